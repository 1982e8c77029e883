# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from .ravlt import RAVLT

__all__ = ['RAVLT']
