# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Checks of COCO files before the first step."""

import json
import os
import re
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from helpers.data_checks import DETECTOR, build, model
from mmengine.dataset import DefaultSampler, InfiniteSampler
from mmengine.registry import METRICS
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, ValLoop
from PIL import Image

from mmlinattn.engine.data import files
from mmlinattn.engine.data.evaluation import check_sampler
from mmlinattn.engine.hooks import data_check
from mmlinattn.engine.hooks.data_check import extend_palette

IMAGES = [dict(id=i, file_name=f'{i}.png', width=40, height=30) for i in (1, 2)]
BOX = dict(iscrowd=0, area=100, bbox=[2, 2, 10, 10])
NAMES = ('cat', 'dog', 'owl')


def coco(folder, names=NAMES, name='a.json', box=(), **changes):
    """Write a file with gaps between category ids and an object of each category, and its images."""
    for entry in IMAGES:
        Image.new('RGB', (40, 30)).save(folder / entry['file_name'])
    categories = [dict(id=7 * i + 3, name=name) for i, name in enumerate(names)]
    boxes = [
        {**BOX, **dict(id=i + 1, image_id=1 + i % 2, category_id=7 * i + 3), **dict(box)} for i in range(len(names))
    ]
    content = {**dict(images=IMAGES, annotations=boxes, categories=categories), **changes}
    (folder / name).write_text(json.dumps(content))
    return folder / name


def coco_data(file, classes=NAMES, **settings):
    folder = str(file.parent) + '/'
    config = dict(type='CocoDataset', ann_file=str(file), data_prefix=dict(img=folder), metainfo=dict(classes=classes))
    return build('mmdet', dict(config, **settings))


def coco_metric(file, **settings):
    return METRICS.build(dict(type='CocoMetric', ann_file=str(file), **settings))


@pytest.mark.parametrize(
    ('classes', 'words'),
    [
        (('cat', 'owl', 'dog'), r"categories in {}.* label 1 is 'dog' there and 'owl' .*=\('cat', 'dog', 'owl'\)"),
        (('cat', 'bat', 'owl'), r"{} has no category \('bat',\).*labels behind it move up.*\('cat', 'dog', 'owl'\)"),
        (('bat', 'fly'), r"{} has no category \('bat', 'fly'\)"),
        ('cat', r"train_dataloader: metainfo.classes = 'cat' is a text.*classes=\('cat',\)"),
    ],
)
def test_classes_that_are_not_the_categories_of_a_coco_file(look, tmp_path, classes, words):
    """Inside of wrappers, too."""
    file = coco(tmp_path)
    joined = dict(type='ConcatDataset', datasets=[coco_data(file, classes)] * 2)
    dataset = build('mmdet', dict(type='RepeatDataset', times=2, dataset=joined))
    line, _ = look(DETECTOR, train=[dataset])
    assert line.startswith('train_dataloader: ')
    assert re.search(words.format(file), line), line
    # each is found in a test, too, and fault=warn continues
    assert look(DETECTOR, test=[dataset])[0] == line.replace('train_', 'test_', 1)
    assert any(re.search(words.format(file), text) for text in look(DETECTOR, train=[dataset], fault='warn')[1])
    assert look(DETECTOR, train=[dataset], fault='skip') == ('', [])


def test_some_classes_in_the_order_of_the_file_are_right(look, tmp_path):
    file = coco(tmp_path)
    assert look(model(bbox_head=2), val=[coco_data(file, ['cat', 'owl']), coco_metric(file)]) == ('', [])


def test_a_last_class_that_only_the_config_has(look, tmp_path):
    """Labels are right; training says it, and a metric that would run out of categories stops."""
    file = coco(tmp_path)
    dataset, cfg = coco_data(file, (*NAMES, 'bat')), dict(val_evaluator=[dict(ann_file=str(file))])
    line, warnings = look(model(bbox_head=4), train=[dataset])
    assert not line and f"{file} has no category ('bat',)" in warnings[0]
    line, _ = look(model(bbox_head=4), val=[dataset, coco_metric(file)], cfg=cfg)
    assert f"val_evaluator (CocoMetric): {file} has no category ('bat',)" in line


