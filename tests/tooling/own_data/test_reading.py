# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Box formats, splits, and refusals of one line."""

import json
import os
import re

import numpy as np
import pytest
from helpers.own_files import (
    HEIGHT,
    WIDTH,
    assert_refused,
    boxes_of,
    coco_dict,
    counts,
    images,
    picture,
    read,
    text,
    voc,
)
from helpers.tool_runs import ROOT
from PIL import Image

from mmlinattn.tooling.own_data.boxes import read_boxes
from mmlinattn.tooling.own_data.data import Data

WHEEL = ('wheel', (4, 8, 24, 38))
HARD = '<difficult>1</difficult>'


def voc_folder(root, names, *objects, **lists):
    images(root / 'JPEGImages', names)
    for name in names:
        text(root / 'Annotations' / f'{name}.xml', voc(*objects))
    for name, ids in lists.items():
        text(root / 'ImageSets/Main' / f'{name}.txt', '\n'.join(ids))


def stems(data):
    return {split: ''.join(path.stem for path in paths) for split, paths in data.images.items()}


def layouts():
    """Yield the layouts of the page: task, name, paths."""
    page = (ROOT / 'docs' / 'own_data.md').read_text(encoding='utf-8')
    tasks = 'detection', 'segmentation', 'classification'
    for kind, block in zip(tasks, re.findall('```text\n(.*?)```', page, re.S)):
        for name, lines in re.findall(r'^(\S.*)\n((?:  .*\n)+)', block, re.M):
            paths = []
            for word in lines.split():
                inside = re.search(r'\{(.*)\}', word)
                paths += [word.replace(inside[0], each) for each in inside[1].split(',')] if inside else [word]
            yield pytest.param(kind, paths, id=name)


@pytest.mark.parametrize('kind, paths', list(layouts()))
def test_layouts_of_the_page(tmp_path, kind, paths):
    pictures = [path for path in paths if path.endswith('.jpg')]
    for path in paths:
        file, stem = tmp_path / path, path.rpartition('/')[2].partition('.')[0]
        if path.endswith('.jpg'):
            picture(file)
        elif path.endswith('.png'):
            picture(file, np.resize(np.array([0, 1], np.uint8), (HEIGHT, WIDTH)))
        elif path.endswith('.json'):
            text(file, coco_dict([name for name in pictures if stem in (*name.split('/'), 'result')]))
        elif path.endswith('.xml'):
            text(file, voc(WHEEL))
        elif path.endswith('.yaml'):
            text(file, 'names: [b, a]')
        else:
            text(file, dict(classes='b\na', train='a\nb', val='c').get(stem, '1 0.5 0.5 0.25 0.5'))
    assert counts(read(tmp_path, kind), 'train', 'val') in ([2, 1], [4, 2])


# -- VOC ---------------------------------------------------------------------------------------------------------------


def test_voc_as_published(tmp_path):
    """Boxes without area are left out, others cropped to their image; 0 stands for an unknown size."""
    lists = dict(train='ab', val='c', trainval='abc', test='d')
    voc_folder(tmp_path, 'abcd', WHEEL, ('car', (5, 5, 5, 5)), **lists)
    text(tmp_path / 'Annotations/d.xml', voc(('car', (50, 10, 80, 20), HARD), WHEEL, size=(0, 0)))
    data = read(tmp_path)
    assert (data.kind, data.classes) == ('VOC XML', ['car', 'wheel']) and stems(data) == dict(
        train='ab', val='c', test='d'
    )
    assert list(boxes_of(data, 'val')) == [('JPEGImages/c.jpg', 'wheel', (4, 8, 20, 30))]
    found = {key: entry['iscrowd'] for key, entry in boxes_of(data, 'test').items()}
    assert found['JPEGImages/d.jpg', 'car', (50, 10, 14, 10)] == 1
    assert any('3 boxes narrower than a pixel' in note for note in data.notes)


