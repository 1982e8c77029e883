# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Configs of each task through tools/train.py and tools/test.py, on shapes: a few iterations on small images, and a
test of the checkpoint with the predictions of the model in memory.

One process trains and tests all configs of a task. Detection in processes of its own: ``test_roundtrip.py``.
"""

import functools
import json
import pickle
import re
import shutil
from importlib import import_module
from pathlib import Path
from pprint import pformat

import numpy as np
import pytest
import torch
from helpers.config_helpers import load
from helpers.tool_runs import TOOLS, in_one_process, losses
from torch.utils._pytree import tree_leaves

from mmlinattn.tooling.datasets import DatasetSpec, write_dataset

pytestmark = pytest.mark.slow

# the quick-start config, also trained and tested by upstream's tools, and some of the other backbones
OWN = 'ravlt_shapes_quickstart'
ROUNDS = dict(
    mmdet='inline_swin_t_cascade_3x flatten_pvt_v2_b1_retinanet_1x',
    mmseg=f'{OWN} flatten_swin_t_upernet_160k',
    mmpretrain=f'{OWN} hmhsa_nextvit_s_in1k',
)
CASES = [(task, name) for task, names in ROUNDS.items() for name in names.split()]
DATA = dict(mmdet=('coco', 4, 2), mmseg=('ade', 4, 2), mmpretrain=('imagenet', 24, 12))  # layout, images
DUMP = dict(mmdet='DumpDetResults', mmseg='DumpResults', mmpretrain='DumpResults')
STEPS = dict(
    Resize=dict(scale=(150, 110)),
    RandomResize=dict(scale=(150, 110)),
    RandomCrop=dict(crop_size=(64, 64)),
    RandomResizedCrop=dict(scale=64),
    ResizeEdge=dict(scale=72),
    CenterCrop=dict(crop_size=64),
)
# few regions for the heads; an untrained model is sure of nothing
REGIONS = 'test_cfg.rcnn.score_thr=0 test_cfg.rcnn.max_per_img=10 test_cfg.rpn.max_per_img=50'
SMALL = dict(
    cascade=f'{REGIONS} ' + ' '.join(f'train_cfg.rcnn.{i}.sampler.num=16' for i in range(3)),
    retinanet='test_cfg.score_thr=0 test_cfg.max_per_img=10',
    upernet='data_preprocessor.size=(64,64)',
)


def derived(task: str, name: str) -> str:
    """Return a config as users write it: a published one with small images."""
    cfg = load(f'{task}/{name}')
    lines = [f'_base_ = "mmlinattn::{task}/{name}.py"']
    for part in ('train', 'val', 'test'):
        steps = [dict(step) for step in cfg[f'{part}_dataloader'].dataset.pipeline]
        pipeline = [
            dict(STEPS['Resize'], type='Resize')
            if step['type'] == 'RandomChoice'
            else {**step, **STEPS.get(step['type'], {})}
            for step in steps
        ]
        loader = dict(num_workers=0, persistent_workers=False, dataset=dict(pipeline=pipeline))
        if part == 'train':
            loader['batch_size'] = 8 if task == 'mmpretrain' else 2
        lines.append(f'{part}_dataloader = {pformat(loader, sort_dicts=False)}')
    lines.append(f"val_evaluator = [_base_.val_evaluator, dict(type='{DUMP[task]}', out_file_path='{name}.val.pkl')]")
    return '\n'.join(lines)


def commands(task: str, name: str) -> list[list[str]]:
    small = SMALL.get(name.split('_')[-2], '') if name != OWN else ''
    options = [
        'model.backbone.init_cfg=None',
        'default_hooks.logger.interval=1',
        'default_hooks.checkpoint.save_optimizer=False',
        *(f'model.{option}' for option in small.split()),
    ]
    if task == 'mmseg':
        options += ['train_cfg.max_iters=3', 'train_cfg.val_interval=3', 'default_hooks.checkpoint.interval=3']
    else:
        options += ['train_cfg.max_epochs=1', 'train_cfg.val_interval=1']
    if task == 'mmpretrain':  # its warm-up is longer
        options += ['param_scheduler.0.end=1', 'param_scheduler.1.begin=0']
    config, work = f'{name}.py', f'work/{name}'
    checkpoint = f'{work}/{"iter_3" if task == "mmseg" else "epoch_1"}.pth'
    common = ['--data-root', 'data/', '--cfg-options', *options]
    test = [str(TOOLS / 'test.py'), config, checkpoint, '--work-dir', f'{work}/tested', '--out', f'{name}.test.pkl']
    train = [str(TOOLS / 'train.py'), config, '--work-dir', work, *common]
    if name != OWN:
        return [train, [*test, *common]]
    metrics = [*test[:-2], '--out', 'metrics.json', '--out-item', 'metrics']
    return [train, [*test, '--show-dir', 'shown', *common], [*metrics, *common]]


def of_upstream(task: str) -> list[list[str]]:
    """Return the commands of upstream's tools on the dumped config; it finds its data without ``--data-root``."""
    tools = Path(import_module(task).__file__).parent / '.mim' / 'tools'
    config, checkpoint = f'work/{OWN}/{OWN}.py', f'work/{OWN}/{"iter_3" if task == "mmseg" else "epoch_1"}.pth'
    return [
        [str(tools / 'train.py'), config, '--work-dir', 'work/upstream'],
        [str(tools / 'test.py'), config, checkpoint, '--work-dir', 'work/upstream_tested'],
    ]


