# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import argparse
import builtins
import os
import pickle
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_helpers import Hostile, touch_when_loaded
from mmengine.config import ConfigDict
from mmengine.logging import HistoryBuffer
from mmengine.optim.scheduler import OneCycleLR
from torch import nn

from mmlinattn.checkpoints import CheckpointError, load_file, safe


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
