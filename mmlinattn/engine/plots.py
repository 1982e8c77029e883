# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Plot losses, metrics, confusion matrices and precision-recall curves to files; no display is needed."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

MAX_NAMED = 20  # most classes with legible names and numbers
LINE_STYLES = ('-', '--', ':', '-.')  # after ten colours
SMOOTHED = 25  # a smoothed loss is the mean of this part of the training


def _grid(axes) -> None:
    axes.grid(alpha=0.3)
    axes.spines[['top', 'right']].set_visible(False)


def plot_training(path: str, losses: dict, rates: dict, metrics: dict, unit: str) -> None:
    """Plot losses and learning rates over iterations, and metrics over epochs or iterations.

    Each dict maps names to pairs (positions, values). ``unit``, ``'epoch'`` or ``'iteration'``, is that of the
    positions of ``metrics``. Losses of many values are drawn faintly behind their running mean. Empty panels are left
    out.
    """
    panels = [('loss', losses, 'iteration'), ('learning rate', rates, 'iteration'), ('metric', metrics, unit)]
    panels = [panel for panel in panels if panel[1]]
    figure = Figure(figsize=(5.4 * max(1, len(panels)), 4.8), layout='constrained')
    for axes, (title, curves, label) in zip(figure.subplots(1, max(1, len(panels)), squeeze=False).flat, panels):
        for number, (name, (positions, values)) in enumerate(curves.items()):
            colour, style = f'C{number % 10}', LINE_STYLES[number // 10 % len(LINE_STYLES)]
            if title == 'loss' and len(values) >= 2 * SMOOTHED:
                axes.plot(positions, values, color=colour, alpha=0.2, linewidth=0.8)
                values = running_mean(values, len(values) // SMOOTHED)
            marker = 'o' if len(values) < 50 and title == 'metric' else None
            width = 2 if name in ('loss', 'lr') else 1
            axes.plot(positions, values, style, color=colour, label=name, marker=marker, markersize=4, linewidth=width)
        axes.set(title=title, xlabel=label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        if all(min(values) >= 0 for _, values in curves.values()):
            axes.set_ylim(bottom=0)
        axes.legend(fontsize='x-small', ncols=1 + len(curves) // 9)
        _grid(axes)
    figure.savefig(path, dpi=120)


def running_mean(values, window: int) -> np.ndarray:
    """Return the mean of about ``window`` values around every position, of fewer at both ends."""
    ones = np.ones(window // 2 * 2 + 1)
    return np.convolve(values, ones, 'same') / np.convolve(np.ones(len(values)), ones, 'same')


def plot_confusion(path: str, matrix: np.ndarray, names: Sequence[str], title: str) -> None:
    """Plot a confusion matrix, counts of shape (true classes, predicted classes), normalised by row."""
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    side = 4.5 + 0.45 * min(len(names), 40)
    figure = Figure(figsize=(side + 2.5, side), layout='constrained')
    axes = figure.subplots()
    image = axes.imshow(shares, cmap='Blues', vmin=0, vmax=1)
    figure.colorbar(image, ax=axes, fraction=0.046, label='share of the true class')
    axes.set(title=title, xlabel='predicted', ylabel='true')
    if len(names) <= 3 * MAX_NAMED:
        axes.set_xticks(range(len(names)), names, rotation=90)
        axes.set_yticks(range(len(names)), names)
    if len(names) <= MAX_NAMED:
        for row, column in zip(*np.nonzero(matrix)):
            share = shares[row, column]
            colour = 'white' if share > 0.5 else 'black'
            axes.text(column, row, f'{share:.2f}', ha='center', va='center', color=colour, fontsize='small')
    figure.savefig(path, dpi=120)


def plot_precision_recall(path: str, precision: np.ndarray, scores: np.ndarray, names: Sequence[str]) -> None:
    """Plot precision over recall and F1 over the score threshold, for each class and their mean.

    With more than :data:`MAX_NAMED` classes, the mean alone is plotted. ``precision`` (recalls, classes) is at IoU 0.5,
    and -1 for classes without objects. ``scores`` (recalls, classes) holds the score threshold of each recall.
    """
    recall = np.linspace(0, 1, len(precision))
    known = [k for k in range(len(names)) if (precision[:, k] > -1).all()]
    figure = Figure(figsize=(14, 5.5), layout='constrained')
    left, right = figure.subplots(1, 2)
    thresholds, curves = np.linspace(0, 1, 201), []
    for k in known:
        f1_of_recall = 2 * precision[:, k] * recall / np.maximum(precision[:, k] + recall, 1e-12)
        # the largest recall with a score above the threshold
        reached = (scores[:, k] >= thresholds[:, None]) & (precision[:, k] > 0)
        last = reached.shape[1] - 1 - reached[:, ::-1].argmax(axis=1)
        f1 = np.where(reached.any(axis=1), f1_of_recall[last], 0)
        curves.append(f1)
        if len(known) <= MAX_NAMED:
            left.plot(recall, precision[:, k], linewidth=1, label=f'{names[k]}  AP50 {precision[:, k].mean():.3f}')
            right.plot(thresholds, f1, linewidth=1, label=names[k])
    if known:
        mean, f1 = precision[:, known].mean(axis=1), np.mean(curves, axis=0)
        left.plot(recall, mean, 'k', linewidth=2.5, label=f'mean  AP50 {mean.mean():.3f}')
        at = np.argmax(f1)
        right.plot(thresholds, f1, 'k', linewidth=2.5, label=f'mean  {f1[at]:.3f} at score {thresholds[at]:.2f}')
    left.set(title='precision and recall at IoU 0.5', xlabel='recall', ylabel='precision')
    right.set(title='F1 and score threshold at IoU 0.5', xlabel='lowest score that is kept', ylabel='F1')
    for axes in (left, right):
        axes.set(xlim=(0, 1), ylim=(0, 1.02))
        _grid(axes)
        if known:
            axes.legend(fontsize='small')
    figure.savefig(path, dpi=120)
