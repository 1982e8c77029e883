# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Curves of a work dir's log."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from config_helpers import ROOT

from mmlinattn.utils.errors import RunError

TOOL = ROOT / 'tools' / 'analysis_tools' / 'plot_log.py'


@pytest.fixture
def work_dir(tmp_path):
    """Two runs, the second resumed from before the end of the first."""
    runs = {
        '20250101_000000': [dict(loss=3.0, lr=0.1, step=10), dict(loss=2.0, lr=0.1, step=20)],
        '20250101_010000': [dict(loss=1.5, lr=0.1, step=20), {'coco/bbox_mAP': 0.25, 'step': 2}],
    }
    for name, records in runs.items():
        log = tmp_path / 'work' / name / 'vis_data' / 'scalars.json'
        log.parent.mkdir(parents=True)
        log.write_text('\n'.join(map(json.dumps, records)) + '\n')
    return tmp_path / 'work'


def run(monkeypatch, *args):
    monkeypatch.setattr(sys, 'argv', ['plot_log.py', *map(str, args)])
    runpy.run_path(str(TOOL), run_name='__main__')


def test_resumed_run_replaces_what_it_ran_again(work_dir):
    tool = runpy.run_path(str(TOOL))
    curves = tool['read_curves'](tool['find_logs'](work_dir))
    assert curves['loss'] == {10: 3.0, 20: 1.5}
    assert curves['coco/bbox_mAP'] == {2: 0.25}
    assert tool['choose'](curves, None) == ['loss', 'coco/bbox_mAP']
    assert tool['choose'](curves, ['bbox_mAP']) == ['coco/bbox_mAP']


def test_logs_are_read_oldest_first(work_dir, monkeypatch):
    """In whatever order a drive has them."""
    find_logs, logs = runpy.run_path(str(TOOL))['find_logs'], sorted(work_dir.rglob('scalars.json'))
    for order in (logs, logs[::-1]):
        monkeypatch.setattr(Path, 'rglob', lambda self, pattern, order=order: iter(order))
        assert find_logs(work_dir) == logs


@pytest.mark.parametrize('keys', [[], ['--keys', 'loss', 'bbox_mAP']])
def test_draws_a_panel_for_each_key(work_dir, tmp_path, monkeypatch, capsys, keys):
    mmcv = pytest.importorskip('mmcv')
    run(monkeypatch, work_dir, *keys, '--out', tmp_path / 'two.png')
    run(monkeypatch, work_dir, '--keys', 'loss', '--out', tmp_path / 'one.png')
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / 'two.png'), str(tmp_path / 'one.png')]
    two, one = (mmcv.imread(str(tmp_path / f'{name}.png')) for name in ('two', 'one'))
    assert two.shape[0] == pytest.approx(2 * one.shape[0], abs=2)
    assert one.shape == (288, 840, 3)  # 7 x 2.4 inches, 120 dots each
    assert len({tuple(pixel) for pixel in two.reshape(-1, 3)}) > 10  # more than an empty page


def test_curves_are_of_all_runs_of_the_folder(work_dir, tmp_path, monkeypatch):
    for i, log in enumerate(sorted(work_dir.rglob('scalars.json'))):
        with open(log, 'a') as file:
            file.write(json.dumps({f'of run {i}': 1.0, 'step': 5}) + '\n')
    for i in range(2):
        run(monkeypatch, work_dir, '--keys', f'of run {i}', '--out', tmp_path / f'{i}.png')
        assert (tmp_path / f'{i}.png').exists()


def test_what_is_a_curve(tmp_path):
    """Not the bookkeeping, not words; what has no step is counted by its line."""
    tool, log = runpy.run_path(str(TOOL)), tmp_path / 'scalars.json'
    words = dict(step=5, epoch=1, iter=5, time=0.1, data_time=0.1, memory=100, loss_cls=1, note='hello', lr=0.5)
    records = [words, {'a/AP': 0.5}, {'b/AP': 0.25, 'step': 9}, {'b/AP': 0.0, 'step': 0}]
    log.write_text('\n'.join(map(json.dumps, records)))
    curves = tool['read_curves'](tool['find_logs'](log))
    assert curves == {'loss_cls': {5: 1}, 'lr': {5: 0.5}, 'a/AP': {2: 0.5}, 'b/AP': {9: 0.25, 0: 0.0}}
    assert tool['choose'](curves, []) == ['a/AP', 'b/AP']  # no loss of a name of its own
    assert tool['choose'](curves, ['AP', 'lr']) == ['a/AP', 'b/AP', 'lr']
    assert tool['choose'](curves, ['b/AP']) == ['b/AP']
    with pytest.raises(RunError, match='^--keys loss: not in the log; it has a/AP, b/AP, loss_cls, lr.$'):
        tool['choose'](curves, ['lr', 'loss'])  # a key whole, or its last part


