# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The command line of the swapping tool, as the documentation has it."""

import re
import shlex
import subprocess
import sys

import pytest
from mmengine.config import Config
from tool_runs import ROOT


@pytest.mark.slow
def test_it_says_what_it_changed(tmp_path):
    pytest.importorskip('mmdet')
    page = (ROOT / 'docs' / 'get_started.md').read_text(encoding='utf-8')
    _, tool, *words, name = shlex.split(re.search(r'^python tools/swap_backbone.*dino-4scale.*', page, re.M)[0])
    out = tmp_path / 'made' / name
    done = subprocess.run([sys.executable, ROOT / tool, *words, out], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert 'backbone: ResNet -> RAVLT tiny' in done.stdout and 'note: ' in done.stdout
    assert 'and predicted; every parameter of the backbone has a gradient' in done.stdout
    assert Config.fromfile(out).model.neck.in_channels == [128, 256, 512]
