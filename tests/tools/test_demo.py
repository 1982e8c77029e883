# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""tools/demo.py: drawings of small models of the three tasks."""

import copy
import itertools
import json
import os
import re
from contextlib import nullcontext
from unittest import mock

import cv2
import mmcv
import numpy as np
import pytest
import torch
from helpers.config_helpers import load
from helpers.tool_runs import QUICK, in_this_process
from mmengine import fileio
from mmengine.registry import MODELS, VISUALIZERS, DefaultScope, init_default_scope

TASKS = ('mmdet', 'mmseg', 'mmpretrain')
NAMES = {task: [f'name_{i}' for i in range(number)] for task, number in dict(mmdet=6, mmseg=10, mmpretrain=12).items()}


@pytest.fixture
def run(tmp_path):
    """Return a function that runs the tool on the checkpoint of an untrained model, and returns the visualizer.

    ``settings`` are names of a config over the quick-start config of the task.
    """

    def start(task, image, out, *args, settings=None, channels=3, **meta):
        pytest.importorskip(task)
        init_default_scope(task)
        torch.manual_seed(0)
        model = copy.deepcopy(load(f'{task}/ravlt_shapes_quickstart').model)
        model.backbone.in_channels = channels
        state = MODELS.build(model).state_dict()
        torch.save(dict(state_dict=state, meta=meta), tmp_path / 'model.pth')
        text = [f'{name} = {value!r}' for name, value in (settings or {}).items()]
        (tmp_path / 'config.py').write_text('\n'.join([f'_base_ = {QUICK[task]!r}', *text]))
        words, made = [*(['--out', out] if out else []), *args], []
        build = VISUALIZERS.build
        with mock.patch.object(VISUALIZERS, 'build', lambda cfg: made.append(build(cfg)) or made[0]):
            in_this_process('demo.py', tmp_path / 'config.py', tmp_path / 'model.pth', image, *words)
        assert DefaultScope.get_current_instance().scope_name == task
        return made[0]

    return start


@pytest.fixture
def pictures(tmp_path):
    """Folder with images of similar names, a text, a folder and a hidden file of macOS."""
    folder = tmp_path / 'pictures'
    (folder / 'folder.png').mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in ('2024.01.01.jpg', '2024.01.02.jpg', 'b.jpg', 'b.png', 'b.png.bmp', 'c.TIFF', 'folder.png/below.png'):
        mmcv.imwrite(rng.integers(0, 256, (70, 101, 3), dtype=np.uint8), str(folder / name))
    for name in ('notes.txt', 'jpg', '._one.jpg', 'g.gif'):
        (folder / name).write_text('not an image')
    return folder


@pytest.mark.parametrize('task', TASKS)
def test_a_folder_of_pictures(run, pictures, tmp_path, capsys, task):
    out, masks = tmp_path / 'deep' / 'folder', tmp_path / 'labels'
    options = dict(mmdet=['--score-thr', 0], mmseg=['--save-labels', masks], mmpretrain=[])[task]
    if task != 'mmpretrain':  # its drawings alone would have one name
        for name in ('2024.01.02.jpg', 'b.png', 'b.png.bmp'):
            (pictures / name).unlink()
    visualizer = run(task, pictures, out, '--classes', *NAMES[task], *options)
    drawn = sorted(path.name for path in out.iterdir())
    said = capsys.readouterr()
    assert f'{len(drawn)} image(s) in {out}\n' in said.out
    assert f"1 folder(s) inside {str(pictures)!r}, as 'folder.png', are not read" in said.err
    if task == 'mmpretrain':
        assert drawn == '2024.01.01.jpg 2024.01.02.jpg b.jpg b.png b.png.bmp.png c.TIFF.png'.split()
        labels = re.findall(rf'^{pictures}/(\S+): (\w+) \([01]\.\d{{3}}\)$', said.out, re.M)
        assert [name for name, _ in labels] == '2024.01.01.jpg 2024.01.02.jpg b.jpg b.png b.png.bmp c.TIFF'.split()
        assert {label for _, label in labels} <= set(NAMES[task])
    else:
        assert len(drawn) == 3
        assert visualizer.dataset_meta['classes'] == NAMES[task]
        (path,) = out.glob('c.*')
        drawing, given = mmcv.imread(str(path)), mmcv.imread(str(pictures / 'c.TIFF'))
        assert drawing.shape == given.shape and (drawing != given).mean() > 0.01
    if task == 'mmseg':
        assert sorted(path.name for path in masks.iterdir()) == ['2024.01.01.png', 'b.png', 'c.png']
        labels = mmcv.imread(str(masks / 'c.png'), 'unchanged')
        assert labels.shape == (70, 101) and labels.dtype == np.uint8
        assert 1 <= labels.min() <= labels.max() <= 10  # reduce_zero_label


