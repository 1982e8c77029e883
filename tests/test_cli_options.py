# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What the options of tools/train.py and tools/test.py change in the config that runs."""

import copy
import functools
import json
import pickle
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from mmengine.config import Config

from mmlinattn.engine import cli

pytest.importorskip('mmdet')
ROOT = Path(__file__).resolve().parents[1]
DETECTOR, SEGMENTOR, CLASSIFIER = (
    str(ROOT / 'configs' / task / 'ravlt_shapes_quickstart.py') for task in ('mmdet', 'mmseg', 'mmpretrain')
)
LOADERS = ('train_dataloader', 'val_dataloader', 'test_dataloader')


read_once = functools.cache(Config.fromfile)


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """The functions of a tool whose arguments are given, without what looks for data and checkpoints."""

    def load(name, *arguments):
        functions = runpy.run_path(str(ROOT / 'tools' / name))['configure'].__globals__
        monkeypatch.setattr(cli, 'read_config', lambda path: copy.deepcopy(read_once(path)))
        for check in ('check_data_config', 'check_checkpoint', 'check_match'):
            monkeypatch.setitem(functions, check, lambda value, *_: value)
        monkeypatch.setattr(sys, 'argv', [name, *map(str, arguments), '--work-dir', str(tmp_path / 'work')])
        return functions

    return load


@pytest.fixture
def configured(tool):
    """The config that a tool would run."""

    def run(name, *arguments):
        functions = tool(name, *arguments)
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


def test_training_without_validation(configured):
    cfg = configured('train.py', DETECTOR, '--no-validate')
    assert cfg.val_cfg is cfg.val_dataloader is cfg.val_evaluator is None
    assert None not in [configured('train.py', DETECTOR)[key] for key in ('val_cfg', 'val_dataloader', 'val_evaluator')]


@pytest.mark.parametrize('config', [DETECTOR, SEGMENTOR, CLASSIFIER], ids=['detector', 'segmentor', 'classifier'])
def test_loaders(config, configured, monkeypatch):
    """Workers stay between epochs unless told otherwise; memory is pinned for an accelerator only."""
    cfg = configured('train.py', config)
    assert cfg.train_dataloader.persistent_workers and cfg.val_dataloader.persistent_workers
    cfg = configured('train.py', config, '--no-persistent-workers')
    assert cfg.train_dataloader.persistent_workers is cfg.val_dataloader.persistent_workers is False
    for device in ('cpu', 'cuda'):
        monkeypatch.setattr(cli, 'get_device', lambda device=device: device)
        cfg = configured('train.py', config, '--no-pin-memory')
        assert [cfg[key].pin_memory for key in LOADERS] == [False] * 3
        if config == CLASSIFIER:  # upstream's other two leave it to PyTorch
            cfg = configured('train.py', config)
            assert [cfg[key].pin_memory for key in LOADERS] == [device == 'cuda'] * 3


def test_what_a_training_begins_with(configured, tmp_path):
    begins = configured('train.py', DETECTOR)
    assert not begins.get('resume') and begins.get('load_from') is None
    resumed = configured('train.py', DETECTOR, '--resume', 'epoch_3.pth')
    assert (resumed.resume, resumed.load_from) == (True, 'epoch_3.pth')
    tuned = configured('train.py', DETECTOR, '--cfg-options', 'load_from=some.pth')
    assert (tuned.get('resume', False), tuned.load_from) == (False, 'some.pth')
    nothing = configured('train.py', DETECTOR, '--resume')
    assert (nothing.resume, nothing.load_from) == (False, None)
    last = tmp_path / 'work' / 'epoch_1.pth'
    last.touch()
    (last.parent / 'last_checkpoint').write_text(str(last))
    found = configured('train.py', DETECTOR, '--resume')
    assert (found.resume, found.load_from) == (True, str(last))


def test_the_work_dir_is_that_of_the_command_then_of_the_config_then_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'named.py').write_text("work_dir = 'of_the_config'")
    (tmp_path / 'plain.py').write_text('')

    def work_dir(config, given=None):
        args = dict(config=config, work_dir=given, data_root=None, cfg_options=None, no_pin_memory=False)
        return cli.load_config(SimpleNamespace(launcher='none', local_rank=0, **args)).work_dir

    assert work_dir('named.py', 'given') == 'given'
    assert work_dir('named.py') == 'of_the_config'
    assert work_dir('plain.py') == 'work_dirs/plain'


