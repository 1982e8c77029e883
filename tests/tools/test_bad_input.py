# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Every tool on bad input: one line that names the argument, its value and what is allowed; nothing is written.

A new case is a line of ``ROWS``: the command, what its line has to say, and ``slow`` where a model is built. Files of
``FILES`` and data sets of ``DATA`` that a command names are made for it; ``{mmdet}`` and so on are the quick-start
configs.
"""

import functools
import os
import re
import shlex
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import touch_when_loaded
from mmengine.registry import MODELS, init_default_scope
from PIL import Image
from tool_runs import TOOLS, in_this_process

from mmlinattn.tooling.configs import read_config
from mmlinattn.tooling.datasets import DatasetSpec, write_dataset

for package in ('mmdet', 'mmseg', 'mmpretrain'):
    pytest.importorskip(package)
QUICK = {
    task: TOOLS.parent / 'configs' / task / 'ravlt_shapes_quickstart.py' for task in ('mmdet', 'mmseg', 'mmpretrain')
}
DATA = ('coco', 'ade', 'imagenet')


@functools.cache
def untrained():
    init_default_scope('mmpretrain')
    return MODELS.build(read_config(str(QUICK['mmpretrain'])).model).state_dict()


def weights(**changes):
    return lambda path: torch.save(dict(state_dict={**untrained(), **changes}, meta={}), path)


def saved(value):
    return lambda path: torch.save(value, path)


def text(content):
    return lambda path: path.write_text(content.format(**QUICK))


def code(path):
    saved({'state_dict': {}, 'more': touch_when_loaded(path.with_name('was_run'))})(path)


def loads_code(path):
    code(path.with_name('code.pth'))
    text(
        "_base_ = '{mmpretrain}'\ninit_cfg = dict(_delete_=True, type='Pretrained', checkpoint='code.pth')\n"
        'model = dict(backbone=dict(init_cfg=init_cfg))\n'
    )(path)


def photo(path):
    Image.effect_noise((140, 90), 60).convert('RGB').save(path)


FILES = {
    # checkpoints
    'empty.pth': Path.touch,
    'pipe': os.mkfifo,
    'page.pth': text('<html>Please log in</html>'),
    'code.pth': code,
    'other.pth': saved({'state_dict': {'backbone.stages.0.0.norm1.weight': torch.ones(7)}}),
    'nan.pth': weights(**{'head.fc.weight': torch.full((12, 256), torch.nan)}),
    'good.pth': weights(),
    # configs
    'unclosed.py': text('model = dict(\n'),
    'comment.py': text('# nothing\n'),
    'no_data.py': text("model = dict(type='RAVLT')\n"),
    'no_task.py': text("default_scope = 'mmaction'\nmodel = dict()\n"),
    'loads_code.py': loads_code,
    'resnet.py': text(
        "_base_ = 'mmpretrain::resnet/resnet18_8xb32_in1k.py'\ndefault_scope = 'mmpretrain'\n"
        "custom_imports = dict(imports=['mmlinattn'], allow_failed_imports=False)\n"
    ),
    # work dirs
    'work_pipe': lambda path: path.mkdir() or os.mkfifo(path / 'last_checkpoint'),
    'work_text': lambda path: path.mkdir() or (path / 'last_checkpoint').write_bytes(b'\xff\xfe\x00\x1b[2J'),
    # images
    'photo.png': photo,
    'notes.png': text('no image'),
    'file': Path.touch,
    'empty': Path.mkdir,
    'pictures': lambda path: path.mkdir() or photo(path / 'a.png'),
    'broken': lambda path: path.mkdir() or (path / 'a.png').touch(),
}

TRAIN, TEST = 'train.py {mmpretrain} --data-root imagenet --work-dir work', 'test.py {mmpretrain}'
TESTED = '--data-root imagenet --work-dir work'
METAINFO = 'train_dataloader.dataset.metainfo.classes'
DEMO, EXPORT = 'demo.py photo.png {mmpretrain}', 'export.py {mmpretrain} none --format'
INSPECT = 'analysis_tools/inspect_attention.py {mmpretrain}'
LOOK = f'{INSPECT} none photo.png --out out --what locality --num-queries 4'
SHEET = 'analysis_tools/contact_sheet.py'
FLOPS = 'analysis_tools/get_flops.py {mmdet}'
SHAPES = 'make_shapes_dataset.py out --format coco --num-train 3 --num-val 2'


def bad(command, *words, slow=False):
    return pytest.param(command, words, id=command, marks=[pytest.mark.slow] * slow)


ROWS = [
    # configs
    bad('train.py no_such.py', "config 'no_such.py': no such file"),
    bad('convert_checkpoint.py good.pth o.pth --config no_such.py', "config 'no_such.py': no such file"),
    bad('train.py unclosed.py', "config 'unclosed.py' cannot be read", 'SyntaxError'),
    bad('train.py comment.py', 'comment.py has no model, no train_dataloader, no train_cfg, no optim_wrapper.'),
    bad('test.py no_data.py empty.pth', 'no_data.py has no test_dataloader, no test_cfg, no test_evaluator.'),
    bad('demo.py photo.png no_task.py empty.pth --out o.jpg', "default_scope = 'mmaction' is none of mmdet, mmseg"),
    bad('analysis_tools/inspect_attention.py no_task.py none photo.png --out out', 'none of mmdet, mmseg, mmpretrain'),
    bad('analysis_tools/inspect_attention.py resnet.py none photo.png --out out', 'has no attention', slow=True),
    # settings of configs: whatever stumbles over them, before or while a model is built
    bad('train.py {mmdet} --cfg-options optim_wrapper=SGD', 'quickstart.py cannot be run: ', 'Error: '),
    bad('train.py {mmdet} --cfg-options custom_hooks.x=3', "--cfg-options {'custom_hooks.x': 3} does not fit"),
    bad('train.py {mmdet} --auto-scale-lr', '--auto-scale-lr: ', 'auto_scale_lr.base_batch_size'),
    bad(f'{TRAIN} --cfg-options train_dataloader.batch_size=-2', 'r.batch_size = -2 has to be an integer from 1 up'),
    bad(f'{TRAIN} --cfg-options model.backbone.arch=huge', 'arch', 'huge', slow=True),
    bad(f'{TRAIN} --cfg-options model.head.num_classes=1', 'num_classes = 1 of the head is too small', slow=True),
    bad(
        'train.py {mmseg} --data-root ade --work-dir work --cfg-options model.decode_head.num_classes=3',
        'num_classes = 3 of the head is too small for the 10 classes',
    ),
    bad(
        'train.py {mmdet} --data-root coco --work-dir work --cfg-options '
        'train_dataloader.dataset.metainfo.classes=person,car',
        'cannot be run: CocoDataset',
        'none of metainfo.classes is a category of its ann_file',
        slow=True,
    ),
    bad(f'{TRAIN} --launcher slurm', '--launcher slurm: SLURM_PROCID'),
    bad(f'{FLOPS} --cfg-options model.backbone.arch=foo', "'foo'"),
    bad(f"{LOOK} --cfg-options model.backbone.stage_attns='rala,rala,rala,ralla'", "unknown attention 'ralla'"),
    # places
    bad('train.py {mmdet} --work-dir file', "work dir 'file' cannot be written: File exists"),
    bad('train.py {mmdet} --work-dir /proc', "work dir '/proc' cannot be written: "),  # for root, too
    bad('train.py {mmdet} --data-root nowhere', "train_dataloader.dataset.data_root = 'nowhere': no such folder"),
    bad('train.py {mmdet} --data-root empty', "No such file or directory: 'empty/annotations/instances_", slow=True),
    bad('swap_backbone.py mmdet::a/b.py ravlt_t --out empty', "--out 'empty' cannot be written: Is a directory."),
    bad('swap_backbone.py nowhere.py ravlt_t --out o.py', "UPSTREAM is 'nowhere.py': no such file"),
    # checkpoints
    bad('test.py {mmdet} no.pth', "checkpoint 'no.pth': no such file."),
    bad('test.py {mmdet} empty', "checkpoint 'empty': a folder, not a file."),
    bad('test.py {mmdet} pipe', "checkpoint 'pipe': a pipe or a device, not a file."),
    bad('train.py {mmdet} --resume no.pth', "--resume 'no.pth': no such file"),
    bad('train.py {mmdet} --cfg-options load_from=no.pth', "load_from 'no.pth': no such file"),
    bad(f'{TRAIN}_pipe --resume', 'work_pipe/last_checkpoint is not a file'),
    bad(f'{TRAIN}_text --resume', 'work_text/last_checkpoint names', 'delete that file to begin from the start'),
    bad(f'{DEMO} no.pth --out o.jpg', "checkpoint 'no.pth': no such file"),
    bad('convert_checkpoint.py page.pth o.pth --config {mmpretrain}', 'page.pth is a web page, not a checkpoint'),
    bad('convert_checkpoint.py good.pth empty --config {mmpretrain}', 'DST empty is a folder; name a file in it'),
    bad(f'{TRAIN} --resume code.pth', 'is not known to be harmless', slow=True),
    bad('train.py loads_code.py --data-root imagenet --work-dir work', 'is not known to be harmless', slow=True),
    bad(f'{TEST} code.pth {TESTED}', 'code.pth', 'is not known to be harmless', slow=True),
    bad(f'{DEMO} code.pth --out o.jpg', 'is not known to be harmless', slow=True),
    bad('convert_checkpoint.py code.pth o.pth --config {mmpretrain}', 'is not known to be harmless'),
    bad(f'{TEST} other.pth {TESTED}', 'other.pth', slow=True),
    bad(
        f'{DEMO} nan.pth --out o.jpg',
        'nan.pth',
        '1 weights of the checkpoint are NaN or infinite: head.fc.weight',
        slow=True,
    ),
    bad(
        f'{TEST} good.pth {TESTED} --cfg-options model.head.num_classes=5',
        'head.fc.weight (12x256 in the file, 5x256 in the model)',
        '--cfg-options custom_hooks.CheckpointMatchHook.left_out=head.fc',
        slow=True,
    ),
    # data
    bad(f'{TRAIN} --cfg-options {METAINFO}=disc', "metainfo.classes = 'disc' is a text"),
    bad(
        f'train.py {{mmdet}} --data-root coco --work-dir work --cfg-options {METAINFO}=[heart,cross,star,square,disc]',
        'coco/annotations/instances_train2017.json, not that of metainfo.classes',
        "Write classes=('disc', 'square', 'star', 'cross', 'heart')",
        slow=True,
    ),
    # arguments
    bad('test.py {mmdet} empty.pth --out-item metrics', '--out-item metrics: --out has to name the file to write'),
    bad('test.py {mmdet} empty.pth --out x.txt', "--out 'x.txt' has to end with .pkl or .pickle."),
    bad('test.py {mmdet} empty.pth --out x --out-item metrics', "--out 'x' has to end with .pkl or .pickle or .json."),
    bad('test.py {mmdet} empty.pth --interval 0', '--interval 0 has to be at least 1.'),
    bad('test.py {mmdet} empty.pth --data-root coco --tta', 'no tta_model and no tta_pipeline'),
    bad('demo.py gone.jpg {mmdet} empty.pth --out o.jpg', "image 'gone.jpg': no such file or folder."),
    bad('demo.py empty {mmdet} empty.pth --out o', "image 'empty': no image (.jpg .jpeg .png", 'in this folder'),
    bad('demo.py notes.png {mmdet} empty.pth --out o.jpg', "image 'notes.png' cannot be read as an image."),
    bad('demo.py photo.png {mmdet} empty.pth --out found.gif', "--out 'found.gif' has to end in one of .jpg .jpeg"),
    bad('demo.py photo.png {mmdet} empty.pth --out file/o.jpg', "--out 'file/o.jpg' cannot be written: "),
    bad('demo.py pictures {mmdet} empty.pth --out file', "--out 'file' is a file; for a folder of images it has to be"),
    bad(f'{DEMO} empty.pth --out o.jpg --classes one two', '2 names given, the model has 12 classes'),
    bad(f'{LOOK} --num-queries 1', '--num-queries 1 has to be at least 2'),
    bad(f'{LOOK} --shape 16 64', '--shape 16 64: height and width have to be at least 32'),
    bad(f'{LOOK} --device abacus', '--device abacus'),
    bad(f'{INSPECT} none photo.png --out file', "--out 'file' cannot be written"),
    bad(f'{EXPORT} torchscript --out o.pt --batch 0', '--batch 0 has to be at least 1'),
    bad(f'{EXPORT} openvino --out graph.ir', "--out 'graph.ir' has to end with .xml for --format openvino"),
    bad(f'{EXPORT} torchscript --out file/graph.pt', "--out 'file/graph.pt' cannot be written"),
    bad(f'{SHEET} none sheet.png', "SHOW_DIR 'none': no image"),
    bad(f'{SHEET} broken sheet.png', "image 'broken/a.png' cannot be read as an image"),
    bad(f'{SHEET} pictures pictures/a.png/sheet.png', "--out 'pictures/a.png/sheet.png' cannot be written"),
    bad(f'{SHEET} pictures sheet.jpg', "'sheet.jpg' has to end with .png"),
    bad(f'{SHEET} pictures sheet.png --num 0', '--num 0 has to be at least 1'),
    bad(f'{SHAPES} --num-train -3', '--num-train must be at least 1, got -3'),
    bad(f'{SHAPES} --size 10 160', '--size must be ', 'got (10, 160)'),
    bad(f'{SHAPES} --size-jitter 0.9', '--size-jitter must be from 0 to 0.5, got 0.9'),
    bad(SHAPES.replace('out', 'file', 1), "OUT 'file' cannot be written: "),
    bad('analysis_tools/ablation_study.py --study rala --out out --arms fulll', "--arms ['fulll']: study 'rala' has"),
]


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    @functools.cache
    def written(layout):
        root = tmp_path_factory.mktemp('data') / layout
        write_dataset(root, DatasetSpec(layout, 3, 1, size=(64, 64)))
        return root

    return written


def start(command):
    in_this_process(*shlex.split(command.format(**QUICK)))


def files():
    """What lies in the current folder and when it was written, without locks and the logs of work dirs."""
    found = (path for path in Path().rglob('*') if path.is_file() and '.locks' not in path.parts)
    kept = (path for path in found if not path.parts[0].startswith('work') or path.suffix == '.pth')
    return {str(path): path.stat().st_mtime_ns for path in kept}


@pytest.fixture
def fails(tmp_path, monkeypatch, data, capfd):
    """Run a command that has to be refused, in a folder with the files that it names; the line it leaves on stderr."""
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
            start(command)
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


@pytest.mark.slow
def test_broken_weights_need_an_option(fails):
    command = f'{TEST} nan.pth {TESTED}'
    line = fails(command)
    assert 'nan.pth' in line and 'NaN or infinite: head.fc.weight' in line
    option = line.rpartition('--cfg-options ')[2]
    assert option.endswith('allow_nonfinite=True')
    start(f'{command} --cfg-options {option}')
