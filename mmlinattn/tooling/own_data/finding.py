# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Find the images of a data set, their splits and their pixel format."""

import os
import random
import re
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Optional

import cv2
import numpy as np
from PIL import Image, ImageSequence

from ...engine.data.files import oriented_size
from ...utils.errors import RunError, described

SUFFIXES = ('.jpg', '.jpeg', '.jfif', '.png', '.bmp', '.tif', '.tiff', '.webp')
NOT_READ = ('.gif', '.heic', '.heif', '.avif')
_ORDER = ('trainval', 'train', 'val', 'test')
_SPLIT_FILE = re.compile(r'(trainval|train|val|test)(?:ing|id|idation)?\.txt', re.IGNORECASE)  # not bird_train.txt
_SEVERAL_PAGES = ('.tif', '.tiff', '.webp')
_NODATA, _SUBFILE, _ORIENTATION = 42113, 254, 274  # TIFF and EXIF tags
_NUM_READ = 50  # images that are decoded to infer their format


class OwnData(NamedTuple):
    """Data set of the user, as read by one of the readers."""

    kind: str  # format, for messages
    classes: list[str]  # in the order of the labels
    images: dict[str, list[Path]]  # by split: 'train', 'val', perhaps 'test'
    annotations: dict[str, str]  # text of the annotation file by split
    settings: dict[str, dict]  # further settings of the data set by split
    notes: list[str]  # for the user, a line each
    masks: bool = False  # objects have outlines
    densest: int = 0  # most objects in an image
    ignores: bool = False  # some objects are neither learnt nor counted


def is_hidden(name: str) -> bool:
    return name.startswith('.') or name == '__MACOSX'


def find(root: Path, *suffixes: str) -> list[Path]:
    """Return all files below a folder with one of the suffixes, sorted by path.

    Links are followed, except for loops. Hidden folders and those of macOS are skipped.
    """

    def is_loop(path: Path) -> bool:
        return path.is_symlink() and path.resolve() in {parent.resolve() for parent in path.parents}

    found = []
    for folder, inner, files in os.walk(root, followlinks=True):
        inner[:] = [name for name in inner if not is_hidden(name) and not is_loop(Path(folder, name))]
        found += [Path(folder, name) for name in files if name.lower().endswith(suffixes) and not name.startswith('.')]
    return sorted(found)


def split_of(path: Path) -> Optional[str]:
    """Return 'train', 'val' or 'test' by the last part of a path that names a split, or None."""
    names = (
        re.search(r'(?:^|[^a-z])(train|val|test)(?:ing|id|idation|set)?(?![a-z])', part.lower())
        for part in path.parts[::-1]
    )
    return next((found[1] for found in names if found), None)


def read_lists(
    root: Path, name: str, stems: Container[str], is_file_name: bool = False
) -> tuple[dict[str, str], Optional[Path]]:
    """Read VOC's lists of splits, ``ImageSets/NAME/{trainval,train,val,test}.txt``.

    Args:
        root: Folder of the data set; lists may be in any folder below.
        name: Folder of the lists: ``'Main'`` for boxes, ``'Segmentation'`` for label images.
        stems: Names of images without suffix. Of other lines, only the first word is used.
        is_file_name: Lines are file names or paths; unknown images are skipped.

    Returns:
        tuple[dict[str, str], Path | None]: Split by image name, and the folder of the lists; ({}, None) without lists.
    """
    texts = [(_SPLIT_FILE.fullmatch(path.name), path) for path in find(root, '.txt') if path.parent.name == name]
    listed = sorted((_ORDER.index(match[1].lower()), path) for match, path in texts if match)
    lists: dict[str, str] = {}
    for number, path in listed:
        # trainval takes the place of a missing train
        if number or not any(other == 1 and train.parent == path.parent for other, train in listed):
            named = (line if line in stems else line.split()[0] for line in read_lines(path))
            if is_file_name:
                named = (stem for stem in (Path(line.split()[0]).stem for line in read_lines(path)) if stem in stems)
            lists.update(dict.fromkeys(named, _ORDER[max(number, 1)]))
    return lists, listed[0][1].parent if listed else None


