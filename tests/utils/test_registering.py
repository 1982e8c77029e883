# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Models by name in MMPretrain's hub. The test of docs/get_started.md covers MMEngine's hub."""

from types import SimpleNamespace

import pytest
import torch

import mmlinattn
from mmlinattn.utils import register_all_modules, registering


def test_classifiers_are_known_by_name(monkeypatch):
    hub = pytest.importorskip('mmpretrain.apis').ModelHub
    from mmpretrain import get_model, list_models

    monkeypatch.setattr(hub, '_models_dict', {})  # reading its index takes seconds
    monkeypatch.setattr(hub, '_ModelHub__mmpretrain_registered', True)
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
    assert hub.get('ravlt_t_in1k').metadata.parameters == 14_900_000