@pytest.mark.parametrize('key', [ord('q'), 27])
def test_windows_show_the_drawings_until_a_key_ends_them(run, pictures, tmp_path, monkeypatch, key):
    folder, out, shown, keys = tmp_path / 'few', tmp_path / 'out', [], iter([ord('a'), 1 << 8 | key])
    for i in range(3):
        mmcv.imwrite(mmcv.imread(str(pictures / 'b.png'))[i:], str(folder / f'{i}.png'))
    monkeypatch.setenv('DISPLAY', ':0')
    monkeypatch.setattr(cv2, 'imshow', lambda name, drawn: shown.append(drawn))
    monkeypatch.setattr(cv2, 'waitKey', lambda wait: next(keys) if wait == 0 else pytest.fail('does not wait'))
    run('mmpretrain', folder, out, '--show')
    assert len(shown) == 2
    for i, drawn in enumerate(shown):
        assert np.array_equal(drawn, mmcv.imread(str(out / f'{i}.png')))


@pytest.mark.parametrize('task', TASKS)
@pytest.mark.parametrize('named', ['checkpoint', 'config', 'nobody'])
def test_one_picture_in_the_format_that_is_asked_for(run, pictures, tmp_path, capsys, task, named):
    """Draw nothing below the threshold. Class names are from the checkpoint or the config, or numbers."""
    of_config = [f'of_config_{i}' for i in range(len(NAMES[task]))]
    names = {'checkpoint': NAMES[task], 'config': of_config, 'nobody': None}[named]
    data = dict(metainfo=dict(classes=None if named == 'nobody' else of_config))
    settings, out = dict(test_dataloader=dict(dataset=data)), tmp_path / 'new' / 'found.bmp'
    palette = [(i, 9, 9) for i in range(len(NAMES[task]))]
    meta = dict(dataset_meta=dict(classes=NAMES[task], palette=palette)) if named == 'checkpoint' else {}
    plain = np.full((70, 101, 3), 100, np.uint8)  # Matplotlib before 3.11 draws pictures a part of a pixel off
    mmcv.imwrite(plain, str(pictures / 'b.png'))
    visualizer = run(task, pictures / 'b.png', out, '--device', 'cpu', '--score-thr', 0.999, settings=settings, **meta)
    assert out.read_bytes()[:2] == b'BM' and [path.name for path in out.parent.iterdir()] == ['found.bmp']
    assert capsys.readouterr().out.endswith(f'1 image(s) in {out}\n')
    drawing = mmcv.imread(str(out))
    assert drawing.shape == plain.shape and (task == 'mmdet') == np.array_equal(drawing, plain)
    if task == 'mmpretrain':
        assert visualizer.dataset_meta == dict(classes=names)  # numbers without names
    else:
        unnamed = [f'class {i}' for i in range(len(NAMES[task]))]
        assert visualizer.dataset_meta['classes'] == (names or unnamed)
        assert len(visualizer.dataset_meta['palette']) >= len(NAMES[task])


