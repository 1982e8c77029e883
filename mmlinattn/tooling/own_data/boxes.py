# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Convert objects of all formats to COCO JSON: settle what the numbers of boxes mean, and note what is not used."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torchvision.ops import box_convert

from ...utils.errors import RunError
from .data import Data, OwnData
from .formats import READERS, recognise_all, refusal
from .names import of_split, some
from .reading import IGNORED, Object, Photo, Reader, bounds, counted, is_rectangle
from .splits import divide

_READINGS = {
    'corners': 'corners (left, top, right, bottom)',
    'sides': 'left, top, width, height',
    'centre': 'centre x, y, width, height',
}
_FORMATS = {'corners': 'xyxy', 'sides': 'xywh', 'centre': 'cxcywh'}  # of torchvision
_SLACK = 0.01  # of shares beyond the image, by rounding
_REMEDY = f'give --boxes {"|".join(_READINGS)}.'
_Raw = list[tuple[Photo, Object]]  # objects with unconverted boxes, each with its image
_LEAST = 1.0  # pixels; MMDetection leaves out narrower boxes
_MEANING = {
    'rotated': 'the upright boxes around them are learnt',
    'truncated': 'learnt as whole ones',
    'occluded': 'learnt as whole ones',
    'score': 'as predictions have: learnt as if they were certain',
    'keypoints': 'boxes are learnt, not the points',
    'parts': 'each is one object of several polygons',
    'lines': 'polygons of fewer than three points are left out',
}


def read_boxes(data: Data) -> OwnData:
    """Read the objects of a data set.

    Raises:
        RunError: There are no images or objects, a file cannot be read, or the box format is unclear. The message names
            the file and the option that decides.
    """
    data.need_images()
    readers = _readers(data)
    decided = [_settle(reader, is_alone=len(readers) == 1) for reader in readers]
    if data.options.boxes and not any(decided):
        names = ' and '.join(reader.kind for reader in readers)
        raise RunError(f'--boxes: the numbers of {names} have one meaning each; leave the option out.')
    merged = _merged(readers, data)
    photos = [without_small(photo) for photo in merged]
    given = [item for photo in merged for item in photo.objects]
    objects = [item for photo in photos for item in photo.objects]
    small, classes = len(given) - len(objects), readers[0].classes
    if not objects:
        photo = next(photo for photo in merged if photo.objects)
        raise RunError(
            f'{photo.file}: all {small} boxes are narrower than a pixel or outside of their image, as '
            f'{photo.objects[0].box} of {photo.path.name}.'
        )
    _check_classes(data, objects, classes)
    splits, notes = divide(data, photos, classes)
    notes[1:1] = [note for reader in readers for note in reader.notes]
    masks = _have_polygons(objects, notes)
    notes += _notes_on(photos) + _notes_on_polygons(merged)
    empty = sum(not photo.objects for photo in photos)
    notes += [f'{empty} of {len(photos)} images have no object: they are background'] if empty else []
    notes += [f'{small} boxes narrower than a pixel, or outside of their image, are left out'] if small else []
    written = {split: as_coco(chosen, classes, data.root, masks) for split, chosen in splits.items()}
    counts = [Counter(a['image_id'] for a in coco['annotations'] if not a['iscrowd']) for coco in written.values()]
    return OwnData(
        ' and '.join(reader.kind for reader in readers),
        classes,
        splits,
        {split: json.dumps(coco) for split, coco in written.items()},
        dict.fromkeys(splits, dict(data_prefix=dict(img=''))),
        notes,
        masks,
        max(most for count in counts for most in count.values()),
        any(item.is_ignored for item in objects),
    )


def _check_classes(data: Data, objects: list[Object], classes: list[str]) -> None:
    """Raise a RunError if two classes have one name, or no object is learnt."""
    twice = [name for name, count in Counter(classes).items() if count > 1]
    if twice:
        raise data.error(f': two classes have the name {twice[0]!r}.')
    if all(item.is_ignored for item in objects):
        kinds = {flag for item in objects for flag in item.flags & IGNORED}
        raise data.error(f': all objects are ignored ({", ".join(sorted(kinds))}).')


