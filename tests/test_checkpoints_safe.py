# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import argparse
import builtins
import os
import pickle
import sys
import types
import warnings
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_helpers import Hostile, touch_when_loaded
from mmengine.config import ConfigDict
from mmengine.logging import HistoryBuffer
from mmengine.optim.scheduler import OneCycleLR
from mmengine.registry import DATASETS, HOOKS, MODELS
from torch import nn

from mmlinattn.checkpoints import CheckpointError, CheckpointNotFoundError, config_text, limits, load_file, safe
from mmlinattn.checkpoints.config_text import read_config_text
from mmlinattn.checkpoints.inert import make_inert
from mmlinattn.utils import errors


@pytest.fixture(params=['torch list', 'own unpickler'])
def loader(request, monkeypatch):
    """Both ways to read: PyTorch's list, and the unpickler for PyTorch before 2.6."""
    if request.param == 'own unpickler':
        monkeypatch.setattr(safe, '_TORCH_HAS_ALLOW_LIST', False)
    elif not safe._TORCH_HAS_ALLOW_LIST:
        pytest.skip('this PyTorch has no list to extend')
    return load_file


@pytest.fixture(params=['zip', 'legacy'])
def save(request, tmp_path):
    def save(thing, name='checkpoint.pth'):
        torch.save(thing, tmp_path / name, _use_new_zipfile_serialization=request.param == 'zip')
        return tmp_path / name

    return save


def one_line(caught) -> str:
    text = str(caught.value)
    assert '\n' not in text
    return text


def test_history_buffers_survive_with_their_statistics(loader, save):
    checkpoint = loader(save({'scalars': {'loss': HistoryBuffer([3.0, 1.0], [1, 1])}}))
    buffer = checkpoint['scalars']['loss']
    assert buffer.mean() == 2.0 and buffer.statistics('min') == 1.0
    buffer.update(5.0)
    assert buffer.current() == 5.0


def test_one_cycle_scheduler_state_survives(loader, save):
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1, momentum=0.9)
    scheduler = OneCycleLR(optimizer, eta_max=0.2, total_steps=5)
    state = loader(save(scheduler.state_dict()))
    assert state['anneal_func'](0.0, 1.0, 1.0) == scheduler.anneal_func(0.0, 1.0, 1.0)


@pytest.mark.parametrize('strategy', ['cos', 'linear'])
def test_both_ways_of_one_cycle_schedules_survive(loader, save, strategy):
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1, momentum=0.9)
    scheduler = OneCycleLR(optimizer, eta_max=0.2, total_steps=5, anneal_strategy=strategy)
    found = loader(save(scheduler.state_dict()))['anneal_func']
    assert found is scheduler.anneal_func and found.__name__ == f'_annealing_{strategy}'


def test_data_of_every_kind_survives(loader, save):
    """Numbers of each of NumPy's types, a schedule's milestones, and what PyTorch itself allows."""
    arrays = {code: np.arange(3).astype(code) for code in '?bhilqBHILQefdgFDG'}
    scalars = {code: array[1] for code, array in arrays.items() if code not in 'gG'}
    others = dict(
        milestones=Counter([3, 3, 5]), names={'a', 'b'}, size=torch.Size([2, 3]), bytes=b'\x00\xff', none=None
    )
    found = loader(save(dict(arrays=arrays, scalars=scalars, **others)))
    for code, array in arrays.items():
        assert found['arrays'][code].dtype == array.dtype and (found['arrays'][code] == array).all()
    assert found['scalars'] == scalars
    assert {code: number.dtype for code, number in found['scalars'].items()} == {
        code: array.dtype for code, array in arrays.items() if code in scalars
    }
    assert {key: found[key] for key in others} == others and type(found['milestones']) is Counter


@pytest.mark.parametrize('core', ['core', '_core'])
def test_numpy_data_of_numpy_1_and_2(loader, tmp_path, core):
    """NumPy 2 renamed the modules that a pickle names; both kinds of file are about."""
    thing = {'array': np.arange(6.0).reshape(2, 3), 'scalar': np.float32(0.5)}
    torch.save(thing, tmp_path / 'saved.pth')
    with zipfile.ZipFile(tmp_path / 'saved.pth') as old:
        with zipfile.ZipFile(tmp_path / 'renamed.pth', 'w') as new:
            for name in old.namelist():
                data = old.read(name)
                for other in (b'core', b'_core'):
                    data = data.replace(b'numpy.%s.multiarray' % other, b'numpy.%s.multiarray' % core.encode())
                new.writestr(name, data)
    loaded = loader(tmp_path / 'renamed.pth')
    assert np.array_equal(loaded['array'], thing['array'])
    assert loaded['scalar'] == 0.5 and loaded['scalar'].dtype == np.float32


