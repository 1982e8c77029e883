# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Find the classes that the pixel values of masks (numbers or colours) stand for."""

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple, Optional

import numpy as np
from PIL import Image

from ...utils.errors import RunError
from .data import Data
from .names import some

_VALUE_LINE = re.compile(
    r'(?P<before>\d+(?:[,;\s]+\d+[,;\s]+\d+)?)[,;:\s]+(?P<name>(?=\S*[^\W\d])\w[^,;:]*)'
    r'|(?P<name2>[^\W\d][^,;:]*?)[,;:\s]+(?P<after>\d+[,;\s]+\d+[,;\s]+\d+)[,;:\s]*'
)
_OF_CLASSES = re.compile('class|label|categor|map|colou?r|palette|legend|names|dict', re.IGNORECASE)  # of CSV files
_MAX_VALUES = 256
_VOID = ('void', 'unlabelled', 'unlabeled', 'ignore', 'ignored', '__ignore__')
IGNORED = 255  # left out by MMSegmentation's losses and metrics
_CITYSCAPES_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)  # of its 19 classes
_IS_COLOUR = 1 << 24  # added to 0xRRGGBB, so that a colour differs from all numbers
_GREY = 0x010101
_Reading = tuple[list[str], dict[int, int], str]  # class names in the order of the labels, labels by value, a note


class ValueCounts(NamedTuple):
    """Values of all masks: numbers, or colours as ``_IS_COLOUR`` + 0xRRGGBB.

    Attributes:
        values: Set of values of each mask.
        pixels: Number of pixels by value.
        flat: Number of pixels with equal neighbours at the right and below, by value.
        coloured: The values are colours.
        is_plain: MMSegmentation reads the same values.
        is_indexed: All masks have a palette and the values are its indices.
    """

    values: list[set[int]]
    pixels: Counter
    flat: Counter
    coloured: bool
    is_plain: bool
    is_indexed: bool


def _colour(red: int, green: int, blue: int) -> int:
    return _IS_COLOUR + (red << 16 | green << 8 | blue)


def format_value(value: int) -> str:
    """Format a value of :class:`ValueCounts` for messages: a number, or a colour as ``(red, green, blue)``."""
    colour = value - _IS_COLOUR
    return str(value) if colour < 0 else f'({colour >> 16}, {colour >> 8 & 255}, {colour & 255})'


def read_mask(path: Path, coloured: bool = False) -> tuple[np.ndarray, bool]:
    """Return the values of a mask, and True if MMSegmentation reads the same values.

    The values (H, W) are numbers in uint16, or colours as ``_IS_COLOUR`` + 0xRRGGBB in int32. With ``coloured``, grey
    levels and numbers with a palette are read as colours too. Values other than integers from 0 to 65535 raise a
    RunError.
    """
    with Image.open(path) as image:
        pixels, mode = np.asarray(image.convert('RGB') if coloured else image), image.mode
    if pixels.dtype.kind == 'f' and not (pixels == np.floor(pixels)).all():
        raise RunError(f'{path} has values with fractions, or NaN: labels are whole numbers from 0.')
    if pixels.ndim == 3:
        if coloured or mode != 'LA' and (pixels[..., :3] != pixels[..., :1]).any():
            red, green, blue = (pixels[..., i].astype(np.int32) for i in range(3))
            return _IS_COLOUR + (red << 16 | green << 8 | blue), False
        pixels = pixels[..., 0]
    if pixels.min() < 0 or pixels.max() > 65535:
        raise RunError(f'{path} has values from {pixels.min()} to {pixels.max()}: labels are 0 to 254.')
    return pixels.astype(np.uint16), mode in ('L', 'P', '1')


def scan(masks: list[Path]) -> ValueCounts:
    """Collect the values of all masks: colours if a file has RGB colours or two palettes differ, else numbers. More
    than 256 values raise a RunError."""
    palettes: dict[int, bytes] = {}
    coloured, is_indexed = False, True
    for path in masks:
        with Image.open(path) as image:
            is_indexed = is_indexed and image.mode == 'P'
            coloured = coloured or image.mode in ('RGB', 'RGBA') and bool((read_mask(path)[0] >= _IS_COLOUR).any())
            given = bytes(image.getpalette('RGB') or ()) if image.mode == 'P' else b''
            used = np.unique(np.asarray(image)).tolist() if given else []
        for value in used:
            colour = given[3 * value : 3 * value + 3]
            coloured = coloured or palettes.setdefault(value, colour) != colour
    values, pixels, flat = [], Counter[int](), Counter[int]()
    is_plain = True
    for path in masks:
        read, plain = read_mask(path, coloured)
        inside = read[:-1, :-1]
        same = inside[(inside == read[:-1, 1:]) & (inside == read[1:, :-1])]
        for counter, chosen in ((pixels, read), (flat, same)):
            here, counts = np.unique(chosen, return_counts=True)
            counter.update(dict(zip(here.tolist(), counts.tolist())))
        values.append(set(np.unique(read).tolist()))
        is_plain = is_plain and plain
        if len(pixels) > _MAX_VALUES:
            kind = 'colours' if coloured else 'values'
            raise RunError(
                f'{path}: more than {_MAX_VALUES} {kind}; was it resized with interpolation, or saved with loss?'
            )
    return ValueCounts(values, pixels, flat, coloured, is_plain, is_indexed and not coloured)


