# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Divide labelled images into train, val and test."""

import os
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Optional

from ...utils.errors import RunError
from .csv_files import Table
from .data import Data, read_lines
from .images import SUFFIXES, check_whole, end_of
from .names import has_role_only, some, split_in
from .reading import Photo

_ENDINGS = (*SUFFIXES, '.xml', '.txt', '.json')  # of images and label files in lists
_LISTS = ('.txt', '.csv', '.tsv')
_PREFERRED = {'detection': 'Main', 'segmentation': 'Segmentation'}  # VOC's folders of lists
_LEAST_FOLDERS = 4  # that are drawn as a whole: one of fewer is more than a quarter
_Listed = tuple[dict[Path, str], list[Path]]  # splits of images by lists, and the files that list them


def divide(
    data: Data, items: list[Photo], classes: list[str], by_folder: bool = True
) -> tuple[dict[str, list[Photo]], list[str]]:
    """Group images by split.

    A single split of any name is train. Without val, a labelled test takes its place, else about a fifth of train is
    drawn. A test without labels is left out.

    Args:
        data: The data set.
        items: Labelled images. ``split`` is that of a column or the name of the label file, or None.
        classes: Class names in the order of the labels.
        by_folder: Names of folders give the split of images without one.

    Returns:
        tuple: Images by split, and notes for the user, first the source of the splits.

    Raises:
        RunError: Sources of splits contradict each other, or train or val has too few images or no labels. Also for an
            image that is broken or truncated.
    """
    for item in items:
        check_whole(item.path)
    found, source = _find_splits(data, items, by_folder)
    splits: dict[str, list[Photo]] = {}
    for item, split in zip(items, found):
        splits.setdefault(split or 'none', []).append(item)
    stray, notes = splits.pop('none', []), [f'splits by {source}'] if source else []
    if len(splits) == 1 and not stray and 'train' not in splits:
        stray = splits.popitem()[1]
    if 'train' not in splits:
        splits['train'] = stray
    elif stray:
        folders = data.folders_of(item.path for item in stray)
        notes.append(f'{len(stray)} images outside of train and val are left out: {folders}')
    copies = _copies([item for chosen in splits.values() for item in chosen])
    if 'val' not in splits and any(item.classes for item in splits.get('test', ())):
        splits['val'] = splits.pop('test')
        notes.append('no val in the data: test takes its place')
    if 'val' not in splits:
        notes.append(_draw_val(splits, copies, by_folder=data.options.task != 'classification'))
    if len(splits['train']) < 2 or not splits['val']:
        raise RunError(
            f'{len(splits["train"])} image(s) to train on and {len(splits["val"])} of val: 2 are the least. Name the '
            'splits by folders or lists train, val, test, or give --train and --val.'
        )
    for split in [split for split, chosen in splits.items() if not any(item.classes for item in chosen)]:
        if split != 'test':
            raise RunError(f'none of the {len(splits[split])} images of {split} has a label of {some(classes)}.')
        notes.append(f'the {len(splits.pop(split))} images of test have no labels: val is tested on')
    notes += _notes_on_unused(data, items) + _notes_on_copies(splits, copies) + _class_table(classes, splits)
    return {split: splits[split] for split in ('train', 'val', 'test') if split in splits}, notes


def _notes_on_unused(data: Data, items: list[Photo]) -> list[str]:
    """Return notes on images without labels, and on masks that belong to none of ``items``."""
    labelled, notes = {path for item in items for path in (item.path, item.file)}, list[str]()
    left = [path for path in data.images if path not in labelled]
    if data.options.task == 'segmentation':
        masks = data.pictures.separate_masks(data.images)[1].keys() & {*left}
        left = [path for path in left if path not in masks]
        notes += [f'{len(masks)} masks are not used: {data.folders_of(sorted(masks))}'] if masks else []
    return notes + ([f'{len(left)} images without labels are left out: {data.folders_of(left)}'] if left else [])


