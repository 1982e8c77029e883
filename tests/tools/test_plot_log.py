# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""tools/analysis_tools/plot_log.py: curves of a work dir's log."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from matplotlib import pyplot
from matplotlib.figure import Figure

TOOL = str(Path(__file__).resolve().parents[2] / 'tools' / 'analysis_tools' / 'plot_log.py')
RECORDS = [
    [dict(loss=3.0, lr=0.1, step=10, time=0.1, memory=100, note='words'), dict(loss=2.0, lr=0.1, step=20)],
    # resumed from before the end of the first; metrics of MMSegmentation have no prefix
    [dict(loss=1.5, step=20), {'coco/bbox_mAP': 0.25, 'decode.loss_ce': 1.0, 'step': 2}, dict(mIoU=40.0)],
]
CURVES = {'loss': [[10, 3.0], [20, 1.5]], 'coco/bbox_mAP': [[2, 0.25]], 'mIoU': [[3, 40.0]]}


@pytest.fixture
def work_dir(tmp_path):
    for name, records in zip(('20250101_000000', '20250101_010000'), RECORDS):
        log = tmp_path / 'work' / name / 'vis_data' / 'scalars.json'
        log.parent.mkdir(parents=True)
        log.write_text('\n'.join(map(json.dumps, records)) + '\n')
    return tmp_path / 'work'


@pytest.fixture
def drawn(monkeypatch):
    """Run the tool; the curves that were drawn, by their labels."""
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, 'savefig', lambda self, path, **k: figures.append(self) or save(self, path, **k))

    def run(*args):
        monkeypatch.setattr(sys, 'argv', ['plot_log.py', *map(str, args)])
        open_before = pyplot.get_fignums()
        runpy.run_path(TOOL, run_name='__main__')
        assert pyplot.get_fignums() == open_before
        lines = {axis.get_ylabel(): axis.lines[0] for axis in figures.pop().axes}
        assert {line.get_marker() for line in lines.values()} == {'.'}  # without, a single point is not seen
        return {key: line.get_xydata().tolist() for key, line in lines.items()}

    return run


def test_curves_of_all_runs(work_dir, tmp_path, drawn, capsys, monkeypatch):
    """What a later run did again counts; without keys the loss and all metrics, else keys or their last parts."""
    out = tmp_path / 'new' / 'deep' / 'a.svg'
    assert drawn(work_dir, '--out', out) == CURVES
    assert out.is_file() and capsys.readouterr().out.strip() == str(out)
    found = drawn(work_dir, '--keys', 'bbox_mAP', 'lr', 'decode.loss_ce', '--out', tmp_path / 'b.png')
    assert found == {
        'coco/bbox_mAP': [[2, 0.25]],
        'lr': [[10, 0.1], [20, 0.1]],
        'decode.loss_ce': [[2, 1.0]],
    }
    logs = sorted(work_dir.rglob('scalars.json'))
    assert drawn(logs[0], '--keys', 'loss', '--out', out) == {'loss': [[10, 3.0], [20, 2.0]]}
    monkeypatch.setattr(Path, 'rglob', lambda self, pattern: iter(logs[::-1]))  # in whatever order a drive has them
    assert drawn(work_dir, '--out', out) == CURVES
