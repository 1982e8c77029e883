# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Private APIs of PyTorch and MMEngine that this package uses.

Docstrings give the reason why the public API does not suffice, and for most the version with which the private one was
checked. Functions that not every supported PyTorch has fall back to public ones.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Callable, cast

import torch
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

# --- state of PyTorch -------------------------------------------------------------------------------------------------

# operators of oneDNN that fuse a linear layer or convolution with an activation or sum; torch.compile uses them on CPUs
_mkldnn = torch.ops.mkldnn
LINEAR: Any = getattr(_mkldnn, '_linear_pointwise', None)
CONV: Any = getattr(_mkldnn, '_convolution_pointwise', None)
HAS_ONEDNN = None not in (LINEAR, CONV)
CAN_BE_SIZE_OBLIVIOUS = hasattr(_config, 'backed_size_oblivious')  # since torch 2.6


# True if oneDNN multiplies bfloat16 natively on this CPU (AVX-512 BF16, AMX)
has_bfloat16_units: Any = getattr(_mkldnn, '_is_mkldnn_bf16_supported', bool)
# number of active dispatch modes (FLOP counters, tracers); the innermost torch.func transform (vmap, grad)
num_modes: Any = torch._C._len_torch_dispatch_stack
innermost_transform: Any = torch._C._functorch.peek_interpreter_stack
forward_mode: Any = forward_ad  # its level is 0 or more in forward-mode differentiation
compiler: Any = torch.compiler  # its flag spares a Python call of ``is_compiling`` for each op
is_jit_tracing: Any = torch._C._is_tracing  # the public function asks for TorchScript first
is_batched: Any = torch._C._functorch.is_legacy_batchedtensor  # by ``torch.autograd.grad(..., is_grads_batched=True)``
is_exporting: Any = getattr(torch.compiler, 'is_exporting', torch.compiler.is_compiling)  # since torch 2.7


def has_global_hooks() -> bool:
    """Return True if global module hooks are registered. PyTorch's ``_has_any_global_hook`` does not exist in 2.4."""
    return bool(
        _module._global_forward_hooks
        or _module._global_forward_pre_hooks
        or _module._global_backward_hooks
        or _module._global_backward_pre_hooks
    )


def has_function_modes() -> bool:
    """Return True if a ``TorchFunctionMode`` is active, other than the one that ``with torch.device(...)`` sets."""
    return any(type(mode) is not DeviceContext for mode in overrides._get_current_function_mode_stack())


def has_static_value(size) -> bool:
    """Return True if a size is a plain number rather than a symbol of a traced graph."""
    check = getattr(symbolic_shapes, 'has_static_value', None)  # since torch 2.5
    return type(size) is int if check is None else check(size)


def is_surely_above_one(size) -> bool:
    return symbolic_shapes.statically_known_true(size > 1)


def size_oblivious():
    """Return a context in which ``torch.export`` adds no guards that distinguish sizes of 1 from larger ones."""
    return _config.patch(  # type: ignore[attr-defined]
        backed_size_oblivious=True
    )


# copies a list of tensors in one kernel launch, also between dtypes
FOREACH_COPY: Any = torch._foreach_copy_
# gradients of ReLU, ELU and softmax in one kernel each; those of ReLU and ELU are written to given memory
RELU_BACKWARD = torch.ops.aten.threshold_backward.grad_input
ELU_BACKWARD: Any = torch.ops.aten.elu_backward.grad_input
SOFTMAX_BACKWARD: Any = torch._softmax_backward_data


# --- objects of MMEngine and PyTorch ----------------------------------------------------------------------------------


def default_scopes() -> list[str]:
    """Return the names of all default scopes, the current scope last.

    Private API, checked with MMEngine 0.10.7. Only the current scope is public, and that is the scope of this package
    while MMEngine builds a module of it; callers need the scope of the user's config.
    """
    return [scope.scope_name for scope in DefaultScope._instance_dict.values()]


def default_store() -> Any:
    """Return the key-value store of the default process group; raise a ValueError without a group.

    Unlike collectives, its methods work while other processes are busy. There is no public function for it.
    """
    return torch.distributed.distributed_c10d._get_default_store()


def checkpoint_loaders() -> dict[str, Callable]:
    """Return the registered checkpoint loaders by address prefix. Private API, checked with MMEngine 0.10.7: no public
    list."""
    return dict(CheckpointLoader._schemes)


def own_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers of a module, without those of its children.

    Private API, checked with PyTorch 2.14: adapters (LoRA) remove entries from the public ``state_dict`` by hooks.
    """
    named = {**module._parameters, **module._buffers}
    return {key: t for key, t in named.items() if t is not None and key not in module._non_persistent_buffers_set}


@contextmanager
def before_loading(model: nn.Module, hook: Callable) -> Iterator[None]:
    """Call ``hook(module, state_dict, prefix, ...)`` before each module of ``model`` loads its weights, after other
    hooks.

    Private API, checked with PyTorch 2.4: the public ``register_load_state_dict_pre_hook`` does not exist there.
    """
    handles = [module._register_load_state_dict_pre_hook(hook, with_module=True) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def call_compiled(module: nn.Module, call: Callable) -> None:
    """Make ``call`` the compiled forward of a module, so that modules of one class can share one compiled graph.

    Private API, checked with PyTorch 2.11: the public ``nn.Module.compile`` compiles a graph for each module.
    """
    module._compiled_call_impl = call


def is_altered(*modules: nn.Module) -> bool:
    """Return True if calling one of the modules may run more than the forward of its class.

    This is so if the module has hooks or overridden methods, is compiled, or has sparse or subclassed weights. Private
    API, checked with PyTorch 2.14: there is no public list of hooks.
    """
    return any(bool(module._forward_pre_hooks) or _is_watched(module) for module in modules)


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
    """Return True if a module computes a plain convolution with its ``weight``.

    The weight may come from a parametrization or a hook of ``torch.nn.utils`` (weight norm, spectral norm, pruning).
    Private API, checked with PyTorch 2.14: there is no public list of hooks.
    """
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
    """Run the hooks that recompute the weight of ``conv`` before each call, and return the weight.

    Private API, checked with PyTorch 2.14: there is no public list of hooks.
    """
    for hook in conv._forward_pre_hooks.values():
        hook(conv, ())
    return conv.weight


@functools.cache
def _methods(kind: Any) -> frozenset:
    return frozenset(name for name in dir(kind) if callable(getattr(kind, name, None)))


def keep_sizes_open() -> None:
    """Let Inductor call PyTorch's operator for the gradient of a convolution, as up to PyTorch 2.11.

    Otherwise Inductor compiles this gradient anew for each image size. Private API, checked with PyTorch 2.14: there is
    no public option.
    """
    from torch._inductor import lowering

    lowering.make_fallback(torch.ops.aten.convolution_backward, lowering.constrain_to_fx_strides, warn=False)
