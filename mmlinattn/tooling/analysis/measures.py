# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The papers' measures of attention maps, states and features, as functions of tensors; no model in here.

Weights are (heads, n, M): n queries, some or all, and their weights of all M keys. Linear attentions may give negative
weights; what is said of shares and entropies is then of their magnitudes.
"""

import torch
from torch import Tensor

CONFUSION_DISTANCE = 1e-3  # InLine Sec. 4.1


def ranks(matrix: Tensor) -> dict[str, list[float]]:
    """Ranks of each matrix (heads, N, d).

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
    """Euclidean distances of the weights of all pairs of queries: (heads, n, M) -> (heads, n (n - 1) / 2).

    Two queries closer than :data:`CONFUSION_DISTANCE` are confused (InLine Def. 1, Fig. 2).
    """
    distance = torch.cdist(weights.double(), weights.double())
    first, second = torch.triu_indices(weights.shape[-2], weights.shape[-2], offset=1, device=weights.device)
    return distance[..., first, second]


def inside(weights: Tensor, near: Tensor) -> tuple[Tensor, Tensor]:
    """Weight inside the neighbourhood, mean over queries: its plain sum (InLine Fig. 3), and its share of all
    magnitudes, which is the same where no weight is negative and the rows sum to one. ``near``: which keys are in it,
    (n, M) bool.
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
