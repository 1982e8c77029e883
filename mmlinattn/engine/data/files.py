# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Facts from the files of data sets, read once and kept as JSON; checks judge them."""

import json
import math
import os
import os.path as osp
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

_NUM_SIZES = 200  # images whose sizes are compared
_ROTATED = (5, 6, 7, 8)  # values of the EXIF orientation
_ORIENTATION = 274


def spread(length: int, count: int) -> list[int]:
    """Up to ``count`` of ``length`` indices, the first among them, in an order that is spread at every length."""
    chosen = np.unique(np.linspace(0, max(length - 1, 0), min(length, count)).round().astype(int))
    return [int(i) for i in np.random.default_rng(0).permutation(chosen)]


class Memory:
    """Facts of an earlier run, kept in a file beside the sizes and times of change of what they were read from.

    Args:
        path: A JSON file, made where it can be.
    """

    def __init__(self, path: Any):
        self.path, self.kept = Path(path), {}
        with suppress(OSError, ValueError):
            kept = json.loads(self.path.read_text())
            self.kept = kept if isinstance(kept, dict) else {}

    def facts(self, read: Callable[..., dict], files: Sequence[str], *args: Any, **settings: Any) -> dict:
        """``read(*args, **settings)``, or what it said before while ``files`` and ``settings`` were the same."""
        stats = [(file, osp.getsize(file), os.stat(file).st_mtime_ns) for file in files if osp.exists(file)]
        state = sha256(repr((stats, settings)).encode()).hexdigest()
        key = f'{read.__name__} {files[0]}'
        entry = self.kept.get(key)
        if isinstance(entry, dict) and entry.get('state') == state and isinstance(entry.get('facts'), dict):
            return entry['facts']
        facts = read(*args, **settings)
        self.kept[key] = dict(state=state, facts=facts)
        with suppress(OSError):
            self.path.write_text(json.dumps(self.kept))
        return facts


def load_coco(path: str) -> tuple[dict, str]:
    """What an annotation file in COCO's layout holds, and the first thing in it that is wrong, '' where nothing is."""
    try:
        with open(path, encoding='utf-8') as file:
            content = json.load(file)
    except ValueError as error:
        return {}, f'is no whole JSON file: {error}' if osp.getsize(path) else 'is empty'
    if not isinstance(content, dict):
        return {}, f'holds a {type(content).__name__}, not images, annotations and categories'
    content.setdefault('annotations', [])  # of images to be sent to a server of COCO's
    for key in ('images', 'annotations', 'categories'):
        if not isinstance(content.get(key), list) or not all(isinstance(entry, dict) for entry in content[key]):
            return {}, f'has no list of {key}'
    try:
        ids = {entry.get('id') for entry in content['categories']}
        return content, _fault_of_ids(content) or _fault_of_boxes(content['annotations'], ids)
    except TypeError:  # an id that has no hash
        return content, 'has ids that are neither numbers nor texts'


def read_coco(path: str, folder: str = '') -> dict:
    """The categories of an annotation file in COCO's layout, and the first thing in it that is wrong.

    Args:
        path: The JSON file.
        folder: Where its images are; the sizes of some of them are compared. '' compares none.

    Returns:
        dict: ``categories`` as ``[id, name]`` in the order of the file; ``fault``, '' where there is none.
    """
    content, fault = load_coco(path)
    categories = [[entry.get('id'), entry.get('name')] for entry in content.get('categories', ())]
    return dict(categories=categories, fault=fault or _fault_of_sizes(content.get('images', []), folder))


def _fault_of_ids(content: dict) -> str:
    for key in ('categories', 'images'):
        for number, count in Counter(entry.get('id') for entry in content[key]).most_common(1):
            if count > 1:
                return f'has the id {number} {count} times among its {key}'
    return ''


def _fault_of_boxes(annotations: list, category_ids: set) -> str:
    for entry in annotations:
        name = f'annotation {entry.get("id")} of image {entry.get("image_id")}'
        if 'segments_info' in entry:  # a panoptic file
            continue
        if entry.get('category_id') not in category_ids:
            return f'{name}: category_id {entry.get("category_id")} is the id of none of its categories'
        box = entry.get('bbox')
        try:
            is_box = box is not None and len(box) == 4 and math.isfinite(sum(box))
        except TypeError:
            is_box = False
        if not is_box:
            return f'{name}: bbox = {box} has to be four finite numbers: x, y, width, height'
    return ''


def _fault_of_sizes(images: list, folder: str) -> str:
    for entry in (images[i] for i in spread(len(images) if folder else 0, _NUM_SIZES)):
        with (
            suppress(OSError, TypeError, KeyError, ValueError),
            Image.open(osp.join(folder, entry['file_name'])) as image,
        ):
            said, size = (entry['width'], entry['height']), image.size
            if said != size and not (said == size[::-1] and image.getexif().get(_ORIENTATION) in _ROTATED):
                return (
                    f'image {entry["id"]} ({entry["file_name"]}): width x height is {said[0]}x{said[1]} in it, and '
                    f'{size[0]}x{size[1]} in the image'
                )
    return ''
