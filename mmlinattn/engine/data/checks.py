# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Check data sets, after they are built, against the config. Each check yields messages of one line."""

import os.path as osp
from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any, NamedTuple, Optional

import numpy as np
from torch import nn

from .coco import check_coco
from .files import reads_local_files, spread
from .findings import Finding, classes_of, decode_head_of, format_names, is_metric_learning, transforms_of
from .label_images import check_label_images

_NUM_READ = 2000  # samples with labels that are read


class Samples(NamedTuple):
    """Facts read from samples of a data set."""

    num: int  # number of samples read
    labels: dict[int, str]  # of objects and images, each with the path of an image that has it
    folders: dict[str, set[int]]  # labels by the first folder below the prefix of the images
    fault: str = ''  # an image that cannot be loaded
    is_part: bool = False  # joined data sets have labels, so this one may be background only


def inner_datasets(dataset: Any) -> Sequence:
    """Return the data sets inside a wrapper such as ``RepeatDataset`` or ``ConcatDataset``."""
    known = getattr(dataset, '__dict__', {})
    if isinstance(known.get('datasets'), (list, tuple)):
        return dataset.datasets
    inner = known.get('dataset', known.get('_dataset'))
    return [] if inner is None else [inner]


def all_datasets(dataset: Any) -> Iterator[Any]:
    """Yield a data set and all data sets inside it."""
    yield dataset
    for child in inner_datasets(dataset):
        yield from all_datasets(child)


def leaf_datasets(dataset: Any) -> Iterator[Any]:
    """Yield the data sets that are not wrappers, from inside all wrappers."""
    return (each for each in all_datasets(dataset) if not inner_datasets(each))


def infos_of(dataset: Any, count: Optional[int] = None) -> Iterator[dict]:
    """Yield ``get_data_info`` of images in all data sets inside wrappers: of all images, or of ``count`` in each data
    set."""
    for leaf in leaf_datasets(dataset):
        if hasattr(leaf, 'get_data_info'):
            infos = map(leaf.get_data_info, range(len(leaf)) if count is None else spread(len(leaf), count))
            yield from (info for info in infos if isinstance(info, dict))


def first_difference(first: Sequence, second: Sequence) -> Optional[int]:
    """Return the first label for which two lists have different class names, or None if there is none.

    Only the common length is compared. Case, blanks and hyphens are ignored. Two lists of one name each never differ.
    """

    def normalised(name: Any) -> str:
        return ''.join(c for c in str(name).lower() if c.isalnum()) or str(name)

    if len(first) == len(second) == 1:
        return None
    return next((i for i, (a, b) in enumerate(zip(first, second)) if normalised(a) != normalised(b)), None)


# -- names ------------------------------------------------------------------------------------------------------------


def check_names(key: str, meta: dict) -> Iterator[Finding]:
    """Check that ``classes`` of a ``metainfo`` is a sequence of names, or an existing text file, and is not spelt
    ``CLASSES``."""
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


# -- labels -----------------------------------------------------------------------------------------------------------


_NO_CLASSES = ('rpn_conv', 'max_depth', 'boundary_threshold')  # attributes of heads of proposals, depth and edges


def _counts_of_stages(model: nn.Module) -> dict[str, list[int]]:
    """Return ``num_classes`` of each classifying head by name: one number per stage."""
    if hasattr(model, 'language_model'):
        return {}
    roi, found = getattr(model, 'roi_head', None), {}
    heads = {'bbox_head': getattr(roi, 'bbox_head', None) or getattr(model, 'bbox_head', None)}
    heads['mask_head'] = getattr(roi, 'mask_head', None)
    heads.update((name, getattr(model, name, None)) for name in ('head', 'decode_head', 'auxiliary_head'))
    for name, head in heads.items():
        stages: list[Any] = list(head) if isinstance(head, nn.ModuleList) else [head]
        counts = [
            stage.num_classes
            for stage in stages
            if type(getattr(stage, 'num_classes', None)) is int
            and not getattr(stage, 'class_agnostic', False)
            and not any(hasattr(stage, attribute) for attribute in _NO_CLASSES)
        ]
        if counts:
            found[name] = counts
    return found


def num_classes_of_heads(model: nn.Module) -> dict[str, int]:
    """Return ``num_classes`` of each classifying head by name; empty for models that take class names as text.

    Of a cascade, the smallest number counts.
    """
    return {name: min(counts) for name, counts in _counts_of_stages(model).items()}


