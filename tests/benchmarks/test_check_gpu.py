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


@pytest.mark.skipif(torch.cuda.is_available(), reason='where there is none')
def test_without_a_gpu_one_line(tmp_path):
    done = run(ROOT / 'benchmarks' / 'check_gpu.py', '--out', tmp_path / 'report')
    assert done.returncode == 1 and len(done.stdout.splitlines()) == 1 and '--interpret' in done.stdout
    assert not (tmp_path / 'report').exists()


# parts one after the other in one process: to import PyTorch for each takes longer
REHEARSAL = """
import os, sys
os.environ['TRITON_INTERPRET'] = '1'
import check_gpu
from pathlib import Path

by_process, file = check_gpu.run_part, Path(sys.argv[1]) / 'part.json'

def run_part(name, interpret, seconds):
    if name == 'machine':
        return by_process(name, interpret, seconds)
    check_gpu.run_here(name, file)
    return check_gpu.json.loads(file.read_text())

check_gpu.run_part = run_part
sys.exit(check_gpu.main(['--out', sys.argv[1], '--interpret']))
"""


@pytest.mark.slow
def test_a_rehearsal_runs_all_of_it(tmp_path):
    pytest.importorskip('triton')
    pytest.importorskip('mmdet')
    done = run('-c', REHEARSAL, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report, text = json.loads((tmp_path / 'report.json').read_text()), (tmp_path / 'report.md').read_text()
    assert {part['status'] for part in report['parts'].values()} == {'done'}
    rows = [row for part in report['parts'].values() for row in part['rows']]
    assert all(row['ms'] > 0 and row['first_s'] > 0 for row in rows if 'step' in row)
    kernels = [row for row in rows if 'case' in row]
    assert len(kernels) == 18 and all(row['kernel'] < 0.1 and not row['told'] for row in kernels)
    assert any(row['kernel'] != row['pytorch'] for row in kernels)  # kernels ran
    note, *last = done.stdout.splitlines()[-14:]
    assert note.startswith('A rehearsal: ')
    assert all(': take ' in line for line in last[:-1]) and last[-1].startswith('Kernels right: yes.')
    assert last == report['take'] and all(f'- {line}' in text for line in last)
    assert "MMDetection's Swin-T | compiled" in text and 'of eager' in text


@pytest.mark.skipif(check_gpu.INTERPRET, reason='a rehearsal itself')
def test_what_a_rehearsal_replaces_is_of_pytorch():
    names = [name for name in vars(check_gpu.OnCPU) if not name.startswith('__')]
    assert len(names) == 6 and all(callable(getattr(torch.cuda, name)) for name in names)
    assert check_gpu.cuda is torch.cuda


def made_up(ms, right=True, told=()):
    """Parts of a report. ``ms``: of eager, compiled, kernels; None for what failed."""
    parts = {'machine': dict(status='done', rows=[dict(gpu='H100')])}
    row = dict(case='float32', kernel=1e-6, pytorch=2e-6, right=right, told=list(told))
    parts.update({f'kernels, {op}': dict(status='done', rows=[row]) for op in check_gpu.OPS})
    for name in (name for name in check_gpu.PARTS if name.startswith(tuple(check_gpu.MODELS))):
        time = ms[check_gpu.FORMS.index(name.rpartition(', ')[2])]
        rows = [dict(step='train, 8 images', **(dict(error='no\nmemory') if time is None else dict(ms=time, MiB=9.0)))]
        parts[name] = dict(status='done', rows=rows)
    return parts


@pytest.mark.parametrize(
    ('parts', 'takes', 'verdict'),
    [
        (made_up((10.0, 5.0, 4.0)), 'MMLINATTN_OPS=triton (compiled 2.00x, kernels 2.50x of eager)', 'yes. yes.'),
        (made_up((10.0, 5.0, 4.0), right=False), '--compile (compiled 2.00x, kernels 2.50x of eager)', 'no. yes.'),
        (made_up((10.0, 5.0, 4.0), told=['no Triton']), '--compile (compiled 2.00x, kern', 'not known. yes.'),
        (made_up((10.0, 5.0, 8.0)), '--compile (compiled 2.00x, kernels 1.25x of eager)', 'yes. no.'),
        (made_up((10.0, 9.9, 8.5)), 'MMLINATTN_OPS=triton (compiled 1.01x', 'yes. no.'),
        (made_up((10.0, 9.9, 9.8)), 'neither (compiled 1.01x', 'yes. no.'),
        (made_up((10.0, None, 8.0)), 'MMLINATTN_OPS=triton (kernels 1.25x of eager)', 'yes. not known.'),
        (made_up((None, 5.0, 8.0)), None, 'yes. not known.'),
    ],
)
def test_what_to_take(parts, takes, verdict):
    first, *_, last = check_gpu.advice(parts)
    expected = 'RAVLT-T, train, 8 images: ' + ('not measured' if takes is None else f'take {takes}')
    assert first.startswith(expected)
    right, reached = verdict.split('. ')
    assert last.startswith(f'Kernels right: {right}. ') and last.endswith(f': {reached}')
    assert ('no memory' in '\n'.join(check_gpu.report(parts))) == (takes is None or 'not known' in reached)


def test_a_part_that_fails_or_hangs_keeps_its_rows(monkeypatch, tmp_path, capsys):
    def hangs(command, timeout, **_):
        if command[-1] == 'machine':
            Path(command[3]).write_text(json.dumps(dict(status='stopped', rows=[dict(gpu='H100')])))
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(check_gpu.subprocess, 'run', hangs)
    assert check_gpu.main(['--out', str(tmp_path)]) == 1 and 'machine: failed' in capsys.readouterr().out
    machine = json.loads((tmp_path / 'report.json').read_text())['parts']['machine']
    assert machine == dict(status='failed', rows=[dict(gpu='H100')], error='no end within 1200 s')
    monkeypatch.undo()
    monkeypatch.setattr(check_gpu.sys, 'executable', '/bin/false')
    assert check_gpu.run_part('machine', True, 9) == dict(status='failed', rows=[], error='status 1')
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    assert check_gpu.main(['--out', str(tmp_path), '--minutes', '0']) == 0  # nothing wrong was seen
    assert 'no time left' in (tmp_path / 'report.md').read_text()


def test_what_is_measured(monkeypatch):
    """The median without the first two calls, the largest growth of memory, the first call's seconds."""
    times = iter([0.0, 9.0, 0.0, 4.0, *(t for ms in range(1, check_gpu.REPEATS + 1) for t in (0.0, ms / 1e3))])
    monkeypatch.setattr(check_gpu, 'cuda', check_gpu.OnCPU)
    monkeypatch.setattr(check_gpu, 'clock', lambda: next(times))
    monkeypatch.setattr(check_gpu.OnCPU, 'max_memory_allocated', lambda: 3 * 2**20)
    calls = []
    found = check_gpu.measured(lambda: calls.append(1))
    assert found == dict(ms=pytest.approx((check_gpu.REPEATS + 1) / 2), MiB=3.0, first_s=9.0)
    assert len(calls) == check_gpu.REPEATS + 2
