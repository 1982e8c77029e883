# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Read images and segmentation masks of numbers or colours, in the layouts of CamVid, Cityscapes, KITTI, VOC, CVAT and
Roboflow."""

import os
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from ...utils.errors import RunError
from .data import Data, OwnData
from .formats import recognise_all, refusal
from .images import MASKS_ONLY, check_whole, file_notes, image_size, is_mask
from .mask_values import IGNORED, format_value, interpret, remap, scan
from .names import some
from .pictures import MASK_SUFFIXES, beginnings, stems_of_image
from .reading import Photo
from .splits import divide

_Keys = dict[Path, tuple[str, ...]]  # parts of the folder of each image or mask
_KINDS = ('labelTrainIds', 'labelIds')  # of masks, in the order of preference
# masks of objects, parts and previews beside those of classes
_OTHERS = re.compile(r'instance|object|panoptic|_parts|polygon|_color|_colour|confidence', re.IGNORECASE)


class _Place(NamedTuple):
    """Folders of an image and its mask, the common path ``stem`` below both, and the two endings of the names.
    ``images/a/1_img.jpg`` and ``masks/a/1.png`` have the stem ``a/1`` and the suffixes ``_img.jpg`` and ``.png``."""

    images: Path
    masks: Path
    stem: str
    suffixes: tuple[str, str]


def _place(photo: Photo) -> _Place:
    image, mask = photo.path, photo.file
    stem = next((stem for stem in beginnings(mask.stem) if stem in stems_of_image(image)), '')
    inner = [path.parent.parts[::-1] for path in (image, mask)]
    depth = len(os.path.commonprefix(inner)) if image.parent != mask.parent else 0
    name = (image.parent.relative_to(image.parents[depth]) / stem).as_posix()
    return _Place(image.parents[depth], mask.parents[depth], name, (image.name[len(stem) :], mask.name[len(stem) :]))


def read_masks(data: Data, remapped: Path) -> OwnData:
    """Read images and their segmentation masks.

    If MMSegmentation would not read the labels 0, 1, ... from the masks, copies with such labels are written to
    ``remapped``.

    Raises:
        RunError: There are no masks, they do not match their images, or the meaning of their values is unclear.
    """
    notes: list[str] = []
    pairs = _all_pairs(data)
    if _place(pairs[0]).suffixes[0] == pairs[0].path.name:  # no common beginning
        example = f'{pairs[0].path.name} and {pairs[0].file.name}'
        notes.append(f'images and masks are paired by the parts of their names that differ, as {example}')
    seen = scan([pair.file for pair in pairs])
    classes, table = interpret(data, pairs[0].path, pairs[0].file, seen, notes)
    items = []
    for pair, values in zip(pairs, seen.values):
        labels = {table.get(value, IGNORED) for value in values}
        items.append(pair._replace(in_mask=frozenset(classes[label] for label in labels if label < len(classes))))
    splits, more = divide(data, items, classes)
    notes += file_notes(pair.file for pair in pairs)
    changed = {value: label for value, label in sorted(table.items()) if value != label and value in seen.pixels}
    places = {split: [_place(item) for item in chosen] for split, chosen in splits.items()}
    is_mixed = any(_is_mixed(data, split, splits[split], each) for split, each in places.items())
    is_copied, settings, lists = bool(changed) or not seen.is_plain or is_mixed, {}, {}
    for split, chosen in splits.items():
        first, stems = places[split][0], [place.stem for place in places[split]]
        images, masks, endings = data.name(first.images), data.name(first.masks), first.suffixes
        if is_mixed:
            stems, images, endings = [data.name(item.path) for item in chosen], '.', ('', '')
        if is_copied:
            masks, endings = str(remapped / split), (endings[0], '.png')
        for stem, item in zip(stems, chosen) if is_copied else ():
            copy = remapped / split / f'{stem}.png'
            copy.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(remap(item.file, table, seen.coloured)).save(copy)
        lists[split] = ''.join(f'{stem}\n' for stem in stems)
        prefix = dict(img_path=f'{images}/', seg_map_path=f'{masks}/')
        settings[split] = dict(data_prefix=prefix, img_suffix=endings[0], seg_map_suffix=endings[1])
    if is_copied:
        changes = some(f'{format_value(old)} -> {new}' for old, new in changed.items() if new != IGNORED)
        changes = changes or ('one folder' if is_mixed else 'one number per pixel')
        notes.append(f'masks are copied to {remapped}: {changes}')
    labels_of = partial(remap, table=table, coloured=seen.coloured)
    return OwnData('segmentation masks', classes, splits, lists, settings, more + notes, labels_of=labels_of)


def _is_mixed(data: Data, split: str, chosen: list[Photo], places: list[_Place]) -> bool:
    """Return True if the images or masks of a split have several folders or endings, as MMSegmentation takes one. Then
    their masks are copied to one folder, if ``--labels`` is given. Without the option, a RunError is raised."""
    kinds = [place._replace(stem='') for place in places]
    other = next((item for item, kind in zip(chosen, kinds) if kind != kinds[0]), None)
    if other and not data.options.labels:
        raise RunError(
            f'{other.path} and {chosen[0].path} are both of {split}: MMSegmentation wants one folder and ending. Give '
            f'--labels {data.root} to write copies of the masks into one folder.'
        )
    return bool(other)


def _all_pairs(data: Data) -> list[Photo]:
    """Pair each image with its segmentation mask.

    Their folders are equal except for generic words (images, masks, labels). The name of the mask begins with that of
    the image. Without any pair, words that only folders of images have are ignored. With ``--images`` and ``--labels``
    those of folders of masks are ignored too, and at last the common beginnings and endings of names.

    Raises:
        RunError: There are no pairs, or a mask has another size than its image.
    """
    images, masks = _folder_keys(data)
    images = {path: key for path, key in images.items() if path.suffix.lower() not in MASKS_ONLY}
    found = _paired(data, images, masks) or _paired(data, _with_words_of(masks, images), masks)
    if not found and data.options.images and data.options.labels:
        shared = _with_words_of(masks, images), _with_words_of(images, masks)
        found = _paired(data, *shared) or _paired_by_difference(*shared)
    if not found:
        raise _no_pairs(data, images, masks)
    pairs = [_of_classes(data, several) for several in found.values()]
    _refuse_others(data, pairs, masks)
    for pair in pairs:
        size = image_size(pair.path)
        check_whole(pair.file)
        with Image.open(pair.file) as image:
            if image.size != size:
                turned = ' as stored, without its EXIF rotation' if image_size(pair.file) == size else ''
                raise RunError(f'{pair.file} has not the size of its image, {size[0]}x{size[1]}{turned}.')
    return pairs


def _paired(data: Data, images: _Keys, masks: _Keys) -> dict[Path, list[Photo]]:
    """Return the pairs of each image, by image: its masks have the same key and a name that begins with its name."""
    named: dict[tuple, list[Path]] = {}
    for path, key in images.items():
        for stem in stems_of_image(path):
            named.setdefault((key, stem), []).append(path)
    found: dict[Path, list[Photo]] = {}
    for mask, key in masks.items():
        stem = next((stem for stem in beginnings(mask.stem) if (key, stem) in named), '')
        owners = named.get((key, stem), [])
        owners = [path for path in owners if not _OTHERS.search(data.name(path))] or owners
        if len(owners) > 1:
            raise RunError(f'{owners[0]} and {owners[1]} have one name: of which is the mask {mask}?')
        for image in owners:
            found.setdefault(image, []).append(Photo(image, mask))
    return found


def _paired_by_difference(images: _Keys, masks: _Keys) -> dict[Path, list[Photo]]:
    """Return the mask of each image by names without the beginning and the ending that all names of a folder share:
    ``21_training.tif`` and ``21_manual1.png`` are a pair. Nothing is returned if a mask has no image by this rule."""
    parts: list[dict[tuple, Path]] = []
    for keys in (images, masks):
        parts.append({})
        for key in {*keys.values()}:
            stems = {path: path.stem for path in keys if keys[path] == key}
            first = os.path.commonprefix([*stems.values()]).rstrip('0123456789')
            last = os.path.commonprefix([stem[::-1] for stem in stems.values()])[::-1].lstrip('0123456789')
            parts[-1].update({(key, stem[len(first) :].removesuffix(last)): path for path, stem in stems.items()})
    of_image, of_mask = parts
    if of_mask.keys() <= of_image.keys() and len(of_mask) == len(masks):
        return {of_image[part]: [Photo(of_image[part], mask)] for part, mask in of_mask.items()}
    return {}


def _folder_keys(data: Data) -> tuple[_Keys, _Keys]:
    """Return the images and the masks, each with its key: the parts of its folder that are equal for a pair.

    ``--images`` and ``--labels`` separate images and masks; else names of folders and files do. If both options name
    one folder, the masks are in the folders of it whose images have few values.
    """
    top, labels = data.options.images, data.options.labels
    if top and top == labels:
        of_masks = {folder for folder in {path.parent for path in data.images} if _has_masks(data, folder)}
        keys = {path: data.pictures.key(path) for path in data.images}
        masks = {path: key for path, key in keys.items() if path.parent in of_masks}
        return {path: key for path, key in keys.items() if path not in masks}, masks
    if top and labels and labels.is_dir():
        data.images = Data(data.root, data.options._replace(images=None)).images  # those of --labels too
        masks = {path: path.relative_to(labels).parent.parts for path in data.images if labels in path.parents}
        images = {path: path.relative_to(top).parent.parts for path in data.images if top in path.parents}
        return {path: key for path, key in images.items() if path not in masks}, masks
    data.need_images()
    images, masks = data.pictures.separate_masks(data.images)
    return images, {path: key for path, key in masks.items() if labels is None or labels in path.parents}


def _with_words_of(masks: _Keys, images: _Keys) -> _Keys:
    """Return the keys of ``images`` without the words that no key of ``masks`` has."""
    known = {word for key in masks.values() for part in key for word in part.split()}
    parts = {
        path: [' '.join(word for word in part.split() if word in known) for part in key] for path, key in images.items()
    }
    return {path: tuple(filter(None, each)) for path, each in parts.items()}


def _of_classes(data: Data, several: list[Photo]) -> Photo:
    """Return the pair with a mask of classes, among ``several`` pairs of one image with masks of objects or parts too.
    A second mask of classes, or a mask in JPEG or WebP, raises a RunError."""
    left = [pair for pair in several if pair.file.suffix.lower() in MASK_SUFFIXES] or several
    left = [pair for pair in left if not _OTHERS.search(data.name(pair.file))] or left
    kinds = ([pair for pair in left if kind in pair.file.name] for kind in _KINDS)
    first, *others = next((pairs for pairs in kinds if pairs), left)
    if others and _place(others[0]).masks != _place(first).masks:
        raise _two_folders(data, _place(first), _place(others[0]).masks)
    if others:
        shorter, longer = sorted((first.file, others[0].file), key=lambda path: (len(path.name), path))
        raise RunError(f'{longer} is a second mask of {first.path.name}, beside {shorter.name}: join them.')
    if first.file.suffix.lower() not in MASK_SUFFIXES:
        raise RunError(f'{first.file} is no PNG: JPEG and WebP files change the numbers of pixels: expected PNG.')
    return first


def _two_folders(data: Data, place: _Place, other: Path) -> RunError:
    return RunError(
        f'{data.name(place.masks)} and {data.name(other)} both have masks of {data.name(place.images)}: give --labels '
        'DIR, one of them.'
    )


def _refuse_others(data: Data, pairs: list[Photo], masks: Iterable[Path]) -> None:
    """Raise an error if folders beside those of a pair hold other masks."""
    tops = {place.images.parent: place for place in map(_place, pairs) if place.images != place.masks}
    folders = {path.parent for path in data.images} - {path.parent for path in (*masks, *(pair.path for pair in pairs))}
    labels = data.options.labels
    for folder in sorted(folder for folder in folders if labels is None or labels in (folder, *folder.parents)):
        place = next((tops[top] for top in folder.parents if top in tops), None)
        is_apart = place and place.images not in folder.parents and not _OTHERS.search(data.name(folder))
        if place and is_apart and _has_masks(data, folder):
            raise _two_folders(data, place, folder)


def _has_masks(data: Data, folder: Path) -> bool:
    """Return True if the first three images of a folder are segmentation masks, by their values."""
    return all(map(is_mask, [path for path in data.images if path.parent == folder][:3]))


def _no_pairs(data: Data, images: Iterable[Path], masks: Iterable[Path]) -> RunError:
    """Return the error for data without a pair: it names a mask and an image, or files that seem to be masks."""
    stems = {path.stem.casefold(): path for path in images}
    for mask in masks:
        image = stems.get(mask.stem.casefold())
        if image and image.stem != mask.stem:
            return RunError(f'{mask} and {image} differ by capital letters in their names: rename one.')
    remedy = 'give --images DIR and --labels DIR (both DATA, if there are several folders)'
    are_given = data.options.images and data.options.labels
    for image, mask in zip(images, masks):
        alike = sorted(path.parent.name for path in masks if path.name == mask.name)
        joined = f'; {len(alike)} masks have the name {mask.name}, in {some(alike, 4)}: join them'
        several = joined if len(alike) > 1 else ''
        if are_given:
            remedy = 'let the name of a mask begin with that of its image'
        return RunError(
            f'{mask.parent} has no label image with the name of an image of {image.parent}{several}: {remedy}.'
        )
    there = [folder for folder in sorted({path.parent for path in data.images}) if _has_masks(data, folder)]
    there = there or [path for path in data.images[:100] if is_mask(path)][:2]
    if there:
        return data.error(
            f': no annotations in it under known names; {some(map(data.name, there), 6)} seem to be masks: '
            f'{"" if are_given else remedy + ", or "}name them images/x.jpg and masks/x.png (in one folder x.jpg and '
            'x_mask.png).'
        )
    return refusal(data, recognise_all(data))