def divide(items: list) -> tuple[dict[str, list], list[str]]:
    """Group images by split.

    If there is no val, test is used as val. If both are missing, a fifth of train is drawn as val.

    Args:
        items: Images with the attributes ``split`` (None if unknown) and ``classes``.

    Returns:
        tuple[dict[str, list], list[str]]: Images by split, and notes for the user.

    Raises:
        RunError: There are fewer than two training images, or no validation image.
    """
    splits: dict[str, list] = {}
    for item in items:
        splits.setdefault(item.split or 'none', []).append(item)
    stray, notes = splits.pop('none', []), []
    if 'train' not in splits:
        splits['train'] = stray
    elif stray:
        notes.append(f'{len(stray)} images outside of train and val are left out')
    if 'val' not in splits and 'test' in splits:
        splits['val'] = splits.pop('test')
        notes.append('no val in the data: test takes its place')
    if 'val' not in splits:
        chosen = _draw([set(item.classes) for item in splits['train']])
        splits['val'] = [item for i, item in enumerate(splits['train']) if i in chosen]
        splits['train'] = [item for i, item in enumerate(splits['train']) if i not in chosen]
        notes.append(f'no val in the data: {len(chosen)} images were drawn from train for it')
    if len(splits['train']) < 2 or not splits['val']:
        raise RunError(
            f'{len(splits["train"])} image(s) to train on and {len(splits["val"])} of val: 2 are the least. Splits are '
            'named by folders or files with train, val or test in their names, classes by folders.'
        )
    return {split: splits[split] for split in ('train', 'val', 'test') if split in splits}, notes


def _draw(classes: list[set]) -> set[int]:
    """Draw about a fifth of the images of each class, rare classes first; at least one image of each class is left."""
    members: dict[Optional[str], list[int]] = {}
    for i, names in enumerate(classes):
        for name in names or {None}:
            members.setdefault(name, []).append(i)
    left = {name: len(indices) for name, indices in members.items()}
    chosen: set[int] = set()
    draw = random.Random(0)
    for name, indices in sorted(members.items(), key=lambda item: (len(item[1]), str(item[0]))):
        wanted = max(name is not None, round(len(indices) / 5)) - sum(i in chosen for i in indices)
        for i in draw.sample(indices, len(indices)):
            if wanted > 0 and i not in chosen and all(left[each] > 1 for each in classes[i]):
                chosen.add(i)
                wanted -= 1
                for each in classes[i]:
                    left[each] -= 1
    return chosen or set(draw.sample(range(len(classes)), int(len(classes) > 2)))


def unseen_classes(classes: Sequence[str], splits: dict[str, list]) -> list[str]:
    """Return notes on classes without images in train or val; ``splits`` is the result of :func:`divide`."""
    seen = {split: {name for item in items for name in item.classes} for split, items in splits.items()}
    nowhere = [name for name in classes if not any(name in names for names in seen.values())]
    notes = [f'no image of {_some(nowhere)}: nothing of these classes is learnt'] * bool(nowhere)
    for split, end in (('train', 'val counts them, and they cannot be learnt'), ('val', 'not measured')):
        lacking = [name for name in classes if name not in seen.get(split, ()) and name not in nowhere]
        notes += [f'no image of {_some(lacking)} in {split}: {end}'] * bool(lacking)
    return notes


def image_size(path: Path) -> tuple[int, int]:
    """Return width and height of an image from its header, after applying its EXIF orientation."""
    try:
        return oriented_size(path)
    except Exception as error:  # Pillow's plugins raise anything at a broken file
        raise RunError(f'{path} is no image that can be read: {described(error)}') from error


def _some(names: list[str]) -> str:
    return ', '.join(names[:12]) + f' and {len(names) - 12} more' * (len(names) > 12)


def turned_notes(paths: Iterable[Path]) -> list[str]:
    """Return a note with the number of images that their EXIF data rotates or mirrors; empty if there are none."""
    turned = [path for path in paths if path.suffix.lower() in ('.jpg', '.jpeg', '.jfif') and _orientation(path) > 1]
    meaning = 'labels are taken as drawn on the turned image, as loaders turn it'
    return [f'{len(turned)} images are turned by EXIF, as {turned[0].name}: {meaning}'] if turned else []


def _orientation(path: Path) -> int:
    with suppress(Exception), Image.open(path) as image:
        return int(image.getexif().get(_ORIENTATION, 1))
    return 1


