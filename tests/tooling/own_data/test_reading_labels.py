# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Label images, folders of images, and the form of images, as people have them."""

import cv2
import numpy as np
import pytest
from helpers.own_files import HEIGHT, WIDTH, assert_refused, counts, picture, read, text
from PIL import Image, TiffImagePlugin

from mmlinattn.tooling.own_data import images, mask_values


def masks(root, values, names=None, suffix='.png', dtype=np.uint8, shape=(HEIGHT, WIDTH)):
    for i in range(4):
        picture(root / 'images' / f'{i}.jpg')
        picture(root / 'masks' / f'{i}{suffix}', np.resize(np.array(values, dtype), shape))
    return read(root, 'segmentation', classes=names)


@pytest.mark.parametrize(
    'values, names, classes, table',
    [
        ([0, 1], None, ['class_0', 'class_1'], {0: 0, 1: 1}),
        ([0, 1, 2, 255], ['a', 'b', 'c'], ['a', 'b', 'c'], {0: 0, 1: 1, 2: 2, 255: 255}),
        ([0, 255], None, ['background', 'foreground'], {0: 0, 255: 1}),
        ([0, 128], ['road', 'rest'], ['road', 'rest'], {0: 0, 128: 1}),
        ([0, 128, 255], ['a', 'b', 'c'], ['a', 'b', 'c'], {0: 0, 128: 1, 255: 2}),
        ([0, 38, 75, 255], ['a', 'b', 'c'], ['a', 'b', 'c'], {0: 0, 38: 1, 75: 2}),
        ([7], None, 'the value 7 alone', None),
        ([0, 1, 2, 3], ['a', 'b', 'c'], 'name every value in their order, the background too', None),
        ([0, 255], ['road'], 'the background too', None),
        ([0, 128, 255], None, 'give --classes', None),
    ],
)
def test_values_of_label_images(values, names, classes, table):
    if table:
        assert mask_values.read_indices(values, names)[:2] == (classes, table)
    else:
        assert_refused(classes, mask_values.read_indices, values, names)


def test_masks_divided_by_the_lists_of_voc(tmp_path):
    """Read ``ImageSets/Segmentation``, not the lists of boxes beside it."""
    root = tmp_path / 'data'
    for name, listed in (('Segmentation/train', '0\n2\n'), ('Segmentation/val', '3'), ('Main/train', '1\n3\n0')):
        text(root / 'ImageSets' / f'{name}.txt', listed)
    data = masks(root, [0, 1, 2])
    assert data.annotations == dict(train='0\n2\n', val='3\n')
    assert '1 images outside of train and val are left out: images/ (1)' in data.notes


def test_masks_as_mmsegmentation_reads_them_stay(tmp_path):
    for split, count in (('train', 3), ('val', 1)):
        for i in range(count):
            picture(tmp_path / split / 'images' / f'{i}.png')
            picture(tmp_path / split / 'masks' / f'{i}.png', np.full((HEIGHT, WIDTH), i, np.uint8))
    picture(tmp_path / 'val' / 'images' / '9.png')
    data = read(tmp_path, 'segmentation', classes=['a', 'b', 'c'])
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
    assert_refused(said, masks, tmp_path / 'data', **how)


@pytest.mark.parametrize(
    'how, classes, said',
    [
        (dict(values=[0, 255, 255], suffix='_mask.png'), ['background', 'foreground'], '255 -> 1'),
        (dict(values=[0, 1], dtype=np.float32, suffix='.tif'), ['class_0', 'class_1'], 'one number per pixel'),
        (dict(values=[0, 1], dtype=np.uint16), ['class_0', 'class_1'], 'one number per pixel'),
        (dict(values=[0, 0, 0, 1, 1, 1], shape=(HEIGHT, WIDTH, 3)), ['class_0', 'class_1'], 'one number per pixel'),
        (dict(values=[0, 9, 1, 9], shape=(HEIGHT, WIDTH, 2)), ['class_0', 'class_1'], 'one number per pixel'),  # alpha
    ],
    ids=str,
)
def test_masks_that_are_copied(tmp_path, how, classes, said):
    data = masks(tmp_path / 'data', **how)
    train = data.settings['train']
    assert (train['img_suffix'], train['seg_map_suffix']) == ('.jpg', '.png')
    copy = Image.open(train['data_prefix']['seg_map_path'] + data.annotations['train'].split()[0] + '.png')
    assert (copy.mode, np.unique(copy).tolist(), data.classes) == ('L', [0, 1], classes)
    assert f'masks are copied to {tmp_path}/mine_labels: {said}' in data.notes
    assert sum(counts(data)) == 4


