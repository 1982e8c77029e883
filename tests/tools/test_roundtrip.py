# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Train, checkpoint, resume and test a small detector through the command lines, as users do."""

import os
import pickle
import signal
import sys
from pathlib import Path

import pytest
from helpers.tool_runs import HELD, QUICK, ROOT, TOOLS, in_one_process, losses, python, start, wait_for

from mmlinattn.tooling.datasets import DatasetSpec, write_dataset

mmdet = pytest.importorskip('mmdet')
pytestmark = pytest.mark.slow

UPSTREAM_TOOLS = Path(mmdet.__file__).parent / '.mim' / 'tools'
NUM_ITERS = 9  # 3 epochs of 3 batches
EVALUATOR = """
val_evaluator = dict(ann_file='shapes/annotations/instances_val2017.json')
test_evaluator = val_evaluator
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('roundtrip')
    write_dataset(folder / 'shapes', DatasetSpec('coco', 12, 4, size=(96, 96)))
    (folder / 'config.py').write_text(HELD.format(base=QUICK['mmdet'], batch=4) + EVALUATOR)
    return folder


@pytest.fixture(scope='module')
def trained(folder):
    """Run without interruption, as the reference of the other runs."""
    path = os.pathsep.join([str(ROOT), str(ROOT / 'tests')])
    out = python(TOOLS / 'train.py', 'config.py', '--work-dir', 'whole', '--amp', cwd=folder, PYTHONPATH=path)
    assert 'notice: no accelerator: mixed precision is off' in out
    assert len(losses(folder / 'whole')) == NUM_ITERS
    return folder / 'whole'


@pytest.mark.roundtrip
@pytest.mark.skipif(os.name != 'posix', reason='kills a process group')
def test_killed_training_resumes_with_the_same_losses(folder, trained):
    cut = folder / 'cut'
    process = start(sys.executable, TOOLS / 'train.py', 'config.py', '--work-dir', 'cut', cwd=folder, HOLD=5)
    wait_for(process, lambda: len(losses(cut)) == 4)  # in the middle of the second epoch
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert (cut / 'last_checkpoint').read_text().endswith('epoch_1.pth')

    out = python(TOOLS / 'train.py', 'config.py', '--work-dir', 'cut', '--resume', cwd=folder)
    assert 'resumed epoch: 1, iter: 3' in out
    assert losses(cut) == losses(trained)


@pytest.mark.roundtrip
def test_tests_a_checkpoint(folder, trained):
    checkpoint = trained / 'epoch_3.pth'
    args = ['config.py', checkpoint, '--show-dir', 'shown', '--interval', 2, '--work-dir', 'tested']
    args += ['--cfg-options', 'test_dataloader.batch_size=3']
    out = python(TOOLS / 'test.py', *args, '--out', 'predictions.pkl', cwd=folder)
    assert f'wrote {folder / "shown"}' in out
    images = sorted(path.name for path in (folder / 'shapes' / 'val2017').iterdir())
    assert sorted(path.name for path in (folder / 'shown').iterdir()) == images[::2]
    predictions = pickle.loads((folder / 'predictions.pkl').read_bytes())
    assert len(predictions) == 4
    assert {'bboxes', 'scores', 'labels', 'masks'} <= set(predictions[0]['pred_instances'])


@pytest.mark.skipif(not UPSTREAM_TOOLS.is_dir(), reason='mmdet is installed without its tools')
def test_through_the_tools_of_mmdet(folder, trained):
    train = [str(UPSTREAM_TOOLS / 'train.py'), 'config.py', '--work-dir', 'upstream']
    test = [str(UPSTREAM_TOOLS / 'test.py'), 'config.py', str(trained / 'epoch_3.pth')]
    jobs = dict(
        first=[[*train, '--cfg-options', 'train_cfg.max_epochs=1']],
        resumed=[[*train, '--resume']],
        tested=[[*test, '--work-dir', 'upstream_tested']],
    )
    out, errors = in_one_process(jobs, folder)
    assert errors == dict.fromkeys(jobs, '')
    assert 'resumed epoch: 1, iter: 3' in out['resumed']
    # the scheduler of the first part was built for one epoch: losses differ, so only their number counts
    assert sorted(losses(folder / 'upstream')) == list(range(1, NUM_ITERS + 1))
    assert 'Load checkpoint from' in out['tested'] and 'Epoch(test) [1/1]' in out['tested']
