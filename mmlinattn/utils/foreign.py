# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""All that this package changes in objects of others, or reads of them, beyond their public interfaces.

Each function names the version it was written for, and why nothing public does it.
"""

import functools
from collections.abc import Iterable
from typing import Any, Callable, cast

import torch
from mmengine.model import BaseModule
from mmengine.registry import DefaultScope
from mmengine.runner import CheckpointLoader
from torch import nn
from torch.utils.data import DataLoader


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
    upstream's base file does. MMCV 2.1's ``DropPath``, of which blocks hold references.
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
    if module._compiled_call_impl or not _methods(cast(Any, type(module))).isdisjoint(vars(module)):
        return True
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    weights = (weight for weight in module._parameters.values() if weight is not None)
    return any(type(w) not in (torch.Tensor, nn.Parameter) or w.layout != torch.strided for w in weights)


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
