# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Attention maps of a click, and access to the page."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from mmengine.config import Config

from mmlinattn.utils.errors import RunError
from projects.attention_viewer import __main__ as app
from projects.attention_viewer.viewer import AttentionViewer

CONFIG = Path(__file__).resolve().parents[3] / 'configs' / 'mmpretrain' / 'ravlt_shapes_quickstart.py'


@pytest.fixture(scope='module')
def viewer():
    pytest.importorskip('mmpretrain')
    return AttentionViewer(Config.fromfile(CONFIG), 'none')


def picture(height=90, width=140):
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_maps_of_a_click(viewer):
    forward = viewer.run(picture())
    assert [block.mixer_name for block in forward.blocks] == ['rala', 'rala', 'softmax', 'softmax', 'softmax']
    first, other = viewer.maps(forward, 20, 20), viewer.maps(forward, 120, 80)
    assert first.dtype == np.uint8 and first.shape == other.shape and (first != other).any()
    assert (viewer.maps(forward, 20, 20, local=True) != first).any()
    seen = []
    image = SimpleNamespace(to_shown=lambda *pixel: seen.append(pixel) or pixel)
    with pytest.raises(RunError, match='keys of this model have no grid'):
        viewer.maps(forward._replace(picture=image, scale=(0.5, 0.25), blocks=[]), 20, 80)
    assert seen == [(10, 20)]


def test_large_pictures_are_made_smaller_and_clicks_follow(viewer):
    forward = viewer.run(picture(900, 2048))
    assert forward.scale == (0.5, 0.5) and viewer.maps(forward, 2040, 890).any()
    with pytest.raises(RunError, match='outside of picture'):
        viewer.maps(forward, 2400, 10)


@pytest.mark.parametrize('shape', [(8, 20000, 3), (4, 100, 3), (64, 64)])
def test_unusable_pictures_are_refused(viewer, shape):
    with pytest.raises(RunError, match=r'too narrow|expected \(H, W, 3\) with at least 8 pixels'):
        viewer.run(np.zeros(shape, np.uint8))


def test_the_page_is_served_to_this_machine_only(monkeypatch):
    monkeypatch.setitem(sys.modules, 'gradio', ModuleType('gradio'))
    launched = []
    monkeypatch.setattr(
        app, 'build_page', lambda *_: SimpleNamespace(launch=lambda **options: launched.append(options))
    )
    monkeypatch.setattr(sys, 'argv', ['attention_viewer', str(CONFIG), 'none'])
    app.main()
    assert launched[0]['server_name'] == '127.0.0.1' and launched[0]['share'] is False
