# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The layout of ADEChallengeData2016 (ADE20K semantic segmentation, 150 classes).

A map holds the label plus one, 0 where a pixel belongs to none of the classes. Only the first
``len(ADE_CLASSES)`` of ADE20K's labels occur, so a model with all 150 trains as well.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .pictures import is_empty, save_jpeg, save_png
from .shapes import ADE20K_NAMES, ADE_CLASSES, SHAPES, UNLABELLED_SHAPE, draw_scene
from .textures import BACKGROUNDS

TOP_LEVEL = ('images', 'annotations', 'objectInfo150.txt', 'sceneCategories.txt')
_SPLITS = dict(train='training', val='validation')
FOLDERS = tuple(f'{kind}/{split}' for kind in TOP_LEVEL[:2] for split in _SPLITS.values())
_KINDS = (*SHAPES, UNLABELLED_SHAPE)


def write_picture(root: Path, split: str, number: int, rng: np.random.Generator, size: tuple[int, int]) -> dict:
    """Write the ``number``-th image (from 1) of ``split`` with its map; return its statistics."""
    scene = draw_scene(rng, size, num_shapes=0 if is_empty(number) else None, kinds=_KINDS, muted=True)
    values = [ADE_CLASSES.index(kind) + 1 for kind in SHAPES] + [0]
    labels = np.full(scene.image.shape[:2], ADE_CLASSES.index(scene.background) + 1, np.uint8)
    for mask, kind in zip(scene.masks, scene.labels):
        labels[mask] = values[kind]
    name = f'ADE_{split}_{number:08d}'
    save_jpeg(root / 'images' / _SPLITS[split] / f'{name}.jpg', scene.image)
    save_png(root / 'annotations' / _SPLITS[split] / f'{name}.png', labels)
    pixels = np.bincount(labels.ravel(), minlength=len(ADE_CLASSES) + 1)
    return dict(name=name, scene=scene.background, pixels=pixels)


def write_index(root: Path, records: dict[str, list[dict]]) -> None:
    """Write ``objectInfo150.txt`` (the classes that occur) and ``sceneCategories.txt``."""
    pixels = {s: np.stack([record['pixels'] for record in part]) for s, part in records.items()}
    share = pixels['train'].sum(axis=0) / pixels['train'].sum()
    pictures = {s: np.count_nonzero(part, axis=0) for s, part in pixels.items()}
    lines = ['Idx\tRatio\tTrain\tVal\tStuff\tName']
    for value, (ours, theirs) in enumerate(zip(ADE_CLASSES, ADE20K_NAMES), start=1):
        seen = f'{pictures["train"][value]}\t{pictures["val"][value]}'
        stuff = int(ours in BACKGROUNDS)
        lines.append(f'{value}\t{share[value]:.4f}\t{seen}\t{stuff}\t{theirs.strip()}, {ours}')
    (root / 'objectInfo150.txt').write_text('\n'.join(lines) + '\n')
    scenes = [f'{record["name"]} {record["scene"]}' for part in records.values() for record in part]
    (root / 'sceneCategories.txt').write_text('\n'.join(scenes) + '\n')
