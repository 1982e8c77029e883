# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""How a backbone runs: chosen here once a forward pass, never in layers, attentions or hosts.

Modules are plain PyTorch. On a CPU without gradients, :class:`~mmlinattn.inference.cpu.CPUForward` computes the same
with fused operators and reused memory; in graphs, on GPUs, in training, and for modules that are patched or hooked,
the module itself is called.
"""

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
from .snapshot import is_known, snapshot_of

__all__ = ['CPUForward', 'run']

# what forward passes of modules call, and fused forms may not: somebody may replace it
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
    dtype = next(backbone.parameters(), x).dtype  # replicas of DataParallel have no parameters
    casts = dispatch.autocasts(x) and torch.float64 not in (x.dtype, dtype)
    # autocast turns any of its types into any other, but leaves float64 alone
    if not x.is_floating_point() or (x.dtype != dtype and not casts):
        raise ValueError(f'x has the type {x.dtype}; the model is in {dtype} and takes images of that type')
    if dispatch.is_traced():
        with dispatch.size_oblivious():
            return backbone.features(x, plain_caller(backbone))
    if casts and dtype == torch.float32 and _is_slow(x):
        with dispatch.without_autocast(x):
            x = x.float()
            return backbone.features(x, module_caller(backbone, x, x.dtype))
    products = torch.get_autocast_dtype(x.device.type) if casts else x.dtype
    return backbone.features(x, module_caller(backbone, x, products))


def _call(module, *args):
    return module(*args)


def plain_caller(backbone):
    """The default module caller."""
    return call_recomputed if backbone.with_cp else _call


def module_caller(backbone, x: Tensor, dtype: torch.dtype):
    """Return the function that calls the modules of a backbone, with products of type ``dtype``."""
    if dispatch.needs_reference(x) or private_apis.has_global_hooks():
        return plain_caller(backbone)
    if torch.is_grad_enabled():
        # hosts of other packages may compute between the modules as autocast casts
        if dtype == x.dtype or not is_known(type(backbone)) or _code_is_changed():
            return plain_caller(backbone)
        snapshot = snapshot_of(backbone)
        return MixedPrecision(snapshot.groups, x, backbone.with_cp) if snapshot.is_plain else plain_caller(backbone)
    # float16 would lose small layer scales in a matrix
    if not dispatch.on_cpu(x) or backbone.training or dtype == torch.float16:
        return plain_caller(backbone)
    if private_apis.has_function_modes() or _code_is_changed():
        return plain_caller(backbone)
    return CPUForward(dtype, x.dtype).call


def _code_is_changed() -> bool:
    """Whether somebody replaced a function of PyTorch, or a method of a class that has a fused form or whose weights
    one takes."""
    for holder, name, function in _METHODS:
        if holder.__dict__.get(name) is not function:
            return True
    for kind, names in _NAMES.items():
        if len(kind.__dict__) != len(names) and any(callable(vars(kind)[name]) for name in vars(kind).keys() - names):
            return True
    return False


def _is_slow(x: Tensor) -> bool:
    """Return True if autocast casts to bfloat16 on a CPU without units for it: a depth-wise convolution takes a hundred
    times as long there as in float32."""
    is_bfloat16 = torch.get_autocast_dtype('cpu') == torch.bfloat16
    return dispatch.on_cpu(x) and is_bfloat16 and not private_apis.has_bfloat16_units()
