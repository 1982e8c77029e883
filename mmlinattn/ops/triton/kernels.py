# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The kernels, as one program of each; :mod:`.attention` launches them.

``out_i = R phi(q_i) S / (phi(q_i) . z + eps)`` with a small state ``S = sum_j w_j R phi(k_j) v_j^T`` and the mean key
``z = sum_j w_j phi(k_j)`` of a head. Tokens are read where they lie, in slices of a projection; their map, weight and
rotation never leave the registers, and the backward pass computes them again.

- A program has one head of one image and a span of its tokens. It writes its partial sums to memory of its own,
  and PyTorch adds them in a fixed order: the same bits in every run.
- Sums, maps, weights and normalisers are float32. Products are of the inputs' type, but float16: quotients by ``eps``
  leave its range, and two bfloat16 numbers have its digits with the range of float32. float32 takes three products of
  TF32.
- No ``min`` or ``max`` of tokens: on GPUs they hide NaN.
- Tiles are read transposed where a product needs them so: on compute capability 9.0, Triton 3.4 and later made wrong
  products of transposed results (flash-linear-attention, pull request 826; triton issue 6124).
- Heads may have any width: tiles are padded to powers of two. The first token of a tile is addressed in 64 bits.
"""

import triton
import triton.language as tl

# sizes of images and batches; another one must not recompile a kernel
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
def tile_transposed(pointer, stride, rows, columns, real_rows, real_columns):
    """The transpose of :func:`tile`."""
    mask = real_columns[:, None] & real_rows[None, :]
    return tl.load(pointer + columns[:, None] + rows[None, :] * stride, mask=mask, other=0.0)


@triton.jit
def put(pointer, stride, rows, columns, real_rows, real_columns, values):
    mask = real_rows[:, None] & real_columns[None, :]
    tl.store(pointer + rows[:, None] * stride + columns[None, :], values.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def put_transposed(pointer, stride, rows, columns, real_rows, real_columns, values):
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
def rotated(x, cos, sin, ROWS: tl.constexpr, WIDTH: tl.constexpr):
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
    k, v, mask, rotary, count, query_parts, query_mean, parts, key_parts, stats,
    k_b, k_n, v_b, v_n, tokens, heads, splits, span, weight_scale,
    KERNEL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_ROTARY: tl.constexpr, WEIGHTED: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The state and the sum of keys of each span. Where ``WEIGHTED``, tokens weigh ``exp(logit - m)``, ``m`` the
    largest logit of the span, and ``stats`` gets ``m`` and the sum of weights."""
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
    state = tl.zeros([WIDTH_V, WIDTH], dtype=tl.float32)  # S^T
    keys = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    largest = -float('inf')
    total = 0.0
    for start in range(split * span, end, ROWS):
        inside, real = real_tokens(mask, image, start, rows, end, tokens, HAS_MASK)
        x = tile(k + tl.cast(start, tl.int64) * k_n, k_n, rows, columns, inside, channels)
        value = tile_transposed(v + tl.cast(start, tl.int64) * v_n, v_n, rows, columns_v, real, channels_v)
        y = mapped(x.to(tl.float32), channels, KERNEL)
        if WEIGHTED:
            logits = tl.where(real, tl.sum(y * query[None, :], 1) * weight_scale, -float('inf'))
            new = tl.maximum(largest, tl.max(logits, 0))  # a logit that is NaN is so in p, too
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
        y = tl.where(real[:, None], y * p[:, None], 0.0)
        keys += y
        if HAS_ROTARY:
            cos, sin = angles(rotary, start, rows, columns, inside, channels, D, ROWS, WIDTH)
            y = rotated(y, cos, sin, ROWS, WIDTH)
        state += product(value, y, x)
    at = owner * splits + split
    put_transposed(parts + at * D * E, E, columns, columns_v, channels, channels_v, state)
    tl.store(key_parts + at * D + columns, tl.sum(keys, 0), mask=channels)
    tl.store(stats + at * 2, largest if WEIGHTED else 0.0)
    tl.store(stats + at * 2 + 1, total)


