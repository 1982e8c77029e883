# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Kernel launches and Python calls of a training step on a GPU, counted on a CPU.

Operators are counted by a dispatch mode while the CPU takes the path of a GPU (``ops.dispatch.as_on_gpu``) under the
autocast rules of CUDA. Views and allocations launch nothing. Counts do not depend on channels or batch size, so the
models are narrow.
"""

import contextlib
import math
import sys
import warnings
from collections.abc import Iterator
from typing import Any, Callable
from unittest import mock

import torch
from mmengine.registry import MODELS
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import mmlinattn  # noqa: F401  registers the backbones
from mmlinattn import ops
from mmlinattn.utils import private_apis

HALF = (torch.bfloat16, torch.float16)
SWIN = 'Swin-T of MMDetection'

# --- autocast ---------------------------------------------------------------------------------------------------------

# ATen/autocast_mode.h, PyTorch 2.14: operators that CUDA's autocast runs in float32 ...
TO_FLOAT32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm group_norm
    cosine_similarity nll_loss l1_loss smooth_l1_loss huber_loss mse_loss binary_cross_entropy_with_logits kl_div
    logsumexp dist cdist
""".split()
# ... whose result is float32 unless the caller gives a dtype ...
SETS_DTYPE = 'prod softmax log_softmax cumprod cumsum linalg_vector_norm sum'.split()
# ... and that take the widest type of their arguments. The lower-precision list is that of CPUs.
PROMOTES = 'addcdiv addcmul atan2 dot index_put scatter_add grid_sampler'.split()


def _to_float32(op, args, kwargs):
    def widen(x):
        return x.float() if isinstance(x, Tensor) and x.dtype in HALF else x

    return op(*map(widen, args), **{key: widen(value) for key, value in kwargs.items()})


def _set_dtype(op, args, kwargs):
    is_given = kwargs.get('dtype') is not None or any(isinstance(arg, torch.dtype) for arg in args)
    if args[0].dtype in HALF and not is_given:
        kwargs = dict(kwargs, dtype=torch.float32)
    return op(*args, **kwargs)


def _promote(op, args, kwargs):
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if any(x.dtype in HALF for x in tensors) and any(x.dtype == torch.float32 for x in tensors):
        return _to_float32(op, args, kwargs)
    return op(*args, **kwargs)


def _overloads(name: str) -> Iterator[Any]:
    packet = getattr(torch.ops.aten, name)
    for overload in packet.overloads():
        op = getattr(packet, overload)
        kinds = [str(argument.type) for argument in op._schema.arguments]
        if 'out' not in overload and not any('Dimname' in kind for kind in kinds):
            yield op


@contextlib.contextmanager
def cuda_autocast():
    """Context with the autocast lists of CUDA for CPUs. The lists of CPUs leave LayerNorm, softmax and sums in
    bfloat16."""
    rules = {_to_float32: TO_FLOAT32, _set_dtype: SETS_DTYPE, _promote: PROMOTES}

    def kernel(rule: Callable, op):
        def call(*args, **kwargs):
            with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
                return rule(op, args, kwargs)

        return call

    with torch.library._scoped_library('aten', 'IMPL') as library:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # kernels are overridden on purpose
            for rule, names in rules.items():
                for op in (op for name in names for op in _overloads(name)):
                    library.impl(op, kernel(rule, op), 'AutocastCPU')
        yield


def autocast() -> torch.autocast:
    """Return bfloat16 autocast for one forward pass; at its end PyTorch drops the cast weights."""
    return torch.autocast('cpu', torch.bfloat16)


@contextlib.contextmanager
def gpu_path(is_gpu: bool = True):
    """Context in which ops treat CPU tensors as CUDA tensors, also while a dispatch mode counts their operations.

    Args:
        is_gpu (bool): False for the path of the CPU.
    """
    # a built-in function adds no Python call
    with mock.patch.object(private_apis, 'num_modes', int):
        with ops.dispatch.as_on_gpu() if is_gpu else contextlib.nullcontext():
            yield


# --- counts -----------------------------------------------------------------------------------------------------------

NO_LAUNCH = (
    'view', '_unsafe_view', '_reshape', 'alias', 'as_strided', 'detach', 't.', 'empty', 'new_empty', 'lift_fresh',
    'promote_types', '_local_scalar',
)  # fmt: skip
# Tensors and blocks that one launch of a multi-tensor kernel takes, by its number of lists (ForeachFunctors.cuh)
TENSORS, BLOCKS, BLOCK = {1: 110, 2: 64, 3: 48, 4: 36}, 320, 65536


def multi_tensor_launches(tensors: list[Tensor], lists: int) -> int:
    """Return a lower bound of the launches of a foreach or fused kernel on ``lists`` lists of ``tensors``."""
    blocks = sum(math.ceil(x.numel() / BLOCK) for x in tensors)
    return max(math.ceil(len(tensors) / TENSORS[lists]), math.ceil(blocks / BLOCKS))


