# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Train small models of the three tasks for some minutes under random faults, and compare with undisturbed runs.

    python -m projects.sweeps.soak --minutes 30 --out soak

Each round trains one model to its end through ``tools/train.py``. On the way the process is killed, terminated or
interrupted at a random iteration, finds no room for a checkpoint, its last checkpoint cut in half, or an image that
cannot be read. Every end has to be the one that the documentation promises (exit status, one line), and at the end of a
round the loss of every iteration has to be that of the undisturbed run, bit by bit. Not a test: it takes as long as it
is let, and is for machines that have nothing else to do. Exit status 1 where anything was otherwise.
"""

import argparse
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Optional

from mmlinattn.datasets import DatasetSpec, write_dataset

ROOT = Path(__file__).resolve().parents[2]

TASKS = dict(mmdet='coco', mmseg='ade', mmpretrain='imagenet')
SIGNALS = dict(SIGKILL=(-9,), SIGTERM=(143,), SIGINT=(130,))
FAULTS = (*SIGNALS, 'full disk', 'truncated checkpoint', 'unreadable image')
CONFIG = """
_base_ = {base!r}
model = dict(backbone=dict(arch=dict(embed_dims=(16, 32, 32, 32), depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 2))))
{widths}
train_cfg = dict({loop})
train_dataloader = dict(batch_size=4, num_workers=2)
default_hooks = dict(logger=dict(interval=1), checkpoint=dict({interval}, max_keep_ckpts=2))
log_processor = dict(window_size=1)
"""
EPOCHS = ('max_epochs=4, val_interval=4', 'interval=1')  # of 6 batches
ITERATIONS = ('max_iters=24, val_interval=24', 'interval=6')
WIDTHS = dict(
    mmdet='model.update(neck=dict(in_channels=[32, 32, 32]))',
    mmseg='model.update(neck=dict(in_channels=[16, 32, 32, 32]))',
    mmpretrain='model.update(neck=dict(in_channels=32))',
)


class Wrong(Exception):
    """The run did something else than is promised."""


def logged(work_dir: Path) -> list[tuple[int, float]]:
    """Iteration and loss of all runs in a work dir, oldest first; those done again are there again."""
    found = []
    for log in sorted(work_dir.glob('*/vis_data/scalars.json')):
        for line in log.read_text().splitlines():
            with suppress(ValueError):  # the line at which the process was killed
                record = json.loads(line)
                found += [(record['step'], record['loss'])] if 'loss' in record else []
    return found


class Task:
    """A data set, a config, and what the undisturbed run gives."""

    def __init__(self, scope: str, folder: Path):
        self.scope, self.folder = scope, folder
        write_dataset(str(folder / 'data'), DatasetSpec(TASKS[scope], 24, 4, size=(64, 64)))
        loop, interval = ITERATIONS if scope == 'mmseg' else EPOCHS
        base = str(ROOT / 'configs' / scope / 'ravlt_shapes_quickstart.py')
        text = CONFIG.format(base=base, widths=WIDTHS[scope], loop=loop, interval=interval)
        (folder / 'config.py').write_text(text)
        status, output = self.finish(self.start(folder / 'undisturbed'))
        self.losses = dict(logged(folder / 'undisturbed'))
        self.checkpoint_size = max((path.stat().st_size for path in folder.glob('undisturbed/*.pth')), default=0)
        if status != 0 or len(self.losses) != 24:
            raise SystemExit(f'{scope}: the undisturbed run ended with {status}:\n{output[-3000:]}')

    def start(self, work_dir: Path, *arguments: str, file_limit: Optional[int] = None) -> subprocess.Popen:
        """Start a training in a process group of its own, its output going to a file."""

        def prepare():
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if file_limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))

        command = [sys.executable, str(ROOT / 'tools' / 'train.py'), str(self.folder / 'config.py')]
        command += ['--data-root', str(self.folder / 'data'), '--work-dir', str(work_dir), '--no-validate', *arguments]
        self.output = self.folder / 'output.txt'
        with open(self.output, 'w') as stream:
            return subprocess.Popen(
                command,
                stdout=stream,
                stderr=stream,
                env=dict(os.environ, OMP_NUM_THREADS='1', CUDA_VISIBLE_DEVICES=''),
                start_new_session=True,
                preexec_fn=prepare,
            )

    def finish(self, process: subprocess.Popen) -> tuple[int, str]:
        """Exit status and output."""
        status = process.wait(timeout=600)
        return status, self.output.read_text(errors='replace')


class Round:
    """One model, trained to its end."""

    def __init__(self, task: Task, chance: random.Random, counts: Counter):
        self.task, self.chance, self.counts = task, chance, counts
        self.work_dir = task.folder / 'disturbed'
        shutil.rmtree(self.work_dir, ignore_errors=True)
        self.resume = ['--resume']
        self.is_done = False

    def run(self, num_faults: int) -> None:
        """Disturb it a number of times, let it end, compare."""
        for fault in self.chance.choices(FAULTS, k=num_faults):
            if self.is_done:
                break
            if fault in SIGNALS:
                self.send(fault)
            else:
                getattr(self, fault.replace(' ', '_'))()
        while not self.is_done:
            self.expect(self.task.start(self.work_dir, *self.resume), {0}, 'the rest')
            self.resume = ['--resume']
        if dict(logged(self.work_dir)) != self.task.losses:
            raise Wrong('the losses differ from those of the undisturbed run')
        self.counts['rounds with equal losses'] += 1

    def last(self) -> Optional[Path]:
        pointer = self.work_dir / 'last_checkpoint'
        return Path(pointer.read_text()) if pointer.exists() else None

    def expect(self, process, statuses, what: str, line: str = '') -> None:
        status, output = self.task.finish(process)
        last = output.strip().splitlines()[-1] if output.strip() else ''
        # killed processes leave workers behind whose connections break; what MMCV raises of an image is left as it is
        is_loud = 'Traceback' in output and status != -9 and what != 'unreadable image'
        if status not in statuses or is_loud or line not in last:
            raise Wrong(
                f'{what}: status {status} where {sorted(statuses)} was due, last line {last!r}\n{output[-3000:]}'
            )
        self.is_done = status == 0
        self.counts[what] += 1

    def send(self, name: str) -> None:
        """A signal at a random iteration, to the process or, as terminals and Slurm do, to all of its group."""
        process = self.task.start(self.work_dir, *self.resume)
        last = len(logged(self.work_dir)) + self.chance.randint(1, 10)
        while process.poll() is None and len(logged(self.work_dir)) < last:
            time.sleep(0.02)
        if process.poll() is None:
            (os.killpg if self.chance.random() < 0.5 else os.kill)(process.pid, getattr(signal, name))
        # a signal after the last iteration may come too late to end anything
        line = 'interrupted' if name == 'SIGINT' and process.wait(timeout=600) != 0 else ''
        self.expect(process, {0, *SIGNALS[name]}, name, line)
        self.resume = ['--resume']

    def full_disk(self) -> None:
        """No file may grow to the size of a checkpoint; logs, and what workers hand over in files, are smaller."""
        process = self.task.start(self.work_dir, *self.resume, file_limit=self.task.checkpoint_size // 2)
        self.expect(process, {1}, 'full disk', 'could not be written')

    def truncated_checkpoint(self) -> None:
        """Resuming refuses half a checkpoint; the one before, or the beginning, serves."""
        last = self.last()
        if last is None:
            return
        os.truncate(last, last.stat().st_size // 2)
        self.expect(self.task.start(self.work_dir, '--resume'), {1}, 'truncated checkpoint', 'error: ')
        last.unlink()
        others = sorted(self.work_dir.glob('*.pth'), key=lambda path: path.stat().st_mtime)
        self.resume = ['--resume', str(others[-1])] if others else []
        (self.work_dir / 'last_checkpoint').unlink()

    def unreadable_image(self) -> None:
        """It is named in the last line."""
        files = (self.task.folder / 'data').rglob('*')
        pictures = sorted(path for path in files if path.suffix in ('.jpg', '.JPEG') and 'val' not in str(path))
        picture = self.chance.choice(pictures)
        content = picture.read_bytes()
        picture.write_bytes(content[:20])
        try:
            process = self.task.start(self.work_dir, *self.resume)
            self.expect(process, {1}, 'unreadable image', picture.name)
        finally:
            picture.write_bytes(content)


def main() -> None:
    """Rounds until the time is up, then the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--minutes', type=float, default=30, help='no round begins after this time [30]')
    parser.add_argument('--out', default='soak', help='folder for data, runs and counts.json [soak]')
    parser.add_argument('--seed', type=int, default=0, help='of the faults and their times [0]')
    parser.add_argument('--tasks', nargs='+', choices=list(TASKS), default=list(TASKS))
    args = parser.parse_args()
    out = Path(args.out).resolve()
    end, chance, counts, wrong = time.monotonic() + 60 * args.minutes, random.Random(args.seed), Counter(), []
    tasks = []
    for scope in args.tasks:
        shutil.rmtree(out / scope, ignore_errors=True)
        (out / scope).mkdir(parents=True)
        tasks.append(Task(scope, out / scope))
    for task in itertools.cycle(tasks):
        if time.monotonic() > end:
            break
        try:
            Round(task, chance, counts).run(num_faults=chance.randint(2, 5))
        except Wrong as error:
            wrong.append(f'{task.scope}: {error}')
            print(f'WRONG {wrong[-1]}', flush=True)
        print(f'{task.scope:10}  {dict(counts)}', flush=True)
    result = dict(minutes=args.minutes, seed=args.seed, tasks=args.tasks, counts=counts, wrong=wrong)
    (out / 'counts.json').write_text(json.dumps(result, indent=1) + '\n')
    sys.exit(bool(wrong))


if __name__ == '__main__':
    main()
