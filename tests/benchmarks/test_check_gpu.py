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


# parts one after the other in one process: to import PyTorch for each takes longer
REHEARSAL = """
import sys
import check_gpu
from pathlib import Path

by_process, file = check_gpu.run_part, Path(sys.argv[1]) / 'part.json'

def run_part(name, rehearse, seconds):
    if name == 'machine':
        return by_process(name, rehearse, seconds)
    check_gpu.run_here(name, file)
    return check_gpu.json.loads(file.read_text())

check_gpu.run_part = run_part
sys.exit(check_gpu.main(['--out', sys.argv[1], '--rehearse']))
"""


@pytest.mark.exhaustive
def test_rehearsal(tmp_path):
    """Run all parts on a CPU, with small models."""
    pytest.importorskip('mmdet')
    done = run('-c', REHEARSAL, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report, text = json.loads((tmp_path / 'report.json').read_text()), (tmp_path / 'report.md').read_text()
    assert {part['status'] for part in report['parts'].values()} == {'done'}
    rows = [row for part in report['parts'].values() for row in part['rows']]
    assert all(row['ms'] > 0 and row['first_s'] > 0 for row in rows if 'step' in row)
    found = [row for row in rows if 'right' in row]
    assert len(found) == 2 * len(check_gpu.HOSTS) + 2 * (len(check_gpu.TIMED) - 1)
    assert all(row['right'] and 0 < row['error'] < 0.1 for row in found)
    detectors = [row for row in rows if 'optimizer_ms' in row]
    assert len(detectors) == 6 and min(row['groups'] for row in detectors) < 10 < max(
        row['groups'] for row in detectors
    )
    *_, last = done.stdout.splitlines()
    assert 'A rehearsal: its times mean nothing.' in done.stdout and last == 'Hosts right: yes.'
    assert all(f'- {line}' in text for line in report['take'])
    assert f'{check_gpu.PEER} | compiled' in text and '| channels last | contiguous |' in text


def test_stand_in_of_a_rehearsal_is_of_pytorch():
    names = [name for name in vars(check_gpu.OnCPU) if not name.startswith('__')]
    assert len(names) == 6 and all(callable(getattr(torch.cuda, name)) for name in names)
    assert check_gpu.cuda is torch.cuda


def test_hosts_are_those_of_the_counts():
    import launches

    assert tuple(launches.HOSTS) == check_gpu.HOSTS and launches.SWIN == check_gpu.PEER


def made_up(eager, compiled, right=True, status='done'):
    """Parts of a report with these milliseconds, None for a step that failed."""
    parts = {'machine': dict(status='done', rows=[dict(gpu='H100')])}
    row = dict(case='eager, float32', error=1e-6, plain=2e-6, right=right)
    parts.update({f'values, {host}': dict(status=status, rows=[row]) for host in check_gpu.HOSTS})
    for name in (name for name in check_gpu.PARTS if name.startswith(('steps', 'detectors'))):
        ms = compiled if ', compiled' in name else eager
        row = dict(error='no\nmemory') if ms is None else dict(ms=ms, MiB=9.0, first_s=1.0)
        if name.startswith('detectors'):
            row = dict(ms=eager, MiB=9.0, first_s=1.0, groups=2, optimizer_ms=3.0)
        parts[name] = dict(status='done', rows=[dict(step='train, 2 images', **row)])
    return parts


@pytest.mark.parametrize(
    ('times', 'options', 'takes', 'verdict'),
    [
        ((10.0, 5.0), {}, 'take --compile (2.00x of eager, eager 1.00x of Swin-T)', 'yes'),
        ((10.0, 9.8), dict(right=False), 'take eager (1.02x of eager, eager 1.00x of Swin-T)', 'no'),
        ((10.0, None), dict(status='no time left'), 'not measured', 'not known'),
        ((10.0, 20.0), dict(status='failed'), 'take eager (0.50x', 'no'),
    ],
)
def test_form_to_take(times, options, takes, verdict):
    parts = made_up(*times, **options)
    first, *_, last = check_gpu.advice(parts)
    assert first.startswith('RAVLT-T, train, 2 images: ' + takes)
    assert last == f'Hosts right: {verdict}.'
    assert 'Optimizer of Mask R-CNN: 3.00 ms, merged 3.00 ms' in check_gpu.advice(parts)
    assert ('no memory' in '\n'.join(check_gpu.report(parts))) == (None in times)


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
    assert check_gpu.main(['--out', str(tmp_path), '--minutes', '0']) == 0  # nothing wrong was found
    assert 'no time left' in (tmp_path / 'report.md').read_text()


def test_what_is_measured(monkeypatch):
    """The median without the first two calls, the largest growth of memory, the first call's seconds."""
    repeats = check_gpu.setup.repeats
    times = iter([0.0, 9.0, 0.0, 4.0, *(t for ms in range(1, repeats + 1) for t in (0.0, ms / 1e3))])
    monkeypatch.setattr(check_gpu, 'cuda', check_gpu.OnCPU)
    monkeypatch.setattr(check_gpu, 'clock', lambda: next(times))
    monkeypatch.setattr(check_gpu.OnCPU, 'max_memory_allocated', lambda: 3 * 2**20)
    calls = []
    found = check_gpu.measured(lambda: calls.append(1))
    assert found == dict(ms=pytest.approx((repeats + 1) / 2), MiB=3.0, first_s=9.0)
    assert len(calls) == repeats + 2
