# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Boxes of COCO JSON, VOC XML and YOLO text files, all as COCO JSON: upstream's reader of VOC looks for .jpg alone."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any, NamedTuple, Optional

import yaml

from ...engine.data.files import load_coco
from ...utils.errors import RunError, described
from .finding import SUFFIXES, OwnData, divide, find, image_size, read_names, split_of


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
        kind, classes = 'YOLO text files', _yolo_names(root)
        photos = [(_yolo_photo(root, path, classes), split_of(path.parent.relative_to(root))) for path in images]
    if not any(photo.objects for photo, _ in photos):
        raise RunError(
            f'DATA {str(root)!r}: no box in it. Boxes are looked for in COCO JSON, VOC XML and labels/NAME.txt.'
        )
    splits, notes = divide(photos)
    for split in [split for split, chosen in splits.items() if not any(photo.objects for photo in chosen)]:
        if split != 'test':
            raise RunError(f'none of the {len(splits[split])} images of {split} has a box.')
        notes.append(f'the {len(splits.pop(split))} images of test have no boxes: val is tested on')
    written = {split: as_coco(chosen, classes, root) for split, chosen in splits.items()}
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
            annotations.append({**dict(area=area, iscrowd=0), **more, **whose})
    categories = [dict(id=i, name=name) for i, name in enumerate(classes, 1)]
    return dict(images=images, annotations=annotations, categories=categories), flat


def _voc(root: Path, images: list[Path]) -> tuple[list, list[str]]:
    """Every XML file with the image of its name, and its split: of ImageSets/Main, else of its folder."""
    beside = {path.with_suffix(''): path for path in images}
    anywhere = {path.stem: path for path in images}
    lists: dict[str, str] = {}
    for name in ('trainval', 'train', 'val', 'test'):
        listed = root / 'ImageSets' / 'Main' / f'{name}.txt'
        if listed.is_file():
            stems = (line.split()[0] for line in listed.read_text().splitlines() if line.strip())
            lists.update(dict.fromkeys(stems, name.replace('trainval', 'train')))
    photos = []
    for path in find(root, '.xml'):
        if not lists or path.stem in lists:
            picture = beside.get(path.with_suffix('')) or anywhere.get(path.stem)
            split = lists[path.stem] if lists else split_of(path.parent.relative_to(root))
            photos.append((read_voc(path, picture), split))
    missing = set(lists) - {photo.path.stem for photo, _ in photos}
    if missing:
        raise RunError(f'{root / "ImageSets" / "Main"} names {min(missing)}, of which there is no XML file.')
    found = {name for photo, _ in photos for name, *_ in photo.objects}
    classes = read_names(root, 'classes.txt', 'labelmap.txt') or sorted(found)
    if found - set(classes):
        raise RunError(f'the XML files have boxes of {min(found - set(classes))!r}, which classes.txt does not list.')
    return photos, classes


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


def _yolo_names(root: Path) -> list[str]:
    for path in sorted([*root.glob('*.yaml'), *root.glob('*.yml')]):
        try:
            names = (yaml.safe_load(path.read_text(encoding='utf-8')) or {}).get('names')
        except (yaml.YAMLError, AttributeError) as error:
            raise RunError(f'{path} cannot be read: {described(error)}') from error
        if names:
            return [str(names[i]) for i in sorted(names, key=int)] if isinstance(names, dict) else list(map(str, names))
    found = read_names(root, 'classes.txt', 'labels/classes.txt', 'obj.names')
    if not found:
        raise RunError(
            f'DATA {str(root)!r} has neither COCO JSON nor VOC XML, and for YOLO text files no class names: write '
            'classes.txt, a name a line, or data.yaml with names: [...].'
        )
    return found


