# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Read COCO JSON, as written by COCO, CVAT, Roboflow, Label Studio, LVIS and other tools."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from ...engine.data.coco import fault_of_coco
from ...utils.errors import RunError
from .data import Data
from .kinds import Source
from .objects import Claim, Object, Photo, checked_size, corners, in_names, marks_of

# keys that are read, or say nothing about an object
_READ = {'id', 'image_id', 'category_id', 'bbox', 'area', 'segmentation', 'attributes', 'rotation', 'num_keypoints'}
_READ |= {'isbbox', 'color', 'creator', 'metadata', 'dataset_id', 'width', 'height', 'extra', 'deleted'}
_OF_IMAGES = {'id', 'file_name', 'width', 'height', 'license', 'coco_url', 'flickr_url', 'date_captured', 'path', 'url'}
_OF_IMAGES |= {'dataset_id', 'extra', 'metadata', 'name', 'split', 'subset', 'flickr_640_url', 'num_annotations'}
_OF_IMAGES |= {'absolute_url', 'neg_category_ids', 'not_exhaustive_category_ids'}


def _of_boxes(sources: list[Source]) -> list[Source]:
    """Leave out COCO's key points and stuff beside its ``instances_*.json``."""
    with_boxes = {source.path.parent for source in sources if source.path.name.startswith('instances')}
    others = ('person_keypoints', 'stuff')
    return [s for s in sources if not (s.path.name.startswith(others) and s.path.parent in with_boxes)]


def read_coco_files(sources: list[Source], data: Data) -> Claim:
    """Read COCO files that share one list of categories.

    The empty supercategory that Roboflow lists as first category is skipped.

    Raises:
        RunError: A file is damaged, or does not match its images or the other files.
    """
    classes, photos, groups, unused = list[str](), list[Photo](), set[str](), Counter[str]()
    chosen = _of_boxes(sources)
    for path, _, coco in chosen:
        fault = fault_of_coco(coco)
        if fault or not coco['images']:
            raise RunError(f'{path} {fault or "has no images"}.')
        categories = {item.get('id'): item.get('name') for item in coco['categories']}
        if None in categories.values():
            raise RunError(f'{path} has a category without a name.')
        categories = {number: str(name) for number, name in categories.items()}
        names = list(categories.values())
        if names != (classes or names) or len(set(names)) < len(names):
            raise RunError(f'{path} has the categories {names}: expected different names, the same in all files.')
        classes = names
        parents = ((item.get('supercategory'), item['name']) for item in coco['categories'])
        groups.update(str(group) for group, name in parents if group not in (None, name))
        objects: dict[Any, list[Object]] = {}
        for item in coco['annotations']:
            try:
                read = _object(item, categories[item['category_id']], path)
            except (TypeError, ValueError) as error:
                raise RunError(f'{path}: annotation {item.get("id")}: {error}.') from error
            objects.setdefault(item.get('image_id'), []).append(read)
        pictures = data.pictures.find(path, list(map(_name_of, coco['images'])))
        of_file = data.splits.of(data.rel(path), is_file=True)
        for image, picture in zip(coco['images'], pictures):
            size = checked_size(path, picture, image.get('width'), image.get('height'))
            own = str(image.get('split') or image.get('subset') or '')
            found = objects.pop(image.get('id'), [])
            split = of_file or data.splits.of(Path(own))
            photos.append(Photo(picture, size, found, split, path))
            unused.update(key for key in image if key not in _OF_IMAGES and marks_of({key: image[key]}))
        if objects:
            raise RunError(
                f'{path}: annotations with image_id {next(iter(objects))!r}, which is not the id of one of its images.'
            )
    groups -= {str(item.name) for photo in photos for item in photo.objects}
    classes = [name for name in classes if name not in groups]
    if data.options.classes:
        photos, classes = in_names(photos, data.options.classes)
    listed = ', '.join(f'{key} ({count})' for key, count in sorted(unused.items()))
    notes = [f'not used of the images in COCO JSON: {listed}'] if unused else []
    data.used -= {source.path for source in sources if source not in chosen}
    return Claim('COCO JSON', photos, classes, notes, 'sides', 'pixels')


def _object(item: dict, name: str, path: Path) -> Object:
    box, is_raw = tuple(item['bbox']), True
    attributes = item['attributes'] if isinstance(item.get('attributes'), dict) else {}
    marks = marks_of({key: value for key, value in item.items() if key not in _READ})
    marks |= marks_of({key: value for key, value in attributes.items() if key != 'rotation'})
    outline, area = item.get('segmentation') or None, item.get('area')
    if isinstance(outline, list) and any(np.ndim(part) != 1 for part in outline):
        raise RunError(
            f'{path}: annotation {item.get("id")}: segmentation is no list of polygons, [[x, y, ...], ...], each a '
            'flat list of numbers.'
        )
    if isinstance(outline, list):
        kept = [part for part in outline if len(part) >= 6 and len(part) % 2 == 0]
        marks |= {'lines'} if len(kept) < len(outline) else set()
        outline = kept or None
    turn = attributes.get('rotation', item.get('rotation'))
    if isinstance(turn, (int, float)) and turn % 180:  # CVAT: degrees clockwise, of a box given before its rotation
        x, y, width, height = box
        points = corners((x, y, x + width, y + height), turn)
        box, is_raw = (*points.min(0).tolist(), *points.max(0).tolist()), False
        marks |= {'rotated'}
    area = area if isinstance(area, (int, float)) and area > 0 else 0.0
    return Object(name, box, outline, marks, area, is_raw)


def _name_of(image: dict) -> str:
    return str(image.get('file_name') or image.get('coco_url'))  # of LVIS: the latter
