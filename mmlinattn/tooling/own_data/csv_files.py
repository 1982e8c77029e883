# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Read CSV files with boxes or with the classes of images."""

import csv
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Optional

import numpy as np

from ...utils.errors import RunError, described
from .finding import read_lines, read_names, split_of
from .objects import Found, Photo, Pictures, checked_size, from_points, marks_of

# columns by their meaning, in small letters without other signs
_IMAGE = (
    'filename file imagename imagepath image imageid path filepath img imgname id photo picture imgpath name'.split()
)
_CLASS = 'class classname label labelname category categoryname target species labels classid diagnosis dx name'.split()
_SPLIT, _BOX = ['split', 'set', 'subset', 'partition', 'phase'], ['bbox', 'box', 'boundingbox']
_CORNERS = ['xmin x1 left xtl', 'ymin y1 top ytl', 'xmax x2 right xbr', 'ymax y2 bottom ybr']
_SIDES = ['x bboxx left xmin', 'y bboxy top ymin', 'w width bboxwidth boxwidth', 'h height bboxheight boxheight']
_SIZE = ['width imagewidth imgwidth', 'height imageheight imgheight']
_MARKS = 'confidence score difficult truncated occluded ignore iscrowd isoccluded istruncated isgroupof'.split()
_RETINANET = ['filename', 'xmin', 'ymin', 'xmax', 'ymax', 'class']  # without names of columns


class _Table:
    """Rows of a CSV file (separated by ``,``, ``;`` or tabs), with the columns recognised by their names."""

    def __init__(self, path: Path):
        lines = read_lines(path)
        rows = list(csv.reader(lines, delimiter=max(',;\t', key=lines[0].count))) if lines else [[]]
        first = [cell.strip() for cell in rows[0]]
        is_plain = len(first) == 6 and all(re.fullmatch(r'(-?\d+(\.\d+)?)?', cell) for cell in first[1:5])
        self.path, self.names = path, _RETINANET if is_plain else first
        self.columns = [re.sub('[^a-z0-9]', '', name.lower()) for name in self.names]
        rows = rows if is_plain else rows[1:]
        self.rows = [dict(zip(self.columns, [*map(str.strip, row), *[''] * len(self.columns)])) for row in rows]
        self.image, self.split = self.key(_IMAGE), self.key(_SPLIT)
        self.label = next((name for name in _CLASS if name in self.columns and name != self.image), '')
        self.written = self.key(_BOX)
        corners, sides = ([self.key(names.split()) for names in each] for each in (_CORNERS, _SIDES))
        self.has_sides = not all(corners)
        self.box = [self.written] if self.written else corners if all(corners) else sides if all(sides) else []
        self.size = [key if key not in self.box else '' for key in (self.key(names.split()) for names in _SIZE)]

    def key(self, names: Iterable[str]) -> str:
        return next((name for name in names if name in self.columns), '')

    def unused(self, *used: str) -> list[str]:
        return [name for name, column in zip(self.names, self.columns) if column not in (self.image, self.split, *used)]

    def edges(self, row: dict[str, str]) -> list[float]:
        """Return left, top, right and bottom of a row's box in the unit of the file, or [] for an image without
        objects."""
        cells = [row[key] for key in self.box]
        if self.written:
            cells = re.findall(r'-?\d+\.?\d*(?:e-?\d+)?', cells[0])
        if not any(cells):
            return []
        try:
            left, top, right, bottom = map(float, cells)
        except ValueError:
            raise RunError(f'{self.path}: {list(row.values())} has no box of four numbers.') from None
        return [left, top, left + right, top + bottom] if self.has_sides or self.written else [left, top, right, bottom]

    def split_of(self, row: dict[str, str], root: Path, picture: Path) -> Optional[str]:
        paths = (Path(row.get(self.split, '')), self.path.relative_to(root), picture.relative_to(root).parent)
        return next(filter(None, map(split_of, paths)), None)


def kind_of_table(path: Path) -> Optional[str]:
    """Return ``'CSV of boxes'`` or ``'CSV of classes'``, or None for other tables."""
    try:
        table = _Table(path)
    except (RunError, csv.Error):
        return None
    if table.box and table.image:
        return 'CSV of boxes'
    return 'CSV of classes' if table.image and table.rows and len(table.columns) > 1 else None


