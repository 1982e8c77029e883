# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Backbones against outputs of the authors' released code. Published parameter counts: tests/configs."""

import pytest
import torch
from helpers import goldens
from helpers.config_helpers import BACKBONES, SIZES
from mmengine.registry import MODELS

import mmlinattn  # noqa: F401
from mmlinattn.checkpoints import load_pretrained


def released(name, tmp_path):
    """Return a model with the weights of a file with the released keys; norms that a classifier lacks are missing."""
    checkpoint = tmp_path / 'released.pth'
    torch.save({'model': goldens.state_dict(name)}, checkpoint)
    method, *backbone, size = [part for part in name.split('_') if 'x' not in part[1:-1] or part == 'nextvit']
    arch = SIZES.get(size, size) if method == 'ravlt' else f'{method}-{SIZES.get(size, size)}'
    kind = 'RAVLT' if method == 'ravlt' else BACKBONES['_'.join(backbone)]
    model = MODELS.build(dict(type=kind, arch=arch))
    fit = load_pretrained(model, str(checkpoint), logger='silent')
    assert not fit.unexpected and all(key.startswith('out_norm') for key in fit.missing)
    return model.double().eval()


@pytest.mark.parametrize('name', goldens.cases())
def test_released_weights_give_the_released_outputs(name, tmp_path):
    stored, raw, model = goldens.outputs(name), [], released(name, tmp_path)
    # the larger ones of RAVLT in single precision: exact and slow
    dtype, tolerance = (torch.float32, 5e-5) if 'ravlt_' in name and name != 'ravlt_t' else (torch.float64, 1e-5)
    if 'deit' not in name:
        for norm in model.out_norms.values():
            norm.register_forward_pre_hook(lambda _, inputs: raw.append(inputs[0]))
    with torch.no_grad():
        outs = model.to(dtype)(goldens.image(name).to(dtype))
    if raw:
        found = outs if 'det' in name else raw
        for i, (out, feature) in enumerate(zip(found, goldens.info(name)['features'], strict=True)):
            assert list(out.shape) == feature['shape']
            assert goldens.error(out, stored[f'feat{i}']) < tolerance
    if 'logits' in stored and 'ravlt' not in name:  # RAVLT's classifier is a neck and a head
        state = goldens.state_dict(name)
        last = (raw if 'pvt_t' in name else outs)[-1]  # PVT's classifiers stand on the last stage itself
        pooled = last if last.dim() == 2 else last.mean(dim=(2, 3))
        head = 'proj_head.0' if 'nextvit' in name else 'head'
        logits = pooled @ state[f'{head}.weight'].double().T + state[f'{head}.bias'].double()
        expected = torch.from_numpy(stored['logits']).double()
        assert (logits - expected).abs().max() < 1e-5 * expected.std()
