# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Objects in images, and the common part of all readers of boxes: match images, check their sizes, name the classes."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Optional

import cv2
import numpy as np

from ...utils.errors import RunError, described
from .data import Data, Source
from .images import image_size
from .names import composed

IGNORED = frozenset({'crowd', 'ignore', 'difficult'})  # flags of objects that are neither learnt nor counted
_ATTRIBUTES = {'iscrowd': 'crowd', 'is_crowd': 'crowd', 'isgroupof': 'crowd', 'ignored': 'ignore', 'dontcare': 'ignore'}
_ATTRIBUTES.update(isoccluded='occluded', istruncated='truncated', confidence='score', num_keypoints='keypoints')
_NOTHING = ('', '0', '0.0', 'false', 'no', 'none', 'unspecified', 'n/a', '-1')
# classes of regions that are ignored, of CrowdHuman, KITTI, LabelMe, VisDrone
_REGIONS = ('ignore', 'ignored', '__ignore__', 'dontcare', "don't care", 'ignored regions', 'ignored-regions')


class Object(NamedTuple):
    """Annotated object in an image.

    Attributes:
        name: Class; None for a region that is ignored for every class.
        box: Left, top, right, bottom in pixels; with ``is_raw`` the four numbers of the file.
        segmentation: Polygons [[x, y, ...], ...] in pixels, or run lengths as in COCO.
        flags: Flags of the annotation, e.g. ``'crowd'``, ``'rotated'``.
        area: Square pixels; 0 if the format has none.
        is_raw: The box is not converted yet: :class:`Reader` has the meaning of its numbers.
    """

    name: Optional[str]
    box: tuple
    segmentation: Any = None
    flags: frozenset = frozenset()
    area: float = 0.0
    is_raw: bool = False

    @property
    def is_ignored(self) -> bool:
        return bool(self.flags & IGNORED)


class Photo(NamedTuple):
    """Image with its objects, its class or its mask.

    Attributes:
        path (Path): File of the image.
        file (Path): File of its labels, such as a segmentation mask; the image itself in class folders.
        split (str, optional): ``'train'``, ``'val'`` or ``'test'`` by a column or the name of the label file.
        group (str, optional): Images of one group belong to one split.
        label (str): Class of the whole image, '' without.
        in_mask (frozenset[str]): Classes of the mask's pixels.
        objects (Sequence[Object]): Annotated objects.
        size (tuple[int, int]): Width and height in pixels, read for images with objects alone.
    """

    path: Path
    file: Path
    split: Optional[str] = None
    group: Optional[str] = None
    label: str = ''
    in_mask: frozenset[str] = frozenset()
    objects: Sequence[Object] = ()
    size: tuple[int, int] = (0, 0)

    @property
    def classes(self) -> set[str]:
        """Classes that are used in training."""
        objects = {item.name for item in self.objects if item.name and not item.is_ignored}
        return {self.label} - {''} | self.in_mask | objects


def flags_of(attributes: dict[str, Any]) -> frozenset:
    """Return the names of the attributes that are set, lower case and with one name for synonyms (``iscrowd``: crowd).

    An attribute is not set if its value is None, empty, 0, -1, false, no, none, n/a or unspecified, in any case.

    Raises:
        ValueError: An attribute of :data:`IGNORED` (crowd, ignore, difficult) is neither 0 nor 1.
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


def from_points(name: str, parts: list, flags: Iterable[str] = (), is_polygon: bool = True) -> Object:
    """Return an object with the polygons ``parts``, each ``(N, 2)`` in pixels, and the box around them. Without
    ``is_polygon`` it has the box alone. Missing points and NaN raise a ValueError."""
    if not any(map(len, parts)) or not all(np.isfinite(np.asarray(part, float)).all() for part in parts):
        raise ValueError('a point that is no number')
    segmentation = [np.ravel(np.asarray(part, float)).tolist() for part in parts if len(part) >= 3]
    return Object(name, bounds(parts), segmentation if is_polygon and segmentation else None, frozenset(flags))


def bounds(parts: Sequence) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of polygons, each an array or nested list of x, y pairs in any shape."""
    points = np.concatenate([np.reshape(np.asarray(part, float), (-1, 2)) for part in parts])
    return (*points.min(0).tolist(), *points.max(0).tolist())