def _find_splits(data: Data, items: list[Photo], by_folder: bool) -> tuple[list[Optional[str]], str]:
    """Return the split of each image, or None, and the name of the source for messages. The first source with a split
    decides: ``--train`` and ``--val``, columns and names of label files, lists of images (:data:`_SOURCES`), names of
    folders. Names of folders count only if ``by_folder``."""
    given = [(split, path) for split, path in (('train', data.options.train), ('val', data.options.val)) if path]
    if given:
        listed, files = _resolve(data, items, given)
        for _, path in given:
            if path not in files:
                raise RunError(f'{path} has no labelled image.')
        return _filled(items, listed, [None] * len(items)), ' and '.join(f'--{split}' for split, _ in given)
    folders = [
        data.splits.of(data.rel(item.path).parent) or data.splits.of(data.rel(item.file).parent) if by_folder else None
        for item in items
    ]
    if any(item.split for item in items):
        return [item.split or split for item, split in zip(items, folders)], 'columns or names of files and folders'
    readings = (source(data, items) for source in _SOURCES)
    listed, files = next((reading for reading in readings if reading), ({}, []))
    if not files:
        return folders, 'names of folders' if any(folders) else ''
    found, names = _filled(items, listed, folders), some(map(data.name, files))
    for item, split, folder in zip(items, found, folders if len({*folders}) > 1 else ()):
        is_both = 'trainval' in data.name(item.path.parent).lower()
        if item.path in listed and folder and folder != split and not is_both:
            raise RunError(
                f'{item.path} is of {split} in {names}, and in a folder of {folder}: give --train and --val, each a '
                'list or a folder.'
            )
    return found, f'the lists {names}'


def _filled(items: list[Photo], listed: dict[Path, str], folders: list[Optional[str]]) -> list[Optional[str]]:
    """Return the split of each image by ``listed``, else by its folder, else train. An image in no list gets None if
    the split of its folder has a list."""
    known = {*listed.values()}
    rest = [folder or 'train' for folder in folders]
    return [listed.get(item.path, None if own in known else own) for item, own in zip(items, rest)]


def _resolve(data: Data, items: list[Photo], sources: Iterable[tuple[str, Path]]) -> _Listed:
    """Read the splits of images from ``sources``: pairs of a split and its folder, label file or list of images."""
    listed, files, labelled = dict[Path, str](), list[Path](), {item.path for item in items}
    for split, source in sources:
        images = [item.path for item in items if source in (item.file, *item.path.parents, *item.file.parents)]
        lost, inside = 0, source.resolve()
        if not images and source.is_file():
            images, lost = _of_list(data, source, labelled, split)
        elif not images:  # of an absolute path in data.yaml, by another link
            images = [path for path in labelled if inside in path.resolve().parents]
        if not images:
            continue
        data.lost.update({source: lost} if lost else {})
        files.append(source)
        for image in images:
            known = listed.setdefault(image, 'train' if split == 'trainval' else split)
            if known != split and 'train' in (known, split) and split != 'trainval':
                raise RunError(
                    f'{image} is of {known} and of {split} in two of {some(map(str, files))}: give --train and --val, '
                    'each a list or a folder.'
                )
    data.used.update(path for path in files if path.is_file())
    return listed, files


