# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""tools/analysis_tools/sweep_upstream.py: which configs it tries, what it makes of how they end, and its page."""

import json
import multiprocessing
import os
import runpy
import sys
import time
from types import SimpleNamespace

import pytest
from config_helpers import ROOT

from mmlinattn import swapping
from mmlinattn.utils.errors import RunError

TOOL = runpy.run_path(str(ROOT / 'tools' / 'analysis_tools' / 'sweep_upstream.py'), run_name='sweep')


@pytest.mark.parametrize(
    ('files', 'picked'),
    [
        (['a_swin.py', 'b_r101.py', 'c_r50.py', 'd_r50.py'], 'c_r50.py'),
        (['a_base.py', 'b_tiny.py', 'c_small.py'], 'c_small.py'),
        (['z_x.py', 'b_y.py', '_r50.py'], 'b_y.py'),  # names with an underscore in front are parts of others
        # the most usual first, whatever comes first by name
        (['a_small.py', 'b_resnet50.py'], 'b_resnet50.py'),
        (['a_s_x.py', 'b_tiny.py'], 'b_tiny.py'),
        (['a_base.py', 'b_s_x.py'], 'b_s_x.py'),
        (['a_b0.py', 'b_base.py'], 'b_base.py'),
        (['a_large.py', 'b_b0.py'], 'b_b0.py'),
        (['metafile.yml'], None),
    ],
)
def test_which_config_stands_for_a_folder(tmp_path, files, picked):
    folder = tmp_path / 'r50_resnet50_small_tiny_s_base_b0'  # names of folders say nothing
    folder.mkdir()
    for name in files:
        (folder / name).touch()
    assert [path.name for path in TOOL['pick'](folder)] == ([picked] if picked else [])


def test_one_config_of_every_folder(tmp_path, monkeypatch):
    for project in ('mmdet', 'mmseg'):
        root = tmp_path / project / '.mim' / 'configs'
        for name in ('_base_/a_r50.py', 'b/b_r50.py', 'b/b_r101.py', 'a/a.py', 'none/metafile.yml'):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
        (root / 'file.py').touch()
        assert TOOL['pick'](root / '_base_') == []  # parts of configs
    monkeypatch.setitem(TOOL['sample'].__globals__, 'get_installed_path', lambda name: str(tmp_path / name))
    assert TOOL['sample'](['mmseg', 'mmdet']) == [
        *('mmseg::a/a.py', 'mmseg::b/b_r50.py'),
        *('mmdet::a/a.py', 'mmdet::b/b_r50.py'),
    ]


@pytest.mark.parametrize(
    ('ends', 'found'),
    [
        (
            SimpleNamespace(remarks=['a MapAdapter is added', 'nothing', 'x goes']),
            ('works', 'a MapAdapter is added; x goes'),
        ),
        (swapping.NoPlace('there'), ('no place', 'there')),
        (swapping.NoModel('none'), ('no model', 'none')),
        (RunError('broken'), ('upstream fails too', 'broken')),
        (KeyError('key'), ('error', "KeyError: 'key'")),
        (type('Foreign', (Exception,), {})('why'), ('error', 'Foreign: why')),
    ],
)
def test_how_a_config_ends(monkeypatch, ends, found):
    asked, sent = [], []

    def swap(*args):
        asked.append(args)
        if isinstance(ends, Exception):
            raise ends
        return ends

    monkeypatch.setattr(swapping, 'swap_backbone', swap)
    monkeypatch.setattr(sys, 'stdout', sys.stdout)  # it silences its process
    monkeypatch.setattr(sys, 'stderr', sys.stderr)
    TOOL['attempt']('mmdet::a/a.py', 'ravlt_s', SimpleNamespace(send=sent.append))
    assert sent == [found]
    assert sys.stdout is sys.stderr and sys.stdout.name == os.devnull
    assert asked[0][:2] == ('mmdet::a/a.py', 'ravlt_s') and asked[0][2].suffix == '.py'


def _says(name, backbone, send):
    send.send((name, backbone))


def _dies(name, backbone, send):
    raise SystemExit(3)


def _sleeps(name, backbone, send):
    time.sleep(60)


@pytest.mark.parametrize(
    ('what', 'seconds', 'found'),
    [
        (_says, 30, ('a', 'b')),
        (_dies, 30, ('error', 'the process died')),
        (_sleeps, 0.25, ('time', 'no result within 0.25 s')),
    ],
)
def test_a_config_has_a_process_and_so_much_time(monkeypatch, what, seconds, found):
    fork = multiprocessing.get_context('fork')
    monkeypatch.setitem(TOOL['outcome'].__globals__, 'multiprocessing', fork)
    monkeypatch.setitem(TOOL['outcome'].__globals__, 'attempt', what)
    began = time.monotonic()
    assert TOOL['outcome']('a', 'b', seconds) == found
    assert time.monotonic() - began < 30 and not multiprocessing.active_children()


def row(config, outcome, why='', backbone='ravlt_t'):
    return dict(config=config, backbone=backbone, outcome=outcome, why=why)


