# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What the tools do between their arguments and the first batch."""

import os
import time

import pytest
import torch
from engine_toys import ToyDataset, ToyModel, make_runner
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper
from mmengine.registry import DATASETS, MODELS, Registry
from torch import nn

from mmlinattn.engine import RunError, cli
from mmlinattn.engine.checkpoint_match import CheckpointMatchHook
from mmlinattn.engine.class_names import class_names, num_classes
from mmlinattn.utils.errors import CheckpointError


@MODELS.register_module(force=True)
class ModelWithHead(ToyModel):
    """ToyModel with a head of two classes, and errors of its own."""

    def __init__(self, error=None, **kwargs):
        super().__init__(**kwargs)
        self.head = nn.Identity()
        self.head.num_classes = 2
        self.error = error

    def forward(self, inputs, data_samples=None, mode='loss'):
        if self.error:
            raise KeyError(self.error)
        return super().forward(inputs, data_samples, mode)


@DATASETS.register_module(force=True)
class LabelledDataset(ToyDataset):
    """ToyDataset whose last sample is of the fourth class."""

    METAINFO = dict(classes=('a', 'b', 'c', 'd'))

    def load_data_list(self):
        return [dict(entry, gt_label=3 * (i == self.size - 1)) for i, entry in enumerate(super().load_data_list())]


def test_files_are_tried_before_the_work(tmp_path):
    """In folders that are made for them; what is there stays."""
    new, old = tmp_path / 'a' / 'b' / 'new.md', tmp_path / 'old.md'
    old.write_text('old')
    cli.check_out_file(new)
    cli.check_out_file(str(old))
    assert old.read_text() == 'old' and new.parent.is_dir() and not any(new.parent.iterdir())
    for out, reason in (
        (tmp_path / 'a', 'Is a directory'),
        (old / 'c.md', 'File exists'),
        (old / 'c' / 'd', 'Not a d'),
    ):
        with pytest.raises(RunError) as found:
            cli.check_out_file(out)
        assert str(found.value).startswith(f'--out {str(out)!r} cannot be written: {reason}')
    with pytest.raises(RunError, match="--out 'a' cannot be written: why.$"), cli.writing('a'):
        raise PermissionError(1, 'why')
    with pytest.raises(KeyError), cli.writing('a'):
        raise KeyError


@pytest.mark.parametrize('exists', [False, True])
def test_files_in_a_place_without_rights(exists, tmp_path, monkeypatch):
    """As another user sees them, where the tests run as root."""

    def refused(*_, **__):
        raise PermissionError(13, 'Permission denied')

    out = tmp_path / 'a.md'
    if exists:
        out.touch()
    monkeypatch.setattr(cli.tempfile if not exists else type(out), 'TemporaryFile' if not exists else 'open', refused)
    with pytest.raises(RunError) as found:
        cli.check_out_file(out)
    assert str(found.value) == f'--out {str(out)!r} cannot be written: Permission denied.'


def test_labels_are_looked_at_before_the_first_batch(tmp_path):
    runner = make_runner(
        tmp_path, [], model=dict(type='ModelWithHead'), loader=dict(dataset=dict(type='LabelledDataset'))
    )
    with pytest.raises(RunError, match=r'num_classes = 2 .* folder/11.jpg has label 3 \(d\)'):
        with cli.explained_setup('toy.py') as watch:
            watch(runner)
            runner.train()
    assert runner.iter == 0


def test_errors_from_the_first_batch_on_stay_as_they_are(tmp_path):
    runner = make_runner(tmp_path, [], model=dict(type='ModelWithHead', error='not in the batch'))
    with pytest.raises(KeyError, match='not in the batch'), cli.explained_setup('toy.py') as watch:
        watch(runner)
        runner.train()


@pytest.mark.parametrize('stage', ['before_run', 'before_train', 'before_train_epoch'])
def test_errors_of_hooks_before_the_first_batch_are_one_line(tmp_path, monkeypatch, stage):
    monkeypatch.delenv('MMLINATTN_TRACEBACK', raising=False)

    def fails(runner):
        raise ValueError('of a hook')

    runner = make_runner(tmp_path, [])
    hook = Hook()
    setattr(hook, stage, fails)
    runner.register_hook(hook, priority='LOWEST')
    with pytest.raises(RunError) as found, cli.explained_setup('toy.py') as watch:
        watch(runner)
        runner.train()
    assert str(found.value) == 'toy.py cannot be run: ValueError: of a hook (MMLINATTN_TRACEBACK=1 shows where)'


