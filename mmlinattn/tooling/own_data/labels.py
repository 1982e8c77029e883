# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Label images, and folders of images, a class each."""

import os
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
from PIL import Image

from ...utils.errors import RunError
from .finding import SUFFIXES, OwnData, divide, find, image_size, is_hidden, read_lists, read_names, split_of

# folders, in small letters
_IMAGES = ('images', 'image', 'imgs', 'img', 'img_dir', 'jpegimages')
_MASKS = ('masks', 'mask', 'labels', 'annotations', 'ann_dir', 'segmentationclass')
IGNORED = 255  # which MMSegmentation's losses and metrics leave out


def read_folders(root: Path) -> OwnData:
    """Images in a folder a class, in train/ and val/ or undivided.

    Lists say the labels: read from folders, they would follow the folders of each split, of which one may lack a class.

    Raises:
        RunError: There are less than two folders, or a class is in val alone.
    """
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
    tops = {path: split for path, split in splits.items() if split} if is_divided else {root: None}
    items: list[tuple[Any, Optional[str]]] = []
    for top, split in tops.items():
        for path in find(top, *SUFFIXES):
            if path.parent != top:
                name, *rest = path.relative_to(top).parts
                items.append(((path, name), split or split_of(Path(*rest[:-1]))))
    divided, notes = divide(items, group=lambda item: item[1])
    notes += [f'{", ".join(others)} beside train: left out'] * bool(others)
    classes = sorted({name for _, name in divided['train']})
    for split, chosen in divided.items():
        names = {name for _, name in chosen}
        if names - set(classes):
            raise RunError(
                f'{split} has images of {min(names - set(classes))!r}, and train has none ({", ".join(classes)}).'
            )
        notes += [f'no image of {name!r} in {split}' for name in classes if name not in names]
    if len(classes) < 2:
        raise RunError(f'DATA {str(root)!r} has images of {len(classes)} class(es); it has to have a folder a class.')
    lists = {
        split: ''.join(f'{path.relative_to(root).as_posix()} {classes.index(name)}\n' for path, name in chosen)
        for split, chosen in divided.items()
    }
    used = {split: [path for path, _ in chosen] for split, chosen in divided.items()}
    return OwnData('folders of images', classes, used, lists, dict.fromkeys(lists, dict(data_prefix='')), notes)


def read_masks(root: Path, names: Optional[list[str]], remapped: Path) -> OwnData:
    """Images and label images of their names. Of label images whose values are no labels, copies go to ``remapped``.

    Raises:
        RunError: There are none, they do not fit their images, or what their values mean is not clear.
    """
    pairs: list[_Pair] = []
    notes: list[str] = []
    for top, inner, _ in sorted(os.walk(root, followlinks=True)):
        if any(map(is_hidden, Path(top).relative_to(root).parts)):
            continue
        here = {name.lower(): name for name in sorted(inner)}
        images, masks = (next((here[name] for name in known if name in here), '') for known in (_IMAGES, _MASKS))
        if images and masks:
            pairs += _pairs(Path(top, images), Path(top, masks), notes)
    if not pairs:
        raise RunError(f'DATA {str(root)!r} has no folder images beside masks (or labels, annotations).')
    values, is_plain = _values([pair.mask for pair in pairs])
    names = names or read_names(root, 'classes.txt', 'labelmap.txt')
    classes, table = meaning(values, names)
    if table or not is_plain:
        table = table or {value: value for value in values}
        said = ', '.join(f'{old} -> {new}' for old, new in table.items() if old != new) or 'one number a pixel'
        notes.append(f'label images are copied to {remapped}: {said}')
    elif names:
        shown = [f'{value} is {classes[value]}' for value in values if value != IGNORED]
        notes.append(f'label {", ".join(shown[:12])}{", ..." * (len(shown) > 12)}')
    if not table and IGNORED in values:
        notes.append(f'pixels of value {IGNORED} are ignored')
    if not names:
        notes.append(f'the classes have no names: give --classes, or write {root / "classes.txt"}, a name a line')
    listed, source = read_lists(root, 'Segmentation', {pair.stem for pair in pairs})
    missing = set(listed) - {pair.stem for pair in pairs}
    if missing:
        raise RunError(f'{source} names {min(missing)}, of which there is no label image.')
    named = [listed.get(pair.stem) if listed else split_of(pair.image.parent.relative_to(root)) for pair in pairs]
    splits, more = divide(list(zip(pairs, named)))
    settings, lists = {}, {}
    for split, chosen in splits.items():
        first = chosen[0]
        folder = remapped / split if table else first.masks
        for pair in chosen:
            if (pair.images, pair.suffixes) != (first.images, first.suffixes):
                raise RunError(
                    f'{pair.image} and {first.image} are both of {split}: MMSegmentation wants one folder and ending.'
                )
            if table:
                lookup = np.full(65536, IGNORED, np.uint8)
                lookup[list(table)] = list(table.values())
                copy = folder / f'{pair.stem}{pair.suffixes[1]}'
                copy.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(lookup[read_mask(pair.mask)[0]]).save(copy)
        prefix = dict(img_path=f'{first.images}/', seg_map_path=f'{folder}/')
        settings[split] = dict(data_prefix=prefix, img_suffix=first.suffixes[0], seg_map_suffix=first.suffixes[1])
        lists[split] = ''.join(f'{pair.stem}\n' for pair in chosen)
    used = {split: [pair.image for pair in chosen] for split, chosen in splits.items()}
    return OwnData('label images', classes, used, lists, settings, notes + more)


