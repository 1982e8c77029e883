# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Checkpoints published by the methods' authors, by name.

``released_checkpoints.csv`` lists them with their links. A name is one of:

- the stem of a config of this project: the whole model (detector ``ravlt_b_cascade_3x``, classifier ``ravlt_b_in1k``);
- a backbone: its ImageNet weights, without classifier (``ravlt_b``).
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
    """Published checkpoint under one of its names.

    Attributes:
        name (str): The name.
        link (str): The authors' link.
        file_name (str): Name of the file in the cache: the link's own, if it has one.
        bare (bool): True for a backbone without head.
    """

    name: str
    link: str
    file_name: str
    bare: bool

    @property
    def path(self) -> Path:
        """The path in the cache."""
        return Path(torch.hub.get_dir(), 'checkpoints', 'mmlinattn', self.file_name)


@functools.cache
def released_checkpoints() -> dict[str, Released]:
    """Return all published checkpoints by name. ImageNet files are there as NAME and as NAME_in1k."""
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
    """Return the published checkpoint ``name``.

    Raises:
        CheckpointError: The name is unknown. The message lists the known names, the closest first.
    """
    table = released_checkpoints()
    if name in table:
        return table[name]
    close = difflib.get_close_matches(name, table, n=5, cutoff=0.5)
    known = close + [other for other in table if other not in close]
    raise CheckpointError(f'no published checkpoint is called {name!r}; known names: {", ".join(known)}')


def find_link(link: str) -> Optional[Released]:
    """Return the whole published checkpoint of a link, with or without fragment, or None."""
    plain = link.partition('#')[0]
    return next((entry for entry in released_checkpoints().values() if entry.link == plain and not entry.bare), None)
