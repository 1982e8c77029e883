# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Ends of the command lines: one line on errors and on Ctrl-C. tests/tools/test_bad_input.py has the lines."""

import multiprocessing
import os
import re
import signal
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.engine_toys import refused
from helpers.own_files import coco_dict, text
from mmengine.registry import DATA_SAMPLERS, DATASETS, MODELS, init_default_scope

import mmlinattn_console
from mmlinattn.ops.linear import check_kernel
from mmlinattn.tooling import command_line
from mmlinattn.utils.errors import RunError, raising_object


@pytest.mark.parametrize(('age', 'is_resumed', 'is_its_own'), [(0, False, True), (99, True, True), (99, False, False)])
@pytest.mark.parametrize('rank', ['0', '1'])
def test_ctrl_c_names_the_last_checkpoint(tmp_path, monkeypatch, capsys, age, is_resumed, is_its_own, rank):
    monkeypatch.setenv('RANK', rank)
    (tmp_path / 'last_checkpoint').write_text('work/epoch_1.pth\n')
    os.utime(tmp_path / 'last_checkpoint', (time.time() - age,) * 2)
    with pytest.raises(SystemExit) as end, command_line.clean_end() as run:
        run.work_dir, run.since = str(tmp_path), 0 if is_resumed else run.since
        raise KeyboardInterrupt
    line = capsys.readouterr().err
    assert end.value.code == 130 and line.count('\n') == (rank == '0')
    words = "interrupted: the last checkpoint is 'work/epoch_1.pth'" if is_its_own else 'no checkpoint was written'
    assert (words in line) == (rank == '0')


@pytest.mark.parametrize(('error', 'end'), [(KeyboardInterrupt, SystemExit), (ValueError, ValueError)])
def test_workers_end_with_the_tool(monkeypatch, error, end):
    monkeypatch.setattr(command_line, 'keep_freed_memory', lambda: kept.append(True))
    kept = []
    handler, worker = signal.getsignal(signal.SIGCHLD), multiprocessing.Process(target=time.sleep, args=(100,))
    worker.start()
    try:
        with pytest.raises(end), command_line.clean_end():
            raise error
        assert kept and not worker.is_alive()
    finally:
        worker.kill()
        signal.signal(signal.SIGCHLD, handler)


def test_an_error_of_several_lines_is_one_line(capsys):
    with pytest.raises(SystemExit, match='1'), command_line.one_line_errors():
        raise RunError('of another library:\n\x1b[31mtwo lines\r')
    assert re.fullmatch(r'error: of another library:[^\n\r\x1b]+two lines[^\n\r\x1b]*\n', capsys.readouterr().err)


@MODELS.register_module(force=True)
class Refuses:
    def __init__(self):
        raise KeyError('of the inner part')


@MODELS.register_module(force=True)
class Outer:
    def __init__(self, part):
        MODELS.build(part)


@DATA_SAMPLERS.register_module(force=True)
class Unseeded:
    def __init__(self, dataset):
        pass


def interrupt():
    try:
        raise KeyboardInterrupt
    except BaseException:
        raise SyntaxError('Failed to format')  # noqa: B904 -- as MMEngine does


def build(kind, **options):
    return lambda: MODELS.build(dict(type=kind, **options))


def fail(error):
    def run():
        raise error

    return run


