# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Check annotation files in COCO's layout: structure, ids, boxes, polygons, image sizes and categories."""

import json
import math
import os.path as osp
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np

from .datasets import MAX_NAMES, Finding, View, format_names, transforms_of
from .files import oriented_size, spread
from .heads import max_per_image

_NUM_SIZES = 200  # images compared by size


def load_coco(path: str) -> tuple[dict, str]:
    """Return the content of an annotation file ({} without the lists of COCO), and the first error in its structure,
    ids and boxes ('' without errors)."""
    try:
        with open(path, encoding='utf-8-sig') as file:
            content = json.load(file)
    except ValueError as reason:
        return {}, f'is no whole JSON file: {reason}' if osp.getsize(path) else 'is empty'
    error = _error_of_structure(content)
    if error:
        return {}, error
    return content, error_of_coco(content) or _error_of_annotation_ids(content['annotations'])


def error_of_coco(content: Any) -> str:
    """Describe the first error of structure, ids and boxes in the content of a COCO file; '' if there is none."""
    error = _error_of_structure(content)
    if error:
        return error
    try:
        error = _repeated_id(content['categories'], 'categories') or _repeated_id(content['images'], 'images')
        return error or _error_of_boxes(content['annotations'], {entry.get('id') for entry in content['categories']})
    except TypeError:  # an id without hash
        return 'has ids that are neither numbers nor texts'


def _error_of_structure(content: Any) -> str:
    """Describe a missing list of images, annotations or categories; '' if all are there."""
    if not isinstance(content, dict):
        return f'holds a {type(content).__name__}, not images, annotations and categories'
    content.setdefault('annotations', [])  # of images to be sent to a server of COCO's
    for key in ('images', 'annotations', 'categories'):
        if not isinstance(content.get(key), list) or not all(isinstance(entry, dict) for entry in content[key]):
            return f'has no list of {key}'
    return ''


def _repeated_id(entries: list, key: str) -> str:
    number, count = max(Counter(entry.get('id') for entry in entries).items(), key=lambda each: each[1], default=(0, 0))
    return f'has the id {number} {count} times among its {key}' if count > 1 else ''


def _error_of_annotation_ids(annotations: list) -> str:
    """Describe missing or repeated annotation ids, which MMDetection's reader would confuse; '' if there are none."""
    annotations = [entry for entry in annotations if 'segments_info' not in entry]  # of panoptic files
    if any(entry.get('id') is None for entry in annotations):
        return 'has annotations without id'
    return _repeated_id(annotations, 'annotations')


def _error_of_boxes(annotations: list, category_ids: set) -> str:
    """Describe the first annotation with an unknown category or without four finite numbers; '' if there is none."""
    for entry in annotations:
        name, box = f'annotation {entry.get("id")} of image {entry.get("image_id")}', entry.get('bbox')
        if 'segments_info' in entry:  # a panoptic file
            continue
        if entry.get('category_id') not in category_ids:
            return f'{name}: category_id {entry.get("category_id")!r} is the id of none of its categories'
        try:
            is_box = len(box) == 4 and math.isfinite(sum(box))
        except TypeError:
            is_box = False
        if not is_box:
            return f'{name}: bbox={box}: expected four finite numbers: x, y, width, height'
    return ''


def _error_of_boxes_in_images(content: dict) -> str:
    """Describe boxes in normalised coordinates or as two corners; '' if there are none."""
    sizes = {image.get('id'): (image.get('width'), image.get('height')) for image in content['images']}
    entries = [entry for entry in content['annotations'] if 'bbox' in entry]
    if not entries:
        return ''
    boxes = np.array([entry['bbox'] for entry in entries], dtype=float)
    if (boxes <= 1).all():
        return f'has boxes that are shares of the image, {entries[0]["bbox"]}: expected pixels: x, y, width, height'
    edges = np.array([sizes.get(entry.get('image_id'), (None, None)) for entry in entries], dtype=float) + 2
    starts, sides = boxes[:, :2], boxes[:, 2:]
    # a box that passes the edge, as those of hidden objects may, and would fit as two corners
    passes, fits = (starts + sides > edges).any(axis=1), ((starts < sides) & (sides <= edges)).all(axis=1)
    beyond = np.flatnonzero(passes & fits)
    if len(beyond) <= len(entries) / 5:
        return ''
    first = entries[beyond[0]]
    width, height = sizes[first.get('image_id')]
    return (
        f'has {len(beyond)} of {len(entries)} boxes that pass the edge of their image, annotation {first.get("id")} '
        f'with bbox = {first["bbox"]} in {width}x{height} first: expected x, y, width, height'
    )


