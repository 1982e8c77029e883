# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Layouts of released state dicts, one module per family.

Each module has two functions:

- ``matches(keys)`` returns True for the keys of a released classifier or backbone of the family, without prefixes such
  as ``module.`` and ``backbone.``, and False for our own keys.
- ``convert(state)`` returns three parts: backbone weights under our names, without prefix; head weights under the names
  of the MMPretrain model in the family's config (``head.*``, ``neck.*``); released keys dropped on purpose (derived
  buffers, unused norms). Unknown keys stay in the first part, and are reported as unexpected.

All entries of :data:`LAYOUTS` load in ``init_cfg``, through ``mmlinattn://`` and in ``tools/convert_checkpoint.py``.
"""

from collections.abc import Iterable
from types import ModuleType
from typing import Optional

from . import cswin, deit, nextvit, pvt, ravlt, swin

LAYOUTS = (cswin, deit, nextvit, pvt, ravlt, swin)


def find_layout(keys: Iterable[str]) -> Optional[ModuleType]:
    """Return the layout module for the keys of a released file, or None for keys of this project or of an unknown
    layout."""
    keys = frozenset(keys)
    return next((layout for layout in LAYOUTS if layout.matches(keys)), None)
