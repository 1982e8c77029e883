# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Training under autocast with the weights of a stage cast by one operation.

Autocast casts each weight and each gradient by its own kernel, and a GPU waits for these launches if it has only two
images. It also keeps LayerNorm in float32, although the next linear layer rounds to half precision anyway.
"""

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..layers import Block, PatchEmbed
from ..utils import private_apis
from .recomputing import recompute

PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d)


class CastTogether(torch.autograd.Function):
    """Cast a list of tensors by one operation, and their gradients by one operation in the backward pass."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        outs = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
        private_apis.FOREACH_COPY(outs, tensors)
        ctx.tensors = tensors
        ctx.mark_non_differentiable(*[out for out, tensor in zip(outs, tensors) if not tensor.requires_grad])
        ctx.set_materialize_grads(False)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Optional[Tensor]) -> tuple[Optional[Tensor], ...]:
        if torch.is_grad_enabled():  # create_graph=True: the casts have to be differentiable
            found = [None if grad is None else grad.to(t.dtype) for grad, t in zip(grads, ctx.tensors)]
            return None, *found
        outs = [None if grad is None else torch.empty_like(t) for grad, t in zip(grads, ctx.tensors)]
        pairs = [(out, grad) for out, grad in zip(outs, grads) if out is not None]
        if pairs:
            private_apis.FOREACH_COPY(*map(list, zip(*pairs)))
        return None, *outs


Slot = tuple[dict, str]  # place of a weight: the dictionary of a module's parameters, and the name in it
KINDS = ('products', 'stream')


class WeightGroup:
    """Weights of a stage that are cast together: ``'products'`` of linear layers and convolutions, ``'stream'`` of
    LayerNorm and layer scale.

    Args:
        modules (list[nn.Module]): Modules of a stage that the forward pass of the backbone calls.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self.slots: dict[str, list[Slot]] = {kind: [] for kind in KINDS}
        self.spans: dict[nn.Module, dict[str, slice]] = {}
        for module in modules:
            parts = list(module.modules())
            # not the norm of a patch embedding: it makes the residual stream, which keeps its precision
            stream = () if isinstance(module, PatchEmbed) else (nn.LayerNorm, Block)
            self.spans[module] = {}
            for kind, classes in zip(KINDS, (PRODUCTS, stream)):
                owned, first = [part._parameters for part in parts if isinstance(part, classes)], len(self.slots[kind])
                self.slots[kind] += [(own, name) for own in owned for name in own if own[name] is not None]
                self.spans[module][kind] = slice(first, len(self.slots[kind]))


class MixedPrecision:
    """Call modules in one training forward pass under autocast, with the weights of a stage cast by one operation.

    If the residual stream is in half precision, modules run without autocast and all of their weights are cast,
    LayerNorm and layer scale included. If it is in float32, autocast stays on, and weights of linear layers and
    convolutions are cast.

    Args:
        groups (list[WeightGroup]): Weights of the backbone's stages.
        x (Tensor): The images.
        recomputes (bool): Recompute blocks in the backward pass.
    """

    def __init__(self, groups: list[WeightGroup], x: Tensor, recomputes: bool) -> None:
        self.group_of = {module: group for group in groups for module in group.spans}
        self.device_type = x.device.type
        self.dtype = torch.get_autocast_dtype(self.device_type)
        self.recomputes = recomputes
        self.casts: dict[tuple[WeightGroup, str], Sequence[Tensor]] = {}
        self.weights: dict[tuple[nn.Module, bool], list[tuple[Slot, Tensor]]] = {}

    def __call__(self, module: nn.Module, x: Tensor, *stage) -> Any:
        group = self.group_of.get(module)
        if group is None:
            return module(x, *stage)
        in_half = x.dtype == self.dtype and not isinstance(module, PatchEmbed)
        weights = self.weights.get((module, in_half))
        if weights is None:
            self._cast(group, in_half)
            weights = self.weights[module, in_half]
        torch.set_autocast_enabled(self.device_type, not in_half)
        try:
            if self.recomputes and stage and x.requires_grad:
                return recompute(module, _with_weights, module, weights, x, *stage)
            return _with_weights(module, weights, x, *stage)
        finally:
            torch.set_autocast_enabled(self.device_type, True)

    def _cast(self, group: WeightGroup, in_half: bool) -> None:
        """Cast the weights of a group that are not cast yet, and store the casts by module."""
        kinds = KINDS if in_half else KINDS[:1]
        missing = [kind for kind in kinds if (group, kind) not in self.casts]
        weights = [own[name] for kind in missing for own, name in group.slots[kind]]
        casts: Sequence[Tensor] = CastTogether.apply(self.dtype, *weights) if weights else ()
        for kind in missing:
            size = len(group.slots[kind])
            self.casts[group, kind], casts = casts[:size], casts[size:]
        for module, spans in group.spans.items():
            found = self.weights[module, in_half] = []
            for kind in kinds:
                found += zip(group.slots[kind][spans[kind]], self.casts[group, kind][spans[kind]])


def _with_weights(module: nn.Module, weights: list[tuple[Slot, Tensor]], *args) -> Any:
    """Call ``module(*args)`` with the casts in ``weights`` in place of its parameters."""
    kept = []
    for (own, name), cast in weights:
        kept.append(own[name])
        own[name] = cast
    try:
        return module(*args)
    finally:
        for ((own, name), _), weight in zip(weights, kept):
            own[name] = weight
