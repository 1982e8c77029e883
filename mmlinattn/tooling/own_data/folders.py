# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Read images with one class each, from class folders or from CSV files."""

import os
import re
from collections import Counter
from pathlib import Path
from typing import Optional

from ...utils.errors import RunError
from .csv_files import Table, names_by_number, read_class_lists, read_class_tables
from .data import Data, OwnData, Source
from .formats import UNKNOWN, described_kind, recognise_all, refusal
from .names import composed, has_role_only, plain, some
from .reading import Photo, name_table
from .splits import divide

_FOLDERS = 'folders of images'
_Found = dict[Path, tuple[Optional[str], tuple[str, ...]]]  # split and folders of each image


def read_classes(data: Data) -> OwnData:
    """Read images with one class each, from CSV files or class folders.

    Labels are written to list files. MMPretrain would number the folders of each split by itself, and a split may lack
    a class.

    Raises:
        RunError: There are fewer than two classes, train lacks one, labels are numbers, or tables and folders differ.
    """
    data.need_images()
    kind, items, notes = _claim(data, recognise_all(data))
    has_lists = kind != _FOLDERS
    listed, numbered = (data.names('classes.txt'), names_by_number(data)) if has_lists else (data.names(), {})
    order, names = name_table({item.label for item in items}, listed, numbered)
    items = [item._replace(label=names[item.label]) for item in items]
    _refuse_numbers(data, [item.label for item in items])
    occurring = {item.label for item in items}
    order = [name for name in order if name in occurring]
    splits, more = divide(data, items, order, has_lists)
    found = {item.label for item in splits['train']}
    classes = [name for name in order if name in found]
    for split, chosen in splits.items():
        others = {item.label for item in chosen} - found
        if others:
            raise RunError(f'{split} has images of {min(others)!r}, and train has none ({some(classes)}).')
    if len(classes) < 2:
        raise data.error(f' has images of {len(classes)} class(es): expected a folder for each.')
    lists = {
        split: ''.join(f'{data.name(item.path)} {classes.index(item.label)}\n' for item in chosen)
        for split, chosen in splits.items()
    }
    return OwnData(kind, classes, splits, lists, dict.fromkeys(lists, dict(data_prefix='')), more + notes)


def _refuse_numbers(data: Data, labels: list[str]) -> None:
    """Raise a RunError if the labels are measured numbers, or if each image has its own label."""
    classes = set(labels)
    given = f': the {len(classes)} labels ({some(sorted(classes), 3)})'
    has_fractions = any(re.fullmatch(r'-?\d*\.\d*[1-9]\d*', name) for name in classes)
    if has_fractions and 2 * len(classes) > len(labels):  # coins of 0.50 have many images of each
        raise data.error(f'{given} are numbers, not classes: regression is not learnt.')
    if len(classes) == len(labels) > 2:
        raise data.error(f'{given} are of one image each: these are names of images, or each class needs more images.')


def _claim(data: Data, kinds: dict[str, list[Source]]) -> tuple[str, list[Photo], list[str]]:
    """Read images with their labels from CSV files, class folders or text lists.

    Class folders of another split are added to the images of a CSV file. Text lists are read if there are neither.

    Args:
        data (Data): Files of the data set.
        kinds (dict[str, list[Source]]): Label files by format, as of :func:`~.formats.recognise_all`.

    Returns:
        tuple[str, list[Photo], list[str]]: Name of the format, images, and notes for the user.
    """
    tables = _tables(kinds)
    chosen, notes = data.options.labels, list[str]()
    for source in kinds.get(UNKNOWN, ()):
        if isinstance(source.content, Table) and source.content.file_columns and source.content.label:
            columns = ' and '.join(source.content.file_columns)
            raise RunError(f'{source.path}: {columns} both name files: name the column of images image.')
        if isinstance(source.content, Table) and source.content.image and len(source.content.flags) > 2 and not chosen:
            raise RunError(
                f'{source.path}: {some(source.content.flags, 3)} are several classes of one image, which are not '
                'learnt: write a CSV file with filename,label; if they are none, give --labels DIR of the folders.'
            )
    labelled = [{path for row in t.rows for path in data.pictures.named(row[t.image])} for t in tables]
    named = [table for table, images in zip(tables, labelled) if images]
    folders, error = list[Photo](), None
    if not chosen or chosen.is_dir() and not tables:
        try:
            folders = _folder_items(data, notes, set[Path]().union(*labelled))
        except RunError as raised:
            error = raised
    if len({item.label for item in folders}) == 1 and kinds:
        folders = []
    if tables := named or ([] if folders or error else tables):  # a table of numbers and names names no image
        data.used.update(table.path for table in tables)
        items, more = read_class_tables(tables, data)
        kind, items = _joined(items, folders, data.name(tables[0].path))
        return kind, items, more + notes
    if not folders and (items := read_class_lists(data)):
        return 'lists of images and classes', _named_by_folders(items), notes
    if error:
        others = [sources[0] for kind, sources in kinds.items() if kind not in (UNKNOWN, 'CSV of classes')]
        beside = [f' {described_kind(data, source)}.' for source in others]
        raise RunError(f'{error}{"".join(beside[-1:])}')
    if not folders:
        raise refusal(data, kinds)
    return _FOLDERS, folders, notes


