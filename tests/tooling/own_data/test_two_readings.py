# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Data with two readings: the error names the option that decides, and the option decides."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.own_files import (
    HEIGHT,
    NAMES,
    WIDTH,
    assert_refused,
    boxes_of,
    coco_dict,
    images,
    picture,
    read,
    text,
    voc,
)
from PIL import Image

from mmlinattn.tooling.own_data import drawing
from mmlinattn.tooling.own_data.data import Data
from mmlinattn.tooling.own_data.names import Splits, shared_key, split_in
from mmlinattn.utils.errors import RunError

SIDES = (4, 8, 20, 30)
CORNERS = (4, 8, 24, 38)
RIGHT = (30, 10, 28, 30)  # no corners; passes no edge as sides


def table(header, row, name='labels.csv', names=NAMES):
    def write(root):
        images(root, names)
        text(root / name, '\n'.join([header, *(row(each, i) for i, each in enumerate(names))]))

    return write


def csv_of(box, columns='x,y,w,h'):
    return table(f'filename,class,{columns}', lambda name, i: f'{name}.jpg,car,{",".join(map(str, box))}')


def coco_file(root, box=SIDES, name='all.json', names=NAMES):
    images(root, names)
    text(root / name, coco_dict([f'{each}.jpg' for each in names], ['car'], bbox=list(box)))


def voc_files(root, box=CORNERS, folder='', names=NAMES):
    images(root, names)
    for name in names:
        text(root / folder / f'{name}.xml', voc(('car', box)))


def yolo(root, line='0 0.21875 0.479167 0.3125 0.625', folder='', names=NAMES):
    images(root, names)
    text(root / 'classes.txt', 'car')
    for name in names:
        text(root / folder / f'{name}.txt', line)


def both(root):
    voc_files(root)
    yolo(root)


def two_tools(root):
    voc_files(root, names='abc')
    yolo(root, folder='labels', names='def')


def exports(root):
    coco_file(root)
    coco_file(root, RIGHT, 'old.json')


def two_folders(root):
    voc_files(root)
    for folder in ('a', 'b'):
        text(root / folder / 'a.xml', (root / 'a.xml').read_text())
    for file in root.glob('*.xml'):
        file.rename(root / 'b' / file.name)


def mixed(name, i):
    return f'{name}.jpg,car,' + ','.join(map(str, (0.1, 0.2, 0.5, 0.9) if i % 2 else CORNERS))


@pytest.mark.parametrize(
    'write, options, expected',
    [
        (csv_of(SIDES), {}, '--boxes corners|sides|centre'),
        (csv_of(SIDES), dict(boxes='sides'), SIDES),
        (csv_of((14, 23, 20, 30)), dict(boxes='centre'), SIDES),
        (csv_of(RIGHT), {}, RIGHT),  # other readings fall outside or are empty
        (csv_of(CORNERS, 'left,top,right,bottom'), {}, SIDES),
        (csv_of((0.1, 0.2, 0.9, 1.000001), 'xmin,ymin,xmax,ymax'), {}, (6.4, 9.6, 51.2, 38.4)),
        (table('filename,class,xmin,ymin,xmax,ymax', mixed), {}, '--units pixels|shares'),
        (csv_of((0.5, 0.5, 0.9, 0.9), 'xmin,ymin,xmax,ymax'), dict(units='pixels'), 'all 6 boxes are narrower than'),
        (csv_of(CORNERS, 'x_center,y_center,wide,high'), {}, 'its columns are filename, class, x_center'),
        (csv_of((*CORNERS, 1, 1), 'x1,y1,x2,y2,x3,y3'), {}, 'CSV of quadrilaterals'),
        (table('file,kind,xmin,ymin,xmax,ymax', lambda n, i: f'{n},k{i},1,2,9,9'), {}, 'Is it kind? Name it class'),
        (table('a.jpg,4,8,24,38,car', lambda n, i: f'{n}.jpg,4,8,24,38,car'), {}, 'has no header'),
        (lambda root: coco_file(root, (30, 8, 60, 40)), {}, '--boxes corners|sides|centre'),
        (lambda root: coco_file(root, (30, 8, 60, 40)), dict(boxes='corners'), (30, 8, 30, 32)),
        (lambda root: coco_file(root, (0.1, 0.1, 0.5, 0.5)), {}, 'shares of the image'),
        (lambda root: voc_files(root, RIGHT), {}, 'all of them fit: give --boxes'),
        (lambda root: voc_files(root, (4, 8, 24, 7)), dict(boxes='corners'), 'ymin 8 is above ymax 7'),
        (both, {}, 'is labelled twice: by a.xml and by a.txt: give --labels FILE'),
        (both, dict(labels='a.xml'), SIDES),
        (two_tools, {}, 'VOC XML (a.xml, 3 images, classes car) and YOLO text files (labels/d.txt, 3 images'),
        (lambda root: coco_file(root, (0, 0, 0, 0)), {}, 'all.json: all 6 boxes are narrower than a pixel'),
        (exports, {}, 'labelled twice: by all.json and by old.json: give --labels FILE'),
        (exports, dict(labels='old.json'), RIGHT),
        (two_folders, {}, 'is labelled twice: by'),
        (two_folders, dict(labels='b'), SIDES),
        (lambda root: yolo(root, '0 0.3 0.3 0.6 0.6 0.2 0.2 0.3 0.4'), {}, 'write kpt_shape'),
        (lambda root: yolo(root, '0 0.3 0.3 0.2 0.2 0.9 1'), {}, 'leave the scores out'),
        (lambda root: yolo(root, '0 0.1 0.1 0.4 0.1 0.4 0.4 0.9'), {}, 'the score of a prediction (--save-conf)'),
        (lambda root: yolo(root, '0 0.0625 0.166667 0.375 0.166667 0.375 0.791667 0.0625 0.791667'), {}, SIDES),
        (lambda root: yolo(root, '0 14 23 20 30'), {}, '--units pixels|shares'),
        (lambda root: yolo(root, '0 14 23 20 30'), dict(units='pixels'), SIDES),
    ],
)
def test_an_option_decides(tmp_path, write, options, expected):
    root = tmp_path / 'data'
    write(root)
    if isinstance(expected, str):
        assert_refused(expected, read, root, **options)
    else:
        found = {box for _, _, box in boxes_of(read(root, **options))}
        assert np.abs(np.array(list(found)) - expected).max() < 0.01 and len(found) == 1


