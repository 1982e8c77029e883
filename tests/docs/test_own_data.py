# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Run every command of docs/own_data.md in order on a few images, and the downstream example."""

import re
import shlex

import pytest
from helpers.tool_runs import ROOT, TOOLS, in_one_process

PAGE = (ROOT / 'docs' / 'own_data.md').read_text(encoding='utf-8')
BLOCKS = dict(zip(('detection', 'segmentation', 'classification'), re.findall(r'```shell\n(.*?)```', PAGE, re.S)))
# options that shorten a command to seconds
PROPOSALS = ['model.train_cfg.rpn_proposal.max_per_img=20', 'model.test_cfg.rpn.max_per_img=20']
SHORT = dict(
    detection=['train_cfg.max_epochs=1', 'train_dataloader.dataset.indices=2', *PROPOSALS],
    segmentation=['train_cfg.max_iters=2', 'train_cfg.val_interval=2', 'default_hooks.checkpoint.interval=2'],
    classification=[
        'train_cfg.max_epochs=1',
        'default_hooks.checkpoint.interval=1',
        'train_dataloader.dataset.indices=4',
    ],
)
SAID = dict(detection='coco/segm_mAP', segmentation='mIoU', classification='accuracy/top1')
FRUIT = [f'{part}_dataloader.dataset.metainfo.classes=(disc,square)' for part in ('train', 'val', 'test')]


def lines_of(task):
    text = re.sub(r'--num-train \d+ --num-val \d+', '--num-train 12 --num-val 3 --size 64 64', BLOCKS[task])
    for line in text.splitlines():
        python, tool, *args = shlex.split(line)
        assert (python, tool[:6]) == ('python', 'tools/')
        short = dict(train=SHORT[task], test=PROPOSALS[1:] if task == 'detection' else []).get(tool[6:-3])
        options = ['--cfg-options', *short] if short else []
        yield [str(ROOT / tool), *args, *options]


@pytest.mark.slow
@pytest.mark.parametrize('task', list(BLOCKS))
def test_page_on_own_data(tmp_path, task):
    jobs = {str(number): [line] for number, line in enumerate(lines_of(task))}
    printed, errors = in_one_process(jobs, tmp_path)
    for name in jobs:
        assert not errors[name], printed[name][-6000:]
    assert SAID[task] in printed['3'] and 'trained one step on your images' in printed['1']


@pytest.mark.slow
def test_downstream_example(tmp_path):
    folder = tmp_path / 'data'
    shapes = [str(TOOLS / 'make_shapes_dataset.py'), 'data', '--format', 'coco', '--num-train', '8', '--num-val', '4']
    example = str(ROOT / 'docs' / 'examples' / 'downstream' / 'fruit_detector.py')
    small = ['model.backbone.init_cfg=None', 'train_cfg.max_epochs=1', 'train_dataloader.dataset.indices=2']
    small += [
        f'{part}_dataloader.dataset.pipeline.{i}.scale=(96,96)' for part, i in (('train', 2), ('val', 1), ('test', 1))
    ]
    _, errors = in_one_process(dict(shapes=[shapes]), tmp_path)
    assert not errors['shapes']
    for split in ('train', 'val'):
        (folder / 'images').mkdir(exist_ok=True)
        (folder / f'{split}2017').rename(folder / 'images' / split)
        (folder / 'annotations' / f'instances_{split}2017.json').rename(folder / 'annotations' / f'{split}.json')
    train = [str(TOOLS / 'train.py'), example, '--data-root', 'data', '--cfg-options', *small, *FRUIT]
    printed, errors = in_one_process(dict(train=[train]), tmp_path)
    assert not errors['train'], printed['train'][-6000:]
    assert 'coco/segm_mAP' in printed['train']