def test_a_head_of_more_classes_than_the_metric_knows(look, tmp_path):
    file = coco(tmp_path)
    line, _ = look(model(bbox_head=80), val=[coco_data(file, NAMES[:2]), coco_metric(file)])
    assert 'num_classes = 80 of the bbox_head is more than the 2 categories' in line


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
    dataset, file = coco_data(coco(tmp_path)), str(coco(tmp_path, name='b.json', **changes))
    line, warnings = look(DETECTOR, val=[dataset, coco_metric(file)], cfg=dict(val_evaluator=dict(ann_file=file)))
    assert bool(warnings) == ('box' in words) != bool(line)
    assert re.search(rf'val_evaluator \(CocoMetric\): {words.format(file)}', ''.join([line, *warnings]))


@pytest.mark.parametrize('kind', [EpochBasedTrainLoop, ValLoop, IterBasedTrainLoop])
@pytest.mark.parametrize('sampler', [InfiniteSampler, DefaultSampler])
def test_epochs_that_never_end(kind, sampler):
    """MMSegmentation's configs train by iterations; with epochs alone they would go on for ever."""
    loop = object.__new__(kind)
    loop.dataloader = SimpleNamespace(sampler=sampler([1, 2]))
    said = [finding.text for finding in check_sampler('train_dataloader', loop)]
    assert bool(said) == (sampler is InfiniteSampler and kind is not IterBasedTrainLoop)
    assert not said or "train_dataloader.sampler = dict(type='DefaultSampler', shuffle=True)" in said[0]


def test_a_mock_in_place_of_data():
    """As in MMPretrain's vis_scheduler.py."""

    class Loader(list):
        dataset = MagicMock()

    assert data_check._datasets(SimpleNamespace(dataloader=Loader())) == []


@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        (dict(box=dict(category_id=4711)), 'annotation 1 of image 1: category_id 47'),
        (dict(box=dict(bbox=[float('nan')] * 4)), 'bbox=[nan, '),
        (dict(box=dict(bbox=[0.1, 0.1, 0.5, 1])), 'are shares'),
        (dict(box=dict(bbox=[20, 9, 38, 28])), 'pass the edge'),
        (dict(images=IMAGES + IMAGES[:1]), 'has the id 1 2 times among its images'),
        (dict(images=[dict(IMAGES[0], width=7), IMAGES[1]]), '1.png): width x height is 7x30 in it, and 40x30 in'),
        (dict(box=dict(bbox=[20, 9, 18, 28])), ''),  # of hidden parts they may pass it
        (dict(box=dict(bbox=[20, 9, 22, 23])), ''),  # by two pixels, as tools that round write them
    ],
)
def test_faults_that_a_coco_file_is_built_with(look, tmp_path, changes, words):
    file = coco(tmp_path, **changes)
    line, _ = look(DETECTOR, train=[coco_data(file)])
    assert line.startswith(f'train_dataloader: {file} ' if words else '') and bool(line) == bool(words)
    assert words in line


OUTLINE = [[2, 2, 12, 2, 12, 12]]


@pytest.mark.parametrize(
    ('outline', 'is_right'),
    [
        ([[1, 2, 3, 4], *OUTLINE], True),  # left out by MMDetection
        (dict(size=[30, 40], counts='0'), True),
        (dict(size=[40, 30], counts='0'), False),
        (OUTLINE[0], False),
        ([OUTLINE[0][:4]], False),
        (None, False),
    ],
)
def test_outlines_where_masks_are_learnt(look, tmp_path, outline, is_right):
    boxes = [dict(BOX, id=i, image_id=1, category_id=3, segmentation=s) for i, s in enumerate((OUTLINE, outline))]
    file = coco(tmp_path, annotations=boxes)
    loads = dict(type='LoadAnnotations', with_bbox=True, with_mask=True)
    line, _ = look(DETECTOR, train=[coco_data(file, pipeline=[loads])])
    assert ('annotation 1 of image 1: segmentation' in line) != is_right and bool(line) != is_right
    assert not look(DETECTOR, train=[coco_data(file)])[0]


