# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Depth-wise convolutions of channels-last maps (B, H, W, C).

A program has a tile of places and channels of one image. What lies around the tile is read for each tap; it comes from
the cache. Sums are in float32.
"""

import triton
import triton.language as tl

SIZES = ['height', 'width', 'tiles_x', 'tiles']


@triton.jit(do_not_specialize=SIZES)
def convolve(
    x, weight, bias, out, x_b, x_h, x_w, out_b, out_h, out_w, weight_b, height, width, channels, tiles_x, tiles,
    K: tl.constexpr, FLIP: tl.constexpr, HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """``DWConv(x) + bias``, and ``+ x`` where ``RESIDUAL``; with the kernel turned by 180 degrees where ``FLIP``, as in
    the gradient of the input. ``weight`` is (B or 1, K K, C)."""
    tile = tl.program_id(0) % tiles
    image = (tl.program_id(0) // tiles).to(tl.int64)
    place = tl.arange(0, ROWS * COLUMNS)
    row = (tile // tiles_x) * ROWS + place // COLUMNS
    column = (tile % tiles_x) * COLUMNS + place % COLUMNS
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    real = channel < channels
    x += image * x_b
    weight += image * weight_b
    total = tl.zeros([ROWS * COLUMNS, WIDTH], dtype=tl.float32)
    for i in tl.static_range(K):
        for j in tl.static_range(K):
            y, z = row + (i - K // 2), column + (j - K // 2)
            inside = (y >= 0) & (y < height) & (z >= 0) & (z < width)
            at = y.to(tl.int64) * x_h + z.to(tl.int64) * x_w
            value = tl.load(x + at[:, None] + channel[None, :], mask=inside[:, None] & real[None, :], other=0.0)
            tap = K * K - 1 - (i * K + j) if FLIP else i * K + j
            factor = tl.load(weight + tap * channels + channel, mask=real, other=0.0).to(tl.float32)
            total += value.to(tl.float32) * factor[None, :]
            if RESIDUAL:
                if i * K + j == K * K // 2:
                    total += value.to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)[None, :]
    inside = (row < height) & (column < width)
    at = image * out_b + row.to(tl.int64) * out_h + column.to(tl.int64) * out_w
    tl.store(out + at[:, None] + channel[None, :], total.to(out.dtype.element_ty), mask=inside[:, None] & real[None, :])


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
