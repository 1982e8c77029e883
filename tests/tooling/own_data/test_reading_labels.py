# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Label images, folders of images, and the form of images, as people have them."""

import re

import numpy as np
import pytest
from own_files import HEIGHT, WIDTH, picture, text
from PIL import Image

from mmlinattn.tooling.own_data import finding, folders, label_images
from mmlinattn.utils.errors import RunError


def masks(root, values, names=None, suffix='.png', dtype=np.uint8, shape=(HEIGHT, WIDTH)):
    for i in range(4):
        picture(root / 'images' / f'{i}.jpg')
        picture(root / 'masks' / f'{i}{suffix}', np.resize(np.array(values, dtype), shape))
    return label_images.read_masks(root, names, root.parent / 'mine_labels')


@pytest.mark.parametrize(
    'values, names, classes, table',
    [
        ([0, 1], None, ['class_0', 'class_1'], {}),
        ([0, 1, 2, 255], ['a', 'b', 'c'], ['a', 'b', 'c'], {}),
        ([0, 255], None, ['background', 'foreground'], {0: 0, 255: 1}),
        ([0, 128], ['road', 'rest'], ['road', 'rest'], {0: 0, 128: 1}),
        ([0, 128, 255], ['a', 'b', 'c'], ['a', 'b', 'c'], {0: 0, 128: 1, 255: 2}),
        ([0, 38, 75, 255], ['a', 'b', 'c'], ['a', 'b', 'c'], {0: 0, 38: 1, 75: 2, 255: 255}),
    ],
)
def test_what_values_of_label_images_mean(values, names, classes, table):
    assert label_images.meaning(values, names) == (classes, table)


@pytest.mark.parametrize(
    'values, names, said',
    [
        ([7], None, 'the value 7 alone'),
        ([0, 1, 2, 3], ['a', 'b', 'c'], 'name every value in their order, the background too'),
        ([0, 128, 255], None, 'give --classes'),
    ],
)
def test_values_that_are_refused(values, names, said):
    with pytest.raises(RunError, match=said):
        label_images.meaning(values, names)


def test_masks_of_0_and_255_are_copied_as_labels(tmp_path):
    data = masks(tmp_path / 'data', [0, 255, 255], suffix='_mask.png')
    train = data.settings['train']
    assert (train['img_suffix'], train['seg_map_suffix']) == ('.jpg', '.png')
    stem = data.annotations['train'].split()[0]
    copy = Image.open(f'{train["data_prefix"]["seg_map_path"]}{stem}.png')
    assert np.unique(copy).tolist() == [0, 1] and data.classes == ['background', 'foreground']
    assert sum(map(len, data.images.values())) == 4 and 'copied' in ' '.join(data.notes)


def test_masks_divided_by_the_lists_of_voc(tmp_path):
    """``ImageSets/Segmentation``; those of boxes beside it are others."""
    root = tmp_path / 'data'
    for name, listed in (('Segmentation/train', '0\n2\n'), ('Segmentation/val', '3'), ('Main/train', '1\n3\n0')):
        text(root / 'ImageSets' / f'{name}.txt', listed)
    data = masks(root, [0, 1, 2])
    assert data.annotations == dict(train='0\n2\n', val='3\n')
    assert '1 images outside of train and val are left out' in data.notes
    text(root / 'ImageSets/Segmentation/val.txt', '3\n7')
    with pytest.raises(RunError, match='Segmentation names 7, of which there is no label image'):
        masks(root, [0, 1, 2])


def test_masks_as_mmsegmentation_reads_them_stay(tmp_path):
    """A folder a split, or one below another; those without a label image are left out."""
    for split, count in (('train', 3), ('val', 1)):
        for i in range(count):
            picture(tmp_path / split / 'images' / f'{i}.png')
            picture(tmp_path / split / 'masks' / f'{i}.png', np.full((HEIGHT, WIDTH), i, np.uint8))
    picture(tmp_path / 'val' / 'images' / '9.png')
    data = label_images.read_masks(tmp_path, ['a', 'b', 'c'], tmp_path / 'none')
    assert data.annotations == dict(train='0\n1\n2\n', val='0\n') and not (tmp_path / 'none').exists()
    assert data.settings['val']['data_prefix']['seg_map_path'] == 'val/masks/'
    assert any('1 images' in note and 'left out' in note for note in data.notes)


