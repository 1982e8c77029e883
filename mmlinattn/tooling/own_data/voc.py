# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Read VOC XML with images of any suffix; the readers of MMDetection and MMSegmentation accept only .jpg."""

import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np

from ...utils.errors import RunError, described
from .data import Data
from .kinds import Source
from .objects import Claim, Object, Photo, checked_size, corners, from_points, in_names, marks_of


def read_voc_files(sources: list[Source], data: Data) -> Claim:
    """Read every XML file with its image.

    Raises:
        RunError: A file is damaged, or its image does not exist, or its name and its ``<filename>`` are of two images.
    """
    names = list[str]()
    for path, *_ in sources:
        name = Path((_parsed(path).findtext('filename') or '').strip().replace('\\', '/')).name
        named, own = data.pictures.named(name) if name else [], data.pictures.named(path.stem)
        if named and own and not set(named) & set(own):
            raise RunError(
                f'{path}: its name is that of {own[0].name}, its <filename> {name!r} is another image: correct one.'
            )
        names.append(name if named else '')
    owners = data.pictures.owners([path for path, *_ in sources], names)
    photos = [read_voc(path, picture) for picture, path in owners.items()]
    photos, classes = in_names(photos, data.names('classes.txt', 'labelmap.txt'))
    return Claim('VOC XML', photos, classes, [], 'corners', 'pixels')


def _parsed(path: Path) -> ElementTree.Element:
    try:
        return ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError) as error:
        raise RunError(f'{path} cannot be read: {described(error)}') from error


def read_voc(path: Path, picture: Path) -> Photo:
    """Read one file. Coordinates are pixels from the left and upper edge of the image, and are not shifted by 1.

    Raises:
        RunError: The file is not a VOC annotation, or belongs to another image.
    """
    tree = _parsed(path)
    try:
        objects = [_object(item) for item in tree.iter('object')]
        if not all(math.isfinite(edge) for item in objects for edge in item.box):
            raise ValueError('a box that is no number')
    except ValueError as error:
        raise RunError(f'{path} cannot be read: {described(error)}') from error
    size = [tree.findtext(f'size/{side}') for side in ('width', 'height')]
    return Photo(picture, checked_size(path, picture, *size), objects, None, path)


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
    rotated = item.find('robndbox')
    if rotated is not None:  # centre, sides, radians clockwise
        x, y, width, height, angle = (float(text('robndbox', key)) for key in ('cx', 'cy', 'w', 'h', 'angle'))
        box = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
        return from_points(text('name'), [corners(box, math.degrees(angle))], marks | {'rotated'}, is_outline=False)
    outline = item.find('polygon')
    if outline is not None and len(outline) >= 6:
        points = np.reshape([float(child.text or 'nan') for child in outline], (-1, 2))
        return from_points(text('name'), [points], marks)
    edges = tuple(float(text('bndbox', edge)) for edge in ('xmin', 'ymin', 'xmax', 'ymax'))
    return Object(text('name'), edges, None, marks, is_raw=True)
