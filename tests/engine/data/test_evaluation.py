# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Evaluators and samplers against the data sets of their loops."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.data_checks import BOX, DETECTOR, IMAGES, NAMES, coco_data, model, segmentation, write_coco
from mmengine.dataset import DefaultSampler, InfiniteSampler
from mmengine.registry import METRICS
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, ValLoop

from mmlinattn.engine.data.evaluation import check_evaluator, check_sampler


def coco_metric(file, **settings):
    return METRICS.build(dict(type='CocoMetric', ann_file=str(file), **settings))


def test_classes_of_the_config_and_categories_of_the_metric(look, tmp_path):
    """Some of the classes in the order of the file are right. A last class of the config alone is a note in training;
    in validation the metric would run out of categories."""
    file = write_coco(tmp_path)
    assert look(model(bbox_head=2), val=[coco_data(file, ['cat', 'owl']), coco_metric(file)]) == ('', [])
    dataset, cfg = coco_data(file, (*NAMES, 'bat')), dict(val_evaluator=[dict(ann_file=str(file))])
    line, warnings = look(model(bbox_head=4), train=[dataset])
    assert not line and f"{file} has no category ('bat',)" in warnings[0]
    line, _ = look(model(bbox_head=4), val=[dataset, coco_metric(file)], cfg=cfg)
    assert f"val_evaluator (CocoMetric): {file} has no category ('bat',)" in line


@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        (dict(names=NAMES[::-1]), 'labels follow the order'),
        (dict(images=IMAGES[:1], box=dict(image_id=1)), 'image 2 is .*2.png .* and none of its images in {}'),
        (dict(images=[dict(IMAGES[0], file_name='2.png'), IMAGES[1]]), 'image 1 is .*1.png .* and 2.png in {}'),
        (dict(box=dict(bbox=[3, 2, 10, 10])), 'image ., .*, has other boxes in {} than'),
    ],
)
def test_a_metric_with_another_file(look, tmp_path, changes, words):
    """The file of the training set has ids from 1 as well. Other boxes are a warning: they may be the better ones."""
    dataset, file = coco_data(write_coco(tmp_path)), str(write_coco(tmp_path, name='b.json', **changes))
    line, warnings = look(DETECTOR, val=[dataset, coco_metric(file)], cfg=dict(val_evaluator=dict(ann_file=file)))
    assert bool(warnings) == ('box' in words) != bool(line)
    assert re.search(rf'val_evaluator \(CocoMetric\): {words.format(file)}', ''.join([line, *warnings]))


def test_image_ids_from_zero(look, tmp_path):
    file = write_coco(
        tmp_path,
        images=[dict(IMAGES[0], id=0), IMAGES[1]],
        annotations=[dict(BOX, id=i + 1, image_id=2 * (i % 2), category_id=7 * i + 3) for i in range(3)],
    )
    assert look(DETECTOR, val=[coco_data(file), coco_metric(file)]) == ('', [])


def test_images_of_the_file_that_the_data_set_lacks(look, tmp_path):
    file = write_coco(tmp_path)
    dataset = coco_data(file, indices=1)
    line, (warning,) = look(DETECTOR, val=[dataset, coco_metric(file)])
    assert not line and 'its ann_file has 2 images, and the data set 1: objects in the others count as' in warning


@pytest.mark.parametrize('number, said', [(0, 'annotation 0 of'), (2, 'has the id 2 2 times'), (None, 'without id')])
def test_ids_of_annotations(look, tmp_path, number, said):
    """pycocotools never matches an object of id 0; MMDetection takes two of one id for one."""
    boxes = [dict(BOX, id=i, image_id=1, category_id=3) for i in (1, 2)] + [dict(BOX, image_id=2, category_id=3)]
    boxes[2].update(dict(id=number) if number is not None else {})
    file = write_coco(tmp_path)
    data, metric = coco_data(file), coco_metric(file)
    file.write_text(json.dumps(dict(json.loads(file.read_text()), annotations=boxes)))
    metric = metric if number is None else coco_metric(file)
    assert said in look(DETECTOR, val=[data, metric])[0]


