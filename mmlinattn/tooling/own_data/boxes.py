# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Convert objects of all formats to COCO JSON, and note parts of the annotations that training does not use."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from ...utils.errors import RunError
from .box_numbers import settle
from .data import Data, Example, OwnData
from .formats import READERS, recognise_all, refusal
from .names import composed, of_split, some
from .objects import IGNORED, Object, Photo, is_region, is_right_angled
from .reading import Claim
from .splits import divide

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
        RunError: There are no images or objects, a file cannot be read, or labels have two readings; one line that
            names the file, and the option that decides.
    """
    data.need_images()
    claims = [settle(_with_composed_names(claim), data) for claim in _claims(data)]
    merged = _merged(claims, data)
    photos, small = _without_small(merged)
    if small and not any(photo.objects for photo in photos):
        photo = next(photo for photo in merged if photo.objects)
        raise RunError(
            f'{photo.file}: all {small} boxes are narrower than a pixel or outside of their image, as '
            f'{photo.objects[0].box} of {photo.path.name}.'
        )
    classes = [name for name in claims[0].classes if not is_region(name)]
    objects = [item for photo in photos for item in photo.objects]
    _check_classes(classes, objects, data)
    splits, notes = divide(data, photos, 'detection', classes)
    notes[1:1] = [note for claim in claims for note in claim.notes]
    masks = _have_polygons(objects, notes)
    notes += _notes_on(photos) + _notes_on_polygons(merged)
    empty = sum(not photo.objects for photo in photos)
    notes += [f'{empty} of {len(photos)} images have no object: they are background'] if empty else []
    notes += [f'{small} boxes narrower than a pixel, or outside of their image, are left out'] if small else []
    written = {split: as_coco(chosen, classes, data.root, masks) for split, chosen in splits.items()}
    counts = [Counter(a['image_id'] for a in coco['annotations'] if not a['iscrowd']) for coco in written.values()]
    return OwnData(
        ' and '.join(claim.kind for claim in claims),
        classes,
        {split: [photo.path for photo in chosen] for split, chosen in splits.items()},
        {split: json.dumps(coco) for split, coco in written.items()},
        dict.fromkeys(splits, dict(data_prefix=dict(img=''))),
        notes,
        [Example(photo.path, photo.objects) for photo in splits['train']],
        masks,
        max(most for count in counts for most in count.values()),
        any(item.is_ignored for item in objects),
    )


def _merged(claims: list[Claim], data: Data) -> list[Photo]:
    """Return the images of all claims."""
    first: dict[Path, Photo] = {}
    photos = [_with_regions(photo) for claim in claims for photo in claim.photos]
    for photo in sorted(photos, key=lambda photo: photo.file == photo.path):  # without label file: last
        other = first.setdefault(photo.path, photo)
        if other is not photo and photo.file != photo.path:
            files = [f'{data.name(each.file)}{of_split(each.split)}' for each in (other, photo)]
            remedy = 'give --labels FILE, or remove one' if other.split == photo.split else 'remove it from one'
            raise RunError(f'{photo.path} is labelled twice: by {files[0]} and by {files[1]}: {remedy}.')
        _check_run_lengths(photo)
    for claim in claims[1:]:
        _check_splits(claims[0], claim, data)
    return list(first.values())


def _with_composed_names(claim: Claim) -> Claim:
    known = {*claim.classes}
    classes = [composed(name) for name in claim.classes if name == composed(name) or composed(name) not in known]
    if classes == claim.classes:
        return claim
    photos = [
        photo._replace(objects=[item._replace(name=item.name and composed(item.name)) for item in photo.objects])
        for photo in claim.photos
    ]
    return claim._replace(classes=classes, photos=photos)


def _check_classes(classes: list[str], objects: list[Object], data: Data) -> None:
    twice = [name for name, count in Counter(classes).items() if count > 1]
    if twice:
        raise RunError(f'DATA {str(data.root)!r}: two classes have the name {twice[0]!r}.')
    if objects and all(item.is_ignored for item in objects):
        kinds = {flag for item in objects for flag in item.flags & IGNORED}
        raise RunError(f'DATA {str(data.root)!r}: all objects are ignored ({", ".join(sorted(kinds))}).')


def _have_polygons(objects: list[Object], notes: list[str]) -> bool:
    """Return True if all objects that are learnt have polygons, and not all of these are rectangles."""
    have_polygons = [bool(item.segmentation) for item in objects if not item.is_ignored]
    if not any(have_polygons):
        return False
    count = have_polygons.count(False)
    if count or all(map(_is_rectangle, objects)):
        reason = f'{count} of {len(have_polygons)} objects have no polygon' if count else 'all polygons are rectangles'
        notes.append(f'{reason}: boxes alone are learnt')
        return False
    return True


def _claims(data: Data) -> list[Claim]:
    """Return the claims of all readers that recognise files.

    ``--labels`` with a file of one image stands for all files of its format.
    """
    kinds = recognise_all(data)
    chosen = next((kind for kind in kinds if kind in READERS and READERS[kind].has_one_image), None)
    if chosen and data.options.labels and data.options.labels.is_file():
        data.options = data.options._replace(labels=None)
        kinds = {chosen: recognise_all(data)[chosen]}
    claims = []
    for kind, reader in READERS.items():
        if kinds.get(kind):
            data.used.update(source.path for source in kinds[kind])
            claims.append(reader(kind, data).read(kinds[kind]))
    if not claims:
        raise refusal(data, kinds, 'detection')
    full = [claim for claim in claims if any(photo.objects for photo in claim.photos)]
    if not full:
        why = f': {"; ".join(claims[0].notes)}' if claims[0].notes else ''
        raise RunError(f'DATA {str(data.root)!r}: no box in its {claims[0].kind}{why}.')
    return full


def _check_splits(first: Claim, second: Claim, data: Data) -> None:
    """Raise an error if two formats label one split, or differ in their classes."""
    names, splits = list[str](), list[set]()
    for claim in (first, second):
        photos = [photo for photo in claim.photos if photo.file != photo.path]
        splits.append({photo.split or data.splits.of(data.rel(photo.path).parent) for photo in photos})
        of_splits = f' of {some(sorted(splits[-1]))}' if None not in splits[-1] else ''
        file, count = data.name(photos[0].file), len(photos)
        names.append(f'{claim.kind} ({file}, {count} images{of_splits}, classes {some(claim.classes)})')
    if splits[0] & splits[1] or None in splits[0] | splits[1] or set(first.classes) != set(second.classes):
        raise RunError(f'{" and ".join(names)} both have labels: convert one, or give --labels FILE, one of them.')


def _check_run_lengths(photo: Photo) -> None:
    for item in photo.objects:
        if isinstance(item.segmentation, dict) and list(item.segmentation.get('size') or ()) != list(photo.size[::-1]):
            raise RunError(
                f'{photo.file}: a run length of {photo.path.name} has size={item.segmentation.get("size")}: expected '
                f'{list(photo.size[::-1])}, height and width of the image.'
            )


def _cut(box: Sequence[float], size: tuple[int, int]) -> tuple[float, float, float, float]:
    left, right = (min(max(x, 0.0), size[0]) for x in box[::2])
    top, bottom = (min(max(y, 0.0), size[1]) for y in box[1::2])
    return left, top, right, bottom


def _without_small(photos: list[Photo]) -> tuple[list[Photo], int]:
    """Leave out boxes that are narrower than a pixel within their image; return their number too."""
    kept = []
    for photo in photos:
        boxes = ((item, _cut(item.box, photo.size)) for item in photo.objects)
        objects = [item for item, b in boxes if min(b[2] - b[0], b[3] - b[1]) >= _LEAST]
        kept.append(photo._replace(objects=objects))
    return kept, sum(map(len, (p.objects for p in photos))) - sum(map(len, (p.objects for p in kept)))


def _with_regions(photo: Photo) -> Photo:
    """Replace objects of a class that means "ignore" by regions that are ignored for every class."""
    objects = [
        item._replace(name=None, flags=item.flags | {'ignore'}) if is_region(item.name) else item
        for item in photo.objects
    ]
    return photo._replace(objects=objects)


def _notes_on_polygons(photos: list[Photo]) -> list[str]:
    """Return a note on objects whose box and polygons overlap by less than half."""
    both = [
        (photo, item)
        for photo in photos
        for item in photo.objects
        if isinstance(item.segmentation, list) and not item.flags & {'rotated', 'lines'}
    ]
    apart = [(photo, item) for photo, item in both if _overlap(item.box, _extent(item.segmentation)) < 0.5]
    if not apart:
        return []
    photo, item = apart[0]
    return [
        f'the boxes of {len(apart)} of {len(both)} objects lie elsewhere than their polygons, as '
        f'{item.box} of {photo.path.name}: boxes are learnt as they are; correct one'
    ]


def _extent(polygons: list[list[float]]) -> tuple:
    sides = [[each for polygon in polygons for each in polygon[axis::2]] for axis in (0, 1)]
    return (*map(min, sides), *map(max, sides))


def _overlap(box: tuple, other: tuple) -> float:
    """Return the intersection over union of two boxes."""
    left, top, right, bottom = (*map(max, box[:2], other[:2]), *map(min, box[2:], other[2:]))
    areas = [(b[2] - b[0]) * (b[3] - b[1]) for b in (box, other)]
    shared = max(right - left, 0) * max(bottom - top, 0)
    return shared / max(sum(areas) - shared, 1e-9)


def _notes_on(photos: list[Photo]) -> list[str]:
    """Return notes on attributes of objects, and on boxes that extend beyond the image."""
    boxes = [(photo.size, item) for photo in photos for item in photo.objects]
    beyond = sum(_reaches_beyond(size, item.box) for size, item in boxes)
    notes = [f'{beyond} of {len(boxes)} boxes reach beyond their images and are cut'] if beyond else []
    ignored = Counter(flag for _, item in boxes for flag in sorted(item.flags & IGNORED)[:1])
    if ignored:
        listed = ', '.join(f'{count} {flag}' for flag, count in sorted(ignored.items()))
        notes.append(f'{sum(ignored.values())} of {len(boxes)} boxes are ignored, neither learnt nor counted: {listed}')
    counts = Counter(flag for _, item in boxes for flag in item.flags - IGNORED)
    notes += [f'{counts[flag]} objects: {flag}, {meaning}' for flag, meaning in _MEANING.items() if counts[flag]]
    rest = [f'{flag} ({count})' for flag, count in sorted(counts.items()) if flag not in _MEANING]
    notes += [f'not used of the annotations: {", ".join(rest)}'] if rest else []
    return notes


def as_coco(photos: list[Photo], classes: list[str], root: Path, masks: bool = False) -> dict:
    """Convert images and objects to a COCO data set, with boxes cut to their images, and ids from 1.

    Args:
        photos: Images and their objects. An object without a class is ignored for every class.
        classes: Class names in the order of the labels.
        root: Folder to which file names are relative.
        masks: Write polygons too.
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


def _is_rectangle(item: Object) -> bool:
    """Return True if the polygon is a rectangle, as some exporters write it for a box."""
    if not isinstance(item.segmentation, list) or len(item.segmentation) != 1:
        return not item.segmentation and item.is_ignored
    polygon = item.segmentation[0]
    return is_right_angled(polygon[:8] if len(polygon) == 10 and polygon[:2] == polygon[8:] else polygon)


def _reaches_beyond(size: tuple[int, int], box: tuple) -> bool:
    """Return True if a box extends beyond the image by more than two pixels, which allows for rounding and counting
    from 1."""
    return min(box[:2]) < -2 or box[2] > size[0] + 2 or box[3] > size[1] + 2