def test_one_box_of_six_that_no_reading_keeps_in_its_image_is_cut(tmp_path):
    coco_file(tmp_path)
    content = json.loads((tmp_path / 'all.json').read_text())
    content['annotations'][0]['bbox'] = [4, 8, 90, 90]
    text(tmp_path / 'all.json', content)
    assert {box for _, _, box in boxes_of(read(tmp_path))} == {SIDES, (4, 8, WIDTH - 4, HEIGHT - 8)}


@pytest.mark.parametrize(
    'options, train, val',
    [
        (dict(train='one.txt'), 'abc', ''),
        (dict(val='one.txt'), 'def', 'abc'),
        (dict(train='one.txt', val='e.xml'), 'abc', 'e'),
    ],
)
def test_lists_of_the_command_line(tmp_path, options, train, val):
    voc_files(tmp_path)
    text(tmp_path / 'one.txt', 'a.jpg\nb.jpg\nc.jpg')
    data = read(tmp_path, **options)
    found = {split: ''.join(path.stem for path in paths) for split, paths in data.images.items()}
    assert set(''.join(found.values())) == set(train + val)
    assert not val or (found['train'], found['val']) == (train, val)


@pytest.mark.parametrize(
    'lists, expected',
    [
        (dict(train1='a b c', val1='d', val2='e'), 'abc de'),
        (dict(car_train='a.jpg/1 b.jpg/-1 c.jpg/1', car_val='d.jpg/1 e.jpg/-1'), 'abc de'),
        (dict(train='a.jpg/masks-a.png b c', val='d', test='d e'), 'abc d e'),
        (dict(train1='a b', val1='c', train2='c'), 'is of train and of val in two of'),
        ({'split.csv': 'image,split a.jpg,train b.jpg,train c.jpg,val d.jpg,test'}, 'ab c d'),
        (dict(train='a.xml b.jpg c.PNG f', val='d.xml e'), 'abcf de'),  # of label files, and before a conversion
        (dict(train='x.jpg y.jpg', val='z.jpg'), "train.txt: 2 of 2 lines name no image, the first is 'x.jpg'"),
        (dict(train='a b c', val='d x.jpg'), "val.txt: 1 of 2 lines name no image, the first is 'x.jpg'"),
        (dict(train='a b c', val='x.jpg/1 y.jpg/1'), "val.txt: 2 of 2 lines name no image, the first is 'x.jpg 1'"),
        (dict(train='a b', val='c d x'), 'ab cd'),
        ({'train.csv': 'image a.jpg b.jpg', 'val.csv': 'image,age c.jpg,1 d.jpg,2'}, 'ab cd'),
        (dict(train='a b c d e', test='x.jpg y.jpg'), 'abce d'),  # test images that were not copied, and a val drawn
        (dict(train='a b c d e', val='cat dog'), 'abce d'),  # names of classes
        (dict(train='a b c d e', val='My/notes/on Its/first/images 0/0.5/0.5/0.2/0.2'), 'abce d'),
    ],
)
def test_lists_of_the_data(tmp_path, lists, expected):
    voc_files(tmp_path)
    for name, lines in lists.items():
        text(
            tmp_path / (name if '.' in name else f'{name}.txt'),
            '\n'.join(line.replace('/', ' ') for line in lines.split()),
        )
    if len(expected) > 10:
        with pytest.raises(RunError, match=expected):
            read(tmp_path)
    else:
        found = read(tmp_path).images.values()
        assert ' '.join(''.join(sorted(path.stem for path in paths)) for paths in found) == expected