def test_results_by_class_need_sorted_category_ids(look, tmp_path):
    file = write_coco(tmp_path, categories=[dict(id=i, name=name) for i, name in zip((17, 10, 3), NAMES)])
    for classwise in (True, False):
        line, _ = look(DETECTOR, val=[coco_data(file), coco_metric(file, classwise=classwise)])
        assert ('[17, 10, 3] in its ann_file' in line) == classwise == bool(line)
    file = write_coco(tmp_path, categories=[dict(id=i, name=name) for i, name in zip((3, 17, 10), NAMES)])
    assert look(DETECTOR, val=[coco_data(file, ['cat', 'owl']), coco_metric(file, classwise=True)]) == ('', [])


@pytest.mark.parametrize('kind', ['bbox', 'proposal_fast'])
def test_objects_without_iscrowd(look, tmp_path, kind):
    """pycocotools would raise a KeyError at such an object, which a rehearsal with two images may miss."""
    lacking = dict(id=1, image_id=1, category_id=3, area=100, bbox=[2, 2, 10, 10])
    file = write_coco(tmp_path, annotations=[dict(lacking, id=2, iscrowd=0), lacking])
    line, _ = look(DETECTOR, val=[coco_data(file), coco_metric(file, metric=kind)])
    assert ('annotation 1 of its ann_file has no iscrowd; write 0' in line) == (kind == 'bbox')


@pytest.mark.parametrize(
    ('names', 'ignored', 'words'),
    [
        (('sky', 'bird'), 255, ''),
        (('bird',), 255, 'of one class, .* it counts every pixel as found. Write classes='),
        (('sky', 'bird'), 99, 'ignore_index = 99, and 255 of the decode_head'),
    ],
)
def test_metrics_of_segmentors(look, tmp_path, names, ignored, words):
    dataset = segmentation(tmp_path / 'data', [0, 1], names=names, dtype=np.uint8)
    made = model(decode_head=2)
    made.decode_head.ignore_index = 255
    line, _ = look(made, val=[dataset, METRICS.build(dict(type='mmseg.IoUMetric', ignore_index=ignored))])
    assert re.search(words, line) and bool(words) == bool(line)


@pytest.mark.parametrize('kind', [EpochBasedTrainLoop, ValLoop, IterBasedTrainLoop])
@pytest.mark.parametrize('sampler', [InfiniteSampler, DefaultSampler])
def test_epochs_that_never_end(kind, sampler):
    """MMSegmentation's configs train by iterations; by epochs they would never validate."""
    loop = object.__new__(kind)
    loop.dataloader = SimpleNamespace(sampler=sampler([1, 2]))
    said = [finding.text for finding in check_sampler('train_dataloader', loop)]
    assert bool(said) == (sampler is InfiniteSampler and kind is not IterBasedTrainLoop)
    assert not said or "train_dataloader.sampler = dict(type='DefaultSampler', shuffle=True)" in said[0]


def test_two_data_sets_that_are_judged_apart(look, tmp_path):
    """The metric of the second knows none of the images of the first."""
    parts = []
    for name in 'ab':
        (tmp_path / name).mkdir()
        images = [dict(each, id=each['id'] + 10 * (name == 'b')) for each in IMAGES]
        file = write_coco(tmp_path / name, images=images, box=dict(image_id=images[0]['id']))
        parts.append((coco_data(file), coco_metric(file)))
    joined = SimpleNamespace(datasets=[data for data, _ in parts], metainfo=[data.metainfo for data, _ in parts])
    evaluator = SimpleNamespace(metrics=[metric for _, metric in parts], dataset_prefixes=['a', 'b'])
    assert [*check_evaluator('val_evaluator', evaluator, dict(metrics=None), joined, DETECTOR)] == []
    evaluator.metrics.reverse()
    (first, *_) = check_evaluator('val_evaluator', evaluator, None, joined, DETECTOR)
    assert 'image 1 is' in first.text and 'none of its images' in first.text
