# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""How a backbone runs: chosen here once a forward pass, never in layers, attentions or hosts.

Modules are plain PyTorch. On a CPU without gradients, :class:`~mmlinattn.inference.cpu.CPUForward` computes the same
with fused operators and reused memory; in graphs, on GPUs, in training, and for modules that are patched or hooked,
the module itself is called.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import dispatch
from ..utils import private_apis
from ..utils.private_apis import methods_of
from . import attention  # noqa: F401  fills the table
from .cpu import KNOWN, CPUForward
from .mixed_precision import MixedPrecision
from .recomputing import call_recomputed
from .snapshot import dtype_of, is_known, snapshot_of

__all__ = ['CPUForward', 'run']

# functions that forward passes of modules call and fused ones may not: users may replace them
_OWN = methods_of(KNOWN)
_METHODS = [
    *_OWN,
    *((nn.Module, name, getattr(nn.Module, name)) for name in ('__call__', '_call_impl')),
    *((F, name, getattr(F, name)) for name in ('linear', 'conv2d', 'gelu', 'layer_norm', 'batch_norm')),
]
_NAMES = {kind: frozenset(vars(kind)) for kind, *_ in _OWN}


def run(backbone, x: Tensor) -> tuple[Tensor, ...]:
    """The outputs of a backbone for a batch of images, by its ``features``.

    Raises:
        ValueError: For images of another shape or type than the backbone takes.
    """
    backbone.check_input(x)
    dtype = dtype_of(backbone) or x.dtype  # replicas of DataParallel have no parameters
    casts = dispatch.autocasts(x) and torch.float64 not in (x.dtype, dtype)
    # autocast turns any of its types into any other, but leaves float64 alone
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
    """Outputs with products of type ``products``."""
    call = plain_caller(backbone)
    if dispatch.needs_reference(x) or private_apis.has_global_hooks() or _code_is_changed():
        return backbone.features(x, call)
    # a host of another package may compute between its modules as autocast casts
    snapshot = snapshot_of(backbone) if is_known(type(backbone)) else None
    is_plain = snapshot is not None and snapshot.is_plain
    if torch.is_grad_enabled():
        if is_plain and products != x.dtype and snapshot.dtype == torch.float32:
            call = MixedPrecision(snapshot.groups, x, backbone.with_cp)
    # float16 would lose small layer scales in a matrix
    elif dispatch.on_cpu(x) and not backbone.training and products != torch.float16:
        if not private_apis.has_function_modes():
            call = CPUForward(products, x.dtype).call
    with dispatch.settle() if is_plain else nullcontext():
        return backbone.features(x, call)


def _call(module, *args):
    return module(*args)


def plain_caller(backbone):
    """The default module caller."""
    return call_recomputed if backbone.with_cp else _call


def _code_is_changed() -> bool:
    """Return True if a function of PyTorch or a method of a class with a fused form was replaced."""
    for holder, name, function in _METHODS:
        if holder.__dict__.get(name) is not function:
            return True
    for kind, names in _NAMES.items():
        if len(kind.__dict__) != len(names):
            for name in kind.__dict__.keys() - names:
                if callable(kind.__dict__[name]):
                    return True
    return False


def _is_slow(x: Tensor) -> bool:
    """Return True if autocast casts to bfloat16 on a CPU without units for it: a depth-wise convolution takes a hundred
    times as long there as in float32."""
    is_bfloat16 = torch.get_autocast_dtype('cpu') == torch.bfloat16
    return dispatch.on_cpu(x) and is_bfloat16 and not private_apis.has_bfloat16_units()
