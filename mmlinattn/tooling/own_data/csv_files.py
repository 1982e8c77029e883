# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Readers of CSV files of boxes and of classes."""

import csv
import re
from collections import Counter
from pathlib import Path
from typing import Any, Optional

import numpy as np

from ...utils.errors import RunError, described
from .finding import read_names, split_of
from .objects import Object, Photo, Pictures, checked_size, from_points, marks_of

# columns by their meaning, in small letters without other signs
_IMAGE = tuple(
    'filename file imagename imagepath image imageid path filepath img imgname id photo picture imgpath name'.split()
)
_CLASS = tuple(
    'class classname label labelname category categoryname target species labels classid diagnosis dx name'.split()
)
_EDGES = (('xmin', 'x1', 'left', 'xtl', 'bboxxmin'), ('ymin', 'y1', 'top', 'ytl', 'bboxymin'))
_ENDS = (('xmax', 'x2', 'right', 'xbr', 'bboxxmax'), ('ymax', 'y2', 'bottom', 'ybr', 'bboxymax'))
_SIDES = (('w', 'width', 'bboxwidth', 'boxwidth'), ('h', 'height', 'bboxheight', 'boxheight'))
_STARTS = (('x', 'bboxx', 'left', 'xmin'), ('y', 'bboxy', 'top', 'ymin'))
_BOX, _SPLIT = ('bbox', 'box', 'boundingbox'), ('split', 'set', 'subset', 'datasplit', 'partition', 'phase')
_SIZE = (('width', 'imagewidth', 'imgwidth'), ('height', 'imageheight', 'imgheight'))
_MARKS = tuple('confidence score difficult truncated occluded ignore iscrowd isoccluded istruncated isgroupof'.split())


def _rows(path: Path) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of a table; columns are empty where the first row is one of values."""
    try:
        text = path.read_text(encoding='utf-8-sig')
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f'{path} cannot be read as text of UTF-8: {described(error)}') from error
    first = text.partition('\n')[0]
    delimiter = max(',;\t', key=first.count)
    rows = [row for row in csv.reader(text.splitlines(), delimiter=delimiter) if any(cell.strip() for cell in row)]
    columns = [re.sub('[^a-z0-9]', '', cell.lower()) for cell in rows[0]] if rows else []
    if _is_plain_row(rows[0] if rows else []):
        return [], rows
    return columns, rows[1:]


def _is_plain_row(row: list[str]) -> bool:
    """Return True of ``path, x1, y1, x2, y2, class`` without names of columns; empty edges mean no object."""
    return len(row) == 6 and all(not cell.strip() or re.fullmatch(r'-?\d+(\.\d+)?', cell.strip()) for cell in row[1:5])


def _place(columns: list[str], names: tuple[str, ...]) -> Optional[int]:
    return next((columns.index(name) for name in names if name in columns), None)


def _box_columns(columns: list[str]) -> Optional[tuple[list[int], bool]]:
    """Return the columns of left, top, right, bottom, or of left, top, width, height and True."""
    for pairs, has_sides in (((*_EDGES, *_ENDS), False), ((*_STARTS, *_SIDES), True)):
        places = [_place(columns, names) for names in pairs]
        if None not in places:
            return [place for place in places if place is not None], has_sides
    return None


def kind_of_table(path: Path) -> Optional[str]:
    """Return ``'CSV of boxes'``, ``'CSV of classes'``, or None of other tables."""
    try:
        columns, rows = _rows(path)
    except RunError:
        return None
    if (rows and not columns) or _box_columns(columns) or _place(columns, _BOX) is not None:
        return 'CSV of boxes'
    is_list = rows and _place(columns, _IMAGE) is not None and len(columns) > 1
    return 'CSV of classes' if is_list and columns[0] not in ('epoch', 'step', 'r') else None


def read_box_tables(files: list[Path], root: Path, images: list[Path]) -> tuple[list, list[str], list[str]]:
    """Read tables with a box a row: of TensorFlow, keras-retinanet, Kaggle, Open Images and others alike.

    Edges are pixels; all of them from 0 to 1 are shares of the image.

    Raises:
        RunError: A row is no box, or its image is not there.
    """
    pictures = Pictures(root, images)
    found: dict[tuple[Path, Optional[str]], list[Object]] = {}
    sizes: dict[Path, tuple[int, int]] = {}
    notes: list[str] = []
    for path in files:
        columns, rows = _rows(path)
        get = _Columns(path, columns)
        notes += [f'not used of {path.name}: {", ".join(get.unused)}'] * bool(get.unused)
        notes += [f'{path.name} has no column of classes: all boxes are of one, "object"'] * (get.klass is None)
        shares = bool(rows) and all(max(map(abs, edges), default=0) <= 1 for edges in map(get.edges, rows))
        for number, row in enumerate(rows, 2 if columns else 1):
            name = get.text(row, get.image)
            picture = pictures.find(path, name)
            size = sizes.get(picture)
            if size is None:
                size = sizes[picture] = checked_size(path, picture, *(get.text(row, place) for place in get.size))
            split = split_of(Path(get.text(row, get.split))) or split_of(path.relative_to(root))
            key = (picture, split or split_of(picture.relative_to(root).parent))
            objects = found.setdefault(key, [])
            edges = get.edges(row)
            if not edges:
                continue  # an image without object
            try:
                corners = np.reshape(edges, (2, 2)) * (size if shares else 1)
                objects.append(from_points(get.label(row), [corners], get.marks(row), is_outline=False))
            except ValueError as error:
                raise RunError(f'{path}, line {number}: {row} is no box of an image: {described(error)}.') from error
    photos = [(Photo(picture, sizes[picture], objects), split) for (picture, split), objects in found.items()]
    classes = {str(item.name) for photo, _ in photos for item in photo.objects}
    return photos, read_names(root, 'classes.txt') or in_order(classes), notes


class _Columns:
    """Columns of a table of boxes."""

    def __init__(self, path: Path, columns: list[str]):
        self.path, self.columns = path, columns
        if not columns:  # keras-retinanet
            self.image, self.box, self.has_sides = 0, [1, 2, 3, 4], False
            self.klass: Optional[int] = 5
            self.size: list[Optional[int]] = [None, None]
            self.split, self.written, self.unused = None, None, list[str]()
            return
        self.written = _place(columns, _BOX)
        box = _box_columns(columns) if self.written is None else ([], True)
        image = _place(columns, _IMAGE)
        self.klass = _place([column * (i != image) for i, column in enumerate(columns)], _CLASS)
        if box is None or image is None:
            raise RunError(f'{path}: expected a column of images ({", ".join(_IMAGE[:6])}) among {columns}.')
        self.image, (self.box, self.has_sides) = image, box
        self.split = _place(columns, _SPLIT)
        self.size = [None if p in self.box else p for p in (_place(columns, names) for names in _SIZE)]
        read = {self.image, self.klass, self.split, self.written, *self.box, *self.size}
        self.unused = [name for i, name in enumerate(columns) if i not in read and name not in _MARKS]

    def text(self, row: list[str], place: Optional[int]) -> str:
        return row[place].strip() if place is not None and place < len(row) else ''

    def label(self, row: list[str]) -> str:
        """Return the class of a row; one class is called object where no column has it."""
        name = self.text(row, self.klass) if self.klass is not None else 'object'
        if not name:
            raise ValueError('no class')
        return name

    def edges(self, row: list[str]) -> list[float]:
        """Return left, top, right, bottom as they are written, empty of an image without object."""
        cells = [self.text(row, place) for place in self.box]
        if self.written is not None:
            cells = re.findall(r'-?\d+\.?\d*(?:e-?\d+)?', self.text(row, self.written))
        if not any(cells):
            return []
        try:
            left, top, right, bottom = map(float, cells)
        except ValueError:
            raise RunError(f'{self.path}: {row} has no box of four numbers.') from None
        return [left, top, left + right, top + bottom] if self.has_sides else [left, top, right, bottom]

    def marks(self, row: list[str]) -> frozenset:
        """Return marks of columns such as Open Images' IsGroupOf. A confidence of 1 says nothing."""
        said = {name: self.text(row, self.columns.index(name)) for name in _MARKS if name in self.columns}
        return marks_of({key: value for key, value in said.items() if not _is_certain(key, value)})


