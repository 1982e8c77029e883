# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Segmentation and classification on shapes: train, test and pictures, through these tools and upstream's."""

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_cli_roundtrip import ROOT, TOOLS, python

pytestmark = pytest.mark.slow

# task: data set format, pictures, overrides for a quick run, metric
TASKS = {
    'mmseg': (
        'ade',
        (24, 8),
        ['train_cfg.max_iters=12', 'train_cfg.val_interval=12', 'default_hooks.checkpoint.interval=6'],
        'mIoU',
    ),
    'mmpretrain': ('imagenet', (96, 48), ['train_cfg.max_epochs=2', 'train_cfg.val_interval=1'], 'accuracy/top1'),
}
SMALL = ['--size', 96, 96]


def metric(out: str, name: str) -> float:
    return float(re.findall(rf'{name}: ([\d.]+)', out)[-1])


@pytest.fixture(scope='module', params=sorted(TASKS))
def trained(request, tmp_path_factory):
    """A task, its folder with a data set and a trained model, and what training printed."""
    task = request.param
    if find_spec(task) is None:
        pytest.skip(f'needs {task}')
    form, (num_train, num_val), overrides, *_ = TASKS[task]
    folder = tmp_path_factory.mktemp(task)
    pictures = ['--num-train', num_train, '--num-val', num_val]
    python(TOOLS / 'make_shapes_dataset.py', folder / 'data', '--format', form, *pictures, *SMALL, cwd=folder)
    config = ROOT / 'configs' / task / 'ravlt_shapes_quickstart.py'
    common = ['--data-root', folder / 'data', '--work-dir', 'work']
    options = ['--cfg-options', *overrides]
    out = python(TOOLS / 'train.py', config, *common, *options, cwd=folder)
    return task, folder, config, out


def test_tests_a_checkpoint_and_shows_pictures(trained):
    task, folder, config, out = trained
    checkpoint = (folder / 'work' / 'last_checkpoint').read_text()
    args = ['--data-root', folder / 'data', '--work-dir', 'tested', '--show-dir', 'shown']
    tested = python(TOOLS / 'test.py', config, checkpoint, *args, cwd=folder)
    name = TASKS[task][-1]
    assert metric(tested, name) == pytest.approx(metric(out, name), abs=0.02)
    assert any(path.suffix in ('.png', '.jpg') for path in (folder / 'shown').rglob('*'))


def test_upstream_tools_test_the_checkpoint(trained):
    task, folder, _, out = trained
    upstream = Path(import_module(task).__file__).parent / '.mim' / 'tools' / 'test.py'
    # the config as it ran, so that the data set is found without --data-root
    dumped = next((folder / 'work').glob('*.py'))
    checkpoint = (folder / 'work' / 'last_checkpoint').read_text()
    tested = python(upstream, dumped, checkpoint, '--work-dir', 'upstream', cwd=folder)
    name = TASKS[task][-1]
    assert metric(tested, name) == pytest.approx(metric(out, name), abs=0.02)
