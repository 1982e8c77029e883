# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The synthetic images part by part, and what the tool hands on."""

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
    DatasetSpec,
    draw_scene,
    write_dataset,
    writer,
)
from mmlinattn.datasets import shapes as shapes_module
from mmlinattn.datasets.pictures import save_jpeg, save_png
from mmlinattn.datasets.staging import NOTE, StagedFolder
from mmlinattn.datasets.textures import (
    BACKGROUNDS,
    FILLS,
)
from mmlinattn.datasets.writer import GENERATOR_VERSION

TOOL = Path(__file__).parents[2] / 'tools' / 'make_shapes_dataset.py'

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
        trained = np.concatenate([each.ravel() for each in labels[:4]])  # of images of several sizes
        shares = [np.mean(trained == value) for value in range(1, 11)]
        assert [float(line.split('\t')[1]) for line in info[1:]] == pytest.approx(shares, abs=6e-5)


def test_files_of_pictures(tmp_path):
    labels = np.arange(12, dtype=np.uint8).reshape(3, 4)
    save_png(tmp_path / 'labels.png', labels)
    assert (cv2.imread(str(tmp_path / 'labels.png'), cv2.IMREAD_UNCHANGED) == labels).all()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    save_jpeg(tmp_path / 'noise.jpg', noise)
    at_95 = cv2.imencode('.jpg', noise[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 95])[1]
    assert (tmp_path / 'noise.jpg').read_bytes() == at_95.tobytes()


def test_stretched_shapes_are_whole():
    """Stretched to more than its diameter, a shape would be cut at the border of the square it is drawn in."""
    for seed in range(12):
        scene = draw_scene(np.random.default_rng(seed), (256, 256), num_shapes=1, kinds=('disc',), diameters=(0.4, 0.4))
        rows, columns = (np.flatnonzero(scene.masks[0].any(axis)) for axis in (1, 0))
        assert max(np.ptp(rows), np.ptp(columns)) + 1 <= 0.4 * 256 + 1


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


# ------------------------------------------------------------------------------------- surfaces


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
        f'wrote {out} (ade, 3 training and 2 validation images, seed 5)\nclasses: {ADE_CLASSES}\n'
        f'already there, unchanged: {out} (ade, 3 training and 2 validation images, seed 0)\nclasses: {ADE_CLASSES}\n'
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
