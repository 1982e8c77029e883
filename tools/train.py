#!/usr/bin/env python
# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Train a detector, segmentor or classifier: the task of ``default_scope`` in the config."""

import argparse
import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().with_name('check_env.py')))  # finds the checkout and missing packages

from mmlinattn_console import add_common_arguments, add_config_arguments, tool_parser


def parse_args() -> argparse.Namespace:
    parser = tool_parser(__doc__)
    add_config_arguments(parser)
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        metavar='CHECKPOINT',
        help='continue from CHECKPOINT [the last one in the work dir]',
    )
    parser.add_argument(
        '--amp',
        action='store_true',
        help='mixed precision: bfloat16, or float16 with loss scaling on older GPUs; off without an accelerator',
    )
    parser.add_argument(
        '--auto-scale-lr',
        action='store_true',
        help='scale the learning rate by images per update / auto_scale_lr.base_batch_size',
    )
    parser.add_argument('--no-validate', action='store_true', help='do not evaluate while training')
    parser.add_argument(
        '--no-rehearsal', action='store_true', help='do not validate two images before the first step (rehearsal=False)'
    )
    parser.add_argument('--no-persistent-workers', action='store_true', help='restart loader workers every epoch')
    add_common_arguments(parser)
    return parser.parse_args()


if __name__ == '__main__':
    args = parse_args()  # before PyTorch is imported: --help answers at once

from mmlinattn.checkpoints.download import DownloadError
from mmlinattn.engine.runner import find_latest_checkpoint, launched_rank
from mmlinattn.tooling.command_line import clean_end, notice, one_line_errors, setup_errors
from mmlinattn.tooling.configs import check_checkpoint, check_data_config, load_config, require
from mmlinattn.tooling.console import quiet_upstream
from mmlinattn.tooling.running import add_checks, build_runner, set_precision
from mmlinattn.utils.errors import RunError


def configure(args: argparse.Namespace):
    cfg = load_config(args)
    require(cfg, args.config, 'model', 'train_dataloader', 'train_cfg', 'optim_wrapper')
    if args.no_rehearsal:
        cfg.rehearsal = False
    add_checks(cfg)
    if args.no_validate:
        cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    if args.no_persistent_workers:
        for loader in (cfg.train_dataloader, cfg.get('val_dataloader')):
            if loader:
                loader.persistent_workers = False
    set_precision(cfg, is_requested=args.amp)
    if args.auto_scale_lr:
        if 'base_batch_size' not in (cfg.get('auto_scale_lr') or {}):
            raise RunError('--auto-scale-lr: the config has no auto_scale_lr.base_batch_size.')
        cfg.auto_scale_lr.enable = True

    resume = args.resume or ((cfg.get('load_from') or 'auto') if cfg.get('resume') else None)
    if launched_rank(args.launcher) > 0:  # the first process chooses the checkpoint, and looks for its file
        cfg.resume, cfg.load_from = False, None
        return checked(cfg)
    last = find_latest_checkpoint(cfg.work_dir) if resume == 'auto' else resume
    if resume == 'auto' and last is None:
        start = f'with the weights of {cfg.load_from!r}' if cfg.get('load_from') else 'from the start'
        notice(f'no checkpoint to resume from in {cfg.work_dir!r}: beginning {start}.')
    cfg.resume = last is not None
    cfg.load_from = last or cfg.get('load_from') or None
    if cfg.load_from:
        cfg.load_from = check_checkpoint(cfg.load_from, '--resume' if cfg.resume else 'load_from')
    return checked(cfg)


def checked(cfg):
    check_data_config(cfg, ['train', 'val'] if cfg.get('val_dataloader') else ['train'])
    return cfg


def main(args: argparse.Namespace) -> None:
    quiet_upstream()
    with clean_end() as run, one_line_errors():
        with setup_errors(args.config):
            cfg = configure(args)
            run.work_dir, run.since = cfg.work_dir, 0 if cfg.get('resume') else run.since
            runner = build_runner(cfg, compiles=args.compile)
        with setup_errors(args.config, whole=False, work_dir=cfg.work_dir, runner=runner):
            try:
                runner.train()
            except DownloadError as error:
                raise RunError(f'{error}, or write the config with `mmlinattn config --scratch`') from error


if __name__ == '__main__':
    main(args)
