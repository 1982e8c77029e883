# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The synthetic pictures part by part, and what the tool hands on."""

import json
import runpy
import signal
from pathlib import Path

import cv2
import numpy as np
import pytest

import mmlinattn.datasets as datasets
from mmlinattn.datasets import (
    ADE_CLASSES,
    COCO_CLASSES,
    DatasetSpec,
    ade,
    coco,
    draw_scene,
    imagenet,
    write_dataset,
    writer,
)
from mmlinattn.datasets import shapes as shapes_module
from mmlinattn.datasets.pictures import is_empty, save_jpeg, save_png
from mmlinattn.datasets.shapes import UNLABELLED_SHAPE, _coverage, _place
from mmlinattn.datasets.staging import NOTE, StagedFolder
from mmlinattn.datasets.textures import (
    _MIXES,
    BACKGROUNDS,
    FILLS,
    _of_hue,
    _pale,
    _ramp,
    _soft_square_wave,
    contrasting_colour,
    draw_background,
    draw_fill,
)
from mmlinattn.datasets.writer import GENERATOR_VERSION

TOOL = Path(__file__).parents[2] / 'tools' / 'make_shapes_dataset.py'

# Of DatasetSpec(format, 4, 2, seed=11, size=(128, 96), size_jitter=0.3), in generator version 5: width, height, mean of
# red, green and blue, standard deviation, mean step from pixel to pixel; training pictures, then those for validation.
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
# picture, category, box, area
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
    assert json.loads((tmp_path / NOTE).read_text())['content'] == dict(
        made_by='mmlinattn',
        generator=GENERATOR_VERSION,
        format=form,
        num_train=4,
        num_val=2,
        seed=11,
        size=[128, 96],
        size_jitter=0.3,
    )
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
        trained = np.concatenate([each.ravel() for each in labels[:4]])  # of pictures of several sizes
        shares = [np.mean(trained == value) for value in range(1, 11)]
        assert [float(line.split('\t')[1]) for line in info[1:]] == pytest.approx(shares, abs=6e-5)


def spied(monkeypatch, layout, tmp_path, **kwargs):
    asked = []

    def spy(rng, size, **options):
        asked.append((size, options))
        return draw_scene(rng, size, **options)

    monkeypatch.setattr(layout, 'draw_scene', spy)
    for name in layout.FOLDERS:
        (tmp_path / name).mkdir(parents=True)
    records = [
        layout.write_picture(tmp_path, 'train', number, np.random.default_rng(number), (96, 64)) for number in (1, 4)
    ]
    assert [size for size, _ in asked] == [(96, 64)] * 2
    return records, [options for _, options in asked]


def test_what_coco_asks_for(monkeypatch, tmp_path):
    (first, empty), (options, of_empty) = spied(monkeypatch, coco, tmp_path)
    assert options == dict(num_shapes=None, fills=('plain', 'plain', 'plain', 'striped'))
    assert of_empty['num_shapes'] == 0 and empty['instances'] == [] and first['instances']
    assert first['image'] == dict(id=1, file_name='000000000001.jpg', width=96, height=64, license=1)


def test_what_ade_asks_for(monkeypatch, tmp_path):
    (first, empty), (options, of_empty) = spied(monkeypatch, ade, tmp_path)
    assert options == dict(num_shapes=None, kinds=(*COCO_CLASSES, UNLABELLED_SHAPE), muted=True)
    assert of_empty['num_shapes'] == 0 and first['name'] == 'ADE_train_00000001'
    assert first['pixels'].sum() == 96 * 64 and len(first['pixels']) == 11
    assert empty['pixels'][ADE_CLASSES.index(empty['scene']) + 1] == 96 * 64


def test_what_imagenet_asks_for(monkeypatch, tmp_path):
    """One large shape of the class, hardly hidden, before a background without bands of its own."""
    (first, fourth), (options, of_fourth) = spied(monkeypatch, imagenet, tmp_path)
    assert options == dict(
        num_shapes=1,
        kinds=('disc',),
        fills=('plain',),
        diameters=(0.45, 0.9),
        min_visible=0.9,
        backgrounds=('gradient', 'clouds'),
        muted=True,
        band_strength=0.9,
    )
    assert (of_fourth['kinds'], of_fourth['fills']) == (('square',), ('striped',))
    assert first == 'n90000000/n90000000_1.JPEG 0' and fourth == 'n90000003/n90000003_4.JPEG 3'
    rng = np.random.default_rng(0)
    assert imagenet.write_picture(tmp_path, 'val', 13, rng, (64, 64)) == 'n90000000/ILSVRC2012_val_00000013.JPEG 0'
    assert imagenet.IMAGENET_CLASSES[:3] == ('plain disc', 'striped disc', 'plain square')


