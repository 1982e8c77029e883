# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""RALA and linear attention by :mod:`.kernels`: two passes over the tokens forward, two backward, one more each where
the mean query weighs the keys."""

from typing import Any, Optional

import torch
from torch import Tensor

from ..gradients import Rule, by_hand
from . import kernels

MAPS = 'elu', 'relu'
# wider heads would take more than the 99 KB of shared memory that consumer GPUs have, or spill
WIDEST_HEAD = {torch.float32: 64, torch.float16: 64, torch.bfloat16: 128}
# Spans of the tokens: enough programs for every GPU, each with tokens enough to be worth its start, and few enough for
# the memory of what they sum.
PROGRAMS, FEWEST_TOKENS, MOST_SPLITS = 1024, 256, 128


def attention(equation, q, k, v, rotary, mask, num_heads, kernel, weight_scale, eps) -> Tensor:
    """RALA, or linear attention where ``weight_scale`` is None, of what :func:`takes` takes.

    Args:
        equation (callable): The same in PyTorch's operators, for gradients of gradients.
    """
    # kernels read the channels of a token side by side
    q, k, v = (t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in (q, k, v))
    rotary, mask = (None if t is None else t.contiguous() for t in (rotary, mask))
    options = dict(num_heads=num_heads, kernel=kernel, weight_scale=weight_scale, eps=eps)
    return by_hand(Rule(equation, forward, backward), q, k, v, rotary, mask, **options)


def takes(q, k, v, num_heads, rotary=None, mask=None) -> bool:
    """Whether tensors have exactly the shapes that kernels index. The reference broadcasts others, or raises."""
    tensors = (q, k, v)
    if not (num_heads > 0 and all(t.dim() == 3 and t.numel() and t.shape[-1] % num_heads == 0 for t in tensors)):
        return False
    (batch, tokens, channels), keys, d = q.shape, k.shape[1], q.shape[-1] // num_heads
    others = (rotary, (tokens, d // 2, 2)), (mask, (batch, keys))
    return (
        k.shape == (batch, keys, channels)
        and v.shape[:2] == (batch, keys)
        and all(t.dtype == q.dtype and t.device == q.device for t in tensors)
        and all(t is None or (t.shape == shape and t.device == q.device) for t, shape in others)
        and (mask is None or mask.dtype == torch.bool)
        and (rotary is None or (d % 2 == 0 and not rotary.requires_grad))
    )


class _Call:
    """Sizes, flags and memory that all kernels of a call share."""

    def __init__(self, q, k, v, rotary, mask, num_heads, kernel, weight_scale) -> None:
        self.batch, self.heads, self.device = q.shape[0], num_heads, q.device
        self.d, self.e = d, e = q.shape[-1] // num_heads, v.shape[-1] // num_heads
        self.weighted = weight_scale is not None
        self.scale = float(weight_scale) if self.weighted else 1.0
        width, width_v = (max(16, 1 << (size - 1).bit_length()) for size in (d, e))
        # as many rows as leave backward kernels their registers, see tests/ops/compile_kernels.py; all but the spans
        # follows from head width and type: another size of images compiles nothing
        widest, itemsize = max(width, width_v), 2 if q.dtype == torch.bfloat16 else 4
        self.rows = 32 if widest * itemsize <= 128 else 16
        narrow = dict(
            D=d, WIDTH=width, ROWS=self.rows, num_warps=8 if widest > 32 else 4, num_stages=2 if widest <= 64 else 1
        )
        self.narrow, self.wide = narrow, dict(narrow, E=e, WIDTH_V=width_v)
        self.flags = dict(KERNEL=kernel, HAS_ROTARY=rotary is not None)
        self.mask = dict(HAS_MASK=mask is not None)

    def spans(self, x: Tensor) -> tuple[tuple[int], dict[str, int]]:
        """One program a span, head and image; sizes of tensor and spans."""
        owners, tokens = self.batch * self.heads, x.shape[1]
        splits = max(1, min(-(-PROGRAMS // owners), MOST_SPLITS, tokens // FEWEST_TOKENS))
        span = -(-tokens // (splits * self.rows)) * self.rows
        splits = -(-tokens // span)
        return (owners * splits,), dict(tokens=tokens, heads=self.heads, splits=splits, span=span)

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(self.batch, self.heads, *shape, dtype=torch.float32, device=self.device)

    def count(self, k: Tensor, mask: Optional[Tensor]) -> Optional[Tensor]:
        """Real tokens of each image, at least 1."""
        if not self.weighted:
            return None
        if mask is None:
            return torch.full((self.batch,), k.shape[1], dtype=torch.float32, device=self.device)
        return mask.sum(dim=1).clamp_(min=1).float()


def launch(kernel, grid: tuple, device: torch.device, *args, **settings) -> None:
    if kernels.INTERPRETED:
        kernel[grid](*args, **settings)
        return
    with torch.cuda.device(device):
        kernel[grid](*args, **settings)


def _strides(x: Tensor) -> tuple[int, int]:
    return x.stride(0), x.stride(1)


def forward(q, k, v, rotary, mask, num_heads, kernel, weight_scale, eps):
    """The result (B, N, E), and state, mean key, statistics of the weights and mean query."""
    call = _Call(q, k, v, rotary, mask, num_heads, kernel, weight_scale)
    (grid, sizes), d, e = call.spans(k), call.d, call.e
    splits, device = sizes['splits'], q.device
    parts, key_parts, part_stats = call.empty(splits, d, e), call.empty(splits, d), call.empty(splits, 2)
    query_mean: Any = call.empty(d) if call.weighted else None
    query_parts = call.empty(splits, d) if call.weighted else None
    if call.weighted:
        launch(
            kernels.sum_queries, grid, device, q, mask, query_parts, *_strides(q), **sizes, **call.narrow, **call.mask,
            KERNEL=kernel,
        )  # fmt: skip
    launch(
        kernels.sum_keys, grid, device, k, v, mask, rotary, call.count(k, mask), query_parts, query_mean,
        parts, key_parts, part_stats, *_strides(k), *_strides(v), **sizes, weight_scale=call.scale,
        **call.flags, **call.mask, WEIGHTED=call.weighted, **call.wide,
    )  # fmt: skip
    logits, totals = part_stats.unbind(-1)
    largest = logits.amax(-1, keepdim=True)
    largest = torch.where(largest == -torch.inf, 0, largest)  # of padding alone
    share = (logits - largest).exp()
    total = (totals * share).sum(-1)
    share /= torch.where(total == 0, 1, total)[..., None]  # where sums are zero, so are the means
    state = parts.mul_(share[..., None, None]).sum(2)
    key_mean = key_parts.mul_(share[..., None]).sum(2)
    stats = torch.stack((largest[..., 0], total), -1)
    out = torch.empty(*q.shape[:2], v.shape[-1], dtype=v.dtype, device=device)
    grid, sizes = call.spans(q)
    launch(
        kernels.mix_values, grid, device, q, rotary, state, key_mean, stats, out, *_strides(q), *_strides(out), **sizes,
        eps=eps, **call.flags, **call.wide,
    )  # fmt: skip
    return out, (state, key_mean, stats, query_mean)


def backward(grads, inputs, kept, wanted, num_heads, kernel, weight_scale, eps):
    """Gradients of queries, keys and values."""
    (q, k, v, rotary, mask), (state, key_mean, stats, query_mean) = inputs, kept
    grad = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
    grad_q, grad_k, grad_v = (torch.empty_like(t) for t in (q, k, v))
    call = _Call(q, k, v, rotary, mask, num_heads, kernel, weight_scale)
    (grid, sizes), (key_grid, key_sizes) = call.spans(q), call.spans(k)
    splits, device, d, e = sizes['splits'], q.device, call.d, call.e
    parts, key_parts = call.empty(splits, d, e), call.empty(splits, d)
    query_grads = call.empty(key_sizes['splits'], d) if call.weighted else None
    count = call.count(k, mask)

    def over_queries(**steps) -> None:
        launch(
            kernels.queries_backward, grid, device, q, grad, mask if call.weighted else None, rotary, count,
            state, key_mean, stats, query_grads, parts, key_parts, grad_q,
            *_strides(q), *_strides(grad), *_strides(grad_q), **sizes, eps=eps, **call.flags, **call.wide, **steps,
            HAS_MASK=mask is not None and call.weighted, WEIGHTED=call.weighted,
        )  # fmt: skip

    over_queries(SUM=True, WRITE=not call.weighted)
    total = stats[..., 1]
    over = 1 / torch.where(total == 0, 1, total)[..., None]
    grad_state, grad_mean = parts.sum(2) * over[..., None], key_parts.sum(2) * over
    shift = (grad_state * state).sum((-2, -1)) + (grad_mean * key_mean).sum(-1)
    launch(
        kernels.keys_backward, key_grid, device, k, v, mask, rotary, query_mean, grad_state, grad_mean, stats,
        shift, query_grads, grad_k, grad_v,
        *_strides(k), *_strides(v), *_strides(grad_k), *_strides(grad_v), **key_sizes, weight_scale=call.scale,
        **call.flags, **call.mask, WEIGHTED=call.weighted, **call.wide,
    )  # fmt: skip
    if call.weighted:
        over_queries(SUM=False, WRITE=True)
    return grad_q, grad_k, grad_v, None, None
