# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Read images and label images of numbers or colours, in the layouts of CamVid, Cityscapes, KITTI, VOC, CVAT and
Roboflow."""

import os
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple, Optional

from PIL import Image

from ...utils.errors import RunError
from .finding import (
    SUFFIXES,
    OwnData,
    divide,
    find,
    image_size,
    is_hidden,
    page_notes,
    read_lists,
    split_of,
    turned_notes,
    unseen_classes,
)  # fmt: skip
from .kinds import kinds_of
from .label_values import IGNORED, format_value, interpret, remap, scan, shortened

# folders, in small letters
_IMAGES = ('images', 'image', 'imgs', 'img', 'img_dir', 'jpegimages', 'leftimg8bit', 'image_2', '701_stillsraw_full')
_MASKS = tuple(
    'masks mask labels label annotations ann_dir segmentationclass gtfine semantic semantic_rgb gt '
    'labeledapproved_full groundtruth ground_truth segmentations'.split()
)
_BESIDE = re.compile(r'(.+?)[_-]?(annot|annotations?|labels?|masks?|gt)', re.IGNORECASE)  # train and trainannot
_ENDING = re.compile(r'[_-](masks?|labels?|seg|gt|L|P)\.(png|tiff?|bmp)$', re.IGNORECASE)  # both in one folder
_OF_IMAGES = ('_leftImg8bit', '_sat', '_image', '_img', '_rgb')  # endings of images
_KINDS = ('labelTrainIds', 'labelIds')  # of label images, in the order of preference


def read_masks(root: Path, names: Optional[list[str]], remapped: Path) -> OwnData:
    """Read images and their label images.

    If pixel values are not the labels 0, 1, ..., copies of the label images with such labels are written to
    ``remapped``.

    Args:
        root: Folder of the data set.
        names: Class names in the order of the values; if None, names are read from files of the data set.
        remapped: Folder for the copies.

    Raises:
        RunError: There are no label images, they do not match their images, or the meaning of their values is unclear.
    """
    notes: list[str] = []
    pairs = _all_pairs(root, notes)
    if not pairs:
        read = 'images beside masks (or labels, annotations), train beside trainannot, leftImg8bit beside gtFine'
        kinds = kinds_of(root)
        raise RunError(kinds.refusal(root, f'label images: folders {read}'))
    seen = scan([pair.mask for pair in pairs])
    classes, table = interpret(root, names, pairs[0].image, pairs[0].mask, seen, notes)
    listed, source = read_lists(root, 'Segmentation', {pair.stem for pair in pairs})
    if not listed:
        listed, _ = read_lists(root, root.name, {pair.stem for pair in pairs}, is_file_name=True)
    missing = set(listed) - {pair.stem for pair in pairs}
    if missing and source:
        raise RunError(f'{source} names {min(missing)}, of which there is no label image.')
    items = []
    for pair, values in zip(pairs, seen.values):
        split = listed.get(pair.stem) if listed else split_of(pair.image.parent.relative_to(root))
        labels = {table.get(value, IGNORED) if table else value for value in values}
        learnt = frozenset(classes[label] for label in labels if label < len(classes) and label != IGNORED)
        items.append(pair._replace(split=split, classes=learnt))
    splits, more = divide(items)
    for split in [split for split, chosen in splits.items() if not any(pair.classes for pair in chosen)]:
        if split != 'test':
            raise RunError(f'the label images of {split} have no pixel of {", ".join(classes)}.')
        notes.append(f'the {len(splits.pop(split))} label images of test have no class: val is tested on')
    notes += unseen_classes(classes, splits)
    notes += page_notes(pair.mask for pair in pairs) + turned_notes(pair.image for pair in pairs)
    settings, lists = {}, {}
    for split, chosen in splits.items():
        first = chosen[0]
        for pair in chosen:
            if (pair.images, pair.suffixes) != (first.images, first.suffixes):
                raise RunError(
                    f'{pair.image} and {first.image} are both of {split}: MMSegmentation wants one folder and ending.'
                )
            if table:
                copy = remapped / split / f'{pair.stem}.png'
                copy.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(remap(pair.mask, table, seen.coloured)).save(copy)
        folder = f'{remapped / split}/' if table else f'{first.masks.relative_to(root).as_posix()}/'
        prefix = dict(img_path=f'{first.images.relative_to(root).as_posix()}/', seg_map_path=folder)
        endings = dict(img_suffix=first.suffixes[0], seg_map_suffix='.png' if table else first.suffixes[1])
        settings[split] = dict(data_prefix=prefix, **endings)
        lists[split] = ''.join(f'{pair.stem}\n' for pair in chosen)
    if table:
        changed = {old: new for old, new in sorted(table.items()) if old != new and new != IGNORED}
        changes = shortened(f'{format_value(old)} -> {new}' for old, new in changed.items())
        notes.append(f'label images are copied to {remapped}: {changes or "one number a pixel"}')
    used = {split: [pair.image for pair in chosen] for split, chosen in splits.items()}
    return OwnData('label images', classes, used, lists, settings, more + notes)


class _Pair(NamedTuple):
    images: Path  # folder of the image
    masks: Path  # folder of the label image
    stem: str  # of both, relative to their folders
    suffixes: tuple[str, str]
    split: Optional[str] = None
    classes: frozenset = frozenset()

    @property
    def image(self) -> Path:
        return self.images / f'{self.stem}{self.suffixes[0]}'

    @property
    def mask(self) -> Path:
        return self.masks / f'{self.stem}{self.suffixes[1]}'


def _all_pairs(root: Path, notes: list[str]) -> list[_Pair]:
    """Pair images with label images, from neighbouring folders or, if there are none, from one folder."""
    pairs: list[_Pair] = []
    alone: tuple[list[Path], list[Path]] = ([], [])  # folders of images, of label images
    for top, inner, _ in sorted(os.walk(root, followlinks=True)):
        if any(map(is_hidden, Path(top).relative_to(root).parts)):
            continue
        for name in inner:
            for found, known in zip(alone, (_IMAGES, _MASKS)):
                found += [Path(top, name)] * (name.lower() in known)
        here = {name.lower(): name for name in sorted(inner)}
        images, masks = (next((here[name] for name in known if name in here), '') for known in (_IMAGES, _MASKS))
        if images and masks:
            pairs += _pairs(Path(top, images), Path(top, masks), notes)
            continue
        for name in sorted(inner):
            beside = _BESIDE.fullmatch(name)
            if beside and beside[1] in inner:
                pairs += _pairs(Path(top, beside[1]), Path(top, name), notes)
    if not pairs and list(map(len, alone)) == [1, 1]:  # leftImg8bit_trainvaltest/leftImg8bit of Cityscapes
        pairs = _pairs(alone[0][0], alone[1][0], notes)
    if not pairs:
        for folder in sorted({path.parent for path in find(root, '.png', '.tif', '.tiff', '.bmp')}):
            stems = {path.stem for path in folder.iterdir() if path.suffix.lower() in SUFFIXES}
            stems |= {stem.removesuffix(end) for stem in stems for end in _OF_IMAGES}
            ends = [(_ENDING.search(path.name), path) for path in folder.iterdir()]
            counts = Counter(end[0] for end, path in ends if end and path.name[: end.start()] in stems - {path.stem})
            plain = Counter(path.suffix for path in folder.glob('*.png') if path.with_suffix('.jpg').exists())
            for ending, _ in (counts or plain).most_common(1):
                pairs += _pairs(folder, folder, notes, ending)
    return pairs


def _pairs(images: Path, masks: Path, notes: list[str], ending: str = '') -> list[_Pair]:
    """Pair images with label images ``masks/STEM`` plus the most frequent ending (``.png``, ``_mask.png``)."""
    stems: dict[str, str] = {}
    for path in find(images, *SUFFIXES):
        stem = path.relative_to(images).with_suffix('').as_posix()
        if images == masks and path.name.endswith(ending):
            continue
        if stem in stems:
            raise RunError(f'{images / stem}{stems[stem]} and {path} have one name: of which is the label image?')
        stems[stem] = path.suffix
    for end in _OF_IMAGES:
        if stems and all(stem.endswith(end) for stem in stems):
            stems = {stem.removesuffix(end): f'{end}{suffix}' for stem, suffix in stems.items()}
    found = {path.relative_to(masks).as_posix() for path in find(masks, *SUFFIXES)}
    endings = {name[len(stem) :] for stem in list(stems)[:20] for name in found if name.startswith(stem)}
    counts = {ending: sum(f'{stem}{ending}' in found for stem in stems) for ending in sorted(endings)}
    if images == masks:
        counts = {ending: sum(f'{stem}{ending}' in found for stem in stems)}
    if not counts:
        raise RunError(f'{masks} has no label image with the name of an image of {images}.')
    best = [ending for ending in counts if counts[ending] == max(counts.values())]
    kinds = [[each for each in best if kind in each] for kind in _KINDS]
    ending, *others = next(filter(None, kinds), best)
    if others:
        raise RunError(f'{masks} has two label images of each image, *{ending} and *{others[0]}: keep one kind.')
    if ending.lower().endswith(('.jpg', '.jpeg')):
        raise RunError(f'{masks} has JPEG files, which change the numbers of pixels: expected PNG.')
    if counts[ending] < len(stems):
        notes.append(f'{len(stems) - counts[ending]} images of {images} have no label image and are left out')
    both = {stem: suffix for stem, suffix in stems.items() if f'{stem}{ending}' in found}
    pairs = [_Pair(images, masks, stem, (suffix, ending)) for stem, suffix in both.items()]
    for pair in pairs:
        size = image_size(pair.image)
        if image_size(pair.mask) != size:
            raise RunError(f'{pair.mask} has not the size of its image, {size[0]}x{size[1]}.')
    return pairs
