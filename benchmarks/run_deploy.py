#!/usr/bin/env python
# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Measure the latency of backbones in PyTorch, ONNX Runtime and OpenVINO on a CPU.

    python benchmarks/run_deploy.py --results deploy.jsonl --out deploy.md     # one thread, float32, batch 1

Each backbone is exported at the timed size. The runtimes take turns in one process, and the shortest time of each
counts: other load only makes a call longer. Cases in ``--results`` are skipped.
"""

import argparse
import copy
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from measure import interleaved_minima
from mmengine.registry import MODELS
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mmlinattn  # noqa: F401  registers the backbones
from mmlinattn.tooling.export import FORMATS, ExportableModel
from mmlinattn.tooling.export.models import deviation

BACKBONES = {
    'RAVLT-T': dict(type='RAVLT', arch='tiny'),
    'RAVLT-T, linear': dict(type='RAVLT', arch='tiny', stage_attns=('rala',) * 4),
    'InLine-Swin-T': dict(type='LinearSwin', arch='inline-tiny'),
    'FLatten-PVTv2-B0': dict(type='LinearPVTv2', arch='flatten-b0'),
    'ResNet-50': dict(type='mmdet.ResNet', depth=50),
}
SIZES = ('512x512', '800x1216')
RUNTIMES = ('PyTorch', 'ONNX Runtime', 'OpenVINO')


class Pyramid(nn.Module):
    """Detector that consists of a backbone only, in the form that :class:`ExportableModel` takes."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.extract_feat = backbone


def onnx_session(path: Path, threads: int):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, providers=['CPUExecutionProvider'])
    return lambda image: [torch.from_numpy(out) for out in session.run(None, {'image': image.numpy()})]


def openvino_model(path: Path, threads: int):
    import openvino

    # by default CPUs with bfloat16 or float16 units round to it
    settings = {'INFERENCE_PRECISION_HINT': 'f32', 'INFERENCE_NUM_THREADS': threads, 'NUM_STREAMS': 1}
    compiled = openvino.compile_model(str(path), 'CPU', settings)
    return lambda image: [torch.from_numpy(out) for out in compiled(image.numpy()).values()]


@torch.no_grad()
def measure(name: str, size: str, threads: int, repeats: int, max_seconds: float) -> dict:
    """Time a backbone in PyTorch, ONNX Runtime and OpenVINO.

    Args:
        name: Key of ``BACKBONES``.
        size: Image size as ``'HxW'``, such as ``'224x224'``.
        threads: Threads of each runtime.
        repeats: Number of timed calls, in turns.
        max_seconds: Time limit of the calls.

    Returns:
        dict: ``milliseconds`` (shortest time) and ``errors`` (deviation from PyTorch), both by runtime.
    """
    torch.manual_seed(0)
    height, width = map(int, size.split('x'))
    model = ExportableModel(Pyramid(MODELS.build(BACKBONES[name])))
    image = torch.randn(1, 3, height, width)
    names = model.output_names(model(image))
    model.fold()
    with TemporaryDirectory() as folder:
        calls = {'PyTorch': model}
        for runtime, form, load in (
            ('ONNX Runtime', 'onnx', onnx_session),
            ('OpenVINO', 'openvino', openvino_model),
        ):
            path = Path(folder) / f'model{FORMATS[form].suffix}'
            written = copy.deepcopy(model)
            written.fold(FORMATS[form].prefers_convolutions)
            FORMATS[form].write(written, image, path, None, dict(outputs=names))
            calls[runtime] = load(path, threads)
        errors = {runtime: deviation(call(image), model(image)) for runtime, call in calls.items()}
        cases = {runtime: (lambda: image, call) for runtime, call in calls.items()}
        shortest = interleaved_minima(cases, repeats, max_seconds)
    return dict(milliseconds={key: 1000 * value for key, value in shortest.items()}, errors=errors)


def table(results: list[dict]) -> str:
    lines = ['| backbone | size | ' + ' | '.join(RUNTIMES) + ' |', '| --- ' * (len(RUNTIMES) + 2) + '|']
    for result in results:
        took = result['milliseconds']
        cells = [f'{took[runtime]:.0f} ms ({took["PyTorch"] / took[runtime]:.2f}x)' for runtime in RUNTIMES]
        lines.append(f'| {result["backbone"]} | {result["size"]} | ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines) + '\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--results', type=Path, required=True, help='file of measurements; run again to resume')
    parser.add_argument('--out', type=Path, help='table to write')
    parser.add_argument('--backbones', nargs='+', choices=list(BACKBONES), default=list(BACKBONES), metavar='NAME')
    parser.add_argument('--sizes', nargs='+', default=SIZES, metavar='HxW')
    parser.add_argument('--threads', type=int, default=1)
    parser.add_argument('--repeats', type=int, default=10)
    parser.add_argument('--max-seconds', type=float, default=60.0, help='of one runtime and case in all')
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    results = [json.loads(line) for line in lines]
    for name in options.backbones:
        for size in options.sizes:
            if any((result['backbone'], result['size']) == (name, size) for result in results):
                continue
            found = measure(name, size, options.threads, options.repeats, options.max_seconds)
            results.append(dict(backbone=name, size=size, **found))
            with open(options.results, 'a') as file:
                file.write(json.dumps(results[-1]) + '\n')
            print(json.dumps(results[-1]), flush=True)
    print(table(results))
    if options.out:
        options.out.write_text(table(results))


if __name__ == '__main__':
    main()
