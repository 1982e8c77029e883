# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Read CSV files with boxes or with the classes of images."""

import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Optional

from ...utils.errors import RunError
from .data import Data, Source, read_lines, read_text
from .images import SUFFIXES
from .names import GROUPS, composed, of_split, plain, some, split_in
from .reading import Entry, Object, Photo, Reader, flags_of

# columns by their meaning, in small letters without other signs
_IMAGE = 'filename fname file imagename imagepath image imageid path filepath img imgname photo picture imgpath'.split()
_ROWS = ['id', 'name']  # of images too, if no other column names them
_CLASS = 'class classname label labelname category categoryname target species labels classid diagnosis dx'.split()
_CLASS += ['choice', 'name']
_GENERIC = _CLASS[:7]  # of these, one column alone tells the class
_SPLIT, _BOX = ['split', 'set', 'subset', 'partition', 'phase'], ['bbox', 'box', 'boundingbox']
_SPLIT += ['isvalid', 'isval', 'isvalidation', 'istest', 'istrain']  # the others are of train, or of val
_SPLIT_OR_OTHER = ['usage', 'dataset']  # of splits if all cells name one
_SEVERAL = frozenset('tags labels classes categories attributes'.split())
# columns of a box by their meaning (None: the numbers have to tell)
_HEADERS = {
    'corners': ('xmin ymin xmax ymax', 'x1 y1 x2 y2', 'roix1 roiy1 roix2 roiy2', 'left top right bottom'),
    'sides': ('left top width height', 'xmin ymin width height'),
    None: ('x y w h', 'x y width height', 'bboxx bboxy bboxwidth bboxheight'),
}
_SIZE = ['width imagewidth imgwidth', 'height imageheight imgheight']
_FLAGS = 'confidence score difficult truncated occluded ignore iscrowd isoccluded istruncated isgroupof'.split()
csv.field_size_limit(1 << 30)  # characters of a cell; run lengths of masks are longer than the default of 1 << 17
_RETINANET = ['filename', 'x1', 'y1', 'x2', 'y2', 'class']  # without header


def _read_rows(path: Path) -> tuple[str, list[list[str]]]:
    """Return the delimiter of a CSV file, and its rows of stripped cells without empty rows."""
    text = read_text(path)
    given = re.match(r'\s*sep=(.)\r?\n', text)  # of Excel
    text = text[given.end() :] if given else text
    line = text.lstrip('\r\n').partition('\n')[0]
    delimiter = given[1] if given else max(',;\t', key=line.count)
    rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text), delimiter=delimiter)]
    return delimiter, [row for row in rows if any(row)]


