# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Segmentation and classification on shapes: train, test and images, through these tools and upstream's."""

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from tool_runs import ROOT, TOOLS, in_one_process, python

pytestmark = pytest.mark.slow

# task: data set format, images, overrides for a quick run, those for a still shorter one, and what the quick run
# reaches on images it has not seen (by chance: 8 % of the images, an IoU of about 4): metric and its least value
TASKS = {
    'mmseg': (
        'ade',
        (200, 24),
        ['train_cfg.max_iters=100', 'train_cfg.val_interval=100', 'param_scheduler.1.end=100'],
        ['train_cfg.max_iters=2', 'train_cfg.val_interval=2', 'default_hooks.checkpoint.interval=2'],
        'mIoU',
        20,
    ),
    'mmpretrain': (
        'imagenet',
        (480, 96),
        ['train_cfg.max_epochs=5', 'train_cfg.val_interval=5'],
        ['train_cfg.max_epochs=1', 'train_cfg.val_interval=1'],
        'accuracy/top1',
        45,
    ),
}
SMALL = ['--size', 96, 96]
LOGS = ['default_hooks.logger.interval=1']
TENSORBOARD = ['visualizer.vis_backends.0.type=TensorboardVisBackend']


def losses(out: str) -> list[str]:
    return re.findall(r'  loss: ([\d.]+)', out)


def upstream_tool(task: str, name: str) -> Path:
    return Path(import_module(task).__file__).parent / '.mim' / 'tools' / name


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
    options = ['--cfg-options', *overrides, *LOGS, *(TENSORBOARD if find_spec('tensorboard') else [])]
    out = python(TOOLS / 'train.py', config, *common, *options, cwd=folder)
    return task, folder, config, out


@pytest.fixture(scope='module')
def afterwards(trained):
    """What these tools and upstream's printed that went on from there, by name, all in one process."""
    task, folder, config, _ = trained
    checkpoint = (folder / 'work' / 'last_checkpoint').read_text()
    dumped = next((folder / 'work').glob('*.py'))  # the config as it ran: the data set is found without --data-root
    shown = ['--data-root', folder / 'data', '--work-dir', 'tested', '--show-dir', 'shown']
    jobs = {
        'tested': [TOOLS / 'test.py', config, checkpoint, *shown],
        'upstream, trained': [
            *[upstream_tool(task, 'train.py'), dumped, '--work-dir', 'upstream_train'],
            *['--cfg-options', *TASKS[task][-3]],
        ],
        'upstream, tested': [upstream_tool(task, 'test.py'), dumped, checkpoint, '--work-dir', 'upstream'],
    }
    printed, errors = in_one_process({name: [[str(word) for word in job]] for name, job in jobs.items()}, folder)
    assert errors == dict.fromkeys(jobs, '')
    return printed


def test_learns_what_it_has_not_seen(trained):
    task, _, _, out = trained
    *_, name, least = TASKS[task]
    assert metric(out, name) > least


def test_tests_a_checkpoint_and_shows_pictures(trained, afterwards):
    task, folder, _, out = trained
    name = TASKS[task][-2]
    assert metric(afterwards['tested'], name) == pytest.approx(metric(out, name), abs=0.02)
    assert any(path.suffix in ('.png', '.jpg') for path in (folder / 'shown').rglob('*'))


def test_tensorboard_has_the_loss(trained):
    events = pytest.importorskip('tensorboard.backend.event_processing.event_accumulator')
    task, folder, _, out = trained
    (file,) = (folder / 'work').glob('*/vis_data/events.out.tfevents.*')
    written = events.EventAccumulator(str(file)).Reload()
    values = [scalar.value for scalar in written.Scalars('loss')]
    assert values == pytest.approx([float(loss) for loss in losses(out)], abs=1e-4)
    assert [scalar.step for scalar in written.Scalars('loss')] == list(range(1, len(values) + 1))


def test_upstream_tools_train(trained, afterwards):
    """With the same hooks, hence the same losses."""
    task, folder, _, out = trained
    upstream = afterwards['upstream, trained']
    found = losses(upstream)
    assert 2 <= len(found) < len(losses(out))
    assert found == losses(out)[: len(found)]
    assert metric(upstream, TASKS[task][-2]) >= 0
    assert Path(folder / 'upstream_train' / 'last_checkpoint').exists()


def test_upstream_tools_test_the_checkpoint(trained, afterwards):
    task, _, _, out = trained
    name = TASKS[task][-2]
    assert metric(afterwards['upstream, tested'], name) == pytest.approx(metric(out, name), abs=0.02)