@pytest.mark.parametrize(
    ('task', 'error'), [*itertools.product(['mmseg', 'mmpretrain'], ['small', 'broken']), ('mmdet', 'thin')]
)
def test_one_image_that_fails_keeps_no_other_from_being_drawn(run, tmp_path, capsys, task, error):
    folder, out = tmp_path / 'pictures', tmp_path / 'out'
    for name, size in dict(a=(60, 60), b=(2, 2000) if error == 'thin' else (20, 20), c=(60, 60)).items():
        mmcv.imwrite(np.zeros((*size, 3), np.uint8), str(folder / f'{name}.png'))
    if error == 'broken':
        (folder / 'b.png').write_text('no image')
    steps = [dict(type='LoadImageFromFile'), dict(type='PackSegInputs' if task == 'mmseg' else 'PackInputs')]
    settings = dict(test_pipeline=steps, test_dataloader=dict(dataset=dict(pipeline=steps)))
    with pytest.raises(SystemExit, match='1'):
        run(task, folder, out, settings={} if error == 'thin' else settings)
    assert sorted(drawn.name for drawn in out.iterdir()) == ['a.png', 'c.png']
    last = capsys.readouterr().err.splitlines()[-1]
    if error != 'broken':
        kind, word = ('ValueError', '32') if error == 'small' else ('error', 'resize')
        assert last.startswith(f"error: image '{folder}/b.png': it cannot be predicted: {kind}: ") and word in last
    else:
        assert last == f"error: image '{folder}/b.png' cannot be read as an image."


def test_classifiers_of_several_labels_and_tasks(run, pictures, tmp_path, capsys):
    loss, fc = dict(type='CrossEntropyLoss', use_sigmoid=True), dict(type='LinearClsHead')
    labels = dict(type='MultiLabelLinearClsHead', topk=None, loss=loss)
    tasks = dict(_delete_=True, type='MultiTaskHead', in_channels=64, task_heads=dict(a=dict(fc, num_classes=12)))
    for head, count in ((dict(labels, thr=0.01), 12), (dict(labels, thr=0.99), 0), (tasks, None)):
        with nullcontext() if count is not None else pytest.raises(SystemExit, match='1'):
            names = ['--classes', *NAMES['mmpretrain']]
            run('mmpretrain', pictures / 'b.png', tmp_path / 'out.png', *names, settings=dict(model=dict(head=head)))
        said = capsys.readouterr()
        if count is None:
            assert 'labels of several tasks are not drawn' in said.err
            continue
        assert len(re.findall(r'name_\d+ \(0\.\d{3}\)', said.out)) == count
        assert ('b.png: no class' in said.out) == (count == 0)


# -- files for other programs ------------------------------------------------------------------------------------------


def test_detections_of_a_folder_as_coco_results_and_yolo_text(run, pictures, tmp_path, capsys):
    """Write results without drawings. Images are identified by the test annotations, or else by file name."""
    (pictures / 'b.jpg').rename(pictures / '12.jpg')
    categories = [dict(id=10 * i, name=name) for i, name in enumerate(NAMES['mmdet'])]
    content = dict(images=[dict(id=3, file_name='12.jpg')], annotations=[], categories=categories)
    (tmp_path / 'truth.json').write_text(json.dumps(content))
    settings = dict(test_dataloader=dict(dataset=dict(data_root=str(tmp_path), ann_file='truth.json')))
    found, texts = tmp_path / 'new' / 'found.json', tmp_path / 'texts'
    words = ['--save-json', found, '--save-txt', texts, '--save-conf', '--score-thr', 0.12]
    run('mmdet', pictures, None, *words, '--classes', *NAMES['mmdet'], settings=settings)
    entries, said = json.loads(found.read_text()), capsys.readouterr().err
    names = {'2024.01.01.jpg', '2024.01.02.jpg', 'b.png', 'b.png.bmp', 'c.TIFF'}
    assert 3 in {entry['image_id'] for entry in entries} <= {3, *names}
    assert all((entry['image_id'] == 3) == (entry['file_name'] == '12.jpg') for entry in entries)
    assert f'image_id of 1 image(s) by file name from {tmp_path}/truth.json' in said
    assert f'image_id of 5 image(s) is the file name: not in {tmp_path}/truth.json' in said
    assert {entry['category_id'] for entry in entries} <= {*range(0, 60, 10)}
    names = '12.txt 2024.01.01.txt 2024.01.02.txt b.png.txt b.txt c.txt'
    assert sorted(path.name for path in texts.iterdir()) == names.split()
    found = [entry for entry in entries if entry['image_id'] == 3]
    assert all(entry['segmentation']['size'] == [70, 101] for entry in found)
    lines = [line.split() for line in (texts / '12.txt').read_text().splitlines()]
    assert len(lines) <= sum(entry['score'] >= 0.12 for entry in found) < len(entries)
    # the class, three points or more, and the score
    assert all(len(line) >= 8 and len(line) % 2 == 0 and float(line[-1]) >= 0.12 for line in lines)


