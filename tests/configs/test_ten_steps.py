# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Ten steps of the published ImageNet recipes beside a reference implementation of the releases, in float64."""

import csv
import re

import pytest
import torch
from helpers.config_helpers import ROOT, build
from helpers.goldens import fill
from helpers.released import AdamW, Released, learning_rate, soft_cross_entropy
from mmengine.optim import build_optim_wrapper
from mmengine.registry import PARAM_SCHEDULERS

pytest.importorskip('mmpretrain')
from mmpretrain.structures import DataSample  # noqa: E402

CLASSES, IMAGES, SIDE, STEPS = 7, 3, 64, 10
_pyramid = dict(depths=(1, 1, 2, 1), mlp_ratios=2, drop_path_rate=0.0)
_linear, _half = ('{}',) * 4, ('{}', '{}', 'softmax', 'softmax')
ARCHS = {
    'RAVLT': dict(
        _pyramid, embed_dims=(8, 16, 32, 32), num_heads=(1, 2, 2, 4), layer_scales=(1.0, 1.0, 0.5, 0.5), attns=_half
    ),
    'LinearPVT': dict(_pyramid, embed_dims=(8, 16, 24, 32), num_heads=(1, 2, 3, 4), sr_ratios=(8, 4, 2, 1)),
    'LinearPVTv2': dict(_pyramid, embed_dims=(8, 16, 24, 32), num_heads=(1, 2, 3, 4), sr_ratios=(8, 4, 2, 1)),
    'LinearSwin': dict(
        _pyramid, embed_dims=(8, 16, 32, 64), num_heads=(1, 2, 4, 8), window=2, linear_windows=(8, 8, 4, 2), attns=_half
    ),
    'LinearCSWin': dict(
        _pyramid, embed_dims=(8, 16, 32, 64), num_heads=(2, 2, 4, 8), stripes=(1, 2, 2, None), attns=_half
    ),
    'LinearDeiT': dict(
        embed_dims=(24,), depths=(3,), num_heads=(3,), mlp_ratios=2, drop_path_rate=0.0, grid=4, attns=('{}',)
    ),
}
RELEASES = {
    'ravlt_t': ('RAVLT', 'rala'),
    'inline_pvt_t': ('LinearPVT', 'inline'),
    'flatten_pvt_t': ('LinearPVT', 'focused'),
    'flatten_pvt_v2_b1': ('LinearPVTv2', 'focused'),
    'inline_swin_t': ('LinearSwin', 'inline'),
    'flatten_swin_t': ('LinearSwin', 'focused'),
    'inline_cswin_t': ('LinearCSWin', 'inline'),
    'flatten_cswin_t': ('LinearCSWin', 'focused'),
    'inline_deit_t': ('LinearDeiT', 'inline'),
}


def released_decay(name: str, weights: dict) -> set[str]:
    """Return the names of the weights that decay in the release."""
    release = re.sub(r'_(t|b1)$', '', name)
    with open(ROOT / 'tests' / 'data' / 'initial_weights.csv', newline='') as file:
        rows = [row for row in csv.DictReader(file) if row['release'] == release]
    decay = {(row['weights'], int(row['dimensions'])) for row in rows if row['decay'] == 'yes'}
    return {key for key, value in weights.items() if (re.sub(r'\.\d+\b', '', key), value.dim()) in decay}


def small_model(name: str):
    backbone, attention = RELEASES[name]
    arch = dict(ARCHS[backbone])
    arch['stage_attns'] = tuple(kind.format(attention) for kind in arch.pop('attns', _linear))
    if backbone in ('LinearPVT', 'LinearPVTv2', 'LinearCSWin'):
        arch['grids'] = tuple(SIDE // 4 // 2**i for i in range(4))
    options = dict(model__head__num_classes=CLASSES, model__head__in_channels=arch['embed_dims'][-1])
    if backbone == 'RAVLT':
        options.update(model__neck__in_channels=32, model__neck__out_channels=16, model__head__in_channels=16)
    options['model__backbone__arch'] = dict(arch, _delete_=True)
    model, cfg = build(f'mmpretrain/{name}_in1k', **options)
    return fill(model).double(), cfg


def batches():
    """Yield images with soft labels, as mixup makes them."""
    torch.manual_seed(1)
    for _ in range(STEPS):
        images = torch.randn(IMAGES, 3, SIDE, SIDE, dtype=torch.float64)
        share = torch.rand(1).item()
        labels = [torch.nn.functional.one_hot(torch.randint(CLASSES, (IMAGES,)), CLASSES) for _ in range(2)]
        yield images, (share * labels[0] + (1 - share) * labels[1]).float()


def train_ours(model, cfg) -> list[float]:
    """Train with the optimizer and the schedule of the config, one iteration an epoch."""
    wrapper, losses = build_optim_wrapper(model, cfg.optim_wrapper), []
    schedulers = [
        PARAM_SCHEDULERS.build({'end': 300, **each}, default_args=dict(optimizer=wrapper.optimizer, epoch_length=1))
        for each in cfg.param_scheduler
    ]
    model.train()
    for images, shares in batches():
        loss = model(images, [DataSample().set_gt_score(share) for share in shares], mode='loss')['loss']
        losses.append(loss.item())
        wrapper.update_params(loss)
        for scheduler in schedulers:
            scheduler.step()
    return losses


def train_reference(reference: Released, decays: set, warmup: int, clip) -> list[float]:
    optimizer, losses = AdamW(reference.weights, decays, 0.05, clip), []
    for step, (images, shares) in enumerate(batches()):
        loss = soft_cross_entropy(reference.logits(images), shares)
        losses.append(loss.item())
        optimizer.step(loss, learning_rate(step, 1e-3, warmup, 300, 1e-5))
    return losses


@pytest.mark.parametrize('name', RELEASES)
def test_ten_steps_equal_those_of_the_release(name):
    model, cfg = small_model(name)
    backbone = RELEASES[name][0]
    reference = Released(backbone, model.backbone.arch, model.state_dict())
    decays = released_decay(name, reference.weights)
    expected = train_reference(reference, decays, *((5, None) if backbone == 'RAVLT' else (20, 5.0)))
    losses = train_ours(model, cfg)
    assert max(abs(ours - theirs) for ours, theirs in zip(losses, expected)) < 1e-6
    state = model.state_dict()
    for key, value in {**reference.weights, **reference.buffers}.items():
        torch.testing.assert_close(
            state[key], value.detach(), rtol=0, atol=1e-6, msg=lambda text, key=key: f'{key}: {text}'
        )
    assert abs(losses[0] - losses[-1]) > 1e-3  # the weights moved
