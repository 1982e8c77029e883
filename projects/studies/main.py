# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Run a study with the arguments of ``tools/analysis_tools/ablation_study.py``."""

import argparse
import sys

from mmengine.logging import MMLogger
from rich.console import Console
from rich.progress import Progress

from mmlinattn.tooling.command_line import check_device, clean_end, one_line_errors, writing
from mmlinattn.utils.errors import RunError

from . import report
from .arguments import Settings
from .study import run_study


def checked_settings(args: argparse.Namespace) -> Settings:
    """Return the settings of the runs after a check of all options, and make the output folder."""
    settings = Settings(*(getattr(args, name) for name in Settings._fields))
    least = dict(iterations=1, batch=2, num_train=settings.batch, num_val=4, size=64)
    for name, value in least.items():
        if getattr(settings, name) < value:
            raise RunError(f'--{name.replace("_", "-")}={getattr(settings, name)}: expected at least {value}.')
    if args.seeds < 1:
        raise RunError(f'--seeds={args.seeds}: expected at least 1.')
    if not 0 <= settings.tinted <= 1:
        raise RunError(f'--tinted={settings.tinted}: expected a number from 0 to 1.')
    for name, value in (('lr', settings.lr), ('max-minutes', args.max_minutes)):
        if value is not None and not 0 < value < float('inf'):
            raise RunError(f'--{name}={value}: expected a number above 0.')
    check_device(args.device)
    with writing(args.out):
        args.out.mkdir(parents=True, exist_ok=True)
    return settings


def main(args: argparse.Namespace) -> None:
    MMLogger.get_instance('mmengine', log_level='ERROR')  # MMEngine logs a line for each initialised parameter
    with clean_end(), one_line_errors():
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
