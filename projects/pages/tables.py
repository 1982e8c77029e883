# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Write docs/tables.md: the papers' metrics with counted parameters and operations.

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
MERGED = 'hMHSA/cFFN'  # prints sizes of merged models
# metrics of the page by task; metafile.yml has all
METRICS = {
    'mmpretrain': ('Top 1 Accuracy',),
    'mmdet': ('box AP', 'mask AP'),
    'mmseg': ('mIoU', 'mAcc'),
}
HEADER = ('model', 'recipe', 'params M', 'FLOPs G')


def measure(row: Row) -> Cost:
    """Count the model of a row. Models of the hMHSA paper are deployed ones, with merged compact FFNs."""
    cfg = Config.fromfile(CONFIGS / f'{row.name}.py')
    if row.paper == MERGED:
        cfg.model.backbone.deploy = True
    shape = (row.resolution, row.resolution) if row.resolution else SHAPES[row.task]
    return count_model(cfg, shape)


def beside(counted: float, published: str) -> str:
    """Format a counted number, with the published one in brackets if the first does not round to it."""
    digits = len(published.partition('.')[2])
    agrees = not published or f'{counted:.{digits}f}' == f'{float(published):.{digits}f}'
    return f'{counted:.2f}' if agrees else f'{counted:.2f} ({published})'


def cells(row: Row, cost: Cost) -> list:
    """Return the cells of a row of the table."""
    macs = cost.layer_macs if row.paper == 'RALA' else cost.total_macs()
    metrics = [f'{row.metrics[name]:g}' if name in row.metrics else '' for name in METRICS[row.task]]
    params = beside(cost.total_params / 1e6, row.released_params or row.params)
    return [row.model, row.recipe, params, beside(macs / 1e9, row.flops), *metrics]


def markdown_table(header, lines) -> str:
    rows = [header, ['---'] * len(header), *lines]
    return '\n'.join('| ' + ' | '.join(row) + ' |' for row in rows)


def page(measured: list) -> str:
    """Return the Markdown page for pairs of a row and its cost."""
    text = [
        "# The papers' tables",
        "Metrics are the papers' (`configs/*/metafile.yml` has all of them); nothing was retrained here. Parameters "
        "and multiply-adds are counted on our configs, with the paper's number (or its released code's parameters) in "
        'brackets if ours does not round to it.',
        'Multiply-adds are those of convolutions, linear layers and products in attentions (not for rows of the RALA '
        'paper). Detectors: 1000 proposals through the box heads, 100 through the mask heads, each stage of a cascade. '
        "Segmentors: without the auxiliary head. The hMHSA paper's: merged for deployment, attention maps built. "
        'Written by `python -m projects.pages.tables --out docs/tables.md`.',
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
    warnings.simplefilter('ignore')  # model constructors warn for each row
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