def _is_certain(key: str, value: str) -> bool:
    return key in ('confidence', 'score') and re.fullmatch(r'1(\.0*)?', value) is not None


def in_order(names: Any) -> list[str]:
    """Sort class names, numbers by their value."""
    return sorted(names, key=lambda name: (0, float(name), '') if re.fullmatch(r'\d+', name) else (1, 0.0, name))


def read_class_tables(
    files: list[Path], root: Path, images: list[Path]
) -> tuple[list[tuple[tuple[Path, str], Optional[str]]], list[str]]:
    """Read tables with the class of an image a row, or a column of 0 and 1 for each class.

    Returns:
        ``((image, class), split)`` of each row, and notes.

    Raises:
        RunError: A row has no class or several, or its image is not there.
    """
    pictures, unused = Pictures(root, images), Counter[str]()
    items: dict[Path, tuple[str, Optional[str]]] = {}
    for path in files:
        columns, rows = _rows(path)
        image, split = _place(columns, _IMAGE), _place(columns, _SPLIT)
        others = [i for i in range(len(columns)) if i not in (image, split)]
        klass = next((columns.index(n) for n in _CLASS if n in columns and columns.index(n) != image), None)
        header = _header(path)
        one_hot = klass is None and len(others) > 1
        if klass is None and len(others) == 1:
            klass = others[0]
        for number, row in enumerate(rows, 2):
            cells = [cell.strip() for cell in row] + [''] * (len(columns) - len(row))
            if one_hot:
                if any(not re.fullmatch(r'[01](\.0*)?', cells[i]) for i in others):
                    raise RunError(f'{path}: expected a column of classes ({", ".join(_CLASS[:6])}) among {header}.')
                names = [header[i] for i in others if float(cells[i])]
            else:
                names = [cells[klass]] if klass is not None and cells[klass] else []
            if len(names) != 1:
                raise RunError(f'{path}, line {number}: {row} has {len(names)} classes; one an image is learnt.')
            picture = pictures.find(path, cells[image or 0])
            said = split_of(Path(cells[split])) if split is not None else None
            said = said or split_of(path.relative_to(root)) or split_of(picture.relative_to(root).parent)
            if items.setdefault(picture, (names[0], said)) != (names[0], said):
                raise RunError(
                    f'{path}, line {number}: {picture} is {items[picture]} and {(names[0], said)}; keep one.'
                )
        if not one_hot:
            unused.update(header[i] for i in others if i != klass)
    notes = [f'not used: columns {", ".join(unused)}'] * bool(unused)
    return [((picture, name), split) for picture, (name, split) in items.items()], notes


def _header(path: Path) -> list[str]:
    text = path.read_text(encoding='utf-8-sig').partition('\n')[0]
    return [cell.strip() for cell in next(csv.reader([text], delimiter=max(',;\t', key=text.count)))]
