# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""tools/demo.py on ordinary images, for the three tasks, with small models and a checkpoint file."""

import copy
import re
import runpy
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from config_helpers import ROOT, build
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.registry import DefaultScope

from mmlinattn.utils.errors import RunError

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
    """A folder with two images and a text."""
    folder = tmp_path / 'pictures'
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in ('one.jpg', 'two.png'):
        mmcv.imwrite(rng.integers(0, 256, (70, 101, 3), dtype=np.uint8), str(folder / name))
    (folder / 'notes.txt').write_text('not an image')
    return folder


def run(monkeypatch, *args):
    monkeypatch.setattr(sys, 'argv', ['demo.py', *map(str, args), '--device', 'cpu'])
    runpy.run_path(str(TOOL), run_name='__main__')


INFERENCERS = dict(mmdet='mmdet.apis.DetInferencer', mmseg='mmseg.apis.MMSegInferencer')
INFERENCERS.update(mmpretrain='mmpretrain.ImageClassificationInferencer')


def draws_itself(inferencer, found):
    """Have a stand-in find this in images and name the drawings as MMPretrain does: alike where stems begin alike."""

    def visualize(pictures, samples, show_dir):
        for picture, sample in zip(pictures, samples):
            (Path(show_dir) / Path(picture).stem).with_suffix('.png').write_text(f'{picture} {sample}')

    inferencer.side_effect = lambda pictures, **_: [f'sample {i}' for i in range(len(pictures))]
    inferencer.postprocess.side_effect = lambda samples, _: found[: len(samples)]
    inferencer.visualize.side_effect = visualize


def test_what_has_to_be_given(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['demo.py'])
    with pytest.raises(SystemExit):
        runpy.run_path(str(TOOL), run_name='demo')['parse_args']()
    assert capsys.readouterr().err.endswith('arguments are required: image, config, checkpoint, --out\n')


@pytest.mark.parametrize('task', TASKS)
def test_options_reach_the_inferencer(monkeypatch, tmp_path, task):
    pytest.importorskip(task)
    inferencer, loaded = mock.MagicMock(model=SimpleNamespace(), visualizer=SimpleNamespace()), []
    draws_itself(inferencer, [dict(pred_label=0, pred_score=1.0)])
    build_one = mock.Mock(return_value=inferencer)
    monkeypatch.setattr(INFERENCERS[task], build_one)
    functions = runpy.run_path(str(TOOL), run_name='demo')
    loader = mock.Mock()
    monkeypatch.setitem(functions['draw'].__globals__, 'CheckpointLoader', loader)
    monkeypatch.setitem(functions['draw'].__globals__, 'check_weights', lambda *args: loaded.append(args))
    classes = ('moon', 'star')
    args = SimpleNamespace(config='c.py', checkpoint='c.pth', device='cuda:7', score_thr=0.7, classes=classes)
    cfg = Config(dict(default_scope=task, model={}, test_dataloader={}))
    functions['draw'](args, cfg, ['one.jpg'], str(tmp_path))
    (given,) = build_one.call_args_list
    assert 'cuda:7' in (*given.args, given.kwargs.get('device'))
    assert loaded == [(inferencer.model, loader.load_checkpoint.return_value)]
    if task == 'mmdet':
        assert inferencer.call_args.kwargs['pred_score_thr'] == 0.7
    if task == 'mmpretrain':
        assert given.kwargs['classes'] == classes
    else:
        assert inferencer.model.dataset_meta['classes'] == classes
        assert inferencer.visualizer.dataset_meta['classes'] == classes