def test_lists_of_stems_without_images_are_refused(tmp_path):
    voc_files(tmp_path, names=[f'2008_{i:03}' for i in range(5)])
    text(tmp_path / 'train.txt', '\n'.join(f'2008_{i:03}' for i in range(4)))
    text(tmp_path / 'val.txt', '2009_007\n2009_008 1')
    assert_refused("val.txt: 2 of 2 lines name no image, the first is '2009_007'", read, tmp_path)
    picture(tmp_path / '2009_007.jpg')  # without labels
    text(tmp_path / 'val.txt', '2009_007')
    assert_refused("val.txt: its lines name no labelled image, the first is '2009_007'", read, tmp_path)


def test_a_mask_is_no_image_of_a_label(tmp_path):
    voc_files(tmp_path / 'images')
    (tmp_path / 'images/a.jpg').unlink()
    picture(tmp_path / 'trimaps' / 'a.png', np.zeros((HEIGHT, WIDTH), np.uint8))
    assert_refused(('a.xml: the only image of its name is', 'trimaps/a.png, a mask'), read, tmp_path)


def test_two_formats_of_two_splits_are_read(tmp_path):
    voc_files(tmp_path / 'val', names='cgh')
    coco_file(tmp_path / 'train', names='abc')
    data = read(tmp_path)
    assert {split: len(paths) for split, paths in data.images.items()} == dict(train=3, val=3)
    assert data.kind == 'COCO JSON and VOC XML' and len(boxes_of(data)) == 6
    assert any(note.startswith('1 images of val are copies of training images') for note in data.notes)
    (tmp_path / 'train').rename(tmp_path / 'more')
    assert_refused('both have labels: convert one', read, tmp_path)


def test_an_option_decides_for_the_format_that_needs_it(tmp_path):
    csv_of(SIDES)(tmp_path / 'train')
    voc_files(tmp_path / 'val', names='xyz')
    assert_refused('give --boxes', read, tmp_path)
    assert {box for *_, box in boxes_of(read(tmp_path, boxes='sides'))} == {SIDES}
    (tmp_path / 'train/labels.csv').unlink()
    coco_file(tmp_path / 'train')
    assert_refused('--boxes: the numbers of COCO JSON and VOC XML', read, tmp_path, boxes='sides')


def test_names_of_splits():
    """Find the split in one name, and in names that differ by the split alone."""
    names = dict(train=['TrainData', 'trainannot'], val=['val2017', 'VALIDATE', 'dev'], test=['test_images'])
    names[None] = ['train station', 'crash test 1', 'train_val2019', 'latest']
    assert {split: [name for name in names[split] if split_in(name) == split] for split in names} == names
    splits = Splits(['seg_train', 'seg_test', 'train_station'], ['v1.0_train_clean', 'v1.0_val_clean', 'a_train_b'])
    assert [splits.of_folder(name) for name in ('seg_train', 'seg_pred', 'train_station')] == ['train', None, None]
    assert splits.of_file('lvis_v1_val') == splits.of(Path('x/v1.0_val_clean.json'), True) == 'val'
    assert splits.of_file('a_train_b') is None
    assert shared_key(Path('labels/train2017')) == shared_key(Path('train2017/images')) != shared_key(Path('val2017'))


def test_groups_stay_together(tmp_path):
    names = [f'{i}_jpg.rf.{j}f' for i in range(5) for j in range(3)]
    voc_files(tmp_path, names=names)
    data = read(tmp_path)
    val = {path.name.partition('.rf.')[0] for path in data.images['val']}
    assert len(data.images['val']) == 3 and len(val) == 1 and 'as 1 whole groups' in ' '.join(data.notes)