def test_voc_of_a_folder_above_and_lists_by_other_names(tmp_path):
    lists = dict(Train='ab', Validation='c', wheel_train=['a 1', 'b -1', 'd 1'])
    voc_folder(tmp_path / 'VOCdevkit/VOC2007', 'abcd', (*WHEEL, HARD), ('car', (4, 8, 9, 9)), **lists)
    text(tmp_path / 'VOCdevkit/VOC2007/Annotations/a.xml', voc((*WHEEL, HARD), ('car', (4, 8, 24, 70))))
    data = read(tmp_path)
    assert stems(data) == dict(train='ab', val='c')
    for note in ('no image of wheel', '1 images outside of train and val', '1 of 8 boxes reach beyond', '4 difficult'):
        assert any(note in each for each in data.notes), data.notes


def test_a_folder_of_trainval_contradicts_no_list(tmp_path):
    """As in DIOR."""
    voc_folder(tmp_path, '0123', WHEEL, train='012', val='3')
    (tmp_path / 'JPEGImages').rename(tmp_path / 'JPEGImages-trainval')
    assert counts(read(tmp_path)) == [3, 1]


def test_voc_of_two_years(tmp_path):
    """trainval replaces the missing train of the later one."""
    voc_folder(tmp_path / 'VOC2007', 'abcx', WHEEL, trainval='abcx', train='ab', val='c')
    voc_folder(tmp_path / 'VOC2012', 'de', WHEEL, trainval='de', val='e')
    assert stems(read(tmp_path)) == dict(train='abd', val='ce')


def test_voc_beside_the_images_and_no_val(tmp_path):
    for i in range(8):
        picture(tmp_path / f'train{i}.png')  # a name of an image is no split
        text(tmp_path / f'train{i}.xml', voc(WHEEL))
    data, again = read(tmp_path), read(tmp_path)
    assert counts(data) == [6, 2] and data.images == again.images
    assert any('drawn from train' in note for note in data.notes)


def test_images_of_xml_files_that_have_several(tmp_path):
    for name in ('train/a', 'train/c', 'val/c'):
        for folder in ('JPEGImages', 'SegmentationClass', 'SegmentationObject', 'thumbnails'):
            picture(tmp_path / folder / f'{name}.{"jpg" if folder == "JPEGImages" else "png"}')
        text(tmp_path / 'Annotations' / f'{name}.xml', voc(WHEEL))
    found = [name for name, *_ in boxes_of(read(tmp_path), 'train', 'val')]
    assert found == [f'JPEGImages/{name}.jpg' for name in ('train/a', 'train/c', 'val/c')]
    (tmp_path / 'JPEGImages' / 'val' / 'c.jpg').rename(tmp_path / 'JPEGImages' / 'd.jpg')
    assert_refused("val/c.xml: 'c' may be ", read, tmp_path)
    for folder in ('one', 'two'):
        picture(tmp_path / 'JPEGImages' / folder / 'c.jpg')
    assert_refused("val/c.xml: 'c' may be ", read, tmp_path)


# -- YOLO --------------------------------------------------------------------------------------------------------------


def yolo(root, line='1 0.5 0.5 0.25 0.5', names='b\na'):
    for split, count in (('train', 3), ('val', 1)):
        for i in range(count):
            picture(root / 'images' / split / f'{i}.jpg')
            text(root / 'labels' / split / f'{i}.txt', line + '\n')
    (root / 'labels' / 'train' / '2.txt').unlink()
    text(root / 'classes.txt', names)


@pytest.mark.parametrize(
    'name, content',
    [
        ('data.yaml', 'train: images/train\nnames: [b, a]'),
        ('data.yaml', 'names: {0: b, 1: a}'),
        ('classes.txt', '\ufeffb\r\na\r\n'),
        ('classes.txt', '0 b\n1: a\n'),
    ],
)
def test_yolo(tmp_path, name, content):
    yolo(tmp_path)
    (tmp_path / 'classes.txt').unlink()
    text(tmp_path / name, content)
    data = read(tmp_path)
    assert data.classes == ['b', 'a'] and counts(data) == [3, 1]
    assert list(boxes_of(data, 'train')) == [(f'images/train/{i}.jpg', 'a', (24, 12, 16, 24)) for i in (0, 1)]


