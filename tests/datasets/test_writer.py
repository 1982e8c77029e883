# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import errno
import hashlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from mmlinattn.datasets import (
    ADE20K_NAMES,
    ADE_CLASSES,
    COCO_CLASSES,
    IMAGENET_CLASSES,
    DatasetSpec,
    draw_scene,
    imagenet,
    write_dataset,
)
from mmlinattn.datasets.pictures import save_jpeg
from mmlinattn.datasets.polygons import mask_to_box, mask_to_polygons
from mmlinattn.datasets.shapes import MIN_VISIBLE
from mmlinattn.datasets.staging import COMMITTING, LOCK, NOTE, STAGING

TOOL = Path(__file__).parents[2] / 'tools' / 'make_shapes_dataset.py'


def run_tool(*args):
    return runpy.run_path(str(TOOL))['main']([str(arg) for arg in args])


def digest(folder):
    """Content of every file, by path."""
    files = sorted(path for path in Path(folder).rglob('*') if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha1(path.read_bytes()).hexdigest() for path in files}


def rasterise(polygons, shape):
    mask_utils = pytest.importorskip('pycocotools.mask')
    return mask_utils.decode(mask_utils.merge(mask_utils.frPyObjects(polygons, *shape))) > 0


@pytest.fixture(scope='module')
def coco_root(tmp_path_factory):
    root = tmp_path_factory.mktemp('coco')
    write_dataset(root, DatasetSpec('coco', num_train=60, num_val=24, seed=3))
    return root


def annotations(root, split='train'):
    return json.loads((root / 'annotations' / f'instances_{split}2017.json').read_text())


# ---------------------------------------------------------------------------------------- scenes


def test_masks_are_the_visible_pixels():
    """Two scenes from the same randomness, the second without its last shape, differ just there."""
    compared = 0
    for seed in range(40):
        more = draw_scene(np.random.default_rng(seed), (120, 90), num_shapes=4)
        less = draw_scene(np.random.default_rng(seed), (120, 90), num_shapes=3)
        assert more.image.shape == (90, 120, 3) and more.masks.shape[1:] == (90, 120)
        assert (more.masks.sum(axis=0) <= 1).all()
        if len(more.labels) != 4:
            continue
        top = more.masks[3]
        assert (more.masks[:3] == less.masks & ~top).all()
        compared += (less.masks & top).any()
    assert compared >= 5  # occlusions did occur


def test_mostly_hidden_shapes_are_not_drawn():
    """Shapes of one form and size: no visible area falls far below the largest one."""
    for seed in range(30):
        scene = draw_scene(
            np.random.default_rng(seed),
            (160, 160),
            num_shapes=6,
            kinds=['disc'],
            diameters=(0.4, 0.4),
        )
        areas = scene.masks.sum(axis=(1, 2))
        smallest_disc = np.pi * 32**2 * np.exp(-0.12)
        assert (areas >= 0.98 * MIN_VISIBLE * smallest_disc).all()


def told_apart(colours):
    """Share of colours, ``(kinds, N, 3)``, that are nearest to the mean of their own kind."""
    distances = np.linalg.norm(colours[:, :, None] - colours.mean(axis=1), axis=-1)
    return np.mean(distances.argmin(axis=-1) == np.arange(len(colours))[:, None])


@pytest.mark.parametrize(
    'kwargs, name',
    [
        (dict(size=(63, 160)), 'size'),
        (dict(size=(160, 9000)), 'size'),
        (dict(num_shapes=-1), 'num_shapes'),
        (dict(kinds=['disk']), 'kinds'),
        (dict(kinds=[]), 'kinds'),
        (dict(fills=['dotted']), 'fills'),
        (dict(backgrounds=['sky']), 'backgrounds'),
        (dict(backgrounds=()), 'backgrounds'),
        (dict(tinted=-0.1), 'tinted'),
        (dict(max_turn=4), 'max_turn'),
        (dict(band_strength=1.5), 'band_strength'),
        (dict(diameters=(0.5, 0.2)), 'diameters'),
        (dict(min_visible=0), 'min_visible'),
    ],
)
def test_draw_scene_names_the_bad_argument(kwargs, name):
    with pytest.raises(ValueError, match=f'^{name} must be'):
        draw_scene(np.random.default_rng(0), **{'size': (160, 160), **kwargs})


