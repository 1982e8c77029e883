# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Multiply-adds and kept memory of the benchmarks; their times need a quiet machine."""

import count_traffic
import measure
import pytest
import run_attentions
import run_ravlt

from mmlinattn.attention import TOKEN_MIXERS
from mmlinattn.backbones import RAVLT


@pytest.mark.parametrize(('attns', 'expected'), [('hybrid', 2.59e9), ('linear', 2.51e9)])
def test_multiply_adds(attns, expected):
    """Count the paper's convolutions (2.41 G, with 0.03 G of the classifier) plus the products of the attention."""
    count = measure.multiply_adds(lambda: RAVLT('tiny', stage_attns=run_ravlt.ATTNS[attns]), 1, 3, 224, 224)
    assert count == pytest.approx(expected, rel=0.005)


def test_every_registered_attention_is_measured(tmp_path):
    out = tmp_path / 'table.md'
    sizes = ['--sides', '3', '6', '--dim', '16', '--heads', '2', '--repeats', '1', '--no-memory']
    run_attentions.main([*sizes, '--out', str(out), '--plot', str(tmp_path / 'plot.png')])
    for name in TOKEN_MIXERS.module_dict:
        assert len([line for line in out.read_text().splitlines() if line.startswith(f'| {name} |')]) == 2


def test_kept_memory_and_launches_of_attentions(capsys):
    """Check the rows of the report: analytic gradients keep little, and RALA starts two thirds of the launches."""
    count_traffic.main(['--only', 'attentions', '--tokens', '1024'])
    rows = [line.strip('| ').split(' | ') for line in capsys.readouterr().out.splitlines()]
    found = [row for row in rows if len(row) == 7 and row[1][0].isdigit()]
    linear = {name for name, kind in TOKEN_MIXERS.module_dict.items() if not kind.quadratic}
    assert sorted(row[0] for row in found) == sorted([*linear, *linear])
    for name, plain, launches, on_cpu, _, on_gpu, ours in found:
        assert max(float(on_cpu), float(on_gpu)) <= 0.25 and 2 < float(plain)
        if name == 'rala':
            assert all(3 * int(a) <= 2 * int(b) for a, b in zip(ours.split(', '), launches.split(', ')))
