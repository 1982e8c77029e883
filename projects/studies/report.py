# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Tables and plots of a study beside the paper's numbers; missing runs are left out."""

import statistics
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from .arguments import SOURCES
from .task import CHANCE, QUESTION
from .variants import STUDIES, Study


def by_variant(results: dict) -> dict[str, list[dict]]:
    """Group the runs of a study by variant, in the study's order; runs of a variant are sorted by seed."""
    runs: dict[str, list[dict]] = {variant: [] for variant in STUDIES[results['study']]().variants}
    for run in sorted(results['runs'], key=lambda run: run['seed']):
        runs.setdefault(run['variant'], []).append(run)
    return {variant: found for variant, found in runs.items() if found}


def spread(values: list[float]) -> str:
    """Format mean and standard deviation over seeds."""
    mean = statistics.fmean(values)
    return f'{mean:.1f} ± {statistics.stdev(values):.1f}' if len(values) > 1 else f'{mean:.1f}'


def verdict(better: list[float], worse: list[float]) -> str:
    """Compare the paper's ranking of two variants with the accuracies measured here.

    Args:
        better (list[float]): Accuracies of the variant with the higher accuracy in the paper, one per seed.
        worse (list[float]): Accuracies of the other variant.

    Returns:
        str: ``'holds'`` or ``'reversed'`` if the ranges of both do not overlap, else ``'within the spread'``;
        ``'one seed'`` if a variant has one run.
    """
    if min(len(better), len(worse)) < 2:
        return 'one seed'
    if min(better) > max(worse):
        return 'holds'
    return 'reversed' if max(better) < min(worse) else 'within the spread'


def attention_of(run: dict) -> dict[str, tuple]:
    """Average the attention measures of a run over its blocks.

    Returns:
        dict: Pairs (value, largest possible or uniform value) by measure; measures that all blocks lack are left out.
    """
    blocks = run['attention']

    def mean(*keys):
        values = []
        for block in blocks:
            value = block
            for key in keys:
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                values.append(value)
        return statistics.fmean(values) if values else None

    found = {
        'state': (mean('rank', 'state', 'effective'), mean('rank', 'state', 'at_most')),
        'output': (mean('rank', 'output', 'effective'), mean('rank', 'output', 'at_most')),
        'projected': (mean('rank', 'projected', 'effective'), mean('rank', 'projected', 'at_most')),
        'confused': (mean('confusion', 'share'), None),
        'local': (mean('locality', 'share'), mean('locality', 'if_uniform')),
    }
    return {key: value for key, value in found.items() if value[0] is not None}


def _cell(runs: list[dict], key: str, form: str) -> str:
    """Format a measure of :func:`attention_of`, averaged over runs; '' if a run lacks it.

    ``form`` is a format string for two numbers: the value, and its maximum or its value for uniform attention.
    """
    values = [attention_of(run).get(key) for run in runs]
    if any(value is None for value in values):
        return ''
    mean = statistics.fmean(value[0] for value in values)
    most = statistics.fmean(value[1] for value in values) if values[0][1] is not None else None
    return form.format(mean, most)


def _paper_difference(study: Study, better: str, worse: str, metric) -> str:
    if metric is None:
        return 'not in our tables'
    if isinstance(metric, str):
        return f'{study.variants[better].paper[metric] - study.variants[worse].paper[metric]:+.1f} ({metric})'
    return f'{metric:+.1f} (ImageNet)'


