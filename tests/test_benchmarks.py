# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The benchmarks measure what they say; what they find is for a quiet machine."""

import measure
import pytest
import run_ravlt
import torch

from mmlinattn.backbones import RAVLT


@pytest.mark.parametrize(('attns', 'expected'), [('hybrid', 2.59e9), ('linear', 2.51e9)])
def test_multiply_adds(attns, expected):
    """The paper's convolutions (2.41 G with the classifier's 0.03 G), and the products of the attention."""
    count = measure.multiply_adds(lambda: RAVLT('tiny', stage_attns=run_ravlt.ATTNS[attns]), 1, 3, 224, 224)
    assert count == pytest.approx(expected, rel=0.005)


def allocating(mebibytes):
    """A call that needs this much at its peak and twice that in all."""

    def call(size):
        for _ in range(2):
            torch.ones(size * 2**18)

    return (lambda: call(1)), (lambda: call(mebibytes))


def test_peak_memory_is_what_is_alive_at_once():
    assert measure.peak_rss(allocating, (200,), 1) / measure.MIB == pytest.approx(200, abs=10)


def test_times_are_of_the_named_calls():
    import time

    calls = {'slow': lambda: time.sleep(0.03), 'fast': lambda: time.sleep(0.003)}
    times = measure.interleaved_times(calls, 3)
    assert list(times) == ['slow', 'fast']
    assert times['slow'] > 3 * times['fast']


def test_breakdown_names_the_groups():
    model = RAVLT(dict(embed_dims=(8, 16, 24, 32), depths=(1, 1, 1, 1), num_heads=(1, 2, 3, 4))).eval()
    with torch.no_grad():
        shares = measure.breakdown(lambda: model(torch.randn(1, 3, 64, 64)))
    assert sum(shares.values()) == pytest.approx(1)
    assert {
        'matrix products',
        'softmax attention',
        'dense convolutions',
        'depth-wise convolutions',
        'norms',
    } <= set(shares)


@pytest.mark.slow
def test_the_command_line(tmp_path, capsys):
    out = tmp_path / 'table.md'
    sizes = ['--forward-size', '64', '96', '--train-size', '64', '64', '--linear-sizes', '32', '96']
    run_ravlt.main([*sizes, '--repeats', '1', '--threads', '1', '--out', str(out)])
    text = out.read_text()
    assert text.strip() == capsys.readouterr().out.strip()
    for row in ('time, forward 64x96', 'peak extra memory, fully linear, 96^2', 'hybrid literal'):
        assert row in text


def test_a_gpu_that_is_not_there(capsys):
    if torch.cuda.is_available():
        pytest.skip('there is one')
    with pytest.raises(SystemExit):
        run_ravlt.parse(['--device', 'cuda'])
    assert 'sees no GPU' in capsys.readouterr().err


@pytest.mark.slow
def test_overhead_of_hooks(tmp_path, capsys):
    pytest.importorskip('mmpretrain')
    import run_overhead

    (config,) = (path for path in run_overhead.QUICKSTARTS if path.parent.name == 'mmpretrain')
    small = ['--iters', '2', '--batch', '2', '--size', '64', '64', '--num-pictures', '4', '--threads', '1']
    run_overhead.main([str(config), *small, '--out', str(tmp_path / 'table.md')])
    *_, row = (tmp_path / 'table.md').read_text().splitlines()
    name, bare, with_hooks, ratio, *_, inside = (cell.strip() for cell in row.strip('|').split('|'))
    assert name == 'mmpretrain/ravlt_shapes_quickstart'
    assert bare.endswith(' ms') and with_hooks.endswith(' ms') and float(ratio) > 0
    assert float(inside.split()[0]) > 0


def test_what_a_larger_image_will_take():
    from run_resolution import Point, next_cost

    assert next_cost([], 512, 'bytes') is None
    assert next_cost([Point(512, None, 100)], 1024, 'bytes') == 1600  # nothing known: quadratic in pixels
    assert next_cost([Point(512, None, 100), Point(1024, None, 400)], 2048, 'bytes') == pytest.approx(1600)
    assert next_cost([Point(512, 1.0, None), Point(1024, 8.0, None)], 2048, 'seconds') == pytest.approx(64)


@pytest.mark.slow
def test_sizes_that_would_take_too_much_are_left_out(tmp_path, capsys):
    import run_resolution

    name = 'RAVLT-T, fully linear'
    options = ['--models', name, '--only', 'memory', '--sides', '64', '256', '2048', '--threads', '1']
    out, plot = tmp_path / 'table.md', tmp_path / 'new' / 'plot.png'
    run_resolution.main([*options, '--max-gib', '0.3', '--out', str(out), '--plot', str(plot)])
    text = out.read_text()
    assert f'| {name} | 256 |' in text and f'| {name} | 2048 |' not in text
    assert f'Left out: {name}, 2048: about' in text and plot.stat().st_size > 5000
