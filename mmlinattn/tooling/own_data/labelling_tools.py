# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Read LabelMe JSON, CVAT XML 1.1 and Label Studio JSON."""

import base64
import io
import itertools
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
from PIL import Image

from ...utils.errors import RunError, described
from .data import Data
from .images import SUFFIXES
from .kinds import Source
from .names import shared_key
from .objects import Claim, Object, Photo, checked_size, corners, ellipse, from_points, in_names, in_order, marks_of


class _Shape(NamedTuple):
    name: str
    points: np.ndarray  # (N, 2) pixels, or the pixels of a mask (H, W) bool
    is_outline: bool
    marks: frozenset
    group: Hashable = None  # outlines of one group and name are parts of one object


def _objects(shapes: Iterator[_Shape]) -> list[Object]:
    """Convert shapes to objects: outlines with one name and group become one object, and masks become run lengths."""
    found: list[Object] = []
    groups: dict[tuple, list[_Shape]] = {}
    for number, shape in enumerate(shapes):
        is_grouped, is_mask = shape.group not in (None, 0, '', '0'), shape.points.dtype == bool
        if is_grouped and not shape.is_outline:
            shape = shape._replace(marks=shape.marks | {'group'})
        key = (shape.name, is_mask, shape.group) if is_grouped and shape.is_outline else (number,)
        groups.setdefault(key, []).append(shape)
    for several in groups.values():
        marks = frozenset().union(*(shape.marks for shape in several)) | ({'parts'} if len(several) > 1 else set())
        name, points = several[0].name, [shape.points for shape in several]
        if points[0].dtype == bool:
            found.append(_of_mask(name, np.any(points, axis=0), marks))
        else:
            found.append(from_points(name, points, marks, several[0].is_outline))
    return found


def _of_mask(name: str, mask: np.ndarray, marks: frozenset) -> Object:
    from pycocotools import mask as coco_masks

    rle = coco_masks.encode(np.asfortranarray(mask.astype(np.uint8)))
    left, top, width, height = coco_masks.toBbox(rle).tolist()
    outline = dict(size=list(rle['size']), counts=rle['counts'].decode())
    return Object(name, (left, top, left + width, top + height), outline, marks, float(mask.sum()))


def _placed(mask: np.ndarray, left: int, top: int, size: tuple[int, int]) -> np.ndarray:
    """Return a mask of the image ``size``, with the given part placed at ``left``, ``top``."""
    whole = np.zeros(size[::-1], bool)
    part = mask[: size[1] - top, : size[0] - left]
    whole[top : top + part.shape[0], left : left + part.shape[1]] = part
    return whole


def _listed(data: Data, photos: list[Photo], *listed: str) -> Optional[list[str]]:
    """Return the class names of a list file (or ``listed``), without LabelMe's ``__ignore__`` and ``_background_``."""
    found = {str(item.name) for photo in photos for item in photo.objects}
    names = data.names('classes.txt', 'labels.txt')
    if names is None and listed:
        names = [*listed, *in_order(found - set(listed))]
    return [name for name in names or () if name in found or not name.startswith('_')] or None


def _left_out(counts: Counter) -> list[str]:
    listed = ', '.join(f'{count} of kind {kind}' for kind, count in sorted(counts.items()))
    return [f'shapes that are no boxes or outlines are left out: {listed}'] * bool(counts)


# -- LabelMe ----------------------------------------------------------------------------------------------------------

_OF_SHAPES = {'label', 'points', 'shape_type', 'group_id', 'flags', 'mask', 'attributes', 'direction', 'kie_linking'}


def read_labelme(sources: list[Source], data: Data) -> Claim:
    """Read LabelMe and X-AnyLabeling JSON, one file for each image.

    Raises:
        RunError: A file is damaged, or its image does not exist.
    """
    photos, lost, flags = list[Photo](), Counter[str](), set[str]()
    keys = {shared_key(data.rel(path).parent) for path, *_ in sources}
    for path, _, content in sources:
        name = str(content.get('imagePath') or '')
        if name and (data.pictures.named(name) or not data.pictures.named(path.stem)):
            (picture,) = data.pictures.find(path, [name])
        else:
            picture = data.pictures.of_label(path, keys)
        size = checked_size(path, picture, content.get('imageWidth'), content.get('imageHeight'))
        flags |= marks_of(content.get('flags') or {})
        try:
            objects = _objects(_labelme_shapes(content['shapes'], size, lost))
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise RunError(f'{path} cannot be read: {described(error)}') from error
        photos.append(Photo(picture, size, objects, None, path))
    notes = [f'not used of the images: flags {", ".join(sorted(flags))}'] if flags else []
    photos, classes = in_names(photos, _listed(data, photos))
    return Claim('LabelMe JSON', photos, classes, notes + _left_out(lost))


