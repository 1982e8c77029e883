# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Plots of what was measured of the attentions of a model."""

import textwrap
from pathlib import Path
from typing import NamedTuple, Optional

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from .capture import BlockCall
from .inspecting import full_map, query_map
from .loading import Picture, token_at

MAX_HEADS = 8
SHOWN_BLOCKS = 12
TITLE_WIDTH = 7.5  # inches that titles need


def subplots(rows: int = 1, columns: int = 1, *, squeeze: bool = True, **kwargs):
    """As pyplot's, for files only: pyplot would keep the figure, and show it in a notebook or a window."""
    figure = Figure(**kwargs)
    return figure, figure.subplots(rows, columns, squeeze=squeeze)


class QueryMaps(NamedTuple):
    """Where one token of a block looks.

    Attributes:
        block (str): Its name.
        mixer (str): Its attention.
        maps (ndarray): (heads, h, w), NaN where it cannot look.
        token (tuple[int, int]): Row and column of the query in the map of the queries.
        size (tuple[int, int]): Height and width of the map of the queries.
        classes (ndarray): (heads,), weight of class tokens.
    """

    block: str
    mixer: str
    maps: np.ndarray
    token: tuple[int, int]
    size: tuple[int, int]
    classes: np.ndarray

    @property
    def mean(self) -> np.ndarray:
        """Mean of the heads, (h, w): a head that cannot look at a key gives it nothing; NaN where none can."""
        blind = np.isnan(self.maps)
        return np.where(blind.all(axis=0), np.nan, np.where(blind, 0, self.maps).mean(axis=0))


def collect_query(block: BlockCall, picture: Picture, x: int, y: int, local: bool = False) -> QueryMaps:
    """The maps of the token at column ``x`` and row ``y`` of the picture as shown."""
    token = token_at(x, y, picture.inputs, block.size)
    maps, classes = query_map(block, *token, local)
    return QueryMaps(block.name, block.mixer_name, maps.cpu().numpy(), token, block.size, classes.cpu().numpy())


def collect_full(block: BlockCall, side: int = 128) -> np.ndarray:
    return full_map(block, side).cpu().numpy()


def _over_image(map_: np.ndarray, picture: Picture) -> np.ndarray:
    """A map at the size of the picture as shown; its padding cut off."""
    height, width = picture.inputs.shape[-2:]
    rows = np.minimum((np.arange(height) * map_.shape[0] / _covered(height, map_.shape[0])).astype(int), len(map_) - 1)
    columns = np.minimum(
        (np.arange(width) * map_.shape[1] / _covered(width, map_.shape[1])).astype(int), map_.shape[1] - 1
    )
    return map_[rows][:, columns][: picture.shown.shape[0], : picture.shown.shape[1]]


