# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Files of each layout: read by hand, by upstream's data sets and by COCO's own evaluation."""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image
from test_polygons import rasterise

from mmlinattn.datasets import (
    ADE20K_NAMES,
    ADE_CLASSES,
    COCO_CLASSES,
    IMAGENET_CLASSES,
    DatasetSpec,
    draw_scene,
    layouts,
    write_dataset,
)
from mmlinattn.datasets.writer import GENERATOR_VERSION

# Of DatasetSpec(format, 4, 2, seed=11, size=(128, 96), size_jitter=0.3), in generator version 6: width, height, mean of
# red, green and blue, standard deviation, mean step from pixel to pixel; training images, then those for validation.
SIZES = [(113, 92), (113, 77), (97, 94), (102, 89), (97, 90), (119, 77)]
PICTURES = dict(
    coco=[
        (168.6, 105.7, 108.8, 42.6, 3.74),
        (85.5, 53.6, 116.2, 48.9, 7.73),
        (63.6, 142.5, 110.4, 34.2, 3.17),
        (23.1, 169.8, 225.0, 85.4, 3.88),
        (200.2, 210.7, 230.5, 33.3, 8.45),
        (68.8, 106.3, 34.7, 39.1, 7.83),
    ],
    ade=[
        (90.0, 125.9, 170.0, 42.9, 4.05),
        (153.2, 178.2, 121.7, 42.0, 7.14),
        (108.4, 179.1, 126.6, 44.1, 4.78),
        (220.9, 189.9, 143.3, 32.4, 3.93),
        (150.0, 169.3, 229.7, 40.7, 8.8),
        (136.4, 112.7, 126.1, 21.7, 6.48),
    ],
    imagenet=[
        (94.9, 138.2, 102.2, 43.1, 2.28),
        (202.1, 179.9, 123.7, 39.1, 5.56),
        (158.3, 161.1, 103.7, 36.2, 5.37),
        (204.5, 174.6, 117.8, 62.5, 9.47),
        (162.1, 143.4, 108.2, 61.5, 6.77),
        (112.0, 150.8, 102.2, 41.4, 8.27),
    ],
)
# image, category, box, area
INSTANCES = [
    (1, 3, 19, 38, 30, 22, 380),
    (1, 4, 79, 0, 28, 23, 297),
    (1, 6, 24, 25, 20, 19, 240),
    (1, 3, 70, 25, 18, 15, 143),
    (1, 3, 71, 78, 12, 11, 79),
    (2, 3, 5, 2, 16, 14, 120),
    (2, 6, 0, 28, 24, 28, 449),
    (2, 5, 58, 2, 35, 29, 542),
    (2, 1, 45, 53, 25, 24, 491),
    (2, 5, 58, 24, 25, 23, 301),
    (3, 5, 60, 78, 17, 16, 151),
    (3, 2, 37, 58, 13, 13, 152),
]


@pytest.mark.parametrize('form', PICTURES)
def test_the_same_arguments_give_the_same_pictures_until_the_version_is_raised(tmp_path, form):
    """A data set that was written is kept as long as its note says the same: whoever changes what is drawn has to
    raise ``GENERATOR_VERSION``, and the numbers here with it."""
    write_dataset(tmp_path, DatasetSpec(form, 4, 2, seed=11, size=(128, 96), size_jitter=0.3))
    assert GENERATOR_VERSION == 6
    images = [cv2.imread(str(path)) for path in sorted(tmp_path.rglob('*.[jJ][pP]*'))]
    images = [image[..., ::-1].astype(float) for image in images]
    assert [image.shape[1::-1] for image in images] == SIZES
    found = [(*im.mean((0, 1)), im.std(), np.abs(np.diff(im, axis=1)).mean()) for im in images]
    np.testing.assert_allclose(found, PICTURES[form], atol=0.4)  # decoders of JPEG differ
    if form == 'coco':
        content = json.loads((tmp_path / 'annotations' / 'instances_train2017.json').read_text())
        found = [(a['image_id'], a['category_id'], *a['bbox'], a['area']) for a in content['annotations']]
        assert found == INSTANCES
        assert content['info'] == dict(description='Synthetic shapes, mmlinattn', version='1.0', year=2017)
        assert content['licenses'] == [dict(id=1, name='Apache-2.0', url='')]
        assert {image['license'] for image in content['images']} == {1}
        assert {each['supercategory'] for each in content['categories']} == {'shape'}
    if form == 'ade':
        labels = [cv2.imread(str(path), -1) for path in sorted(tmp_path.rglob('*.png'))]
        seen = [np.bincount(each.ravel(), minlength=11).nonzero()[0].tolist() for each in labels]
        assert seen == [[0, 3, 8], [2, 5, 7, 8], [2, 10], [1], [0, 3, 8], [0, 4, 6, 9]]
        # stuff are the backgrounds; names as ADE20K's, then ours
        info = (tmp_path / 'objectInfo150.txt').read_text().splitlines()
        assert info[1].split('\t')[2:] == ['1', '0', '1', 'wall, gradient']
        assert info[8].split('\t')[2:] == ['2', '1', '0', 'bed, star']
        trained = np.concatenate([each.ravel() for each in labels[:4]])  # of images of several sizes
        shares = [np.mean(trained == value) for value in range(1, 11)]
        assert [float(line.split('\t')[1]) for line in info[1:]] == pytest.approx(shares, abs=6e-5)


