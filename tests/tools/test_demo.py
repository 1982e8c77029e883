# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""tools/demo.py: drawings of small models of the three tasks, and what upstream's inferencers are asked for."""

import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from config_helpers import ROOT, load
from mmengine.device import get_device
from mmengine.registry import MODELS, DefaultScope, init_default_scope
from torch import nn

mmcv = pytest.importorskip('mmcv')
TOOL = ROOT / 'tools' / 'demo.py'
INFERENCERS = dict(
    mmdet='mmdet.apis.DetInferencer',
    mmseg='mmseg.apis.MMSegInferencer',
    mmpretrain='mmpretrain.ImageClassificationInferencer',
)
NUM_CLASSES = dict(mmdet=6, mmseg=10, mmpretrain=12)
NAMES = {task: [f'name_{i}' for i in range(number)] for task, number in NUM_CLASSES.items()}


def config(task):
    pytest.importorskip(task)
    return ROOT / 'configs' / task / 'ravlt_shapes_quickstart.py'


def run(*args):
    with mock.patch.object(sys, 'argv', ['demo.py', *map(str, args)]):
        runpy.run_path(str(TOOL), run_name='__main__')


@pytest.fixture
def pictures(tmp_path):
    """A folder with images and with what is none: a text, a folder, macOS's file beside an image."""
    folder = tmp_path / 'pictures'
    (folder / 'folder.png').mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in ('one.jpg', 'two.PNG', 'folder.png/below.png'):
        mmcv.imwrite(rng.integers(0, 256, (70, 101, 3), dtype=np.uint8), str(folder / name))
    for name in ('notes.txt', 'jpg', '._one.jpg'):
        (folder / name).write_text('not an image')
    return folder


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """In place of a task's inferencer: it inverts images, as upstream's draw them, and notes what it is asked."""

    def put(task, of_model=None, **meta):
        pytest.importorskip(task)
        model = nn.Linear(1, 1)
        model.dataset_meta = of_model
        checkpoint = tmp_path / 'model.pth'
        torch.save(dict(state_dict=model.state_dict(), meta=meta), checkpoint)
        seen = SimpleNamespace(checkpoint=checkpoint, calls=[], inferencer=None)

        def inverted(path, target):
            target.parent.mkdir(exist_ok=True)
            mmcv.imwrite(255 - mmcv.imread(path), str(target))

        class Inferencer:
            show_progress = visualizer = None

            def __init__(self, *args, **kwargs):
                self.model, self.visualizer, seen.inferencer = model, SimpleNamespace(), self
                seen.built = [*args, kwargs.pop('device', None)], kwargs, DefaultScope.get_current_instance().scope_name

            def __call__(self, inputs, out_dir=None, **kwargs):
                seen.calls.append((inputs, kwargs))
                for path in inputs if out_dir else ():
                    inverted(path, Path(out_dir, 'vis', Path(path).with_suffix('.png').name))
                    Path(out_dir, 'preds').mkdir(exist_ok=True)  # as MMSegmentation's
                return [f'sample {i}' for i in range(len(inputs))]

            def postprocess(self, samples, _):
                found = [dict(pred_label=2, pred_score=0.25), dict(pred_label=1, pred_class='moon', pred_score=0.5)]
                return [found[i % 2] for i in range(len(samples))]

            def visualize(self, inputs, samples, show_dir):  # names are alike where stems begin alike
                for path in inputs:
                    inverted(path, (Path(show_dir) / Path(path).stem).with_suffix('.png'))

        monkeypatch.setattr(INFERENCERS[task], Inferencer)
        return seen

    return put


@pytest.mark.parametrize('task', INFERENCERS)
def test_what_inferencers_are_asked_for(stand_in, pictures, tmp_path, capsys, task):
    """All images at once, with a bar where there are several; one is drawn in the format that ``--out`` says."""
    seen, conf = stand_in(task), str(config(task))
    out = tmp_path / 'new' / 'found.bmp'
    run(pictures / 'two.PNG', conf, seen.checkpoint, '--out', out)
    given = mmcv.imread(str(pictures / 'two.PNG'))
    assert np.array_equal(mmcv.imread(str(out)), 255 - given) and out.read_bytes()[:2] == b'BM'
    assert [path.name for path in out.parent.iterdir()] == ['found.bmp']
    assert capsys.readouterr().err == f'notice: 1 image(s) in {out}\n'
    words, options, scope = seen.built
    assert words[:2] == [conf, str(seen.checkpoint)] and get_device() in words and scope == task
    assert (seen.inferencer.show_progress if task == 'mmseg' else options.get('show_progress', False)) is False

    more = ['--device', 'cuda:7', '--classes', *NAMES[task], *(['--score-thr', 0.7] if task == 'mmdet' else [])]
    run(pictures, conf, seen.checkpoint, '--out', tmp_path / 'deep' / 'folder', *more)
    words, options, _ = seen.built
    assert 'cuda:7' in words
    assert sorted(path.name for path in (tmp_path / 'deep' / 'folder').iterdir()) == ['one.png', 'two.png']
    one, several = seen.calls
    both = [str(pictures / name) for name in ('one.jpg', 'two.PNG')]
    assert (one[0], several[0]) == ([str(pictures / 'two.PNG')], both)
    said = capsys.readouterr()
    assert said.err == f'notice: 2 image(s) in {tmp_path / "deep" / "folder"}\n'
    if task == 'mmpretrain':
        assert options['classes'] == seen.inferencer.classes == NAMES[task]
        assert said.out.splitlines() == [f'{both[0]}: 2 (0.250)', f'{both[1]}: moon (0.500)']
    else:
        assert seen.inferencer.visualizer.dataset_meta['classes'] == tuple(NAMES[task])
        assert (seen.inferencer.show_progress if task == 'mmseg' else options['show_progress']) is True
    if task == 'mmdet':
        assert [kwargs for _, kwargs in seen.calls] == [dict(pred_score_thr=t, no_save_pred=True) for t in (0.3, 0.7)]


