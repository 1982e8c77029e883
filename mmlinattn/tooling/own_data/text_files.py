# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Read YOLO and KITTI text files, one for each image."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import numpy as np

from ...utils.errors import RunError
from .data import Source, read_lines
from .names import some
from .reading import Entry, Object, Photo, Reader, flags_of, from_points, is_rectangle


class Yolo(Reader):
    """YOLO text files: a line has the number of a class, then a box or a polygon in shares of the image.

    An image without text file is background if other images of its folder have one.
    """

    boxes, units, lists, has_one_image, is_numbered = 'centre', 'shares', (), True, True

    def images(self, sources: list[Source]) -> list[Photo]:
        """Read all files; raise a RunError without class names, or for numbers that are neither boxes nor polygons."""
        file, content = self.data.settings
        self.classes, self.has_points = self._class_names(file, content), 'kpt_shape' in content
        self.rows = list[list[float]]()  # numbers of polygons
        photos = super().images(sources)
        if _have_points(self.rows):
            raise RunError(
                f'{sources[0].path} and others: the first four numbers of each line are a box with further numbers, as '
                'key points or scores are: write kpt_shape: [number, 2 or 3] into data.yaml, or leave the scores out.'
            )
        photos += self._background(photos)
        polygons = [item.segmentation[0] for photo in photos for item in photo.objects if item.segmentation]
        if polygons and all(map(is_rectangle, polygons)):
            photos = [photo._replace(objects=list(map(_as_rotated, photo.objects))) for photo in photos]
        elif polygons and all(len(polygon) == 8 for polygon in polygons):
            self.notes.append('all polygons have four points, as rotated boxes have: they are learnt as masks')
        return photos

    def _class_names(self, file: Optional[Path], content: dict) -> list[str]:
        """Return the class names of ``--classes``, the settings ``file`` with its ``content``, or a list file."""
        listed = self.data.names('classes.txt', 'labels.txt', '.names', '.labels') or []
        named = _names(file, content)
        if self.data.options.classes:
            return listed
        if any(a != b for a, b in zip(named, listed)):
            raise RunError(
                f'{file} names the classes {some(named)}, and a list beside (classes.txt, labels.txt or .names) '
                f'{some(listed)}: keep one, or give --classes NAME ...'
            )
        if not named and not listed:
            raise self.data.error(
                ' has YOLO text files, and no names of their classes: write classes.txt, one name per line, or '
                'data.yaml with names: [...], or give --classes NAME ...'
            )
        return named or listed

    def _background(self, photos: list[Photo]) -> list[Photo]:
        """Return the images without text file in folders of ``photos``, except masks, and add notes on both."""
        key, owned = self.data.pictures.key, {photo.path for photo in photos}
        folders, keys = {path.parent for path in owned}, {key(photo.file) for photo in photos}
        found = [p for p in self.data.images if p in owned or p.parent in folders or key(p) in keys]
        masks = self.data.pictures.masks_among(found) - owned
        background = [path for path in found if path not in owned and path not in masks]
        if background:
            total = len(background) + len(photos)
            self.notes.append(f'{len(background)} of {total} images have no text file: they are background')
        if masks:
            self.notes.append(f'{len(masks)} masks of images are left out, as {min(masks).name}')
        return [self.photo(path, path, Entry('', [])) for path in background]

    def entries(self, source: Source) -> Iterator[Entry]:
        yield Entry('', read_lines(source.path))

    def objects(self, content: Any, size: tuple[int, int]) -> Iterator[Object]:
        flags = frozenset({'keypoints'} if self.has_points else ())
        for number, line in enumerate(content, 1):
            label, *values = line.split()
            here = f'line {number}: {line[:60]!r}'
            try:
                numbers = [float(value) for value in values[: 4 if self.has_points else None]]
                name = self.classes[int(float(label))] if float(label) >= 0 and float(label) % 1 == 0 else ''
            except (ValueError, IndexError, OverflowError):
                raise ValueError(f'{here}; classes are 0 to {len(self.classes) - 1}') from None
            count = len(numbers)
            if not name or not (count == 4 or count >= 6 and count % 2 == 0):
                score = '; the last number is the score of a prediction (--save-conf), or key points follow'
                raise ValueError(
                    f'{here} is no class and x y width height, or x y of a polygon{score if count % 2 else ""}'
                )
            if not np.isfinite(numbers).all() or count > 4 and not all(-0.01 <= each <= 1.01 for each in numbers):
                raise ValueError(f'{here}; numbers are shares of the image, from 0 to 1')
            if count == 4:
                yield Object(name, tuple(numbers), None, flags, is_raw=True)
            else:
                self.rows.append(numbers)
                yield from_points(name, [np.reshape(numbers, (-1, 2)) * size], flags)


def _as_rotated(item: Object) -> Object:
    return item._replace(segmentation=None, flags=item.flags | {'rotated'}) if item.segmentation else item


def _have_points(rows: list[list[float]]) -> bool:
    """Return True if all lines are boxes with equally many points inside, or with two more numbers (score, track)."""
    if len({len(row) for row in rows}) != 1:
        return False
    table = np.array(rows)
    centres, halves = table[:, None, :2], table[:, None, 2:4] / 2
    if table.shape[1] == 6:
        return bool((np.abs(centres - 0.5) + halves < 0.51).all())
    for size in (2, 3):
        if (table.shape[1] - 4) % size == 0:
            points = table[:, 4:].reshape(len(rows), -1, size)[..., :2]
            inside = np.abs(points - centres) <= halves + 0.01
            if (inside.all(-1) | (points == 0).all(-1)).all():
                return True
    return False


def _names(file: Optional[Path], content: dict) -> list[str]:
    """Return the class names in the ``content`` of a data.yaml; [] without names."""
    names, number = content.get('names'), content.get('nc')
    if names is not None and not isinstance(names, (dict, list)):
        raise RunError(f'{file}: names={names!r}: expected a list, or numbers and their names.')
    if names and number and str(number) != str(len(names)):
        raise RunError(f'{file}: nc={number}, and names has {len(names)}: correct one.')
    if isinstance(names, dict):
        if sorted(names) != sorted(map(str, range(len(names)))):
            raise RunError(f'{file}: names have the numbers [{", ".join(names)}]: expected 0 to {len(names) - 1}.')
        names = [names[str(number)] for number in range(len(names))]
    return list(map(str, names or ()))


class Kitti(Reader):
    """KITTI's files: type, truncated, occluded, alpha, left, top, right, bottom, then seven fields of 3D."""

    boxes, units, has_one_image = 'corners', 'pixels', True
    remark = 'of KITTI the boxes are learnt, nothing in 3D'

    def entries(self, source: Source) -> Iterator[Entry]:
        yield Entry('', read_lines(source.path))

    def objects(self, content: Any, size: tuple[int, int]) -> Iterator[Object]:
        for number, (kind, *values) in enumerate(map(str.split, content), 1):
            try:
                truncated, occluded, _, left, top, right, bottom = map(float, values[:7])
            except ValueError:
                raise ValueError(f'line {number}: {kind} is not followed by the 14 numbers of KITTI') from None
            flags = flags_of(dict(truncated=truncated > 0, occluded=occluded > 0, score=len(values) > 14))
            yield Object(kind, (left, top, right, bottom), None, flags, is_raw=True)
