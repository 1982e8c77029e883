# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Fused inference on CPUs by twins: copies of modules that share their weights.

A twin has the attributes of its module, and twins as children. Its class is a subclass of the module's class with
cheaper steps: linear layers are fused with GELU, convolutions with batch norms, and sums and gates are in place.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import torch
import torch.nn.functional as F
from mmengine.model import ModuleList, Sequential
from torch import Tensor, nn

from ..layers import (
    MLP,
    Block,
    ConvDownsample,
    ConvFFN,
    ConvOfGELU,
    ConvStem,
    DWConvFFN,
    FactorisedLinear,
    ResidualDWConv,
    SourceBlock,
    TokenBlock,
    fold_batch_norm,
    is_foldable,
)
from ..layers.compact import BranchedLinear, merges
from ..ops import dispatch
from ..utils import private_apis
from ..utils.private_apis import is_altered

STRIP_NUMEL = 2**22  # elements of a strip of a feed-forward network's hidden map: 16 MiB in float32


class Precision(NamedTuple):
    """Data types of one forward pass.

    Attributes:
        products: Type of matmuls and convolutions; under autocast, the autocast type.
        onednn: True if oneDNN's fused operators support ``products``.
    """

    products: torch.dtype
    onednn: bool

    @classmethod
    def of(cls, products: torch.dtype) -> 'Precision':
        return cls(products, dispatch.onednn_takes(products))


class Twin:
    """Base class of twins, fused versions of modules; subclasses hold the methods that a twin overrides."""

    precision: Precision

    @classmethod
    def prepare(cls, module: Any, children: dict, precision: Precision) -> bool:
        """Return True if a twin with ``children`` (by name) equals ``module``. It may replace some children."""
        return True


TWINS: dict[type, Any] = {}
CONTAINERS = (nn.Sequential, nn.ModuleList, Sequential, ModuleList)


def twin_of(*kinds: type) -> Callable:
    """Return a decorator that makes a class the twin (fused version) of ``kinds``: it overrides methods of each."""

    def register(steps: type) -> type:
        own = {'__module__': steps.__module__}
        TWINS.update({kind: type(f'Fused{kind.__name__}', (steps, kind), own) for kind in kinds})
        return steps

    return register


def replaced_methods(kind: type, twin: type) -> set[str]:
    """Return the names of methods of a class that its twin (fused version) overrides, or calls with other arguments."""
    steps = twin.__mro__[1 : twin.__mro__.index(kind)]
    names = {name for base in steps for name, value in vars(base).items() if callable(value)}
    return {name for name in names if hasattr(kind, name)} | {'__call__', '_call_impl'}


def is_own(kind: type) -> bool:
    """Return True for a class of this package."""
    return kind.__module__.startswith('mmlinattn.')


def fuse(module: Any, precision: Precision) -> Any:
    """Return the twin of a module: a copy with fused operators and the same weights. Without a twin, return the module.

    Modules of other packages have no twin, nor have modules with hooks, adapters or patched methods.
    """
    kind = type(module)
    if not (kind in CONTAINERS or kind in TWINS or is_own(kind)) or is_altered(module):
        return module
    given = module._modules
    children = {name: None if child is None else fuse(child, precision) for name, child in given.items()}
    twin_kind = TWINS.get(kind)
    if twin_kind is None or not twin_kind.prepare(module, children, precision):
        twin_kind = kind
    if twin_kind is kind and all(children[name] is given[name] for name in given):
        return module
    twin: Any = object.__new__(twin_kind)
    vars(twin).update(vars(module), _modules=children, precision=precision)
    return twin


# --- linear layers and norms ------------------------------------------------------------------------------------------


def has_weights(module: nn.Module) -> bool:
    """Return True if weight and bias are registered parameters (or None), not computed by a parametrisation."""
    return {'weight', 'bias'} <= module._parameters.keys()


@twin_of(nn.Linear)
class LinearStep(Twin, nn.Linear):
    @classmethod
    def prepare(cls, module, children, precision) -> bool:
        return has_weights(module)

    def forward(self, x: Tensor, gelu: bool = False) -> Tensor:
        return product(self.precision, x, self.weight, self.bias, gelu)

    def project(self, x: Tensor, widths: list[int]) -> list[Tensor]:
        """Compute the outputs by one matmul for each of ``widths``, so that each result is contiguous."""
        if not is_row(self.bias, self.weight):
            return list(self(x).split(widths, dim=-1))
        weights, biases = self.weight.split(widths), [None] * len(widths)
        biases = biases if self.bias is None else self.bias.split(widths)
        x = x.to(self.precision.products)
        return [product(self.precision, x, *part) for part in zip(weights, biases)]


