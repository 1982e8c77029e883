# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""``_base_ = 'mmlinattn::TASK/NAME.py'``: the same config as by its path, and the same classes for its types."""

from importlib import import_module
from pathlib import Path

import mmengine.registry
import numpy as np
import pytest
from helpers.config_helpers import CONFIG_DIR, ROOT, load
from helpers.tool_runs import TOOLS, in_one_process
from mmengine.config import Config
from mmengine.registry import DATASETS, MODELS, Registry, init_default_scope
from PIL import Image

import mmlinattn  # noqa: F401
from mmlinattn.tooling.datasets import DatasetSpec, write_dataset

pytestmark = pytest.mark.skipif(not (ROOT / 'mmlinattn/.mim').is_dir(), reason='mmlinattn is not installed')
TASKS = 'mmdet', 'mmseg', 'mmpretrain'
ROOTS = [root for root in vars(mmengine.registry).values() if isinstance(root, Registry)]


def without_scopes(node):
    if isinstance(node, dict):
        return {key: without_scopes(value) for key, value in node.items() if key != '_scope_'}
    return [without_scopes(item) for item in node] if isinstance(node, (list, tuple)) else node


def types_of(node, is_ours=False):
    """Types that are looked up in our scope."""
    if isinstance(node, dict):
        is_ours = node.get('_scope_', 'mmlinattn' if is_ours else '') == 'mmlinattn'
        found = {node['type']} if is_ours and isinstance(node.get('type'), str) else set()
        return found.union(*(types_of(value, is_ours) for value in node.values()))
    return set().union(*(types_of(item, is_ours) for item in node)) if isinstance(node, (list, tuple)) else set()


@pytest.mark.slow
@pytest.mark.parametrize('task', TASKS)
def test_every_config_is_the_same_by_name(task, tmp_path):
    pytest.importorskip(task)
    child, types = tmp_path / 'child.py', set()
    for path in sorted((CONFIG_DIR / task).glob('*.py')):
        child.write_text(f"_base_ = 'mmlinattn::{task}/{path.name}'\n")
        cfg = Config.fromfile(child)
        assert without_scopes(cfg.to_dict()) == without_scopes(load(f'{task}/{path.stem}').to_dict()), path.name
        types |= types_of(cfg.to_dict())
    init_default_scope(task)
    classes = {}
    for scope in (None, 'mmlinattn'):
        for root in ROOTS:
            with root.switch_scope_and_registry(scope) as registry:
                classes[scope, root.name] = {kind: registry.get(kind) for kind in types}
    assert all(classes['mmlinattn', root.name] == classes[None, root.name] for root in ROOTS)
    assert len(types) > 5 and all(any(classes[None, root.name][kind] for root in ROOTS) for kind in types)


@pytest.mark.parametrize('task', TASKS)
def test_the_scope_is_that_of_the_run(task):
    """Types of the same name in each package, also in a part of another task."""
    pytest.importorskip(task)
    init_default_scope(task)
    loss = dict(type='CrossEntropyLoss', _scope_='mmlinattn')
    assert type(MODELS.build(loss)).__module__.startswith(f'{task}.')
    for other in filter(lambda name: name != task, TASKS):
        with MODELS.switch_scope_and_registry(other):
            assert type(MODELS.build(loss)).__module__.startswith(f'{other}.')
    assert type(MODELS.build(dict(type='mmlinattn.CrossEntropyLoss'))).__module__.startswith(f'{task}.')
    with pytest.raises(KeyError, match='NoSuchLoss is not in the'):
        MODELS.build(dict(loss, type='NoSuchLoss'))


OWN = "type='BaseSegDataset', metainfo=dict(classes=('a', 'b', 'c')), "


@pytest.mark.parametrize(
    ('changes', 'expected'),
    [
        ('', [255, 0, 1]),  # ADE20K
        (OWN, [0, 1, 2]),
        (f'{OWN}reduce_zero_label=False, ', [0, 1, 2]),
        (f'{OWN}reduce_zero_label=True, ', [255, 0, 1]),
    ],
)
def test_label_images_of_ones_own_take_one_setting(changes, expected, tmp_path):
    pytest.importorskip('mmseg')
    write_dataset(tmp_path / 'data', DatasetSpec('ade', 1, 1, size=(64, 64)))
    (label,) = tmp_path.glob('data/annotations/validation/*.png')
    Image.fromarray(np.tile(np.uint8([0, 1, 2, 2]), (64, 16))).save(label)
    (tmp_path / 'child.py').write_text(f"""
_base_ = 'mmlinattn::mmseg/ravlt_t_upernet_160k.py'
val_dataloader = dict(dataset=dict({changes}data_root={str(tmp_path / 'data')!r}))
""")
    cfg = Config.fromfile(tmp_path / 'child.py')
    init_default_scope('mmseg')
    sample = DATASETS.build(cfg.val_dataloader.dataset)[0]['data_samples']
    assert sample.gt_sem_seg.data[0, 0, :3].tolist() == expected


