#!/usr/bin/env python
# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What half precision and int8 cost a trained model: AP, mIoU or top-1 accuracy of its graphs beside the model's own.

    python benchmarks/run_precision.py configs/mmdet/ravlt_shapes_quickstart.py work_dirs/quickstart/epoch_5.pth \
        --shape 160 160 --results precision.jsonl

Graphs are written by tools/export.py and take the place of what they hold in the model: a detector keeps its heads in
PyTorch, a classifier and a segmentor what makes labels of logits. The test itself is that of the test tool. What is in
``--results`` is not measured again.
"""

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mmlinattn.apis.cli import add_common_arguments, one_line_errors
from mmlinattn.apis.configs import check_checkpoint, load_config
from mmlinattn.apis.running import build_runner
from mmlinattn.export import FORMATS
from mmlinattn.export.cli import main as export

VARIANTS = (
    ('onnx', 'float32'),
    ('onnx', 'float16'),
    ('onnx', 'int8'),
    ('openvino', 'float16'),
    ('torch-export', 'float16'),
    ('torch-export', 'bfloat16'),
)
METRICS = ('coco/bbox_mAP', 'coco/segm_mAP', 'mIoU', 'accuracy/top1')


def put_in_place(model, run) -> None:
    """Let ``run`` answer for the part of the model that was exported."""

    def first(image):
        outputs = run(image.contiguous())
        return outputs if torch.is_tensor(outputs) else outputs[0]

    if hasattr(model, 'decode_head'):
        model.encode_decode = lambda image, metas: first(image)
    elif hasattr(model, 'head'):
        model.extract_feat = first
        model.head.forward = lambda logits: logits
    else:
        model.extract_feat = lambda image: tuple(run(image.contiguous()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='config file')
    parser.add_argument('checkpoint', help='checkpoint file')
    parser.add_argument('--shape', nargs=2, default=[], metavar=('H', 'W'), help='size of the image of the export')
    parser.add_argument('--results', type=Path, required=True, help='measurements, a line each; is added to')
    add_common_arguments(parser)
    options = parser.parse_args()
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    done = [tuple(json.loads(line)[key] for key in ('config', 'format', 'dtype')) for line in lines]
    task = Path(options.config).parent.name
    with one_line_errors():
        cfg = load_config(options)
        cfg.load_from, cfg.resume = check_checkpoint(options.checkpoint, 'checkpoint'), False
        runner = build_runner(cfg)
        found = runner.test()
    if (task, 'PyTorch', 'float32') not in done:
        report(options, 'PyTorch', 'float32', found)
    for form, dtype in VARIANTS:
        if (task, form, dtype) in done:
            continue
        with TemporaryDirectory() as folder:
            path = Path(folder) / f'graph{FORMATS[form].suffix}'
            arguments = [options.config, options.checkpoint, '--format', form, '--dtype', dtype, '--dynamic']
            arguments += ['--out', str(path), *(['--shape', *options.shape] if options.shape else [])]
            try:
                export(arguments)
            except SystemExit:  # the tool has said why
                report(options, form, dtype, {})
                continue
            put_in_place(runner.model, FORMATS[form].load(path))
            report(options, form, dtype, runner.test_loop.run())


def report(options: argparse.Namespace, form: str, dtype: str, found: dict) -> None:
    """Add a line to the results: no metrics where the graph was refused."""
    metrics = {name: float(found[name]) for name in METRICS if name in found}
    line = json.dumps(dict(config=Path(options.config).parent.name, format=form, dtype=dtype, **metrics))
    with open(options.results, 'a') as file:
        file.write(line + '\n')
    print(line, flush=True)


if __name__ == '__main__':
    main()