REFUSES, DIVIDE = build('Outer', part=dict(type='Refuses')), fail(ZeroDivisionError('by zero'))
STARTED, STEPPED = (dict(whole=False, runner=SimpleNamespace(has_stepped=stepped)) for stepped in (False, True))
ERRORS = [  # what fails, arguments of setup_errors, the error and its words
    (REFUSES, {}, RunError, '^c.py cannot be run: Refuses: KeyError: '),
    (REFUSES, dict(whole=False), RunError, '^c.py cannot be run: Refuses: KeyError: '),
    (build('Refuses', split='train'), {}, RunError, r"argument 'split'\. .*_delete_=True"),
    (build('Outer', prt=1), {}, RunError, "Did you mean 'part'"),
    (build('Outr'), {}, RunError, "Did you mean 'Outer'"),
    (build('mmdet.RAVLT2'), {}, RunError, "Did you mean 'RAVLT'"),
    (
        lambda: DATA_SAMPLERS.build(dict(type='Unseeded', dataset=[], seed=1)),
        {},
        RunError,
        'MMEngine passes seed to each sampler',
    ),
    (DIVIDE, {}, RunError, '^c.py cannot be run: ZeroDivisionError: '),
    (DIVIDE, dict(whole=False), ZeroDivisionError, ''),  # nothing is under construction
    (DIVIDE, STARTED, RunError, ''),
    (DIVIDE, STEPPED, ZeroDivisionError, ''),
    (interrupt, {}, KeyboardInterrupt, ''),
    # a ValueError of this package
    (lambda: check_kernel('x', ('y',)), dict(whole=False), RunError, "^c.py: kernel='x': expected"),
    (fail(RunError('as it is')), {}, RunError, '^as it is$'),
    (fail(ValueError('need at least one array to concatenate')), {}, RunError, 'run: the data set holds no image with'),
    (fail(OSError(28, 'No space left')), dict(whole=False), RunError, 'c.py: OSError.*MMLINATTN_TRACEBACK=1'),
    (fail(MemoryError('no memory')), dict(whole=False), RunError, 'c.py: MemoryError.*MMLINATTN_TRACEBACK=1'),
    # words of errors that have a remedy (test_advice.py), of another origin
    (lambda: np.zeros(3)[5], dict(whole=False), IndexError, 'out of bounds'),
    (lambda: torch.nn.GroupNorm(1, 1)(torch.ones(1, 1, 1, 1)), dict(whole=False), ValueError, 'more than 1 value per'),
    (fail(TypeError('None is not a callable object')), dict(whole=False), TypeError, ''),
]


@pytest.mark.parametrize(('run', 'options', 'kind', 'words'), ERRORS)
def test_an_error_while_building_names_the_innermost_class(monkeypatch, run, options, kind, words):
    monkeypatch.delenv('MMLINATTN_TRACEBACK', raising=False)
    with pytest.raises(kind, match=words), command_line.setup_errors('c.py', **options):
        run()


def test_names_of_another_project(monkeypatch):
    pytest.importorskip('mmdet.models')
    pytest.importorskip('mmpretrain.models')
    with pytest.raises(RunError, match='It is of another project: write mmdet.RetinaNet'):
        with command_line.setup_errors('c.py'), MODELS.switch_scope_and_registry('mmpretrain') as registry:
            registry.build(dict(type='RetinaNet'))


@pytest.mark.parametrize(('name', 'reason'), [('cuda:99', 'cuda:99'), ('gpu', 'gpu'), ('', ''), ('cpu', '')])
def test_devices(name, reason):
    with refused(reason and f"--device='{name}': .*Error"):
        command_line.check_device(name)


def test_modules_are_named_by_their_place_in_the_model():
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.ModuleDict(dict(head=torch.nn.Linear(2, 2))))
    model.forward = lambda x: model[1]['head'](x)
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(1, 3))
    assert raising_object(caught.value) == 'Linear 1.head'


def test_a_coco_file_of_other_classes_is_named_with_its_categories(tmp_path):
    pytest.importorskip('mmdet.datasets')
    text(tmp_path / 'a.json', coco_dict(['a.jpg'], ['disc'], iscrowd=0, area=600))
    data = dict(type='mmdet.CocoDataset', ann_file=str(tmp_path / 'a.json'), metainfo=dict(classes=('cat',)))
    with pytest.raises(RunError, match='holds no image with .*; the categories of .*a.json are disc'):
        with command_line.setup_errors('c.py'):
            DATASETS.build(dict(data, data_prefix=dict(img=''), filter_cfg=dict(filter_empty_gt=True), pipeline=[]))


def test_a_traceback_if_asked_for(monkeypatch):
    monkeypatch.setenv('MMLINATTN_TRACEBACK', '1')
    with pytest.raises(KeyError), command_line.setup_errors('c.py'):
        REFUSES()


