# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The command line of ``tools/export.py``."""

import argparse
from pathlib import Path
from typing import Any, Optional

from mmengine.runner.checkpoint import CheckpointLoader
from torch import nn

from ...checkpoints.convert import convert_state
from ...checkpoints.states import some
from ...engine.hooks.checkpoint_match import UNUSED_IN_TESTS
from ...utils.building import build_model
from ...utils.errors import RunError
from ..command_line import check_out_file, one_line_errors
from ..configs import check_checkpoint, read_config
from .formats import FORMATS
from .models import SMALLEST, Sizes, default_shape, export_model


def parse_args(args: Optional[list[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description='Write a classifier or segmentor, or the backbone and neck of a detector, as a graph, and check '
        'the file against the model.'
    )
    add = parser.add_argument
    add('config', help='config file')
    add('checkpoint', help='checkpoint file, URL, mmlinattn://NAME, or none for random weights')
    add('--format', required=True, choices=list(FORMATS))
    add('--out', required=True, metavar='FILE', help='file to write')
    add('--shape', nargs=2, type=int, metavar=('H', 'W'), help='size of the image [what the config tests at]')
    add('--batch', type=int, default=1, help='images at a time [1]')
    add('--dynamic', action='store_true', help=f'serve any batch and size from {SMALLEST}x{SMALLEST} on')
    return parser.parse_args(args)


def load(model: nn.Module, source: str, config: str) -> dict:
    """Load a checkpoint of this project or a published one; returns its ``meta``.

    As in tests, auxiliary heads need not fit, and the file may hold parts that the model does not have.

    Raises:
        RunError: It cannot be read, or does not fit the model key by key.
    """
    checkpoint: Any = CheckpointLoader.load_checkpoint(source, 'cpu', logger='silent')
    state, report, _ = convert_state(checkpoint, source, model)
    parts = {name for name, _ in model.named_children()}
    unexpected = [key for key in report.unexpected if key.partition('.')[0] in parts]
    for kind, keys in dict(mismatched=report.mismatched, unexpected=unexpected, missing=report.missing).items():
        wrong = [key for key in keys if not key.startswith(UNUSED_IN_TESTS)]
        if wrong:
            raise RunError(f'checkpoint {source!r} does not fit the model of {config}; {kind}: {some(wrong)}.')
    model.load_state_dict(state, strict=False)
    return (checkpoint.get('meta') if isinstance(checkpoint, dict) else None) or {}


def main(args: Optional[list[str]] = None) -> None:
    """Export as the arguments say; exits with status 1 and one line where that fails."""
    options = parse_args(args)
    with one_line_errors():
        target, form = Path(options.out).expanduser(), FORMATS[options.format]
        if options.format == 'openvino' and target.suffix != form.suffix:  # the weights lie beside it, in a .bin
            raise RunError(f'--out {options.out!r} has to end with {form.suffix} for --format {options.format}.')
        form.check_installed()
        check_out_file(target)
        cfg = read_config(options.config)
        height, width = options.shape or default_shape(cfg)
        sizes = Sizes(options.batch, height, width, options.dynamic)
        sizes.check()
        model, meta = build_model(cfg), None
        if options.checkpoint != 'none':
            meta = load(model, check_checkpoint(options.checkpoint, 'checkpoint'), options.config)
        export = export_model(model, cfg, target, options.format, sizes, meta)
        size = sum(path.stat().st_size for path in export.files)
        files, outputs = ' and '.join(map(str, export.files)), ', '.join(export.metadata['outputs'])
        print(f'wrote {files}: {options.format}, {size / 2**20:.1f} MiB, outputs {outputs}')
        print(f'serves {export.metadata["serves"]}')
        for shape, error in export.errors.items():
            print(f'deviation at {"x".join(map(str, shape))}: {error:.1e} standard deviations')
