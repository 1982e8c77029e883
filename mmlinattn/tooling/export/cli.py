# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Command line of ``tools/export.py``."""

import argparse
from pathlib import Path

from ...checkpoints.loading import trained_model
from ...utils.building import build_model
from ...utils.errors import RunError
from ..command_line import check_out_file, clean_end, one_line_errors
from ..configs import check_checkpoint, read_config
from ..images import image_channels, usual_size
from .formats import FORMATS
from .models import Sizes, export_model

HOLD_BOXES = ' or '.join(name for name, form in FORMATS.items() if form.holds_boxes)


def main(options: argparse.Namespace) -> None:
    """Export the model given by the arguments of ``tools/export.py``. On failure, print one line and exit with status
    1."""
    with clean_end(), one_line_errors():
        target, form = Path(options.out).expanduser(), FORMATS[options.format]
        if options.format == 'openvino' and target.suffix != form.suffix:  # the weights are in a .bin beside it
            raise RunError(
                f'--out={options.out!r}: expected a name that ends with {form.suffix} for --format {options.format}.'
            )
        form.check_installed()
        if options.checkpoint != 'none':
            options.checkpoint = check_checkpoint(options.checkpoint, 'checkpoint')
        check_out_file(target, options.config, options.checkpoint)
        cfg = read_config(options.config)
        height, width = options.shape or usual_size(cfg)
        sizes = Sizes(options.batch, height, width, options.dynamic, channels=image_channels(cfg))
        sizes.check()
        if options.checkpoint == 'none':
            model, meta = build_model(cfg), None
        else:
            model, meta = trained_model(cfg, options.checkpoint, name=options.config)
        export = export_model(model, cfg, target, options.format, sizes, meta, options.neck)
        size = sum(path.stat().st_size for path in export.files)
        files, outputs = ' and '.join(map(str, export.files)), ', '.join(export.metadata['outputs'])
        print(f'wrote {files}: {options.format}, {size / 2**20:.1f} MiB, outputs {outputs}')
        print(f'serves {export.metadata["serves"]}')
        if export.metadata['task'] == 'detector' and 'boxes' not in export.metadata['outputs'] and not options.neck:
            print(f'backbone and neck only; boxes: --format {HOLD_BOXES}')
        if export.metadata['windows']:
            print(f'one window of those that model.test_cfg tests in: {export.metadata["windows"]}')
        for shape, error in export.errors.items():
            print(f'deviation at {"x".join(map(str, shape))}: {error:.1e} {export.unit}')
        for shape, error in export.default_errors.items():
            at = 'x'.join(map(str, shape))
            print(f'deviation at {at} in {export.precision}: {error:.1e} {export.unit}')
        if export.default_errors:
            print(
                f'{export.precision} is the default of {options.format} on this CPU; for the numbers of the model set '
                "compile_model(..., config={'INFERENCE_PRECISION_HINT': 'f32'})"
            )
