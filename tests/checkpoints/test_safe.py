# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Read a file as data, or raise one line with its name; run nothing in it."""

import argparse
import functools
import io
import os
import pickle
import re
import threading
import time
import warnings
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.checkpoint_helpers import Hostile, touch_when_loaded
from mmengine.config import ConfigDict
from mmengine.logging import HistoryBuffer
from mmengine.optim.scheduler import OneCycleLR
from torch import nn
from torch.serialization import get_safe_globals

from mmlinattn.checkpoints import CheckpointError, load_file


@pytest.fixture(params=['zip', 'legacy'])
def save(request, tmp_path):
    def save(thing, **kwargs):
        torch.save(thing, tmp_path / 'a.pth', _use_new_zipfile_serialization=request.param == 'zip', **kwargs)
        return tmp_path / 'a.pth'

    return save


def error_line(path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_file(path)
    line = str(caught.value)
    assert str(path) in line and line.isprintable() and len(line) < 1000
    return line


def test_history_buffers_keep_statistics_without_functions(save):
    given = HistoryBuffer([3.0, 1.0], [1, 1], max_length=3)
    vars(given).update(update=1, _statistics_methods={'mean': HistoryBuffer.max})
    (buffer,) = load_file(save({'scalars': [given]}))['scalars']
    assert buffer.statistics('mean') == 2.0 and buffer.statistics('min') == 1.0
    for value in (5.0, 7.0):
        buffer.update(value)
    written = pickle.loads(pickle.dumps(buffer))  # by MMEngine, in the next checkpoint
    assert type(written) is HistoryBuffer and written.max_length == 3
    for found in (buffer, written):
        assert found.current() == 7.0 and list(found.data[0]) == [1.0, 5.0, 7.0]
    assert load_file(save(dict(loss=HistoryBuffer())))['loss'].data[0].size == 0


@pytest.mark.parametrize('strategy', ['cos', 'linear'])
def test_one_cycle_schedules(save, strategy):
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1, momentum=0.9)
    scheduler = OneCycleLR(optimizer, eta_max=0.2, total_steps=5, anneal_strategy=strategy)
    found = load_file(save(scheduler.state_dict()))['anneal_func']
    assert found is scheduler.anneal_func and found.__name__ == f'_annealing_{strategy}'


def test_plain_data(save):
    arrays = {code: np.arange(3).astype(code) for code in '?bhilqBHILQefdgFDG'}
    scalars = {code: array[1] for code, array in arrays.items() if code not in 'gG'}
    others = dict(milestones=Counter([3, 3, 5]), names={'a', 'b'}, size=torch.Size([2, 3]), bytes=b'\x00\xff', no=None)
    args, config = argparse.Namespace(lr=0.1, output_dir=Path('runs')), ConfigDict(model=dict(depth=2))
    found = load_file(save(dict(arrays=arrays, scalars=scalars, args=args, config=config, **others)))
    for code, array in arrays.items():
        assert found['arrays'][code].dtype == array.dtype and (found['arrays'][code] == array).all()
    assert found['scalars'] == scalars and all(found['scalars'][code].dtype == code for code in scalars)
    assert {key: found[key] for key in others} == others and type(found['milestones']) is Counter
    assert found['args'].lr == 0.1 and str(found['args'].output_dir) == 'runs'
    assert found['config']['model']['depth'] == 2


def renamed(path, *names: bytes) -> Path:
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, 'w') as archive:
        for name, data in parts.items():
            archive.writestr(name, re.sub(b'|'.join(map(re.escape, names[:-1])), names[-1], data))
    return path


@pytest.mark.parametrize('core', [b'core', b'_core'])
def test_numpy_data_of_numpy_1_and_2(tmp_path, core):
    """Read arrays pickled by both versions; NumPy 2 renamed its modules."""
    torch.save({'array': np.arange(6.0).reshape(2, 3), 'scalar': np.float32(0.5)}, tmp_path / 'a.pth')
    names = (b'numpy.%s.multiarray' % name for name in (b'core', b'_core', core))
    loaded = load_file(renamed(tmp_path / 'a.pth', *names))
    assert loaded['array'].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert loaded['scalar'] == 0.5 and loaded['scalar'].dtype == np.float32


@pytest.mark.parametrize('module', [b'pathlib', b'pathlib._local'])
def test_paths_of_all_versions_of_python(tmp_path, module):
    """Python 3.13 moved the class."""
    torch.save(dict(output_dir=Path('runs')), tmp_path / 'a.pth')
    names = (b'%s\nPosixPath' % name for name in (b'pathlib', b'pathlib._local', module))
    assert str(load_file(renamed(tmp_path / 'a.pth', *names))['output_dir']) == 'runs'


class Settings(dict):
    """Dict with attributes, as yacs' node, and with arguments, as addict's dict."""

    def __getnewargs__(self):
        return tuple(self.items())


@pytest.mark.parametrize('name', [b'yacs.config\nCfgNode', b'addict.addict\nDict', b'mmcv.utils.config\nConfigDict'])
def test_settings_of_packages_not_installed(tmp_path, name):
    """Read yacs nodes of Swin's files, and dicts whose attributes could replace their methods."""
    node = Settings(MODEL=Settings(DEPTHS=[2, 2]))
    vars(node).update(__immutable__=True, pop=Settings)
    torch.save(dict(config=node, meta=node), tmp_path / 'a.pth')
    own = f'{Settings.__module__}\nSettings'.encode()
    found = load_file(renamed(tmp_path / 'a.pth', own, name))
    assert found['config'] == {'MODEL': {'DEPTHS': [2, 2]}} and not vars(found['config'])


