# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from .cswin import LinearCSWin
from .deit import LinearDeiT
from .nextvit import LinearNextViT
from .pvt import LinearPVT
from .pvt_v2 import LinearPVTv2
from .ravlt import RAVLT
from .swin import LinearSwin

__all__ = ['RAVLT', 'LinearCSWin', 'LinearDeiT', 'LinearNextViT', 'LinearPVT', 'LinearPVTv2', 'LinearSwin']