def _error_of_polygons(content: dict) -> str:
    """Describe the first object without a polygon or RLE from which a mask can be drawn; '' if all have one."""
    sizes = {image.get('id'): [image.get('height'), image.get('width')] for image in content['images']}
    for entry in content['annotations']:
        mask, size = entry.get('segmentation'), sizes.get(entry.get('image_id'))
        if isinstance(mask, dict):
            is_valid = size in (None, list(mask.get('size') or ()))
        else:
            parts = mask if isinstance(mask, list) else []
            is_valid = any(isinstance(part, list) and len(part) >= 6 and len(part) % 2 == 0 for part in parts)
        if not is_valid and not _is_lost(entry, sizes):
            return (
                f'annotation {entry.get("id")} of image {entry.get("image_id")}: segmentation={mask!r:.60}: expected a '
                'list of polygons of three points or more, [[x, y, ...], ...], or an RLE of the size of its image, '
                'where masks are learnt'
            )
    return ''


def error_of_sizes(images: list, folder: str, turns: bool) -> str:
    """Describe the first of a sample of ``images`` (entries of a COCO file) with another size than its file. The result
    is '' if there is none. ``turns``: loading applies EXIF rotations, which is MMCV's default."""
    for image in (images[i] for i in spread(len(images), _NUM_SIZES)):
        with suppress(Exception):  # missing and broken images are reported with the samples
            expected = image['width'], image['height']
            size = oriented_size(osp.join(folder, image['file_name']), turns)
            if size != expected:
                turned = ' (turned by its EXIF data, as MMCV loads it)' if size[::-1] == expected else ''
                return (
                    f'image {image.get("id")} ({image["file_name"]}): width x height is {expected[0]}x{expected[1]} in '
                    f'it, and {size[0]}x{size[1]} in the image{turned}'
                )
    return ''


def _is_lost(entry: dict, images: Container) -> bool:
    """Return True for an annotation that MMDetection leaves out: no area, a narrow box, or an id not in ``images``."""
    area = entry.get('area', 1)
    is_flat = isinstance(area, (int, float)) and area <= 0
    return is_flat or min(entry.get('bbox', [0])[2:], default=0) < 1 or entry.get('image_id') not in images


def check_categories(
    key: str, file: str, in_file: Sequence, of_labels: Sequence, classes: Sequence, needs_all: bool
) -> Iterator[Finding]:
    """Check the class names of the config against the categories of a COCO file, in the order of the labels.

    Args:
        key (str): Setting of the data set for messages, such as ``'train_dataloader'``.
        file (str): Path of the COCO file.
        in_file (Sequence[str]): Names of all categories, in the order of the file.
        of_labels (Sequence[str]): Name of the category of each label.
        classes (Sequence[str]): Class names of the config.
        needs_all (bool): A class without a category is an error, else a warning.

    Yields:
        Finding: At most one.
    """
    if not set(of_labels) <= set(classes):
        return  # data sets that choose categories by something else
    missing = [name for name in classes if name not in of_labels]
    order = format_names(of_labels) if len(of_labels) <= MAX_NAMES else 'in that order'
    at = next((i for i, (one, other) in enumerate(zip(of_labels, classes)) if one != other), len(of_labels))
    if missing and (needs_all or at < len(of_labels) or not of_labels):
        yield Finding(
            f'{key}: {file} has no category {format_names(missing)}, which metainfo.classes names'
            f'{"" if at == len(of_labels) else ", and the labels behind it move up"}. Its categories are '
            f'{format_names(in_file)}; write the names as they are there, in its order.'
        )
    elif missing:
        yield Finding(f'{key}: {file} has no category {format_names(missing)}: nothing of these classes trains.', False)
    elif len(of_labels) != len(set(of_labels)):
        yield Finding(
            f'{key}: {file} has two categories of one name, which labels tell apart: {format_names(of_labels)}.'
        )
    elif at < len(of_labels):
        yield Finding(
            f'{key}: labels follow the order of the categories in {file}, not that of metainfo.classes: label {at} is '
            f'{of_labels[at]!r} there and {classes[at]!r} in the config. Write classes={order}'
        )