def remap(path: Path, table: dict[int, int], coloured: bool) -> np.ndarray:
    """Return the labels (H, W) uint8 of a mask by a ``table`` from values to labels; :data:`IGNORED` for others."""
    read, _ = read_mask(path, coloured)
    labels = np.full(read.shape, IGNORED, np.uint8)
    for value, label in table.items():
        labels[read == value] = label
    return labels


class _Masks(NamedTuple):
    """Values of all masks of a data set, and the sources of class names.

    Attributes:
        image: First image.
        mask: Its mask.
        seen: Counts of the values.
        values: All values, ascending.
        listed: Class names by value or colour, from a file, or {}.
        named: Class names in the order of the values, from a file.
        given: Class names of ``--classes``.
    """

    image: Path
    mask: Path
    seen: ValueCounts
    values: list[int]
    listed: dict[int, str]
    named: Optional[list[str]]
    given: Optional[list[str]]


def interpret(
    data: Data, image: Path, mask: Path, seen: ValueCounts, notes: list[str]
) -> tuple[list[str], dict[int, int]]:
    """Return the class names, and a table from values to labels; extend the notes. ``image`` and ``mask`` are the first
    of the data set. Values missing in the table are ignored. Unclear values raise a RunError."""
    values, listed = sorted(seen.pixels), read_values(data)
    greys = {i: listed[_IS_COLOUR + i * _GREY] for i in range(256) if _IS_COLOUR + i * _GREY in listed}
    listed = greys if greys.keys() >= {*values} else listed
    named = data.names('classes.txt', 'labelmap.txt', 'codes.txt', *[] if listed else ['labels.txt'])
    if not named and not seen.coloured and len(listed) == values[-1] + 1 and min(listed) >= _IS_COLOUR:
        named = list(listed.values())
        notes.append('the numbers of the masks are named in the order of the list of colours')
    of_255 = [IGNORED in each for each in seen.values if len(each) > 1]
    if values == [0, 1, IGNORED] and any(of_255) and not any({1, IGNORED} <= each for each in seen.values):
        raise RunError(
            f'{of_255.count(False)} masks have the values 0 and 1, {sum(of_255)} the values 0 and 255: two codings of '
            'one class. Write one of them.'
        )
    if not (named or listed or seen.coloured) and _are_objects(seen.values):
        raise RunError(
            f'each mask has the values 0 to n, and n differs, up to {values[-1]}: these seem to be numbers of objects. '
            'If they are classes, give --classes NAME ..., one name per value.'
        )
    masks = _Masks(image, mask, seen, values, listed, named, data.options.classes)
    readings = (read(masks) for read in (_of_colours, _of_cityscapes, _of_two_blurred, _of_list))  # the first decides
    found = next((reading for reading in readings if reading), None)
    names, labels, note = found or read_indices(values, named, seen.is_indexed)
    table = {IGNORED: IGNORED, **labels}
    notes += [note] if note else []
    ignored = [format_value(value) for value in values if table.get(value) == IGNORED]
    meanings = some(f'{format_value(value)} is {names[label]}' for value, label in labels.items() if label != IGNORED)
    notes.append(f'{"colour" if seen.coloured else "label"} {meanings}')
    void = [name for name in names if name.strip().lower() in _VOID]
    if void:
        kept = [label for label, name in enumerate(names) if name not in void]
        table = {value: kept.index(label) if label in kept else IGNORED for value, label in table.items()}
        notes.append(f'pixels of {", ".join(void)} are ignored')
        names = [names[label] for label in kept]
    elif ignored:
        notes.append(f'pixels of value {some(ignored, 20)} are ignored')
    if len(names) > IGNORED:
        raise RunError(f'the masks have {len(names)} classes: 255 are the most.')
    return names, table


def _are_objects(values: list[set[int]]) -> bool:
    """Return True for masks of instances: half of them have the values 1 to n without a gap, for three or more n."""
    whole = [max(each) for each in values if each - {0} == {*range(1, max(each) + 1)}]
    return len({*whole}) >= 3 and max(whole) >= 4 and 2 * len(whole) >= len(values)


