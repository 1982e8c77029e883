# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The measures of one block's attention, from what it saw of an image."""

import math
from typing import Callable, Optional

import numpy as np
import torch
from torch import Tensor

from ...ops.dispatch import accumulation_dtype
from . import measures
from .capture import CLASS_TOKEN, PADDING, BlockCall, MixerCall

WHAT = ('rank', 'confusion', 'locality', 'sharpness', 'ccs', 'maps')
NUM_QUERIES = 196  # tokens of a DeiT at 224, which the papers measure
MAX_WINDOWS = 8
NUMEL = 2**25  # weights built at a time: 128 MiB
_FAR = -(10**6)


def measure_block(
    block: BlockCall, what=WHAT[:-1], num_queries: int = NUM_QUERIES, generator: Optional[torch.Generator] = None
) -> dict:
    """Every measure of a block, head by head.

    Args:
        block (BlockCall): See :func:`~mmlinattn.tooling.analysis.capture.watched`.
        what (Sequence[str]): Which, of :data:`WHAT`.
        num_queries (int): Queries, at least 2, that are sampled for what needs their weights: never more than these
            rows of a head's map are built at a time. Of windowed attention they are drawn from at most
            :data:`MAX_WINDOWS` windows, two or more of each.
        generator (torch.Generator, optional): Of the sample.

    Returns:
        dict: What ``summary.json`` holds for the block. Lists have a number a head; with stripes, the heads of the
        vertical ones come first.
    """
    calls, branches = block.calls, block.branches
    samples = [sample(branch, num_queries, generator) for branch in branches]
    heads = sum(branch[0].mixer.num_heads for branch in branches)
    entry: dict = dict(
        block=block.name,
        mixer=block.mixer_name,
        heads=heads,
        map=list(block.size),
        key_map=list(block.key_size),
        windows=sum(len(call.queries) for call in calls),
        queries_a_window=max(call.queries.shape[1] for call in calls),
        keys_a_window=max(call.keys.shape[1] for call in calls),
        sampled_queries=sum(len(rows) for found in samples for _, _, rows in found),
    )
    entry.update(_joined([_measure_windows(block, found, what) for found in samples]))
    if 'rank' in what:
        for name, features in zip(('output', 'projected'), zip(*block.features())):
            entry['rank'][name] = _joined([_ranks(t) for t in features])
    if 'ccs' in what:
        entry['ccs'] = measures.cross_head_similarity(_some_rows(block, heads, num_queries)) if heads > 1 else None
    return entry


def _measure_windows(block: BlockCall, samples: list, what) -> dict:
    found = []  # measures of a window and how many queries speak for it
    for call, window, rows in samples:
        weights = call.weights(window, rows)
        both = call.weights(window, rows, local=True) if call.local_kernels() else None
        entry: dict = dict(forward_error=call.error(window, rows, weights))
        if 'rank' in what:
            matrices = dict(weights=weights, weights_with_local=both, state=call.state(window))
            entry['rank'] = {name: _ranks(matrix) for name, matrix in matrices.items() if matrix is not None}
        if 'confusion' in what and len(rows) > 1:
            entry['confusion'] = _confusion(weights)
        num_keys = int((call.keys[window] != PADDING).sum())
        if 'locality' in what and block.ratio:
            near = measures.neighbours(*coordinates(block, call, window, rows))
            entry['locality'] = _locality(weights, both, near, num_keys)
        if 'sharpness' in what:
            entry['sharpness'] = _sharpness(weights, num_keys)
        found.append((entry, float(len(rows))))
    return averaged(found)


def _ranks(matrix: Tensor) -> dict:
    return {**measures.ranks(matrix), 'at_most': min(matrix.shape[1:])}


def _confusion(weights: Tensor) -> dict:
    return dict(
        share=measures.confusion(weights).tolist(),
        median_distance=measures.pair_distances(weights).median(dim=-1).values.tolist(),
        mean_norm=weights.norm(dim=-1).mean(dim=-1).tolist(),
    )


def _locality(weights: Tensor, both: Optional[Tensor], near: Tensor, num_keys: int) -> dict:
    uniform = float(near.sum(dim=-1).double().mean()) / num_keys  # fewer than 9 neighbours at the border
    found: dict = dict(chance=9 / num_keys, if_uniform=uniform)
    for name, map_ in (('', weights), ('_with_local', both)):
        if map_ is not None:
            total, share = measures.inside(map_, near)
            found.update({f'sum{name}': total.tolist(), f'share{name}': share.tolist()})
    return found


def _sharpness(weights: Tensor, num_keys: int) -> dict:
    negative = (measures.magnitudes(weights) * (weights < 0)).sum(dim=-1)
    return dict(
        entropy=measures.entropy(weights).tolist(),
        entropy_if_uniform=math.log(num_keys),
        negative=negative.mean(dim=-1).tolist(),
        **{f'top_{n}': measures.top_mass(weights, n).tolist() for n in (1, 9, 25)},
    )


