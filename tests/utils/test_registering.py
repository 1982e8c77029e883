# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Models by their names, through MMEngine's hub and MMPretrain's."""

from types import SimpleNamespace

import pytest
import torch
from config_helpers import ROOT

import mmlinattn
from mmlinattn.utils import register_all_modules, registering


@pytest.fixture
def hub(monkeypatch):
    """MMPretrain's list of models without its own (reading its index takes seconds)."""
    models = pytest.importorskip('mmpretrain.apis').ModelHub
    monkeypatch.setattr(models, '_models_dict', {})
    monkeypatch.setattr(models, '_ModelHub__mmpretrain_registered', True)
    return models


def test_classifiers_are_known_by_name(hub, monkeypatch):
    from mmpretrain import get_model, list_models
    from mmpretrain.apis import ModelHub

    with monkeypatch.context() as patch:
        patch.setattr(registering, 'find_spec', lambda name: None)  # without MMPretrain the modules only
        register_all_modules()
    assert list_models() == []
    hub._models_dict['ravlt_s_in1k'] = theirs = SimpleNamespace(name='ravlt_s_in1k')
    register_all_modules()
    register_all_modules(init_default_scope=False)
    assert hub._models_dict.pop('ravlt_s_in1k') is theirs
    assert 'ravlt_t_in1k' in list_models('*ravlt*')
    assert 'inline_deit_t_in1k' in list_models(task='Image Classification')
    assert not any('maskrcnn' in name or 'fpn' in name for name in list_models())
    model = get_model('ravlt_t_in1k', backbone=dict(init_cfg=None), head=dict(num_classes=7))
    assert isinstance(model.backbone, mmlinattn.backbones.RAVLT) and model(torch.rand(1, 3, 64, 64)).shape == (1, 7)
    assert ModelHub.get('ravlt_t_in1k').metadata.parameters == 14_900_000


@pytest.mark.slow
@pytest.mark.parametrize(
    'name, head',
    [
        ('mmdet/ravlt_t_maskrcnn_1x', 'roi_head'),
        ('mmseg/inline_pvt_t_fpn_80k', 'decode_head'),
        ('mmpretrain/flatten_pvt_v2_b0_in1k', 'head'),
        ('mmpretrain/ravlt_shapes_quickstart', 'head'),
    ],
)
def test_mmengine_builds_any_config_by_name(name, head, hub):
    pytest.importorskip(name.partition('/')[0])
    from mmengine.hub import get_config, get_model

    if not (ROOT / 'mmlinattn' / '.mim').is_dir():
        pytest.skip('mmlinattn is not installed')
    model = get_model(f'mmlinattn::{name}.py')
    assert isinstance(model.backbone, mmlinattn.backbones.base.Backbone)
    assert hasattr(model, head)
    assert get_config(f'mmlinattn::{name}.py').default_scope == name.partition('/')[0]