def _named_by_folders(items: list[Photo]) -> list[Photo]:
    """Replace numbers as labels by the names of class folders, if each number is in one class folder. ImageNet has
    lists with numbers, class folders (``train/n01440764/``), and all images of val in one folder."""
    labels: dict[Path, set[str]] = {}
    for item in items:
        labels.setdefault(item.path.parent, set()).add(item.label)
    pairs = {(label, folder.name) for folder, found in labels.items() for label in found if len(found) == 1}
    names = dict(pairs)
    is_one_each = len(pairs) == len(names) == len({*names.values()})
    is_named = is_one_each and names.keys() == set[str]().union(*labels.values())
    return [item._replace(label=names[item.label]) for item in items] if is_named else items


def _tables(kinds: dict[str, list[Source]]) -> list[Table]:
    """Return the CSV tables with one class for each image; a table of boxes counts if no image has two rows."""
    boxes = [source.content for source in kinds.get('CSV of boxes', ())]
    boxes = [table for table in boxes if table.label and table.has_one_row_an_image and not table.is_plain]
    classes = [source.content for source in kinds.get('CSV of classes', ())]
    return [table for table in classes if not table.box or table.label and table.has_one_row_an_image] + boxes


def _joined(items: list[Photo], folders: list[Photo], table: str) -> tuple[str, list[Photo]]:
    """Return the name of the format and the images: those of a CSV file, and of class folders of another split.

    Args:
        items: Images of the CSV file.
        folders: Images of class folders.
        table: Name of the CSV file, for messages.

    Raises:
        RunError: An image has two classes, or images of the same split are in class folders alone.
    """
    classes = {item.path: item.label for item in items}
    splits = [{item.split for item in found} for found in (items, folders)]
    rest = {item.path for item in folders} - classes.keys()
    if folders and None not in splits[0] | splits[1] and not splits[0] & splits[1] and len(rest) == len(folders):
        return 'CSV of classes and folders of images', items + folders
    for item in folders:
        if classes.get(item.path, item.label) != item.label:
            raise RunError(
                f'{item.path} is of the class {classes[item.path]!r} in {table}, and in a folder of '
                f'{item.label!r}: give --labels FILE, or --labels {item.path.parent.parent} for the folders.'
            )
    if rest:
        raise RunError(
            f'{table} and folders of classes both have labels, and {len(rest)} images are in folders alone: give '
            '--labels FILE, or --labels DIR for the folders.'
        )
    return 'CSV of classes', items


def _folder_items(data: Data, notes: list[str], labelled: set[Path]) -> list[Photo]:
    """Return the images in class folders such as ``train/cat/`` and ``cat/train/``, with their class and split.

    Masks among the images, and folders without a label, are left out, and ``notes`` get a line about each, in place.

    Args:
        data: The data set. Its ``images`` lose the masks.
        notes: Lines for the user.
        labelled: Images that a CSV file labels. In a folder of a split they need no class folder.

    Raises:
        RunError: Classes and splits cannot be told apart, or other images of a split are in no class folder.
    """
    masks = data.pictures.masks_among(data.images)
    notes += [f'{len(masks)} masks of images are left out, as {data.name(min(masks))}'] if masks else []
    data.images = [path for path in data.images if path not in masks]
    given = [path for path in (data.options.train, data.options.val) if path and path.is_dir()]
    items = list[Photo]()
    for top in given or [data.root]:
        found = _in_folders(data, top)
        if not given and any(split for split, _ in found.values()):
            found = _inside_splits(data, found, notes, labelled)
        given_names = {*map(composed, data.options.classes or ())}
        found = _of_level(given_names, found)
        _refuse_nested(top, {names for _, names in found.values() if not {*names[:1]} & given_names})
        for path, (split, names) in found.items():
            group = '/'.join(names) if names[1:] and names[0] in given_names else None  # of a patient, a plant
            items += [Photo(path, path, split, group, composed(names[0]))] if names else []
    labels = {item.label for item in items}  # _unlabeled of FiftyOne, no_label of CVAT
    unlabelled = {name for name in labels if name[0] == '_' or plain(name) in ('unlabeled', 'unlabelled', 'nolabel')}
    notes += [f'folders of images without label are left out: {some(sorted(unlabelled))}'] if unlabelled else []
    return [item for item in items if item.label not in unlabelled]