@pytest.mark.parametrize(
    ('kind', 'content'), [('CocoDataset', 'x y z'), ('CocoDataset', '[]'), ('VOCDataset', 'x y z')]
)
def test_an_error_in_an_annotation_file_names_it(tmp_path, monkeypatch, kind, content):
    pytest.importorskip('mmdet')
    monkeypatch.delenv('MMLINATTN_TRACEBACK', raising=False)
    init_default_scope('mmdet')
    file = tmp_path / ('a.json' if kind == 'CocoDataset' else 'a.xml')
    file.write_text(content)
    config = dict(type=kind, ann_file=str(file))
    if kind == 'VOCDataset':  # a list of names
        (tmp_path / 'Annotations').mkdir()
        file = file.rename(tmp_path / 'Annotations' / 'a.xml')
        (tmp_path / 'list.txt').write_text('a')
        config = dict(type=kind, ann_file='list.txt', data_root=str(tmp_path), data_prefix=dict(sub_data_root=''))
    with pytest.raises(RunError, match=f'^c.py cannot be run: {kind}: .*{re.escape(str(file))}'):
        with command_line.setup_errors('c.py'):
            DATASETS.build(config)


NO_DICT = 'a value is no dict. Set each key, as model.init_cfg.type=NAME'


@pytest.mark.parametrize(
    ('option', 'line'),
    [
        *((option, f'argument --cfg-options: {option}: expected KEY=VALUE') for option in ('max_epochs', 'a=[1,(2]')),
        *(
            (f'model.init_cfg={value}', NO_DICT)
            for value in ("dict(type='A',b=1)", '{}', "[dict(type='A')]", '(1,{"a":2})')
        ),
    ],
)
def test_options_without_a_value_and_dicts_are_a_usage_error(capsys, option, line):
    parser = mmlinattn_console.tool_parser('A tool.')
    mmlinattn_console.add_config_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(['c.py', '--cfg-options', option])
    assert line in capsys.readouterr().err
    assert parser.parse_args(['c.py', '--cfg-options', 'a=predict(x)']).cfg_options == dict(a='predict(x)')


def test_the_folder_of_an_output_file(tmp_path):
    (tmp_path / 'old.txt').write_text('old')
    command_line.check_out_file(tmp_path / 'old.txt')
    command_line.check_out_file(tmp_path / 'new' / 'deep' / 'a.txt')
    assert (tmp_path / 'old.txt').read_text() == 'old' and not list((tmp_path / 'new' / 'deep').iterdir())
    for path, reason in ((tmp_path, 'Is a directory'), (tmp_path / 'old.txt' / 'a', 'Not a directory|File exists')):
        with pytest.raises(RunError, match=f'^--out {re.escape(repr(str(path)))} cannot be written: ({reason}).$'):
            command_line.check_out_file(path)


@pytest.mark.parametrize(('place', 'is_named'), [('.', True), ('of_another_python', False), (None, False)])
def test_the_command_of_this_python(tmp_path, monkeypatch, place, is_named):
    monkeypatch.setattr(sys, 'executable', str(tmp_path / 'python'))
    monkeypatch.setenv('PATH', str(tmp_path / (place or '.')))
    if place:
        (tmp_path / place).mkdir(exist_ok=True)
        (tmp_path / place / 'mmlinattn').touch(0o755)
    assert command_line.console_command() == ('mmlinattn' if is_named else f'{tmp_path}/python -m mmlinattn')


def test_home_folders_of_arguments_are_expanded(monkeypatch):
    monkeypatch.setenv('HOME', '/home/me')
    parser = mmlinattn_console.tool_parser('A tool.')
    parser.add_argument('--out')
    parser.add_argument('images', nargs='+')
    args = parser.parse_args(['--out=~/x', '~/a.jpg', 'b~/c', '~'])
    assert (args.out, args.images) == ('/home/me/x', ['/home/me/a.jpg', 'b~/c', '/home/me'])
