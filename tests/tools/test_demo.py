# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""tools/demo.py: drawings of small models of the three tasks, by upstream's inferencers."""

import re
from pkgutil import resolve_name
from unittest import mock

import mmcv
import numpy as np
import pytest
import torch
from config_helpers import load
from mmengine.registry import MODELS, DefaultScope, init_default_scope
from tool_runs import QUICK, in_this_process

INFERENCERS = dict(
    mmdet='mmdet.apis:DetInferencer',
    mmseg='mmseg.apis:MMSegInferencer',
    mmpretrain='mmpretrain:ImageClassificationInferencer',
)
NAMES = {task: [f'name_{i}' for i in range(number)] for task, number in dict(mmdet=6, mmseg=10, mmpretrain=12).items()}


@pytest.fixture
def run(tmp_path):
    """Runs the tool with an untrained model whose file has ``meta``; gives the inferencer it built."""

    def start(task, image, out, *args, of_config=None, **meta):
        pytest.importorskip(task)
        init_default_scope(task)
        torch.manual_seed(0)
        state = MODELS.build(load(f'{task}/ravlt_shapes_quickstart').model).state_dict()
        torch.save(dict(state_dict=state, meta=meta), tmp_path / 'model.pth')
        kind, made = resolve_name(INFERENCERS[task]), []
        keep = mock.patch.object(
            kind, '__init__', lambda self, *a, init=kind.__init__, **k: made.append(self) or init(self, *a, **k)
        )
        with keep:
            in_this_process('demo.py', image, of_config or QUICK[task], tmp_path / 'model.pth', '--out', out, *args)
        assert DefaultScope.get_current_instance().scope_name == task
        return made[0]

    return start


@pytest.fixture
def pictures(tmp_path):
    """A folder with images, some of whose names begin alike, and with what is none: a text, a folder, macOS's file."""
    folder = tmp_path / 'pictures'
    (folder / 'folder.png').mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in ('2024.01.01.jpg', '2024.01.02.jpg', 'b.jpg', 'b.png', 'b.png.bmp', 'c.TIFF', 'folder.png/below.png'):
        mmcv.imwrite(rng.integers(0, 256, (70, 101, 3), dtype=np.uint8), str(folder / name))
    for name in ('notes.txt', 'jpg', '._one.jpg', 'g.gif'):
        (folder / name).write_text('not an image')
    return folder


@pytest.mark.parametrize('task', INFERENCERS)
def test_a_folder_of_pictures(run, pictures, tmp_path, capsys, task):
    """A drawing each, in a folder that is made, with the names of ``--classes``."""
    out, threshold = tmp_path / 'deep' / 'folder', ['--score-thr', 0] if task == 'mmdet' else []
    if task != 'mmpretrain':  # whose drawings alone would be named alike
        for name in ('2024.01.02.jpg', 'b.png', 'b.png.bmp'):
            (pictures / name).unlink()
    inferencer = run(task, pictures, out, '--classes', *NAMES[task], *threshold)
    drawn = sorted(path.name for path in out.iterdir())
    said = capsys.readouterr()
    assert f'notice: {len(drawn)} image(s) in {out}\n' in said.err
    if task == 'mmpretrain':
        assert drawn == '2024.01.01.png 2024.01.02.png b.png b.png.bmp.png b.png.png c.png'.split()
        labels = re.findall(rf'^{pictures}/(\S+): (\w+) \([01]\.\d{{3}}\)$', said.out, re.M)
        assert [name for name, _ in labels] == '2024.01.01.jpg 2024.01.02.jpg b.jpg b.png b.png.bmp c.TIFF'.split()
        assert {label for _, label in labels} <= set(NAMES[task])
    else:
        assert len(drawn) == 3
        assert inferencer.visualizer.dataset_meta['classes'] == tuple(NAMES[task])
        (path,) = out.glob('c.*')
        drawing, given = mmcv.imread(str(path)), mmcv.imread(str(pictures / 'c.TIFF'))
        assert drawing.shape == given.shape and (drawing != given).mean() > 0.01


