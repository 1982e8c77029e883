# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Read YOLO and KITTI text files, one for each image."""

from pathlib import Path
from typing import Optional

import numpy as np
import yaml

from ...utils.errors import RunError, described
from .data import Data, read_lines
from .images import image_size, is_mask
from .kinds import Source
from .names import some
from .objects import Claim, Object, Photo, from_points, in_names, is_right_angled, marks_of


def read_yolo(sources: list[Source], data: Data) -> Claim:
    """Read text files with their images. Images without text file beside others with one are background.

    The split comes from data.yaml or darknet's .data file, if they name lists or folders.

    Raises:
        RunError: A line is not a box or polygon of a known class, or there are no class names.
    """
    file, content = _settings(data)
    named, listed = _names(file, content) or [], data.names('classes.txt', 'labels.txt', '.names', '.labels') or []
    if not data.options.classes and any(a != b for a, b in zip(named, listed)):
        raise RunError(
            f'{file} names the classes {some(named)}, and a list beside (classes.txt, labels.txt or .names) '
            f'{some(listed)}: keep one, or give --classes NAME ...'
        )
    classes = data.options.classes or named or listed
    if not classes:
        raise RunError(
            f'DATA {str(data.root)!r} has YOLO text files, and no names of their classes: write classes.txt, a name a '
            'line, or data.yaml with names: [...], or give --classes NAME ...'
        )
    files = [path for path, *_ in sources]
    owners, keys = data.pictures.owners(files), set(map(data.pictures.key, files))
    folders = {path.parent for path in owners}
    splits = _splits(data, file, content)
    background = [
        path
        for path in data.images
        if path not in owners and (path in splits or path.parent in folders or data.pictures.key(path) in keys)
    ]
    masks = [
        path for path in background if path.with_suffix('') in {p.with_suffix('') for p in owners} and is_mask(path)
    ]
    background = [path for path in background if path not in masks]
    has_points = 'kpt_shape' in content
    rows: list[list[float]] = []
    photos = [_photo(path, owners.get(path), classes, has_points, rows) for path in [*owners, *background]]
    photos = [photo._replace(split=splits.get(photo.path)) for photo in photos]
    if _have_points(rows):
        raise RunError(
            f'{sources[0].path} and others: the first four numbers of each line are a box with further numbers, as key '
            'points or scores are: write kpt_shape: [number, 2 or 3] into data.yaml, or leave the scores out.'
        )
    notes = [f'{len(background)} of {len(photos)} images have no text file: they are background'] if background else []
    notes += [f'{len(masks)} masks beside images of their name are left out, as {masks[0].name}'] if masks else []
    outlines = [item.outline[0] for photo in photos for item in photo.objects if item.outline]
    if outlines and all(map(is_right_angled, outlines)):
        photos = [photo._replace(objects=list(map(_as_rotated, photo.objects))) for photo in photos]
    elif outlines and all(len(outline) == 8 for outline in outlines):
        notes.append('all polygons have four points, as rotated boxes have: they are learnt as masks')
    return Claim('YOLO text files', photos, classes, notes, 'centre', 'shares')


def _as_rotated(item: Object) -> Object:
    return item._replace(outline=None, marks=item.marks | {'rotated'}) if item.outline else item


def _have_points(rows: list[list[float]]) -> bool:
    """Return True if all lines have a box, and as many points in it, or two further numbers (a score and a track)."""
    if len({len(row) for row in rows}) != 1:
        return False
    table = np.array(rows)
    if table.shape[1] == 6:
        ends = np.hstack([table[:, :2] - table[:, 2:4] / 2, table[:, :2] + table[:, 2:4] / 2])
        return bool(((ends > -0.01) & (ends < 1.01)).all())
    for size in (2, 3):
        if (table.shape[1] - 4) % size:
            continue
        points = table[:, 4:].reshape(len(rows), -1, size)[..., :2]
        inside = np.abs(points - table[:, None, :2]) <= table[:, None, 2:4] / 2 + 0.01
        if (inside.all(-1) | (points == 0).all(-1)).all():
            return True
    return False


def _settings(data: Data) -> tuple[Optional[Path], dict]:
    """Return the file with ``names`` or darknet's lists, and its content.

    Raises:
        RunError: Several YAML files have other names.
    """
    found: dict[Path, dict] = {}
    for path in [path for path in data.files if path.suffix.lower() in ('.yaml', '.yml')]:
        try:  # names are texts: YAML would read yes, no, on and 1.0 otherwise
            content = yaml.load(path.read_text(encoding='utf-8-sig'), Loader=yaml.BaseLoader)  # noqa: S506
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise RunError(f'{path} cannot be read: {described(error)}') from error
        if isinstance(content, dict) and content.get('names'):
            found[path] = content
    for path, other in found.items():
        first, content = next(iter(found.items()))
        if other != content:
            raise RunError(f'{first} and {path} have other names or splits: keep one YAML file.')
    data.used.update(found)
    if found:
        return first, content
    for path in [path for path in data.files if path.suffix.lower() == '.data']:
        data.used.add(path)
        pairs = {key.strip(): value.strip() for key, _, value in (line.partition('=') for line in read_lines(path))}
        return path, {'train': pairs.get('train'), 'val': pairs.get('valid')}
    return None, {}