def sample(branch: list[MixerCall], num_queries: int, generator=None) -> list[tuple[MixerCall, int, Tensor]]:
    """Windows and rows of queries to look at, spread over the image; no class tokens, no padding, and windows of one
    token, which has no pair, only where there are no others."""
    most = NUMEL // (branch[0].mixer.num_heads * max(call.keys.shape[1] for call in branch))
    num_queries = max(2, min(num_queries, most))  # an attention may have as many heads as channels
    windows = [(call, i, (call.queries[i] >= 0).nonzero()[:, 0]) for call in branch for i in range(len(call.queries))]
    windows = [window for window in windows if len(window[2]) > 1] or windows
    windows = _some(windows, min(MAX_WINDOWS, num_queries // 2), generator)  # two of a window make a pair
    return [(call, i, _some(rows, num_queries // len(windows), generator)) for call, i, rows in windows]


def _some(things, most: int, generator):
    """At most so many of a list or tensor, in their order."""
    if len(things) <= most:
        return things
    picked = torch.randperm(len(things), generator=generator)[:most].sort().values
    return things[picked.to(things.device)] if isinstance(things, Tensor) else [things[i] for i in picked]


def coordinates(block: BlockCall, call: MixerCall, window: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns, in the map of the keys, of some queries (n, 2) and of all keys (M, 2) of a window."""
    keys = call.keys[window]
    where = torch.stack((keys // block.key_size[1], keys % block.key_size[1]), dim=-1)
    queries = call.queries[window, rows]
    at = torch.stack((queries // block.size[1], queries % block.size[1]), dim=-1)
    at = at // block.ratio  # the cell of the reduced map that a query lies in
    return at, where.where((keys >= 0)[:, None], torch.full_like(where, _FAR))


def maps_of(block: BlockCall, queries: Tensor, keys: Tensor, local: bool = False) -> Tensor:
    """Weights of some tokens of the block's map on some keys, both as ascending places as in
    :class:`~mmlinattn.tooling.analysis.capture.MixerCall`: (heads, n, m), NaN where a query cannot look."""
    maps = []
    for branch in block.branches:
        heads, wide = branch[0].mixer.num_heads, accumulation_dtype(branch[0].out)
        out = torch.full((heads, len(queries), len(keys)), math.nan, dtype=wide, device=queries.device)
        for call in branch:
            asked = torch.isin(call.queries, queries)
            for window in asked.any(dim=1).nonzero()[:, 0].tolist():
                columns = torch.isin(call.keys[window], keys).nonzero()[:, 0]
                to = torch.searchsorted(keys, call.keys[window, columns])
                for rows in asked[window].nonzero()[:, 0].split(max(1, NUMEL // (heads * call.keys.shape[1]))):
                    at = torch.searchsorted(queries, call.queries[window, rows])
                    out[:, at[:, None], to] = call.weights(window, rows, local)[:, :, columns]
        maps.append(out)
    return torch.cat(maps)


def query_map(block: BlockCall, row: int, column: int, local: bool = False) -> tuple[Tensor, Tensor]:
    """The attention of the token at ``row``, ``column`` of the block's map.

    Returns:
        tuple[Tensor, Tensor]: The weights over the map of the keys, (heads, h, w), NaN where it cannot look (outside of
        its window), and the weight of the class token, (heads,).

    Raises:
        ValueError: For a token outside of the map, or keys that lie on no map.
    """
    if not block.ratio:
        raise ValueError(f'the keys of {block.name} are averages over the sequence of tokens and lie on no map')
    if not (0 <= row < block.size[0] and 0 <= column < block.size[1]):
        raise ValueError(f'row={row}, column={column} is outside of the map of {block.name}, {block.size}')
    device = block.projected.device
    query = torch.tensor([row * block.size[1] + column], device=device)
    weights = maps_of(block, query, torch.arange(CLASS_TOKEN, math.prod(block.key_size), device=device), local)[:, 0]
    return weights[:, 1:].unflatten(1, block.key_size), weights[:, 0].nan_to_num()


def full_map(block: BlockCall, side: int = 128, local: bool = False) -> Tensor:
    """The whole N x M map, or every so-many-th of its rows and columns, (heads, n, m) with n, m <= ``side``; NaN where
    a query cannot look."""
    sizes = math.prod(block.size), math.prod(block.key_size)
    queries, keys = (torch.arange(0, size, -(-size // side), device=block.projected.device) for size in sizes)
    return maps_of(block, queries, keys, local)


def _some_rows(block: BlockCall, heads: int, num_queries: int) -> Tensor:
    """Weights (heads, n, M) of queries that all heads share, the same ones on every call."""
    keys = torch.arange(CLASS_TOKEN, math.prod(block.key_size), device=block.projected.device)
    most = max(1, min(num_queries, NUMEL // (heads * len(keys))))
    queries = _some(torch.arange(math.prod(block.size)), most, torch.Generator().manual_seed(0))
    return maps_of(block, queries.to(keys.device), keys).nan_to_num()


# --- numbers in nested dicts ------------------------------------------------------------------------------------------


def averaged(entries: list[tuple[dict, float]]) -> dict:
    """Mean of dicts of numbers, lists of as many numbers each and dicts of these, each with its weight; of keys that
    all have."""
    weights = [weight for _, weight in entries]
    return _merged([entry for entry, _ in entries], lambda values: _mean(values, weights))


def _joined(branches: list[dict]) -> dict:
    """Measures of the two directions of stripes as one: heads one after the other, other numbers averaged."""

    def join(values: list):
        return [number for part in values for number in part] if isinstance(values[0], list) else _mean(values)

    return _merged(branches, join)


def _mean(values: list, weights: Optional[list] = None):
    if all(value == values[0] for value in values):  # names, and counts that stay whole
        return values[0]
    return np.average(values, axis=0, weights=weights).tolist()


def _merged(entries: list[dict], merge: Callable) -> dict:
    """The common keys of several dicts, their values merged; dicts in them likewise."""
    found = {}
    for key in entries[0]:
        if all(key in entry for entry in entries):
            values = [entry[key] for entry in entries]
            found[key] = _merged(values, merge) if isinstance(values[0], dict) else merge(values)
    return found