# -- videos, webcams, URLs ---------------------------------------------------------------------------------------------


@pytest.fixture
def video(tmp_path):
    path = str(tmp_path / 'clip.avi')
    writer = cv2.VideoWriter(path, cv2.VideoWriter_fourcc(*'MJPG'), 10, (96, 64))
    for _ in range(5):
        writer.write(np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8))
    writer.release()
    return path


@pytest.mark.parametrize(('task', 'suffix'), [('mmdet', 'mp4'), ('mmseg', 'avi'), ('mmpretrain', 'avi')])
def test_a_video(run, video, tmp_path, capsys, task, suffix):
    out, found, texts = tmp_path / f'out.{suffix}', tmp_path / 'found.json', tmp_path / 'texts'
    words = ['--save-json', found, '--save-txt', texts] if task == 'mmdet' else []
    run(task, video, out, *words, '--classes', *NAMES[task])
    drawn = mmcv.VideoReader(str(out))
    assert (len(drawn), drawn.fps, drawn.resolution) == (5, 10, (96, 64))
    assert f'5 frame(s) in {out}\n' in capsys.readouterr().out
    if words:
        assert {entry['image_id'] for entry in json.loads(found.read_text())} <= {f'clip_00000{i}' for i in range(5)}
        assert sorted(path.name for path in texts.iterdir()) == [f'clip_00000{i}.txt' for i in range(5)]


def test_ctrl_c_keeps_the_predictions(run, video, tmp_path, monkeypatch):
    found, capture = tmp_path / 'found.json', cv2.VideoCapture
    frames = iter(range(2))

    class Capture:  # a subclass of OpenCV's class crashes when it is collected
        def __init__(self, name):
            self.video = capture(name)

        def read(self):
            if next(frames, None) is None:
                raise KeyboardInterrupt
            return self.video.read()

        def __getattr__(self, name):
            return getattr(self.video, name)

    monkeypatch.setattr(cv2, 'VideoCapture', Capture)
    with pytest.raises(SystemExit, match='130'):
        run('mmdet', video, None, '--save-json', found, '--classes', *NAMES['mmdet'])
    assert {entry['image_id'] for entry in json.loads(found.read_text())} <= {'clip_000000', 'clip_000001'}


