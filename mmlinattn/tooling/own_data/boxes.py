# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Boxes of COCO JSON, VOC XML and YOLO text files, all as COCO JSON: upstream's reader of VOC looks for .jpg alone."""

import itertools
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any, NamedTuple, Optional

import yaml

from ...engine.data.files import fault_of_shapes, load_coco
from ...utils.errors import RunError, described
from .finding import SUFFIXES, OwnData, divide, find, image_size, read_lines, read_lists, read_names, split_of

_SPLIT_JSON = re.compile(r'(instances_)?(train|val|test)(?:ing|id|idation)?\d*\.json', re.IGNORECASE)
# of COCO, beside what has the boxes
_OTHER_COCO = ('captions', 'person_keypoints', 'image_info', 'stuff', 'panoptic')


class Photo(NamedTuple):
    """An image and what is drawn into it."""

    path: Path
    size: tuple[int, int]  # width, height
    objects: list  # (name of its class, (left, top, right, bottom) in pixels, what else COCO says)


def read_boxes(root: Path) -> OwnData:
    """The boxes of a folder, or of one COCO file beside its images.

    Raises:
        RunError: There are none, or a file is not what it seems; in one line that names it.
    """
    files = [root] if root.is_file() else [path for path in find(root, '.json') if _is_coco(path)]
    root = root.parent if root.is_file() else root
    images = find(root, *SUFFIXES)
    if not images:
        raise RunError(f'DATA {str(root)!r}: no image in it.')
    if files:
        kind, (photos, classes) = 'COCO JSON', _coco(files, root, images)
    elif find(root, '.xml'):
        kind, (photos, classes) = 'VOC XML', _voc(root, images)
    else:
        kind, (photos, classes) = 'YOLO text files', _yolo(root, images)
    if not any(photo.objects for photo, _ in photos):
        raise RunError(
            f'DATA {str(root)!r}: no box in it. Boxes are looked for in COCO JSON, VOC XML and labels/NAME.txt.'
        )
    places: dict[Path, Optional[str]] = {}
    for photo, split in photos:
        if photo.path in places:
            raise RunError(f'{photo.path} is in {places[photo.path]} and again in {split}; it belongs in one.')
        places[photo.path] = split
    splits, notes = divide(photos)
    for split in [split for split, chosen in splits.items() if not any(photo.objects for photo in chosen)]:
        if split != 'test':
            raise RunError(f'none of the {len(splits[split])} images of {split} has a box.')
        notes.append(f'the {len(splits.pop(split))} images of test have no boxes: val is tested on')
    written = {split: as_coco(chosen, classes, root) for split, chosen in splits.items()}
    used = {path.parent for path in places}
    unnamed = sum(path not in places and path.parent in used for path in images)
    notes += [f'{unnamed} images that no annotation names are left out'] * bool(unnamed)
    boxes = [(photo, *item) for chosen in splits.values() for photo in chosen for item in photo.objects]
    beyond = sum(_reaches_beyond(photo.size, box) for photo, _, box, _ in boxes)
    notes += [f'{beyond} of {len(boxes)} boxes reach beyond their images and are cut'] * bool(beyond)
    hard = sum(bool(more.get('iscrowd')) for *_, more in boxes)
    notes += [f'{hard} of {len(boxes)} boxes are of crowds or difficult: neither learnt nor counted'] * bool(hard)
    if kind.startswith('YOLO'):
        notes += _unpaired(root, images)
    flat = sum(count for _, count in written.values())
    notes += [f'{flat} boxes without area are left out'] * bool(flat)
    outlined = [bool(more.get('segmentation')) for photo, _ in photos for *_, more in photo.objects]
    if any(outlined) and not all(outlined):
        notes.append(f'{outlined.count(False)} of {len(outlined)} objects have no outline: boxes alone are learnt')
    return OwnData(
        kind,
        classes,
        {split: [photo.path for photo in chosen] for split, chosen in splits.items()},
        {split: json.dumps(coco) for split, (coco, _) in written.items()},
        dict.fromkeys(splits, dict(data_prefix=dict(img=''))),
        notes,
        all(outlined),
    )


