# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Run a tool of mmlinattn: ``mmlinattn train mine.py`` is ``python tools/train.py mine.py``. Shared arguments of tools.

A module beside the package: ``import mmlinattn`` fails if packages are missing, and the tools report those in one line.
It also imports PyTorch, and tools parse their arguments before that, so that ``--help`` answers at once.
"""

import argparse
import os
import re
import runpy
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

TOOLS = {
    'config': 'make_config.py',
    'train': 'train.py',
    'test': 'test.py',
    'demo': 'demo.py',
    'export': 'export.py',
    'swap': 'swap_backbone.py',
    'convert': 'convert_checkpoint.py',
    'shapes': 'make_shapes_dataset.py',
    'flops': 'analysis_tools/get_flops.py',
    'attention': 'analysis_tools/inspect_attention.py',
    'study': 'analysis_tools/ablation_study.py',
    'images': 'analysis_tools/contact_sheet.py',
    'check': 'check_env.py',
}


def tools_folder() -> Path:
    """Return ``tools/`` of the checkout, or its copy in the installed package."""
    spec = find_spec('mmlinattn')
    if spec is None or spec.origin is None:
        raise SystemExit(f'error: mmlinattn is not installed in {sys.executable}: pip install mmlinattn')
    package = Path(spec.origin).resolve().parent
    # the copy of an editable install without links (Windows) may be out of date
    checkout = package.parent if (package.parent / 'mmcv_ops').is_dir() else package / '.mim'
    return checkout / 'tools'


def installed_version() -> str:
    """Return the version of the distribution, without importing the package."""
    try:
        return version('mmlinattn')
    except PackageNotFoundError:
        return 'unknown (not installed)'


# --- shared arguments -------------------------------------------------------------------------------------------------

started_as = None  # ``mmlinattn COMMAND``, or None for a tool that is started as a script


def tool_parser(description: str, **options) -> argparse.ArgumentParser:
    """Return a parser with usage lines for the command that the user gave, and the line breaks of ``description``."""
    formatter = argparse.RawDescriptionHelpFormatter
    return Parser(prog=started_as, description=description, formatter_class=formatter, **options)


class Parser(argparse.ArgumentParser):
    """Argument parser that expands the home folder in ``--out=~/x`` too, as shells do in ``--out ~/x``."""

    def parse_known_args(self, args=None, namespace=None):
        given = sys.argv[1:] if args is None else args
        parts = [re.fullmatch(r'((?:--[\w-]+=)?)(~(?:/.*)?)', each, re.DOTALL) for each in given]
        expanded = [m[1] + os.path.expanduser(m[2]) if m else each for m, each in zip(parts, given)]
        return super().parse_known_args(expanded, namespace)


class Settings(argparse.Action):
    """MMEngine's action for KEY=VALUE arguments; others, and dicts as values, are a usage error."""

    def __call__(self, parser, namespace, values, option_string=None):
        from mmengine.config import DictAction  # imports torch

        for value in values:
            key, _, text = value.partition('=')
            if re.search(r'(^|[\[(,\s])(dict\(|\{)', text):
                reason = f'a value is no dict. Set each key, as {key}.type=NAME, or {key}.0.type=NAME in a list'
                raise argparse.ArgumentError(self, f'{value}: {reason}')
        try:
            DictAction(self.option_strings, self.dest)(parser, namespace, values, option_string)
        except (ValueError, AssertionError) as error:
            raise argparse.ArgumentError(self, f'{" ".join(values)}: expected KEY=VALUE ({error})') from error


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add CONFIG and ``--cfg-options``."""
    parser.add_argument('config', metavar='CONFIG', help='config file')
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=Settings,
        metavar='KEY=VALUE',
        help='override settings of the config, e.g. train_dataloader.batch_size=4 or '
        'model.backbone.init_cfg=None; lists as key="[a,b]" or key=a,b',
    )


def add_model_arguments(parser: argparse.ArgumentParser, may_be_random: bool = False) -> None:
    """Add CONFIG, ``--cfg-options`` and CHECKPOINT; with ``may_be_random``, the checkpoint may be ``none``."""
    addresses = 'URL, mmlinattn://NAME, or none for random weights' if may_be_random else 'URL or mmlinattn://NAME'
    add_config_arguments(parser)
    parser.add_argument(
        'checkpoint', metavar='CHECKPOINT', help=f'checkpoint file, work dir (its last checkpoint), {addresses}'
    )


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that ``train`` and ``test`` share."""
    parser.add_argument('--work-dir', help='folder for logs and checkpoints [work_dirs/CONFIG]')
    parser.add_argument(
        '--data-root',
        help='folder of the data set: replaces data_root of every data set and the folder of the annotation files of '
        'the evaluators',
    )
    parser.add_argument(
        '--compile',
        action='store_true',
        help='compile the blocks of the backbone (torch.compile): the first iteration takes minutes, on a GPU the '
        'others are faster (docs/gpu.md)',
    )
    parser.add_argument('--no-pin-memory', action='store_true', help='do not pin loader memory')
    parser.add_argument('--launcher', choices=['none', 'pytorch', 'slurm', 'mpi'], default='none')
    # torch.distributed.launch passes it; everything here reads the environment
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0)


def add_prediction_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for prediction files."""
    parser.add_argument('--save-json', metavar='FILE', help='write boxes and masks as COCO results (detectors)')
    parser.add_argument(
        '--save-txt',
        metavar='DIR',
        help='write YOLO text, one file per image: class, then box or polygon in normalised coordinates (detectors)',
    )
    parser.add_argument('--save-conf', action='store_true', help='append the score to each line of --save-txt')
    parser.add_argument(
        '--save-labels',
        metavar='DIR',
        help='write segmentation masks as grey PNG images, in the values of the annotation files (segmentors)',
    )


# --- the command ------------------------------------------------------------------------------------------------------


def main() -> None:
    """Run the tool named by the first argument with the others.

    Raises:
        SystemExit: The first argument is no tool, mmlinattn is not installed, or the tool exits.
    """
    folder = tools_folder()
    parser = argparse.ArgumentParser(
        prog='mmlinattn',
        description='Run a tool of mmlinattn.',
        epilog=f'tools: {folder}',
        formatter_class=argparse.RawDescriptionHelpFormatter,  # a path is one line
    )
    parser.add_argument('--version', action='version', version=installed_version())
    parser.add_argument('command', choices=TOOLS, help='the tool to run')
    parser.add_argument('arguments', nargs=argparse.REMAINDER, help='arguments of the tool; --help lists them')
    args = parser.parse_args()
    tool = folder / TOOLS[args.command]
    global started_as
    started_as = f'mmlinattn {args.command}'
    sys.argv = [str(tool), *args.arguments]
    runpy.run_path(str(tool), run_name='__main__')


if __name__ == '__main__':
    main()