class Table:
    """Rows of a CSV file (separated by ``,``, ``;`` or tabs), with the columns recognised by their names.

    ``image``, ``split``, ``group`` and ``label`` are keys of the cells in a row, '' without such a column; ``box`` and
    ``size`` are lists of keys. A key is the name of a column in small letters, without signs (:func:`~.names.plain`).
    """

    def __init__(self, path: Path):
        self.delimiter, rows = _read_rows(path)
        first = rows[0] if rows else []
        named = len(first) == 6 and first[0].lower().endswith(SUFFIXES)
        self.is_plain = named and all(re.fullmatch(r'(-?\d+(\.\d+)?)?', cell) for cell in first[1:5])
        self.path, self.names = path, _RETINANET if self.is_plain else first
        self.columns = list(map(plain, self.names))
        rows = rows if self.is_plain else rows[1:]
        padding = [''] * len(self.columns)
        cells = (zip(self.columns, [*row, *padding]) for row in rows)
        self.rows = [{column: cell for column, cell in row if column} for row in cells]
        # pandas writes whole numbers as 1.0 if a cell of their column is blank
        for name in self._columns_of(_CLASS, lambda cell: re.fullmatch(r'(\d+\.0)?', cell)):
            self.rows = [{**row, name: row[name].removesuffix('.0')} for row in self.rows]
        of_files = self._columns_of(self.columns, lambda cell: cell.lower().endswith(SUFFIXES))
        self.image = self.key([*_IMAGE, *(of_files if len(of_files) == 1 else []), *_ROWS])
        self.file_columns = [] if self.image else of_files  # several, of which one may name the images
        of_splits = self._columns_of(_SPLIT_OR_OTHER, split_in)
        self.split = self.key([*_SPLIT, *(name for name in of_splits if len({row[name] for row in self.rows}) > 1)])
        self.group = self.key(GROUPS)
        self.label = self._label()
        self.box, self.boxes = [self.key(_BOX)] if self.key(_BOX) else [], None
        for meaning, header in ((meaning, header) for meaning, headers in _HEADERS.items() for header in headers):
            if not self.box and set(header.split()) <= set(self.columns):
                self.box, self.boxes = header.split(), meaning
        self.size = [key if key not in self.box else '' for key in (self.key(names.split()) for names in _SIZE)]

    @property
    def has_classes(self) -> bool:
        """True if the table has one class per image.

        Classes are in a column of a known header, a single other column without decimal fractions, or one-hot columns.
        """
        others = self.unused()
        flags = [row[self.column(name)] for row in self.rows for name in others]
        are_flags = bool(flags) and all(re.fullmatch(r'[01](\.0*)?', cell) for cell in flags)
        are_fractions = any(re.fullmatch(r'-?\d*\.\d*[1-9]\d*', cell) for cell in flags)  # an age, a score
        return bool(self.label) or len(others) == 1 and not are_fractions or are_flags

    @property
    def flags(self) -> list[str]:
        """Columns of 1, 0, -1 and blanks, if a row has several of 1: findings in one image, as of CheXpert."""
        cells = {name: [row[self.column(name)] for row in self.rows] for name in self.unused()}
        found = [name for name, each in cells.items() if all(re.fullmatch(r'(-?[01](\.0*)?)?', cell) for cell in each)]
        rows = zip(*(cells[name] for name in found))
        return found if any(sum(cell[:1] == '1' for cell in row) > 1 for row in rows) else []

    @property
    def has_choices(self) -> bool:
        """True for Label Studio's column of one class per image; several are JSON in a cell."""
        return 'choice' in self.columns and not any(row['choice'].startswith('{') for row in self.rows)

    @property
    def has_one_row_an_image(self) -> bool:
        return len({row[self.image] for row in self.rows}) == len(self.rows)

    def _label(self) -> str:
        """Return the column of classes; names are preferred to their numbers."""
        first, *others = [name for name in _CLASS if name in self.columns and name != self.image] or ['']
        if others and all(re.fullmatch(r'\d*', row[first]) for row in self.rows):
            for name in others:
                is_name = not any(re.fullmatch(r'[\d.]*', row[name]) for row in self.rows)
                if is_name and self._pairs_up(first, name):
                    return name
        return first

    def _pairs_up(self, first: str, other: str) -> bool:
        """Return True if each value of the column ``first`` stands beside one value of ``other``, and vice versa."""
        pairs = {(row[first], row[other]) for row in self.rows}
        return len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})

    def label_of(self, classes: Optional[Sequence[str]]) -> str:
        """Return the column of classes; of several that differ, the only one with all values among ``classes``."""
        rivals = [name for name in _GENERIC if name in self.columns and name not in (self.image, self.label)]
        rivals = [name for name in rivals if self.label and not self._pairs_up(self.label, name)]
        if not rivals or self.label not in _GENERIC:
            return self.label
        values = {name: {row[name] for row in self.rows} - {''} for name in (self.label, *rivals)}
        chosen = [name for name, found in values.items() if classes and found <= {*classes}]
        if len(chosen) != 1:
            listed = ' and '.join(f'{name} ({some(sorted(found), 3)})' for name, found in values.items())
            raise RunError(f'{self.path} has {len(values)} columns of classes, {listed}: give --classes of one.')
        return chosen[0]

    def _columns_of(self, names: Iterable[str], fits: Callable[[str], object]) -> list[str]:
        """Return the columns of ``names`` in which ``fits`` is true for all cells."""
        names = [name for name in names if name and name in self.columns and self.rows]
        return [name for name in names if all(fits(row[name]) for row in self.rows)]

    def key(self, names: Iterable[str]) -> str:
        """Return the first of ``names`` that is a column, or ''."""
        return next((name for name in names if name in self.columns), '')

    def column(self, name: str) -> str:
        """Return the key of the column with a name as in the file."""
        return self.columns[self.names.index(name)]

    def unused(self, *used: str) -> list[str]:
        """Return the names, as in the file, of columns other than image, split, group and the keys ``used``."""
        known = (self.image, self.split, self.group, *used, '')
        return [name for name, column in zip(self.names, self.columns) if column not in known]

    def numbers(self, row: dict[str, str]) -> list[float]:
        """Return the four numbers of a row's box, or [] for an image without objects."""
        cells = [row[key] for key in self.box]
        if len(cells) == 1:
            cells = re.findall(r'-?\d+\.?\d*(?:e-?\d+)?', cells[0])
        if self.delimiter == ';':
            cells = [cell.replace(',', '.') for cell in cells]
        if not any(cells):
            return []
        try:
            a, b, c, d = map(float, cells)
        except ValueError:
            raise RunError(f'{self.path}: {list(row.values())} has no box of four numbers.') from None
        return [a, b, c, d]

    def split_of(self, row: dict[str, str]) -> str:
        """Return the split by the column of splits, or ''; other values than known splits raise an error."""
        value = row.get(self.split, '')
        if value and self.split.startswith('is'):
            other = 'val' if self.split == 'istrain' else 'train'
            value = self.split[2:] if value.lower() in ('true', '1', '1.0', 'yes') else other
        if value and not split_in(value):
            raise RunError(f'{self.path}: {self.split}={value!r}: expected train, val or test.')
        return split_in(value) or ''


