# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Committed pages and metafiles equal those of their writers."""

import csv
from collections import Counter
from pathlib import Path

import pytest
import yaml

from mmlinattn.checkpoints.released import find_link, released_checkpoints
from mmlinattn.tooling.analysis.flops import CONV, PRODUCT, Cost
from projects.pages import metafiles
from projects.pages.published import TABLES, Row, read_rows
from projects.pages.tables import cells, measure, page

ROOT = Path(__file__).resolve().parents[3]
ROWS = {row.name: row for task in ('mmdet', 'mmseg', 'mmpretrain') for row in read_rows(task)}
ROW = Row('mmdet', 'RAVLT-T', 'Mask R-CNN 1x', 'RALA Tab. 2', '33.0', '', '219', {'box AP': 47.3}, None)


def lines_of(text: str) -> list:
    return [[cell.strip() for cell in line.split('|')[1:-1]] for line in text.splitlines() if line.startswith('| ')]


# --- the papers' tables -----------------------------------------------------------------------------------------------


def test_rows_are_those_of_the_tables():
    count = 0
    for path in TABLES.glob('*.csv'):
        with open(path, newline='') as file:
            count += sum(1 for _ in csv.DictReader(file))
    assert len(ROWS) == count  # unique names
    row = ROWS['mmpretrain/inline_swin_b_384_in1k']
    assert (row.resolution, row.paper, row.flops) == (384, 'InLine', '45.2')
    row = ROWS['mmdet/ravlt_b_cascade_3x']
    assert row.metrics['box AP'] == 55.3 and row.metrics['mask AP'] == 47.7 and row.link.startswith('https://')


def test_ravlt_figures_leave_attention_products_out():
    pytest.importorskip('mmseg')
    row = ROWS['mmseg/ravlt_t_fpn_80k']
    cost = measure(row)
    assert cost.layer_macs / 1e9 == pytest.approx(float(row.flops), rel=0.01)
    assert cells(row, cost) in lines_of((ROOT / 'docs' / 'tables.md').read_text(encoding='utf-8'))


def test_hmhsa_figures_are_of_merged_models_and_built_maps():
    pytest.importorskip('mmpretrain')
    row = ROWS['mmpretrain/hmhsa_deit_t_in1k']
    cost = measure(row)
    assert f'{cost.total_params / 1e6:.2f}' == row.params
    assert f'{cost.total_macs() / 1e9:.2f}' == row.flops


def test_committed_page_has_every_row():
    text = (ROOT / 'docs' / 'tables.md').read_text(encoding='utf-8')
    lines = [line[:2] for line in lines_of(text)]
    assert sorted(lines.count([row.model, row.recipe]) for row in ROWS.values()) == [1] * len(ROWS)


def test_lines():
    macs = Counter({('a', CONV): 219.4e9, ('a', PRODUCT): 7e9})
    count = Cost((1, 1), {'a': 33_500_000}, macs, 0, [])
    assert cells(ROW, count) == ['RAVLT-T', 'Mask R-CNN 1x', '33.50 (33.0)', '219.40', '47.3', '']
    other = ROW._replace(source='InLine Tab. 5')
    assert cells(other, count)[3] == '226.40 (219)'
    text = page([(ROW, count), (ROW._replace(task='mmseg', metrics={'mIoU': 50.0}), count)])
    assert text.index('## COCO detection') < text.index('## ADE20K') and 'ImageNet-1K' not in text
    assert '| FLOPs G | mIoU | mAcc |' in text


# --- metafiles --------------------------------------------------------------------------------------------------------


def test_metafiles_are_as_generated():
    for path, text in metafiles.make_files().items():
        assert (ROOT / path).read_text(encoding='utf-8') == text, 'run python -m projects.pages.metafiles'


def test_links_are_those_of_the_released_table():
    released = released_checkpoints()
    for text in metafiles.make_files().values():
        for model in yaml.safe_load(text).get('Models', ()):
            assert ('Weights' in model) == (model['Name'] in released)
            if 'Weights' in model:
                link = find_link(model['Weights'])  # loaded by MMEngine with its layout
                assert link == released[model['Name']] and model['Converted From']['Weights'] == link.link
                assert model['Weights'].split('/')[-1] == link.file_name  # name of the file that mim saves


def test_configs_of_new_families_and_of_one_name(tmp_path):
    for path in ('mmdet/ravlt_x_shapes.py', 'mmseg/ravlt_x_shapes.py', 'mmseg/ravlt_y_shapes.py'):
        (tmp_path / 'configs' / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / 'configs' / path).touch()
    entries = yaml.safe_load(metafiles.make_files(tmp_path)['configs/ravlt/metafile.yml'])['Models']
    assert [entry['Name'] for entry in entries] == ['ravlt_x_shapes_mmdet', 'ravlt_x_shapes_mmseg', 'ravlt_y_shapes']
    (tmp_path / 'configs' / 'mmdet' / 'newcomer_t_maskrcnn_1x.py').touch()
    with pytest.raises(SystemExit, match="'newcomer'"):
        metafiles.make_files(tmp_path)