@pytest.mark.parametrize(
    'error, text',
    [
        (KeyError('LinearSwn is not in the registry'), 'KeyError: LinearSwn is not in the registry'),
        (KeyError(), 'KeyError ('),
        (AssertionError(), 'AssertionError ('),
        (TypeError('no such argument'), 'TypeError: no such argument'),
        (FileNotFoundError(2, 'No such file', 'a.json'), "FileNotFoundError: [Errno 2] No such file: 'a.json'"),
    ],
)
def test_errors_of_the_setting_up_are_one_line(monkeypatch, error, text):
    monkeypatch.delenv('MMLINATTN_TRACEBACK', raising=False)
    with pytest.raises(RunError) as found, cli.explained_setup('toy.py'):
        raise error
    message = str(found.value)
    assert message.startswith(f'toy.py cannot be run: {text}')
    assert message.endswith(' (MMLINATTN_TRACEBACK=1 shows where)')
    assert found.value.__cause__ is error


def test_errors_of_the_setting_up_name_the_class_that_failed(monkeypatch):
    """The innermost, as others only have it as a part; a class that nobody knows is in MMEngine's own message."""
    monkeypatch.delenv('MMLINATTN_TRACEBACK', raising=False)
    registry = Registry('part')

    @registry.register_module()
    class Inner:
        def __init__(self, text):
            raise ValueError(*text)

    @registry.register_module()
    class Outer:
        def __init__(self, part):
            registry.build(part)

    def line(part):
        with pytest.raises(RunError) as found, cli.explained_setup('toy.py'):
            registry.build(dict(type='Outer', part=part))
        return str(found.value).partition(' (MMLINATTN')[0]

    assert line(dict(type='Inner', text=['bad thing'])) == 'toy.py cannot be run: Inner: ValueError: bad thing'
    assert line(dict(type='Inner', text=[])) == 'toy.py cannot be run: Inner: ValueError'
    assert line(dict(type='Inn')).startswith('toy.py cannot be run: Outer: KeyError: Inn is not in the ')


def test_errors_of_the_setting_up_are_left_alone_where_that_is_asked_for(monkeypatch):
    monkeypatch.setenv('MMLINATTN_TRACEBACK', '1')
    with pytest.raises(TypeError), cli.explained_setup('toy.py'):
        raise TypeError
    monkeypatch.setenv('MMLINATTN_TRACEBACK', '0')
    with pytest.raises(RunError), cli.explained_setup('toy.py'):
        raise TypeError


@pytest.mark.parametrize('error', [RunError('of ours'), CheckpointError('of ours')])
def test_lines_that_are_ready_stay(error):
    with pytest.raises(type(error), match='^of ours$'), cli.explained_setup('toy.py'):
        raise error


def test_what_a_config_has_to_have():
    cfg = Config(dict(model=dict(), train_dataloader=None, val_dataloader=dict(batch_size=2)))
    cli.require(cfg, 'toy.py', 'model', 'val_dataloader')
    with pytest.raises(RunError, match=r'^toy\.py has no train_dataloader, no train_cfg\.$'):
        cli.require(cfg, 'toy.py', 'model', 'train_dataloader', 'train_cfg')


@pytest.mark.parametrize('size', [0, -1, 1.0, '2', None, True])
@pytest.mark.parametrize('key', ['train_dataloader', 'val_dataloader', 'test_dataloader'])
def test_batch_sizes(key, size):
    with pytest.raises(RunError, match=rf'{key}\.batch_size = .* has to be an integer from 1 up'):
        cli.require(Config({key: dict(batch_size=size)}), 'toy.py')
    cli.require(Config({key: dict(batch_size=1)}), 'toy.py')


def test_weights_are_compared_with_the_model_in_every_config():
    cfg = Config(dict())
    cli.check_match(cfg)
    assert cfg.custom_hooks == [dict(type='CheckpointMatchHook')]
    cli.check_match(cfg)
    assert len(cfg.custom_hooks) == 1
    cfg = Config(dict(custom_hooks=[dict(type='EMAHook')]))
    cli.check_match(cfg)
    cli.check_match(cfg)  # one is enough, wherever it stands
    assert [hook.type for hook in cfg.custom_hooks] == ['EMAHook', 'CheckpointMatchHook']
    for kind in ('CheckpointMatchHook', 'mmengine.CheckpointMatchHook', CheckpointMatchHook):
        cfg = Config(dict(custom_hooks=[dict(type=kind, left_out='head'), dict(type='EMAHook')]))
        cli.check_match(cfg)
        assert len(cfg.custom_hooks) == 2