# -------------------------------------------------------------------------------------- polygons


def test_polygons_rasterise_to_exactly_the_mask():
    rng = np.random.default_rng(0)
    ring = cv2.circle(np.zeros((40, 50), np.uint8), (25, 20), 15, 1, 4)
    nested = cv2.circle(ring.copy(), (25, 20), 6, 1, 2)  # a hole with an island with a hole
    masks = [ring, nested, np.ones((4, 5)), np.eye(6), 1 - np.eye(6)]
    masks += [rng.random((17, 23)) < density for density in np.linspace(0.05, 0.95, 60)]
    for mask in masks:
        polygons = mask_to_polygons(mask)
        assert all(len(polygon) >= 8 for polygon in polygons)
        assert (rasterise(polygons, mask.shape) == (np.asarray(mask) > 0)).all()
    assert mask_to_polygons(np.zeros((5, 5))) == []
    # what touches at a corner only stays apart
    assert [len(polygon) for polygon in mask_to_polygons(np.eye(6))] == [8] * 6


def test_polygon_of_a_rectangle_has_four_corners():
    mask = np.zeros((10, 12), bool)
    mask[2:7, 3:11] = True
    (polygon,) = mask_to_polygons(mask)
    corners = {tuple(corner) for corner in np.reshape(polygon, (-1, 2)).tolist()}
    assert len(polygon) == 8 and corners == {(3, 2), (11, 2), (11, 7), (3, 7)}
    assert mask_to_box(mask) == [3, 2, 8, 5]


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

    monkeypatch.setattr(imagenet, 'draw_scene', spy)
    write_dataset(tmp_path, DatasetSpec('imagenet', 60, 1))
    lines = (tmp_path / 'meta' / 'train.txt').read_text().splitlines()
    assert [IMAGENET_CLASSES[int(line.split()[1])] for line in lines] == drawn[:60]


def test_colours_are_not_swapped(tmp_path):
    red = np.full((16, 16, 3), (255, 0, 0), np.uint8)
    save_jpeg(tmp_path / 'red.jpg', red)
    assert np.abs(np.asarray(Image.open(tmp_path / 'red.jpg')).astype(int) - red).max() < 10


# ---------------------------------------------------------------------- determinism and the writer


def test_deterministic_by_seed(tmp_path, coco_root):
    write_dataset(tmp_path / 'same', DatasetSpec('coco', 60, 24, seed=3))
    assert digest(tmp_path / 'same') == digest(coco_root)
    write_dataset(tmp_path / 'other', DatasetSpec('coco', 60, 24, seed=4))
    same, other = digest(coco_root), digest(tmp_path / 'other')
    pictures = [name for name in same if name.endswith('.jpg')]
    assert all(same[name] != other[name] for name in pictures)
    assert len({same[name] for name in pictures}) == len(pictures)  # train and val differ too


def test_pictures_do_not_depend_on_their_number(tmp_path, coco_root):
    write_dataset(tmp_path, DatasetSpec('coco', 5, 3, seed=3))
    fewer, more = digest(tmp_path), digest(coco_root)
    pictures = [name for name in fewer if name.endswith('.jpg')]
    assert len(pictures) == 8 and all(fewer[name] == more[name] for name in pictures)


@pytest.mark.slow
def test_workers_do_not_change_the_result(tmp_path, coco_root):
    write_dataset(tmp_path, DatasetSpec('coco', 60, 24, seed=3), workers=2)
    assert digest(tmp_path) == digest(coco_root)


