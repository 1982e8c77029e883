# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Replace modules before an export by equivalent ones that support dynamic image sizes or run faster."""

from collections.abc import Callable
from typing import Any, Optional

import torch
from mmengine.utils import to_2tuple
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...layers.block import ConvFFN, DWConvFFN, ResidualDWConv
from ...ops.tokens import as_tensor
from ...utils.private_apis import is_altered


class StridedPools(TorchFunctionMode):
    """Context that computes max pools of kernel 1 and stride 2 (the extra levels of MMDetection's FPN) by slicing.

    Older exporters of PyTorch fix the parity of the example's size in the graph.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.max_pool2d and args[1:] == (1,) and kwargs.get('stride') == 2 and kwargs.get('padding') == 0:
            return args[0][..., ::2, ::2]
        return func(*args, **kwargs)


class BinMeans(nn.Module):
    """``nn.AdaptiveAvgPool2d`` as two matmuls: (B, C, H, W) -> (B, C, *bins).

    Exporters support adaptive pools only for one size of the feature map, or not at all. As in PyTorch, bin i of n
    covers rows ``floor(i H / n)`` up to, excluding, ``ceil((i + 1) H / n)``.
    """

    def __init__(self, bins: tuple[int, int]) -> None:
        super().__init__()
        self.bins = bins

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = (self.weights(size, number, x) for size, number in zip(x.shape[2:], self.bins))
        return torch.einsum('ih,bchw,jw->bcij', rows, x, columns)

    @staticmethod
    def weights(size, number: int, like: Tensor) -> Tensor:
        """Return the weights (number, size) that average ``size`` positions over each of ``number`` bins."""
        position = torch.arange(size, device=like.device)
        index = torch.arange(number, device=like.device)
        length = as_tensor(size, like, torch.long)
        first = torch.div(index * length, number, rounding_mode='floor')
        end = torch.div((index + 1) * length + number - 1, number, rounding_mode='floor')
        inside = ((position >= first[:, None]) & (position < end[:, None])).to(like.dtype)
        return inside / (end - first)[:, None].to(like.dtype)


def _as_convolution(linear: nn.Linear) -> nn.Conv2d:
    """Return a linear layer as a convolution with a kernel of one pixel."""
    weight = linear.weight
    conv = nn.Conv2d(linear.in_features, linear.out_features, 1, bias=linear.bias is not None).to(weight)
    conv.weight.data.copy_(weight[:, :, None, None])
    if linear.bias is not None:
        conv.bias.data.copy_(linear.bias)  # type: ignore[union-attr]
    return conv


def _with_residual(conv: nn.Conv2d) -> nn.Conv2d:
    """Return ``x + conv(x)`` of a depth-wise convolution as one convolution."""
    size = conv.kernel_size[0]
    new = nn.Conv2d(conv.in_channels, conv.out_channels, size, padding=size // 2, groups=conv.groups)
    new.to(conv.weight).load_state_dict(conv.state_dict())
    new.weight.data[:, :, size // 2, size // 2] += 1
    return new


class ChannelsFirst(nn.Sequential):
    """Layers on feature maps (B, C, H, W), called with feature maps (B, H, W, C)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def as_convolutions(module: Any) -> Optional[nn.Module]:
    """Return a feed-forward network with a depth-wise convolution, or a conditional position encoding, as convolutions
    alone; None for other modules and for altered layers.

    ONNX Runtime keeps a chain of convolutions in its blocked layout; linear layers would transpose the largest map.
    """
    kind = type(module)
    if kind not in (ConvFFN, DWConvFFN, ResidualDWConv) or any(is_altered(each) for each in module.modules()):
        return None
    if kind is ResidualDWConv:
        is_plain = module.padding_mode == 'zeros' and not module.of_gelu
        return ChannelsFirst(_with_residual(module)) if is_plain else None
    kinds = (nn.Linear, ResidualDWConv if kind is ConvFFN else nn.Conv2d, nn.Linear)
    if tuple(map(type, (module.fc1, module.dwconv, module.fc2))) != kinds or module.dwconv.padding_mode != 'zeros':
        return None
    first, last = _as_convolution(module.fc1), _as_convolution(module.fc2)
    if kind is ConvFFN:
        return ChannelsFirst(first, nn.GELU(), _with_residual(module.dwconv), last)
    return ChannelsFirst(first, module.dwconv, nn.GELU(), last)


def replacement(module: Any) -> Optional[nn.Module]:
    """Return an exportable module in place of an adaptive pool or MMSegmentation's ``Upsample``; None for others."""
    if type(module) is nn.AdaptiveAvgPool2d:
        bins = tuple(to_2tuple(module.output_size))
        return None if bins == (1, 1) or None in bins else BinMeans(bins)
    # mmseg.models.utils.Upsample: makes a Python number of the size of the feature map
    if type(module).__name__ == 'Upsample' and type(module).__module__.startswith('mmseg.') and not module.size:
        factor = module.scale_factor
        return nn.Upsample(scale_factor=factor, mode=module.mode, align_corners=module.align_corners)
    return None


def replace_modules(model: nn.Module, new: Callable[[Any], Optional[nn.Module]] = replacement) -> None:
    """Replace modules by the results of ``new``, in place, unless these are None."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            other = new(child)
            if other is not None:
                setattr(parent, name, other.train(child.training))