def _yolo_photo(root: Path, path: Path, classes: list[str]) -> Photo:
    """An image with the boxes of its text file, polygons as boxes; without one it has no object."""
    parts = list(path.relative_to(root).parts)
    if 'images' in parts:
        parts[len(parts) - 1 - parts[::-1].index('images')] = 'labels'
    file, size = root.joinpath(*parts).with_suffix('.txt'), image_size(path)
    objects: list[tuple] = []
    for number, line in enumerate(file.read_text().splitlines() if file.is_file() else [], 1):
        label, *values = line.split() or ['']
        try:
            numbers = [float(value) for value in values]
            name = classes[int(label)] if label and int(label) >= 0 else ''
        except (ValueError, IndexError):
            raise RunError(f'{file}, line {number}: {line[:60]!r}; classes are 0 to {len(classes) - 1}.') from None
        if not line.strip():
            continue
        if not name or not (len(numbers) == 4 or len(numbers) >= 6 and len(numbers) % 2 == 0):
            raise RunError(
                f'{file}, line {number}: {line[:60]!r} is no class and x y width height, or x y of a polygon.'
            )
        if min(numbers) < -0.01 or max(numbers) > 1.01:
            raise RunError(f'{file}, line {number}: {line[:60]!r}; numbers are shares of the image, from 0 to 1.')
        if len(numbers) == 4:
            x, y, w, h = numbers
            numbers = [x - w / 2, y - h / 2, x + w / 2, y + h / 2]
        xs, ys = [x * size[0] for x in numbers[::2]], [y * size[1] for y in numbers[1::2]]
        objects.append((name, (min(xs), min(ys), max(xs), max(ys)), {}))
    return Photo(path, size, objects)


def _is_coco(path: Path) -> bool:
    """Whether a JSON file is in a place where annotations are, or begins like them."""
    if split_of(Path(path.name)) or path.parent.name == 'annotations':
        return True
    with path.open(errors='replace') as file:
        start = file.read(4096)
    return any(f'"{key}"' in start for key in ('images', 'annotations', 'categories'))


def _coco(files: list[Path], root: Path, images: list[Path]) -> tuple[list, list[str]]:
    """The images of the files with their objects, and the classes, which have to be the same in all."""
    here, photos, classes = set(images), [], None
    for path in [path for path in files if path.name.startswith('instances')] or files:  # beside captions, key points
        coco, fault = load_coco(str(path))
        if fault or not coco['images']:
            raise RunError(f'{path} {fault or "has no images"}.')
        split = split_of(path.relative_to(root))
        ids, names = [item.get('id') for item in coco['categories']], [item.get('name') for item in coco['categories']]
        if names != (classes or names) or len(set(names)) < len(names):
            raise RunError(f'{path} has the categories {names}: they have to be different, and in all files the same.')
        folder, classes = _folder(path, coco, root, here, split), names
        objects: dict[Any, list[tuple]] = {}
        for item in coco['annotations']:
            x, y, width, height = item['bbox']
            edges = (x, y, x + width, y + height)
            objects.setdefault(item.get('image_id'), []).append((names[ids.index(item['category_id'])], edges, item))
        for image in coco['images']:
            picture = folder / image['file_name']
            size = _size(path, picture, image.get('width'), image.get('height'))
            photos.append((Photo(picture, size, objects.pop(image.get('id'), [])), split))
        if objects:
            raise RunError(f'{path}: annotations of image {next(iter(objects))!r}, which is not in its list of images.')
    return photos, classes or []


def _folder(path: Path, coco: dict, root: Path, here: set, split: Optional[str]) -> Path:
    """The folder that the file names of a COCO file are relative to."""
    names = [str(image.get('file_name')) for image in coco['images']]
    folders = [Path(image.as_posix()[: -len(names[0])]) for image in here if image.as_posix().endswith(f'/{names[0]}')]
    folders.sort(key=lambda folder: (split_of(folder.relative_to(root)) != split, len(folder.parts)))
    missing = [next((name for name in names if folder / name not in here), None) for folder in folders]
    if None not in missing:
        raise RunError(f'{path} names the image {(missing or names)[0]!r}, which is in no folder below {root}.')
    return folders[missing.index(None)]
