# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from collections.abc import Sequence
from typing import Optional

import torch.nn.functional as F
from torch import Tensor, nn


def conv_norms(x: Tensor, layers: Sequence[tuple[nn.Conv2d, Optional[nn.Module]]]) -> Tensor:
    for i, (conv, norm) in enumerate(layers):
        x = conv(x if i == 0 else F.gelu(x))
        x = x if norm is None else norm(x)
    return x