@pytest.mark.parametrize('task', TASKS)
def test_what_inferencers_are_asked_for(monkeypatch, capsys, tmp_path, task):
    """Drawings below the folder given, a bar for several images, without names the model's own."""
    pytest.importorskip(task)
    kept = SimpleNamespace(dataset_meta='kept')
    inferencer = mock.MagicMock(model=kept, visualizer=SimpleNamespace())
    found = [dict(pred_label=2, pred_score=0.25), dict(pred_label=1, pred_class='moon', pred_score=0.5)]
    draws_itself(inferencer, found)
    build_one = mock.Mock(return_value=inferencer)
    monkeypatch.setattr(INFERENCERS[task], build_one)
    functions = runpy.run_path(str(TOOL), run_name='demo')
    loader = mock.Mock()
    monkeypatch.setitem(functions['draw'].__globals__, 'CheckpointLoader', loader)
    monkeypatch.setitem(functions['draw'].__globals__, 'check_weights', lambda *_: None)
    args = SimpleNamespace(config='c.py', checkpoint='c.pth', device='cpu', score_thr=0.3, classes=None)
    cfg = Config(dict(default_scope=task, model={}, test_dataloader={}))
    for pictures in (['one.jpg'], ['one.jpg', 'two.jpg']):
        out = str(tmp_path / str(len(pictures)))
        Path(out).mkdir()
        functions['draw'](args, cfg, pictures, out)
        assert inferencer.call_args.args == (pictures,)
        given = build_one.call_args
        assert given.args[:2] == ('c.py', 'c.pth')
        if task != 'mmpretrain':
            shown = given.kwargs['show_progress'] if task == 'mmdet' else inferencer.show_progress
            assert shown == (len(pictures) > 1)
    assert (
        inferencer.call_args.kwargs
        == dict(
            mmdet=dict(out_dir=out, pred_score_thr=0.3, no_save_pred=True),
            mmseg=dict(out_dir=out),
            mmpretrain=dict(return_datasamples=True),
        )[task]
    )
    assert kept.dataset_meta == 'kept'
    assert loader.load_checkpoint.call_args == mock.call('c.pth', 'cpu', logger='silent')
    if task == 'mmpretrain':
        assert capsys.readouterr().out.splitlines()[-2:] == ['one.jpg: 2 (0.250)', 'two.jpg: moon (0.500)']
        assert given.kwargs['classes'] is None


@pytest.mark.parametrize('task', TASKS)
@pytest.mark.parametrize('named', ['checkpoint', 'config', 'nobody'])
def test_labels_have_their_own_names(monkeypatch, tmp_path, task, named):
    """Those of the checkpoint, else of the config; not those of COCO or ImageNet, which inferencers take."""
    meta = dict(dataset_meta=dict(classes=['a', 'b', 'c'])) if named == 'checkpoint' else {}
    data = dict(metainfo=dict(classes=('d', 'e', 'f'))) if named != 'nobody' else {}
    upstreams = dict(classes=tuple('xyz') if named == 'nobody' else ('person', 'car'))
    inferencer = mock.MagicMock(model=SimpleNamespace(dataset_meta=upstreams), visualizer=SimpleNamespace())
    draws_itself(inferencer, [dict(pred_label=0, pred_score=1.0)])
    functions = runpy.run_path(str(TOOL), run_name='demo')
    names, loader = functions['draw'].__globals__, mock.Mock()
    loader.load_checkpoint.return_value = dict(state_dict={}, meta=meta)
    monkeypatch.setitem(names, 'build_inferencer', lambda *_: inferencer)
    monkeypatch.setitem(names, 'CheckpointLoader', loader)
    monkeypatch.setitem(names, 'check_weights', lambda *_: None)
    head = dict(mmdet='bbox_head', mmseg='decode_head', mmpretrain='head')[task]
    model = {head: dict(num_classes=3)}
    cfg = Config(dict(default_scope=task, model=model, test_dataloader=dict(dataset=data)))
    args = SimpleNamespace(config='c.py', checkpoint='c.pth', device='cpu', score_thr=0.3, classes=None)
    functions['draw'](args, cfg, ['one.jpg'], str(tmp_path))
    expected = dict(checkpoint=['a', 'b', 'c'], config=['d', 'e', 'f'], nobody=None)[named]
    if task == 'mmpretrain':
        assert inferencer.classes == expected  # numbers where nobody has names
    else:
        assert list(inferencer.model.dataset_meta['classes']) == (expected or list('xyz'))


