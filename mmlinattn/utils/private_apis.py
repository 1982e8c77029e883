# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Most private APIs of PyTorch, MMEngine and MMCV that this package reads or patches.

Docstrings of patches name the version they were written for, and why nothing public does it. Where a release lacks a
private API of PyTorch, a public one replaces it.
"""

import functools
from collections.abc import Iterable
from typing import Any, Callable, cast

import torch
from mmengine.model import BaseModule
from mmengine.registry import DefaultScope
from mmengine.runner import CheckpointLoader
from torch import nn, overrides
from torch.autograd import forward_ad
from torch.fx.experimental import _config, symbolic_shapes
from torch.nn.modules import module as _module
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._device import DeviceContext
from torch.utils.data import DataLoader

# --- what PyTorch says of itself --------------------------------------------------------------------------------------

# oneDNN's operators with a fused activation or sum, which torch.compile uses on CPUs
_mkldnn = torch.ops.mkldnn
LINEAR: Any = getattr(_mkldnn, '_linear_pointwise', None)
CONV: Any = getattr(_mkldnn, '_convolution_pointwise', None)
HAS_ONEDNN = None not in (LINEAR, CONV)
CAN_BE_SIZE_OBLIVIOUS = hasattr(_config, 'backed_size_oblivious')  # since torch 2.6


# whether oneDNN multiplies bfloat16 natively on this CPU (AVX-512 BF16, AMX)
has_bfloat16_units: Any = getattr(_mkldnn, '_is_mkldnn_bf16_supported', bool)
# how many dispatch modes, which count or record every operation, are on; the innermost torch.func transform
num_modes: Any = torch._C._len_torch_dispatch_stack
innermost_transform: Any = torch._C._functorch.peek_interpreter_stack
forward_mode: Any = forward_ad  # whose level is 0 or more where derivatives are taken forward
is_batched: Any = torch._C._functorch.is_legacy_batchedtensor  # by ``torch.autograd.grad(..., is_grads_batched=True)``
is_exporting: Any = getattr(torch.compiler, 'is_exporting', torch.compiler.is_compiling)  # since torch 2.7


def has_global_hooks() -> bool:
    """Whether every module of the process has hooks. ``_has_any_global_hook`` is newer than PyTorch 2.4."""
    return bool(
        _module._global_forward_hooks
        or _module._global_forward_pre_hooks
        or _module._global_backward_hooks
        or _module._global_backward_pre_hooks
    )


def has_function_modes() -> bool:
    """Whether functions of PyTorch are watched or replaced; ``torch.device`` as a context does neither."""
    return any(type(mode) is not DeviceContext for mode in overrides._get_current_function_mode_stack())


def has_static_value(size) -> bool:
    """Whether a size is a number now, not something that a graph leaves open."""
    check = getattr(symbolic_shapes, 'has_static_value', None)  # since torch 2.5
    return type(size) is int if check is None else check(size)


def is_surely_above_one(size) -> bool:
    return symbolic_shapes.statically_known_true(size > 1)


def size_oblivious():
    """A context in which ``torch.export`` does not ask whether an open size is 1."""
    return _config.patch(  # type: ignore[attr-defined]
        backed_size_oblivious=True
    )


# copies of a list of tensors by one kernel, other types included
FOREACH_COPY: Any = torch._foreach_copy_
# the gradient of ReLU in one pass, into given memory
RELU_BACKWARD = torch.ops.aten.threshold_backward.grad_input
ELU_BACKWARD: Any = torch.ops.aten.elu_backward.grad_input
SOFTMAX_BACKWARD: Any = torch._softmax_backward_data


# --- objects of MMEngine, MMCV and PyTorch ----------------------------------------------------------------------------


def default_scopes() -> list[str]:
    """MMEngine 0.10.7: the default scopes so far, the present one last; public is that one alone, which is ours while
    MMEngine builds a dict of ours."""
    return [scope.scope_name for scope in DefaultScope._instance_dict.values()]


def checkpoint_prefixes() -> list[str]:
    """MMEngine 0.10.7: how addresses begin that a loader of checkpoints is registered for; there is no list of them."""
    return [prefix for prefix in CheckpointLoader._schemes if prefix]


def turn_into(thing: Any, kind: type) -> None:
    """An object of a class becomes one of a subclass and keeps its state.

    MMEngine 0.10.7's ``CheckpointHook``, built before custom hooks see the run; a config cannot set its type where
    upstream's base file does.
    """
    thing.__class__ = kind


def call_compiled(module: nn.Module, call: Callable) -> None:
    """PyTorch 2.11: what ``nn.Module.compile`` sets. It compiles each module by itself; here those of a kind share one
    code."""
    module._compiled_call_impl = call


def is_altered(*modules: nn.Module) -> bool:
    """PyTorch 2.14: whether a module computes more than its class and weights say. It has hooks or a method of its own,
    is compiled, or its weights are sparse or of a subclass of tensors. There is no public list of hooks."""
    return any(map(_is_altered, modules))


def _is_altered(module: nn.Module) -> bool:
    return bool(module._forward_pre_hooks) or _is_watched(module)


def _is_watched(module: nn.Module) -> bool:
    if module._compiled_call_impl or not _methods(cast(Any, type(module))).isdisjoint(vars(module)):
        return True
    if module._forward_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    weights = (weight for weight in module._parameters.values() if weight is not None)
    return any(type(w) not in (torch.Tensor, nn.Parameter) or w.layout != torch.strided for w in weights)


_CONV_METHODS = (nn.Module.__call__, nn.Module._call_impl, nn.Conv2d.forward, nn.Conv2d._conv_forward)
_WEIGHT_HOOKS = (WeightNorm, SpectralNorm, BasePruningMethod)


def is_weighted_conv(module: nn.Module) -> bool:
    """PyTorch 2.14: True if a module is a convolution by its ``weight``, that of a parametrization or a hook of
    ``torch.nn.utils`` included."""
    kind: Any = type(module)
    if torch.compiler.is_dynamo_compiling():  # it cannot trace the questions below
        hooks = module._forward_hooks or module._forward_pre_hooks
        return kind is nn.Conv2d and not hooks and 'forward' not in module.__dict__
    if not issubclass(kind, nn.Conv2d) or has_global_hooks():
        return False
    if (kind.__call__, kind._call_impl, kind.forward, kind._conv_forward) != _CONV_METHODS:
        return False
    return all(isinstance(h, _WEIGHT_HOOKS) for h in module._forward_pre_hooks.values()) and not _is_watched(module)


def renewed_weight(conv: nn.Conv2d) -> torch.Tensor:
    """PyTorch 2.14: the weight after the hooks that compute it before each call."""
    for hook in conv._forward_pre_hooks.values():
        hook(conv, ())
    return conv.weight


@functools.cache
def _methods(kind: Any) -> frozenset:
    return frozenset(name for name in dir(kind) if callable(getattr(kind, name, None)))


def methods_of(kinds: Iterable[type]) -> list[tuple[type, str, Any]]:
    """The methods of modules, those of ``nn.Module`` aside: (class, name, function)."""
    classes = {base for kind in kinds for base in kind.__mro__} - set(BaseModule.__mro__)
    return [(base, name, value) for base in classes for name, value in vars(base).items() if callable(value)]


def keep_sizes_open() -> None:
    """PyTorch 2.14's Inductor compiles the gradient of a convolution for each image size; up to 2.11 it calls PyTorch's
    operator, as it does again after this."""
    from torch._inductor import lowering

    lowering.make_fallback(torch.ops.aten.convolution_backward, lowering.constrain_to_fx_strides, warn=False)


def draw_from(loader: DataLoader, batches: Any, load: Callable) -> None:
    """PyTorch 2.11: another batch sampler for a loader, which refuses it for the sake of iterators that are under way,
    and a function that loads whole batches, for which PyTorch looks in the data set. The iterator of a loop over
    iterations, begun before any hook runs, is dropped."""
    vars(loader.dataset)['__getitems__'] = load
    vars(loader).update(batch_sampler=batches, _iterator=None)


def number_from(loop: Any, num_done: int) -> None:
    """MMEngine 0.10.7: ``EpochBasedTrainLoop`` numbers the batches of a resumed epoch from 0; hooks see the place in
    the epoch. ``del loop.run_iter`` ends it."""
    run_iter = loop.run_iter
    loop.run_iter = lambda index, data_batch: run_iter(index + num_done, data_batch)
