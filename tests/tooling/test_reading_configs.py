# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Configs, data sets and checkpoints as the tools read them."""

import os
import sys
from pathlib import Path

import pytest
from helpers.engine_toys import refused
from mmengine.config import Config

from mmlinattn.checkpoints import CheckpointError
from mmlinattn.tooling import configs
from mmlinattn.utils.errors import RunError

COCO, BARE = dict(type='CocoDataset', data_root='data/coco'), dict(type='CustomDataset', data_prefix='val')


def wrapped(*datasets):
    return dict(dataset=dict(type='RepeatDataset', dataset=dict(type='ConcatDataset', datasets=list(datasets))))


@pytest.mark.parametrize(
    ('inside', 'alone', 'roots'),
    [
        ([COCO, dict(COCO, data_root='')], dict(COCO, settings=dict(data_root='no data set')), ['mine'] * 3),
        ([BARE, BARE], BARE, ['mine'] * 3),
        ([BARE, BARE], COCO, [None, None, 'mine']),  # beside others with a root, these have absolute paths
    ],
)
def test_a_data_root_reaches_wrapped_data_sets(inside, alone, roots):
    cfg = Config(dict(train_dataloader=wrapped(*inside), val_dataloader=dict(dataset=alone)))
    configs.set_data_root(cfg, 'mine')
    leaves = (*cfg.train_dataloader.dataset.dataset.datasets, cfg.val_dataloader.dataset)
    assert [leaf.get('data_root') for leaf in leaves] == roots
    assert 'data_root' not in cfg.train_dataloader.dataset and leaves[2].get('settings') == alone.get('settings')


@pytest.mark.parametrize('head', [dict(num_classes=12), dict(type='MultiTaskHead'), None])
def test_own_classes_need_no_second_setting(head, capsys):
    data = dict(type='mmpretrain.CustomDataset', data_root='mine', split='train')
    loader = dict(train_dataloader=wrapped(data), val_dataloader=dict(dataset=dict(type='ImageNet', split='val')))
    cfg = Config(dict(model=dict(head=head), data_preprocessor=dict(num_classes=1000, to_rgb=True), **loader))
    configs.adapt_inherited_classes(cfg)
    count = 12 if head and 'num_classes' in head else 1000
    assert cfg.data_preprocessor == dict(num_classes=count, to_rgb=True)
    assert cfg.train_dataloader.dataset.dataset.datasets[0] == dict(type='mmpretrain.CustomDataset', data_root='mine')
    assert cfg.val_dataloader.dataset.split == 'val'
    said = capsys.readouterr().err
    assert ("'train' is left out" in said) and ('num_classes = 1000 is 12 here' in said) == (count == 12)
    configs.adapt_inherited_classes(cfg)
    assert capsys.readouterr().err == ''


@pytest.mark.parametrize('dot', ['', './'])
@pytest.mark.parametrize('slash', ['', '/'])
def test_a_data_root_moves_the_files_of_evaluators(dot, slash):
    """Paths below the root of any data set move, the longest root first; whole folder names count."""
    roots = [dict(COCO, data_root=root) for root in (f'{dot}data/coco{slash}', 'data/', None)]
    evaluator = dict(
        type='MultiDatasetsEvaluator',
        metrics=[dict(ann_file=f'{dot}data/coco/a.json'), dict(ann_file='data/b.json', count=3)],
        files=['data/coco/a.json', 3, ('data/coco/b.json',), 'data/coco_2/a.json', 'other/data/coco/a.json'],
        dataset_prefixes=['coco', 'data/coco', 'data/coco/'],
    )
    moved = dict(
        type='MultiDatasetsEvaluator',
        metrics=[dict(ann_file='mine/a.json'), dict(ann_file='mine/b.json', count=3)],
        files=['mine/a.json', 3, ('mine/b.json',), 'mine/coco_2/a.json', 'other/data/coco/a.json'],
        dataset_prefixes=['coco', 'mine/', 'mine/'],
    )
    cfg = Config(dict(test_dataloader=wrapped(*roots), val_evaluator=evaluator, test_evaluator=[evaluator]))
    configs.set_data_root(cfg, 'mine')
    assert cfg.val_evaluator == moved and cfg.test_evaluator == [moved]