@pytest.fixture(scope='module')
def rounds(tmp_path_factory):
    """Return folder, output and errors of each task, by name."""
    folders = []

    @functools.cache
    def once(task):
        folder = tmp_path_factory.mktemp(task)
        folders.append(folder)
        layout, *images = DATA[task]
        write_dataset(folder / 'data', DatasetSpec(layout, *images, size=(128, 96)))
        for path in (folder / 'data').glob('annotations/*.json'):  # as many classes as the published heads have
            from mmdet.datasets import CocoDataset

            names = enumerate(CocoDataset.METAINFO['classes'], start=1)
            path.write_text(
                json.dumps({**json.loads(path.read_text()), 'categories': [dict(id=i, name=n) for i, n in names]})
            )
        names = [name for other, name in CASES if other == task]
        for name in names:
            (folder / f'{name}.py').write_text(derived(task, name))
        jobs = {name: commands(task, name) for name in names}
        if OWN in names:
            jobs['upstream'] = of_upstream(task)
        return folder, *in_one_process(jobs, folder)

    yield once
    for folder in folders:
        shutil.rmtree(folder / 'work')  # checkpoints of a gigabyte


def numbers(predictions):
    """Return the numbers of dumped predictions, without paths and encoded masks."""
    return [leaf for leaf in tree_leaves(predictions) if isinstance(leaf, (torch.Tensor, np.ndarray, float))]


@pytest.mark.parametrize(('task', 'name'), CASES)
def test_trains_and_tests(rounds, task, name):
    pytest.importorskip(task)
    folder, printed, errors = rounds(task)
    assert not errors[name], printed[name][-3000:]
    found = losses(folder / 'work' / name)
    assert sorted(found) == list(range(1, 3 if task == 'mmdet' else 4))
    assert np.isfinite(list(found.values())).all()
    assert not re.search('missing keys|unexpected key|size mismatch', printed[name])
    in_memory, tested = (pickle.loads((folder / f'{name}.{kind}.pkl').read_bytes()) for kind in ('val', 'test'))
    assert len(in_memory) == len(tested) == DATA[task][2]
    assert sum(torch.as_tensor(leaf).numel() for leaf in numbers(tested))
    if task == 'mmseg':  # label maps without logits, one byte per pixel
        in_memory, tested = ([sample['pred_sem_seg']['data'] for sample in kind] for kind in (in_memory, tested))
        assert {labels.dtype for labels in tested} == {torch.uint8}
        in_memory = [labels.byte() for labels in in_memory]
    torch.testing.assert_close(numbers(in_memory), numbers(tested))


METRICS = dict(mmseg='mIoU', mmpretrain='accuracy/top1')


@pytest.mark.parametrize('task', METRICS)
def test_upstream_tools_and_files_of_a_run(rounds, task):
    """Compare losses and metrics with upstream's tools on the same config and checkpoint, and look for drawings."""
    pytest.importorskip(task)
    folder, printed, errors = rounds(task)
    assert not errors['upstream'], printed['upstream'][-3000:]
    assert losses(folder / 'work' / 'upstream') == losses(folder / 'work' / OWN)
    ours, theirs = (re.findall(rf'{METRICS[task]}: ([\d.]+)', printed[name]) for name in (OWN, 'upstream'))
    assert len(ours) == 3 and len(theirs) == 2 and len({*ours, *theirs}) == 1  # after training, and of the tests
    written = json.loads((folder / 'metrics.json').read_text())
    assert written[METRICS[task]] == pytest.approx(float(ours[0]), abs=0.01)
    assert any(path.suffix in ('.png', '.jpg') for path in (folder / 'shown').rglob('*'))