@pytest.mark.parametrize('train', ['../images/train', ['train.txt']])
def test_yolo_splits_of_data_yaml(tmp_path, train):
    yolo(tmp_path)
    for kind in ('images', 'labels'):
        (tmp_path / kind / 'val').rename(tmp_path / kind / 'held_out')
    text(tmp_path / 'train.txt', '\n'.join(f'./images/train/{i}.jpg' for i in range(3)))
    content = json.dumps(dict(path='/elsewhere', train=train, val='images/held_out', names=['b', 'a']))
    text(tmp_path / 'data.yaml', content)
    data = read(tmp_path)
    assert counts(data) == [3, 1] and '1 of 4 images have no text file: they are background' in data.notes
    text(tmp_path / 'data.yaml', content.replace('images/held_out', 'images/valid'))
    assert_refused("says 'val: images/valid', which is not there, and the others are", read, tmp_path)


def test_yolo_folders_with_capitals_and_text_files_without_image(tmp_path):
    yolo(tmp_path)
    text(tmp_path / 'train_log.json', '{"loss": 1}')
    text(tmp_path / 'labels/train/other.txt', '1 0.5 0.5 0.25 0.5\n')
    for kind in ('images', 'labels'):
        (tmp_path / kind).rename(tmp_path / kind.capitalize())
    data = read(tmp_path)
    assert [name for name, *_ in boxes_of(data, 'train')] == [f'Images/train/{i}.jpg' for i in (0, 1)]
    files = Data(tmp_path)
    read_boxes(files)
    assert files.unused() == ['files not used: Labels/train/other.txt, train_log.json']


def test_one_folder_to_train_and_validate_on_is_divided(tmp_path):
    yolo(tmp_path)
    text(tmp_path / 'data.yaml', 'train: images/train\nval: images/train\nnames: [b, a]')
    assert counts(read(tmp_path)) == [3, 1]


def test_yolo_boxes_before_key_points(tmp_path):
    yolo(tmp_path, '0 0.5 0.5 0.5 0.5 0.1 0.1 0.2 0.2')
    text(tmp_path / 'data.yaml', 'kpt_shape: [2, 2]\nnames: [b]')
    assert list(boxes_of(read(tmp_path), 'val')) == [('images/val/0.jpg', 'b', (16, 12, 32, 24))]


def test_yolo_polygons_of_turned_photographs(tmp_path):
    """Numbers are shares of the image as shown and trained on."""
    yolo(tmp_path, '0 0.25 0.25 0.75 0.25 0.75 0.5', 'a')
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(tmp_path / 'images/val/0.jpg', exif=exif)
    assert list(boxes_of(read(tmp_path), 'val')) == [('images/val/0.jpg', 'a', (12, 16, 24, 16))]


def test_a_test_file_without_boxes_is_no_val(tmp_path):
    """Challenges keep back the labels of their test images."""
    for i in range(6):
        picture(tmp_path / f'{i}.jpg')
    text(tmp_path / 'train.json', coco_dict([f'{i}.jpg' for i in range(4)]))
    text(tmp_path / 'test.json', dict(coco_dict(['4.jpg', '5.jpg']), annotations=[]))
    data = read(tmp_path)
    assert counts(data, 'train', 'val') == [3, 1]
    assert 'the 2 images of test have no labels: val is tested on' in data.notes


def test_splits_without_boxes(tmp_path):
    yolo(tmp_path)
    picture(tmp_path / 'images' / 'test' / '0.jpg')
    data = read(tmp_path)
    assert list(data.images) == ['train', 'val']
    assert '1 images without labels are left out: images/test/ (1)' in data.notes
    text(tmp_path / 'labels' / 'val' / '0.txt', '')
    assert_refused('none of the 1 images of val has a label of b, a', read, tmp_path)


