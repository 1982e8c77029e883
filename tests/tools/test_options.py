# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Options of tools/train.py and tools/test.py, by their effect on the config of the run."""

import argparse
import copy
import functools
import os
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
from helpers.tool_runs import QUICK, TOOLS

from mmlinattn.tooling import configs, running
from mmlinattn.tooling.analysis import inspecting
from mmlinattn.tooling.export import BOX_FORMATS, FORMATS
from mmlinattn.tooling.export.models import SMALLEST
from mmlinattn.utils.errors import RunError

for package in ('mmdet', 'mmseg', 'mmpretrain'):
    pytest.importorskip(package)
DETECTOR, SEGMENTOR, CLASSIFIER = QUICK.values()
LOADERS = [f'{stage}_dataloader' for stage in ('train', 'val', 'test')]
read_once = functools.cache(configs.read_config)


@pytest.fixture
def configured(tmp_path, monkeypatch):
    """Return the config of a run of a tool, in a folder with data and checkpoints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('LOCAL_RANK', '0')
    monkeypatch.setattr(configs, 'read_config', lambda path: copy.deepcopy(read_once(os.path.abspath(path))))
    os.mkdir('data')
    for name in ('some.pth', 'epoch_3.pth', 'other.pth'):
        Path(name).touch()

    def run(name, *words, work_dir='work'):
        words = [name, *map(str, words), '--data-root', 'data', *(['--work-dir', work_dir] if work_dir else [])]
        monkeypatch.setattr(sys, 'argv', words)
        functions = runpy.run_path(str(TOOLS / name))
        return functions['configure'](functions['parse_args']())

    return run


def test_switches_of_a_training(configured):
    def run(*switches):
        pinned = [f'{key}.pin_memory=True' for key in LOADERS]
        return configured('train.py', DETECTOR, *switches, '--cfg-options', 'auto_scale_lr.base_batch_size=16', *pinned)

    plain, switched = run(), run('--no-persistent-workers', '--no-pin-memory', '--auto-scale-lr')
    for cfg, is_plain in ((plain, True), (switched, False)):
        assert [cfg[key].pin_memory for key in LOADERS] == [is_plain] * 3
        assert [cfg[key].persistent_workers for key in LOADERS[:2]] == [is_plain] * 2
        assert cfg.auto_scale_lr.get('enable', False) is not is_plain
    parts, unvalidated = ('val_cfg', 'val_dataloader', 'val_evaluator'), run('--no-validate', '--no-persistent-workers')
    assert all(plain[part] for part in parts) and [unvalidated[part] for part in parts] == [None] * 3


def test_switches_of_a_test(configured, monkeypatch, capsys):
    for words, device, fp16, launcher in (
        ([], 'cuda', None, 'none'),
        (['--amp', '--launcher', 'mpi'], 'cuda', True, 'mpi'),
        (['--amp'], 'cpu', None, 'none'),  # its autocast is bfloat16, and MMDetection's metrics do not support that
    ):
        monkeypatch.setattr('mmengine.device.get_device', lambda device=device: device)
        cfg = configured('test.py', DETECTOR, 'some.pth', *words)
        assert (cfg.test_cfg.get('fp16'), cfg.launcher) == (fp16, launcher)
    assert 'notice: no accelerator: mixed precision is off' in capsys.readouterr().err


@pytest.mark.parametrize('device', ['cpu', 'cuda'])
def test_loaders_of_classifiers_have_the_settings_their_configs_rely_on(configured, tmp_path, monkeypatch, device):
    for module in (configs, running):
        monkeypatch.setattr(module, 'get_device', lambda: device)
    cfg = configured('train.py', CLASSIFIER)
    for key in LOADERS:
        assert cfg[key].collate_fn == dict(type='default_collate') and cfg[key].pin_memory is (device == 'cuda')
        assert cfg[key].persistent_workers is True
    own = dict(collate_fn=dict(type='pseudo_collate'), pin_memory='mine', persistent_workers=False)
    (tmp_path / 'own.py').write_text(
        f'_base_ = {CLASSIFIER!r}\ntrain_dataloader = dict(**{own})\ntest_dataloader = dict(num_workers=0)\n'
        'val_dataloader = dict(num_workers=0, persistent_workers=False)\n'
    )
    cfg = configured('train.py', 'own.py')
    assert {key: cfg.train_dataloader[key] for key in own} == own
    for config in (DETECTOR, SEGMENTOR):  # upstream's other two leave it to PyTorch
        assert not {'collate_fn', 'pin_memory'} & set(configured('train.py', config).train_dataloader)


@pytest.mark.parametrize('config', [DETECTOR, SEGMENTOR, CLASSIFIER])
def test_loaders_without_workers_keep_none(configured, config):
    """PyTorch raises for ``persistent_workers`` without workers."""
    options = [f'{key}.{setting}' for key in LOADERS for setting in ('num_workers=0', 'pin_memory=True')]
    cfg = configured('train.py', config, '--cfg-options', *options, 'train_dataloader.persistent_workers=True')
    assert [(cfg[key].persistent_workers, cfg[key].pin_memory) for key in LOADERS] == [(False, True)] * 3


def test_a_list_of_loaders_is_refused(configured, tmp_path):
    (tmp_path / 'own.py').write_text(f'_base_ = {CLASSIFIER!r}\nval_dataloader = [dict(num_workers=0)]\n')
    with pytest.raises(RunError, match='val_dataloader is a list: expected one. Set val_dataloader.dataset=dict'):
        configured('train.py', 'own.py')


def test_augmentation_of_the_test_wraps_the_model_and_takes_its_pipeline(configured, tmp_path):
    (tmp_path / 'with_tta.py').write_text(
        f"_base_ = '{DETECTOR}'\n"
        "tta_model = dict(type='DetTTAModel')\n"
        "tta_pipeline = [dict(type='LoadImageFromFile'), dict(type='TestTimeAug', transforms=[])]\n"
        "test_evaluator = dict(metric='bbox')\n"
    )
    cfg = configured('test.py', 'with_tta.py', 'some.pth', '--tta')
    assert cfg.model.type == 'BoxTTAModel' and cfg.model.module.type == 'MaskRCNN'
    assert [step.type for step in cfg.test_dataloader.dataset.pipeline] == ['LoadImageFromFile', 'TestTimeAug']
    assert configured('test.py', 'with_tta.py', 'some.pth').model.type == 'MaskRCNN'
    # a config without both: as upstream's tools do
    boxes = ['--cfg-options', 'test_evaluator.metric=bbox']
    for config, kind, more in ((DETECTOR, 'BoxTTAModel', boxes), (CLASSIFIER, 'AverageClsScoreTTA', [])):
        cfg = configured('test.py', config, 'some.pth', '--tta', *more)
        flips, (pack,) = cfg.test_dataloader.dataset.pipeline[-1].transforms
        assert cfg.model.type == kind and [step.prob for step in flips] == [0, 1]
        assert pack.type.startswith('Pack') and 'meta_keys' not in pack
    joined = dict(_delete_=True, type='ConcatDataset', datasets=[dict(type='A')])
    text = f"_base_ = 'with_tta.py'\ntest_dataloader = dict(dataset={joined})\n"
    (tmp_path / 'joined.py').write_text(text)
    wrapper = configured('test.py', 'joined.py', 'some.pth', '--tta').test_dataloader.dataset
    assert 'pipeline' not in wrapper and wrapper.datasets[0].pipeline[1].type == 'TestTimeAug'
    with pytest.raises(
        RunError, match=r"merges boxes only, and test_evaluator.metric=\['bbox', 'segm'\] measures masks"
    ):
        configured('test.py', DETECTOR, 'gone.pth', '--tta')  # before the weights are read


@pytest.mark.parametrize('more', ['', 'from mmseg.models import SegTTAModel\ntta_model = dict(type=SegTTAModel)\n'])
def test_augmentation_of_a_pure_python_config(configured, tmp_path, more):
    """Types stay names, so that the config of the run can be dumped."""
    (tmp_path / 'pure.py').write_text(
        'from mmengine.config import read_base\nwith read_base():\n    from .pure_base import *\n'
        'from mmpretrain.datasets import CustomDataset, LoadImageFromFile, PackInputs\n'
        'from mmpretrain.evaluation import Accuracy\nfrom mmpretrain.models import ImageClassifier\n'
        'pipeline = [dict(type=LoadImageFromFile), dict(type=PackInputs)]\nmodel = dict(type=ImageClassifier)\n'
        'test_dataloader = dict(dataset=dict(type=CustomDataset, pipeline=pipeline))\ntest_cfg = {}\n'
        'test_evaluator = dict(type=Accuracy)\n' + more
    )
    (tmp_path / 'pure_base.py').write_text("default_scope = 'mmpretrain'\n")
    cfg = configured('test.py', 'pure.py', 'some.pth', '--tta')
    cfg.dump(tmp_path / 'dumped.py')
    assert "type='mmpretrain.datasets.PackInputs'" in (tmp_path / 'dumped.py').read_text()


RESUME = ['--cfg-options', 'resume=True']
LAST = 'work/epoch_1.pth'
SOME = ['--cfg-options', 'load_from=some.pth']


@pytest.mark.parametrize(
    ('words', 'written', 'expected'),
    [
        (['--resume', 'epoch_3.pth'], 100, (True, 'epoch_3.pth')),
        (['--resume'], None, (False, None)),
        (['--resume'], 100, (True, LAST)),
        (SOME, 100, (False, 'some.pth')),
        (['--cfg-options', 'load_from='], 100, (False, None)),
        (['--resume', *SOME], None, (False, 'some.pth')),
        (['--resume', *SOME], 100, (True, LAST)),
        (RESUME, None, (False, None)),
        (RESUME, 100, (True, LAST)),
        ([*RESUME, 'load_from=some.pth'], 100, (True, 'some.pth')),
    ],
)
def test_checkpoint_that_a_training_begins_with(configured, capsys, words, written, expected):
    os.mkdir('work')
    if written:
        Path(LAST).touch()
        Path('work/last_checkpoint').write_text(LAST)
        os.utime('work/last_checkpoint', (written, written))
    cfg = configured('train.py', DETECTOR, *words)
    assert (cfg.get('resume', False), cfg.get('load_from')) == expected
    asked = words in (['--resume'], ['--resume', *SOME], RESUME)
    begins = "with the weights of 'some.pth'" if SOME[1] in words else 'from the start'
    line = f"notice: no checkpoint to resume from in 'work': beginning {begins}.\n"
    assert capsys.readouterr().err == (line if asked and not written else '')


def test_options_of_hooks_by_name_or_index(configured):
    words = ['custom_hooks.StopHook.interval=3', 'custom_hooks.3.left_out=a', 'custom_hooks.CompileHook.priority=LOW']
    hooks = {hook.type: hook for hook in configured('train.py', DETECTOR, '--cfg-options', *words).custom_hooks}
    assert (hooks['StopHook'].interval, hooks['CheckpointMatchHook'].left_out) == (3, 'a')
    assert hooks['CompileHook'].priority == 'LOW' and 'CompileHook' in hooks
    with pytest.raises(RunError, match='custom_hooks.NoHook.x: there is no such hook; custom_hooks has .*StopHook'):
        configured('train.py', DETECTOR, '--cfg-options', 'custom_hooks.NoHook.x=1')


def test_a_test_loads_its_checkpoint_and_resumes_nothing(configured):
    cfg = configured('test.py', DETECTOR, 'some.pth', '--out', 'x.pickle', *RESUME, 'load_from=other.pth')
    assert (cfg.resume, cfg.load_from) == (False, 'some.pth')


@pytest.mark.parametrize(
    ('config', 'given', 'expected'),
    [
        ('named', 'given', 'given'),
        ('named', '~/given', 'home/given'),
        ('named', None, 'home/of_the_config'),
        ('rate_0.5', None, 'work_dirs/rate_0.5'),
    ],
)
def test_the_work_dir_is_that_of_the_command_then_of_the_config_then_of_its_name(
    configured, monkeypatch, config, given, expected
):
    monkeypatch.setenv('HOME', 'home')
    own = "work_dir = '~/of_the_config'\n" if config == 'named' else ''
    Path(f'{config}.py').write_text(f'_base_ = {DETECTOR!r}\n{own}')
    assert configured('train.py', f'{config}.py', work_dir=given).work_dir == expected and Path(expected).is_dir()


def test_options_override_all_settings(configured, monkeypatch):
    monkeypatch.delenv('LOCAL_RANK')
    Path('mine').symlink_to('data')
    own = ['--cfg-options', 'val_dataloader.dataset.data_root=mine']
    cfg = configured('train.py', DETECTOR, '--local_rank', 3, *own)
    assert (cfg.train_dataloader.dataset.data_root, cfg.val_dataloader.dataset.data_root) == ('data', 'mine')
    assert os.environ['LOCAL_RANK'] == '3'
    configured('train.py', DETECTOR, '--local-rank', 4)
    assert os.environ['LOCAL_RANK'] == '3'  # set by the launcher


SHOW = 'default_hooks.visualization.show=True'


@pytest.mark.parametrize(
    ('config', 'words', 'line'),
    [
        (SEGMENTOR, '--save-json x.json', "--save-json: .* is no detector .default_scope='mmseg'.. Use --save-labels."),
        (DETECTOR, '--save-labels x', '--save-labels: .* is no segmentor .* Use --save-json or --save-txt.'),
        (CLASSIFIER, '--save-txt x', "--save-txt: .* is no detector .default_scope='mmpretrain'..$"),
        (DETECTOR, '--save-json x.txt', "--save-json='x.txt': expected a name that ends with .json."),
        (DETECTOR, '--save-json data', "--save-json='data': expected"),
        (DETECTOR, '--save-txt some.pth', "--save-txt 'some.pth' cannot be written"),
        (DETECTOR, '--save-conf', '--save-conf: --save-txt is missing.'),
        (DETECTOR, '--show-dir x --cfg-options visualizer=None', '--show, --show-dir: .* has no visualizer'),
        (DETECTOR, '--show', '--show: there is no display'),
        (DETECTOR, f'--cfg-options default_hooks.visualization.draw=True {SHOW}', f'{SHOW}: there is no display'),
    ],
)
def test_files_of_predictions_are_for_their_task(configured, monkeypatch, config, words, line):
    for name in ('DISPLAY', 'WAYLAND_DISPLAY'):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RunError, match=line):
        configured('test.py', config, 'some.pth', *words.split())


@pytest.mark.parametrize('words', [[], ['resume=True'], ['--resume']])
def test_the_schedule_follows_the_command_line(configured, capsys, words):
    cfg = configured('train.py', DETECTOR, '--cfg-options', 'train_cfg.max_epochs=10', *words)
    assert ('A resumed run keeps the schedule of its checkpoint.' in capsys.readouterr().err) == bool(words)
    assert (cfg.param_scheduler[1].T_max, cfg.param_scheduler[1].end, cfg.param_scheduler[0].end) == (10, 10, 50)


def test_arguments_repeat_lists_of_the_package():
    """Tools that parse their arguments before PyTorch is imported write these lists out."""

    def options(name):
        with mock.patch.object(argparse.ArgumentParser, 'parse_args', lambda self: self):
            parser = runpy.run_path(str(TOOLS / name))['parse_args']()
        return parser, {action.dest: action for action in parser._actions}

    parser, export = options('export.py')
    assert export['format'].choices == list(FORMATS)
    assert f'(--format {BOX_FORMATS})' in parser.description and f'{SMALLEST}x{SMALLEST}' in export['dynamic'].help
    _, inspect = options('analysis_tools/inspect_attention.py')
    assert inspect['what'].choices == (*inspecting.MEASURES, 'maps')
    assert inspect['num_queries'].default == inspecting.measure_block.__defaults__[1]