def _of_cityscapes(masks: _Masks) -> Optional[_Reading]:
    """Read the ids of Cityscapes, which KITTI has too."""
    is_kitti = (masks.image.parent.name, masks.mask.parent.name) == ('image_2', 'semantic')
    are_train_ids = 'labelTrainIds' in masks.mask.name
    if masks.named or masks.listed or not (are_train_ids or 'labelIds' in masks.mask.name or is_kitti):
        return None
    from mmseg.utils import get_classes

    names, values = get_classes('cityscapes'), masks.values
    train_ids = {number: label for label, number in enumerate(_CITYSCAPES_IDS)}
    table = {value: value if are_train_ids else train_ids.get(value, IGNORED) for value in values}
    if any(len(names) <= label != IGNORED for label in table.values()):
        return None
    return names, table, "the values are Cityscapes' ids: its 19 classes are learnt"


def _of_two_blurred(masks: _Masks) -> Optional[_Reading]:
    """Read two-class masks that were interpolated or saved as JPEG: inner values change from pixel to pixel."""
    seen, values, named = masks.seen, masks.values, masks.named
    inner = values[1:-1]
    noisy = [value for value in values if 4 * seen.flat[value] < seen.pixels[value]]
    few = sum(seen.pixels[value] for value in inner) <= sum(seen.pixels.values()) / 2
    is_noise = sum(seen.flat[v] for v in inner) < sum(seen.pixels[v] for v in inner) / 4
    if len(named or 'ab') == 2 and len(inner) >= 4 and values[-1] >= 64 and few and is_noise:
        table = {value: int(2 * value > values[0] + values[-1]) for value in values}
        note = (
            f'the masks have {len(values)} values, as masks of {values[0]} and {values[-1]} that were enlarged with '
            f'interpolation or saved with loss: above {(values[0] + values[-1]) / 2:g} is the second class'
        )
        return named or ['background', 'foreground'], table, note
    if len(noisy) > max(24, len(values) / 2):
        raise RunError(
            f'the masks have {len(values)} values, most of them in single pixels between others, as '
            f'{", ".join(map(format_value, noisy[:5]))}: enlarge them by nearest neighbour, and save them without loss.'
        )
    return None


def _of_list(masks: _Masks) -> Optional[_Reading]:
    """Read numbers that a file lists with their classes."""
    numbers = sorted(value for value in masks.listed if value < _IS_COLOUR)
    if not numbers or masks.given:
        return None
    for value in masks.values:
        if value not in numbers and value != IGNORED:
            raise RunError(f'the masks have the value {value}, which the list of values does not name.')
    return [masks.listed[value] for value in numbers], {value: i for i, value in enumerate(numbers)}, ''


def read_values(data: Data) -> dict[int, str]:
    """Return class names by value from a file that lists both, or {}; values are as in :class:`ValueCounts`. Such files
    are label_colors.txt of CamVid, labelmap.txt of CVAT, class_dict.csv and _classes.csv of Roboflow."""
    found: dict[Path, dict[int, str]] = {}
    for path in [path for path in data.files if path.suffix.lower() in ('.txt', '.csv')]:
        is_other = path.suffix.lower() == '.csv' and not _OF_CLASSES.search(path.stem)
        if is_other or path.stat().st_size > 1 << 16 or len(data.rel(path).parts) > 3:
            continue
        lines = path.read_text(encoding='utf-8-sig', errors='replace').splitlines()
        parsed = [_VALUE_LINE.fullmatch(line.strip()) for line in lines if line.strip() and not line.startswith('#')]
        parsed = parsed[1:] if parsed and not parsed[0] else parsed  # names of columns
        names = [(line['name'] or line['name2']).strip() for line in parsed if line]
        if len(parsed) < 2 or len(names) < len(parsed) or all(map(data.pictures.named, names)):  # of images: a list
            continue
        found[path] = {}
        for line, name in zip(filter(None, parsed), names):
            numbers = [int(each) for each in re.findall(r'\d+', line['before'] or line['after'])]
            value = _colour(*numbers) if len(numbers) == 3 else numbers[0]
            other = found[path].setdefault(value, name)
            if other != name and not {other.lower(), name.lower()}.intersection(_VOID):
                raise RunError(f'{path}: {format_value(value)} is {other!r} and {name!r}: correct one.')
    return data.agreed(found, 'the classes of values: keep one') or {}