def _of_list(data: Data, path: Path, labelled: set[Path], split: str) -> tuple[list[Path], int]:
    """Return the labelled images in a list file, and the number of lines that name no image.

    A line is a path or a file name of an image or its label file, with or without suffix, and may have more words.

    Raises:
        RunError: Half of the lines of a list of images, or more, name no image, or no line names a labelled image.
            Lists of ``--train`` and ``--val`` are accepted. A list of test may have no image, or no labels.
    """
    lines, found, lost = read_lines(path), list[Path](), list[str]()
    for line in lines:
        words = (line, *line.split()[:1], *re.split('[,;]', line)[:1])
        stems = [word.rpartition('.')[0] for word in words if word.lower().endswith(_ENDINGS)]
        known = [(name, data.pictures.named(name)) for name in dict.fromkeys((*words, *stems))]
        fitting = ((name, [image for image in images if image in labelled]) for name, images in known)
        name, images = next(((name, images) for name, images in fitting if name and images), ('', []))
        if len(images) > 1:
            parts = Path(name.replace('\\', '/')).with_suffix('').parts
            exact = [image for image in images if image.with_suffix('').parts[-len(parts) :] == parts]
            images = data.pictures.nearest(path, exact or images)
        found += images
        lost += [] if any(images for _, images in known) else [line]
    if path.suffix.lower() != '.txt' and lost and lost[0] == lines[0]:  # the header of a table
        lines, lost = lines[1:], lost[1:]
    is_list = len(lost) < len(lines) or bool(lines) and _is_file_name(lines[0], labelled)
    if is_list and path not in (data.options.train, data.options.val):
        remedy = 'correct or remove it, or give --train and --val.'
        if 2 * len(lost) >= len(lines) and (split != 'test' or found):
            said = f'{len(lost)} of {len(lines)} lines name no image, the first is {lost[0]!r}'
            raise RunError(f'{path}: {said}: {remedy}')
        if not found and split != 'test':
            raise RunError(f'{path}: its lines name no labelled image, the first is {lines[0]!r}: {remedy}')
    return found, len(lost)


def _is_file_name(line: str, labelled: Iterable[Path]) -> bool:
    """Return True if a line of text looks like the name of an image file: by its ending, or a stem like other images'.
    A number may follow, as in VOC's lists of one class. Prose, class names and boxes of YOLO are no such names."""
    first, *more = line.split()
    if line.lower().endswith(_ENDINGS) or first.lower().endswith(_ENDINGS):
        return True
    return len(more) < 2 and re.sub(r'\d+', '0', first) in {re.sub(r'\d+', '0', image.stem) for image in labelled}


def _of_settings(data: Data, items: list[Photo]) -> Optional[_Listed]:
    """Read the folders or lists under ``train``, ``val`` and ``test`` of a data.yaml, if any is on this machine."""
    file, content = data.settings
    if file is None:
        return None
    sources, lost = list[tuple[str, Path]](), list[str]()
    for split in ('train', 'val', 'test'):
        given = content.get(split)
        if split != 'train' and given == content.get('train'):
            continue
        for entry in given if isinstance(given, list) else [given] if given and isinstance(given, str) else []:
            name = str(entry).replace('\\', '/')
            inside = Path(*(part for part in Path(name).parts if part not in ('..', '.', '/')))
            bases = (data.root, data.root / str(content.get('path') or ''), file.parent)
            paths = [Path(os.path.normpath(base / each)) for base in bases for each in (name, inside, inside.name)]
            paths = [path for path in paths if path.exists() and path.resolve() != data.root.resolve()]
            sources += [(split, path) for path in paths[:1]]
            lost += [] if paths or split == 'test' else [f'{split}: {entry}']
    if lost and sources:
        raise RunError(f'{file} says {lost[0]!r}, which is not there, and the others are.')
    listed, files = _resolve(data, items, sources)
    return (listed, files) if {'val', 'test'} & {*listed.values()} else None


def _of_numbers(data: Data, items: list[Photo]) -> Optional[_Listed]:
    """Read the splits of CUB-200: ``train_test_split.txt`` has 1 for train, ``images.txt`` the paths."""
    path = next((path for path in data.files if path.name == 'train_test_split.txt'), None)
    if not path or not path.with_name('images.txt').exists():
        return None
    files = path, path.with_name('images.txt')
    pairs = [[line.split(maxsplit=1) for line in read_lines(file)] for file in files]
    if any(len(pair) != 2 for file in pairs for pair in file):
        return None
    flags, names = map(dict, pairs)
    known = [number for number, name in names.items() if number in flags and data.pictures.named(name)]
    pictures = data.pictures.find(path, [names[number] for number in known])
    data.used.update(files)
    return {p: 'train' if flags[number] == '1' else 'val' for p, number in zip(pictures, known)}, [path]


