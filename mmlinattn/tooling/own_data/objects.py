# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Objects in images, the common result of the readers for all formats."""

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np

from ...utils.errors import RunError
from .data import Data
from .images import image_size

IGNORED = frozenset({'crowd', 'ignore', 'difficult'})  # marks of objects that are neither learnt nor counted
_ATTRIBUTES = {'iscrowd': 'crowd', 'is_crowd': 'crowd', 'isgroupof': 'crowd', 'ignored': 'ignore', 'dontcare': 'ignore'}
_ATTRIBUTES.update(isoccluded='occluded', istruncated='truncated', confidence='score', num_keypoints='keypoints')
_NOTHING = ('', '0', '0.0', 'false', 'no', 'none', 'unspecified', 'n/a', '-1')


# classes of regions that are ignored, of CrowdHuman, KITTI, LabelMe, VisDrone
_REGIONS = ('ignore', 'ignored', '__ignore__', 'dontcare', "don't care", 'ignored regions', 'ignored-regions')


def is_region(name: Optional[str]) -> bool:
    """Return True for a class that means a region to ignore."""
    return name is None or name.lower() in _REGIONS


class Object(NamedTuple):
    """Annotated object in an image."""

    name: Optional[str]  # class; None for a region that is ignored for every class
    box: tuple  # left, top, right, bottom in pixels; of a raw box: four numbers as the file has them
    outline: Any = None  # polygons [[x, y, ...], ...] in pixels or run lengths, as COCO has them
    marks: frozenset = frozenset()  # further statements of the annotation, e.g. 'crowd', 'rotated'
    area: float = 0.0  # square pixels; 0 if the format has none
    is_raw: bool = False  # the meaning of the four numbers is that of the claim

    @property
    def is_ignored(self) -> bool:
        return bool(self.marks & IGNORED)


class Photo(NamedTuple):
    """Image with its annotated objects."""

    path: Path
    size: tuple[int, int]  # width, height
    objects: list[Object]
    split: Optional[str] = None  # 'train', 'val' or 'test' by a column or the name of the label file
    file: Path = Path()  # of the labels
    group: Optional[str] = None  # images of a group belong to one split

    @property
    def classes(self) -> set[str]:
        """Classes of the objects that are used in training."""
        return {item.name for item in self.objects if item.name is not None and not item.is_ignored}


def marks_of(attributes: dict[str, Any]) -> frozenset:
    """Return the names of attributes with a value other than empty, 0, false or 'Unspecified'.

    Raises:
        ValueError: The value of an attribute that ignores an object is neither yes nor no.
    """
    found = set()
    for key, value in attributes.items():
        mark = _ATTRIBUTES.get(str(key).lower(), str(key).lower())
        if _is_set(value):
            if mark in IGNORED and str(value).strip().lower() not in ('1', '1.0', 'true', 'yes'):
                raise ValueError(f'{key}={value!r}: expected 0 or 1')
            found.add(mark)
    return frozenset(found)


def _is_set(value: Any) -> bool:
    if isinstance(value, (dict, list, tuple)):
        return any(map(_is_set, value.values() if isinstance(value, dict) else value))
    return value is not None and str(value).strip().lower() not in _NOTHING


def from_points(name: Optional[str], parts: list, marks: Iterable[str] = (), is_outline: bool = True) -> Object:
    """Return an object made of polygons, each ``(N, 2)`` in pixels.

    Raises:
        ValueError: There are no points, or a coordinate is not finite.
    """
    points = np.concatenate([np.reshape(np.asarray(part, float), (-1, 2)) for part in parts])
    if not len(points) or not np.isfinite(points).all():
        raise ValueError('a point that is no number')
    box = (*points.min(0).tolist(), *points.max(0).tolist())
    outline = [np.ravel(np.asarray(part, float)).tolist() for part in parts if len(part) >= 3]
    return Object(name, box, outline if is_outline and outline else None, frozenset(marks))


def corners(box: tuple, degrees: float = 0.0, pivot: Optional[tuple] = None) -> np.ndarray:
    """Return the corners ``(4, 2)`` of a box rotated clockwise around its centre, or around ``pivot``."""
    left, top, right, bottom = box
    points = np.array([(left, top), (right, top), (right, bottom), (left, bottom)], float)
    return _rotated(points, degrees, np.array(pivot or ((left + right) / 2, (top + bottom) / 2)))


def ellipse(x: float, y: float, rx: float, ry: float, degrees: float = 0.0) -> np.ndarray:
    """Return 36 points ``(36, 2)`` on an ellipse rotated clockwise around its centre."""
    angles = np.linspace(0, 2 * math.pi, 36, endpoint=False)
    centre = np.array((x, y))
    return _rotated(np.stack([rx * np.cos(angles), ry * np.sin(angles)], 1) + centre, degrees, centre)


