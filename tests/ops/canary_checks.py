# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The trial of kernels, right and broken ones, in Triton's interpreter; run as ``triton_checks.py`` is."""

import importlib.util
from pathlib import Path

import pytest
import torch
from triton_checks import DEVICE

from mmlinattn.ops.triton import attention, attention_launch, depthwise_op, trial
from mmlinattn.ops.triton.attention_op import Variant

assert attention


def attention_variant(op, map='elu', dtype=torch.float32, d=16, e=16, aligned=True, power=1.0, **flags):
    flags = dict(dict(weighted=op == 'rala', masked=False, rotary=False, offset=False), **flags)
    return Variant(op, map, power, dtype, d, e, torch.device(DEVICE), **flags, aligned=aligned)


def convolution_variant(size=3, dtype=torch.float32, biased=True, residual=True, aligned=True):
    device = torch.device(DEVICE)
    return depthwise_op.Variant('depthwise_conv2d', dtype, size, device, biased, residual, aligned)


VARIANTS = {
    'rala': attention_variant('rala', masked=True, rotary=True),
    'rala, half': attention_variant('rala', 'relu', torch.float16, rotary=True),
    'inline': attention_variant('inline_attention', 'identity', e=24, masked=True, aligned=False),
    'linear': attention_variant('linear_attention', 'leakyrelu', torch.bfloat16, d=20),
    'focused': attention_variant('focused_attention', 'focused', power=3.0, masked=True, offset=True),
    'convolution': convolution_variant(),
    'convolution of each image': convolution_variant(biased=False, residual=False, aligned=False),
}
# what is broken: which variant shows it, in which direction first, what stands in its kernels and what comes there
DEFECTS = {
    'a wrong sign': ('rala', 'forward', 'first * cos - second * sin', 'first * cos + second * sin'),
    'no mask': ('rala', 'forward', 'real = inside & (tl.load', 'real = inside | (tl.load'),
    'tokens beyond the last': ('linear', 'forward', 'inside = start + rows < end', 'inside = start + rows >= 0'),
    'a wrong stride': (
        'rala, half',
        'forward',
        'tl.store(pointer + rows[:, None]',
        'tl.store(pointer + (rows - 1)[:, None]',
    ),
    'spans in one place': (
        'inline',
        'forward',
        'put_turned(parts + at * D * E',
        'put_turned(parts + owner * splits * D * E',
    ),
    'a result left out': (
        'linear',
        'forward',
        'columns_v, inside, channels_v, mixed',
        'columns_v, inside & (rows > 0), channels_v, mixed',
    ),
    'a write too many': (
        'linear',
        'forward',
        'key_mean + owner * D + rows, keys, mask=real_rows',
        'key_mean + owner * D + rows, keys',
    ),
    'a sign of a gradient': ('rala', 'backward', 'grad_normaliser = -tl.sum', 'grad_normaliser = tl.sum'),
    'gradients of padding': (
        'rala',
        'backward',
        'tl.where(real[:, None], grad_query[None, :], 0.0)',
        'grad_query[None, :]',
    ),
    'a factor of a gradient': ('focused', 'backward', 'grad_r = along[:, None] * r', 'grad_r = 2 * along[:, None] * r'),
    'an error': ('focused', 'backward', 'grad_r = along[:, None] * r', 'grad_r = unheard_of'),
    'columns that wrap around': (
        'convolution',
        'forward',
        '(z >= 0) & (z < width)\n            at',
        '(z >= -1) & (z < width)\n            at',
    ),
    'kernels of one image': (
        'convolution of each image',
        'forward',
        'weight += image * weight_b',
        'weight += 0 * weight_b',
    ),
    'a kernel that is not turned': ('convolution', 'backward', 'K * K - 1 - (i * K + j) if FLIP', 'i * K + j if FLIP'),
}


FAST = ('no mask', 'a wrong stride', 'a write too many', 'columns that wrap around')


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Few tokens, and still several spans."""
    monkeypatch.setattr(trial, 'TOKENS', 71)
    monkeypatch.setattr(trial, 'HEIGHT', 5)
    monkeypatch.setattr(trial, 'WIDTH', 9)
    monkeypatch.setattr(attention_launch, 'FEWEST_TOKENS', 16)
    monkeypatch.setattr(depthwise_op, 'FEWEST_PLACES', 16)


def broken(source: Path, right: str, wrong: str, folder: Path):
    """A copy of a module of kernels with a defect."""
    text = source.read_text()
    assert right in text
    (folder / source.name).write_text(text.replace(right, wrong))
    spec = importlib.util.spec_from_file_location(f'mmlinattn.ops.triton.broken_{source.stem}', folder / source.name)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize(
    'name', ['linear', *(pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS if name != 'linear')]
)
def test_right_kernels_pass(name):
    deviations = {}
    assert trial.trial(VARIANTS[name], deviations) == dict(forward='', backward='')
    # far from the bound, and of the same size in both directions: the bound holds for more tokens, too
    assert 0 < max(deviations.values()) < 0.5 * trial.BOUNDS[VARIANTS[name].dtype]


@pytest.mark.parametrize(
    'defect', [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in DEFECTS]
)
def test_broken_kernels_do_not(defect, monkeypatch, tmp_path):
    variant, direction, right, wrong = DEFECTS[defect]
    owner = depthwise_op if 'convolution' in variant else attention_launch
    monkeypatch.setattr(owner, 'kernels', broken(Path(owner.kernels.__file__), right, wrong, tmp_path))
    faults = trial.trial(VARIANTS[variant])
    assert faults['backward'] and bool(faults['forward']) == (direction == 'forward')


def test_what_compiles_in_one_direction_serves_in_it(monkeypatch):
    def fails(*args, **kwargs):
        raise attention_launch.NoKernel('keys_backward: no such register')

    monkeypatch.setattr(attention_launch, 'backward', fails)
    with pytest.warns(UserWarning, match='no such register'):
        faults = trial.trial(VARIANTS['linear'])
    assert faults == dict(forward='', backward='it does not compile')


def test_two_runs_have_to_be_equal(monkeypatch):
    right, times = attention_launch.forward, []

    def drifts(*args, **kwargs):
        out, saved = right(*args, **kwargs)
        times.append(1)
        return out * (1 + 1e-6 * len(times)), saved

    monkeypatch.setattr(attention_launch, 'forward', drifts)
    assert trial.trial(VARIANTS['inline'])['forward'] == 'two runs differ'
