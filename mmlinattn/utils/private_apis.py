# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Private APIs of PyTorch, MMEngine and MMCV that this package uses.

Docstrings name the version they were written for, and the reason. A public API replaces a missing one of PyTorch.
"""

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Callable, cast

import torch
from mmengine.model import BaseModule
from mmengine.registry import DefaultScope
from mmengine.runner import CheckpointLoader
from torch import _weights_only_unpickler, nn, overrides
from torch.autograd import forward_ad
from torch.fx.experimental import _config, symbolic_shapes
from torch.nn.modules import module as _module
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._device import DeviceContext

# --- state of PyTorch -------------------------------------------------------------------------------------------------

# oneDNN's operators with a fused activation or sum, as torch.compile uses them on CPUs
_mkldnn = torch.ops.mkldnn
LINEAR: Any = getattr(_mkldnn, '_linear_pointwise', None)
CONV: Any = getattr(_mkldnn, '_convolution_pointwise', None)
HAS_ONEDNN = None not in (LINEAR, CONV)
CAN_BE_SIZE_OBLIVIOUS = hasattr(_config, 'backed_size_oblivious')  # since torch 2.6


# True if oneDNN multiplies bfloat16 natively on this CPU (AVX-512 BF16, AMX)
has_bfloat16_units: Any = getattr(_mkldnn, '_is_mkldnn_bf16_supported', bool)
# number of active dispatch modes (counters, recorders); the innermost torch.func transform
num_modes: Any = torch._C._len_torch_dispatch_stack
innermost_transform: Any = torch._C._functorch.peek_interpreter_stack
forward_mode: Any = forward_ad  # its level is 0 or more in forward-mode differentiation
is_batched: Any = torch._C._functorch.is_legacy_batchedtensor  # by ``torch.autograd.grad(..., is_grads_batched=True)``
is_exporting: Any = getattr(torch.compiler, 'is_exporting', torch.compiler.is_compiling)  # since torch 2.7


def has_global_hooks() -> bool:
    """Return True if there are global module hooks. ``_has_any_global_hook`` is newer than PyTorch 2.4."""
    return bool(
        _module._global_forward_hooks
        or _module._global_forward_pre_hooks
        or _module._global_backward_hooks
        or _module._global_backward_pre_hooks
    )


def has_function_modes() -> bool:
    """Return True if a function mode is active, other than ``torch.device`` as a context."""
    return any(type(mode) is not DeviceContext for mode in overrides._get_current_function_mode_stack())


def has_static_value(size) -> bool:
    """Return True if a size is a number, not a symbol of a graph."""
    check = getattr(symbolic_shapes, 'has_static_value', None)  # since torch 2.5
    return type(size) is int if check is None else check(size)


def is_surely_above_one(size) -> bool:
    return symbolic_shapes.statically_known_true(size > 1)


def size_oblivious():
    """Context for ``torch.export`` without guards on sizes of 1."""
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
    """MMEngine 0.10.7: all default scopes, the current one last. Only the current one is public, and it is ours while
    MMEngine builds a dict of ours."""
    return [scope.scope_name for scope in DefaultScope._instance_dict.values()]


def checkpoint_loaders() -> dict[str, Callable]:
    """MMEngine 0.10.7: loaders of checkpoints by address prefix. There is no public list."""
    return dict(CheckpointLoader._schemes)


def listed_globals() -> set[str]:
    """PyTorch 2.14: names of the types that ``weights_only`` builds. The public list has the added types only."""
    return {*_weights_only_unpickler._get_allowed_globals(), *_weights_only_unpickler._get_user_allowed_globals()}


def own_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """PyTorch 2.14: parameters and persistent buffers of a module, without its children. Hooks of adapters remove
    entries from ``state_dict``."""
    named = {**module._parameters, **module._buffers}
    return {key: t for key, t in named.items() if t is not None and key not in module._non_persistent_buffers_set}


@contextmanager
def before_loading(model: nn.Module, hook: Callable) -> Iterator[None]:
    """PyTorch 2.4: call ``hook(module, state_dict, prefix, ...)`` before each module loads its own weights, after all
    other hooks. The public ``register_load_state_dict_pre_hook`` is newer."""
    handles = [module._register_load_state_dict_pre_hook(hook, with_module=True) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def call_compiled(module: nn.Module, call: Callable) -> None:
    """PyTorch 2.11: set the attribute of ``nn.Module.compile``. Modules of a kind share one graph, not one each."""
    module._compiled_call_impl = call


def is_altered(*modules: nn.Module) -> bool:
    """PyTorch 2.14: return True if a module has hooks or a method of its own, is compiled, or has sparse or subclassed
    weights. There is no public list of hooks."""
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
    """Return (class, name, function) of the methods of modules, without those of ``nn.Module``."""
    classes = {base for kind in kinds for base in kind.__mro__} - set(BaseModule.__mro__)
    return [(base, name, value) for base in classes for name, value in vars(base).items() if callable(value)]


def keep_sizes_open() -> None:
    """PyTorch 2.14: let Inductor call PyTorch's operator for the gradient of a convolution, as up to 2.11. It would
    compile one for each image size."""
    from torch._inductor import lowering

    lowering.make_fallback(torch.ops.aten.convolution_backward, lowering.constrain_to_fx_strides, warn=False)