def _readers(data: Data) -> list[Reader]:
    """Return the readers that recognise files and found objects in them. ``--labels`` with a file of one image stands
    for all files of its format."""
    kinds = recognise_all(data)
    chosen = next((kind for kind in kinds if kind in READERS and READERS[kind].has_one_image), None)
    if chosen and data.options.labels and data.options.labels.is_file():
        data.options = data.options._replace(labels=None)
        kinds = {chosen: recognise_all(data)[chosen]}
    readers = [reader(kind, data) for kind, reader in READERS.items() if kinds.get(kind)]
    if not readers:
        raise refusal(data, kinds)
    for reader in readers:
        data.used.update(source.path for source in kinds[reader.kind])
        reader.read(kinds[reader.kind])
    full = [reader for reader in readers if any(photo.objects for photo in reader.photos)]
    if not full:
        why = f': {"; ".join(readers[0].notes)}' if readers[0].notes else ''
        raise data.error(f': no box in its {readers[0].kind}{why}.')
    return full


def _settle(reader: Reader, is_alone: bool) -> bool:
    """Convert all boxes of a reader to left, top, right, bottom in pixels, and note the meaning of the numbers.

    A reading of the numbers (:data:`_READINGS`) is wrong for boxes with negative sides, or beyond the edge of their
    image. ``--boxes`` decides, else the format unless another reading fits better, else the only reading that fits.
    Otherwise a RunError is raised. ``is_alone``: no other format has labels. Beside other formats, ``--boxes`` is for
    formats without a meaning of their own, or with boxes that contradict it.

    Returns:
        bool: ``--boxes`` has decided.
    """
    options = reader.data.options
    raw = [(photo, item) for photo in reader.photos for item in photo.objects if item.is_raw]
    if not raw:
        if is_alone and (options.boxes or options.units):
            raise RunError(f'--boxes and --units: the numbers of {reader.kind} have one meaning; leave the option out.')
        return False
    units, unit_note = (options.units, '; --units') if options.units else _box_unit(reader, raw)
    numbers = np.array([item.box for _, item in raw], float)
    sizes = np.array([photo.size for photo, _ in raw], float)
    boxes, bad = _readings(numbers, sizes, units)
    counts = {reading: int(outside.sum()) for reading, outside in bad.items()}
    fitting = [reading for reading, count in counts.items() if not count]
    # another reading fits better, or many boxes do not fit
    is_wrong = bool(reader.boxes and counts[reader.boxes] and (fitting or 5 * counts[reader.boxes] > len(raw)))
    given = options.boxes if is_alone or reader.boxes is None or is_wrong else None
    said, source = given or reader.boxes, '--boxes' if given else 'as the format has it'
    if said is None:
        flat = {r: (box[:, 2:] == box[:, :2]).any(1) & numbers[:, 2:].all(1) for r, box in boxes.items()}
        said, source = _most_likely(raw, bad, flat), 'the only reading in which boxes stay in their images'
    elif is_wrong and not given:
        raise _wrong_reading(raw, bad[said], said, fitting)
    if said == 'corners':
        _check_corners(raw, boxes[said])
    rows = iter(zip(boxes[said].tolist(), sizes if units == 'shares' else np.ones_like(sizes)))
    reader.photos = [
        photo._replace(objects=[_placed(item, *next(rows)) if item.is_raw else item for item in photo.objects])
        for photo in reader.photos
    ]
    note = f'the four numbers of a box are {_READINGS[said]} in {units}: {source}{unit_note}'
    reader.notes.insert(0, note)
    return bool(given)