@pytest.mark.parametrize('videos', [3, 1])
def test_frames_of_a_video_stay_together(tmp_path, videos):
    coco_file(tmp_path)
    content = json.loads((tmp_path / 'all.json').read_text())
    for i, image in enumerate(content['images']):
        image['video_id'] = i % videos
    text(tmp_path / 'all.json', content)
    drawn = dict.fromkeys((3, 1), 'drawn from train for it') | {3: '2 images were drawn from train for it as 1 whole'}
    assert drawn[videos] in ' '.join(read(tmp_path).notes)


@pytest.mark.parametrize(
    'task, folders, options, expected',
    [
        ('classification', ['tr/cat', 'tr/dog', 'te/cat', 'te/dog'], {}, '--train DIR and --val DIR'),
        ('classification', ['tr/cat', 'tr/dog', 'te/cat', 'te/dog'], dict(train='tr', val='te'), ['cat', 'dog']),
        ('classification', ['Birds/gull', 'Birds/owl', 'Fish/carp', 'Fish/eel'], {}, 'nested: which are the classes'),
        ('classification', ['seg_train/seg_train/a', 'seg_train/seg_train/b', 'seg_test/seg_test/a'], {}, ['a', 'b']),
        ('classification', ['x/x/train/a', 'x/x/train/b', 'x/x/val/a', 'test/test'], {}, ['a', 'b']),
        ('classification', ['a_train/a_train/a', 'a_train/a_train/b', 'a_test/a_test'], {}, ['a', 'b']),
        ('classification', ['train/a', 'train/b', 'val'], {}, '2 images of val are in no folder of a class'),
        ('segmentation', ['photos', 'overlays'], {}, 'give --images DIR and --labels DIR'),
        ('segmentation', ['photos_train', 'masks_train', 'valPhotos', 'valMasks'], {}, ['class_0', 'class_1']),
        ('segmentation', ['rgb', 'labels'], {}, ['class_0', 'class_1']),
        ('segmentation', ['photos', 'labels/trimaps'], {}, 'give --images DIR and --labels DIR'),
        ('segmentation', ['photos', 'overlays'], dict(images='photos', labels='overlays'), ['class_0', 'class_1']),
        ('segmentation', ['photos_train', 'pets2_train', 'photos_val', 'pets2_val'], {}, r'\(both DATA, if'),
        (
            'segmentation',
            ['photos_train', 'pets2_train', 'photos_val', 'pets2_val'],
            dict(images='.', labels='.'),
            ['class_0', 'class_1'],
        ),
        ('segmentation', ['images', 'masks', 'labels'], {}, 'both have masks of images: give --labels DIR'),
        ('segmentation', ['images', 'masks', 'labels'], dict(labels='labels'), ['class_0', 'class_1']),
        ('segmentation', ['images', 'masks', 'labels'], dict(labels='.'), 'both have masks of images'),
    ],
)
def test_folders_with_two_readings(tmp_path, task, folders, options, expected):
    for folder in folders:
        for i in range(2 if task == 'classification' else 4):
            is_mask = task == 'segmentation' and folder != folders[0] and 'photos' not in folder.lower()
            picture(
                tmp_path / 'data' / folder / f'{i}.png',
                np.resize([0, 1], (HEIGHT, WIDTH)).astype(np.uint8) if is_mask else None,
            )
    if isinstance(expected, list):
        assert read(tmp_path / 'data', task, **options).classes == expected
    else:
        with pytest.raises(RunError, match=expected):
            read(tmp_path / 'data', task, **options)


def test_copies_stay_in_one_split(tmp_path):
    """As in data that were unpacked inside themselves; half of the copies have another name."""
    for folder in ('data', 'data/data'):
        voc_files(tmp_path / folder)
    for file in (tmp_path / 'data/data').glob('[abc].*'):
        file.rename(file.with_name(f'copy_{file.name}'))
    data = read(tmp_path)
    shown = {split: {path.read_bytes() for path in paths} for split, paths in data.images.items()}
    assert not shown['train'] & shown['val'] and '6 images are there several times' in ' '.join(data.notes)


def test_copies_in_folders_of_splits_are_read_once(tmp_path):
    """A script copied the images to train and val; those around are of no split."""
    voc_files(tmp_path)
    voc_files(tmp_path / 'train', names='abcd')
    voc_files(tmp_path / 'val', names='ef')
    data = read(tmp_path)
    assert {split: len(paths) for split, paths in data.images.items()} == dict(train=4, val=2)
    assert '6 images outside of train and val are left out: ./ (6)' in data.notes


