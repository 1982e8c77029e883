# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

import torch.nn.functional as F
from torch import Tensor, nn

from .. import onednn
from ..forms import records
from ..memory import is_plain_conv
from . import reference


def gelu_of_conv(x: Tensor, conv: nn.Module) -> Tensor:
    if records() or not is_plain_conv(conv):
        return reference.gelu_of_conv(x, conv)
    return fused(x, conv.weight, conv.bias, conv)


def fused(x: Tensor, weight: Tensor, bias: Optional[Tensor], conv: nn.Conv2d) -> Tensor:
    """With the given weights in place of those of ``conv``."""
    if x.device.type == 'cpu' and onednn.takes(x, weight):
        steps = (list(conv.padding), list(conv.stride), list(conv.dilation), conv.groups)
        return onednn.CONV(x, weight, bias, *steps, 'gelu', [], 'none')
    return F.gelu(F.conv2d(x, weight, bias, conv.stride, conv.padding, conv.dilation, conv.groups))
