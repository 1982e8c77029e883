# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What the kernels are made of: tiles of tokens, their map, rotation and products."""

import triton
import triton.language as tl

SPLITS_AT_ONCE = tl.constexpr(16)


@triton.jit
def place(heads, splits):
    """Image, head and split of a program, and the place of its results among all of the head's."""
    program = tl.program_id(0)
    head = program % heads
    split = (program // heads) % splits
    image = program // (heads * splits)
    owner = image.to(tl.int64) * heads + head
    return image.to(tl.int64), head.to(tl.int64), split, owner


INTERPRETED = not isinstance(place, triton.JITFunction)  # TRITON_INTERPRET=1
INTERPRETED_HERE = tl.constexpr(INTERPRETED)  # where there is no product of bfloat16


@triton.jit
def product(a, b, like):
    """Matrix product, summed in float32, of operands with the digits of ``like``."""
    if INTERPRETED_HERE:
        if like.dtype == tl.bfloat16:
            a, b = a.to(tl.bfloat16), b.to(tl.bfloat16)
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision='ieee')
    if like.dtype == tl.float32:
        return tl.dot(a, b, input_precision='tf32x3')
    high_a, high_b = a.to(tl.bfloat16), b.to(tl.bfloat16)
    if like.dtype == tl.bfloat16:
        return tl.dot(high_a, high_b)
    low_a = (a.to(tl.float32) - high_a.to(tl.float32)).to(tl.bfloat16)
    low_b = (b.to(tl.float32) - high_b.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(high_a, high_b, tl.dot(high_a, low_b, tl.dot(low_a, high_b)))


@triton.jit
def tile(pointer, stride, rows, columns, real_rows, real_columns):
    """A tile of ``rows`` x ``columns``; zero where they are not real."""
    mask = real_rows[:, None] & real_columns[None, :]
    return tl.load(pointer + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def tile_turned(pointer, stride, rows, columns, real_rows, real_columns):
    """The transpose of :func:`tile`."""
    mask = real_columns[:, None] & real_rows[None, :]
    return tl.load(pointer + columns[:, None] + rows[None, :] * stride, mask=mask, other=0.0)


@triton.jit
def put(pointer, stride, rows, columns, real_rows, real_columns, values):
    mask = real_rows[:, None] & real_columns[None, :]
    tl.store(pointer + rows[:, None] * stride + columns[None, :], values.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def put_turned(pointer, stride, rows, columns, real_rows, real_columns, values):
    """Write the transpose of ``values`` (columns, rows)."""
    mask = real_columns[:, None] & real_rows[None, :]
    tl.store(pointer + columns[:, None] + rows[None, :] * stride, values, mask=mask)


@triton.jit
def mapped(x, columns, KERNEL: tl.constexpr):
    """phi of a tile in float32, zero in columns that are not real."""
    if KERNEL == 'elu':
        y = tl.where(x > 0, x + 1, tl.exp(x))
    else:
        y = tl.where(x < 0, 0.0, x)
    return tl.where(columns[None, :], y, 0.0)


@triton.jit
def mapped_backward(x, y, grad, KERNEL: tl.constexpr):
    """Gradient of ``x`` from that of ``y = phi(x)``."""
    if KERNEL == 'elu':
        return tl.where(x > 0, grad, grad * y)
    else:
        return tl.where(x <= 0, 0.0, grad)


@triton.jit
def turned(x, cos, sin, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Interleaved channel pairs turned by the angles of ``cos`` and ``sin`` (ROWS, WIDTH / 2)."""
    first, second = tl.split(tl.reshape(x, [ROWS, WIDTH // 2, 2]))
    pairs = tl.join(first * cos - second * sin, second * cos + first * sin)
    return tl.reshape(pairs, [ROWS, WIDTH])


@triton.jit
def angles(rotary, start, rows, columns, real, channels, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """cos and sin of a tile, from the table (N, d / 2, 2)."""
    pairs = tile(rotary + tl.cast(start, tl.int64) * D, D, rows, columns, real, channels).to(tl.float32)
    return tl.split(tl.reshape(pairs, [ROWS, WIDTH // 2, 2]))


@triton.jit
def real_tokens(mask, image, start, rows, end, tokens, HAS_MASK: tl.constexpr):
    """Which tokens of a tile there are, and which of those are no padding."""
    inside = start + rows < end
    real = inside
    if HAS_MASK:
        real = inside & (tl.load(mask + image * tokens + start + rows, mask=inside, other=0) != 0)
    return inside, real


@triton.jit
def sum_of_parts(parts, owner, splits, columns, real_columns, WIDTH: tl.constexpr, D: tl.constexpr):
    """Sum over splits of (owners, splits, D)."""
    total = tl.zeros([WIDTH], dtype=tl.float32)
    each = tl.arange(0, SPLITS_AT_ONCE)
    for first in range(0, splits, SPLITS_AT_ONCE):
        start = parts + (owner * splits + first) * D
        total += tl.sum(tile(start, D, each, columns, first + each < splits, real_columns), 0)
    return total
