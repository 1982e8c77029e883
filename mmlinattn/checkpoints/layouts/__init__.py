# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Layouts of released state dicts: one module per family, found by itself.

A module of this package with two functions, ``matches(keys)`` and ``convert(state)`` (see
:class:`Layout`), is all it takes to make a released file of that family load everywhere: in
``init_cfg``, through ``mmlinattn://`` and in ``tools/convert_checkpoint.py``. A module with more
than one layout defines :class:`Layout` objects instead.
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Optional

from torch import Tensor


class Converted(NamedTuple):
    """A released state dict in the names of this project.

    Attributes:
        backbone: our backbone keys, without prefix, to tensors.
        head: classifier keys in the names of the MMPretrain model of the family's config
            (``head.*``, ``neck.*``); empty for a dense backbone.
        dropped: released keys left out on purpose: buffers that the model derives by itself, such
            as rotary angles, index tables and attention masks.
    """

    backbone: dict[str, Tensor]
    head: dict[str, Tensor]
    dropped: list[str]


class Layout(NamedTuple):
    """How one family of released files names its tensors.

    Attributes:
        name: name of the family, for messages.
        matches: whether a set of keys (prefixes such as ``module.`` and ``backbone.`` removed) is
            a released classifier or backbone of the family. It must be False for our own keys.
        convert: turns such a state dict into the three parts of :class:`Converted` (a plain tuple
            will do). Keys it does not know stay in ``backbone`` under their own name, so that
            they are reported as unexpected rather than lost.
    """

    name: str
    matches: Callable[[frozenset[str]], bool]
    convert: Callable[[Mapping[str, Tensor]], tuple[dict, dict, list]]


@functools.cache
def all_layouts() -> tuple[Layout, ...]:
    """The layouts of every module of this package, by module name."""
    found = []
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        if info.name.startswith('_'):  # helpers
            continue
        module = importlib.import_module(f'{__name__}.{info.name}')
        layouts = [value for value in vars(module).values() if isinstance(value, Layout)]
        found += layouts or [Layout(info.name, module.matches, module.convert)]
    return tuple(dict.fromkeys(found))


def find_layout(keys: Iterable[str]) -> Optional[Layout]:
    """The released layout that ``keys`` are written in, or None (our own layout, or an alien)."""
    keys = frozenset(keys)
    return next((layout for layout in all_layouts() if layout.matches(keys)), None)