def _rotated(points: np.ndarray, degrees: float, centre: np.ndarray) -> np.ndarray:
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return (points - centre) @ np.array([[cos, sin], [-sin, cos]]) + centre


def is_right_angled(outline: list[float]) -> bool:
    """Return True for the four points of a rectangle, upright or rotated."""
    if len(outline) != 8:
        return False
    points = np.reshape(outline, (4, 2))
    sides = np.roll(points, -1, 0) - points
    lengths = np.linalg.norm(sides, axis=1)
    angles = np.abs((sides * np.roll(sides, -1, 0)).sum(1)) / np.maximum(lengths * np.roll(lengths, -1), 1e-9)
    return bool((lengths > 0).all() and (angles < 0.05).all())


def checked_size(file: Path, picture: Path, width: Any = None, height: Any = None) -> tuple[int, int]:
    """Return width and height of an image, after comparing them with those in its annotation file.

    Raises:
        RunError: The annotation file gives another size. Missing sizes and 0 are accepted.
    """
    size = image_size(picture)
    try:
        expected = (int(float(width or 0)), int(float(height or 0)))
    except (TypeError, ValueError):
        raise RunError(f'{file}: {width!r} x {height!r} is no size of an image.') from None
    if all(expected) and expected != size:
        text = f'{file} has an image of {expected[0]}x{expected[1]}'
        raise RunError(f'{text}, and {picture} is {size[0]}x{size[1]} (turned by EXIF?).')
    return size


class Claim(NamedTuple):
    """Labelled images, as one reader understood them."""

    kind: str  # format
    photos: list[Photo]
    classes: list[str]  # in the order of the labels
    notes: list[str]  # for the user
    boxes: Optional[str] = None  # meaning of raw boxes: 'corners', 'sides' or 'centre'; None if the file does not say
    units: Optional[str] = None  # 'pixels' or 'shares'


READINGS = {
    'corners': 'corners (left, top, right, bottom)',
    'sides': 'left, top, width, height',
    'centre': 'centre x, y, width, height',
}
_SLACK = 0.01  # of shares beyond the image, by rounding


def _edges(numbers: np.ndarray, reading: str) -> np.ndarray:
    """Return left, top, right, bottom ``(N, 4)`` of four numbers ``(N, 4)`` in one of the readings."""
    first, second = numbers[:, :2], numbers[:, 2:]
    if reading == 'corners':
        return numbers
    start = first if reading == 'sides' else first - second / 2
    return np.hstack([start, start + second])


def settle(claim: Claim, data: Data) -> Claim:
    """Return the claim with all boxes as left, top, right, bottom in pixels, and notes on what the numbers mean.

    A reading is wrong where boxes have negative sides or pass the edge of their image. It is taken if the format or
    ``--boxes`` says it and no other fits better, or if it is the only one that fits.

    Raises:
        RunError: No reading fits, or several do.
    """
    raw = [(photo, item) for photo in claim.photos for item in photo.objects if item.is_raw]
    if not raw:
        if data.options.boxes or data.options.units:
            raise RunError(f'--boxes and --units: the numbers of {claim.kind} have one meaning; leave the option out.')
        return claim
    units, unit_note = _units(claim, raw, data.options.units)
    sizes = np.array([photo.size for photo, _ in raw], float)
    scale = np.tile(sizes, 2) if units == 'shares' else np.ones((len(raw), 4))
    numbers = np.array([item.box for _, item in raw], float)
    boxes = {reading: _edges(numbers, reading) * scale for reading in READINGS}
    slack = np.maximum(2.0, _SLACK * sizes) if units == 'shares' else 2.0
    bad, flat = {}, {}
    for reading, box in boxes.items():
        beyond = (box[:, :2] < -slack) | (box[:, 2:] > sizes + slack)
        bad[reading] = (beyond | (box[:, 2:] < box[:, :2])).any(1)
        flat[reading] = (box[:, 2:] == box[:, :2]).any(1) & numbers[:, 2:].all(1)
    said, source = data.options.boxes or claim.boxes, '--boxes' if data.options.boxes else 'as the format has it'
    fitting = [reading for reading in READINGS if not bad[reading].any()]
    if said is None:
        likely = [reading for reading in READINGS if 5 * (bad[reading] | flat[reading]).sum() <= len(raw)]
        if len(likely) != 1:
            photo, item = raw[int(bad['sides'].argmax())]
            several = ' and as '.join(READINGS[each] for each in likely)
            both = f'boxes fit as {several}' if likely else 'boxes pass the edge of their image in every reading'
            raise RunError(f'{photo.file}: {both}, as {_numbers(item)} of {photo.path.name}: give --boxes {_OPTIONS}.')
        said, source = likely[0], 'the only reading in which boxes stay in their images'
    elif not data.options.boxes and bad[said].any() and (fitting or 5 * bad[said].sum() > len(raw)):
        photo, item = raw[int(bad[said].argmax())]
        others = f'; as {READINGS[fitting[0]]} all of them fit' if fitting else ''
        raise RunError(
            f'{photo.file}: {bad[said].sum()} of {len(raw)} boxes pass the edge of their image, as {_numbers(item)} in '
            f'{photo.size[0]}x{photo.size[1]}, read as {READINGS[said]}{others}: give --boxes {_OPTIONS}.'
        )
    found = boxes[str(said)]
    negative = (found[:, 2:] < found[:, :2]).any(1)
    if said == 'corners' and negative.any():
        (photo, item), box = raw[int(negative.argmax())], found[int(negative.argmax())]
        axis, low, high = ('x', box[0], box[2]) if box[2] < box[0] else ('y', box[1], box[3])
        raise RunError(f'{photo.file}: {axis}min {low:g} is above {axis}max {high:g}, {_numbers(item)}.')
    rows = iter(zip(found.tolist(), scale[:, :2]))
    photos = [
        photo._replace(objects=[_placed(item, *next(rows)) if item.is_raw else item for item in photo.objects])
        for photo in claim.photos
    ]
    note = f'the four numbers of a box are {READINGS[str(said)]} in {units}: {source}{unit_note}'
    return claim._replace(photos=photos, notes=[note, *claim.notes])


