# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Check evaluators and samplers against the data sets of the same loop."""

import os.path as osp
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, repeat
from typing import Any, Optional

import numpy as np
from mmengine.runner import EpochBasedTrainLoop, TestLoop, ValLoop
from torch import nn

from .coco import check_categories
from .datasets import Finding, classes_of, format_names, infos_of, inner_datasets
from .heads import decode_head_of

_NUM_IMAGES = 500  # compared by id
_ENDLESS = {'InfiniteSampler', 'MultiSourceSampler'}


def check_sampler(key: str, loop: Any) -> Iterator[Finding]:
    """Report an infinite sampler in a loop that waits for the end of an epoch; ``key`` is that of its dataloader."""
    if not isinstance(loop, (EpochBasedTrainLoop, ValLoop, TestLoop)):
        return
    samplers = (getattr(loop.dataloader, name, None) for name in ('sampler', 'batch_sampler'))
    kinds = {kind.__name__ for sampler in samplers for kind in type(sampler).__mro__}
    if kinds & _ENDLESS:
        yield Finding(
            f'{key}: {min(kinds & _ENDLESS)} never ends, and {type(loop).__name__} waits for the end of an epoch. '
            f"Set {key}.sampler = dict(type='DefaultSampler', shuffle={key.startswith('train')})."
        )


def _other_image(name: str, file: str, api: Any, info: dict) -> Optional[Finding]:
    """Report an image for which the data set and the evaluator's annotation file name different files or boxes.
    ``name`` of the metric and ``file`` are for messages; ``api`` is the index of pycocotools; ``info`` the data
    info."""
    number, path = info.get('img_id'), info.get('img_path')
    if not isinstance(path, str):
        return None
    there = str(api.imgs[number].get('file_name') or path) if number in api.imgs else 'none of its images'
    if osp.basename(there) != osp.basename(path):
        return Finding(
            f'{name}: image {number} is {path} in the data set and {there} in {file}, by whose boxes it would be '
            'judged. Set ann_file of the evaluator to that of the data set.'
        )
    judged = [entry['bbox'] for entry in api.imgToAnns.get(number, ()) if 'bbox' in entry]
    for left, top, right, bottom in (entry['bbox'] for entry in info.get('instances', ()) if 'bbox' in entry):
        box = left, top, right - left, bottom - top
        if not judged or np.abs(np.subtract(judged, box)).max(axis=1).min() > 0.5:
            return Finding(
                f'{name}: image {number}, {path}, has other boxes in {file} than in the data set. Is it the file of '
                'another split?',
                False,
            )
    return None


def check_evaluator(key: str, evaluator: Any, config: Any, dataset: Any, model: nn.Module) -> Iterator[Finding]:
    """Check ``CocoMetric`` (images by id, order of the classes, annotation ids) and ``IoUMetric`` against the data set
    and the model.

    Args:
        key (str): Key of the evaluator in the config, for messages.
        evaluator (Evaluator): The built evaluator; None is not checked.
        config (dict | list | None): Config of the evaluator, which names the annotation file in messages.
        dataset (Any): Data set of the loop, with its wrappers.
        model (nn.Module): Model that is evaluated.
    """
    parts: Iterable = repeat(dataset)
    if hasattr(evaluator, 'dataset_prefixes'):  # MultiDatasetsEvaluator: a metric for each of the joined data sets
        parts = inner_datasets(dataset)
        config = config.get('metrics') if isinstance(config, dict) else None
    entries = config if isinstance(config, (list, tuple)) else [config]
    for metric, dataset, entry in zip(getattr(evaluator, 'metrics', ()), parts, chain(entries, repeat(None))):
        file = (entry.get('ann_file') if isinstance(entry, dict) else None) or 'its ann_file'
        name = f'{key} ({type(metric).__name__})'
        if any(kind.__name__ == 'IoUMetric' for kind in type(metric).__mro__):
            yield from _check_iou_metric(name, metric, classes_of(dataset), decode_head_of(model))
        api = getattr(metric, '_coco_api', None)
        if isinstance(getattr(api, 'dataset', None), dict) and classes_of(dataset):
            findings = (_other_image(name, file, api, info) for info in infos_of(dataset, _NUM_IMAGES))
            yield from islice(filter(None, findings), 1)
            yield from _check_coco_metric(name, file, metric, dataset)


def _check_coco_metric(name: str, file: str, metric: Any, dataset: Any) -> Iterator[Finding]:
    """Check the annotation file of a COCO metric: number of images, order of ids, ``iscrowd``, and categories. ``name``
    of the metric and ``file`` are for messages."""
    content, kinds, classes = metric._coco_api.dataset, {*getattr(metric, 'metrics', ())}, classes_of(dataset)
    images, annotations, categories = (content.get(key, ()) for key in ('images', 'annotations', 'categories'))
    if hasattr(dataset, '__len__') and len(dataset) < len(images):
        yield Finding(
            f'{name}: {file} has {len(images)} images, and the data set {len(dataset)}: objects in the others '
            'count as missed. Set test_mode=True of the data set, or a file of its images alone.',
            False,
        )
    names = [entry['name'] for entry in categories]
    ids = [entry['id'] for entry in categories if entry['name'] in classes]
    if getattr(metric, 'classwise', False) and ids != sorted(ids):
        yield Finding(
            f'{name}: classwise=True gives the results of one class the name of another where category ids do not '
            f'ascend, as {ids[:10]} in {file}. Sort the categories by id, or set it to False.'
        )
    unmarked = next((entry for entry in annotations if 'iscrowd' not in entry), None)
    if unmarked and {'bbox', 'segm', 'proposal'} & kinds:
        yield Finding(f'{name}: annotation {unmarked.get("id")} of {file} has no iscrowd; write 0.')
    zero = next((entry for entry in annotations if entry.get('id') == 0 and 'bbox' in entry), None)
    if zero and {'bbox', 'segm'} & kinds:
        yield Finding(
            f'{name}: annotation 0 of {file}, of image {zero.get("image_id")}: pycocotools takes the id 0 as no '
            'match, and counts this object as missed. Number annotations from 1.'
        )
    yield from check_categories(name, file, names, [each for each in names if each in classes], classes, True)


def _check_iou_metric(name: str, metric: Any, classes: Sequence, head: Any) -> Iterator[Finding]:
    """Check that ``IoUMetric`` has more than one class, and that its ``ignore_index`` equals that of the decode head.

    ``name`` is the metric in messages. Without a head, nothing is checked.
    """
    if head is None:
        return
    if len(classes) == 1:
        yield Finding(
            f'{name}: of one class, {format_names(classes)}, it counts every pixel as found. Write '
            f'classes=("background", {classes[0]!r}), and num_classes=2, out_channels=1, threshold=0.5 of the '
            'decode_head with loss_decode.use_sigmoid=True.'
        )
    ours, theirs = getattr(head, 'ignore_index', None), getattr(metric, 'ignore_index', None)
    if type(ours) is int and type(theirs) is int and ours != theirs:
        yield Finding(
            f'{name}: ignore_index = {theirs}, and {ours} of the decode_head: pixels are judged that do not train. Set '
            'both to one number.'
        )