def test_size_and_jitter(tmp_path):
    write_dataset(tmp_path, DatasetSpec('coco', 12, 1, size=(200, 100), size_jitter=0.3))
    images = annotations(tmp_path)['images']
    sizes = {(image['width'], image['height']) for image in images}
    assert len(sizes) > 6
    assert all(140 <= width <= 200 and 70 <= height <= 100 for width, height in sizes)
    assert len({round(width / height, 1) for width, height in sizes}) > 3  # each side by a fraction of its own
    for image in images:
        picture = cv2.imread(str(tmp_path / 'train2017' / image['file_name']))
        assert picture.shape == (image['height'], image['width'], 3)


def test_same_settings_are_kept_others_replaced(tmp_path):
    spec = DatasetSpec('coco', 3, 2)
    assert write_dataset(tmp_path, spec) is True
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob('*')}
    assert write_dataset(tmp_path, spec) is False
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob('*')}
    first = digest(tmp_path)
    (tmp_path / 'val2017' / '000000000002.jpg').unlink()
    assert write_dataset(tmp_path, spec) is True  # it was no longer whole
    assert digest(tmp_path) == first
    (tmp_path / 'my_notes.txt').write_text('keep')
    assert write_dataset(tmp_path, DatasetSpec('ade', 3, 2)) is True
    assert not (tmp_path / 'train2017').exists() and (tmp_path / 'images').exists()
    assert (tmp_path / 'my_notes.txt').read_text() == 'keep'


@pytest.mark.parametrize('content', ['train2017/mine.jpg', 'somebody.txt'])
def test_foreign_content_is_not_overwritten(tmp_path, content, capsys):
    out = tmp_path / 'out'
    (out / content).parent.mkdir(parents=True)
    (out / content).write_text('precious')
    args = [out, '--format', 'coco', '--num-train', 3, '--num-val', 2]
    with pytest.raises(SystemExit) as stopped:
        run_tool(*args)
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert message.count('\n') == 1 and 'argument OUT' in message and '--overwrite' in message
    assert list(digest(out)) == [content]
    assert run_tool(*args, '--overwrite') == 0
    assert len(annotations(out)['images']) == 3
    assert (out / content).exists() == (content == 'somebody.txt')


def test_files_added_to_our_data_set_are_not_lost(tmp_path):
    write_dataset(tmp_path, DatasetSpec('coco', 3, 2))
    (tmp_path / 'train2017' / 'mine.jpg').write_text('precious')
    with pytest.raises(FileExistsError, match='added'):
        write_dataset(tmp_path, DatasetSpec('coco', 4, 2))
    assert (tmp_path / 'train2017' / 'mine.jpg').read_text() == 'precious'


def test_failure_leaves_nothing_behind(tmp_path):
    class Failure(Exception):
        pass

    def fail():
        raise Failure

    with pytest.raises(Failure):
        write_dataset(tmp_path / 'new', DatasetSpec('ade', 3, 2), on_picture=fail)
    assert not (tmp_path / 'new').exists()
    spec = DatasetSpec('coco', 3, 2)
    write_dataset(tmp_path / 'old', spec)
    before = digest(tmp_path / 'old')
    with pytest.raises(Failure):
        write_dataset(tmp_path / 'old', DatasetSpec('coco', 4, 2), on_picture=fail)
    assert digest(tmp_path / 'old') == before
    assert write_dataset(tmp_path / 'old', spec) is False


def test_killed_run_is_not_mistaken_for_a_data_set(tmp_path):
    out = tmp_path / 'out'
    command = [sys.executable, TOOL, out, '--format', 'imagenet']
    environment = {**os.environ, 'PYTHONPATH': str(TOOL.parents[2])}
    process = subprocess.Popen([*map(str, command), '--num-train', '100000', '--num-val', '2'], env=environment)
    deadline = time.time() + 120
    while not any(out.glob('.partial/train/*/*.JPEG')):
        assert process.poll() is None and time.time() < deadline
        time.sleep(0.05)
    with pytest.raises(BlockingIOError, match='another process'):
        write_dataset(out, DatasetSpec('imagenet', 12, 12))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert {path.name for path in out.iterdir()} == {'.partial', LOCK}  # nothing that a loader finds
    assert write_dataset(out, DatasetSpec('imagenet', 12, 12)) is True
    assert not (out / '.partial').exists()
    assert len(list((out / 'train').rglob('*.JPEG'))) == 12