def test_the_page():
    rows = [
        row('mmdet::dino/dino_r50.py', 'works'),
        row('mmdet::dino/dino_r101.py', 'works', 'a <b> | c of mmdet::dino/dino_r101.py'),
        row('mmseg::fcn/fcn.py', 'time', 'x' * 300),
    ]
    text = TOOL['page'](rows, 'ravlt_s', 7)
    assert '`python tools/swap_backbone.py UPSTREAM ravlt_s`' in text
    assert 'Tried: 3 configs of 2 of the 7 folders; 2 works, 1 time.' in text
    head = ['| family | config | outcome | why |', '| --- | --- | --- | --- |']
    assert text.split('\n\n## ')[1].splitlines() == [
        *('mmdet', '', *head),
        '| dino | dino_r50 | works |  |',
        '| dino | dino_r101 | works | a &lt;b> / c of it |',
    ]
    assert text.split('\n\n## ')[2].rstrip().splitlines() == [
        *('mmseg', '', *head),
        f'| fcn | fcn | time | {"x" * 200} |',
    ]
    assert 'mmpretrain' not in text


def test_results_are_kept_and_not_tried_again(tmp_path, monkeypatch, capsys):
    for project in ('mmdet', 'mmseg', 'mmpretrain'):
        monkeypatch.setitem(sys.modules, f'{project}.models', SimpleNamespace())
    tried, names = [], TOOL['main'].__globals__

    def outcome(*args):
        tried.append(args)
        return 'works', 'fine'

    monkeypatch.setitem(names, 'outcome', outcome)
    monkeypatch.setitem(names, 'sample', lambda projects: [f'{name}::a/a.py' for name in projects])
    kept, out = tmp_path / 'new' / 'deep' / 'kept.jsonl', tmp_path / 'other' / 'deep' / 'page.md'

    def run(*args):
        monkeypatch.setattr(sys, 'argv', ['sweep_upstream.py', '--results', str(kept), *args])
        TOOL['main']()
        return [json.loads(line) for line in kept.read_text().splitlines()] if kept.is_file() else []

    assert run('--projects', 'mmseg') == [row('mmseg::a/a.py', 'works', 'fine')] and not out.exists()
    assert tried == [('mmseg::a/a.py', 'ravlt_t', 180)]
    assert capsys.readouterr().out == 'works                  0 s  mmseg::a/a.py  fine\n'
    assert len(run('--projects', 'mmseg', '--backbone', 'ravlt_s')) == 2  # of another backbone
    assert tried.pop() == ('mmseg::a/a.py', 'ravlt_s', 180)
    assert len(run('--backbone', 'ravlt_s', '--seconds', '7', '--out', str(out))) == 4
    assert tried[1:] == [('mmdet::a/a.py', 'ravlt_s', 7), ('mmpretrain::a/a.py', 'ravlt_s', 7)]
    text = out.read_text()
    assert text.index('## mmdet') < text.index('## mmseg') < text.index('## mmpretrain')
    assert 'ravlt_s' in text and 'Tried: 3 configs of 3 of the 3 folders' in text
    # where the help says
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'argv', ['sweep_upstream.py', '--configs', 'mmdet::a/a.py'])
    TOOL['main']()
    assert json.loads((tmp_path / 'work_dirs' / 'upstream.jsonl').read_text()) == row('mmdet::a/a.py', 'works', 'fine')
    tried.clear()
    more = '--backbone', 'ravlt_s', '--configs', 'mmdet::b/b.py', 'mmdet::a/a.py', '--out', str(out)
    assert len(run(*more)) == 5 and len(tried) == 1
    assert 'Tried: 4 configs of 4 of the 3 folders' in out.read_text()  # that there are, not that were asked for
    assert len(run('--configs', 'mmdet::c/c.py', '--max-minutes', '0')) == 5 and len(tried) == 1
    assert run('--fresh', '--configs', 'mmdet::d/d.py') == [row('mmdet::d/d.py', 'works', 'fine')]
    kept.write_text(json.dumps(dict(config='mmdet::e/e.py', outcome='works', why='')) + '\n')  # of an older version
    assert run('--configs', 'mmdet::e/e.py')[1:] == [row('mmdet::e/e.py', 'works', 'fine')]


def test_a_page_that_cannot_be_written_costs_no_sweep(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['sweep_upstream.py', '--out', str(tmp_path), '--results', str(tmp_path / 'kept')])
    with pytest.raises(SystemExit, match='1'):
        TOOL['main']()
    assert capsys.readouterr().err == f"error: --out '{tmp_path}' cannot be written: Is a directory.\n"
    assert not (tmp_path / 'kept').exists()


def test_none_is_begun_after_the_time(tmp_path, monkeypatch, capsys):
    """Of 25 seconds each, those that begin within a minute: three."""
    for project in ('mmdet', 'mmseg', 'mmpretrain'):
        monkeypatch.setitem(sys.modules, f'{project}.models', SimpleNamespace())
    names, now = TOOL['main'].__globals__, [100.0]

    def outcome(*_):
        now[0] += 25
        return 'time', 'late'

    monkeypatch.setitem(names, 'outcome', outcome)
    monkeypatch.setitem(names, 'time', SimpleNamespace(monotonic=lambda: now[0]))
    kept, configs = tmp_path / 'kept.jsonl', [f'mmdet::{i}/a.py' for i in range(5)]
    monkeypatch.setattr(
        sys, 'argv', ['sweep_upstream.py', '--results', str(kept), '--max-minutes', '1', '--configs', *configs]
    )
    TOOL['main']()
    assert [json.loads(line) for line in kept.read_text().splitlines()] == [
        row(name, 'time', 'late') for name in configs[:3]
    ]
    said = capsys.readouterr().out.splitlines()
    assert said == [f'time                  25 s  {name}  late' for name in configs[:3]]
