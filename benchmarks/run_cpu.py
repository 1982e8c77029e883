# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""RAVLT, InLine- and FLatten-Swin beside MMDetection's Swin-T on this CPU: time, quiet or beside a busy process, and
parallel regions.

    python benchmarks/run_cpu.py --out cpu.md
    python benchmarks/run_cpu.py --busy 1 --modes forward

The models take turns in one process, so that other processes disturb all alike; ratios are of the medians. A
parallel region is one call of OpenMP's ``GOMP_parallel`` with several threads: all are woken, and the last one is
waited for. This takes a time slice if another process has its core. Regions are counted by a small library that gcc
builds and the process preloads. Without gcc, or with another OpenMP, their columns are empty.
"""

import argparse
import ctypes
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

COUNTER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
typedef void (*parallel_t)(void (*)(void *), void *, unsigned, unsigned);
extern int omp_in_parallel(void);
static float lengths[1 << 20];
static long count = 0;
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + 1e-9 * t.tv_nsec; }
void GOMP_parallel(void (*function)(void *), void *data, unsigned threads, unsigned flags) {
  static parallel_t parallel = 0;
  if (!parallel) parallel = (parallel_t)dlsym(RTLD_NEXT, "GOMP_parallel");
  if (threads == 1 || omp_in_parallel()) { parallel(function, data, threads, flags); return; }
  double start = now();
  parallel(function, data, threads, flags);
  long i = __sync_fetch_and_add(&count, 1);
  if (i < 1 << 20) lengths[i] = now() - start;
}
long regions(void) { return count; }
float *region_lengths(void) { return lengths; }
void forget_regions(void) { count = 0; }
"""
SWIN = dict(embed_dims=96, depths=[2, 2, 6, 2], num_heads=[3, 6, 12, 24], window_size=7, drop_path_rate=0.2)
MODELS = {
    "MMDetection's Swin-T": dict(type='mmdet.SwinTransformer', convert_weights=False, **SWIN),
    'RAVLT-T': dict(type='RAVLT', arch='tiny'),
    'RAVLT-T, fully linear': dict(type='RAVLT', arch='tiny', stage_attns=('rala',) * 4),
    'InLine-Swin-T': dict(type='LinearSwin', arch='inline-tiny'),
    'FLatten-Swin-T': dict(type='LinearSwin', arch='flatten-tiny'),
}
SIZES = dict(forward=(800, 1216), train=(640, 640), bfloat16=(800, 1216))


def preload_counter() -> None:
    """Compile the counter of parallel regions by gcc, and restart this process with it preloaded. Without gcc, do
    nothing."""
    if 'MMLINATTN_REGIONS' in os.environ or shutil.which('gcc') is None:
        return
    folder = Path(tempfile.mkdtemp(prefix='regions'))
    (folder / 'regions.c').write_text(COUNTER, encoding='utf-8')
    library = folder / 'regions.so'
    command = ['gcc', '-O2', '-shared', '-fPIC', '-o', library, folder / 'regions.c', '-ldl']
    if subprocess.run(command, capture_output=True).returncode == 0:
        environment = dict(os.environ, LD_PRELOAD=str(library), MMLINATTN_REGIONS=str(library))
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)


class Regions:
    """Counter of OpenMP's parallel regions since the last :meth:`forget`.

    :meth:`read` formats their number and median duration in microseconds as table cells. The cells are empty if the
    counter library is not loaded.
    """

    def __init__(self) -> None:
        path = os.environ.get('MMLINATTN_REGIONS')
        self.library = ctypes.CDLL(path) if path else None
        if self.library:
            self.library.regions.restype = ctypes.c_long
            self.library.region_lengths.restype = ctypes.POINTER(ctypes.c_float)

    def forget(self) -> None:
        if self.library:
            self.library.forget_regions()

    def read(self) -> str:
        count = self.library.regions() if self.library else 0
        if not count:
            return '|'
        lengths = self.library.region_lengths()
        return f'{count} | {statistics.median(lengths[i] for i in range(min(count, 2**20))) * 1e6:.0f} us'


def table(mode: str, rounds: int) -> list[str]:
    import mmdet.models  # noqa: F401
    import torch
    from mmengine.registry import MODELS as REGISTRY

    import mmlinattn  # noqa: F401

    x, models, regions = torch.randn(1, 3, *SIZES[mode]), {}, Regions()
    for name, config in MODELS.items():
        torch.manual_seed(0)
        models[name] = REGISTRY.build(config)
        models[name].train(mode == 'train')

    def call(model) -> None:
        if mode == 'train':
            model.zero_grad()
            sum(out.mean() for out in model(x)).backward()
            return
        with torch.inference_mode(), torch.autocast('cpu', torch.bfloat16, enabled=mode == 'bfloat16'):
            model(x)

    seconds, counted = {name: [] for name in models}, {}
    for turn in range(rounds + 1):
        for name, model in models.items():
            regions.forget()
            start = time.perf_counter()
            call(model)
            if turn:  # the first warms up
                seconds[name].append(time.perf_counter() - start)
            counted[name] = regions.read()
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    first = next(iter(medians.values()))
    lines = [f'### {mode}, {SIZES[mode][0]}x{SIZES[mode][1]}', '']
    lines += ['| | time | of Swin-T | parallel regions | median length |', '| --- | --- | --- | --- | --- |']
    for name, median in medians.items():
        lines.append(f'| {name} | {median * 1000:.0f} ms | {first / median:.2f}x | {counted[name]} |')
    return [*lines, '']


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--modes', nargs='+', choices=SIZES, default=list(SIZES))
    parser.add_argument('--rounds', type=int, default=5, help='turns of each model [5]')
    parser.add_argument('--busy', type=int, default=0, help='busy processes beside the measurement [0]')
    parser.add_argument('--threads', type=int, help="PyTorch's threads [all cores]")
    parser.add_argument('--out', type=Path, help='write the tables here, too')
    args = parser.parse_args()
    preload_counter()
    import torch
    from run_ravlt import machine

    if args.threads:
        torch.set_num_threads(args.threads)
    beside = [subprocess.Popen([sys.executable, '-c', 'while True: pass']) for _ in range(args.busy)]
    try:
        beside_it = f'{args.busy or "no"} busy process{"" if args.busy == 1 else "es"} beside it'
        lines = [f'{machine("cpu", torch.get_num_threads())}, {beside_it}', '']
        for mode in args.modes:
            lines += table(mode, args.rounds)
    finally:
        for process in beside:
            process.kill()
    print('\n'.join(lines))
    if args.out:
        args.out.write_text('\n'.join(lines), encoding='utf-8')


if __name__ == '__main__':
    main()