def test_which_pictures_are_empty():
    assert [number for number in range(1, 70) if is_empty(number)] == [4, 24, 44, 64]


def test_files_of_pictures(tmp_path):
    labels = np.arange(12, dtype=np.uint8).reshape(3, 4)
    save_png(tmp_path / 'labels.png', labels)
    assert (cv2.imread(str(tmp_path / 'labels.png'), cv2.IMREAD_UNCHANGED) == labels).all()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    save_jpeg(tmp_path / 'noise.jpg', noise)
    at_95 = cv2.imencode('.jpg', noise[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 95])[1]
    assert (tmp_path / 'noise.jpg').read_bytes() == at_95.tobytes()


# --------------------------------------------------------------------------------------- forms


AREAS = dict(  # of the circle around it, by geometry
    disc=1.0,
    square=2 / np.pi,
    triangle=3 * np.sqrt(3) / 4 / np.pi,
    star=5 * 0.42 * np.sin(np.pi / 5) / np.pi,
    cross=(8 * 0.3 * np.sqrt(1 - 0.3**2) - 4 * 0.3**2) / np.pi,
    ring=1 - 0.6**2,
)


@pytest.mark.parametrize('kind', AREAS)
def test_areas_of_forms(kind):
    """Stretched by at most exp(0.12) along an axis."""
    for seed in range(6):
        patch = _coverage(np.random.default_rng(seed), kind, 60.0, max_turn=0.5)
        assert patch.shape == (63, 63) and patch.max() == 255 and patch.min() == 0
        share = patch.sum() / 255 / (np.pi * 30**2) / AREAS[kind]
        assert 0.985 * np.exp(-0.12) < share < 1.015


def test_forms_stand_upright():
    def upright(kind):
        return _coverage(np.random.default_rng(3), kind, 80.0, max_turn=0.0) > 127

    widths = {kind: upright(kind).sum(axis=1) for kind in (*COCO_CLASSES, 'ring')}
    middle = 41
    triangle = widths['triangle'][widths['triangle'] > 0]
    assert triangle[0] < 6 and triangle[-1] == triangle.max()
    assert widths['heart'].argmax() < middle and widths['heart'][widths['heart'] > 0][-1] < 8
    assert widths['star'].argmax() < middle  # two points up beside the one on top
    square = upright('square')
    top, left = (np.flatnonzero(square.any(axis=axis))[0] for axis in (1, 0))
    assert square[top + 1, left + 1]  # its sides are level
    assert not upright('ring')[middle, middle] and upright('disc')[middle, middle]
    for kind in COCO_CLASSES:
        mask = upright(kind)
        assert np.mean(mask != mask[:, ::-1]) < 0.03  # alike on both sides
    turned = _coverage(np.random.default_rng(3), 'triangle', 80.0, max_turn=0.5) > 127
    assert np.mean(turned != turned[:, ::-1]) > 0.03


def test_places_keep_the_centre_in_the_picture():
    rng = np.random.default_rng(0)
    centres = []
    for _ in range(300):
        (rows, columns), (patch_rows, patch_columns) = _place(rng, (100, 50), 21, centred=False)
        assert rows.stop - rows.start == patch_rows.stop - patch_rows.start > 0
        assert columns.stop - columns.start == patch_columns.stop - patch_columns.start > 0
        assert 0 <= rows.start and rows.stop <= 50 and 0 <= columns.start and columns.stop <= 100
        centres.append((columns.start - patch_columns.start + 10, rows.start - patch_rows.start + 10))
    x, y = np.array(centres).T
    assert x.min() >= 0 and x.max() <= 99 and y.min() >= 0 and y.max() <= 49
    assert x.max() > 90 and y.max() > 45 and x.min() < 10 and y.min() < 5
    (rows, columns), (patch_rows, patch_columns) = _place(rng, (100, 50), 21, centred=True)
    assert (rows, columns) == (slice(15, 36), slice(40, 61)) and patch_rows == patch_columns == slice(0, 21)


