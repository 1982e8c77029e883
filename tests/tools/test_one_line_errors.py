# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Bad input to tools/train.py and tools/test.py: one line that says what to change, status 1."""

import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from mmengine.registry import MODELS, init_default_scope

from mmlinattn.apis import cli, configs, running
from mmlinattn.engine.runner import find_latest_checkpoint
from mmlinattn.utils.errors import RunError

pytest.importorskip('mmdet')
TOOLS = Path(__file__).resolve().parents[2] / 'tools'
CONFIG = str(TOOLS.parent / 'configs' / 'mmdet' / 'ravlt_shapes_quickstart.py')


@pytest.fixture
def fails(tmp_path, monkeypatch, capsys):
    """Run a tool and return the one line it leaves on stderr."""
    monkeypatch.chdir(tmp_path)

    def run(tool, *args):
        monkeypatch.setattr(sys, 'argv', [tool, *map(str, args)])
        with pytest.raises(SystemExit) as exit_:
            runpy.run_path(str(TOOLS / tool), run_name='__main__')
        assert exit_.value.code == 1
        lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
        errors = [line for line in lines if not line.startswith('notice: ')]
        assert len(errors) == 1 and errors[0].startswith('error: ')
        return errors[0]

    return run


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / 'checkpoint.pth'
    path.touch()
    return path


def test_an_error_of_several_lines_is_one_line(capsys):
    with pytest.raises(SystemExit, match='1'), cli.one_line_errors():
        raise RunError('of another library:\n\x1b[31mtwo lines\r')
    assert re.fullmatch(r'error: of another library:[^\n\r\x1b]+two lines[^\n\r\x1b]*\n', capsys.readouterr().err)


def test_config_missing(fails, checkpoint):
    for args in (['train.py', 'no_such.py'], ['test.py', 'no_such.py', checkpoint]):
        assert "config 'no_such.py': no such file" in fails(*args)


@pytest.mark.parametrize('option', ['optim_wrapper=SGD', 'load_from=5', 'val_dataloader=2'])
def test_values_of_another_kind(fails, option):
    """Whatever stumbles over them, before a model is built."""
    line = fails('train.py', CONFIG, '--cfg-options', option)
    assert 'ravlt_shapes_quickstart.py cannot be run: ' in line and 'Error: ' in line


def test_values_of_another_kind_in_a_test(fails, checkpoint):
    line = fails('test.py', CONFIG, checkpoint, '--cfg-options', 'test_dataloader=2')
    assert 'ravlt_shapes_quickstart.py cannot be run: ' in line and 'Error: ' in line


def test_config_not_readable(fails, tmp_path):
    (tmp_path / 'bad.py').write_text('model = dict(\n')
    assert "config 'bad.py' cannot be read" in fails('train.py', 'bad.py')


@pytest.mark.parametrize('scope, pip', [('mmdet', 'mmdet>='), ('mmseg', 'mmsegmentation>=')])
def test_package_of_the_task_not_installed(fails, tmp_path, monkeypatch, scope, pip):
    (tmp_path / 'config.py').write_text(f"default_scope = '{scope}'\n")
    monkeypatch.setattr(configs, 'find_spec', lambda name: None)
    line = fails('train.py', 'config.py')
    assert f'needs {scope}, which is not installed' in line and f'pip install "{pip}' in line


def test_package_of_a_base_config_not_installed(fails, tmp_path, monkeypatch):
    (tmp_path / 'config.py').write_text("_base_ = 'mmdet::_base_/default_runtime.py'\n")
    monkeypatch.setattr('mmengine.config.config.is_installed', lambda name: False)
    assert 'pip install "mmdet>=' in fails('train.py', 'config.py')


def test_options_that_do_not_fit_the_config(fails):
    """``custom_hooks`` is a list."""
    line = fails('train.py', CONFIG, '--cfg-options', 'custom_hooks.interval=3')
    assert line.startswith("error: --cfg-options {'custom_hooks.interval': 3} does not fit the config: ")


def test_work_dir_is_a_file(fails, checkpoint):
    assert "work dir 'checkpoint.pth' cannot be written" in fails('train.py', CONFIG, '--work-dir', 'checkpoint.pth')


@pytest.mark.skipif(os.name != 'posix' or os.geteuid() == 0, reason='root may write anywhere')
def test_work_dir_is_read_only(fails, tmp_path):
    (tmp_path / 'locked').mkdir(mode=0o500)
    line = fails('train.py', CONFIG, '--work-dir', 'locked/work')
    assert "work dir 'locked/work' cannot be written: Permission denied" in line


def test_data_root_missing(fails):
    line = fails('train.py', CONFIG, '--data-root', 'nowhere')
    assert "train_dataloader.dataset.data_root = 'nowhere': no such folder" in line
    assert 'annotations/instances_train2017.json' in line


def test_annotation_file_missing(fails, tmp_path):
    (tmp_path / 'coco' / 'train2017').mkdir(parents=True)
    line = fails('train.py', CONFIG, '--data-root', 'coco')
    assert "no such file 'coco/annotations/instances_train2017.json'" in line


def test_checkpoint_missing(fails, tmp_path):
    assert fails('test.py', CONFIG, 'no.pth').endswith("checkpoint 'no.pth': no such file.")
    assert fails('test.py', CONFIG, tmp_path).endswith(f"checkpoint '{tmp_path}': a folder, not a file.")
    assert "checkpoint 'typo://x': no such file" in fails('test.py', CONFIG, 'typo://x')
    assert "--resume 'no.pth': no such file" in fails('train.py', CONFIG, '--resume', 'no.pth')
    line = fails('train.py', CONFIG, '--cfg-options', 'load_from=no.pth')
    assert "load_from 'no.pth': no such file" in line


