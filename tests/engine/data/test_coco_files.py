# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""COCO files against the config: categories, objects and images."""

import json
import re
from types import SimpleNamespace

import pytest
from helpers.data_checks import BOX, DETECTOR, IMAGES, build, coco_data, model, write_coco
from PIL import Image

from mmlinattn.engine.data import coco as coco_files
from mmlinattn.engine.data import files


@pytest.mark.parametrize(
    ('classes', 'words'),
    [
        (('cat', 'owl', 'dog'), r"categories in {}.* label 1 is 'dog' there and 'owl' .*=\('cat', 'dog', 'owl'\)"),
        (('cat', 'bat', 'owl'), r"{} has no category \('bat',\).*labels behind it move up.*\('cat', 'dog', 'owl'\)"),
        (('bat', 'fly'), r"{} has no category \('bat', 'fly'\)"),
        ('cat', r"train_dataloader: metainfo.classes = 'cat' is a text.*classes=\('cat',\)"),
    ],
)
def test_classes_that_differ_from_the_categories(look, tmp_path, classes, words):
    """Look inside wrappers, in training and in tests; ``fault`` warns or skips."""
    file = write_coco(tmp_path)
    joined = dict(type='ConcatDataset', datasets=[coco_data(file, classes)] * 2)
    dataset = build('mmdet', dict(type='RepeatDataset', times=2, dataset=joined))
    line, _ = look(DETECTOR, train=[dataset])
    assert line.startswith('train_dataloader: ') and re.search(words.format(file), line), line
    assert look(DETECTOR, test=[dataset])[0] == line.replace('train_', 'test_', 1)
    assert any(re.search(words.format(file), text) for text in look(DETECTOR, train=[dataset], fault='warn')[1])
    assert look(DETECTOR, train=[dataset], fault='skip') == ('', [])


def boxes(*changes):
    """Objects of the category cat in the first image."""
    return [{**BOX, **dict(id=i, image_id=1, category_id=3), **change} for i, change in enumerate(changes, 1)]


@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        (dict(box=dict(category_id=4711)), 'annotation 1 of image 1: category_id 47'),
        (dict(box=dict(bbox=[float('nan')] * 4)), 'bbox=[nan, '),
        (dict(box=dict(bbox=[0.1, 0.1, 0.5, 1])), 'are shares'),
        (dict(box=dict(bbox=[20, 9, 38, 28])), 'pass the edge'),
        (dict(box=dict(bbox=[20, 9, 22.5, 12])), 'pass the edge'),
        (dict(box=dict(bbox=[2, 9, 8, 23.5])), 'pass the edge'),
        (dict(box=dict(bbox=[2, 9, 42.5, 12])), ''),
        (dict(box=dict(bbox=[2, 9, 8, 32.5])), ''),
        (dict(images=IMAGES + IMAGES[:1]), 'has the id 1 2 times among its images'),
        (dict(images=[dict(IMAGES[0], width=7), IMAGES[1]]), '1.png): width x height is 7x30 in it, and 40x30 in'),
        (dict(box=dict(bbox=[20, 9, 18, 28])), ''),  # boxes of hidden parts may pass it
        (dict(box=dict(bbox=[20, 9, 22, 23])), ''),  # by two pixels, as rounding tools write them
    ],
)
def test_errors_of_a_coco_file(look, tmp_path, changes, words):
    file = write_coco(tmp_path, **changes)
    line, _ = look(DETECTOR, train=[coco_data(file)])
    assert words in line and bool(line) == bool(words)
    assert not words or line.startswith(f'train_dataloader: {file} ')


POLYGON = [[2, 2, 12, 2, 12, 12]]


@pytest.mark.parametrize(
    ('polygon', 'is_right'),
    [
        ([[1, 2, 3, 4], *POLYGON], True),  # MMDetection leaves the first out
        (dict(size=[30, 40], counts='0'), True),
        (dict(size=[40, 30], counts='0'), False),
        (POLYGON[0], False),
        ([POLYGON[0][:4]], False),
        (None, False),
    ],
)
def test_polygons_for_masks(look, tmp_path, polygon, is_right):
    file = write_coco(tmp_path, annotations=boxes(dict(segmentation=POLYGON), dict(segmentation=polygon)))
    loads = dict(type='LoadAnnotations', with_bbox=True, with_mask=True)
    line, _ = look(DETECTOR, train=[coco_data(file, pipeline=[loads])])
    assert ('annotation 2 of image 1: segmentation' in line) != is_right and bool(line) != is_right
    assert not look(DETECTOR, train=[coco_data(file)])[0]


@pytest.mark.parametrize(
    ('annotations', 'words'),
    [
        (boxes({}, dict(area=0), dict(image_id=77), dict(bbox=[9, 9, -5, 5])), '3 of 4 annotations are left out'),
        (boxes(dict(ignore=0), dict(ignore=1)), '1 of 2 annotations have ignore = 1, 2 first'),  # as in CrowdHuman
        (boxes({}, dict(category_id=10, iscrowd=1, ignore=1)), "has no object of ('dog', 'owl')"),
    ],
)
def test_objects_and_classes_that_do_not_train_are_named(look, tmp_path, annotations, words):
    dataset = coco_data(write_coco(tmp_path, annotations=annotations))
    line, warnings = look(DETECTOR, train=[dataset])
    assert not line and any(words in warning for warning in warnings)
    assert ('have ignore' in ''.join(warnings)) == ('have ignore' in words)
    assert not any('has no object' in text for text in look(DETECTOR, val=[dataset])[1])


