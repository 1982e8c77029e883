# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Read images and segmentation masks of numbers or colours, in the layouts of CamVid, Cityscapes, KITTI, VOC, CVAT and
Roboflow."""

import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import NamedTuple, Optional

from PIL import Image

from ...utils.errors import RunError
from .data import Data, Example, OwnData
from .formats import recognise_all, refusal
from .images import file_notes, image_size, is_mask
from .mask_values import IGNORED, format_value, interpret, remap, scan
from .names import MASK_WORDS, some
from .splits import divide

# folders, in small letters
_IMAGES = ('images', 'image', 'imgs', 'img', 'img_dir', 'jpegimages', 'leftimg8bit', 'image_2', '701_stillsraw_full')
_MASKS = tuple(
    'masks mask labels label annotations ann_dir segmentationclass segmentationclasspng gtfine semantic '
    'semantic_rgb gt labeledapproved_full groundtruth ground_truth segmentations'.split()
)
_BESIDE = re.compile(r'(.+?)[_-]?(annot|annotations?|labels?|masks?|gt)', re.IGNORECASE)  # train and trainannot
_ENDING = re.compile(rf'{MASK_WORDS}\.(png|tiff?|bmp)$', re.IGNORECASE)  # both in one folder
_OF_IMAGES = ('_leftImg8bit', '_sat', '_image', '_img', '_rgb')  # endings of images
_KINDS = ('labelTrainIds', 'labelIds')  # of masks, in the order of preference
# masks of objects, parts and previews beside those of classes
_OTHERS = re.compile(r'instance|object|panoptic|_parts|polygon|_color|_colour|confidence', re.IGNORECASE)


class _Pair(NamedTuple):
    images: Path  # folder of the image
    masks: Path  # folder of the mask
    stem: str  # of both, relative to their folders
    suffixes: tuple[str, str]
    split: Optional[str] = None
    classes: frozenset = frozenset()
    group: None = None

    @property
    def path(self) -> Path:
        return self.images / f'{self.stem}{self.suffixes[0]}'

    @property
    def file(self) -> Path:
        return self.masks / f'{self.stem}{self.suffixes[1]}'


def read_masks(data: Data, remapped: Path) -> OwnData:
    """Read images and their segmentation masks.

    If pixel values are not the labels 0, 1, ..., copies of the masks with such labels are written to ``remapped``.

    Raises:
        RunError: There are no masks, they do not match their images, or the meaning of their values is unclear.
    """
    notes: list[str] = []
    pairs = _all_pairs(data)
    seen = scan([pair.file for pair in pairs])
    classes, table = interpret(data, pairs[0].path, pairs[0].file, seen, notes)
    items = []
    for pair, values in zip(pairs, seen.values):
        labels = {table.get(value, IGNORED) for value in values}
        items.append(pair._replace(classes=frozenset(classes[label] for label in labels if label < len(classes))))
    splits, more = divide(data, items, 'segmentation', classes)
    notes += file_notes(pair.file for pair in pairs)
    changed = {value: label for value, label in sorted(table.items()) if value != label and value in seen.pixels}
    is_copied, settings, lists = bool(changed) or not seen.is_plain, {}, {}
    for split, chosen in splits.items():
        first = chosen[0]
        for pair in chosen:
            if (pair.images, pair.suffixes) != (first.images, first.suffixes):
                raise RunError(
                    f'{pair.path} and {first.path} are both of {split}: MMSegmentation wants one folder and ending.'
                )
            if is_copied:
                copy = remapped / split / f'{pair.stem}.png'
                copy.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(remap(pair.file, table, seen.coloured)).save(copy)
        folder = remapped / split if is_copied else data.name(first.masks)
        prefix = dict(img_path=f'{data.name(first.images)}/', seg_map_path=f'{folder}/')
        endings = dict(img_suffix=first.suffixes[0], seg_map_suffix='.png' if is_copied else first.suffixes[1])
        settings[split] = dict(data_prefix=prefix, **endings)
        lists[split] = ''.join(f'{pair.stem}\n' for pair in chosen)
    if is_copied:
        changes = some(f'{format_value(old)} -> {new}' for old, new in changed.items() if new != IGNORED)
        notes.append(f'masks are copied to {remapped}: {changes or "one number per pixel"}')
    used = {split: [pair.path for pair in chosen] for split, chosen in splits.items()}
    drawn = [Example(pair.path, label_map=partial(remap, pair.file, table, seen.coloured)) for pair in splits['train']]
    return OwnData('segmentation masks', classes, used, lists, settings, more + notes, drawn)


def _all_pairs(data: Data) -> list[_Pair]:
    """Pair images with masks: of ``--images`` and ``--labels``, of neighbouring folders, or of one folder.

    Raises:
        RunError: No folder of masks is known by its name or beside its images, or two folders of masks fit.
    """
    given = data.options
    if given.images and given.labels and given.labels.is_dir():
        data.images = Data(data.root).images  # those of --labels too
        return _pairs(data, given.images, given.labels)
    data.need_images()
    folders = {folder for path in data.images for folder in data.rel(path).parents}
    inner: dict[Path, list[str]] = {data.root / folder: [] for folder in sorted(folders)}
    for folder in [folder for folder in inner if folder != data.root]:
        inner[folder.parent].append(folder.name)
    claims: list[tuple[Path, Path]] = []
    for top, names in inner.items():
        of_images = [name for known in _IMAGES for name in names if name.lower() == known]
        of_masks = [name for known in _MASKS for name in names if name.lower() == known]
        if of_images and of_masks:
            claims += [(top / of_images[0], top / name) for name in of_masks]
            continue
        for name in names:
            beside = _BESIDE.fullmatch(name)
            claims += [(top / beside[1], top / name)] if beside and beside[1] in names else []
    if not claims:  # leftImg8bit_trainvaltest/leftImg8bit of Cityscapes
        alone = [[folder for folder in inner if folder.name.lower() in known] for known in (_IMAGES, _MASKS)]
        claims = [(alone[0][0], alone[1][0])] if list(map(len, alone)) == [1, 1] else []
    claims = [(images, masks) for images, masks in claims if given.labels in (None, masks)]
    if given.labels is None:
        _refuse_others(data, inner, claims)
    pairs = [pair for images, masks in claims for pair in _pairs(data, images, masks)]
    for folder in inner if not claims else ():
        here = [path for path in data.images if path.parent == folder]
        stems = {path.stem for path in here}
        stems |= {stem.removesuffix(end) for stem in stems for end in _OF_IMAGES}
        ends = [(_ENDING.search(path.name), path) for path in here]
        counts = Counter(end[0] for end, path in ends if end and path.name[: end.start()] in stems - {path.stem})
        plain = Counter(p.suffix for p in here if p.suffix.lower() == '.png' and p.with_suffix('.jpg') in here)
        for ending, _ in (counts or plain).most_common(1):
            pairs += _pairs(data, folder, folder, ending)
    if not pairs:
        there = [folder for folder in inner if _has_masks(data, folder)]
        there = there or [path for path in data.images[:100] if is_mask(path)][:2]
        if there:
            raise RunError(
                f'DATA {str(data.root)!r}: no annotations in it under known names; {some(map(data.name, there), 6)} '
                'seem to be masks: give --images DIR and --labels DIR, or name them images/x.jpg and masks/x.png (in '
                'one folder x.jpg and x_mask.png).'
            )
        raise refusal(data, recognise_all(data), 'segmentation')
    return pairs


def _has_masks(data: Data, folder: Path) -> bool:
    here = [path for path in data.images if path.parent == folder]
    return bool(here) and all(map(is_mask, here[:3]))


def _refuse_others(data: Data, folders: dict, claims: list[tuple[Path, Path]]) -> None:
    """Raise an error if folders beside the masks of a claim hold other masks of the same images."""
    for images, masks in claims:
        for folder in folders:
            is_inside = any(each in (folder, *folder.parents) for each in (images, masks))
            if is_inside or _OTHERS.search(data.name(folder)) or images.parent not in folder.parents:
                continue
            known = any(folder in (claimed, *claimed.parents) or claimed in folder.parents for _, claimed in claims)
            if (images, folder) in claims or not known and _has_masks(data, folder):
                raise RunError(
                    f'{data.name(masks)} and {data.name(folder)} both have masks of {data.name(images)}: give --labels '
                    'DIR, one of them.'
                )


def _pairs(data: Data, images: Path, masks: Path, ending: str = '') -> list[_Pair]:
    """Pair images with masks ``masks/STEM`` plus the most frequent ending (``.png``, ``_mask.png``)."""
    stems: dict[str, str] = {}
    below = {folder: [path for path in data.images if folder in path.parents] for folder in (images, masks)}
    for path in below[images]:
        stem = path.relative_to(images).with_suffix('').as_posix()
        if images == masks and (path.name.endswith(ending) or _OTHERS.search(path.name)):
            continue
        if stem in stems:
            raise RunError(f'{images / stem}{stems[stem]} and {path} have one name: of which is the mask?')
        stems[stem] = path.suffix
    for end in _OF_IMAGES:
        if stems and all(stem.endswith(end) for stem in stems):
            stems = {stem.removesuffix(end): f'{end}{suffix}' for stem, suffix in stems.items()}
    found = {path.relative_to(masks).as_posix() for path in below[masks]}
    endings = {name[len(stem) :] for stem in list(stems)[:20] for name in found if name.startswith(stem)}
    endings = {ending} if ending else endings
    counts = {each: sum(f'{stem}{each}' in found for stem in stems) for each in sorted(endings)}
    if not counts:
        raise RunError(
            f'{masks} has no label image with the name of an image of {images}: give --images DIR and --labels DIR.'
        )
    best = [each for each in counts if counts[each] == max(counts.values())]
    best = [each for each in best if not _OTHERS.search(each)] or best
    kinds = [[each for each in best if kind in each] for kind in _KINDS]
    ending, *others = next((several for several in kinds if several), best)
    if others:
        raise RunError(f'{masks} has two masks of each image, *{ending} and *{others[0]}: keep one kind.')
    if ending.lower().endswith(('.jpg', '.jpeg')):
        raise RunError(f'{masks} has JPEG files, which change the numbers of pixels: expected PNG.')
    both = {stem: suffix for stem, suffix in stems.items() if f'{stem}{ending}' in found}
    base, dot, suffix = ending.rpartition('.')
    for name in sorted(found - {f'{stem}{ending}' for stem in both}):
        mask, is_of_kind = name.removesuffix(f'{dot}{suffix}'), name.endswith(f'{dot}{suffix}')
        owners = (stem for stem in both if mask.startswith((f'{stem}{base}_', f'{stem}{base}-')))
        owner = next(owners, None) if is_of_kind and (base or mask not in stems) else None
        if owner and not _OTHERS.search(name) and not any(kind in ending for kind in _KINDS):
            raise RunError(
                f'{masks / name} is a second mask of {owner}{both[owner]}, beside {owner}{ending}: join them.'
            )
    pairs = [_Pair(images, masks, stem, (end, ending)) for stem, end in both.items()]
    for pair in pairs:
        size = image_size(pair.path)
        with Image.open(pair.file) as mask:
            if mask.size != size:
                turned = ' as stored, without its EXIF rotation' if image_size(pair.file) == size else ''
                raise RunError(f'{pair.file} has not the size of its image, {size[0]}x{size[1]}{turned}.')
    return pairs