def test_a_process_that_was_started_anew_goes_on(tmp_path, monkeypatch):
    pointer, now = tmp_path / 'last_checkpoint', time.time()
    for name in ('TORCHELASTIC_RESTART_COUNT', 'MMLINATTN_LAUNCHED'):
        monkeypatch.delenv(name, raising=False)
    pointer.write_text('epoch_1.pth')
    assert not cli.was_restarted(str(tmp_path))
    monkeypatch.setenv('MMLINATTN_LAUNCHED', str(now - 60))
    assert not cli.was_restarted(str(tmp_path))
    monkeypatch.setenv('TORCHELASTIC_RESTART_COUNT', '0')
    assert not cli.was_restarted(str(tmp_path))
    monkeypatch.setenv('TORCHELASTIC_RESTART_COUNT', '1')
    assert cli.was_restarted(str(tmp_path))
    os.utime(pointer, (now - 60.9, now - 60.9))  # file systems may round to a second
    assert cli.was_restarted(str(tmp_path))
    os.utime(pointer, (now - 61.1, now - 61.1))  # of a run before
    assert not cli.was_restarted(str(tmp_path))
    monkeypatch.delenv('MMLINATTN_LAUNCHED')
    assert not cli.was_restarted(str(tmp_path))
    monkeypatch.setenv('MMLINATTN_LAUNCHED', str(now - 60))
    pointer.unlink()
    assert not cli.was_restarted(str(tmp_path))


def test_notices_come_from_one_process_of_a_machine(monkeypatch, capsys):
    monkeypatch.delenv('LOCAL_RANK', raising=False)
    cli.notice('alone')
    monkeypatch.setenv('LOCAL_RANK', '0')
    cli.notice('first')
    monkeypatch.setenv('LOCAL_RANK', '1')
    cli.notice('second')
    assert capsys.readouterr().err == 'notice: alone\nnotice: first\n'


def test_mixed_precision_of_another_wrapper(monkeypatch, capsys):
    monkeypatch.setattr(cli, 'get_device', lambda: 'cuda')
    cfg = Config(dict(optim_wrapper=dict(type='ApexOptimWrapper')))
    cli.drop_amp_on_cpu(cfg, is_asked=False)
    with pytest.raises(RunError, match="--amp: optim_wrapper.type is 'ApexOptimWrapper'; only 'OptimWrapper' can"):
        cli.drop_amp_on_cpu(cfg, is_asked=True)
    cli.drop_amp_on_cpu(Config(dict()), is_asked=True)  # a config that does not train
    monkeypatch.setattr(cli, 'get_device', lambda: 'cpu')
    cfg = Config(dict(optim_wrapper=dict(optimizer=dict(type='SGD'))))
    cli.drop_amp_on_cpu(cfg, is_asked=False)
    assert cfg.optim_wrapper == dict(optimizer=dict(type='SGD')) and capsys.readouterr().err == ''


def test_the_runner_is_the_one_of_the_config(tmp_path):
    data = dict(dataset=dict(type='ToyDataset'), sampler=dict(type='DefaultSampler'), batch_size=4, num_workers=0)
    cfg = Config(
        dict(
            model=dict(type='ToyModel'),
            train_dataloader=data,
            train_cfg=dict(by_epoch=True, max_epochs=1),
            optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1)),
            work_dir=str(tmp_path),
            default_scope='mmengine',
            launcher='none',
            experiment_name=str(tmp_path),
            log_level='ERROR',
        )
    )
    runner = cli.build_runner(cfg)
    assert type(runner).__name__ == 'Runner' and isinstance(runner.model, ToyModel)
    runner.train()
    assert isinstance(runner.optim_wrapper, OptimWrapper) and runner.iter == 3
    cfg.experiment_name += ' again'
    with pytest.raises(RunError, match='--compile'):
        cli.build_runner(cfg, compiles=True)
    cfg.runner_type = 'NoSuchRunner'
    with pytest.raises(KeyError, match='NoSuchRunner'):
        cli.build_runner(cfg)


NAMES = ('cat', 'dog')


@pytest.mark.parametrize(
    'model, expected',
    [
        (dict(bbox_head=dict(num_classes=2)), 2),
        (dict(decode_head=dict(num_classes=3), auxiliary_head=dict(num_classes=4)), 3),
        (dict(decode_head=[dict(num_classes=1), dict(num_classes=5)]), 5),
        (dict(head=dict(num_classes=6)), 6),
        (dict(rpn_head=dict(num_classes=1), roi_head=dict(bbox_head=dict(num_classes=7))), 7),
        (dict(roi_head=dict(bbox_head=[dict(num_classes=8), dict(num_classes=9)])), 9),
        (dict(backbone=dict()), 0),
        (dict(head=dict()), 0),
    ],
)
def test_number_of_classes_of_a_config(model, expected):
    assert num_classes(Config(dict(model=model))) == expected