def as_coco(photos: list[Photo], classes: list[str], root: Path) -> tuple[dict, int]:
    """A COCO data set of boxes cut to their images, and how many boxes without area were left out."""
    images: list[dict] = []
    annotations: list[dict] = []
    flat = 0
    for number, photo in enumerate(photos, 1):
        width, height = photo.size
        images.append(dict(id=number, file_name=photo.path.relative_to(root).as_posix(), width=width, height=height))
        for name, (left, top, right, bottom), more in photo.objects:
            left, right = (min(max(x, 0.0), width) for x in (left, right))
            top, bottom = (min(max(y, 0.0), height) for y in (top, bottom))
            if right <= left or bottom <= top:
                flat += 1
                continue
            box, area = [left, top, right - left, bottom - top], (right - left) * (bottom - top)
            whose = dict(id=len(annotations) + 1, image_id=number, category_id=classes.index(name) + 1, bbox=box)
            annotations.append({**dict(iscrowd=0), **more, 'area': _positive(more.get('area')) or area, **whose})
    categories = [dict(id=i, name=name) for i, name in enumerate(classes, 1)]
    return dict(images=images, annotations=annotations, categories=categories), flat


def _reaches_beyond(size: tuple[int, int], box: tuple) -> bool:
    """By more than two pixels: exporters round, and some count from 1."""
    return min(box[:2]) < -2 or box[2] > size[0] + 2 or box[3] > size[1] + 2


def _positive(number: Any) -> Any:
    return number if isinstance(number, (int, float)) and number > 0 else None


def _voc(root: Path, images: list[Path]) -> tuple[list, list[str]]:
    """Every XML file with the image of its name, and its split: of ImageSets/Main, else of its folder."""
    files = find(root, '.xml')
    lists, source = read_lists(root, 'Main', {path.stem for path in files})
    photos: list[tuple[Photo, Optional[str]]] = []
    pictures = _pictures(root, [path for path in files if not lists or path.stem in lists], images)
    for path, picture in pictures.items():
        split = lists[path.stem] if lists else split_of(path.parent.relative_to(root))
        photos.append((read_voc(path, picture), split))
    missing = set(lists) - {photo.path.stem for photo, _ in photos}
    if missing:
        raise RunError(f'{source} names {min(missing)}, of which there is no XML file.')
    found = {name for photo, _ in photos for name, *_ in photo.objects}
    classes = read_names(root, 'classes.txt', 'labelmap.txt') or sorted(found)
    if found - set(classes):
        raise RunError(f'the XML files have boxes of {min(found - set(classes))!r}, which classes.txt does not list.')
    return photos, classes


def _pictures(root: Path, files: list[Path], images: list[Path]) -> dict[Path, Optional[Path]]:
    """The image of each XML file: beside it, else in JPEGImages, else anywhere.

    Raises:
        RunError: Several would do, or one is of two files.
    """
    by_stem: dict[str, list[Path]] = {}
    for image in images:
        by_stem.setdefault(image.stem, []).append(image)

    def distance(path: Path, image: Path) -> tuple:
        ours, theirs = (each.relative_to(root).parts[:-1] for each in (path, image))
        differing = sum(a != b for a, b in itertools.zip_longest(ours, theirs))
        return ours != theirs, 'JPEGImages' not in theirs, any('Segmentation' in part for part in theirs), differing > 1

    found: dict[Path, Optional[Path]] = {}
    owners: dict[Path, Path] = {}
    for path in files:
        alike = sorted(by_stem.get(path.stem, ()), key=lambda image: distance(path, image))  # noqa: B023
        if len(alike) > 1 and distance(path, alike[0]) == distance(path, alike[1]):
            raise RunError(f'{path}: its image may be {alike[0]} or {alike[1]}; keep one.')
        found[path] = alike[0] if alike else None
        if alike and owners.setdefault(alike[0], path) != path:
            raise RunError(f'{owners[alike[0]]} and {path} are both of the image {alike[0]}.')
    return found


