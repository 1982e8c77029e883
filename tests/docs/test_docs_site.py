# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Build the site without a warning, with one page per backbone and the reference."""

import re
import runpy
import subprocess
import sys

import pytest
from helpers.config_helpers import ROOT

pytest.importorskip('mkdocs')
pytest.importorskip('mkdocstrings')
pytest.importorskip('mkdocs_jupyter')


@pytest.mark.slow
def test_site_builds_without_warnings(tmp_path):
    command = [sys.executable, '-m', 'mkdocs', 'build', '--strict', '--site-dir', str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    page = (tmp_path / 'backbones' / 'RAVLT' / 'index.html').read_text(encoding='utf-8')
    assert 'ravlt_b_cascade_3x.py' in page and 'drop_path_rate' in page
    assert 'BackboneLayerDecayOptimWrapperConstructor' in (tmp_path / 'reference/engine/index.html').read_text('utf-8')
    # numbers and images of the notebook as run by this build
    page = (tmp_path / 'tutorial' / 'index.html').read_text(encoding='utf-8')
    assert 'backbone: ResNetV1c -&gt; RAVLT tiny' in page
    learned = float(re.search(r'mIoU on images that it was not trained on: ([\d.]+)', page)[1])
    assert learned > 60, learned  # all background gives 25
    assert len(re.findall(r'^stages\.\d\.\d  (?:rala|softmax) ', page, re.M)) == 5
    assert page.count('src="data:image/png;base64') == 5
    assert 'href="../configs/"' in page


def test_front_page_is_the_readme_with_links_from_docs():
    text = runpy.run_path(str(ROOT / 'docs' / 'site_pages.py'))['front_page']()
    links = re.findall(r'(?:\]\(|src=")(?!https?:)([^)"#]+)', text)
    assert 'get_started.md' in links and '../CONTRIBUTING.md' in links
    assert [link for link in links if not (ROOT / 'docs' / link).exists()] == []


def test_pages_of_backbones_hold_sizes_and_configs():
    pages = runpy.run_path(str(ROOT / 'docs' / 'site_pages.py'))
    text = pages['backbone_page']('LinearSwin', pages['backbones']()['LinearSwin'])
    assert '| `inline-tiny` | 96 192 384 768 | 2 2 6 2 | 3 6 12 24 | inline, inline, inline, softmax |' in text
    assert '| `configs/mmdet/flatten_swin_s_cascade_3x.py` | box AP' in text
    assert 'stage 1: 2 x focused<br>(linear)<br>96 channels, H/4 x W/4' in text
    assert all(pages['built_with'](model['Config']) for model in pages['models']())
