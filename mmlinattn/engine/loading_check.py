# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Checks of image and label files as a data set's own pipeline reads them."""

import os
import os.path as osp
from typing import NamedTuple, Optional

import mmcv
import numpy as np
from mmcv.transforms import LoadAnnotations, LoadImageFromFile
from mmengine.fileio import get as read_bytes
from mmengine.model import BaseTTAModel, is_model_wrapper

from ..utils.errors import RunError
from .annotations import MIN_SIDE, is_extreme

__all__ = ['AllowedLabels', 'CheckedLoading', 'SegMapCheck', 'allowed_labels', 'read_samples', 'watch_loading']

MAX_VALUES = 10  # of labels in a message


class AllowedLabels(NamedTuple):
    """Labels ``0 .. num_classes - 1`` and ``ignore_index``."""

    num_classes: int
    ignore_index: int


def allowed_labels(model) -> Optional[AllowedLabels]:
    """What an MMSegmentation model takes as labels; None for other models."""
    while is_model_wrapper(model) or isinstance(model, BaseTTAModel):
        model = model.module
    num_classes, head = getattr(model, 'num_classes', None), getattr(model, 'decode_head', None)
    if head is None or not isinstance(num_classes, int):
        return None
    head = head[-1] if hasattr(head, '__getitem__') else head  # cascades have several
    return AllowedLabels(num_classes, getattr(head, 'ignore_index', 255))


class Unreadable(RunError):
    """A file that cannot be read, and why."""


class CheckedLoading:
    """A loading transform that names the file it fails on, and skips the sample if it may.

    Args:
        loading: The transform.
        key: Under which its samples have the file.
        skipped_list: A text file that gets a line for each skipped file. The sample is then None, in place of which a
            data set that trains draws another one. None stops instead.

    Raises:
        RunError: The file cannot be read and ``skipped_list`` is None.
    """

    def __init__(self, loading, key: str, skipped_list: Optional[str] = None):
        self.loading = loading
        self.key = key
        self.skipped_list = skipped_list

    def __getattr__(self, name):
        if name == 'loading':  # not there yet while unpickling
            raise AttributeError(name)
        return getattr(self.loading, name)

    def __repr__(self) -> str:
        return repr(self.loading)

    def read(self, results: dict) -> Optional[dict]:
        """The sample with what was read, whatever ``skipped_list`` says."""
        declared = results.get('height'), results.get('width')
        try:
            loaded = self.loading(results)
        except MemoryError:
            raise
        except Exception as error:  # what a decoder raises depends on the decoder
            reason = ' '.join(f'{type(error).__name__}: {error}'.split())
            raise Unreadable(f'{results.get(self.key, self.key)} cannot be read ({reason})') from error
        if self.key == 'img_path' and loaded is not None and None not in declared:
            size = tuple(loaded.get('ori_shape', declared))[:2]
            if size != declared:
                raise RunError(
                    f'{results["img_path"]} has {size[0]}x{size[1]} pixels (height x width), its annotation file says '
                    f'{declared[0]}x{declared[1]}: boxes and masks would not fit.'
                )
        return loaded

    def __call__(self, results: dict) -> Optional[dict]:
        try:
            return self.read(results)
        except Unreadable as error:
            if self.skipped_list is None:
                raise RunError(
                    f'{error}. Mend the file or take it out of the data set. DataCheckHook(num_read=None) reads '
                    "every file before training, DataCheckHook(unreadable='skip') trains without such files."
                ) from None
            os.makedirs(osp.dirname(self.skipped_list), exist_ok=True)
            with open(self.skipped_list, 'a') as stream:  # one short write: workers do not cut each other's lines
                stream.write(f'{error}\n')
            return None


