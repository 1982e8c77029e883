# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Annotation files in COCO's format: what is wrong in them, found before anything is trained.

A fault here is what MMDetection fails on with an error that names no file, or what it would train on, or drop, without
a word, though nobody can have meant it. What it drops for good reason passes: crowds, ignored and tiny objects, images
without objects, categories that are not among the classes.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Optional

import numpy as np
from mmengine.fileio import get as read_bytes

from ..utils.errors import RunError

__all__ = ['Findings', 'check_annotations', 'check_coco', 'describe_extreme', 'is_extreme', 'listed', 'read_coco']

MAX_QUOTED = 80  # characters of a value in a message
MIN_SIDE, MAX_RATIO = 8, 50  # pixels, and the longer side over the shorter: nothing is left of such pictures


@dataclass
class Findings:
    """What a file has: ``faults`` stop a run, ``notices`` are said once."""

    faults: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def _quoted(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_QUOTED else text[:MAX_QUOTED] + '...'


def _is_number(value: Any) -> bool:
    # JSON has integers that no float holds
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _is_id(value: Any) -> bool:
    return type(value) in (int, str)


def is_extreme(width: float, height: float) -> bool:
    """Whether resizing leaves nothing of a picture to learn from: 1x1, or 20000x20."""
    return min(width, height) < MIN_SIDE or max(width, height) > MAX_RATIO * min(width, height)


def describe_extreme(pictures: list[tuple]) -> str:
    """The notice on pictures, as (file, width, height), that :func:`is_extreme` is true of."""
    names = [f'{file} ({width}x{height})' for file, width, height in pictures]
    return (
        f'{len(pictures)} pictures have a side below {MIN_SIDE} pixels or are over {MAX_RATIO} times as long as wide, '
        f'so that resizing leaves little of them: {listed(names)}'
    )


def listed(items: list, max_listed: int = 5, separator: str = ', ') -> str:
    """The first items, and how many more there are."""
    more = len(items) - max_listed
    text = separator.join(str(item).rstrip('.') for item in items[:max_listed])
    return text + (f' and {more} more.' if more > 0 else '.')


def read_coco(path: str, backend_args: Optional[dict] = None, need_annotations: bool = True) -> dict:
    """Read an annotation file and see that it is one.

    Args:
        path: The file.
        backend_args: Of MMEngine's file backend.
        need_annotations: False for data sets to test on, which may be without ground truth.

    Raises:
        RunError: It is no JSON, not a dictionary, or a list that COCO's format has is missing.
    """
    content = read_bytes(path, backend_args=backend_args)
    if not content.strip():
        raise RunError(f'annotation file {path!r} is empty.')
    try:
        data = json.loads(content)
    except UnicodeDecodeError:
        raise RunError(f'annotation file {path!r} is binary, not JSON.') from None
    except RecursionError:
        raise RunError(f'annotation file {path!r} is nested too deeply to be annotations.') from None
    except ValueError as error:  # of which JSONDecodeError is one
        is_cut = getattr(error, 'pos', 0) >= len(content.rstrip()) - 1 or 'Unterminated' in str(error)
        cut = ' It seems to be cut off.' if is_cut else ''
        raise RunError(f'annotation file {path!r} is not JSON: {error}.{cut}') from None
    if not isinstance(data, dict):
        raise RunError(
            f'annotation file {path!r} holds a {type(data).__name__}; it has to be a dictionary with the lists images, '
            'annotations and categories.'
        )
    for key in ('images', 'categories', *['annotations'] * (need_annotations or 'annotations' in data)):
        if not isinstance(data.get(key), list):
            found = f'is a {type(data[key]).__name__}' if key in data else 'is missing'
            raise RunError(f'annotation file {path!r}: {key!r} {found}; it has to be a list.')
        for index, entry in enumerate(data[key]):
            if not isinstance(entry, dict):
                raise RunError(
                    f'annotation file {path!r}: {key}[{index}] is {_quoted(entry)}; it has to be a dictionary.'
                )
    return data


def _check_ids(entries: list, kind: str, describe, faults: list[str]) -> dict:
    """Entries by id; those with the id of an earlier one are faults."""
    found: dict = {}
    for entry in entries:
        key = entry.get('id')
        if not _is_id(key):
            faults.append(f'{kind} {describe(entry)} has id {_quoted(key)}, not a number')
        elif key in found:
            faults.append(f'{kind} id {key!r} is there twice ({describe(found[key])} and {describe(entry)})')
        else:
            found[key] = entry
    return found


def _image_faults(image: dict) -> Iterator[str]:
    name = f'image id {image["id"]!r}'
    if not isinstance(image.get('file_name'), str) or not image['file_name']:
        yield f'{name} has file_name {_quoted(image.get("file_name"))}, not the name of a file'
    for key in ('width', 'height'):
        value = image.get(key)
        if not _is_number(value) or value < 1:
            yield f'{name} ({_quoted(image.get("file_name"))}) has {key} {_quoted(value)}, not a number of pixels'


def _form_fault(entry: dict) -> Optional[str]:
    """What MMDetection fails on, or takes for something else, in any object that it does not ignore."""
    box, area = entry.get('bbox'), entry.get('area')
    if not isinstance(box, list) or len(box) != 4:
        count = f' of {len(box)} values' if isinstance(box, list) else ''
        return f'bbox {_quoted(box)}{count}; it has to be [x, y, width, height]'
    if not all(map(_is_number, box)):
        return f'bbox {_quoted(box)}, whose values are not all finite numbers'
    return None if _is_number(area) else f'area {_quoted(area)}, not a finite number'


def _place_fault(box: list, width: float, height: float) -> Optional[str]:
    """What is wrong with ``[x, y, width, height]`` in a picture of that size."""
    x, y, w, h = box
    if w < 0 or h < 0:
        return f'bbox {_quoted(box)} of negative size; it has to be [x, y, width, height]'
    if x + w < 0 or y + h < 0 or x > width or y > height:
        return f'bbox {_quoted(box)} outside of its {width}x{height} image'
    if x < -width / 2 or y < -height / 2 or x + w > 1.5 * width or y + h > 1.5 * height:
        return f'bbox {_quoted(box)} far larger than its {width}x{height} image'
    return None


def _reaches_out(box: list, width: float, height: float) -> bool:
    x, y, w, h = box
    return x < -1 or y < -1 or x + w > width + 1 or y + h > height + 1


def _is_dropped(entry: dict) -> bool:
    """Whether MMDetection leaves an object out for being tiny; one of negative size is none that is meant to be."""
    _, _, w, h = entry['bbox']
    return w >= 0 and h >= 0 and (w < 1 or h < 1 or entry['area'] <= 0)


def _counts_of_rle(text: str) -> Optional[np.ndarray]:
    """Run lengths of COCO's compressed form: 5 bits a character, differences from the fourth on. None for nonsense.

    By hand because pycocotools takes some nonsense for a mask: ``'\\x00\\xff!'`` is decoded without an error.
    """
    codes = np.frombuffer(text.encode('latin-1', 'replace'), np.uint8).astype(np.int64) - 48
    if codes.size == 0 or codes.min() < 0 or codes.max() > 63:
        return None
    is_last = (codes & 32) == 0
    if not is_last[-1]:
        return None
    ends = np.flatnonzero(is_last)
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > 7:  # 35 bits
        return None
    shifts = 5 * (np.arange(codes.size) - np.repeat(starts, lengths))
    counts = np.add.reduceat((codes & 31) << shifts, starts)
    counts -= np.where(codes[ends] & 16, np.int64(1) << (5 * lengths), 0)
    counts[1::2] = np.cumsum(counts[1::2])
    counts[2::2] = np.cumsum(counts[2::2])
    return counts


def _mask_fault(mask: Any, width: float, height: float) -> Optional[str]:
    """What is wrong with a ``segmentation``: polygons, or run lengths with their size."""
    if isinstance(mask, list):
        if not any(mask):
            return 'an empty segmentation'
        for polygon in mask:
            if not isinstance(polygon, list):
                return f'a polygon {_quoted(polygon)}; it has to be a list of x, y, x, y, ...'
            if not all(map(_is_number, polygon)):
                return f'a polygon {_quoted(polygon)}, whose values are not all finite numbers'
        # COCO itself has scraps of two points beside whole polygons, and MMDetection leaves them out
        if not any(len(polygon) >= 6 and len(polygon) % 2 == 0 for polygon in mask):
            return f'segmentation {_quoted(mask)}, in which no polygon has x and y of at least 3 points'
        return None
    if not isinstance(mask, dict):
        return f'segmentation {_quoted(mask)}; it has to be a list of polygons, or run lengths (RLE)'
    if mask.get('size') != [height, width]:
        return f'run lengths (RLE) of size {_quoted(mask.get("size"))}; its image has [{height}, {width}]'
    counts = mask.get('counts')
    if isinstance(counts, str):
        counts = _counts_of_rle(counts)
    elif isinstance(counts, list) and counts and all(type(count) is int for count in counts):
        counts = np.asarray(counts, dtype=object)  # of any size, up to the sum
    else:
        counts = None
    if counts is None or (counts < 0).any() or counts.sum() != height * width:
        return f'run lengths (RLE) {_quoted(mask.get("counts"))} that do not fill its {width}x{height} image'
    return None


def check_coco(data: dict, with_masks: bool = False, classes: Optional[Sequence[str]] = None) -> Findings:
    """Look at every entry of a file that :func:`read_coco` took.

    Args:
        data: Its content.
        with_masks: Whether segmentations are used.
        classes: Names of the categories that are used; None, or names of which the file has none, for all.

    Returns:
        Faults with the ids that they are at, and notices of what is unusual.
    """
    findings = Findings()
    faults = findings.faults
    images = _check_ids(data['images'], 'image', lambda image: _quoted(image.get('file_name')), faults)
    broken = set()
    for key, image in images.items():
        found = list(_image_faults(image))
        faults += found
        broken.update([key] * bool(found))
    categories = _check_ids(data['categories'], 'category', lambda category: _quoted(category.get('name')), faults)
    for key, category in categories.items():
        if not isinstance(category.get('name'), str):
            faults.append(f'category id {key!r} has name {_quoted(category.get("name"))}, not a text')

    others = {key for key, category in categories.items() if category.get('name') not in (classes or ())}
    if len(others) == len(categories):  # it is the classes that do not fit
        others = set()

    annotations = data.get('annotations', [])
    _check_ids(annotations, 'annotation', lambda entry: f'image id {_quoted(entry.get("image_id"))}', faults)
    num_clipped = num_orphans = 0
    for entry in annotations:
        image_id = entry.get('image_id')
        if not _is_id(image_id) or image_id not in images:
            num_orphans += 1
            continue
        if entry.get('ignore', False):
            continue
        image = images[image_id]
        found = []
        form = _form_fault(entry)
        is_dropped = not form and _is_dropped(entry)
        category = entry.get('category_id')
        is_known = _is_id(category) and category in categories
        if not is_known and not is_dropped:
            known = _quoted(sorted(categories, key=str))
            found.append(f'category_id {_quoted(category)}; categories has {known}')
        if image_id not in broken:
            fault = form
            if not form and not is_dropped and not (is_known and category in others):
                size = _size(image)
                fault = _place_fault(entry['bbox'], *size)
                num_clipped += not fault and _reaches_out(entry['bbox'], *size)
                if with_masks and not fault:
                    fault = _mask_fault(entry.get('segmentation'), *size)
            found += [fault] if fault else []
        if found:
            name = f'annotation id {_quoted(entry.get("id"))}'
            of = f'{_quoted(image.get("file_name"))} (image id {image_id!r})'
            faults += [f'{name} of {of} has {fault}' for fault in found]

    extreme = [image for key, image in images.items() if key not in broken and is_extreme(*_size(image))]
    if extreme:
        findings.notices.append(describe_extreme([(image['file_name'], *_size(image)) for image in extreme]))
    if num_clipped:
        findings.notices.append(f'{num_clipped} boxes reach out of their image and are clipped.')
    if num_orphans:
        findings.notices.append(f'{num_orphans} annotations are of images that the file lacks, and are left out.')
    return findings


def _size(image: dict) -> tuple:
    return image['width'], image['height']


def _coco_class(kind: Any) -> Optional[type]:
    """The class of a data set's type, or name of one, if it reads files as MMDetection's ``CocoDataset`` does."""
    from mmdet.datasets import CocoDataset
    from mmdet.registry import DATASETS

    cls = kind if isinstance(kind, type) else DATASETS.get(str(kind))
    reads_coco = (
        isinstance(cls, type)
        and issubclass(cls, CocoDataset)
        and cls.parse_data_info is CocoDataset.parse_data_info  # panoptic files and captions are others
    )
    return cls if reads_coco else None


def _classes(cls: Any, metainfo: Optional[dict]) -> Optional[tuple]:
    """Names of the categories that a data set keeps; None where that is not for :class:`CocoDataset` to say."""
    from mmdet.datasets import CocoDataset

    if cls.load_data_list is not CocoDataset.load_data_list:  # LVIS keeps all
        return None
    with suppress(OSError, TypeError, ValueError):  # as the class does it, which reads names from a file as well
        return tuple(map(str, cls._load_metainfo(metainfo).get('classes') or ()))
    return None


_checked: set[tuple] = set()


def check_annotations(
    kind: Any,
    path: str,
    key: str,
    with_masks: bool,
    is_training: bool,
    backend_args: Optional[dict] = None,
    metainfo: Optional[dict] = None,
) -> list:
    """Check the annotation file of a data set, if it is in COCO's format and was not checked by this process before.

    Args:
        kind: The data set's type, or its name.
        path: The file.
        key: Where the config names it, for messages.
        with_masks: Whether the data set's pipeline reads segmentations.
        is_training: Whether annotations have to be there.
        backend_args: Of MMEngine's file backend.
        metainfo: The data set's, with the classes that it keeps.

    Returns:
        Notices.

    Raises:
        RunError: The file cannot be used; with the number of faults and the first five.
    """
    cls = _coco_class(kind)
    if cls is None:
        return []
    classes = _classes(cls, metainfo)
    if (path, with_masks, classes) in _checked:
        return []
    findings = check_coco(read_coco(path, backend_args, need_annotations=is_training), with_masks, classes)
    if findings.faults:
        counted = f'{len(findings.faults)} faults: ' if len(findings.faults) > 1 else ''
        raise RunError(f'{key} = {path!r}: {counted}{listed(findings.faults, separator="; ")}')
    _checked.add((path, with_masks, classes))
    return [f'{path}: {notice}' for notice in findings.notices]
