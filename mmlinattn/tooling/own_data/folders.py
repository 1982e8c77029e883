# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Read images with one class each, from class folders or from CSV files."""

import os
import re
from collections import Counter
from pathlib import Path
from typing import Optional

from ...utils.errors import RunError
from .csv_files import Item, Table, read_class_tables
from .data import Data, Example, OwnData, Source
from .formats import UNKNOWN, described_kind, recognise_all, refusal
from .names import composed, has_role_only, is_unlabelled, some
from .reading import name_table
from .splits import divide


def read_classes(data: Data) -> OwnData:
    """Read images with one class each, from CSV files or class folders.

    Labels are written to list files. MMPretrain would number the folders of each split by itself, and a split may lack
    a class.

    Raises:
        RunError: There are fewer than two classes, a class occurs only in val, or tables and folders differ.
    """
    data.need_images()
    kinds = recognise_all(data)
    kind, items, notes = _claim(data, kinds)
    items = [item._replace(name=composed(item.name)) for item in items]
    listed = data.names('classes.txt') if kind.startswith('CSV') else data.options.classes
    order, names = name_table({item.name for item in items}, listed)
    items = [item._replace(name=names[item.name]) for item in items]
    _refuse_numbers(data, [item.name for item in items])
    occurring = {item.name for item in items}
    order = [name for name in order if name in occurring]
    splits, more = divide(data, items, 'classification', order, kind.startswith('CSV'))
    found = {item.name for item in splits['train']}
    classes = [name for name in order if name in found]
    for split, chosen in splits.items():
        others = {item.name for item in chosen} - found
        if others:
            raise RunError(f'{split} has images of {min(others)!r}, and train has none ({some(classes)}).')
    if len(classes) < 2:
        raise RunError(f'DATA {str(data.root)!r} has images of {len(classes)} class(es): expected a folder for each.')
    used = {split: [item.path for item in chosen] for split, chosen in splits.items()}
    lists = {
        split: ''.join(f'{data.name(item.path)} {classes.index(item.name)}\n' for item in chosen)
        for split, chosen in splits.items()
    }
    examples = [Example(item.path, title=item.name) for item in splits['train']]
    return OwnData(kind, classes, used, lists, dict.fromkeys(lists, dict(data_prefix='')), more + notes, examples)


def _refuse_numbers(data: Data, labels: list[str]) -> None:
    """Raise an error if the labels are measured numbers, or another one for each image."""
    classes = set(labels)
    what = f'DATA {str(data.root)!r}: the {len(classes)} labels ({some(sorted(classes), 3)})'
    has_fractions = any(re.fullmatch(r'-?\d*\.\d*[1-9]\d*', name) for name in classes)
    if has_fractions and 2 * len(classes) > len(labels):  # coins of 0.50 have many images of each
        raise RunError(f'{what} are numbers, not classes: regression is not learnt.')
    if len(classes) == len(labels) > 2:
        raise RunError(f'{what} are of one image each: these are names of images, or each class needs more images.')


def _claim(data: Data, kinds: dict[str, list[Source]]) -> tuple[str, list[Item], list[str]]:
    """Return the only claim: format, images and notes."""
    tables = _tables(kinds)
    chosen, notes = data.options.labels, list[str]()
    labelled = [{path for row in t.rows for path in data.pictures.named(row[t.image])} for t in tables]
    named = [table for table, images in zip(tables, labelled) if images]
    folders, error = list[Item](), None
    if not chosen or chosen.is_dir() and not tables:
        try:
            folders = _folder_items(data, notes, set[Path]().union(*labelled))
        except RunError as raised:
            error = raised
    if len({item.name for item in folders}) == 1 and len(kinds) > 0:
        folders = []
    if tables := named or ([] if folders or error else tables):  # a table of numbers and names names no image
        data.used.update(table.path for table in tables)
        items, more = read_class_tables(tables, data)
        kind, items = _joined(data, items, folders, data.name(tables[0].path))
        return kind, items, more + notes
    if error:
        others = [sources[0] for kind, sources in kinds.items() if kind not in (UNKNOWN, 'CSV of classes')]
        beside = [f' {described_kind(data, source, "classification")}.' for source in others]
        raise RunError(f'{error}{"".join(beside[-1:])}')
    if not folders:
        raise refusal(data, kinds, 'classification')
    return 'folders of images', folders, notes


