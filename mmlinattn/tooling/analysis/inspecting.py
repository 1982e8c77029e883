# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The measures of one block's attention, from what it saw of an image."""

import math
from typing import Callable, Optional

import numpy as np
import torch
from torch import Tensor

from ...ops.dtypes import accumulation_dtype
from . import measures
from .capture import CLASS_TOKEN, PADDING, BlockCall, Window

WHAT = ('rank', 'confusion', 'locality', 'sharpness', 'ccs', 'maps')
NUM_QUERIES = 196  # tokens of a DeiT at 224, which the papers measure
MAX_WINDOWS = 8
NUMEL = 2**25  # weights built at a time: 128 MiB


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
        sampled_queries=sum(len(rows) for found in samples for _, rows in found),
    )
    by_branch = [
        averaged([(_measure_window(block, window, rows, what), float(len(rows))) for window, rows in found])
        for found in samples
    ]
    entry.update(_joined(by_branch))
    if 'rank' in what:
        for name, features in zip(('output', 'projected'), zip(*block.features())):
            entry['rank'][name] = _joined([measures.ranks(t) for t in features])
    if 'ccs' in what:
        entry['ccs'] = measures.cross_head_similarity(_some_rows(block, heads, num_queries)) if heads > 1 else None
    return entry


def _measure_window(block: BlockCall, window: Window, rows: Tensor, what) -> dict:
    weights = window.weights(rows)
    both = window.weights(rows, local=True) if window.local_kernels() else None
    entry: dict = dict(forward_error=window.error(rows, weights))
    if 'rank' in what:
        matrices = dict(weights=weights, weights_with_local=both, state=window.state())
        entry['rank'] = {name: measures.ranks(matrix) for name, matrix in matrices.items() if matrix is not None}
    if 'confusion' in what and len(rows) > 1:
        distances = measures.pair_distances(weights)
        entry['confusion'] = dict(
            share=(distances < measures.CONFUSION_DISTANCE).double().mean(dim=-1).tolist(),
            median_distance=distances.median(dim=-1).values.tolist(),
            mean_norm=weights.norm(dim=-1).mean(dim=-1).tolist(),
        )
    num_keys = int((window.keys != PADDING).sum())
    if 'locality' in what and block.ratio:
        near = _near(block, window, rows)
        uniform = float(near.sum(dim=-1).double().mean()) / num_keys  # fewer than 9 neighbours at the border
        entry['locality'] = dict(chance=9 / num_keys, if_uniform=uniform)
        for name, map_ in (('', weights), ('_with_local', both)):
            if map_ is not None:
                total, share = measures.inside(map_, near)
                entry['locality'].update({f'sum{name}': total.tolist(), f'share{name}': share.tolist()})
    if 'sharpness' in what:
        negative = (measures.magnitudes(weights) * (weights < 0)).sum(dim=-1)
        entry['sharpness'] = dict(
            entropy=measures.entropy(weights).tolist(),
            entropy_if_uniform=math.log(num_keys),
            negative=negative.mean(dim=-1).tolist(),
            **{f'top_{n}': measures.top_mass(weights, n).tolist() for n in (1, 9, 25)},
        )
    return entry


def _near(block: BlockCall, window: Window, rows: Tensor) -> Tensor:
    """Which keys of a window lie in the 3x3 around which of its queries, in the map of the keys: (n, M) bool."""

    def places(tokens: Tensor, width: int) -> Tensor:
        return torch.stack((tokens // width, tokens % width), dim=-1)

    queries = places(window.queries[rows], block.size[1]) // block.ratio  # the cell of the reduced map
    distances = (queries[:, None] - places(window.keys, block.key_size[1])).abs()
    return (distances <= 1).all(dim=-1) & (window.keys >= 0)


def _sample(branch: list[Window], num_queries: int, generator=None) -> list[tuple[Window, Tensor]]:
    """Windows and rows of queries to look at, spread over the image; no class tokens, no padding, and windows of one
    token, which has no pair, only where there are no others."""
    most = NUMEL // (branch[0].mixer.num_heads * max(len(window.keys) for window in branch))
    num_queries = max(2, min(num_queries, most))  # an attention may have as many heads as channels
    windows = [(window, (window.queries >= 0).nonzero()[:, 0]) for window in branch]
    windows = [(window, rows) for window, rows in windows if len(rows) > 1] or windows
    windows = _some(windows, min(MAX_WINDOWS, num_queries // 2), generator)  # two of a window make a pair
    return [(window, _some(rows, num_queries // len(windows), generator)) for window, rows in windows]


def _some(things, most: int, generator):
    """At most so many of a list or tensor, in their order."""
    if len(things) <= most:
        return things
    picked = torch.randperm(len(things), generator=generator)[:most].sort().values
    return things[picked.to(things.device)] if isinstance(things, Tensor) else [things[i] for i in picked]


# --- maps -------------------------------------------------------------------------------------------------------------


def maps_of(block: BlockCall, queries: Tensor, keys: Tensor, local: bool = False) -> Tensor:
    """Weights of some tokens of the block's map on some keys, both as ascending places as in
    :class:`~mmlinattn.tooling.analysis.capture.Window`: (heads, n, m), NaN where a query cannot look."""
    maps = []
    for branch in block.branches:
        heads, wide = branch[0].mixer.num_heads, accumulation_dtype(branch[0].out)
        out = torch.full((heads, len(queries), len(keys)), math.nan, dtype=wide, device=queries.device)
        for window in branch:
            asked = torch.isin(window.queries, queries).nonzero()[:, 0]
            if not len(asked):
                continue
            columns = torch.isin(window.keys, keys).nonzero()[:, 0]
            to = torch.searchsorted(keys, window.keys[columns])
            for rows in asked.split(max(1, NUMEL // (heads * len(window.keys)))):
                at = torch.searchsorted(queries, window.queries[rows])
                weights = window.weights(rows, local)[:, :, columns]
                summed = weights.new_zeros(*weights.shape[:2], len(keys)).index_add_(2, to, weights)  # class tokens
                out[:, at[:, None], to] = summed[:, :, to]
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


def full_map(block: BlockCall, side: int = 128) -> Tensor:
    """The whole N x M map, or every so-many-th of its rows and columns, (heads, n, m) with n, m <= ``side``; NaN where
    a query cannot look."""
    sizes = math.prod(block.size), math.prod(block.key_size)
    queries, keys = (torch.arange(0, size, -(-size // side), device=block.projected.device) for size in sizes)
    return maps_of(block, queries, keys)


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
    return _merged(branches, lambda values: sum(values, []) if isinstance(values[0], list) else _mean(values))


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
