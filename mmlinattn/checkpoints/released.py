# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Checkpoints published by the methods' authors, by name.

``released_checkpoints.csv`` lists them with their links. A name is one of:

- a config name of this project: the whole model (detector ``ravlt_b_cascade_3x``, classifier ``ravlt_b_in1k``);
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
from .download import mirrored

_TABLE = Path(__file__).with_name('released_checkpoints.csv')


class Released(NamedTuple):
    """Published checkpoint under one of its names.

    Attributes:
        name (str): The name.
        link (str): URL of the file, published by the authors.
        file_name (str): Name of the file in the cache, taken from the link, or the backbone's name if the link has
            none.
        bare (bool): True if the name is a backbone's, so that the head is left out.
    """

    name: str
    link: str
    file_name: str
    bare: bool

    @property
    def path(self) -> Path:
        """Path of the downloaded file in PyTorch's cache."""
        return Path(torch.hub.get_dir(), 'checkpoints', 'mmlinattn', self.file_name)


@functools.cache
def released_checkpoints() -> dict[str, Released]:
    """Return all published checkpoints by name. An ImageNet file has two names: NAME (backbone) and NAME_in1k
    (classifier)."""
    table = {}
    with open(_TABLE, newline='') as file:
        for row in csv.DictReader(file):
            config_name, link = row['config'], row['link']
            backbone = config_name.removesuffix('_in1k')
            file_name = os.path.basename(urlsplit(link).path) or f'{backbone}.pth'
            for name in dict.fromkeys((backbone, config_name)):
                table[name] = Released(name, link, file_name, bare=name != config_name)
    return table


def find_released(name: str) -> Released:
    """Return the published checkpoint ``name``.

    Raises:
        CheckpointError: The name is unknown. The message lists all known names, similar ones first.
    """
    table = released_checkpoints()
    if name in table:
        return table[name]
    close = difflib.get_close_matches(name, table, n=5, cutoff=0.5)
    known = close + [other for other in table if other not in close]
    raise CheckpointError(f'no published checkpoint is called {name!r}; known names: {", ".join(known)}')


def find_link(link: str) -> Optional[Released]:
    """Return the published whole-model checkpoint with this link, or None. A ``#`` fragment of the link is ignored.
    Links of the mirror in ``HF_ENDPOINT`` are known too."""
    plain = link.partition('#')[0]
    entries = (entry for entry in released_checkpoints().values() if not entry.bare)
    return next((entry for entry in entries if plain in (entry.link, mirrored(entry.link))), None)
