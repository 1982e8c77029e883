# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Whether a layer is just what its class says, so that its weights may be used without calling it.

Adapters (LoRA), parametrisations, pruning, sharding and hooks change what a layer computes, or watch it; such a
layer is called as it is.
"""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn
from typing_extensions import TypeGuard

from ..ops import dispatch, private

Layer = TypeVar('Layer', bound=nn.Module)


def is_just(kind: type[Layer], layer: nn.Module) -> TypeGuard[Layer]:
    """Whether ``layer`` is of this very class, with the ``forward`` of the class."""
    return type(layer) is kind and 'forward' not in layer.__dict__


def is_plain_linear(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether ``layer`` computes ``x @ weight.T + bias`` and nothing else."""
    return is_just(nn.Linear, layer) and not has_hooks(layer)


def is_plain_conv(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Whether ``layer`` is a zero-padded convolution and nothing else."""
    plain = is_just(nn.Conv2d, layer) and not has_hooks(layer)
    return plain and layer.padding_mode == 'zeros' and not isinstance(layer.padding, str)


def has_hooks(layer: nn.Module) -> bool:
    own = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return bool(own) or private.has_global_hooks()


def call(module: Callable, *args, **kwargs) -> Tensor:
    """``module(...)``, in memory that the caller may write over.

    Whoever watches the module with a hook keeps what it saw, and views of shared memory (expanded tensors) become
    tensors of their own.
    """
    out = module(*args, **kwargs)
    if dispatch.records() or dispatch.is_traced():  # graphs are not to hold an answer for one size
        return out
    shared = any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape))
    watched = isinstance(module, nn.Module) and has_hooks(module)
    return out.clone() if shared or watched else out
