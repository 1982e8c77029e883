# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Detection of changes to a backbone's modules (hooks, patches, replaced children) without a call for each module."""

from typing import Any, Optional
from weakref import WeakKeyDictionary

import torch
from mmcv.cnn.bricks import DropPath
from mmengine.model import ModuleList
from mmengine.utils.dl_utils.parrots_wrapper import SyncBatchNorm
from torch import nn

from ..utils.private_apis import is_altered
from .fused import Precision, has_weights, is_own
from .mixed_precision import WeightGroup

KNOWN = {
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d, SyncBatchNorm, nn.SyncBatchNorm),
    *(nn.Identity, nn.ModuleList, nn.ModuleDict, nn.Sequential, ModuleList, DropPath),
}


def is_known(kind: type) -> bool:
    """Return True for a class of this package, or a class of PyTorch or OpenMMLab that its backbones use unchanged."""
    return kind in KNOWN or is_own(kind)


class Snapshot:
    """Recorded state of a backbone's modules, with weight groups for training and twins for inference derived from it.

    Args:
        backbone (nn.Module): The backbone; no reference to it is kept.

    Attributes:
        is_plain (bool): True if all modules are of known classes, without hooks, and all weights are parameters of one
            type.
        dtype (torch.dtype): The type of all weights.
        groups (list[WeightGroup]): Weights that are cast together in training, by stage; empty unless ``is_plain``.
        modules (set[nn.Module]): Modules below the backbone.
        twins (dict): Fused twins for inference, by precision and module.
    """

    def __init__(self, backbone: Any) -> None:
        parts = list(backbone.modules())
        self.children = dict(backbone._modules)
        self.modules = set(parts[1:])
        # modules of other packages are left out: they have no twins, and may change their own attributes
        self.entries = [
            (part, part.__dict__, type(part), dict(part.__dict__), dict(part._modules), _hooks(part), _weights(part))
            for part in parts[1:]
            if is_known(type(part))
        ]
        self.twins: dict[Precision, dict[nn.Module, Any]] = {}
        self.dtype = dtype_of(backbone)
        # the backbone itself may have hooks: they run before and after ``features``
        self.is_plain = not is_altered(*parts[1:]) and all(is_known(type(part)) for part in parts)
        for part in parts:
            weights = [kind for kind in _weights(part).values() if kind is not None]
            self.is_plain &= all(kind == (nn.Parameter, self.dtype) for kind in weights)
            if isinstance(part, (nn.Linear, nn.Conv2d, nn.Conv1d)):  # a weight that is no parameter may be anything
                self.is_plain &= has_weights(part)
        self.groups = [WeightGroup(modules) for modules in backbone.stage_modules()] if self.is_plain else []

    def is_current(self, backbone: nn.Module) -> bool:
        """Return True if no module was since replaced or hooked, or got other attributes or kinds of weights."""
        if backbone._modules != self.children:
            return False
        try:
            for part, state, kind, kept, children, hooks, kinds in self.entries:
                if type(part) is not kind or state != kept or state['_modules'] != children:
                    return False
                if (
                    len(state['_forward_hooks']) != hooks[0]
                    or len(state['_forward_pre_hooks']) != hooks[1]
                    or len(state['_backward_hooks']) != hooks[2]
                    or len(state['_backward_pre_hooks']) != hooks[3]
                ):
                    return False
                weights = state['_parameters']
                if len(weights) != len(kinds):
                    return False
                for name, weight in weights.items():
                    if kinds.get(name) != (None if weight is None else (type(weight), weight.dtype)):
                        return False
        except (RuntimeError, TypeError, ValueError):  # another tensor or array as an attribute has no truth value
            return False
        return True


def _hooks(module: nn.Module) -> tuple[int, ...]:
    """Return the number of hooks of each kind."""
    kinds = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return tuple(map(len, kinds))


def _weights(module: nn.Module) -> dict[str, Optional[tuple]]:
    """Return class and dtype of each weight by name; None for an absent weight."""
    return {name: None if p is None else (type(p), p.dtype) for name, p in module._parameters.items()}


def dtype_of(module: nn.Module) -> Optional[torch.dtype]:
    """Return the dtype of the first weight of a module or its children, None if there is none."""
    for weight in module._parameters.values():
        if weight is not None:
            return weight.dtype
    for child in module._modules.values():
        dtype = None if child is None else dtype_of(child)
        if dtype is not None:
            return dtype
    return None


_snapshots: WeakKeyDictionary = WeakKeyDictionary()


def snapshot_of(backbone: nn.Module) -> Snapshot:
    """Return the snapshot of a backbone for its mode, training or eval; an outdated one is replaced."""
    of_modes = _snapshots.setdefault(backbone, {})
    found = of_modes.get(backbone.training)
    if found is None or not found.is_current(backbone):
        found = of_modes[backbone.training] = Snapshot(backbone)
    return found
