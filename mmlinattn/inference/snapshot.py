# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""A check, without a call for each module, that nobody changed the modules of a backbone."""

from typing import Optional
from weakref import WeakKeyDictionary

import torch
from mmcv.cnn.bricks import DropPath
from mmengine.model import ModuleList
from mmengine.utils.dl_utils.parrots_wrapper import SyncBatchNorm
from torch import nn

from ..utils.private_apis import is_altered
from .mixed_precision import WeightGroup

KNOWN = {
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d, SyncBatchNorm, nn.SyncBatchNorm),
    *(nn.Identity, nn.ModuleList, nn.ModuleDict, nn.Sequential, ModuleList, DropPath),
}


def is_known(kind: type) -> bool:
    """Return True for a class of this package, or one of PyTorch's and OpenMMLab's that it builds on."""
    return kind in KNOWN or kind.__module__.startswith('mmlinattn.')


class Snapshot:
    """Modules below a backbone as they were, and the weights that are cast together.

    Args:
        backbone (nn.Module): The backbone; no reference to it is kept.

    Attributes:
        is_plain (bool): All modules are of known classes, without hooks, and have weights of their own.
        dtype (torch.dtype): The type of all weights.
        groups (list[WeightGroup]): Weights by stage.
    """

    def __init__(self, backbone: nn.Module) -> None:
        parts = list(backbone.modules())
        self.children = dict(backbone._modules)
        self.entries = [
            (part, part.__dict__, type(part), len(part.__dict__), dict(part._modules), _present(part))
            for part in parts[1:]
        ]
        self.is_plain = not is_altered(*parts) and all(is_known(type(part)) for part in parts)
        self.dtype = dtype_of(backbone)
        for part in parts:
            self.is_plain &= all(p is None or p.dtype == self.dtype for p in part._parameters.values())
            if isinstance(part, (nn.Linear, nn.Conv2d, nn.Conv1d)):  # a weight that is no parameter may be anything
                self.is_plain &= {'weight', 'bias'} <= part._parameters.keys()
        self.groups = [WeightGroup(modules) for modules in backbone.stage_modules()] if self.is_plain else []

    def is_current(self, backbone: nn.Module) -> bool:
        """Return True if no module was replaced, hooked or given an attribute since."""
        if backbone._modules != self.children:
            return False
        for part, state, kind, size, children, present in self.entries:
            if type(part) is not kind or len(state) != size or state['_modules'] != children:
                return False
            if state['_forward_hooks'] or state['_forward_pre_hooks']:
                return False
            if state['_backward_hooks'] or state['_backward_pre_hooks']:
                return False
            weights = state['_parameters']
            if len(weights) != len(present):
                return False
            for name, weight in weights.items():
                if present.get(name) is not (weight is not None):
                    return False
                if weight is not None and (type(weight) is not nn.Parameter or weight.dtype != self.dtype):
                    return False
        return True


def dtype_of(module: nn.Module) -> Optional[torch.dtype]:
    """Return the type of the first weight that is found, None if there is none."""
    for weight in module._parameters.values():
        if weight is not None:
            return weight.dtype
    for child in module._modules.values():
        dtype = None if child is None else dtype_of(child)
        if dtype is not None:
            return dtype
    return None


def _present(module: nn.Module) -> dict[str, bool]:
    return {name: weight is not None for name, weight in module._parameters.items()}


_snapshots: WeakKeyDictionary = WeakKeyDictionary()


def snapshot_of(backbone: nn.Module) -> Snapshot:
    """Return the snapshot of a backbone, taken anew if it is out of date."""
    found = _snapshots.get(backbone)
    if found is None or not found.is_plain or not found.is_current(backbone):
        found = _snapshots[backbone] = Snapshot(backbone)
    return found
