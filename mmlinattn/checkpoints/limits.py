# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Data that is small in the file and without bound in memory, or on the way through it."""

from argparse import Namespace
from collections import OrderedDict
from typing import Any, Optional

import numpy as np
from torch import Tensor

_MAX_DEPTH = 100
_MAX_ENTRIES = 50_000_000  # of everything, what occurs twice counted twice
_MIN_ALLOWED = 64 << 20  # bytes an array may have in any file
# A zip file may be compressed, though torch.save never does it; beyond this a small file would fill the memory.
MAX_EXPANSION = 20


def why_too_large(data: Any, file_size: int) -> Optional[str]:
    """What is wrong with the extent of loaded data, None if nothing is.

    Whoever copies, prints or saves data later goes through all of it: a list that contains itself, one nested a
    thousand levels deep, a list of lists that are all the same one thirty levels down (which multiply to more than any
    memory), an array that repeats one number a million million times.

    Args:
        data: what was read from a file.
        file_size: of that file, in bytes.
    """
    allowed = max(MAX_EXPANSION * file_size, _MIN_ALLOWED)
    try:
        _count(data, 0, {}, allowed)
    except _TooLargeError as error:
        return str(error)
    return None


class _TooLargeError(ValueError):
    pass


def _count(node: Any, depth: int, known: dict[int, tuple[int, int]], allowed: int) -> tuple[int, int]:
    """Entries of a node and the levels below it, which are counted once however often the node occurs."""
    if isinstance(node, (Tensor, np.ndarray)):
        size = node.numel() * node.element_size() if isinstance(node, Tensor) else node.nbytes
        if size > allowed:
            raise _TooLargeError(f'declares an array of {size} bytes, more than the file can hold')
    attributes = vars(node) if isinstance(node, (Namespace, OrderedDict, Tensor)) else {}
    if not attributes and not isinstance(node, (dict, list, tuple, set)):
        return 1, 0
    count, levels = known.get(id(node), (0, 1))
    if depth + levels > _MAX_DEPTH:  # also of a node that occurred before, nearer to the top
        raise _TooLargeError(f'is nested more than {_MAX_DEPTH} levels deep, or contains itself')
    if not count:
        children = [*attributes.values()]
        if isinstance(node, (dict, list, tuple, set)):
            children += node
        if isinstance(node, dict):
            children += node.values()
        found = [_count(child, depth + 1, known, allowed) for child in children]
        count = 1 + sum(entries for entries, _ in found)
        if count > _MAX_ENTRIES:
            raise _TooLargeError(f'repeats its contents to more than {_MAX_ENTRIES} entries')
        levels = 1 + max((below for _, below in found), default=0)
        known[id(node)] = count, levels
    return count, levels
