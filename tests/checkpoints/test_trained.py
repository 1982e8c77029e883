# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Whole trained models, and adapters that save a part of their weights."""

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from torch import nn

from mmlinattn.backbones import RAVLT
from mmlinattn.checkpoints.fit import compare
from mmlinattn.checkpoints.loading import check_trained, rename_wrapped, trained_model
from mmlinattn.utils.errors import RunError


class Parts(nn.Module):
    def __init__(self, data_preprocessor=None):
        super().__init__()
        self.backbone, self.decode_head, self.auxiliary_head = nn.Linear(2, 2), nn.Linear(2, 3), nn.Linear(2, 3)
        self.data_preprocessor = nn.Identity()


def test_a_trained_model_needs_all_weights(tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS._module_dict, 'Parts', Parts)
    cfg, checkpoint = Config(dict(model=dict(type='Parts'))), tmp_path / 'weights.pth'
    state = {key: value for key, value in Parts().state_dict().items() if not key.startswith('auxiliary_head')}
    others = {'auxiliary_head.weight': torch.ones(9, 2), 'auxiliary_head.x': torch.ones(1), 'teacher.x': torch.ones(1)}
    others['data_preprocessor.mean'] = torch.ones(3)  # older ones register it
    for more in ({}, others):
        torch.save({**state, **more}, checkpoint)
        model, _ = trained_model(cfg, str(checkpoint))
        assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())
    lacking = {key: value for key, value in state.items() if key != 'decode_head.bias'}
    more = {**state, 'decode_head.x': torch.ones(1)}
    misfits = {
        'mismatched: decode_head.weight': {**state, 'decode_head.weight': torch.ones(1)},
        'missing: decode_head.bias': lacking,
        'NaN or infinite: backbone.bias': {**state, 'backbone.bias': torch.tensor([1.0, float('nan')])},
    }
    unexpected = {r'weights.pth\' does not fit the model of c\.py; unexpected: decode_head.x': more}
    for said, wrong in {**unexpected, **misfits}.items():
        torch.save(wrong, checkpoint)
        with pytest.raises(RunError, match=said):
            trained_model(cfg, str(checkpoint), name='c.py')
    check_trained(Parts(), state)
    for said, wrong in misfits.items():
        with pytest.raises(RunError, match=said.split()[-1]):
            check_trained(Parts(), wrong)


ARCH = dict(embed_dims=(8, 16, 24, 32), depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 4))


def lora(*targets):
    return dict(type='LoRAModel', alpha=4, rank=2, targets=[dict(type=target) for target in targets])


@pytest.fixture
def saved(tmp_path, monkeypatch):
    pytest.importorskip('mmpretrain')
    init_default_scope('mmpretrain')
    base = RAVLT(ARCH, out_indices=(3,))
    for parameter in base.parameters():
        nn.init.normal_(parameter, std=0.2)
    torch.save(dict(state_dict=base.state_dict()), tmp_path / 'base.pth')

    def make(adapter, init_cfg=True):
        init = dict(type='Pretrained', checkpoint=str(tmp_path / 'base.pth')) if init_cfg else None
        base = dict(type='RAVLT', arch=ARCH, out_indices=(3,), out_norm=False, init_cfg=init)
        head = dict(type='LinearClsHead', num_classes=3, in_channels=32)
        parts = dict(backbone=dict(adapter, module=base), neck=dict(type='GlobalAveragePooling'), head=head)
        cfg = Config(dict(default_scope='mmpretrain', model=dict(type='ImageClassifier', **parts)))
        model = MODELS.build(cfg.model)
        model.init_weights()
        for parameter in model.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, std=0.2)
        torch.save(dict(state_dict=model.state_dict(), meta=dict(epoch=3)), tmp_path / 'trained.pth')
        return cfg, model.eval(), tmp_path / 'trained.pth'

    return make


@pytest.mark.parametrize('adapter', [lora('proj', 'fc1'), lora('.*')])
def test_frozen_weights_come_from_init_cfg(adapter, saved):
    cfg, model, checkpoint = saved(adapter)
    found, meta = trained_model(cfg, str(checkpoint))
    image = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(found.eval()(image), model(image))
        # as for export: folded but for adapted layers
        found.backbone.module.switch_to_deploy()
        torch.testing.assert_close(found(image), model(image))
    assert meta['epoch'] == 3
    # a weight that trains is in the checkpoint or nowhere: init_cfg is not even read
    state = torch.load(checkpoint)['state_dict']
    lost = next(key for key in state if 'lora_' in key)
    torch.save({key: value for key, value in state.items() if key != lost}, checkpoint)
    (checkpoint.parent / 'base.pth').unlink()
    with pytest.raises(RunError, match=f'missing: .*{lost}'):
        trained_model(cfg, str(checkpoint))


def test_missing_frozen_weights_are_refused(saved):
    cfg, _, checkpoint = saved(lora('qkv'), init_cfg=False)
    with pytest.raises(RunError, match='missing: backbone.module.patch_embeds.0'):
        trained_model(cfg, str(checkpoint))


def test_missing_running_statistics_are_refused():
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    state = {key: value for key, value in model.state_dict().items() if 'running_var' not in key}
    with pytest.raises(RunError, match='1 parameters not in the file: 1.running_var'):
        check_trained(model, dict(state_dict=state))
    with pytest.raises(RunError, match="no weights under 'state_dict'; the file has model, optimizer"):
        check_trained(model, dict(model=state, optimizer={}))


def test_weights_of_the_model_itself_do_not_move_into_an_adapter():
    model = nn.ModuleDict(dict(layer=nn.Linear(1, 1), original_layer=nn.ModuleDict(dict(layer=nn.Linear(1, 1)))))
    state = model['layer'].state_dict(prefix='layer.')
    rename_wrapped(state, model)
    assert [*state] == ['layer.weight', 'layer.bias']


@pytest.mark.parametrize('prefix', ['', 'module.'])  # as processes save them
def test_plain_weights_load_into_adapters(saved, prefix):
    cfg, adapted, _ = saved(lora('qkv', 'fc1'), init_cfg=False)
    cfg.model.backbone = cfg.model.backbone.module
    plain = MODELS.build(cfg.model).eval()
    for value in (*plain.parameters(), *plain.buffers()):
        if value.is_floating_point():
            nn.init.uniform_(value, 0.1, 0.5)
    state = {prefix + key: value for key, value in plain.state_dict().items()}
    rename_wrapped(state, adapted)
    fit = compare(adapted, state)
    assert fit.missing and all('.lora_' in key for key in fit.missing)
    adapted.load_state_dict(fit.weights, strict=False)
    for key, parameter in adapted.named_parameters():
        if '.lora_' in key:
            nn.init.zeros_(parameter)
    image = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(adapted(image), plain(image))
