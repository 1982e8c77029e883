# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Kernels of the linear attentions for GPUs: what one program does. :mod:`.attention_launch` says how many there are.

All of them are ``out_i = phi(q_i) S / n_i`` with a small state ``S = sum_j w_j phi(k_j) v_j^T`` of a head, or
``out_i = phi(q_i) S + mean(v)`` where ``CENTRED`` (InLine). Tokens are read where they lie, in slices of a projection;
what is between a projected token and its product with the state (map, weight, rotation) never leaves the registers.

- A program has one head of one image, and a span of its tokens. What it sums over them it writes to a buffer of its
  own, and :func:`combine` adds those up in a fixed order: results are the same in every run.
- Products are of the type of the inputs (float32: three TF32 products, with the error of float32); sums, maps, weights
  and normalisers are in float32.
- What a product transposes is a tile as it was read, never one that was computed: on compute capability 9.0, Triton 3.4
  and later made wrong products of transposed results (flash-linear-attention, pull request 826; triton issue 6124).
- Heads may have any width: tiles are padded to powers of two, and what is padded is masked.
- Programs are numbered with the head as the fastest: those that run together read whole rows of memory.
- The first token of a tile is addressed in 64 bits.

Where phi is a product of a factor of the token and a map ``z`` of each channel (``FOCUSED``), ``z`` takes the place of
phi, the factor is a weight of the key and cancels in the query but for the ``eps`` of the normaliser.
"""

import triton
import triton.language as tl

from . import compat

# the interpreter has no product of bfloat16
INTERPRETED = tl.constexpr(compat.INTERPRETED)
# sizes of images and batches; a kernel is not to be compiled again for another one
SIZES = ['tokens', 'heads', 'splits', 'span']
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


@triton.jit
def product(a, b, like):
    """Matrix product with float32 sums of operands rounded to the type of ``like``."""
    a, b = a.to(like.dtype), b.to(like.dtype)
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision='tf32x3')


@triton.jit
def tile(pointer, stride, rows, columns, real_rows, real_columns):
    """A tile of ``rows`` x ``columns``; zero where they are not real."""
    mask = real_rows[:, None] & real_columns[None, :]
    return tl.load(pointer + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0)


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
        y = tl.where(x > 0, x + 1, tl.exp(tl.minimum(x, 0.0)))
    elif KERNEL == 'relu':
        y = tl.maximum(x, 0.0)
    elif KERNEL == 'leakyrelu':
        y = tl.where(x > 0, x, 0.01 * x)
    elif KERNEL == 'exp':
        y = tl.exp(0.2 * x)
    elif KERNEL == 'softmax':
        x = tl.where(columns[None, :], x, -float('inf'))
        y = tl.exp(x - tl.max(x, 1)[:, None])
        y = y / tl.sum(y, 1)[:, None]
    else:
        y = x
    return tl.where(columns[None, :], y, 0.0)


@triton.jit
def mapped_backward(x, y, grad, KERNEL: tl.constexpr):
    """Gradient of ``x`` from that of ``y = phi(x)``."""
    if KERNEL == 'elu':
        grad = grad * tl.minimum(y, 1.0)
    elif KERNEL == 'relu':
        grad = tl.where(x > 0, grad, 0.0)
    elif KERNEL == 'leakyrelu':
        grad = tl.where(x > 0, grad, 0.01 * grad)
    elif KERNEL == 'exp':
        grad = grad * y * 0.2
    elif KERNEL == 'softmax':
        grad = y * (grad - tl.sum(y * grad, 1)[:, None])
    return grad


@triton.jit
def power_of(x, POWER: tl.constexpr):
    """``x ** POWER`` of numbers in [0, 1]."""
    if POWER == 0:
        y = x * 0 + 1
    elif POWER == 1:
        y = x
    elif POWER == 2:
        y = x * x
    elif POWER == 3:
        y = x * x * x
    elif POWER == 4:
        y = (x * x) * (x * x)
    else:
        y = tl.exp2(tl.log2(tl.maximum(x, 1e-37)) * POWER)
    return y


@triton.jit
def turned(x, cos, sin, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Interleaved channel pairs turned by the angles of ``cos`` and ``sin`` (ROWS, WIDTH / 2)."""
    first, second = tl.split(tl.reshape(x, [ROWS, WIDTH // 2, 2]))
    pairs = tl.join(first * cos - second * sin, second * cos + first * sin)
    return tl.reshape(pairs, [ROWS, WIDTH])


@triton.jit
def angles(
    rotary, start, rows, columns, real_rows, real_columns, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """cos and sin of a tile, from the table (N, d / 2, 2)."""
    pairs = tile(rotary + tl.cast(start, tl.int64) * D, D, rows, columns, real_rows, real_columns).to(tl.float32)
    return tl.split(tl.reshape(pairs, [ROWS, WIDTH // 2, 2]))


@triton.jit
def real_tokens(mask, image, start, rows, end, tokens, HAS_MASK: tl.constexpr):
    """Which tokens of a tile there are, and which of those are no padding."""
    inside = start + rows < end
    if HAS_MASK:
        real = inside & (tl.load(mask + image * tokens + start + rows, mask=inside, other=0) != 0)
    else:
        real = inside
    return inside, real


@triton.jit
def sum_of_parts(parts, owner, splits, columns, real_columns, WIDTH: tl.constexpr, D: tl.constexpr):
    """Sum over splits of (owners, splits, D)."""
    total = tl.zeros([WIDTH], dtype=tl.float32)
    each = tl.arange(0, SPLITS_AT_ONCE)
    for first in range(0, splits, SPLITS_AT_ONCE):
        total += tl.sum(
            tile(parts + (owner * splits + first) * D, D, each, columns, first + each < splits, real_columns), 0
        )
    return total


@triton.jit(do_not_specialize=[*SIZES, 'rows_in_all'])
def focus_rows(
    x, offset, scale, rows_out, stride_b, stride_n, offset_b, offset_n, tokens, rows_in_all, eps,
    POWER: tl.constexpr, HAS_OFFSET: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """What the focused map of a token needs to know of all its channels, ``r = (ReLU(x) + eps) * scale``:
    1 / max(r), the factor ``|r| / |(r / max(r))^p|`` and ``1 / |r|^2``; (3, B N)."""
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = at < rows_in_all
    image, token = at // tokens, at % tokens
    columns = tl.arange(0, WIDTH)
    real = columns < C
    mask = inside[:, None] & real[None, :]
    values = tl.load(x + (image * stride_b + token * stride_n)[:, None] + columns[None, :], mask=mask, other=0.0).to(
        tl.float32
    )
    if HAS_OFFSET:
        place_of = (image * offset_b + token * offset_n)[:, None] + columns[None, :]
        values += tl.load(offset + place_of, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(scale + columns, mask=real, other=0.0).to(tl.float32)
    r = (tl.maximum(values, 0.0) + eps) * weight[None, :]
    largest = tl.max(r, 1)
    largest = tl.where(inside, largest, 1.0)
    unit = r / largest[:, None]
    square = tl.sum(unit * unit, 1)
    z = tl.where(real[None, :], power_of(unit, POWER), 0.0)
    powered = tl.where(inside, tl.sum(z * z, 1), 1.0)
    tl.store(rows_out + at, 1 / largest, mask=inside)
    tl.store(rows_out + rows_in_all + at, largest * tl.sqrt(square / powered), mask=inside)
    tl.store(rows_out + 2 * rows_in_all + at, 1 / (square * largest * largest), mask=inside)


@triton.jit
def focused(x, weight, inverse, columns, eps, POWER: tl.constexpr):
    """``z = (r / max(r)) ** p`` of a tile."""
    z = power_of((tl.maximum(x, 0.0) + eps) * weight[None, :] * inverse[:, None], POWER)
    return tl.where(columns[None, :], z, 0.0)


@triton.jit
def focused_backward(x, z, grad, along, weight, inverse, factor, eps, POWER: tl.constexpr):
    """Gradients of ``x`` and, in each token, of ``weight``. ``grad`` is that of ``y = factor z`` times ``factor``,
    ``along`` its product with ``z`` over all channels, divided by ``|r|^2``."""
    # dL/dr = (g.y) r / |r|^2 + p y / r (g - (g.y) y / |r|^2) of y = |r| / |r^p| r^p
    root = tl.maximum(x, 0.0) + eps
    r = root * weight[None, :]
    slope = POWER * inverse[:, None] * power_of(r * inverse[:, None], POWER - 1)
    grad_r = along[:, None] * r + slope * (grad - (along * factor * factor)[:, None] * z)
    return tl.where(x > 0, grad_r * weight[None, :], 0.0), grad_r * root


@triton.jit(do_not_specialize=SIZES)
def sum_queries(
    q, mask, parts, stride_b, stride_n, tokens, heads, splits, span,
    KERNEL: tl.constexpr, HAS_MASK: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sums of mapped queries over each span."""
    image, head, split, owner = place(heads, splits)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    channels = columns < D
    q += image * stride_b + head * D
    end = tl.minimum((split + 1) * span, tokens)
    total = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    for start in range(split * span, end, ROWS):
        inside, real = real_tokens(mask, image, start, rows, end, tokens, HAS_MASK)
        x = tile(q + tl.cast(start, tl.int64) * stride_n, stride_n, rows, columns, inside, channels).to(tl.float32)
        total += tl.where(real[:, None], mapped(x, channels, KERNEL), 0.0)
    tl.store(parts + (owner * splits + split) * D + columns, tl.sum(total, 0), mask=channels)


@triton.jit(do_not_specialize=SIZES)
def sum_keys(
    k, v, mask, rotary, count, query_parts, query_mean, offset, scale, rows_in, parts, key_parts, more_parts, stats,
    k_b, k_n, v_b, v_n, offset_b, offset_n, tokens, heads, splits, span, weight_scale, eps,
    KERNEL: tl.constexpr, POWER: tl.constexpr, HAS_MASK: tl.constexpr, HAS_ROTARY: tl.constexpr,
    HAS_OFFSET: tl.constexpr, WEIGHTED: tl.constexpr, CENTRED: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The state, the sum of keys and the sum of values (where ``CENTRED``) of each span. Where ``WEIGHTED``, tokens
    weigh ``exp(logit - m)``, ``m`` the largest logit of the span, and ``stats`` gets ``m`` and the sum of weights."""
    image, head, split, owner = place(heads, splits)
    rows, columns, columns_v = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
    channels, channels_v = columns < D, columns_v < E
    k += image * k_b + head * D
    v += image * v_b + head * E
    end = tl.minimum((split + 1) * span, tokens)
    if WEIGHTED:
        query = sum_of_parts(query_parts, owner, splits, columns, channels, WIDTH, D) / tl.load(count + image)
        if split == 0:
            tl.store(query_mean + owner * D + columns, query, mask=channels)
    if KERNEL == 'focused':
        weight = tl.load(scale + head * D + columns, mask=channels, other=0.0).to(tl.float32)
        rows_in_all = tl.num_programs(0).to(tl.int64) // (heads * splits) * tokens
        rows_in += image * tokens
    state = tl.zeros([WIDTH_V, WIDTH], dtype=tl.float32)  # S^T
    keys = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    values = tl.zeros([ROWS, WIDTH_V], dtype=tl.float32)
    largest = -float('inf')
    total = 0.0
    for start in range(split * span, end, ROWS):
        inside, real = real_tokens(mask, image, start, rows, end, tokens, HAS_MASK)
        x = tile(k + tl.cast(start, tl.int64) * k_n, k_n, rows, columns, inside, channels)
        value = tile(v + tl.cast(start, tl.int64) * v_n, v_n, rows, columns_v, real, channels_v)
        if KERNEL == 'focused':
            wide = x.to(tl.float32)
            if HAS_OFFSET:
                shift = offset + image * offset_b + head * D + tl.cast(start, tl.int64) * offset_n
                wide += tile(shift, offset_n, rows, columns, inside, channels).to(tl.float32)
            inverse = tl.load(rows_in + start + rows, mask=inside, other=0.0)
            factor = tl.load(rows_in + rows_in_all + start + rows, mask=real, other=0.0)
            y = focused(wide, weight, inverse, channels, eps, POWER) * factor[:, None]
            total += tl.sum(real.to(tl.float32), 0)
        else:
            y = mapped(x.to(tl.float32), channels, KERNEL)
            if WEIGHTED:
                logits = tl.where(real, tl.sum(y * query[None, :], 1) * weight_scale, -float('inf'))
                new = tl.maximum(largest, tl.max(logits, 0))
                # where all so far are padding, the difference of two infinities would be NaN
                base = tl.where(new == -float('inf'), 0.0, new)
                shrink = tl.exp(largest - base)
                p = tl.exp(logits - base)
                state *= shrink
                keys *= shrink
                total *= shrink
                largest = new
            else:
                p = real.to(tl.float32)
            total += tl.sum(p, 0)
            y *= p[:, None]
        if CENTRED:
            # the covariance is a difference of two sums: both are of the same rounded keys
            y = y.to(x.dtype).to(tl.float32)
            values += value.to(tl.float32)
        keys += y
        if HAS_ROTARY:
            cos, sin = angles(rotary, start, rows, columns, inside, channels, D, ROWS, WIDTH)
            y = turned(y, cos, sin, ROWS, WIDTH)
        state += product(tl.trans(value), y, x)
    at = owner * splits + split
    put_turned(parts + at * D * E, E, columns, columns_v, channels, channels_v, state)
    tl.store(key_parts + at * D + columns, tl.sum(keys, 0), mask=channels)
    if CENTRED:
        tl.store(more_parts + at * E + columns_v, tl.sum(values, 0), mask=channels_v)
    tl.store(stats + at * 2, largest if WEIGHTED else 0.0)
    tl.store(stats + at * 2 + 1, total)


@triton.jit(do_not_specialize=SIZES)
def combine(
    parts, key_parts, more_parts, part_stats, state, key_mean, more, stats, splits, scale,
    CENTRED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, WIDTH_V: tl.constexpr,
    ROWS: tl.constexpr, MOST_SPLITS: tl.constexpr,
):  # fmt: skip
    """State, mean key and mean value from the sums of all spans, some rows of the state a program. ``stats`` gets the
    largest logit and the sum of weights of all, where ``CENTRED`` the state is the covariance times ``scale``."""
    owner = tl.program_id(0).to(tl.int64)
    rows, columns = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH_V)
    real_rows, channels = rows < D, columns < E
    each = tl.arange(0, MOST_SPLITS)
    logits = tl.load(part_stats + (owner * splits + each) * 2, mask=each < splits, other=-float('inf'))
    totals = tl.load(part_stats + (owner * splits + each) * 2 + 1, mask=each < splits, other=0.0)
    largest = tl.max(logits, 0)
    base = tl.where(largest == -float('inf'), 0.0, largest)
    total = tl.sum(totals * tl.exp(logits - base), 0)
    over = 1 / tl.where(total == 0, 1.0, total)  # no token but padding: sums are zero, and so are the means
    matrix = tl.zeros([ROWS, WIDTH_V], dtype=tl.float32)
    keys = tl.zeros([ROWS], dtype=tl.float32)
    values = tl.zeros([WIDTH_V], dtype=tl.float32)
    for split in range(splits):
        at = owner * splits + split
        share = tl.exp(tl.load(part_stats + at * 2) - base) * over
        matrix += tile(parts + at * D * E, E, rows, columns, real_rows, channels) * share
        keys += tl.load(key_parts + at * D + rows, mask=real_rows, other=0.0) * share
        if CENTRED:
            values += tl.load(more_parts + at * E + columns, mask=channels, other=0.0) * share
    if CENTRED:
        matrix = (matrix - keys[:, None] * values[None, :]) * scale
        tl.store(more + owner * E + columns, values, mask=channels & (tl.program_id(1) == 0))
    put(state + owner * D * E, E, rows, columns, real_rows, channels, matrix)
    tl.store(key_mean + owner * D + rows, keys, mask=real_rows)
    if tl.program_id(1) == 0:
        tl.store(stats + owner * 2, base)
        tl.store(stats + owner * 2 + 1, total)


@triton.jit(do_not_specialize=SIZES)
def mix_values(
    q, rotary, scale, rows_in, state, key_mean, value_mean, stats, out,
    q_b, q_n, out_b, out_n, tokens, heads, splits, span, eps, map_eps,
    KERNEL: tl.constexpr, POWER: tl.constexpr, HAS_ROTARY: tl.constexpr, CENTRED: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The output from queries and state."""
    image, head, split, owner = place(heads, splits)
    rows, columns, columns_v = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
    channels, channels_v = columns < D, columns_v < E
    q += image * q_b + head * D
    out += image * out_b + head * E
    end = tl.minimum((split + 1) * span, tokens)
    matrix = tile(state + owner * D * E, E, columns, columns_v, channels, channels_v).to(q.dtype.element_ty)
    mean = tl.load(key_mean + owner * D + columns, mask=channels, other=0.0)
    if CENTRED:
        shift = tl.load(value_mean + owner * E + columns_v, mask=channels_v, other=0.0)
    else:
        # where all keys are padding, anything does that keeps the numbers in range: the values are zero
        floor = eps + tl.where(tl.load(stats + owner * 2 + 1) == 0, 1.0, 0.0)
    if KERNEL == 'focused':
        weight = tl.load(scale + head * D + columns, mask=channels, other=0.0).to(tl.float32)
        rows_in_all = tl.num_programs(0).to(tl.int64) // (heads * splits) * tokens
        rows_in += image * tokens
    for start in range(split * span, end, ROWS):
        inside = start + rows < end
        x = tile(q + tl.cast(start, tl.int64) * q_n, q_n, rows, columns, inside, channels)
        if KERNEL == 'focused':
            inverse = tl.load(rows_in + start + rows, mask=inside, other=1.0)
            factor = tl.load(rows_in + rows_in_all + start + rows, mask=inside, other=1.0)
            y = focused(x.to(tl.float32), weight, inverse, channels, map_eps, POWER)
            normaliser = tl.sum(y * mean[None, :], 1) + floor / factor
        else:
            y = mapped(x.to(tl.float32), channels, KERNEL)
            if not CENTRED:
                normaliser = tl.sum(y * mean[None, :], 1) + floor
        if HAS_ROTARY:
            cos, sin = angles(rotary, start, rows, columns, inside, channels, D, ROWS, WIDTH)
            y = turned(y, cos, sin, ROWS, WIDTH)
        mixed = product(y, matrix, x)
        if CENTRED:
            mixed += shift[None, :]
        else:
            mixed = mixed / normaliser[:, None]
        put(out + tl.cast(start, tl.int64) * out_n, out_n, rows, columns_v, inside, channels_v, mixed)


@triton.jit(do_not_specialize=SIZES)
def queries_backward(
    q, grad, mask, rotary, count, scale, rows_in, state, key_mean, stats, query_grad_parts,
    parts, key_parts, more_parts, dots, grad_q, scale_parts,
    q_b, q_n, grad_b, grad_n, grad_q_b, grad_q_n, tokens, heads, splits, span, eps, map_eps,
    KERNEL: tl.constexpr, POWER: tl.constexpr, HAS_MASK: tl.constexpr, HAS_ROTARY: tl.constexpr,
    WEIGHTED: tl.constexpr, CENTRED: tl.constexpr, SUM: tl.constexpr, WRITE: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Where ``SUM``, the gradients of state, mean key and mean value (``CENTRED``), and ``dots``, the products of
    mapped queries with their gradients (``focused``). Where ``WRITE``, the gradients of the queries: they need sums
    over tokens themselves where the queries' mean weighs the keys, over heads where the map is focused."""
    image, head, split, owner = place(heads, splits)
    rows, columns, columns_v = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
    channels, channels_v = columns < D, columns_v < E
    q += image * q_b + head * D
    grad += image * grad_b + head * E
    end = tl.minimum((split + 1) * span, tokens)
    matrix = tile(state + owner * D * E, E, columns, columns_v, channels, channels_v).to(q.dtype.element_ty)
    mean = tl.load(key_mean + owner * D + columns, mask=channels, other=0.0)
    if not CENTRED:
        floor = eps + tl.where(tl.load(stats + owner * 2 + 1) == 0, 1.0, 0.0)
    if WRITE and WEIGHTED:
        grad_query = sum_of_parts(query_grad_parts, owner, splits, columns, channels, WIDTH, D) / tl.load(count + image)
    if KERNEL == 'focused':
        weight = tl.load(scale + head * D + columns, mask=channels, other=0.0).to(tl.float32)
        rows_in_all = tl.num_programs(0).to(tl.int64) // (heads * splits) * tokens
        rows_in += image * tokens
        grad_scale = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    grad_state = tl.zeros([WIDTH_V, WIDTH], dtype=tl.float32)  # of S^T
    grad_mean = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    grads = tl.zeros([ROWS, WIDTH_V], dtype=tl.float32)
    for start in range(split * span, end, ROWS):
        inside, real = real_tokens(mask, image, start, rows, end, tokens, HAS_MASK)
        x = tile(q + tl.cast(start, tl.int64) * q_n, q_n, rows, columns, inside, channels)
        g = tile(grad + tl.cast(start, tl.int64) * grad_n, grad_n, rows, columns_v, inside, channels_v)
        wide = x.to(tl.float32)
        if KERNEL == 'focused':
            inverse = tl.load(rows_in + start + rows, mask=inside, other=1.0)
            factor = tl.load(rows_in + rows_in_all + start + rows, mask=inside, other=1.0)
            y = focused(wide, weight, inverse, channels, map_eps, POWER)
            normaliser = tl.sum(y * mean[None, :], 1) + floor / factor
        else:
            y = mapped(wide, channels, KERNEL)
            if not CENTRED:
                normaliser = tl.sum(y * mean[None, :], 1) + floor
        inner = product(g, tl.trans(matrix), x)  # of the turned query
        if CENTRED:
            if SUM:
                grad_state += product(tl.trans(g), y, x)
                grads += g.to(tl.float32)
        else:
            # not the gradient is divided: where a query is dead, that would leave the range of float16
            inner = inner / normaliser[:, None]
            if HAS_ROTARY:
                cos, sin = angles(rotary, start, rows, columns, inside, channels, D, ROWS, WIDTH)
                inner = turned(inner, cos, -sin, ROWS, WIDTH)
            grad_normaliser = -tl.sum(y * inner, 1) / normaliser
            if SUM:
                grad_mean += tl.where(inside[:, None], y * grad_normaliser[:, None], 0.0)
                divided = y / normaliser[:, None]
                if KERNEL == 'relu' and not HAS_ROTARY:
                    # channels that all keys are dead in: their quotient by eps leaves the range of float16, for
                    # gradients of keys that are none
                    divided = tl.where(mean[None, :] > 0, divided, 0.0)
                if HAS_ROTARY:
                    divided = turned(divided, cos, sin, ROWS, WIDTH)
                divided = tl.where(inside[:, None], divided, 0.0)
                grad_state += product(tl.trans(g), divided, x)
            inner += grad_normaliser[:, None] * mean[None, :]
        if KERNEL == 'focused':
            at = (image * tokens + start + rows) * heads
            if SUM:
                tl.store(dots + at + head, tl.sum(y * inner, 1), mask=inside)
            if WRITE:
                along = tl.zeros([ROWS], dtype=tl.float32)
                for other in range(heads):
                    along += tl.load(dots + at + other, mask=inside, other=0.0)
                along *= tl.load(rows_in + 2 * rows_in_all + start + rows, mask=inside, other=0.0)
                inner, share = focused_backward(wide, y, inner, along, weight, inverse, factor, map_eps, POWER)
                grad_scale += tl.where(inside[:, None], share, 0.0)
        elif WRITE:
            if WEIGHTED:
                inner += tl.where(real[:, None], grad_query[None, :], 0.0)
            inner = mapped_backward(wide, y, inner, KERNEL)
        if WRITE:
            target = grad_q + image * grad_q_b + tl.cast(start, tl.int64) * grad_q_n + head * D
            put(target, grad_q_n, rows, columns, inside, channels, inner)
    at = owner * splits + split
    if SUM:
        put_turned(parts + at * D * E, E, columns, columns_v, channels, channels_v, grad_state)
        if CENTRED:
            tl.store(more_parts + at * E + columns_v, tl.sum(grads, 0), mask=channels_v)
        else:
            tl.store(key_parts + at * D + columns, tl.sum(grad_mean, 0), mask=channels)
    if WRITE and KERNEL == 'focused':
        tl.store(scale_parts + at * D + columns, tl.sum(grad_scale, 0), mask=channels)


@triton.jit(do_not_specialize=SIZES)
def combine_backward(
    parts, key_parts, more_parts, stats, state, key_mean, grad_state, grad_mean, grad_more, inner_parts, splits, scale,
    CENTRED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of state, mean key and mean value over the sum of the weights, and their inner products with what they
    are the gradients of (``inner_parts``, one a program): the sum over tokens in the derivative of a softmax."""
    owner = tl.program_id(0).to(tl.int64)
    rows, columns = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH_V)
    real_rows, channels = rows < D, columns < E
    matrix = tl.zeros([ROWS, WIDTH_V], dtype=tl.float32)
    keys = tl.zeros([ROWS], dtype=tl.float32)
    values = tl.zeros([WIDTH_V], dtype=tl.float32)
    for split in range(splits):
        at = owner * splits + split
        matrix += tile(parts + at * D * E, E, rows, columns, real_rows, channels)
        if CENTRED:
            values += tl.load(more_parts + at * E + columns, mask=channels, other=0.0)
        else:
            keys += tl.load(key_parts + at * D + rows, mask=real_rows, other=0.0)
    total = tl.load(stats + owner * 2 + 1)
    over = 1 / tl.where(total == 0, 1.0, total)
    matrix *= over * scale
    put(grad_state + owner * D * E, E, rows, columns, real_rows, channels, matrix)
    if CENTRED:
        tl.store(grad_more + owner * E + columns, values * over, mask=channels & (tl.program_id(1) == 0))
    else:
        keys *= over
        tl.store(grad_mean + owner * D + rows, keys, mask=real_rows)
        forward = tile(state + owner * D * E, E, rows, columns, real_rows, channels)
        means = tl.load(key_mean + owner * D + rows, mask=real_rows, other=0.0)
        inner = tl.sum(tl.sum(matrix * forward, 1) + keys * means, 0)
        tl.store(inner_parts + owner * tl.num_programs(1) + tl.program_id(1), inner)


@triton.jit(do_not_specialize=SIZES)
def keys_backward(
    k, v, mask, rotary, query_mean, offset, scale, rows_in, grad_state, grad_mean, grad_more, key_mean, value_mean,
    stats, inner_parts, dots, query_grad_parts, scale_parts, grad_k, grad_v,
    k_b, k_n, v_b, v_n, offset_b, offset_n, grad_k_b, grad_k_n, grad_v_b, grad_v_n,
    tokens, heads, splits, span, weight_scale, eps,
    KERNEL: tl.constexpr, POWER: tl.constexpr, HAS_MASK: tl.constexpr, HAS_ROTARY: tl.constexpr,
    HAS_OFFSET: tl.constexpr, WEIGHTED: tl.constexpr, CENTRED: tl.constexpr,
    VALUES: tl.constexpr, KEYS: tl.constexpr, INNER_PARTS: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of the values where ``VALUES``, of the keys where ``KEYS``, and of the mean query where ``WEIGHTED``.
    Those of a focused map need ``dots``, the products of mapped keys with their gradients, summed over heads: they are
    written with the values."""
    image, head, split, owner = place(heads, splits)
    rows, columns, columns_v = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
    channels, channels_v = columns < D, columns_v < E
    k += image * k_b + head * D
    v += image * v_b + head * E
    end = tl.minimum((split + 1) * span, tokens)
    matrix = tile(grad_state + owner * D * E, E, columns, columns_v, channels, channels_v).to(k.dtype.element_ty)
    if CENTRED:
        mean_k = tl.load(key_mean + owner * D + columns, mask=channels, other=0.0)
        mean_v = tl.load(value_mean + owner * E + columns_v, mask=channels_v, other=0.0)
        each = tl.load(grad_more + owner * E + columns_v, mask=channels_v, other=0.0)
    else:
        mean = tl.load(grad_mean + owner * D + columns, mask=channels, other=0.0)
    if WEIGHTED:
        query = tl.load(query_mean + owner * D + columns, mask=channels, other=0.0)
        largest = tl.load(stats + owner * 2)
        shift = 0.0
        for part in range(INNER_PARTS):
            shift += tl.load(inner_parts + owner * INNER_PARTS + part)
        grad_query = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    if KERNEL == 'focused':
        weight = tl.load(scale + head * D + columns, mask=channels, other=0.0).to(tl.float32)
        rows_in_all = tl.num_programs(0).to(tl.int64) // (heads * splits) * tokens
        rows_in += image * tokens
        grad_scale = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    for start in range(split * span, end, ROWS):
        inside, real = real_tokens(mask, image, start, rows, end, tokens, HAS_MASK)
        x = tile(k + tl.cast(start, tl.int64) * k_n, k_n, rows, columns, inside, channels)
        value = tile(v + tl.cast(start, tl.int64) * v_n, v_n, rows, columns_v, real, channels_v)
        wide = x.to(tl.float32)
        if KERNEL == 'focused':
            if HAS_OFFSET:
                moved = offset + image * offset_b + head * D + tl.cast(start, tl.int64) * offset_n
                wide += tile(moved, offset_n, rows, columns, inside, channels).to(tl.float32)
            inverse = tl.load(rows_in + start + rows, mask=inside, other=1.0)
            p = tl.load(rows_in + rows_in_all + start + rows, mask=real, other=0.0)
            y = focused(wide, weight, inverse, channels, eps, POWER)
        else:
            y = mapped(wide, channels, KERNEL)
            if WEIGHTED:
                logits = tl.sum(y * query[None, :], 1) * weight_scale
                p = tl.exp(tl.where(real, logits - largest, -float('inf')))
            else:
                p = real.to(tl.float32)
        if CENTRED:
            y_centred = tl.where(real[:, None], y.to(x.dtype).to(tl.float32) - mean_k[None, :], 0.0)
            value_centred = tl.where(real[:, None], value.to(tl.float32) - mean_v[None, :], 0.0)
            inner = product(value_centred, tl.trans(matrix), x)
            grad_value = product(y_centred, matrix, x) + tl.where(real[:, None], each[None, :], 0.0)
        else:
            inner = product(value, tl.trans(matrix), x)
            turned_y = y
            if HAS_ROTARY:
                cos, sin = angles(rotary, start, rows, columns, inside, channels, D, ROWS, WIDTH)
                turned_y = turned(y, cos, sin, ROWS, WIDTH)
                inner = turned(inner, cos, -sin, ROWS, WIDTH)
            inner += mean[None, :]
            if VALUES:
                grad_value = product(turned_y, matrix, x) * p[:, None]
            if WEIGHTED:
                grad_logit = p * (tl.sum(y * inner, 1) - shift) * weight_scale
                inner = inner * p[:, None] + grad_logit[:, None] * query[None, :]
                grad_query += grad_logit[:, None] * y
            else:
                inner *= p[:, None]
        if VALUES:
            target = grad_v + image * grad_v_b + tl.cast(start, tl.int64) * grad_v_n + head * E
            put(target, grad_v_n, rows, columns_v, inside, channels_v, grad_value)
        if KERNEL == 'focused':
            at = (image * tokens + start + rows) * heads
            if VALUES:
                tl.store(dots + at + head, tl.sum(y * inner, 1), mask=inside)
            if KEYS:
                along = tl.zeros([ROWS], dtype=tl.float32)
                for other in range(heads):
                    along += tl.load(dots + at + other, mask=inside, other=0.0)
                along *= tl.load(rows_in + 2 * rows_in_all + start + rows, mask=inside, other=0.0)
                inner, share = focused_backward(wide, y, inner, along, weight, inverse, p, eps, POWER)
                grad_scale += tl.where(real[:, None], share, 0.0)
        else:
            inner = mapped_backward(wide, y, inner, KERNEL)
        if KEYS:
            target = grad_k + image * grad_k_b + tl.cast(start, tl.int64) * grad_k_n + head * D
            put(target, grad_k_n, rows, columns, inside, channels, inner)
    at = owner * splits + split
    if WEIGHTED:
        tl.store(query_grad_parts + at * D + columns, tl.sum(grad_query, 0), mask=channels)
    if KEYS and KERNEL == 'focused':
        tl.store(scale_parts + at * D + columns, tl.sum(grad_scale, 0), mask=channels)