def test_pictures_whose_names_begin_alike_have_a_drawing_each(monkeypatch, tmp_path):
    """MMPretrain would put both days, and the three kinds of b, into one file each."""
    pytest.importorskip('mmpretrain')
    inferencer = mock.MagicMock(model=SimpleNamespace(), visualizer=SimpleNamespace())
    pictures = ['2024.01.01.jpg', '2024.01.02.jpg', 'b.jpg', 'b.png', 'b.png.bmp']
    draws_itself(inferencer, [dict(pred_label=0, pred_score=1.0)] * len(pictures))
    functions = runpy.run_path(str(TOOL), run_name='demo')
    names = functions['draw'].__globals__
    monkeypatch.setitem(names, 'build_inferencer', lambda *_: inferencer)
    monkeypatch.setitem(names, 'CheckpointLoader', mock.Mock())
    monkeypatch.setitem(names, 'check_weights', lambda *_: None)
    cfg = Config(dict(default_scope='mmpretrain', model={}, test_dataloader={}))
    args = SimpleNamespace(config='c.py', checkpoint='c.pth', device='cpu', score_thr=0.3, classes=None)
    functions['draw'](args, cfg, pictures, str(tmp_path))
    drawn = {path.name: path.read_text() for path in (tmp_path / 'vis').iterdir()}
    assert drawn == {
        '2024.01.01.png': '2024.01.01.jpg sample 0',
        '2024.01.02.png': '2024.01.02.jpg sample 1',
        'b.png': 'b.jpg sample 2',
        'b.png.png': 'b.png sample 3',
        'b.png.bmp.png': 'b.png.bmp sample 4',
    }


def test_a_model_that_cannot_be_built_is_said_in_one_error(monkeypatch):
    pytest.importorskip('mmdet')
    scopes = []

    def fails(*_, **__):
        scopes.append(DefaultScope.get_current_instance().scope_name)
        raise KeyError('Nowhere is not in the mmdet::model registry')

    monkeypatch.setattr(INFERENCERS['mmdet'], fails)
    draw = runpy.run_path(str(TOOL), run_name='demo')['draw']
    args = SimpleNamespace(config='c.py', checkpoint='c.pth', device='cpu', score_thr=0.3, classes=None)
    with pytest.raises(RunError, match='Nowhere is not in the mmdet::model registry'):
        draw(args, Config(dict(default_scope='mmdet', model={}, test_dataloader={})), ['one.jpg'], 'out')
    assert scopes == ['mmdet']


@pytest.fixture
def main(pictures, tmp_path, monkeypatch):
    """The tool with a stand-in for the model: what is asked for, and what is said at the end."""
    names = runpy.run_path(str(TOOL), run_name='demo')['main'].__globals__
    seen = SimpleNamespace(drawn=[], said=[], ends=0)

    def draw(args, cfg, given, folder):
        seen.drawn.append((args, given))
        target = Path(folder, 'vis')
        target.mkdir()
        Path(folder, 'preds').mkdir()  # as MMSegmentation's, beside the drawings
        for path in given:
            mmcv.imwrite(255 - mmcv.imread(path), str(target / Path(path).with_suffix('.png').name))

    def run(*args):
        monkeypatch.setattr(sys, 'argv', ['demo.py', *map(str, args)])
        names['main']()

    @contextmanager
    def clean_end():
        yield
        seen.ends += 1

    monkeypatch.setitem(names, 'clean_end', clean_end)
    monkeypatch.setitem(names, 'draw', draw)
    monkeypatch.setitem(names, 'notice', seen.said.append)
    monkeypatch.setitem(names, 'read_config', lambda path: Config(dict(path=path)))
    monkeypatch.setitem(names, 'check_checkpoint', lambda path, name: f'checked {path}')
    seen.run = run
    return seen


