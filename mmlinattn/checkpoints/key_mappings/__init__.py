# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Key mappings of released state dicts, one module per family.

Each module has two functions:

- ``matches(keys)`` returns True for the keys of a released classifier or backbone of the family, without prefixes such
  as ``module.`` and ``backbone.``, and False for our own keys.
- ``convert(state)`` returns three parts: backbone weights under our names, without prefix; head weights under the names
  of the MMPretrain model in the family's config (``head.*``, ``neck.*``); released keys dropped on purpose (derived
  buffers, unused norms). Unknown keys stay in the first part, and are reported as unexpected.

All entries of :data:`KEY_MAPPINGS` load in ``init_cfg``, through ``mmlinattn://`` and in
``tools/convert_checkpoint.py``.
"""

from collections.abc import Iterable
from types import ModuleType
from typing import Optional

from . import cswin, deit, nextvit, pvt, ravlt, swin

KEY_MAPPINGS = (cswin, deit, nextvit, pvt, ravlt, swin)


def find_key_mapping(keys: Iterable[str]) -> Optional[ModuleType]:
    """Return the key mapping for a released file; None for keys of this project or of an unknown family."""
    keys = frozenset(keys)
    return next((mapping for mapping in KEY_MAPPINGS if mapping.matches(keys)), None)
