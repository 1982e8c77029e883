# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Linear attention with division, and the equation that it shares with rank-augmented linear attention."""

from typing import Optional

import torch
from torch import Tensor

from . import dispatch
from .dispatch import accumulation_dtype, with_gradient
from .feature_maps import FEATURE_MAPS, LOWEST_EXPONENT, check_kernel
from .heads import have_attention_shapes, merge_heads_5d, split_heads_5d
from .padding import padded_eps, root_weights, token_mean
from .rotary import rotate_reference
from .sizes import is_known


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_heads: int,
    kernel: str = 'identity',
    mask: Optional[Tensor] = None,
    eps: float = 1e-6,
) -> Tensor:
    """Linear attention with division, O(N d^2) for each head.

    ``out_i = phi(q_i) (1/N sum_j phi(k_j) v_j^T) / (phi(q_i) . mean_j(phi(k_j)) + eps)``.

    Source: Katharopoulos et al. 2020, Eq. 5; InLine Eq. 2; FLatten Eq. 4.

    Args:
        q (Tensor): Queries, (B, N, num_heads * d).
        k (Tensor): Keys, (B, M, num_heads * d).
        v (Tensor): Values, (B, M, E); zero for masked tokens.
        num_heads (int): Heads that the channels are split into.
        kernel (str): phi, a name of :data:`~mmlinattn.ops.feature_maps.FEATURE_MAPS`; sums of its results must not
            vanish.
        mask (Tensor, optional): (B, M) bool, True for valid tokens.
        eps (float): Added to the normaliser.

    Returns:
        Tensor: (B, N, E), in the dtype of ``v``.

    Raises:
        ValueError: For another ``kernel``.
    """
    check_kernel(kernel, FEATURE_MAPS)
    with dispatch.without_autocast(q):
        options = dict(num_heads=num_heads, kernel=kernel, weight_scale=None, eps=eps)
        op = recomputed_equation if have_attention_shapes(q, k, v, num_heads) else equation
        return op(q, k, v, None, mask, **options)


def equation(q, k, v, rotary, mask, num_heads, kernel, weight_scale, eps) -> Tensor:
    """Compute :func:`~mmlinattn.ops.rala`; with ``rotary`` and ``weight_scale`` None, it is linear attention.

    In float16 logits would be off by several per cent, and gradients divided by a normaliser near eps would overflow.
    So half precision is computed in float32, but for the products of bfloat16 with values and state.
    """
    dtype, wide = v.dtype, accumulation_dtype(q)
    products = q.dtype if q.dtype == dtype == torch.bfloat16 else torch.promote_types(wide, dtype)
    q, k, v = (split_heads_5d(t, num_heads) for t in (q, k, v))
    q, k = (FEATURE_MAPS[kernel](t.to(wide)) for t in (q, k))
    if weight_scale is None:
        root = root_weights(k, mask)
    else:
        root = _root_softmax(k @ token_mean(q, mask).transpose(-1, -2) * weight_scale, mask)
    k, v = k * root, v * root
    normaliser = q @ (k.transpose(-1, -2) @ root) + padded_eps(eps, mask, wide)
    if rotary is not None:
        q, k = rotate_reference(q, rotary), rotate_reference(k, rotary)
    state = k.to(products).transpose(-1, -2) @ v.to(products)
    return merge_heads_5d(q.to(products) @ state / normaliser).to(dtype)


def exponentials(logits: Tensor, mask: Optional[Tensor], lowest: float = LOWEST_EXPONENT) -> Tensor:
    """Return ``exp(logits - their maximum)`` over the tokens of (..., B, heads, N, d): at most 1, at least
    ``exp(lowest)``, and 0 for padding."""
    if is_known(logits.shape[-2]) and not logits.shape[-2]:
        return logits
    if mask is None:
        return (logits - logits.amax(dim=-2, keepdim=True).detach()).clamp(min=lowest).exp()
    real = mask[:, None, :, None]
    # not minus infinity: for an image of padding alone, results and their gradients would be NaN
    largest = logits.detach().masked_fill(~real, torch.finfo(logits.dtype).min).amax(dim=-2, keepdim=True)
    return (logits - largest).masked_fill(~real, 0.0).clamp(min=lowest).exp() * real


def _root_softmax(logits: Tensor, mask: Optional[Tensor]) -> Tensor:
    """Return the square root of the softmax over the tokens of logits (..., B, heads, N, 1), see
    :func:`~mmlinattn.ops.padding.root_weights`."""
    root = exponentials(logits / 2, mask, LOWEST_EXPONENT / 2) / 16
    return root / (root.transpose(-1, -2) @ root).clamp(min=1 / 512).sqrt()


recomputed_equation = with_gradient(equation)
