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
    out = tmp_path / 'out'
    done = study(installed, '--out', out, '--arms', 'full')
    assert done.returncode == 0, done.stderr
    first = json.loads((out / 'results.json').read_text())
    assert [(run['arm'], run['seed']) for run in first['runs']] == [('full', 0)]
    assert '| full | 1 |' in (out / 'table.md').read_text() and (out / 'plot.png').stat().st_size > 1000
    done = study(ROOT, '--out', out, '--arms', 'full', 'without CPE')
    assert done.returncode == 0, done.stderr
    both = json.loads((out / 'results.json').read_text())
    assert both['runs'][0] == first['runs'][0] and both['runs'][1]['arm'] == 'without CPE' and len(both['runs']) == 2
    assert 'without CPE' in (out / 'table.md').read_text()


def test_missing_projects_are_one_line(installed, tmp_path):
    shutil.rmtree(installed / 'projects')
    done = study(installed, '--out', tmp_path / 'out')
    assert done.returncode == 1 and done.stderr.startswith('error: ') and len(done.stderr.splitlines()) == 1
    assert 'projects' in done.stderr