def test_argparse_and_config_leftovers(loader, save):
    path = save(
        {
            'args': argparse.Namespace(lr=0.1, output_dir=Path('runs')),
            'config': ConfigDict(model=dict(depth=2)),
        }
    )
    loaded = loader(path)
    assert loaded['args'].lr == 0.1 and str(loaded['args'].output_dir) == 'runs'
    assert loaded['config']['model']['depth'] == 2


@pytest.mark.parametrize(
    'name', ['yacs.config.CfgNode', 'addict.addict.Dict', 'mmcv.utils.config.ConfigDict', 'pathlib._local.PosixPath']
)
def test_types_of_packages_that_are_not_there(loader, save, monkeypatch, name):
    """Swin-type files hold a yacs node, MMCV 1.x a ConfigDict; the newest Python names its paths otherwise."""
    path, _, kind = name.rpartition('.')
    module = types.ModuleType(path)
    made = type(kind, (dict,), {'__reduce__': lambda self: (getattr(module, kind), tuple(self.items())[0])})
    made.__module__ = path
    setattr(module, kind, made)
    packages = path.split('.')
    for end in range(1, len(packages)):
        monkeypatch.setitem(sys.modules, '.'.join(packages[:end]), types.ModuleType('.'.join(packages[:end])))
    monkeypatch.setitem(sys.modules, path, module)
    if kind == 'PosixPath':
        file = save({'value': made({'a': 'b'})})
    else:
        made.__reduce__ = dict.__reduce__
        made.__reduce_ex__ = lambda self, protocol: (made, (), None, None, iter(self.items()))
        file = save({'value': made({'a': 'b'})})
    monkeypatch.undo()
    found = loader(file)['value']
    assert str(found) == 'a/b' if kind == 'PosixPath' else found == {'a': 'b'} and type(found) is OrderedDict


def test_yacs_config_without_yacs(loader, save, monkeypatch):
    """Swin-type files hold a yacs node, whose package their readers usually lack."""
    module = types.ModuleType('yacs.config')

    class CfgNode(dict):
        def __init__(self, values):
            super().__init__(values)
            self.__dict__['__immutable__'] = True

    CfgNode.__module__, CfgNode.__qualname__ = 'yacs.config', 'CfgNode'
    module.CfgNode = CfgNode
    monkeypatch.setitem(sys.modules, 'yacs', types.ModuleType('yacs'))
    monkeypatch.setitem(sys.modules, 'yacs.config', module)
    path = save({'config': CfgNode({'MODEL': CfgNode({'DEPTHS': [2, 2]})})})
    monkeypatch.undo()
    assert loader(path)['config']['MODEL']['DEPTHS'] == [2, 2]


@pytest.mark.parametrize(
    'hostile, name',
    [
        (lambda marker: touch_when_loaded(marker), f'{os.name}'),
        (lambda marker: Hostile(eval, f'open({str(marker)!r}, "w")'), 'eval'),
        (lambda marker: Hostile(exec, f'open({str(marker)!r}, "w")'), 'exec'),
        (lambda marker: Hostile(builtins.open, str(marker), 'w'), 'open'),
        (lambda marker: Hostile(getattr, HistoryBuffer, '__init__'), 'getattr'),
        (lambda marker: Hostile(getattr, dict, 'fromkeys'), 'dict'),
        (lambda marker: np.array([object], dtype=object), 'numpy.dtype[object]'),
        (lambda marker: nn.Linear(1, 1), 'torch.nn.modules.linear.Linear'),
    ],
)
def test_code_in_a_checkpoint_is_refused_and_not_run(loader, save, tmp_path, hostile, name):
    marker = tmp_path / 'was_run'
    path = save({'state_dict': {'w': torch.ones(1)}, 'meta': hostile(marker)})
    with pytest.raises(CheckpointError) as caught:
        loader(path)
    message = one_line(caught)
    assert str(path) in message and name in message and 'refused' in message
    assert not marker.exists()


@pytest.mark.parametrize('protocol', [0, 1, 2, 3, 4, 5])
def test_code_in_a_plain_pickle_is_not_run(loader, tmp_path, protocol):
    path, marker = tmp_path / 'model.pkl', tmp_path / 'was_run'
    path.write_bytes(pickle.dumps({'model': touch_when_loaded(marker)}, protocol=protocol))
    with pytest.raises(CheckpointError) as caught:
        loader(path)
    assert str(path) in one_line(caught) and not marker.exists()


@pytest.mark.parametrize('protocol', [3, 4, 5])
def test_code_under_other_pickle_protocols_is_not_run(loader, tmp_path, protocol):
    path, marker = tmp_path / 'model.pth', tmp_path / 'was_run'
    torch.save({'model': touch_when_loaded(marker)}, path, pickle_protocol=protocol)
    with pytest.raises(CheckpointError) as caught:
        loader(path)
    assert str(path) in one_line(caught) and not marker.exists()


