# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""``check_gpu.py`` has to work on the first GPU it meets: all of it runs here, on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import check_gpu
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def run(*command):
    environment = {**os.environ, 'PYTHONPATH': f'{ROOT}:{ROOT / "benchmarks"}', 'OMP_NUM_THREADS': '1'}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU')
def test_without_a_gpu_one_line(tmp_path):
    done = run(ROOT / 'benchmarks' / 'check_gpu.py', '--out', tmp_path / 'report')
    assert done.returncode == 1 and len(done.stdout.splitlines()) == 1 and '--rehearse' in done.stdout
    assert not (tmp_path / 'report').exists()


@pytest.mark.exhaustive
def test_rehearsal(tmp_path):
    pytest.importorskip('mmdet')
    done = run(ROOT / 'benchmarks' / 'check_gpu.py', '--out', tmp_path, '--rehearse')
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / 'report.json').read_text())
    assert {part['status'] for part in report['parts'].values()} == {'done'}
    rows = [row for part in report['parts'].values() for row in part['rows']]
    assert all(row['ms'] > 0 and row['first_s'] > 0 for row in rows if 'step' in row)
    found = [row for row in rows if 'right' in row]
    assert len(found) == 2 * len(check_gpu.BACKBONES) + 2 * (len(check_gpu.TIMED) - 1)
    assert all(row['right'] and 0 < row['error'] < 0.1 for row in found)
    groups = [row['groups'] for row in rows if 'optimizer_ms' in row]
    assert len(groups) == 6 and min(groups) < 10 < max(groups)


def test_a_part_that_fails_or_hangs_keeps_its_rows(monkeypatch, tmp_path):
    def hangs(command, timeout, **_):
        if command[-1] == 'machine':
            Path(command[3]).write_text(json.dumps(dict(status='stopped', rows=[dict(gpu='H100')])))
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(check_gpu.subprocess, 'run', hangs)
    assert check_gpu.main(['--out', str(tmp_path)]) == 1
    machine = json.loads((tmp_path / 'report.json').read_text())['parts']['machine']
    assert machine == dict(status='failed', rows=[dict(gpu='H100')], error='no end within 1200 s')
    monkeypatch.undo()
    monkeypatch.setattr(check_gpu.sys, 'executable', '/bin/false')
    assert check_gpu.run_part('machine', True, 9) == dict(status='failed', rows=[], error='status 1')


def test_times_are_medians_without_the_first_two_calls(monkeypatch):
    repeats = check_gpu.setup.repeats
    times = iter([0.0, 9.0, 0.0, 4.0, *(t for ms in range(1, repeats + 1) for t in (0.0, ms / 1e3))])
    monkeypatch.setattr(check_gpu, 'cuda', check_gpu.OnCPU)
    monkeypatch.setattr(check_gpu, 'clock', lambda: next(times))
    monkeypatch.setattr(check_gpu.OnCPU, 'max_memory_allocated', lambda: 3 * 2**20)
    assert check_gpu.measured(lambda: None) == dict(ms=pytest.approx((repeats + 1) / 2), MiB=3.0, first_s=9.0)