def _covered(length: int, tokens: int) -> int:
    """Pixels that so many tokens cover: the last one may reach over the border."""
    strides = [2**i for i in range(8) if -(-length // 2**i) == tokens]
    return strides[0] * tokens if strides else length


def overlay(map_: np.ndarray, picture: Picture) -> tuple[np.ndarray, float]:
    """The picture in grey with weights in colour, (h, w, 3) float in [0, 1], and the largest magnitude: full colour.

    Red is positive, blue negative; where the query cannot look, the picture is dark.
    """
    weights = _over_image(map_, picture)
    peak = float(np.nanmax(np.abs(weights))) if np.isfinite(weights).any() else 0.0
    grey = picture.shown.mean(axis=-1, keepdims=True).repeat(3, axis=-1) / 255 * 0.6 + 0.35
    level = np.nan_to_num(weights / (peak or 1.0))
    colour = colormaps['RdBu_r'](level / 2 + 0.5)[..., :3]
    strength = 0.85 * np.abs(level)[..., None] ** 0.8
    out = grey * (1 - strength) + colour * strength
    out[~np.isfinite(weights)] *= 0.35
    return out.clip(0, 1), peak


def picked(number: int, most: int) -> list[int]:
    """Indices of at most ``most`` of ``number`` things, spread evenly."""
    return sorted({round(i) for i in np.linspace(0, number - 1, min(number, most))})


def plot_query(
    found: list[QueryMaps], picture: Picture, query: tuple, pixel: tuple, path: Path, local: bool = False
) -> None:
    """A row for each block, a column for each head.

    Args:
        found (list[QueryMaps]): One a block.
        picture (Picture): What they are drawn over.
        query (tuple[int, int]): Column and row of the token's mark in the picture as shown.
        pixel (tuple[int, int]): The same place in the picture as given, for the title.
        path (Path): Of the drawing.
        local (bool): Whether the convolutions of the values are in the weights, for the title.
    """
    found = [found[i] for i in picked(len(found), SHOWN_BLOCKS)]
    columns = 2 + max(min(len(maps.maps), MAX_HEADS) for maps in found)
    ratio = picture.shown.shape[0] / picture.shown.shape[1]
    figure, axes = subplots(
        len(found),
        columns,
        figsize=(max(1.7 * columns + 0.5, TITLE_WIDTH), (1.7 * ratio + 0.35) * len(found) + 0.9),
        squeeze=False,
        layout='constrained',
    )
    for row, maps in zip(axes, found):
        for axis in row:
            axis.set_xticks([])
            axis.set_yticks([])
            axis.set_visible(False)
        heads = picked(len(maps.maps), MAX_HEADS)
        row[0].imshow(picture.shown)
        row[0].set_visible(True)
        row[0].set_title('picture and query', fontsize=6.5, pad=2)
        row[0].plot(*query, marker='+', color='lime', markersize=7, markeredgewidth=1.6)
        for axis, head in zip(row[1:], [None, *heads]):
            weights = maps.mean if head is None else maps.maps[head]
            drawn, peak = overlay(weights, picture)
            axis.set_visible(True)
            axis.imshow(drawn, interpolation='nearest')
            axis.plot(*query, marker='+', color='lime', markersize=7, markeredgewidth=1.6)
            title = f'head {head}' if head is not None else 'mean of heads'
            axis.set_title(f'{title}, max {peak:.2g}', fontsize=6.5, pad=2)
        alike = 1 / max(np.isfinite(maps.maps[0]).sum(), 1)
        label = f'{maps.block}\n{maps.mixer}, {maps.size[0]}x{maps.size[1]}\nall keys alike: {alike:.2g}'
        row[0].set_ylabel(label, fontsize=7)
    title = 'with the convolutions of the values (mean over channels)' if local else 'attention weights'
    figure.suptitle(
        f'{picture.name}: where the token at pixel {pixel[0]:g}, {pixel[1]:g} [+] looks, {title}\n'
        'red: positive, blue: negative; full colour is the largest magnitude of the panel; dark: outside of its window',
        fontsize=8,
    )
    _save(figure, path)


def plot_full(found: list[tuple[str, str, np.ndarray]], name: str, path: Path) -> None:
    """The map of all queries by all keys, as in FLatten Fig. 3 and hMHSA: a row for each block, a column a head."""
    found = [found[i] for i in picked(len(found), SHOWN_BLOCKS)]
    columns = max(min(len(maps), MAX_HEADS) for _, _, maps in found)
    size = (max(1.5 * columns + 1.0, TITLE_WIDTH), 1.6 * len(found) + 0.9)
    figure, axes = subplots(len(found), columns, figsize=size, squeeze=False, layout='constrained')
    for row, (block, mixer, maps) in zip(axes, found):
        for axis in row:
            axis.set_xticks([])
            axis.set_yticks([])
            axis.set_visible(False)
        for axis, head in zip(row, picked(len(maps), MAX_HEADS)):
            peak = float(np.nanquantile(np.abs(maps[head]), 0.995)) or 1.0
            axis.set_visible(True)
            axis.imshow(maps[head], cmap='RdBu_r', vmin=-peak, vmax=peak, aspect='auto', interpolation='nearest')
            axis.set_facecolor('0.85')
            axis.set_title(f'head {head}, ±{peak:.2g}', fontsize=6.5, pad=2)
        row[0].set_ylabel(f'{block}\n{mixer}\nqueries ↓  keys →', fontsize=6.5)
    figure.suptitle(
        f'{name}: weights of every query (rows) on every key (columns), row by row of the map, evenly sampled\n'
        'red: positive, blue: negative, scale in each title; grey: outside of its window',
        fontsize=8,
    )
    _save(figure, path)


def _series(entries: list[dict], *keys: str) -> np.ndarray:
    """(blocks, 3): mean, least and largest of the heads; NaN where a block has no such measure."""
    rows = []
    for entry in entries:
        value = entry
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if value is None:
            rows.append((np.nan,) * 3)
        else:
            numbers = np.atleast_1d(np.asarray(value, float))
            rows.append((numbers.mean(), numbers.min(), numbers.max()))
    return np.array(rows, float).reshape(-1, 3)


def _draw(axis, entries, label, *keys, **style) -> bool:
    series = _series(entries, *keys)
    if not np.isfinite(series).any():
        return False
    x = np.arange(len(entries))
    (line,) = axis.plot(x, series[:, 0], marker='.', label=label, **style)
    axis.fill_between(x, series[:, 1], series[:, 2], alpha=0.15, color=line.get_color())
    return True


def _axis(title: str, label: str, entries: list[dict]):
    width = max(7.5, 0.42 * len(entries) + 2)
    figure, axis = subplots(figsize=(width, 5.2), layout='constrained')
    lines = [part for line in title.splitlines() for part in textwrap.wrap(line, int(12 * width))]
    axis.set_title('\n'.join(lines), fontsize=9)
    axis.set_ylabel(label, fontsize=9)
    short = [entry['block'].removeprefix('backbone.').removeprefix('stages.') for entry in entries]
    names = [f'{name} {entry["mixer"]}' for name, entry in zip(short, entries)]
    axis.set_xticks(range(len(names)), names, rotation=60, ha='right', fontsize=7)
    axis.set_xlabel('block and its attention, input to output', fontsize=9)
    axis.grid(alpha=0.3)
    return figure, axis


def _finish(figure, axis, path: Path) -> None:
    figure.legend(fontsize=7.5, ncols=2, loc='outside lower center')
    _save(figure, path)


def _save(figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


BAND = 'lines: mean over heads, bands: lowest and highest head'


def plot_measures(entries: list[dict], what, out: Path, title: str) -> list[Path]:
    """A plot for each measure asked for; those that no block has are left out."""
    made = []
    for name in what:
        draw = PLOTS.get(name)
        path = out / f'{name}.png'
        if draw is not None and draw(entries, path, title):
            made.append(path)
    return made


def _plot_rank(entries, path, title) -> bool:
    figure, axis = _axis(
        f'{title}: effective rank of state, output and weights\n{BAND}', 'effective rank / largest possible', entries
    )
    shown = False
    for key, label in (
        ('state', 'state of keys and values'),
        ('output', 'output of the attention'),
        ('projected', 'with convolution and gate, before the output projection'),
        ('weights', 'weights of the sampled queries'),
        ('weights_with_local', 'weights with the convolutions of the values'),
    ):
        scaled = [
            {'value': [value / rank['at_most'] for value in rank['effective']]}
            if (rank := (entry.get('rank') or {}).get(key))
            else {}
            for entry in entries
        ]
        shown |= _draw(axis, scaled, label, 'value')
    axis.set_ylim(0, 1.05)
    axis.axhline(1, color='k', linestyle='--', linewidth=0.8, label='full rank')
    if shown:
        _finish(figure, axis, path)
    return shown


def _plot_confusion(entries, path, title) -> bool:
    figure, axis = _axis(
        f'{title}: confused pairs of queries (weights closer than 1e-3 in L2)\n{BAND}', 'share of pairs, %', entries
    )
    scaled = [
        {'value': [100 * v for v in entry['confusion']['share']]} if entry.get('confusion') else {} for entry in entries
    ]
    shown = _draw(axis, scaled, 'confused pairs within a window', 'value')
    axis.set_ylim(bottom=0)  # also where there are none
    if shown:
        _finish(figure, axis, path)
    return shown


def _plot_locality(entries, path, title) -> bool:
    figure, axis = _axis(f'{title}: weight inside the 3x3 around the query\n{BAND}', 'weight', entries)
    shown = _draw(axis, entries, 'sum of weights, attention', 'locality', 'sum')
    _draw(axis, entries, 'share of magnitudes, attention', 'locality', 'share', linestyle=':')
    _draw(
        axis, entries, 'share of magnitudes, with the convolutions of the values', 'locality', 'share_with_local',
        linestyle='--',
    )  # fmt: skip
    _draw(
        axis, entries, 'all keys alike (9 / number of keys, fewer at the border)', 'locality', 'if_uniform', color='k'
    )
    if shown:
        _finish(figure, axis, path)
    return shown


def _plot_sharpness(entries, path, title) -> bool:
    figure, axis = _axis(f'{title}: how sharp the weights of a query are\n{BAND}', 'share', entries)
    scaled = [
        {'value': [v / entry['sharpness']['entropy_if_uniform'] for v in entry['sharpness']['entropy']]}
        if entry.get('sharpness', {}).get('entropy_if_uniform')  # none of a single key, which says nothing
        else {}
        for entry in entries
    ]
    shown = _draw(axis, scaled, 'entropy / log(number of keys); 1: all keys alike', 'value')
    for count in (1, 9, 25):
        _draw(axis, entries, f'mass of the {count} strongest key(s)', 'sharpness', f'top_{count}')
    _draw(axis, entries, 'negative share of the magnitude', 'sharpness', 'negative', linestyle='--')
    axis.set_ylim(-0.02, 1.05)
    if shown:
        _finish(figure, axis, path)
    return shown


def _plot_ccs(entries, path, title) -> bool:
    figure, axis = _axis(
        f'{title}: similarity of the heads of a block (blocks with one head are left out)', 'cosine similarity', entries
    )
    shown = _draw(axis, entries, "mean over pairs of heads' maps", 'ccs')
    if shown:
        _finish(figure, axis, path)
    return shown


PLOTS = dict(
    rank=_plot_rank, confusion=_plot_confusion, locality=_plot_locality, sharpness=_plot_sharpness, ccs=_plot_ccs
)


def plot_masking(accuracies: dict, path: Path, title: str, source: Optional[str] = 'InLine Tab. 2') -> None:
    """Bars: the accuracy as it is, without local weights, without as many others."""
    figure, axis = subplots(figsize=(6, 3.6), layout='constrained')
    names = list(accuracies)
    colours = ['0.4' if name == 'none' else 'tab:red' if 'x' in name else 'tab:blue' for name in names]
    bars = axis.bar(range(len(names)), list(accuracies.values()), color=colours)
    axis.bar_label(bars, fmt='%.1f', fontsize=8)
    axis.set_xticks(range(len(names)), names, rotation=30, ha='right', fontsize=8)
    axis.set_xlabel('keys masked for each query (red: around it, blue: random others)', fontsize=9)
    axis.set_ylabel('top-1 accuracy, %', fontsize=9)
    axis.set_title(f'{title}: accuracy with masked attention weights ({source})', fontsize=9)
    _save(figure, path)
