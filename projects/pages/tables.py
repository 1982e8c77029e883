# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The papers' size and cost columns beside what is counted here, as Markdown.

python -m projects.pages.tables --out docs/tables.md
"""

import argparse
import functools
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Optional
from unittest import mock

from mmengine.config import Config
from mmengine.config import utils as config_utils
from mmengine.logging import MMLogger
from mmengine.utils import ProgressBar

import mmlinattn  # noqa: F401  registers the backbones
from mmlinattn.tooling.analysis.flops import SHAPES, Cost, count_model
from mmlinattn.tooling.command_line import check_out_file, one_line_errors

from .published import Row, read_rows

CONFIGS = Path(__file__).resolve().parents[2] / 'configs'

TITLES = {
    'mmpretrain': 'ImageNet-1K classification, batch 1, resolution as listed',
    'mmdet': 'COCO detection, 1280x800',
    'mmseg': 'ADE20K segmentation, 512x2048',
}
# Ways of counting that papers use, as (name, what it adds to the one before)
CONVENTIONS = {
    'layers': 'convolutions and linear layers',
    'products': 'and the products inside attentions (q k^T, k^T v, ...)',
    'norms': 'and norms as fvcore counts them, 5 operations an element of a layer norm and 2 of a batch norm',
}
MERGED = 'hMHSA/cFFN'  # the paper that prints sizes of merged models
HEADER = (
    'model',
    'recipe',
    'params M, published',
    'measured',
    'difference',
    'FLOPs G, published',
    *CONVENTIONS,
    'nearest',
    'its difference',
    'metrics, published',
)

# MMEngine reads a project's whole model index, over a second, for each upstream base
_load_once = functools.cache(config_utils.load)


def in_conventions(cost: Cost) -> dict:
    """G operations by each of :data:`CONVENTIONS`."""
    products = cost.total_macs()
    return {
        'layers': cost.layer_macs / 1e9,
        'products': products / 1e9,
        'norms': (products + cost.norm_ops) / 1e9,
    }


def nearest_convention(published: float, counted: dict) -> str:
    """The convention whose count is nearest to the published figure; of equals, the one that counts least."""
    return min(counted, key=lambda name: abs(counted[name] - published))


def measure(row: Row, configs: Path = CONFIGS) -> Optional[Cost]:
    """Count the model of a row; None where its config does not exist.

    Args:
        row (Row): Row of a table. The hMHSA paper's models are counted as they are deployed, its compact FFNs merged.
        configs (Path): The folder ``configs``.
    """
    path = configs / f'{row.name}.py'
    if not path.is_file():
        return None
    with mock.patch.object(config_utils, 'load', _load_once):
        cfg = Config.fromfile(path)
    if row.paper == MERGED:
        cfg.model.backbone.deploy = True
    shape = (row.resolution, row.resolution) if row.resolution else SHAPES[row.task]
    return count_model(cfg, shape)


def cells(row: Row, cost: Optional[Cost]) -> list:
    """A table line; numbers as the paper prints them, differences as measured minus published."""
    params = row.released_params or row.params
    metrics = ', '.join(f'{name} {value:g}' for name, value in row.metrics.items())
    if cost is None:
        return [row.model, row.recipe, params, 'not built', '', row.flops, '', '', '', '', '', metrics]
    millions, counted = cost.total_params / 1e6, in_conventions(cost)
    line = [row.model, row.recipe, params, f'{millions:.2f}', f'{millions - float(params):+.2f}' if params else '']
    line += [row.flops, *(f'{value:.2f}' for value in counted.values())]
    if row.flops:
        published = float(row.flops)
        nearest = nearest_convention(published, counted)
        line += [nearest, f'{100 * (counted[nearest] - published) / published:+.1f} %']
    else:
        line += ['', '']
    return [*line, metrics]


def markdown_table(header, lines) -> str:
    rows = [header, ['---'] * len(header), *lines]
    return '\n'.join('| ' + ' | '.join(row) + ' |' for row in rows)


def which_convention(measured: list) -> str:
    """Table of how many rows of a paper, by task, are nearest to each convention, and the median difference."""
    groups = {}
    for row, cost in measured:
        if cost is not None and row.flops:
            groups.setdefault((row.paper, row.task), []).append((float(row.flops), in_conventions(cost)))
    lines = []
    for (paper, task), pairs in groups.items():
        votes = Counter(nearest_convention(published, counted) for published, counted in pairs)
        medians = []
        for name in CONVENTIONS:
            errors = sorted(100 * (counted[name] - published) / published for published, counted in pairs)
            medians.append(f'{errors[len(errors) // 2]:+.1f} %')
        nearest = ', '.join(f'{name} {number}' for name, number in votes.most_common())
        lines.append([paper, task, str(len(pairs)), nearest, *medians])
    return markdown_table(('paper', 'task', 'rows', 'nearest, rows', *(f'{n}, median' for n in CONVENTIONS)), lines)


def page(measured: list) -> str:
    """The Markdown page of (row, cost or None) pairs as :func:`measure` gives."""
    text = [
        "# The papers' tables",
        'Written by `python -m projects.pages.tables --out docs/tables.md`.',
        'Parameters and operations are counted on the configs of this repository (one multiply-add is one operation). '
        "Metrics are the papers' own: none of these models was retrained here. Where a paper and its released code "
        "differ in parameters, the published column has the released code's number. Differences are measured minus "
        'published. "not built" rows have no config yet.',
        '## Ways of counting',
        '\n'.join(f'- **{name}**: {meaning}' for name, meaning in CONVENTIONS.items()),
        "The models are those of the configs; where a config differs from the model of a paper's table (hybrid "
        'RAVLT, heads as released), so does its count. Detectors: backbone, neck and RPN on all levels, box heads on '
        'as many proposals as `test_cfg.rpn.max_per_img` (1000), mask heads on 100, each stage of a cascade, the '
        'convention of MMDetection 2.x (3.x feeds all proposals to the mask heads of a cascade; the published figures '
        'fit 100). '
        'Segmentors: without the auxiliary head.',
        'The models of the hMHSA paper are counted as deployed, the branches of their compact FFNs merged, and their '
        'attention as the paper counts it: as if its maps were built and convolved.',
        "The RALA paper's figures are **layers** in all three tables: the softmax and linear attention of the hybrid "
        'model are not in them. Those of the InLine and FLatten papers include the **products**; whether norms are in '
        'is below the rounding of most rows. The convention a figure is nearest to, by paper, and the median '
        'difference in each:',
        which_convention(measured),
    ]
    for task, title in TITLES.items():
        rows = [cells(row, cost) for row, cost in measured if row.task == task]
        if rows:
            text += [f'## {title}', markdown_table(HEADER, rows)]
    return '\n\n'.join(text) + '\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, help='Markdown file to write [print]')
    parser.add_argument('--task', nargs='+', choices=list(TITLES), default=list(TITLES), help='tables [all]')
    args = parser.parse_args()
    warnings.simplefilter('ignore')  # of model constructors, once a row
    MMLogger.get_instance('mmengine', log_level='ERROR')
    with one_line_errors():
        if args.out:
            check_out_file(args.out)
        rows = [row for task in args.task for row in read_rows(task)]
        bar = ProgressBar(len(rows), file=sys.stderr)
        measured = []
        for row in rows:
            measured.append((row, measure(row)))
            bar.update()
    text = page(measured)
    if args.out:
        args.out.write_text(text, encoding='utf-8')
    print(f'\n{args.out or text}')


if __name__ == '__main__':
    main()
