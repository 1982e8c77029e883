# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Read LabelMe JSON, CVAT XML 1.1, Label Studio JSON, and VOC XML with images of any suffix."""

import base64
import io
import itertools
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Hashable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from ...utils.errors import RunError
from .data import Source
from .images import SUFFIXES
from .reading import Entry, Object, Reader, corners, ellipse, flags_of, from_points


class _Shape(NamedTuple):
    """Shape of a labelling tool. ``points`` are (N, 2) in pixels, or the pixels of a mask (H, W) bool. Polygons of one
    ``group`` and name are parts of one object."""

    name: str
    points: np.ndarray
    is_polygon: bool
    flags: frozenset
    group: Hashable = None


class _ShapeReader(Reader):
    """Base class of the readers of LabelMe, CVAT and Label Studio files, which hold shapes. Polygons and masks of one
    name and group become one object. Masks become run lengths."""

    def shapes(self, content: Any, size: tuple[int, int]) -> Iterator[_Shape]:
        """Yield the shapes of an entry with this ``content``; ``size`` is width and height of the image."""
        raise NotImplementedError

    def objects(self, content: Any, size: tuple[int, int]) -> Iterator[Object]:
        groups: dict[tuple, list[_Shape]] = {}
        for number, shape in enumerate(self.shapes(content, size)):
            is_grouped, is_mask = shape.group not in (None, 0, '', '0'), shape.points.dtype == bool
            if is_grouped and not shape.is_polygon:
                shape = shape._replace(flags=shape.flags | {'group'})
            key = (shape.name, is_mask, shape.group) if is_grouped and shape.is_polygon else (number,)
            groups.setdefault(key, []).append(shape)
        for several in groups.values():
            flags = frozenset().union(*(shape.flags for shape in several)) | ({'parts'} if len(several) > 1 else set())
            name, points = several[0].name, [shape.points for shape in several]
            if points[0].dtype == bool:
                yield _object_of_mask(name, np.any(points, axis=0), flags)
            else:
                yield from_points(name, points, flags, several[0].is_polygon)


def _object_of_mask(name: str, mask: np.ndarray, flags: frozenset) -> Object:
    """Return an object with the run lengths of a mask (H, W) bool, and the box around it."""
    from pycocotools import mask as coco_masks

    rle = coco_masks.encode(np.asfortranarray(mask.astype(np.uint8)))
    left, top, width, height = coco_masks.toBbox(rle).tolist()
    segmentation = dict(size=list(rle['size']), counts=rle['counts'].decode())
    return Object(name, (left, top, left + width, top + height), segmentation, flags, float(mask.sum()))


def _placed(mask: np.ndarray, left: float, top: float, size: tuple[int, int]) -> np.ndarray:
    """Return a mask of the image ``size`` (width, height), with ``mask`` placed at ``left``, ``top`` and cut."""
    whole = Image.new('1', size)
    whole.paste(Image.fromarray(mask), (int(left), int(top)))
    return np.array(whole)


_OF_SHAPES = {'label', 'points', 'shape_type', 'group_id', 'flags', 'mask', 'attributes', 'direction', 'kie_linking'}


class LabelMe(_ShapeReader):
    """JSON of LabelMe and X-AnyLabeling, a file for each image."""

    has_one_image = True

    def entries(self, source: Source) -> Iterator[Entry]:
        content = source.content
        self.unused.update(f'flag {flag}' for flag in flags_of(content.get('flags') or {}))
        size = content.get('imageWidth'), content.get('imageHeight')
        yield Entry(str(content.get('imagePath') or ''), content['shapes'], size)

    def shapes(self, content: Any, size: tuple[int, int]) -> Iterator[_Shape]:
        for shape in content:
            kind, points = shape.get('shape_type') or 'polygon', np.reshape(np.asarray(shape['points'], float), (-1, 2))
            flags = flags_of({key: value for key, value in shape.items() if key not in _OF_SHAPES})
            flags |= flags_of(shape.get('flags') or {}) | flags_of(shape.get('attributes') or {})
            if kind == 'circle':  # its centre and a point of its edge
                radius = float(np.hypot(*(points[1] - points[0])))
                points = ellipse(points[0, 0], points[0, 1], radius, radius)
            elif kind == 'mask':
                with Image.open(io.BytesIO(base64.b64decode(shape['mask']))) as image:
                    points = _placed(np.asarray(image) > 0, points[0, 0], points[0, 1], size)
            elif kind == 'rotation':
                flags |= {'rotated'}
            elif kind != 'rectangle' and (kind != 'polygon' or len(points) < 3):
                self.lost[kind] += 1
                continue
            is_polygon = kind not in ('rectangle', 'rotation')
            yield _Shape(str(shape['label']), points, is_polygon, flags, shape.get('group_id'))


