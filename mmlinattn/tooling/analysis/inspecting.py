# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Measure the attention of one block on an image."""

import math
from typing import Optional

import numpy as np
import torch
from torch import Tensor

from ...ops.dispatch import accumulation_dtype
from .capture import CLASS_TOKEN, PADDING, BlockCall, Window

MEASURES = ('rank', 'confusion', 'locality', 'sharpness', 'ccs')
MAX_WINDOWS = 8
CONFUSION_DISTANCE = 1e-3  # InLine Sec. 4.1
NUMEL = 2**25  # attention weights computed at a time: 128 MiB


def measure_block(
    block: BlockCall, names=MEASURES, num_queries: int = 196, generator: Optional[torch.Generator] = None
) -> dict:
    """Measure the attention of a block, head by head.

    Args:
        block (BlockCall): See :func:`~mmlinattn.tooling.analysis.capture.watched`.
        names (Sequence[str]): Measures to compute, from :data:`MEASURES`.
        num_queries (int): Number of sampled queries, at least 2: the most rows of a head's attention map in memory.
            The default is the tokens of a DeiT at 224, as in the papers. Windowed attention samples two or more
            queries in each of at most :data:`MAX_WINDOWS` windows.
        generator (torch.Generator, optional): Random generator of the sample.

    Returns:
        dict: Entry of the block in ``summary.json``. Lists have one number per head, those of vertical stripes first.
    """
    samples = [_sample(branch, num_queries, generator) for branch in block.branches]
    heads = sum(branch[0].mixer.num_heads for branch in block.branches)
    entry: dict = dict(
        block=block.name,
        mixer=block.mixer_name,
        heads=heads,
        map=list(block.size),
        key_map=list(block.key_size),
        windows=len(block.windows),
        queries_a_window=max(len(window.queries) for window in block.windows),
        keys_a_window=max(len(window.keys) for window in block.windows),
        sampled_queries=sum(len(rows) for sample in samples for _, rows in sample),
    )
    by_branch = [
        averaged([(_measure_window(block, window, rows, names), float(len(rows))) for window, rows in sample])
        for sample in samples
    ]
    entry.update(_joined(by_branch))
    if 'rank' in names:
        for name, features in zip(('output', 'projected'), zip(*block.features())):
            entry['rank'][name] = _joined([ranks(t) for t in features])
    if 'ccs' in names:  # of a sample of queries that is the same for all heads and in every call
        keys = torch.arange(CLASS_TOKEN, math.prod(block.key_size), device=block.projected.device)
        limit = max(1, min(num_queries, NUMEL // (heads * len(keys))))
        queries = _some(torch.arange(math.prod(block.size)), limit, torch.Generator().manual_seed(0))
        maps = maps_of(block, queries.to(keys.device), keys).nan_to_num() if heads > 1 else None
        entry['ccs'] = None if maps is None else cross_head_similarity(maps)
    return entry


def _measure_window(block: BlockCall, window: Window, rows: Tensor, names) -> dict:
    """Measure the queries ``rows`` (indices within the window) of one window. ``names`` are among :data:`MEASURES`;
    ``ccs`` is measured elsewhere. The result has ``forward_error``, and a dict for each measure that the window allows.
    Lists have one number per head."""
    weights = window.weights(rows)
    both = window.weights(rows, local=True) if window.convolutions() else None
    entry: dict = dict(forward_error=window.error(rows, weights))
    if 'rank' in names:
        matrices = dict(weights=weights, weights_with_local=both, state=window.state())
        entry['rank'] = {name: ranks(matrix) for name, matrix in matrices.items() if matrix is not None}
    if 'confusion' in names and len(rows) > 1:
        distances = pair_distances(weights)
        entry['confusion'] = dict(
            share=(distances < CONFUSION_DISTANCE).double().mean(dim=-1).tolist(),
            median_distance=distances.median(dim=-1).values.tolist(),
            mean_norm=weights.norm(dim=-1).mean(dim=-1).tolist(),
        )
    num_keys = int((window.keys != PADDING).sum())
    if 'locality' in names and block.ratio:
        near = _near(block, window, rows)
        uniform = float(near.sum(dim=-1).double().mean()) / num_keys  # fewer than 9 neighbours at the border
        entry['locality'] = dict(chance=9 / num_keys, if_uniform=uniform)
        for name, map_ in (('', weights), ('_with_local', both)):
            if map_ is not None:  # the sum is that of InLine Fig. 3; both are equal for positive rows that sum to one
                parts = {f'sum{name}': map_ * near, f'share{name}': magnitudes(map_) * near}
                entry['locality'].update({key: _mean_sum(part) for key, part in parts.items()})
    if 'sharpness' in names:
        shares = magnitudes(weights)
        strongest = shares.sort(dim=-1, descending=True).values
        entry['sharpness'] = dict(
            entropy=_mean_sum(torch.special.entr(shares)),  # in nats
            entropy_if_uniform=math.log(num_keys),
            negative=_mean_sum(shares * (weights < 0)),
            **{f'top_{n}': _mean_sum(strongest[..., :n]) for n in (1, 9, 25)},
        )
    return entry


def _mean_sum(parts: Tensor) -> list[float]:
    """Sum over the keys and average over the queries: (heads, n, M) -> (heads,)."""
    return parts.sum(dim=-1).mean(dim=-1).tolist()


def _near(block: BlockCall, window: Window, rows: Tensor) -> Tensor:
    """Return (n, M) bool: True for keys within the 3x3 neighbourhood of the query on the grid of the keys."""
    tokens = ((window.queries[rows], block.size[1]), (window.keys, block.key_size[1]))
    queries, keys = (torch.stack((position // width, position % width), dim=-1) for position, width in tokens)
    distances = ((queries // block.ratio)[:, None] - keys).abs()  # of the query's cell in the grid of the keys
    return (distances <= 1).all(dim=-1) & (window.keys >= 0)


def _sample(branch: list[Window], num_queries: int, generator=None) -> list[tuple[Window, Tensor]]:
    """Sample windows and, in each, indices of at most ``num_queries`` queries, without class tokens and padding.
    Windows of a single token are sampled only if there are no others."""
    limit = NUMEL // (branch[0].mixer.num_heads * max(len(window.keys) for window in branch))
    num_queries = max(2, min(num_queries, limit))  # an attention may have as many heads as channels
    windows = [(window, (window.queries >= 0).nonzero()[:, 0]) for window in branch]
    windows = [(window, rows) for window, rows in windows if len(rows) > 1] or windows
    windows = _some(windows, min(MAX_WINDOWS, num_queries // 2), generator)  # two of a window make a pair
    return [(window, _some(rows, num_queries // len(windows), generator)) for window, rows in windows]


def _some(items, limit: int, generator):
    """Return at most ``limit`` items of a list or a tensor, drawn at random, in their order."""
    if len(items) <= limit:
        return items
    picked = torch.randperm(len(items), generator=generator)[:limit].sort().values
    return items[picked.to(items.device)] if isinstance(items, Tensor) else [items[i] for i in picked]


# --- attention maps ---------------------------------------------------------------------------------------------------


def maps_of(block: BlockCall, queries: Tensor, keys: Tensor, local: bool = False) -> Tensor:
    """Return attention weights (heads, n, m) of some queries on some keys; NaN for keys outside a query's window.

    ``queries`` (n,) and ``keys`` (m,) are ascending positions, see :class:`~mmlinattn.tooling.analysis.capture.Window`.
    With ``local``, the weights of the convolutions of the values are added.
    """
    maps = []
    for branch in block.branches:
        heads, wide = branch[0].mixer.num_heads, accumulation_dtype(branch[0].out)
        out = torch.full((heads, len(queries), len(keys)), math.nan, dtype=wide, device=queries.device)
        for window in branch:
            selected = torch.isin(window.queries, queries).nonzero()[:, 0]
            columns = torch.isin(window.keys, keys).nonzero()[:, 0]
            to = torch.searchsorted(keys, window.keys[columns])
            for rows in selected.split(max(1, NUMEL // (heads * len(window.keys)))) if len(selected) else ():
                at = torch.searchsorted(queries, window.queries[rows])
                weights = window.weights(rows, local)[:, :, columns]
                summed = weights.new_zeros(*weights.shape[:2], len(keys)).index_add_(2, to, weights)  # class tokens
                out[:, at[:, None], to] = summed[:, :, to]
        maps.append(out)
    return torch.cat(maps)


def query_map(block: BlockCall, row: int, column: int, local: bool = False) -> tuple[Tensor, Tensor]:
    """Return the attention weights of the token at ``row``, ``column`` of the block's feature map.

    Returns:
        tuple[Tensor, Tensor]: Attention map over the grid of the keys, (heads, h, w), NaN outside the token's window;
        and weights on the class token, (heads,).

    Raises:
        ValueError: The token is outside the feature map, or the keys lie on no grid.
    """
    if not block.ratio:
        raise ValueError(f'the keys of {block.name} are averages over the sequence of tokens and lie on no grid')
    if not (0 <= row < block.size[0] and 0 <= column < block.size[1]):
        raise ValueError(f'row={row}, column={column} is outside of the feature map of {block.name}, {block.size}')
    device = block.projected.device
    query = torch.tensor([row * block.size[1] + column], device=device)
    weights = maps_of(block, query, torch.arange(CLASS_TOKEN, math.prod(block.key_size), device=device), local)[:, 0]
    return weights[:, 1:].unflatten(1, block.key_size), weights[:, 0].nan_to_num()


def full_map(block: BlockCall, side: int = 128) -> Tensor:
    """Return the attention map of all queries and keys, subsampled to n, m <= ``side``: (heads, n, m)."""
    sizes = math.prod(block.size), math.prod(block.key_size)
    queries, keys = (torch.arange(0, size, -(-size // side), device=block.projected.device) for size in sizes)
    return maps_of(block, queries, keys)


# --- measures of attention weights (heads, n, M) of n queries and all M keys, as defined in the papers ----------------
# Linear attentions may have negative weights; fractions and entropies are then computed from their magnitudes.


def ranks(matrix: Tensor) -> dict[str, list[float]]:
    """Return three measures of the rank of each matrix of a batch (heads, N, d), one number per head.

    - ``rank``: number of singular values above the usual tolerance (NumPy's ``matrix_rank``) for float32.
    - ``above_1_percent``: number of singular values above 1 % of the largest.
    - ``effective``: exponential of the entropy of the normalised singular values (Roy & Vetterli 2007), from 1 to
      ``at_most``; 0 for a zero matrix.
    - ``at_most``: the smaller side of the matrix, one number for all heads.
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
    """Return Euclidean distances of the weights of all pairs of queries: (heads, n, M) -> (heads, n (n - 1) / 2). Two
    queries closer than :data:`CONFUSION_DISTANCE` are confused (InLine Def. 1, Fig. 2)."""
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


# --- numbers in nested dicts ------------------------------------------------------------------------------------------


def averaged(entries: list[tuple[dict, float]], joins_lists: bool = False) -> dict:
    """Return the weighted average of dicts, given as (dict, weight) pairs, over their common keys. Values are numbers,
    lists of equal length (concatenated with ``joins_lists``), or dicts of these."""
    found: dict = {}
    weights = [weight for _, weight in entries]
    for key in entries[0][0]:
        values = [entry[key] for entry, _ in entries if key in entry]
        if len(values) < len(entries):
            continue
        if isinstance(values[0], dict):
            found[key] = averaged([*zip(values, weights)], joins_lists)
        elif isinstance(values[0], list) and joins_lists:
            found[key] = sum(values, [])
        elif all(value == values[0] for value in values):  # names, and counts that stay whole
            found[key] = values[0]
        else:
            found[key] = np.average(values, axis=0, weights=weights).tolist()
    return found


def _joined(branches: list[dict]) -> dict:
    """Join the measures of vertical and horizontal stripes."""
    return averaged([(branch, 1.0) for branch in branches], joins_lists=True)