@pytest.mark.parametrize('task', INFERENCERS)
@pytest.mark.parametrize('named', ['checkpoint', 'config', 'nobody'])
def test_one_picture_in_the_format_that_is_asked_for(run, pictures, tmp_path, capsys, task, named):
    """Above a score that nothing has, a detector draws nothing. Labels have the names of the checkpoint, else of the
    config; not those of COCO or ImageNet, which inferencers take."""
    of_config = [f'of_config_{i}' for i in range(len(NAMES[task]))]
    names = {'checkpoint': NAMES[task], 'config': of_config, 'nobody': None}[named]
    data = dict(metainfo=dict(classes=None if named == 'nobody' else of_config))
    path, out = tmp_path / 'config.py', tmp_path / 'new' / 'found.bmp'
    path.write_text(f'_base_ = {QUICK[task]!r}\ntest_dataloader = dict(dataset={data!r})\n')
    palette = [(i, 9, 9) for i in range(len(NAMES[task]))]
    meta = dict(dataset_meta=dict(classes=NAMES[task], palette=palette)) if named == 'checkpoint' else {}
    plain = np.full((70, 101, 3), 100, np.uint8)  # Matplotlib before 3.11 draws pictures a part of a pixel off
    mmcv.imwrite(plain, str(pictures / 'b.png'))
    inferencer = run(task, pictures / 'b.png', out, '--device', 'cpu', '--score-thr', 0.999, of_config=path, **meta)
    assert out.read_bytes()[:2] == b'BM' and [path.name for path in out.parent.iterdir()] == ['found.bmp']
    assert capsys.readouterr().err.endswith(f'notice: 1 image(s) in {out}\n')
    assert next(inferencer.model.parameters()).device.type == 'cpu'
    drawing = mmcv.imread(str(out))
    assert drawing.shape == plain.shape and (task == 'mmdet') == np.array_equal(drawing, plain)
    if task == 'mmpretrain':
        assert inferencer.classes == names  # numbers where nobody has names
    elif names:
        assert list(inferencer.visualizer.dataset_meta['classes']) == names


@pytest.mark.parametrize('task', ['mmseg', 'mmpretrain'])
def test_an_image_that_is_too_small_keeps_no_other_from_being_drawn(run, tmp_path, capsys, task):
    """It is named in the last line."""
    folder, out = tmp_path / 'pictures', tmp_path / 'out'
    for name, size in dict(a=60, b=20, c=60).items():
        mmcv.imwrite(np.zeros((size, size, 3), np.uint8), str(folder / f'{name}.png'))
    path = tmp_path / 'config.py'
    steps = [dict(type='LoadImageFromFile'), dict(type='PackSegInputs' if task == 'mmseg' else 'PackInputs')]
    loader = dict(dataset=dict(pipeline=steps))
    path.write_text(f'_base_ = {QUICK[task]!r}\ntest_pipeline = {steps!r}\ntest_dataloader = {loader!r}\n')
    with pytest.raises(SystemExit, match='1'):
        run(task, folder, out, of_config=path)
    assert sorted(drawn.name for drawn in out.iterdir()) == ['a.png', 'c.png']
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"error: image '{folder}/b.png': the model refuses it: ValueError: ") and '32' in last


@pytest.mark.parametrize(('threshold', 'count'), [(0.01, 12), (0.99, 0)])
def test_a_classifier_of_several_labels(run, pictures, tmp_path, capsys, threshold, count):
    """All of them are named, or none."""
    path, loss = tmp_path / 'config.py', dict(type='CrossEntropyLoss', use_sigmoid=True)
    head = dict(type='MultiLabelLinearClsHead', topk=None, thr=threshold, loss=loss)
    path.write_text(f'_base_ = {QUICK["mmpretrain"]!r}\nmodel = dict(head={head!r})\n')
    run('mmpretrain', pictures / 'b.png', tmp_path / 'out.png', '--classes', *NAMES['mmpretrain'], of_config=path)
    said = capsys.readouterr().out
    assert len(re.findall(r'name_\d+ \(0\.\d{3}\)', said)) == count and ('b.png: no class' in said) == (count == 0)


def test_a_classifier_of_several_tasks_is_refused(run, pictures, tmp_path, capsys):
    path, fc = tmp_path / 'config.py', dict(type='LinearClsHead', num_classes=12)
    head = dict(_delete_=True, type='MultiTaskHead', in_channels=64, task_heads=dict(a=fc, b=fc))
    path.write_text(f'_base_ = {QUICK["mmpretrain"]!r}\nmodel = dict(head={head!r})\n')
    with pytest.raises(SystemExit, match='1'):
        run('mmpretrain', pictures / 'b.png', tmp_path / 'out.png', of_config=path)
    assert 'labels of several tasks are not drawn' in capsys.readouterr().err