def test_more_objects_than_a_detector_gives(look, tmp_path):
    annotations = boxes(*(dict(category_id=7 * (i % 3) + 3) for i in range(12)))
    dataset, detector = coco_data(write_coco(tmp_path, annotations=annotations)), model(bbox_head=3)
    detector.bbox_head.test_cfg = dict(max_per_img=10)
    line, (warning,) = look(detector, val=[dataset])
    assert not line and 'has up to 12 objects an image, and max_per_img = 10' in warning
    for settings in (dict(max_per_img=12), [dict(max_per_img=10)]):
        detector.bbox_head.test_cfg = settings
        assert look(detector, val=[dataset]) == ('', [])


@pytest.mark.parametrize('order', [('soil', 'leaf', 'root'), ('leaf', 'root', 'soil')])
def test_panoptic_categories_that_begin_with_stuff(look, tmp_path, order):
    """Heads count things first."""
    categories = [dict(id=i, name=name, isthing=int(name != 'soil')) for i, name in enumerate(order, 1)]
    ids = {entry['name']: entry['id'] for entry in categories}
    segments = [dict(id=i, category_id=ids[name], iscrowd=0, bbox=[0, 0, 9, 9], area=81) for i, name in enumerate(ids)]
    annotations = [dict(image_id=i, file_name=f'{i}.png', segments_info=segments) for i in (1, 2)]
    file = write_coco(tmp_path, categories=categories, annotations=annotations)
    classes = ('leaf', 'root', 'soil')
    meta = dict(classes=classes, thing_classes=classes[:2], stuff_classes=classes[2:])
    line, _ = look(model(bbox_head=2), train=[coco_data(file, type='CocoPanopticDataset', metainfo=meta)])
    advice = "'soil', which is stuff, before things: .* write classes=\\('leaf', 'root', 'soil'\\)"
    assert bool(re.search(advice, line)) == bool(line) == (order[0] == 'soil'), line


def test_images_without_content(look, tmp_path):
    dataset = coco_data(write_coco(tmp_path))
    (tmp_path / '2.png').write_bytes(b'')
    assert f'the image {tmp_path}/2.png has no bytes' in look(DETECTOR, train=[dataset])[0]
    (tmp_path / '2.png').unlink()
    assert f'the image {tmp_path}/2.png is not there' in look(DETECTOR, test=[dataset])[0]


BOXES = '{"images": [], "categories": [{"id": 1}], "annotations": [{"id": 7, "image_id": 1, "category_id": 1, BOX}]}'


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        ('', 'is empty'),
        ('{"images": [', 'is no whole JSON file'),
        ('[]', 'holds a list'),
        ('{"images": []}', 'has no list of categories'),
        ('{"images": [1], "categories": []}', 'has no list of images'),
        ('{"images": [], "categories": [{"id": []}]}', 'neither numbers nor texts'),
        (BOXES.replace(', BOX', ''), 'annotation 7 of image 1: bbox=None: expected four finite numbers'),
        (BOXES.replace('BOX', '"bbox": [1, 2, 3]'), 'bbox=[1, 2, 3]: expected four finite numbers'),
    ],
)
def test_malformed_coco_files(tmp_path, text, words):
    (tmp_path / 'a.json').write_text(text)
    assert words in coco_files.load_coco(str(tmp_path / 'a.json'))[1]


def test_photographs_turned_by_exif(look, tmp_path):
    """Compare the size as loaded. Missing images, flat crowds and a file without annotations are no error."""
    exif = Image.Exif()
    exif[274] = 6
    images = [dict(IMAGES[0], file_name='turned.jpg', width=30, height=40), dict(IMAGES[1], file_name='gone.png')]
    file = write_coco(tmp_path, images=images, annotations=boxes(dict(bbox=[5, 5, 0, 3], iscrowd=1)))
    Image.new('RGB', (40, 30)).save(tmp_path / 'turned.jpg', exif=exif)
    assert coco_files.load_coco(str(file))[1] == coco_files.error_of_sizes(images, str(tmp_path), True) == ''
    swapped = [dict(images[0], width=40, height=30)]
    assert 'turned by its EXIF data' in coco_files.error_of_sizes(swapped, str(tmp_path), True)
    for color_type, turns in (('color', True), ('unchanged', False), ('color_ignore_orientation', False)):
        data = coco_data(file, pipeline=[dict(type='LoadImageFromFile', color_type=color_type)])
        line, _ = look(DETECTOR, train=[data])
        assert ('width x height is 30x40 in it, and 40x30 in the image' in line) != turns, line
    file.write_text(json.dumps(dict(images=images, categories=[dict(id=1, name='a')])))
    assert coco_files.load_coco(str(file))[1] == ''


def test_images_without_objects(look, tmp_path):
    (tmp_path / 'none').mkdir()
    some, none = coco_data(write_coco(tmp_path)), coco_data(write_coco(tmp_path / 'none', annotations=[]))
    line, warnings = look(DETECTOR, train=[SimpleNamespace(datasets=[some, none])])
    assert not line and any('no image of' in warning for warning in warnings)
    assert "has an object of metainfo.classes = ('cat', 'dog', 'owl')" in look(DETECTOR, train=[none])[0]
    (warning,) = look(DETECTOR, val=[none])[1]  # every number would be -1
    assert 'val_dataloader: no image of' in warning and look(DETECTOR, test=[none]) == ('', [])


def test_images_above_the_limit_of_pillow(tmp_path, monkeypatch):
    Image.new('L', (40, 30)).save(tmp_path / 'a.png')
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 100)
    assert files.oriented_size(tmp_path / 'a.png') == (40, 30) and Image.MAX_IMAGE_PIXELS == 100