_OF_CLASSES = re.compile('class|label|categor|names|species', re.IGNORECASE)  # in the names of files


def names_by_number(data: Data) -> dict[str, str]:
    """Return the class names of a CSV file with two columns, numbers and names, such as keras-retinanet's
    ``classes.csv``; {} without such a file."""
    found: dict[Path, dict[str, str]] = {}
    tables = [path for path in data.files if path.suffix.lower() in ('.csv', '.tsv')]
    for path in [path for path in tables if _OF_CLASSES.search(path.stem)]:
        rows = _read_rows(path)[1]
        rows = rows if rows and any(map(str.isdecimal, rows[0])) else rows[1:]  # without header
        first, second = zip(*rows) if rows and all(len(row) == 2 for row in rows) else ((), ())
        for numbers, names in ((first, second), (second, first)):
            is_one_each = len({*numbers}) == len({*names}) == len(rows)
            if numbers and is_one_each and all(map(str.isdecimal, numbers)) and not any(map(str.isdecimal, names)):
                found[path] = {n: names[i] for i, n in sorted(enumerate(numbers), key=lambda each: int(each[1]))}
    if data.options.classes:  # these name the numbers
        return next(iter(found.values()), {})
    return data.agreed(found, 'the names of class numbers: keep one, or give --classes NAME ...') or {}


class BoxTable(Reader):
    """Tables with a box in each row, as written by TensorFlow, keras-retinanet, Kaggle, Open Images and others."""

    def images(self, sources: list[Source]) -> list[Photo]:
        """Read all tables; refuse different box columns, and tables without header, class list and ``--boxes``."""
        tables = [source.content for source in sources]
        self.numbered = names_by_number(self.data)
        if tables[0].is_plain and not self.numbered and not self.data.options.boxes:
            raise RunError(
                f'{tables[0].path} has no header, and no classes.csv of keras-retinanet is beside it: give --boxes '
                'corners|sides|centre.'
            )
        meanings = {'corners' if table.is_plain and self.numbered else table.boxes for table in tables}
        if len(meanings) > 1:
            raise RunError(f'{tables[0].path} and {tables[1].path} have other columns of boxes: give --labels FILE.')
        self.boxes = meanings.pop()
        return super().images(sources)

    def entries(self, source: Source) -> Iterator[Entry]:
        table, label = source.content, source.content.label_of(self.data.options.classes)
        unused = table.unused(label, *table.box, *table.size)
        unused = [name for name in unused if table.column(name) not in _FLAGS]
        self.notes += [f'not used of {source.path.name}: {", ".join(unused)}'] if unused else []
        name = (self.data.options.classes or ['object'])[0]
        if not label:
            text = next((each for each in unused if _has_several_words(table, each)), None)
            if text and not self.data.options.classes:
                raise RunError(
                    f'{source.path}: no column of classes among {", ".join(table.names)}. Is it {text}? Name it class, '
                    'give --classes NAME for boxes of one class, or --labels DIR of other label files.'
                )
            self.notes.append(f'{source.path.name} has no column of classes: all boxes are of one, {name!r}')
        images: dict[tuple[str, str], Entry] = {}
        for row in table.rows:
            key = row[table.image], table.split_of(row)
            size = tuple(row.get(column) for column in table.size)
            entry = images.setdefault(key, Entry(key[0], [], size, key[1], row.get(table.group) or None))
            numbers = table.numbers(row)
            if numbers:  # none for an image without objects
                certain = {key for key in ('confidence', 'score') if re.fullmatch(r'1(\.0*)?', row.get(key, ''))}
                flags = {key: row[key] for key in _FLAGS if key in row and key not in certain}
                entry.content.append((row.get(label, name), numbers, flags, list(row.values())))
        return iter(images.values())

    def objects(self, content: Any, size: tuple[int, int]) -> Iterator[Object]:
        for label, numbers, flags, row in content:
            if not label:
                raise ValueError(f'{row} has no class')
            yield Object(label, tuple(numbers), None, flags_of(flags), is_raw=True)


