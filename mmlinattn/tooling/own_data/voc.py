# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Read VOC XML with images of any suffix; the readers of MMDetection and MMSegmentation accept only .jpg."""

import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

import numpy as np

from .data import Source
from .objects import Object, corners, flags_of, from_points
from .reading import Entry, Reader

_SHAPES = ('name', 'bndbox', 'robndbox', 'polygon', 'segmented', 'type', 'id', 'deleted')


class Voc(Reader):
    """A file for each image. Coordinates are pixels from the upper left corner, and are not shifted by 1."""

    boxes, units, has_one_image = 'corners', 'pixels', True

    def entries(self, source: Source) -> Iterator[Entry]:
        tree = source.content
        name = (tree.findtext('filename') or '').strip()
        name = name if self.data.pictures.named(name) else ''  # files that were renamed keep their old <filename>
        yield Entry(name, tree, (tree.findtext('size/width'), tree.findtext('size/height')))

    def objects(self, content: ElementTree.Element, size: tuple[int, int]) -> Iterator[Object]:
        for item in content.iter('object'):
            read = _object(item)
            if not all(map(math.isfinite, read.box)):
                raise ValueError('a box that is no number')
            yield read


def _object(item: ElementTree.Element) -> Object:
    """Read an object: a box, a rotated box of roLabelImg, or an polygon that Roboflow writes beside the box."""

    def text(key: str) -> str:
        found = item.findtext(key)
        if not found:
            raise ValueError(f'{item.tag} without {key}')
        return found.strip()

    flags = flags_of({child.tag: child.text for child in item if child.tag not in _SHAPES and not len(child)})
    flags |= {f'<{child.tag}>' for child in item if len(child) and child.tag not in _SHAPES}
    if item.find('robndbox') is not None:  # centre, sides, radians clockwise
        x, y, width, height, angle = (float(text(f'robndbox/{key}')) for key in ('cx', 'cy', 'w', 'h', 'angle'))
        box = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
        return from_points(text('name'), [corners(box, math.degrees(angle))], flags | {'rotated'}, is_polygon=False)
    polygon = item.find('polygon')
    if polygon is not None and len(polygon) >= 6:
        points = np.reshape([float(child.text or 'nan') for child in polygon], (-1, 2))
        return from_points(text('name'), [points], flags)
    edges = tuple(float(text(f'bndbox/{edge}')) for edge in ('xmin', 'ymin', 'xmax', 'ymax'))
    return Object(text('name'), edges, None, flags, is_raw=True)
