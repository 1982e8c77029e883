# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The measures of one block's attention, from what it saw of an image."""

import math
from typing import Optional

import torch
from torch import Tensor

from . import measures
from .capture import PADDING, BlockCall, MixerCall

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
        block (BlockCall): See :func:`~mmlinattn.analysis.capture.watched`.
        what (Sequence[str]): Which, of :data:`WHAT`.
        num_queries (int): Queries, at least 2, that are sampled for what needs their weights: never more than these
            rows of a head's map are built at a time. Of windowed attention they are drawn from at most
            :data:`MAX_WINDOWS` windows, two or more of each.
        generator (torch.Generator, optional): Of the sample.

    Returns:
        dict: What ``summary.json`` holds for the block. Lists have a number a head; with stripes, the heads of the
        vertical ones come first.
    """
    calls = block.calls
    entry = dict(
        block=block.name,
        mixer=block.mixer_name,
        heads=sum(branch[0].mixer.num_heads for branch in block.branches),
        map=list(block.size),
        key_map=list(block.key_size),
        windows=sum(len(call.queries) for call in calls),
        queries_a_window=max(call.queries.shape[1] for call in calls),
        keys_a_window=max(call.keys.shape[1] for call in calls),
    )
    branches = [_measure_branch(block, branch, what, num_queries, generator) for branch in block.branches]
    entry.update(_joined(branches))
    if 'rank' in what:
        features = block.features()
        size = min(features[0][0].shape[1:])
        features = [[measures.ranks(t) for t in pair] for pair in features]
        rank = entry.setdefault('rank', {})
        rank['output'] = {**_chained([pair[0] for pair in features]), 'at_most': size}
        rank['projected'] = {**_chained([pair[1] for pair in features]), 'at_most': size}
    if 'ccs' in what:
        weights = _same_rows(block, num_queries)
        value = math.nan if weights is None else measures.cross_head_similarity(weights)
        entry['ccs'] = None if math.isnan(value) else value
    return entry


def _measure_branch(block: BlockCall, branch: list[MixerCall], what, num_queries, generator) -> dict:
    samples = sample(branch, num_queries, generator)
    found: list[tuple[dict, float]] = []  # measures of a window and how many queries speak for it
    for call, window, rows in samples:
        result: dict = {}
        weights = call.weights(window, rows)
        result['forward_error'] = call.error(window, rows, weights)
        both = call.weights(window, rows, local=True) if call.local_kernels() else None
        if 'rank' in what:
            result['rank'] = _weight_ranks(call, window, weights, both)
        if 'confusion' in what and len(rows) > 1:
            distances = measures.pair_distances(weights)
            near = measures.confusion(weights)
            tokens = int((call.queries[window] >= 0).sum())
            result['confusion'] = dict(
                share=near.tolist(),
                pairs_a_window=(near * tokens * (tokens - 1) / 2).tolist(),
                median_distance=distances.median(dim=-1).values.tolist(),
                mean_norm=weights.norm(dim=-1).mean(dim=-1).tolist(),
            )
        num_keys = int((call.keys[window] != PADDING).sum())
        if 'locality' in what and block.ratio:
            near = measures.neighbours(*coordinates(block, call, window, rows))
            uniform = float(near.sum(dim=-1).double().mean()) / num_keys  # fewer than 9 neighbours at the border
            result['locality'] = dict(chance=9 / num_keys, if_uniform=uniform)
            for name, map_ in (('', weights), ('_with_local', both)):
                if map_ is not None:
                    total, share = measures.inside(map_, near)
                    result['locality'].update({f'sum{name}': total.tolist(), f'share{name}': share.tolist()})
        if 'sharpness' in what:
            result['sharpness'] = dict(
                entropy=measures.entropy(weights).tolist(),
                entropy_if_uniform=math.log(num_keys),
                negative=((weights.clamp(max=0).abs().sum(-1)) / weights.abs().sum(-1).clamp(min=1e-30))
                .mean(-1)
                .tolist(),
                **{f'top_{n}': measures.top_mass(weights, n).tolist() for n in (1, 9, 25)},
            )
        found.append((result, len(rows)))
    # a window of one token has no pairs, and takes none from the others
    confused = [(entry.pop('confusion'), number) for entry, number in found if 'confusion' in entry]
    result = averaged(found)
    if confused:
        windows = sum(len(call.queries) for call in branch)
        each = zip(*(entry.pop('pairs_a_window') for entry, _ in confused))
        result['confusion'] = averaged(confused)
        result['confusion']['pairs_an_image'] = [windows * sum(pairs) / len(samples) for pairs in each]
    return {'sampled_queries': sum(len(rows) for _, _, rows in samples), **result}


def _weight_ranks(call: MixerCall, window: int, weights: Tensor, both: Optional[Tensor]) -> dict:
    rank = dict(weights={**measures.ranks(weights), 'at_most': min(weights.shape[1:])})
    if both is not None:
        rank['weights_with_local'] = {**measures.ranks(both), 'at_most': min(both.shape[1:])}
    state = call.state(window)
    if state is not None:
        rank['state'] = {**measures.ranks(state), 'at_most': min(state.shape[1:])}
    return rank


def sample(branch: list[MixerCall], num_queries: int, generator=None) -> list[tuple[MixerCall, int, Tensor]]:
    """Windows and rows of queries to look at, spread over the image; no class tokens, no padding."""
    most = NUMEL // (branch[0].mixer.num_heads * max(call.keys.shape[1] for call in branch))
    num_queries = max(2, min(num_queries, most))  # an attention may have as many heads as channels
    windows = [(call, i) for call in branch for i in range(len(call.queries))]
    shown = min(MAX_WINDOWS, num_queries // 2)  # two of a window make a pair
    if len(windows) > shown:
        order = torch.randperm(len(windows), generator=generator)[:shown].sort().values
        windows = [windows[i] for i in order]
    each = num_queries // len(windows)
    chosen = []
    for call, window in windows:
        rows = (call.queries[window] >= 0).nonzero()[:, 0]
        if len(rows) > each:
            pick = torch.randperm(len(rows), generator=generator)[:each].sort().values
            rows = rows[pick.to(rows.device)]
        if len(rows):
            chosen.append((call, window, rows))
    return chosen


def coordinates(block: BlockCall, call: MixerCall, window: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns, in the map of the keys, of some queries (n, 2) and of all keys (M, 2) of a window."""
    keys = call.keys[window]
    where = torch.stack((keys // block.key_size[1], keys % block.key_size[1]), dim=-1)
    queries = call.queries[window, rows]
    at = torch.stack((queries // block.size[1], queries % block.size[1]), dim=-1)
    at = at // block.ratio  # the cell of the reduced map that a query lies in
    return at, where.where((keys >= 0)[:, None], torch.full_like(where, _FAR))


def query_map(block: BlockCall, row: int, column: int, local: bool = False) -> tuple[Tensor, Tensor]:
    """Where the token at ``row``, ``column`` of the block's map looks.

    Returns:
        tuple[Tensor, Tensor]: The weights over the map of the keys, (heads, h, w), NaN where it cannot look (outside of
        its window), and the weight of the class tokens, (heads,).

    Raises:
        ValueError: For a token outside of the map, or keys that lie on no map.
    """
    if not block.ratio:
        raise ValueError(f'the keys of {block.name} are averages over the sequence of tokens and lie on no map')
    if not (0 <= row < block.size[0] and 0 <= column < block.size[1]):
        raise ValueError(f'row={row}, column={column} is outside of the map of {block.name}, {block.size}')
    token, height, width = row * block.size[1] + column, *block.key_size
    maps, classes = [], []
    for branch in block.branches:
        for call in branch:
            found = (call.queries == token).nonzero()
            if len(found):
                break
        window, index = found[0].tolist()
        weights = call.weights(window, torch.tensor([index], device=call.queries.device), local)[:, 0]
        keys = call.keys[window]
        out = weights.new_full((len(weights), height * width), math.nan)
        out[:, keys[keys >= 0]] = weights[:, keys >= 0]
        maps.append(out.unflatten(1, (height, width)))
        classes.append(weights[:, keys < 0].sum(dim=1))
    return torch.cat(maps), torch.cat(classes)


def full_map(block: BlockCall, side: int = 128, local: bool = False) -> Tensor:
    """The whole N x M map, or every so-many-th of its rows and columns, (heads, n, m) with n, m <= ``side``; NaN where
    a query cannot look."""
    axes = []
    for height, width in (block.size, block.key_size):
        step = -(-height * width // side)
        axes.append(torch.arange(0, height * width, step, device=block.x.device))
    queries, keys = axes
    maps = []
    for branch in block.branches:
        out = None
        for call in branch:
            for window in range(len(call.queries)):
                rows = torch.isin(call.queries[window], queries).nonzero()[:, 0]
                columns = torch.isin(call.keys[window], keys).nonzero()[:, 0]
                if not len(rows) or not len(columns):
                    continue
                size = max(1, NUMEL // (call.mixer.num_heads * call.keys.shape[1]))
                weights = torch.cat([call.weights(window, r, local)[:, :, columns] for r in rows.split(size)], dim=1)
                if out is None:
                    out = weights.new_full((len(weights), len(queries), len(keys)), math.nan)
                at = torch.searchsorted(queries, call.queries[window, rows])
                to = torch.searchsorted(keys, call.keys[window, columns])
                out[:, at[:, None], to] = weights
        maps.append(out)
    return torch.cat(maps)


def _same_rows(block: BlockCall, num_queries: int) -> Optional[Tensor]:
    """Weights (heads, queries of all, keys of the map) of queries that all heads share; None for a single head."""
    if sum(branch[0].mixer.num_heads for branch in block.branches) < 2:
        return None
    if len(block.branches) == 1:
        rows = []
        for call, window, index in sample(block.branches[0], num_queries, torch.Generator().manual_seed(0)):
            weights = call.weights(window, index)
            rows.append(weights.flatten(1))
        return torch.cat(rows, dim=1)
    tokens = block.size[0] * block.size[1]
    picked = torch.arange(0, tokens, max(1, tokens // 64, -(-tokens // num_queries)))
    maps = [query_map(block, int(t) // block.size[1], int(t) % block.size[1])[0].nan_to_num() for t in picked]
    return torch.stack(maps, dim=1).flatten(1)


# --- numbers in nested dicts ------------------------------------------------------------------------------------------


def averaged(entries: list[tuple[dict, float]]) -> dict:
    """Mean of dicts of numbers, lists of as many numbers each and dicts of these, each with its weight; of keys that
    all have.

    Raises:
        ValueError: Lists of one key have different lengths.
    """
    return _mean([entry for entry, _ in entries], [weight for _, weight in entries]) if entries else {}


def _mean(values: list, weights: list):
    first = values[0]
    if isinstance(first, dict):
        return {key: _mean([v[key] for v in values], weights) for key in first if all(key in v for v in values)}
    if isinstance(first, list):
        if any(len(value) != len(first) for value in values):
            raise ValueError('one list is shorter than another: they have no mean')
        return [_mean(list(group), weights) for group in zip(*values)]
    if not isinstance(first, (int, float)) or isinstance(first, bool):
        return first if all(value == first for value in values) else values
    if all(value == first for value in values):
        return first
    return sum(value * weight for value, weight in zip(values, weights)) / sum(weights)


def _chained(parts: list[dict]) -> dict:
    """Lists of the branches one after the other."""
    return {key: [value for part in parts for value in part[key]] for key in parts[0]}


def _joined(branches: list[dict]) -> dict:
    """Measures of the two directions of stripes as one: heads one after the other, other numbers averaged."""
    if len(branches) == 1:
        return branches[0]
    result = {}
    for key, first in branches[0].items():
        if not all(key in branch for branch in branches):
            continue
        values = [branch[key] for branch in branches]
        if isinstance(first, dict):
            result[key] = _joined(values)
        elif isinstance(first, list):
            result[key] = [value for part in values for value in part]
        else:
            result[key] = sum(values) if key == 'sampled_queries' else _mean(values, [1] * len(values))
    return result
