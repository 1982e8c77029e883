# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The command line of the swapping tool."""

import subprocess
import sys

import pytest
from config_helpers import ROOT
from mmengine.config import Config

TOOL = [sys.executable, str(ROOT / 'tools' / 'swap_backbone.py')]


def run(*arguments):
    return subprocess.run([*TOOL, *map(str, arguments)], capture_output=True, text=True)


@pytest.mark.slow
def test_it_says_what_it_changed(tmp_path):
    pytest.importorskip('mmpretrain')
    upstream, out = tmp_path / 'mine.py', tmp_path / 'made' / 'swapped.py'
    upstream.write_text("_base_ = 'mmpretrain::resnet/resnet18_8xb16_cifar10.py'\n")
    done = run(upstream, 'ravlt_t', '--out', out)
    assert done.returncode == 0, done.stderr[-2000:]
    assert 'backbone: ResNet_CIFAR -> RAVLT tiny' in done.stdout and 'note: ' in done.stdout
    assert 'and predicted; every parameter of the backbone has a gradient' in done.stdout
    assert Config.fromfile(out).model.head.in_channels == 512
