# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Time limits, kept results and the page of the sweep."""

import json
import multiprocessing
import sys
import time
from types import SimpleNamespace

import pytest

from projects.sweeps import upstream


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
        row('mmseg::fcn/fcn.py', 'time', 'x ' * 150),
        row('mmseg::sam/sam.py', 'unsupported', 'mmseg::sam/sam.py: no other backbone fits: it has no head'),
        *(row(f'mmseg::clip/{name}.py', 'unsupported', 'it: no other backbone fits: it has no head') for name in 'ab'),
    ]
    text = upstream.page(rows, 'ravlt_s', 7)
    assert 'UPSTREAM ravlt_s`' in text
    assert 'Tried: 8 configs of 5 of the 7 folders; works: 4, unsupported: 3, time: 1.' in text
    lines = text.splitlines()
    assert '| works | a &lt;b> / c of it | dino/dino_r101 |' in lines and 'atss' not in text
    assert f'| time | {"x " * 48}... | fcn |' in lines and '## mmpretrain' not in lines
    assert '| unsupported | it has no head | sam, clip |' in lines


def test_results_are_kept_and_not_tried_again(tmp_path, monkeypatch, fails):
    for project in upstream.PROJECTS:
        monkeypatch.setitem(sys.modules, f'{project}.models', SimpleNamespace())
    tried = []

    def outcome(*args):
        tried.append(args)
        return 'works', 'fine'

    monkeypatch.setattr(upstream, 'outcome', outcome)
    monkeypatch.setattr(upstream, 'sample', lambda: [f'{name}::a/a.py' for name in upstream.PROJECTS])
    kept, out = tmp_path / 'new' / 'kept.jsonl', tmp_path / 'other' / 'page.md'

    def run(*args):
        monkeypatch.setattr(sys, 'argv', ['upstream', '--results', str(kept), *args])
        tried.clear()
        upstream.main()
        return [json.loads(line) for line in kept.read_text().splitlines()]

    assert run('--configs', 'mmseg::a/a.py') == [row('mmseg::a/a.py', 'works', 'fine')]
    assert tried == [('mmseg::a/a.py', 'ravlt_t', 180)]
    assert len(run('--out', str(out))) == 3 and len(tried) == 2
    text = out.read_text()
    assert text.index('## mmdet') < text.index('## mmseg') < text.index('## mmpretrain')
    run('--configs', 'mmseg::a/a.py', '--backbone', 'ravlt_s')
    assert tried == [('mmseg::a/a.py', 'ravlt_s', 180)]  # of another backbone
    assert run('--configs', 'mmdet::d/d.py')[-1] == row('mmdet::d/d.py', 'works', 'fine')
    tried.clear()
    assert 'cannot be written' in fails(upstream.main, '--out', tmp_path, '--results', kept) and not tried
