# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Names, inheritance and sizes of the configs. A config that appears is covered by what it is
called; the published rows it has to reproduce are in ``mmlinattn/tables``."""

import ast
import csv
import re
from pathlib import Path

import numpy as np
import pytest
from config_helpers import CONFIG_DIR, CONFIGS, ROOT, build, configs_of, load
from mmengine.registry import MODELS

import mmlinattn  # noqa: F401

for project in ('mmdet', 'mmseg', 'mmpretrain'):
    pytest.importorskip(project)

NAMES = {
    'mmdet': r'[a-z0-9_]+_(maskrcnn|cascade|retinanet)_(1x|3x)',
    'mmseg': r'[a-z0-9_]+_(fpn_80k|upernet_160k)',
    'mmpretrain': r'[a-z0-9_]+_in1k',
}


# ---- names, scopes, inheritance


@pytest.mark.parametrize('name', CONFIGS)
def test_upstream_tools_can_run_it(name):
    task, stem = name.split('/')
    assert re.fullmatch(NAMES[task], stem), f'{name}: see the naming scheme in NAMES'
    cfg = load(name)
    assert cfg.default_scope == task
    assert cfg.get('custom_imports') == dict(imports=['mmlinattn'], allow_failed_imports=False)
    assert 'CheckpointGuardHook' in [hook.type for hook in cfg.custom_hooks]


def bases_of(path: Path) -> set:
    """Upstream bases (``scope::path``) of a config, through all local ones."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == '_base_':
            bases = ast.literal_eval(node.value)
            break
    else:
        return set()
    found = set()
    for base in [bases] if isinstance(bases, str) else bases:
        found |= {base} if '::' in base else bases_of(path.parent / base)
    return found


@pytest.mark.parametrize('name', CONFIGS)
def test_inherits_upstream(name):
    path = CONFIG_DIR / f'{name}.py'
    task = path.parent.name
    bases = bases_of(path)
    for part in ('models', 'datasets', 'schedules'):
        assert any(base.startswith(f'{task}::_base_/{part}/') for base in bases), part
    assert f'{task}::_base_/default_runtime.py' in bases
    assert {base.split('::')[0] for base in bases} == {task}
    statements = [line for line in path.read_text().splitlines() if not line.startswith('#')]
    assert len(statements) <= 35, 'a config says only what differs from its bases'


# ---- published rows

METHODS = {
    'Mask R-CNN': 'maskrcnn',
    'Cascade Mask R-CNN': 'cascade',
    'RetinaNet': 'retinanet',
    'Semantic FPN': 'fpn',
    'UperNet': 'upernet',
}
HOSTS = {
    'PVT': 'LinearPVT',
    'PVTv2': 'LinearPVTv2',
    'Swin': 'LinearSwin',
    'CSWin': 'LinearCSWin',
    'DeiT': 'LinearDeiT',
    'NextViT': 'LinearNextViT',
}
SIZES = dict(T='tiny', S='small', M='medium', B='base', L='large')
# Rows whose paper and whose released code disagree; the release decides.
CONTRADICTORY = {'mmpretrain/inline_pvt_l_in1k', 'mmpretrain/inline_swin_t_in1k'}


def config_name(task: str, row: dict) -> str:
    backbone = row.get('backbone') or row['model']
    backbone = backbone.lower().replace('-', '_').replace('pvtv2', 'pvt_v2')
    if task == 'mmpretrain':
        return f'{task}/{backbone}_in1k'
    return f'{task}/{backbone}_{METHODS[row["method"]]}_{row["schedule"].replace("+MS", "")}'


def published_rows() -> dict:
    """Config name -> row of its table."""
    tables = dict(mmdet='detection', mmseg='segmentation', mmpretrain='classification')
    rows = {}
    for task, table in tables.items():
        with open(ROOT / 'mmlinattn' / 'tables' / f'{table}.csv', newline='') as file:
            rows.update({config_name(task, row): row for row in csv.DictReader(file)})
    return rows


ROWS = published_rows()


def has_host(row: dict) -> bool:
    """Whether the backbone of a row is registered, with the row's size."""
    family, *rest = (row.get('backbone') or row['model']).split('-')
    host = MODELS.get('RAVLT' if family == 'RAVLT' else HOSTS[rest.pop(0)])
    size = '-'.join([SIZES.get(rest[0], rest[0].lower()), *rest[1:]])
    arch = size if family == 'RAVLT' else f'{family.lower()}-{size}'
    return host is not None and arch in host.arch_zoo


@pytest.mark.parametrize('name', ROWS)
def test_every_published_row_has_a_config(name):
    if name not in CONFIGS and not has_host(ROWS[name]):
        pytest.skip(f'no backbone yet for {name}')
    assert name in CONFIGS


def test_every_config_is_a_published_row():
    assert set(CONFIGS) <= set(ROWS)


def rounded(number: float, like: str) -> float:
    return round(number, len(like.partition('.')[2]))


def test_rows_that_contradict_themselves_are_known():
    contradictory = {
        name
        for name, row in ROWS.items()
        if row.get('released_params_M')
        and row['params_M']
        and rounded(float(row['released_params_M']), row['params_M']) != float(row['params_M'])
    }
    assert contradictory == CONTRADICTORY


@pytest.mark.parametrize('name', CONFIGS)
def test_parameter_count_and_widths(name):
    model, cfg = build(name, random_init=False)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    row = ROWS[name]
    for published in (row.get('released_params_M'), name not in CONTRADICTORY and row['params_M']):
        if published:
            assert rounded(millions, published) == float(published)

    widths = [info['channels'] for info in model.backbone.feature_info]
    for part in ('neck', 'decode_head', 'auxiliary_head'):
        # An input of the part that takes the backbone's maps: a pyramid hides them from the head.
        if part in cfg.model and not (part != 'neck' and 'neck' in cfg.model):
            given = cfg.model[part].in_channels
            index = cfg.model[part].get('in_index')
            expected = widths if index is None else np.array(widths)[index].tolist()
            assert given == (expected if isinstance(given, list) else np.squeeze(expected))


@pytest.mark.parametrize(
    'name', configs_of('mmdet/ravlt') + configs_of('mmseg/ravlt') + configs_of('mmpretrain/ravlt')
)
def test_ravlt_backbone(name):
    size = re.search('ravlt_(.)_', name)[1]
    backbone = load(name).model.backbone
    assert backbone.type == 'RAVLT' and backbone.arch == SIZES[size.upper()]
    if name.startswith('mmpretrain'):  # the run that makes the ImageNet weights
        assert 'init_cfg' not in backbone and not backbone.out_norm
    else:
        assert backbone.norm_cfg.type == 'SyncBN'
        assert backbone.init_cfg == dict(type='Pretrained', checkpoint=f'mmlinattn://ravlt_{size}')
