# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Read images with one class each, from class folders or from CSV files."""

from collections.abc import Iterable
from pathlib import Path
from typing import Optional

from ...utils.errors import RunError
from .csv_files import Item, Table, read_class_tables
from .data import Data, Example, OwnData, Source
from .formats import UNKNOWN, recognise_all, refusal
from .names import has_role_only, some
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
    listed = data.names('classes.txt') if kind.startswith('CSV') else data.options.classes
    order, names = name_table({item.name for item in items}, listed)
    items = [item._replace(name=names[item.name]) for item in items]
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


def _claim(data: Data, kinds: dict[str, list[Source]]) -> tuple[str, list[Item], list[str]]:
    """Return the only claim: format, images and notes.

    Raises:
        RunError: Tables and folders give an image other classes, or neither labels images.
    """
    found = [source.content for source in (*kinds.get('CSV of classes', ()), *kinds.get('CSV of boxes', ()))]
    # a table of boxes that names each image once gives it one class
    tables = [table for table in found if not table.box or table.label and table.has_one_row_an_image]
    chosen = data.options.labels
    fault: Optional[RunError] = None
    folders, notes = list[Item](), list[str]()
    if not chosen or chosen.is_dir() and not tables:
        try:
            folders = _folder_items(data, notes)
        except RunError as error:
            fault = error
    if len({item.name for item in folders}) == 1 and len(kinds) > 0:
        folders = []
    named = [table for table in tables if any(data.pictures.named(row[table.image]) for row in table.rows)]
    if folders or fault or named:  # a table of numbers and class names names no image
        tables = named
    if tables:
        data.used.update(table.path for table in tables)
        items, more = read_class_tables(tables, data)
        by_path, table = {item.path: item for item in items}, data.name(tables[0].path)
        for item in folders:
            if item.path in by_path and item.name != by_path[item.path].name:
                raise RunError(
                    f'{item.path} is of the class {by_path[item.path].name!r} in {table}, and in a folder of '
                    f'{item.name!r}: give --labels FILE, or --labels {item.path.parent.parent} for the folders.'
                )
        rest = {item.path for item in folders} - by_path.keys()
        if rest:
            raise RunError(
                f'{table} and folders of classes both have labels, and {len(rest)} images are in folders alone: give '
                '--labels FILE, or --labels DIR for the folders.'
            )
        return 'CSV of classes', items, more
    if fault:
        beside = ''
        for kind, ((path, _, content), *_) in kinds.items():
            if isinstance(content, Table) and kind != 'CSV of classes':
                beside = f' {data.name(path)} has the columns {some(content.names)}: none is named class or label.'
            elif kind not in (UNKNOWN, 'CSV of classes'):
                beside = f' {data.name(path)} is {kind}, which this task does not take.'
        raise RunError(f'{fault}{beside}')
    if not folders:
        raise refusal(data, kinds, 'classification')
    return 'folders of images', folders, notes


class _Folders:
    """Folders with images below a folder: ``inner[folder]`` by name, and images that lie in none."""

    def __init__(self, top: Path, images: Iterable[Path]):
        self.top, self.loose = top, list[Path]()
        below: dict[str, list[Path]] = {}
        for path in images:
            name, *rest = path.relative_to(top).parts
            if rest:
                below.setdefault(name, []).append(path)
            else:
                self.loose.append(path)
        self.inner = {name: _Folders(top / name, paths) for name, paths in below.items()}
        if all(has_role_only(name) and not folder.inner for name, folder in self.inner.items()):
            self.loose, self.inner = self.images, {}  # val/images/x.jpg: no class is named images
        only = next(iter(self.inner.values()), None)
        is_around = only and (only.inner or only.top.name == top.name)  # the others, or test/test of an archive
        if only and is_around and len(self.inner) == 1 and not self.loose:
            self.top, self.loose, self.inner = only.top, only.loose, only.inner

    @property
    def images(self) -> list[Path]:
        return [*self.loose, *(path for folder in self.inner.values() for path in folder.images)]

    @property
    def is_nested(self) -> bool:
        return not self.loose and len(self.inner) > 1