def _has_several_words(table: Table, name: str) -> bool:
    words = {row[table.column(name)] for row in table.rows}
    return len(words) > 1 and not any(re.fullmatch(r'-?[\d.]*', word) for word in words)


def read_class_lists(data: Data) -> list[Photo]:
    """Return the images of text files with an image and the number of its class in each line, as of MMPretrain."""
    items: dict[Path, Photo] = {}
    given = [path for path in (data.options.train, data.options.val) if path]
    lists = [path for path in data.labels if path.suffix.lower() == '.txt' and (len(given) < 2 or path in given)]
    for path in lists:
        lines = [re.fullmatch(r'(.+?)[\s,;]+(\d+)', line) for line in read_lines(path)]
        pairs = [(line[1], line[2]) for line in lines if line]
        if pairs and len(pairs) == len(lines) and all(data.pictures.named(name) for name, _ in pairs):
            data.used.add(path)
            split = data.splits.of(data.rel(path), is_file=True)
            pictures = data.pictures.find(path, (name for name, _ in pairs))
            for picture, (_, number) in zip(pictures, pairs):
                first = items.setdefault(picture, Photo(picture, path, split, None, number))
                if (first.split, first.label) != (split, number):
                    raise RunError(
                        f'{picture} is {first.label}{of_split(first.split)} in {data.name(first.file)}, and {number}'
                        f'{of_split(split)} in {data.name(path)}: give --train LIST and --val LIST, or remove one.'
                    )
    return [*items.values()]


_SEPARATORS = r'[\s,;|]+'


def read_class_tables(tables: list[Table], data: Data) -> tuple[list[Photo], list[str]]:
    """Return the images of tables, and notes for the user. A table has a row for each image: a column with the class,
    or a 0/1 column for each class."""
    notes, items, columns = list[str](), dict[Path, Photo](), set[str]()
    for table in tables:
        named = table.label_of(data.options.classes)
        path, others = table.path, table.unused(named)
        label = named or (table.column(others[0]) if len(others) == 1 else '')
        columns.add(label)
        notes += [f'not used of {path.name}: columns {", ".join(others)}'] if named and others else []
        of_file = data.splits.of(data.rel(path), is_file=True)
        pictures = data.pictures.find(path, [row[table.image] for row in table.rows])
        for row, picture in zip(table.rows, pictures):
            names = [name for name in others if not label and float(row[table.column(name)])]
            names += [row[label]] if row.get(label) else []
            if len(names) != 1:
                raise RunError(f'{path}: {list(row.values())} has {len(names)} classes; one an image is learnt.')
            split, group = table.split_of(row) or of_file, row.get(table.group) or None
            item = Photo(picture, path, split, group, composed(names[0]))
            first = items.setdefault(picture, item)
            if first._replace(group=group) != item:
                labels = [f'{each.label!r}{of_split(each.split)} in {data.name(each.file)}' for each in (first, item)]
                remedy = 'remove one of the two rows' if first.file == path else 'give --labels FILE'
                raise RunError(f'{picture} is labelled twice: {labels[0]}, and {labels[1]}: {remedy}.')
    _refuse_several(tables[0].path, {item.label for item in items.values()}, columns)
    return list(items.values()), notes


def _refuse_several(path: Path, labels: set[str], columns: set[str]) -> None:
    """Raise a RunError if a label lists several classes (``cat,dog``); ``columns`` are the keys of label columns."""
    words = Counter(word for name in labels for word in set(re.split(_SEPARATORS, name)))
    for name in sorted(labels, key=lambda name: (-len(name), name)):
        parts = set(re.split(_SEPARATORS, name)) - {name}
        listed = set(re.split(r' *[,;|] *', name)) - {name, ''}
        is_list = re.fullmatch(r'\[([\'"].*|.*,.*)\]|\d+([\s,;|]+\d+)+', name)  # saved by pandas, or numbers
        is_joined = len(parts & labels) > 1 or listed & labels or '|' in name
        if is_list or is_joined or columns & _SEVERAL and any(words[part] > 1 for part in parts):
            raise RunError(
                f'{path} has {name!r}, several classes; one an image is learnt. If it is one class, name the column '
                'class and write its words with _.'
            )