@pytest.mark.parametrize(
    ('leaf', 'fits'),
    [
        (dict(data_root='gone'), False),
        (dict(data_root='root/a.json'), False),
        (dict(data_root='gone', type='CIFAR10'), True),  # makes its folder
        (dict(data_root='s3://gone'), True),
        (dict(data_root='gone', backend_args=dict(backend='petrel')), True),
        (dict(ann_file='root/a.json', data_prefix='root'), True),
    ],
)
def test_folders_that_are_not_there_are_named_with_their_key(tmp_path, monkeypatch, leaf, fits):
    monkeypatch.chdir(tmp_path)
    os.mkdir('root')
    Path('root/a.json').touch()
    for loader, key in ((dict(dataset=leaf), 'dataset.'), (wrapped(dict(data_root='root'), leaf), 'datasets.1.')):
        cfg = Config(dict(train_dataloader=loader, test_dataloader=dict(dataset=dict(data_root='not asked for'))))
        with refused('' if fits else f'{key}data_root = {leaf["data_root"]!r}: no such folder. Set the folder'):
            configs.check_data_config(cfg, ['val', 'train'])


def test_checkpoints_by_path_and_by_address(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    (tmp_path / 'a.pth').touch()
    for path in ('~/a.pth', f'{tmp_path}/a.pth', 'https://example.org/a.pth', 's3://a/b.pth', 'mmlinattn://ravlt_t'):
        assert configs.check_checkpoint(path, '--resume') == path
    with pytest.raises(CheckpointError, match='no published checkpoint is called'):
        configs.check_checkpoint('mmlinattn://ravlt', 'checkpoint')


def test_a_work_dir_is_its_last_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ('epoch_96.pth', 'epoch_100.pth'):
        os.makedirs('work_dirs/mine', exist_ok=True)
        Path('work_dirs/mine', name).touch()
    with pytest.raises(RunError, match=r"'work_dirs/mine': no last_checkpoint in this folder. There are: .*epoch_96"):
        configs.check_checkpoint('work_dirs/mine', 'checkpoint')
    with pytest.raises(RunError, match=r"epoch_20.pth': no such file. There are: .*epoch_.*epoch_"):
        configs.check_checkpoint('work_dirs/mine/epoch_20.pth', 'checkpoint')
    Path('work_dirs/mine/last_checkpoint').write_text('/elsewhere/mine/epoch_100.pth')
    for given in ('work_dirs/mine', 'work_dirs/mine/'):
        assert configs.check_checkpoint(given, 'checkpoint') == os.path.join(given, 'epoch_100.pth')


@pytest.mark.parametrize('root', ['', '.', './'])
def test_a_new_data_root_moves_relative_files(root):
    others = [dict(ann_file='/ann/a.json'), dict(ann_file=''), dict(ann_file=None)]
    metrics = [dict(ann_file='ann/a.json', metric='bbox'), *others]
    cfg = Config(dict(test_dataloader=dict(dataset=dict(COCO, data_root=root)), test_evaluator=metrics))
    configs.set_data_root(cfg, 'mine')
    assert cfg.test_evaluator == [dict(ann_file='mine/ann/a.json', metric='bbox'), *others]


@pytest.mark.parametrize(
    ('scope', 'line', 'pip'),
    [
        ('mmdet', "default_scope = 'mmdet'", '"mmdet>=3.3,<3.4"'),
        # beside requirements that it does not install
        ('mmseg', "_base_ = 'mmseg::_base_/default_runtime.py'", '"mmsegmentation>=1.2.2,<1.3" ftfy regex'),
        ('mmpretrain', "__import__('mmpretrain')", '"mmpretrain>=1.2,<1.3"'),
    ],
)
def test_missing_packages_are_named_for_pip(tmp_path, monkeypatch, scope, line, pip):
    config = tmp_path / 'config.py'
    config.write_text(line)
    monkeypatch.setattr(configs, 'find_spec', lambda name: None)  # not installed
    monkeypatch.setattr('mmengine.config.config.is_installed', lambda name: False)
    monkeypatch.setitem(sys.modules, scope, None)
    with pytest.raises(RunError) as found:
        configs.read_config(str(config))
    assert str(found.value) == f'{config} needs {scope}, which is not installed in {sys.executable}: pip install {pip}'
    config.write_text("__import__('mmsegment')\n")  # begins like a known name
    with pytest.raises(RunError, match="cannot be read: ModuleNotFoundError: No module named 'mmsegment'$"):
        configs.read_config(str(config))


@pytest.mark.parametrize(
    ('module', 'content', 'line'),
    [
        ('gone_package.part', '', "No module named 'gone_package'. Add its folder to PYTHONPATH$"),
        ('own_module', 'import gone_package', "'own_module': ModuleNotFoundError: No module named 'gone_package'$"),
        ('own_module', 'import own', "'own_module': ModuleNotFoundError: No module named 'own'$"),  # begins like it
        ('own_module', 'from os import gone', "'own_module': ImportError: cannot import name 'gone' from 'os'"),
        ('own_module', 'import mmdet', 'needs mmdet, which is not installed in .*: pip install "mmdet'),
    ],
)
def test_own_modules_that_cannot_be_imported(tmp_path, monkeypatch, module, content, line):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, 'own_module', raising=False)
    monkeypatch.setitem(sys.modules, 'mmdet', None)
    (tmp_path / 'own_module.py').write_text(content)
    (tmp_path / 'config.py').write_text(f'custom_imports = dict(imports=[{module!r}], allow_failed_imports=False)')
    with pytest.raises(RunError, match=line):
        configs.read_config(str(tmp_path / 'config.py'))


