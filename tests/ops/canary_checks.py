# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The trial of kernels, right and broken ones, in Triton's interpreter; run as ``triton_checks.py`` is."""

import importlib.util
from pathlib import Path

import pytest
import torch
from triton_checks import DEVICE

from mmlinattn import ops
from mmlinattn.ops.rank_augmented import rala_reference
from mmlinattn.ops.triton import attention, attention_launch, canary, trial
from mmlinattn.ops.triton.attention_op import Variant

assert attention


def attention_variant(op, map='elu', dtype=torch.float32, d=16, e=16, aligned=True, power=1.0, **flags):
    flags = dict(dict(weighted=op == 'rala', masked=False, rotary=False, offset=False), **flags)
    return Variant(op, map, power, dtype, d, e, torch.device(DEVICE), **flags, aligned=aligned)


VARIANTS = {
    'rala': attention_variant('rala', masked=True, rotary=True),
    'rala, half': attention_variant('rala', 'relu', torch.float16, rotary=True),
    'inline': attention_variant('inline_attention', 'identity', e=24, masked=True, aligned=False),
    'linear': attention_variant('linear_attention', 'leakyrelu', torch.bfloat16, d=20),
    'focused': attention_variant('focused_attention', 'focused', power=3.0, masked=True, offset=True),
}
# what is broken: which variant shows it, in which direction first, what stands in its kernels and what comes there
DEFECTS = {
    'a wrong sign': ('rala', 'forward', 'first * cos - second * sin', 'first * cos + second * sin'),
    'tokens beyond the last': ('linear', 'forward', 'inside = start + rows < end', 'inside = start + rows >= 0'),
    'a write too many': ('linear', 'forward', 'owner * D + rows, keys, mask=real_rows', 'owner * D + rows, keys'),
    'a sign of a gradient': ('rala', 'backward', 'grad_normaliser = -tl.sum', 'grad_normaliser = tl.sum'),
    'a sign of one gradient': ('focused', 'backward', 'channels_v, grad_value)', 'channels_v, -grad_value)'),
    'an error': ('focused', 'backward', 'grad_r = along[:, None] * r', 'grad_r = unheard_of'),
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Few tokens, and still several spans."""
    monkeypatch.setattr(trial, 'TOKENS', 71)
    monkeypatch.setattr(attention_launch, 'FEWEST_TOKENS', 16)


@pytest.fixture
def spoil(monkeypatch, tmp_path):
    """Puts a defect into a copy of the kernels."""

    def spoil(defect):
        _, _, right, wrong = DEFECTS[defect]
        source = Path(attention_launch.kernels.__file__)
        text, copy = source.read_text(), tmp_path / source.name
        assert right in text
        copy.write_text(text.replace(right, wrong))
        spec = importlib.util.spec_from_file_location(f'mmlinattn.ops.triton.broken_{source.stem}', copy)
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        monkeypatch.setattr(attention_launch, 'kernels', made)

    return spoil


@pytest.mark.parametrize('name', VARIANTS)
def test_right_kernels_pass(name):
    answer = trial.trial(VARIANTS[name])
    assert answer['forward'] == answer['backward'] == ''
    # far from the bound, and of the same size in both directions: the bound holds for more tokens, too
    assert 0 < max(answer['deviations'].values()) < 0.5 * canary.BOUNDS[VARIANTS[name].dtype]


@pytest.mark.parametrize('defect', DEFECTS)
def test_broken_kernels_do_not(defect, spoil):
    variant, direction, _, _ = DEFECTS[defect]
    spoil(defect)
    faults = trial.trial(VARIANTS[variant])
    assert faults['backward'] and bool(faults['forward']) == (direction == 'forward')


def test_what_compiles_in_one_direction_serves_in_it(monkeypatch):
    def fails(*args, **kwargs):
        raise attention_launch.NoKernel('keys_backward: no such register')

    monkeypatch.setattr(attention_launch, 'backward', fails)
    with pytest.warns(UserWarning, match='no such register'):
        faults = trial.trial(VARIANTS['linear'])
    assert (faults['forward'], faults['backward']) == ('', 'it does not compile')


def test_two_runs_have_to_be_equal(monkeypatch):
    right, times = attention_launch.forward, []

    def drifts(*args, **kwargs):
        out, saved = right(*args, **kwargs)
        times.append(1)
        return out * (1 + 1e-6 * len(times)), saved

    monkeypatch.setattr(attention_launch, 'forward', drifts)
    assert trial.trial(VARIANTS['inline'])['forward'] == 'two runs differ'


# --- the first call of each shape -------------------------------------------------------------------------------------


@pytest.fixture
def spot_checks(monkeypatch):
    """Comparisons are made, also in the interpreter; gives the verdicts that they leave."""
    monkeypatch.setattr(canary, 'COMPARES_IN_INTERPRETER', True)
    monkeypatch.setattr(canary, '_compared', set())
    monkeypatch.setattr(canary, '_verdicts', {})
    with ops.use('auto'):  # of the reference nothing is compared
        yield canary._verdicts


def tensors(op, dtype=torch.float32, tokens=33):
    """Queries, keys and values of two images and heads of 16, and what else the op takes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, tokens, 96, generator=generator).to(DEVICE, dtype).requires_grad_()
    mask = torch.arange(tokens, device=DEVICE) < torch.tensor([[tokens], [tokens - 5]], device=DEVICE)
    q, k, v = x.split(32, dim=-1)
    scale = torch.full((32,), 1.5, device=DEVICE)
    own = {attention.inline_attention: [0.25], attention.focused_attention: [scale, 3.0]}
    return x, (q, k, v * mask.unsqueeze(-1), 2, *own.get(op, [])), dict(mask=mask)


@pytest.mark.parametrize(
    ('op', 'dtype'),
    [('rala', torch.bfloat16), ('inline_attention', torch.float32), ('focused_attention', torch.float32)],
)
def test_first_calls_of_right_kernels_agree(op, dtype, spot_checks, recwarn):
    op = getattr(attention, op)
    for tokens in (33, 33, 40):
        x, arguments, options = tensors(op, dtype, tokens)
        op(*arguments, **options).square().sum().backward()
    assert len(canary._compared) == 4 and spot_checks == {}  # two shapes, both directions
    assert not [w for w in recwarn if 'mmlinattn' in str(w.message)]


@pytest.mark.parametrize('defect', ['a wrong sign', 'a sign of a gradient'])
def test_a_kernel_that_goes_wrong_in_a_call_serves_no_more(defect, spot_checks, spoil):
    direction = DEFECTS[defect][1]
    x, arguments, options = tensors(attention.rala)
    options['rotary'] = torch.randn(33, 8, 2, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    expected = rala_reference(*arguments, **options)
    gradient = torch.autograd.grad(expected.square().sum(), x, retain_graph=True)[0]
    spoil(defect)
    with pytest.warns(UserWarning, match=f'kernel fails .{direction}: in a call it deviates by') as caught:
        out = attention.rala(*arguments, **options)
        found = torch.autograd.grad(out.square().sum(), x, retain_graph=True)[0]
    assert len([w for w in caught if 'kernel fails' in str(w.message)]) == 1
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-3)
    assert list(spot_checks.values()) == [() if direction == 'forward' else ('forward',)]
