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
        return {axis.get_ylabel(): axis.lines[0].get_xydata().tolist() for axis in figures.pop().axes}

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


@pytest.mark.parametrize(
    ('args', 'message'),
    [
        (['nowhere', '--out', 'a.png'], 'vis_data/scalars.json'),
        (['work', '--keys', 'bbox_AP', '--out', 'a.png'], 'coco/bbox_mAP, decode.loss_ce, loss, lr, mIoU'),
        (['work', '--keys', 'time', '--out', 'a.png'], '--keys time: not in the log'),
        (['work', '--out', 'a.nopicture'], 'nopicture'),
        (['work', '--out', 'file/a.png'], "file/a.png' cannot be written"),
        (['work', '--out', 'folder.png'], "folder.png' cannot be written"),
        (['broken.json', '--out', 'a.png'], 'broken.json: line 2 is not JSON'),
        (['empty.json', '--out', 'a.png'], "work_dir 'empty.json': neither a loss nor a metric in its log"),
    ],
)
def test_bad_input_is_one_line(work_dir, tmp_path, drawn, monkeypatch, capsys, args, message):
    monkeypatch.chdir(tmp_path)
    Path('file').touch()
    Path('folder.png').mkdir()
    Path('broken.json').write_text('{"loss": 1.0, "step": 1}\n{"loss": 0.\n')
    Path('empty.json').write_text('{"lr": 0.1, "step": 1}')
    with pytest.raises(SystemExit) as stop:
        drawn(*args)
    error = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 1 and len(error) == 1 and error[0].startswith('error:') and message in error[0]
    assert not Path('a.png').exists()
