# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Check data sets, after they are built, against the config. Each check yields messages of one line."""

import os.path as osp
from collections.abc import Iterator, Sequence
from itertools import product
from numbers import Integral
from typing import Any, Optional

import numpy as np

from .datasets import Finding, Samples, View, classes_of, format_names, reads_local_files, transforms_of
from .heads import counts_of_stages, decode_head_of, is_metric_learning

_NUM_READ = 20_000  # samples with labels that are read, in about a second
_NUM_FILES = 2000  # of these, images that are looked for
_OF_PIXELS = ('decode_head', 'auxiliary_head')  # their labels are in segmentation masks


def first_difference(first: Sequence, second: Sequence) -> Optional[int]:
    """Return the first label for which two lists have different class names, or None if there is none. Only the common
    length is compared, and only letters and digits, without case. Two lists of one name each never differ."""

    def normalised(name: Any) -> str:
        return ''.join(c for c in str(name).lower() if c.isalnum()) or str(name)

    if len(first) == len(second) == 1:
        return None
    return next((i for i, (a, b) in enumerate(zip(first, second)) if normalised(a) != normalised(b)), None)


def check_names(key: str, meta: dict) -> Iterator[Finding]:
    """Check that ``classes`` of a ``metainfo`` are names or an existing file, and not spelt ``CLASSES``. Here and
    below, ``key`` is the config key of the dataloader, for messages."""
    names = meta.get('classes')
    if isinstance(names, str) and names.endswith('.txt') and not osp.isfile(names):
        yield Finding(f'{key}: metainfo.classes = {names!r}: there is no such file of class names.')
    elif isinstance(names, str) and not osp.isfile(names):
        yield Finding(
            f'{key}: metainfo.classes = {names!r} is a text, whose letters would be the classes. One class needs a '
            f'comma: classes=({names!r},)'
        )
    if meta.get('CLASSES') and list(meta['CLASSES']) != list(names or ()):
        yield Finding(
            f'{key}: metainfo.CLASSES is read by nobody. Write metainfo=dict(classes={format_names(meta["CLASSES"])})'
        )