def page_notes(paths: Iterable[Path]) -> list[str]:
    """Return notes on parts of image files that loaders do not read: pages after the first, and the nodata value."""
    pages: list[Path] = []
    nodata: dict[str, list[Path]] = {}
    for path in paths:
        if path.suffix.lower() not in _SEVERAL_PAGES:
            continue
        with suppress(Exception), Image.open(path) as image:
            tags = getattr(image, 'tag_v2', {})
            value = str(tags.get(_NODATA, '')).strip(' \0')
            count = 0
            for page in ImageSequence.Iterator(image):
                count += not getattr(page, 'tag_v2', {}).get(_SUBFILE, 0) & 5  # smaller copies and masks of GeoTIFF
            pages += [path] * (count > 1)
            if value:
                nodata.setdefault(value, []).append(path)
    notes = [f'{len(pages)} files have several pages, as {path.name}: the first is read' for path in pages[:1]]
    for value, files in nodata.items():
        notes.append(f'{len(files)} files say that {value} means no data, as {files[0].name}: it is read as a value')
    return notes


class ImageFormat(NamedTuple):
    """Median size and channels of images; mean and std, or None if the images use ImageNet's."""

    width: int
    height: int
    channels: int
    mean: Optional[list[float]]
    std: Optional[list[float]]
    notes: list[str]


def image_format(paths: list[Path], channels: Optional[int] = None) -> ImageFormat:
    """Infer the image format from a sample. 8-bit images, also grey ones, are read as RGB, to fit the released weights.

    Args:
        paths: The images.
        channels: Channels of 8-bit images; None infers them.

    Raises:
        RunError: An image cannot be read, or the images differ in channels or dtype.
    """
    found = []
    for path in paths[:: -(-len(paths) // _NUM_READ)]:
        image = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
        if image is None:
            raise RunError(f'{path} is no image that OpenCV can read, which takes up to four channels.')
        image = image[..., None] if image.ndim == 2 else image
        is_opaque = image.shape[2] == 4 and image.dtype == np.uint8 and bool((image[..., 3] == 255).all())
        values = image.reshape(-1, image.shape[2])[:: max(1, image[..., 0].size // 4096)]
        found.append((path, image_size(path), values, is_opaque))
    width, height = (int(side) for side in np.median([size for _, size, *_ in found], axis=0))
    # drop a fourth channel of 255 everywhere in all images
    drops = channels != 4 and all(is_opaque for *_, values, is_opaque in found if values.shape[1] == 4)
    pixels = [values[:, :3] if drops else values for *_, values, _ in found]
    kinds = {(values.shape[1], str(values.dtype)): path for (path, *_), values in reversed([*zip(found, pixels)])}
    allowed = (1, 3) if channels is None else (1, 3, 4)
    if channels in (None, 3) and all(count in allowed and dtype == 'uint8' for count, dtype in kinds):
        grey = any(count == 1 for count, _ in kinds)
        notes = ['grey images are read as three equal channels (--channels 1: as one, without weights)'] * grey
        return ImageFormat(width, height, 3, None, None, notes)
    listed = ', '.join(f'{path.name} {count} channel(s) of {dtype}' for (count, dtype), path in kinds.items())
    if len(kinds) > 1:
        raise RunError(f'the images are of several forms ({listed}): make them one.')
    count = next(iter(kinds))[0]
    if channels not in (None, count):
        raise RunError(f'--channels {channels}: the images have others ({listed}).')
    values = np.concatenate(pixels).astype(np.float64)
    if not np.isfinite(values).all():
        raise RunError(f'the images ({listed}) have values that are NaN or infinite.')
    mean, std = values.mean(0).round(3).tolist(), np.maximum(values.std(0), 1e-3).round(3).tolist()
    notes = [f'{listed}: with their own mean and std, without released weights']
    return ImageFormat(width, height, count, mean, std, notes)


def read_lines(path: Path) -> list[str]:
    """Return the stripped, non-empty lines of a text file.

    Raises:
        RunError: The file cannot be read as UTF-8 text.
    """
    try:
        return list(filter(None, map(str.strip, path.read_text(encoding='utf-8-sig').splitlines())))
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f'{path} cannot be read as text of UTF-8: {described(error)}') from error


def read_names(root: Path, *files: str) -> Optional[list[str]]:
    """Return the class names in the first existing file, or None. Each line has a name, perhaps after its number.

    In CVAT's ``labelmap.txt`` a name ends at the colon, and lines may be comments.
    """
    for path in (root / file for file in files):
        if path.is_file():
            lines = read_lines(path)
            if path.name == 'labelmap.txt':
                return [line.split(':')[0] for line in lines if not line.startswith('#')]
            numbered = [re.match(r'(\d+)[:,\s]\s*(.+)', line) for line in lines]
            if all(found and int(found[1]) == i for i, found in enumerate(numbered)):
                return [found[2] for found in numbered if found]
            return lines
    return None
