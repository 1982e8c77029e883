# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Read COCO JSON, as written by COCO, CVAT, Roboflow, Label Studio, LVIS and other tools."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ...engine.data.coco import error_of_coco
from ...utils.errors import RunError
from .data import Source
from .names import GROUPS, composed, plain
from .reading import Entry, Object, Photo, Reader, bounds, corners, flags_of

# keys that are read, or say nothing about an object
_READ = {'id', 'image_id', 'category_id', 'bbox', 'area', 'segmentation', 'attributes', 'rotation', 'num_keypoints'}
_READ |= {'isbbox', 'color', 'creator', 'metadata', 'dataset_id', 'width', 'height', 'extra', 'deleted'}
_OF_IMAGES = {'id', 'file_name', 'width', 'height', 'license', 'coco_url', 'flickr_url', 'date_captured', 'path', 'url'}
_OF_IMAGES |= {'dataset_id', 'extra', 'metadata', 'name', 'split', 'subset', 'flickr_640_url', 'num_annotations'}
_OF_IMAGES |= {'absolute_url', 'neg_category_ids', 'not_exhaustive_category_ids'}


class Coco(Reader):
    """Files that share one list of categories. The empty supercategory that Roboflow lists first is skipped."""

    boxes, units, lists = 'sides', 'pixels', ()

    def images(self, sources: list[Source]) -> list[Photo]:
        """Read the images, except from files of key points and stuff beside COCO's ``instances_*.json``.
        Supercategories without objects are removed from ``classes``."""
        with_boxes = {source.path.parent for source in sources if source.path.name.startswith('instances')}
        others = ('person_keypoints', 'stuff')
        chosen = [s for s in sources if not (s.path.name.startswith(others) and s.path.parent in with_boxes)]
        self.data.used -= {source.path for source in sources if source not in chosen}
        self.groups = set[str]()
        photos = super().images(chosen)
        groups = self.groups - {str(item.name) for photo in photos for item in photo.objects}
        self.classes = [name for name in self.classes if composed(name) not in groups]
        return photos

    def entries(self, source: Source) -> Iterator[Entry]:
        path, coco = source.path, source.content
        error = error_of_coco(coco)
        if error or not coco['images']:
            raise RunError(f'{path} {error or "has no images"}.')
        categories = {item.get('id'): item.get('name') and str(item['name']).strip() for item in coco['categories']}
        names = list(map(str, categories.values()))
        if None in categories.values():
            raise RunError(f'{path} has a category without a name.')
        if {*names} != {*(self.classes or names)} or len(set(names)) < len(names):
            raise RunError(f'{path} has the categories {names}: expected different names, the same in all files.')
        self.classes = self.classes or names
        parents = ((item.get('supercategory'), item['name']) for item in coco['categories'])
        self.groups.update(composed(str(group)) for group, name in parents if group not in (None, name))
        annotations: dict[Any, list] = {}
        for item in coco['annotations']:
            named = str(categories[item['category_id']]), item
            annotations.setdefault(item.get('image_id'), []).append(named)
        for image in coco['images']:
            name = str(image.get('file_name') or image.get('coco_url'))  # of LVIS: the latter
            groups = [key for key in image if plain(key) in GROUPS]
            unused = (key for key in image if key not in (*_OF_IMAGES, *groups) and flags_of({key: image[key]}))
            self.unused.update(unused)
            group = next((f'{key} {image[key]}' for key in groups if image[key] not in (None, '')), None)
            split = str(image.get('split') or image.get('subset') or '')
            size = image.get('width'), image.get('height')
            yield Entry(name, annotations.pop(image.get('id'), []), size, split, group)
        if annotations:
            raise RunError(
                f'{path}: annotations with image_id {next(iter(annotations))!r}, which is not the id of one of its '
                'images.'
            )

    def objects(self, content: Any, size: tuple[int, int]) -> Iterator[Object]:
        for name, item in content:
            try:
                yield _object(name, item, [size[1], size[0]])
            except (TypeError, ValueError) as error:
                raise ValueError(f'annotation {item.get("id")}: {error}') from error


def _object(name: str, item: dict, shape: list[int]) -> Object:
    """Convert a COCO annotation ``item`` of the class ``name``; ``shape`` is height and width of the image."""
    box, is_raw = tuple(item['bbox']), True
    attributes = item['attributes'] if isinstance(item.get('attributes'), dict) else {}
    flags = flags_of({key: value for key, value in item.items() if key not in _READ})
    flags |= flags_of({key: value for key, value in attributes.items() if key != 'rotation'})
    segmentation, area = item.get('segmentation') or None, item.get('area')
    if isinstance(segmentation, list):
        if any(np.ndim(part) != 1 for part in segmentation):
            raise ValueError('segmentation is no list of polygons, [[x, y, ...], ...], each a flat list of numbers')
        kept = [part for part in segmentation if len(part) >= 6 and len(part) % 2 == 0]
        flags |= {'lines'} if len(kept) < len(segmentation) else set()
        segmentation = kept or None
    elif isinstance(segmentation, dict) and list(segmentation.get('size') or ()) != shape:
        told = segmentation.get('size')
        raise ValueError(f'a run length has size={told}: expected {shape}, height and width of the image')
    turn = attributes.get('rotation', item.get('rotation'))
    if isinstance(turn, (int, float)) and turn % 180:  # CVAT: degrees clockwise, of a box given before its rotation
        x, y, width, height = box
        points = corners((x, y, x + width, y + height), turn)
        box, is_raw = bounds([points]), False
        flags |= {'rotated'}
    area = area if isinstance(area, (int, float)) and area > 0 else 0.0
    return Object(name, box, segmentation, flags, area, is_raw)