def read_voc(path: Path, picture: Optional[Path]) -> Photo:
    """One XML file and its image. Coordinates are taken as they are, from the left and upper edge of the image.

    Raises:
        RunError: It is no VOC annotation, or not of this image.
    """

    def text(tree: ElementTree.Element, *keys: str) -> str:
        found = tree.findtext('/'.join(keys))
        if not found:
            raise ValueError(f'{tree.tag} without {"/".join(keys)}')
        return found.strip()

    if picture is None:
        raise RunError(f'{path}: there is no image of this name.')
    try:
        tree = ElementTree.parse(path).getroot()
        given = tuple(int(float(tree.findtext(f'size/{side}') or 0)) for side in ('width', 'height'))
        objects = [
            (
                text(item, 'name'),
                tuple(float(text(item, 'bndbox', edge)) for edge in ('xmin', 'ymin', 'xmax', 'ymax')),
                dict(iscrowd=int(item.findtext('difficult') == '1')),  # which both evaluations leave out
            )
            for item in tree.iter('object')
        ]
        if not all(math.isfinite(edge) for _, box, _ in objects for edge in box):
            raise ValueError('a box that is no number')
    except (OSError, ElementTree.ParseError, ValueError) as error:
        raise RunError(f'{path} cannot be read: {described(error)}') from error
    return Photo(picture, _size(path, picture, *given), objects)


def _size(path: Path, picture: Path, width: Optional[int], height: Optional[int]) -> tuple[int, int]:
    """Width and height of an image, which have to be those of its annotations, unless they give none or 0."""
    size = image_size(picture)
    if width and height and (width, height) != size:
        raise RunError(
            f'{path} has an image of {width}x{height}, and {picture} is {size[0]}x{size[1]} (turned by EXIF?).'
        )
    return size


def _yolo(root: Path, images: list[Path]) -> tuple[list, list[str]]:
    """Every image with its text file, and its split: of data.yaml, else of its folder."""
    file, content = _yolo_settings(root)
    names = content.get('names')
    if isinstance(names, dict):
        if sorted(names, key=str) != sorted(range(len(names)), key=str):
            raise RunError(f'{file}: names have the numbers {list(names)}; they have to be 0 to {len(names) - 1}.')
        names = [names[number] for number in range(len(names))]
    elif names is not None and not isinstance(names, list):
        raise RunError(f'{file}: names = {names!r} has to be a list, or numbers and their names.')
    classes = [str(name) for name in names or ()] or read_names(root, 'classes.txt', 'labels/classes.txt', 'obj.names')
    if not classes:
        raise RunError(
            f'DATA {str(root)!r} has neither COCO JSON nor VOC XML, and for YOLO text files no class names: write '
            'classes.txt, a name a line, or data.yaml with names: [...].'
        )
    listed = _yolo_splits(root, content, images)
    has_points = 'kpt_shape' in content
    photos = []
    for path in images:
        split = listed.get(path) if listed else split_of(path.parent.relative_to(root))
        photos.append((_yolo_photo(root, path, classes, has_points), split))
    return photos, classes


def _yolo_settings(root: Path) -> tuple[Optional[Path], dict]:
    for path in sorted([*root.glob('*.yaml'), *root.glob('*.yml')]):
        try:
            content = yaml.safe_load(path.read_text(encoding='utf-8-sig'))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise RunError(f'{path} cannot be read: {described(error)}') from error
        if isinstance(content, dict) and content.get('names'):
            return path, content
    return None, {}


