# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The page on data of one's own, followed from the folder to a test, and the downstream example on the same data; with
the smallest backbone on a few images."""

import re
import subprocess
import sys

import pytest
from tool_runs import ROOT, TOOLS, in_one_process

SMALL = [
    'model.backbone.init_cfg=None',
    'model.backbone.arch=tiny',
    'model.neck.in_channels=[64,128,256,512]',
    'train_cfg.max_epochs=1',
    'train_dataloader.dataset.indices=2',
    'train_dataloader.dataset.pipeline.2.scale=(96,96)',
    'val_dataloader.dataset.pipeline.1.scale=(96,96)',
    'test_dataloader.dataset.pipeline.1.scale=(96,96)',
    'default_hooks.checkpoint.save_optimizer=False',
    'model.train_cfg.rpn_proposal.max_per_img=20',
    'model.test_cfg.rpn.max_per_img=20',
]
FRUIT = [f'{part}_dataloader.dataset.metainfo.classes=(disc,square)' for part in ('train', 'val', 'test')]


@pytest.mark.slow
def test_page_on_own_data(tmp_path):
    page = (ROOT / 'docs' / 'own_data.md').read_text(encoding='utf-8')
    commands = re.search(r'```shell\n(python tools/make_shapes_dataset.*?)```', page, re.S)[1]
    commands = commands.replace('python tools/', f'{sys.executable} {ROOT}/tools/')
    commands = commands.replace('--num-train 200', '--num-train 8').replace('--num-val 40', '--num-val 4')
    subprocess.run(['bash', '-euo', 'pipefail', '-c', commands], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / 'mine.py').write_text(re.search(r'```python\n(.*?)```', page, re.S)[1])
    train, test = str(TOOLS / 'train.py'), str(TOOLS / 'test.py')
    downstream = str(ROOT / 'docs' / 'examples' / 'downstream' / 'fruit_detector.py')
    jobs = dict(
        train=[[train, 'mine.py', '--cfg-options', 'load_from=None', *SMALL]],
        test=[[test, 'mine.py', 'work_dirs/mine/epoch_1.pth', '--cfg-options', *SMALL]],
        downstream=[[train, downstream, '--data-root', 'data/mine', '--cfg-options', *SMALL, *FRUIT]],
    )
    printed, errors = in_one_process(jobs, tmp_path)
    assert not any(errors.values()), ''.join(printed.values())[-6000:]
    assert 'coco/segm_mAP' in printed['test'] and 'coco/segm_mAP' in printed['downstream']
