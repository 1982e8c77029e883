# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The papers' size and cost columns beside what is counted here, as Markdown.

python -m projects.pages.tables --out docs/tables.md
"""

import argparse
import sys
import warnings
from pathlib import Path

from mmengine.config import Config
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
MERGED = 'hMHSA/cFFN'  # the paper that prints sizes of merged models
# task -> the metrics that the page has; metafile.yml has all
METRICS = {
    'mmpretrain': ('Top 1 Accuracy',),
    'mmdet': ('box AP', 'mask AP'),
    'mmseg': ('mIoU', 'mAcc'),
}
HEADER = ('model', 'recipe', 'params M, published', 'counted', 'FLOPs G, published', 'counted')


def measure(row: Row) -> Cost:
    """Count the model of a row. Those of the hMHSA paper are counted as they are deployed, compact FFNs merged."""
    cfg = Config.fromfile(CONFIGS / f'{row.name}.py')
    if row.paper == MERGED:
        cfg.model.backbone.deploy = True
    shape = (row.resolution, row.resolution) if row.resolution else SHAPES[row.task]
    return count_model(cfg, shape)


def cells(row: Row, cost: Cost) -> list:
    """A table line: numbers as the paper prints them beside those that are counted."""
    macs = cost.layer_macs if row.paper == 'RALA' else cost.total_macs()
    params, flops = f'{cost.total_params / 1e6:.2f}', f'{macs / 1e9:.2f}'
    metrics = [f'{row.metrics[name]:g}' if name in row.metrics else '' for name in METRICS[row.task]]
    published = row.released_params or row.params
    return [row.model, row.recipe, published, params, row.flops, flops, *metrics]


def markdown_table(header, lines) -> str:
    rows = [header, ['---'] * len(header), *lines]
    return '\n'.join('| ' + ' | '.join(row) + ' |' for row in rows)


def page(measured: list) -> str:
    """The Markdown page of (row, cost) pairs as :func:`measure` gives."""
    text = [
        "# The papers' tables",
        'Written by `python -m projects.pages.tables --out docs/tables.md`. '
        "Metrics are the papers' own: none of these models was retrained here; `configs/*/metafile.yml` has all of "
        'them. Parameters and operations are counted on the configs of this repository, a multiply-add as one '
        "operation. Where a paper and its released code differ in parameters, the code's are printed.",
        'Operations are those of convolutions, linear layers and, but for rows of the RALA paper, the products inside '
        'attentions. Detectors: 1000 proposals through the box heads, 100 through the mask heads, each stage of a '
        "cascade. Segmentors: without the auxiliary head. The hMHSA paper's: merged for deployment, and as if the maps "
        'of their attention were built.',
    ]
    for task, title in TITLES.items():
        rows = [cells(row, cost) for row, cost in measured if row.task == task]
        if rows:
            text += [f'## {title}', markdown_table((*HEADER, *METRICS[task]), rows)]
    return '\n\n'.join(text) + '\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, help='Markdown file to write [print]')
    args = parser.parse_args()
    warnings.simplefilter('ignore')  # of model constructors, once a row
    MMLogger.get_instance('mmengine', log_level='ERROR')
    with one_line_errors():
        if args.out:
            check_out_file(args.out)
        rows = [row for task in TITLES for row in read_rows(task)]
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