def _yolo_splits(root: Path, content: dict, images: list[Path]) -> dict[Path, str]:
    """The split of each image by ``train``, ``val`` and ``test`` of a data.yaml: folders, or lists of files; nothing
    where they are not below ``root``, as ``path`` of others often says."""
    known, listed, lost = {path.resolve(): path for path in images}, {}, []
    for split in ('train', 'val', 'test'):
        given = content.get(split)
        for entry in given if isinstance(given, list) else [given] if isinstance(given, str) else []:
            inside = Path(*(part for part in Path(str(entry)).parts if part not in ('..', '.', '/')))
            places = [root / str(content.get('path') or '') / str(entry), root / inside]
            place = next((place for place in places if place.exists() and place.resolve() != root.resolve()), None)
            if split != 'train' and given == content.get('train'):
                continue
            if place is None:
                lost += [] if split == 'test' else [f'{split}: {entry}']
                continue
            if place.is_file():
                found = [root / line for line in read_lines(place)]
                missing = [path for path in found if path.resolve() not in known]
                if missing:
                    raise RunError(f'{place} names the image {missing[0]}, which is not there.')
            else:
                found = find(place, *SUFFIXES)
            listed.update({known[path.resolve()]: split for path in found if path.resolve() in known})
    if lost and listed:
        raise RunError(f'{root}: the YAML file says {lost[0]!r}, which is not there, and the others are.')
    return listed if {'val', 'test'} & set(listed.values()) else {}


def _yolo_file(root: Path, path: Path) -> Path:
    """The text file of an image."""
    parts = list(path.relative_to(root).parts)
    at = next((i for i in reversed(range(len(parts))) if parts[i] in ('images', 'Images')), None)
    if at is not None:
        parts[at] = 'labels' if parts[at] == 'images' else 'Labels'
    return root.joinpath(*parts).with_suffix('.txt')


def _unpaired(root: Path, images: list[Path]) -> list[str]:
    """Notes on images without text files, and on text files beside those of others that are of no image."""
    files = {_yolo_file(root, path) for path in images}
    folders = {file.parent for file in files}
    there = {path for path in find(root, '.txt') if path.parent in folders}
    lone = [path for path in sorted(there - files) if re.match(r'\d+ [\d.]', path.read_text(errors='replace'))]
    empty = len(files - there)
    notes = [f'{empty} of {len(files)} images have no text file: they are background'] * bool(empty)
    return [*notes, *(f'{len(lone)} text files have no image, as {path}: left out' for path in lone[:1])]


def _yolo_photo(root: Path, path: Path, classes: list[str], has_points: bool = False) -> Photo:
    """An image with the boxes of its text file, polygons as boxes; without one it has no object. ``has_points``: of
    people, say, whose key points follow the box."""
    file, size = _yolo_file(root, path), image_size(path)
    objects: list[tuple] = []
    for number, line in enumerate(read_lines(file) if file.is_file() else [], 1):
        label, *values = line.split()
        try:
            numbers = [float(value) for value in values]
            name = classes[int(label)] if int(label) >= 0 else ''
        except (ValueError, IndexError):
            raise RunError(f'{file}, line {number}: {line[:60]!r}; classes are 0 to {len(classes) - 1}.') from None
        numbers = numbers[:4] if has_points else numbers
        if not name or not (len(numbers) == 4 or len(numbers) >= 6 and len(numbers) % 2 == 0):
            raise RunError(
                f'{file}, line {number}: {line[:60]!r} is no class and x y width height, or x y of a polygon.'
            )
        if not all(-0.01 <= number <= 1.01 for number in numbers):
            raise RunError(f'{file}, line {number}: {line[:60]!r}; numbers are shares of the image, from 0 to 1.')
        if len(numbers) == 4:
            x, y, w, h = numbers
            numbers = [x - w / 2, y - h / 2, x + w / 2, y + h / 2]
        xs, ys = [x * size[0] for x in numbers[::2]], [y * size[1] for y in numbers[1::2]]
        objects.append((name, (min(xs), min(ys), max(xs), max(ys)), {}))
    return Photo(path, size, objects)