def read_box_tables(files: list[Path], root: Path, images: list[Path]) -> Found:
    """Read tables with a box in each row, as written by TensorFlow, keras-retinanet, Kaggle, Open Images and similar
    tools.

    Coordinates are pixels. If all numbers of a table are from 0 to 1, they are relative to the size of the image.

    Raises:
        RunError: A row has no valid box, or its image does not exist.
    """
    pictures, notes = Pictures(root, images), list[str]()
    photos: dict[tuple[Path, Optional[str]], Photo] = {}
    for path in files:
        table = _Table(path)
        unused = table.unused(table.label, *table.box, *table.size)
        unused = [name for name in unused if re.sub('[^a-z0-9]', '', name.lower()) not in _MARKS]
        notes += [f'not used of {path.name}: {", ".join(unused)}'] * bool(unused)
        notes += [f'{path.name} has no column of classes: all boxes are of one, "object"'] * (not table.label)
        shares = bool(table.rows) and all(max(map(abs, table.edges(row)), default=0) <= 1 for row in table.rows)
        for row in table.rows:
            picture = pictures.find(path, row[table.image])
            split = table.split_of(row, root, picture)
            if (picture, split) not in photos:
                size = checked_size(path, picture, *(row.get(key) for key in table.size))
                photos[picture, split] = Photo(picture, size, [], split)
            photo = photos[picture, split]
            edges, label = table.edges(row), row.get(table.label, 'object')
            if not edges:
                continue  # an image without object
            certain = {key for key in ('confidence', 'score') if re.fullmatch(r'1(\.0*)?', row.get(key, ''))}
            marks = marks_of({key: row[key] for key in _MARKS if key in row and key not in certain})
            try:
                corners = np.reshape(edges, (2, 2)) * (photo.size if shares else 1)
                photo.objects.append(from_points(label, [corners], marks, is_outline=False))
            except ValueError as error:
                raise RunError(f'{path}: {list(row.values())} is no box: {described(error)}.') from error
            if not label:
                raise RunError(f'{path}: {list(row.values())} has no class.')
    classes = {str(item.name) for photo in photos.values() for item in photo.objects}
    return list(photos.values()), read_names(root, 'classes.txt') or in_order(classes), notes


def in_order(names: Iterable[str]) -> list[str]:
    """Sort class names alphabetically; names that are numbers come first, sorted by value."""
    return sorted(names, key=lambda name: (0, float(name), '') if re.fullmatch(r'\d+', name) else (1, 0.0, name))


class Item(NamedTuple):
    """Image with one class."""

    path: Path
    name: str  # class
    split: Optional[str]

    @property
    def classes(self) -> list[str]:
        return [self.name]


def read_class_tables(files: list[Path], root: Path, images: list[Path]) -> tuple[list[Item], list[str]]:
    """Read tables with a row for each image: a column with the class, or a 0/1 column for each class.

    Returns:
        tuple[list[Item], list[str]]: The images, and notes for the user.

    Raises:
        RunError: A row has no class or several classes, or its image does not exist.
    """
    pictures, notes = Pictures(root, images), list[str]()
    items: dict[Path, Item] = {}
    for path in files:
        table = _Table(path)
        others = table.unused(table.label)
        label = table.label or (table.columns[table.names.index(others[0])] if len(others) == 1 else '')
        notes += [f'not used of {path.name}: columns {", ".join(others)}'] * bool(table.label and others)
        for row in table.rows:
            flags = dict(zip(others, (row[table.columns[table.names.index(name)]] for name in others)))
            if not label and not all(re.fullmatch(r'[01](\.0*)?', flag) for flag in flags.values()):
                raise RunError(f'{path}: expected a column of classes ({", ".join(_CLASS[:6])}) among {table.names}.')
            names = [row[label]] * bool(row[label]) if label else [name for name in others if float(flags[name])]
            if len(names) != 1:
                raise RunError(f'{path}: {list(row.values())} has {len(names)} classes; one an image is learnt.')
            picture = pictures.find(path, row[table.image])
            item = Item(picture, names[0], table.split_of(row, root, picture))
            if items.setdefault(picture, item) != item:
                raise RunError(f'{path}: {picture} is of {items[picture][1:]} and of {item[1:]}.')
    return list(items.values()), notes