def test_last_checkpoint_names_a_missing_file(fails, tmp_path):
    (tmp_path / 'work').mkdir()
    (tmp_path / 'work' / 'last_checkpoint').write_text('old/place/epoch_3.pth')
    line = fails('train.py', CONFIG, '--work-dir', 'work', '--resume')
    assert "'old/place/epoch_3.pth', which is not there" in line
    assert find_latest_checkpoint(str(tmp_path)) is None
    (tmp_path / 'work' / 'epoch_3.pth').touch()  # the work dir was moved as a whole
    assert find_latest_checkpoint('work') == os.path.join('work', 'epoch_3.pth')


def test_output_file_of_the_wrong_kind(fails, checkpoint):
    assert "--out 'x.txt' has to end with .pkl" in fails('test.py', CONFIG, checkpoint, '--out', 'x.txt')


def test_interval_below_one(fails, checkpoint):
    assert '--interval 0' in fails('test.py', CONFIG, checkpoint, '--interval', '0')


def test_no_tta_in_the_config(fails, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr('mmlinattn.apis.configs.check_data_config', lambda *_: None)
    assert 'has no tta_model and no tta_pipeline' in fails('test.py', CONFIG, checkpoint, '--tta')


def test_learning_rate_cannot_be_scaled(fails):
    assert 'auto_scale_lr.base_batch_size' in fails('train.py', CONFIG, '--auto-scale-lr')


def test_launcher_without_its_environment(fails, monkeypatch):
    from mmengine.config import Config

    from mmlinattn.engine import RunError, prepare_distributed

    monkeypatch.setattr('mmlinattn.engine.runner.distributed.get_device', lambda: 'cpu')
    monkeypatch.delenv('SLURM_PROCID', raising=False)
    with pytest.raises(RunError, match='--launcher slurm: SLURM_PROCID'):
        prepare_distributed(Config(dict(launcher='slurm')))


def test_more_processes_than_gpus(monkeypatch):
    from mmengine.config import Config

    from mmlinattn.engine import RunError, prepare_distributed

    monkeypatch.setattr('mmlinattn.engine.runner.distributed.get_device', lambda: 'cuda')
    monkeypatch.setattr('torch.cuda.is_available', lambda: True)
    monkeypatch.setattr('torch.cuda.device_count', lambda: 2)
    monkeypatch.setenv('LOCAL_RANK', '1')
    prepare_distributed(Config(dict(launcher='pytorch')))
    monkeypatch.setenv('LOCAL_RANK', '2')
    with pytest.raises(RunError, match='process 3 of this machine has no GPU: there are 2'):
        prepare_distributed(Config(dict(launcher='pytorch')))


@pytest.mark.parametrize('in_config', [False, True])
def test_mixed_precision_without_an_accelerator(monkeypatch, capsys, in_config):
    from mmengine.config import Config

    monkeypatch.setattr(running, 'get_device', lambda: 'cpu')
    amp = dict(type='AmpOptimWrapper', loss_scale='dynamic', dtype='float16')
    cfg = Config(dict(optim_wrapper=amp if in_config else dict(type='OptimWrapper')))
    running.drop_amp_on_cpu(cfg, is_asked=not in_config)
    assert dict(cfg.optim_wrapper) == dict(type='OptimWrapper')
    assert 'notice: no accelerator: mixed precision is off' in capsys.readouterr().err
    monkeypatch.setattr(running, 'get_device', lambda: 'cuda')
    running.drop_amp_on_cpu(cfg, is_asked=True)
    assert cfg.optim_wrapper.type == 'AmpOptimWrapper'


def test_data_root_reaches_every_place():
    from mmengine.config import Config

    leaf = dict(type='CocoDataset', data_root='data/coco/', ann_file='a.json')
    cfg = Config(
        dict(
            train_dataloader=dict(dataset=dict(type='RepeatDataset', dataset=dict(leaf))),
            val_dataloader=dict(dataset=dict(leaf)),
            val_evaluator=[dict(type='CocoMetric', ann_file='data/coco/a.json')],
        )
    )
    configs.set_data_root(cfg, 'mine')
    assert cfg.train_dataloader.dataset.dataset.data_root == 'mine'
    assert cfg.val_dataloader.dataset.data_root == 'mine'
    assert cfg.val_evaluator[0].ann_file == 'mine/a.json'


def shapes(task, scope):
    """A data set of three images beside the test, and the arguments to train on it."""
    pytest.importorskip(scope)
    from mmlinattn.datasets import DatasetSpec, write_dataset

    write_dataset('data', DatasetSpec(task, 3, 1, size=(64, 64)))
    config = TOOLS.parent / 'configs' / scope / 'ravlt_shapes_quickstart.py'
    return [str(config), '--data-root', 'data', '--work-dir', 'work']


def test_labels_that_the_head_does_not_have(fails):
    args = shapes('ade', 'mmseg')
    line = fails('train.py', *args, '--cfg-options', 'model.decode_head.num_classes=3')
    assert 'num_classes = 3 of the head is too small for the 10 classes' in line


def test_checkpoint_of_other_classes(fails):
    args = shapes('imagenet', 'mmpretrain')
    cfg = configs.read_config(args[0])
    init_default_scope('mmpretrain')
    torch.save(dict(state_dict=MODELS.build(cfg.model).state_dict()), 'twelve.pth')
    line = fails('test.py', args[0], 'twelve.pth', *args[1:], '--cfg-options', 'model.head.num_classes=5')
    assert 'head.fc.weight (12x256 in the file, 5x256 in the model)' in line
    assert line.endswith('--cfg-options custom_hooks.4.left_out=head.fc')
