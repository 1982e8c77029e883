# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""tools/demo.py on ordinary pictures, for the three tasks, with small models and a checkpoint file."""

import copy
import re
import runpy
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from config_helpers import ROOT, build
from mmengine.config import Config

mmcv = pytest.importorskip('mmcv')
TOOL = ROOT / 'tools' / 'demo.py'
SMALL = dict(_delete_=True, embed_dims=(32, 64, 128, 160), depths=(1, 1, 1, 1), num_heads=(1, 2, 4, 5))
TASKS = {
    'mmdet': ('mmdet/ravlt_shapes_quickstart', {}),
    'mmseg': (
        'mmseg/ravlt_t_fpn_80k',
        {
            'model__backbone__arch': SMALL,
            'model__neck__in_channels': list(SMALL['embed_dims']),
            'model__decode_head__num_classes': 3,
            'test_dataloader__dataset__pipeline__1__scale': (96, 64),
        },
    ),
    'mmpretrain': (
        'mmpretrain/ravlt_t_in1k',
        {
            'model__backbone__arch': SMALL,
            'model__neck__in_channels': 160,
            'model__neck__out_channels': 64,
            'model__head__in_channels': 64,
            'model__head__num_classes': 3,
        },
    ),
}
CLASSES = {'mmdet': 'a b c d e f'.split(), 'mmseg': 'a b c'.split(), 'mmpretrain': 'a b c'.split()}


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    """Task -> config file and checkpoint file, made when first asked for."""
    files = {}

    def make(task):
        pytest.importorskip(task)
        if task not in files:
            folder = tmp_path_factory.mktemp(task)
            name, options = TASKS[task]
            torch.manual_seed(0)
            model, cfg = build(name, **copy.deepcopy(options))  # merging takes _delete_ out
            cfg.dump(str(folder / 'config.py'))
            torch.save(dict(state_dict=model.state_dict(), meta={}), folder / 'random.pth')
            files[task] = str(folder / 'config.py'), str(folder / 'random.pth')
        return files[task]

    return make


@pytest.fixture
def pictures(tmp_path):
    """A folder with two pictures and a text."""
    folder = tmp_path / 'pictures'
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in ('one.jpg', 'two.png'):
        mmcv.imwrite(rng.integers(0, 256, (70, 101, 3), dtype=np.uint8), str(folder / name))
    (folder / 'notes.txt').write_text('not a picture')
    return folder


def run(monkeypatch, *args):
    monkeypatch.setattr(sys, 'argv', ['demo.py', *map(str, args), '--device', 'cpu'])
    runpy.run_path(str(TOOL), run_name='__main__')


INFERENCERS = dict(mmdet='mmdet.apis.DetInferencer', mmseg='mmseg.apis.MMSegInferencer')
INFERENCERS.update(mmpretrain='mmpretrain.ImageClassificationInferencer')


@pytest.mark.parametrize('task', TASKS)
def test_options_reach_the_inferencer(monkeypatch, task):
    pytest.importorskip(task)
    inferencer, loaded = mock.MagicMock(model=SimpleNamespace(), visualizer=SimpleNamespace()), []
    inferencer.side_effect = lambda pictures, **_: [dict(pred_label=0, pred_score=1.0) for _ in pictures]
    build_one = mock.Mock(return_value=inferencer)
    monkeypatch.setattr(INFERENCERS[task], build_one)
    functions = runpy.run_path(str(TOOL), run_name='demo')
    monkeypatch.setitem(functions['draw'].__globals__, 'CheckpointLoader', mock.Mock())
    monkeypatch.setitem(functions['draw'].__globals__, 'check_weights', lambda *args: loaded.append(args))
    classes = ('moon', 'star')
    args = SimpleNamespace(config='c.py', checkpoint='c.pth', device='cuda:7', score_thr=0.7, classes=classes)
    functions['draw'](args, Config(dict(default_scope=task, model={}, test_dataloader={})), ['one.jpg'], 'out')
    (given,) = build_one.call_args_list
    assert 'cuda:7' in (*given.args, given.kwargs.get('device'))
    assert len(loaded) == 1 and loaded[0][0] is inferencer.model
    if task == 'mmdet':
        assert inferencer.call_args.kwargs['pred_score_thr'] == 0.7
    if task == 'mmpretrain':
        assert given.kwargs['classes'] == classes
    else:
        assert inferencer.model.dataset_meta['classes'] == classes
        assert inferencer.visualizer.dataset_meta['classes'] == classes