class _Pair(NamedTuple):
    images: Path  # the folder
    masks: Path
    stem: str  # of both, relative to their folders
    suffixes: tuple[str, str]

    @property
    def image(self) -> Path:
        return self.images / f'{self.stem}{self.suffixes[0]}'

    @property
    def mask(self) -> Path:
        return self.masks / f'{self.stem}{self.suffixes[1]}'


def _pairs(images: Path, masks: Path, notes: list[str]) -> list[_Pair]:
    """Images with label images ``masks/STEM`` and the ending that most of them have (``.png``, ``_mask.png``)."""
    stems: dict[str, str] = {}
    for path in find(images, *SUFFIXES):
        stem = path.relative_to(images).with_suffix('').as_posix()
        if stem in stems:
            raise RunError(f'{images / stem}{stems[stem]} and {path} have one name: of which is the label image?')
        stems[stem] = path.suffix
    found = {path.relative_to(masks).as_posix() for path in find(masks, *SUFFIXES)}
    endings = {name[len(stem) :] for stem in list(stems)[:20] for name in found if name.startswith(stem)}
    counts = {ending: sum(f'{stem}{ending}' in found for stem in stems) for ending in sorted(endings)}
    if not counts:
        raise RunError(f'{masks} has no label image with the name of an image of {images}.')
    ending, *others = [ending for ending in counts if counts[ending] == max(counts.values())]
    if others:
        raise RunError(f'{masks} has two label images of each image, *{ending} and *{others[0]}: keep one kind.')
    if ending.lower().endswith(('.jpg', '.jpeg')):
        raise RunError(f'{masks} has JPEG files, which change the numbers of pixels: label images have to be PNG.')
    if counts[ending] < len(stems):
        notes.append(f'{len(stems) - counts[ending]} images of {images} have no label image and are left out')
    both = {stem: suffix for stem, suffix in stems.items() if f'{stem}{ending}' in found}
    pairs = [_Pair(images, masks, stem, (suffix, ending)) for stem, suffix in both.items()]
    for pair in pairs:
        size = image_size(pair.image)
        if image_size(pair.mask) != size:
            raise RunError(f'{pair.mask} has not the size of its image, {size[0]}x{size[1]}.')
    return pairs


def read_mask(path: Path) -> tuple[np.ndarray, bool]:
    """The numbers of a label image (H, W), and whether MMSegmentation reads them so."""
    with Image.open(path) as image:
        pixels, mode = np.asarray(image), image.mode
    if pixels.dtype.kind == 'f' and not (pixels == np.floor(pixels)).all():
        raise RunError(f'{path} has values with fractions, or NaN: labels are whole numbers from 0.')
    if mode == 'LA':
        pixels = pixels[..., 0]
    if pixels.ndim == 3:
        if (pixels[..., :3] != pixels[..., :1]).any():
            raise RunError(f'{path} has colours: a label image has one number a pixel, that of its class, from 0.')
        pixels = pixels[..., 0]
    if pixels.min() < 0 or pixels.max() > 65535:
        raise RunError(f'{path} has values from {pixels.min()} to {pixels.max()}: labels are 0 to 254.')
    return pixels.astype(np.uint16), mode in ('L', 'P', '1')


def _values(masks: list[Path]) -> tuple[list[int], bool]:
    """All values of the label images, and whether MMSegmentation reads all of them."""
    values: set[int] = set()
    is_plain = True
    for path in masks:
        pixels, plain = read_mask(path)
        here, is_plain = set(np.unique(pixels).tolist()), is_plain and plain
        if len(values | here) > 256:
            raise RunError(f'{path}: more than 256 values; was it resized or saved with loss?')
        values |= here
    return sorted(values), is_plain


def meaning(values: list[int], names: Optional[list[str]]) -> tuple[list[str], dict[int, int]]:
    """Class names, and value -> label where values are no labels.

    Args:
        values: Those of the label images, ascending.
        names: Of the classes; None where nobody gave any.

    Raises:
        RunError: Values and names do not fit.
    """
    labels = [value for value in values if value != IGNORED]
    said = ', '.join(map(str, values[:12])) + ', ...' * (len(values) > 12)
    if len(values) < 2:
        raise RunError(f'the label images have the value {said} alone: there is nothing to tell apart.')
    if len(values) == 2 and values[0] == 0 and values[1] > 1 and len(names or 'ab') == 2:
        return names or ['background', 'foreground'], {0: 0, values[1]: 1}
    if names is None:
        if labels[-1] < 2 * len(labels):
            return [f'class_{label}' for label in range(labels[-1] + 1)], {}
        raise RunError(f'the label images have the values {said}: give --classes NAME ..., a name a value.')
    if labels[-1] < len(names):
        return names, {}
    for known in (labels, values):
        if len(known) == len(names):
            return names, {**{IGNORED: IGNORED}, **{value: label for label, value in enumerate(known)}}
    raise RunError(
        f'the label images have the values {said}, and {len(names)} classes have names ({", ".join(names)}): name '
        'every value in their order, the background too.'
    )