def _of_tables(data: Data, items: list[Photo]) -> Optional[_Listed]:
    """Read the splits from a CSV table that has images, their splits and nothing else."""
    for path in [path for path in data.files if path.suffix.lower() in ('.csv', '.tsv') and path not in data.used]:
        table = None
        with suppress(RunError):
            table = Table(path)
        if table and table.image and table.split and not table.box and not table.unused():
            data.used.add(path)
            pictures = data.pictures.find(path, [row[table.image] for row in table.rows])
            splits = zip(pictures, map(table.split_of, table.rows))
            return {picture: split for picture, split in splits if split}, [path]
    return None


def _of_texts(data: Data, items: list[Photo]) -> Optional[_Listed]:
    """Read the splits from text or CSV files with the name of a split. VOC's lists for the task are preferred.
    ``trainval`` takes the place of a missing ``train``."""
    by_folder: dict[Path, dict[str, list[Path]]] = {}
    texts = [path for path in data.files if path.suffix.lower() in _LISTS and path not in data.used]
    named = {path: split_in(path.stem) for path in texts}
    if not any(named.values()):  # car_train.txt
        named = {path: data.splits.of_file(path.stem) for path in texts}
    for path, split in named.items():
        if split:
            key = 'trainval' if 'trainval' in path.stem.lower() else split
            by_folder.setdefault(path.parent, {}).setdefault(key, []).append(path)
    name = _PREFERRED.get(data.options.task)
    preferred = {folder: lists for folder, lists in by_folder.items() if folder.name == name}
    sources = list[tuple[str, Path]]()
    for lists in (preferred or by_folder).values():
        order = ('train', 'val', 'test', *([] if 'train' in lists else ['trainval']))
        sources += [(split, file) for split in order for file in lists.get(split, ())]
    listed, files = _resolve(data, items, sources)
    return (listed, files) if listed else None


_SOURCES = (_of_settings, _of_numbers, _of_tables, _of_texts)


def _draw_val(splits: dict[str, list[Photo]], copies: list[list[Photo]], by_folder: bool) -> str:
    """Move images drawn from train to val, whole groups together; return a note.

    A group is that of a column, copies of one image, or with ``by_folder`` a folder of several (a patient, a video).
    """
    items = splits['train']
    alike = {item.path: str(several[0].path) for several in copies for item in several}
    # a column's, or the name before Roboflow's augmentation
    groups = [item.group or item.path.stem.rpartition('.rf.')[0] or None for item in items]
    if by_folder and not any(groups):
        groups = _folders_of(items)
    for found in (groups, [group or alike.get(item.path) for group, item in zip(groups, items)]):
        groups = found if len(set(found)) > 1 else [None] * len(items)  # one group divides nothing
    chosen = _draw(items, groups)
    whole = len({groups[i] for i in chosen} - {None})
    splits['val'] = [item for i, item in enumerate(items) if i in chosen]
    splits['train'] = [item for i, item in enumerate(items) if i not in chosen]
    drawn = f'{len(chosen)} images were drawn from train for it{f" as {whole} whole groups" if whole else ""}'
    return f'no val in the data, and no test takes its place: {drawn}'


def _folders_of(items: Sequence[Photo]) -> list[Optional[str]]:
    """Return the folder of each image, or None for all: there are few folders, or one alone has all of a class."""
    folders = [None if has_role_only(item.path.parent.name) else str(item.path.parent) for item in items]
    of_class = Counter(name for _, name in {(folder, name) for folder, i in zip(folders, items) for name in i.classes})
    is_clear = len(items) > len({*folders}) >= _LEAST_FOLDERS and min(of_class.values(), default=0) > 1
    return folders if is_clear else [None] * len(items)


