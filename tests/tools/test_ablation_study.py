# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""tools/analysis_tools/ablation_study.py, whose code is in ``projects/studies`` with most of its tests."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = Path('tools', 'analysis_tools', 'ablation_study.py')
QUICK = '--iterations=2 --batch=4 --num-train=8 --num-val=8 --seeds=1'.split()


@pytest.fixture
def installed(tmp_path):
    """Tools and projects as a wheel has them."""
    (tmp_path / TOOL).parent.mkdir(parents=True)
    shutil.copy(ROOT / TOOL, tmp_path / TOOL)
    ignored = shutil.ignore_patterns('tests', 'results', '__pycache__')
    shutil.copytree(ROOT / 'projects', tmp_path / 'projects', ignore=ignored)
    return tmp_path


def study(root, *args):
    command = [sys.executable, root / TOOL, '--study', 'rala', *args, *QUICK]
    return subprocess.run(command, capture_output=True, text=True, cwd=root.parent)


@pytest.mark.slow
def test_a_study_writes_its_results_and_goes_on(installed, tmp_path):
    out, found = tmp_path / 'out', []
    for root, arms in ((installed, ['full']), (ROOT, ['full', 'without CPE'])):
        done = study(root, '--out', out, '--arms', *arms)
        assert done.returncode == 0, done.stderr
        found.append(json.loads((out / 'results.json').read_text())['runs'])
        assert [(run['arm'], run['seed']) for run in found[-1]] == [(arm, 0) for arm in arms]
        assert all(f'| {arm} | 1 |' in (out / 'table.md').read_text() for arm in arms)
    assert found[0] == found[1][:1] and (out / 'plot.png').stat().st_size > 1000


def test_missing_projects_are_one_line(installed, tmp_path):
    shutil.rmtree(installed / 'projects')
    done = study(installed, '--out', tmp_path / 'out')
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith('error: ') and 'projects' in done.stderr
