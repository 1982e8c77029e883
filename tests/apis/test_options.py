# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What the options of tools/train.py and tools/test.py change in the config that runs."""

import copy
import functools
import json
import os
import pickle
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from mmengine.config import Config
from mmengine.optim import AmpOptimWrapper, OptimWrapper

from mmlinattn.apis import configs, running
from mmlinattn.checkpoints import CheckpointError
from mmlinattn.utils.errors import RunError

pytest.importorskip('mmdet')
ROOT = Path(__file__).resolve().parents[2]
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
        monkeypatch.setattr(configs, 'read_config', lambda path: copy.deepcopy(read_once(path)))
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
    monkeypatch.setattr(running, 'get_device', lambda: 'cuda')
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
        for module in (configs, running):
            monkeypatch.setattr(module, 'get_device', lambda device=device: device)
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
        return configs.load_config(SimpleNamespace(launcher='none', local_rank=0, **args)).work_dir

    assert work_dir('named.py', 'given') == 'given'
    assert work_dir('named.py') == 'of_the_config'
    assert work_dir('plain.py') == 'work_dirs/plain'
    (tmp_path / 'rate_0.5.py').write_text('')
    assert work_dir('rate_0.5.py') == 'work_dirs/rate_0.5'


AMP = dict(type='AmpOptimWrapper', loss_scale='dynamic', dtype='bfloat16', use_fsdp=False)


@pytest.mark.parametrize(
    'wrapper',
    [
        AMP,
        dict(AMP, type='mmengine.AmpOptimWrapper'),
        dict(AMP, type='mmengine.optim.AmpOptimWrapper'),
        dict(AMP, type=AmpOptimWrapper),  # as configs in pure Python have it
        dict(type='ApexOptimWrapper', opt_level='O1', loss_scale='dynamic', num_losses=2),
    ],
    ids=lambda wrapper: str(wrapper['type']),
)
@pytest.mark.parametrize('device, why', [('cpu', 'no accelerator'), ('mps', 'mps is no device of AmpOptimWrapper')])
def test_mixed_precision_leaves_nothing_behind_where_there_is_none(monkeypatch, capsys, wrapper, device, why):
    """None of its arguments, which the plain wrapper does not take."""
    monkeypatch.setattr(running, 'get_device', lambda: device)
    for is_asked in (False, True):
        cfg = Config(dict(optim_wrapper=dict(wrapper, clip_grad=None)))
        running.drop_amp_on_cpu(cfg, is_asked)
        assert cfg.optim_wrapper == dict(type='OptimWrapper', clip_grad=None)
        assert capsys.readouterr().err == f'notice: {why}: mixed precision is off, training in fp32.\n'


@pytest.mark.parametrize('plain', [OptimWrapper, 'mmengine.OptimWrapper', 'mmengine.optim.OptimWrapper'])
def test_mixed_precision_of_wrappers_by_class_and_path(monkeypatch, plain):
    monkeypatch.setattr(running, 'get_device', lambda: 'cuda')
    cfg = Config(dict(optim_wrapper=dict(type=plain)))
    running.drop_amp_on_cpu(cfg, is_asked=True)
    assert cfg.optim_wrapper == dict(type='AmpOptimWrapper', loss_scale='dynamic')
    cfg.optim_wrapper.type = AmpOptimWrapper
    running.drop_amp_on_cpu(cfg, is_asked=True)
    assert cfg.optim_wrapper.type is AmpOptimWrapper


def test_drawings_of_each_task(configured, tmp_path, monkeypatch):
    """Each of the three projects spells it its own way, and MMDetection puts relative folders into the work_dir."""
    options = ['--show-dir', 'shown', '--interval', 3, '--wait-time', 0.5]
    monkeypatch.chdir(tmp_path)
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
    """Tests five images in batches of two."""

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
    # each hook of several draws its own
    both = [visualization_hook('DetVisualizationHook') for _ in range(2)]
    monkeypatch.setitem(functions, 'build_runner', lambda cfg, compiles: FakeRunner([hook for hook, _ in both]))
    functions['main']()
    assert [drawn for _, drawn in both] == [chosen, chosen]


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
    for model in ('CascadeRCNN', 'RetinaNet', 'DetTTAModel'):  # whatever the detector, augmented or not
        cfg = Config(dict(default_scope='mmdet', model=dict(type=model)))
        assert type(functions['dump_metric'](cfg, 'p.pkl')).__name__ == 'DumpDetResults'