def _of_level(classes: set[str], found: _Found) -> _Found:
    """Cut the folder names of each image so that the first is one of the given ``classes``, if any is. If one depth
    alone fits all images, it is taken. Otherwise an image in folders of two classes raises a RunError."""
    depths = {
        path: {i for i, name in enumerate(names) if composed(name) in classes} for path, (_, names) in found.items()
    }
    common = set.intersection(*depths.values()) if depths else set[int]()
    levels: _Found = {}
    for path, (split, names) in found.items():
        fitting = common if len(common) == 1 else depths[path]
        if len(fitting) > 1:
            raise RunError(f'{path} is in folders of several classes of --classes ({", ".join(names)}): move it.')
        levels[path] = split, tuple(map(composed, names[min(fitting, default=0) :]))
    return levels


def _in_folders(data: Data, top: Path) -> _Found:
    """Return the split of each image below ``top``, and the names of its other folders that may be classes. A folder
    names a split if it holds other folders or lies beside another split. Generic names (``images``) are left out, and
    so are folders that contain all others."""
    images = [path for path in data.images if top in path.parents]
    folders = {folder for path in images for folder in path.parents if top in folder.parents}
    inner: dict[Path, set[str]] = {}  # names of the folders in a folder
    for folder in folders:
        inner.setdefault(folder.parent, set()).add(folder.name)
    full, split_of = {path.parent for path in images}, data.splits.of_folder
    splits, names = dict[Path, Optional[str]](), dict[Path, str]()
    for folder in folders:
        beside, name = inner[folder.parent], folder.name
        names_split = len({*map(split_of, beside)} - {None}) > 1 or folder in inner
        splits[folder] = split_of(name) if names_split else None
        is_around = folder in inner and folder.parent not in full or name == folder.parent.name
        if not splits[folder] and not (len(beside) == 1 and is_around) and not all(map(has_role_only, beside)):
            names[folder] = name
    found: _Found = {}
    for path in images:
        of_path = (splits[folder] for folder in path.parents if splits.get(folder))
        found[path] = next(of_path, None), tuple(names[each] for each in reversed(path.parents) if each in names)
    around = len(os.path.commonprefix([names[:-1] for _, names in found.values() if names]))
    return {path: (split, names[around:]) for path, (split, names) in found.items()}


def _inside_splits(data: Data, found: _Found, notes: list[str], labelled: set[Path]) -> _Found:
    """Return the images of ``found`` inside folders of splits; ``notes`` get a line about folders beside the splits. A
    folder that may be a split or a class raises a RunError. So does an image in no class folder, unless it is of test
    or a CSV file labels it (``labelled``)."""
    inside: _Found = {path: (split, names) for path, (split, names) in found.items() if split}
    splits = {split for split, _ in inside.values()}
    first = next(split for split in ('train', 'val', 'test') if split in splits)
    # folders beside those of splits or of classes that may be splits or classes too
    classes = sorted({names[0] for _, names in inside.values() if len(names) == 1})
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


def _refuse_nested(top: Path, names: set[tuple[str, ...]]) -> None:
    """Raise a RunError if a class folder holds several folders in place of images. ``names`` are the folder names of
    each image below ``top``."""
    inner: dict[str, set[str]] = {}
    for first, second, *_ in (each for each in names if len(each) > 1):
        inner.setdefault(first, set()).add(second)
    for name, folders in inner.items():
        if len(folders) > 1 and (name,) not in names:
            same = sorted(other for other, others in inner.items() if others == folders)
            nested = f'{some(same, 3)} hold the same folders' if len(same) > 1 else f'{name} holds folders'
            raise RunError(
                f'{top}: {nested} ({some(sorted(folders), 4)}), nested: which are the classes? Give --train DIR and '
                '--val DIR if the upper ones are splits, --images DIR for one of them, or --classes NAME ..., the '
                'names of one level.'
            )
