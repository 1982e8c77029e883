# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The papers' measures of attention maps, states and features, as functions of tensors.

Weights are (heads, n, M): n queries, some or all, and their weights of all M keys. Shares and entropies of negative
weights, as linear attentions have, are of their magnitudes.
"""

import torch
from torch import Tensor

CONFUSION_DISTANCE = 1e-3  # InLine Sec. 4.1


def ranks(matrix: Tensor) -> dict[str, list[float]]:
    """Return the ranks of each matrix (heads, N, d).

    ``rank`` counts singular values above the usual tolerance (NumPy's ``matrix_rank``) of a float32 matrix, and
    ``above_1_percent`` those above 1 % of the largest. ``effective`` is ``exp`` of the entropy of the singular values
    as a distribution (Roy & Vetterli 2007): 0 for a zero matrix, else from 1 to ``at_most``.
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


def neighbourhood_weight(weights: Tensor, near: Tensor) -> tuple[Tensor, Tensor]:
    """Return sum (InLine Fig. 3) and share of the weight inside a neighbourhood, means over queries.

    The share is of all magnitudes. Both are equal if no weight is negative and the rows sum to one.

    Args:
        weights (Tensor): (heads, n, M).
        near (Tensor): (n, M) bool, True for keys in the neighbourhood of a query.
    """
    total, share = ((t * near).sum(dim=-1).mean(dim=-1) for t in (weights, magnitudes(weights)))
    return total, share


def magnitudes(weights: Tensor) -> Tensor:
    """Return ``|w| / sum |w|`` of each query."""
    size = weights.double().abs()
    return size / size.sum(dim=-1, keepdim=True).clamp(min=1e-300)


def entropy(weights: Tensor) -> Tensor:
    """Return the entropy (nats) of the magnitudes, mean over queries: 0 for one key, log M for equal weights."""
    return torch.special.entr(magnitudes(weights)).sum(dim=-1).mean(dim=-1)


def top_mass(weights: Tensor, count: int) -> Tensor:
    """Return the share of the magnitude on a query's ``count`` strongest keys, mean over queries."""
    return magnitudes(weights).topk(min(count, weights.shape[-1]), dim=-1).values.sum(dim=-1).mean(dim=-1)


def cross_head_similarity(weights: Tensor) -> float:
    """Return the cross-head cosine similarity ("CCS") of the maps (heads, n, M) of two heads or more, in [-1, 1].

    It is the mean over all pairs of heads, our reading of hMHSA Eq. 9-11, Tab. 4: no code was released.
    """
    heads = weights.shape[0]
    flat = torch.nn.functional.normalize(weights.double().flatten(1), dim=-1)
    return float(((flat @ flat.T).sum() - flat.square().sum()) / (heads * (heads - 1)))