def product(precision: Precision, x: Tensor, weight: Any, bias: Any, gelu: bool = False) -> Tensor:
    """Compute ``x @ weight.T + bias`` or its GELU, by a single oneDNN kernel if possible."""
    dtype = precision.products
    x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if precision.onednn and x.numel() and weight.is_contiguous():
        if is_row(bias, weight):
            return private_apis.LINEAR(x, weight, bias, 'gelu' if gelu else 'none', [], 'none' if gelu else '')
    out = F.linear(x, weight, bias)
    return F.gelu(out) if gelu else out


def is_row(bias: Optional[Tensor], weight: Tensor) -> bool:
    """Return True for a bias that oneDNN reads correctly: it assumes a contiguous row of the right size."""
    return bias is None or (bias.is_contiguous() and bias.shape == weight.shape[:1])


def linear_gelu(layer: nn.Module, x: Tensor) -> Tensor:
    """Return the GELU of a linear layer's output, in one kernel if the layer is a twin."""
    return layer(x, gelu=True) if isinstance(layer, LinearStep) else F.gelu(layer(x))


@twin_of(BranchedLinear)
class BranchedLinearStep(Twin, BranchedLinear):
    """Twin of :class:`BranchedLinear` that merges the branches into one linear layer at each call."""

    @classmethod
    def prepare(cls, module, children, precision) -> bool:
        children.update(module._modules)  # the twin reads their weights and does not call them
        return not any(norm.training for norm in module.norms) and all(map(merges, module.linears, module.norms))

    def forward(self, x: Tensor) -> Tensor:
        return product(self.precision, x, *self.merged_weights())


@twin_of(FactorisedLinear)
class FactorisedLinearStep(Twin, FactorisedLinear):
    @classmethod
    def prepare(cls, module, children, precision) -> bool:
        return isinstance(children['down'], Twin) and isinstance(children['up'], Twin)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        if isinstance(self.up, LinearStep) and self.up.bias is not None:
            return product(self.precision, x, self.up.weight, self.up.bias + self.bias)
        return self.up(x) + self.bias


# --- convolutions -----------------------------------------------------------------------------------------------------


def is_ordinary(conv: Any) -> bool:
    """Return True if a convolution is unaltered, has registered weights, pads with zeros and is not dilated."""
    plain = conv.padding_mode == 'zeros' and not isinstance(conv.padding, str) and conv.dilation == (1, 1)
    return plain and has_weights(conv) and not is_altered(conv)


def conv_gelu(precision: Precision, x: Tensor, conv: Any, norm: Any = None, gelu: bool = False) -> Tensor:
    """Compute ``conv(x)`` of (B, C, H, W), with ``norm`` (a batch norm) folded into it and GELU if ``gelu``."""
    weight, bias = (conv.weight, conv.bias) if norm is None else fold_batch_norm(conv, norm)
    dtype = precision.products
    x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if gelu and precision.onednn and x.numel() and is_row(bias, weight):
        return private_apis.CONV(x, weight, bias, conv.padding, conv.stride, [1, 1], conv.groups, 'gelu', [], 'none')
    out = F.conv2d(x, weight, bias, conv.stride, conv.padding, 1, conv.groups)
    return F.gelu(out) if gelu else out


