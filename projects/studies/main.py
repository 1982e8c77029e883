# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Train small variants of a paper's ablation on images drawn in memory, and compare with the paper's differences.

Results are saved after each run; run again to resume.

    python tools/analysis_tools/ablation_study.py --study rala --out work_dirs/study_rala --max-minutes 25
"""

import argparse
import sys
from pathlib import Path

import torch
from mmengine.logging import MMLogger
from rich.console import Console
from rich.progress import Progress

from mmlinattn.tooling.command_line import one_line_errors, writing
from mmlinattn.utils.errors import RunError

from . import report
from .study import run_study
from .task import Settings
from .variants import STUDIES

SETTINGS = dict(
    iterations='training steps of a run',
    batch='images per step',
    num_train='training images, mirrored at random',
    num_val='test images',
    size='side of an image in pixels, at least 64',
    lr='peak learning rate of AdamW, after a warm-up of 5 %% of the steps and before cosine decay to 0',
    tinted='fraction of the shapes in the typical colour of their class; at 1, the colour gives the class',
)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = {name: study().source for name, study in STUDIES.items()}
    text = '; '.join(f'{name}: {source}' for name, source in names.items())
    parser.add_argument('--study', required=True, choices=list(names), help=text)
    parser.add_argument('--out', type=Path, required=True, help='folder for results.json, table.md and the plots')
    parser.add_argument('--seeds', type=int, default=3, help='runs of each variant [3]')
    parser.add_argument('--max-minutes', type=float, help='time limit; no run starts that would exceed it [no limit]')
    parser.add_argument('--variants', '--arms', nargs='+', metavar='NAME', help='only these variants [all]')
    for name, value in Settings()._asdict().items():
        parser.add_argument('--' + name.replace('_', '-'), type=type(value), help=f'{SETTINGS[name]} [{value}]')
    parser.add_argument('--device', default='cpu', help='cpu, cuda, ... [cpu]')
    return parser.parse_args()


def checked_settings(args: argparse.Namespace) -> Settings:
    """Return the settings of the runs after a check of all options, and make the output folder."""
    """Return the settings of the runs after a check of all options, and make the output folder."""
    given = {name: getattr(args, name) for name in Settings._fields if getattr(args, name) is not None}
    settings = Settings(**given)
    least = dict(iterations=1, batch=2, num_train=settings.batch, num_val=4, size=64)
    for name, value in least.items():
        if getattr(settings, name) < value:
            raise RunError(f'--{name.replace("_", "-")}={getattr(settings, name)}: expected at least {value}')
    if args.seeds < 1:
        raise RunError(f'--seeds={args.seeds}: expected at least 1')
    if not 0 <= settings.tinted <= 1:
        raise RunError(f'--tinted={settings.tinted}: expected a value in [0, 1]')
    for name, value in (('lr', settings.lr), ('max-minutes', args.max_minutes)):
        if value is not None and value <= 0:
            raise RunError(f'--{name}={value}: expected a value above 0')
    try:
        torch.empty(0, device=args.device)
    except RuntimeError as error:
        raise RunError(f'--device={args.device}: {str(error).splitlines()[0]}') from error
    with writing(args.out):
        args.out.mkdir(parents=True, exist_ok=True)
    return settings


def main() -> None:
    args = parse_args()
    MMLogger.get_instance('mmengine', log_level='ERROR')  # MMEngine logs a line for each initialised parameter
    with one_line_errors():
        settings = checked_settings(args)
        with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
            steps = bar.add_task('steps of a run', total=settings.iterations)

            def finished(message):
                print(message, flush=True)
                bar.reset(steps)

            arguments = args.study, args.out, args.seeds, settings, args.max_minutes, args.variants, args.device
            results = run_study(*arguments, finished, lambda: bar.advance(steps))
        for path in report.write(results, args.out):
            print(path)
