# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Read YOLO and KITTI text files, one for each image."""

import re
from pathlib import Path
from typing import Optional

import numpy as np
import yaml

from ...utils.errors import RunError, described
from .finding import SUFFIXES, find, image_size, read_lines, read_lists, read_names, split_of
from .objects import Found, Object, Photo, Pictures, from_points, marks_of


def read_yolo(files: list[Path], root: Path, images: list[Path]) -> Found:
    """Read every image with its text file. The split comes from data.yaml, or else from the folder.

    Raises:
        RunError: A line is not a box or outline of a known class, or there are no class names.
    """
    file, content = _yolo_settings(root)
    names = content.get('names')
    if isinstance(names, dict):
        if sorted(names) != sorted(map(str, range(len(names)))):
            raise RunError(f'{file}: names have the numbers [{", ".join(names)}]: expected 0 to {len(names) - 1}.')
        names = [names[str(number)] for number in range(len(names))]
    elif names is not None and not isinstance(names, list):
        raise RunError(f'{file}: names={names!r}: expected a list, or numbers and their names.')
    classes = list(map(str, names or ())) or read_names(root, 'classes.txt', 'labels/classes.txt', 'obj.names')
    if not classes:
        raise RunError(
            f'DATA {str(root)!r} has YOLO text files, and no names of their classes: write classes.txt, a name a line, '
            'or data.yaml with names: [...].'
        )
    listed = _yolo_splits(root, content, images)
    photos = []
    for path in images:
        split = listed.get(path) if listed else split_of(path.parent.relative_to(root))
        photos.append(_yolo_photo(root, path, classes, 'kpt_shape' in content)._replace(split=split))
    notes = _unpaired(root, images)
    outlines = [item.outline for photo in photos for item in photo.objects]
    if outlines and all(outline and len(outline[0]) == 8 for outline in outlines):
        notes.append('all outlines have four points, as turned boxes have: they are learnt as masks')
    return photos, classes, notes


def _yolo_settings(root: Path) -> tuple[Optional[Path], dict]:
    for path in sorted([*root.glob('*.yaml'), *root.glob('*.yml')]):
        try:  # names are texts: YAML would read yes, no, on and 1.0 otherwise
            content = yaml.load(path.read_text(encoding='utf-8-sig'), Loader=yaml.BaseLoader)  # noqa: S506
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise RunError(f'{path} cannot be read: {described(error)}') from error
        if isinstance(content, dict) and content.get('names'):
            return path, content
    return None, {}


def _yolo_splits(root: Path, content: dict, images: list[Path]) -> dict[Path, str]:
    """Return the split of images listed under ``train``, ``val`` and ``test`` in data.yaml, as folders or lists of
    files.

    Folders that do not exist on this machine are skipped.
    """
    known, listed, lost = {path.resolve(): path for path in images}, dict[Path, str](), []
    for split in ('train', 'val', 'test'):
        given = content.get(split)
        for entry in given if isinstance(given, list) else [given] if given and isinstance(given, str) else []:
            inside = Path(*(part for part in Path(str(entry)).parts if part not in ('..', '.', '/')))
            paths = [root / str(content.get('path') or '') / str(entry), root / inside]
            source = next((path for path in paths if path.exists() and path.resolve() != root.resolve()), None)
            if split != 'train' and given == content.get('train'):
                continue
            if source is None:
                lost += [] if split == 'test' else [f'{split}: {entry}']
                continue
            if source.is_file():
                found = [root / line for line in read_lines(source)]
                missing = [path for path in found if path.resolve() not in known]
                if missing:
                    raise RunError(f'{source} names the image {missing[0]}, which is not there.')
            else:
                found = find(source, *SUFFIXES)
            listed.update({known[path.resolve()]: split for path in found if path.resolve() in known})
    if lost and listed:
        raise RunError(f'{root}: the YAML file says {lost[0]!r}, which is not there, and the others are.')
    return listed if {'val', 'test'} & set(listed.values()) else {}


def _yolo_file(root: Path, path: Path) -> Path:
    parts = list(path.relative_to(root).parts)
    at = next((i for i in reversed(range(len(parts))) if parts[i] in ('images', 'Images')), None)
    if at is not None:
        parts[at] = 'labels' if parts[at] == 'images' else 'Labels'
    return root.joinpath(*parts).with_suffix('.txt')