def read_samples(dataset: Any) -> Samples:
    """Read the labels of about 2000 samples, evenly spaced in a data set."""
    samples, length = Samples(0, {}, {}), len(dataset)
    if not hasattr(dataset, 'get_data_info'):
        return samples
    prefix = getattr(dataset, 'data_prefix', None)
    root = osp.join(str(prefix.get('img_path') or ''), '') if isinstance(prefix, dict) else ''
    indices, fault = range(0, length, max(1, length // _NUM_READ)), ''
    steps = transforms_of(dataset)
    is_local = reads_local_files(dataset, *steps) and not any(getattr(step, 'ignore_empty', False) for step in steps)
    for index in indices:
        info = dataset.get_data_info(index)
        if not isinstance(info, dict):
            return samples
        path = str(info.get('img_path', ''))
        objects = [instance for instance in info.get('instances') or () if isinstance(instance, dict)]
        labels = [instance.get('bbox_label') for instance in objects if not instance.get('ignore_flag')]
        of_image = np.ravel(info['gt_label']).tolist() if info.get('gt_label') is not None else []
        for label in labels + of_image:
            if isinstance(label, Integral):
                samples.labels.setdefault(int(label), path)
        inside = path[len(root) :] if root and path.startswith(root) else ''
        if len(of_image) == 1 and '/' in inside:
            samples.folders.setdefault(inside.split('/')[0], set()).add(of_image[0])
        if is_local and not fault and osp.isdir(osp.dirname(path)) and not (osp.isfile(path) and osp.getsize(path)):
            fault = f'the image {path} {"has no bytes" if osp.exists(path) else "is not there"}'
    return samples._replace(num=len(indices), fault=fault)


def check_labels(key: str, dataset: Any, model: nn.Module, samples: Samples, is_training: bool) -> Iterator[Finding]:
    """Check that each label has an output in the heads, and that training data has labelled objects or images."""
    heads = {} if not is_training and is_metric_learning(model) else num_classes_of_heads(model)
    classes = classes_of(dataset)
    advice = 'Set num_classes of the {}, or metainfo.classes of the data set to those that count.'
    for label, path in sorted(samples.labels.items()):
        for head, count in heads.items():
            if not 0 <= label < count and head not in ('decode_head', 'auxiliary_head'):
                name = f' ({classes[label]})' if 0 <= label < len(classes) else ''
                yield Finding(
                    f'{key}: num_classes = {count} of the head is too small for the data: {path} has label '
                    f'{label}{name}, and the data set {len(classes)} classes. {advice.format(head)}'
                )
                return
    if samples.fault:
        yield Finding(f'{key}: {samples.fault}. Put it there, or take it out of the data set.')
        return
    all_are_read = bool(heads.keys() & {'bbox_head', 'head'}) and samples.num and samples.num == len(dataset)
    is_judged = key.startswith('val') and not samples.is_part  # a test may have no annotations
    has_none = all_are_read and not samples.labels and classes and 'instances' in dataset.get_data_info(0)
    if has_none and (is_training or is_judged):
        yield Finding(
            f'{key}: no image of {getattr(dataset, "ann_file", "")} has an object of metainfo.classes = '
            f'{format_names(classes)}: they have other names there, no area, or an image_id that is no image.',
            is_training and not samples.is_part,
        )
    if not is_training or not classes:
        return
    for head, counts in _counts_of_stages(model).items():
        if len(set(counts)) > 1:
            yield Finding(f'num_classes of the stages of {head} are {counts}: expected one number, {len(classes)}.')
            return
    is_binary = getattr(decode_head_of(model), 'out_channels', None) == 1  # background and foreground, by a sign
    for head, count in heads.items():
        if head in ('decode_head', 'auxiliary_head') and (max(count, 2) if is_binary else count) < len(classes):
            yield Finding(
                f'{key}: num_classes = {count} of the head is too small for the {len(classes)} classes of the data. '
                f'{advice.format(head)}'
            )
        elif count > len(classes):
            yield Finding(
                f'{key}: num_classes = {count} of the {head} is more than the {len(classes)} classes of the data; what '
                'it finds of the others has no name, and cannot be measured.',
                False,
            )
    rest = [name for label, name in enumerate(classes) if label not in samples.labels]
    if all_are_read and samples.labels and rest and not hasattr(dataset, 'cat_ids'):
        has = 'has an object' if 'bbox_head' in heads else 'is'
        yield Finding(f'{key}: none of its {samples.num} images {has} of {format_names(rest)}.', False)


def check_folders(key: str, dataset: Any) -> Iterator[Finding]:
    """Check that ``metainfo.classes`` is in the order in which MMPretrain numbers folders of the same names."""
    folders, classes = getattr(dataset, 'folder_to_idx', None), classes_of(dataset)
    if not isinstance(folders, dict) or not classes:
        return
    hidden = [folder for folder in folders if folder.startswith(('.', '__'))]
    if hidden:
        root = dataset.data_prefix['img_path']
        yield Finding(
            f'{key}: {osp.join(root, hidden[0])} counts as a class, of label {folders[hidden[0]]}. Remove it.'
        )
        return
    labels = {str(name): label for label, name in enumerate(classes)}
    for folder, label in folders.items():
        if labels.get(folder, label) != label:
            yield Finding(
                f'{key}: labels follow the alphabetical order of the folders in {dataset.data_prefix["img_path"]}, not '
                f'that of metainfo.classes: label {label} is the folder {folder!r}, and {classes[label]!r} in the '
                f'config. Write classes={format_names(sorted(folders, key=folders.__getitem__))}'
            )
            return


def _labelled_folders(dataset: Any, samples: Samples) -> dict[str, int]:
    """Return the label of each folder if each folder holds one class; {} otherwise."""
    found = getattr(dataset, 'folder_to_idx', None)
    if isinstance(found, dict) and found:
        return found
    labels = [label for of_folder in samples.folders.values() for label in of_folder]
    is_class = len(labels) == len(set(labels)) == len(samples.folders) > 1
    return {folder: next(iter(of_folder)) for folder, of_folder in samples.folders.items()} if is_class else {}


def check_stages(stages: dict[str, list[tuple[Any, Samples]]]) -> Iterator[Finding]:
    """Check that each label has the same class name in training, validation and all concatenated data sets.

    Args:
        stages: Pairs (data set, its samples) by config key.
    """
    entries = [(key, dataset, samples) for key, several in stages.items() for dataset, samples in several]
    entries = [entry for entry in entries if not getattr(entry[1], 'return_classes', False)]  # they are text to a model
    if len(entries) < 2:
        return
    (key, dataset, samples), *others = entries
    first, folders = classes_of(dataset), dict(_labelled_folders(dataset, samples))
    is_given = list(getattr(dataset, 'folder_to_idx', None) or ()) != first
    for other_key, other, more in others:
        theirs = _labelled_folders(other, more)
        names = {label: folder for folder, label in folders.items()}
        for folder, label in theirs.items() if folders else ():
            # a sample may miss folders, and joined data sets may have more
            is_sample = not getattr(other, 'folder_to_idx', None)
            is_new = folder not in folders and (is_sample or (other_key == key and label not in names))
            if folders.get(folder) != label and not is_new:
                here = f'the folder {names[label]!r}' if label in names else 'no folder'
                yield Finding(
                    f'label {label} is {here} in {key} and the folder {folder!r} in {other_key}: images are judged by '
                    'other classes than they train. Both need the same folders (some may be empty).'
                )
                return
        if other_key == key:
            folders.update(theirs)
        second = classes_of(other)
        at = first_difference(first, second)
        if at is not None and not (folders and theirs and not is_given):
            yield Finding(
                f'metainfo.classes: label {at} is {first[at]!r} in {key} and {second[at]!r} in {other_key}. Both need '
                f'the same classes in one order: {format_names(first)}'
            )
            return


def check_trained_names(key: str, dataset: Any, checkpoint: Any) -> Iterator[Finding]:
    """Check that the class names in a checkpoint of MMEngine are those of the data set."""
    meta = checkpoint.get('meta') if isinstance(checkpoint, dict) else None
    meta = (meta.get('dataset_meta') if isinstance(meta, dict) else None) or {}
    trained = meta.get('classes') if isinstance(meta, dict) else None
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


def check_dataset(
    key: str, dataset: Any, model: nn.Module, samples: Samples, is_training: bool, num_images: int
) -> Iterator[Finding]:
    """Run all checks of a single data set."""
    yield from check_names(key, getattr(dataset, 'metainfo', None) or {})
    yield from check_coco(key, dataset, model, is_training)
    yield from check_folders(key, dataset)
    yield from check_labels(key, dataset, model, samples, is_training)
    yield from check_label_images(key, dataset, model, is_training, num_images)