@pytest.fixture(scope='module')
def coco_root(tmp_path_factory):
    root = tmp_path_factory.mktemp('coco')
    write_dataset(root, DatasetSpec('coco', num_train=60, num_val=24, seed=3))
    return root


def annotations(root, split='train'):
    return json.loads((root / 'annotations' / f'instances_{split}2017.json').read_text())


# ------------------------------------------------------------------------------------------ COCO


def test_coco_layout(coco_root):
    assert {path.name for path in coco_root.iterdir() if path.name[0] != '.'} == {
        'train2017',
        'val2017',
        'annotations',
    }
    for split, count in (('train', 60), ('val', 24)):
        content = annotations(coco_root, split)
        names = [f'{i:012d}.jpg' for i in range(1, count + 1)]
        assert [image['file_name'] for image in content['images']] == names
        assert sorted(path.name for path in (coco_root / f'{split}2017').iterdir()) == names
        assert [image['id'] for image in content['images']] == list(range(1, count + 1))
        assert [entry['name'] for entry in content['categories']] == list(COCO_CLASSES)
        assert [entry['id'] for entry in content['categories']] == list(range(1, 7))
        ids = [entry['id'] for entry in content['annotations']]
        assert ids == list(range(1, len(ids) + 1))
        assert {entry['category_id'] for entry in content['annotations']} == set(range(1, 7))


def test_coco_annotations_are_exact(coco_root):
    content = annotations(coco_root)
    taken = {i['id']: np.zeros((i['height'], i['width']), bool) for i in content['images']}
    for entry in content['annotations']:
        others = taken[entry['image_id']]
        mask = rasterise(entry['segmentation'], others.shape)
        assert not (mask & others).any()  # visible regions do not overlap
        others |= mask
        ys, xs = np.nonzero(mask)
        x, y, width, height = entry['bbox']
        assert (x, y, x + width - 1, y + height - 1) == (xs.min(), ys.min(), xs.max(), ys.max())
        assert entry['area'] == len(xs)
        assert entry['iscrowd'] == 0
    image = cv2.imread(str(coco_root / 'train2017' / '000000000001.jpg'))
    assert image.shape == (160, 160, 3)


def test_mmdet_reads_it(coco_root):
    datasets = pytest.importorskip('mmdet.datasets')
    kwargs = dict(
        data_root=str(coco_root),
        ann_file='annotations/instances_train2017.json',
        data_prefix=dict(img='train2017/'),
        metainfo=dict(classes=COCO_CLASSES),
        pipeline=[
            dict(type='mmdet.LoadImageFromFile'),
            dict(type='mmdet.LoadAnnotations', with_bbox=True, with_mask=True),
        ],
    )
    assert len(datasets.CocoDataset(test_mode=True, **kwargs)) == 60
    train = datasets.CocoDataset(filter_cfg=dict(filter_empty_gt=True, min_size=32), **kwargs)
    assert len(train) == 57
    content = annotations(coco_root)
    for item in (train[i] for i in range(5)):
        expected = [e for e in content['annotations'] if e['image_id'] == item['img_id']]
        assert item['gt_bboxes_labels'].tolist() == [e['category_id'] - 1 for e in expected]
        assert item['gt_masks'].masks.sum(axis=(1, 2)).tolist() == [e['area'] for e in expected]