class Cvat(_ShapeReader):
    """CVAT XML 1.1 for images."""

    def entries(self, source: Source) -> Iterator[Entry]:
        tree = source.content
        if tree.find('track') is not None:
            raise RunError(f'{source.path} is CVAT XML for videos: export "CVAT for images 1.1" or COCO JSON.')
        for label in tree.iter('label'):
            name = (label.findtext('name') or '').strip()
            if name and name not in self.classes and not (label.findtext('parent') or '').strip():
                self.classes.append(name)
        for image in tree.iter('image'):
            name = image.get('name', '')
            folders = f'{name.rpartition("/")[0]}/{image.get("subset", "")}'.strip('/')
            yield Entry(name, image, (image.get('width'), image.get('height')), folders)

    def shapes(self, content: Any, size: tuple[int, int]) -> Iterator[_Shape]:
        for shape in content:
            kind, values, numbers = shape.tag, shape.attrib, dict[str, float]()
            for key, value in values.items():
                with suppress(ValueError):
                    numbers[key] = float(value)
            turn, flags = numbers.get('rotation', 0.0), flags_of(dict(occluded=values.get('occluded')))
            flags |= flags_of({str(each.get('name')): each.text for each in shape.iter('attribute')})
            if kind == 'box':
                points = corners(tuple(numbers[key] for key in ('xtl', 'ytl', 'xbr', 'ybr')), turn)
                flags |= {'rotated'} if turn % 180 else set()
            elif kind == 'polygon':
                points = np.array([pair.split(',') for pair in values['points'].split(';')], float)
            elif kind == 'ellipse':
                points = ellipse(numbers['cx'], numbers['cy'], numbers['rx'], numbers['ry'], turn)
            elif kind == 'mask':  # run lengths of rows, background first
                runs = [int(run) for run in values['rle'].split(',')]
                part = np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(
                    int(numbers['height']), int(numbers['width'])
                )
                points = _placed(part, numbers['left'], numbers['top'], size)
            else:
                self.lost[kind] += 1
                continue
            yield _Shape(values['label'], points, kind != 'box', flags, values.get('group_id'))


