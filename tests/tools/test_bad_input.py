# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Every tool on bad input: one line with the argument, its value and the allowed values; nothing is written.

A new case is a line of ``ROWS``: the command, words of its line, and ``slow`` if a model is built. Files of ``FILES``
and data sets of ``DATA`` in a command are made for it; ``{mmdet}`` and so on are the quick-start configs.
"""

import functools
import os
import re
import shlex
from pathlib import Path

import pytest
import torch
from helpers.checkpoint_helpers import touch_when_loaded
from helpers.tool_runs import QUICK, in_this_process
from PIL import Image

from mmlinattn.tooling.datasets import DatasetSpec, write_dataset

for package in ('mmdet', 'mmseg', 'mmpretrain'):
    pytest.importorskip(package)
DATA = ('coco', 'ade', 'imagenet')


def saved(value):
    return lambda path: torch.save(value, path)


def text(content):
    return lambda path: path.write_text(content.format(**QUICK))


def code(path):
    saved({'state_dict': {}, 'more': touch_when_loaded(path.with_name('was_run'))})(path)


def photo(path):
    Image.effect_noise((140, 90), 60).convert('RGB').save(path)


FILES = {
    # checkpoints
    'empty.pth': Path.touch,
    'pipe': os.mkfifo,
    'page.pth': text('<html>Please log in</html>'),
    'code.pth': code,
    # configs
    'unclosed.py': text('model = dict(\n'),
    'comment.py': text('# nothing\n'),
    'no_task.py': text("default_scope = 'mmaction'\nmodel = dict()\n"),
    # images
    'photo.png': photo,
    'notes.png': text('no image'),
    'file': Path.touch,
    'empty': Path.mkdir,
    'pictures': lambda path: path.mkdir() or photo(path / 'a.png'),
}

TRAIN, TEST = 'train.py {mmpretrain} --data-root imagenet --work-dir work', 'test.py {mmpretrain}'
TESTED = '--data-root imagenet --work-dir work'
COCO = '--data-root coco --work-dir work'
SEGMENT = 'train.py {mmseg} --data-root ade --work-dir work --cfg-options'
DETECT, DRAW = 'test.py {mmdet} empty.pth', 'demo.py photo.png {mmdet} empty.pth'
METAINFO = 'train_dataloader.dataset.metainfo.classes'
DEMO, EXPORT = 'demo.py photo.png {mmpretrain}', 'export.py {mmpretrain} none --format'
INSPECT = 'analysis_tools/inspect_attention.py {mmpretrain}'
LOOK = f'{INSPECT} none photo.png --out out --what locality --num-queries 4'
SHEET = 'analysis_tools/contact_sheet.py --annotations file --images pictures'
FLOPS = 'analysis_tools/get_flops.py {mmdet}'
MINE = 'make_config.py empty --task detection --backbone ravlt_t --out mine.'
SHAPES = 'make_shapes_dataset.py out --format coco --num-train 3 --num-val 2'


def bad(command, *words, slow=False):
    return pytest.param(command, words, id=command, marks=[pytest.mark.slow] * slow)


ROWS = [
    # configs and their settings, before or while a model is built
    bad('train.py no_such.py', "config 'no_such.py': no such file"),
    bad(
        'train.py mmlinattn::mmdet/ravlt_t_1x.py', "mmlinattn has no such config. Did you mean 'mmlinattn::mmdet/ravlt_"
    ),
    bad('train.py unclosed.py', "config 'unclosed.py' cannot be read", 'SyntaxError'),
    bad('train.py comment.py', 'comment.py has no model, no train_dataloader, no train_cfg, no optim_wrapper.'),
    bad('demo.py photo.png no_task.py empty.pth --out o.jpg', "default_scope='mmaction': expected one of"),
    bad('train.py {mmdet} --cfg-options optim_wrapper=SGD', 'quickstart.py cannot be run: ', 'Error: '),
    bad('train.py {mmdet} --cfg-options custom_hooks.x=3', "--cfg-options {'custom_hooks.x': 3} does not fit"),
    bad('train.py {mmdet} --auto-scale-lr', '--auto-scale-lr: ', 'auto_scale_lr.base_batch_size'),
    bad(f'{TRAIN} --cfg-options train_dataloader.batch_size=-2', 'r.batch_size=-2: expected an integer of at least 1'),
    bad(f'{TRAIN} --cfg-options {METAINFO}=disc', "metainfo.classes = 'disc' is a text"),
    bad(f'{SEGMENT} model.decode_head.num_classes=3', 'num_classes = 3 of the head is too small for the 10 classes'),
    bad(f'{FLOPS} --cfg-options model.backbone.arch=foo', "'foo'"),
    # folders and output files
    bad('train.py {mmdet} --work-dir file', "work dir 'file' cannot be written: File exists"),
    bad('train.py {mmdet} --data-root nowhere', "train_dataloader.dataset.data_root = 'nowhere': no such folder"),
    bad('swap_backbone.py mmdet::a/b.py ravlt_t --out o.txt', "--out='o.txt': expected a name that ends with .py."),
    bad('swap_backbone.py no_task.py ravlt_t --out comment.py', "--out 'comment.py' exists and is not by tools/swap"),
    bad(f'{DETECT} {COCO} --out file/x.pkl', "--out 'file/x.pkl' cannot be written: "),
    # an output that is an input
    bad('swap_backbone.py comment.py ravlt_t --out comment.py', "--out 'comment.py' is 'comment.py', which is read"),
    bad('export.py {mmdet} empty.pth --format torchscript --out empty.pth', "--out 'empty.pth' is 'empty.pth'"),
    bad(f'{DRAW} --out photo.png', "--out 'photo.png' is 'photo.png', which is read"),
    bad('demo.py pictures {mmdet} empty.pth --out pictures', "--out 'pictures/a.png' is 'pictures/a.png'"),
    bad('swap_backbone.py nowhere.py ravlt_t --out o.py', "UPSTREAM 'nowhere.py': no such file"),
    bad(SHAPES.replace('out', 'file', 1), "OUT 'file' cannot be written: "),
    # checkpoints
    bad('test.py {mmdet} no.pth', "checkpoint 'no.pth': no such file."),
    bad('test.py {mmdet} empty', "checkpoint 'empty': no last_checkpoint in this folder."),
    bad('test.py {mmdet} pipe', "checkpoint 'pipe': a pipe or a device, not a file."),
    bad('train.py {mmdet} --resume no.pth', "--resume 'no.pth': no such file"),
    bad('train.py {mmdet} --cfg-options load_from=no.pth', "load_from 'no.pth': no such file"),
    bad('convert_checkpoint.py page.pth o.pth --config {mmpretrain}', 'page.pth is a web page, not a checkpoint'),
    bad('convert_checkpoint.py code.pth o.pth --config {mmpretrain}', 'is not known to be harmless'),
    bad(f'{TRAIN} --resume code.pth', 'is not known to be harmless', slow=True),
    bad(f'{TEST} code.pth {TESTED}', 'code.pth', 'is not known to be harmless', slow=True),
    # arguments
    bad(f'{DETECT} --out-item metrics', '--out-item metrics: --out is missing. Name the file'),
    bad(f'{DETECT} --out x --out-item metrics', "--out='x': expected a name that ends with .pkl or .pickle or .json."),
    bad(f'{DETECT} --interval 0', '--interval=0: expected at least 1.'),
    bad('test.py {mmseg} empty.pth --data-root ade --tta --cfg-options tta_model=None', 'has no tta_model'),
    bad('demo.py gone.jpg {mmdet} empty.pth --out o.jpg', "image 'gone.jpg': no such file or folder."),
    bad('demo.py empty {mmdet} empty.pth --out o', "image 'empty': no image (.jpg .jpeg .png", 'in this folder'),
    bad('demo.py notes.png {mmdet} empty.pth --out o.jpg', "image 'notes.png' cannot be read as an image."),
    bad(f'{DRAW} --out found.gif', "--out='found.gif': expected a name that ends with .jpg or .jpeg"),
    bad('demo.py pictures {mmdet} empty.pth --out file', "--out='file': expected a folder, as pictures is one"),
    bad('demo.py pictures {mmdet} empty.pth --out a.jpg', "--out='a.jpg': expected a folder, as pictures is one"),
    bad('demo.py gone.mp4 {mmdet} empty.pth --out o.mp4', "video 'gone.mp4': no such file."),
    bad('demo.py 99 {mmdet} empty.pth --out o.jpg', "--out='o.jpg': expected a name that ends with .mp4 or .avi"),
    bad('demo.py 99 {mmdet} empty.pth --out o.mp4 --max-frames 0', '--max-frames=0: expected at least 1.'),
    bad('demo.py 99 {mmdet} empty.pth', '--out is missing: name the file or folder to write.'),
    bad('demo.py http://127.0.0.1:9/a.jpg {mmdet} empty.pth --out o.jpg', "a.jpg' cannot be downloaded: URLErr"),
    bad('demo.py nowhere:///a.jpg {mmdet} empty.pth --out o.jpg', "a.jpg' cannot be downloaded: KeyError"),
    bad(f'{DEMO} empty.pth --out o.jpg --classes one two', '2 names given, the model has 12 classes'),
    bad(f'{LOOK} --num-queries 1', '--num-queries=1: expected at least 2'),
    bad(f'{LOOK} --shape 16 64', '--shape 16 64: expected at least 32 pixels per side'),
    bad(f'{LOOK} --device abacus', "--device='abacus': "),
    bad(f'{EXPORT} torchscript --out o.pt --batch 0', '--batch=0: expected at least 1'),
    bad(f'{EXPORT} openvino --out graph.ir', "--out='graph.ir': expected a name that ends with .xml for"),
    bad(f'{EXPORT} onnx --out c.xml', "--out='c.xml': expected a name that ends with .onnx for --format onnx"),
    bad(f'{EXPORT} torch-export --out c.pt', "--out='c.pt': expected a name that ends with .pt2 for"),
    bad(f'{SHEET} gone.json sheet.png', "results 'gone.json': no such file or folder."),
    bad(f'{SHEET} file sheet.jpg', "OUT.png='sheet.jpg': expected a name that ends with .png"),
    bad(f'{SHEET} file sheet.png --num 0', '--num=0: expected at least 1.'),
    bad(f'{SHAPES} --size-jitter 0.9', '--size-jitter=0.9: expected a number from 0 to 0.5.'),
    bad(f'{MINE}yaml', 'expected a name that ends with .py'),
    bad(f'{MINE}py --batch 0', '--batch=0: expected at least 1'),
    bad(MINE.replace('detection', 'segmentation') + 'py --boxes sides', "--boxes='sides': segmentation has no boxes"),
    bad(f'{MINE}py --images nowhere', "--images='nowhere': expected a file or folder"),
    bad(MINE.replace('empty', 'nowhere') + 'py', 'no such folder'),
    bad('analysis_tools/ablation_study.py --study rala --out out --variants fulll', "--variants=['fulll']: expected"),
]


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    @functools.cache
    def written(layout):
        root = tmp_path_factory.mktemp('data') / layout
        write_dataset(root, DatasetSpec(layout, 3, 1, size=(64, 64)))
        return root

    return written


def files():
    """Return the files of the current folder with their times, without locks and logs of work dirs."""
    found = (path for path in Path().rglob('*') if path.is_file() and '.locks' not in path.parts)
    kept = (path for path in found if not path.parts[0].startswith('work') or path.suffix == '.pth')
    return {str(path): path.stat().st_mtime_ns for path in kept}


@pytest.fixture
def fails(tmp_path, monkeypatch, data, capfd):
    """Run a command with bad input in a folder with the files it names; return its error line."""
    monkeypatch.chdir(tmp_path)
    for name in ('MMLINATTN_TRACEBACK', 'SLURM_PROCID'):
        monkeypatch.delenv(name, raising=False)

    def run(command):
        named = re.findall(r'[\w.]+', command)
        for name in [name for name in FILES if name in named]:
            FILES[name](tmp_path / name)
        for layout in [layout for layout in DATA if f'--data-root {layout}' in command]:
            (tmp_path / layout).symlink_to(data(layout))
        before = files()
        with pytest.raises(SystemExit) as end:
            in_this_process(*shlex.split(command.format(**QUICK)))
        out, err = capfd.readouterr()
        errors = [line for line in err.splitlines() if line.startswith('error: ')]
        assert end.value.code == 1 and len(errors) == 1, err
        assert err.rstrip().endswith(errors[0]) and errors[0].isprintable()
        assert 'Traceback' not in err and '\x1b[2J' not in out + err
        assert files() == before
        return errors[0]

    return run


@pytest.mark.parametrize(('command', 'words'), ROWS)
def test_one_line_and_nothing_written(fails, command, words):
    line = fails(command)
    assert all(word in line for word in words), line
