# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The command line of the swapping tool, as in the documentation."""

import re
import shlex

import pytest
from helpers.tool_runs import ROOT, in_this_process
from mmengine.config import Config


@pytest.mark.slow
def test_it_says_what_it_changed(tmp_path, capsys):
    pytest.importorskip('mmdet')
    page = (ROOT / 'README.md').read_text(encoding='utf-8')
    _, tool, *words, name = shlex.split(re.search(r'^python tools/swap_backbone.*dino-4scale.*', page, re.M)[0])
    out = tmp_path / 'made' / name
    in_this_process(ROOT / tool, *words, out)
    said = capsys.readouterr().out
    assert 'backbone: ResNet -> RAVLT tiny' in said and 'note: ' in said
    assert 'and predicted; every parameter of the backbone has a gradient' in said
    assert Config.fromfile(out).model.neck.in_channels == [128, 256, 512]