def read_indices(values: list[int], names: Optional[list[str]], is_indexed: bool = False) -> _Reading:
    """Interpret ascending numbers as labels, as ranks of the classes, or as background and foreground.

    Without ``names``, many missing numbers raise a RunError, unless the masks have a palette (``is_indexed``). Numbers
    that do not fit the ``names`` raise one, too.
    """
    labels, same = [value for value in values if value != IGNORED], dict(zip(values, values))
    listed = some(map(str, values))
    if len(values) < 2:
        raise RunError(f'the masks have the value {listed} alone: there is nothing to tell apart.')
    if len(values) == 2 and values[0] == 0 and values[1] > 1 and len(names or 'ab') == 2:
        return names or ['background', 'foreground'], {0: 0, values[1]: 1}, ''
    if names is None:
        if is_indexed or labels[-1] < 2 * len(labels):
            names = [f'class_{label}' for label in range(labels[-1] + 1)]
            note = 'the classes have no names: give --classes, or write classes.txt, one name per line'
            return names, same, note
        raise RunError(f'the masks have the values {listed}: give --classes NAME ..., one name per value.')
    if len(names) > 1 and labels[-1] < len(names):
        return names, same, ''
    for known in (labels, values) if len(names) > 1 else ():
        if len(known) == len(names):
            return names, {value: label for label, value in enumerate(known)}, ''
    raise RunError(
        f'the masks have the values {listed}, and {len(names)} classes have names ({", ".join(names)}): name '
        'every value in their order, the background too.'
    )


def _of_colours(masks: _Masks) -> Optional[_Reading]:
    """Interpret colours by a list, by the palettes of Cityscapes or VOC, or in the order of ``--classes``. Two colours,
    one of them black, are background and foreground. More than a few pixels of other colours raise a RunError. The
    result is None for numbers."""
    if not masks.seen.coloured:
        return None
    note, colours, pixels, given = '', masks.values, masks.seen.pixels, masks.given
    listed = {value: name for value, name in masks.listed.items() if value >= _IS_COLOUR}
    if not listed:
        listed, note = _palette(colours, given)
    if not listed and given and len(given) == len(colours):
        note = 'names are given to colours in the order of their red, green and blue'
        return given, {colour: label for label, colour in enumerate(colours)}, note
    if not listed and len(colours) == 2 and _IS_COLOUR in colours:
        return given or ['background', 'foreground'], {_IS_COLOUR: 0, colours[1]: 1}, ''
    if not listed:
        raise RunError(
            f'{masks.mask} and others have the colours {some(map(format_value, colours))}: write label_colors.txt into '
            'DATA, one line "R G B NAME" per class, or give --classes NAME ..., in this order.'
        )
    unknown = {colour: pixels[colour] for colour in colours if colour not in listed}
    if sum(unknown.values()) > sum(pixels.values()) / 1000:
        worst = max(unknown, key=unknown.__getitem__)
        raise RunError(f'the masks have the colour {format_value(worst)}, which the list of colours does not name.')
    if unknown:
        note = f'{sum(unknown.values())} pixels of {len(unknown)} colours that are not listed are ignored'
    if given:
        listed = _renamed(listed, given)
    names = list(dict.fromkeys([*(given or ()), *listed.values()]))
    table = {colour: names.index(name) for colour, name in listed.items()} | dict.fromkeys(unknown, IGNORED)
    return names, table, note


def _renamed(listed: dict[int, str], given: list[str]) -> dict[int, str]:
    """Return ``listed`` with the names of ``--classes`` in the order of the list, unless both have the same names.
    Another number of names raises a RunError; void may be left out."""
    names = list(dict.fromkeys(listed.values()))
    kept = [name for name in names if name.strip().lower() not in _VOID]
    known = names if len(given) == len(names) else kept
    if len(given) != len(known):
        raise RunError(
            f'--classes has {len(given)} names, and the list of colours {len(known)} ({some(known)}): give as many, or '
            'leave the option out.'
        )
    renamed = {} if {*given} == {*known} else dict(zip(known, given))
    return {colour: renamed.get(name, name) for colour, name in listed.items()}


def _palette(colours: list[int], given: Optional[list[str]]) -> tuple[dict[int, str], str]:
    """Return the class names by colour in the palette of Cityscapes or VOC, and a note.

    The result is ({}, '') unless the palette has all ``colours``. Labelling tools take VOC's first colours for classes
    of any name: these have to be half of the palette, or have its void. Another number of ``given`` names than the
    palette has contradicts it, too.
    """
    from mmseg.utils import get_classes, get_palette

    for dataset, void in (('cityscapes', 0), ('voc', 0xE0E0C0)):
        palette = [_colour(*rgb) for rgb in get_palette(dataset)]
        known = {**dict(zip(palette, get_classes(dataset))), _IS_COLOUR + void: 'void'}
        is_clear = dataset == 'cityscapes' or 2 * len(colours) >= len(known) or _IS_COLOUR + void in colours
        if set(colours) <= known.keys() and len(colours) > 2 and is_clear and len(given or palette) == len(palette):
            return known, f'the colours are those of {dataset}, and no file says others: they are named as there'
    return {}, ''
