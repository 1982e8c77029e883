# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Convert objects of all formats to COCO JSON, and note parts of the annotations that training does not use."""

import json
from collections import Counter
from pathlib import Path
from typing import Any, Callable

import cv2
import numpy as np

from ...utils.errors import RunError
from .coco import read_coco_files
from .csv_files import read_box_tables
from .finding import SUFFIXES, OwnData, divide, find, turned_notes, unseen_classes
from .kinds import BOXES, kinds_of
from .labelling_tools import read_cvat, read_label_studio, read_labelme
from .objects import IGNORED, Found, Object, Photo
from .text_files import read_kitti, read_yolo
from .voc import read_voc_files

# in the order of preference
READERS: dict[str, Callable[[list[Path], Path, list[Path]], Found]] = {
    'COCO JSON': read_coco_files,
    'CVAT XML': read_cvat,
    'VOC XML': read_voc_files,
    'LabelMe JSON': read_labelme,
    'Label Studio JSON': read_label_studio,
    'CSV of boxes': read_box_tables,
    'KITTI text files': read_kitti,
    'YOLO text files': read_yolo,
}
# classes of CrowdHuman, KITTI, LabelMe, VisDrone
_REGIONS = ('ignore', 'ignored', '__ignore__', 'dontcare', "don't care", 'ignored regions', 'ignored-regions')
_MEANING = {
    'turned': 'the upright boxes around them are learnt',
    'truncated': 'learnt as whole ones',
    'occluded': 'learnt as whole ones',
    'score': 'as predictions have: learnt as if they were certain',
    'keypoints': 'boxes are learnt, not the points',
    'parts': 'each is one object of several outlines',
}


def read_boxes(root: Path) -> OwnData:
    """Read the objects of a data set: a folder, or an annotation file with its images in the same folder.

    Raises:
        RunError: There are no images or objects, or a file cannot be read; one line that names the file.
    """
    files = [root] if root.is_file() else None
    root = root.parent if root.is_file() else root
    images = find(root, *SUFFIXES)
    if not images:
        raise RunError(f'DATA {str(root)!r}: no image in it.')
    kinds = kinds_of(root, files)
    kind = next((kind for kind in READERS if kinds.files.get(kind)), None)
    if kind is None:
        raise RunError(kinds.refusal(root, BOXES))
    photos, classes, notes = READERS[kind](kinds.files[kind], root, images)
    others = [f'{len(files)} {other} files' for other, files in kinds.files.items() if other != kind and files]
    notes += [f'{kind} is read; {", ".join(others)} beside are not'] * bool(others)
    return _own_data(root, kind, photos, classes, images, notes)


def _own_data(
    root: Path, kind: str, photos: list[Photo], classes: list[str], images: list[Path], notes: list[str]
) -> OwnData:
    if not any(photo.objects for photo in photos):
        raise RunError(f'DATA {str(root)!r}: no box in its {kind}.')
    twice = next((name for name, count in Counter(classes).items() if count > 1), None)
    if twice is not None:
        raise RunError(f'DATA {str(root)!r}: two classes have the name {twice!r}.')
    photos = list(map(_with_regions, photos))
    classes = [name for name in classes if name.lower() not in _REGIONS]
    split_by_path: dict[Path, Any] = {}
    for photo in photos:
        if photo.path in split_by_path:
            first = split_by_path[photo.path]
            raise RunError(f'{photo.path} is in {first} and again in {photo.split}; it belongs in one.')
        split_by_path[photo.path] = photo.split
    splits, more = divide(photos)
    notes = more + notes
    for split in [split for split, chosen in splits.items() if not any(photo.objects for photo in chosen)]:
        if split != 'test':
            raise RunError(f'none of the {len(splits[split])} images of {split} has a box.')
        notes.append(f'the {len(splits.pop(split))} images of test have no boxes: val is tested on')
    notes += unseen_classes(classes, splits)

    objects = [item for photo in photos for item in photo.objects]
    outlined = [bool(item.outline) for item in objects if not item.is_ignored]
    masks = bool(outlined) and all(outlined) and not all(map(_is_rectangle, objects))
    if any(outlined) and not masks:
        count = outlined.count(False)
        reason = f'{count} of {len(outlined)} objects have no outline' if count else 'all outlines are rectangles'
        notes.append(f'{reason}: boxes alone are learnt')
    written = {split: as_coco(chosen, classes, root, masks) for split, chosen in splits.items()}
    used = {path.parent for path in split_by_path}
    unnamed = sum(path not in split_by_path and path.parent in used for path in images)
    notes += [f'{unnamed} images that no annotation names are left out'] * bool(unnamed)
    notes += _notes_on(photos) + turned_notes(split_by_path)
    flat = sum(count for _, count in written.values())
    notes += [f'{flat} boxes without area are left out'] * bool(flat)
    counts = [Counter(a['image_id'] for a in coco['annotations'] if not a['iscrowd']) for coco, _ in written.values()]
    return OwnData(
        kind,
        classes,
        {split: [photo.path for photo in chosen] for split, chosen in splits.items()},
        {split: json.dumps(coco) for split, (coco, _) in written.items()},
        dict.fromkeys(splits, dict(data_prefix=dict(img=''))),
        notes,
        masks,
        max((most for count in counts for most in count.values()), default=0),
        any(item.is_ignored for item in objects),
    )


