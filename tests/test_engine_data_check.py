# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import json
import os

import pytest
from engine_toys import ToyDataset, make_runner
from mmengine.config import Config
from mmengine.dataset import ConcatDataset, RepeatDataset

from mmlinattn.engine import RunError, check_data_config
from mmlinattn.engine.data_check import explained_empty_data, find_missing_files

HOOKS = [dict(type='DataCheckHook', max_listed=2)]


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """A folder with the 12 files that ToyDataset names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'folder').mkdir()
    for index in range(12):
        (tmp_path / 'folder' / f'{index}.jpg').touch()
    return tmp_path / 'folder'


def test_all_there(pictures, tmp_path):
    make_runner(tmp_path / 'work', HOOKS).train()
    assert (tmp_path / 'work' / 'epoch_2.pth').exists()


def test_missing_images_stop_the_run_before_it_trains(pictures, tmp_path):
    for index in (3, 7, 9):
        (pictures / f'{index}.jpg').unlink()
    runner = make_runner(tmp_path / 'work', HOOKS)
    message = r'train_dataloader \(ToyDataset.*: 3 of the files .* 12 samples .*missing: '
    with pytest.raises(RunError, match=message + r'folder/3.jpg, folder/7.jpg and 1 more\.'):
        runner.train()
    assert runner.iter == 0


def test_a_missing_folder_is_all_its_images(pictures):
    for path in pictures.iterdir():
        path.unlink()
    pictures.rmdir()
    assert len(find_missing_files(ToyDataset())) == 12


@pytest.mark.parametrize('wrap', [lambda d: RepeatDataset(d, 2), lambda d: ConcatDataset([ToyDataset(size=2), d])])
def test_looks_into_wrappers(pictures, tmp_path, wrap):
    (pictures / '5.jpg').unlink()
    runner = make_runner(tmp_path / 'work', HOOKS)
    runner.train_loop.dataloader = runner.build_dataloader(
        dict(dataset=wrap(ToyDataset()), sampler=dict(type='DefaultSampler'), batch_size=4)
    )
    with pytest.raises(RunError, match='folder/5.jpg'):
        runner.train()


def test_an_empty_data_set_is_an_error(pictures, tmp_path):
    runner = make_runner(tmp_path / 'work', HOOKS)
    runner.train_loop.dataloader.dataset.size = 0
    runner.train_loop.dataloader.dataset.data_address = []
    with pytest.raises(RunError, match='holds no image'):
        runner.train()


def test_lists_each_folder_once(pictures, monkeypatch):
    """118 thousand images have to take seconds on a network disk."""
    scans = []
    scandir = os.scandir
    monkeypatch.setattr(os, 'scandir', lambda path: scans.append(path) or scandir(path))
    monkeypatch.setattr(os, 'stat', None)
    assert find_missing_files(ToyDataset()) == []
    assert scans == ['folder']


def coco_config(root, **kwargs):
    leaf = dict(
        type='CocoDataset',
        data_root=str(root),
        ann_file='annotations/train.json',
        data_prefix=dict(img='train/'),
    )
    leaf.update(kwargs)
    evaluator = dict(type='CocoMetric', ann_file=f'{root}/annotations/train.json')
    return Config(
        dict(
            train_dataloader=dict(dataset=dict(type='RepeatDataset', times=2, dataset=leaf)),
            val_dataloader=dict(dataset=dict(leaf)),
            val_evaluator=evaluator,
        )
    )


@pytest.fixture
def coco_root(tmp_path):
    (tmp_path / 'coco' / 'annotations').mkdir(parents=True)
    (tmp_path / 'coco' / 'train').mkdir()
    (tmp_path / 'coco' / 'annotations' / 'train.json').write_text('{}')
    return tmp_path / 'coco'


def test_config_of_a_data_set_that_is_there(coco_root):
    check_data_config(coco_config(coco_root), ['train', 'val'])


@pytest.mark.parametrize(
    'change, message',
    [
        (dict(data_root='/no/such'), "train_dataloader.dataset.dataset.data_root = '/no/such'"),
        (dict(ann_file='a.json'), "train_dataloader.dataset.dataset.ann_file = 'a.json'"),
        (
            dict(data_prefix=dict(img='x/')),
            "train_dataloader.dataset.dataset.data_prefix.img = 'x/'",
        ),
    ],
)
def test_config_naming_what_is_not_there(coco_root, change, message):
    with pytest.raises(RunError, match=message):
        check_data_config(coco_config(coco_root, **change), ['train'])


def test_config_of_an_evaluator(coco_root):
    cfg = coco_config(coco_root)
    cfg.val_evaluator.ann_file = 'elsewhere.json'
    with pytest.raises(RunError, match="val_evaluator.ann_file = 'elsewhere.json'"):
        check_data_config(cfg, ['train', 'val'])
    check_data_config(cfg, ['train'])


@pytest.mark.parametrize('change', [dict(data_root='s3://bucket/coco'), dict(backend_args=dict(backend='petrel'))])
def test_config_of_remote_data_is_not_checked(coco_root, change):
    change = dict(dict(data_root='/no/such'), **change)
    check_data_config(coco_config(coco_root, **change), ['train'])


def empty_config(names, image_ids=(1, 2)):
    """A loader of two data sets: one that has images left, then one of the classes ``names``."""
    pytest.importorskip('mmdet')
    objects = [dict(id=i, image_id=i, category_id=1, bbox=[1, 1, 5, 5], area=25, iscrowd=0) for i in image_ids]
    images = [dict(id=i, file_name=f'{i}.jpg', width=64, height=64) for i in image_ids]
    with open('coco.json', 'w') as stream:
        json.dump(dict(images=images, annotations=objects, categories=[dict(id=1, name='disc')]), stream)
    leaf = dict(
        type='mmdet.CocoDataset',
        ann_file='coco.json',
        data_prefix=dict(img='pictures'),
        metainfo=dict(classes=('disc',)),
        filter_cfg=dict(filter_empty_gt=True, min_size=32),
    )
    datasets = [leaf, dict(leaf, metainfo=dict(classes=names))]
    return Config(dict(train_dataloader=dict(dataset=dict(type='ConcatDataset', datasets=datasets))))


def test_why_a_data_set_is_empty(tmp_path, monkeypatch):
    """MMEngine fails in NumPy."""
    monkeypatch.chdir(tmp_path)
    cfg = empty_config(('star',))
    with pytest.raises(RunError) as found, explained_empty_data(cfg, ['train', 'val']):
        raise ValueError('need at least one array to concatenate')
    message = str(found.value)
    assert message.startswith("train_dataloader.dataset.datasets.1: none of the 2 images of 'coco.json' is left after ")
    assert "filter_cfg = {'filter_empty_gt': True, 'min_size': 32}" in message
    assert "metainfo.classes = ('star',)" in message


def test_an_error_over_data_that_is_there_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for cfg, kind in [(empty_config(('disc',)), ValueError), (empty_config(('star',)), TypeError)]:
        with pytest.raises(kind, match='of another kind'), explained_empty_data(cfg, ['train']):
            raise kind('of another kind')


def test_a_file_that_names_no_image(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match="datasets.0: 'coco.json' in data_root None names no image"):
        with explained_empty_data(empty_config(('disc',), image_ids=()), ['train']):
            raise ValueError