def test_mixed_precision_leaves_nothing_behind_on_a_cpu(monkeypatch):
    """None of its arguments, which the plain wrapper does not take."""
    monkeypatch.setattr(cli, 'get_device', lambda: 'cpu')
    wrapper = dict(type='AmpOptimWrapper', loss_scale='dynamic', dtype='bfloat16', use_fsdp=False, clip_grad=None)
    cfg = Config(dict(optim_wrapper=wrapper))
    cli.drop_amp_on_cpu(cfg, is_asked=False)
    assert cfg.optim_wrapper == dict(type='OptimWrapper', clip_grad=None)


def test_drawings_of_each_task(configured, tmp_path):
    """Each of the three projects spells it its own way."""
    options = ['--show-dir', tmp_path / 'shown', '--interval', 3, '--wait-time', 0.5]
    for config in (DETECTOR, SEGMENTOR, CLASSIFIER):
        cfg = configured('test.py', config, 'some.pth', *options)
        hook, folder = cfg.default_hooks.visualization, str(tmp_path / 'shown')
        assert (hook.show, hook.wait_time) == (False, 0.5)
        if config == CLASSIFIER:
            assert (hook.enable, hook.out_dir, hook.interval) == (True, folder, 3)
        else:  # the tool chooses every third, as the hooks count batches, or not at all
            assert (hook.draw, hook.interval) == (True, 1)
            assert folder == (hook.test_out_dir if config == DETECTOR else cfg.visualizer.save_dir)
        assert configured('test.py', config, 'some.pth', '--show').default_hooks.visualization.show is True
        quiet = configured('test.py', config, 'some.pth').default_hooks.get('visualization', {})
        assert not quiet.get('draw') and not quiet.get('enable')


class FakeRunner:
    """Tests five pictures in batches of two."""

    rank = 0

    def __init__(self, hooks):
        self.hooks = hooks
        self.test_evaluator = SimpleNamespace(metrics=[])

    def register_hook(self, hook):
        pass

    def test(self):
        for index, batch in enumerate(([0, 1], [2, 3], [4])):
            for hook in self.hooks:
                hook.after_test_iter(self, batch_idx=index, data_batch=None, outputs=batch)
        return {'coco/bbox_mAP': 0.5}


def visualization_hook(kind):
    """A hook of that name which notes down what it draws."""
    drawn = []
    hook = type(
        kind, (), {'after_test_iter': lambda self, runner, batch_idx, data_batch, outputs: drawn.extend(outputs)}
    )
    return hook(), drawn


@pytest.mark.parametrize('kind', ['DetVisualizationHook', 'SegVisualizationHook', 'AnotherHook'])
@pytest.mark.parametrize(('interval', 'chosen'), [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (3, [0, 3])])
def test_every_nth_picture_is_drawn(kind, interval, chosen, tool, tmp_path, monkeypatch):
    functions, (hook, drawn) = (
        tool('test.py', DETECTOR, 'some.pth', '--interval', interval, '--show-dir', tmp_path),
        visualization_hook(kind),
    )
    monkeypatch.setitem(functions, 'build_runner', lambda cfg, compiles: FakeRunner([hook]))
    functions['main']()
    assert drawn == (chosen if kind != 'AnotherHook' else [0, 1, 2, 3, 4])


def test_what_is_written_out(tool, tmp_path, monkeypatch):
    """Predictions by a metric of the evaluator, or the figures, in the format of the file's name."""
    for name, parse in (('m.json', json.load), ('m.pkl', pickle.load)):
        runner = FakeRunner([])
        functions = tool('test.py', DETECTOR, 'some.pth', '--out', tmp_path / name, '--out-item', 'metrics')
        monkeypatch.setitem(functions, 'build_runner', lambda cfg, compiles, runner=runner: runner)
        functions['main']()
        assert runner.test_evaluator.metrics == []
        with open(tmp_path / name, 'r' if name.endswith('json') else 'rb') as stream:
            assert parse(stream) == {'coco/bbox_mAP': 0.5}
    runner = FakeRunner([])
    functions = tool('test.py', DETECTOR, 'some.pth', '--out', tmp_path / 'p.pkl')
    monkeypatch.setitem(functions, 'build_runner', lambda cfg, compiles: runner)
    functions['main']()
    (metric,) = runner.test_evaluator.metrics
    assert type(metric).__name__ == 'DumpDetResults' and metric.out_file_path == str(tmp_path / 'p.pkl')
    assert not (tmp_path / 'p.pkl').exists()