@pytest.mark.parametrize('task', INFERENCERS)
@pytest.mark.parametrize('named', ['checkpoint', 'config', 'nobody'])
def test_labels_have_their_own_names(stand_in, pictures, tmp_path, task, named):
    """Those of the checkpoint, else of the config; not those of COCO or ImageNet, which inferencers take."""
    of_config, number = tmp_path / 'config.py', NUM_CLASSES[task]
    names = {'checkpoint': NAMES[task], 'config': [f'of_config_{i}' for i in range(number)], 'nobody': None}[named]
    data = dict(metainfo=dict(classes=None if named == 'nobody' else [f'of_config_{i}' for i in range(number)]))
    of_config.write_text(
        f'_base_ = {str(config(task))!r}\ntest_dataloader = dict(dataset={dict(data, type="Nobody")!r})\n'
    )
    upstream = ['person', 'car']
    meta = dict(dataset_meta=dict(classes=NAMES[task])) if named == 'checkpoint' else {}
    seen = stand_in(task, dict(classes=upstream), **meta)
    run(pictures / 'one.jpg', of_config, seen.checkpoint, '--out', tmp_path / 'o.png')
    if task == 'mmpretrain':
        assert seen.inferencer.classes == names  # numbers where nobody has names
    else:
        assert list(seen.inferencer.model.dataset_meta['classes']) == (names or upstream)


@pytest.mark.parametrize('palette', [None, [(1, 2, 3)], 'random', [(i, 9, 9) for i in range(6)]], ids=str)
def test_names_need_colours(stand_in, pictures, tmp_path, palette):
    """A palette is kept where it has a colour a class, else made."""
    seen = stand_in('mmdet', dict(palette=palette, more=1) if palette else None)
    options = ['--out', tmp_path / 'o.png', '--classes', *NAMES['mmdet']]
    run(pictures / 'one.jpg', config('mmdet'), seen.checkpoint, *options)
    meta = seen.inferencer.model.dataset_meta
    assert seen.inferencer.visualizer.dataset_meta == meta and ('more' in meta) == bool(palette)
    if isinstance(palette, list) and len(palette) == 6:
        assert meta['palette'] == palette
    else:
        assert len(set(meta['palette'])) == 6 and all(0 <= min(c) <= max(c) < 256 for c in meta['palette'])


def test_pictures_whose_names_begin_alike_have_a_drawing_each(stand_in, tmp_path):
    """MMPretrain would put both days, and the three kinds of b, into one file each."""
    seen, folder = stand_in('mmpretrain'), tmp_path / 'alike'
    names = ['2024.01.01.jpg', '2024.01.02.jpg', 'b.jpg', 'b.png', 'b.png.bmp', 'c.webp', 'd.TIFF', 'e.jpeg', 'f.tif']
    for i, name in enumerate(names):
        mmcv.imwrite(np.full((8, 8, 3), 20 * i, np.uint8), str(folder / name))
    (folder / 'g.gif').touch()
    run(folder, config('mmpretrain'), seen.checkpoint, '--out', tmp_path / 'out')
    drawn = {path.name: mmcv.imread(str(path))[4, 4, 0] for path in (tmp_path / 'out').iterdir()}
    expected = '2024.01.01.png 2024.01.02.png b.png b.png.png b.png.bmp.png c.png d.png e.png f.png'
    assert set(drawn) == set(expected.split())
    assert all(abs(int(drawn[name]) - 255 + 20 * i) < 4 for i, name in enumerate(expected.split()))


@pytest.mark.slow
@pytest.mark.parametrize('task', INFERENCERS)
def test_draws_with_models(pictures, tmp_path, capsys, task):
    conf, checkpoint = config(task), tmp_path / 'model.pth'
    init_default_scope(task)
    torch.save(dict(state_dict=MODELS.build(load(f'{task}/ravlt_shapes_quickstart').model).state_dict()), checkpoint)
    threshold = ['--score-thr', 0] if task == 'mmdet' else []
    run(pictures, conf, checkpoint, '--out', tmp_path / 'out', '--classes', *NAMES[task], *threshold)
    drawings = {path.stem: str(path) for path in (tmp_path / 'out').iterdir()}
    assert sorted(drawings) == ['one', 'two']
    drawn, given = mmcv.imread(drawings['two']), mmcv.imread(str(pictures / 'two.PNG'))
    assert task == 'mmpretrain' or drawn.shape == given.shape
    assert drawn.shape != given.shape or (drawn != given).mean() > 0.01
    if task == 'mmpretrain':
        assert re.search(r'two\.PNG: name_\d+ \(', capsys.readouterr().out.replace('\n', ''))
    if task == 'mmdet':
        run(pictures / 'two.PNG', conf, checkpoint, '--out', tmp_path / 'none.png', '--score-thr', 0.999)
        assert np.array_equal(mmcv.imread(str(tmp_path / 'none.png')), given)
