# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Check label images against the classes of a segmentor."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
from torch import nn

from ...checkpoints.states import some
from ...utils.errors import printable
from .files import open_image, oriented_size, reads_local_files, spread
from .findings import Finding, classes_of, decode_head_of, format_names, transforms_of

_MIN_OPENED = 16  # label images that are opened, however slow


def read_labels(
    dataset: Any, load: Callable[[dict], dict], paths: dict[int, str], ignored: Any, count: int
) -> tuple[int, dict[int, str], str]:
    """Read the labels of some label images through the pipeline of their data set.

    On average 0.01 s is allowed for each image of ``count``. While only one label and ignored pixels have been found,
    up to ten times as many images are read.

    Args:
        dataset: A data set of MMSegmentation.
        load: ``LoadAnnotations`` transform of the data set.
        paths: Paths of label images by their index in the data set.
        ignored: Label of ignored pixels.
        count: Number of label images to open.

    Returns:
        tuple[int, dict[int, str], str]: Number of images read, path of the first image with each label in ascending
            order, and the first unusable image as text, or ''.
    """
    found: dict[int, str] = {}
    begin, done = time.monotonic(), 0
    for index, path in paths.items():
        limit = count * 10 if ignored in found and len(found) <= 2 else count
        if done >= _MIN_OPENED and (done >= limit or time.monotonic() - begin > limit / 100):
            break
        labels, fault = _read(dataset.get_data_info(index), load, path)
        if fault:
            return done, {}, f'the label image {path} {fault}'
        numbers = np.bincount(labels.ravel()).nonzero()[0] if labels.dtype == np.uint8 else np.unique(labels)
        for number in numbers.tolist():
            found.setdefault(int(number), path)
        done += 1
    return done, dict(sorted(found.items())), ''


def _read(info: dict, load: Callable[[dict], dict], path: str) -> tuple[Any, str]:
    """Return the labels of a label image, and the reason why it cannot be used ('' if it can)."""
    picture, size = info.get('img_path'), None
    with suppress(Exception):  # Pillow does not know all images
        size = oriented_size(picture)
    try:
        labels = load(info)['gt_seg_map']
        with open_image(path) as image:
            highest = int(np.max(np.asarray(image))) if image.mode[0] in 'IF' else 0
    except AssertionError as error:  # two settings of reduce_zero_label
        return None, f'cannot be loaded: {printable(error)}'
    except FileNotFoundError:
        return None, 'is not there'
    except (OSError, ValueError) as error:
        return None, f'cannot be read as an image ({error})'
    if labels.ndim != 2:
        return labels, f'has {labels.shape[-1]} channels: expected one, the number of a class'
    if highest > 255:
        return labels, f'has the value {highest}, of which MMSegmentation keeps 8 bits: {highest % 256}'
    if size and size != labels.shape[::-1]:
        height, width = labels.shape
        return labels, f'is {width}x{height}, and its image {picture} {size[0]}x{size[1]}: expected one size'
    return labels, ''


def check_label_images(
    key: str, dataset: Any, model: nn.Module, is_training: bool, num_images: int
) -> Iterator[Finding]:
    """Check that label images of a segmentor hold labels of its classes only, and more than one class.

    A sample of ``num_images`` is read.
    """
    head = decode_head_of(model)
    count, ignored = getattr(head, 'num_classes', None), getattr(head, 'ignore_index', 255)
    ignored = 255 if ignored is None else ignored
    if getattr(head, 'out_channels', None) == 1 and getattr(getattr(head, 'loss_decode', None), 'use_sigmoid', True):
        count = 2  # background and foreground, by the sign of one number
    load = next((step for step in transforms_of(dataset) if type(step).__name__ == 'LoadAnnotations'), None)
    if type(count) is not int or load is None or not hasattr(dataset, 'get_data_info'):
        return
    padding = getattr(getattr(model, 'data_preprocessor', None), 'seg_pad_val', ignored)
    if is_training and padding != ignored:
        yield Finding(
            f'{key}: data_preprocessor.seg_pad_val = {padding} and ignore_index = {ignored} of the decode_head: '
            f'padding trains as label {padding}. Set both to one number.',
            False,
        )
    paths = {i: dataset.get_data_info(i).get('seg_map_path') for i in spread(len(dataset), 10 * num_images)}
    paths = {i: path for i, path in paths.items() if isinstance(path, str) and '://' not in path}
    if not paths or not reads_local_files(dataset, load):
        return
    reduces = bool(getattr(load, 'reduce_zero_label', None) or getattr(dataset, 'reduce_zero_label', False))
    num_read, paths_of, fault = read_labels(dataset, load, paths, ignored, num_images)
    if fault:
        yield Finding(f'{key}: {fault}.')
        return
    labels = {number: path for number, path in paths_of.items() if number != ignored}

    def value(label: int) -> str:
        of_ignored = ' or 255' if label == 255 else ''
        return f' (the value {(label + 1) % 256}{of_ignored} in the file)' if reduces else ''

    beyond = [label for label in labels if not 0 <= label < count]
    if beyond:
        advice = f'Write the numbers 0 to {count - 1} into the label images'
        if beyond == [count] and not reduces:
            advice += ', or reduce_zero_label=True where 0 is no class'
        if labels[beyond[0]].lower().endswith(('.jpg', '.jpeg')):
            advice = 'JPEG changes the numbers of pixels: save label images as PNG'
        yield Finding(
            f'{key}: {labels[beyond[0]]} has the label {beyond[0]}{value(beyond[0])}, which '
            f'num_classes = {count} of the decode_head does not know; {ignored} does not count. {advice}.'
        )
        return
    classes = classes_of(dataset)
    if len(labels) > 1 or num_read == 0:
        missing = set(range(count)) - set(labels)
        if reduces and missing == {count - 1} and ignored in paths_of:
            yield Finding(
                f'{key}: reduce_zero_label=True ignores the value 0 of label images, and 1 is the first class '
                f'{some(classes[:1])}; the last, {some(classes[-1:])}, then is in none of {num_read} of them. '
                'Where 0 is a class, set it to False.',
                False,
            )
        elif is_training and missing and num_read == len(dataset) and max(missing) < len(classes):
            names = format_names([classes[label] for label in sorted(missing)])
            yield Finding(f'{key}: none of its {len(dataset)} label images has {names}: nothing of it trains.', False)
        return
    only = ', '.join(f'label {n} {classes[n] if n < len(classes) else ""}'.strip() for n in labels) or 'no label at all'
    text = f'{key}: {num_read} of its label images, {next(iter(paths_of.values()))} among them, have {only}'
    if ignored in paths_of:
        text += f', and {ignored}{value(ignored)}, which is ignored (ignore_index): no other class trains. '
        remedy = 'reduce_zero_label=True ignores the value 0: set it to False where 0 is a class.'
        text += remedy if reduces else f'Write the number of the class in place of {ignored}.'
    yield Finding(text, is_training and ignored in paths_of)