@pytest.mark.parametrize(
    'content, reason',
    [
        (b'', 'is empty'),
        (b'<!DOCTYPE html><html>Not found</html>', 'web page'),
        (b'\n <HTML>', 'web page'),
        (b'version https://git-lfs.github.com/spec/v1\noid sha256:00\n', 'git-lfs pointer'),
        (b'{"error": "rate limit"}', 'not a checkpoint'),
        (bytes(np.random.RandomState(0).bytes(4096)), 'not a checkpoint'),
    ],
)
def test_files_that_are_no_checkpoints(loader, tmp_path, content, reason):
    path = tmp_path / 'model.pth'
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        loader(path)
    assert str(path) in one_line(caught) and reason in one_line(caught)


@pytest.mark.parametrize('kept', [0.001, 0.3, 0.9, 0.999])
def test_a_truncated_checkpoint_names_the_file(loader, save, kept):
    path = save({'state_dict': {f'w{i}': torch.randn(100) for i in range(20)}})
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(CheckpointError) as caught:
        loader(path)
    assert str(path) in one_line(caught)


def test_other_archives_are_no_checkpoints(loader, tmp_path):
    path = tmp_path / 'model.pth'
    with zipfile.ZipFile(path, 'w') as archive:
        for name in ('data.pkl', 'constants.pkl', 'code/__torch__.py'):
            archive.writestr(f'model/{name}', b'')
    with pytest.raises(CheckpointError, match='TorchScript'):
        loader(path)
    with zipfile.ZipFile(path, 'w') as archive:
        archive.writestr('readme.txt', 'weights are elsewhere')
    with pytest.raises(CheckpointError, match='zip archive'):
        loader(path)


def test_a_missing_file_and_a_folder(loader, tmp_path):
    missing = tmp_path / 'nothing.pth'
    with pytest.raises(CheckpointError) as caught:
        loader(missing)
    assert one_line(caught) == f'checkpoint {missing} does not exist'
    # What code written against MMEngine catches.
    assert isinstance(caught.value, FileNotFoundError)
    with pytest.raises(CheckpointError, match='is a folder'):
        loader(tmp_path)


@pytest.mark.parametrize('map_location', [None, 'cpu', torch.device('cpu'), lambda storage, _: storage])
def test_map_location(loader, save, map_location):
    loaded = loader(save({'w': torch.ones(3)}), map_location)
    assert torch.equal(loaded['w'], torch.ones(3))


def test_where_tensors_are_put(loader, save, monkeypatch):
    """Where they are asked for, and without a word in main memory, wherever they were saved."""
    path, asked = save({'w': torch.ones(3)}), []
    assert loader(path, 'meta')['w'].is_meta and loader(path, map_location=torch.device('meta'))['w'].is_meta
    read = torch.load

    def load(*args, **kwargs):
        asked.append(kwargs['map_location'])
        return read(*args, **kwargs)

    monkeypatch.setattr(torch, 'load', load)
    loader(path)
    loader(path, None)
    assert asked == ['cpu', None]


def test_other_pickle_protocols_are_no_news(loader, tmp_path):
    path = tmp_path / 'a.pth'
    torch.save({'w': torch.ones(1)}, path, pickle_protocol=3)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        before = list(warnings.filters)
        assert loader(path)['w'] == 1
        assert warnings.filters == before


def test_lines_that_reach_the_terminal():
    assert errors.printable('  a\n\tb \x1b[2J\x07 ü ') == 'a b \\x1b[2J\\x07 ü'
    assert errors.printable(8000 * 'x') == 8000 * 'x'
    assert errors.printable('a' + 8000 * 'x' + 'b') == f'a{3999 * "x"} ... {3999 * "x"}b'
    assert str(CheckpointError('a\nb')) == str(CheckpointNotFoundError('a\nb')) == 'a b'


def nested(depth):
    node = 1
    for _ in range(depth):
        node = [node]
    return node


def shared_twice(depth):
    node = 1
    for _ in range(depth):
        node = [node, node]
    return node


def test_bounds_of_what_a_file_may_hold(monkeypatch):
    deep = 'is nested more than 100 levels deep, or contains itself'
    assert limits.why_too_large(nested(100), 1) is None and limits.why_too_large(nested(101), 1) == deep
    assert limits.why_too_large(dict(a=nested(100)), 1) == deep
    # dicts count keys and values; what occurs twice counts twice
    shared = [1, 2]
    monkeypatch.setattr(limits, '_MAX_ENTRIES', 9)
    assert limits.why_too_large([shared, shared, 5], 1) is None  # 1 + 2 * 3 + 1
    assert limits.why_too_large([shared, shared, (shared,)], 1) == 'repeats its contents to more than 9 entries'
    assert limits.why_too_large({1: 2, 3: 4, 5: 6, 7: 8}, 1) is None
    assert limits.why_too_large({1: 2, 3: 4, 5: 6, 7: 8, 9: 0}, 1) == 'repeats its contents to more than 9 entries'