def _readings(
    numbers: np.ndarray, sizes: np.ndarray, units: str
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Read the numbers of boxes in each way.

    Args:
        numbers: Four numbers of each box, (N, 4).
        sizes: Width and height of the image of each box, (N, 2).
        units: ``'pixels'``, or ``'shares'`` of the image from 0 to 1.

    Returns:
        tuple: Two dicts by name of the reading: boxes (left, top, right, bottom) in pixels, (N, 4); and (N,) bool, True
        for boxes that have negative sides or pass the edge of their image.
    """
    slack: Any = 2.0
    scale = np.ones_like(numbers)
    if units == 'shares':
        slack, scale = np.maximum(2.0, _SLACK * sizes), np.tile(sizes, 2)
    boxes, bad = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for reading, format_ in _FORMATS.items():
        box = boxes[reading] = box_convert(torch.from_numpy(numbers), format_, 'xyxy').numpy() * scale
        bad[reading] = ((box[:, :2] < -slack) | (box[:, 2:] > sizes + slack) | (box[:, 2:] < box[:, :2])).any(1)
    return boxes, bad


def _wrong_reading(raw: _Raw, bad: np.ndarray, reading: str, fitting: list[str]) -> RunError:
    """Return the error for the ``bad`` boxes, (N,) bool, that pass the edge of their image in a reading. ``fitting``
    are the readings in which all boxes lie inside."""
    photo, item = raw[int(np.argmax(bad))]
    others = f'; as {_READINGS[fitting[0]]} all of them fit' if fitting else ''
    return RunError(
        f'{photo.file}: {bad.sum()} of {len(raw)} boxes pass the edge of their image, as {_numbers(item)} in '
        f'{photo.size[0]}x{photo.size[1]}, read as {_READINGS[reading]}{others}: {_REMEDY}'
    )


def _check_corners(raw: _Raw, boxes: np.ndarray) -> None:
    """Raise a RunError for a box whose left or top is above its right or bottom."""
    negative = (boxes[:, 2:] < boxes[:, :2]).any(1)
    if negative.any():
        first = int(np.argmax(negative))
        (photo, item), box = raw[first], boxes[first]
        axis, low, high = ('x', box[0], box[2]) if box[2] < box[0] else ('y', box[1], box[3])
        raise RunError(f'{photo.file}: {axis}min {low:g} is above {axis}max {high:g}, {_numbers(item)}.')


def _most_likely(raw: _Raw, bad: dict[str, np.ndarray], flat: dict[str, np.ndarray]) -> str:
    """Return the only reading in which nearly all boxes stay in their images and have an area, else raise a RunError.
    ``bad`` and ``flat`` hold (N,) bool by reading: the boxes beyond their image, and the boxes without area."""
    likely = [reading for reading in _READINGS if 5 * (bad[reading] | flat[reading]).sum() <= len(raw)]
    if len(likely) == 1:
        return likely[0]
    photo, item = raw[int(np.argmax(bad['sides']))]
    several = ' and as '.join(_READINGS[each] for each in likely)
    both = f'boxes fit as {several}' if likely else 'boxes pass the edge of their image in every reading'
    raise RunError(f'{photo.file}: {both}, as {_numbers(item)} of {photo.path.name}: {_REMEDY}')


def _placed(item: Object, box: list[float], scale: np.ndarray) -> Object:
    segmentation = item.segmentation
    if isinstance(segmentation, list) and (scale != 1).any():
        segmentation = [(np.reshape(part, (-1, 2)) * scale).ravel().tolist() for part in segmentation]
    return item._replace(box=tuple(box), segmentation=segmentation, is_raw=False)


def _numbers(item: Object) -> str:
    return f'({", ".join(f"{number:g}" for number in item.box)})'


def _box_unit(reader: Reader, raw: _Raw) -> tuple[str, str]:
    """Return the unit of the box numbers, ``'pixels'`` or ``'shares'`` of the image (0 to 1), and a note for the user.
    The note is empty if the format gives the unit. A mixture of both units raises a RunError."""
    raw = [(photo, item) for photo, item in raw if max(item.box) > 0]
    small = [max(map(abs, item.box)) <= 1 + _SLACK for _, item in raw]
    if any(small) and not all(small) or reader.units and small and all(small) != (reader.units == 'shares'):
        odd = reader.units != 'shares'  # the shares among pixels, or the pixels among shares
        photo, item = raw[small.index(odd)]
        kinds = 'shares of the image, from 0 to 1' if odd else 'no shares of the image (numbers are from 0 to 1)'
        raise RunError(
            f'{photo.file}: {small.count(odd)} of {len(small)} boxes are {kinds}, as {_numbers(item)} of '
            f'{photo.path.name}: give --units pixels|shares.'
        )
    if reader.units:
        return reader.units, ''
    if small and all(small):
        return 'shares', '; all numbers are from 0 to 1'
    return 'pixels', '; all numbers are in the size of pixels'


def _merged(readers: list[Reader], data: Data) -> list[Photo]:
    """Return the images of all readers; an image with labels in two files raises a RunError."""
    first: dict[Path, Photo] = {}
    photos = [photo for reader in readers for photo in reader.photos]
    for photo in sorted(photos, key=lambda photo: photo.file == photo.path):  # without label file: last
        other = first.setdefault(photo.path, photo)
        if other is not photo and photo.file != photo.path:
            files = [f'{data.name(each.file)}{of_split(each.split)}' for each in (other, photo)]
            remedy = 'give --labels FILE or DIR, or --train and --val, or remove one'
            raise RunError(f'{photo.path} is labelled twice: by {files[0]} and by {files[1]}: {remedy}.')
    for reader in readers[1:]:
        _check_splits(readers[0], reader, data)
    return list(first.values())


def _check_splits(first: Reader, second: Reader, data: Data) -> None:
    """Raise an error if two formats label one split, or differ in their classes."""
    names, splits = list[str](), list[set]()
    for reader in (first, second):
        photos = [photo for photo in reader.photos if photo.file != photo.path]
        splits.append({photo.split or data.splits.of(data.rel(photo.path).parent) for photo in photos})
        of_splits = f' of {some(sorted(splits[-1]))}' if None not in splits[-1] else ''
        file, count = data.name(photos[0].file), len(photos)
        names.append(f'{reader.kind} ({file}, {count} images{of_splits}, classes {some(reader.classes)})')
    if splits[0] & splits[1] or None in splits[0] | splits[1] or set(first.classes) != set(second.classes):
        raise RunError(f'{" and ".join(names)} both have labels: convert one, or give --labels FILE, one of them.')


def _cut(box: Sequence[float], size: tuple[int, int]) -> tuple[float, float, float, float]:
    """Clip a box (left, top, right, bottom) to an image of ``size`` (width, height)."""
    left, top, right, bottom = np.clip(box, 0, (*size, *size)).tolist()
    return left, top, right, bottom


def without_small(photo: Photo) -> Photo:
    """Return an image without the objects whose boxes are narrower than a pixel within the image."""
    boxes = ((item, _cut(item.box, photo.size)) for item in photo.objects)
    return photo._replace(objects=[item for item, b in boxes if min(b[2] - b[0], b[3] - b[1]) >= _LEAST])


def _have_polygons(objects: list[Object], notes: list[str]) -> bool:
    """Return True if all learnt objects have polygons, and not rectangles alone; note the reason if they are unused."""
    polygons = [item.segmentation for item in objects if not item.is_ignored]
    count = sum(not parts for parts in polygons)
    if count == len(polygons):
        return False
    # some exporters write a rectangle for each box
    if count or all(isinstance(parts, list) and len(parts) == 1 and is_rectangle(parts[0]) for parts in polygons):
        reason = f'{count} of {len(polygons)} objects have no polygon' if count else 'all polygons are rectangles'
        notes.append(f'{reason}: boxes alone are learnt')
        return False
    return True


def _notes_on_polygons(photos: list[Photo]) -> list[str]:
    """Return a note if boxes have an IoU below 0.5 with the bounds of their polygons, except rotated boxes."""
    from mmdet.structures.bbox import bbox_overlaps

    both = [
        (photo, item)
        for photo in photos
        for item in photo.objects
        if isinstance(item.segmentation, list) and not item.flags & {'rotated', 'lines'}
    ]
    boxes = torch.tensor([item.box for _, item in both]).reshape(-1, 4)
    others = torch.tensor([bounds(item.segmentation) for _, item in both]).reshape(-1, 4)
    apart = [both[i] for i in (bbox_overlaps(boxes, others, is_aligned=True) < 0.5).nonzero()]
    return [
        f'the boxes of {len(apart)} of {len(both)} objects lie elsewhere than their polygons, as '
        f'{item.box} of {photo.path.name}: boxes are learnt as they are; correct one'
        for photo, item in apart[:1]
    ]


def _notes_on(photos: list[Photo]) -> list[str]:
    """Return notes on attributes of objects, and on boxes that extend beyond the image by more than rounding does."""
    boxes = [(photo.size, item) for photo in photos for item in photo.objects]
    beyond = sum(min(b[:2]) < -2 or b[2] > width + 2 or b[3] > height + 2 for (width, height), (_, b, *_) in boxes)
    notes = [f'{beyond} of {len(boxes)} boxes reach beyond their images and are cut'] if beyond else []
    ignored = Counter(flag for _, item in boxes for flag in sorted(item.flags & IGNORED)[:1])
    if ignored:
        listed = ', '.join(f'{count} {flag}' for flag, count in sorted(ignored.items()))
        notes.append(f'{sum(ignored.values())} of {len(boxes)} boxes are ignored, neither learnt nor counted: {listed}')
    counts = Counter(flag for _, item in boxes for flag in item.flags - IGNORED)
    notes += [f'{counts.pop(flag)} objects: {flag}, {meaning}' for flag, meaning in _MEANING.items() if counts[flag]]
    return notes + ([f'not used of the annotations: {counted(counts)}'] if counts else [])


def as_coco(photos: list[Photo], classes: list[str], root: Path, masks: bool = False) -> dict:
    """Convert images and objects to a COCO data set, with boxes cut to their images, and ids from 1.

    Args:
        photos: Images and their objects. An object without a class is ignored for every class.
        classes: Class names in the order of the labels.
        root: Folder to which file names are relative.
        masks: Write polygons too; the rectangle of the box for an object without polygons.
    """
    images: list[dict] = []
    annotations: list[dict] = []
    for number, photo in enumerate(photos, 1):
        width, height = photo.size
        images.append(dict(id=number, file_name=photo.path.relative_to(root).as_posix(), width=width, height=height))
        for item in photo.objects:
            left, top, right, bottom = _cut(item.box, photo.size)
            entry = dict(image_id=number, bbox=[left, top, right - left, bottom - top], iscrowd=int(item.is_ignored))
            entry['area'] = item.area or _area(item.segmentation) or (right - left) * (bottom - top)
            if masks:
                entry['segmentation'] = item.segmentation or [[left, top, right, top, right, bottom, left, bottom]]
            for name in classes if item.name is None else [item.name]:
                annotations.append(dict(entry, id=len(annotations) + 1, category_id=classes.index(name) + 1))
    categories = [dict(id=i, name=name, supercategory='none') for i, name in enumerate(classes, 1)]
    return dict(images=images, annotations=annotations, categories=categories)


def _area(segmentation: Any) -> float:
    parts = segmentation if isinstance(segmentation, list) else []
    return sum(float(cv2.contourArea(np.reshape(part, (-1, 2)).astype(np.float32))) for part in parts)
