# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""tools/analysis_tools/ablation_study.py; ``projects/studies`` has its code and most of its tests."""

import json

import pytest
from helpers.tool_runs import in_this_process

TOOL = 'analysis_tools/ablation_study.py'
QUICK = '--iterations=2 --batch=4 --num-train=8 --num-val=8 --seeds=1'.split()


@pytest.mark.slow
def test_a_study_writes_its_results_and_resumes(tmp_path):
    found = []
    for variants in (['full'], ['full', 'without CPE']):
        in_this_process(TOOL, '--study', 'rala', '--out', tmp_path, '--variants', *variants, *QUICK)
        found.append(json.loads((tmp_path / 'results.json').read_text())['runs'])
        assert [(run['variant'], run['seed']) for run in found[-1]] == [(variant, 0) for variant in variants]
        assert all(f'| {variant} | 1 |' in (tmp_path / 'table.md').read_text() for variant in variants)
    assert found[0] == found[1][:1] and (tmp_path / 'plot.png').stat().st_size > 1000
