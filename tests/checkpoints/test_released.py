# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The published checkpoints by name."""

import csv
from pathlib import Path

import pytest

import mmlinattn
from mmlinattn.checkpoints import CheckpointError, find_released, released_checkpoints
from mmlinattn.checkpoints.released import find_link, link_with_name

TABLE = Path(mmlinattn.__file__).parent / 'checkpoints' / 'released_checkpoints.csv'


def test_every_row_of_the_table_has_its_names():
    table = released_checkpoints()
    with open(TABLE, newline='') as file:
        links = {row['link'] for row in csv.DictReader(file)}
    assert {entry.link for entry in table.values()} == links and len(links) == 45
    backbones = {name for name, entry in table.items() if entry.bare}
    assert len(backbones) == 24 and len(table) == 24 + 45
    assert all(table[name].path == table[f'{name}_in1k'].path for name in backbones)
    expected = (
        'ravlt_b ravlt_b_cascade_3x ravlt_t_retinanet_1x ravlt_t_maskrcnn_1x ravlt_s_maskrcnn_3x ravlt_t_fpn_80k '
        'ravlt_s_upernet_160k inline_pvt_t inline_swin_b inline_cswin_t inline_deit_t flatten_pvt_t flatten_pvt_v2_b0 '
        'flatten_swin_b_384 flatten_cswin_t'
    )
    assert set(expected.split()) <= set(table)


def test_cached_files_have_readable_names_that_do_not_collide(monkeypatch, tmp_path):
    monkeypatch.setenv('TORCH_HOME', str(tmp_path))
    table = released_checkpoints()
    assert table['ravlt_b'].path == tmp_path / 'hub' / 'checkpoints' / 'mmlinattn' / 'RAVLT_B.pth'
    assert table['ravlt_b_cascade_3x'].path.name == 'Casmaskrcnn_b_3x_36_epoch.pth'
    assert table['inline_deit_t'].path.name == 'inline_deit_t.pth'  # whose link ends in /?dl=1
    links = {}
    for entry in table.values():
        assert links.setdefault(entry.file_name.lower(), entry.link) == entry.link


def test_an_unknown_name_lists_the_known_ones_closest_first():
    with pytest.raises(
        CheckpointError, match="is called 'ravlt_b_cascade_1x'; known names: ravlt_b_cascade_3x"
    ) as caught:
        find_released('ravlt_b_cascade_1x')
    known = str(caught.value).split('known names: ')[1].split(', ')
    assert sorted(known) == sorted(released_checkpoints())  # each once
    with pytest.raises(CheckpointError, match=', '.join(released_checkpoints())):
        find_released('%%')  # like none


def test_links_of_the_metafiles_name_the_file_and_the_checkpoint():
    for name in ('ravlt_t_maskrcnn_1x', 'inline_swin_t_in1k'):
        link = link_with_name(find_released(name))
        assert link.split('/')[-1].endswith('.pth') and find_link(link).name == name
    assert find_link('https://example.org/RAVLT_T.pth') is None