LAYOUTS = {  # image and label image, without the name
    'images and masks': ('images/{n}.jpg', 'masks/{n}.png'),
    'CamVid of SegNet': ('{split}/{n}.png', '{split}annot/{n}.png'),
    'CamVid of Kaggle': ('{split}/{n}.png', '{split}_labels/{n}_L.png'),
    'CamVid of fastai': ('images/{n}.png', 'labels/{n}_P.png'),
    'Cityscapes': ('leftImg8bit/{split}/a/{n}_leftImg8bit.png', 'gtFine/{split}/a/{n}_gtFine_labelIds.png'),
    'KITTI': ('training/image_2/{n}.png', 'training/semantic/{n}.png'),
    'Roboflow': ('{split}/{n}.jpg', '{split}/{n}_mask.png'),
    'DeepGlobe': ('{split}/{n}_sat.jpg', '{split}/{n}_mask.png'),
    'jpg and png': ('{split}/{n}.jpg', '{split}/{n}.png'),
}


def layout(root, name, value, splits=('train', 'train', 'train', 'val', 'val'), **options):
    """Label images of ``value(number)`` in one of the layouts."""
    for number, split in enumerate(splits):
        image, mask = (path.format(split=split, n=number) for path in LAYOUTS[name])
        picture(root / image)
        picture(root / mask, value(number))
    return read(root, 'segmentation', **options)


def pairs(root, value, count=4, **options):
    return layout(root, 'images and masks', value, range(count), **options)


def halves(*values, dtype=np.uint8):
    """Return a label image with the values in turn as columns."""
    return np.resize(np.array(values, dtype), (HEIGHT, WIDTH, *np.shape(values)[1:]))


@pytest.mark.parametrize('name', LAYOUTS)
def test_layouts_of_label_images(tmp_path, name):
    values = (7, 11, 0) if name in ('Cityscapes', 'KITTI') else (0, 1, 2)
    if 'fastai' in name:
        text(tmp_path / 'data/codes.txt', 'sky\nroad\ncar')
        text(tmp_path / 'data/valid.txt', '3.png\n4.png')
    if name == 'Cityscapes':  # beside other files of each image
        for number in range(5):
            split = 'train' if number < 3 else 'val'
            for kind in ('color', 'instanceIds'):
                picture(tmp_path / f'data/gtFine/{split}/a/{number}_gtFine_{kind}.png')
    data = layout(tmp_path / 'data', name, lambda number: halves(*values))
    assert counts(data, 'train', 'val') == ([4, 1] if name in ('KITTI', 'images and masks') else [3, 2])
    assert (tmp_path / 'data' / data.settings['train']['data_prefix']['img_path']).is_dir()
    if name in ('Cityscapes', 'KITTI'):
        assert len(data.classes) == 19 and data.classes[:3] == ['road', 'sidewalk', 'building']
        assert np.unique(Image.open(next((tmp_path / 'mine_labels/train').rglob('*.png')))).tolist() == [0, 2, 255]
        assert 'pixels of value 0 are ignored' in data.notes
    if 'fastai' in name:
        assert data.classes == ['sky', 'road', 'car']


SKY, ROAD, VOID = (128, 128, 128), (128, 64, 128), (0, 0, 0)
COLOUR_FILES = {
    'label_colors.txt': '128 128 128\tSky\n128 64 128\t\tRoad\n0 0 0\tVoid',
    'class_dict.csv': 'name,r,g,b\nSky,128,128,128\nRoad,128,64,128\nVoid,0,0,0',
    'labelmap.txt': '# label:color_rgb:parts:actions\nSky:128,128,128::\nRoad:128,64,128::\nVoid:0,0,0::',
    'class_dict_seg.csv': 'name, r, g, b\nSky, 128, 128, 128\nRoad, 128, 64, 128\nVoid, 0, 0, 0',
}


