# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Merged parameter groups beside MMEngine's: settings, updates, resuming in both directions, fused kernels."""

import copy
import re

import pytest
import torch
from helpers.engine_toys import ToyModel, make_runner
from mmengine.config import ConfigDict
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, OPTIMIZERS
from torch import nn
from torch.nn import functional as F

from mmlinattn.engine.optimizers.merged_groups import can_be_fused
from mmlinattn.utils.errors import RunError

OURS = 'MergedOptimWrapperConstructor'
THEIRS = 'DefaultOptimWrapperConstructor'
KEYS = dict(
    norm_decay_mult=0.0,
    bias_decay_mult=0.5,
    dwconv_decay_mult=2.0,
    custom_keys={'head': dict(lr_mult=10.0), 'token': dict(decay_mult=0.0), 'odd': dict(betas=(0.5, 0.9))},
)


class Net(nn.Module):
    """A depth-wise and a usual convolution, norms, and two parameters with settings of their own."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.conv, self.depthwise = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8)
        self.norm, self.frozen = nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 1).requires_grad_(False)
        self.token, self.odd = nn.Parameter(torch.zeros(8, 1, 1)), nn.Parameter(torch.ones(8, 1, 1))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.frozen(self.norm(self.depthwise(self.conv(x))) + self.token) * self.odd
        return self.head(F.gelu(x).mean((2, 3)))


def wrap(model, constructor=OURS, paramwise=KEYS, optimizer=None, **options):
    cfg = dict(
        type='OptimWrapper',
        constructor=constructor,
        optimizer=dict(dict(type='AdamW', lr=1e-2, weight_decay=0.1), **(optimizer or {})),
        paramwise_cfg=copy.deepcopy(paramwise),
        **options,
    )
    return build_optim_wrapper(model, ConfigDict(cfg))


def train(model, wrapper, steps=3, start=0):
    for i in range(start, start + steps):
        torch.manual_seed(i)
        wrapper.update_params(model(torch.randn(2, 3, 9, 9)).square().mean())
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same(found, expected, exact=False):
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, **(dict(rtol=0, atol=0) if exact else dict(rtol=1e-5, atol=1e-6))
        )


def settings(wrapper, model, keys=('lr', 'weight_decay', 'betas')):
    names = {p: name for name, p in model.named_parameters()}
    groups = wrapper.optimizer.param_groups
    return {names[p]: {key: group[key] for key in keys} for group in groups for p in group['params']}


@pytest.mark.parametrize('options', [{}, dict(clip_grad=dict(max_norm=0.1)), dict(accumulative_counts=2)])
@pytest.mark.parametrize('optimizer', [{}, dict(type='SGD', momentum=0.9), dict(type='RMSprop')], ids=str)
def test_updates_are_those_of_mmengine(options, optimizer):
    paramwise = {**KEYS, 'custom_keys': {**KEYS['custom_keys'], 'odd': {}}} if optimizer else KEYS
    ours, theirs = Net(), Net()
    merged, plain = (wrap(net, name, paramwise, optimizer, **options) for net, name in ((ours, OURS), (theirs, THEIRS)))
    if not optimizer:
        assert settings(merged, ours) == settings(plain, theirs)
    groups = merged.optimizer.param_groups
    kinds = {repr({k: v for k, v in group.items() if k not in ('params', 'param_names')}) for group in groups}
    assert len(groups) == len(kinds) < len(plain.optimizer.param_groups)
    assert all(group.get('fused', optimizer.get('type') == 'RMSprop') for group in groups)
    assert merged.get_lr()['lr'][0] == plain.get_lr()['lr'][0]
    assert_same(train(ours, merged, 4), train(theirs, plain, 4))


def test_settings_without_effect_make_no_group():
    wrapper = wrap(Net(), paramwise=None)
    (group,) = wrapper.optimizer.param_groups
    assert group['fused'] and 'base_lr' not in wrapper.get_lr()
    keys = {'conv': dict(decay_mult=1.0), 'token': dict(lr_mult=1)}
    assert len(wrap(Net(), paramwise=dict(custom_keys=keys)).optimizer.param_groups) == 1


@pytest.mark.parametrize('factors', [3, 4])
def test_the_settings_of_up_to_four_groups_are_logged(monkeypatch, factors):
    lines, rates = [], zip(('conv', 'norm', 'token', 'odd'), (0.5, 2.0, 3.0, 4.0)[:factors])
    monkeypatch.setattr('mmlinattn.engine.optimizers.merged_groups.print_log', lambda line, _: lines.append(line))
    wrap(Net(), paramwise=dict(custom_keys={key: dict(lr_mult=rate) for key, rate in rates}))
    assert lines[0].startswith(f'AdamW (fused): 10 parameters in {factors + 1} groups: ')
    assert ('; 2 with lr=0.005, weight_decay=0.1; ' in lines[0]) == ('; ...; ' not in lines[0]) == (factors == 3)


class Exempt(Net):
    def no_weight_decay(self):
        return {'token', 'no parameter'}


@pytest.mark.parametrize(
    ('paramwise', 'decay'),
    [
        (None, 0.0),
        (dict(norm_decay_mult=0.0), 0.0),
        (dict(custom_keys=dict(token=dict(lr_mult=0.1))), 0.0),
        (dict(custom_keys=dict(token=dict(decay_mult=0.5))), 0.05),
    ],
)
def test_weights_that_a_part_of_the_model_exempts_do_not_decay(paramwise, decay):
    model = nn.ModuleDict(dict(backbone=Exempt(), shared=nn.Linear(2, 2)))
    model['again'] = model['shared'] if paramwise is None else nn.Linear(2, 2)
    groups = wrap(model, paramwise=paramwise).optimizer.param_groups
    decays = {p: group['weight_decay'] for group in groups for p in group['params']}
    assert decays.pop(model['backbone'].token) == pytest.approx(decay)
    assert decays[model['backbone'].odd] == 0.1
    assert len(decays) == len([p for p in model.parameters() if p.requires_grad]) - 1
    kept = wrap(model, paramwise=paramwise and {}, optimizer=dict(weight_decay=0.0)).optimizer.param_groups
    assert {group['weight_decay'] for group in kept} == {0.0}


def test_shared_parameters_and_modules_around_the_model():
    net = Net()
    net.again = nn.Sequential(net.conv)
    with pytest.raises(ValueError, match=r'share the parameter conv.weight. Set .*bypass_duplicate=True'):
        wrap(net)
    wrapper = wrap(nn.ModuleDict(dict(module=net)), paramwise=dict(KEYS, bypass_duplicate=True))
    assert sum(len(group['params']) for group in wrapper.optimizer.param_groups) == 10
    assert wrapper.optimizer.param_groups[0]['param_names'] == ['token', 'norm.weight', 'norm.bias']


# ---- fused kernels


class Custom(torch.optim.AdamW):
    """AdamW's subclass, which may override ``step``."""