def test_drawings_go_where_out_says(main, pictures, tmp_path):
    """In the format of its suffix; of folders under their names, by their names; temporary files are gone."""
    out = tmp_path / 'new' / 'found.bmp'
    main.run(pictures / 'two.png', 'c.py', 'c.pth', '--out', out)
    (args, given), *_ = main.drawn
    assert given == [str(pictures / 'two.png')] and args.checkpoint == 'checked c.pth'
    assert args.score_thr == 0.3 and args.classes is None and args.device == get_device()
    assert np.array_equal(mmcv.imread(str(out)), 255 - mmcv.imread(given[0])) and out.read_bytes()[:2] == b'BM'
    assert main.said == [f'1 image(s) in {out}'] and [path.name for path in out.parent.iterdir()] == ['found.bmp']
    folder = tmp_path / 'deep' / 'folder'
    more = '--score-thr', 0.5, '--classes', 'a', 'b', '--device', 'cuda:3'
    main.run(pictures, 'c.py', 'c.pth', '--out', folder, *more)
    args, given = main.drawn[1]
    assert given == [str(pictures / name) for name in ('one.jpg', 'two.png')]  # no text
    assert (args.score_thr, args.classes, args.device) == (0.5, ['a', 'b'], 'cuda:3')
    assert sorted(path.name for path in folder.iterdir()) == ['one.png', 'two.png']
    assert main.said[1] == f'2 image(s) in {folder}' and main.ends == 2


def test_which_pictures_of_a_folder(tmp_path):
    find = runpy.run_path(str(TOOL), run_name='demo')['find_pictures']
    names = ['b.TIFF', 'a.webp', 'c.jpeg', 'd.bmp', 'e.tif', 'f.JPG', 'g.png']
    for name in (*names, 'h.gif', 'jpg'):
        (tmp_path / name).touch()
    (tmp_path / 'below').mkdir()
    (tmp_path / 'below' / 'a.png').touch()
    (tmp_path / 'folder.png').mkdir()
    (tmp_path / '._b.jpg').touch()  # macOS's, beside an image on a disk of others
    assert find(str(tmp_path)) == [str(tmp_path / name) for name in sorted(names)]
    empty = tmp_path / 'empty'
    empty.mkdir()
    with pytest.raises(RunError, match=f"image '{empty}': no image .*in this folder"):
        find(str(empty))


def test_an_out_that_cannot_be_written_is_named(tmp_path):
    check = runpy.run_path(str(TOOL), run_name='demo')['check_out']
    (tmp_path / 'file').touch()
    for out, folder in (('file/a.png', False), ('file/a', True)):
        with pytest.raises(RunError, match='--out .*file/a.*cannot be written: '):
            check(str(tmp_path / out), folder)
    for name in ('a.JPG', 'new/b.webp'):
        assert check(str(tmp_path / name), False) == tmp_path / name and (tmp_path / name).parent.is_dir()


def test_the_lines_of_the_demo(tmp_path, monkeypatch):
    functions = runpy.run_path(str(TOOL), run_name='demo')
    suffixes = '.jpg .jpeg .png .bmp .tif .tiff .webp'
    (tmp_path / 'folder').mkdir()
    (tmp_path / 'file.gif').touch()

    def line(name, *args):
        with pytest.raises(RunError) as found:
            functions[name](*args)
        return str(found.value)

    folder, file = str(tmp_path / 'folder'), str(tmp_path / 'file.gif')
    assert line('find_pictures', 'gone') == "image 'gone': no such file or folder."
    assert line('find_pictures', folder) == f'image {folder!r}: no image ({suffixes}) in this folder.'
    assert functions['find_pictures'](file) == [file]  # what is named is tried
    assert line('check_out', file, False) == f'--out {file!r} has to end in one of {suffixes}.'
    assert line('check_out', file, True) == f'--out {file!r} is a file; for a folder of images it has to be a folder.'
    below = f'{file}/a'
    assert line('check_out', below, True) == f'--out {below!r} cannot be written: Not a directory.'
    picture = f'{file}/a/b.png'
    assert line('check_out', picture, False) == f'--out {picture!r} cannot be written: Not a directory.'
    below = str(tmp_path / 'new' / 'a.png')
    functions['check_out'](below, False)
    assert not any((tmp_path / 'new').iterdir())

    (tmp_path / 'empty.png').touch()
    empty = str(tmp_path / 'empty.png')
    assert line('check_pictures', [empty]) == f'image {empty!r} cannot be read as an image.'

    class DecoderError(Exception):
        """As decoders have their own, which are no ValueError or OSError (cv2.error)."""

    def read(path):
        if path == 'broken':
            raise DecoderError
        return None if path == 'none' else np.zeros((1, 1, 3))

    monkeypatch.setitem(functions['check_pictures'].__globals__, 'mmcv', SimpleNamespace(imread=read))
    functions['check_pictures'](['a', 'b'])
    for path in ('broken', 'none'):
        assert line('check_pictures', ['a', path, 'b']) == f'image {path!r} cannot be read as an image.'

    def fails(*args):
        raise TypeError(f'of {len(args)} arguments')

    monkeypatch.setitem(functions['draw'].__globals__, 'build_inferencer', fails)
    cfg = Config(dict(default_scope='mmseg', model={}, test_dataloader={}))
    assert line('draw', SimpleNamespace(config='c.py'), cfg, [], 'out') == (
        'c.py cannot be run: TypeError: of 3 arguments (MMLINATTN_TRACEBACK=1 shows where)'
    )