def test_what_occurs_again_counts_with_the_levels_it_has_wherever_it_is():
    shared = nested(60)
    assert limits.why_too_large([shared, [shared]], 1) is None
    deeper = shared
    for _ in range(60):
        deeper = [deeper]
    for data in ([shared, deeper], dict(extra=shared, meta=dict(deep=deeper)), {(1,): [shared], 'deep': (deeper,)}):
        assert limits.why_too_large(data, 1) == 'is nested more than 100 levels deep, or contains itself'


def test_what_is_shared_is_gone_through_once(monkeypatch):
    """Each of these 100 lists holds the one below it twice: 2 ** 100 ways down, in a file of a hundred lists."""
    monkeypatch.setattr(limits, '_MAX_ENTRIES', 2**102)
    assert limits.why_too_large(shared_twice(100), 1) is None
    assert limits.why_too_large([shared_twice(30), shared_twice(101)], 1).startswith('is nested more than 100 levels')


@pytest.mark.parametrize('holder', ['Namespace', 'OrderedDict', 'Parameter'])
def test_attributes_of_what_a_file_holds_are_looked_at(tmp_path, holder):
    thing = dict(
        Namespace=argparse.Namespace,
        OrderedDict=OrderedDict,
        Parameter=lambda: nn.Parameter(torch.ones(1)),
    )[holder]()
    thing.harmless = nested(5)
    torch.save(dict(meta=thing), tmp_path / 'x.pth')
    assert load_file(tmp_path / 'x.pth')['meta'].harmless == nested(5)
    thing.deep = nested(101)
    torch.save(dict(meta=thing), tmp_path / 'x.pth')
    with pytest.raises(CheckpointError, match='is nested more than 100 levels deep'):
        load_file(tmp_path / 'x.pth')