@pytest.mark.parametrize('file', COLOUR_FILES)
def test_colours_of_a_list(tmp_path, file):
    text(tmp_path / 'data' / file, COLOUR_FILES[file])
    data = layout(tmp_path / 'data', 'CamVid of Kaggle', lambda number: halves(ROAD, SKY, VOID, ROAD))
    assert data.classes == ['Sky', 'Road'] and 'pixels of Void are ignored' in data.notes
    copy = np.asarray(Image.open(tmp_path / 'mine_labels/train/0.png'))
    assert copy[0, :4].tolist() == [1, 0, 255, 1]
    assert 'colour (128, 128, 128) is Sky, (128, 64, 128) is Road' in ' '.join(data.notes)


@pytest.mark.parametrize(
    'listed, values, classes, said',
    [
        ('0 0 0 ground\n255 255 255 roof', (0, 255), ['ground', 'roof'], ''),
        ('0 0 0 ground\n64 0 128 car\n0 128 192 bus', (0, 1, 2), ['ground', 'car', 'bus'], 'in the order of the list'),
        ('0 0 0 ground\n64 0 128 car\n64 0 128 bus', (VOID, (64, 0, 128)), None, "(64, 0, 128) is 'car' and 'bus'"),
        (COLOUR_FILES['label_colors.txt'], (ROAD, SKY, (1, 2, 3)), None, 'the colour (1, 2, 3), which the list of'),
        ('', (ROAD, (0, 0, 142), VOID), ['road', 'sidewalk', 'building'], 'those of cityscapes'),
        ('', (VOID, (128, 0, 0), (0, 128, 0)), None, 'or give --classes'),  # the first colours of VOC, of any class
        ('', (VOID, (128, 0, 0), (224, 224, 192)), ['background', 'aeroplane', 'bicycle'], 'those of voc'),
        ('', (VOID, (9, 8, 7), (200, 3, 4)), None, '(0, 0, 0), (9, 8, 7), (200, 3, 4): write label_colors.txt'),
        ('', (VOID, (200, 3, 4)), ['background', 'foreground'], ''),
        # not CamVid's, by their number
        ('', range(12), ['class_0', 'class_1', 'class_2'], 'the classes have no names'),
    ],
)
def test_values_by_a_list_of_colours_or_without(tmp_path, listed, values, classes, said):
    text(tmp_path / 'data/label_colors.txt', listed)
    if classes:
        data = layout(tmp_path / 'data', 'CamVid of Kaggle', lambda number: halves(*values))
        assert data.classes[:3] == classes and said in ' '.join(data.notes)
    else:
        assert_refused(said, layout, tmp_path / 'data', 'CamVid of Kaggle', lambda number: halves(*values))


@pytest.mark.parametrize('second', [(128, 0, 0), (0, 0, 142)])  # of VOC's palette and of Cityscapes'
def test_given_names_are_those_of_the_colours(tmp_path, second):
    images = {i: halves(VOID, second, (128, 64, 128) if second[2] else (0, 128, 0)) for i in range(4)}
    for i, pixels in images.items():
        picture(tmp_path / f'images/{i}.jpg', pixels)
        picture(tmp_path / f'masks/{i}.png', pixels)
    assert read(tmp_path, 'segmentation', classes=['a', 'b', 'c']).classes == ['a', 'b', 'c']
    text(tmp_path / 'label_colors.txt', f'0 0 0 void\n{second[0]} 0 {second[2]} car\n128 64 128 road\n0 128 0 bus')
    for classes, of_second in ((['bus', 'road', 'car'], 2), (['x', 'y', 'z'], 0), (['void', 'road', 'car', 'bus'], 1)):
        data = read(tmp_path, 'segmentation', classes=classes)
        assert data.classes == [name for name in classes if name != 'void']
        assert data.labels_of(tmp_path / 'masks/0.png')[0, 1] == of_second
    assert_refused('--classes has 2 names', read, tmp_path, 'segmentation', classes=['car', 'road'])