OPTIMIZERS.register_module(module=Custom, force=True)


def sparse(net):
    net.table = nn.Embedding(4, 4, sparse=True)


def transposed(net):
    net.head.weight = nn.Parameter(torch.randn(8, 4).t())


def whole_numbers(net):
    net.register_parameter('count', nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False))


@pytest.mark.parametrize(
    'optimizer, change, fused',
    [
        (dict(type='Adam'), None, True),
        (dict(type=torch.optim.SGD), None, True),
        (dict(type='SGD'), lambda net: net.to(memory_format=torch.channels_last), True),
        (dict(type='AdamW'), lambda net: net.to(torch.bfloat16), True),
        (dict(type='AdamW', foreach=True), None, False),
        (dict(type='AdamW', fused=False), None, False),
        (dict(type='Custom'), None, False),
        (dict(type='Adadelta'), None, False),
        (dict(type='SGD'), sparse, False),
        (dict(type='AdamW'), transposed, False),
        (dict(type='AdamW'), whole_numbers, False),
        (dict(type='AdamW'), lambda net: net.to('meta'), False),
    ],
)
def test_when_the_optimizer_is_fused(optimizer, change, fused):
    net = Net()
    if change:
        change(net)
    assert can_be_fused(optimizer, net) == fused
    wrapper = wrap(net, paramwise=dict(norm_decay_mult=0.5), optimizer=optimizer)
    assert bool(wrapper.optimizer.defaults.get('fused')) == fused


