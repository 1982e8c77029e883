# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The checkpoints that the methods' authors published, by name.

``released_checkpoints.csv`` lists them with their links. A name is a backbone's (``ravlt_b``: the ImageNet weights,
without classifier) or the stem of a config of this project (``ravlt_b_cascade_3x``: the whole detector;
``ravlt_b_in1k``: the whole classifier).
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
_TASK_SUFFIX = {
    'ImageNet-1K': 'in1k',
    'RetinaNet 1x': 'retinanet_1x',
    'Mask R-CNN 1x': 'maskrcnn_1x',
    'Mask R-CNN 3x+MS': 'maskrcnn_3x',
    'Cascade Mask R-CNN 3x+MS': 'cascade_3x',
    'Semantic FPN 80k': 'fpn_80k',
    'UperNet 160k': 'upernet_160k',
}


class Released(NamedTuple):
    """One published checkpoint under one of its names.

    Attributes:
        name: the name asked for.
        link: where its authors put it.
        file_name: name of the file in the cache; the link's own where it has one.
        bare: whether the name stands for the backbone alone.
    """

    name: str
    link: str
    file_name: str
    bare: bool

    @property
    def path(self) -> Path:
        """Where the file is kept, and looked for before anything is downloaded."""
        return Path(torch.hub.get_dir(), 'checkpoints', 'mmlinattn', self.file_name)


def _backbone_name(model: str) -> str:
    return model.lower().replace('-', '_').replace('pvtv2', 'pvt_v2')


@functools.cache
def released_checkpoints() -> dict[str, Released]:
    """Every published checkpoint by name; ImageNet files appear as NAME and as NAME_in1k."""
    table = {}
    with open(_TABLE, newline='') as file:
        for row in csv.DictReader(file):
            backbone = _backbone_name(row['model'])
            stem = f'{backbone}_{_TASK_SUFFIX[row["trained_for"]]}'
            is_classifier = row['trained_for'] == 'ImageNet-1K'
            file_name = os.path.basename(urlsplit(row['link']).path) or f'{backbone if is_classifier else stem}.pth'
            for name in (backbone, stem) if is_classifier else (stem,):
                table[name] = Released(name, row['link'], file_name, bare=name == backbone)
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


def link_with_name(entry: Released) -> str:
    """The link, with a fragment that names the file where the link's own path does not (``.../?dl=1``).

    Downloaders that take what is behind the last slash for the name (``mim download``) then do not give all files the
    same one. Servers are not sent fragments.
    """
    has_name = os.path.basename(urlsplit(entry.link).path)
    return entry.link if has_name else f'{entry.link}#/{entry.file_name}'


def find_link(link: str) -> Optional[Released]:
    """The published checkpoint, whole, that is behind a link with or without fragment; None for other links."""
    plain = link.partition('#')[0]
    return next((entry for entry in released_checkpoints().values() if entry.link == plain and not entry.bare), None)
