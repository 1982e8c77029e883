# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""docs/attentions.md: every attention and host is in it, and it is what the tool writes."""

import re

import pytest
import torch
from config_helpers import ROOT

import mmlinattn  # noqa: F401  registers the hosts
from mmlinattn import backbones
from mmlinattn.analysis import ablation, attentions  # noqa: F401  a study adds no attention to the registry
from mmlinattn.attention import TOKEN_MIXERS

PAGE = ROOT / 'docs' / 'attentions.md'


def rows(text: str) -> list:
    return [[cell.strip() for cell in line.split('|')[1:-1]] for line in text.splitlines() if line.startswith('| ')]


def test_every_attention_has_two_rows_and_every_host_a_column():
    found = rows(PAGE.read_text(encoding='utf-8'))
    for name in TOKEN_MIXERS.module_dict:
        described, counted = (row for row in found if row[0] == f'`{name}`')
        assert all(described) and len(described) == 7
        assert len(counted) == 1 + len(backbones.__all__), 'run tools/analysis_tools/attention_table.py'
        assert all(re.fullmatch(r'\d+\.\d\d, \d+\.\d\d', cell) for cell in counted[1:])
    assert set(backbones.__all__) <= set(attentions.HOSTS)


@pytest.mark.slow
def test_it_is_as_generated():
    assert PAGE.read_text(encoding='utf-8') == attentions.page(), 'run tools/analysis_tools/attention_table.py'


def test_an_attention_without_a_description_is_named():
    TOKEN_MIXERS.register_module('undescribed', module=type('Undescribed', (TOKEN_MIXERS.get('hydra'),), {}))
    try:
        with pytest.raises(KeyError, match='undescribed'):
            attentions.page()
    finally:
        TOKEN_MIXERS._module_dict.pop('undescribed')


def test_what_is_kept_for_the_backward_pass():
    """Queries, keys and values at least, no map of all pairs."""
    for name in ('efficient', 'hallucinated'):
        small, large = (attentions.kept_for_backward(name, side=side) for side in (16, 32))
        assert 2.9 < large <= small < 8


def test_measuring_leaves_threads_as_they_were(monkeypatch):
    """It takes one, for numbers that are the same everywhere; also where it fails."""
    asked = []
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 7)
    monkeypatch.setattr(torch, 'set_num_threads', asked.append)
    attentions.kept_for_backward('hydra', side=4)
    assert asked == [1, 7]
    monkeypatch.setattr(TOKEN_MIXERS.get('hydra'), 'forward', lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        attentions.kept_for_backward('hydra', side=4)
    assert asked == [1, 7] * 2


def test_the_page_says_what_is_measured():
    """But for the costs of all pairs, which take long: those of one attention in every host."""
    found = rows(PAGE.read_text(encoding='utf-8'))
    for name, about in attentions.ABOUT.items():
        described, counted = (row for row in found if row[0] == f'`{name}`')
        kept, gate = f'{attentions.kept_for_backward(name):.1f}', attentions.gate_of(name)
        assert described[1:] == [about.source, about.equation, about.complexity, kept, gate, about.position]
        if name == 'hydra':
            costs = [attentions.cost_in(host, name) for host in attentions.HOSTS]
            assert counted[1:] == [f'{params:.2f}, {macs:.2f}' for params, macs in costs]
