# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Train small variants of a paper's ablation on images drawn in memory, and compare with the paper's differences.

Results are saved after each run; run again to resume.

    python tools/analysis_tools/ablation_study.py --study rala --out work_dirs/study_rala --max-minutes 25
"""

import argparse
from pathlib import Path
from typing import NamedTuple

from mmlinattn_console import tool_parser

# tables of the papers by study
SOURCES = dict(
    rala='RALA Tab. 9 and 10, Fig. 8',
    inline='InLine Tab. 1, 3 and 4',
    flatten='FLatten Tab. 4 and 5',
    hallucinated='hMHSA Tab. 2, 3, 5 and 7',
    attentions='every attention in one backbone',
)


class Settings(NamedTuple):
    """Settings of all variants of a study, explained by :data:`HELP`."""

    iterations: int = 300
    batch: int = 32
    num_train: int = 4096
    num_val: int = 512
    size: int = 64
    lr: float = 2e-3
    tinted: float = 0.5


HELP = dict(
    iterations='training steps of a run',
    batch='images per step',
    num_train='training images, mirrored at random',
    num_val='test images',
    size='side of an image in pixels, at least 64',
    lr='peak learning rate of AdamW, after a warm-up of 5 %% of the steps and before cosine decay to 0',
    tinted='fraction of the shapes in the typical colour of their class; at 1, the colour gives the class',
)


def parse_args() -> argparse.Namespace:
    parser = tool_parser(__doc__)
    text = '; '.join(f'{name}: {source}' for name, source in SOURCES.items())
    parser.add_argument('--study', required=True, choices=list(SOURCES), help=text)
    parser.add_argument('--out', type=Path, required=True, help='folder for results.json, table.md and the plots')
    parser.add_argument('--seeds', type=int, default=3, help='runs of each variant [3]')
    parser.add_argument('--max-minutes', type=float, help='time limit; no run starts that would exceed it [no limit]')
    parser.add_argument('--variants', '--arms', nargs='+', metavar='NAME', help='only these variants [all]')
    for name, value in Settings()._asdict().items():
        flag, text = f'--{name.replace("_", "-")}', f'{HELP[name]} [{value}]'
        parser.add_argument(flag, type=type(value), default=value, help=text)
    parser.add_argument('--device', default='cpu', help='cpu, cuda, ... [cpu]')
    return parser.parse_args()