def _is_coco(path: Path) -> bool:
    """Whether a JSON file has the place or the name of annotations, or begins like them."""
    if _SPLIT_JSON.fullmatch(path.name) or path.parent.name == 'annotations':
        return True
    with path.open(errors='replace') as file:
        start = file.read(4096)
        if '"categories"' in start:  # which may fill the beginning; Label Studio's notes.json has them alone
            start += file.read()
    return any(f'"{key}"' in start for key in ('images', 'annotations'))


def _coco(files: list[Path], root: Path, images: list[Path]) -> tuple[list, list[str]]:
    """The images of the files with their objects, and the classes, which have to be the same in all. A category without
    objects that others name as their group, as Roboflow writes first, is none."""
    here, photos, classes = set(images), [], None
    groups: set[str] = set()
    of_boxes = {split_of(path.relative_to(root)) for path in files if path.name.startswith('instances')}
    if of_boxes:
        files = [path for path in files if not path.name.startswith(_OTHER_COCO)]
        files = [p for p in files if p.name.startswith('instances') or split_of(p.relative_to(root)) not in of_boxes]
    for path in files:
        coco, fault = load_coco(str(path))
        if fault or not coco['images']:
            raise RunError(f'{path} {fault or "has no images"}.')
        split = split_of(path.relative_to(root))
        ids, given = [item.get('id') for item in coco['categories']], [item.get('name') for item in coco['categories']]
        if None in given:
            raise RunError(f'{path} has a category without a name.')
        names = list(map(str, given))
        if names != (classes or names) or len(set(names)) < len(names):
            raise RunError(f'{path} has the categories {names}: they have to be different, and in all files the same.')
        folder, classes = _folder(path, coco, root, here, split), names
        over = ((item.get('supercategory'), item['name']) for item in coco['categories'])
        groups.update(str(group) for group, name in over if group not in (None, name))
        objects: dict[Any, list[tuple]] = {}
        for item in coco['annotations']:
            x, y, width, height = item['bbox']
            edges = (x, y, x + width, y + height)
            objects.setdefault(item.get('image_id'), []).append((names[ids.index(item['category_id'])], edges, item))
        for image in coco['images']:
            picture = folder / _name_of(image)
            size = _size(path, picture, image.get('width'), image.get('height'))
            photos.append((Photo(picture, size, objects.pop(image.get('id'), [])), split))
        shapes = fault_of_shapes(coco)
        if shapes:
            raise RunError(f'{path} {shapes}.')
        if objects:
            raise RunError(f'{path}: annotations of image {next(iter(objects))!r}, which is not in its list of images.')
    groups -= {name for photo, _ in photos for name, *_ in photo.objects}
    return photos, [name for name in classes or [] if name not in groups]


def _name_of(image: dict) -> str:
    return str(image.get('file_name')).replace('\\', '/').removeprefix('./')


def _folder(path: Path, coco: dict, root: Path, here: set, split: Optional[str]) -> Path:
    """The folder that the file names of a COCO file are relative to, of several that of its split."""
    names = list(map(_name_of, coco['images']))
    ends = f'/{names[0]}'
    folders = sorted(Path(image.as_posix()[: -len(names[0])]) for image in here if image.as_posix().endswith(ends))
    missing = [next((name for name in names if folder / name not in here), None) for folder in folders]
    if None not in missing:
        raise RunError(f'{path} names the image {(missing or names)[0]!r}, which is in no folder below {root}.')
    folders = [folder for folder, lacks in zip(folders, missing) if lacks is None]
    for is_nearer in (
        lambda folder: split_of(folder.relative_to(root)) == split,
        lambda folder: folder.name.lower() in ('images', 'jpegimages', 'img', 'imgs'),
    ):
        folders = list(filter(is_nearer, folders)) or folders
    if len(folders) > 1:
        raise RunError(f'{path}: its images are in {folders[0]} and in {folders[1]}; keep one.')
    return folders[0]
