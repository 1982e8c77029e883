# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Read images with one class each, from class folders or from CSV files."""

from pathlib import Path
from typing import Any

from ...utils.errors import RunError
from .csv_files import Item, in_order, read_class_tables
from .finding import SUFFIXES, OwnData, divide, find, is_hidden, read_names, split_of, unseen_classes
from .kinds import kinds_of


def read_classes(root: Path) -> OwnData:
    """Read images with one class each: from CSV files if these name at least half of the images, or else from class
    folders.

    Labels are written to list files. MMPretrain would number the folders of each split by itself, and a split may lack
    a class.

    Raises:
        RunError: There are fewer than two classes, or a class occurs only in val.
    """
    images, kinds = find(root, *SUFFIXES), kinds_of(root)
    tables = kinds.files.get('CSV of classes', [])
    kind, items, notes = 'CSV of classes', list[Item](), list[str]()
    if tables:
        try:
            items, notes = read_class_tables(tables, root, images)
        except RunError:
            if not _folder_items(root, []):
                raise
    if 2 * len(items) < len(images):
        notes = [f'{len(tables)} CSV files beside are not read, as {path.name}' for path in tables[:1]]
        kind, items = 'folders of images', _folder_items(root, notes)
    if not items and (kinds.files or kinds.unread):
        raise RunError(kinds.refusal(root, 'a folder of images a class, and CSV files of images and classes'))
    splits, more = divide(items)
    found = {item.name for item in splits['train']}
    classes = read_names(root, 'classes.txt') if kind.startswith('CSV') else None
    classes = [name for name in classes or in_order(found) if name in found]
    for split, chosen in splits.items():
        others = {item.name for item in chosen} - set(classes)
        if others:
            raise RunError(f'{split} has images of {min(others)!r}, and train has none ({", ".join(classes)}).')
    if len(classes) < 2:
        raise RunError(f'DATA {str(root)!r} has images of {len(classes)} class(es): expected a folder a class.')
    lists = {
        split: ''.join(f'{i.path.relative_to(root).as_posix()} {classes.index(i.name)}\n' for i in chosen)
        for split, chosen in splits.items()
    }
    used = {split: [item.path for item in chosen] for split, chosen in splits.items()}
    notes = more + notes + unseen_classes(classes, splits)
    return OwnData(kind, classes, used, lists, dict.fromkeys(lists, dict(data_prefix='')), notes)


def _folder_items(root: Path, notes: list[str]) -> list[Item]:
    """Return the images in class folders, which are inside train/ and val/ or directly in ``root``."""
    folders = [path for path in sorted(root.iterdir()) if path.is_dir() and not is_hidden(path.name)]
    splits = {path: split_of(Path(path.name)) for path in folders}
    named = set(splits.values())

    def has_classes(top: Path) -> bool:
        return sum(bool(find(each, *SUFFIXES)) for each in top.iterdir() if each.is_dir()) > 1

    is_divided = 'train' in named
    if named == {'train', None}:  # a folder train among others is a class, of locomotives, unless it has classes inside
        is_divided = any(has_classes(path) for path in folders if splits[path])
        other = next((path for path in folders if not splits[path] and has_classes(path)), None)
        if is_divided and other:
            raise RunError(
                f'DATA {str(root)!r}: train and {other.name} both hold folders of images. Is train a class, or the '
                'split? Move what is not part of it.'
            )
    others = [path.name for path in folders if is_divided and not splits[path] and find(path, *SUFFIXES)]
    notes += [f'{", ".join(others)} beside train: left out'] * bool(others)
    tops: dict[Path, Any] = {path: split for path, split in splits.items() if split} if is_divided else {root: None}
    items = []
    for top, split in tops.items():
        for path in find(top, *SUFFIXES):
            if path.parent != top:
                name, *rest = path.relative_to(top).parts
                items.append(Item(path, name, split or split_of(Path(*rest[:-1]))))
    return items
