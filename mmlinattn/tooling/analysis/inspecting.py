# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Measure the attention of one block on an image."""

import math
from typing import Callable, Optional

import numpy as np
import torch
from torch import Tensor

from ...ops.dispatch import accumulation_dtype
from . import measures
from .capture import CLASS_TOKEN, PADDING, BlockCall, Window

MEASURES = ('rank', 'confusion', 'locality', 'sharpness', 'ccs')
NUM_QUERIES = 196  # tokens of a DeiT at 224, as in the papers
MAX_WINDOWS = 8
NUMEL = 2**25  # attention weights computed at a time: 128 MiB


def measure_block(
    block: BlockCall, names=MEASURES, num_queries: int = NUM_QUERIES, generator: Optional[torch.Generator] = None
) -> dict:
    """Measure the attention of a block, head by head.

    Args:
        block (BlockCall): See :func:`~mmlinattn.tooling.analysis.capture.watched`.
        names (Sequence[str]): Measures to compute, from :data:`MEASURES`.
        num_queries (int): Number of sampled queries, at least 2: the most rows of a head's attention map in memory.
            Windowed attention samples two or more queries in each of at most :data:`MAX_WINDOWS` windows.
        generator (torch.Generator, optional): Random generator of the sample.

    Returns:
        dict: Entry of the block in ``summary.json``. Lists have one number per head. In cross-shaped windows, the heads
            of vertical stripes come first.
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
            entry['rank'][name] = _joined([measures.ranks(t) for t in features])
    if 'ccs' in names:
        entry['ccs'] = measures.cross_head_similarity(_some_rows(block, heads, num_queries)) if heads > 1 else None
    return entry


def _measure_window(block: BlockCall, window: Window, rows: Tensor, names) -> dict:
    """Measure the queries ``rows`` (indices within the window) of one window."""
    weights = window.weights(rows)
    both = window.weights(rows, local=True) if window.convolutions() else None
    entry: dict = dict(forward_error=window.error(rows, weights))
    if 'rank' in names:
        matrices = dict(weights=weights, weights_with_local=both, state=window.state())
        entry['rank'] = {name: measures.ranks(matrix) for name, matrix in matrices.items() if matrix is not None}
    if 'confusion' in names and len(rows) > 1:
        distances = measures.pair_distances(weights)
        entry['confusion'] = dict(
            share=(distances < measures.CONFUSION_DISTANCE).double().mean(dim=-1).tolist(),
            median_distance=distances.median(dim=-1).values.tolist(),
            mean_norm=weights.norm(dim=-1).mean(dim=-1).tolist(),
        )
    num_keys = int((window.keys != PADDING).sum())
    if 'locality' in names and block.ratio:
        near = _near(block, window, rows)
        uniform = float(near.sum(dim=-1).double().mean()) / num_keys  # fewer than 9 neighbours at the border
        entry['locality'] = dict(chance=9 / num_keys, if_uniform=uniform)
        for name, map_ in (('', weights), ('_with_local', both)):
            if map_ is not None:
                total, fraction = measures.neighbourhood_weight(map_, near)
                entry['locality'].update({f'sum{name}': total.tolist(), f'share{name}': fraction.tolist()})
    if 'sharpness' in names:
        negative = (measures.magnitudes(weights) * (weights < 0)).sum(dim=-1)
        entry['sharpness'] = dict(
            entropy=measures.entropy(weights).tolist(),
            entropy_if_uniform=math.log(num_keys),
            negative=negative.mean(dim=-1).tolist(),
            **{f'top_{n}': measures.top_mass(weights, n).tolist() for n in (1, 9, 25)},
        )
    return entry


def _near(block: BlockCall, window: Window, rows: Tensor) -> Tensor:
    """Return (n, M) bool: True for keys within the 3x3 neighbourhood of the query on the grid of the keys."""

    def coordinates(tokens: Tensor, width: int) -> Tensor:
        return torch.stack((tokens // width, tokens % width), dim=-1)

    queries = coordinates(window.queries[rows], block.size[1]) // block.ratio  # its cell in the grid of the keys
    distances = (queries[:, None] - coordinates(window.keys, block.key_size[1])).abs()
    return (distances <= 1).all(dim=-1) & (window.keys >= 0)


def _sample(branch: list[Window], num_queries: int, generator=None) -> list[tuple[Window, Tensor]]:
    """Sample windows and, in each, indices of at most ``num_queries`` queries, without class tokens and padding.

    Windows of a single token are sampled only if there are no others.
    """
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


def _some_rows(block: BlockCall, heads: int, num_queries: int) -> Tensor:
    """Return attention weights (heads, n, M) of a sample of queries, the same for all heads and in every call."""
    keys = torch.arange(CLASS_TOKEN, math.prod(block.key_size), device=block.projected.device)
    limit = max(1, min(num_queries, NUMEL // (heads * len(keys))))
    queries = _some(torch.arange(math.prod(block.size)), limit, torch.Generator().manual_seed(0))
    return maps_of(block, queries.to(keys.device), keys).nan_to_num()


# --- numbers in nested dicts ------------------------------------------------------------------------------------------


def averaged(entries: list[tuple[dict, float]]) -> dict:
    """Return the weighted average of dicts, given as (dict, weight) pairs, over their common keys.

    Values are numbers, lists of equal length, or dicts of these.
    """
    weights = [weight for _, weight in entries]
    return _merged([entry for entry, _ in entries], lambda values: _mean(values, weights))


def _joined(branches: list[dict]) -> dict:
    """Join the measures of vertical and horizontal stripes: lists over heads are concatenated, other numbers
    averaged."""
    return _merged(branches, lambda values: sum(values, []) if isinstance(values[0], list) else _mean(values))


def _mean(values: list, weights: Optional[list] = None):
    if all(value == values[0] for value in values):  # names, and counts that stay whole
        return values[0]
    return np.average(values, axis=0, weights=weights).tolist()


def _merged(entries: list[dict], merge: Callable) -> dict:
    """Merge nested dicts over their common keys; ``merge`` gets the list of the values of a key."""
    found = {}
    for key in entries[0]:
        if all(key in entry for entry in entries):
            values = [entry[key] for entry in entries]
            found[key] = _merged(values, merge) if isinstance(values[0], dict) else merge(values)
    return found