def corners(box: tuple, degrees: float = 0.0, pivot: Optional[tuple] = None) -> np.ndarray:
    """Return corners ``(4, 2)`` of a box (left, top, right, bottom) turned clockwise around ``pivot`` or its centre."""
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


def is_rectangle(polygon: list[float]) -> bool:
    """Return True for the four corners of a rectangle, upright or rotated, perhaps with the first repeated."""
    points = np.reshape(polygon, (-1, 2)).astype(np.float32)
    _, sides, _ = cv2.minAreaRect(points)
    return len(np.unique(points, axis=0)) == 4 and cv2.contourArea(points) > 0.95 * math.prod(sides)


class Entry(NamedTuple):
    """Image in a label file, as the file has it.

    Attributes:
        name: Name, path or URL of the image; '' for the name of the label file.
        content: Annotations, the argument of :meth:`Reader.objects`.
        size: Width and height in pixels; None if the file does not say.
        split: Name of the split, or of folders that may name it.
        group: Images of one group belong to one split.
    """

    name: str
    content: Any
    size: tuple = (None, None)
    split: str = ''
    group: Optional[str] = None


class Reader:
    """Base class of readers of label files. A subclass yields the images of a file and the objects of an image."""

    boxes: Optional[str] = None  # meaning of raw boxes: 'corners', 'sides' or 'centre'; None: the file does not say
    units: Optional[str] = None  # of raw boxes: 'pixels' or 'shares'; None: the file does not say
    lists: tuple[str, ...] = ('classes.txt', 'labels.txt', 'labelmap.txt')  # files with a class name a line
    has_one_image = False  # a file has the labels of one image, mostly of its own name
    is_numbered = False  # labels are numbers of classes: a class without objects stays
    remark = ''  # note for the user on all data of the format

    def __init__(self, kind: str, data: Data):
        self.kind, self.data = kind, data
        self.photos, self.notes = list[Photo](), [self.remark] if self.remark else []
        self.classes = list[str]()  # names that the files list; after read() those in the order of the labels
        self.numbered = dict[str, str]()  # class names by number, from a file that lists both
        self.lost = Counter[str]()  # shapes that are neither boxes nor polygons, by kind
        self.unused = Counter[str]()  # fields of images

    def entries(self, source: Source) -> Iterable[Entry]:
        """Yield the images of a label file."""
        raise NotImplementedError

    def objects(self, content: Any, size: tuple[int, int]) -> Iterable[Object]:
        """Yield the objects of an entry with this ``content``; ``size`` is width and height of the image in pixels."""
        raise NotImplementedError

    def listed(self, found: set[str]) -> Optional[list[str]]:
        """Return the class names of ``--classes`` or a list file, else ``classes`` of the label files, or None. Names
        ``found`` at objects follow the ``classes`` of the label files."""
        listed, given = self.data.names(*self.lists), {*self.classes}  # perhaps one name in two forms of Unicode
        own = [composed(name) for name in self.classes if name == composed(name) or composed(name) not in given]
        return [*own, *sort_names(found - {*own})] if listed is None and own else listed

    def read(self, sources: list[Source]) -> None:
        """Read all files of a format; set ``photos`` and ``classes``, and add to ``notes``."""
        photos = self.images(sources)
        found = {str(item.name) for photo in photos for item in photo.objects if not _is_region(str(item.name))}
        order, names = name_table(found, self.listed(found), self.numbered)
        self.photos = [photo._replace(objects=[_named(item, names) for item in photo.objects]) for photo in photos]
        # without LabelMe's _background_
        kept = [name for name in order if self.is_numbered or name in names.values() or not name.startswith('_')]
        self.classes = [name for name in kept if not _is_region(name)]
        if self.unused:
            self.notes.append(f'not used of the images in {self.kind}: {counted(self.unused)}')
        if self.lost:
            kinds = ', '.join(f'{count} of kind {kind}' for kind, count in sorted(self.lost.items()))
            self.notes.append(f'shapes that are no boxes or polygons are left out: {kinds}')

    def images(self, sources: list[Source]) -> list[Photo]:
        """Read the images of all files, with objects as the files name them."""
        photos, pictures = list[Photo](), self.data.pictures
        keys = {pictures.key(source.path) for source in sources}
        for source in sources:
            path = source.path
            with _guarded(str(path)):
                entries = list(self.entries(source))
            if self.has_one_image:
                found = [pictures.of_label(path, entry.name, keys) for entry in entries]
            else:
                found = pictures.find(path, (entry.name for entry in entries))
            of_file = None if self.has_one_image else self.data.splits.of(self.data.rel(path), is_file=True)
            for entry, picture in zip(entries, found):
                split = self.data.splits.of(Path(entry.split)) or of_file
                photos.append(self.photo(path, picture, entry)._replace(split=split))
        return photos

    def photo(self, path: Path, picture: Path, entry: Entry) -> Photo:
        """Return an image with its objects; raise a RunError if it has another size than the label file says."""
        size = image_size(picture)
        try:
            expected = tuple(int(float(side or 0)) for side in entry.size)
        except (TypeError, ValueError):
            raise RunError(f'{path}: width and height {entry.size} are no size of an image.') from None
        if all(expected) and expected != size:
            told, real = (f'{width}x{height}' for width, height in (expected, size))
            raise RunError(f'{path} has an image of {told}, and {picture} is {real} (turned by EXIF?).')
        with _guarded(str(path) if self.has_one_image else f'{path}, image {entry.name!r}'):
            objects = [
                item._replace(name=composed(str(item.name)).strip()) for item in self.objects(entry.content, size)
            ]
            if not all(map(math.isfinite, itertools.chain(*(item.box for item in objects)))):
                raise ValueError('a box that is no number')
        return Photo(picture, path, None, entry.group, objects=objects, size=size)


