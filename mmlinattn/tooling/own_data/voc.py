# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Read VOC XML with images of any suffix; the readers of MMDetection and MMSegmentation accept only .jpg."""

import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np

from ...utils.errors import RunError, described
from .finding import read_lists, read_names, split_of
from .objects import Found, Object, Photo, Pictures, checked_size, corners, from_points, marks_of


def read_voc_files(files: list[Path], root: Path, images: list[Path]) -> Found:
    """Read every XML file with its image. The split comes from ImageSets/Main, or else from the folder.

    Raises:
        RunError: A file is damaged, or its image does not exist.
    """
    lists, source = read_lists(root, 'Main', {path.stem for path in files})
    pictures, owners, photos = Pictures(root, images), dict[Path, Path](), list[Photo]()
    for path in [path for path in files if not lists or path.stem in lists]:
        picture = pictures.find(path, path.stem)
        if owners.setdefault(picture, path) != path:
            raise RunError(f'{owners[picture]} and {path} are both of the image {picture}.')
        split = lists[path.stem] if lists else split_of(path.parent.relative_to(root))
        photos.append(read_voc(path, picture)._replace(split=split))
    missing = set(lists) - {photo.path.stem for photo in photos}
    if missing:
        raise RunError(f'{source} names {min(missing)}, of which there is no XML file.')
    found = {str(item.name) for photo in photos for item in photo.objects}
    classes = read_names(root, 'classes.txt', 'labelmap.txt') or sorted(found)
    if found - set(classes):
        raise RunError(f'the XML files have boxes of {min(found - set(classes))!r}, which classes.txt does not list.')
    return photos, classes, []


def read_voc(path: Path, picture: Path) -> Photo:
    """Read one XML file. Coordinates are pixels from the left and upper edge of the image, and are not shifted by 1.

    Raises:
        RunError: The file is not a VOC annotation, or belongs to another image.
    """
    try:
        tree = ElementTree.parse(path).getroot()
        size = [tree.findtext(f'size/{side}') for side in ('width', 'height')]
        objects = [_object(item) for item in tree.iter('object')]
        if not all(math.isfinite(edge) for item in objects for edge in item.box):
            raise ValueError('a box that is no number')
    except (OSError, ElementTree.ParseError, ValueError) as error:
        raise RunError(f'{path} cannot be read: {described(error)}') from error
    return Photo(picture, checked_size(path, picture, *size), objects)


def _object(item: ElementTree.Element) -> Object:
    """Read an object: a box, a rotated box of roLabelImg, or an outline that Roboflow writes beside the box."""

    def text(*keys: str) -> str:
        found = item.findtext('/'.join(keys))
        if not found:
            raise ValueError(f'{item.tag} without {"/".join(keys)}')
        return found.strip()

    shapes = ('name', 'bndbox', 'robndbox', 'polygon', 'segmented', 'type', 'id', 'deleted')
    marks = marks_of({child.tag: child.text for child in item if child.tag not in shapes and not len(child)})
    marks |= {f'<{child.tag}>' for child in item if len(child) and child.tag not in shapes}
    turned = item.find('robndbox')
    if turned is not None:  # centre, sides, radians clockwise
        x, y, width, height, angle = (float(text('robndbox', key)) for key in ('cx', 'cy', 'w', 'h', 'angle'))
        box = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
        return from_points(text('name'), [corners(box, math.degrees(angle))], marks | {'turned'}, is_outline=False)
    outline = item.find('polygon')
    if outline is not None and len(outline) >= 6:
        points = np.reshape([float(child.text or 'nan') for child in outline], (-1, 2))
        return from_points(text('name'), [points], marks)
    edges = tuple(float(text('bndbox', edge)) for edge in ('xmin', 'ymin', 'xmax', 'ymax'))
    return Object(text('name'), edges, None, marks)
