# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The papers' measures of attention maps, states and features, as functions of tensors; no model in here.

Weights are (..., n, M): n queries, some or all, and their weights of all M keys. Linear attentions may give negative
weights; what is said of shares and entropies is then of their magnitudes.
"""

import torch
from torch import Tensor

CONFUSION_DISTANCE = 1e-3  # InLine Sec. 4.1


def singular_values(matrix: Tensor) -> Tensor:
    """Singular values of (..., N, d), largest first, in float64; of tall matrices through their d x d Gram matrix."""
    matrix = matrix.double()
    rows, columns = matrix.shape[-2:]
    if max(rows, columns) <= 4 * min(rows, columns):
        return torch.linalg.svdvals(matrix)
    gram = matrix.transpose(-1, -2) @ matrix if rows > columns else matrix @ matrix.transpose(-1, -2)
    return torch.linalg.eigvalsh(gram).flip(-1).clamp(min=0).sqrt()


def rank_above(values: Tensor, threshold: float) -> Tensor:
    """How many singular values (..., r), largest first, lie above ``threshold`` times the largest."""
    return (values > values[..., :1] * threshold).sum(dim=-1)


def effective_rank(values: Tensor) -> Tensor:
    """``exp`` of the entropy of the singular values (..., r), largest first, as a distribution (Roy & Vetterli 2007):
    between 1 and r, and r only where all are equal; 0 for a zero matrix."""
    return torch.special.entr(magnitudes(values)).sum(dim=-1).exp() * (values[..., 0] > 0)


def ranks(matrix: Tensor) -> dict[str, list[float]]:
    """The three ranks of each matrix (heads, N, d): ``rank`` with the usual tolerance (NumPy's ``matrix_rank``) of a
    float32 matrix."""
    values = singular_values(matrix)
    rounding = max(matrix.shape[-2:]) * torch.finfo(torch.float32).eps
    return dict(
        rank=rank_above(values, rounding).tolist(),
        above_1_percent=rank_above(values, 0.01).tolist(),
        effective=effective_rank(values).tolist(),
    )


def pair_distances(weights: Tensor) -> Tensor:
    """Euclidean distances of the weights of all pairs of queries: (..., n, M) -> (..., n (n - 1) / 2)."""
    distance = torch.cdist(weights.double(), weights.double())
    first, second = torch.triu_indices(weights.shape[-2], weights.shape[-2], offset=1, device=weights.device)
    return distance[..., first, second]


def confusion(weights: Tensor, distance: float = CONFUSION_DISTANCE) -> Tensor:
    """Share of the pairs of queries that are confused (InLine Def. 1, Fig. 2): whose weights differ by less than
    ``distance`` in L2. (..., n, M) -> (...)."""
    return (pair_distances(weights) < distance).double().mean(dim=-1)


def neighbours(queries: Tensor, keys: Tensor, reach: int = 1) -> Tensor:
    """Which keys lie in the (2 reach + 1)^2 window around which query.

    Args:
        queries (Tensor): Row and column of each query in the grid of the keys, (..., n, 2).
        keys (Tensor): Those of the keys, (..., M, 2); class tokens and padding far away.

    Returns:
        Tensor: (..., n, M) bool.
    """
    offset = queries[..., :, None, :] - keys[..., None, :, :]
    return (offset.abs() <= reach).all(dim=-1)


def inside(weights: Tensor, near: Tensor) -> tuple[Tensor, Tensor]:
    """Weight inside the neighbourhood, mean over queries: its plain sum (InLine Fig. 3), and its share of all
    magnitudes, which is the same where no weight is negative and the rows sum to one.

    Args:
        weights (Tensor): (heads, n, M).
        near (Tensor): (n, M) bool, see :func:`neighbours`.

    Returns:
        tuple[Tensor, Tensor]: (heads,) each.
    """
    total, share = ((t * near).sum(dim=-1).mean(dim=-1) for t in (weights, magnitudes(weights)))
    return total, share


def magnitudes(weights: Tensor) -> Tensor:
    """Weights as distributions: ``|w| / sum |w|`` of each query."""
    size = weights.double().abs()
    return size / size.sum(dim=-1, keepdim=True).clamp(min=1e-300)


def entropy(weights: Tensor) -> Tensor:
    """Entropy in nats of the magnitudes of each query's weights, mean over queries: 0 for one key, log M for all
    alike."""
    return torch.special.entr(magnitudes(weights)).sum(dim=-1).mean(dim=-1)


def top_mass(weights: Tensor, count: int) -> Tensor:
    """Share of the magnitude on a query's ``count`` strongest keys, mean over queries."""
    return magnitudes(weights).topk(min(count, weights.shape[-1]), dim=-1).values.sum(dim=-1).mean(dim=-1)


def cross_head_similarity(weights: Tensor) -> float:
    """Similarity of a layer's heads, "CCS" here: the cosine similarity of the attention maps of two heads, as vectors
    of n M weights, mean over all pairs of different heads.

    In the spirit of hMHSA's cross-head cosine similarity (hMHSA Eq. 9-11, Tab. 4); the mean over pairs is our reading
    of it, since no code was released. (heads, n, M), two heads or more -> a number in [-1, 1].
    """
    heads = weights.shape[0]
    flat = torch.nn.functional.normalize(weights.double().flatten(1), dim=-1)
    return float(((flat @ flat.T).sum() - flat.square().sum()) / (heads * (heads - 1)))
