# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Classifiers start and decay as their releases: ``tests/data/initial_weights.csv``, read off the released code."""

import csv
import math
import re

import pytest
import torch
from helpers.config_helpers import CONFIGS, ROOT, build, load, one_size
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS
from torch import nn

pytest.importorskip('mmpretrain')

RULES: dict[str, dict] = {}  # release -> (weights without indices, dimensions) -> start, decay
with open(ROOT / 'tests' / 'data' / 'initial_weights.csv', newline='') as file:
    for row in csv.DictReader(file):
        key = row['weights'], int(row['dimensions'])
        RULES.setdefault(row['release'], {})[key] = row['start'], row['decay'] == 'yes'


def release_of(name: str) -> str:
    return re.sub(r'mmpretrain/(\w+?)_(t|s|m|b|l|b\d)(_384)?_in1k', r'\1', name)


RELEASED = [name for name in CONFIGS if release_of(name) in RULES]


def assert_starts(value: torch.Tensor, start: str, layer: nn.Module, scales: set) -> None:
    """Check that ``value``, a weight or bias of ``layer``, starts as the release says."""
    constant = dict(zero=0.0, one=1.0).get(start)
    if start == 'layer_scale':
        constant = next(scale for scale in scales if math.isclose(scale, value.flatten()[0].item(), rel_tol=1e-6))
    if constant is not None:
        assert torch.equal(value, torch.full_like(value, constant))
        return
    if start == 'default':  # of PyTorch: uniform
        bound = layer.weight[0].numel() ** -0.5
        assert value.abs().max() <= bound
        median = bound / 2
    else:
        size = math.prod(getattr(layer, 'kernel_size', ())) * len(value) // getattr(layer, 'groups', 1)
        median = 0.6745 * dict(normal=0.02, fan_out=(2 / size) ** 0.5)[start]
    # medians: PyTorch's truncated normal gives -2 once in some 2^24 numbers, and so do the releases
    deviations = 6 / value.numel() ** 0.5
    assert value.abs().median().item() == pytest.approx(median, rel=deviations)
    assert abs(value.median().item()) < 2 * deviations * median


@pytest.mark.parametrize('name', one_size(RELEASED))
def test_classifiers_start_and_decay_as_released(name):
    torch.manual_seed(0)
    model, cfg = build(name, model__head__init_cfg=None)  # that of the fine-tuned ones is a checkpoint
    model.init_weights()
    rules = RULES[release_of(name)]
    groups = build_optim_wrapper(model, cfg.optim_wrapper).optimizer.param_groups
    decays = {p: group['weight_decay'] > 0 for group in groups for p in group['params']}
    scales = model.backbone.arch.get('layer_scales')
    scales = set(scales) if isinstance(scales, tuple) else {scales}
    modules, found = dict(model.named_modules()), set()
    for weight, parameter in model.named_parameters():
        kind = re.sub(r'\.\d+\b', '', weight), parameter.dim()
        start, decay = rules[kind]
        found.add(kind)
        assert decays[parameter] == decay, weight
        assert_starts(parameter.detach(), start, modules[weight.rpartition('.')[0]], scales)
    assert found == set(rules) or '_b_384' in name  # other stages have linear attention at that size


# stochastic depth of the last block, by size (t s m b l, b0 to b4)
RATES = dict(
    ravlt=dict(t=0.1, s=0.15, b=0.4, l=0.55),
    swin=dict(t=0.2, s=0.3, b=0.5),
    cswin=dict(t=0.2, s=0.4, b=0.5),
    pvt=dict(t=0.1, s=0.1, m=0.3, l=0.3),
    v2=dict(b0=0.1, b1=0.1, b2=0.1, b3=0.3, b4=0.3),
    deit=dict(t=0.1, s=0.1, b=0.1),
)


@pytest.mark.parametrize('name', RELEASED)
def test_stochastic_depth_of_the_last_block(name):
    """Rates grow from block to block: tests/backbones/test_base.py."""
    backbone = load(name).model.backbone
    kind = MODELS.get(backbone.type)
    found = re.search(r'(ravlt|cswin|swin|pvt|v2|deit)_(\w+?)(_384)?_in1k', name.replace('pvt_v2', 'v2'))
    release, size = found.group(1, 2)
    assert (kind.arch_defaults | kind.arch_zoo[backbone.arch])['drop_path_rate'] == RATES[release][size]