def _tables(kinds: dict[str, list[Source]]) -> list[Table]:
    """Return the tables of classes; one of boxes that names each image once gives it one class."""
    boxes = [source.content for source in kinds.get('CSV of boxes', ())]
    boxes = [table for table in boxes if table.label and table.has_one_row_an_image and not table.is_plain]
    classes = [source.content for source in kinds.get('CSV of classes', ())]
    return [table for table in classes if not table.box or table.label and table.has_one_row_an_image] + boxes


def _joined(data: Data, items: list[Item], folders: list[Item], table: str) -> tuple[str, list[Item]]:
    """Return the images of a table, and those of class folders if both are of different splits.

    Raises:
        RunError: Class folders differ from the classes of the table, or have more images.
    """
    classes = {item.path: item.name for item in items}
    splits = [{item.split for item in found} for found in (items, folders)]
    are_apart = None not in splits[0] | splits[1] and not splits[0] & splits[1]
    if folders and are_apart and not any(item.path in classes for item in folders):
        return 'CSV of classes and folders of images', items + folders
    for item in folders:
        if classes.get(item.path, item.name) != item.name:
            raise RunError(
                f'{item.path} is of the class {classes[item.path]!r} in {table}, and in a folder of '
                f'{item.name!r}: give --labels FILE, or --labels {item.path.parent.parent} for the folders.'
            )
    rest = {item.path for item in folders} - classes.keys()
    if rest:
        raise RunError(
            f'{table} and folders of classes both have labels, and {len(rest)} images are in folders alone: give '
            '--labels FILE, or --labels DIR for the folders.'
        )
    return 'CSV of classes', items


class _Folders:
    """Folders below ``top`` that name a split, a class, or nothing (``images``, a folder around all others)."""

    def __init__(self, data: Data, top: Path, images: list[Path]):
        self.data, self.top = data, top
        self.inner: dict[Path, set[str]] = {}  # names of the folders in a folder
        for folder in {folder for path in images for folder in path.parents if top in folder.parents}:
            self.inner.setdefault(folder.parent, set()).add(folder.name)
        self.full = {path.parent for path in images}

    def split(self, folder: Path) -> Optional[str]:
        """Return the split of a folder that holds other folders, or lies beside another split."""
        found = {self.data.splits.of_folder(name) for name in self.inner[folder.parent]} - {None}
        return self.data.splits.of_folder(folder.name) if len(found) > 1 or self.inner.get(folder) else None

    def read(self, path: Path) -> tuple[Optional[str], tuple[str, ...]]:
        """Return the split of an image, and the names of its other folders that tell images apart."""
        split, names = None, list[str]()
        for folder in [folder for folder in reversed(path.parents) if self.top in folder.parents]:
            beside, own = self.inner[folder.parent], self.split(folder)
            is_around = self.inner.get(folder) and folder.parent not in self.full or folder.name == folder.parent.name
            split = own or split
            if not own and not (len(beside) == 1 and is_around) and not all(map(has_role_only, beside)):
                names.append(folder.name)
        return split, tuple(names)