def test_palettes_that_differ_are_colours(tmp_path):
    """Editors sort the palette of each file again: the number 1 is another class in each."""
    root = tmp_path / 'data'
    text(root / 'label_colors.txt', COLOUR_FILES['label_colors.txt'])
    for number in range(4):
        picture(root / f'images/{number}.png')
        colours = [SKY, ROAD] if number % 2 else [ROAD, SKY]
        image = Image.fromarray(halves(0, 1)).convert('P')
        image.putpalette(np.ravel(colours).tolist())
        (root / 'masks').mkdir(exist_ok=True)
        image.save(root / f'masks/{number}.png')
    data = read(root, 'segmentation')
    firsts = {path.stem: np.asarray(Image.open(path))[0, 0] for path in (tmp_path / 'mine_labels').rglob('*.png')}
    assert firsts == {'0': 1, '1': 0, '2': 1, '3': 0} and data.classes == ['Sky', 'Road']


def test_values_and_classes_of_a_table(tmp_path):
    for split in ('train', 'val'):
        text(tmp_path / f'data/{split}/_classes.csv', 'Pixel Value, Class\n0, background\n1, leaf\n2, root')
    data = layout(tmp_path / 'data', 'Roboflow', lambda number: halves(0, 1, 2))
    assert data.classes == ['background', 'leaf', 'root']
    assert layout(tmp_path / 'data', 'Roboflow', lambda number: halves(0, 1, 255)).classes == data.classes
    assert read(tmp_path / 'data', 'segmentation', classes=['x', 'y', 'z']).classes == ['x', 'y', 'z']
    unknown = 'the value 7, which the list of values does not name'
    assert_refused(unknown, layout, tmp_path / 'data', 'Roboflow', lambda number: halves(0, 1, 7))
    for split in ('train', 'val'):
        text(tmp_path / f'data/{split}/_classes.csv', 'Pixel Value, Class\n0, background\n90, leaf\n170, root')
    layout(tmp_path / 'data', 'Roboflow', lambda number: halves(0, 170))
    assert np.unique(Image.open(tmp_path / 'mine_labels/train/0.png')).tolist() == [0, 2]  # by its value, not its index


LINEAR, CUBIC = cv2.INTER_LINEAR, cv2.INTER_CUBIC