def test_objects_that_do_not_train(look, tmp_path):
    boxes = [dict(BOX, id=i, image_id=1, category_id=3) for i in range(4)]
    boxes[1]['area'], boxes[2]['image_id'], boxes[3]['bbox'] = 0, 77, [9, 9, -5, 5]
    line, (warning, _) = look(DETECTOR, train=[coco_data(coco(tmp_path, annotations=boxes))])
    assert not line and '3 of 4 annotations are left out, 1 first' in warning


def test_classes_without_object_are_named(look, tmp_path):
    boxes = [dict(BOX, id=1, image_id=1, category_id=3), dict(BOX, id=2, image_id=1, category_id=10, iscrowd=1)]
    dataset = coco_data(coco(tmp_path, annotations=boxes))
    line, (warning,) = look(DETECTOR, train=[dataset])
    assert not line and "has no object of ('dog', 'owl'): nothing of these classes trains" in warning
    assert look(DETECTOR, val=[dataset]) == ('', [])


def test_objects_to_be_ignored_are_named(look, tmp_path):
    """Upstream's reader drops the objects of CrowdHuman and VisDrone, its metric counts them."""
    boxes = [dict(BOX, id=i, image_id=1, category_id=3, ignore=i - 1) for i in (1, 2)]
    line, (warning, _) = look(DETECTOR, train=[coco_data(coco(tmp_path, annotations=boxes))])
    assert not line and '1 of 2 annotations have ignore = 1, 2 first' in warning and 'Write iscrowd = 1' in warning


def test_more_objects_than_a_detector_gives(look, tmp_path):
    boxes = [dict(BOX, id=i, image_id=1, category_id=7 * (i % 3) + 3) for i in range(1, 13)]
    dataset, detector = coco_data(coco(tmp_path, annotations=boxes)), model(bbox_head=3)
    detector.bbox_head.test_cfg = dict(max_per_img=10)
    line, (warning,) = look(detector, val=[dataset])
    assert not line and 'has up to 12 objects an image, and max_per_img = 10' in warning
    detector.bbox_head.test_cfg = dict(max_per_img=12)
    assert look(detector, val=[dataset]) == ('', [])


@pytest.mark.parametrize('number, said', [(0, 'annotation 0 of'), (2, 'has the id 2 2 times'), (None, 'without id')])
def test_ids_of_annotations(look, tmp_path, number, said):
    """An object of id 0 is never matched by pycocotools; two of one id are one to MMDetection."""
    boxes = [dict(BOX, id=i, image_id=1, category_id=3) for i in (1, 2)] + [dict(BOX, image_id=2, category_id=3)]
    boxes[2].update(dict(id=number) if number is not None else {})
    file = coco(tmp_path)
    data, metric = coco_data(file), coco_metric(file)
    file.write_text(json.dumps(dict(json.loads(file.read_text()), annotations=boxes)))
    metric = metric if number is None else coco_metric(file)
    assert said in look(DETECTOR, val=[data, metric])[0]


@pytest.mark.parametrize('order', [('soil', 'leaf', 'root'), ('leaf', 'root', 'soil')])
def test_panoptic_categories_that_begin_with_stuff(look, tmp_path, order):
    """Heads count things first."""
    categories = [dict(id=i, name=name, isthing=int(name != 'soil')) for i, name in enumerate(order, 1)]
    ids = {entry['name']: entry['id'] for entry in categories}
    segments = [dict(id=i, category_id=ids[name], iscrowd=0, bbox=[0, 0, 9, 9], area=81) for i, name in enumerate(ids)]
    annotations = [dict(image_id=i, file_name=f'{i}.png', segments_info=segments) for i in (1, 2)]
    file = coco(tmp_path, categories=categories, annotations=annotations)
    classes = ('leaf', 'root', 'soil')
    meta = dict(classes=classes, thing_classes=classes[:2], stuff_classes=classes[2:])
    dataset = coco_data(file, type='CocoPanopticDataset', metainfo=meta)
    line, _ = look(model(bbox_head=2), train=[dataset])
    advice = "'soil', which is stuff, before things: .* write classes=\\('leaf', 'root', 'soil'\\)"
    assert bool(re.search(advice, line)) == bool(line) == (order[0] == 'soil'), line


