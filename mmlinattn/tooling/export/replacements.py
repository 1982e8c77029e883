# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Replace parts of upstream heads for graphs of dynamic size, with the same numbers."""

from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...ops.sizes import as_tensor


class StridedPools(TorchFunctionMode):
    """Context that turns max pools of one pixel and stride 2, the last levels of MMDetection's FPN, into slices.

    Older exporters of PyTorch write the parity of the example's size into the graph.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.max_pool2d and args[1:] == (1,) and kwargs.get('stride') == 2 and kwargs.get('padding') == 0:
            return args[0][..., ::2, ::2]
        return func(*args, **kwargs)


class BinMeans(nn.Module):
    """``nn.AdaptiveAvgPool2d`` as two matrix products.

    Exporters support adaptive pools at one size of the map, or not at all. As in PyTorch, bin i of n covers the rows
    from ``floor(i H / n)`` to ``ceil((i + 1) H / n)``.

    Args:
        bins (tuple[int, int]): Rows and columns of the result.

    Shape: (B, C, H, W) -> (B, C, *bins).
    """

    def __init__(self, bins: tuple[int, int]) -> None:
        super().__init__()
        self.bins = bins

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = (self.weights(size, number, x) for size, number in zip(x.shape[2:], self.bins))
        return torch.einsum('ih,bchw,jw->bcij', rows, x, columns)

    @staticmethod
    def weights(size, number: int, like: Tensor) -> Tensor:
        """Return the weights of the mean over each bin, (number, size)."""
        position = torch.arange(size, device=like.device)
        index = torch.arange(number, device=like.device)
        length = as_tensor(size, like, torch.long)
        first = torch.div(index * length, number, rounding_mode='floor')
        end = torch.div((index + 1) * length + number - 1, number, rounding_mode='floor')
        inside = ((position >= first[:, None]) & (position < end[:, None])).to(like.dtype)
        return inside / (end - first)[:, None].to(like.dtype)


def replacement(module: Any) -> Optional[nn.Module]:
    """Return the replacement of a module, or None."""
    if type(module) is nn.AdaptiveAvgPool2d:
        size: Any = module.output_size
        bins = (size, size) if isinstance(size, int) else tuple(size)
        return None if bins == (1, 1) or None in bins else BinMeans(bins)
    # mmseg.models.utils.Upsample: makes a Python number of the size of the map
    if type(module).__name__ == 'Upsample' and type(module).__module__.startswith('mmseg.') and not module.size:
        factor = module.scale_factor
        return nn.Upsample(scale_factor=factor, mode=module.mode, align_corners=module.align_corners)
    return None


def replace_modules(model: nn.Module) -> None:
    """Replace modules of ``model`` by :func:`replacement`, in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            new = replacement(child)
            if new is not None:
                setattr(parent, name, new)
