# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The papers' tables: every row is in the page, and the differences are what they say."""

import csv
import re
import runpy
import sys

import pytest
from config_helpers import CONFIG_DIR, CONFIGS, ROOT

import mmlinattn  # noqa: F401
from mmlinattn.analysis.paper_tables import TITLES, cells, far_rows, in_conventions, measure, nearest_convention, page
from mmlinattn.analysis.published import TABLES, read_rows

for project in ('mmdet', 'mmseg', 'mmpretrain'):
    pytest.importorskip(project)
ROWS = {row.name: row for task in ('mmdet', 'mmseg', 'mmpretrain') for row in read_rows(task)}


def test_rows_are_those_of_the_tables():
    count = 0
    for path in TABLES.glob('*.csv'):
        with open(path, newline='') as file:
            count += sum(1 for _ in csv.DictReader(file))
    assert len(ROWS) == count  # names are unique, none is lost


def test_nearest_convention():
    assert nearest_convention(2.4, dict(layers=2.41, products=2.61)) == 'layers'
    assert nearest_convention(2.6, dict(layers=2.41, products=2.61)) == 'products'


@pytest.mark.parametrize('name', ['mmdet/ravlt_t_retinanet_1x', 'mmseg/ravlt_t_fpn_80k', 'mmpretrain/ravlt_t_in1k'])
def test_ravlt_figures_leave_attention_products_out(name):
    row = ROWS[name]
    cost = measure(row, CONFIG_DIR)
    counted = in_conventions(cost)
    assert nearest_convention(float(row.flops), counted) == 'layers'
    assert counted['layers'] == pytest.approx(float(row.flops), rel=0.01)
    assert not far_rows([(row, cost)]) and far_rows([(row._replace(flops='1000'), cost)])
    line = cells(row, cost)
    assert float(line[4]) == pytest.approx(cost.total_params / 1e6 - float(row.released_params or row.params), abs=0.01)


@pytest.mark.parametrize('name', ['mmpretrain/hmhsa_deit_t_in1k', 'mmpretrain/hmhsa_pvt_v2_b1_in1k'])
def test_hmhsa_figures_are_of_merged_models_and_built_maps(name):
    row = ROWS[name]
    cost = measure(row, CONFIG_DIR)
    assert f'{cost.total_params / 1e6:.2f}' == row.params
    assert f'{in_conventions(cost)["products"]:.2f}' == row.flops


def test_row_without_config_is_not_built(tmp_path):
    row = ROWS['mmpretrain/ravlt_t_in1k']
    assert measure(row, tmp_path) is None
    assert 'not built' in cells(row, None)
    assert '| RAVLT-T | 224 | 14.90 | not built |' in page([(row, None)])


def test_committed_page_has_every_row():
    text = (ROOT / 'docs' / 'tables.md').read_text(encoding='utf-8')
    lines = [re.split(r' *\| *', line)[1:3] for line in text.splitlines() if line.startswith('| ')]
    for row in ROWS.values():
        assert [row.model, row.recipe] in lines
    for name in set(CONFIGS) & set(ROWS):
        row = ROWS[name]
        pattern = rf'^\| {re.escape(row.model)} \| {re.escape(row.recipe)} \|.*not built'
        assert not re.search(pattern, text, re.M), (
            f'{name}: run tools/analysis_tools/paper_tables.py --out docs/tables.md'
        )


@pytest.mark.parametrize('name', ['paper_tables', 'attention_table'])
def test_places_that_cannot_be_written_are_refused_at_once(name, tmp_path, monkeypatch, capsys):
    """Measuring takes minutes."""
    tool = runpy.run_path(str(ROOT / 'tools' / 'analysis_tools' / f'{name}.py'), run_name='tool')
    for function in ('measure', 'page'):
        monkeypatch.setitem(tool['main'].__globals__, function, lambda *_: pytest.fail('begun'))
    (tmp_path / 'file').touch()
    out = str(tmp_path / 'file' / 'page.md')
    monkeypatch.setattr(sys, 'argv', [f'{name}.py', '--out', out])
    with pytest.raises(SystemExit, match='1'):
        tool['main']()
    assert capsys.readouterr().err.startswith(f'error: --out {out!r} cannot be written: ')


def test_tasks_that_there_are(monkeypatch, capsys):
    tool = runpy.run_path(str(ROOT / 'tools' / 'analysis_tools' / 'paper_tables.py'), run_name='tool')
    monkeypatch.setattr(sys, 'argv', ['paper_tables.py', '--task', 'mmdet', 'no_such'])
    with pytest.raises(SystemExit) as end:
        tool['main']()
    assert end.value.code == 2 and "--task: invalid choice: 'no_such' (choose from " in capsys.readouterr().err
    monkeypatch.setattr(sys, 'argv', ['paper_tables.py'])
    assert tool['parse_args']().task == list(TITLES)
