# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Time the operators of ``mmcv_ops/`` beside installed compiled MMCV, on this CPU.

    python benchmarks/run_mmcv_ops.py --rounds 30

Both are called in turns through ``mmcv.ops``. The time is the shortest one, since other work on the machine only makes
a call longer. The ratio is compiled MMCV's time over ours. Compiled MMCV has no deformable attention on CPUs; ours is
compared with the function of ``mmcv.ops`` that MMDetection calls there.
"""

import argparse
import functools
import importlib.util
import sys
from pathlib import Path

import measure
import mmcv._ext
import torch
from mmcv import ops
from mmcv.ops import multi_scale_deform_attn as attention

FILE = Path(__file__).resolve().parents[1] / 'mmcv_ops' / 'mmcv' / '_ext.py'
MODULES = [module for name, module in sys.modules.items() if name[:9] == 'mmcv.ops.' and hasattr(module, 'ext_module')]


def load_ours():
    spec = importlib.util.spec_from_file_location('ours', FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def boxes(count: int, size: float, width=1216, height=800) -> torch.Tensor:
    """Return random boxes (count, 4) as (x1, y1, x2, y2), with sides of up to ``size`` pixels.

    Their top left corners are in the image; boxes may extend beyond its border.
    """
    values = torch.rand(count, 4)
    start = values[:, :2] * torch.tensor([width, height])
    return torch.cat((start, start + values[:, 2:] * size), dim=1)


def backward(function, *tensors):
    """Return a call that computes ``function(*tensors)`` and its gradients."""
    leaves = [tensor.requires_grad_() for tensor in tensors]
    return lambda: torch.autograd.grad(function(*leaves).sum(), leaves)


def calls() -> dict:
    """Return the timed calls: one for both modules, or a pair (ours, compiled)."""
    found = {}
    for count in (1000, 10000):
        found[f'NMS, {count} boxes, 0.7'] = functools.partial(ops.nms, boxes(count, 160), torch.rand(count), 0.7)
    found['soft-NMS, 1000 boxes'] = functools.partial(ops.soft_nms, boxes(1000, 160), torch.rand(1000))
    # RoIs of each level have the sizes that MMDetection's extractor sends there
    levels = [torch.randn(1, 256, 800 // stride, 1216 // stride) for stride in (4, 8, 16, 32)]
    rois = [torch.cat((torch.zeros(250, 1), boxes(250, size)), dim=1) for size in (112, 224, 448, 800)]

    def align(*levels):
        parts = zip(levels, rois, (4, 8, 16, 32))
        return torch.cat([ops.roi_align(x, part, 7, 1 / stride, 0, 'avg', True) for x, part, stride in parts])

    found['RoIAlign 7x7, 1000 RoIs, FPN of 800x1216'] = functools.partial(align, *levels)
    found['the same with gradients'] = backward(align, *levels)
    x, weight = torch.randn(1, 256, 50, 76), torch.randn(256, 256, 3, 3) / 48
    offset, mask = torch.randn(1, 18, 50, 76), torch.rand(1, 9, 50, 76)

    def plain(x, offset, weight):
        return ops.deform_conv2d(x, offset, weight, 1, 1)

    def modulated(x, offset, mask, weight):
        return ops.modulated_deform_conv2d(x, offset, mask, weight, None, 1, 1)

    found['deformable convolution 3x3, 256 channels, 50x76'] = functools.partial(plain, x, offset, weight)
    found['the same with gradients '] = backward(plain, x, offset, weight)
    found['modulated'] = functools.partial(modulated, x, offset, mask, weight)
    found['modulated with gradients'] = backward(modulated, x, offset, mask, weight)
    shapes = torch.tensor([[50, 76], [25, 38], [13, 19], [7, 10]])
    starts = torch.tensor([0, 3800, 4750, 4997])
    value, locations, weights = (
        torch.randn(1, 5067, 8, 32),
        torch.rand(1, 5067, 8, 4, 4, 2),
        torch.rand(1, 5067, 8, 4, 4),
    )

    def ours(value, locations, weights):
        return attention.MultiScaleDeformableAttnFunction.apply(value, shapes, starts, locations, weights, 64)

    def theirs(value, locations, weights):
        return attention.multi_scale_deformable_attn_pytorch(value, shapes, locations, weights)

    tensors = value, locations, weights
    found['deformable attention, 5067 queries'] = tuple(functools.partial(f, *tensors) for f in (ours, theirs))
    found['deformable attention with gradients'] = tuple(backward(f, *tensors) for f in (ours, theirs))
    return found


def use(ext) -> None:
    for module in MODULES:
        module.ext_module = ext


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rounds', type=int, default=30)
    parser.add_argument('--max-seconds', type=float, default=20, help='no further round of a call after these')
    args = parser.parse_args()
    if mmcv._ext.__file__.endswith('.py'):
        parser.error(f'{mmcv._ext.__file__} is not compiled MMCV. Install mmcv with its operators.')
    modules = load_ours(), mmcv._ext
    print(f'torch {torch.__version__}, {torch.get_num_threads()} threads\n')
    print('| | ours | compiled MMCV | ratio |\n| --- | --- | --- | --- |')
    for name, call in calls().items():
        pair = call if isinstance(call, tuple) else (call, call)
        cases = {i: (functools.partial(use, modules[i]), lambda _, f=pair[i]: f()) for i in (0, 1)}
        mine, compiled = measure.interleaved_minima(cases, args.rounds, args.max_seconds).values()
        print(f'| {name} | {mine * 1e3:.2f} ms | {compiled * 1e3:.2f} ms | {compiled / mine:.2f} |', flush=True)


if __name__ == '__main__':
    main()
