# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Read facts (sizes, ids, faults) from image and annotation files, and cache them as JSON."""

import json
import math
import os
import os.path as osp
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

_NUM_SIZES = 200  # images compared by size
_ROTATED = (5, 6, 7, 8)  # values of the EXIF orientation
_ORIENTATION = 274


def spread(length: int, count: int) -> list[int]:
    """Return up to ``count`` evenly spaced indices below ``length``, shuffled, so that the first few are spread out
    too."""
    chosen = np.unique(np.linspace(0, max(length - 1, 0), min(length, count)).round().astype(int))
    return [int(i) for i in np.random.default_rng(0).permutation(chosen)]


def reads_local_files(*parts: Any) -> bool:
    """Return True if a data set and its loading transforms read local files."""
    backends = (getattr(part, 'backend_args', None) or {} for part in parts)
    return all(backend.get('backend', 'local') == 'local' for backend in backends)


class FactCache:
    """Cache of facts on disk. An entry is valid while size and modification time of its source files are unchanged.

    Args:
        path: JSON file of the cache. If it cannot be written, nothing is cached on disk.
    """

    version = 2  # raise it if the keys of the facts change: work dirs hold older files

    def __init__(self, path: Any):
        self.path, self.kept = Path(path), {}
        with suppress(OSError, ValueError):
            kept = json.loads(self.path.read_text())
            self.kept = kept if isinstance(kept, dict) else {}

    def facts(self, read: Callable[..., dict], files: Sequence[str], *args: Any, **settings: Any) -> dict:
        """Return ``read(*args, **settings)``, cached while ``files`` and ``settings`` stay the same."""
        stats = [(file, osp.getsize(file), os.stat(file).st_mtime_ns) for file in files if osp.exists(file)]
        state = sha256(repr((self.version, stats, settings)).encode()).hexdigest()
        key = f'{read.__name__} {files[0]}'
        entry = self.kept.get(key)
        if isinstance(entry, dict) and entry.get('state') == state and isinstance(entry.get('facts'), dict):
            return entry['facts']
        facts = read(*args, **settings)
        self.kept[key] = dict(state=state, facts=facts)
        with suppress(OSError):
            self.path.write_text(json.dumps(self.kept))
        return facts


@contextmanager
def open_image(path: Any) -> Iterator[Image.Image]:
    """Open an image of any size. OpenCV, which reads the images of upstream, has no limit like Pillow's."""
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        with Image.open(path) as image:
            yield image
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def oriented_size(path: Any, turns: bool = True) -> tuple[int, int]:
    """Return width and height of an image in pixels from its header, swapped if its EXIF data turns it by 90 degrees.

    Args:
        path: The image.
        turns: Apply the EXIF orientation.

    Raises:
        Exception: Errors of any type, raised by Pillow's plugins for a broken file.
    """
    with open_image(path) as image:
        is_turned = turns and image.getexif().get(_ORIENTATION) in _ROTATED
        return image.size[::-1] if is_turned else image.size


def load_coco(path: str) -> tuple[dict, str]:
    """Load an annotation file in COCO's layout, and check its structure, ids and boxes.

    Returns:
        tuple[dict, str]: Its content ({} if it cannot be used), and its first fault ('' without faults).
    """
    try:
        with open(path, encoding='utf-8-sig') as file:
            content = json.load(file)
    except ValueError as error:
        return {}, f'is no whole JSON file: {error}' if osp.getsize(path) else 'is empty'
    fault = _fault_of_structure(content)
    return ({}, fault) if fault else (content, _fault_of_ids(content))


def fault_of_coco(content: Any) -> str:
    """Describe the first fault of structure, ids and boxes in the content of a COCO file; '' if there is none."""
    return _fault_of_structure(content) or _fault_of_ids(content)


def _fault_of_structure(content: Any) -> str:
    if not isinstance(content, dict):
        return f'holds a {type(content).__name__}, not images, annotations and categories'
    content.setdefault('annotations', [])  # of images to be sent to a server of COCO's
    for key in ('images', 'annotations', 'categories'):
        if not isinstance(content.get(key), list) or not all(isinstance(entry, dict) for entry in content[key]):
            return f'has no list of {key}'
    return ''