@pytest.mark.slow
@pytest.mark.parametrize('task', TASKS)
def test_draws_on_a_picture(made, pictures, tmp_path, monkeypatch, capsys, task):
    out = tmp_path / 'new' / 'found.png'
    threshold = () if task != 'mmdet' else ('--score-thr', '0')
    run(monkeypatch, pictures / 'two.png', *made(task), '--out', out, '--classes', *CLASSES[task], *threshold)
    drawn, given = mmcv.imread(str(out)), mmcv.imread(str(pictures / 'two.png'))
    assert task == 'mmpretrain' or drawn.shape == given.shape
    assert drawn.shape != given.shape or (drawn != given).mean() > 0.01
    if task == 'mmpretrain':
        assert re.search(r'two\.png: [abc] \(', capsys.readouterr().out.replace('\n', ''))


@pytest.mark.slow
def test_score_threshold(made, pictures, tmp_path, monkeypatch):
    run(monkeypatch, pictures / 'two.png', *made('mmdet'), '--out', tmp_path / 'none.png', '--score-thr', '0.999')
    drawn, given = mmcv.imread(str(tmp_path / 'none.png')), mmcv.imread(str(pictures / 'two.png'))
    assert np.array_equal(drawn, given)


@pytest.mark.slow
@pytest.mark.parametrize('task', TASKS)
def test_folder(made, pictures, tmp_path, monkeypatch, task):
    run(monkeypatch, pictures, *made(task), '--out', tmp_path / 'out')
    written = sorted(path.stem for path in (tmp_path / 'out').iterdir())
    assert len(written) == 2 and written[0].endswith('one') and written[1].endswith('two')


@pytest.mark.parametrize(
    'change, message',
    [
        (dict(image='gone.jpg'), "image 'gone.jpg': no such file or folder"),
        (dict(image='{folder}/notes.txt'), 'cannot be read as a picture'),
        (dict(config='gone.py'), "config 'gone.py': no such file"),
        (dict(checkpoint='gone.pth'), "checkpoint 'gone.pth': no such file"),
        (dict(out='found'), "--out 'found' has to end in"),
        (dict(out='found.gif'), "--out 'found.gif' has to end in"),
        (dict(image='{folder}', out='{folder}/one.jpg'), 'is a file; for a folder'),
    ],
)
def test_bad_input_is_one_line(made, pictures, tmp_path, monkeypatch, capsys, change, message):
    config, checkpoint = made('mmdet')
    args = dict(image='{folder}/one.jpg', config=config, checkpoint=checkpoint, out=str(tmp_path / 'found.jpg'))
    args = {key: value.format(folder=pictures) for key, value in {**args, **change}.items()}
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, args['image'], args['config'], args['checkpoint'], '--out', args['out'])
    error = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 1 and error[-1].startswith('error:') and message in error[-1]


@pytest.mark.slow
@pytest.mark.parametrize('task', TASKS)
def test_wrong_number_of_class_names(made, pictures, tmp_path, monkeypatch, capsys, task):
    with pytest.raises(SystemExit):
        run(monkeypatch, pictures / 'one.jpg', *made(task), '--out', tmp_path / 'x.png', '--classes', 'only', 'two')
    assert '--classes: 2 names given, the model has' in capsys.readouterr().err


@pytest.mark.slow
def test_file_that_is_no_checkpoint_is_one_line(made, pictures, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, pictures / 'one.jpg', made('mmdet')[0], pictures / 'notes.txt', '--out', tmp_path / 'x.png')
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith('error:') and 'notes.txt' in error
