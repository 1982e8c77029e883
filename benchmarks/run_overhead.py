# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Time that this project's hooks add to an iteration of the train loop.

    python benchmarks/run_overhead.py --out overhead.md
    python benchmarks/run_overhead.py configs/mmdet/ravlt_t_maskrcnn_1x.py --data-root data/coco/

Two runs of one config in one process, one with the hooks of ``configs/_base_/default_runtime.py`` and one without any
``custom_hooks``, take turns iteration by iteration: same weights, same data, each with its own loader and log. The
ratio is of the medians. Beside it, the fraction of an iteration that is spent inside the hooks. It misses their
effect elsewhere (the loader's workers). On a GPU it includes the wait for the loss. Other work on the machine hardly
changes it.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import measure  # noqa: E402
from mmengine.config import Config, ConfigDict  # noqa: E402
from mmengine.runner import IterBasedTrainLoop, Runner  # noqa: E402
from run_ravlt import Report, Target, machine, ms  # noqa: E402

from mmlinattn.tooling import configs  # noqa: E402
from mmlinattn.tooling.datasets import DatasetSpec, write_dataset  # noqa: E402

CONFIGS = Path(__file__).resolve().parents[1] / 'configs'
FORMATS = dict(mmdet='coco', mmseg='ade', mmpretrain='imagenet')
QUICKSTARTS = [CONFIGS / task / 'ravlt_shapes_quickstart.py' for task in FORMATS]
TARGET = Target(1.02, least=False)


def config_of(path: Path, data_root: Path, work_dir: Path, with_hooks: bool, batch: int) -> Config:
    name = 'with_hooks' if with_hooks else 'bare'
    args = argparse.Namespace(
        config=str(path), work_dir=str(work_dir / path.parent.name / name), data_root=str(data_root), launcher='none',
        local_rank=0, cfg_options=None, no_pin_memory=False,
    )  # fmt: skip
    cfg = configs.load_config(args)
    cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    cfg.test_cfg = cfg.test_dataloader = cfg.test_evaluator = None
    if batch:
        cfg.train_dataloader.batch_size = batch
    if cfg.model.backbone.get('init_cfg') and not isinstance(cfg.model.backbone.init_cfg, list):
        cfg.model.backbone.init_cfg = None  # nothing to download
    cfg.train_dataloader.sampler = ConfigDict(dict(type='InfiniteSampler', shuffle=True))  # no start of an epoch
    if not with_hooks:
        cfg.custom_hooks = []
    # MMEngine keeps logs and visualisers of a process by name
    cfg.experiment_name = f'{path.parent.name}_{path.stem}_{name}'
    cfg.setdefault('visualizer', ConfigDict(dict(type='Visualizer'))).name = cfg.experiment_name
    cfg.log_level = 'ERROR'
    return cfg


def begin(cfg: Config) -> Runner:
    """Return a Runner with all hooks called up to the first training iteration, but no iteration run."""
    runner = Runner.from_cfg(cfg)
    loop = runner._train_loop = runner.build_train_loop(runner._train_loop)

    def begin_only():
        for stage in ('before_train', 'before_train_epoch'):
            runner.call_hook(stage)
        runner.model.train()

    loop.run = begin_only
    runner.train()
    return runner


def stepper(runner: Runner) -> Callable[[], None]:
    """Return a function that trains one iteration, without the hooks before and after an epoch."""
    loop = runner.train_loop
    if isinstance(loop, IterBasedTrainLoop):
        return lambda: loop.run_iter(next(loop.dataloader_iterator))

    batches, length = iter(loop.dataloader), len(loop.dataloader)
    return lambda: loop.run_iter((runner.iter + 1) % length, next(batches))


def clock_hooks(runner: Runner) -> list[float]:
    """Time the hooks of this project around each iteration. Return a list; each call appends its seconds."""
    spent = []

    def clocked(method):
        def call(*args, **kwargs):
            start = time.perf_counter()
            method(*args, **kwargs)
            spent.append(time.perf_counter() - start)

        return call

    for hook in runner.hooks:
        if type(hook).__module__.startswith('mmlinattn.'):
            for name in ('before_train_iter', 'after_train_iter'):
                if name in vars(type(hook)):
                    setattr(hook, name, clocked(getattr(hook, name)))
    return spent


def compare(path: Path, args, folder: Path, report: Report) -> None:
    data_root = args.data_root
    if data_root is None:
        data_root = folder / 'data' / path.parent.name
        size = tuple(args.size)
        write_dataset(data_root, DatasetSpec(FORMATS[path.parent.name], args.num_pictures, 1, size=size))
    runners = {
        name: begin(config_of(path, data_root, folder, name == 'with hooks', args.batch))
        for name in ('bare', 'with hooks')
    }
    calls = {name: stepper(runner) for name, runner in runners.items()}
    measure.interleaved_times(calls, 2, args.device)
    spent = clock_hooks(runners['with hooks'])
    times = measure.interleaved_times(calls, args.iters, args.device)
    inside = sum(spent) / (args.iters + 1)  # one more as its warm-up
    ratio = times['with hooks'] / times['bare']
    report.row(
        f'{path.parent.name}/{path.stem}', ms(times['bare']), ms(times['with hooks']), f'{ratio:.3f}',
        TARGET.judge(ratio), f'{ms(inside)} ({inside / times["with hooks"]:.2%})',
    )  # fmt: skip


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('configs', nargs='*', type=Path, default=QUICKSTARTS, help='[the three quick-start configs]')
    parser.add_argument('--data-root', type=Path, help='data set of the config [shapes, written for the run]')
    parser.add_argument('--iters', type=int, default=20, help='timed iterations of each run [20]')
    parser.add_argument('--batch', type=int, help="[the config's]")
    parser.add_argument('--size', nargs=2, type=int, default=(160, 160), metavar=('W', 'H'), help='of the shapes')
    parser.add_argument('--num-pictures', type=int, default=64, help='of the shapes data set [64]')
    parser.add_argument('--threads', type=int, default=2, help='CPU threads of torch')
    parser.add_argument('--out', type=Path, help='write the table to this markdown file as well')
    args = parser.parse_args(argv)
    args.device = 'cuda' if torch.cuda.is_available() else 'cpu'
    if args.iters < 1:
        parser.error(f'--iters={args.iters}: expected at least 1')
    return args


def main(argv=None) -> None:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    report = Report()
    report.add(f'Hooks of this project, {machine(args.device, args.threads)}, medians of {args.iters} iterations')
    report.table('config', 'bare', 'with hooks', 'ratio', 'target', 'met', 'inside the hooks')
    with tempfile.TemporaryDirectory() as folder:
        for path in args.configs:
            compare(path.resolve(), args, Path(folder), report)
    if args.out:
        args.out.write_text('\n'.join(report.lines) + '\n')


if __name__ == '__main__':
    main()
