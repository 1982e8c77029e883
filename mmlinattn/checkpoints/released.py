# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The checkpoints that the methods' authors published, by name.

``released_checkpoints.csv`` lists them with their links. A name is the stem of a config of this project
(``ravlt_b_cascade_3x``: the whole detector; ``ravlt_b_in1k``: the whole classifier) or a backbone's (``ravlt_b``: the
ImageNet weights, without classifier).
"""

import csv
import difflib
import functools
import os
from pathlib import Path
from typing import NamedTuple, Optional
from urllib.parse import urlsplit

import torch

from ..utils.errors import CheckpointError

_TABLE = Path(__file__).with_name('released_checkpoints.csv')


class Released(NamedTuple):
    """One published checkpoint under one of its names.

    Attributes:
        name: the name asked for.
        link: where its authors put it.
        file_name: name of the file in the cache; the link's own where it has one.
        bare: whether the name is of a backbone without head.
    """

    name: str
    link: str
    file_name: str
    bare: bool

    @property
    def path(self) -> Path:
        """The path of the file in the cache, which is tried before a download."""
        return Path(torch.hub.get_dir(), 'checkpoints', 'mmlinattn', self.file_name)


@functools.cache
def released_checkpoints() -> dict[str, Released]:
    """Every published checkpoint by name; ImageNet files appear as NAME and as NAME_in1k."""
    table = {}
    with open(_TABLE, newline='') as file:
        for row in csv.DictReader(file):
            stem, link = row['config'], row['link']
            backbone = stem.removesuffix('_in1k')
            file_name = os.path.basename(urlsplit(link).path) or f'{backbone}.pth'
            for name in dict.fromkeys((backbone, stem)):
                table[name] = Released(name, link, file_name, bare=name != stem)
    return table


def find_released(name: str) -> Released:
    """The published checkpoint called ``name``.

    Raises:
        CheckpointError: there is none; the message lists the known names, the closest first.
    """
    table = released_checkpoints()
    if name in table:
        return table[name]
    close = difflib.get_close_matches(name, table, n=5, cutoff=0.5)
    known = close + [other for other in table if other not in close]
    raise CheckpointError(f'no published checkpoint is called {name!r}; known names: {", ".join(known)}')


def find_link(link: str) -> Optional[Released]:
    """The published checkpoint, whole, that is behind a link with or without fragment; None for other links."""
    plain = link.partition('#')[0]
    return next((entry for entry in released_checkpoints().values() if entry.link == plain and not entry.bare), None)
