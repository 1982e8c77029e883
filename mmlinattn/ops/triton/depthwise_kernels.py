# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Depth-wise convolutions of channels-last maps (B, H, W, C).

A program has a tile of places and channels of one image. What lies around the tile is read for each tap; it comes from
the cache. Sums are in float32.
"""

import triton
import triton.language as tl

SIZES = ['height', 'width', 'tiles_x', 'tiles']


ROWS = 4  # of a tile, each a sum of its own


@triton.jit
def tap_of(weight, i: tl.constexpr, j: tl.constexpr, at, real, channels, K: tl.constexpr, FLIP: tl.constexpr):
    """The tap in row ``i`` of the kernel, (COLUMNS, WIDTH); any where the kernel has no such row."""
    tap = K * K - 1 - (min(i, K - 1) * K + j) if FLIP else min(i, K - 1) * K + j
    return tl.load(weight + tap * channels + at, mask=real, other=0.0).to(tl.float32)


@triton.jit
def added(total, value, i: tl.constexpr, middle: tl.constexpr, a, b, c, d, e, K: tl.constexpr, RESIDUAL: tl.constexpr):
    """``total`` and the product of a row of the map with the tap of row ``i``, where the kernel has such a row."""
    if i >= 0 and i < K:
        if i == 0:
            factor = a
        elif i == 1:
            factor = b
        elif i == 2:
            factor = c
        elif i == 3:
            factor = d
        else:
            factor = e
        total += value * factor
        if RESIDUAL and middle and i == K // 2:
            total += value
    return total


@triton.jit
def put_row(out, total, bias, row, height, inside, real, at, out_h, channel, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)[None, :]
    mask = (inside & (row < height))[:, None] & real[None, :]
    tl.store(out + at + row.to(tl.int64) * out_h, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def convolve(
    x, weight, bias, out, x_b, x_h, x_w, out_b, out_h, out_w, weight_b, height, width, channels, tiles_x, tiles,
    K: tl.constexpr, FLIP: tl.constexpr, HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """``DWConv(x) + bias``, and ``+ x`` where ``RESIDUAL``; with the kernel turned by 180 degrees where ``FLIP``, as in
    the gradient of the input. ``weight`` is (B or 1, K K, C), K at most 5.

    A row of the map is read and widened once for all rows of the tile that it belongs to: the kernel is bound by the
    number of its instructions, of which the products are a fifth otherwise.
    """
    tile = tl.program_id(0) % tiles
    image = (tl.program_id(0) // tiles).to(tl.int64)
    top = (tile // tiles_x) * 4
    column = (tile % tiles_x) * COLUMNS + tl.arange(0, COLUMNS)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    real = channel < channels
    x += image * x_b
    weight += image * weight_b
    first = tl.zeros([COLUMNS, WIDTH], dtype=tl.float32)
    second = tl.zeros([COLUMNS, WIDTH], dtype=tl.float32)
    third = tl.zeros([COLUMNS, WIDTH], dtype=tl.float32)
    fourth = tl.zeros([COLUMNS, WIDTH], dtype=tl.float32)
    # each place reads the taps for itself: a broadcast would go through shared memory
    each = tl.zeros([COLUMNS, 1], dtype=tl.int32) + channel[None, :]
    real_each = each < channels
    for j in tl.static_range(K):
        a = tap_of(weight, 0, j, each, real_each, channels, K, FLIP)
        b = tap_of(weight, 1, j, each, real_each, channels, K, FLIP)
        c = tap_of(weight, 2, j, each, real_each, channels, K, FLIP)
        d = tap_of(weight, 3, j, each, real_each, channels, K, FLIP)
        e = tap_of(weight, 4, j, each, real_each, channels, K, FLIP)
        z = column + (j - K // 2)
        mask = ((z >= 0) & (z < width))[:, None] & real[None, :]
        at = z.to(tl.int64)[:, None] * x_w + channel[None, :]
        for r in tl.static_range(K + 3):
            y = top + (r - K // 2)
            value = tl.load(x + y.to(tl.int64) * x_h + at, mask=mask & (y >= 0) & (y < height), other=0.0)
            value = value.to(tl.float32)
            first = added(first, value, r, j == K // 2, a, b, c, d, e, K, RESIDUAL)
            second = added(second, value, r - 1, j == K // 2, a, b, c, d, e, K, RESIDUAL)
            third = added(third, value, r - 2, j == K // 2, a, b, c, d, e, K, RESIDUAL)
            fourth = added(fourth, value, r - 3, j == K // 2, a, b, c, d, e, K, RESIDUAL)
    at = image * out_b + column.to(tl.int64)[:, None] * out_w + channel[None, :]
    inside = column < width
    put_row(out, first, bias, top, height, inside, real, at, out_h, channel, HAS_BIAS)
    put_row(out, second, bias, top + 1, height, inside, real, at, out_h, channel, HAS_BIAS)
    put_row(out, third, bias, top + 2, height, inside, real, at, out_h, channel, HAS_BIAS)
    put_row(out, fourth, bias, top + 3, height, inside, real, at, out_h, channel, HAS_BIAS)


@triton.jit(do_not_specialize=['height', 'width', 'places', 'span', 'splits'])
def correlate(
    x, grad, parts, bias_parts, x_b, x_h, x_w, grad_b, grad_h, grad_w, height, width, places, channels, span, splits,
    K: tl.constexpr, TAPS: tl.constexpr, PLACES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradients of one row of the kernel, and of the bias, over a span of places: ``parts`` (B, splits, K K, C)."""
    split = tl.program_id(0) % splits
    i = (tl.program_id(0) // splits) % K
    image = (tl.program_id(0) // (splits * K)).to(tl.int64)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    real = channel < channels
    tap = tl.arange(0, TAPS)  # of the row; a power of two
    x += image * x_b
    grad += image * grad_b
    total = tl.zeros([TAPS, WIDTH], dtype=tl.float32)
    shift = tl.zeros([WIDTH], dtype=tl.float32)
    end = tl.minimum((split + 1) * span, places)
    for start in range(split * span, end, PLACES):
        place = start + tl.arange(0, PLACES)
        row, column = place // width, place % width
        at = row.to(tl.int64) * grad_h + column.to(tl.int64) * grad_w
        g = tl.load(grad + at[:, None] + channel[None, :], mask=(place < end)[:, None] & real[None, :], other=0.0)
        g = g.to(tl.float32)
        y = row + i - K // 2
        z = column[:, None] + tap[None, :] - K // 2
        inside = (place < end) & (y >= 0) & (y < height)
        inside = inside[:, None] & (z >= 0) & (z < width) & (tap < K)[None, :]
        at = y.to(tl.int64)[:, None] * x_h + z.to(tl.int64) * x_w
        value = tl.load(
            x + at[:, :, None] + channel[None, None, :], mask=inside[:, :, None] & real[None, None, :], other=0.0
        )
        total += tl.sum(value.to(tl.float32) * g[:, None, :], 0)
        shift += tl.sum(g, 0)
    at = ((image * splits + split) * K * K + i * K + tap) * channels
    tl.store(parts + at[:, None] + channel[None, :], total, mask=(tap < K)[:, None] & real[None, :])
    if i == 0:
        tl.store(bias_parts + (image * splits + split) * channels + channel, shift, mask=real)