def test_the_first_shape_always_finds_a_place():
    """It is put in the middle at last, where even one as large as the picture is wholly visible."""
    for seed in range(5):
        scene = draw_scene(
            np.random.default_rng(seed), (64, 64), num_shapes=2, kinds=['square'], diameters=(0.9, 0.9), min_visible=1
        )
        assert len(scene.labels) == 1
        rows, columns = np.nonzero(scene.masks[0])
        assert abs(rows.mean() - 32) < 7 and abs(columns.mean() - 32) < 7


def test_sizes_of_shapes_follow_the_shorter_side():
    for diameters, size, expected in (((0.5, 0.5), (200, 80), 40), ((0.05, 0.05), (200, 80), 12)):
        scene = draw_scene(
            np.random.default_rng(0), size, num_shapes=1, kinds=['disc'], diameters=diameters, min_visible=1, max_turn=0
        )
        rows, columns = np.nonzero(scene.masks[0])
        assert 0.88 * expected - 1 <= max(np.ptp(rows), np.ptp(columns)) + 1 <= expected + 3
    diameters = [
        np.sqrt(
            4 / np.pi * draw_scene(np.random.default_rng(seed), (100, 100), num_shapes=1, kinds=['disc']).masks.sum()
        )
        for seed in range(60)
    ]
    assert 13 < min(diameters) < 26 and 40 < max(diameters) < 50.5  # 0.18 to 0.5 of it


def test_stretched_shapes_are_whole():
    """Stretched to more than its diameter, a shape would be cut at the border of the square it is drawn in."""
    for seed in range(12):
        scene = draw_scene(np.random.default_rng(seed), (256, 256), num_shapes=1, kinds=('disc',), diameters=(0.4, 0.4))
        rows, columns = (np.flatnonzero(scene.masks[0].any(axis)) for axis in (1, 0))
        assert max(np.ptp(rows), np.ptp(columns)) + 1 <= 0.4 * 256 + 1


def test_typical_colours_of_forms():
    """Forms share the circle of hues in their order; ``tinted`` is the share of those that keep to it."""

    def hues(kind, tinted):
        found = []
        for seed in range(14):
            options = dict(num_shapes=1, kinds=[kind], fills=['plain'], tinted=tinted, muted=True)
            scene = draw_scene(np.random.default_rng(seed), (64, 64), **options)
            colour = np.median(scene.image[scene.masks[0]], axis=0).astype(np.uint8)
            found.append(cv2.cvtColor(colour[None, None], cv2.COLOR_RGB2HSV)[0, 0, 0] / 180)
        return np.array(found)

    for place, kind in enumerate((*COCO_CLASSES, UNLABELLED_SHAPE)):
        off = (hues(kind, 1) - place / 7 + 0.5) % 1 - 0.5
        assert np.abs(off).mean() < 0.08 and np.abs(off).max() < 0.25
    assert np.abs((hues('disc', 0) + 0.5) % 1 - 0.5).mean() > 0.12
    assert shapes_module.TINTED == 0.95


def test_a_picture_without_shapes():
    scene = draw_scene(np.random.default_rng(0), (80, 64), num_shapes=0)
    assert scene.masks.shape == (0, 64, 80) and scene.masks.dtype == bool
    assert scene.labels.shape == (0,) and scene.labels.dtype == np.int64 and scene.image.shape == (64, 80, 3)


SCENE = dict(
    size=(64, 8192),
    num_shapes=None,
    kinds=['ring'],
    fills=FILLS,
    backgrounds=BACKGROUNDS,
    diameters=(1, 1),
    min_visible=1,
)