def _fault_of_ids(content: dict) -> str:
    try:
        ids = {entry.get('id') for entry in content['categories']}
        return _repeated_id(content, 'categories', 'images') or _fault_of_boxes(content['annotations'], ids)
    except TypeError:  # an id without hash
        return 'has ids that are neither numbers nor texts'


def read_coco(path: str, outlines: bool = False) -> dict:
    """Read facts from an annotation file in COCO's layout.

    Args:
        path: The file.
        outlines: Check outlines too, because the model learns masks.

    Returns:
        dict: Facts as JSON:

        - ``categories``: ``[id, name]`` of each category, in the order of the file;
        - ``stuff``: names of categories with ``isthing=0``;
        - ``used``: ids of categories with objects that are used in training;
        - ``densest``: largest number of such objects in one image;
        - ``images``: ``[id, file name, width, height]`` of a sample of the images;
        - ``fault``: first fault of structure and ids, or '';
        - ``shapes``: first fault of boxes or outlines, or '';
        - ``note``: objects that MMDetection leaves out or trains as background, as text, or ''.
    """
    content, fault = load_coco(path)
    fault = fault or _fault_of_annotation_ids(content)
    annotations = [] if fault else content['annotations']
    trained = [entry for entry in annotations if not (entry.get('iscrowd') or entry.get('ignore'))]
    segments = [segment for entry in annotations for segment in entry.get('segments_info', ())]
    images, categories = content.get('images', []), content.get('categories', [])
    sample = [images[i] for i in spread(len(images), _NUM_SIZES)]
    return dict(
        categories=[[entry.get('id'), entry.get('name')] for entry in categories],
        images=[[image.get(key) for key in ('id', 'file_name', 'width', 'height')] for image in sample],
        stuff=[entry.get('name') for entry in categories if entry.get('isthing', 1) in (0, False)],
        used=sorted({entry['category_id'] for entry in [*trained, *segments] if 'category_id' in entry}, key=str),
        densest=max(Counter(entry.get('image_id') for entry in trained).values(), default=0) if not segments else 0,
        fault=fault,
        shapes='' if fault else fault_of_shapes(content, outlines),
        note='' if fault else _lost_objects(content),
    )


def _is_lost(entry: dict, images: Container) -> bool:
    area = entry.get('area', 1)
    is_flat = isinstance(area, (int, float)) and area <= 0
    return is_flat or min(entry.get('bbox', [0])[2:], default=0) < 1 or entry.get('image_id') not in images


def _lost_objects(content: dict) -> str:
    """Describe annotations that MMDetection leaves out or trains as background; '' if there are none."""
    images, annotations = {image.get('id') for image in content['images']}, content['annotations']
    lost = [entry for entry in annotations if 'segments_info' not in entry and _is_lost(entry, images)]
    ignored = [entry for entry in annotations if entry.get('ignore') and not entry.get('iscrowd')]
    if ignored:
        return (
            f'{len(ignored)} of {len(annotations)} annotations have ignore = {ignored[0]["ignore"]!r}, '
            f'{ignored[0].get("id")} first: MMDetection trains them as background, and pycocotools counts them as '
            'missed. Write iscrowd = 1 for them'
        )
    if not lost or not images:
        return ''
    return (
        f'{len(lost)} of {len(annotations)} annotations are left out, {lost[0].get("id")} first: their area '
        'is 0, their box is narrower than a pixel, or their image_id is no image of the file'
    )


def _repeated_id(content: dict, *keys: str) -> str:
    for key in keys:
        for number, count in Counter(entry.get('id') for entry in content[key]).most_common(1):
            if count > 1:
                return f'has the id {number} {count} times among its {key}'
    return ''


