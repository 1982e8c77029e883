# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import torch.nn.functional as F
from torch import Tensor, nn


def gelu_of_conv(x: Tensor, conv: nn.Module) -> Tensor:
    return F.gelu(conv(x))