def read_samples(dataset: Any) -> Samples:
    """Read the labels of about 20000 samples, evenly spaced in a data set.

    For some of them, the image file is checked for existence.
    """
    labels: dict[int, str] = {}
    folders: dict[str, set[int]] = {}
    error = ''
    if not hasattr(dataset, 'get_data_info'):
        return Samples()
    prefix = getattr(dataset, 'data_prefix', None)
    root = osp.join(str(prefix.get('img_path') or ''), '') if isinstance(prefix, dict) else ''
    steps = transforms_of(dataset)
    is_local = reads_local_files(dataset, *steps) and not any(getattr(step, 'ignore_empty', False) for step in steps)
    indices = range(0, len(dataset), max(1, len(dataset) // _NUM_READ))
    for number, info in enumerate(map(dataset.get_data_info, indices)):
        if not isinstance(info, dict):
            return Samples()
        path = str(info.get('img_path', ''))
        of_image = np.ravel(info['gt_label']).tolist() if info.get('gt_label') is not None else []
        objects = [each for each in info.get('instances') or () if isinstance(each, dict)]
        for label in [each.get('bbox_label') for each in objects if not each.get('ignore_flag')] + of_image:
            if isinstance(label, Integral):
                labels.setdefault(int(label), path)
        inside = path[len(root) :] if root and path.startswith(root) else ''
        if len(of_image) == 1 and '/' in inside:
            folders.setdefault(inside.split('/')[0], set()).add(of_image[0])
        if not is_local or error or number % max(1, len(indices) // _NUM_FILES):
            continue
        if osp.isdir(osp.dirname(path)) and not (osp.isfile(path) and osp.getsize(path)):
            error = f'the image {path} {"has no bytes" if osp.exists(path) else "is not there"}'
    return Samples(len(indices), labels, folders, error)


def check_labels(view: View) -> Iterator[Finding]:
    """Check that the heads know each label, and that data sets have labelled objects or images of each class."""
    key, classes, samples = view.key, view.classes, view.samples
    heads = {} if not view.is_training and is_metric_learning(view.model) else counts_of_stages(view.model)
    for (label, path), (head, counts) in product(sorted(samples.labels.items()), heads.items()):
        count = min(counts)
        if not 0 <= label < count and head not in _OF_PIXELS:
            name = f' ({classes[label]})' if 0 <= label < len(classes) else ''
            found = f'{path} has label {label}{name}, and the data set {len(classes)} classes'
            yield _too_small(key, head, count, f'for the data: {found}')
            return
    if samples.error:
        yield Finding(f'{key}: {samples.error}. Put it there, or take it out of the data set.')
        return
    if heads.keys() & {'bbox_head', 'head'} and samples.num == len(view.dataset) and classes:
        yield from _unused(view, 'bbox_head' in heads)
    if view.is_training and classes:
        yield from _other_counts(view, heads)


def _too_small(key: str, head: str, count: int, than: str) -> Finding:
    """Return the error for a ``head`` whose ``num_classes`` (``count``) is too small; ``than`` says for what."""
    return Finding(
        f'{key}: num_classes = {count} of the head is too small {than}. Set num_classes of the {head}, or '
        'metainfo.classes of the data set to those that count.'
    )


def _unused(view: View, is_detector: bool) -> Iterator[Finding]:
    """Report classes without objects or images in the training data, and detection data without any object."""
    key, samples = view.key, view.samples
    unused = [name for label, name in enumerate(view.classes) if label not in samples.labels]
    is_judged = view.is_training or (key.startswith('val') and not samples.is_part)  # a test may have no annotations
    if not samples.labels and is_judged and 'instances' in view.dataset.get_data_info(0):
        yield Finding(
            f'{key}: no image of {getattr(view.dataset, "ann_file", "")} has an object of metainfo.classes = '
            f'{format_names(view.classes)}: they have other names there, no area, or an image_id that is no image.',
            view.is_training and not samples.is_part,
        )
    elif samples.labels and unused and view.is_training and not hasattr(view.dataset, 'cat_ids'):  # see check_coco
        has = 'has an object' if is_detector else 'is'
        text = f'{key}: none of its {samples.num} images {has} of {format_names(unused)}: nothing of these trains.'
        yield Finding(text, False)


def _other_counts(view: View, heads: dict[str, list[int]]) -> Iterator[Finding]:
    """Report heads with more classes than the data set, and segmentation heads with fewer.

    ``heads`` has ``num_classes`` of each cascade stage by name of the head. Different numbers in one head are reported
    too.
    """
    num = len(view.classes)
    for head, counts in heads.items():
        if len(set(counts)) > 1:
            yield Finding(f'num_classes of the stages of {head} are {counts}: expected one number, {num}.')
            return
    is_binary = getattr(decode_head_of(view.model), 'out_channels', None) == 1  # background and foreground, by a sign
    for head, count in ((head, min(counts)) for head, counts in heads.items()):
        if head in _OF_PIXELS and (max(count, 2) if is_binary else count) < num:
            yield _too_small(view.key, head, count, f'for the {num} classes of the data')
        elif count > num:
            yield Finding(
                f'{view.key}: num_classes = {count} of the {head} is more than the {num} classes of the data; what '
                'it finds of the others has no name, and cannot be measured.',
                False,
            )


def check_folders(key: str, dataset: Any) -> Iterator[Finding]:
    """Check that no hidden folder is a class, and that ``metainfo.classes`` has the order of the class folders.
    MMPretrain numbers class folders alphabetically."""
    folders, classes = getattr(dataset, 'folder_to_idx', None), classes_of(dataset)
    if not isinstance(folders, dict) or not classes:
        return
    root, labels = dataset.data_prefix['img_path'], {str(name): label for label, name in enumerate(classes)}
    for folder, label in folders.items():
        if folder.startswith(('.', '__')):
            yield Finding(f'{key}: {osp.join(root, folder)} counts as a class, of label {label}. Remove it.')
            return
        if labels.get(folder, label) != label:
            yield Finding(
                f'{key}: labels follow the alphabetical order of the folders in {root}, not that of metainfo.classes: '
                f'label {label} is the folder {folder!r}, and {classes[label]!r} in the config. Write '
                f'classes={format_names(sorted(folders, key=folders.__getitem__))}'
            )
            return


def _labelled_folders(view: View) -> dict[str, int]:
    """Return the label of each folder if each folder holds one class; {} otherwise."""
    found, folders = getattr(view.dataset, 'folder_to_idx', None), view.samples.folders
    if isinstance(found, dict) and found:
        return found
    labels = [label for of_folder in folders.values() for label in of_folder]
    is_class = len(labels) == len(set(labels)) == len(folders) > 1
    return {folder: next(iter(of_folder)) for folder, of_folder in folders.items()} if is_class else {}


def check_stages(views: Sequence[View]) -> Iterator[Finding]:
    """Check that each label has the same class folder or class name in training, validation and joined data sets."""
    views = [view for view in views if not getattr(view.dataset, 'return_classes', False)]  # they are text to a model
    if not views:
        return
    key, first, folders = views[0].key, views[0].classes, dict(_labelled_folders(views[0]))
    for view in views[1:]:
        theirs, names = _labelled_folders(view), {label: folder for folder, label in folders.items()}
        at = None if folders and theirs else first_difference(first, view.classes)
        if at is not None:
            yield Finding(
                f'metainfo.classes: label {at} is {first[at]!r} in {key} and {view.classes[at]!r} in {view.key}. Both '
                f'need the same classes in one order: {format_names(first)}'
            )
            return
        # a sample may miss folders, and joined data sets may have more
        is_sample = not getattr(view.dataset, 'folder_to_idx', None)
        for folder, label in theirs.items() if folders else ():
            is_new = folder not in folders and (is_sample or (view.key == key and label not in names))
            if folders.get(folder) != label and not is_new:
                here = f'the folder {names[label]!r}' if label in names else 'no folder'
                yield Finding(
                    f'label {label} is {here} in {key} and the folder {folder!r} in {view.key}: images are judged by '
                    'other classes than they train. Both need the same folders (some may be empty).'
                )
                return
        if view.key == key:
            folders.update(theirs)


def check_trained_names(key: str, dataset: Any, checkpoint: Any) -> Iterator[Finding]:
    """Check that the class names in a checkpoint's ``meta`` equal those of the data set.

    ``key`` is the setting of the data set for messages, such as ``'val_dataloader'``. Another order of the classes is
    an error, other classes are a warning.
    """
    trained: Any = checkpoint
    for part in ('meta', 'dataset_meta', 'classes'):
        trained = trained.get(part) if isinstance(trained, dict) else None
    if not isinstance(trained, (list, tuple)) or getattr(dataset, 'return_classes', False):
        return
    names = classes_of(dataset)
    at = first_difference(trained, names)
    if at is not None:
        is_moved = names[at] in trained or trained[at] in names
        yield Finding(
            f'label {at} is {trained[at]!r} in the checkpoint and {names[at]!r} in {key}: '
            f'{"the classes have another order" if is_moved else "these are other classes"}. It was trained with '
            f'classes={format_names(trained)}',
            is_moved,
        )
