# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The layout of COCO 2017 instance annotations."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from .pictures import is_empty, save_jpeg
from .polygons import mask_to_box, mask_to_polygons
from .shapes import COCO_CLASSES, draw_scene

TOP_LEVEL = ('train2017', 'val2017', 'annotations')
FOLDERS = TOP_LEVEL
_FILLS = ('plain', 'plain', 'plain', 'striped')  # mostly plain: a small model learns it in minutes


def write_picture(root: Path, split: str, number: int, rng: np.random.Generator, size: tuple[int, int]) -> dict:
    """Write the ``number``-th image (from 1) of ``split``; return its part of the annotations."""
    num_shapes = 0 if is_empty(number) else None
    scene = draw_scene(rng, size, num_shapes=num_shapes, fills=_FILLS)
    name = f'{number:012d}.jpg'
    save_jpeg(root / f'{split}2017' / name, scene.image)
    image = dict(id=number, file_name=name, width=size[0], height=size[1], license=1)
    instances = [
        dict(
            image_id=number,
            category_id=int(label) + 1,
            segmentation=mask_to_polygons(mask),
            area=int(np.count_nonzero(mask)),
            bbox=mask_to_box(mask),
            iscrowd=0,
        )
        for mask, label in zip(scene.masks, scene.labels)
    ]
    return dict(image=image, instances=instances)


def write_index(root: Path, records: dict[str, list[dict]]) -> None:
    """Write ``annotations/instances_{train,val}2017.json``."""
    categories = [dict(id=i, name=name, supercategory='shape') for i, name in enumerate(COCO_CLASSES, start=1)]
    for split, pictures in records.items():
        instances = [instance for picture in pictures for instance in picture['instances']]
        content = dict(
            info=dict(description='Synthetic shapes, mmlinattn', version='1.0', year=2017),
            licenses=[dict(id=1, name='Apache-2.0', url='')],
            images=[picture['image'] for picture in pictures],
            annotations=[dict(id=i, **entry) for i, entry in enumerate(instances, start=1)],
            categories=categories,
        )
        path = root / 'annotations' / f'instances_{split}2017.json'
        path.write_text(json.dumps(content, separators=(',', ':')))