def _folder_items(data: Data, notes: list[str], labelled: set[Path]) -> list[Item]:
    """Return the images in class folders, in or around folders of splits; ``labelled`` ones may lie in none."""
    masks = data.pictures.masks_among(data.images)
    notes += [f'{len(masks)} masks of images are left out, as {data.name(min(masks))}'] if masks else []
    data.images = [path for path in data.images if path not in masks]
    given = [path for path in (data.options.train, data.options.val) if path and path.is_dir()]
    items = list[Item]()
    for top in given or [data.root]:
        images = [path for path in data.images if top in path.parents]
        folders = _Folders(data, top, images)
        found = {path: folders.read(path) for path in images}
        around = len(os.path.commonprefix([names[:-1] for _, names in found.values() if names]))
        found = {path: (split, names[around:]) for path, (split, names) in found.items()}
        if not given and any(split for split, _ in found.values()):
            found = _of_splits(data, found, notes, labelled)
        _refuse_nested(top, {names for _, names in found.values()})
        items += [Item(path, names[0], split, path) for path, (split, names) in found.items() if names]
    unlabelled = {item.name for item in items if is_unlabelled(item.name)}
    notes += [f'folders of images without label are left out: {some(sorted(unlabelled))}'] if unlabelled else []
    return [item for item in items if item.name not in unlabelled]


_Found = dict[Path, tuple[Optional[str], tuple[str, ...]]]  # split and folders of each image


def _of_splits(data: Data, found: _Found, notes: list[str], labelled: set[Path]) -> _Found:
    """Return the images in folders of splits, after checking what lies beside and in them."""
    splits = {split for split, _ in found.values() if split}
    inside: _Found = {path: (split, names) for path, (split, names) in found.items() if split}
    first = next(split for split in ('train', 'val', 'test') if split in splits)
    _refuse_unclear(data, found, inside, first)
    beside = sorted({names[0] for split, names in found.values() if not split and names})
    loose = [path for path, (split, names) in inside.items() if not names and split != 'test' and path not in labelled]
    if loose:
        lists = [path for path in data.files if path.suffix.lower() in ('.txt', '.csv')]
        raise RunError(
            f'{loose[0].parent}: {len(loose)} images of {inside[loose[0]][0]} are in no folder of a class'
            f'{"; " + some(map(data.name, lists), 4) + ": no CSV of images and classes" if lists else ""}: sort '
            'them into folders, or write a CSV file with filename,label.'
        )
    notes += [f'{some(beside)} beside {first}: left out'] if beside else []
    return inside


def _refuse_unclear(data: Data, found: _Found, inside: _Found, first: str) -> None:
    """Raise an error if folders beside those of splits or of classes may be splits or classes too."""
    classes = sorted({names[0] for _, names in inside.values() if len(names) == 1})
    splits = {split for split, _ in inside.values()}
    unclear = [names[0] for split, names in found.values() if {*classes} & {*names[bool(split) :]}]
    nested = Counter(first for first, _ in {names[:2] for split, names in found.values() if not split and names[1:]})
    unclear += [name for name, count in nested.items() if count > 1 and len(splits) == 1]
    of_val = [data.rel(path).parts for path, (split, _) in inside.items() if split == 'val']
    unclear += ['dev'] if of_val and all('dev' in parts for parts in of_val) else []
    if unclear:
        raise RunError(
            f'{data.root}: {first} and {unclear[0]} both hold folders of images ({len(classes)} class(es), '
            f'{some(classes, 4)}). Is {unclear[0]} a split, or {first} a class? Give --train DIR and --val DIR, or '
            '--images DIR.'
        )


def _refuse_nested(top: Path, names: set[tuple[str, ...]]) -> None:
    """Raise an error if folders of classes hold several folders in place of images."""
    inner: dict[str, set[str]] = {}
    for first, second, *_ in (each for each in names if len(each) > 1):
        inner.setdefault(first, set()).add(second)
    for name, folders in inner.items():
        if len(folders) > 1 and (name,) not in names:
            same = sorted(other for other, others in inner.items() if others == folders)
            nested = f'{some(same, 3)} hold the same folders' if len(same) > 1 else f'{name} holds folders'
            raise RunError(
                f'{top}: {nested} ({some(sorted(folders), 4)}), nested: which are the classes? Give --train DIR and '
                '--val DIR if the upper ones are splits, else --images DIR of one level.'
            )
