# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Objects in images, the common result of the readers for all formats."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np

IGNORED = frozenset({'crowd', 'ignore', 'difficult'})  # flags of objects that are neither learnt nor counted
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
    segmentation: Any = None  # polygons [[x, y, ...], ...] in pixels, or run lengths
    flags: frozenset = frozenset()  # of the annotation, e.g. 'crowd', 'rotated'
    area: float = 0.0  # square pixels; 0 if the format has none
    is_raw: bool = False  # the meaning of the four numbers is that of the claim

    @property
    def is_ignored(self) -> bool:
        return bool(self.flags & IGNORED)


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


def flags_of(attributes: dict[str, Any]) -> frozenset:
    """Return the names of attributes with a value other than empty, 0, false or 'Unspecified'.

    Raises:
        ValueError: The value of an attribute that ignores an object is neither yes nor no.
    """
    found = set()
    for key, value in attributes.items():
        flag = _ATTRIBUTES.get(str(key).lower(), str(key).lower())
        if _is_set(value):
            if flag in IGNORED and str(value).strip().lower() not in ('1', '1.0', 'true', 'yes'):
                raise ValueError(f'{key}={value!r}: expected 0 or 1')
            found.add(flag)
    return frozenset(found)


def _is_set(value: Any) -> bool:
    if isinstance(value, (dict, list, tuple)):
        return any(map(_is_set, value.values() if isinstance(value, dict) else value))
    return value is not None and str(value).strip().lower() not in _NOTHING


def from_points(name: Optional[str], parts: list, flags: Iterable[str] = (), is_polygon: bool = True) -> Object:
    """Return an object made of polygons, each ``(N, 2)`` in pixels.

    Raises:
        ValueError: There are no points, or a coordinate is not finite.
    """
    points = np.concatenate([np.reshape(np.asarray(part, float), (-1, 2)) for part in parts])
    if not len(points) or not np.isfinite(points).all():
        raise ValueError('a point that is no number')
    box = (*points.min(0).tolist(), *points.max(0).tolist())
    segmentation = [np.ravel(np.asarray(part, float)).tolist() for part in parts if len(part) >= 3]
    return Object(name, box, segmentation if is_polygon and segmentation else None, frozenset(flags))


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


def is_right_angled(polygon: list[float]) -> bool:
    """Return True for the four points of a rectangle, upright or rotated."""
    if len(polygon) != 8:
        return False
    points = np.reshape(polygon, (4, 2))
    sides = np.roll(points, -1, 0) - points
    lengths = np.linalg.norm(sides, axis=1)
    angles = np.abs((sides * np.roll(sides, -1, 0)).sum(1)) / np.maximum(lengths * np.roll(lengths, -1), 1e-9)
    return bool((lengths > 0).all() and (angles < 0.05).all())
