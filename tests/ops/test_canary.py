# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""When a kernel serves; what a trial finds is in ``canary_checks.py``."""

# ruff: noqa: E402
import json
import os
import stat
import sys
import warnings
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

pytest.importorskip('triton')
from mmlinattn.ops.triton import attention, attention_op, canary
from mmlinattn.ops.triton import attention_launch as launch

CPU = torch.device('cpu')
FLAGS = dict(weighted=True, masked=False, rotary=True, offset=False, aligned=True)
RALA = attention_op.Variant('rala', 'elu', 1.0, torch.bfloat16, 32, 48, CPU, **FLAGS)
OTHER = RALA._replace(dtype=torch.float16, offset=True)
RIGHT, WRONG = dict(forward='', backward=''), dict(forward='', backward='it deviates by 0.7, where 0.05 is allowed')


@pytest.fixture
def trials(monkeypatch, tmp_path):
    """What every trial answers, which variants were ``asked`` for, and the file that keeps them."""
    trials = SimpleNamespace(answer=RIGHT, asked=[], file=tmp_path / 'cache' / 'mmlinattn' / 'kernels.json')
    monkeypatch.setattr(canary.compat, 'INTERPRETED', False)
    monkeypatch.setattr(canary, '_verdicts', {})
    monkeypatch.setattr(canary, 'ask', lambda variant: trials.asked.append(variant) or trials.answer)
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: False)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    return trials


def restart():
    canary._verdicts.clear()


def test_passed_trials_are_kept(trials, monkeypatch):
    for _ in range(2):
        assert canary.allows(RALA, backward=True) and canary.allows(OTHER, backward=True)
        restart()
    assert trials.asked == [RALA, OTHER]
    assert canary.allows(RALA._replace(masked=True), backward=True)  # another binary
    assert len(trials.asked) == 3
    restart()
    monkeypatch.setattr(canary, 'environment', lambda device: 'another driver')
    assert canary.allows(RALA, backward=True)
    assert len(trials.asked) == 4


def test_a_broken_file_and_a_folder_that_cannot_be_written_cost_a_trial(trials):
    trials.file.parent.mkdir(parents=True)
    trials.file.write_text('{"half')
    assert canary.allows(RALA, backward=True)
    assert json.loads(trials.file.read_text()) == {canary.environment(CPU): [canary.name_of(RALA)]}
    trials.file.unlink(), trials.file.parent.rmdir(), trials.file.parent.write_text('no folder')
    for start in (2, 3):
        restart()
        assert canary.allows(RALA, backward=True) and len(trials.asked) == start


def test_what_fails_warns_once_and_is_tried_at_the_next_start(trials):
    trials.answer = WRONG
    told = r'plain PyTorch for rala \(elu, .*heads of 32 and 48.*backward: it deviates by 0.7'
    with pytest.warns(UserWarning, match=told):
        assert not canary.allows(RALA, backward=True)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert not canary.allows(RALA, backward=True)
        assert canary.allows(RALA, backward=False)  # whose kernel is right
    restart()
    trials.answer = dict.fromkeys(RIGHT, 'not all of its results are finite')
    with pytest.warns(UserWarning, match='forward: not all'):
        assert not canary.allows(RALA, backward=False)


def test_no_trial_while_a_graph_is_captured(trials, monkeypatch):
    captures = [True, False]
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: captures.pop(0))
    assert not canary.allows(RALA, backward=False) and not trials.asked
    assert canary.allows(RALA, backward=False)
    restart()
    assert canary.allows(RALA, backward=False)  # from the file


def test_the_plain_form_serves_instead(monkeypatch):
    asked = []
    monkeypatch.setattr(canary, 'allows', lambda variant, backward: asked.append((variant, backward)))
    monkeypatch.setattr(canary.compat, 'INTERPRETED', True)
    q, k, v = torch.randn(2, 5, 48).chunk(3, dim=-1)
    with mock.patch.object(launch, 'launch', side_effect=AssertionError):
        torch.testing.assert_close(attention.rala(q, k, v, 2), attention.rala_reference(q, k, v, 2))
        attention.rala(q.requires_grad_(), k, v, 2)
        with torch.no_grad():
            attention.rala(q, k, v, 2)
    assert [backward for _, backward in asked] == [False, True, False]
    assert asked[0][0].aligned and (asked[0][0].d, asked[0][0].weighted) == (8, True)


# --- the process of trials --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('script', 'told'), [('echo "no memory" >&2; exit 3', 'status 3. no memory'), ('exec sleep 60', 'more than 1 s')]
)
def test_a_process_that_dies_or_hangs_fails_the_kernel(script, told, monkeypatch, tmp_path):
    program = tmp_path / 'python'
    program.write_text(f'#!/bin/sh\n{script}\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, 'executable', str(program))
    monkeypatch.setattr(canary, 'SECONDS', 1)
    faults = canary.ask(RALA)
    assert told in faults['forward'] and faults['forward'] == faults['backward']


@pytest.mark.slow
def test_a_trial_in_the_interpreter(monkeypatch, tmp_path):
    monkeypatch.setenv('TRITON_INTERPRET', '1')
    (tmp_path / 'sitecustomize.py').write_text(
        'import interpreter\nfrom mmlinattn.ops.triton import trial\ntrial.TOKENS = 71'
    )
    paths = [str(tmp_path), os.path.dirname(__file__), os.environ.get('PYTHONPATH', '')]
    monkeypatch.setenv('PYTHONPATH', os.pathsep.join(paths))
    variant = attention_op.Variant('linear_attention', 'elu', 1.0, torch.float32, 16, 16, CPU, *(False,) * 4, True)
    answer = canary.ask(variant)
    assert 0 < answer.pop('deviations')['backward'] < 1e-5 and answer == RIGHT