def _fault_of_annotation_ids(content: dict) -> str:
    """Describe missing or repeated annotation ids, which MMDetection's reader would confuse; '' if there are none."""
    annotations = [entry for entry in content.get('annotations', ()) if 'segments_info' not in entry]
    if any(entry.get('id') is None for entry in annotations):
        return 'has annotations without id'
    return _repeated_id(dict(annotations=annotations), 'annotations')


def _fault_of_boxes(annotations: list, category_ids: set) -> str:
    for entry in annotations:
        name = f'annotation {entry.get("id")} of image {entry.get("image_id")}'
        if 'segments_info' in entry:  # a panoptic file
            continue
        if entry.get('category_id') not in category_ids:
            return f'{name}: category_id {entry.get("category_id")!r} is the id of none of its categories'
        box = entry.get('bbox')
        try:
            is_box = len(box) == 4 and math.isfinite(sum(box))
        except TypeError:
            is_box = False
        if not is_box:
            return f'{name}: bbox={box}: expected four finite numbers: x, y, width, height'
    return ''


def fault_of_shapes(content: dict, outlines: bool = False) -> str:
    """Describe boxes in relative coordinates or as two corners, and with ``outlines`` objects without a valid outline.

    Returns:
        str: The first fault, or '' without faults.
    """
    sizes = {image.get('id'): (image.get('width'), image.get('height')) for image in content['images']}
    boxes = [
        (entry, entry['bbox'], sizes.get(entry.get('image_id'))) for entry in content['annotations'] if 'bbox' in entry
    ]
    if boxes and all(max(box) <= 1 for _, box, _ in boxes):
        return f'has boxes that are shares of the image, {boxes[0][1]}: expected pixels: x, y, width, height'
    beyond = [
        (entry, box, size)
        for entry, box, size in boxes
        if size and all(isinstance(side, (int, float)) for side in size)
        if box[0] + box[2] > size[0] + 2 or box[1] + box[3] > size[1] + 2
        # only boxes that would fit as two corners count; boxes of partly hidden objects may extend beyond the edge
        if box[0] < box[2] <= size[0] + 2 and box[1] < box[3] <= size[1] + 2
    ]
    if len(beyond) <= len(boxes) / 5:
        return _fault_of_outlines(content) if outlines else ''
    entry, box, size = beyond[0]
    return (
        f'has {len(beyond)} of {len(boxes)} boxes that pass the edge of their image, annotation {entry.get("id")} with '
        f'bbox = {box} in {size[0]}x{size[1]} first: expected x, y, width, height'
    )


def _fault_of_outlines(content: dict) -> str:
    sizes = {image.get('id'): [image.get('height'), image.get('width')] for image in content['images']}
    for entry in content['annotations']:
        outline, size = entry.get('segmentation'), sizes.get(entry.get('image_id'))
        if isinstance(outline, dict):
            is_right = size in (None, list(outline.get('size') or ()))
        else:
            parts = outline if isinstance(outline, list) else []
            is_right = any(isinstance(part, list) and len(part) >= 6 and len(part) % 2 == 0 for part in parts)
        if not is_right and not _is_lost(entry, sizes):
            return (
                f'annotation {entry.get("id")} of image {entry.get("image_id")}: segmentation={outline!r:.60}: '
                'expected a list of polygons of three points or more, [[x, y, ...], ...], or an RLE of the size of its '
                'image, where masks are learnt'
            )
    return ''


def fault_of_sizes(images: list, folder: str, turns: bool) -> str:
    """Describe the first image with another size than in its annotation; '' if there is none.

    Args:
        images: ``[id, file name, width, height]`` of each image.
        folder: Folder of the images.
        turns: Images are turned by their EXIF data when loaded, which is MMCV's default.
    """
    for number, name, *expected in images:
        with suppress(Exception):  # missing and broken images are reported with the samples
            size = oriented_size(osp.join(folder, name), turns)
            if list(size) != expected:
                width, height = expected
                return (
                    f'image {number} ({name}): width x height is {width}x{height} in it, and {size[0]}x{size[1]} in '
                    'the image' + ' (turned by its EXIF data, as MMCV loads it)' * (list(size[::-1]) == expected)
                )
    return ''