def test_names_need_colours():
    """A palette is kept where it has a colour a class, else made, the same each time."""
    functions = runpy.run_path(str(TOOL), run_name='demo')

    def named(meta, names, classes=2):
        model, visualizer = SimpleNamespace(dataset_meta=meta), SimpleNamespace()
        cfg = Config(dict(model=dict(bbox_head=dict(num_classes=classes))))
        functions['name_classes'](cfg, SimpleNamespace(model=model, visualizer=visualizer), names)
        assert visualizer.dataset_meta == model.dataset_meta and model.dataset_meta['classes'] == ('a', 'b')
        return model.dataset_meta

    own = [(1, 2, 3), (4, 5, 6)]
    assert named(dict(palette=own, classes=('x', 'y'), more=1), ['a', 'b']) == dict(
        palette=own, classes=('a', 'b'), more=1
    )
    for meta in (dict(palette=own[:1]), dict(palette='ab'), {}, None):
        palette = named(meta, ['a', 'b'])['palette']
        assert len(set(palette)) == 2 and all(len(c) == 3 and 0 <= min(c) <= max(c) < 256 for c in palette)
        assert palette == named({}, ['a', 'b'])['palette']
    named({}, ['a', 'b'], classes=0)  # nobody knows how many
    with pytest.raises(RunError, match='--classes: 2 names given, the model has 5 classes'):
        named({}, ['a', 'b'], classes=5)


def test_a_classifier_has_as_many_names_as_classes(monkeypatch):
    pytest.importorskip('mmpretrain')
    monkeypatch.setattr(INFERENCERS['mmpretrain'], mock.Mock())
    build_inferencer = runpy.run_path(str(TOOL), run_name='demo')['build_inferencer']
    args = SimpleNamespace(config='c.py', checkpoint='c.pth', device='cpu', classes=['a', 'b'])
    cfg = Config(dict(default_scope='mmpretrain', model=dict(head=dict(num_classes=3))))
    with pytest.raises(RunError, match='--classes: 2 names given, the model has 3 classes'):
        build_inferencer(args, cfg, 1)
    args.classes.append('c')
    build_inferencer(args, cfg, 1)


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        (dict(default_scope='mmaction'), "c.py: default_scope = 'mmaction' is none of mmdet, mmseg, mmpretrain"),
        ({}, 'c.py: default_scope = None is none of'),
        (dict(default_scope='mmdet', model={}), 'test_dataloader'),
    ],
)
def test_configs_that_cannot_be_drawn_with(settings, message):
    draw = runpy.run_path(str(TOOL), run_name='demo')['draw']
    with pytest.raises(RunError, match=re.escape(message)):
        draw(SimpleNamespace(config='c.py', checkpoint='c.pth'), Config(settings), [], 'out')


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
        (dict(image='{folder}/notes.txt'), 'cannot be read as an image'),
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