_OPTIONS = '|'.join(READINGS)


def _placed(item: Object, box: list[float], scale: np.ndarray) -> Object:
    outline = item.outline
    if isinstance(outline, list) and (scale != 1).any():
        outline = [(np.reshape(part, (-1, 2)) * scale).ravel().tolist() for part in outline]
    return item._replace(box=tuple(box), outline=outline, is_raw=False)


def _numbers(item: Object) -> str:
    return f'({", ".join(f"{number:g}" for number in item.box)})'


def _units(claim: Claim, raw: list, given: Optional[str]) -> tuple[str, str]:
    """Return the unit of the numbers, and a note if they alone tell it."""
    small = [max(map(abs, item.box)) <= 1 + _SLACK for _, item in raw if max(item.box) > 0]
    photo, item = raw[0]
    if given:
        return given, '; --units'
    if any(small) and not all(small) or claim.units and small and all(small) != (claim.units == 'shares'):
        odd = claim.units != 'shares'  # the shares among pixels, or the pixels among shares
        photo, item = next(pair for pair in raw if (max(map(abs, pair[1].box)) <= 1 + _SLACK) == odd)
        kinds = 'shares of the image, from 0 to 1' if odd else 'no shares of the image (numbers are from 0 to 1)'
        raise RunError(
            f'{photo.file}: {sum(small) if odd else small.count(False)} of {len(small)} boxes are {kinds}, as '
            f'{_numbers(item)} of {photo.path.name}: give --units pixels|shares.'
        )
    units = 'shares' if small and all(small) else 'pixels'
    return (
        claim.units or units,
        '' if claim.units else f'; all numbers are {"from 0 to 1" if units == "shares" else "in the size of pixels"}',
    )


def in_order(names: Iterable[str]) -> list[str]:
    """Sort class names alphabetically; names that are numbers come first, sorted by value."""
    return sorted(names, key=lambda name: (0, float(name), '') if re.fullmatch(r'\d+', name) else (1, 0.0, name))


def name_table(found: set[str], listed: Optional[list[str]]) -> tuple[list[str], dict[str, str]]:
    """Return the class names in the order of the labels, and the name of each label that occurs.

    Args:
        found: Labels that occur.
        listed: Names of the user's list, if any; labels may be their numbers from 0.

    Raises:
        RunError: A label is not in the list.
    """
    if not listed:
        return in_order(found), {name: name for name in found}
    if found <= set(listed):
        return listed, {name: name for name in found}
    if '0' in found and found <= set(map(str, range(len(listed)))):
        return listed, {name: listed[int(name)] for name in found}
    lacking = in_order(found - set(listed))[0]
    raise RunError(
        f'the label {lacking!r} is not in the list of classes ({", ".join(listed)}), and not all labels are its '
        'numbers from 0: correct classes.txt, or give --classes NAME ...'
    )


def in_names(photos: list[Photo], listed: Optional[list[str]]) -> tuple[list[Photo], list[str]]:
    """Return images with the names of the list in place of labels, and the class names (:func:`name_table`)."""
    found = {str(item.name) for photo in photos for item in photo.objects if not is_region(item.name)}
    classes, names = name_table(found, listed)
    if all(name == label for label, name in names.items()):
        return photos, classes
    renamed = [
        photo._replace(objects=[item._replace(name=names.get(str(item.name), item.name)) for item in photo.objects])
        for photo in photos
    ]
    return renamed, classes