TWO_SPLITS = ('train/cat', 'train/dog', 'val/cat', 'val/dog')


@pytest.mark.parametrize(
    'folders, count, said',
    [
        (('cat', 'dog', '_unlabeled', 'no_label'), 6, 'folders of images without label are left out: _unlabeled, no_'),
        ((*TWO_SPLITS, 'train/bird'), 12, 'folders without a file: train/bird'),
        (('cat', 'Cat', 'dog'), 9, 'classes differ by capital letters alone: Cat, cat'),
        (TWO_SPLITS, 13, '1 images of val are copies of training images'),
        (('train/cat', 'train/dog', 'val'), 9, 'splits by columns or names of files and folders'),
    ],
)
def test_class_folders_with_more_than_classes(tmp_path, folders, count, said):
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
        names = [f'{folder.replace("/", "_")}{i}' for i in range(3)]
        images(tmp_path / folder, [] if folder == 'train/bird' else names)
    if 'val' in folders:
        text(tmp_path / 'val_labels.csv', 'filename,label\nval0.jpg,cat\nval1.jpg,dog\nval2.jpg,dog')
    if 'are copies' in said:
        (tmp_path / 'val/cat/other.jpg').write_bytes((tmp_path / 'train/cat/train_cat0.jpg').read_bytes())
    data = read(tmp_path, 'classification')
    assert said in ' '.join([*data.notes, *Data(tmp_path).unused()])
    assert sum(map(len, data.images.values())) == count


def test_two_columns_of_classes(tmp_path):
    rows = [f'{name}.jpg,{"cat" if name < "d" else "dog"},{"old" if name in "adf" else "young"}' for name in NAMES]
    text(tmp_path / 'labels.csv', '\n'.join(['filename,class,category', *rows]))
    images(tmp_path, NAMES)
    assert_refused('2 columns of classes, class (cat, dog) and category (old, young)', read, tmp_path, 'classification')
    assert read(tmp_path, 'classification', classes=['young', 'old']).classes == ['young', 'old']
    text(tmp_path / 'labels.csv', '\n'.join(['filename,class,species', *rows]))
    assert read(tmp_path, 'classification').classes == ['cat', 'dog']


@pytest.mark.parametrize('numbers', ['class_numbers.csv', None])
def test_class_numbers_from_one(tmp_path, numbers):
    text(tmp_path / 'cameras.csv', 'id,name\n1,left\n2,right')  # of no classes
    table('filename;x1;y1;x2;y2;class', lambda name, i: f'{name}.jpg;4;8;24;38;{i % 2 + 1}')(tmp_path)
    text(tmp_path / (numbers or 'classes.txt'), 'id;name\n1;van\n2;car' if numbers else 'van\ncar')
    assert {name for _, name, _ in boxes_of(read(tmp_path))} == {'van', 'car'}
    assert read(tmp_path, classes=['x', 'y']).classes == ['x', 'y']
    text(tmp_path / 'class_names.csv', 'id,name\n1,lorry\n2,bus')
    text(tmp_path / 'classes.csv', 'id,name\n1,a\n2,b')
    assert read(tmp_path, classes=['x', 'y']).classes == ['x', 'y']
    if numbers:
        assert_refused('differ in the names of class numbers: keep one, or give --classes', read, tmp_path)


def test_columns_by_their_content(tmp_path):
    rows = [
        f'{name}.jpg,{"cat" if i % 2 else "dog"},{"Training" if i < 4 else "PublicTest"}'
        for i, name in enumerate(NAMES)
    ]
    text(tmp_path / 'all.csv', '\n'.join(['frame,label,Usage', *rows]))
    images(tmp_path, NAMES)
    assert {split: len(paths) for split, paths in read(tmp_path, 'classification').images.items()} == dict(
        train=4, val=2
    )
    text(
        tmp_path / 'all.csv',
        '\n'.join(['frame,label,is_train', *(f'{row.rpartition(",")[0]},{i % 2}' for i, row in enumerate(rows))]),
    )
    assert_refused('val has images of', read, tmp_path, 'classification')
    rows = [f'{name}.jpg,{i % 2}.0' for i, name in enumerate(NAMES[:-1])]  # of pandas, for a blank cell
    text(tmp_path / 'all.csv', '\n'.join(['image,label', *rows]))
    assert read(tmp_path, 'classification').classes == ['0', '1']


