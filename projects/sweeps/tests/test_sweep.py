# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Which configs are tried, what is made of how they end, and the page."""

import json
import multiprocessing
import sys
import time
from types import SimpleNamespace

import pytest

from mmlinattn.tooling import swapping
from mmlinattn.utils.errors import RunError
from projects.sweeps import upstream


@pytest.mark.parametrize(
    ('files', 'picked'),
    [
        (['a_swin.py', 'b_r101.py', 'c_r50.py', 'd_r50.py'], ['c_r50.py']),
        (['a_base.py', 'b_tiny.py', 'c_small.py'], ['c_small.py']),
        (['a_small.py', 'b_resnet50.py'], ['b_resnet50.py']),
        (['z_x.py', 'b_y.py', '_r50.py'], ['b_y.py']),  # names with an underscore in front are parts of others
        (['metafile.yml'], []),
    ],
)
def test_one_config_of_every_folder(tmp_path, monkeypatch, files, picked):
    root = tmp_path / 'mmdet' / '.mim' / 'configs'
    for name in (*(f'folder_r50/{name}' for name in files), '_base_/a_r50.py', 'file.py'):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    monkeypatch.setattr(upstream, 'get_installed_path', lambda name: str(tmp_path / name))
    assert upstream.sample(['mmdet']) == [f'mmdet::folder_r50/{name}' for name in picked]


@pytest.mark.parametrize(
    ('ends', 'found'),
    [
        (SimpleNamespace(remarks=['a MapAdapter is added', 'nothing', 'x goes']), 'a MapAdapter is added; x goes'),
        (swapping.NoPlace('there'), 'there'),
        (swapping.NoModel('none'), 'none'),
        (RunError('broken'), 'broken'),
        (KeyError('key'), "KeyError: 'key'"),
    ],
)
def test_how_a_config_ends(monkeypatch, ends, found):
    sent = []

    def swap(*args):
        if isinstance(ends, Exception):
            raise ends
        return ends

    monkeypatch.setattr(swapping, 'swap_backbone', swap)
    monkeypatch.setattr(sys, 'stdout', sys.stdout)  # it silences its process
    monkeypatch.setattr(sys, 'stderr', sys.stderr)
    upstream.attempt('mmdet::a/a.py', 'ravlt_s', SimpleNamespace(send=sent.append))
    kinds = {SimpleNamespace: 'works', swapping.NoPlace: 'no place', swapping.NoModel: 'no model'}
    kinds |= {RunError: 'upstream fails too', KeyError: 'error'}
    assert sent == [(kinds[type(ends)], found)]


@pytest.mark.parametrize(
    ('what', 'found'),
    [
        (lambda name, backbone, send: send.send((name, backbone)), ('a', 'b')),
        (lambda *_: sys.exit(3), ('error', 'the process died')),
        (lambda *_: time.sleep(60), ('time', 'no result within 2 s')),
    ],
)
def test_a_config_has_a_process_and_so_much_time(monkeypatch, what, found):
    monkeypatch.setattr(upstream, 'multiprocessing', multiprocessing.get_context('fork'))
    monkeypatch.setattr(upstream, 'attempt', what)
    assert upstream.outcome('a', 'b', 2) == found and not multiprocessing.active_children()


def row(config, outcome, why='', backbone='ravlt_t'):
    return dict(config=config, backbone=backbone, outcome=outcome, why=why)


def test_the_page():
    rows = [
        *(row(f'mmdet::dino/dino_{size}.py', 'works') for size in ('r18', 'r50')),
        row('mmdet::atss/atss.py', 'works'),
        row('mmdet::dino/dino_r101.py', 'works', 'a <b> | c of mmdet::dino/dino_r101.py'),
        row('mmseg::fcn/fcn.py', 'time', 'x' * 300),
        row('mmseg::sam/sam.py', 'no place', 'mmseg::sam/sam.py has no place for a pyramid: it has no head'),
        *(row(f'mmseg::clip/{name}.py', 'no place', 'it has no place for a pyramid: it has no head') for name in 'ab'),
    ]
    text = upstream.page(rows, 'ravlt_s', 7)
    assert 'UPSTREAM ravlt_s`' in text
    assert 'Tried: 8 configs of 5 of the 7 folders; 4 works, 3 no place, 1 time.' in text
    lines = text.splitlines()
    assert '| works | a &lt;b> / c of it | dino/dino_r101 |' in lines and 'atss' not in text
    assert f'| time | {"x" * 100} | fcn |' in lines and '## mmpretrain' not in lines
    assert '| no place | it has no head | sam, clip |' in lines


def test_results_are_kept_and_not_tried_again(tmp_path, monkeypatch, fails):
    for project in upstream.PROJECTS:
        monkeypatch.setitem(sys.modules, f'{project}.models', SimpleNamespace())
    tried, now = [], [0.0]

    def outcome(*args):
        tried.append(args)
        now[0] += 25
        return 'works', 'fine'

    monkeypatch.setattr(upstream, 'outcome', outcome)
    monkeypatch.setattr(upstream, 'sample', lambda projects: [f'{name}::a/a.py' for name in projects])
    monkeypatch.setattr(upstream, 'time', SimpleNamespace(monotonic=lambda: now[0]))
    kept, out = tmp_path / 'new' / 'kept.jsonl', tmp_path / 'other' / 'page.md'

    def run(*args):
        monkeypatch.setattr(sys, 'argv', ['upstream', '--results', str(kept), *args])
        tried.clear()
        upstream.main()
        return [json.loads(line) for line in kept.read_text().splitlines()]

    assert run('--projects', 'mmseg') == [row('mmseg::a/a.py', 'works', 'fine')]
    assert tried == [('mmseg::a/a.py', 'ravlt_t', 180)]
    assert len(run('--out', str(out))) == 3 and len(tried) == 2
    text = out.read_text()
    assert text.index('## mmdet') < text.index('## mmseg') < text.index('## mmpretrain')
    run('--projects', 'mmseg', '--backbone', 'ravlt_s')
    assert tried == [('mmseg::a/a.py', 'ravlt_s', 180)]  # of another backbone
    run('--configs', *(f'mmdet::{i}/a.py' for i in range(5)), '--max-minutes', '1')
    assert len(tried) == 3  # of 25 seconds each, those that begin within a minute
    assert run('--fresh', '--configs', 'mmdet::d/d.py') == [row('mmdet::d/d.py', 'works', 'fine')]
    tried.clear()
    assert 'cannot be written' in fails(upstream.main, '--out', tmp_path, '--results', kept) and not tried