def test_the_task_of_a_config_without_a_scope(tmp_path):
    """The scope of the model's class, as in upstream's pure Python configs."""
    pytest.importorskip('mmpretrain')
    for text, scope in (
        ('from mmpretrain.models import ImageClassifier\nmodel = dict(type=ImageClassifier)', 'mmpretrain'),
        ("model = dict(type='mmpretrain.ImageClassifier')", 'mmpretrain'),
        ("model = dict(type='ImageClassifier')", None),
        ('from torch.nn import Linear\nmodel = dict(type=Linear)', None),
    ):
        (tmp_path / 'config.py').write_text(text)
        assert configs.read_config(str(tmp_path / 'config.py')).get('default_scope') == scope


def test_a_config_by_name_without_an_installation(tmp_path, monkeypatch):
    (tmp_path / 'mmlinattn').mkdir()
    monkeypatch.setattr('mmengine.config.config.get_installed_path', lambda name: str(tmp_path / 'mmlinattn'))
    (tmp_path / 'config.py').write_text("_base_ = 'mmlinattn::mmpretrain/ravlt_t_in1k.py'")
    with pytest.raises(RunError, match=r'by its name, and mmlinattn is not installed. Run pip install -e \.'):
        configs.read_config(str(tmp_path / 'config.py'))


def test_the_folder_of_a_pure_python_config(tmp_path):
    """Types stay names, so that the config of the run can be dumped."""
    (tmp_path / 'base.py').write_text(
        'from mmengine.evaluator import DumpResults\nfrom mmengine.dataset import BaseDataset\n'
        "test_dataloader = dict(dataset=dict(type=BaseDataset, data_root='data/old'))\n"
        "test_evaluator = dict(type=DumpResults, out_file_path='data/old/out.pkl')\n"
    )
    (tmp_path / 'config.py').write_text(
        'from mmengine.config import read_base\nwith read_base():\n    from .base import *\n'
    )
    cfg = configs.read_config(str(tmp_path / 'config.py'))
    configs.set_data_root(cfg, 'new')
    cfg.dump(tmp_path / 'dumped.py')
    dumped = Config.fromfile(tmp_path / 'dumped.py')
    assert dumped.test_dataloader.dataset.data_root == 'new'
    assert dumped.test_evaluator == dict(type='mmengine.evaluator.DumpResults', out_file_path='new/out.pkl')


def test_whole_paths_move_with_the_data(tmp_path):
    old, new = tmp_path / 'old', tmp_path / 'new'
    new.mkdir()
    (new / 'mine_val.json').write_text('{}')
    prefix, elsewhere = dict(img=f'{old}/images/', seg='masks'), str(tmp_path / 'gone' / 'mine_val.json')
    train = dict(dataset=dict(data_root=f'{old}/', ann_file=f'{old}/a/train.json', data_prefix=prefix))
    val = dict(dataset=dict(data_root=f'{old}/', ann_file=elsewhere, data_prefix=dict(img='')))
    cfg = Config(dict(train_dataloader=train, val_dataloader=val, val_evaluator=dict(ann_file=elsewhere)))
    configs.set_data_root(cfg, str(new))
    train = cfg.train_dataloader.dataset
    assert (train.data_root, train.ann_file) == (str(new), f'{new}/a/train.json')
    assert train.data_prefix == dict(img=f'{new}/images', seg='masks')
    assert cfg.val_dataloader.dataset.ann_file == cfg.val_evaluator.ann_file == f'{new}/mine_val.json'
