# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Objects in images, the common result of the readers for all formats."""

import itertools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Optional
from urllib.parse import unquote

import numpy as np

from ...utils.errors import RunError
from .finding import image_size

IGNORED = frozenset({'crowd', 'ignore', 'difficult'})  # marks of objects that are neither learnt nor counted
_ATTRIBUTES = {'iscrowd': 'crowd', 'is_crowd': 'crowd', 'isgroupof': 'crowd', 'ignored': 'ignore', 'dontcare': 'ignore'}
_ATTRIBUTES.update(isoccluded='occluded', istruncated='truncated', confidence='score', num_keypoints='keypoints')
_NOTHING = ('', '0', '0.0', 'false', 'no', 'none', 'unspecified', 'n/a', '-1')


class Object(NamedTuple):
    """Annotated object in an image."""

    name: Optional[str]  # class; None for a region that is ignored for every class
    box: tuple  # left, top, right, bottom in pixels
    outline: Any = None  # polygons [[x, y, ...], ...] in pixels or run lengths, as COCO has them
    marks: frozenset = frozenset()  # further statements of the annotation, e.g. 'crowd', 'turned'
    area: float = 0.0  # square pixels; 0 if the format has none

    @property
    def is_ignored(self) -> bool:
        return bool(self.marks & IGNORED)


class Photo(NamedTuple):
    """Image with its annotated objects."""

    path: Path
    size: tuple[int, int]  # width, height
    objects: list[Object]
    split: Optional[str] = None  # 'train', 'val' or 'test', None if unknown

    @property
    def classes(self) -> set[str]:
        """Classes of the objects that are used in training."""
        return {item.name for item in self.objects if item.name is not None and not item.is_ignored}


def marks_of(attributes: dict[str, Any]) -> frozenset:
    """Return the names of attributes with a value other than empty, 0, false or 'Unspecified'."""
    names = [str(key) for key, value in attributes.items() if _is_set(value)]
    return frozenset(_ATTRIBUTES.get(key.lower(), key if key in _KNOWN else key.lower()) for key in names)


_KNOWN = IGNORED | {'turned', 'truncated', 'occluded', 'score', 'keypoints', 'parts'}


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
    return _turned(points, degrees, np.array(pivot or ((left + right) / 2, (top + bottom) / 2)))


def ellipse(x: float, y: float, rx: float, ry: float, degrees: float = 0.0) -> np.ndarray:
    """Return 36 points ``(36, 2)`` on an ellipse rotated clockwise around its centre."""
    angles = np.linspace(0, 2 * math.pi, 36, endpoint=False)
    centre = np.array((x, y))
    return _turned(np.stack([rx * np.cos(angles), ry * np.sin(angles)], 1) + centre, degrees, centre)


def _turned(points: np.ndarray, degrees: float, centre: np.ndarray) -> np.ndarray:
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return (points - centre) @ np.array([[cos, sin], [-sin, cos]]) + centre


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


# images, classes in the order of the labels, notes for the user
Found = tuple[list[Photo], list[str], list[str]]


class Pictures:
    """Images of a data set, found by names in annotation files.

    Args:
        root: Folder of the data set.
        images: Paths of all images.
    """

    def __init__(self, root: Path, images: list[Path]):
        self.root, self.by_name = root, dict[str, list[Path]]()
        for path in images:
            for name in {path.name, path.stem}:
                self.by_name.setdefault(name, []).append(path)

    def has(self, name: str) -> bool:
        return name.replace('\\', '/').rpartition('/')[2] in self.by_name

    def find(self, file: Path, name: str, is_upload: bool = False) -> Path:
        """Return the image for a name, path or URL in an annotation file.

        If several images have the name, the image with the most parent folders in common is taken. If these are equal,
        images beside the file and in VOC's JPEGImages are preferred.

        Args:
            file: The annotation file, for messages and relative paths.
            name: Name in that file, with or without suffix.
            is_upload: The name may begin with eight characters and a hyphen, as Label Studio renames uploads.

        Raises:
            RunError: No image matches, or several match equally.
        """
        parts = unquote(str(name)).replace('\\', '/').split('?d=')[-1].split('?')[0].split('/')
        names = [parts[-1], *([parts[-1].partition('-')[2]] if is_upload and '-' in parts[-1] else [])]
        found = next((self.by_name[each] for each in names if each in self.by_name), [])
        if not found:
            raise RunError(f'{file} names the image {str(name)!r}, which is in no folder below {self.root}.')
        ours = file.relative_to(self.root).parts[:-1]

        def rank(path: Path) -> tuple:
            theirs = path.relative_to(self.root).parts[:-1]
            pairs = [one == other for one, other in zip(reversed(theirs), reversed(parts[:-1]))]
            same = (*pairs, False).index(False)
            differing = sum(a != b for a, b in itertools.zip_longest(ours, theirs))
            is_label = any('Segmentation' in part for part in theirs)
            return same, ours == theirs, 'JPEGImages' in theirs, not is_label, differing <= 1

        best = max(map(rank, found))
        found = [path for path in found if rank(path) == best]
        if len(found) > 1:
            raise RunError(f'{file}: {str(name)!r} may be {found[0]} or {found[1]}; keep one.')
        return found[0]