def test_perfect_predictions_score_one(coco_root):
    """The annotations fed back as detections reach AP 1 in COCO's own evaluation."""
    coco_api = pytest.importorskip('pycocotools.coco')
    from pycocotools.cocoeval import COCOeval

    truth = coco_api.COCO(str(coco_root / 'annotations' / 'instances_val2017.json'))
    detections = [
        dict(
            image_id=entry['image_id'],
            category_id=entry['category_id'],
            bbox=entry['bbox'],
            segmentation=truth.annToRLE(entry),
            score=1.0,
        )
        for entry in truth.loadAnns(truth.getAnnIds())
    ]
    for kind in ('bbox', 'segm'):
        evaluation = COCOeval(truth, truth.loadRes(detections), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        assert evaluation.stats[0] == pytest.approx(1.0)


# ----------------------------------------------------------------------------------------- ADE20K


@pytest.fixture(scope='module')
def ade_root(tmp_path_factory):
    root = tmp_path_factory.mktemp('ade')
    write_dataset(root, DatasetSpec('ade', num_train=40, num_val=8, seed=1))
    return root


def test_ade_layout(ade_root):
    seen = set()
    for split, folder, count in (('train', 'training', 40), ('val', 'validation', 8)):
        names = [f'ADE_{split}_{i:08d}' for i in range(1, count + 1)]
        for kind, suffix in (('images', '.jpg'), ('annotations', '.png')):
            found = sorted(path.name for path in (ade_root / kind / folder).iterdir())
            assert found == [name + suffix for name in names]
        for name in names:
            path = ade_root / 'annotations' / folder / f'{name}.png'
            labels = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
            assert labels.dtype == np.uint8 and labels.shape == (160, 160)
            seen |= set(np.unique(labels).tolist())
    assert seen == set(range(len(ADE_CLASSES) + 1))  # the unlabelled 0 as well
    info = (ade_root / 'objectInfo150.txt').read_text().splitlines()
    assert info[0].split('\t') == ['Idx', 'Ratio', 'Train', 'Val', 'Stuff', 'Name']
    assert [line.split('\t')[0] for line in info[1:]] == [str(i) for i in range(1, 11)]
    maps = {
        part: [cv2.imread(str(path), cv2.IMREAD_UNCHANGED) for path in (ade_root / 'annotations' / part).iterdir()]
        for part in ('training', 'validation')
    }
    for value, line in enumerate(info[1:], 1):  # of the pixels in training; images of both parts
        _, ratio, *pictures, _, _ = line.split('\t')
        assert float(ratio) == pytest.approx(np.mean([labels == value for labels in maps['training']]), abs=6e-5)
        assert pictures == [str(sum((labels == value).any() for labels in part)) for part in maps.values()]
    assert len((ade_root / 'sceneCategories.txt').read_text().splitlines()) == 48


def test_ade_labels_follow_the_picture(ade_root):
    """Moving the labels by a few pixels makes them explain the colours worse."""

    def unexplained(picture, labels):
        regions = [picture[labels == label] for label in np.unique(labels)]
        return sum(((region - region.mean(axis=0)) ** 2).sum() for region in regions)

    better = []
    for path in sorted((ade_root / 'annotations' / 'training').iterdir()):
        labels = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
        picture = cv2.imread(str(ade_root / 'images' / 'training' / f'{path.stem}.jpg')) / 255.0
        if len(np.unique(labels)) > 1:
            here = unexplained(picture, labels)
            for shift in ((2, 0), (-2, 0), (0, 2), (0, -2)):
                better.append(here < unexplained(picture, np.roll(labels, shift, axis=(0, 1))))
    assert len(better) > 120 and np.mean(better) > 0.9


def test_ade_empty_picture_is_all_background(ade_root):
    path = ade_root / 'annotations' / 'training' / 'ADE_train_00000004.png'
    labels = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
    name, scene = (ade_root / 'sceneCategories.txt').read_text().splitlines()[3].split()
    assert name == path.stem
    assert np.unique(labels).tolist() == [ADE_CLASSES.index(scene) + 1]


@pytest.mark.parametrize(
    'kind, classes',
    [
        ('ADE20KDataset', None),
        ('ADE20KDataset', ADE20K_NAMES),
        ('BaseSegDataset', ADE_CLASSES),
    ],
)
def test_mmseg_reads_it(ade_root, kind, classes):
    datasets = pytest.importorskip('mmseg.datasets')
    dataset = getattr(datasets, kind)(
        data_root=str(ade_root),
        data_prefix=dict(img_path='images/training', seg_map_path='annotations/training'),
        reduce_zero_label=True,
        metainfo=dict(classes=classes) if classes else None,
        pipeline=[
            dict(type='mmseg.LoadImageFromFile'),
            dict(type='mmseg.LoadAnnotations', reduce_zero_label=True),
        ],
    )
    assert len(dataset) == 40
    assert classes is None or dataset.metainfo['classes'] == classes
    seen = set()
    for item in dataset:
        path = ade_root / 'annotations' / 'training' / (Path(item['img_path']).stem + '.png')
        labels = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
        assert (item['gt_seg_map'] == np.where(labels == 0, 255, labels - 1.0)).all()
        seen |= set(np.unique(item['gt_seg_map']).tolist())
    assert seen == {*range(len(ADE_CLASSES)), 255}


def test_ade20k_names_are_those_of_mmseg():
    datasets = pytest.importorskip('mmseg.datasets')
    assert datasets.ADE20KDataset.METAINFO['classes'][: len(ADE_CLASSES)] == ADE20K_NAMES


# --------------------------------------------------------------------------------------- ImageNet


@pytest.fixture(scope='module')
def imagenet_root(tmp_path_factory):
    root = tmp_path_factory.mktemp('imagenet')
    write_dataset(root, DatasetSpec('imagenet', num_train=24, num_val=12, seed=1))
    return root


def test_imagenet_layout(imagenet_root):
    for split, count in (('train', 24), ('val', 12)):
        lines = (imagenet_root / 'meta' / f'{split}.txt').read_text().splitlines()
        paths, labels = zip(*(line.split() for line in lines))
        found = (imagenet_root / split).glob('n????????/*.JPEG')
        assert {str(path.relative_to(imagenet_root / split)) for path in found} == set(paths)
        assert np.bincount(np.array(labels, int)).tolist() == [count // 12] * 12
        folders = sorted({path.split('/')[0] for path in paths})
        assert [folders.index(path.split('/')[0]) for path in paths] == list(map(int, labels))
        name = dict(train='n90000000/n90000000_1.JPEG', val='n90000000/ILSVRC2012_val_00000001.JPEG')[split]
        assert paths[0] == name
    names = (imagenet_root / 'LOC_synset_mapping.txt').read_text().splitlines()
    assert [line.split(' ', 1)[1] for line in names] == list(IMAGENET_CLASSES)


@pytest.mark.parametrize('classes, with_lists', [(None, True), (IMAGENET_CLASSES, True), (IMAGENET_CLASSES, False)])
def test_mmpretrain_reads_it(imagenet_root, tmp_path, classes, with_lists):
    datasets = pytest.importorskip('mmpretrain.datasets')
    root = imagenet_root
    if not with_lists:  # labels from the order of the folders
        root = tmp_path
        (root / 'val').symlink_to(imagenet_root / 'val')
    dataset = datasets.ImageNet(
        data_root=str(root),
        split='val',
        metainfo=dict(classes=classes) if classes else None,
        pipeline=[dict(type='mmpretrain.LoadImageFromFile')],
    )
    listed = dict(line.split() for line in (imagenet_root / 'meta' / 'val.txt').open())
    assert len(dataset) == len(listed) == 12
    for item in dataset:
        name = '/'.join(Path(item['img_path']).parts[-2:])
        assert item['gt_label'] == int(listed[name])
        assert item['img'].shape == (160, 160, 3)


def test_imagenet_class_is_what_is_drawn(tmp_path, monkeypatch):
    drawn = []

    def spy(rng, size, *, kinds, fills, **kwargs):
        drawn.append(f'{fills[0]} {kinds[0]}')
        scene = draw_scene(rng, size, kinds=kinds, fills=fills, **kwargs)
        assert scene.labels.tolist() == [0]
        assert scene.masks.mean() > 0.04
        return scene

    monkeypatch.setattr(layouts, 'draw_scene', spy)
    write_dataset(tmp_path, DatasetSpec('imagenet', 60, 1))
    lines = (tmp_path / 'meta' / 'train.txt').read_text().splitlines()
    assert [IMAGENET_CLASSES[int(line.split()[1])] for line in lines] == drawn[:60]


def test_colours_are_not_swapped(tmp_path):
    red = np.full((16, 16, 3), (255, 0, 0), np.uint8)
    layouts.save_image(tmp_path / 'red.jpg', red)
    assert np.abs(np.asarray(Image.open(tmp_path / 'red.jpg')).astype(int) - red).max() < 10