def test_links_are_followed(tmp_path):
    yolo(tmp_path / 'elsewhere')
    text(tmp_path / 'data' / 'classes.txt', 'b\na')
    for name in ('images', 'labels'):
        os.symlink(tmp_path / 'elsewhere' / name, tmp_path / 'data' / name)
    os.symlink(tmp_path / 'data', tmp_path / 'elsewhere' / 'images' / 'again')  # a loop
    os.symlink(tmp_path / 'elsewhere' / 'images' / 'train', tmp_path / 'data' / 'images' / 'test')  # train once more
    data = read(tmp_path / 'data')
    assert len(boxes_of(data, 'train')) == 2 and counts(data) == [3, 1]
    assert '3 images without labels are left out: images/test/ (3)' in data.notes


# -- COCO --------------------------------------------------------------------------------------------------------------


def test_files_beside_those_of_coco_boxes(tmp_path):
    given = {split: coco_dict([f'{split}{i}.jpg' for i in range(2)]) for split in ('train', 'val', 'test')}
    for split in given:
        for i in range(2):
            picture(tmp_path / split / f'{split}{i}.jpg')
    text(tmp_path / 'annotations/instances_train.json', given['train'])
    text(tmp_path / 'annotations/captions_train.json', dict(given['train'], annotations=[dict(caption='a')]))
    text(tmp_path / 'val.json', given['val'])
    text(tmp_path / 'annotations/image_info_test.json', dict(images=given['test']['images']))
    text(tmp_path / 'notes.json', dict(categories=[dict(id=0, name='a')], info={}))  # of Label Studio
    data = read(tmp_path)
    assert counts(data) == [2, 2] and data.classes == ['b', 'a'] and not data.masks  # in the order of the file
    assert list(boxes_of(data, 'train')) == [(f'train/train{i}.jpg', 'b', (4, 8, 20, 30)) for i in range(2)]


def test_coco_files_with_images_in_two_folders(tmp_path):
    """A missing or zero area is that of the box."""
    for folder in ('gt', 'images', 'train', 'val'):
        for i in range(2):
            picture(tmp_path / folder / f'{i}.jpg')
    text(tmp_path / 'val.json', coco_dict(['0.jpg', '1.jpg']))
    for area in (None, 0):
        text(tmp_path / 'train.json', coco_dict(['./0.jpg', '1.jpg'], area=area))
        found = boxes_of(read(tmp_path))
        assert [name for name, *_ in found] == [f'{split}/{i}.jpg' for split in ('train', 'val') for i in range(2)]
        assert [entry['area'] for entry in found.values()] == [600] * 4
    (tmp_path / 'train' / '0.jpg').unlink()
    assert_refused(
        ("train.json: './0.jpg' may be ", '/gt/0.jpg or ', '/images/0.jpg: give --images DIR'), read, tmp_path
    )


def test_a_group_of_categories_is_no_class(tmp_path):
    """Roboflow's files begin with one. COCO's persons name themselves, with or without objects."""
    for i in range(3):
        picture(tmp_path / f'{i}.jpg')
    content = coco_dict(['0.jpg', '1.jpg', '2.jpg'])
    content['categories'].insert(1, dict(id=0, name='animals'))
    for category, group in zip(content['categories'], ('animals', 'none', 'a')):  # of the classes b, animals, a
        category['supercategory'] = group
    assert read(text(tmp_path / 'result.json', content)).classes == ['b', 'a']
    content['annotations'][0]['category_id'] = 0
    assert read(text(tmp_path / 'result.json', content)).classes == ['b', 'animals', 'a']


def test_polygons_are_learnt_if_all_objects_have_them(tmp_path):
    for i in range(4):
        picture(tmp_path / f'{i}.jpg')
    content = coco_dict([f'{i}.jpg' for i in range(4)], segmentation=[[4, 8, 24, 8, 24, 38]])
    assert read(text(tmp_path / 'result.json', content)).masks
    content['annotations'][0]['segmentation'] = []
    data = read(text(tmp_path / 'result.json', content))
    assert not data.masks and '1 of 4 objects have no polygon: boxes alone are learnt' in data.notes