@pytest.mark.parametrize(
    ('change', 'said'),
    [
        ({}, None),
        (dict(size=(8192, 64), num_shapes=0, diameters=(1e-3, 1e-3), min_visible=1e-3), None),
        (dict(num_shapes=255), None),
        (dict(num_shapes=256), 'num_shapes must be from 0 to 255, got 256'),
        (dict(size=(64, 8193)), 'size must be a width and a height from 64 to 8192 pixels, got (64, 8193)'),
        (dict(size=(63, 64)), 'size must be a width and a height from 64 to 8192 pixels, got (63, 64)'),
        (dict(size=(64, 64, 3)), 'size must be a width and a height from 64 to 8192 pixels, got (64, 64, 3)'),
        (dict(fills=['plain', 'dotted']), "fills must be one or more of ('plain', 'striped'), got ['plain', 'dotted']"),
        (dict(fills=()), "fills must be one or more of ('plain', 'striped'), got ()"),
        (
            dict(backgrounds=['sky']),
            "backgrounds must be one or more of ('gradient', 'clouds', 'stripes', 'checker'), got ['sky']",
        ),
        (
            dict(kinds=['disk']),
            "kinds must be one or more of ('disc', 'square', 'triangle', 'star', 'cross', 'heart', 'ring'), "
            "got ['disk']",
        ),
        (dict(diameters=(0, 0.5)), 'diameters must be rising fractions from 0 to 1, got (0, 0.5)'),
        (dict(diameters=(0.5, 1.01)), 'diameters must be rising fractions from 0 to 1, got (0.5, 1.01)'),
        (dict(diameters=(0.5, 0.49)), 'diameters must be rising fractions from 0 to 1, got (0.5, 0.49)'),
        (dict(min_visible=0), 'min_visible must be above 0 and at most 1, got 0'),
        (dict(min_visible=1.01), 'min_visible must be above 0 and at most 1, got 1.01'),
    ],
)
def test_what_a_scene_may_be(change, said):
    if said is None:
        return shapes_module._check(**dict(SCENE, **change))
    with pytest.raises(ValueError) as error:
        draw_scene(np.random.default_rng(0), **dict(SCENE, **change))
    assert str(error.value) == said


def test_shares_and_turns_that_a_scene_may_have():
    rng, most = np.random.default_rng(0), dict(max_turn=np.pi, tinted=1, band_strength=1)
    for options in (most, dict.fromkeys(most, 0)):
        assert draw_scene(rng, (64, 64), num_shapes=1, **options).image.shape == (64, 64, 3)
    for name, said in (('max_turn', '3.14159'), ('tinted', '1'), ('band_strength', '1')):
        for value in (-0.01, most[name] + 0.01):
            with pytest.raises(ValueError) as error:
                draw_scene(rng, (64, 64), **{name: value})
            assert str(error.value) == f'{name} must be from 0 to {said}, got {value}'


# ------------------------------------------------------------------------------------- surfaces


def test_colours_of_backgrounds_lie_close_together():
    seconds = []
    for seed in range(40):
        for kind in BACKGROUNDS:
            picture, (first, second) = draw_background(np.random.default_rng(seed), (64, 72), kind)
            assert picture.shape == (72, 64, 3) and picture.dtype == np.float32
            assert 20 <= first.min() and first.max() <= 235 and 0 <= second.min() and second.max() <= 255
            distance = np.linalg.norm(second - first)
            assert distance <= 65 and (distance >= 25 or second.min() == 0 or second.max() == 255)
            seconds.append(second)
    assert np.min(seconds) == 0 and np.max(seconds) == 255  # the ends of the range are taken


def test_patterns_of_backgrounds():
    """A ramp from end to end; noise of which 2 % are cut off on either side; bands with edges of a pixel, of 5 to 15 %
    of the shorter side, and squares of 10 to 25 %."""
    periods = dict(stripes=[], checker=[])
    for seed in range(40):
        mixes = {kind: _MIXES[kind](np.random.default_rng(seed), 120, 80) for kind in BACKGROUNDS}
        for mix in mixes.values():
            assert mix.shape == (80, 120) and mix.min() == 0 and mix.max() == pytest.approx(1, abs=1e-4)
        ramp = mixes['gradient']
        for axis in (0, 1):
            assert np.abs(np.diff(ramp, 2, axis=axis)).max() < 1e-5
        assert ramp[::79, ::119].min() == 0 and ramp[::79, ::119].max() == ramp.max()  # from corner to corner
        clouds = mixes['clouds']
        assert np.mean(clouds == 0) == pytest.approx(0.02, abs=0.002)
        assert np.mean(clouds > 0.9999) == pytest.approx(0.02, abs=0.002)
        assert np.abs(np.diff(clouds, axis=1)).max() < 0.25
        for kind, edges in (('stripes', 2), ('checker', 4)):  # a period
            assert mixes[kind].mean() == pytest.approx(0.5, abs=0.02)
            periods[kind].append(edges / np.mean((mixes[kind] > 0) & (mixes[kind] < 1)))
    assert 4 <= min(periods['stripes']) < 4.5 and 11.3 < max(periods['stripes']) <= 12.1
    assert 8 <= min(periods['checker']) < 10 and 19.5 < max(periods['checker']) < 21.5  # edges cross