class LabelStudio(_ShapeReader):
    """JSON and JSON-MIN of Label Studio. Tasks without annotations are left out."""

    def entries(self, source: Source) -> Iterator[Entry]:
        several, unlabelled = 0, 0
        for task in source.content:
            given = [
                each for each in task.get('annotations') or task.get('completions') or () if isinstance(each, dict)
            ]
            results = [each for each in given if 'result' in each and not each.get('was_cancelled')]
            if 'annotations' not in task and 'completions' not in task:  # JSON-MIN has the values beside the image
                lists = (value for value in task.values() if isinstance(value, list))
                shapes = [each for each in itertools.chain(*lists) if isinstance(each, dict)]
                results = [dict(result=[dict(value=shape, **shape) for shape in shapes])]
            several += len(results) > 1
            unlabelled += not results
            if results:
                shapes = results[0]['result']
                sizes = [(each.get('original_width'), each.get('original_height')) for each in shapes]
                size = next((size for size in sizes if all(size)), (None, None))
                yield Entry(self._address(task.get('data') or task), shapes, size)
        if unlabelled:
            self.notes.append(f'{unlabelled} tasks without annotation are left out, predictions do not count')
        if several:
            self.notes.append(f'{several} tasks have several annotations: the first is read')

    def _address(self, data: dict) -> str:
        """Return path or URL of a task's image: its first string with the ending of an image, else its first string."""
        texts = [value for value in data.values() if isinstance(value, str)]
        names = [text for text in texts if text.lower().partition('?d=')[0].partition('?')[0].endswith(SUFFIXES)]
        names += [text for text in texts if text.lower().endswith(SUFFIXES)]
        images = {path: name for name in names for path in self.data.pictures.named(name)[:1]}
        if len(images) > 1:
            raise ValueError(f'a task has several images, {" and ".join(images.values())}: label them in tasks of one')
        return (names or texts or [''])[0]

    def shapes(self, content: Any, size: tuple[int, int]) -> Iterator[_Shape]:
        named = {result.get('id') for result in content if _names_of(result)}  # a region may be in two results
        for result in content:
            value, names = result.get('value'), _names_of(result)
            if not names:
                is_region = result.get('type') == 'rectangle' and result.get('id') not in named
                kind = 'rectangle without label' if is_region else result.get('type')
                self.lost.update({kind} - {None, 'rectangle', 'relation'})
                continue
            if result.get('image_rotation'):
                raise ValueError('the image was turned in Label Studio: turn the files, and label anew')
            if 'rle' in value:
                raise ValueError('it has brush masks: export them as "Brush labels to PNG" or COCO JSON')
            flags, turn = flags_of(dict(score=result.get('score'))), float(value.get('rotation') or 0)
            keys, is_polygon = ('x', 'y', 'radiusX', 'radiusY'), 'points' in value or 'radiusX' in value
            if not is_polygon and 'width' in value and 'keypointlabels' not in value:
                keys = ('x', 'y', 'width', 'height')
            elif not is_polygon:
                self.lost[str(result.get('type', 'keypoint'))] += 1
                continue
            rows = value['points'] if 'points' in value else [[value[key] for key in keys]]
            numbers = np.asarray(rows, float).reshape(-1, 2) * (np.array(size) / 100)  # of percent
            if 'points' in value:
                points = numbers
            elif is_polygon:
                x, y, rx, ry = numbers.ravel()
                points = ellipse(x, y, rx, ry, turn)
            else:
                points = corners((*numbers[0], *numbers.sum(0)), turn, pivot=tuple(numbers[0]))
                flags |= {'rotated'} if turn % 180 else set()
            for name in names:
                yield _Shape(str(name), points, is_polygon, flags)


def _names_of(result: dict) -> list:
    """Return the class names of a result of Label Studio: the value of a key such as ``rectanglelabels``."""
    value = result.get('value')
    values = value.items() if isinstance(value, dict) else ()
    return next((names for key, names in values if key.endswith('labels') and names), [])


_OF_VOC = ('name', 'bndbox', 'robndbox', 'polygon', 'segmented', 'type', 'id', 'deleted')


class Voc(Reader):
    """A file for each image. Coordinates are pixels from the upper left corner, and are not shifted by 1."""

    boxes, units, has_one_image = 'corners', 'pixels', True

    def entries(self, source: Source) -> Iterator[Entry]:
        tree = source.content
        name = (tree.findtext('filename') or '').strip()
        name = name if self.data.pictures.named(name) else ''  # files that were renamed keep their old <filename>
        yield Entry(name, tree, (tree.findtext('size/width'), tree.findtext('size/height')))

    def objects(self, content: ElementTree.Element, size: tuple[int, int]) -> Iterator[Object]:
        """Yield boxes, rotated boxes of roLabelImg, and polygons that Roboflow writes beside the box."""
        for item in content.iter('object'):
            name = _text(item, 'name')
            flags = flags_of({child.tag: child.text for child in item if child.tag not in _OF_VOC and not len(child)})
            flags |= {f'<{child.tag}>' for child in item if len(child) and child.tag not in _OF_VOC}
            polygon = item.find('polygon')
            if item.find('robndbox') is not None:  # centre, sides, radians clockwise
                x, y, w, h, angle = (float(_text(item, f'robndbox/{key}')) for key in ('cx', 'cy', 'w', 'h', 'angle'))
                points = corners((x - w / 2, y - h / 2, x + w / 2, y + h / 2), math.degrees(angle))
                yield from_points(name, [points], flags | {'rotated'}, is_polygon=False)
            elif polygon is not None and len(polygon) >= 6:
                yield from_points(name, [[float(child.text or 'nan') for child in polygon]], flags)
            else:
                edges = (float(_text(item, f'bndbox/{edge}')) for edge in ('xmin', 'ymin', 'xmax', 'ymax'))
                yield Object(name, tuple(edges), None, flags, is_raw=True)


def _text(item: ElementTree.Element, key: str) -> str:
    found = item.findtext(key)
    if not found:
        raise ValueError(f'{item.tag} without {key}')
    return found.strip()