def _unpaired(root: Path, images: list[Path]) -> list[str]:
    """Return notes on images without text file and on text files without image."""
    files = {_yolo_file(root, path) for path in images}
    folders = {file.parent for file in files}
    there = {path for path in find(root, '.txt') if path.parent in folders}
    lone = [path for path in sorted(there - files) if re.match(r'\d+ [\d.]', path.read_text(errors='replace'))]
    empty = len(files - there)
    notes = [f'{empty} of {len(files)} images have no text file: they are background'] * bool(empty)
    return [*notes, *(f'{len(lone)} text files have no image, as {path}: left out' for path in lone[:1])]


def _yolo_photo(root: Path, path: Path, classes: list[str], has_points: bool = False) -> Photo:
    """Read an image and its text file, if there is one, with boxes or with outlines of three or more points.

    Args:
        root: Folder of the data set.
        path: The image.
        classes: Class names.
        has_points: Key points follow each box, and are skipped.
    """
    file, size = _yolo_file(root, path), image_size(path)
    objects: list[Object] = []
    for number, line in enumerate(read_lines(file) if file.is_file() else [], 1):
        label, *values = line.split()
        try:
            numbers = [float(value) for value in values]
            name = classes[int(label)] if int(label) >= 0 else ''
        except (ValueError, IndexError):
            raise RunError(f'{file}, line {number}: {line[:60]!r}; classes are 0 to {len(classes) - 1}.') from None
        numbers = numbers[:4] if has_points else numbers
        if not name or not (len(numbers) == 4 or len(numbers) >= 6 and len(numbers) % 2 == 0):
            raise RunError(
                f'{file}, line {number}: {line[:60]!r} is no class and x y width height, or x y of a polygon'
                f'{"; a fifth number is the score of a prediction" * (len(numbers) == 5)}.'
            )
        if not all(-0.01 <= number <= 1.01 for number in numbers):
            raise RunError(f'{file}, line {number}: {line[:60]!r}; numbers are shares of the image, from 0 to 1.')
        if len(numbers) == 4:
            x, y, w, h = numbers
            numbers = [x - w / 2, y - h / 2, x + w / 2, y + h / 2]
        marks = {'keypoints'} if has_points else ()
        is_outline = len(numbers) > 4
        objects.append(from_points(name, [np.reshape(numbers, (-1, 2)) * size], marks, is_outline))
    return Photo(path, size, objects)


def read_kitti(files: list[Path], root: Path, images: list[Path]) -> Found:
    """Read KITTI's label files: type, truncated, occluded, alpha, left, top, right, bottom, then seven fields of 3D.

    Raises:
        RunError: A line does not have KITTI's fields, or a file has no image.
    """
    pictures, photos = Pictures(root, images), list[Photo]()
    lists, _ = read_lists(root, 'ImageSets', {path.stem for path in files})
    for path in files:
        lines = [line.split() for line in read_lines(path)]
        if not path.parent.name.startswith('label') and not (lines and len(lines[0]) in (15, 16)):
            continue  # lists and remarks
        objects = []
        for number, (kind, *values) in enumerate(lines, 1):
            try:
                truncated, occluded, _, *box = map(float, values[:7])
                item = from_points(kind, [np.reshape(box, (2, 2))], is_outline=False)
            except ValueError:
                raise RunError(f'{path}, line {number}: {kind} is not followed by the 14 numbers of KITTI.') from None
            marks = marks_of(dict(truncated=truncated > 0, occluded=occluded > 0, score=len(values) > 14))
            objects.append(item._replace(marks=marks))
        picture = pictures.find(path, f'{path.parent.parent.name}/image_2/{path.stem}')
        split = lists.get(path.stem) if lists else split_of(path.relative_to(root).parent)
        photos.append(Photo(picture, image_size(picture), objects, split))
    classes = sorted({str(item.name) for photo in photos for item in photo.objects})
    return photos, read_names(root, 'classes.txt') or classes, ['of KITTI the boxes are learnt, nothing in 3D']