def _draw(items: Sequence[Photo], groups: Sequence[Optional[str]]) -> set[int]:
    """Return the indices of about a fifth of the images of each class, drawn at random, rare classes first. At least
    one image of each class is left. Images of a group (a patient, a photograph before its augmentation, copies) stay
    together; None is a group of one image."""
    units: dict[object, list[int]] = {}
    for i, group in enumerate(groups):
        units.setdefault(group or i, []).append(i)
    members: dict[Optional[str], list[object]] = {}
    classes = {unit: {name for i in indices for name in items[i].classes} for unit, indices in units.items()}
    for unit, names in classes.items():
        for each in names or (None,):
            members.setdefault(each, []).append(unit)
    left = {name: len(found) for name, found in members.items()}
    chosen: set[object] = set()
    draw = random.Random(0)
    for name, found in sorted(members.items(), key=lambda item: (len(item[1]), str(item[0]))):
        wanted = max(name is not None, round(len(found) / 5)) - sum(unit in chosen for unit in found)
        for unit in draw.sample(found, len(found)):
            if wanted > 0 and unit not in chosen and all(left[own] > 1 for own in classes[unit]):
                chosen.add(unit)
                wanted -= 1
                for own in classes[unit]:
                    left[own] -= 1
    chosen = chosen or set(draw.sample(list(units), int(len(units) > 2)))
    return {i for unit in chosen for i in units[unit]}


def _copies(items: list[Photo]) -> list[list[Photo]]:
    """Return the groups of images with the same bytes; whole files are read only if size and end are equal."""
    groups = [items]
    for key in (lambda path: path.stat().st_size, end_of, lambda path: sha256(path.read_bytes()).digest()):
        alike: dict[tuple, list[Photo]] = {}
        for number, several in enumerate(groups):
            for item in several:
                alike.setdefault((number, key(item.path)), []).append(item)
        groups = [several for several in alike.values() if len(several) > 1]
    return groups


def _notes_on_copies(splits: dict[str, list[Photo]], copies: list[list[Photo]]) -> list[str]:
    """Return notes on images of val that are copies of training images, and on other repeated images."""
    of_split = {item.path: split for split, chosen in splits.items() for item in chosen}
    places = [{of_split.get(item.path): item.path for item in several} for several in copies]
    shared = [place for place in places if {'train', 'val'} <= place.keys()]
    notes = []
    if shared:
        val, train = shared[0]['val'], shared[0]['train']
        notes.append(f'{len(shared)} images of val are copies of training images, as {val} of {train}: remove them')
    repeated = [several for several, place in zip(copies, places) if any(place) and place not in shared]
    if repeated:
        first, second = (item.path for item in repeated[0][:2])
        notes.append(f'{len(repeated)} images are there several times, as {first} and {second}: remove the copies')
    return notes


def _class_table(classes: Sequence[str], splits: dict[str, list[Photo]]) -> list[str]:
    """Return the lines of a table with the images of each class in train and val, and notes on missing classes."""
    counts = {split: Counter(name for item in splits[split] for name in item.classes) for split in ('train', 'val')}
    width = max(map(len, [*classes, 'class']))
    lines = [f'{"class":{width}}  train    val  (images)']
    lines += [f'{name:{width}} {counts["train"][name]:6} {counts["val"][name]:6}' for name in classes[:50]]
    lines += [f'and {len(classes) - 50} more classes'] if len(classes) > 50 else []
    alike = some(name for name in classes if [*map(str.lower, classes)].count(name.lower()) > 1)
    lines += [f'classes differ by capital letters alone: {alike}; correct the labels, if they are one'] if alike else []
    nowhere = [name for name in classes if not any(count[name] for count in counts.values())]
    lines += [f'no image of {some(nowhere)}: nothing of these classes is learnt'] if nowhere else []
    for split, end in (('train', 'val counts them, and they cannot be learnt'), ('val', 'not measured')):
        lacking = [name for name in classes if not counts[split][name] and name not in nowhere]
        lines += [f'no image of {some(lacking)} in {split}: {end}'] if lacking else []
    return lines