def test_figures_are_written_by_one_process_and_said_to_be_drawn(tool, tmp_path, monkeypatch, capsys):
    runner = FakeRunner([])
    runner.rank = 1
    out = tmp_path / 'm.json'
    functions = tool('test.py', SEGMENTOR, 'some.pth', '--out', out, '--out-item', 'metrics', '--show-dir', 'shown')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(functions, 'build_runner', lambda cfg, compiles: runner)
    functions['main']()
    assert not out.exists()
    assert capsys.readouterr().err == f'notice: images are in {tmp_path / "shown"}\n'
    functions = tool('test.py', SEGMENTOR, 'some.pth', '--out', tmp_path / 'p.pkl')
    monkeypatch.setitem(functions, 'build_runner', lambda cfg, compiles: runner)
    functions['main']()
    (metric,) = runner.test_evaluator.metrics
    assert type(metric).__name__ == 'DumpResults' and metric.out_file_path == str(tmp_path / 'p.pkl')
    assert capsys.readouterr().err == ''


@pytest.mark.parametrize(
    'options, line',
    [
        (['--out', 'x.txt'], "--out 'x.txt' has to end with .pkl or .pickle."),
        (['--out', 'x.json'], "--out 'x.json' has to end with .pkl or .pickle."),
        (['--out', 'x', '--out-item', 'metrics'], "--out 'x' has to end with .pkl or .pickle or .json."),
        (['--interval', -1], '--interval -1 has to be at least 1.'),
        (['--tta', '--cfg-options', 'tta_model.type=TTA'], f'--tta: {DETECTOR} has no tta_pipeline.'),
    ],
)
def test_options_of_the_test_that_cannot_be(configured, options, line):
    with pytest.raises(RunError) as found:
        configured('test.py', DETECTOR, 'some.pth', *options)
    assert str(found.value) == line


def test_a_test_loads_its_checkpoint_and_resumes_nothing(configured):
    options = ['--cfg-options', 'resume=True', 'load_from=other.pth']
    cfg = configured('test.py', DETECTOR, 'some.pth', '--out', 'x.pickle', *options)
    assert (cfg.resume, cfg.load_from) == (False, 'some.pth')


@pytest.mark.parametrize(
    'scope, kind',
    [('mmdet', 'DetVisualizationHook'), ('mmseg', 'SegVisualizationHook'), ('mmpretrain', 'VisualizationHook')],
)
def test_drawings_of_a_config_without_a_hook_for_them(tool, scope, kind):
    draw = tool('test.py', DETECTOR, 'some.pth')['draw_predictions']
    cfg = Config(dict(default_scope=scope, visualizer=dict(type='Any')))
    draw(cfg, SimpleNamespace(show=True, show_dir=None, interval=2, wait_time=1.5))
    hook = cfg.default_hooks.visualization
    assert (hook.type, hook.show, hook.wait_time) == (kind, True, 1.5)
    assert hook.get('test_out_dir') is None and hook.get('out_dir') is None and cfg.visualizer == dict(type='Any')


def test_what_the_tools_write_in_their_help(tool, capsys):
    """Defaults of both, of which the rest of these tests sees only some."""
    args = tool('test.py', DETECTOR, 'some.pth')['parse_args']()
    found = {key: value for key, value in vars(args).items() if key not in ('config', 'checkpoint', 'work_dir')}
    common = dict(data_root=None, cfg_options=None, compile=False, no_pin_memory=False, launcher='none', local_rank=0)
    testing = dict(out=None, out_item='pred', show=False, show_dir=None, interval=1, wait_time=2, tta=False, amp=False)
    assert found == {**common, **testing}
    args = tool('train.py', DETECTOR)['parse_args']()
    found = {key: value for key, value in vars(args).items() if key not in ('config', 'work_dir')}
    names = ('amp', 'auto_scale_lr', 'no_validate', 'no_persistent_workers')
    assert found == {**common, **dict.fromkeys(names, False), 'resume': None}
    for launcher in ('pytorch', 'slurm', 'mpi'):
        assert tool('train.py', DETECTOR, '--launcher', launcher)['parse_args']().launcher == launcher
    for name, missing in (('train.py', 'config'), ('test.py', 'config, checkpoint')):
        with pytest.raises(SystemExit):
            tool(name)['parse_args']()
        assert capsys.readouterr().err.endswith(f'arguments are required: {missing}\n')
    for option, names in (('--launcher', 'none pytorch slurm mpi'), ('--out-item', 'metrics pred')):
        with pytest.raises(SystemExit):
            tool('test.py', DETECTOR, 'some.pth', option, 'other')['parse_args']()
        line = capsys.readouterr().err.splitlines()[-1]
        assert f"argument {option}: invalid choice: 'other'" in line
        assert re.findall(r'\w+', line.partition('choose from')[2]) == names.split()


