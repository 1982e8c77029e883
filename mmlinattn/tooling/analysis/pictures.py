# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Plot attention maps and measures of a model."""

from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure  # pyplot would keep figures, and show them in a notebook

from .capture import BlockCall
from .inspecting import query_map
from .loading import Picture, pixels_a_token, token_at

MAX_HEADS = 8
SHOWN_BLOCKS = 12
TITLE_WIDTH = 7.5  # inches that titles need


class QueryMaps(NamedTuple):
    """Attention maps of one query token in one block.

    Attributes:
        block: Name of the block within the model.
        mixer: Name of the attention.
        maps: (heads, h, w) over the grid of the keys, NaN outside the token's window.
        size: Height and width of the feature map of the queries.
    """

    block: str
    mixer: str
    maps: np.ndarray
    size: tuple[int, int]

    @property
    def mean(self) -> np.ndarray:
        """Mean over heads, (h, w). A head counts as 0 for keys outside its window; NaN outside all windows."""
        is_outside = np.isnan(self.maps)
        return np.where(is_outside.all(axis=0), np.nan, np.where(is_outside, 0, self.maps).mean(axis=0))


def collect_query(block: BlockCall, picture: Picture, x: int, y: int, local: bool = False) -> QueryMaps:
    """Return the attention maps of the token at column ``x`` and row ``y`` in pixels of the preprocessed image. The
    flag ``local`` includes the convolutions of the values."""
    maps, _ = query_map(block, *token_at(x, y, picture.inputs, block.size), local)
    return QueryMaps(block.name, block.mixer_name, maps.cpu().numpy(), block.size)


def overlay(map_: np.ndarray, picture: Picture) -> tuple[np.ndarray, float]:
    """Draw attention weights ``map_`` (h, w) over a grey image: positive weights red, negative blue, pixels outside the
    window dark. Return the image (h, w, 3) RGB in [0, 1], and the largest magnitude, drawn in full colour."""
    weights = map_
    for axis, (length, shown) in enumerate(zip(picture.inputs.shape[-2:], picture.shown.shape)):
        at = np.arange(shown) / pixels_a_token(length, map_.shape[axis])
        weights = weights.take(np.minimum(at.astype(int), map_.shape[axis] - 1), axis)
    peak = float(np.nanmax(np.abs(weights))) if np.isfinite(weights).any() else 0.0
    grey = picture.shown.mean(axis=-1, keepdims=True).repeat(3, axis=-1) / 255 * 0.6 + 0.35
    level = np.nan_to_num(weights / (peak or 1.0))
    colour = colormaps['RdBu_r'](level / 2 + 0.5)[..., :3]
    strength = 0.85 * np.abs(level)[..., None] ** 0.8
    out = grey * (1 - strength) + colour * strength
    out[~np.isfinite(weights)] *= 0.35
    return out.clip(0, 1), peak


def evenly_spaced(number: int, limit: int) -> list[int]:
    """Return at most ``limit`` evenly spaced indices below ``number``."""
    return sorted({round(i) for i in np.linspace(0, number - 1, min(number, limit))})


def _plot_grid(rows: list[tuple[str, list]], size: tuple, title: str, path: Path, cross: tuple = ()) -> None:
    """Plot a grid with one row per block, at most :data:`SHOWN_BLOCKS` evenly spaced ones. ``rows`` have the label of a
    block, and panels (title, image, options of imshow), each ``size`` (width, height) in inches. ``cross`` is the
    column and row of a cross in each panel."""
    rows = [rows[i] for i in evenly_spaced(len(rows), SHOWN_BLOCKS)]
    columns = max(len(panels) for _, panels in rows)
    width, height = max(size[0] * columns + 1.0, TITLE_WIDTH), size[1] * len(rows) + 0.9
    figure = Figure(figsize=(width, height), layout='constrained')
    for axes, (label, panels) in zip(figure.subplots(len(rows), columns, squeeze=False), rows):
        axes[0].set_ylabel(label, fontsize=7)
        for axis, panel in zip_longest(axes, panels):
            axis.set(xticks=[], yticks=[], visible=panel is not None, facecolor='0.85')
            if panel is not None:
                axis.imshow(panel[1], interpolation='nearest', **panel[2])
                axis.set_title(panel[0], fontsize=6.5, pad=2)
                axis.plot(*cross, marker='+', color='lime', markersize=7, markeredgewidth=1.6)
    figure.suptitle(title, fontsize=8)
    _save(figure, path)


