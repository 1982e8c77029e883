# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Each path that a checkpoint may take, with each file of the corpus: refused in one line, or loaded as data."""

import sys

import corpus
import pytest
import torch
from checkpoint_helpers import ARCH
from corpus import DATA, ENTRIES, REFUSED
from engine_toys import ToyModel, make_runner
from mmengine.config import Config
from mmengine.infer import BaseInferencer
from mmengine.registry import MODELS
from mmengine.runner import load_checkpoint
from mmengine.runner.checkpoint import CheckpointLoader

from mmlinattn.checkpoints import convert, load_file
from mmlinattn.engine.checkpoint_match import check_weights
from mmlinattn.utils.errors import RunError

HOOKS = [dict(type='CheckpointMatchHook')]
TOY = dict(model=dict(type='ToyWithBackbone', backbone=dict(type='ToyModel')), default_scope='mmengine')


@MODELS.register_module(force=True)
class ToyWithBackbone(ToyModel):
    """ToyModel in the form that upstream's functions ask of a config; they set more arguments."""

    def __init__(self, backbone, **_):
        super().__init__()
        self.backbone = MODELS.build(backbone)


class Files:
    """The corpus on disk, and a runner that loads and resumes one file after the other."""

    def __init__(self, folder):
        each = dict(checkpoint=dict(type='CheckpointHook', interval=1))
        make_runner(folder / 'first', HOOKS, train_cfg=dict(by_epoch=True, max_epochs=1), default_hooks=each).train()
        self.marker = folder / 'files' / 'was_run'
        self.precious = folder / 'files' / 'precious'
        self.marker.parent.mkdir()
        saved = torch.load(folder / 'first' / 'epoch_1.pth', weights_only=True)
        self.paths = corpus.build(self.marker.parent, saved, self.marker)
        self.work_dir = folder / 'work'
        self.runner = make_runner(self.work_dir, HOOKS)
        self.runner._train_loop = self.runner.build_train_loop(self.runner._train_loop)


@pytest.fixture(scope='module')
def files(tmp_path_factory):
    return Files(tmp_path_factory.mktemp('corpus'))


def read(files, path):
    load_file(path)


def read_by_mmengine(files, path):
    CheckpointLoader.load_checkpoint(path, 'cpu', logger='silent')


def load_into_a_model(files, path):
    load_checkpoint(ToyModel(), path, 'cpu', logger='silent')


def compare_with_a_model(files, path):
    check_weights(ToyModel(), CheckpointLoader.load_checkpoint(path, 'cpu', logger='silent'))


def load_from(files, path):
    files.runner.load_checkpoint(path)


def load_for_a_test(files, path):
    files.runner._train_loop, loop = None, files.runner._train_loop
    try:
        files.runner.load_checkpoint(path)
    finally:
        files.runner._train_loop = loop


def resume(files, path):
    files.runner.resume(path)


def auto_resume(files, path):
    (files.work_dir / 'last_checkpoint').write_text(f'work/{path.rpartition("/")[2]}')
    link = files.work_dir / path.rpartition('/')[2]
    link.unlink(missing_ok=True)
    link.symlink_to(path)
    files.runner._has_loaded, files.runner._resume, files.runner._load_from = False, True, None
    try:
        files.runner.load_or_resume()
    finally:
        files.runner._resume = False


def init_cfg(files, path):
    model = dict(type='RAVLT', arch=dict(ARCH), init_cfg=dict(type='Pretrained', checkpoint=path))
    MODELS.build(model).init_weights()


def convert_to_a_config(files, path):
    config = files.marker.parent / 'config.py'
    if not config.exists():
        config.write_text(f"model = dict(type='ToyWithBackbone', backbone=dict(type='RAVLT', arch={ARCH}))\n")
    convert.convert_checkpoint(path, files.work_dir / 'converted.pth', config)


def inferencer(files, path):
    class Inferencer(BaseInferencer):
        _init_pipeline = _init_visualizer = visualize = postprocess = lambda *args, **kwargs: None

    Inferencer(weights=path, device='cpu')


def init_detector(files, path):
    pytest.importorskip('mmdet.apis').init_detector(Config(TOY), path, palette='coco', device='cpu')


def init_segmentor(files, path):
    try:
        pytest.importorskip('mmseg.apis').init_model(Config(TOY), path, device='cpu')
    except KeyError as error:  # it looks for class names without looking for meta
        assert error.args == ('meta',)


def get_model(files, path):
    pytest.importorskip('mmpretrain.apis').get_model(Config(TOY), pretrained=path)


# path: which outcome of an entry it has to come to; None where upstream's loading has the last word on what it means
PATHS = {
    read: 'load',
    read_by_mmengine: 'load',
    load_into_a_model: None,
    compare_with_a_model: 'fit',
    load_for_a_test: 'fit',
    load_from: None,
    resume: 'resume',
    auto_resume: 'resume',
    init_cfg: None,
    convert_to_a_config: None,
    inferencer: None,
    init_detector: None,
    init_segmentor: None,
    get_model: None,
}
# Refused when it is put to MMEngine: a list in a file is data to load_file.
ONLY_MMENGINE = (
    'a list',
    'None',
    'a string',
    'a state dict that is a list',
    'meta that is a list',
    'keys that are numbers',
    'keys that clear the screen',
    'a log scalar that clears the screen',
    'a key of a million parts',
    'a dict with a method of its own',
)


def test_the_corpus_is_large_enough():
    assert len(ENTRIES) >= 60
    assert {file.load for file in ENTRIES.values()} == {REFUSED, DATA}


@pytest.mark.timeout(120)
@pytest.mark.parametrize('path', PATHS, ids=lambda path: path.__name__)
@pytest.mark.filterwarnings('ignore')
def test_every_file_on_every_path(files, path, monkeypatch, capfd):
    monkeypatch.setattr('builtins.input', lambda *_: pytest.fail('asks'))
    wrong = []
    for name, file in ENTRIES.items():
        expected = getattr(file, PATHS[path]) if PATHS[path] else None
        if expected is None and file.load == REFUSED:
            expected = REFUSED
        if path is read and name in ONLY_MMENGINE:
            expected = DATA
        try:
            path(files, str(files.paths[name]))
            outcome = DATA
        except RunError as error:
            text = str(error)
            outcome = REFUSED if text.isprintable() and len(text) < 9000 else f'not a line: {text!r}'
        except Exception as error:
            outcome = f'{type(error).__name__}: {error}'
        if files.marker.exists():
            files.marker.unlink()
            outcome = 'RAN CODE'
        if not files.precious.is_dir():
            outcome = 'REMOVED FILES'
        if outcome not in (REFUSED, DATA) or expected not in (None, outcome):
            wrong.append(f'{name}: {outcome}, expected {expected}')
    out = ''.join(capfd.readouterr())
    assert not wrong, '\n'.join(wrong)
    assert '\x1b[2J' not in out and '\x07' not in out
    assert 'antigravity' not in sys.modules
