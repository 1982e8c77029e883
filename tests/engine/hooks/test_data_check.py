# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Processes and palettes of the hook; its checks: tests/engine/data."""

import pytest
from helpers.data_checks import build, coco_data, model, write_coco
from helpers.engine_toys import make_runner

from mmlinattn.engine import DataCheckHook, RunError
from mmlinattn.engine.hooks import data_check
from mmlinattn.engine.hooks.data_check import extend_palette


@pytest.mark.parametrize('part', [{}, dict(num_batch_per_epoch=1)], ids=['whole', 'part'])
def test_an_empty_data_set(tmp_path, monkeypatch, part):
    loader = dict(dataset=dict(type='ToyDataset', size=0), **part)
    runner = make_runner(tmp_path, [dict(type='DataCheckHook')], loader=loader)
    with pytest.raises(RunError, match='train_dataloader .ToyDataset, ann_file .* holds no image'):
        runner.train()
    monkeypatch.setattr(data_check, 'is_main_process', lambda: False)  # one process looks for all
    DataCheckHook().before_run(runner)
    with pytest.raises(ValueError, match="fault = 'no' has to be 'stop', 'warn' or 'skip'"):
        DataCheckHook(fault='no')


def test_more_classes_than_colours(look, tmp_path):
    names = tuple(f'kind {i}' for i in range(90))
    dataset = build('mmdet', dict(type='RepeatDataset', times=2, dataset=coco_data(write_coco(tmp_path, names), names)))
    assert look(model(bbox_head=90), train=[dataset], fault='skip') == ('', [])
    assert len(dataset.metainfo['palette']) == len(dataset.dataset.metainfo['palette']) == 90
    made = extend_palette(dict(classes=names, palette=((1, 2, 3),) * 2))['palette']
    assert len(made) == 90 and made[:2] == [(1, 2, 3)] * 2
    for palette in ('random', None, [], [(1, 2, 3)] * 91):
        assert extend_palette(dict(classes=names, palette=palette))['palette'] == palette