@pytest.mark.parametrize(
    ('name', 'words', 'needs'),
    [
        ('train.py', [], ('train_dataloader', 'train_cfg', 'optim_wrapper')),
        ('test.py', ['some.pth'], ('test_dataloader', 'test_cfg', 'test_evaluator')),
    ],
)
def test_what_is_looked_at_in_a_config(tool, monkeypatch, name, words, needs):
    functions, seen = tool(name, DETECTOR, *words), []
    monkeypatch.setitem(functions, 'require', lambda cfg, *args: seen.append((cfg, *args)))
    monkeypatch.setitem(functions, 'check_match', seen.append)
    cfg = functions['configure'](functions['parse_args']())
    (required, *given), matched = seen
    assert required is matched is cfg and given == [DETECTOR, 'model', *needs]


def test_a_config_may_ask_for_resuming(configured, tool, tmp_path, monkeypatch, capsys):
    """As may torchrun, which started the process anew."""
    work, options = str(tmp_path / 'work'), ['--cfg-options', 'resume=True']
    cfg = configured('train.py', DETECTOR, *options)
    assert (cfg.resume, cfg.load_from) == (False, None)
    line = f'notice: no checkpoint to resume from in {work!r}: beginning from the start.\n'
    assert capsys.readouterr().err == line
    last = tmp_path / 'work' / 'epoch_1.pth'
    last.touch()
    (last.parent / 'last_checkpoint').write_text(str(last))
    cfg = configured('train.py', DETECTOR, *options)
    assert (cfg.resume, cfg.load_from) == (True, str(last))
    cfg = configured('train.py', DETECTOR, *options, 'load_from=mine.pth')
    assert (cfg.resume, cfg.load_from) == (True, 'mine.pth')
    assert capsys.readouterr().err == ''
    for is_new, given, expected in (
        (True, [], (True, str(last))),
        (True, ['--resume', 'epoch_3.pth'], (True, str(last))),  # what it left since is further on
        (False, [], (False, None)),
        (False, ['--resume', 'epoch_3.pth'], (True, 'epoch_3.pth')),
    ):
        functions = tool('train.py', DETECTOR, *given)
        monkeypatch.setitem(functions, 'was_restarted', lambda folder, is_new=is_new: is_new and folder == work)
        cfg = functions['configure'](functions['parse_args']())
        assert (cfg.get('resume', False), cfg.get('load_from')) == expected


def test_options_have_the_last_word(configured, monkeypatch):
    monkeypatch.setenv('LOCAL_RANK', '')
    monkeypatch.delenv('LOCAL_RANK')
    own = ['--cfg-options', 'val_dataloader.dataset.data_root=mine']
    cfg = configured('train.py', DETECTOR, '--data-root', 'given', '--launcher', 'mpi', '--local_rank', 3, *own)
    assert (cfg.train_dataloader.dataset.data_root, cfg.val_dataloader.dataset.data_root) == ('given', 'mine')
    assert cfg.launcher == 'mpi' and os.environ['LOCAL_RANK'] == '3'
    configured('train.py', DETECTOR, '--local-rank', 4)
    assert os.environ['LOCAL_RANK'] == '3'  # of the launcher


def test_settings_of_a_classifier_s_own_stay():
    own = dict(collate_fn=dict(type='pseudo_collate'), pin_memory='mine', num_workers=2, persistent_workers=False)
    cfg = Config(dict(train_dataloader=own, val_dataloader=dict(batch_size=2), test_dataloader=dict(num_workers=0)))
    configs._set_mmpretrain_loader_defaults(cfg)
    assert cfg.train_dataloader == own
    for loader in (cfg.val_dataloader, cfg.test_dataloader):
        assert 'persistent_workers' not in loader  # PyTorch refuses it without workers, and has none by default
    assert cfg.test_dataloader.collate_fn == dict(type='default_collate')