@pytest.mark.parametrize(
    'factor, how, dark',
    [(2, LINEAR, 0), (2, LINEAR, 128), (8, LINEAR, 0), (2, CUBIC, 0), (8, CUBIC, 0), (1, 'jpeg', 0)],
)
def test_masks_enlarged_with_interpolation_have_two_classes(tmp_path, factor, how, dark):
    small = np.full((HEIGHT // factor, WIDTH // factor), dark, np.uint8)
    cv2.circle(small, (WIDTH // factor // 2, HEIGHT // factor // 2), 16 // factor, 255, -1)
    scaled = cv2.resize(small, (WIDTH, HEIGHT), interpolation=cv2.INTER_NEAREST if how == 'jpeg' else how)
    if how == 'jpeg':
        scaled = cv2.imdecode(cv2.imencode('.jpg', scaled)[1], cv2.IMREAD_GRAYSCALE)
    data = pairs(tmp_path / 'data', lambda number: scaled)
    assert data.classes == ['background', 'foreground'] and 'enlarged with interpolation' in ' '.join(data.notes)
    copy = np.asarray(Image.open(next((tmp_path / 'mine_labels').rglob('*.png'))))
    assert np.unique(copy).tolist() == [0, 1] and 0.1 < copy.mean() < 0.4


def test_label_images_of_more_classes_enlarged_with_interpolation(tmp_path):
    def enlarged(number):
        small = np.random.default_rng(number).integers(0, 4, (6, 8), np.uint8) * 60
        return cv2.resize(small, (WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC)

    assert_refused('most of them in single pixels between others', pairs, tmp_path, enlarged)


def test_masks_of_two_codings(tmp_path):
    said = '2 masks have the values 0 and 1, 2 the values 0 and 255: two codings'
    assert_refused(said, pairs, tmp_path, lambda number: halves(0, 255 if number % 2 else 1))


@pytest.mark.parametrize('content', [b'no image', None])
def test_broken_masks_are_named(tmp_path, content):
    pairs(tmp_path, lambda number: halves(0, 1))
    mask = tmp_path / 'masks/3.png'
    mask.write_bytes(content or mask.read_bytes()[:-40])
    assert_refused('masks/3.png', read, tmp_path, 'segmentation')


def test_cityscapes_as_it_is_unpacked(tmp_path):
    for number in range(4):
        picture(tmp_path / f'leftImg8bit_trainvaltest/leftImg8bit/train/a/{number}_leftImg8bit.png')
        mask = tmp_path / f'gtFine_trainvaltest/gtFine/train/a/{number}_gtFine_labelTrainIds.png'
        picture(mask, halves(0, 1, 255))
    data = read(tmp_path, 'segmentation')
    assert data.classes[:2] == ['road', 'sidewalk'] and len(data.images['train']) == 3
    picture(mask, halves(0, 19))  # of a class of the user
    assert_refused('the values 0, 1, 19, 255: give --classes', read, tmp_path, 'segmentation')


def test_classes_of_label_images_stay_in_train(tmp_path):
    extra = {3: 2, 11: 2, 7: 3}
    data = pairs(tmp_path / 'data', lambda i: halves(0, 1, extra.get(i, 0)), 20, classes=['a', 'b', 'c', 'd'])
    train = {int(stem) for stem in data.annotations['train'].split()}
    assert len(train & {3, 11}) == 1 and 7 in train and 'no image of d in val: not measured' in data.notes


def test_masks_and_images_by_other_capitals_and_without_the_other(tmp_path):
    picture(tmp_path / 'images/A.jpg')
    picture(tmp_path / 'masks/a.png', halves(0, 1))
    assert_refused('A.jpg differ by capital letters in their names: rename one', read, tmp_path, 'segmentation')
    notes = pairs(tmp_path, lambda number: halves(0, 1)).notes
    assert {'1 masks are not used: masks/ (1)', '1 images without labels are left out: images/ (1)'} <= {*notes}


def test_test_images_without_labels_of_a_class(tmp_path):
    """Cityscapes keeps back the labels of its test images."""
    splits = ('train', 'train', 'val', 'test')
    data = layout(tmp_path / 'data', 'Cityscapes', lambda number: halves(*((7, 11) if number < 3 else (0, 3))), splits)
    assert list(data.images) == ['train', 'val'] and 'the 1 images of test have no labels' in ' '.join(data.notes)


def test_pages_and_values_that_mean_no_data_are_named(tmp_path):
    first, second = (Image.fromarray(np.full((8, 9, 3), value, np.uint8)) for value in (1, 2))
    first.save(tmp_path / 'pages.tif', save_all=True, append_images=[second])
    overview = TiffImagePlugin.ImageFileDirectory_v2()
    overview[42113] = '-9999'
    first.save(tmp_path / 'plain.tif', tiffinfo=overview)
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(tmp_path / 'turned.jpg', exif=exif)
    assert images.file_notes(sorted(tmp_path.iterdir()), are_drawn_on=True) == [
        '1 files have several pages, as pages.tif: the first is read',
        '1 files say that -9999 means no data, as plain.tif: it is read as a value',
        '1 images are turned by EXIF, as turned.jpg: labels are taken as drawn on the turned image, as loaders turn it',
    ]


@pytest.mark.parametrize(
    'name, said', [('masks/0_b.png', '0_c.png is a second mask of 0.jpg'), ('images/0.png', 'one name')]
)
def test_two_label_images_of_an_image(tmp_path, name, said):
    for path in ('images/0.jpg', 'masks/0_c.png', name):
        picture(tmp_path / path, np.resize(np.array([0, 1], np.uint8), (HEIGHT, WIDTH)))
    assert_refused(said, read, tmp_path, 'segmentation')


def read_classes(root):
    return read(root, 'classification')


def sorted_images(root, *counts):
    for name, count in counts:
        for i in range(count):
            picture(root / name / f'{i} x.jpg')
    return root


def test_folders_of_one_level_are_divided_class_by_class(tmp_path):
    data = read_classes(sorted_images(tmp_path, ('train', 8), ('bus', 4), ('one', 1)))  # a class of locomotives
    assert data.classes == ['bus', 'one', 'train']
    assert counts(data) == [10, 3]
    assert sorted(line.rsplit(' ', 1)[1] for line in data.annotations['val'].splitlines()) == ['0', '2', '2']
    assert 'no image of one in val: not measured' in data.notes


def test_splits_below_classes(tmp_path):
    data = read_classes(sorted_images(tmp_path, ('a/train', 3), ('a/val', 1), ('b/train', 3), ('b/val', 1)))
    assert data.classes == ['a', 'b'] and counts(data, 'train', 'val') == [6, 2]


def test_labels_of_val_follow_train(tmp_path):
    data = read_classes(sorted_images(tmp_path, ('train/a', 2), ('train/b', 2), ('val/b', 2)))
    assert data.annotations['val'] == 'val/b/0 x.jpg 1\nval/b/1 x.jpg 1\n'


@pytest.mark.parametrize(
    'folders, said',
    [
        ([('train/a', 2), ('train/b', 2), ('val/c', 2)], "val has images of 'c', and train has none"),
        ([('a', 4)], '1 class'),
        ([], 'no image in it'),
        ([(f'{name}/{side}', 2) for name in ('bus', 'train') for side in ('a', 'b')], 'train and bus both hold'),
    ],
)
def test_folders_that_are_refused(tmp_path, folders, said):
    assert_refused(said, read_classes, sorted_images(tmp_path, *folders))


@pytest.mark.parametrize(
    'pixels, channels, expected',
    [
        (np.zeros((8, 9), np.uint8), None, 3),
        (np.zeros((8, 9), np.uint8), 1, 1),
        (np.zeros((8, 9), np.uint8), 3, 3),
        (np.full((8, 9, 4), 255, np.uint8), None, 3),  # nothing is transparent
        (np.full((8, 9, 4), 255, np.uint8), 4, 4),
        (np.zeros((8, 9, 4), np.uint8), None, 4),
        (np.zeros((8, 9, 4), np.uint8), 3, 3),
        (np.full((8, 9), 4000, np.uint16), None, 1),
    ],
)
def test_channels(tmp_path, pixels, channels, expected):
    form = images.image_format([picture(tmp_path / 'a.png', pixels)], channels)
    is_plain = expected == 3
    assert (form.channels, form.width, form.height, form.mean is None) == (expected, 9, 8, is_plain)
    assert is_plain or form.mean == [pixels.max()] * expected
    assert any('grey images are read as three' in note for note in form.notes) == (is_plain and pixels.ndim == 2)


def test_a_fourth_channel_that_is_full_in_some_images(tmp_path):
    paths = [picture(tmp_path / f'{value}.png', np.full((8, 9, 4), value, np.uint8)) for value in (255, 55)]
    form = images.image_format(paths)
    assert (form.channels, form.mean) == (4, [155] * 4)


def test_images_of_several_forms(tmp_path):
    shapes = {'a.png': ((8, 8), np.uint16), 'b.png': ((8, 8, 3), np.uint8)}
    paths = [picture(tmp_path / name, np.zeros(*shape)) for name, shape in shapes.items()]
    assert_refused('several forms', images.image_format, paths)
    assert_refused('c.png', images.image_format, [text(tmp_path / 'c.png', 'no image')])
    nan = picture(tmp_path / 'a.tif', np.full((8, 9), np.nan, np.float32))
    assert_refused('have values that are NaN or infinite', images.image_format, [nan])


@pytest.mark.parametrize('other', ['__MACOSX', 'results/plots'])
def test_folders_beside_train(tmp_path, other):
    data = read_classes(sorted_images(tmp_path, ('train/cat', 3), ('train/dog', 3), (other, 3)))
    assert data.classes == ['cat', 'dog'] and sum(counts(data)) == 6
    assert any('beside train: left out' in note for note in data.notes) is (other != '__MACOSX')
