# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The layout of ImageNet-1k: a folder per class, and lists of the files with their labels.

MMPretrain's ``ImageNet`` wants 1000 class folders unless it finds ``meta/{train,val}.txt``. With
these a model with all 1000 classes trains as well.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .pictures import save_jpeg
from .shapes import FILLS, IMAGENET_CLASSES, SHAPES, draw_scene

TOP_LEVEL = ('train', 'val', 'meta', 'LOC_synset_mapping.txt')
WNIDS = tuple(f'n9{label:07d}' for label in range(len(IMAGENET_CLASSES)))  # sort as the labels do
QUIET_BACKGROUNDS = ('gradient', 'clouds')  # the others have bands themselves, as the striped shapes do
FOLDERS = (*(f'{split}/{wnid}' for split in ('train', 'val') for wnid in WNIDS), 'meta')


def write_picture(root: Path, split: str, number: int, rng: np.random.Generator, size: tuple[int, int]) -> str:
    """Write the ``number``-th image (from 1) of ``split``; return its line of the list."""
    label = (number - 1) % len(IMAGENET_CLASSES)  # equally many of each class
    shape, fill = divmod(label, len(FILLS))
    scene = draw_scene(
        rng,
        size,
        num_shapes=1,
        kinds=(SHAPES[shape],),
        fills=(FILLS[fill],),
        diameters=(0.45, 0.9),
        min_visible=0.9,
        backgrounds=QUIET_BACKGROUNDS,
        muted=True,
        band_strength=0.9,
    )
    wnid = WNIDS[label]
    name = f'{wnid}_{number}' if split == 'train' else f'ILSVRC2012_val_{number:08d}'
    path = f'{wnid}/{name}.JPEG'
    save_jpeg(root / split / path, scene.image)
    return f'{path} {label}'


def write_index(root: Path, records: dict[str, list[str]]) -> None:
    """Write ``meta/{train,val}.txt`` and the names of the classes."""
    for split, lines in records.items():
        (root / 'meta' / f'{split}.txt').write_text('\n'.join(lines) + '\n')
    names = [f'{wnid} {name}' for wnid, name in zip(WNIDS, IMAGENET_CLASSES)]
    (root / 'LOC_synset_mapping.txt').write_text('\n'.join(names) + '\n')
