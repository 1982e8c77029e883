# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What the options of tools/train.py and tools/test.py change in the config that runs."""

import runpy
import sys
from pathlib import Path

import pytest

from mmlinattn.engine import cli

pytest.importorskip('mmdet')
ROOT = Path(__file__).resolve().parents[1]
DETECTOR = str(ROOT / 'configs' / 'mmdet' / 'ravlt_shapes_quickstart.py')
CLASSIFIER = str(ROOT / 'configs' / 'mmpretrain' / 'ravlt_shapes_quickstart.py')


@pytest.fixture
def configured(tmp_path, monkeypatch):
    """The config that a tool would run, without its data."""

    def run(tool, *arguments):
        script = runpy.run_path(str(ROOT / 'tools' / tool))
        functions = script['configure'].__globals__
        for name in ('check_data_config', 'check_checkpoint', 'check_match'):
            monkeypatch.setitem(functions, name, lambda value, *_: value)
        monkeypatch.setattr(sys, 'argv', [tool, *map(str, arguments), '--work-dir', str(tmp_path)])
        return functions['configure'](functions['parse_args']())

    return run


def test_amp_on_an_accelerator(configured, monkeypatch):
    monkeypatch.setattr(cli, 'get_device', lambda: 'cuda')
    cfg = configured('train.py', DETECTOR, '--amp')
    assert cfg.optim_wrapper.type == 'AmpOptimWrapper' and cfg.optim_wrapper.loss_scale == 'dynamic'
    assert configured('train.py', DETECTOR).optim_wrapper.get('type', 'OptimWrapper') == 'OptimWrapper'


def test_amp_of_the_test_is_the_loops(configured):
    assert configured('test.py', DETECTOR, 'some.pth', '--amp').test_cfg.fp16 is True
    assert not configured('test.py', DETECTOR, 'some.pth').test_cfg.get('fp16')


def test_learning_rates_are_scaled_when_asked_for(configured):
    options = ['--cfg-options', 'auto_scale_lr.base_batch_size=16']
    assert configured('train.py', DETECTOR, '--auto-scale-lr', *options).auto_scale_lr.enable is True
    assert not configured('train.py', DETECTOR, *options).auto_scale_lr.get('enable')


def test_memory_is_not_pinned_where_that_is_asked_for(configured):
    options = ['--cfg-options', *(f'{stage}_dataloader.pin_memory=True' for stage in ('train', 'val', 'test'))]
    cfg = configured('train.py', DETECTOR, *options)
    assert all(cfg[f'{stage}_dataloader'].pin_memory is True for stage in ('train', 'val', 'test'))
    cfg = configured('train.py', DETECTOR, *options, '--no-pin-memory')
    assert all(cfg[f'{stage}_dataloader'].pin_memory is False for stage in ('train', 'val', 'test'))


def test_loaders_of_classifiers_have_the_settings_their_configs_rely_on(configured):
    """MMPretrain's own tools fill them in."""
    pytest.importorskip('mmpretrain')
    cfg = configured('train.py', CLASSIFIER)
    for loader in (cfg.train_dataloader, cfg.val_dataloader):
        assert loader.collate_fn == dict(type='default_collate')
        assert loader.pin_memory is False  # without an accelerator
        assert loader.persistent_workers is (loader.num_workers > 0)
    assert 'collate_fn' not in configured('train.py', DETECTOR).train_dataloader


def test_augmentation_of_the_test_wraps_the_model_and_takes_its_pipeline(configured, tmp_path):
    config = tmp_path / 'with_tta.py'
    config.write_text(
        f"_base_ = '{DETECTOR}'\n"
        "tta_model = dict(type='DetTTAModel')\n"
        "tta_pipeline = [dict(type='LoadImageFromFile'), dict(type='TestTimeAug', transforms=[])]\n"
    )
    cfg = configured('test.py', config, 'some.pth', '--tta')
    assert cfg.model.type == 'DetTTAModel' and cfg.model.module.type == 'MaskRCNN'
    assert [step.type for step in cfg.test_dataloader.dataset.pipeline] == ['LoadImageFromFile', 'TestTimeAug']
    assert configured('test.py', config, 'some.pth').model.type == 'MaskRCNN'