def _labelme_shapes(shapes: list[dict], size: tuple[int, int], lost: Counter) -> Iterator[_Shape]:
    for shape in shapes:
        kind, points = shape.get('shape_type') or 'polygon', np.reshape(np.asarray(shape['points'], float), (-1, 2))
        marks = marks_of({key: value for key, value in shape.items() if key not in _OF_SHAPES})
        marks |= marks_of(shape.get('flags') or {}) | marks_of(shape.get('attributes') or {})
        if kind == 'circle':  # its centre and a point of its edge
            radius = float(np.hypot(*(points[1] - points[0])))
            points = ellipse(points[0, 0], points[0, 1], radius, radius)
        elif kind == 'mask':
            with Image.open(io.BytesIO(base64.b64decode(shape['mask']))) as image:
                points = _placed(np.asarray(image) > 0, int(points[0, 0]), int(points[0, 1]), size)
        elif kind == 'rotation':
            marks |= {'rotated'}
        elif kind != 'rectangle' and (kind != 'polygon' or len(points) < 3):
            lost[kind] += 1
            continue
        is_outline = kind not in ('rectangle', 'rotation')
        yield _Shape(str(shape['label']), points, is_outline, marks, shape.get('group_id'))


# -- CVAT -------------------------------------------------------------------------------------------------------------


def read_cvat(sources: list[Source], data: Data) -> Claim:
    """Read CVAT XML 1.1 for images.

    Raises:
        RunError: A file is damaged or is for videos, or an image does not exist.
    """
    photos, lost, labels = list[Photo](), Counter[str](), list[str]()
    for path, *_ in sources:
        try:
            tree = ElementTree.parse(path).getroot()
        except (OSError, ElementTree.ParseError) as error:
            raise RunError(f'{path} cannot be read: {described(error)}') from error
        if tree.find('track') is not None:
            raise RunError(f'{path} is CVAT XML for videos: export "CVAT for images 1.1" or COCO JSON.')
        listed = [label for label in tree.iter('label') if label.find('name') is not None]
        labels += [str(label.findtext('name')) for label in listed if not (label.findtext('parent') or '').strip()]
        images = list(tree.iter('image'))
        pictures = data.pictures.find(path, [image.get('name', '') for image in images])
        of_file = data.splits.of(data.rel(path), is_file=True)
        for image, picture in zip(images, pictures):
            size = checked_size(path, picture, image.get('width'), image.get('height'))
            try:
                objects = _objects(_cvat_shapes(image, size, lost))
            except (KeyError, TypeError, ValueError) as error:
                raise RunError(f'{path}, image {image.get("name")!r}: {described(error)}.') from error
            own = Path(image.get('subset', '')), Path(image.get('name', '')).parent
            split = next(filter(None, map(data.splits.of, own)), of_file)
            photos.append(Photo(picture, size, objects, split, path))
    photos, classes = in_names(photos, _listed(data, photos, *dict.fromkeys(labels)))
    return Claim('CVAT XML', photos, classes, _left_out(lost))


def _cvat_shapes(image: ElementTree.Element, size: tuple[int, int], lost: Counter) -> Iterator[_Shape]:
    for shape in image:
        kind, values = shape.tag, shape.attrib
        numbers = {key: float(value) for key, value in values.items() if _is_number(value)}
        turn, marks = numbers.get('rotation', 0.0), marks_of(dict(occluded=values.get('occluded')))
        marks |= marks_of({str(each.get('name')): each.text for each in shape.iter('attribute')})
        if kind == 'box':
            points = corners(tuple(numbers[key] for key in ('xtl', 'ytl', 'xbr', 'ybr')), turn)
            marks |= {'rotated'} if turn % 180 else set()
        elif kind == 'polygon':
            points = np.array([pair.split(',') for pair in values['points'].split(';')], float)
        elif kind == 'ellipse':
            points = ellipse(numbers['cx'], numbers['cy'], numbers['rx'], numbers['ry'], turn)
        elif kind == 'mask':  # run lengths of rows, background first
            left, top, width, height = (int(numbers[key]) for key in ('left', 'top', 'width', 'height'))
            runs = [int(run) for run in values['rle'].split(',')]
            part = np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(height, width)
            points = _placed(part, left, top, size)
        else:
            lost[kind] += 1
            continue
        yield _Shape(values['label'], points, kind != 'box', marks, values.get('group_id'))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# -- Label Studio -----------------------------------------------------------------------------------------------------