@pytest.mark.parametrize(
    'rows, said',
    [
        ('id,photo,class 1,b.jpg,cat 2,a.jpg,dog 3,d.jpg,cat 4,c.jpg,dog 5,e.jpg,cat 6,f.jpg,dog', ''),
        ('mask,scan,class a.jpg,b.jpg,cat b.jpg,a.jpg,dog', 'mask and scan both name files'),
    ],
)
def test_columns_of_files(tmp_path, rows, said):
    images(tmp_path, NAMES)
    text(tmp_path / 'all.csv', rows.replace('photo', 'frame').replace(' ', '\n'))
    if said:
        assert_refused(said, read, tmp_path, 'classification')
    else:
        data = read(tmp_path, 'classification')
        labels = {item.path.stem: item.label for items in data.items.values() for item in items}
        assert labels['a'] == labels['c'] == 'dog' and labels['b'] == labels['d'] == 'cat'


def test_a_column_of_one_word_names_no_split(tmp_path):
    for split, names in dict(train='abcd', val='ef').items():
        table(
            'filename,xmin,ymin,xmax,ymax,class,usage',
            lambda name, i: f'{name}.jpg,4,8,24,38,car,valid',
            f'{split}.csv',
            names,
        )(tmp_path)
    assert {split: len(paths) for split, paths in read(tmp_path).images.items()} == dict(train=4, val=2)


def test_lists_of_one_image(tmp_path):
    images(tmp_path, NAMES)
    for split, names in dict(train='abcd', val='ef', trainval='abcdef').items():
        text(tmp_path / f'{split}.txt', '\n'.join(f'{name}.jpg {i % 2}' for i, name in enumerate(names)))
    assert_refused('give --train LIST and --val LIST', read, tmp_path, 'classification')
    data = read(tmp_path, 'classification', train='train.txt', val='val.txt')
    assert {split: len(paths) for split, paths in data.images.items()} == dict(train=4, val=2)


def test_numbers_of_lists_are_named_by_class_folders(tmp_path):
    images(tmp_path / 'train/cat', 'abc')
    images(tmp_path / 'train/dog', 'abc')
    images(tmp_path / 'val', 'gh')
    lines = [f'{folder}/{name}.jpg {i}' for i, folder in enumerate(('cat', 'dog')) for name in 'abc']
    text(tmp_path / 'meta/train.txt', '\n'.join(lines))
    text(tmp_path / 'meta/val.txt', 'g.jpg 0\nh.jpg 1')
    data = read(tmp_path, 'classification')
    assert data.classes == ['cat', 'dog'] and len(data.images['train']) == len(lines)


@pytest.mark.parametrize('file', ['classes.txt', 'label_list.txt'])
def test_lists_of_images_and_classes(tmp_path, file):
    images(tmp_path / 'train', 'abcd')
    images(tmp_path / 'val', 'ef')
    for split, names in dict(train='abcd', val='ef').items():
        lines = [f'{name}.jpg {i % 2}' for i, name in enumerate(names)]
        text(tmp_path / 'meta' / f'{split}.txt', '\n'.join(lines))
    text(tmp_path / f'meta/{file}', '1 cat\n2 dog')
    data = read(tmp_path, 'classification')
    assert (data.kind, data.classes) == ('lists of images and classes', ['cat', 'dog'])
    assert {split: len(paths) for split, paths in data.images.items()} == dict(train=4, val=2)


def test_classes_of_the_command_line_choose_the_level_of_folders(tmp_path):
    for i, patient in enumerate('pqrstuvw'):
        images(tmp_path / ('ill' if i % 2 else 'well') / patient, [f'{patient}{j}' for j in range(2)])
    assert_refused('--classes NAME ..., the names of one level', read, tmp_path, 'classification')
    data = read(tmp_path, 'classification', classes=['well', 'ill'])
    patients = [{path.parent for path in paths} for paths in data.images.values()]
    assert data.classes == ['well', 'ill'] and not patients[0] & patients[1]
    leaves = read(tmp_path, 'classification', classes=[*'pqrstuvw'])
    assert leaves.classes == [*'pqrstuvw']


def test_label_files_of_both_splits_leave_others_out(tmp_path):
    coco_file(tmp_path, name='all.json')
    for name, names in dict(fold0_a='abcd', fold0_b='ef').items():
        text(tmp_path / f'{name}.json', coco_dict([f'{each}.jpg' for each in names], ['car'], bbox=list(SIDES)))
    assert_refused('or --train and --val', read, tmp_path)
    data = read(tmp_path, train='fold0_a.json', val='fold0_b.json')
    assert {split: len(paths) for split, paths in data.images.items()} == dict(train=4, val=2)