@pytest.mark.parametrize(
    ('channels', 'mean', 'message'),
    [
        (1, 110, None),
        (3, 110, None),
        (4, 110, 'video .*, frame 0: it cannot be predicted: '),
        (1, 3000, 'the model takes pixels beyond 8 bits .data_preprocessor has mean or std 3000'),
    ],
)
def test_frames_pass_the_loading_of_the_test_pipeline(run, video, tmp_path, capsys, channels, mean, message):
    """Give a frame the mask of the same picture as an image, or raise."""
    steps = [dict(type='LoadImageFromFile', color_type='unchanged', to_float32=True), dict(type='PackSegInputs')]
    model = dict(data_preprocessor=dict(mean=[mean] * channels, std=[50] * channels, bgr_to_rgb=False))
    model['backbone'] = dict(in_channels=channels)
    settings = dict(model=model, test_dataloader=dict(dataset=dict(pipeline=steps)))
    still = tmp_path / 'stills' / 'clip_000000.png'
    _, frame = cv2.VideoCapture(video).read()
    mmcv.imwrite(cv2.cvtColor(frame, cv2.COLOR_BGR2GRAY) if channels == 1 else frame, str(still))
    with pytest.raises(SystemExit, match='1') if message else nullcontext():
        run('mmseg', video, None, '--save-labels', tmp_path / 'masks', settings=settings, channels=channels)
    said = capsys.readouterr().err
    if message:
        assert re.match(f'error: {message}', said.splitlines()[-1])
        return
    words = ['--save-labels', tmp_path / 'still_masks']
    run('mmseg', still.parent, None, *words, settings=settings, channels=channels)
    masks = [mmcv.imread(str(tmp_path / name / still.name), 'unchanged') for name in ('masks', 'still_masks')]
    np.testing.assert_array_equal(*masks)


@pytest.mark.parametrize('sizes', [3, 20])
def test_folders_of_many_sizes_limit_the_caches_of_onednn(run, tmp_path, monkeypatch, sizes):
    variables = ('LRU_CACHE_CAPACITY', 'ONEDNN_PRIMITIVE_CACHE_CAPACITY')
    for variable in variables:
        monkeypatch.setenv(variable, '')  # restored after the test
        monkeypatch.delenv(variable)
    for i in range(sizes):
        mmcv.imwrite(np.zeros((40, 40 + i, 3), np.uint8), str(tmp_path / 'pictures' / f'{i}.png'))
    run('mmpretrain', tmp_path / 'pictures', tmp_path / 'out')
    assert [os.environ.get(variable) for variable in variables] == [None if sizes == 3 else '64'] * 2


@pytest.mark.parametrize('source', ['0', 'rtsp://camera/stream'])
def test_a_webcam_or_stream(run, video, tmp_path, monkeypatch, source):
    opened, capture = [], cv2.VideoCapture
    monkeypatch.setattr(cv2, 'VideoCapture', lambda name: opened.append(name) or capture(video))
    run('mmpretrain', source, tmp_path / 'out.avi', '--max-frames', 3)
    monkeypatch.undo()
    assert opened == [int(source) if source.isdecimal() else source]
    assert len(mmcv.VideoReader(str(tmp_path / 'out.avi'))) == 3


@pytest.mark.parametrize('url', ['http://host/a/photo.jpg', 'http://host/image?id=3'])
def test_an_image_of_a_url(run, tmp_path, monkeypatch, capsys, url):
    content = cv2.imencode('.png', np.zeros((64, 64, 3), np.uint8))[1].tobytes()
    get = fileio.get
    monkeypatch.setattr(fileio, 'get', lambda name, **options: content if name == url else get(name, **options))
    run('mmpretrain', url, tmp_path / 'out.jpg')
    assert f'\n{url}: ' in f'\n{capsys.readouterr().out}' and (tmp_path / 'out.jpg').is_file()


@pytest.mark.parametrize('source', ['text.mp4', '99'])
def test_videos_that_cannot_be_opened(run, tmp_path, monkeypatch, capsys, source):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'text.mp4').write_text('no video')
    with pytest.raises(SystemExit, match='1'):
        run('mmpretrain', source, 'o.mp4')
    assert f"'{source}' cannot be opened." in capsys.readouterr().err and not (tmp_path / 'o.mp4').exists()


def test_boxes_below_the_threshold_are_named(run, tmp_path, capsys):
    mmcv.imwrite(np.zeros((64, 64, 3), dtype=np.uint8), str(tmp_path / 'a.png'))
    run('mmdet', tmp_path / 'a.png', tmp_path / 'found.png', '--score-thr', '1.1')
    assert 'no box has a score of at least --score-thr 1.1; the highest is 0' in capsys.readouterr().err