def read_label_studio(sources: list[Source], data: Data) -> Claim:
    """Read Label Studio's JSON or JSON-MIN. Tasks without annotations are left out.

    Raises:
        RunError: A file is damaged, has brush masks or rotated images, or an image does not exist.
    """
    photos, lost, several, open_tasks = list[Photo](), Counter[str](), 0, 0
    for path, _, content in sources:
        tasks: list[tuple[dict, list[dict]]] = []
        for task in content:
            results = [each for each in task.get('annotations') or task.get('completions') or () if _counts(each)]
            if 'annotations' not in task and 'completions' not in task:  # JSON-MIN has the values beside the image
                lists = (value for value in task.values() if isinstance(value, list))
                shapes = [each for each in itertools.chain(*lists) if isinstance(each, dict)]
                results = [dict(result=[dict(value=shape, **shape) for shape in shapes])]
            several += len(results) > 1
            open_tasks += not results
            tasks += [(task, results[0]['result'])] if results else []
        addresses = [_address(task.get('data') or task) for task, _ in tasks]
        of_file = data.splits.of(data.rel(path), is_file=True)
        for (task, shapes), picture in zip(tasks, data.pictures.find(path, addresses, is_upload=True)):
            size = checked_size(path, picture)
            try:
                objects = _objects(_studio_shapes(shapes, path, picture, lost))
            except (KeyError, TypeError, ValueError) as error:
                raise RunError(f'{path}, task {task.get("id", picture.name)}: {described(error)}.') from error
            photos.append(Photo(picture, size, objects, of_file, path))
    notes = [f'{open_tasks} tasks without annotation are left out, predictions do not count'] if open_tasks else []
    notes += [f'{several} tasks have several annotations: the first is read'] if several else []
    photos, classes = in_names(photos, _listed(data, photos))
    return Claim('Label Studio JSON', photos, classes, notes + _left_out(lost))


def _counts(annotation: Any) -> bool:
    return isinstance(annotation, dict) and 'result' in annotation and not annotation.get('was_cancelled')


def _address(data: dict) -> str:
    """Return the image address of a task: the first string that ends like an image file, or else the first string."""
    texts = [value for value in data.values() if isinstance(value, str)]
    names = [text for text in texts if text.lower().partition('?d=')[0].partition('?')[0].endswith(SUFFIXES)]
    names += [text for text in texts if text.lower().endswith(SUFFIXES)]
    return (names or texts or [''])[0]


def _studio_shapes(results: list[dict], path: Path, picture: Path, lost: Counter) -> Iterator[_Shape]:
    for result in results:
        value = result.get('value')
        names = next((v for k, v in (value or {}).items() if k.endswith('labels') and v), None)
        if not isinstance(value, dict) or not names:
            lost.update([str(result.get('type'))] * (result.get('type') not in (None, 'rectangle', 'relation')))
            continue
        size = checked_size(path, picture, result.get('original_width'), result.get('original_height'))
        if result.get('image_rotation'):
            raise RunError(f'{path} has images that were turned in Label Studio: turn the files, and label anew.')
        if 'rle' in value:
            raise RunError(f'{path} has brush masks: export them as "Brush labels to PNG" or COCO JSON.')
        marks, turn = marks_of(dict(score=result.get('score'))), float(value.get('rotation') or 0)
        share = np.array(size) / 100  # of percent
        if 'points' in value:
            points = np.asarray(value['points'], float) * share
        elif 'radiusX' in value:
            x, y, rx, ry = np.array([value[key] for key in ('x', 'y', 'radiusX', 'radiusY')], float) * np.tile(share, 2)
            points = ellipse(x, y, rx, ry, turn)
        elif 'width' in value and 'keypointlabels' not in value:
            x, y, w, h = np.array([value[key] for key in ('x', 'y', 'width', 'height')], float) * np.tile(share, 2)
            points = corners((x, y, x + w, y + h), turn, pivot=(x, y))
            marks |= {'rotated'} if turn % 180 else set()
        else:
            lost[str(result.get('type', 'keypoint'))] += 1
            continue
        is_outline = 'points' in value or 'radiusX' in value
        for name in names:
            yield _Shape(str(name), points, is_outline, marks)