@pytest.mark.parametrize(
    'how, said',
    [
        (dict(values=[0, 1], suffix='.jpg'), 'JPEG'),
        (dict(values=[0, 1], shape=(3, 3)), 'has not the size'),
        (dict(values=[0, 1, 2], shape=(HEIGHT, WIDTH, 3)), 'have the colours (0, 1, 2): write label_colors.txt'),
        (dict(values=[0, 0.5], dtype=np.float32, suffix='.tif'), 'has values with fractions'),
        (dict(values=[0, 65536], dtype=np.int32, suffix='.tif'), 'has values from 0 to 65536: labels are 0 to 254'),
        (dict(values=[-1, 1], dtype=np.int32, suffix='.tif'), 'has values from -1 to 1'),
    ],
)
def test_masks_that_are_refused(tmp_path, how, said):
    with pytest.raises(RunError, match=re.escape(said)):
        masks(tmp_path / 'data', **how)


@pytest.mark.parametrize(
    'how',
    [
        dict(values=[0, 1], dtype=np.float32, suffix='.tif'),
        dict(values=[0, 1], dtype=np.uint16),
        dict(values=[0, 0, 0, 1, 1, 1], shape=(HEIGHT, WIDTH, 3)),  # grey, as RGB
        dict(values=[0, 9, 1, 9], shape=(HEIGHT, WIDTH, 2)),  # with alpha
    ],
    ids=str,
)
def test_masks_that_are_copied(tmp_path, how):
    data = masks(tmp_path / 'data', **how)
    copies = data.settings['train']['data_prefix']['seg_map_path']
    copy = Image.open(copies + data.annotations['train'].split()[0] + '.png')
    assert (copy.mode, np.unique(copy).tolist()) == ('L', [0, 1])
    assert f'label images are copied to {tmp_path}/mine_labels: one number a pixel' in data.notes


@pytest.mark.parametrize(
    'name, said',
    [('masks/0_b.png', r'two label images of each image, \*_b.png and \*_c.png'), ('images/0.png', 'one name')],
)
def test_label_images_of_which_there_are_two(tmp_path, name, said):
    for path in ('images/0.jpg', 'masks/0_c.png', name):
        picture(tmp_path / path, np.resize(np.array([0, 1], np.uint8), (HEIGHT, WIDTH)))
    with pytest.raises(RunError, match=said):
        label_images.read_masks(tmp_path, None, tmp_path / 'none')


def sorted_images(root, *counts):
    for name, count in counts:
        for i in range(count):
            picture(root / name / f'{i} x.jpg')
    return root


def test_folders_of_one_level_are_divided_class_by_class(tmp_path):
    data = folders.read_classes(sorted_images(tmp_path, ('train', 8), ('bus', 4), ('one', 1)))  # a class of locomotives
    assert data.classes == ['bus', 'one', 'train']
    assert {split: len(paths) for split, paths in data.images.items()} == dict(train=10, val=3)
    assert sorted(line.rsplit(' ', 1)[1] for line in data.annotations['val'].splitlines()) == ['0', '2', '2']
    assert 'no image of one in val: not measured' in data.notes


def test_splits_below_classes(tmp_path):
    counts = [('a/train', 3), ('a/val', 1), ('b/train', 3), ('b/val', 1)]
    data = folders.read_classes(sorted_images(tmp_path, *counts))
    assert data.classes == ['a', 'b'] and [len(data.images[split]) for split in ('train', 'val')] == [6, 2]


def test_labels_of_val_follow_train(tmp_path):
    data = folders.read_classes(sorted_images(tmp_path, ('train/a', 2), ('train/b', 2), ('val/b', 2)))
    assert data.annotations['val'] == 'val/b/0 x.jpg 1\nval/b/1 x.jpg 1\n'