class SegMapCheck:
    """Look at a segmentation map right after it was read: its size, and its labels.

    Raises:
        RunError: It has channels, another size than the image as it was read, or labels that the model cannot take.
            The message has the files, what was found and what is allowed.
    """

    def __init__(self, allowed: Optional[AllowedLabels] = None):
        self.allowed = allowed

    def __call__(self, results: dict) -> dict:
        labels = results.get('gt_seg_map')
        if labels is None:
            return results
        file, image = results.get('seg_map_path'), results.get('img_path')
        if labels.ndim != 2:
            raise RunError(
                f'{file} has shape {labels.shape}: a segmentation map has one channel, of labels and not of colours.'
            )
        size = tuple(results.get('ori_shape', labels.shape))[:2]
        if labels.shape != size:
            raise RunError(
                f'{file} has {labels.shape[0]}x{labels.shape[1]} pixels (height x width), its image {image} has '
                f'{size[0]}x{size[1]}: they have to be of one size.'
            )
        if self.allowed is None:
            return results
        num_classes, ignore_index = self.allowed
        is_wrong = ((labels < 0) | (labels >= num_classes)) & (labels != ignore_index)
        if is_wrong.any():
            values = np.unique(labels[is_wrong]).tolist()
            listed = ', '.join(map(str, values[:MAX_VALUES])) + (', ...' if len(values) > MAX_VALUES else '')
            reduced = results.get('reduce_zero_label')
            raise RunError(
                f'{file} has labels {listed} in {int(is_wrong.sum())} pixels'
                + (' (as in the file less 1, for reduce_zero_label=True)' if reduced else '')
                + f'; allowed are 0 to {num_classes - 1}, as the decode head has num_classes={num_classes}, and '
                f'ignore_index={ignore_index}.'
            )
        return results


def _check_depth(loading, results: dict) -> None:
    """MMSegmentation keeps the lowest 8 bits of a label; 300 would become 44 in silence."""
    file = results['seg_map_path']
    stored = mmcv.imfrombytes(
        read_bytes(file, backend_args=loading.backend_args), flag='unchanged', backend=loading.imdecode_backend
    )
    if stored.max() > 255:
        raise RunError(f'{file} has labels up to {stored.max()}; MMSegmentation reads labels of 0 to 255.')


def watch_loading(dataset, allowed: Optional[AllowedLabels] = None, skipped_list: Optional[str] = None) -> None:
    """Put :class:`CheckedLoading` and :class:`SegMapCheck` into the pipeline of a data set, once."""
    transforms = getattr(getattr(dataset, 'pipeline', None), 'transforms', None)
    if not transforms or any(isinstance(transform, CheckedLoading) for transform in transforms):
        return
    watched = []
    for transform in transforms:
        if isinstance(transform, LoadImageFromFile):
            watched.append(CheckedLoading(transform, 'img_path', skipped_list))
        elif isinstance(transform, LoadAnnotations) and transform.with_seg:
            watched += [CheckedLoading(transform, 'seg_map_path', skipped_list), SegMapCheck(allowed)]
        else:
            watched.append(transform)
    transforms[:] = watched


def read_samples(dataset, count: Optional[int] = None) -> tuple[int, list[RunError], list[tuple]]:
    """Read the files of samples spread evenly over a data set that :func:`watch_loading` has seen.

    Args:
        count: How many samples; None for all.

    Returns:
        How many were read, an error for each that cannot be used (:class:`Unreadable`, or of :class:`SegMapCheck`), and
        pictures so small or long that little is left of them, as (file, width, height). Where annotations declare
        sizes, these were looked at for all pictures before.
    """
    transforms = getattr(getattr(dataset, 'pipeline', None), 'transforms', ())
    checks = [transform for transform in transforms if isinstance(transform, (CheckedLoading, SegMapCheck))]
    if not checks:
        return 0, [], []
    size = len(dataset)
    indices = range(size) if count is None or count >= size else np.linspace(0, size - 1, count, dtype=int)
    errors, extreme = [], []
    for index in indices:
        results = dataset.get_data_info(int(index))
        try:
            for check in checks:
                if isinstance(check, SegMapCheck):
                    check(results)
                    continue
                results = check.read(results)
                if results is None:  # `ignore_empty` of the loading transform
                    break
                height, width = results['ori_shape'][:2] if 'ori_shape' in results else (MIN_SIDE, MIN_SIDE)
                if check.key == 'img_path' and 'height' not in results and is_extreme(width, height):
                    extreme.append((results['img_path'], width, height))
                if check.key == 'seg_map_path' and type(check.loading).__module__.startswith('mmseg.'):
                    _check_depth(check.loading, results)
        except RunError as error:
            errors.append(error)
    return len(indices), errors, extreme