def test_a_mended_image_is_looked_at_again(look, tmp_path):
    dataset = coco_data(coco(tmp_path))
    Image.new('RGB', (41, 30)).save(tmp_path / '1.png')
    assert 'width x height is 40x30 in it, and 41x30' in look(DETECTOR, train=[dataset])[0]
    Image.new('RGB', (40, 30)).save(tmp_path / '1.png')
    assert look(DETECTOR, train=[dataset]) == ('', [])
    (tmp_path / '2.png').write_bytes(b'')
    assert f'the image {tmp_path}/2.png has no bytes' in look(DETECTOR, train=[dataset])[0]
    (tmp_path / '2.png').unlink()
    assert f'the image {tmp_path}/2.png is not there' in look(DETECTOR, test=[dataset])[0]


def test_a_metric_that_names_classes(look, tmp_path):
    """By their place among sorted ids."""
    categories = [dict(id=i, name=name) for i, name in zip((17, 10, 3), NAMES)]
    file = coco(tmp_path, categories=categories)
    for classwise in (True, False):
        line, _ = look(DETECTOR, val=[coco_data(file), coco_metric(file, classwise=classwise)])
        assert ('[17, 10, 3] in its ann_file' in line) == classwise == bool(line)


@pytest.mark.parametrize('kind', ['bbox', 'proposal_fast'])
def test_an_evaluation_needs_to_know_crowds(look, tmp_path, kind):
    """pycocotools would end in a KeyError after the first epoch; MMDetection's own recall does not ask."""
    file = coco(tmp_path, annotations=[dict(id=1, image_id=1, category_id=3, area=100, bbox=[2, 2, 10, 10])])
    line, _ = look(DETECTOR, val=[coco_data(file), coco_metric(file, metric=kind)])
    assert ('annotation 1 of its ann_file has no iscrowd; write 0' in line) == (kind == 'bbox')


@pytest.mark.parametrize('metric', ['Accuracy', 'DumpResults'])
def test_predictions_for_images_without_labels(look, tmp_path, metric):
    """`tools/test.py --out`: upstream's metrics would end in a KeyError after the first batch."""
    Image.new('RGB', (40, 30)).save(tmp_path / '1.png')
    dataset = build('mmpretrain', dict(type='CustomDataset', data_root=str(tmp_path), with_label=False))
    judge = METRICS.build(dict(type=metric, **dict(out_file_path='a.pkl') if metric == 'DumpResults' else {}))
    line, _ = look(model(head=3), test=[dataset, judge])
    assert ('set test_evaluator = [], and give tools/test.py --out' in line) == (metric == 'Accuracy') == bool(line)


DRAWN = '{"images": [], "categories": [{"id": 1}], "annotations": [{"id": 7, "image_id": 1, "category_id": 1, BOX}]}'


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        ('', 'is empty'),
        ('{"images": [', 'is no whole JSON file'),
        ('[]', 'holds a list'),
        ('{"images": []}', 'has no list of categories'),
        ('{"images": [1], "categories": []}', 'has no list of images'),
        ('{"images": [], "categories": [{"id": []}]}', 'neither numbers nor texts'),
        (DRAWN.replace(', BOX', ''), 'annotation 7 of image 1: bbox=None: expected four finite numbers'),
        (DRAWN.replace('BOX', '"bbox": [1, 2, 3]'), 'bbox=[1, 2, 3]: expected four finite numbers'),
    ],
)
def test_files_that_are_no_coco(tmp_path, text, words):
    (tmp_path / 'a.json').write_text(text)
    assert words in files.read_coco(str(tmp_path / 'a.json'))['fault']