@pytest.mark.parametrize('make', [torch.ones, np.ones], ids=['torch', 'numpy'])
def test_arrays_may_be_larger_than_their_file_within_bounds(make):
    """64 MiB in any file, 20 times its size in a larger one: tensors share memory, and zip files may be compressed."""
    small, mebi = make(1), 1 << 20

    def array(size):
        data = small.expand(size // 4) if make is torch.ones else np.broadcast_to(np.float32(1), (size // 4,))
        return dict(state_dict=[data])

    assert limits.why_too_large(array(64 * mebi), 1) is None
    size = 64 * mebi + 4
    assert limits.why_too_large(array(size), 1) == f'declares an array of {size} bytes, more than the file can hold'
    assert limits.why_too_large(array(200 * mebi), 10 * mebi) is None
    assert 'declares' in limits.why_too_large(array(200 * mebi + 4), 10 * mebi)


@pytest.mark.parametrize(
    'text, value',
    [
        ('x = [1, (2.5, None), {"a": True}]', [1, (2.5, None), dict(a=True)]),
        ('x = {1, -2}', {1, -2}),
        ('x = dict([("a", 1)], b=-2.5)', dict(a=1, b=-2.5)),
        ('x = dict()', {}),
        ('x = range(1, 4)', range(1, 4)),
        ('x = [inf, -inf]', [float('inf'), -float('inf')]),
        ('x = 1\nx = "later"', 'later'),
    ],
)
def test_values_of_a_config_text(text, value):
    config = read_config_text(f"custom_imports = dict(imports=['a'])\nmodel = None\n{text}", 'a.pth')
    assert config == dict(model=None, x=value) and type(config.x).__name__ in (type(value).__name__, 'ConfigDict')


def test_numbers_and_names_of_a_config_text():
    nan, inf = read_config_text('model = None\nx = (nan, inf)', 'a.pth').x
    assert np.isnan(nan) and inf == float('inf')
    for name in ('filename', 'text', 'pretty_text'):  # which Config keeps for itself
        with pytest.raises(CheckpointError) as found:
            read_config_text(f'model = None\n{name} = 1', 'a.pth')
        assert str(found.value) == f'the config inside a.pth was refused: {name} is reserved for config file'


NOT_PLAIN = 'is not a plain value'


@pytest.mark.parametrize(
    'text, reason',
    [
        ('x = 1 + 2', f'line 2 {NOT_PLAIN}'),
        ('\nx = [\nnames]', f'line 4 {NOT_PLAIN}'),
        ('x = {**model}', f'line 2 {NOT_PLAIN}'),
        ('x = dict(**model)', f'line 2 {NOT_PLAIN}'),
        ('x = dict([], [])', f'line 2 {NOT_PLAIN}'),
        ('x = range(1.5)', f'line 2 {NOT_PLAIN}'),
        ('x = list([1])', f'line 2 {NOT_PLAIN}'),
        ('x = -"a"', f'line 2 {NOT_PLAIN}'),
        ('x = -True', f'line 2 {NOT_PLAIN}'),
        ('x = not 1', f'line 2 {NOT_PLAIN}'),
        ('x = y = 1', 'line 2 is more than "name = value"'),
        ('x.y = 1', 'line 2 is more than "name = value"'),
        ('x: int = 1', 'line 2 is more than "name = value"'),
        ('_base_ = "a"', 'line 2 is more than "name = value"'),
        ('import os', 'line 2 is more than "name = value"'),
        ('x = {[]}', 'TypeError'),
        ('x = [', 'SyntaxError'),
    ],
)
def test_config_texts_that_compute(text, reason):
    with pytest.raises(CheckpointError) as found:
        read_config_text(f'model = None\n{text}', 'a.pth')
    assert str(found.value) == (
        f'the config inside a.pth was refused: {reason}; nothing of it was run. Give the config as a file'
    )


@pytest.mark.parametrize(
    'text, line',
    [
        ('x = 1', 'has no model'),
        (
            "model = [dict(type='NoSuch')]",
            "was refused: it builds 'NoSuch', which is not registered with MMEngine (import its package first)",
        ),
        ("model = ({'a': dict(_scope_='mine')},)", "was refused: its _scope_ = 'mine' is unknown"),
        ("model = None\ndefault_scope = 'mine'", "was refused: its default_scope = 'mine' is unknown"),
        ("model = dict(teacher='a.py')", "was refused: its teacher = 'a.py' is a program"),
        ("model = dict(teacher='a.pyc')", "was refused: its teacher = 'a.pyc' is a program"),
        ("model = dict(files=['a', ('b.py',)])", "was refused: its files = 'b.py' is a program"),
        ("model = dict(weights='https://a/b.pkl')", "was refused: its weights = 'https://a/b.pkl' is a pickle"),
        ("model = dict(weights='pickle')", "was refused: its weights = 'pickle' is a pickle"),  # a file of that name
        ("model = dict(teacher='a/b.yaml')", "was refused: its teacher = 'a/b.yaml' is YAML"),
        (
            "model = dict(teacher_config='a.json')",
            "was refused: its teacher_config = 'a.json' is a config file, which is run",
        ),
        ("model = dict(teacher='a.yml')", "was refused: its teacher = 'a.yml' is YAML"),
        ("model = dict(warp_mode='f()')", "was refused: its warp_mode = 'f()' is evaluated, and more than a name"),
        (
            "model = None\nx = [dict(dtype='float32 or f')]",
            "was refused: its dtype = 'float32 or f' is evaluated, and more than a name",
        ),
        ('model = dict(trust_remote_code=1)', 'was refused: its trust_remote_code = 1 runs code of others'),
        *(
            (
                f'model = dict({place}=dict(type={name!r}))',
                f'was refused: it builds {name!r}, which is not registered with MMEngine (import its package first)',
            )
            for place, name in (('nms', 'exit'), ('nms', 'RoIAlign'), ('roi_layer', 'nms'), ('x', 'nms'))
        ),
    ],
)
def test_config_texts_that_build_what_is_not_known(text, line):
    with pytest.raises(CheckpointError) as found:
        read_config_text(text, 'a.pth')
    assert str(found.value) == f'the config inside a.pth {line}. Give the config as a file'


@pytest.mark.parametrize(
    'model',
    [
        "test_cfg=dict(rcnn=dict(nms=dict(type='nms', iou_threshold=0.5)))",
        "test_cfg=[dict(nms=dict(type='soft_nms'))], dqs_cfg=dict(type='nms')",
        "extractor=dict(roi_layer=dict(type='RoIAlign', output_size=7))",
        "extractor=dict(roi_layer=dict(type='ModulatedDeformRoIPoolPack'))",
        "cmc=dict(warp_mode='cv2.MOTION_EUCLIDEAN'), dtype='float16', trust_remote_code=False",
        "classes=('a python', 'b.pyramid', 'py.x')",
    ],
)
def test_what_detectors_name_that_is_in_no_registry(model):
    assert read_config_text(f'model = dict({model})', 'a').model


def test_batch_augmentations_of_classifiers_are_known():
    pytest.importorskip('mmpretrain.models')
    text = "model = dict(train_cfg=dict(augments=[dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)]))"
    assert read_config_text(text, 'a').model
    with pytest.raises(CheckpointError, match="it builds 'AutoTokenizer', which is not registered"):
        read_config_text("model = dict(tokenizer=dict(type='AutoTokenizer', name_or_path='a/b'))", 'a')


@pytest.mark.parametrize('scope', [None, 'mmengine', 'mmdet', 'mmseg', 'mmpretrain', 'mmlinattn'])
def test_scopes_of_config_texts(scope):
    assert read_config_text(f'model = dict(_scope_={scope!r})\ndefault_scope = {scope!r}', 'a').default_scope == scope


@pytest.mark.parametrize(
    'text', [None, 7, b'model = 1', 'model = "' + 4_000_000 * 'x' + '"'], ids=['none', 'number', 'bytes', 'long']
)
def test_config_texts_that_are_none(text):
    with pytest.raises(CheckpointError, match='refused: it is no text of a usual length; nothing of it was run'):
        read_config_text(text, 'a.pth')


def with_attribute(**others):
    made = OrderedDict(w=torch.ones(1))
    vars(made).update(get=print, **others)
    return made


LONG = 1001 * 'k'


@pytest.mark.parametrize(
    'checkpoint, line',
    [
        ([1], 'a.pth holds a list, not a state dict'),
        (dict(state_dict=[1]), 'state_dict of a.pth is a list, not a dict'),
        (dict(meta=[1]), 'meta of a.pth is a list, not a dict'),
        (dict(meta=''), 'meta of a.pth is a str, not a dict'),
        ({1: torch.ones(1)}, 'the top level of a.pth has a key that is no string: int 1'),
        (dict(model={1: torch.ones(1)}), 'model of a.pth has a key that is no string: int 1'),
        (dict(model_ema={LONG: 1}), f'model_ema of a.pth has a key of 1001 characters: {80 * "k"}...'),
        (dict(state_dict_ema={'a\n': 1}), "state_dict_ema of a.pth has a key with control characters: 'a\\n'"),
        (dict(model={80 * 'a' + '\n': 1}), f"model of a.pth has a key with control characters: '{80 * 'a'}'"),
        (dict(ema_state_dict={None: 1}), 'ema_state_dict of a.pth has a key that is no string: NoneType None'),
        (dict(state_dict=with_attribute()), 'state_dict of a.pth has attributes, which no state dict has'),
        (
            dict(model=with_attribute(_metadata={})),  # beside the one that every state dict has
            'model of a.pth has attributes, which no state dict has',
        ),
        (with_attribute(), 'the top level of a.pth has attributes, which no state dict has'),
        *(
            (dict(message_hub={name: {2: 1}}), f'message_hub.{name} of a.pth has a key that is no string: int 2')
            for name in ('log_scalars', 'runtime_info', 'resumed_keys')
        ),
    ],
)
def test_forms_that_no_checkpoint_has(checkpoint, line):
    with pytest.raises(CheckpointError) as found:
        make_inert(checkpoint, 'a.pth')
    assert str(found.value) == line


def test_what_is_made_of_a_checkpoint():
    meta = dict(
        config='gpu_ids = range(0, 3)',
        CLASSES=('a', 'b\x07'),
        dataset_meta=dict(classes=['c\x1b'], palette=[(1, 2)], names={'d\x07'}, ids={'e\x1b': 1}),
        name='\x07',
    )
    state = OrderedDict({1000 * 'k': torch.ones(1)})
    state._metadata = {}
    found = make_inert(dict(state_dict=state, meta=meta, message_hub=[1]), 'a.pth')
    assert found['meta'] == dict(
        config='gpu_ids = range(3)',
        config_text='gpu_ids = range(0, 3)',
        CLASSES=('a', 'b\\x07'),
        dataset_meta=dict(classes=['c\\x1b'], palette=[(1, 2)], names={'d\\x07'}, ids={'e\\x1b': 1}),
        name='\x07',  # which nobody prints
    )
    assert make_inert(dict(meta=dict(config='x = 1')), 'a')['meta'] == dict(config_text='x = 1')
    on_a_cpu = make_inert(dict(meta=dict(config='gpu_ids = []')), 'a')['meta']  # none is a number as well
    assert on_a_cpu == dict(config='gpu_ids = range(0)', config_text='gpu_ids = []')
    # the last, as in Python
    changed = make_inert(dict(meta=dict(config='gpu_ids = [0]\ngpu_ids = (0, 1)')), 'a')['meta']
    assert changed['config'] == 'gpu_ids = range(2)'
    for data in (torch.ones(1), np.ones(1), {3: 'no weight'}, dict(meta=None)):
        assert make_inert(data, 'a') is data


@pytest.mark.parametrize(
    'content, reason',
    [
        (b'', 'is empty'),
        (b'version https://git-lfs', 'is a git-lfs pointer, not the file itself (run "git lfs pull")'),
        *((start, 'is a web page, not a checkpoint') for start in (b'<!DOCTYPE', b' <html', b'<head', b'\n<?XML')),
        (b'PK\x03\x04', 'is cut short: the end of the file is missing'),
        (safe._LEGACY_START[:5], 'is cut short: the end of the file is missing'),
        (b'text', 'is not a checkpoint written by torch.save (it was not opened)'),
    ],
)
def test_lines_about_files_that_are_none(tmp_path, content, reason):
    path = tmp_path / 'a.pth'
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as found:
        load_file(path)
    assert str(found.value) == f'{path} {reason}'


@pytest.mark.parametrize(
    'entries, reason',
    [
        ({'a/data.pkl': b'', 'a/constants.pkl': b''}, 'is a TorchScript program, not a checkpoint'),
        ({'a/data.txt': b''}, 'is a zip archive, but not a checkpoint'),
        (
            {'a/data.pkl': b'c__builtin__\nbytearray\n'},
            'was refused: it asks for bytearray, which no checkpoint needs',
        ),
        (
            {'a/data.pkl': b'', 'b/data.pkl': b'c__builtin__\nbytearray\n'},
            'was refused: it asks for bytearray, which no checkpoint needs',
        ),
        ({'a/data.pkl': bytes(20 * (1 << 16) + 1)}, 'declares 1310721 bytes of contents in a file of {size}'),
        (
            {'a/data.pkl': b'', 'b/data.pkl': b''},  # of which b is renamed to a
            'is a zip archive with two entries of one name, of which readers take either',
        ),
    ],
)
def test_lines_about_archives_that_are_none(tmp_path, entries, reason):
    path = tmp_path / 'a.pth'
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    if 'of one name' in reason:
        path.write_bytes(path.read_bytes().replace(b'b/data.pkl', b'a/data.pkl'))
    with pytest.raises(CheckpointError) as found:
        load_file(path)
    assert str(found.value) == f'{path} {reason.format(size=path.stat().st_size)}'


def test_archives_within_bounds_are_read_on(tmp_path):
    with zipfile.ZipFile(tmp_path / 'a.pth', 'w', zipfile.ZIP_DEFLATED) as archive:
        archive.writestr('a/data.pkl', bytes(20 * (1 << 16)))
    assert safe._why_not_a_checkpoint(tmp_path / 'a.pth') is None


def test_lines_about_what_cannot_be_opened(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    os.mkfifo(tmp_path / 'pipe')
    for path, kind, line in (
        ('~/nothing', CheckpointNotFoundError, f'checkpoint {tmp_path}/nothing does not exist'),
        ('~', CheckpointError, f'checkpoint {tmp_path} is a folder, not a file'),
        ('~/pipe', CheckpointError, f'checkpoint {tmp_path}/pipe is a pipe, a socket or a device, not a file'),
    ):
        with pytest.raises(kind) as found:
            load_file(path)
        assert str(found.value) == line


@pytest.mark.parametrize(
    'error, line',
    [
        (MemoryError(), 'does not fit into memory, or declares more than it holds'),
        (
            RuntimeError('Advice.\nWeightsUnpickler error: \n' + 300 * 'x' + '\nmore'),
            f'cannot be read (RuntimeError: {200 * "x"}); the file may be cut short or damaged',
        ),
        (EOFError(), 'cannot be read (EOFError: ); the file may be cut short or damaged'),
        (
            pickle.UnpicklingError('Unsupported global: GLOBAL os.system was not allowed'),
            'was refused: it asks for os.system, which is not known to be harmless (a checkpoint can hide code); '
            'nothing of it was run',
        ),
        (CheckpointError('of ours'), None),
    ],
    ids=repr,
)
def test_lines_about_files_that_cannot_be_read(tmp_path, monkeypatch, error, line):
    torch.save({}, tmp_path / 'a.pth')

    def fails(*args):
        raise error

    monkeypatch.setattr(safe, '_torch_load', fails)
    with pytest.raises(CheckpointError) as found:
        load_file(tmp_path / 'a.pth')
    assert str(found.value) == (f'{tmp_path}/a.pth {line}' if line else 'of ours')


@pytest.mark.parametrize(
    'state',
    [
        [1],
        {},
        dict(_log_history=np.ones(2), _count_history=np.ones(1), max_length=5),
        dict(_log_history=np.ones(2), _count_history=np.ones(2), max_length=1),
        dict(_log_history=np.ones(2), _count_history=np.ones(2), max_length=5.0),
        dict(_log_history=np.ones((2, 1)), _count_history=np.ones((2, 1)), max_length=5),
        dict(_log_history=[1.0], _count_history=[1], max_length=5),
    ],
    ids=str,
)
def test_log_buffers_without_a_log(state):
    with pytest.raises(pickle.UnpicklingError, match='without a log in it'):
        safe._ReadHistoryBuffer.__new__(safe._ReadHistoryBuffer).__setstate__(state)


def test_log_buffers_are_plain_ones_once_read(monkeypatch):
    monkeypatch.setattr(HistoryBuffer, '_statistics_methods', OrderedDict())  # of a process that has made none
    buffer = safe._ReadHistoryBuffer.__new__(safe._ReadHistoryBuffer)
    history = dict(_log_history=np.ones(2), _count_history=np.ones(2), max_length=2)
    buffer.__setstate__(dict(history, _statistics_methods=dict(mean=print), other=1))
    assert type(buffer) is HistoryBuffer and not hasattr(buffer, 'other') and buffer.mean() == 1
    assert (len(buffer.data[0]), buffer.max_length) == (2, 2)
    assert buffer.statistics('mean') == 1 and set(buffer._statistics_methods) == {'min', 'max', 'current', 'mean'}


@pytest.mark.parametrize('kind', ['?', 'i1', 'u8', 'f2', 'c16'])
def test_numbers_of_numpy_are_data(kind):
    assert safe._numpy_dtype(kind, False, True) == np.dtype(kind)


@pytest.mark.parametrize('kind', ['O', 'U3', 'S3', 'V8', 'M8[s]', 'm8[s]'])
def test_other_types_of_numpy_are_refused(kind):
    with pytest.raises(pickle.UnpicklingError, match='Unsupported global: GLOBAL numpy.dtype'):
        safe._numpy_dtype(kind)
    with pytest.raises(pickle.UnpicklingError, match='Unsupported global: GLOBAL numpy.dtype'):
        safe._numpy_scalar(np.dtype(kind), bytes(16))


def test_getattr_is_taken_off_pytorch_s_list():
    """Advice against MMEngine's error, which opens every attribute of every listed type; what else is there stays."""
    if not safe._TORCH_HAS_ALLOW_LIST:
        pytest.skip('this PyTorch has no list to extend')
    before = torch.serialization.get_safe_globals()
    try:
        torch.serialization.add_safe_globals([getattr, argparse.ArgumentParser])
        safe.allow_safe_globals()
        allowed = torch.serialization.get_safe_globals()
        assert getattr not in allowed and argparse.ArgumentParser in allowed
        assert set(safe.safe_globals()) <= {thing for thing in allowed if isinstance(thing, tuple)}
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


@pytest.mark.parametrize(
    'name, is_known',
    [
        ('ToyModel', True),
        ('mmengine.ToyModel', True),
        ('engine_toys.ToyModel', True),
        ('engine_toys.make_runner', False),
        ('mmdet.ToyModel', False),
        ('no_such_module.ToyModel', False),
        ('os.system', False),
    ],
)
def test_what_a_config_text_may_build(name, is_known):
    """What is registered with MMEngine, by its name, its scope or its module."""
    from engine_toys import ToyModel

    text = f'model = dict(type={name!r}, parts=[dict(type={ToyModel.__name__!r})])'
    if is_known:
        assert read_config_text(text, 'a').model.type == name
    else:
        with pytest.raises(CheckpointError, match=f"it builds '{name}', which is not registered"):
            read_config_text(text, 'a')


def test_types_of_every_registry_count_once_their_package_is_asked_for(monkeypatch):
    """Those of projects too, whose classes are registered as they are first needed."""
    registry = types.SimpleNamespace(scope='toys', module_dict={})
    registry.import_from_location = lambda: registry.module_dict.update(Late=object)
    monkeypatch.setattr(config_text, '_registries', lambda: [registry])
    for name in ('Late', 'toys.Late'):
        registry.module_dict.clear()
        text = f'model = dict(type={name!r})\ndefault_scope = "toys"'
        assert read_config_text(text, 'a').model.type == name
    with pytest.raises(CheckpointError, match="it builds 'mmdet.Late', which is not registered"):
        read_config_text("model = dict(type='mmdet.Late')", 'a')
    monkeypatch.undo()
    found = list(config_text._registries())
    for registry in (MODELS, *MODELS.children.values(), DATASETS, HOOKS):
        assert registry in found


def test_the_longest_known_module_of_a_name_counts(monkeypatch):
    """A class that is registered under its own name, named by where it is."""
    inner = types.ModuleType('outer.inner')
    inner.ToyModel, inner.other = MODELS.module_dict['ToyModel'], types.SimpleNamespace(ToyModel=int)
    inner.of_the_same_name = type('ToyModel', (), {})
    monkeypatch.setitem(sys.modules, 'outer', types.ModuleType('outer'))  # without an attribute of that name
    monkeypatch.setitem(sys.modules, 'outer.inner', inner)
    assert read_config_text("model = dict(type='outer.inner.ToyModel')", 'a').model
    for name in ('outer.ToyModel', 'outer.inner.other.ToyModel', 'outer.inner', 'outer.inner.of_the_same_name'):
        with pytest.raises(CheckpointError, match=f"it builds '{name}', which is not registered"):
            read_config_text(f'model = dict(type={name!r})', 'a')
