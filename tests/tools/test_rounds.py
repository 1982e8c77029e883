# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Configs of every host through tools/train.py and tools/test.py, on shapes: their backbones made small, a few
iterations of training, and a test of the checkpoint that has to predict what the model in memory did.

One process trains and tests all configs of a task. Detection in processes of its own: ``test_roundtrip.py``.
"""

import functools
import json
import pickle
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pprint import pformat

import numpy as np
import pytest
import torch
from config_helpers import CONFIG_DIR, load
from mmengine.registry import MODELS
from tool_runs import TOOLS, in_one_process, losses

import mmlinattn  # noqa: F401  registers the hosts

pytestmark = pytest.mark.slow

# The shapes' own config of each task, which upstream's tools train and test as well, and every host with its methods.
# `a@b` is the backbone of config a in config b: DeiT has no segmentor of its own.
OWN = 'ravlt_shapes_quickstart'
ROUNDS = dict(
    mmdet='inline_swin_t_cascade_3x flatten_cswin_t_maskrcnn_1x inline_deit_t_maskrcnn_1x '
    'flatten_pvt_v2_b1_retinanet_1x',
    mmseg=f'{OWN} inline_pvt_t_fpn_80k flatten_swin_t_upernet_160k flatten_deit_t@inline_pvt_t_fpn_80k '
    'hmhsa_nextvit_s_fpn_80k',
    mmpretrain=f'{OWN} inline_cswin_t_in1k inline_deit_t_in1k hmhsa_pvt_v2_b1_in1k rala_swin_t_in1k',
)
CASES = [(task, name) for task, names in ROUNDS.items() for name in names.split()]
DATA = dict(mmdet=('coco', 4, 2), mmseg=('ade', 4, 2), mmpretrain=('imagenet', 24, 12))  # layout, images
DUMP = dict(mmdet='DumpDetResults', mmseg='DumpResults', mmpretrain='DumpResults')
CLASSES = ('disc', 'square', 'triangle', 'star', 'cross', 'heart')
PYRAMID = dict(embed_dims=(16, 32, 48, 64), depths=(1, 1, 2, 1), num_heads=(2, 2, 2, 4))
HYBRID = dict(PYRAMID, attn_every=(0, 1, 2, 1), group_dim=4, stem_dims=(8, 4, 8))
PLAIN = dict(embed_dims=(32,), depths=(2,), num_heads=(2,))
STEPS = dict(
    Resize=dict(scale=(150, 110)),
    RandomChoice=dict(type='Resize', scale=(150, 110), keep_ratio=True),  # of many scales
    RandomResize=dict(scale=(150, 110)),
    RandomCrop=dict(crop_size=(64, 64)),
    RandomResizedCrop=dict(scale=64),
    ResizeEdge=dict(scale=72),
    CenterCrop=dict(crop_size=64),
)


def small_pipeline(loader) -> list:
    """The published steps at small sizes."""
    steps = [dict(step) for step in loader.dataset.pipeline]
    return [
        STEPS['RandomChoice'] if step['type'] == 'RandomChoice' else {**step, **STEPS.get(step['type'], {})}
        for step in steps
    ]


def small_model(cfg, backbone) -> dict:
    """Few narrow blocks in place of the published ones; necks and heads get their widths."""
    zoo = MODELS.get(backbone.type).arch_zoo[backbone.arch]
    is_plain = backbone.type == 'LinearDeiT'
    small = dict(LinearDeiT=PLAIN, LinearNextViT=HYBRID).get(backbone.type, PYRAMID)
    arch = dict(zoo, **small)
    width_of = dict(zip(zoo['embed_dims'], arch['embed_dims']))
    model = dict(backbone=dict(arch=dict(_delete_=True, **arch)))
    for part in ('neck', 'decode_head', 'auxiliary_head', 'head'):
        if part.endswith('_head') and cfg.model.get('neck'):
            continue  # it stands on the neck, whose width may be one of the backbone's
        widths = (cfg.model.get(part) or {}).get('in_channels')
        if isinstance(widths, int) and widths in width_of:
            model[part] = dict(in_channels=width_of[widths])
        elif not isinstance(widths, int) and set(widths or [0]) <= set(width_of):
            model[part] = dict(in_channels=[width_of[width] for width in widths])
    if backbone is not cfg.model.backbone:
        model['backbone'] = dict(_delete_=True, type=backbone.type, arch=arch)
    if is_plain and cfg.default_scope != 'mmpretrain':
        model['backbone']['out_type'] = 'featmap'
        model['neck'] = dict(_delete_=True, type='SimpleFeaturePyramid', in_channels=32)
        model['neck']['num_outs'] = 4 if cfg.default_scope == 'mmseg' else 5
    if cfg.default_scope == 'mmseg':
        model['data_preprocessor'] = dict(size=(64, 64))
        for head in ('decode_head', 'auxiliary_head'):
            if head in cfg.model:
                model[head] = dict(model.get(head, {}), channels=32)
    if cfg.default_scope == 'mmdet':
        model.update(heads_of_shapes(cfg.model))
    return model


def heads_of_shapes(model) -> dict:
    """As many classes as there are shapes; few regions for the heads, which are not what is tested here."""
    number = dict(num_classes=len(CLASSES))
    if 'roi_head' not in model:
        return dict(bbox_head=number)

    def each(parts, changes):  # a cascade has a list of heads
        return [dict(part, **changes) for part in parts] if isinstance(parts, (list, tuple)) else changes

    boxes = each(model.roi_head.bbox_head, dict(number, fc_out_channels=64))
    sampler = dict(type='RandomSampler', num=16, pos_fraction=0.25, neg_pos_ub=-1, add_gt_as_proposals=True)
    return dict(
        roi_head=dict(bbox_head=boxes, mask_head=number),
        train_cfg=dict(rpn_proposal=dict(max_per_img=50), rcnn=each(model.train_cfg.rcnn, dict(sampler=sampler))),
        test_cfg=dict(rpn=dict(max_per_img=50), rcnn=dict(max_per_img=10)),
    )


def derived(task: str, name: str) -> str:
    """A config for the shapes as users write theirs: on a published one, with what differs."""
    taken, _, stem = name.rpartition('@')
    cfg = load(f'{task}/{stem}')
    backbone = load(f'mmpretrain/{taken}_in1k').model.backbone if taken else cfg.model.backbone
    metainfo = dict(metainfo=dict(classes=CLASSES)) if task == 'mmdet' else {}
    changes = {} if name == OWN else dict(model=small_model(cfg, backbone))
    for part in ('train', 'val', 'test'):
        loader = cfg[f'{part}_dataloader']
        dataset = dict(metainfo, pipeline=small_pipeline(loader))
        changes[f'{part}_dataloader'] = dict(num_workers=0, persistent_workers=False, dataset=dataset)
    changes['train_dataloader']['batch_size'] = 8 if task == 'mmpretrain' else 2
    lines = [f'_base_ = {str(CONFIG_DIR / task / stem) + ".py"!r}']
    lines += [f'{key} = {pformat(value, sort_dicts=False)}' for key, value in changes.items()]
    lines.append(f"val_evaluator = [_base_.val_evaluator, dict(type='{DUMP[task]}', out_file_path='{name}.val.pkl')]")
    if name == OWN and find_spec('tensorboard'):
        lines.append(
            "visualizer = dict(vis_backends=[dict(type=f'{name}VisBackend') for name in ('Local', 'Tensorboard')])"
        )
    return '\n'.join(lines)


def commands(task: str, name: str) -> list[list[str]]:
    options = [
        'model.backbone.init_cfg=None',
        'default_hooks.logger.interval=1',
        'default_hooks.checkpoint.save_optimizer=False',
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
    """The tools of MMSegmentation or MMPretrain on the config as it ran: it finds its data without ``--data-root``."""
    tools = Path(import_module(task).__file__).parent / '.mim' / 'tools'
    config, checkpoint = f'work/{OWN}/{OWN}.py', f'work/{OWN}/{"iter_3" if task == "mmseg" else "epoch_1"}.pth'
    return [
        [str(tools / 'train.py'), config, '--work-dir', 'work/upstream'],
        [str(tools / 'test.py'), config, checkpoint, '--work-dir', 'work/upstream_tested'],
    ]


def run_rounds(task, folder) -> tuple[dict, dict]:
    """All rounds of a task in ``folder``: what the tools printed and the errors, by name."""
    form, num_train, num_val = map(str, DATA[task])
    numbers = ['--num-train', num_train, '--num-val', num_val, '--size', '128', '96']
    names = [name for other, name in CASES if other == task]
    for name in names:
        (folder / f'{name}.py').write_text(derived(task, name))
    jobs = {'data': [[str(TOOLS / 'make_shapes_dataset.py'), 'data', '--format', form, *numbers]]}
    jobs.update({name: commands(task, name) for name in names})
    if OWN in names:
        jobs['upstream'] = of_upstream(task)
    return in_one_process(jobs, folder)


@pytest.fixture(scope='module')
def rounds(tmp_path_factory):
    @functools.cache
    def once(task):
        folder = tmp_path_factory.mktemp(task)
        return folder, *run_rounds(task, folder)

    return once


def arrays(prediction):
    """All numbers of a dumped prediction, in order."""
    if isinstance(prediction, dict):
        return [array for key in sorted(prediction) for array in arrays(prediction[key])]
    if isinstance(prediction, (list, tuple)):
        return [array for item in prediction for array in arrays(item)]
    return (
        [torch.as_tensor(np.asarray(prediction))] if isinstance(prediction, (torch.Tensor, np.ndarray, float)) else []
    )


@pytest.mark.parametrize(('task', 'name'), CASES)
def test_trains_and_tests(rounds, task, name):
    if find_spec(task) is None:
        pytest.skip(f'needs {task}')
    folder, printed, errors = rounds(task)
    assert not errors[name], printed[name][-3000:]
    found = losses(folder / 'work' / name)
    assert sorted(found) == list(range(1, 3 if task == 'mmdet' else 4))
    assert np.isfinite(list(found.values())).all()
    assert not re.search('missing keys|unexpected key|size mismatch', printed[name])
    in_memory, tested = (pickle.loads((folder / f'{name}.{kind}.pkl').read_bytes()) for kind in ('val', 'test'))
    assert len(in_memory) == len(tested) == DATA[task][2]
    mine, other = arrays(in_memory), arrays(tested)
    assert mine and sum(array.numel() for array in mine)
    for a, b in zip(mine, other):
        torch.testing.assert_close(a, b)


METRICS = dict(mmseg='mIoU', mmpretrain='accuracy/top1')


@pytest.mark.parametrize('task', METRICS)
def test_upstream_tools_and_what_else_a_run_leaves(rounds, task):
    """With the same hooks, hence the same losses; the same metric of the same checkpoint; drawings, TensorBoard."""
    if find_spec(task) is None:
        pytest.skip(f'needs {task}')
    folder, printed, errors = rounds(task)
    assert not errors['upstream'], printed['upstream'][-3000:]
    assert losses(folder / 'work' / 'upstream') == losses(folder / 'work' / OWN)
    ours, theirs = (re.findall(rf'{METRICS[task]}: ([\d.]+)', printed[name]) for name in (OWN, 'upstream'))
    assert len(ours) == 3 and len(theirs) == 2 and len({*ours, *theirs}) == 1  # after training, and of the tests
    written = json.loads((folder / 'metrics.json').read_text())
    assert written[METRICS[task]] == pytest.approx(float(ours[0]), abs=0.01)
    assert any(path.suffix in ('.png', '.jpg') for path in (folder / 'shown').rglob('*'))
    events = pytest.importorskip('tensorboard.backend.event_processing.event_accumulator')
    (file,) = (folder / 'work' / OWN).glob('*/vis_data/events.out.tfevents.*')
    written = events.EventAccumulator(str(file)).Reload().Scalars('loss')
    assert {scalar.step: scalar.value for scalar in written} == pytest.approx(losses(folder / 'work' / 'upstream'))
