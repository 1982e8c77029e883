# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Recipes of the configs beside the published ones, pipelines, and a training step."""

import json

import pytest
from helpers.config_helpers import CONFIGS, ROOT, build, load, without_gradient
from mmengine.registry import TRANSFORMS, init_default_scope

import mmlinattn  # noqa: F401

for project in ('mmdet', 'mmseg', 'mmpretrain'):
    pytest.importorskip(project)


# Recipes of the papers and their released configs, by index, and the recipe of each config
PUBLISHED = json.loads((ROOT / 'tests' / 'data' / 'recipes.json').read_text())


def line(step) -> str:
    """Format a part of a config as ``type(key=value, ...)``, with sorted keys and tuples as lists."""
    left_out = 'type', 'backend_args', 'backend', '_scope_'
    values = {key: json.loads(json.dumps(value)) for key, value in sorted(step.items()) if key not in left_out}
    return f'{step["type"]}({", ".join(f"{key}={value}" for key, value in values.items())})'


def steps(pipeline) -> list[str]:
    lines = []
    for step in pipeline:
        if step['type'] == 'RandomChoice':
            lines += [f'either {i}: {each}' for i, branch in enumerate(step['transforms']) for each in steps(branch)]
        elif not step['type'].startswith(('Load', 'Pack')):
            lines.append(line(step))
    return lines


def summary(cfg) -> dict:
    optim, loop = cfg.optim_wrapper, cfg.train_cfg
    data = cfg.train_dataloader
    found = dict(
        optimizer=line(optim.optimizer),
        wrapper=optim.get('type', 'OptimWrapper'),
        clip=optim.get('clip_grad') and optim.clip_grad.get('max_norm'),
        schedule=[line(step) for step in cfg.param_scheduler],
        length=loop.get('max_epochs') or loop.get('max_iters'),
        images=8 * data.batch_size,
        base_batch=cfg.auto_scale_lr.base_batch_size,
        train=steps(data.dataset.pipeline),
        test=steps(cfg.test_dataloader.dataset.pipeline),
    )
    model = cfg.model
    if cfg.default_scope == 'mmpretrain':
        found['augments'] = [line(step) for step in model.train_cfg.augments]
        found['label_smoothing'] = model.head.loss.label_smooth_val
    else:
        found['norm'] = (model.backbone.get('norm_cfg') or {}).get('type')
        found['out_indices'] = list(model.backbone.get('out_indices', ()))
        heads = model.get('roi_head', {}).get('bbox_head', [])
        heads = [model.get(name) for name in ('neck', 'decode_head', 'auxiliary_head')] + (
            list(heads) if isinstance(heads, list) else [heads]
        )
        found['heads'] = [line({**head, 'in_channels': 'of the backbone'}) for head in heads if head]
    found['decay'] = json.loads(json.dumps(optim.get('paramwise_cfg')))
    return found


@pytest.mark.parametrize('name', CONFIGS)
def test_a_config_is_its_published_recipe(name):
    assert name in PUBLISHED['configs'], 'add its recipe to tests/data/recipes.json'
    assert summary(load(name)) == PUBLISHED['recipes'][PUBLISHED['configs'][name]]
    assert load(name).optim_wrapper.constructor == 'MergedOptimWrapperConstructor'


@pytest.mark.parametrize('name', CONFIGS)
def test_transforms_of_pipelines_exist(name):
    cfg = load(name)
    init_default_scope(cfg.default_scope)
    for loader in (cfg.train_dataloader, cfg.test_dataloader):
        assert [TRANSFORMS.build(dict(step)) for step in loader.dataset.pipeline]


# each kind of head on some backbone, and the features of each backbone for a classifier; parameters of all backbones:
# tests/backbones; cascades: tests/tools/test_rounds.py
NAMES = """
mmdet/ravlt_t_maskrcnn_1x mmdet/ravlt_t_retinanet_1x mmdet/inline_deit_t_maskrcnn_1x
mmdet/flatten_pvt_v2_b1_retinanet_1x mmdet/flatten_cswin_t_maskrcnn_1x mmseg/ravlt_t_fpn_80k mmseg/inline_pvt_t_fpn_80k
mmseg/flatten_swin_t_upernet_160k mmpretrain/ravlt_t_in1k mmpretrain/inline_pvt_t_in1k mmpretrain/flatten_swin_t_in1k
mmpretrain/inline_cswin_t_in1k mmpretrain/inline_deit_t_in1k mmpretrain/hmhsa_nextvit_s_in1k
"""


@pytest.mark.parametrize('name', NAMES.split())
def test_every_parameter_gets_a_gradient(name):
    """Find no unused parameter, at which DistributedDataParallel would stop (``find_unused_parameters`` is off)."""
    options = dict(model__data_preprocessor__size=(64, 64)) if name.startswith('mmseg') else {}
    options.update(dict(model__train_cfg__rcnn__sampler__num=16) if 'maskrcnn' in name else {})
    model, cfg = build(name, **options)
    model.init_weights()
    assert without_gradient(model, cfg) == []