def _folder_items(data: Data, notes: list[str]) -> list[Item]:
    """Return the images in class folders, which are inside of folders of splits or in one folder.

    Raises:
        RunError: It is unclear which folders are the classes or the splits, or images of val are in no folder.
    """
    masks = data.pictures.masks_among(data.images)
    notes += [f'{len(masks)} masks of images are left out, as {data.name(min(masks))}'] if masks else []
    data.images = [path for path in data.images if path not in masks]
    top = _Folders(data.root, data.images)
    with_splits = [each for each in top.inner.values() if len({*map(data.splits.of_folder, each.inner)} - {None}) > 1]
    if len(with_splits) == 1 and all(each in with_splits or not each.inner for each in top.inner.values()):
        top = with_splits[0]  # beside flat folders
    given = [path for path in (data.options.train, data.options.val) if path and path.is_dir()]
    splits = {name: data.splits.of_folder(name) for name in top.inner}
    named = {name for name, split in splits.items() if split and top.inner[name].inner}
    if given:
        parts = [_Folders(path, [image for image in data.images if path in image.parents]) for path in given]
    elif len(set(filter(None, splits.values()))) > 1 or named:
        parts = _divided(data, top, splits, notes)
    else:
        parts = [top]
    items, classes = [], [name for part in parts for name in part.inner]
    if all(map(has_role_only, classes)) and not all(map(str.isdigit, classes)):
        return []
    for part in parts:
        split = data.splits.of(data.rel(part.top)) if part is not top else None
        for name, folder in part.inner.items():
            inner = [each for each in folder.inner if not data.splits.of_folder(each)]
            if folder.is_nested and len(inner) > 1:
                same = [f'{other}' for other, each in part.inner.items() if each.inner.keys() == folder.inner.keys()]
                what = f'{some(same, 3)} hold the same folders' if len(same) > 1 else f'{name} holds folders'
                raise RunError(
                    f'{part.top}: {what} ({some(inner, 4)}), nested: which are the classes? Give --train DIR and --val '
                    'DIR if the upper ones are splits, else --images DIR of one level.'
                )
            items += [
                Item(path, name, split or data.splits.of(path.relative_to(folder.top).parent), path)
                for path in folder.images
            ]
    return items


def _divided(data: Data, top: _Folders, splits: dict[str, Optional[str]], notes: list[str]) -> list[_Folders]:
    """Return the folders of splits, after checking what lies beside and in them."""
    parts = {name: top.inner[name] for name, split in splits.items() if split}
    names = {name for part in parts.values() for name in part.inner} | set(parts)
    first = next(iter(name for name, split in splits.items() if split == 'train'), next(iter(parts)))
    for name, folder in top.inner.items():
        is_part = names & folder.inner.keys() or folder.is_nested and len(parts) == 1
        if name not in parts and is_part or name.lower() == 'dev' and 'val' not in splits:
            inner = f'{len(folder.inner)} class(es), {some(folder.inner, 4)}'
            raise RunError(
                f'{top.top}: {first} and {name} both hold folders of images ({inner}). Is {name} a split, or {first} a '
                'class? Give --train DIR and --val DIR, or --images DIR.'
            )
        if name in parts and folder.loose and splits[name] != 'test':
            lists = [path for path in data.files if path.suffix.lower() in ('.txt', '.csv')]
            raise RunError(
                f'{folder.top}: {len(folder.loose)} images of {splits[name]} are in no folder of a class'
                f'{"; " + some(map(data.name, lists), 4) + ": no CSV of images and classes" if lists else ""}: sort '
                'them into folders, or write a CSV file with filename,label.'
            )
    others = [name for name in top.inner if name not in parts]
    notes += [f'{some(others)} beside {first}: left out'] if others else []
    return list(parts.values())
