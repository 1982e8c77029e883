# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The classifiers of the configs, under released files."""

import numpy as np
import pytest
import torch
from helpers import goldens
from helpers.config_helpers import build

import mmlinattn  # noqa: F401
from mmlinattn.backbones import LinearSwin
from mmlinattn.checkpoints.convert import convert_state

pytest.importorskip('mmpretrain')

# a file of each layout; all sizes and methods: tests/backbones
FAST = 'ravlt_t inline_pvt_t inline_deit_t flatten_pvt_t'.split()
SLOW = 'flatten_pvt_v2_b1 flatten_swin_t inline_cswin_t softmax_nextvit_s'.split()


@pytest.mark.parametrize('case', [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_released_classifier(case):
    # a baseline is its sibling's config with another arch
    arch = dict(model__backbone__arch='softmax-small') if case.startswith('softmax') else {}
    model, _ = build(f'mmpretrain/{case.replace("softmax", "hmhsa")}_in1k', random_init=False, **arch)
    released = {'model': goldens.state_dict(case)}
    fit = convert_state(released, case, model)
    assert fit.is_complete, str(fit)
    model.load_state_dict(fit.weights, strict=True)
    model.double().eval()
    with torch.no_grad():
        logits = model(goldens.image(case).double(), mode='tensor').numpy()
    expected = goldens.outputs(case)['logits']
    assert np.abs(logits - expected).max() < 1e-4 * expected.std()


def test_fine_tuning_at_384_starts_from_the_224_classifier(tmp_path, monkeypatch):
    """Load head and backbone of the published file and resize the position tables, on the tiny model."""
    monkeypatch.setattr(torch.hub, 'get_dir', lambda: str(tmp_path))
    cache = tmp_path / 'checkpoints' / 'mmlinattn'
    cache.mkdir(parents=True)
    released = goldens.state_dict('flatten_swin_t')
    torch.save({'model': released}, cache / 'flatten_swin_t.pth')
    arch = dict(LinearSwin.arch_zoo['flatten-tiny'], _delete_=True, window=12, linear_windows=(96, 48, 24, 12))
    model, _ = build(
        'mmpretrain/flatten_swin_b_384_in1k',
        model__backbone__arch=arch,
        model__backbone__init_cfg=dict(_delete_=True, type='Pretrained', checkpoint='mmlinattn://flatten_swin_t'),
        model__head__in_channels=768,
        model__head__init_cfg__checkpoint='mmlinattn://flatten_swin_t_in1k',
    )
    model.init_weights()
    torch.testing.assert_close(model.head.fc.weight, released['head.weight'])
    torch.testing.assert_close(model.head.fc.bias, released['head.bias'])
    block = model.backbone.stages[0][1]
    torch.testing.assert_close(block.ffn.fc1.weight, released['layers.0.blocks.1.mlp.fc1.weight'])
    table, released_table = block.attn.mixer.position.weight, released['layers.0.blocks.1.attn.positional_encoding']
    assert table.shape == (1, 96 * 96, 96)  # resized as in tests/layers/test_position.py: a corner keeps its value
    torch.testing.assert_close(table[:, 0], released_table[:, 0])
