# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The measures of one block's attention, from what it saw of an image."""

import math
from typing import Callable, Optional

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
    entry: dict = dict(
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
        pairs = ([_ranks(t) for t in pair] for pair in block.features())
        output, projected = (_joined(list(parts)) for parts in zip(*pairs))
        entry.setdefault('rank', {}).update(output=output, projected=projected)
    if 'ccs' in what:
        weights = _same_rows(block, num_queries)
        value = math.nan if weights is None else measures.cross_head_similarity(weights)
        entry['ccs'] = None if math.isnan(value) else value
    return entry


def _measure_branch(block: BlockCall, branch: list[MixerCall], what, num_queries, generator) -> dict:
    samples = sample(branch, num_queries, generator)
    found: list[tuple[dict, float]] = []  # measures of a window and how many queries speak for it
    confused: list[tuple[dict, float]] = []  # a window of one token has no pairs, and takes none from the others
    for call, window, rows in samples:
        weights = call.weights(window, rows)
        both = call.weights(window, rows, local=True) if call.local_kernels() else None
        entry: dict = dict(forward_error=call.error(window, rows, weights))
        if 'rank' in what:
            state = call.state(window)
            matrices = dict(weights=weights, weights_with_local=both, state=state)
            entry['rank'] = {name: _ranks(matrix) for name, matrix in matrices.items() if matrix is not None}
        if 'confusion' in what and len(rows) > 1:
            confused.append((_confusion(weights, int((call.queries[window] >= 0).sum())), len(rows)))
        num_keys = int((call.keys[window] != PADDING).sum())
        if 'locality' in what and block.ratio:
            near = measures.neighbours(*coordinates(block, call, window, rows))
            entry['locality'] = _locality(weights, both, near, num_keys)
        if 'sharpness' in what:
            entry['sharpness'] = _sharpness(weights, num_keys)
        found.append((entry, len(rows)))
    result = averaged(found)
    if confused:
        result['confusion'] = averaged(confused)
        pairs = [entry['pairs_a_window'] for entry, _ in confused]
        windows = sum(len(call.queries) for call in branch)
        del result['confusion']['pairs_a_window']
        result['confusion']['pairs_an_image'] = [windows * sum(head) / len(samples) for head in zip(*pairs)]
    return {'sampled_queries': sum(len(rows) for _, _, rows in samples), **result}


def _ranks(matrix: Tensor) -> dict:
    return {**measures.ranks(matrix), 'at_most': min(matrix.shape[1:])}


def _confusion(weights: Tensor, tokens: int) -> dict:
    share = measures.confusion(weights)
    return dict(
        share=share.tolist(),
        pairs_a_window=(share * tokens * (tokens - 1) / 2).tolist(),
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
    negative = weights.clamp(max=0).abs().sum(-1) / weights.abs().sum(-1).clamp(min=1e-30)
    return dict(
        entropy=measures.entropy(weights).tolist(),
        entropy_if_uniform=math.log(num_keys),
        negative=negative.mean(-1).tolist(),
        **{f'top_{n}': measures.top_mass(weights, n).tolist() for n in (1, 9, 25)},
    )


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
        axes.append(torch.arange(0, height * width, step, device=block.projected.device))
    queries, keys = axes
    maps = []
    for branch in block.branches:
        heads, wide = branch[0].mixer.num_heads, torch.promote_types(branch[0].out.dtype, torch.float32)
        out = torch.full((heads, len(queries), len(keys)), math.nan, dtype=wide, device=queries.device)
        for call in branch:
            for window in range(len(call.queries)):
                rows = torch.isin(call.queries[window], queries).nonzero()[:, 0]
                columns = torch.isin(call.keys[window], keys).nonzero()[:, 0]
                if not len(rows) or not len(columns):
                    continue
                size = max(1, NUMEL // (call.mixer.num_heads * call.keys.shape[1]))
                weights = torch.cat([call.weights(window, r, local)[:, :, columns] for r in rows.split(size)], dim=1)
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
    weights = [weight for _, weight in entries]

    def mean(values: list):
        if all(value == values[0] for value in values):
            return values[0]
        if isinstance(values[0], list):
            if len({len(value) for value in values}) > 1:
                raise ValueError('one list is shorter than another: they have no mean')
            return [mean(list(numbers)) for numbers in zip(*values)]
        if not isinstance(values[0], (int, float)):
            return values
        return sum(value * weight for value, weight in zip(values, weights)) / sum(weights)

    return _merged([entry for entry, _ in entries], mean) if entries else {}


def _joined(branches: list[dict]) -> dict:
    """Measures of the two directions of stripes as one: heads one after the other, other numbers averaged, queries
    added up."""

    def join(values: list):
        if isinstance(values[0], list):
            return [number for part in values for number in part]
        return values[0] if all(value == values[0] for value in values) else sum(values) / len(values)

    joined = _merged(branches, join)
    if 'sampled_queries' in joined:
        joined['sampled_queries'] = sum(branch['sampled_queries'] for branch in branches)
    return joined


def _merged(entries: list[dict], merge: Callable) -> dict:
    """What several dicts have in common, their values under each key merged; dicts in them likewise."""
    found = {}
    for key in entries[0]:
        if all(key in entry for entry in entries):
            values = [entry[key] for entry in entries]
            found[key] = _merged(values, merge) if isinstance(values[0], dict) else merge(values)
    return found
