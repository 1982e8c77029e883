# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Measures of attention maps, states and features, as defined in the papers.

Attention weights have shape (heads, n, M): n queries (all, or a sample) and all M keys. Linear attentions may have
negative weights; fractions and entropies are then computed from their magnitudes.
"""

import torch
from torch import Tensor

CONFUSION_DISTANCE = 1e-3  # InLine Sec. 4.1


def ranks(matrix: Tensor) -> dict[str, list[float]]:
    """Return three measures of the rank of each matrix of a batch (heads, N, d), one number per head.

    - ``rank``: number of singular values above the usual tolerance (NumPy's ``matrix_rank``) for float32.
    - ``above_1_percent``: number of singular values above 1 % of the largest.
    - ``effective``: exponential of the entropy of the normalised singular values (Roy & Vetterli 2007), from 1 to
      ``at_most``; 0 for a zero matrix.
    - ``at_most``: the smaller side of the matrix.
    """
    matrix = matrix.double()
    matrix = matrix if matrix.shape[-1] <= matrix.shape[-2] else matrix.mT
    values = torch.linalg.eigvalsh(matrix.mT @ matrix).clamp(min=0).sqrt()
    largest = values.amax(dim=-1, keepdim=True)
    rounding = matrix.shape[-2] * torch.finfo(torch.float32).eps
    effective = torch.special.entr(magnitudes(values)).sum(dim=-1).exp() * (largest[..., 0] > 0)
    return dict(
        rank=(values > largest * rounding).sum(dim=-1).tolist(),
        above_1_percent=(values > largest * 0.01).sum(dim=-1).tolist(),
        effective=effective.tolist(),
        at_most=matrix.shape[-1],
    )


def pair_distances(weights: Tensor) -> Tensor:
    """Return Euclidean distances of the weights of all pairs of queries: (heads, n, M) -> (heads, n (n - 1) / 2).

    Two queries closer than :data:`CONFUSION_DISTANCE` are confused (InLine Def. 1, Fig. 2).
    """
    distance = torch.cdist(weights.double(), weights.double())
    first, second = torch.triu_indices(weights.shape[-2], weights.shape[-2], offset=1, device=weights.device)
    return distance[..., first, second]


def magnitudes(weights: Tensor) -> Tensor:
    """Return ``|w| / sum |w|`` over the keys of each query: (..., M) -> (..., M), float64."""
    size = weights.double().abs()
    return size / size.sum(dim=-1, keepdim=True).clamp(min=1e-300)


def cross_head_similarity(weights: Tensor) -> float:
    """Return the cross-head cosine similarity ("CCS") of attention maps (heads, n, M), two or more heads, in [-1, 1].

    It is the mean over all pairs of heads. This follows our reading of hMHSA Eq. 9-11 and Tab. 4, as no code was
    released.
    """
    heads = weights.shape[0]
    flat = torch.nn.functional.normalize(weights.double().flatten(1), dim=-1)
    return float(((flat @ flat.T).sum() - flat.square().sum()) / (heads * (heads - 1)))
