# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Read segmentation masks, and check their labels against the classes of a segmentor."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from ...checkpoints.states import some
from ...utils.errors import printable
from .datasets import Finding, Samples, View, format_names, reads_local_files, transforms_of
from .files import open_image, oriented_size, spread
from .heads import decode_head_of


class Masks:
    """Segmentation masks of a data set of MMSegmentation, read by its own ``LoadAnnotations``.

    ``count`` is the number of labels that the decode head knows (0 for other models and data sets), and ``ignored`` the
    label of ignored pixels. ``reduces`` is True with ``reduce_zero_label``.
    """

    def __init__(self, view: View):
        head, steps = decode_head_of(view.model), transforms_of(view.dataset)
        self.dataset, count = view.dataset, getattr(head, 'num_classes', None)
        self.load = next((step for step in steps if type(step).__name__ == 'LoadAnnotations'), None)
        has_masks = type(count) is int and self.load is not None and hasattr(view.dataset, 'get_data_info')
        self.count: Any = count if has_masks else 0
        if has_masks and getattr(head, 'out_channels', None) == 1:
            if getattr(getattr(head, 'loss_decode', None), 'use_sigmoid', True):
                self.count = 2  # background and foreground, by the sign of one number
        ignored = getattr(head, 'ignore_index', None)
        self.ignored = 255 if ignored is None else ignored
        self.reduces = any(getattr(part, 'reduce_zero_label', None) for part in (self.load, self.dataset))

    def read(self, num_images: int) -> Samples:
        """Read the labels of a sample of ``num_images`` masks, with the label of ignored pixels. While only one label
        and ignored pixels have been found, up to ten times as many masks are read."""
        if not reads_local_files(self.dataset, self.load):
            return Samples()
        found: dict[int, str] = {}
        done = 0
        for index in spread(len(self.dataset), 10 * num_images):
            info = self.dataset.get_data_info(index)
            path = info.get('seg_map_path')
            if not isinstance(path, str) or '://' in path:
                continue
            if done >= num_images and not (self.ignored in found and len(found) <= 2):
                break
            labels, error = self._labels(info, path)
            if error:
                return Samples(done, error=f'the segmentation mask {path} {error}')
            numbers = np.bincount(labels.ravel()).nonzero()[0] if labels.dtype == np.uint8 else np.unique(labels)
            for number in numbers.tolist():
                found.setdefault(int(number), path)
            done += 1
        return Samples(done, dict(sorted(found.items())))

    def _labels(self, info: dict, path: str) -> tuple[Any, str]:
        """Return the labels of a mask, (H, W), and the reason why the mask cannot be used ('' if it can). The labels
        are None if the mask cannot be loaded."""
        picture, size = info.get('img_path'), None
        with suppress(Exception):  # Pillow does not know all images
            size = oriented_size(picture)
        try:
            labels = self.load(info)['gt_seg_map']  # type: ignore[misc]
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

    def value(self, label: int) -> str:
        """Return a note with the value of a label in the file if ``reduce_zero_label`` changes it; '' otherwise."""
        of_ignored = ' or 255' if label == 255 else ''
        return f' (the value {(label + 1) % 256}{of_ignored} in the file)' if self.reduces else ''


def check_masks(view: View, num_images: int) -> Iterator[Finding]:
    """Check that the masks of a segmentor hold labels of its classes only, and more than one class.

    Also report classes that are in no mask, and a ``seg_pad_val`` other than the ``ignore_index`` of training data. A
    sample of ``num_images`` is read.
    """
    masks = Masks(view)
    if not masks.count:
        return
    padding = getattr(getattr(view.model, 'data_preprocessor', None), 'seg_pad_val', masks.ignored)
    if view.is_training and padding != masks.ignored:
        yield Finding(
            f'{view.key}: data_preprocessor.seg_pad_val = {padding} and ignore_index = {masks.ignored} of the '
            f'decode_head: padding trains as label {padding}. Set both to one number.',
            False,
        )
    samples = masks.read(num_images)
    labels = [label for label in samples.labels if label != masks.ignored]
    beyond = [label for label in labels if not 0 <= label < masks.count]
    if samples.error:
        yield Finding(f'{view.key}: {samples.error}.')
    elif beyond:
        yield _error_beyond(view, masks, beyond, samples.labels[beyond[0]])
    elif len(labels) > 1:
        yield from _missing(view, masks, labels, samples)
    elif samples.num:
        yield _one_class(view, masks, labels, samples)


def _error_beyond(view: View, masks: Masks, labels: list[int], path: str) -> Finding:
    """Return the error for ``labels`` beyond the classes of the head; the mask ``path`` has the first of them."""
    advice = f'Write the numbers 0 to {masks.count - 1} into the masks'
    if labels == [masks.count] and not masks.reduces:
        advice += ', or reduce_zero_label=True where 0 is no class'
    if path.lower().endswith(('.jpg', '.jpeg')):
        advice = 'JPEG changes the numbers of pixels: save segmentation masks as PNG'
    return Finding(
        f'{view.key}: {path} has the label {labels[0]}{masks.value(labels[0])}, which num_classes = {masks.count} of '
        f'the decode_head does not know; {masks.ignored} does not count. {advice}.'
    )


def _missing(view: View, masks: Masks, labels: list[int], samples: Samples) -> Iterator[Finding]:
    """Report classes of the training data that occur in no mask, if all masks were read.

    A last class lost to ``reduce_zero_label=True`` is reported for any sample. ``labels`` are the labels found.
    """
    missing, classes = sorted(set(range(masks.count)) - set(labels)), view.classes
    if masks.reduces and missing == [masks.count - 1] and masks.ignored in samples.labels:
        yield Finding(
            f'{view.key}: reduce_zero_label=True ignores the value 0 of segmentation masks, and 1 is the first class '
            f'{some(classes[:1])}; the last, {some(classes[-1:])}, then is in none of {samples.num} of them. '
            'Where 0 is a class, set it to False.',
            False,
        )
    elif view.is_training and missing and samples.num == len(view.dataset) and missing[-1] < len(classes):
        names = format_names([classes[label] for label in missing])
        yield Finding(f'{view.key}: none of its {samples.num} masks has {names}: nothing of it trains.', False)


def _one_class(view: View, masks: Masks, labels: list[int], samples: Samples) -> Finding:
    """Report masks with one label or none (``labels``): an error if all other pixels of training are ignored."""
    names = dict(enumerate(view.classes))
    only = ', '.join(f'label {label} {names.get(label, "")}'.strip() for label in labels) or 'no label at all'
    text = f'{view.key}: {samples.num} of its masks, {next(iter(samples.labels.values()))} among them, have {only}'
    is_ignoring = masks.ignored in samples.labels
    if is_ignoring:
        ignored = f'{masks.ignored}{masks.value(masks.ignored)}'
        text += f', and {ignored}, which is ignored (ignore_index): no other class trains. '
        remedy = 'reduce_zero_label=True ignores the value 0: set it to False where 0 is a class.'
        text += remedy if masks.reduces else f'Write the number of the class in place of {masks.ignored}.'
    return Finding(text, view.is_training and is_ignoring)