class Launches(TorchDispatchMode):
    """Counter of the operators that start a kernel on a GPU.

    Attributes:
        count (int): Launches so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix('aten::').split('.')[0] + '.'
        if name.startswith('_foreach_'):
            lists = [arg for arg in args if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], Tensor)]
            writes = not name.endswith('_.')  # results in new memory are one more list
            self.count += multi_tensor_launches(lists[0], min(len(lists) + writes, 4))
        elif not func.is_view and not name.startswith(NO_LAUNCH):
            self.count += 1
        return func(*args, **(kwargs or {}))


def launches(function: Callable, *args) -> int:
    """Count the kernel launches of ``function(*args)``."""
    with Launches() as counter:
        function(*args)
    return counter.count


def python_calls(function: Callable, *args) -> int:
    """Count the calls of Python functions during ``function(*args)``."""
    count = 0

    def note(frame, event, arg):
        nonlocal count
        count += event == 'call'

    sys.setprofile(note)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return count


def backbone_step(model: nn.Module, images: Tensor) -> dict[str, int]:
    """Return the numbers of kernel launches in ``inference``, ``forward`` and ``backward``, and of Python calls.

    The latter are those of a forward pass: ``inference_calls`` and ``forward_calls``.
    """
    found = {}
    with gpu_path():
        for mode in ('inference', 'forward'):
            model.train(mode == 'forward')
            with torch.set_grad_enabled(mode == 'forward'):
                with autocast():
                    model(images)  # fills caches
                with autocast():
                    found[f'{mode}_calls'] = python_calls(model, images)  # without CUDA's lists, Python functions here
                with cuda_autocast(), Launches() as counter, autocast():
                    outs = model(images)
                found[mode] = counter.count
        model.zero_grad()
        found['backward'] = launches(torch.autograd.backward, outs, [out.detach() for out in outs])
    return found


def detector_step(model: nn.Module, data: dict) -> dict[str, int]:
    """Count the launches of ``backbone`` and ``heads`` (neck, heads, losses) in a training step without the optimizer.

    Args:
        model (nn.Module): Detector of MMDetection.
        data (dict): Batch of its data loader.
    """
    import mmcv._ext
    import torchvision

    outs: list[Tensor] = []
    leaves: list[Tensor] = []
    forward = model.backbone.forward

    def cut(x):
        with Launches() as counter:
            outs[:] = forward(x)
        cut.count = counter.count
        leaves[:] = [out.detach().requires_grad_() for out in outs]  # here the backward pass of the heads ends
        return tuple(leaves)

    def nms(boxes, scores, iou_threshold, offset):
        """Replace MMCV's NMS by the CUDA path of ``mmcv_ops``, as the CPU path has many operators."""
        return torchvision.ops.nms(torch.cat((boxes[:, :2], boxes[:, 2:] + offset), dim=1), scores, iou_threshold)

    model.train().zero_grad()
    data = model.data_preprocessor(data, training=True)
    with gpu_path(), mock.patch.object(model.backbone, 'forward', cut), mock.patch.object(mmcv._ext, 'nms', nms):
        with Launches() as both:
            with cuda_autocast(), autocast():
                losses = model(**data, mode='loss')
            model.parse_losses(losses)[0].backward()
        backward = launches(torch.autograd.backward, outs, [leaf.grad for leaf in leaves])
    return dict(backbone=cut.count + backward, heads=both.count - cut.count)


def adamw_launches(optimizer: torch.optim.Optimizer) -> int:
    """Count the launches of a step of AdamW on a GPU: one fused kernel per group, or eight foreach operators."""
    foreach = (1, 2, 1, 3, 2, 1, 1, 3)  # lists of mul_, lerp_, mul_, addcmul_, sqrt, div_, add_, addcdiv_
    if not isinstance(optimizer, torch.optim.AdamW):
        raise TypeError(f'optimizer={type(optimizer).__name__}: expected AdamW')
    return sum(
        multi_tensor_launches(group['params'], lists)
        for group in optimizer.param_groups
        for lists in ((4,) if group.get('fused') else foreach)
    )


# --- models -----------------------------------------------------------------------------------------------------------

BACKBONES = {
    'RAVLT-T': dict(type='RAVLT', arch='tiny'),
    'RAVLT-T, fully linear': dict(type='RAVLT', arch='tiny', stage_attns=('rala',) * 4),
    'InLine-Swin-T': dict(type='LinearSwin', arch='inline-tiny'),
    'FLatten-Swin-T': dict(type='LinearSwin', arch='flatten-tiny'),
    'RALA-Swin-T': dict(type='LinearSwin', arch='rala-tiny'),
    'InLine-PVT-T': dict(type='LinearPVT', arch='inline-tiny'),
    'FLatten-PVT-T': dict(type='LinearPVT', arch='flatten-tiny'),
    'FLatten-PVTv2-B0': dict(type='LinearPVTv2', arch='flatten-b0'),
    'hMHSA-PVTv2-B1': dict(type='LinearPVTv2', arch='hmhsa-b1'),
    'InLine-CSWin-T': dict(type='LinearCSWin', arch='inline-tiny'),
    'FLatten-CSWin-T': dict(type='LinearCSWin', arch='flatten-tiny'),
    'InLine-DeiT-T': dict(type='LinearDeiT', arch='inline-tiny'),
    'hMHSA-Next-ViT-S': dict(type='LinearNextViT', arch='hmhsa-small'),
}


def build(name: str, drop_path_rate: float = 0.0, shrink: int = 4) -> nn.Module:
    """Build a backbone by its name in :data:`BACKBONES`, or :data:`SWIN`, with channels divided by ``shrink`` (except
    Next-ViT's)."""
    if name == SWIN:
        from mmdet.models.backbones.swin import SwinTransformer

        return SwinTransformer(embed_dims=96 // shrink, drop_path_rate=drop_path_rate)
    config = dict(BACKBONES[name])
    kind = MODELS.get(config['type'])
    arch = dict(kind.arch_zoo[config.pop('arch')])
    if config['type'] != 'LinearNextViT':  # its groups of 32 channels need the published channels
        arch['embed_dims'] = tuple(dim // shrink for dim in arch['embed_dims'])
    return MODELS.build(dict(config, arch=arch, drop_path_rate=drop_path_rate))