# --- children that change types ---------------------------------------------------------------------------------------

DATA = dict(mmdet='coco', mmseg='ade', mmpretrain='imagenet')
CHILDREN = dict(
    mmdet="""
train_pipeline = [
    dict(type='LoadImageFromFile'), dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='PhotoMetricDistortion'), dict(type='PackDetInputs')]
train_dataloader = dict(
    batch_size=2, num_workers=0, persistent_workers=False, sampler=dict(type='InfiniteSampler'),
    dataset=dict(_delete_=True, type='RepeatDataset', times=2,
                 dataset=dict(_base_.train_dataloader.dataset, data_root='data/', pipeline=train_pipeline)))
val_evaluator = dict(_delete_=True, type='DumpDetResults', out_file_path='dumped.pkl')
train_cfg = dict(_delete_=True, type='IterBasedTrainLoop', max_iters=1, val_interval=1)
default_hooks = dict(checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=1))
custom_hooks = [*_base_.custom_hooks, dict(type='NumClassCheckHook')]
optim_wrapper = dict(optimizer=dict(_delete_=True, type='SGD', lr=0.001, weight_decay=0.0))
model = dict(neck=dict(type='PAFPN'), roi_head=dict(bbox_head=dict(loss_bbox=dict(_delete_=True, type='SmoothL1Loss'))))
""",
    mmseg="""
train_dataloader = dict(
    batch_size=2, num_workers=0, persistent_workers=False, sampler=dict(type='DefaultSampler'),
    dataset=dict(_delete_=True, type='RepeatDataset', times=1, dataset=dict(
        _base_.train_dataloader.dataset, data_root='data/',
        pipeline=[*_base_.train_pipeline[:2], dict(type='PhotoMetricDistortion'), *_base_.train_pipeline[-1:]])))
val_evaluator = dict(type='IoUMetric', iou_metrics=['mDice'])
train_cfg = dict(_delete_=True, type='EpochBasedTrainLoop', max_epochs=1)
default_hooks = dict(checkpoint=dict(type='CheckpointHook', by_epoch=True, interval=1))
param_scheduler = {{_base_.param_scheduler}}
model = dict(decode_head=dict(loss_decode=dict(_delete_=True, type='DiceLoss')))
""",
    mmpretrain="""
train_pipeline = [
    dict(type='LoadImageFromFile'), dict(type='RandomResizedCrop', scale=64), dict(type='ColorJitter', brightness=0.2),
    dict(type='PackInputs')]
train_dataloader = dict(
    batch_size=2, num_workers=0, persistent_workers=False, sampler=dict(type='RepeatAugSampler'),
    dataset=dict(_delete_=True, type='CustomDataset', data_root='data/train', pipeline=train_pipeline))
val_evaluator = dict(_delete_=True, type='SingleLabelMetric')
train_cfg = dict(max_epochs=1)
custom_hooks = [*_base_.custom_hooks, dict(type='EMAHook')]
visualizer = dict(type='UniversalVisualizer')
model = dict(head=dict(loss=dict(_delete_=True, type='LabelSmoothLoss', label_smooth_val=0.1)))
""",
)


@pytest.mark.slow
@pytest.mark.parametrize('task', TASKS)
def test_a_child_with_other_types_trains(task, tmp_path):
    """Train by our tool and by upstream's, without an import of mmlinattn before the config."""
    pytest.importorskip(task)
    write_dataset(tmp_path / 'data', DatasetSpec(DATA[task], 4, 2, size=(64, 64)))
    for tool, base in ('ours', "'mmlinattn::"), ('upstream', "__import__('mmlinattn').__name__ + '::"):
        (tmp_path / f'{tool}.py').write_text(f"""
_base_ = {base}{task}/ravlt_shapes_quickstart.py'
{CHILDREN[task]}
val_dataloader = dict(num_workers=0, persistent_workers=False, dataset=dict(data_root='data/'))
test_dataloader = val_dataloader
test_evaluator = val_evaluator
""")
    upstream = Path(import_module(task).__file__).parent / '.mim/tools/train.py'
    jobs = {tool: [[str(path), f'{tool}.py', '--work-dir', tool]]
            for tool, path in dict(ours=TOOLS / 'train.py', upstream=upstream).items()}  # fmt: skip
    _, errors = in_one_process(jobs, tmp_path)
    assert errors == dict(ours='', upstream='')
    assert list(tmp_path.glob('upstream/*.pth'))
