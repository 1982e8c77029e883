# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Scenes, their polygons, and the files of each layout."""

import json

import cv2
import numpy as np
import pytest

from mmlinattn.tooling.datasets import (
    ADE_CLASSES,
    COCO_CLASSES,
    IMAGENET_CLASSES,
    DatasetSpec,
    draw_scene,
    layouts,
    write_dataset,
)
from mmlinattn.tooling.datasets.layouts import mask_to_polygons


def test_masks_are_the_visible_pixels():
    """Compare two scenes of one seed; without the last shape, only its pixels differ."""
    compared = 0
    for seed in range(40):
        more, less = (draw_scene(np.random.default_rng(seed), (120, 90), num_shapes=number) for number in (4, 3))
        assert more.image.shape == (90, 120, 3) and more.masks.shape[1:] == (90, 120)
        assert (more.masks.sum(axis=0) <= 1).all()
        if len(more.labels) != 4:
            continue
        top = more.masks[3]
        assert (more.masks[:3] == less.masks & ~top).all()
        compared += (less.masks & top).any()
    assert compared >= 5  # occlusions did occur


def rasterise(polygons, shape):
    mask_utils = pytest.importorskip('pycocotools.mask')
    return mask_utils.decode(mask_utils.merge(mask_utils.frPyObjects(polygons, *shape))) > 0


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


def listed(folder):
    return sorted(path.name for path in folder.iterdir() if path.name[0] != '.')


def test_coco_layout(tmp_path):
    """Rasterise polygons by pycocotools; box and area equal the annotated ones."""
    write_dataset(tmp_path, DatasetSpec('coco', 60, 24, 3))
    assert listed(tmp_path) == ['annotations', 'train2017', 'val2017']
    for split, count in (('train', 60), ('val', 24)):
        content = json.loads((tmp_path / 'annotations' / f'instances_{split}2017.json').read_text())
        names = [f'{i:012d}.jpg' for i in range(1, count + 1)]
        assert [image['file_name'] for image in content['images']] == listed(tmp_path / f'{split}2017') == names
        assert [image['id'] for image in content['images']] == list(range(1, count + 1))
        assert [(entry['id'], entry['name']) for entry in content['categories']] == [*enumerate(COCO_CLASSES, start=1)]
        assert [entry['id'] for entry in content['annotations']] == list(range(1, len(content['annotations']) + 1))
        assert {entry['category_id'] for entry in content['annotations']} == set(range(1, 7))
        taken = {i['id']: np.zeros((i['height'], i['width']), bool) for i in content['images']}
        for entry in content['annotations']:
            others = taken[entry['image_id']]
            mask = rasterise(entry['segmentation'], others.shape)
            assert not (mask & others).any()  # visible regions do not overlap
            others |= mask
            ys, xs = np.nonzero(mask)
            x, y, width, height = entry['bbox']
            assert (x, y, x + width - 1, y + height - 1) == (xs.min(), ys.min(), xs.max(), ys.max())
            assert (entry['area'], entry['iscrowd']) == (len(xs), 0)


def segmentation_masks(root, folder):
    """Return the segmentation masks of a split by image name."""
    paths = sorted((root / 'annotations' / folder).iterdir())
    return {path.stem: cv2.imread(str(path), cv2.IMREAD_UNCHANGED) for path in paths}


def test_ade_layout(tmp_path):
    write_dataset(tmp_path, DatasetSpec('ade', 40, 8, 1, (160, 160), 0.3))
    masks = {part: segmentation_masks(tmp_path, part) for part in ('training', 'validation')}
    for (part, found), split, count in zip(masks.items(), ('train', 'val'), (40, 8)):
        assert list(found) == [f'ADE_{split}_{i:08d}' for i in range(1, count + 1)]
        assert listed(tmp_path / 'images' / part) == [f'{name}.jpg' for name in found]
        assert all(labels.dtype == np.uint8 and labels.ndim == 2 for labels in found.values())
    title, *info = (line.split('\t') for line in (tmp_path / 'objectInfo150.txt').read_text().splitlines())
    assert title == ['Idx', 'Ratio', 'Train', 'Val', 'Stuff', 'Name']
    assert info[0][4:] == ['1', 'wall, gradient'] and info[7][4:] == ['0', 'bed, star']
    _check_object_info(info, masks)
    scenes = [line.split() for line in (tmp_path / 'sceneCategories.txt').read_text().splitlines()]
    assert [name for name, _ in scenes] == [name for part in masks.values() for name in part]
    name, scene = scenes[3]  # an image of a background alone
    assert np.unique(masks['training'][name]).tolist() == [ADE_CLASSES.index(scene) + 1]


def _check_object_info(info, masks):
    """Check the pixel fractions of the training split, and the image counts of both splits."""
    trained = np.concatenate([labels.ravel() for labels in masks['training'].values()])
    for value, (number, ratio, *pictures, _, _) in enumerate(info, 1):
        assert number == str(value) and float(ratio) == pytest.approx(np.mean(trained == value), abs=6e-5)
        assert pictures == [str(sum((labels == value).any() for labels in part.values())) for part in masks.values()]


@pytest.mark.parametrize('kind', layouts.LAYOUTS)
def test_pictures_have_the_colours_of_their_scenes(tmp_path, monkeypatch, kind):
    scenes, draw = [], layouts.draw_scene
    monkeypatch.setattr(layouts, 'draw_scene', lambda *args, **how: scenes.append(draw(*args, **how)) or scenes[-1])
    layouts.LAYOUTS[kind].write_image(tmp_path, 'train', 1, np.random.default_rng(3), (64, 48))
    (path,) = (path for path in tmp_path.rglob('*') if path.suffix in ('.jpg', '.JPEG'))
    assert np.abs(cv2.imread(str(path))[..., ::-1] - scenes[0].image.astype(float)).mean() < 10


def test_imagenet_layout(tmp_path):
    write_dataset(tmp_path, DatasetSpec('imagenet', 24, 12, 1))
    for split, count, first in (('train', 24, 'n90000000_1.JPEG'), ('val', 12, 'ILSVRC2012_val_00000001.JPEG')):
        lines = (tmp_path / 'meta' / f'{split}.txt').read_text().splitlines()
        paths, labels = zip(*(line.split() for line in lines))
        assert {f'{path.parent.name}/{path.name}' for path in (tmp_path / split).glob('n????????/*.JPEG')} == set(paths)
        assert np.bincount(np.array(labels, int)).tolist() == [count // 12] * 12
        folders = sorted({path.split('/')[0] for path in paths})
        assert [folders.index(path.split('/')[0]) for path in paths] == list(map(int, labels))
        assert paths[0] == f'n90000000/{first}'
    names = (tmp_path / 'LOC_synset_mapping.txt').read_text().splitlines()
    assert [line.split(' ', 1)[1] for line in names] == list(IMAGENET_CLASSES)
