# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Initial weights that MMEngine has no initialiser for."""

import math

from mmengine.model.weight_init import BaseInit, update_init_info
from mmengine.registry import WEIGHT_INITIALIZERS
from torch import nn


@WEIGHT_INITIALIZERS.register_module()
class GroupedFanOutInit(BaseInit):
    """Normal distribution of variance ``2 / fan_out`` for 2-D convolutions, as in PVTv2.

    ``fan_out`` counts the outputs of one group: 9 for a depth-wise 3x3 convolution. MMEngine's ``Kaiming`` counts the
    outputs of all groups.

    Args:
        bias (float): Initial bias.
    """

    def __init__(self, bias: float = 0.0) -> None:
        super().__init__(bias=bias, layer='Conv2d')

    def __call__(self, module: nn.Module) -> None:
        for layer in module.modules():
            if isinstance(layer, nn.Conv2d):
                fan_out = math.prod(layer.kernel_size) * layer.out_channels // layer.groups
                nn.init.normal_(layer.weight, std=math.sqrt(2 / fan_out))
                if layer.bias is not None:
                    nn.init.constant_(layer.bias, self.bias)
        if hasattr(module, '_params_init_info'):
            update_init_info(module, init_info=f'{type(self).__name__}: bias={self.bias}')