def test_masks_of_several_folders_are_copied_on_request(tmp_path):
    for i in range(8):
        folder = tmp_path / 'data' / f'p{i % 4}'
        picture(folder / f'{i}.{"png" if i % 2 else "jpg"}')
        picture(folder / f'{i}_mask.png', np.resize([0, i % 2], (HEIGHT, WIDTH)).astype(np.uint8))
    assert_refused('Give --labels ', read, tmp_path / 'data', 'segmentation')
    data = read(tmp_path / 'data', 'segmentation', labels=str(tmp_path / 'data'))
    folder = Path(data.settings['train']['data_prefix']['seg_map_path'])
    lines = data.annotations['train'].splitlines()
    assert lines and all((tmp_path / 'data' / line).is_file() and (folder / f'{line}.png').is_file() for line in lines)
    patients = [{path.parent for path in data.images[split]} for split in ('train', 'val')]
    assert [len(each) for each in patients] == [3, 1] and not patients[0] & patients[1]


def test_folders_of_one_name_are_drawn_apart(tmp_path):
    """Two hospitals number their patients from one."""
    for place in ('east', 'west'):
        for i in range(4):
            voc_files(tmp_path / place / f'p{i}', names=[f'{place}{i}{j}' for j in range(2)])
    train, val = ({path.parent for path in read(tmp_path).images[split]} for split in ('train', 'val'))
    assert len(train) + len(val) == 8 and not train & val
    assert {path.name for path in val} <= {path.name for path in train}


def test_folders_of_one_class_are_divided(tmp_path):
    for name in NAMES[:4]:
        for i in range(3):
            picture(tmp_path / name / f'{name}{i}.jpg')
            text(tmp_path / name / f'{name}{i}.xml', voc([name, (4, 4, 20, 20)]))
    assert {path.parent.name for path in read(tmp_path).images['val']} == {*NAMES[:4]}


def test_masks_with_names_of_their_own(tmp_path):
    for i in (9, 10, 11):
        picture(tmp_path / f'photos/{i}_training.jpg')
        picture(tmp_path / f'vessels/manual_{i}.png', np.resize([0, 1], (HEIGHT, WIDTH)).astype(np.uint8))
    text(tmp_path / 'list.txt', ''.join(f'{i}_training 1 1 {i}\n' for i in (9, 10, 11)))  # no colours
    data = read(tmp_path, 'segmentation', images='photos', labels='vessels')
    pairs = {item.path.name: item.file.name for items in data.items.values() for item in items}
    assert pairs == {f'{i}_training.jpg': f'manual_{i}.png' for i in (9, 10, 11)}
    assert 'that differ, as 10_training.jpg and manual_10.png' in ' '.join(data.notes)
    (tmp_path / 'photos/9_training.jpg').unlink()
    assert_refused('begin with that of its image', read, tmp_path, 'segmentation', images='photos', labels='vessels')
    both = tmp_path / 'both'
    picture(both / 'a.jpg')
    picture(both / 'a_anno.png', np.resize([0, 1], (HEIGHT, WIDTH)).astype(np.uint8))
    assert_refused('a_anno.png seem to be masks: name', read, both, 'segmentation', images=str(both), labels=str(both))


def test_masks_in_gif_files_are_read_and_photographs_are_not(tmp_path):
    for i in range(6):
        picture(tmp_path / f'images/{i}.{"gif" if i == 5 else "jpg"}')
        picture(tmp_path / f'masks/{i}.gif', np.resize([0, 255], (HEIGHT, WIDTH)).astype(np.uint8))
    data = read(tmp_path, 'segmentation')
    masks = {item.file.name for items in data.items.values() for item in items}
    assert masks == {f'{i}.gif' for i in range(5)}
    assert np.unique(data.labels_of(tmp_path / 'masks/0.gif')).tolist() == [0, 1]
    assert_refused('7 of .gif', read, tmp_path)


@pytest.mark.parametrize('classes', [None, [f'c{i}' for i in range(6)]])
def test_numbered_objects_are_no_classes(tmp_path, classes):
    for i in range(6):
        picture(tmp_path / f'images/{i}.jpg')
        numbers = [0, 1, 2, 4, 5] if i == 5 and not classes else np.arange(i + 1)  # one has a gap
        picture(tmp_path / f'masks/{i}.png', np.resize(numbers, (HEIGHT, WIDTH)).astype(np.uint8))
    if classes:
        assert read(tmp_path, 'segmentation', classes=classes).classes == classes
    else:
        assert_refused('numbers of objects. If they are classes, give --classes', read, tmp_path, 'segmentation')