def _notes(content: dict, labels: dict, view: View) -> Iterator[str]:
    """Describe objects left out of training, images with too many objects, and classes without an object. ``labels`` is
    the label by category id."""
    images, annotations = {image.get('id') for image in content['images']}, content['annotations']
    boxes = [entry for entry in annotations if 'segments_info' not in entry]  # the others are of panoptic files
    counted = [entry for entry in annotations if not (entry.get('iscrowd') or entry.get('ignore'))]
    ignored = [entry for entry in annotations if entry.get('ignore') and not entry.get('iscrowd')]
    lost = [entry for entry in boxes if _is_lost(entry, images)]
    if ignored:
        yield (
            f': {len(ignored)} of {len(annotations)} annotations have ignore = {ignored[0]["ignore"]!r}, '
            f'{ignored[0].get("id")} first: MMDetection trains them as background, and pycocotools counts them as '
            'missed. Write iscrowd = 1 for them'
        )
    elif lost and images:
        yield (
            f': {len(lost)} of {len(annotations)} annotations are left out, {lost[0].get("id")} first: their area '
            'is 0, their box is narrower than a pixel, or their image_id is no image of the file'
        )
    most, densest = max_per_image(view.model), Counter(entry.get('image_id') for entry in counted).most_common(1)
    if densest and 0 < most < densest[0][1] and len(boxes) == len(annotations):
        yield (
            f' has up to {densest[0][1]} objects an image, and max_per_img = {most} of test_cfg gives no more: raise '
            'it, and give CocoMetric use_mp_eval=True and proposal_nums of as many'
        )
    segments = (segment for entry in annotations for segment in entry.get('segments_info', ()))
    used = {entry.get('category_id') for entry in chain(counted, segments)} - {None}
    unused = [each.get('name') for each in content['categories'] if each['id'] in labels and each['id'] not in used]
    if view.is_training and used and unused:
        yield f' has no object of {format_names(unused)}: nothing of these classes trains'


def _stuff_first(content: dict) -> str:
    """Describe stuff categories before things, whose labels heads would confuse; '' if there are none."""
    names = [entry.get('name') for entry in content['categories']]
    stuff = [entry.get('name') for entry in content['categories'] if entry.get('isthing', 1) in (0, False)]
    things_first = [name for name in names if name not in stuff] + stuff
    if names == things_first:
        return ''
    return (
        f' lists {stuff[0]!r}, which is stuff, before things: labels follow its order, and heads count things first. '
        f'Sort its categories, and write classes={format_names(things_first)}'
    )


def check_coco(view: View) -> Iterator[Finding]:
    """Check the annotation file of a data set of MMDetection, and its categories against the classes of the config."""
    path, labels = getattr(view.dataset, 'ann_file', ''), getattr(view.dataset, 'cat2label', None)
    is_plain = isinstance(path, str) and path.endswith('.json') and osp.isfile(path)
    if not is_plain or not isinstance(labels, dict) or not hasattr(view.dataset, 'cat_ids'):
        return
    steps = transforms_of(view.dataset)
    colours = [getattr(step, 'color_type', '') for step in steps]
    turns = not any('ignore' in colour or colour == 'unchanged' for colour in colours)
    folder = (getattr(view.dataset, 'data_prefix', None) or {}).get('img') or ''
    content, error = load_coco(path)
    error = error or error_of_sizes(content['images'], folder, turns)
    error = error or _error_of_boxes_in_images(content)
    if not error and any(getattr(step, 'with_mask', False) for step in steps):
        error = _error_of_polygons(content)
    if error:
        yield Finding(f'{view.key}: {path} {error}.')
        return
    for note in _notes(content, labels, view):
        yield Finding(f'{view.key}: {path}{note}.', False)
    order = _stuff_first(content)
    if order:
        yield Finding(f'{view.key}: {path}{order}')
        return
    names = {entry['id']: entry.get('name') for entry in content['categories']}
    of_labels = [names.get(number) for number in sorted(labels, key=labels.__getitem__)]
    yield from check_categories(view.key, path, list(names.values()), of_labels, view.classes, needs_all=False)
