# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The page of tools/analysis_tools/attention_app.py: what it shows, and the page itself in a browser where one is."""

import contextlib
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
from config_helpers import ROOT, load

from mmlinattn.engine import RunError

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
    assert re.match(r'class \d+: 0\.\d\d, class', seen.found) and seen.drawn.shape == (90, 140, 3)
    first, other = looker.maps(seen, 20, 20), looker.maps(seen, 120, 80)
    assert first.dtype == np.uint8 and first.shape == other.shape and (first != other).any()
    assert (looker.maps(seen, 20, 20, local=True) != first).any()
    assert looker.look(picture()) is seen  # remembered


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
    assert seen.scale == LONGEST / 2048 and seen.drawn.shape[1] == LONGEST
    assert looker.maps(seen, 2040, 890).any()
    with pytest.raises(RunError, match='outside of picture'):
        looker.maps(seen, 2400, 10)
    for i in range(KEPT + 1):
        looker.look(picture(70 + i, 80))
    assert len(looker.seen) == KEPT


@pytest.mark.parametrize('shape', [(4, 100, 3), (64, 64), (64, 64, 4)])
def test_what_is_no_picture(looker, shape):
    with pytest.raises(RunError, match='has to be in colour and at least 8 pixels'):
        looker.look(np.zeros(shape, np.uint8))


def test_without_gradio_it_says_how_to_get_it():
    if importlib.util.find_spec('gradio'):
        pytest.skip('gradio is installed')
    command = [sys.executable, str(TOOL), str(ROOT / 'configs' / f'{CONFIG}.py'), 'none']
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith('error: the page needs gradio: pip install "mmlinattn[app]"')


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
        assert 'class' in page.input_value('#found textarea')
        started = time.monotonic()
        page.locator('img').first.click(position=dict(x=40, y=40))
        page.wait_for_function('old => document.querySelector("#maps img").src != old', arg=first, timeout=60_000)
        print(f'a click took {time.monotonic() - started:.1f} s')
        for control, choice in (('#stage', 'stage 1'), ('#mixer', 'softmax')):
            page.click(f'{control} input')
            page.get_by_role('option', name=choice, exact=True).click()
        page.wait_for_selector('#switched img', timeout=60_000)
        text = page.inner_text('body')
        assert 'rala' in text and 'effective ranks' in text
        browser.close()