@contextmanager
def _guarded(place: str) -> Iterator[None]:
    """Convert errors by damaged content in this context to a RunError that names the ``place``."""
    try:
        yield
    except ValueError as error:
        raise RunError(f'{place}: {error}.') from error
    except (AttributeError, KeyError, TypeError, OSError) as error:
        raise RunError(f'{place} cannot be read: {described(error)}') from error


def counted(counts: Counter) -> str:
    """Return the sorted keys with their counts as text: ``a (2), b (1)``."""
    return ', '.join(f'{key} ({count})' for key, count in sorted(counts.items()))


def _is_region(name: str) -> bool:
    """Return True for the name of a class of ignored regions, such as KITTI's ``DontCare``."""
    return name.lower() in _REGIONS


def _named(item: Object, names: dict[str, str]) -> Object:
    """Return an object with its class from ``names`` by label, or without a class if it is a region to ignore."""
    name = names.get(str(item.name), str(item.name))
    return item._replace(name=None, flags=item.flags | {'ignore'}) if _is_region(name) else item._replace(name=name)


def sort_names(names: Iterable[str]) -> list[str]:
    """Sort class names alphabetically; names that are numbers come first, sorted by value."""
    return sorted(names, key=lambda name: (0, float(name), '') if re.fullmatch(r'\d+', name) else (1, 0.0, name))


def name_table(
    found: set[str], listed: Optional[list[str]], numbered: Optional[dict[str, str]] = None
) -> tuple[list[str], dict[str, str]]:
    """Return the class names in the order of the labels, and the name of each label in ``found``.

    Labels are names in the list ``listed``, or all of them are numbers of its names from 0 or from 1. Without
    ``listed``, the names of ``numbered`` are taken by number. Other labels raise a RunError.
    """
    if not listed and numbered and (found <= numbered.keys() or found <= {*numbered.values()}):
        return [*numbered.values()], {name: numbered.get(name, name) for name in found}
    listed = listed or sort_names(found)
    if found <= set(listed):
        return listed, {name: name for name in found}
    for first in (0, 1):  # the number that the other way of counting cannot have decides
        if str(first and len(listed)) in found and found <= set(map(str, range(first, first + len(listed)))):
            return listed, {name: listed[int(name) - first] for name in found}
    lacking = sort_names(found - set(listed))[0]
    raise RunError(
        f'the label {lacking!r} is not in the list of classes ({", ".join(listed)}), and not all labels are its '
        'numbers from 0 or 1: correct classes.txt, or give --classes NAME ..., a name for every number'
    )