@pytest.mark.parametrize(
    'counts, said',
    [
        ([('train/a', 2), ('train/b', 2), ('val/c', 2)], "val has images of 'c', and train has none"),
        ([('a', 4)], '1 class'),
        ([], '2 are the least'),
        ([(f'{name}/{side}', 2) for name in ('bus', 'train') for side in ('a', 'b')], 'train and bus both hold'),
    ],
)
def test_folders_that_are_refused(tmp_path, counts, said):
    with pytest.raises(RunError, match=said):
        folders.read_classes(sorted_images(tmp_path, *counts))


@pytest.mark.parametrize(
    'pixels, channels, expected',
    [
        (np.zeros((8, 9), np.uint8), None, 3),
        (np.zeros((8, 9), np.uint8), 1, 1),
        (np.full((8, 9, 4), 255, np.uint8), None, 3),  # nothing is transparent
        (np.full((8, 9, 4), 255, np.uint8), 4, 4),
        (np.zeros((8, 9, 4), np.uint8), None, 4),
        (np.zeros((8, 9, 4), np.uint8), 3, 3),
        (np.full((8, 9), 4000, np.uint16), None, 1),
    ],
)
def test_channels(tmp_path, pixels, channels, expected):
    form = finding.image_format([picture(tmp_path / 'a.png', pixels)], channels)
    is_plain = expected == 3
    assert (form.channels, form.width, form.height, form.mean is None) == (expected, 9, 8, is_plain)
    assert is_plain or form.mean == [pixels.max()] * expected
    assert any('grey images are read as three' in note for note in form.notes) == (is_plain and pixels.ndim == 2)


def test_images_whose_values_are_no_numbers(tmp_path):
    with pytest.raises(RunError, match='have values that are NaN or infinite'):
        finding.image_format([picture(tmp_path / 'a.tif', np.full((8, 9), np.nan, np.float32))])


def test_a_fourth_channel_that_is_full_in_some_images(tmp_path):
    paths = [picture(tmp_path / f'{value}.png', np.full((8, 9, 4), value, np.uint8)) for value in (255, 55)]
    form = finding.image_format(paths)
    assert (form.channels, form.mean) == (4, [155] * 4)


def test_images_of_several_forms(tmp_path):
    shapes = dict(a=((8, 8), np.uint16), b=((8, 8, 3), np.uint8))
    paths = [picture(tmp_path / f'{name}.png', np.zeros(*shape)) for name, shape in shapes.items()]
    with pytest.raises(RunError, match='several forms'):
        finding.image_format(paths)
    with pytest.raises(RunError, match='c.png'):
        finding.image_format([text(tmp_path / 'c.png', 'no image')])


@pytest.mark.parametrize('other', ['__MACOSX', 'results/plots'])
def test_folders_beside_train(tmp_path, other):
    data = folders.read_classes(sorted_images(tmp_path, ('train/cat', 3), ('train/dog', 3), (other, 3)))
    assert data.classes == ['cat', 'dog'] and sum(map(len, data.images.values())) == 6
    assert any('beside train: left out' in note for note in data.notes) is (other != '__MACOSX')


def test_masks_packed_on_a_mac(tmp_path):
    for name in ('images/._0.jpg', 'masks/._0.png'):
        text(tmp_path / 'data/__MACOSX/data' / name, 'no image')
    data = masks(tmp_path / 'data', [0, 1, 2], ['sky', 'road', 'car'])
    assert sum(map(len, data.images.values())) == 4
    assert 'label 0 is sky, 1 is road, 2 is car' in data.notes


def test_folders_of_masks_with_capitals(tmp_path):
    masks(tmp_path, [0, 1])
    for kind in ('images', 'masks'):
        (tmp_path / kind).rename(tmp_path / kind.capitalize())
    data = label_images.read_masks(tmp_path, None, tmp_path / 'copies')
    assert data.settings['train']['data_prefix']['seg_map_path'] == 'Masks/'
