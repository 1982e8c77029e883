# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Calls of ``mmcv.ops`` on PyTorch's default device, and values and gradients of compiled MMCV.

``python tests/helpers/cases.py`` records them with installed compiled MMCV.
"""

import sys
from itertools import product
from pathlib import Path

import numpy as np
import torch
from mmcv import ops

RECORDS = Path(__file__).resolve().parents[1] / 'data' / 'mmcv_ops' / 'records.npz'


def users() -> list:
    return [module for name, module in sys.modules.items() if name[:9] == 'mmcv.ops.' and hasattr(module, 'ext_module')]


def summary(results) -> np.ndarray:
    """Return one array for a list of results: shapes, integers, and 16 random projections of each float array."""
    parts = []
    for result in (np.asarray(torch.as_tensor(each).cpu()) for each in results):
        values = result.ravel().astype(np.float64)
        if result.dtype.kind == 'f' and values.size > 16:
            values = np.random.RandomState(values.size).randn(16, values.size) @ values
        parts += [result.shape, values]
    return np.concatenate(parts) if parts else np.zeros(0)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.tensor(np.random.RandomState(seed).randn(*shape)).float()


def uniform(seed: int, *shape: int) -> torch.Tensor:
    return torch.tensor(np.random.RandomState(seed).rand(*shape)).float()


def boxes(seed: int, count: int, scale=60.0, whole=False) -> tuple:
    """Return ``count`` random overlapping boxes (N, 4) as (x1, y1, x2, y2) in pixels, and different scores (N,).

    ``scale`` is the largest x1 and y1 in pixels. With ``whole``, coordinates are rounded to integers.
    """
    corners, size = uniform(seed, count, 2) * scale, uniform(seed + 1, count, 2) * 40
    made = torch.cat((corners, corners + size), dim=1)
    scores = torch.tensor(np.random.RandomState(seed + 2).permutation(count) / max(count, 1)).float()
    return (made.round() if whole else made), scores


def rois(seed: int, count: int) -> torch.Tensor:
    """Return RoIs (N, 5) of two images of 100 x 152 pixels: image index, left, top, right, bottom.

    Some RoIs are partly outside; one has no area.
    """
    values = uniform(seed, count, 5)
    start = values[:, 1:3] * torch.tensor([170.0, 115.0]) - 12
    made = torch.cat(((values[:, :1] > 0.5).float(), start, start + values[:, 3:] ** 2 * 90), dim=1)
    made[:1, 3:] = made[:1, 1:3]
    return made


def with_gradients(function, *tensors) -> list:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    value = function(*leaves)
    value.backward(normal(99, *value.shape).to(value.dtype))
    return [value.detach(), *(leaf.grad for leaf in leaves)]


def convolution(modulated, groups, deform_groups, stride, padding, dilation, kernel, bias=False, dtype=torch.float32):
    x, weight = normal(1, 2, 4 * deform_groups, 7, 9), normal(2, 4, 4 * deform_groups // groups, *kernel)
    size = torch.nn.functional.conv2d(x[:, :1], weight[:1, :1], None, stride, padding, dilation).shape[2:]
    taps = deform_groups * kernel[0] * kernel[1]
    offset, mask = normal(3, 2, 2 * taps, *size) * 2, uniform(4, 2, taps, *size)
    settings = stride, padding, dilation, groups, deform_groups
    if modulated:
        tensors = [x, offset, mask, weight, *([normal(5, 4)] if bias else [])]

        def run(x, offset, mask, weight, bias=None):
            return ops.modulated_deform_conv2d(x, offset, mask, weight, bias, *settings)
    else:
        tensors = [x, offset, weight]

        def run(x, offset, weight):
            return ops.deform_conv2d(x, offset, weight, *settings)

    return with_gradients(run, *(tensor.to(dtype) for tensor in tensors))


def make_cases() -> dict:
    """Return functions without arguments by name; each returns the list of results of an operator."""
    cases = {}
    # whole numbers have overlaps of exactly 0.5 and 0.6
    for count, offset, whole, threshold in product((0, 1, 300), (0, 1), (False, True), (0.5, 0.6)):
        made = boxes(count, count, whole=whole)
        name = f'nms-{count}-{offset}-{whole}-{threshold}'
        cases[name] = lambda m=made, t=threshold, o=offset: [ops.nms(*m, t, o)[1]]
    few = [tensor[:60] for tensor in boxes(300, 300)]
    for offset, method in product((0, 1), ('naive', 'linear', 'gaussian')):
        cases[f'softnms-{offset}-{method}'] = lambda o=offset, k=method: ops.soft_nms(*few, 0.3, 0.5, 0.05, k, o)
    made = boxes(7, 300)
    classes = torch.tensor(np.random.RandomState(8).randint(0, 4, 300))
    cases['nms-limits'] = lambda: [ops.nms(*made, 0.5, 0, 0.3, 20)[1]]
    for split in (10000, 100):
        settings = dict(type='nms', iou_threshold=0.5, split_thr=split)
        cases[f'batched_nms-{split}'] = lambda s=settings: [ops.batched_nms(*made, classes, s)[1]]
    odd = made[0].clone()
    odd[3], odd[10, 2], odd[30, 2] = torch.nan, torch.inf, odd[30, 0] - 5
    odd[20:25, 2:] = odd[20:25, :2]
    cases['nms-odd'] = lambda: [ops.nms(odd, made[1], 0.5)[1]]
    cases['nms_match'] = lambda: ops.nms_match(torch.cat((made[0], made[1][:, None]), dim=1), 0.5)
    x = normal(11, 2, 3, 25, 38)
    for count, mode, aligned, ratio in product((0, 4), ('avg', 'max'), (True, False), (0, 2)):

        def align(count=count, settings=((3, 2), 0.25, ratio, mode, aligned)):
            return with_gradients(lambda x: ops.roi_align(x, rois(12, count), *settings), x)

        cases[f'roi_align-{count}-{mode}-{aligned}-{ratio}'] = align
    for index, settings in enumerate(
        (
            (1, 1, 1, 1, 1, (3, 3)),
            (2, 1, 2, 1, 1, (3, 3)),
            (1, 2, 1, 2, 2, (3, 3)),
            (2, 2, (2, 1), (1, 0), (1, 2), (3, 2)),
        )
    ):
        cases[f'deform_conv-{index}'] = lambda s=settings: convolution(False, *s)
        cases[f'modulated-{index}'] = lambda s=settings, b=index % 2 == 1: convolution(True, *s, bias=b)
    for kind in ('collect', 'distribute'):
        for size in ((7, 9), (3, 1)):  # larger and smaller than the feature map
            x_mask = normal(13, 2, size[0] * size[1], 3, 4)
            cases[f'psamask-{kind}-{size[0]}'] = lambda k=kind, s=size, m=x_mask: with_gradients(ops.PSAMask(k, s), m)
    return cases


if __name__ == '__main__':
    import mmcv._ext

    if mmcv._ext.__file__.endswith('.py'):
        raise SystemExit(f'{mmcv._ext.__file__} is not compiled MMCV')
    np.savez_compressed(RECORDS, **{name: summary(case()) for name, case in make_cases().items()})