def test_categories_in_another_order_and_with_blanks(tmp_path):
    images(tmp_path, NAMES)
    for split, names, classes in (('train', 'abcd', ('car', 'bus')), ('val', 'ef', ('bus ', 'car'))):
        text(tmp_path / f'{split}.json', coco_dict([f'{name}.jpg' for name in names], classes, bbox=list(SIDES)))
    data = read(tmp_path)
    assert data.classes == ['car', 'bus']
    assert [{name for _, name, _ in boxes_of(data, split)} for split in ('train', 'val')] == [{'car'}, {'bus'}]


def test_two_data_sets_in_one_folder(tmp_path):
    for folder in ('v1', 'v2'):
        yolo(tmp_path / folder / 'train', names=[f'{name}{folder}' for name in NAMES])
        text(tmp_path / folder / 'data.yaml', 'train: train\nval: train\nnames: [car]')
    assert_refused(('v1/data.yaml and', 'v2/data.yaml differ in names or splits'), read, tmp_path)


def test_dropped_files_are_named(tmp_path):
    coco_file(tmp_path / 'train')
    picture(tmp_path / 'val' / '0.jpg')
    data = read(tmp_path)
    assert '1 images without labels are left out: val/ (1)' in data.notes
    picture(tmp_path / 'train' / 'a.jpg').write_bytes((tmp_path / 'train' / 'b.jpg').read_bytes()[:900])
    assert_refused('a.jpg is truncated', read, tmp_path)


@pytest.mark.parametrize('mask', ['masks/{}.png', 'images/{}_mask.png', 'images/{}.png', 'labels/{}.png'])
def test_masks_are_no_images_of_a_class(tmp_path, mask):
    for name in ('a', 'b', 'c', 'x', 'y', 'z'):
        folder = tmp_path / ('cat' if name < 'd' else 'dog')
        picture(folder / f'images/{name}.jpg')
        picture(folder / mask.format(name), np.zeros((HEIGHT, WIDTH), np.uint8))
    data = read(tmp_path, 'classification')
    assert {path.suffix for paths in data.images.values() for path in paths} == {'.jpg'}
    assert '6 masks of images are left out' in ' '.join(data.notes)


def test_masks_are_no_background(tmp_path):
    for name in NAMES:
        picture(tmp_path / f'images/train/{name}.jpg')
        picture(tmp_path / f'masks/train/{name}.png', np.zeros((HEIGHT, WIDTH), np.uint8))
    assert_refused('masks/train/a.png, set --task segmentation', read, tmp_path)
    for name in NAMES:
        text(tmp_path / f'labels/train/{name}.txt', '0 0.5 0.5 0.2 0.2')
    data = read(tmp_path, classes=['car'])
    assert 'masks/train/ (6)' in ' '.join(data.notes) and sum(map(len, data.images.values())) == 6


@pytest.mark.parametrize('lines', ['1\n0', '1 1\n2'])
def test_lists_with_the_names_of_cub(tmp_path, lines):
    images(tmp_path / 'cat', 'abc')
    images(tmp_path / 'dog', 'def')
    for name in ('train_test_split.txt', 'images.txt'):
        text(tmp_path / name, lines)
    data = read(tmp_path, 'classification')
    assert data.classes == ['cat', 'dog'] and sum(map(len, data.images.values())) == len(NAMES)


@pytest.mark.parametrize(
    ('segmentation', 'expected'),
    [
        ([[1, 2, 3, 4, 5, 6]], [[[1, 2], [3, 4], [5, 6]]]),
        (dict(size=[4, 4], counts=[0, 2, 2, 1, 11]), [[[0, 0], [0, 1], [1, 0]]]),
        (dict(size=[4, 4], counts=[0, 1, 15]), []),  # a pixel has no area
        (None, []),
    ],
)
def test_outlines_of_coco_masks(segmentation, expected):
    assert [sorted(part.tolist()) for part in drawing._polygons(segmentation)] == expected


def test_labels_png_shows_training_images(tmp_path):
    coco_file(tmp_path / 'data')
    file = tmp_path / 'data/all.json'
    content = json.loads(file.read_text())
    content['annotations'].append(dict(id=9, image_id=15, category_id=7, bbox=[40, 40, 3, 3]))
    data = read(text(file, content).parent)
    assert data.items['train'][0].objects and {
        category['supercategory'] for category in json.loads(data.annotations['val'])['categories']
    } == {'none'}
    drawing.draw_examples(data, tmp_path / 'labels.png')
    with Image.open(tmp_path / 'labels.png') as image:
        assert image.size == (1200, 800) and np.asarray(image).std() > 20
    assert drawing.is_drawn(tmp_path / 'labels.png')
