# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What the page shows: numbers and maps of a click, what the model finds, another attention in a stage."""

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.structures import BaseDataElement, InstanceData, PixelData

from mmlinattn.utils.errors import RunError
from projects.attention_viewer import __main__ as app
from projects.attention_viewer.looking import COLUMNS, Looker, describe, in_words

CONFIGS = Path(__file__).resolve().parents[3] / 'configs'


def looker_of(task) -> Looker:
    pytest.importorskip(task)
    return Looker(Config.fromfile(CONFIGS / task / 'ravlt_shapes_quickstart.py'), 'none')


@pytest.fixture(scope='module')
def looker():
    return looker_of('mmpretrain')


def picture(height=90, width=140):
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_numbers_and_maps_of_a_click(looker):
    seen = looker.look(picture())
    assert [row[1] for row in seen.rows] == ['rala', 'rala', 'softmax', 'softmax', 'softmax']
    assert all(len(row) == len(COLUMNS) for row in seen.rows)
    assert re.match(r'(plain|striped) [a-z]+: 0\.\d\d, (plain|striped) ', seen.found)
    assert (seen.drawn == picture()).all()
    first, other = looker.maps(seen, 20, 20), looker.maps(seen, 120, 80)
    assert first.dtype == np.uint8 and first.shape == other.shape and (first != other).any()
    assert (looker.maps(seen, 20, 20, local=True) != first).any()
    assert looker.look(picture()) is seen  # remembered
    with pytest.raises(RunError, match='lie on no map'):
        looker.maps(seen._replace(blocks=[]), 20, 20)


@pytest.mark.parametrize('task', ['mmdet', 'mmseg'])
def test_what_a_dense_model_finds_is_drawn(task):
    seen = looker_of(task).look(picture())
    assert seen.drawn.shape == (90, 140, 3) and seen.drawn.dtype == np.uint8
    assert re.match(r'\d+ found' if task == 'mmdet' else r'[\w ]+: \d+% of the pixels', seen.found)
    assert task == 'mmdet' or (seen.drawn != picture()).any()


def test_findings_in_words():
    names = ['disc', 'grüße', 'c']
    boxes, scores = torch.rand(3, 4), torch.tensor([0.9, 0.4, 0.1])
    found = InstanceData(bboxes=boxes, labels=torch.tensor([1, 0, 1]), scores=scores)
    words = in_words(BaseDataElement(pred_instances=found), names)
    assert words == '2 found with a score of 0.3 or more. grüße: 0.90, disc: 0.40'
    labels = torch.zeros(1, 60, 80, dtype=torch.long)
    labels[..., 20:] = 2
    words = in_words(BaseDataElement(pred_sem_seg=PixelData(data=labels)), names)
    assert words == 'c: 75% of the pixels, disc: 25% of the pixels'
    for scores, expected in (
        ([0.2, 0.8], 'grüße: 0.80, disc: 0.20'),
        ([0.1, 0.4, 0.2, 0.05], 'grüße: 0.40, c: 0.20, disc: 0.10'),
    ):
        assert in_words(BaseDataElement(pred_score=torch.tensor(scores)), names) == expected


def test_switching_the_attention_of_a_stage(looker):
    before = looker.look(picture())
    switched = looker.look(picture(), *describe('stage 1', 'softmax'))
    assert [row[1] for row in switched.rows] == ['softmax', 'rala', 'softmax', 'softmax', 'softmax']
    for missing in ((None, 'softmax'), ('stage 1', None)):
        assert looker.look(picture(), *describe(*missing)).rows == before.rows


def test_large_pictures_are_made_smaller_and_clicks_follow(looker):
    seen = looker.look(picture(900, 2048))
    assert seen.scale == (0.5, 0.5) and seen.drawn.shape[1] == 1024
    assert looker.maps(seen, 2040, 890).any()
    with pytest.raises(RunError, match='outside of picture'):
        looker.maps(seen, 2400, 10)
    tilted = looker.look(picture(420, 3000))  # 143.36 pixels high for the network, of which there are 143
    assert looker.maps(tilted, 2999, 419).any()


@pytest.mark.parametrize('shape', [(8, 20000, 3), (20000, 8, 3), (4, 100, 3), (64, 64), (64, 64, 4)])
def test_what_is_no_picture(looker, shape):
    with pytest.raises(RunError, match='too narrow|in colour and at least 8 pixels'):
        looker.look(np.zeros(shape, np.uint8))


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_is_served_to_this_machine_only(monkeypatch):
    monkeypatch.setitem(sys.modules, 'gradio', ModuleType('gradio'))
    launched = []
    monkeypatch.setattr(
        app, 'build_page', lambda *_: SimpleNamespace(launch=lambda **options: launched.append(options))
    )
    config = str(CONFIGS / 'mmpretrain' / 'ravlt_shapes_quickstart.py')
    monkeypatch.setattr(sys, 'argv', ['attention_viewer', config, 'none'])
    app.main()
    assert launched[0]['server_name'] == '127.0.0.1' and launched[0]['share'] is False
