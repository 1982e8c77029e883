# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Layouts of released state dicts, one module a family.

Each has two functions:

- ``matches(keys)``: whether a set of keys (prefixes such as ``module.`` and ``backbone.`` removed) is a released
  classifier or backbone of the family; False for our own keys.
- ``convert(state)``: such a state dict in three parts: our keys of the backbone, without prefix; those of the head
  in the names of the MMPretrain model of the family's config (``head.*``, ``neck.*``); a list of released keys left out
  on purpose: derived buffers, unused norms. Keys it does not know stay in the first part under their own
  name, so that they are reported as unexpected rather than lost.

A module named in :data:`LAYOUTS` loads everywhere: in ``init_cfg``, through ``mmlinattn://`` and in
``tools/convert_checkpoint.py``.
"""

from collections.abc import Iterable
from types import ModuleType
from typing import Optional

from . import cswin, deit, nextvit, pvt, ravlt, swin

LAYOUTS = (cswin, deit, nextvit, pvt, ravlt, swin)


def find_layout(keys: Iterable[str]) -> Optional[ModuleType]:
    """The released layout that ``keys`` are written in, or None (our own layout, or an alien)."""
    keys = frozenset(keys)
    return next((layout for layout in LAYOUTS if layout.matches(keys)), None)