def write_killed_before(name, folder, spec, monkeypatch):
    """``write_dataset`` that ends where this file or folder would be put into place."""
    rename = Path.rename

    def stop_at(path, target):
        if path.name == name:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, 'rename', stop_at)
        with pytest.raises(KeyboardInterrupt):
            write_dataset(folder, spec)


@pytest.mark.parametrize('moved', ['train2017', 'val2017', 'annotations'])
def test_run_killed_while_moving_is_redone(tmp_path, monkeypatch, moved):
    """Stopped dead at each step of putting the content in place, over an older data set."""
    spec = DatasetSpec('coco', 3, 2)
    write_dataset(tmp_path, DatasetSpec('coco', 5, 2))
    write_killed_before(moved, tmp_path, spec, monkeypatch)
    assert not (tmp_path / 'annotations' / 'instances_train2017.json').exists()
    assert write_dataset(tmp_path, spec) is True
    write_dataset(tmp_path / 'fresh', spec)
    fresh = digest(tmp_path / 'fresh')
    assert {name: value for name, value in digest(tmp_path).items() if 'fresh' not in name} == fresh


def test_a_note_is_gone_before_what_it_describes_is(tmp_path, monkeypatch):
    """Stopped dead before the last step: the images are those of another seed, as many as there were."""
    old, new = (DatasetSpec('coco', 1, 1, seed=seed, size=(64, 64)) for seed in (0, 1))
    write_dataset(tmp_path, old)
    before = digest(tmp_path)
    write_killed_before(NOTE, tmp_path, new, monkeypatch)
    assert not (tmp_path / NOTE).exists() and digest(tmp_path)['train2017/000000000001.jpg']
    assert write_dataset(tmp_path, old) is True and digest(tmp_path) == before


def test_files_that_were_added_after_a_run_was_killed_at_its_very_end_stay(tmp_path):
    """When all was in place, and only its hidden folder not yet cleared away."""
    spec = DatasetSpec('coco', 1, 1, size=(64, 64))
    write_dataset(tmp_path, spec)
    (tmp_path / STAGING).mkdir()
    (tmp_path / STAGING / COMMITTING).touch()
    assert write_dataset(tmp_path, spec) is False
    (tmp_path / 'train2017' / 'mine.jpg').write_text('precious')
    with pytest.raises(FileExistsError, match='^files were added to the data set in it$'):
        write_dataset(tmp_path, DatasetSpec('coco', 2, 1, size=(64, 64)))
    assert (tmp_path / 'train2017' / 'mine.jpg').read_text() == 'precious' and not (tmp_path / STAGING).exists()


# ------------------------------------------------------------------------------------ command line


def test_full_disk(tmp_path, capsys, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, 'write_bytes', full)
    with pytest.raises(SystemExit) as stopped:
        run_tool(tmp_path / 'out', '--format', 'ade', '--num-train', 3, '--num-val', 2)
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert message.count('\n') == 1 and 'No space left on device' in message
    assert not (tmp_path / 'out').exists()


def test_tool_says_what_it_did(tmp_path, capsys):
    args = [tmp_path / 'out', '--format', 'coco', '--num-train', 3, '--num-val', 2]
    assert run_tool(*args) == 0
    said = capsys.readouterr()
    assert said.out.startswith('wrote') and str(COCO_CLASSES) in said.out and not said.err
    assert run_tool(*args) == 0
    assert capsys.readouterr().out.startswith('already there')