def _names(file: Optional[Path], content: dict) -> Optional[list[str]]:
    names = content.get('names')
    if isinstance(names, dict):
        if sorted(names) != sorted(map(str, range(len(names)))):
            raise RunError(f'{file}: names have the numbers [{", ".join(names)}]: expected 0 to {len(names) - 1}.')
        return [str(names[str(number)]) for number in range(len(names))]
    if names is not None and not isinstance(names, list):
        raise RunError(f'{file}: names={names!r}: expected a list, or numbers and their names.')
    return list(map(str, names or ())) or None


def _splits(data: Data, file: Optional[Path], content: dict) -> dict[Path, str]:
    """Return the split of images by the folders or lists of files under ``train``, ``val`` and ``test``.

    Folders that do not exist on this machine are skipped, if all of them.
    """
    listed, lost = dict[Path, str](), []
    for split in ('train', 'val', 'test'):
        given = content.get(split)
        if split != 'train' and given == content.get('train'):
            continue
        for entry in given if isinstance(given, list) else [given] if given and isinstance(given, str) else []:
            name = str(entry).replace('\\', '/')
            inside = Path(*(part for part in Path(name).parts if part not in ('..', '.', '/')))
            bases = (data.root, data.root / str(content.get('path') or ''), *([file.parent] if file else []))
            paths = [base / each for base in bases for each in (name, inside, inside.name)]
            source = next((path for path in paths if path.exists() and path.resolve() != data.root.resolve()), None)
            if source is None:
                lost += [] if split == 'test' else [f'{split}: {entry}']
            elif source.is_file():
                lines = read_lines(source)
                listed.update(dict.fromkeys(data.pictures.find(source, lines), split))
                data.used.add(source)
            else:
                inner = source.resolve()
                listed.update({path: split for path in data.images if inner in path.resolve().parents})
    if lost and listed:
        raise RunError(f'{file} says {lost[0]!r}, which is not there, and the others are.')
    return listed if {'val', 'test'} & set(listed.values()) else {}


def _photo(path: Path, file: Optional[Path], classes: list[str], has_points: bool, rows: list) -> Photo:
    """Read an image and its text file, if there is one, with boxes or with polygons of three or more points.

    Args:
        path: The image.
        file: The text file.
        classes: Class names.
        has_points: Key points follow each box, and are skipped.
        rows: Numbers of polygons, extended in place.
    """
    size, objects = image_size(path), list[Object]()
    for number, line in enumerate(read_lines(file) if file else [], 1):
        label, *values = line.split()
        try:
            numbers = [float(value) for value in values]
            name = classes[int(float(label))] if float(label) >= 0 and float(label) % 1 == 0 else ''
        except (ValueError, IndexError, OverflowError):
            raise RunError(f'{file}, line {number}: {line[:60]!r}; classes are 0 to {len(classes) - 1}.') from None
        numbers = numbers[:4] if has_points else numbers
        count = len(numbers)
        if not name or not (count == 4 or count >= 6 and count % 2 == 0):
            score = (
                '; the last number is the score of a prediction (--save-conf), or key points follow'
                if count % 2
                else ''
            )
            raise RunError(
                f'{file}, line {number}: {line[:60]!r} is no class and x y width height, or x y of a polygon{score}.'
            )
        if not np.isfinite(numbers).all():
            raise RunError(f'{file}, line {number}: {line[:60]!r}; expected finite shares of the image.')
        marks = frozenset({'keypoints'} if has_points else ())
        if count == 4:
            objects.append(Object(name, tuple(numbers), None, marks, is_raw=True))
            continue
        if not all(-0.01 <= each <= 1.01 for each in numbers):
            raise RunError(f'{file}, line {number}: {line[:60]!r}; numbers are shares of the image, from 0 to 1.')
        rows.append(numbers)
        objects.append(from_points(name, [np.reshape(numbers, (-1, 2)) * size], marks))
    return Photo(path, size, objects, None, file or path)


def read_kitti(sources: list[Source], data: Data) -> Claim:
    """Read KITTI's label files: type, truncated, occluded, alpha, left, top, right, bottom, then seven fields of 3D.

    Raises:
        RunError: A line does not have KITTI's fields, or a file has no image.
    """
    photos, owners = list[Photo](), data.pictures.owners([path for path, *_ in sources])
    for picture, path in owners.items():
        objects = []
        for number, (kind, *values) in enumerate(map(str.split, read_lines(path)), 1):
            try:
                truncated, occluded, _, *box = map(float, values[:7])
                left, top, right, bottom = box
            except ValueError:
                raise RunError(f'{path}, line {number}: {kind} is not followed by the 14 numbers of KITTI.') from None
            marks = marks_of(dict(truncated=truncated > 0, occluded=occluded > 0, score=len(values) > 14))
            objects.append(Object(kind, (left, top, right, bottom), None, marks, is_raw=True))
        photos.append(Photo(picture, image_size(picture), objects, None, path))
    photos, classes = in_names(photos, data.names('classes.txt'))
    return Claim(
        'KITTI text files', photos, classes, ['of KITTI the boxes are learnt, nothing in 3D'], 'corners', 'pixels'
    )
