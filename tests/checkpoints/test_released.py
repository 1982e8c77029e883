# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The published checkpoints by name; their links: ``tests/packaging/test_model_index.py``."""

import pytest

from mmlinattn.checkpoints import CheckpointError, find_released, released_checkpoints


def test_names_of_backbones_and_files(monkeypatch, tmp_path):
    monkeypatch.setenv('TORCH_HOME', str(tmp_path))
    table = released_checkpoints()
    backbones = {name for name, entry in table.items() if entry.bare}
    assert len(backbones) == 24 and len(table) == 24 + 45
    assert all(table[name].path == table[f'{name}_in1k'].path for name in backbones)
    assert len({entry.file_name.lower() for entry in table.values()}) == 45
    assert table['ravlt_b'].path == tmp_path / 'hub' / 'checkpoints' / 'mmlinattn' / 'RAVLT_B.pth'
    assert table['ravlt_b_cascade_3x'].path.name == 'Casmaskrcnn_b_3x_36_epoch.pth'
    assert table['inline_deit_t'].path.name == 'inline_deit_t.pth'  # its link ends in /?dl=1


def test_an_unknown_name_lists_the_known_ones_closest_first():
    with pytest.raises(CheckpointError, match="'ravlt_b_cascade_1x'; known names: ravlt_b_cascade_3x") as caught:
        find_released('ravlt_b_cascade_1x')
    known = str(caught.value).split('known names: ')[1].split(', ')
    assert sorted(known) == sorted(released_checkpoints())  # each once