@twin_of(ResidualDWConv)
class ResidualDWConvStep(Twin, ResidualDWConv):
    @classmethod
    def prepare(cls, module, children, precision) -> bool:
        return is_ordinary(module) and module.stride == (1, 1)

    def forward(self, x: Tensor, activated: bool = False) -> Tensor:
        """Run the layer; ``activated`` tells that ``x`` has gone through GELU already."""
        x = (F.gelu(x) if self.of_gelu and not activated else x).permute(0, 3, 1, 2)
        # a central tap larger by 1 adds x in the same kernel; bfloat16 would round the tap
        if self.precision.products.itemsize < 4 or self.groups != len(self.weight):
            return add_in_place(conv_gelu(self.precision, x, self), x).permute(0, 2, 3, 1)
        weight = self.weight.clone()
        weight[:, :, weight.shape[2] // 2, weight.shape[3] // 2] += 1
        return F.conv2d(x, weight, self.bias, 1, self.padding, 1, self.groups).permute(0, 2, 3, 1)


class FoldedConv(nn.Module):
    """Convolution with a folded batch norm, GELU before it (``takes_gelu``) and GELU after it (``gelu``).

    Weights are folded at each call, since a write to ``p.data``, as by EMA, cannot be detected.
    """

    def __init__(
        self, precision: Precision, conv: Any, norm: Optional[nn.Module], takes_gelu: bool, gelu: bool
    ) -> None:
        super().__init__()
        self.precision, self.takes_gelu, self.gelu = precision, takes_gelu, gelu
        self.conv, self.norm = conv, norm

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(x) if self.takes_gelu else x
        return conv_gelu(self.precision, x, self.conv, self.norm, self.gelu)


def fold_layers(layers: nn.Sequential, precision: Precision) -> nn.Sequential:
    """Return the layers of a stem with batch norms and GELU merged into the convolutions."""
    given, folded, activated = list(layers), [], False
    while given:
        layer = given.pop(0)
        if not _is_folded(layer):
            folded.append(layer)
            activated = False
            continue
        norm = given.pop(0) if given and is_foldable(given[0]) and not given[0].training else None
        gelu = bool(given) and type(given[0]) is ConvOfGELU and _is_folded(given[0])
        folded.append(FoldedConv(precision, layer, norm, type(layer) is ConvOfGELU and not activated, gelu))
        activated = gelu
    return nn.Sequential(*folded)


def _is_folded(layer: nn.Module) -> bool:
    return type(layer) in (nn.Conv2d, ConvOfGELU) and is_ordinary(layer)


@twin_of(ConvStem, ConvDownsample)
class StemStep(Twin):
    @classmethod
    def prepare(cls, module, children, precision) -> bool:
        if type(module.layers) is not nn.Sequential or is_altered(module.layers):
            return False
        children['layers'] = fold_layers(module.layers, precision)
        return True


# --- feed-forward networks --------------------------------------------------------------------------------------------


class FeedForwardStep(Twin, MLP):
    """Feed-forward network that processes large maps in strips of rows. The hidden map, several times as wide as the
    input, is never allocated whole."""

    @classmethod
    def prepare(cls, module, children, precision) -> bool:
        return isinstance(children['fc1'], Twin) and isinstance(children['fc2'], Twin)

    def halo(self) -> int:
        """Return the number of further input rows, above and below, that the hidden map of a strip depends on."""
        conv: Any = self._modules.get('dwconv')
        return 0 if conv is None else conv.kernel_size[0] // 2

    def forward(self: Any, x: Tensor) -> Tensor:
        numel = x.numel() // x.shape[-1] * self.hidden_dim
        if numel <= 2 * STRIP_NUMEL:
            return super().forward(x)
        out: Any = None
        height, halo = x.shape[1], self.halo()
        rows = max(STRIP_NUMEL // (numel // (x.shape[0] * height)), 8 * halo, 1)
        for i in range(x.shape[0]):
            for top in range(0, height, rows):
                bottom = min(top + rows, height)
                first, last = max(top - halo, 0), min(bottom + halo, height)
                strip = self.fc2(self.hidden(x[i : i + 1, first:last])[:, top - first : bottom - first])
                out = strip.new_empty(*x.shape[:-1], strip.shape[-1]) if out is None else out
                out[i, top:bottom] = strip[0]
        return out


@twin_of(MLP)
class MLPStep(FeedForwardStep):
    def hidden(self, x: Tensor) -> Tensor:
        return linear_gelu(self.fc1, x)


@twin_of(ConvFFN)
class ConvFFNStep(FeedForwardStep, ConvFFN):
    @classmethod
    def prepare(cls, module, children, precision) -> bool:
        conv = children['dwconv']
        return super().prepare(module, children, precision) and isinstance(conv, ResidualDWConvStep) and conv.of_gelu

    def hidden(self, x: Tensor) -> Tensor:
        return self.dwconv(linear_gelu(self.fc1, x), activated=True)


@twin_of(DWConvFFN)
class DWConvFFNStep(FeedForwardStep, DWConvFFN):
    @classmethod
    def prepare(cls, module, children, precision) -> bool:
        conv = module.dwconv
        is_plain = type(conv) is nn.Conv2d and is_ordinary(conv) and conv.stride == (1, 1)
        return super().prepare(module, children, precision) and is_plain

    def hidden(self, x: Tensor) -> Tensor:
        image = self.fc1(x).permute(0, 3, 1, 2)
        return conv_gelu(self.precision, image, self.dwconv, gelu=True).permute(0, 2, 3, 1)


# --- blocks -----------------------------------------------------------------------------------------------------------


@twin_of(Block, SourceBlock, TokenBlock)
class BlockStep(Twin, Block):
    """Block that adds residual connections in place, into the results of its branches."""

    @classmethod
    def prepare(cls, module, children, precision) -> bool:
        # branches end in linear twins: their results are new tensors, so they may be overwritten
        attn_proj, ffn = children['attn']._modules.get('proj'), children['ffn']
        return isinstance(attn_proj, LinearStep) and isinstance(ffn, FeedForwardStep)

    def add(self, x: Tensor, branch: Tensor, gamma: Optional[Tensor]) -> Tensor:
        drops = self.drop_path.training and not isinstance(self.drop_path, nn.Identity)  # Monte Carlo dropout
        if drops or branch.dtype != x.dtype or (gamma is not None and gamma.dtype != x.dtype):
            return super().add(x, branch, gamma)
        return branch.add_(x) if gamma is None else torch.addcmul(x, branch, gamma, out=branch)


def add_in_place(x: Tensor, y: Tensor) -> Tensor:
    """Return ``x + y``, written to ``x`` if both have the same dtype."""
    return x.add_(y) if x.dtype == y.dtype else x + y
