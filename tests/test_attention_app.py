# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The page of tools/analysis_tools/attention_app.py: what it shows, and the page itself in a browser where one is."""

import contextlib
import copy
import importlib.util
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import cv2
import numpy as np
import pytest
import torch
from config_helpers import ROOT, load
from mmengine.structures import BaseDataElement, InstanceData, PixelData
from torch import nn

from mmlinattn.apis.class_names import class_names
from mmlinattn.datasets.shapes import COCO_CLASSES, IMAGENET_CLASSES
from mmlinattn.utils.errors import RunError

pytest.importorskip('mmpretrain')
TOOL = ROOT / 'tools' / 'analysis_tools' / 'attention_app.py'
CONFIG = 'mmpretrain/ravlt_shapes_quickstart'
BROWSER = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)


@pytest.fixture(scope='module')
def looker():
    from mmlinattn.analysis.looking import Looker

    return Looker(load(CONFIG), 'none')


def picture(height=90, width=140):
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_numbers_and_maps_of_a_click(looker):
    from mmlinattn.analysis.looking import COLUMNS

    seen = looker.look(picture())
    assert [row[1] for row in seen.rows] == ['rala', 'rala', 'softmax', 'softmax', 'softmax']
    assert all(len(row) == len(COLUMNS) for row in seen.rows)
    assert re.match(r'(plain|striped) [a-z]+: 0\.\d\d, (plain|striped) ', seen.found)
    assert seen.drawn.shape == (90, 140, 3)
    first, other = looker.maps(seen, 20, 20), looker.maps(seen, 120, 80)
    assert first.dtype == np.uint8 and first.shape == other.shape and (first != other).any()
    assert (looker.maps(seen, 20, 20, local=True) != first).any()
    assert looker.look(picture()) is seen  # remembered


class Says(nn.Module):
    """A model that finds what it is told to."""

    def __init__(self, sample, classes) -> None:
        super().__init__()
        self.weight, self.sample, self.dataset_meta = nn.Parameter(torch.zeros(1)), sample, dict(classes=classes)

    def forward(self, inputs, samples, mode):
        return [self.sample]


def said(sample, classes):
    from mmlinattn.analysis.loading import Picture
    from mmlinattn.analysis.looking import predict

    image = picture(60, 80)
    words, drawn = predict(Says(sample, classes), Picture('', image, torch.zeros(1), None, (), (80, 60)), image)
    assert drawn.shape == image.shape and (drawn != image).any()
    return words


def test_detections_have_the_names_of_their_classes():
    boxes = torch.tensor([[5.0, 5.0, 30.0, 30.0], [40.0, 30.0, 79.0, 59.0], [0.0, 0.0, 9.0, 9.0]])
    found = InstanceData(bboxes=boxes, labels=torch.tensor([1, 0, 1]), scores=torch.tensor([0.9, 0.4, 0.1]))
    sample = BaseDataElement(pred_instances=found)
    assert said(sample, ['disc', 'grüße']) == '2 found with a score of 0.3 or more. grüße: 0.90, disc: 0.40'
    assert said(sample, None).endswith('class 1: 0.90, class 0: 0.40')


def test_segments_have_the_names_of_their_classes():
    labels = torch.zeros(1, 60, 80, dtype=torch.long)
    labels[..., 20:] = 2
    sample = BaseDataElement(pred_sem_seg=PixelData(data=labels))
    assert said(sample, ['sky', 'sea', 'sand']) == 'sand: 75% of the pixels, sky: 25% of the pixels'


@pytest.mark.parametrize(
    ('scores', 'expected'),
    [
        ([0.2, 0.8], 'b: 0.80, a: 0.20'),
        ([0.1, 0.4, 0.2, 0.0, 0.3], 'b: 0.40, e: 0.30, c: 0.20'),
    ],
)
def test_labels_are_the_three_surest_or_all_there_are(scores, expected):
    from mmlinattn.analysis.loading import Picture
    from mmlinattn.analysis.looking import predict

    image = picture(60, 80)
    model = Says(BaseDataElement(pred_score=torch.tensor(scores)), tuple('abcde'))
    words, drawn = predict(model, Picture('', image, torch.zeros(1), None, (), (80, 60)), image)
    assert words == expected and (drawn == image).all()


@pytest.mark.parametrize(
    ('meta', 'expected'),
    [
        (dict(dataset_meta=dict(classes=tuple('abcdef'))), list('abcdef')),  # the checkpoint's own come first
        (dict(dataset_meta=dict(CLASSES=tuple('abcdef'))), list('abcdef')),
        (dict(CLASSES=tuple('abcdef')), list('abcdef')),  # MMDetection 2.x
        (dict(dataset_meta=dict(classes=tuple('abc'))), None),  # of another head: those of the config
        (dict(dataset_meta=None), None),
        (None, None),
    ],
)
def test_where_class_names_come_from(meta, expected):
    pytest.importorskip('mmdet')
    cfg = copy.deepcopy(load('mmdet/ravlt_shapes_quickstart'))
    assert class_names(cfg, meta) == (expected or list(COCO_CLASSES))
    del cfg.test_dataloader.dataset['metainfo']
    assert class_names(cfg, meta) == expected  # COCO's 80 names are not of these six
    cfg.model.roi_head.bbox_head.num_classes = 80
    assert class_names(cfg)[:2] == ['person', 'bicycle']


