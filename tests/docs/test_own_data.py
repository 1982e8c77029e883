# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The page on data of one's own, followed from the folder to a test, with the smallest backbone on a few images."""

import re
import subprocess
import sys

import pytest
from config_helpers import ROOT

SMALL = [
    'load_from=None',
    'model.backbone.init_cfg=None',
    'model.backbone.arch=tiny',
    'model.neck.in_channels=[64,128,256,512]',
    'train_cfg.max_epochs=1',
    'train_dataloader.dataset.indices=2',
    'train_dataloader.dataset.pipeline.2.scale=(96,96)',
    'val_dataloader.dataset.pipeline.1.scale=(96,96)',
    'test_dataloader.dataset.pipeline.1.scale=(96,96)',
]


def run_tool(folder, name: str, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / 'tools' / name), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.slow
def test_page_on_own_data(tmp_path):
    page = (ROOT / 'docs' / 'own_data.md').read_text(encoding='utf-8')
    commands = re.search(r'```shell\n(python tools/make_shapes_dataset.*?)```', page, re.S)[1]
    commands = commands.replace('python tools/', f'{sys.executable} {ROOT}/tools/')
    commands = commands.replace('--num-train 200', '--num-train 8').replace('--num-val 40', '--num-val 4')
    subprocess.run(['bash', '-euo', 'pipefail', '-c', commands], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / 'mine.py').write_text(re.search(r'```python\n(.*?)```', page, re.S)[1])
    run_tool(tmp_path, 'train.py', 'mine.py', '--cfg-options', *SMALL)
    tested = run_tool(tmp_path, 'test.py', 'mine.py', 'work_dirs/mine/epoch_1.pth', '--cfg-options', *SMALL[2:])
    assert 'coco/segm_mAP' in tested