def test_data_roots_of_wrapped_data_and_of_evaluators():
    leaf = dict(type='CocoDataset', data_root='data/coco')
    other = dict(type='CocoDataset', data_root='data/')
    cfg = Config(
        dict(
            test_dataloader=dict(dataset=dict(type='ConcatDataset', datasets=[leaf, other, dict(leaf, data_root='')])),
            test_evaluator=[
                dict(type='A', ann_file='data/coco/a.json', proposals='data/a.pkl', metric='bbox', count=3),
                dict(type='B', ann_file='data/coco_2/a.json', format='elsewhere/data/coco/a.json'),
            ],
            train_dataloader=dict(dataset=dict(type='ConcatDataset', datasets=(leaf, leaf))),
            val_dataloader=dict(dataset=dict(leaf, settings=dict(data_root='no data set'))),
            val_evaluator=dict(type='C', ann_file='data/coco/a.json', seg_prefix='data/coco', gt_prefix='data/coco/'),
        )
    )
    configs.set_data_root(cfg, 'mine')
    assert [child.data_root for child in cfg.test_dataloader.dataset.datasets] == ['mine'] * 3
    assert [child.data_root for child in cfg.train_dataloader.dataset.datasets] == ['mine'] * 2
    assert cfg.val_dataloader.dataset.settings.data_root == 'no data set'
    assert cfg.test_evaluator[0] == dict(
        type='A', ann_file='mine/a.json', proposals='mine/a.pkl', metric='bbox', count=3
    )
    # a folder beside the root, of which only the shorter one is part
    assert cfg.test_evaluator[1] == dict(type='B', ann_file='mine/coco_2/a.json', format='elsewhere/data/coco/a.json')
    assert cfg.val_evaluator == dict(type='C', ann_file='mine/a.json', seg_prefix='mine/', gt_prefix='mine/')


@pytest.mark.parametrize('root', ['data/coco/', './data/coco', 'data/coco'])
@pytest.mark.parametrize('dot', ['', './'])
def test_data_roots_of_evaluators_in_others_and_of_lists_of_files(root, dot):
    """And of names that begin with the folder one is in. Roots of the evaluators are those of any data set."""
    evaluator = dict(
        type='MultiDatasetsEvaluator',
        metrics=[dict(type='CocoMetric', ann_file=f'{dot}data/coco/a.json'), dict(type='B', ann_file='data/b.json')],
        files=[f'{dot}data/coco/a.json', 3, (f'{dot}data/coco/b.json',)],
        dataset_prefixes=['data', 'coco'],
    )
    cfg = Config(
        dict(
            val_dataloader=dict(dataset=dict(type='CocoDataset', data_root=None)),
            test_dataloader=dict(dataset=dict(type='CocoDataset', data_root=root)),
            val_evaluator=evaluator,
            test_evaluator=[evaluator],
        )
    )
    configs.set_data_root(cfg, 'data/coco/mine')
    assert cfg.val_dataloader.dataset.data_root == cfg.test_dataloader.dataset.data_root == 'data/coco/mine'
    for found in (cfg.val_evaluator, cfg.test_evaluator[0]):
        assert [metric.ann_file for metric in found.metrics] == ['data/coco/mine/a.json', 'data/b.json']
        assert found.files == ['data/coco/mine/a.json', 3, ('data/coco/mine/b.json',)]
        assert found.dataset_prefixes == ['data', 'coco']


def test_data_sets_that_have_no_root_get_one_unless_others_have_it():
    bare, rooted = dict(type='CustomDataset', data_prefix='val'), dict(type='CustomDataset', data_root='data')
    wrapped = dict(type='RepeatDataset', times=2, dataset=dict(type='ConcatDataset', datasets=[bare, bare]))
    cfg = Config(dict(train_dataloader=dict(dataset=wrapped), test_dataloader=dict(dataset=bare)))
    configs.set_data_root(cfg, 'mine')
    leaves = (*cfg.train_dataloader.dataset.dataset.datasets, cfg.test_dataloader.dataset)
    assert [leaf.data_root for leaf in leaves] == ['mine'] * 3
    assert 'data_root' not in cfg.train_dataloader.dataset and 'data_root' not in cfg.train_dataloader.dataset.dataset
    cfg = Config(dict(train_dataloader=dict(dataset=bare), test_dataloader=dict(dataset=rooted)))
    configs.set_data_root(cfg, 'mine')
    assert 'data_root' not in cfg.train_dataloader.dataset and cfg.test_dataloader.dataset.data_root == 'mine'


