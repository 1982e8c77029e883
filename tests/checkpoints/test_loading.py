# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""``init_cfg=dict(type='Pretrained')`` of our backbones, and its warning."""

import logging
import re

import pytest
import torch
from helpers.checkpoint_helpers import ARCH, released_ravlt

from mmlinattn.backbones import RAVLT
from mmlinattn.checkpoints import CheckpointError, load_pretrained

NORM = 'out_norms.1.weight'


def model(**kwargs) -> RAVLT:
    return RAVLT(ARCH, **kwargs)


@pytest.fixture
def load(caplog, tmp_path):
    def run(backbone, thing):
        torch.save(thing, tmp_path / 'a.pth')
        fit = load_pretrained(backbone, str(tmp_path / 'a.pth'), logger=logging.getLogger('of-loading'))
        warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert all(record.name == 'of-loading' for record in warned)
        lines = [record.getMessage() for record in warned]
        assert all(line.startswith(f'{tmp_path}/a.pth and ') for line in lines)
        return fit, lines

    return run


@pytest.mark.parametrize('dense', [False, True])
def test_a_released_file_loads_without_a_warning(load, dense):
    backbone, released = model(out_norm=dense), released_ravlt(dense)
    if dense:
        released = {f'backbone.{key}': value for key, value in released.items()} | {'neck.w': torch.ones(1)}
    fit, warned = load(backbone, released)
    assert warned == [] and set(fit.weights) == set(backbone.state_dict())


def test_differences_are_listed_in_one_warning(load):
    state, stem, kind = model().state_dict(), 'patch_embeds.0.layers.0.weight', 'patch_embeds.0.layers.0.bias'
    state.update({'mystery.weight': torch.ones(1), NORM: torch.full((5,), 3.0), kind: state[kind].int()})
    state['out_norms.2.weight'][3] = float('nan')
    del state[stem]
    target = model()
    fit, (warning,) = load(target, state)
    assert fit.missing == [stem] and fit.unexpected == ['mystery.weight']
    for part in (
        f'missing in the file: {stem}',
        'unexpected in the file: mystery.weight',
        f'of another shape or kind, not loaded: {NORM} (5 in the file, 16 in the model), {kind} (int32, not real)',
        'NaN or infinite: out_norms.2.weight',
    ):
        assert part in warning
    assert target.state_dict()[NORM].shape == (16,)


@pytest.mark.parametrize(
    'alien, said',
    [
        ({'layer1.0.conv1.weight': torch.ones(1)}, 'the file has layer1.0.conv1.weight; the model has patch_embeds.0'),
        ({'patch_embeds.0.layers.0.bias': torch.ones(99)}, 'of another shape or kind: patch_embeds.0.layers.0.bias'),
        ({'head.w': torch.ones(1)}, 'the file has head.w'),
        ({'epoch': 3}, 'holds no weights'),
    ],
)
def test_a_file_without_a_fitting_weight_is_an_error(load, tmp_path, alien, said):
    backbone = model()
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    with pytest.raises(CheckpointError, match=f'{tmp_path}/a.pth') as caught:
        load(backbone, {'state_dict': alien})
    assert said in str(caught.value)
    assert all(torch.equal(before[key], v) for key, v in backbone.state_dict().items())


def test_init_weights_takes_a_prefix(tmp_path):
    parts = {
        f'{prefix}{key}': torch.full_like(value, number)
        for number, prefix in ((1, 'backbone.'), (2, 'teacher.'))
        for key, value in model().state_dict().items()
    }
    torch.save({'state_dict': parts}, tmp_path / 'a.pth')
    for expected, options in ((1, {}), (1, dict(prefix='')), (2, dict(prefix='teacher.'))):
        backbone = model(init_cfg=dict(type='Pretrained', checkpoint=str(tmp_path / 'a.pth'), **options))
        backbone.init_weights()
        assert all((value == expected).all() for value in backbone.state_dict().values())
    for wrong, said in (
        (dict(prefx='teacher.'), "has ['prefx']; allowed are checkpoint, prefix, map_location"),
        (dict(checkpoint=None), 'checkpoint=None: expected a path, an address or mmlinattn://NAME'),
        (dict(checkpoint=''), "checkpoint='': expected a path"),
    ):
        backbone = model(init_cfg=dict(dict(type='Pretrained', checkpoint=str(tmp_path / 'a.pth')), **wrong))
        with pytest.raises(ValueError, match=re.escape(said)):
            backbone.init_weights()
