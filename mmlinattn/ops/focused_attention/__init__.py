# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

from torch import Tensor

from .. import forms
from . import reference


def focused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_heads: int,
    inverse_scale: Tensor,
    power: float,
    offset: Optional[Tensor] = None,
    mask: Optional[Tensor] = None,
    eps: float = 1e-6,
) -> Tensor:
    """Focused linear attention (FLatten Eq. 4-8), O(N d^2) for each head.

    :func:`~mmlinattn.ops.linear_attention` of ``phi_p(q)`` and ``phi_p(k + offset)``, with the focused map
    ``phi_p(x) = |r| / |r^p| r^p``, ``r = (ReLU(x) + eps) * inverse_scale``, whose norms are over all channels, before
    the split into heads. The maths runs in float32 or better: ``r^3`` overflows float16, and gradients grow with the
    inverse cube of small entries.

    In inference, ``q`` and ``k`` are scratch memory of this function; ``v`` never is.

    Args:
        q (Tensor): Queries, (B, N, C).
        k (Tensor): Keys, (B, M, C).
        v (Tensor): Values, (B, M, E); zero where ``mask`` is False.
        num_heads (int): Heads that C and E are split into after the map.
        inverse_scale (Tensor): (C,), ``1 / softplus(scale)``.
        power (float): Focusing factor p, in [1, 32].
        offset (Tensor, optional): Positions added to the keys before the map, broadcastable to (B, M, C).
        mask (Tensor, optional): (B, M) bool, True for real tokens.
        eps (float): Of the map, where it keeps the direction of dead tokens defined, and of the normaliser.

    Returns:
        Tensor: (B, N, E), in the dtype of ``v``.
    """
    with forms.without_autocast(q):
        form = forms.pick(reference, q, k, v, inverse_scale)
        return form.focused_attention(q, k, v, num_heads, inverse_scale, power, offset, mask, eps)