@pytest.mark.parametrize('size', [(120, 80), (60, 90), (50, 50)])
def test_distances_from_a_line_through_the_centre(size):
    """Turned any way; a pixel further across it is one more."""
    width, height = size
    angles = []
    for seed in range(40):
        ramp = _ramp(np.random.default_rng(seed), width, height)
        assert ramp.shape == (height, width) and ramp[height // 2, width // 2] == 0
        right, down = ramp[height // 2, width // 2 + 1], ramp[height // 2 + 1, width // 2]
        assert np.hypot(right, down) == pytest.approx(1)
        rows, columns = np.indices(ramp.shape)
        plane = right * (columns - width / 2) + down * (rows - height / 2)
        np.testing.assert_allclose(ramp, plane, atol=1e-3)
        angles.append(np.arctan2(down, right) % (2 * np.pi))
    assert set((np.array(angles) // (np.pi / 2)).astype(int)) == {0, 1, 2, 3}


def test_pale_colours():
    for place, kind in enumerate(BACKGROUNDS):
        colours = np.array([_pale(np.random.default_rng(seed), kind) for seed in range(60)]) / 255
        value = colours.max(axis=1)
        saturation = 1 - colours.min(axis=1) / value
        assert 0.5 <= value.min() < 0.56 and 0.84 < value.max() <= 0.9
        assert 0.2 <= saturation.min() < 0.25 and 0.4 < saturation.max() <= 0.4501
        hsv = cv2.cvtColor(colours.astype(np.float32)[None], cv2.COLOR_RGB2HSV)[0]
        off = (hsv[:, 0] / 360 - (place + 0.3) / 4 + 0.5) % 1 - 0.5
        assert abs(off.mean()) < 0.015 and 0.02 < off.std() < 0.04


def test_bands_have_half_a_period_and_an_edge_of_a_pixel():
    wave = _soft_square_wave(np.arange(200, dtype=np.float32), 20.0)
    assert wave.mean() == pytest.approx(0.5, abs=0.01) and set(np.unique(wave)) == {0.0, 0.5, 1.0}
    assert np.flatnonzero(wave == 0.5).tolist() == list(range(5, 200, 10))
    assert wave[0] == 1 and wave[10] == 0


def test_shapes_stand_out():
    """110 from both colours behind and 75 from neighbours where a candidate does; else the best there is."""
    rng = np.random.default_rng(0)
    background = np.array([[100.0, 100, 100], [140, 120, 100]])
    neighbours = [np.array([255.0, 0, 0]), np.array([0.0, 0, 255])]
    for hue in (None, 0.33):
        for _ in range(100):
            colour = contrasting_colour(rng, background, neighbours, hue)
            assert 0 <= colour.min() and colour.max() <= 255
            if hue is None:
                assert np.linalg.norm(colour - background, axis=1).min() >= 110
                assert min(np.linalg.norm(colour - other) for other in neighbours) >= 75
    everywhere = np.stack(np.meshgrid(*[[0.0, 85, 170, 255]] * 3), -1).reshape(-1, 3)
    colour = contrasting_colour(rng, everywhere, [])
    assert np.linalg.norm(colour - everywhere, axis=1).min() > 45  # nothing is 110 away; 73 is the most there is
    near = np.linalg.norm(contrasting_colour(rng, background, [], None) - background, axis=1)
    assert near.min() >= 110


def test_saturated_colours():
    colours = _of_hue(np.random.default_rng(0), 0.99, 400) / 255
    value, lowest = colours.max(axis=1), colours.min(axis=1)
    saturation = 1 - lowest / value
    assert 0.35 <= value.min() < 0.37 and 0.98 < value.max() <= 1
    assert 0.599 <= saturation.min() < 0.62 and 0.98 < saturation.max() <= 1
    hues = cv2.cvtColor(colours.astype(np.float32)[None], cv2.COLOR_RGB2HSV)[0, :, 0] / 360
    off = (hues - 0.99 + 0.5) % 1 - 0.5  # around the circle
    assert abs(off.mean()) < 0.01 and 0.04 < off.std() < 0.06


@pytest.mark.parametrize(('colour', 'bands_are_darker'), [((200.0, 180, 60), True), ((40.0, 90, 200), False)])
def test_fills(colour, bands_are_darker):
    """Shaded by up to 12 %; bands of 8 to 12 % of the diameter, towards what is further of black and white."""
    colour = np.array(colour)
    for seed in range(20):
        plain = draw_fill(np.random.default_rng(seed), 50, colour, 'plain', 50.0)
        assert plain.shape == (50, 50, 3) and plain.dtype == np.float32
        shade = plain / colour
        assert 0.83 < shade.min() <= 1 <= shade.max() < 1.18
        striped = draw_fill(np.random.default_rng(seed), 50, colour, 'striped', 50.0, 0.5)
        share = (striped - plain) / ((0 if bands_are_darker else 255) - plain)
        assert share.min() == 0 and share.max() == pytest.approx(0.5) and 0.2 < share.mean() < 0.3
        usual = draw_fill(np.random.default_rng(seed), 50, colour, 'striped', 50.0)
        np.testing.assert_allclose(usual - plain, (striped - plain) * 0.9, atol=1e-3)
    assert np.ptp([draw_fill(np.random.default_rng(s), 9, colour, 'plain', 9.0).std() for s in range(9)]) > 1
    assert FILLS == ('plain', 'striped')


# ------------------------------------------------------------------------------------ the folder


def test_a_data_set_that_lost_a_file_at_the_top_is_written_again(tmp_path):
    spec = DatasetSpec('ade', 1, 1, size=(64, 64))
    write_dataset(tmp_path, spec)
    (tmp_path / 'objectInfo150.txt').unlink()
    assert write_dataset(tmp_path, spec) is True and (tmp_path / 'objectInfo150.txt').is_file()
    (tmp_path / NOTE).write_text('[]')  # no note of ours
    with pytest.raises(FileExistsError, match=f'^it has content of unknown origin: {NOTE}$'):
        write_dataset(tmp_path, spec)
    (tmp_path / NOTE).write_text('{')
    with pytest.raises(FileExistsError, match=f'^it has content of unknown origin: {NOTE}$'):
        write_dataset(tmp_path, spec)


def test_a_file_more_and_a_file_fewer_are_not_the_same_files(tmp_path):
    spec = DatasetSpec('coco', 2, 2, size=(64, 64))
    write_dataset(tmp_path, spec)
    (tmp_path / 'train2017' / 'mine.jpg').write_text('precious')
    (tmp_path / 'val2017' / '000000000001.jpg').unlink()
    with pytest.raises(FileExistsError, match='^files were added to the data set in it$'):
        write_dataset(tmp_path, spec)
    assert (tmp_path / 'train2017' / 'mine.jpg').read_text() == 'precious'


def test_an_empty_folder_that_was_there_stays_after_a_failure(tmp_path):
    def fails():
        raise KeyError

    (tmp_path / 'there').mkdir()
    for out in (tmp_path / 'there', tmp_path / 'not' / 'there'):
        with pytest.raises(KeyError):
            write_dataset(out, DatasetSpec('coco', 1, 1, size=(64, 64)), on_picture=fails)
    assert list((tmp_path / 'there').iterdir()) == [] and list((tmp_path / 'not').iterdir()) == []


def test_sides_are_not_shortened_below_the_least(tmp_path):
    write_dataset(tmp_path, DatasetSpec('coco', 6, 1, size=(64, 100), size_jitter=0.5))
    images = json.loads((tmp_path / 'annotations' / 'instances_train2017.json').read_text())['images']
    assert {image['width'] for image in images} == {64}
    heights = [image['height'] for image in images]
    assert min(heights) >= 64 and len(set(heights)) > 3  # the longer side is shortened all the same


def test_what_is_beside_our_data_set_is_not_replaced(tmp_path):
    write_dataset(tmp_path, DatasetSpec('ade', 1, 1, size=(64, 64)))
    (tmp_path / 'val2017').mkdir()
    (tmp_path / 'val2017' / 'mine.jpg').write_text('precious')
    with pytest.raises(FileExistsError, match='^val2017 in it is of unknown origin$'):
        write_dataset(tmp_path, DatasetSpec('coco', 1, 1, size=(64, 64)))
    assert (tmp_path / 'images').exists() and (tmp_path / 'val2017' / 'mine.jpg').read_text() == 'precious'
    (tmp_path / 'train2017').write_text('a file where a folder belongs')
    write_dataset(tmp_path, DatasetSpec('coco', 1, 1, size=(64, 64)), overwrite=True)
    assert not (tmp_path / 'images').exists()
    assert [path.name for path in (tmp_path / 'val2017').iterdir()] == ['000000000001.jpg']


def test_what_a_link_leads_to_stays(tmp_path):
    elsewhere = tmp_path / 'elsewhere'
    elsewhere.mkdir()
    (elsewhere / 'mine.jpg').write_text('precious')
    out = tmp_path / 'out'
    out.mkdir()
    (out / 'train2017').symlink_to(elsewhere)
    write_dataset(out, DatasetSpec('coco', 1, 1, size=(64, 64)), overwrite=True)
    assert not (out / 'train2017').is_symlink() and [path.name for path in elsewhere.iterdir()] == ['mine.jpg']


def test_folders_know_whether_they_are_current(tmp_path):
    out = tmp_path / 'out'
    folder = StagedFolder(out, dict(a=1))
    assert not folder.is_current and not out.exists()
    with folder:
        folder.claim(['x'], overwrite=False)
        (folder.staging / 'x').mkdir()
        (folder.staging / 'x' / 'file').write_text('1')
        folder.commit(['x'])
    assert folder.is_current and not StagedFolder(out, dict(a=2)).is_current
    assert json.loads((out / NOTE).read_text()) == dict(content=dict(a=1), names=['x'], files=dict(x=['file']))
    (tmp_path / 'file').touch()
    with pytest.raises(NotADirectoryError, match='file is a file, not a folder$'), StagedFolder(tmp_path / 'file', {}):
        pass


def test_a_folder_that_lacks_a_file_is_not_current(tmp_path):
    """Whatever else is there: another file in its place, or one of its name without content."""
    folder = StagedFolder(tmp_path, dict(a=1))

    def fill():
        with folder:
            folder.claim(['x'], overwrite=True)
            (folder.staging / 'x').mkdir()
            for name in '12':
                (folder.staging / 'x' / name).write_text(name)
            folder.commit(['x'])

    fill()
    (tmp_path / 'x' / '1').write_text('changed')  # by somebody who wants it to stay
    assert folder.is_current
    (tmp_path / 'x' / '1').write_text('')
    assert not folder.is_current
    fill()
    (tmp_path / 'x' / '1').rename(tmp_path / 'x' / 'mine')
    assert not folder.is_current
    with folder, pytest.raises(FileExistsError, match='files were added'):
        folder.claim(['x'], overwrite=False)
    assert (tmp_path / 'x' / 'mine').read_text() == '1'


def test_notes_that_count_files_are_read(tmp_path):
    """As this package wrote them once."""
    (tmp_path / 'x').mkdir()
    (tmp_path / 'x' / 'file').write_text('1')
    (tmp_path / NOTE).write_text(json.dumps(dict(content=dict(a=1), names=['x'], files=dict(x=1))))
    folder = StagedFolder(tmp_path, dict(a=1))
    assert folder.is_current
    (tmp_path / 'x' / 'mine').touch()
    assert not folder.is_current
    with folder, pytest.raises(FileExistsError, match='files were added'):
        folder.claim(['x'], overwrite=False)
    (tmp_path / 'x' / 'file').unlink()
    (tmp_path / 'x' / 'mine').unlink()
    assert not folder.is_current


@pytest.mark.parametrize(
    ('change', 'said'),
    [
        (dict(format='voc'), "format must be one of coco, ade, imagenet, got 'voc'"),
        (dict(num_train=0), 'num_train must be at least 1, got 0'),
        (dict(num_val=0), 'num_val must be at least 1, got 0'),
        (dict(seed=-1), 'seed must be at least 0, got -1'),
        (dict(size=(64, 63)), 'size must be a width and a height from 64 to 8192 pixels, got (64, 63)'),
        (dict(size=(64,)), 'size must be a width and a height from 64 to 8192 pixels, got (64,)'),
        (dict(size_jitter=0.51), 'size_jitter must be from 0 to 0.5, got 0.51'),
        (dict(size_jitter=-0.1), 'size_jitter must be from 0 to 0.5, got -0.1'),
    ],
)
def test_what_a_data_set_may_be(change, said):
    allowed = dict(format='coco', num_train=1, num_val=1, seed=0, size=(64, 8192), size_jitter=0.5)
    DatasetSpec(**allowed)
    with pytest.raises(ValueError) as error:
        DatasetSpec(**dict(allowed, **change))
    assert str(error.value) == said
    assert DatasetSpec('coco', 1, 1) == DatasetSpec('coco', 1, 1, 0, (160, 160), 0.0)


# -------------------------------------------------------------------------------------- the tool


def test_the_tool_hands_its_options_on(tmp_path, monkeypatch, capsys):
    asked = []

    def write(out, spec, *, workers, overwrite, on_picture):
        asked.append((out, spec, workers, overwrite))
        on_picture()
        return len(asked) == 1

    monkeypatch.setattr(datasets, 'write_dataset', write)
    main = runpy.run_path(str(TOOL))['main']
    out = str(tmp_path / 'out')
    required = [out, '--format', 'ade', '--num-train', '3', '--num-val', '2']
    more = ['--seed', '5', '--size', '96', '64', '--size-jitter', '0.25', '--workers', '4', '--overwrite']
    assert main(required + more) == 0 and main(required) == 0
    assert asked == [
        (Path(out), DatasetSpec('ade', 3, 2, 5, (96, 64), 0.25), 4, True),
        (Path(out), DatasetSpec('ade', 3, 2), 1, False),
    ]
    assert capsys.readouterr().out == (
        f'wrote {out} (ade, 3 training and 2 validation pictures, seed 5)\nclasses: {ADE_CLASSES}\n'
        f'already there, unchanged: {out} (ade, 3 training and 2 validation pictures, seed 0)\nclasses: {ADE_CLASSES}\n'
    )

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(datasets, 'write_dataset', interrupted)
    assert main(required) == 130
    assert capsys.readouterr().err == f'interrupted: nothing written to {out}\n'


def test_several_processes_draw(tmp_path, monkeypatch):
    """Started anew, as threads do not survive a fork; all of the pool ends with whoever asked for it."""
    pools = []

    class Pool:
        def __init__(self, workers, context, initialise):
            pools.append([workers, context.get_start_method(), initialise])

        def map(self, draw, tasks, chunksize):
            pools[-1].append((list(tasks), chunksize))
            return map(draw, tasks)

        def shutdown(self, **options):
            pools[-1].append(options)

    monkeypatch.setattr(writer, 'ProcessPoolExecutor', Pool)
    spec, drawn = DatasetSpec('coco', 2, 1, size=(64, 64)), []
    assert write_dataset(tmp_path / 'one', spec, on_picture=lambda: drawn.append(1)) and not pools and len(drawn) == 3
    assert write_dataset(tmp_path / 'three', spec, workers=3)
    tasks = [('train', 1), ('train', 2), ('val', 1)]
    assert pools == [[3, 'spawn', writer._init_worker, (tasks, 16), dict(cancel_futures=True)]]
    for name in ('train2017/000000000002.jpg', 'annotations/instances_val2017.json', NOTE):
        assert (tmp_path / 'one' / name).read_bytes() == (tmp_path / 'three' / name).read_bytes()

    def fails():
        raise KeyError

    with pytest.raises(KeyError):
        write_dataset(tmp_path / 'none', spec, workers=2, on_picture=fails)
    assert pools[1][-1] == dict(cancel_futures=True)
    calls = []
    monkeypatch.setattr(writer.signal, 'signal', lambda *args: calls.append(args))
    monkeypatch.setattr(writer.cv2, 'setNumThreads', calls.append)
    writer._init_worker()
    assert calls == [(signal.SIGINT, signal.SIG_IGN), 1]
    with pytest.raises(ValueError, match='^workers must be at least 1, got 0$'):
        write_dataset(tmp_path / 'none', spec, workers=0)


def test_what_another_process_has_written_meanwhile_is_not_written_again(tmp_path, monkeypatch):
    answers = [False, True]
    monkeypatch.setattr(StagedFolder, 'is_current', property(lambda self: answers.pop(0)))
    monkeypatch.setattr(StagedFolder, 'claim', None)
    assert write_dataset(tmp_path, DatasetSpec('coco', 1, 1)) is False and answers == []
