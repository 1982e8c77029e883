# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Linear layers with what comes right after them: scale, GELU, residual, the split into queries, keys and values.

Weights of a layer are used without calling it only where it is just what its class says: adapters (LoRA),
parametrisations, pruning, sharding and hooks change what a layer computes, or watch it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Optional, TypeVar

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import TypeGuard

from .. import ops
from ..ops import dispatch, private
from ..ops.products import linear_by

Layer = TypeVar('Layer', bound=nn.Module)


def is_just(kind: type[Layer], layer: nn.Module) -> TypeGuard[Layer]:
    """Whether ``layer`` is of this very class, with the ``forward`` of the class."""
    return type(layer) is kind and 'forward' not in layer.__dict__


def is_plain_linear(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether ``layer`` computes ``x @ weight.T + bias`` and nothing else."""
    return is_just(nn.Linear, layer) and not has_hooks(layer)


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


def apply_linear(
    layer: nn.Module,
    x: Tensor,
    scale: Optional[Tensor] = None,
    gelu: bool = False,
    residual: Optional[Tensor] = None,
) -> Tensor:
    """``layer(x) * scale + residual``, or ``gelu(layer(x))``.

    The scale goes into the matrix: no pass over the map, and no map kept for its gradient. A layer that is no plain
    linear one (an adapter in its place, one with hooks) is called as it is.

    Args:
        layer (nn.Module): ``nn.Linear`` with C inputs and C' outputs, or what takes its place.
        x (Tensor): (..., C).
        scale (Tensor, optional): (C',).
        gelu (bool): Apply GELU; not together with ``scale`` or ``residual``.
        residual (Tensor, optional): (..., C').

    Returns:
        Tensor: (..., C').
    """
    if not is_plain_linear(layer):
        out = call(layer, x)
        out = out if scale is None else out * scale
        out = F.gelu(out) if gelu else out
        return out if residual is None else residual + out
    weight: Tensor = layer.weight
    bias: Optional[Tensor] = layer.bias
    if scale is not None:
        weight, bias = weight * scale[:, None], None if bias is None else bias * scale
    return ops.linear(x, weight, bias, gelu, residual)


class Projected(NamedTuple):
    """Some outputs of one linear layer, side by side in one tensor (..., N, sum of ``widths``)."""

    tensor: Tensor
    widths: tuple[int, ...]


def project(
    layer: nn.Module, x: Tensor, widths: Sequence[int], kv: Optional[Tensor] = None, convolves: bool = False
) -> list[Projected]:
    """Queries, keys, values and, where there is one, the gate, of one linear layer.

    They come in as many tensors as the memory of the steps that follow wants: autograd keeps all of one tensor or
    nothing, and attentions that map or rotate queries and keys do not need them afterwards; convolutions on CPUs would
    copy values that lie among other things.

    Args:
        layer (nn.Module): ``nn.Linear`` with C inputs and ``sum(widths)`` outputs, or what takes its place.
        x (Tensor): Tokens of the queries (and the gate), (..., N, C).
        widths (Sequence[int]): Widths of queries, keys, values and, if it has a fourth entry, the gate.
        kv (Tensor, optional): Tokens of keys and values, (..., M, C); None for ``x``.
        convolves (bool): Whether the values will be convolved.

    Returns:
        list[Projected]: In this order.
    """
    q, k, v, *gate = widths
    if not is_plain_linear(layer):
        # the layer is called as a whole, so that whatever takes its place may be anything
        whole = call(layer, x)
        if kv is None:
            return [Projected(whole, tuple(widths))]
        rest = call(layer, kv)[..., q : q + k + v]
        return [
            Projected(whole[..., :q], (q,)),
            Projected(rest, (k, v)),
            *(Projected(whole[..., q + k + v :], (g,)) for g in gate),
        ]
    route = dispatch.route(x, kv)
    backend, learns = route.backend, route.backend != 'reference' and route.records
    if kv is not None:
        parts = [(x, (q,)), (kv, (k, v)), *((x, (g,)) for g in gate)]
    elif backend == 'reference' or not (learns or convolves):
        parts = [(x, tuple(widths))]
    elif backend != 'cpu':
        parts = [(x, (q, k)), (x, (v, *gate))]
    else:
        parts = [(x, (q, k)), (x, (v,)), *((x, (g,)) for g in gate)]
    if len(parts) == 1:
        return [Projected(linear_by(route, x, layer.weight, layer.bias), tuple(widths))]
    if backend == 'cpu' and not learns and x.dtype != route.dtype:  # once, not for each part
        cast = x.to(route.dtype)
        parts = [(cast if tokens is x else tokens, part) for tokens, part in parts]
    rows = [sum(part) for _, part in parts]
    biases = [None] * len(rows) if layer.bias is None else layer.bias.split(rows)
    weights = layer.weight.split(rows)
    return [
        Projected(linear_by(route, tokens, weight, bias), part)
        for (tokens, part), weight, bias in zip(parts, weights, biases)
    ]