def _with_regions(photo: Photo) -> Photo:
    """Replace objects of a class that means "ignore" by regions that are ignored for every class."""
    objects = [
        item._replace(name=None, marks=item.marks | {'ignore'}) if str(item.name).lower() in _REGIONS else item
        for item in photo.objects
    ]
    return photo._replace(objects=objects)


def _notes_on(photos: list[Photo]) -> list[str]:
    """Return notes on attributes of objects, and on boxes that extend beyond the image."""
    boxes = [(photo.size, item) for photo in photos for item in photo.objects]
    beyond = sum(_reaches_beyond(size, item.box) for size, item in boxes)
    notes = [f'{beyond} of {len(boxes)} boxes reach beyond their images and are cut'] * bool(beyond)
    ignored = Counter(mark for _, item in boxes for mark in sorted(item.marks & IGNORED)[:1])
    if ignored:
        listed = ', '.join(f'{count} {mark}' for mark, count in sorted(ignored.items()))
        notes.append(f'{sum(ignored.values())} of {len(boxes)} boxes are ignored, neither learnt nor counted: {listed}')
    counts = Counter(mark for _, item in boxes for mark in item.marks - IGNORED)
    notes += [f'{counts[mark]} objects: {mark}, {meaning}' for mark, meaning in _MEANING.items() if counts[mark]]
    rest = [f'{mark} ({count})' for mark, count in sorted(counts.items()) if mark not in _MEANING]
    return notes + [f'not used of the annotations: {", ".join(rest)}'] * bool(rest)


def as_coco(photos: list[Photo], classes: list[str], root: Path, masks: bool = False) -> tuple[dict, int]:
    """Convert images and objects to a COCO data set, with boxes cut to their images, and ids from 1.

    Args:
        photos: Images and their objects. An object without a class is ignored for every class.
        classes: Class names in the order of the labels.
        root: Folder to which file names are relative.
        masks: Write outlines too.

    Returns:
        tuple[dict, int]: The data set, and the number of boxes left out because they have no area.
    """
    images: list[dict] = []
    annotations: list[dict] = []
    flat = 0
    for number, photo in enumerate(photos, 1):
        width, height = photo.size
        images.append(dict(id=number, file_name=photo.path.relative_to(root).as_posix(), width=width, height=height))
        for item in photo.objects:
            left, right = (min(max(x, 0.0), width) for x in item.box[::2])
            top, bottom = (min(max(y, 0.0), height) for y in item.box[1::2])
            if right <= left or bottom <= top:
                flat += 1
                continue
            entry = dict(image_id=number, bbox=[left, top, right - left, bottom - top], iscrowd=int(item.is_ignored))
            entry['area'] = item.area or _area(item.outline) or (right - left) * (bottom - top)
            if masks:
                entry['segmentation'] = item.outline or [[left, top, right, top, right, bottom, left, bottom]]
            for name in classes if item.name is None else [item.name]:
                annotations.append(dict(entry, id=len(annotations) + 1, category_id=classes.index(name) + 1))
    categories = [dict(id=i, name=name) for i, name in enumerate(classes, 1)]
    return dict(images=images, annotations=annotations, categories=categories), flat


def _area(outline: Any) -> float:
    parts = outline if isinstance(outline, list) else []
    return sum(float(cv2.contourArea(np.reshape(part, (-1, 2)).astype(np.float32))) for part in parts)


def _is_rectangle(item: Object) -> bool:
    """Return True if the outline is only the rectangle of the box, as some exporters write it."""
    if not isinstance(item.outline, list) or len(item.outline) != 1 or len(item.outline[0]) not in (8, 10):
        return not item.outline and item.is_ignored
    left, top, right, bottom = item.box
    return all(
        min(abs(x - left), abs(x - right)) < 1 and min(abs(y - top), abs(y - bottom)) < 1
        for x, y in np.reshape(item.outline[0], (-1, 2))
    )


def _reaches_beyond(size: tuple[int, int], box: tuple) -> bool:
    """Return True if a box extends beyond the image by more than two pixels, which allows for rounding and counting
    from 1."""
    return min(box[:2]) < -2 or box[2] > size[0] + 2 or box[3] > size[1] + 2