def test_metrics_of_segmentors_have_no_prefix(tmp_path):
    """As IoUMetric names them; rates and the parts of a loss are no metrics."""
    tool, log = runpy.run_path(str(TOOL)), tmp_path / 'scalars.json'
    trained = dict(lr=0.1, **{'decode.loss_ce': 1.0, 'decode.acc_seg': 50.0}, loss=2.0, step=1)
    log.write_text('\n'.join(map(json.dumps, [trained, dict(aAcc=70.0, mIoU=40.0, mAcc=50.0, mDice=1.0, step=50)])))
    assert tool['choose'](tool['read_curves']([log]), None) == ['loss', 'aAcc', 'mIoU', 'mAcc', 'mDice']


def test_panels_show_the_curves(tmp_path, monkeypatch):
    from matplotlib import pyplot
    from matplotlib.figure import Figure

    saved = []
    monkeypatch.setattr(Figure, 'savefig', lambda self, path, **_: saved.append((self, path)))
    plot, out = runpy.run_path(str(TOOL))['plot'], tmp_path / 'new' / 'deep' / 'a.svg'
    many = {step: 1 / (1 + step) for step in range(30)}
    plot({'loss': {20: 1.0, 10: 3.0}, 'lr': {}, 'coco/bbox_mAP': many}, ['loss', 'coco/bbox_mAP'], out)
    ((figure, path),) = saved
    first, second = figure.axes
    assert path == out and out.parent.is_dir()
    assert first.lines[0].get_xydata().tolist() == [[10, 3], [20, 1]]
    assert (first.get_ylabel(), second.get_ylabel()) == ('loss', 'coco/bbox_mAP')
    assert first.lines[0].get_marker() == '.' and second.lines[0].get_marker() == 'None'
    assert second.lines[0].get_ydata().tolist() == list(many.values())
    assert figure.get_size_inches().tolist() == [7, 4.8]  # 2.4 a panel
    assert not pyplot.get_fignums()  # none stays open
    plot({'loss': dict(list(many.items())[:29])}, ['loss'], out)
    assert saved[1][0].axes[0].lines[0].get_marker() == '.'
    assert first.get_xlabel() == '' and second.get_xlabel().startswith('step (iterations;')


@pytest.mark.parametrize(
    'make_args, message',
    [
        (lambda path: [path / 'nowhere', '--out', path / 'a.png'], 'vis_data/scalars.json'),
        (lambda path: [path / 'work', '--keys', 'bbox_AP', '--out', path / 'a.png'], 'coco/bbox_mAP, loss, lr'),
        (lambda path: [path / 'work', '--out', path / 'a.nopicture'], 'nopicture'),
        (lambda path: [path / 'work', '--out', path / 'work.txt' / 'a.png'], "a.png' cannot be written: File exists."),
        (lambda path: [path / 'work', '--out', path / 'dir.png'], "dir.png' cannot be written: Is a directory."),
    ],
)
def test_bad_input_is_one_line(work_dir, tmp_path, monkeypatch, capsys, make_args, message):
    (tmp_path / 'work.txt').touch()
    (tmp_path / 'dir.png').mkdir()
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, *make_args(tmp_path))
    error = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 1 and len(error) == 1 and error[0].startswith('error:') and message in error[0]


def test_a_log_without_curves_is_named(work_dir, tmp_path, monkeypatch, capsys):
    for log in work_dir.rglob('scalars.json'):
        log.write_text('{"lr": 0.1, "step": 1}')
    with pytest.raises(SystemExit):
        run(monkeypatch, work_dir, '--out', tmp_path / 'a.png')
    error = ' '.join(capsys.readouterr().err.split())
    assert error == f'error: work_dir {str(work_dir)!r}: neither a loss nor a metric in its log.'
    with pytest.raises(SystemExit):
        run(monkeypatch, work_dir, '--keys', 'lr', 'loss', 'AP', '--out', tmp_path / 'a.png')
    error = ' '.join(capsys.readouterr().err.split())
    assert error == 'error: --keys loss: not in the log; it has lr.' and not (tmp_path / 'a.png').exists()


def test_broken_line_is_named(work_dir, tmp_path, monkeypatch, capsys):
    log = next(work_dir.rglob('scalars.json'))
    log.write_text('{"loss": 1.0, "step": 1}\n{"loss": 0.\n')
    with pytest.raises(SystemExit):
        run(monkeypatch, work_dir, '--out', tmp_path / 'a.png')
    assert ' '.join(capsys.readouterr().err.split()) == f'error: {log}: line 2 is not JSON.'
