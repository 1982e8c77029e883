# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Replace modules of upstream heads that cannot be exported with dynamic image sizes by equivalent ones."""

from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...ops.sizes import as_tensor


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
    """``nn.AdaptiveAvgPool2d`` as two matmuls.

    Exporters support adaptive pools only for one size of the map, or not at all. As in PyTorch, bin i of n covers rows
    ``floor(i H / n)`` up to, excluding, ``ceil((i + 1) H / n)``.

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
        """Return the weights (number, size) that average ``size`` positions over each of ``number`` bins."""
        position = torch.arange(size, device=like.device)
        index = torch.arange(number, device=like.device)
        length = as_tensor(size, like, torch.long)
        first = torch.div(index * length, number, rounding_mode='floor')
        end = torch.div((index + 1) * length + number - 1, number, rounding_mode='floor')
        inside = ((position >= first[:, None]) & (position < end[:, None])).to(like.dtype)
        return inside / (end - first)[:, None].to(like.dtype)


def replacement(module: Any) -> Optional[nn.Module]:
    """Return an exportable module equivalent to an adaptive pool or to MMSegmentation's ``Upsample``; None for other
    modules."""
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
    """Replace adaptive pools and MMSegmentation's ``Upsample`` in ``model`` by exportable modules, in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            new = replacement(child)
            if new is not None:
                setattr(parent, name, new)