# -- refusals ----------------------------------------------------------------------------------------------------------

XML, ONE = voc(('a', (1, 1, 9, 9)), size=(HEIGHT, WIDTH)), coco_dict(['0.jpg'])
PASSED = 'pass the edge of their image, as (30, 8, 60, 40) in 64x48, read as left, top, width'


def labelled(line, **names):
    """Files of a YOLO folder with one line."""
    return {'labels/0.txt': line, **({'data.yaml': f'names: {names["yaml"]}'} if names else {'classes.txt': 'a'})}


@pytest.mark.parametrize(
    'files, said',
    [
        ({'train.json': dict(coco_dict([]))}, 'train.json has no images'),
        (
            {'train.json': coco_dict(['0.jpg'], 'ac'), 'val.json': coco_dict(['0.jpg'])},
            "val.json has the categories ['b', 'a']: expected different names, the same in all files",
        ),
        ({'train.json': coco_dict(['0.jpg', '1.jpg'])}, "train.json names the image '1.jpg'"),
        ({'train.json': dict(ONE, categories=[dict(id=1, name='a')])}, 'category_id 7 is the id of none'),
        ({'train.json': ONE, 'val.json': ONE}, 'labelled twice: by train.json (train) and by val.json (val)'),
        ({'train.json': coco_dict(['0.jpg'], bbox=[30, 8, 60, 40])}, PASSED),
        ({'train.json': coco_dict(['0.jpg'], classes=(None, 'a'))}, 'has a category without a name'),
        ({'0.xml': XML.replace('9', 'nan').replace('48', '0')}, 'a box that is no number'),
        ({'0.xml': XML}, '0.xml has an image of 48x64'),
        ({'0.xml': '<annotation><object>'}, '0.xml cannot be read'),
        ({'labels/0.txt': '1 0.5 0.5 0.25 0.5'}, 'write classes.txt'),
        (labelled('1 0.5 0.5 0.25 0.5'), "0.txt: line 1: '1 0.5 0.5 0.25 0.5'; classes are"),
        (labelled('0 24 12 40 36'), 'shares of the image'),
        (labelled('0 nan 0.5 0.1 0.1'), 'shares of the image'),
        (labelled('0 0.1 0.2 0.3 0.4 0.5'), 'is no class and x y width height, or x y of'),
        (labelled('0 0.1 0.2 0.3 0.4 0.5 0.6 0.7'), 'is no class and x y width height'),
        (labelled('1 0.5 0.5 0.2 0.2', yaml='{1: a, 2: b}'), 'names have the numbers [1, 2]: expected 0 to 1'),
        (labelled('1 0.5 0.5 0.2 0.2', yaml='coco.names'), "names='coco.names': expected a list"),
        (labelled('0 0.5 0.5 0.2 0.2', yaml='[a, b'), 'data.yaml cannot be read'),
        (labelled('0 0.5 0.5 0.2 0.2', yaml='[a, a]'), "two classes have the name 'a'"),
        (labelled('0 0.5 0.5 0.2 0.2', yaml='[a, b]\nnc: 3'), 'data.yaml: nc=3, and names has 2'),
        ({**labelled('0 0.5 0.5 0.2 0.2'), 'classes.txt': 'a\n\nb\n'}, "classes.txt: line 2 is ''"),
        ({**labelled('0 0.5 0.5 0.2 0.2'), 'classes.txt': '# mine\na'}, "classes.txt: line 1 is '# mine'"),
        ({'classes.txt': 'a'}, '(classes.txt: of no known format): export it as COCO JSON. It takes COCO'),
        (
            {**labelled('1 0.5 0.5 0.2 0.2', yaml='[a, b]'), 'classes.txt': 'b\na'},
            'names the classes a, b, and a list beside (classes.txt, labels.txt or .names) b, a: keep one',
        ),
    ],
)
def test_refused_boxes(tmp_path, files, said):
    picture(tmp_path / 'images' / '0.jpg')
    for name, content in files.items():
        text(tmp_path / name, content)
    assert_refused(said, read, tmp_path)