def test_valid_coco_files(look, tmp_path):
    """Turned photographs, images that are not there, objects of no area, images without objects."""
    exif = Image.Exif()
    exif[files._ORIENTATION] = 6
    images = [dict(IMAGES[0], file_name='turned.jpg', width=30, height=40), dict(IMAGES[1], file_name='gone.png')]
    flat = [dict(BOX, id=1, image_id=1, category_id=3, bbox=[5, 5, 0, 3], iscrowd=1)]
    file = coco(tmp_path, images=images, annotations=flat)
    Image.new('RGB', (40, 30)).save(tmp_path / 'turned.jpg', exif=exif)
    facts = files.read_coco(str(file))
    assert facts['fault'] == files.fault_of_sizes(facts['images'], str(tmp_path), True) == ''
    assert 'turned by its EXIF data' in files.fault_of_sizes([[1, 'turned.jpg', 40, 30]], str(tmp_path), True)
    assert files.fault_of_sizes([[1, 'turned.jpg', 40, 30]], str(tmp_path), False) == ''
    for form, turns in (('color', True), ('unchanged', False), ('color_ignore_orientation', False)):
        data = coco_data(file, pipeline=[dict(type='LoadImageFromFile', color_type=form)])
        line, _ = look(DETECTOR, train=[data])
        assert ('width x height is 30x40 in it, and 40x30 in the image' in line) != turns, line
    content = json.loads(file.read_text())
    del content['annotations']
    file.write_text(json.dumps(content))
    assert files.read_coco(str(file))['fault'] == ''


def test_files_are_read_once(look, tmp_path, monkeypatch):
    """Until they change; in a work dir that cannot be written, again."""
    file = coco(tmp_path)
    dataset = coco_data(file)
    assert look(DETECTOR, train=[dataset]) == ('', []) and (tmp_path / 'data_check.json').is_file()
    monkeypatch.setattr(files.json, 'load', lambda _: pytest.fail('was read again'))
    assert look(DETECTOR, train=[dataset]) == ('', [])
    monkeypatch.undo()
    coco(tmp_path, NAMES[::-1])
    os.utime(file, (1, 1))
    assert 'follow the order' in look(DETECTOR, train=[dataset])[0]
    (tmp_path / 'data_check.json').write_text('no JSON')
    assert 'follow the order' in look(DETECTOR, train=[dataset])[0]


def test_images_without_objects(look, tmp_path):
    """Hard negatives are joined to labelled images."""
    (tmp_path / 'none').mkdir()
    some, none = coco_data(coco(tmp_path)), coco_data(coco(tmp_path / 'none', annotations=[]))
    line, warnings = look(DETECTOR, train=[SimpleNamespace(datasets=[some, none])])
    assert not line and any('no image of' in warning for warning in warnings)
    assert "has an object of metainfo.classes = ('cat', 'dog', 'owl')" in look(DETECTOR, train=[none])[0]
    assert look(DETECTOR, val=[none]) == ('', [])


def test_more_classes_than_colours(look, tmp_path):
    names = tuple(f'kind {i}' for i in range(90))
    dataset = build('mmdet', dict(type='RepeatDataset', times=2, dataset=coco_data(coco(tmp_path, names), names)))
    assert look(model(bbox_head=90), train=[dataset], fault='skip') == ('', [])
    assert len(dataset.metainfo['palette']) == len(dataset.dataset.metainfo['palette']) == 90
    made = extend_palette(dict(classes=names, palette=((1, 2, 3),) * 2))['palette']
    assert len(made) == 90 and made[:2] == [(1, 2, 3)] * 2
    for palette in ('random', None, [], [(1, 2, 3)] * 91):
        assert extend_palette(dict(classes=names, palette=palette))['palette'] == palette
