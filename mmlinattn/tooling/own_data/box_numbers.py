# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Decide what the four numbers of a box mean: corners, sides or a centre, in pixels or shares of the image."""

import numpy as np

from ...utils.errors import RunError
from .reading import Object, Photo, Reader

_READINGS = {
    'corners': 'corners (left, top, right, bottom)',
    'sides': 'left, top, width, height',
    'centre': 'centre x, y, width, height',
}
_SLACK = 0.01  # of shares beyond the image, by rounding
_REMEDY = f'give --boxes {"|".join(_READINGS)}.'
_Raw = list[tuple[Photo, Object]]


def settle(reader: Reader) -> None:
    """Set all boxes of a reader to left, top, right, bottom in pixels, and note the meaning of the numbers.

    A reading is wrong where boxes have negative sides or pass the edge of their image. It is taken if the format or
    ``--boxes`` says it and no other fits better, or if it is the only one that fits; else the data is refused.
    """
    options = reader.data.options
    raw = [(photo, item) for photo in reader.photos for item in photo.objects if item.is_raw]
    if not raw:
        if options.boxes or options.units:
            raise RunError(f'--boxes and --units: the numbers of {reader.kind} have one meaning; leave the option out.')
        return
    units, unit_note = (options.units, '; --units') if options.units else _units(reader, raw)
    sizes = np.array([photo.size for photo, _ in raw], float)
    scale = np.tile(sizes, 2) if units == 'shares' else np.ones((len(raw), 4))
    numbers = np.array([item.box for _, item in raw], float)
    first, second = numbers[:, :2], numbers[:, 2:]
    starts = {'corners': first, 'sides': first, 'centre': first - second / 2}
    boxes = {
        reading: np.hstack([start, second if reading == 'corners' else start + second]) * scale
        for reading, start in starts.items()
    }
    slack = np.maximum(2.0, _SLACK * sizes) if units == 'shares' else 2.0
    bad = {
        reading: ((box[:, :2] < -slack) | (box[:, 2:] > sizes + slack) | (box[:, 2:] < box[:, :2])).any(1)
        for reading, box in boxes.items()
    }
    said, source = options.boxes or reader.boxes, '--boxes' if options.boxes else 'as the format has it'
    if said is None:
        flat = {r: (box[:, 2:] == box[:, :2]).any(1) & numbers[:, 2:].all(1) for r, box in boxes.items()}
        said, source = _most_likely(raw, bad, flat), 'the only reading in which boxes stay in their images'
    elif not options.boxes:
        _check(raw, bad, said)
    found = boxes[said]
    negative = (found[:, 2:] < found[:, :2]).any(1)
    if said == 'corners' and negative.any():
        (photo, item), box = raw[int(negative.argmax())], found[int(negative.argmax())]
        axis, low, high = ('x', box[0], box[2]) if box[2] < box[0] else ('y', box[1], box[3])
        raise RunError(f'{photo.file}: {axis}min {low:g} is above {axis}max {high:g}, {_numbers(item)}.')
    rows = iter(zip(found.tolist(), scale[:, :2]))
    reader.photos = [
        photo._replace(objects=[_placed(item, *next(rows)) if item.is_raw else item for item in photo.objects])
        for photo in reader.photos
    ]
    note = f'the four numbers of a box are {_READINGS[said]} in {units}: {source}{unit_note}'
    reader.notes.insert(0, note)


def _most_likely(raw: _Raw, bad: dict[str, np.ndarray], flat: dict[str, np.ndarray]) -> str:
    """Return the only reading in which nearly all boxes stay in their images and have an area."""
    likely = [reading for reading in _READINGS if 5 * (bad[reading] | flat[reading]).sum() <= len(raw)]
    if len(likely) == 1:
        return likely[0]
    photo, item = raw[int(np.argmax(bad['sides']))]
    several = ' and as '.join(_READINGS[each] for each in likely)
    both = f'boxes fit as {several}' if likely else 'boxes pass the edge of their image in every reading'
    raise RunError(f'{photo.file}: {both}, as {_numbers(item)} of {photo.path.name}: {_REMEDY}')


def _check(raw: _Raw, bad: dict[str, np.ndarray], said: str) -> None:
    """Raise an error if another reading than the format's fits better, or many boxes do not fit."""
    fitting = [reading for reading in _READINGS if not bad[reading].any()]
    if bad[said].any() and (fitting or 5 * bad[said].sum() > len(raw)):
        photo, item = raw[int(np.argmax(bad[said]))]
        others = f'; as {_READINGS[fitting[0]]} all of them fit' if fitting else ''
        raise RunError(
            f'{photo.file}: {bad[said].sum()} of {len(raw)} boxes pass the edge of their image, as {_numbers(item)} in '
            f'{photo.size[0]}x{photo.size[1]}, read as {_READINGS[said]}{others}: {_REMEDY}'
        )


def _placed(item: Object, box: list[float], scale: np.ndarray) -> Object:
    segmentation = item.segmentation
    if isinstance(segmentation, list) and (scale != 1).any():
        segmentation = [(np.reshape(part, (-1, 2)) * scale).ravel().tolist() for part in segmentation]
    return item._replace(box=tuple(box), segmentation=segmentation, is_raw=False)


def _numbers(item: Object) -> str:
    return f'({", ".join(f"{number:g}" for number in item.box)})'


def _units(reader: Reader, raw: _Raw) -> tuple[str, str]:
    """Return the unit of the numbers, and a note if they alone tell it."""
    are_small = [max(map(abs, item.box)) <= 1 + _SLACK for _, item in raw]
    small = [is_small for is_small, (_, item) in zip(are_small, raw) if max(item.box) > 0]
    if any(small) and not all(small) or reader.units and small and all(small) != (reader.units == 'shares'):
        odd = reader.units != 'shares'  # the shares among pixels, or the pixels among shares
        photo, item = raw[are_small.index(odd)]
        kinds = 'shares of the image, from 0 to 1' if odd else 'no shares of the image (numbers are from 0 to 1)'
        raise RunError(
            f'{photo.file}: {small.count(odd)} of {len(small)} boxes are {kinds}, as {_numbers(item)} of '
            f'{photo.path.name}: give --units pixels|shares.'
        )
    if reader.units:
        return reader.units, ''
    if small and all(small):
        return 'shares', '; all numbers are from 0 to 1'
    return 'pixels', '; all numbers are in the size of pixels'