def plot_query(found: list[QueryMaps], picture: Picture, query: tuple, pixel: tuple, path: Path) -> None:
    """Plot the attention maps of a query token over the image, with one row per block.

    The columns are the image, the mean over heads, and up to :data:`MAX_HEADS` evenly spaced heads. ``query`` is
    (column, row) of the token in the preprocessed image. ``pixel`` is (x, y) in the original image.
    """
    rows = []
    for maps in found:
        panels: list[tuple] = [('image and query', picture.shown, {})]
        for head in (None, *evenly_spaced(len(maps.maps), MAX_HEADS)):
            drawn, peak = overlay(maps.mean if head is None else maps.maps[head], picture)
            name = 'mean of heads' if head is None else f'head {head}'
            panels.append((f'{name}, max {peak:.2g}', drawn, {}))
        uniform = 1 / max(np.isfinite(maps.maps[0]).sum(), 1)
        size = f'{maps.size[0]}x{maps.size[1]}'
        rows.append((f'{maps.block}\n{maps.mixer}, {size}\nuniform weight: {uniform:.2g}', panels))
    title = (
        f'{picture.name}: attention of the token at pixel {pixel[0]:g}, {pixel[1]:g} [+]\n'
        'red: positive, blue: negative; full colour is the largest magnitude of the panel; dark: outside of its window'
    )
    height, width = picture.shown.shape[:2]
    _plot_grid(rows, (1.7, 1.7 * height / width + 0.35), title, path, query)


def plot_full(found: list[tuple[str, str, np.ndarray]], name: str, path: Path) -> None:
    """Plot the attention maps of all queries and keys, as in FLatten Fig. 3 and hMHSA. ``found`` has the names of block
    and attention, and the attention maps (heads, n, m), for one row per block."""
    rows = []
    for block, mixer, maps in found:
        panels = []
        for head in evenly_spaced(len(maps), MAX_HEADS):
            peak = float(np.nanquantile(np.abs(maps[head]), 0.995)) or 1.0
            options = dict(cmap='RdBu_r', vmin=-peak, vmax=peak, aspect='auto')
            panels.append((f'head {head}, ±{peak:.2g}', maps[head], options))
        rows.append((f'{block}\n{mixer}\nqueries ↓  keys →', panels))
    title = (
        f'{name}: weights of all queries (rows) on all keys (columns), row by row of the feature map, evenly sampled\n'
        'red: positive, blue: negative, scale in each title; grey: outside of its window'
    )
    _plot_grid(rows, (1.5, 1.6), title, path)


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


# --- measures by block ------------------------------------------------------------------------------------------------


_MATRICES = ('state', 'output', 'projected', 'weights', 'weights_with_local')
_SHARPNESS = ('entropy / entropy_if_uniform', 'top_1', 'top_9', 'top_25', 'negative')
_LOCALITY = ('sum', 'share', 'share_with_local', 'if_uniform')
# title and lines of the plot of each measure
PLOTS = dict(
    rank=('effective rank / largest possible', [f'rank.{name}.effective / at_most' for name in _MATRICES]),
    confusion=('pairs of queries with weights closer than 1e-3 in L2', ['confusion.share']),
    locality=('weight inside the 3x3 around the query', [f'locality.{name}' for name in _LOCALITY]),
    sharpness=('how sharp the weights of a query are', [f'sharpness.{name}' for name in _SHARPNESS]),
    ccs=('cosine similarity of the attention maps of two heads', ['ccs']),
)


def values_of(line: str, entry: dict) -> np.ndarray:
    """Return the number at a path such as ``rank.state.effective`` in a block's entry of ``summary.json``, (heads,) or
    (1,). A name after ``/`` divides it by a number beside it. It is NaN if missing or divided by 0."""
    path, _, divisor = line.partition(' / ')
    *parents, name = path.split('.')
    for parent in parents:
        entry = entry.get(parent) or {}
    value, by = entry.get(name), entry.get(divisor) if divisor else 1.0
    return np.atleast_1d(np.nan if value is None or not by else np.asarray(value, float) / by)


def plot_measures(entries: list[dict], names, out: Path, title: str) -> list[Path]:
    """Plot measures over the blocks in ``summary.json``, and return the paths of the files ``NAME.png``. Measures
    without an entry in :data:`PLOTS` or without numbers are skipped."""
    made = []
    for name in [name for name in names if name in PLOTS]:
        subject, lines = PLOTS[name]
        width = max(TITLE_WIDTH, 0.42 * len(entries) + 2)
        figure = Figure(figsize=(width, 5.2), layout='constrained')
        axis = figure.subplots()
        for each in lines:
            values = [values_of(each, entry) for entry in entries]
            if np.isfinite(np.concatenate(values)).any():
                (line,) = axis.plot([value.mean() for value in values], marker='.', label=each)
                bands = [value.min() for value in values], [value.max() for value in values]
                axis.fill_between(range(len(entries)), *bands, alpha=0.15, color=line.get_color())
        if not axis.lines:
            continue
        axis.set_title(
            f'{title}: {subject}\nlines: mean over heads, bands: lowest and highest head', fontsize=9, wrap=True
        )
        axis.set_ylim(bottom=min(0, axis.get_ylim()[0]))
        blocks = [entry['block'].removeprefix('backbone.').removeprefix('stages.') for entry in entries]
        labels = [f'{block} {entry["mixer"]}' for block, entry in zip(blocks, entries)]
        axis.set_xticks(range(len(labels)), labels, rotation=60, ha='right', fontsize=7)
        axis.set_xlabel('block and its attention, input to output', fontsize=9)
        axis.grid(alpha=0.3)
        figure.legend(fontsize=7.5, ncols=2, loc='outside lower center')
        made.append(_save(figure, out / f'{name}.png'))
    return made
