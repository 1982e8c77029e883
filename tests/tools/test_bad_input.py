# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The tools on hostile files and on configs with mistakes: one line, status 1, no traceback."""

import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import touch_when_loaded

pytest.importorskip('mmpretrain')
TOOLS = Path(__file__).resolve().parents[2] / 'tools'
CONFIG = TOOLS.parent / 'configs' / 'mmpretrain' / 'ravlt_shapes_quickstart.py'


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Images of three classes, and a checkpoint that was trained on them by nobody."""
    from mmengine.registry import MODELS, init_default_scope

    from mmlinattn.apis.configs import read_config
    from mmlinattn.datasets import DatasetSpec, write_dataset

    folder = tmp_path_factory.mktemp('tools')
    write_dataset(folder / 'data', DatasetSpec('imagenet', 3, 1, size=(64, 64)))
    init_default_scope('mmpretrain')
    state = MODELS.build(read_config(str(CONFIG)).model).state_dict()
    torch.save(dict(state_dict=state, meta={}), folder / 'model.pth')
    state['head.fc.weight'][0] = float('nan')
    torch.save(dict(state_dict=state, meta={}), folder / 'nan.pth')
    return folder


@pytest.fixture
def fails(folder, monkeypatch, capfd):
    """Run a tool in the folder and return the one line it leaves on stderr."""
    monkeypatch.chdir(folder)

    def run(tool, *args):
        monkeypatch.setattr(sys, 'argv', [tool, *map(str, args)])
        with pytest.raises(SystemExit) as exit_:
            runpy.run_path(str(TOOLS / tool), run_name='__main__')
        out, err = capfd.readouterr()
        assert exit_.value.code == 1
        errors = [line for line in err.splitlines() if line.startswith('error: ')]
        assert len(errors) == 1 and err.rstrip().endswith(errors[0]) and 'Traceback' not in err
        assert errors[0].isprintable() and '\x1b[2J' not in out + err
        return errors[0]

    return run


def pretrained_by(file) -> str:
    config = Path('pretrained.py')
    config.write_text(
        f'_base_ = {str(CONFIG)!r}\n'
        f"init_cfg = dict(_delete_=True, type='Pretrained', checkpoint={str(file)!r})\n"
        'model = dict(backbone=dict(init_cfg=init_cfg))\n'
    )
    return str(config)


DATA = ['--data-root', 'data', '--work-dir', 'work']
PATHS = {
    'train --resume': lambda file: ('train.py', CONFIG, '--resume', file, *DATA),
    'train load_from': lambda file: ('train.py', CONFIG, *DATA, '--cfg-options', f'load_from={file}'),
    'train init_cfg': lambda file: ('train.py', pretrained_by(file), *DATA),
    'test': lambda file: ('test.py', CONFIG, file, *DATA),
    'demo': lambda file: ('demo.py', next(Path('data').rglob('*.JPEG')), CONFIG, file, '--out', 'out.jpg'),
}  # fmt: skip
FILES = {
    'code': (lambda marker: {'state_dict': {}, 'anything': touch_when_loaded(marker)}, 'is not known to be harmless'),
    'nothing': (lambda marker: None, 'holds a NoneType, not a state dict'),
    'keys that are numbers': (lambda marker: {1: torch.ones(1)}, 'a key that is no printable string'),
    'keys that clear the screen': (lambda marker: {'\x1b[2J': torch.ones(1)}, 'a key that is no printable string'),
    'weights of another model': (lambda marker: {'state_dict': {'w': torch.ones(2)}}, ''),
}


@pytest.mark.slow
@pytest.mark.parametrize('path', PATHS)
@pytest.mark.parametrize('kind', FILES)
def test_a_hostile_file(fails, folder, kind, path):
    file, marker = folder / 'hostile.pth', folder / 'was_run'
    make, said = FILES[kind]
    torch.save(make(marker), file)
    line = fails(*PATHS[path](file))
    assert said in line and not marker.exists() and not Path('out.jpg').exists()


@pytest.mark.slow
def test_a_pipe_is_not_waited_for(fails, folder):
    os.mkfifo(folder / 'pipe')
    assert 'pipe' in fails(*PATHS['test'](folder / 'pipe'))


@pytest.mark.slow
def test_broken_weights_need_an_option(fails, monkeypatch):
    for args in (PATHS['test']('nan.pth'), PATHS['demo']('nan.pth')):
        line = fails(*args)
        assert '1 weights of the checkpoint are NaN or infinite: head.fc.weight' in line and 'nan.pth' in line
    line = fails(*PATHS['test']('nan.pth'))
    option = line.rpartition('--cfg-options ')[2]
    assert option.endswith('allow_nonfinite=True')
    monkeypatch.setattr(sys, 'argv', [*map(str, PATHS['test']('nan.pth')), '--cfg-options', option])
    runpy.run_path(str(TOOLS / 'test.py'), run_name='__main__')


def test_names_that_are_not_known(fails):
    assert 'ravlt_b' in fails('test.py', CONFIG, 'mmlinattn://no_such', *DATA)
    assert 'ravlt_b' in fails('train.py', CONFIG, '--resume', 'mmlinattn://no_such', *DATA)


@pytest.mark.parametrize(
    'content',
    [
        b'',
        b'\xff\xfe\x00',
        b'a\nb',
        b'x' * 10000,
        b'\x1b[2J',
        b'http://127.0.0.1:9/x.pth',
        b's3://x/y.pth',
        b'/etc/passwd',
    ],
)
def test_any_last_checkpoint(fails, content):
    os.makedirs('work', exist_ok=True)
    Path('work/last_checkpoint').write_bytes(content)
    line = fails('train.py', CONFIG, '--resume', *DATA)
    Path('work/last_checkpoint').unlink()
    assert 'work/last_checkpoint names' in line and 'delete that file to begin from the start' in line


@pytest.mark.parametrize('kind', ['pipe', 'folder'])
def test_a_last_checkpoint_that_is_no_file(fails, kind):
    os.makedirs('work', exist_ok=True)
    path = Path('work/last_checkpoint')
    os.mkfifo(path) if kind == 'pipe' else path.mkdir()
    line = fails('train.py', CONFIG, '--resume', *DATA)
    path.unlink() if kind == 'pipe' else path.rmdir()
    assert 'work/last_checkpoint is not a file' in line


MISTAKES = {
    'model.backbone.arch=huge': 'arch',
    'model.backbone.depth=3': "unexpected keyword argument 'depth'",
    'model.backbone.type=RAVLTT': 'RAVLTT',
    'model.head.num_classes=1': 'num_classes = 1 of the head is too small',
    'train_dataloader.batch_size=-2': 'train_dataloader.batch_size = -2 has to be an integer from 1 up',
    'optim_wrapper.optimizer.lr=-1': 'Invalid learning rate: -1',
    'train_cfg.max_epochs=None': '',
    'custom_hooks.0.type=NoSuchHook': 'NoSuchHook',
}


@pytest.mark.slow
@pytest.mark.parametrize('mistake', MISTAKES)
def test_a_mistake_in_a_config(fails, mistake):
    assert MISTAKES[mistake] in fails('train.py', CONFIG, *DATA, '--cfg-options', mistake)


@pytest.mark.parametrize('text', ['', '# nothing\n', 'model = None\n', "model = dict(type='RAVLT')\n"])
def test_a_config_without_a_model_or_data(fails, text):
    Path('empty.py').write_text(text)
    assert 'empty.py has no ' in fails('train.py', 'empty.py', '--work-dir', 'work')
    assert 'empty.py has no ' in fails('test.py', 'empty.py', 'model.pth', '--work-dir', 'work')


def test_a_port_that_is_taken():
    with socket.socket() as other:
        other.bind(('', 0))
        other.listen()
        port = other.getsockname()[1]
        run = ['bash', str(TOOLS / 'dist_train.sh'), str(CONFIG), '2']
        env = {**os.environ, 'PORT': str(port), 'PYTHON': sys.executable}
        done = subprocess.run(run, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith(f'error: PORT = {port} cannot be used')
    assert done.stderr.count('\n') == 1


def test_a_config_that_ends_the_program(fails):
    Path('leaves.py').write_text('import sys\nsys.exit(0)\n')
    assert 'leaves.py' in fails('train.py', 'leaves.py')