HOSTILE = {
    'posix.system': touch_when_loaded,
    'eval': lambda marker: Hostile(eval, f'open({str(marker)!r}, "w")'),
    'getattr': lambda marker: Hostile(getattr, HistoryBuffer, '__init__'),
    'functools.partial': lambda marker: functools.partial(os.system, f'touch {marker}'),
    '_pickle.loads': lambda marker: Hostile(pickle.loads, pickle.dumps(touch_when_loaded(marker))),
    'numpy.dtype[object]': lambda marker: np.array([touch_when_loaded(marker)], dtype=object),
    'torch.nn.modules.linear.Linear': lambda marker: nn.Linear(1, 1),
}


@pytest.mark.parametrize('name', HOSTILE)
def test_code_raises_by_name(save, tmp_path, name):
    marker = tmp_path / 'was_run'
    line = error_line(save({'state_dict': {'w': torch.ones(1)}, 'meta': {'x': HOSTILE[name](marker)}}))
    assert 'was refused: it asks for' in line and name.rpartition('.')[2] in line and not marker.exists()


def zipped(content: bytes, *names: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, 'w') as archive:
        for name in names:
            archive.writestr(name, content)
    return file.getvalue()


CONTAINERS = {
    'a zip without a pickle': (lambda content: zipped(content, 'a/weights.pth'), 'zip archive, but not'),
    'TorchScript': (lambda content: zipped(content, 'a/data.pkl', 'a/constants.pkl'), 'TorchScript program'),
    'a page': (lambda content: b'\n<!DOCTYPE html><script>', 'is a web page'),
    'a pointer': (lambda content: b'version https://git-lfs.github.com/spec/v1\noid sha256:0', 'git lfs pull'),
    'nothing': (lambda content: b'', 'is empty'),
    'a plain pickle': (lambda content: content, 'not a checkpoint written by torch.save'),
    'noise': (lambda content: np.random.RandomState(0).bytes(5000), 'not a checkpoint written by torch.save'),
}


@pytest.mark.parametrize('kind', CONTAINERS)
@pytest.mark.filterwarnings('ignore')  # of the zip file with two entries
def test_other_containers_are_not_opened(tmp_path, kind):
    make, said = CONTAINERS[kind]
    (tmp_path / 'a.pth').write_bytes(make(pickle.dumps(touch_when_loaded(tmp_path / 'was_run'), 2)))
    assert said in error_line(tmp_path / 'a.pth') and not (tmp_path / 'was_run').exists()


@pytest.mark.parametrize('kept', [0.001, 0.5, 0.999])
def test_truncated_files(save, kept):
    path = save({'state_dict': {f'w{i}': torch.randn(100) for i in range(20)}})
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) + 1])
    error_line(path)


def test_missing_files_folders_and_pipes(tmp_path):
    missing = tmp_path / 'no.pth'
    assert error_line(missing) == f'checkpoint {missing} does not exist'
    with pytest.raises(FileNotFoundError):  # caught by code written for MMEngine
        load_file(missing)
    os.mkfifo(tmp_path / 'pipe')
    for path in (tmp_path, tmp_path / 'pipe'):
        assert 'is a folder or a device' in error_line(path)


@pytest.mark.parametrize(
    'thing, said',
    [
        ([torch.ones(1)], 'holds a list, not a state dict'),
        (None, 'holds a NoneType, not a state dict'),
        ({'state_dict': [1]}, 'state_dict of .* is a list, not a dict'),
        ({'meta': 'x'}, 'meta of .* is a str, not a dict'),
        ({'meta': {}, 7: torch.ones(1)}, 'a key that is no printable string: 7'),
        ({'state_dict': {'\x1b[2J': torch.ones(1)}}, r"a key that is no printable string: '\\x1b"),
        ({'ema_state_dict': {(1,): torch.ones(1)}}, 'a key that is no printable string'),
    ],
    ids=str,
)
def test_contents_that_mmengine_does_not_expect(save, thing, said):
    assert re.search(said, error_line(save(thing)))


def test_the_config_text_of_meta_is_dropped(save):
    meta = dict(config='import os', cfg='model = 1', epoch=3, hook_msgs=dict(config=1))
    found = load_file(save(dict(meta=meta, state_dict=nn.Linear(1, 1).state_dict(), optimizer=dict(config=2))))
    assert found['meta'] == dict(cfg='model = 1', epoch=3, hook_msgs=dict(config=1))
    assert found['optimizer'] == dict(config=2) and found['state_dict']._metadata


def test_reading_changes_no_global_state(save, tmp_path, monkeypatch):
    theirs, allowed, load = get_safe_globals(), [], torch.load
    monkeypatch.setattr(
        torch, 'load', lambda *args, **kwargs: allowed.extend(get_safe_globals()) or load(*args, **kwargs)
    )
    torch.serialization.clear_safe_globals()  # of earlier tests
    torch.serialization.add_safe_globals([getattr])  # common advice on MMEngine's error
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings('error', message='Detected pickle protocol')
            torch.save({'w': torch.ones(1)}, tmp_path / 'b.pth', pickle_protocol=3)
            assert load_file(tmp_path / 'b.pth')['w'] == 1
        assert 'builtins.getattr' in error_line(save({'w': Hostile(getattr, HistoryBuffer, '__init__')}))
        assert allowed and getattr not in allowed  # of two entries with a name, PyTorch takes either
        assert get_safe_globals() == [getattr]
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(theirs)


def test_concurrent_threads(save, monkeypatch):
    path, load, found = save(dict(loss=HistoryBuffer([1.0], [1]))), torch.load, []

    monkeypatch.setattr(torch, 'load', lambda *args, **kwargs: time.sleep(0.2) or load(*args, **kwargs))
    threads = [threading.Thread(target=lambda: found.append(load_file(path))) for _ in range(2)]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    assert len(found) == 2