@triton.jit(do_not_specialize=SIZES)
def mix_values(
    q, rotary, state, key_mean, stats, out, q_b, q_n, out_b, out_n, tokens, heads, splits, span, eps,
    KERNEL: tl.constexpr, HAS_ROTARY: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The output from queries and state."""
    image, head, split, owner = place(heads, splits)
    rows, columns, columns_v = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
    channels, channels_v = columns < D, columns_v < E
    q += image * q_b + head * D
    out += image * out_b + head * E
    end = tl.minimum((split + 1) * span, tokens)
    matrix = tile(state + owner * D * E, E, columns, columns_v, channels, channels_v)
    mean = tl.load(key_mean + owner * D + columns, mask=channels, other=0.0)
    # where all keys are padding, anything does that keeps the numbers in range: the values are zero
    floor = eps + tl.where(tl.load(stats + owner * 2 + 1) == 0, 1.0, 0.0)
    for start in range(split * span, end, ROWS):
        inside = start + rows < end
        x = tile(q + tl.cast(start, tl.int64) * q_n, q_n, rows, columns, inside, channels)
        y = mapped(x.to(tl.float32), channels, KERNEL)
        normaliser = tl.sum(y * mean[None, :], 1) + floor
        if HAS_ROTARY:
            cos, sin = angles(rotary, start, rows, columns, inside, channels, D, ROWS, WIDTH)
            y = rotated(y, cos, sin, ROWS, WIDTH)
        mixed = product(y, matrix, x) / normaliser[:, None]
        put(out + tl.cast(start, tl.int64) * out_n, out_n, rows, columns_v, inside, channels_v, mixed)


@triton.jit(do_not_specialize=SIZES)
def queries_backward(
    q, grad, mask, rotary, count, state, key_mean, stats, query_grad_parts, parts, key_parts, grad_q,
    q_b, q_n, grad_b, grad_n, grad_q_b, grad_q_n, tokens, heads, splits, span, eps,
    KERNEL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_ROTARY: tl.constexpr, WEIGHTED: tl.constexpr,
    SUM: tl.constexpr, WRITE: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``SUM``: gradients of state and mean key. ``WRITE``: gradients of the queries, which need sums over all tokens
    where the mean query weighs the keys."""
    image, head, split, owner = place(heads, splits)
    rows, columns, columns_v = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
    channels, channels_v = columns < D, columns_v < E
    q += image * q_b + head * D
    grad += image * grad_b + head * E
    end = tl.minimum((split + 1) * span, tokens)
    matrix = tile_transposed(state + owner * D * E, E, columns, columns_v, channels, channels_v)
    mean = tl.load(key_mean + owner * D + columns, mask=channels, other=0.0)
    floor = eps + tl.where(tl.load(stats + owner * 2 + 1) == 0, 1.0, 0.0)
    if WRITE and WEIGHTED:
        grad_query = sum_of_parts(query_grad_parts, owner, splits, columns, channels, WIDTH, D) / tl.load(count + image)
    grad_state = tl.zeros([WIDTH_V, WIDTH], dtype=tl.float32)  # of S^T
    grad_mean = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    for start in range(split * span, end, ROWS):
        inside, real = real_tokens(mask, image, start, rows, end, tokens, HAS_MASK)
        x = tile(q + tl.cast(start, tl.int64) * q_n, q_n, rows, columns, inside, channels)
        g = tile(grad + tl.cast(start, tl.int64) * grad_n, grad_n, rows, columns_v, inside, channels_v)
        wide = x.to(tl.float32)
        y = mapped(wide, channels, KERNEL)
        normaliser = tl.sum(y * mean[None, :], 1) + floor
        inner = product(g, matrix, x) / normaliser[:, None]  # of the turned query
        if HAS_ROTARY:
            cos, sin = angles(rotary, start, rows, columns, inside, channels, D, ROWS, WIDTH)
            inner = rotated(inner, cos, -sin, ROWS, WIDTH)
        grad_normaliser = -tl.sum(y * inner, 1) / normaliser
        if SUM:
            grad_mean += tl.where(inside[:, None], y * grad_normaliser[:, None], 0.0)
            divided = y / normaliser[:, None]
            if HAS_ROTARY:
                divided = rotated(divided, cos, sin, ROWS, WIDTH)
            divided = tl.where(inside[:, None], divided, 0.0)
            g = tile_transposed(grad + tl.cast(start, tl.int64) * grad_n, grad_n, rows, columns_v, inside, channels_v)
            grad_state += product(g, divided, x)
        if WRITE:
            inner += grad_normaliser[:, None] * mean[None, :]
            if WEIGHTED:
                inner += tl.where(real[:, None], grad_query[None, :], 0.0)
            target = grad_q + image * grad_q_b + tl.cast(start, tl.int64) * grad_q_n + head * D
            put(target, grad_q_n, rows, columns, inside, channels, mapped_backward(wide, y, inner, KERNEL))
    if SUM:
        at = owner * splits + split
        put_transposed(parts + at * D * E, E, columns, columns_v, channels, channels_v, grad_state)
        tl.store(key_parts + at * D + columns, tl.sum(grad_mean, 0), mask=channels)


@triton.jit(do_not_specialize=SIZES)
def keys_backward(
    k, v, mask, rotary, query_mean, grad_state, grad_mean, stats, shift, query_grad_parts, grad_k, grad_v,
    k_b, k_n, v_b, v_n, grad_k_b, grad_k_n, grad_v_b, grad_v_n, tokens, heads, splits, span, weight_scale,
    KERNEL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_ROTARY: tl.constexpr, WEIGHTED: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values, and of the mean query where ``WEIGHTED``; ``shift`` is the sum over tokens in the
    derivative of a softmax."""
    image, head, split, owner = place(heads, splits)
    rows, columns, columns_v = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
    channels, channels_v = columns < D, columns_v < E
    k += image * k_b + head * D
    v += image * v_b + head * E
    end = tl.minimum((split + 1) * span, tokens)
    matrix_transposed = tile_transposed(grad_state + owner * D * E, E, columns, columns_v, channels, channels_v)
    matrix = tile(grad_state + owner * D * E, E, columns, columns_v, channels, channels_v)
    mean = tl.load(grad_mean + owner * D + columns, mask=channels, other=0.0)
    if WEIGHTED:
        query = tl.load(query_mean + owner * D + columns, mask=channels, other=0.0)
        largest = tl.load(stats + owner * 2)
        all_tokens = tl.load(shift + owner)
        grad_query = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    for start in range(split * span, end, ROWS):
        inside, real = real_tokens(mask, image, start, rows, end, tokens, HAS_MASK)
        x = tile(k + tl.cast(start, tl.int64) * k_n, k_n, rows, columns, inside, channels)
        value = tile(v + tl.cast(start, tl.int64) * v_n, v_n, rows, columns_v, real, channels_v)
        wide = x.to(tl.float32)
        y = mapped(wide, channels, KERNEL)
        if WEIGHTED:
            logits = tl.sum(y * query[None, :], 1) * weight_scale
            p = tl.exp(tl.where(real, logits - largest, -float('inf')))
        else:
            p = real.to(tl.float32)
        inner = product(value, matrix_transposed, x)
        rotated_y = y
        if HAS_ROTARY:
            cos, sin = angles(rotary, start, rows, columns, inside, channels, D, ROWS, WIDTH)
            rotated_y = rotated(y, cos, sin, ROWS, WIDTH)
            inner = rotated(inner, cos, -sin, ROWS, WIDTH)
        inner += mean[None, :]
        grad_value = product(rotated_y, matrix, x) * p[:, None]
        target = grad_v + image * grad_v_b + tl.cast(start, tl.int64) * grad_v_n + head * E
        put(target, grad_v_n, rows, columns_v, inside, channels_v, grad_value)
        if WEIGHTED:
            grad_logit = p * (tl.sum(y * inner, 1) - all_tokens) * weight_scale
            inner = inner * p[:, None] + grad_logit[:, None] * query[None, :]
            grad_query += grad_logit[:, None] * y
        else:
            inner *= p[:, None]
        target = grad_k + image * grad_k_b + tl.cast(start, tl.int64) * grad_k_n + head * D
        put(target, grad_k_n, rows, columns, inside, channels, mapped_backward(wide, y, inner, KERNEL))
    if WEIGHTED:
        at = owner * splits + split
        tl.store(query_grad_parts + at * D + columns, tl.sum(grad_query, 0), mask=channels)
