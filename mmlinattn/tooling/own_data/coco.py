# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Read COCO JSON, as written by COCO, CVAT, Roboflow, Label Studio and other tools."""

from collections import Counter
from pathlib import Path
from typing import Any, Optional

from ...engine.data.files import fault_of_shapes, load_coco
from ...utils.errors import RunError
from .finding import split_of
from .objects import Found, Object, Photo, checked_size, corners, marks_of

_OTHER_FILES = ('captions', 'person_keypoints', 'image_info', 'stuff', 'panoptic')  # of COCO
# keys that are read, or say nothing about an object
_READ = {'id', 'image_id', 'category_id', 'bbox', 'area', 'segmentation', 'attributes', 'rotation', 'num_keypoints'}
_READ |= {'isbbox', 'color', 'creator', 'metadata', 'dataset_id', 'width', 'height', 'extra', 'deleted'}
_OF_IMAGES = {'id', 'file_name', 'width', 'height', 'license', 'coco_url', 'flickr_url', 'date_captured', 'path', 'url'}
_OF_IMAGES |= {'dataset_id', 'extra', 'metadata', 'name', 'split', 'subset', 'flickr_640_url', 'num_annotations'}


def read_coco_files(files: list[Path], root: Path, images: list[Path]) -> Found:
    """Read COCO files that share one list of categories.

    The empty supercategory that Roboflow lists as first category is skipped.

    Raises:
        RunError: A file is damaged, or does not match its images or the other files.
    """
    known, classes, photos = set(images), list[str](), list[Photo]()
    groups: set[str] = set()
    unused: Counter = Counter()
    of_boxes = {split_of(path.relative_to(root)) for path in files if path.name.startswith('instances')}
    if of_boxes:
        files = [path for path in files if not path.name.startswith(_OTHER_FILES)]
        files = [p for p in files if p.name.startswith('instances') or split_of(p.relative_to(root)) not in of_boxes]
    for path in files:
        coco, fault = load_coco(str(path))
        fault = fault or fault_of_shapes(coco)
        if fault or not coco['images']:
            raise RunError(f'{path} {fault or "has no images"}.')
        split = split_of(path.relative_to(root))
        categories = {item.get('id'): item.get('name') for item in coco['categories']}
        if None in categories.values():
            raise RunError(f'{path} has a category without a name.')
        categories = {number: str(name) for number, name in categories.items()}
        names = list(categories.values())
        if names != (classes or names) or len(set(names)) < len(names):
            raise RunError(f'{path} has the categories {names}: expected different names, the same in all files.')
        folder, classes = _folder(path, coco, root, known, split), names
        parents = ((item.get('supercategory'), item['name']) for item in coco['categories'])
        groups.update(str(group) for group, name in parents if group not in (None, name))
        objects: dict[Any, list[Object]] = {}
        for item in coco['annotations']:
            objects.setdefault(item.get('image_id'), []).append(_object(item, categories[item['category_id']]))
        for image in coco['images']:
            picture = folder / _name_of(image)
            size = checked_size(path, picture, image.get('width'), image.get('height'))
            own = split_of(Path(str(image.get('split') or image.get('subset') or '')))
            own = split or own or split_of(picture.relative_to(folder).parent)
            photos.append(Photo(picture, size, objects.pop(image.get('id'), []), own))
            unused.update(key for key in image if key not in _OF_IMAGES and marks_of({key: image[key]}))
        if objects:
            raise RunError(f'{path}: annotations of image {next(iter(objects))!r}, which is not in its list of images.')
    groups -= {str(item.name) for photo in photos for item in photo.objects}
    listed = ', '.join(f'{key} ({count})' for key, count in sorted(unused.items()))
    notes = [f'not used of the images in COCO JSON: {listed}'] * bool(unused)
    return photos, [name for name in classes if name not in groups], notes


def _object(item: dict, name: str) -> Object:
    x, y, width, height = item['bbox']
    box = (x, y, x + width, y + height)
    attributes = item['attributes'] if isinstance(item.get('attributes'), dict) else {}
    marks = marks_of({key: value for key, value in item.items() if key not in _READ})
    marks |= marks_of({key: value for key, value in attributes.items() if key != 'rotation'})
    outline, area = item.get('segmentation') or None, item.get('area')
    turn = attributes.get('rotation', item.get('rotation'))
    if isinstance(turn, (int, float)) and turn % 180:  # CVAT: degrees clockwise, of a box given before its turn
        points = corners(box, turn)
        box = (*points.min(0).tolist(), *points.max(0).tolist())
        marks |= {'turned'}
    return Object(name, box, outline, marks, area if isinstance(area, (int, float)) and area > 0 else 0.0)


def _name_of(image: dict) -> str:
    name = image.get('file_name') or str(image.get('coco_url')).rpartition('/')[2]  # of LVIS
    return str(name).replace('\\', '/').removeprefix('./')


def _folder(path: Path, coco: dict, root: Path, known: set, split: Optional[str]) -> Path:
    """Return the folder to which file names are relative; if several fit, prefer the folder of the same split."""
    names = list(map(_name_of, coco['images']))
    suffix = f'/{names[0]}'
    folders = sorted(Path(image.as_posix()[: -len(names[0])]) for image in known if image.as_posix().endswith(suffix))
    missing = [next((name for name in names if folder / name not in known), None) for folder in folders]
    if None not in missing:
        raise RunError(f'{path} names the image {(missing or names)[0]!r}, which is in no folder below {root}.')
    folders = [folder for folder, name in zip(folders, missing) if name is None]
    for is_preferred in (
        lambda folder: split_of(folder.relative_to(root)) == split,
        lambda folder: folder.name.lower() in ('images', 'jpegimages', 'img', 'imgs'),
    ):
        folders = list(filter(is_preferred, folders)) or folders
    if len(folders) > 1:
        raise RunError(f'{path}: its images are in {folders[0]} and in {folders[1]}; keep one.')
    return folders[0]
