# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Choice of how a backbone calls its modules, made once for each forward pass.

Modules are plain PyTorch. In inference on CPUs their twins are called instead (:mod:`.fused`): copies with the same
weights that use fused operators and reuse memory. In training under autocast, the weights of a stage are cast together
(:mod:`.mixed_precision`). Modules themselves are called in graphs, and if they are patched or hooked.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers import ConvOfGELU
from ..ops import dispatch
from ..utils import private_apis
from . import fused_attention  # noqa: F401  registers twins
from .fused import TWINS, Precision, fuse, replaced_methods
from .mixed_precision import MixedPrecision
from .recomputing import call_recomputed
from .snapshot import Snapshot, dtype_of, snapshot_of

__all__ = ['run']

# functions and methods that modules call but twins may bypass; if a user replaces one, twins are not used
_HOLDERS: list[tuple[Any, str]] = [
    *((kind, name) for kind, twin in TWINS.items() for name in replaced_methods(kind, twin)),
    *((kind, 'forward') for kind in (nn.Conv2d, nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm, ConvOfGELU)),
    *((F, name) for name in ('linear', 'conv2d', 'gelu', 'layer_norm', 'batch_norm')),
]
_FUNCTIONS = [(holder, name, getattr(holder, name)) for holder, name in _HOLDERS]


def run(backbone, x: Tensor) -> tuple[Tensor, ...]:
    """Return the outputs of a backbone for a batch of images, by calling its ``features``.

    Raises:
        ValueError: For images of another shape or type than the backbone takes.
    """
    backbone.check_input(x)
    dtype = dtype_of(backbone) or x.dtype  # replicas of DataParallel have no parameters
    casts = dispatch.autocasts(x) and torch.float64 not in (x.dtype, dtype)
    # autocast converts between half precision and float32, but not float64
    if not x.is_floating_point() or (x.dtype != dtype and not casts):
        raise ValueError(f'x has the type {x.dtype}; the model is in {dtype} and takes images of that type')
    if dispatch.is_traced():
        with dispatch.size_oblivious():
            return backbone.features(x, plain_caller(backbone))
    if casts and dtype == torch.float32 and _is_slow(x):
        with dispatch.without_autocast(x):
            return _run(backbone, x.float(), torch.float32)
    return _run(backbone, x, torch.get_autocast_dtype(x.device.type) if casts else x.dtype)


def _run(backbone, x: Tensor, products: torch.dtype) -> tuple[Tensor, ...]:
    """Return the outputs, with matmuls and convolutions in the type ``products``."""
    call = plain_caller(backbone)
    if dispatch.needs_reference(x) or private_apis.has_global_hooks() or _functions_are_replaced():
        return backbone.features(x, call)
    snapshot = snapshot_of(backbone)
    if torch.is_grad_enabled():
        if snapshot.is_plain and products != x.dtype and snapshot.dtype == torch.float32:
            call = MixedPrecision(snapshot.groups, x, backbone.with_cp)
    # not in float16, which would lose small layer scales merged into weights
    elif dispatch.on_cpu(x) and not backbone.training and products != torch.float16:
        if not private_apis.has_function_modes():
            call = twin_caller(snapshot, Precision.of(products))
    with dispatch.settle() if snapshot.is_plain and x.numel() else nullcontext():
        return backbone.features(x, call)


def _call(module, *args):
    return module(*args)


def plain_caller(backbone) -> Callable:
    """Return the caller of modules without twins, ``call(module, *args)``. With ``with_cp``, blocks are recomputed in
    the backward pass."""
    return call_recomputed if backbone.with_cp else _call


def twin_caller(snapshot: Snapshot, precision: Precision) -> Callable:
    """Return a function ``call(module, *args)`` that calls the fused twin of a module.

    A twin is made when its module is first called, and kept in ``snapshot``.
    """
    twins = snapshot.twins.setdefault(precision, {})

    def call(module, *args) -> Any:
        twin = twins.get(module)
        if twin is None:
            twin = fuse(module, precision)
            if module in snapshot.modules:
                twins[module] = twin
        return twin(*args)

    return call


def _functions_are_replaced() -> bool:
    """Return True if a function or method of ``_FUNCTIONS`` was replaced after import."""
    for holder, name, function in _FUNCTIONS:
        if getattr(holder, name) is not function:
            return True
    return False


def _is_slow(x: Tensor) -> bool:
    """Return True if autocast casts to bfloat16 on a CPU without instructions for it. A depth-wise convolution takes a
    hundred times as long there as in float32."""
    is_bfloat16 = torch.get_autocast_dtype('cpu') == torch.bfloat16
    return dispatch.on_cpu(x) and is_bfloat16 and not private_apis.has_bfloat16_units()