@pytest.mark.parametrize('clips', [False, True])
def test_gradients_scaled_for_float16(clips):
    """AmpOptimWrapper's order of calls; overflowing gradients change nothing."""
    results = []
    for name in (OURS, THEIRS):
        net = Net()
        optimizer, scaler = wrap(net, name).optimizer, torch.amp.GradScaler('cpu', init_scale=256.0)
        if name == OURS:  # a state without fused kernels, as of earlier versions
            optimizer.load_state_dict(wrap(Net(), THEIRS).optimizer.state_dict())
        for value in (0, float('inf'), 1):
            scaler.scale(net(torch.full((1, 3, 9, 9), float(value))).square().mean()).backward()
            if clips:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append(dict(net.named_parameters()))
    assert_same(*results)


@pytest.mark.parametrize('when', ['saved', 'loaded', 'trained'])
def test_states_follow_the_memory_format(when):
    """Fused kernels read memory in order; other strides of a state would be other numbers."""
    expected = Net()
    values = train(expected, wrap(expected), 6)
    net = Net().to(memory_format=torch.channels_last if when == 'saved' else torch.contiguous_format)
    wrapper = wrap(net)
    train(net, wrapper)
    if when != 'trained':
        after = Net().to(memory_format=torch.contiguous_format if when == 'saved' else torch.channels_last)
        after.load_state_dict(net.state_dict())
        state, net, wrapper = wrapper.state_dict(), after, wrap(after)
        wrapper.load_state_dict(state)
    else:
        net.to(memory_format=torch.channels_last)
    assert_same(train(net, wrapper, 3, 3), values)


# ---- resuming


@pytest.mark.parametrize('fused', [None, False])
@pytest.mark.parametrize('paramwise', [KEYS, dict(norm_decay_mult=0.0), None], ids=['many', 'two', 'one'])
def test_states_of_mmengine_s_groups(paramwise, fused):
    net, resumed = Net(), Net(1)
    plain = wrap(net, THEIRS, paramwise, dict(foreach=False))
    train(net, plain)
    resumed.load_state_dict(net.state_dict())
    merged = wrap(resumed, OURS, paramwise, dict(fused=fused))
    merged.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert all(bool(group['fused']) == (fused is None) for group in merged.optimizer.param_groups)
    assert_same(train(resumed, merged, 3, 3), train(net, plain, 3, 3), exact=fused is False)


def test_settings_and_order_of_groups_are_those_of_the_checkpoint():
    net = Net()
    plain = wrap(net, THEIRS, optimizer=dict(lr=0.5))
    train(net, plain)
    merged = wrap(net)
    merged.load_state_dict(plain.state_dict())
    assert settings(merged, net) == settings(plain, net)
    paramwise = dict(custom_keys=dict(head=dict(decay_mult=0.0)))
    saved, resumed = wrap(net, paramwise=paramwise), copy.deepcopy(net)
    state = copy.deepcopy(saved.state_dict())
    state['param_groups'].reverse()
    wrapper = wrap(resumed, paramwise=paramwise)
    wrapper.load_state_dict(state)
    assert_same(train(resumed, wrapper), train(net, saved), exact=True)