def table(results: dict) -> str:
    """Return the study as Markdown."""
    study, runs = STUDIES[results['study']](), by_variant(results)
    settings = results['settings']
    lines = [
        f'Study `{results["study"]}` ({SOURCES[results["study"]]}); task: {QUESTION}. {settings["iterations"]} steps of'
        f' {settings["batch"]} images of {settings["size"]} x {settings["size"]} for every variant, '
        f'{settings["num_val"]} images to test on, chance {CHANCE:.1f} %. In percent, mean and standard deviation '
        'over seeds.',
        '',
    ]
    ranks = ['effective rank of the state', 'effective rank of the output', 'as projected']
    rows = [
        ['variant', 'seeds', 'parameters', 'accuracy', 'paper', *ranks, 'confused pairs', 'weight in 3x3 (if uniform)']
    ]
    for variant, found in runs.items():
        paper = study.variants[variant].paper if variant in study.variants else {}
        cells = [
            variant,
            str(len(found)),
            f'{found[0]["params"] / 1e3:.0f} k',
            spread([run['accuracy'] for run in found]),
            ', '.join(f'{value} {metric}' for metric, value in paper.items()),
            _cell(found, 'state', '{:.1f} of {:.0f}'),
            _cell(found, 'output', '{:.1f} of {:.0f}'),
            _cell(found, 'projected', '{:.1f} of {:.0f}'),
            _cell(found, 'confused', '{:.2%}'),
            _cell(found, 'local', '{:.3f} ({:.3f})'),
        ]
        rows.append(cells)
    known = [i for i in range(len(rows[0])) if any(row[i] for row in rows[1:])]
    rows.insert(1, ['---'] * len(rows[0]))
    lines += ['| ' + ' | '.join(row[i] for i in known) + ' |' for row in rows]
    pairs = [pair for pair in study.pairs if pair[0] in runs and pair[1] in runs]
    if pairs:
        lines += ['', '| better in the paper | than | paper | here | ordering |', '| --- ' * 5 + '|']
    for better, worse, metric in pairs:
        ours = [[run['accuracy'] for run in runs[variant]] for variant in (better, worse)]
        difference = statistics.fmean(ours[0]) - statistics.fmean(ours[1])
        printed = _paper_difference(study, better, worse, metric)
        lines.append(f'| {better} | {worse} | {printed} | {difference:+.1f} | {verdict(*ours)} |')
    return '\n'.join(lines) + '\n'


def plot(results: dict, path: Path) -> None:
    """Plot the accuracy of each run and the mean learning curve of each variant to ``path``.

    ``results`` are those of a study as saved by ``study.py``, with the keys ``study`` and ``runs``.
    """
    runs = by_variant(results)
    figure = Figure(figsize=(12, 0.42 * len(runs) + 2.6), layout='constrained')
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    colours = colormaps['tab10' if len(runs) <= 10 else 'tab20'].colors
    for i, found in enumerate(runs.values()):
        colour, values = colours[i % len(colours)], [run['accuracy'] for run in found]
        left.plot(values, [i] * len(values), 'o', color=colour, alpha=0.6)
        left.plot([statistics.fmean(values)] * 2, [i - 0.3, i + 0.3], color=colour, linewidth=2)
        curves = np.array([[point[1] for point in run['curve']] for run in found])
        steps = [point[0] for point in found[0]['curve']]
        right.plot(steps, curves.mean(axis=0), color=colour, marker='.')
        right.fill_between(steps, curves.min(axis=0), curves.max(axis=0), color=colour, alpha=0.1)
    left.set_yticks(range(len(runs)), [f'{variant} ({len(found)})' for variant, found in runs.items()], fontsize=8)
    left.invert_yaxis()
    left.grid(axis='x', alpha=0.3)
    left.set_xlabel('accuracy, %: dots are seeds, the line is their mean')
    right.set_xlabel('training steps (colours as on the left)')
    right.set_ylabel('accuracy, % (band: lowest and highest seed)')
    right.grid(alpha=0.3)
    figure.suptitle(
        f'study {results["study"]}: variants (number of seeds), with the same images and steps', fontsize=10
    )
    figure.savefig(path, dpi=110)


def write(results: dict, out: Path) -> list[Path]:
    """Write ``table.md`` and ``plot.png`` beside ``results.json``, and return all paths; [] without runs."""
    paths = [out / 'results.json', out / 'table.md', out / 'plot.png']
    if not results['runs']:
        return []
    paths[1].write_text(table(results), encoding='utf-8')
    plot(results, paths[2])
    return paths
