# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from .. import forms
from . import reference


def hallucinated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_heads: int,
    grid,
    intra: Optional[Tensor] = None,
    cross: Optional[Tensor] = None,
    cross_first: bool = False,
    mask: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
) -> Tensor:
    """Softmax attention that computes half of its maps and derives ("hallucinates") the others from them.

    ``A_i = q_i k_i^T / sqrt(d)``, i = 1..h/2, are the real maps. Each row of ``A_i`` lies on the grid of the keys, on
    which IHH convolves it, ``B_i = w_i * A_i`` (3x3, depth-wise), and CHH mixes the heads, ``H_m = sum_i c_mi B_i``.
    Then ``out = softmax([A, H] + bias) v``, head by head.

    Both are linear in the keys and move there: ``H_m = [c_m1 q_1 | ... | c_m(h/2) q_(h/2)] [w_1*k_1 | ... ]^T``. So
    the hallucinated heads are plain attention of width C/2, and no N x M map is built or kept: O(N + M) memory,
    about ``N M C (h/2 + 1)`` multiply-adds. In inference, CPUs take the maps of a few queries at a time, with
    ``N M (2 C + h^2 / 4)``.

    Source: "Vision Transformer with Attention Map Hallucination and FFN Compaction" (Xu et al. 2023), Eq. 2.

    Args:
        q (Tensor): Queries of the real heads, (B, N, h/2 * d).
        k (Tensor): Keys of the real heads, (B, M, h/2 * d).
        v (Tensor): Values of all heads, the real ones first, (B, M, h * d); zero where ``mask`` is False.
        num_heads (int): Heads h, real and hallucinated; even.
        grid (Grid): The grid of the keys, see :class:`mmlinattn.attention.Grid`. Class tokens have no neighbours and
            pass the convolution as they are; tokens of different ``grid.regions`` are none either.
        intra (Tensor, optional): w of IHH, (h/2, 3, 3); None leaves it out.
        cross (Tensor, optional): c of CHH, (h/2, h/2); None leaves it out. Without both, real maps are copied.
        cross_first (bool): CHH before IHH.
        mask (Tensor, optional): (B, M) bool, True for real tokens. Others are no neighbours.
        bias (Tensor, optional): Added to the logits, broadcastable to (B, h, N, M), with four dimensions.

    Returns:
        Tensor: (B, N, h * d), in the dtype of ``v``.
    """
    if has_torch_function((q, k, v)):  # counters see it whole, as they see fused attention
        options = dict(intra=intra, cross=cross, cross_first=cross_first, mask=mask, bias=bias)
        return handle_torch_function(hallucinated_attention, (q, k, v), q, k, v, num_heads, grid, **options)
    form = forms.pick(reference, q, k, v)
    return form.hallucinated_attention(q, k, v, num_heads, grid, intra, cross, cross_first, mask, bias)