@pytest.mark.parametrize(
    'saved, paramwise, line',
    [
        (THEIRS, dict(norm_decay_mult=0.0), 'other settings for odd than for token, which share a group'),
        (OURS, dict(norm_decay_mult=0.0), 'other settings for odd than for token, which share a group'),
        ('frozen', KEYS, 'other parameters than that of the config: 1 are in one of them only, odd first'),
        ('one', KEYS, 'has 1 groups of parameters and that of the config 6. Set optim_wrapper.constructor'),
        (OURS, None, 'has 6 groups of parameters and that of the config 1. Set optim_wrapper.constructor'),
    ],
)
def test_states_that_do_not_fit_are_refused(saved, paramwise, line):
    net, other = Net(), Net()
    other.odd.requires_grad_(saved != 'frozen')
    constructor = dict(one=THEIRS, frozen=OURS).get(saved, saved)
    optimizer = wrap(other, constructor, None if saved == 'one' else KEYS)
    with pytest.raises(RunError, match=re.escape(line)) as error:
        wrap(net, paramwise=paramwise).load_state_dict(optimizer.state_dict())
    assert '\n' not in str(error.value)


@MODELS.register_module(force=True)
class DeepToy(ToyModel):
    def __init__(self):
        super().__init__()
        self.backbone = Depths()

    def forward(self, inputs, data_samples=None, mode='loss'):
        return super().forward(self.backbone(torch.stack(list(inputs))), data_samples, mode)


class Depths(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))

    def get_layer_depth(self, name, prefix=''):
        return int(name[len(prefix)]), 4


COSINE = [dict(type='CosineAnnealingLR', by_epoch=False, T_max=6, eta_min_ratio=0.1)]  # reads a base rate of each group


@pytest.mark.parametrize(
    'before, after, paramwise',
    [
        (THEIRS, OURS, dict(norm_decay_mult=0.0, custom_keys=dict(layer=dict(lr_mult=0.5)))),
        (OURS, THEIRS, dict(norm_decay_mult=0.0, custom_keys=dict(layer=dict(lr_mult=0.5)))),
        (THEIRS, OURS, dict(norm_decay_mult=1.0)),
        (OURS, OURS, dict(norm_decay_mult=0.0)),
        ('unmerged', 'BackboneLayerDecayOptimWrapperConstructor', dict(layer_decay_rate=0.5)),
    ],
)
def test_runs_resume_with_other_groups(tmp_path, monkeypatch, before, after, paramwise):
    from mmlinattn.engine.optimizers import MergedOptimWrapperConstructor

    def run(folder, constructor, **more):
        with monkeypatch.context() as patch:
            if constructor == 'unmerged':
                constructor = 'BackboneLayerDecayOptimWrapperConstructor'
                patch.setattr(MergedOptimWrapperConstructor, '_merged', lambda self, params, model: params)
            runner = make_runner(
                tmp_path / folder,
                [dict(type='ExactResumeHook'), dict(type='CheckpointMatchHook')],
                model=dict(type='DeepToy'),
                optim=dict(constructor=constructor, paramwise_cfg=paramwise),
                param_scheduler=COSINE,
                randomness=dict(seed=0),
                **more,
            )
            runner.optim_wrapper['optimizer'] = dict(type='AdamW', lr=0.1, weight_decay=0.1)
            runner.train()
        return runner

    whole = run('whole', before)
    resumed = run('resumed', after, load_from=str(tmp_path / 'whole' / 'epoch_1.pth'), resume=True)
    assert resumed.iter == 6
    assert_same(dict(resumed.model.named_parameters()), dict(whole.model.named_parameters()))
    runners, keys = (whole, resumed), ('lr', 'initial_lr', 'weight_decay')
    rates = [settings(runner.optim_wrapper, runner.model, keys) for runner in runners]
    assert rates[0] == rates[1]
    counts = [len(runner.optim_wrapper.optimizer.param_groups) for runner in runners]
    assert (counts[0] == counts[1]) == (before == after)
