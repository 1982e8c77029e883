# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import json
import os
import subprocess
import sys
from pathlib import Path

import check_gpu
import gpu_parts
import pytest
import torch

pytest.importorskip('triton')
ROOT = Path(__file__).resolve().parents[2]
OPS = gpu_parts.ATTENTIONS


def run(*arguments):
    command = [sys.executable, str(ROOT / 'benchmarks' / 'check_gpu.py'), *arguments]
    environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason='where there is none')
def test_without_a_gpu_one_line(tmp_path):
    done = run('--out', str(tmp_path / 'report'))
    assert done.returncode == 1 and len(done.stdout.splitlines()) == 1 and '--interpret' in done.stdout
    assert not (tmp_path / 'report').exists()


@pytest.mark.slow
def test_kernels_in_the_interpreter(tmp_path):
    done = run('--out', str(tmp_path), '--interpret', '--only', 'kernels float32 linear')
    assert done.returncode == 0, done.stdout + done.stderr
    report, text = json.loads((tmp_path / 'report.json').read_text()), (tmp_path / 'report.md').read_text()
    assert [part['status'] for part in report['parts'].values()] == ['done'] * 2
    rows = report['parts']['kernels float32 linear_attention']['result']['rows']
    assert len(rows) >= 2 and all(0 < row['deviations']['backward'] < 1e-4 and not row['faults'] for row in rows)
    assert 'float32 linear_attention' in text and 'not measured' in text
    assert 'not known - every kernel is right' in done.stdout and 'send' in done.stdout.splitlines()[-1]


TIMES = dict(copy=1.0, **{f'softmax {what}': 40.0 for what in ('forward', 'both')})
TIMES.update({f'{op} {form} {what}': 5.0 if form == 'plain' else 1.0
              for op in OPS for form in ('kernels', 'plain') for what in ('forward', 'both')})  # fmt: skip
STEPS = {'RAVLT-T': 50.0, 'fully linear': 40.0, 'softmax twin': 60.0, 'literal': 80.0}


def fake_part(name, interpret, seconds):
    if name == 'detector':
        return dict(status='failed', error='ImportError: no mmdet')
    if name == 'environment':
        result = dict(torch='2.9', gpu='H100', identity='one')
    elif name == 'tests':
        result = dict(counts=dict(passed=3), failed=[], right=True)
    elif name.startswith('kernels'):
        row = dict(variant='{}', faults={}, deviations=dict(forward=1e-6, backward=2e-6))
        result = dict(rows=[row], bound=1e-4, right=True)
    elif name.startswith('attention'):
        served = {op: op != 'inline_attention' for op in OPS}
        result = dict(tokens=int(name.split()[1]), batch=4, times=TIMES, served=served)
    else:
        result = dict(batch=8, times=STEPS, memory={'RAVLT-T': 100.0}, told=[])
    return dict(status='done', seconds=1.0, result=result)


@pytest.fixture
def parts(monkeypatch):
    """Parts that give made-up results; what ran is listed."""
    ran = []
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(check_gpu, 'run_part', lambda name, *more: ran.append(name) or fake_part(name, *more))
    return ran


def test_report_of_all_parts(parts, tmp_path, capsys):
    pytest.importorskip('matplotlib')
    assert check_gpu.main(['--out', str(tmp_path)]) == 1  # a part failed
    assert parts == list(gpu_parts.PARTS)
    text, told = (tmp_path / 'report.md').read_text(), capsys.readouterr().out
    assert 'gpu H100' in text and 'ImportError: no mmdet' in text and (tmp_path / 'attention.png').stat().st_size > 5000
    assert '| rala | 1.000 / 5.000, 5.00x | 1.000 / 5.000, 5.00x | 50% |' in text
    assert '| inline_attention * |' in text and '| literal | 80.0 |' in text and '| RAVLT-T | 50.0 | 100 |' in text
    assert 'holds - every kernel is right' in told and 'holds - RALA alone, forward, 16384 tokens' in told
    assert 'holds - training step, fully linear against softmax twin: 1.3x (1.50x)' in told
    assert 'DOES NOT HOLD - training step, RAVLT-T against literal: 1.8x (1.60x)' in told
    goals = json.loads((tmp_path / 'report.json').read_text())['goals']
    assert [goal['holds'] for goal in goals] == [True] * 4 + [False]


@pytest.mark.slow
def test_what_is_timed_runs(monkeypatch):
    """On a CPU, where the figures mean nothing."""
    few = dict(
        DEVICE='cpu', BATCH=1, HEADS=1, WIDTH=16, IMAGES=1, REPEATS=1, SIDES=dict(forward=(64, 64), train=(64, 64))
    )
    for name, value in few.items():
        monkeypatch.setattr(gpu_parts, name, value)
    monkeypatch.setattr(gpu_parts.measure, 'peak_cuda', lambda call: (call(), 2**20)[1])
    found = gpu_parts.attention(40, torch.float32)
    assert found['served']['rala'] is False and found['batch'] == 1
    assert all(found['times'][f'{op} {form} both'] > 0 for op in OPS for form in ('kernels', 'plain'))
    found = gpu_parts.backbones('train', compiled=False)
    assert set(STEPS) < set(found['times']) and found['memory']['literal'] == 1.0