def test_class_names_fit_the_head_or_are_not_given():
    cfg = Config(
        dict(
            default_scope='mmengine',
            model=dict(head=dict(num_classes=2)),
            test_dataloader=dict(dataset=dict(type='RepeatDataset', dataset=dict(metainfo=dict(classes=NAMES)))),
        )
    )
    assert class_names(cfg) == list(NAMES)
    assert class_names(cfg, dict(CLASSES=('one', 'two'))) == ['one', 'two']
    assert class_names(cfg, dict(dataset_meta=dict(CLASSES=('one', 'two')), CLASSES=('a', 'b'))) == ['one', 'two']
    assert class_names(cfg, dict(dataset_meta=dict(classes=('one', 'two', 'three')))) == list(NAMES)
    assert class_names(cfg, 'no dictionary') == list(NAMES)
    cfg.model.head.num_classes = 3
    assert class_names(cfg) is None
    cfg.model.head.num_classes = 0  # of a head that does not say
    assert class_names(cfg) == list(NAMES)
    cfg.model.head.num_classes = 4
    cfg.test_dataloader.dataset = dict(
        type='ConcatDataset', datasets=[dict(type='LabelledDataset'), dict(metainfo=dict(classes=NAMES))]
    )
    assert class_names(cfg) == ['a', 'b', 'c', 'd']
    cfg.test_dataloader.dataset.datasets[0].type = LabelledDataset
    assert class_names(cfg) == ['a', 'b', 'c', 'd']
    cfg.test_dataloader.dataset.datasets[0].metainfo = dict(classes=tuple('efgh'))  # go before those of the class
    assert class_names(cfg) == ['e', 'f', 'g', 'h']
    both = dict(dataset_meta=dict(classes=tuple('ijkl'), CLASSES=tuple('mnop')), CLASSES=tuple('qrst'))
    assert class_names(cfg, both) == ['i', 'j', 'k', 'l']
    cfg.test_dataloader.dataset = dict(dataset=dict(datasets=[dict(dataset=dict(metainfo=dict(classes='wxyz')))]))
    assert class_names(cfg) is None  # a text is no list of names
    cfg.test_dataloader.dataset.dataset.datasets[0].dataset.metainfo.classes = list('wxyz')
    assert class_names(cfg) == ['w', 'x', 'y', 'z']
    dataset = cfg.test_dataloader.dataset = dict(type='LabelledDataset', classes=list('1234'))  # as MMPretrain's may
    assert class_names(cfg) == ['1', '2', '3', '4']
    cfg.test_dataloader.dataset = dict(dataset, metainfo=dict(classes=tuple('efgh')))  # the order of MMPretrain
    assert class_names(cfg) == ['e', 'f', 'g', 'h']
    cfg.test_dataloader.dataset = dict(dataset, classes='names.txt')
    assert class_names(cfg) is None  # those of the class are not its names
    cfg.test_dataloader = None
    assert class_names(cfg) is None
    assert class_names(cfg, dict(CLASSES=torch.zeros(4))) is None


def test_errors_of_the_tools_are_one_printable_line(capsys):
    for error in (RunError('first\nsecond\x07'), CheckpointError('first\nsecond\x07')):
        with pytest.raises(SystemExit) as ended, cli.one_line_errors():
            raise error
        assert ended.value.code == 1
        assert capsys.readouterr() == ('', 'error: first second\\x07\n')
    with pytest.raises(ValueError), cli.one_line_errors():
        raise ValueError


def test_an_error_of_a_worker_is_the_line_that_it_had():
    trace = 'Original Traceback (most recent call last):\n  errors.RunError: another\nmmlinattn.utils.errors.RunError: '
    assert str(RunError(f'Caught RunError in DataLoader worker process 0.\n{trace}the line\n')) == 'the line'
    assert str(RunError(f'of the main process: {trace}')) == f'of the main process: {trace}'


def test_names_of_data_sets_that_hold_none():
    cfg = Config(dict(default_scope='mmengine', model=dict(head=dict(num_classes=2))))
    for dataset in (dict(datasets=[]), dict(type='NoSuchDataset'), dict(metainfo=None), None):
        cfg.test_dataloader = dict(dataset=dataset)
        assert class_names(cfg) is None
    assert class_names(cfg, dict(dataset_meta=dict(classes=(7, 'x')))) == ['7', 'x']
    assert class_names(cfg, dict(dataset_meta=dict(classes=[]), CLASSES=('a', 'b'))) == ['a', 'b']