def test_checkpoints_by_path_and_by_address(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    (tmp_path / 'a.pth').touch()
    os.mkfifo(tmp_path / 'pipe')
    for path in ('~/a.pth', str(tmp_path / 'a.pth'), 'https://example.org/a.pth', 'mmlinattn://ravlt_t'):
        assert configs.check_checkpoint(path, '--resume') == path
    with pytest.raises(RunError) as found:
        configs.check_checkpoint('~/pipe', '--resume')
    assert str(found.value) == "--resume '~/pipe': a pipe or a device, not a file."
    with pytest.raises(CheckpointError, match='no published checkpoint is called'):
        configs.check_checkpoint('mmlinattn://ravlt', 'checkpoint')


def test_mixed_precision_that_the_config_has_already(monkeypatch, capsys):
    monkeypatch.setattr(running, 'get_device', lambda: 'cuda')
    amp = dict(type='AmpOptimWrapper', dtype='bfloat16')
    cfg = Config(dict(optim_wrapper=amp))
    for is_asked in (True, False):
        running.drop_amp_on_cpu(cfg, is_asked)
        assert cfg.optim_wrapper == amp
    cfg = Config(dict(optim_wrapper=dict(type='OptimWrapper', loss_scale=512.0)))
    running.drop_amp_on_cpu(cfg, is_asked=False)
    assert cfg.optim_wrapper.type == 'OptimWrapper'
    running.drop_amp_on_cpu(cfg, is_asked=True)
    assert cfg.optim_wrapper == dict(type='AmpOptimWrapper', loss_scale=512.0)
    assert capsys.readouterr().err == ''


def test_processes_join_before_the_runner_is_built(monkeypatch):
    calls, cfg = [], Config(dict(launcher='none'))
    monkeypatch.setattr(running, 'prepare_distributed', lambda given: calls.append(('join', given is cfg)))
    monkeypatch.setattr(running.Runner, 'from_cfg', lambda given: calls.append(('build', given is cfg)))
    running.build_runner(cfg)
    assert calls == [('join', True), ('build', True)]
    assert type(Config(dict(a=dict(b=1))).a).__name__ == 'ConfigDict'


PIP = dict(
    mmdet='"mmdet>=3.3,<3.4"',
    mmseg='"mmsegmentation>=1.2.2,<1.3" ftfy regex',  # which it needs and does not install
    mmpretrain='"mmpretrain>=1.2,<1.3"',
)


@pytest.mark.parametrize('scope', PIP)
@pytest.mark.parametrize('how', ['scope', 'module', 'distribution'])
def test_what_is_missing_is_named_as_pip_knows_it(tmp_path, monkeypatch, scope, how):
    config = str(tmp_path / 'config.py')
    Path(config).write_text(f"default_scope = '{scope}'\n")
    if how == 'scope':
        monkeypatch.setattr(configs, 'find_spec', lambda name: None)
    else:
        distribution = PIP[scope].split('>')[0].strip('"')
        error = ModuleNotFoundError(name=scope) if how == 'module' else ModuleNotFoundError(f'{distribution} is away')

        def fails(path):
            raise error

        monkeypatch.setattr(configs.Config, 'fromfile', fails)
    with pytest.raises(RunError) as found:
        configs.read_config(config)
    assert str(found.value) == (
        f'{config} needs {scope}, which is not installed in {sys.executable}: pip install {PIP[scope]}'
    )


@pytest.mark.parametrize('name', ['nobody_has_this', 'mmsegment'])  # the latter is a part of a name above
def test_other_modules_that_a_config_lacks(tmp_path, name):
    config = tmp_path / 'config.py'
    config.write_text(f"__import__('{name}')\n")
    with pytest.raises(RunError) as found:
        configs.read_config(str(config))
    assert str(found.value) == f"config {str(config)!r} cannot be read: No module named '{name}'"