def test_the_model_keeps_the_names_of_its_checkpoint(tmp_path):
    from mmlinattn.analysis.loading import load_model

    cfg = load(CONFIG)
    model = load_model(cfg, 'none')
    assert model.dataset_meta['classes'] == list(IMAGENET_CLASSES)
    names = tuple(f'name {i}' for i in range(12))
    torch.save(dict(state_dict=model.state_dict(), meta=dict(dataset_meta=dict(classes=names))), tmp_path / 'own.pth')
    assert load_model(cfg, str(tmp_path / 'own.pth')).dataset_meta['classes'] == list(names)


@pytest.mark.parametrize(
    'changed',
    [dict(type='NoSuchBackbone'), dict(arch='no such size'), dict(no_such_argument=1)],
    ids=['KeyError', 'ValueError', 'TypeError'],
)
def test_a_model_that_cannot_be_built_is_said_in_one_error(changed):
    from mmlinattn.analysis.loading import load_model

    with pytest.raises(RunError, match='the model of the config cannot be built: .*[Nn]o[_ ]?[Ss]uch'):
        load_model(load(CONFIG), 'none', backbone=changed)


def test_switching_the_attention_of_a_stage(looker):
    from mmlinattn.analysis.looking import describe

    before = looker.look(picture())
    switched = looker.look(picture(), *describe('stage 1', 'softmax'))
    assert [row[1] for row in switched.rows] == ['softmax', 'rala', 'softmax', 'softmax', 'softmax']
    assert [row[1] for row in before.rows][0] == 'rala'
    assert looker.look(picture(), *describe(None, 'softmax')).rows == before.rows
    assert looker.look(picture(), *describe('stage 1', None)).rows == before.rows
    assert len(looker.models) == 2


def test_large_pictures_are_made_smaller_and_clicks_follow(looker):
    from mmlinattn.analysis.looking import KEPT, LONGEST

    seen = looker.look(picture(900, 2048))
    assert seen.scale == (LONGEST / 2048, LONGEST / 2048) and seen.drawn.shape[1] == LONGEST
    assert looker.maps(seen, 2040, 890).any()
    with pytest.raises(RunError, match='outside of picture'):
        looker.maps(seen, 2400, 10)
    tilted = looker.look(picture(420, 3000))  # 143.36 pixels high for the network, of which there are 143
    assert looker.maps(tilted, 2999, 419).any()
    for i in range(KEPT + 1):
        looker.look(picture(70 + i, 80))
    assert len(looker.seen) == KEPT


@pytest.mark.parametrize('shape', [(8, 20000, 3), (20000, 8, 3)])
def test_pictures_of_which_nothing_would_be_left_are_refused(looker, shape):
    with pytest.raises(RunError, match='too narrow'):
        looker.look(np.zeros(shape, np.uint8))


@pytest.mark.parametrize('shape', [(4, 100, 3), (64, 64), (64, 64, 4)])
def test_what_is_no_picture(looker, shape):
    with pytest.raises(RunError, match='has to be in colour and at least 8 pixels'):
        looker.look(np.zeros(shape, np.uint8))


@contextlib.contextmanager
def served():
    """The page on a free port, in a process of its own."""
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(TOOL), str(ROOT / 'configs' / f'{CONFIG}.py'), 'none', '--port', str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    address = f'http://127.0.0.1:{port}'
    try:
        for _ in range(240):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(address, timeout=2).read()
                break
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec('gradio'), reason='gradio is not installed')
@pytest.mark.skipif(not importlib.util.find_spec('playwright'), reason='playwright is not installed')
@pytest.mark.skipif(not BROWSER, reason='no Chromium is installed')
def test_clicking_in_a_browser(tmp_path):
    """Upload, click, switch the attention of a stage."""
    from playwright.sync_api import sync_playwright

    photo = tmp_path / 'photo.png'
    cv2.imwrite(str(photo), np.kron(picture(12, 18), np.ones((20, 20, 1), np.uint8)))
    with served() as address, sync_playwright() as play:
        browser = play.chromium.launch(executable_path=BROWSER, args=['--no-sandbox'])
        page = browser.new_page(viewport=dict(width=1300, height=1500))
        page.goto(address)
        page.set_input_files('input[type=file]', str(photo))
        page.wait_for_selector('#maps img', timeout=60_000)
        first = page.get_attribute('#maps img', 'src')
        assert re.match('plain|striped', page.input_value('#found textarea'))
        started = time.monotonic()
        corner = page.locator('img').first.bounding_box()  # gradio's own layer over the picture takes the click
        page.mouse.click(corner['x'] + 40, corner['y'] + 40)
        page.wait_for_function('old => document.querySelector("#maps img").src != old', arg=first, timeout=60_000)
        print(f'a click took {time.monotonic() - started:.1f} s')
        for control, choice in (('#stage', 'stage 1'), ('#mixer', 'softmax')):
            page.click(f'{control} input')
            page.get_by_role('option', name=choice, exact=True).click()
        page.wait_for_selector('#switched img', timeout=60_000)
        text = page.inner_text('body')
        assert 'rala' in text and 'effective ranks' in text
        browser.close()
