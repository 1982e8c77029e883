# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Speed and memory of RAVLT against a reference implementation of its equations (``reference_ravlt.py``).

    python benchmarks/run_ravlt.py --out ravlt_cpu.md
    python benchmarks/run_ravlt.py --device cuda --out ravlt_cuda.md
    python benchmarks/run_ravlt.py --only memory --forward-size 256 384

All ratios are of one run, medians of interleaved repeats. See README.md in this folder.
"""

import argparse
import math
import platform
import sys
import time
from functools import partial
from pathlib import Path
from typing import Callable, NamedTuple

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import measure  # noqa: E402
import reference_ravlt  # noqa: E402

from mmlinattn.backbones import RAVLT  # noqa: E402

ATTNS = dict(hybrid=None, linear=('rala',) * 4, softmax=('softmax',) * 4)
WARM_UP = (64, 64)


class Case(NamedTuple):
    """Measured case.

    Attributes:
        attns: ``hybrid`` (the released model), ``linear`` or ``softmax`` in all stages.
        form: ``ours``, ``reference``, ``deploy`` or ``compiled``.
        mode: ``forward`` (inference) or ``train`` (forward and backward).
        size: height and width of the images.
    """

    attns: str
    form: str
    mode: str
    size: tuple[int, int]
    batch: int = 1
    arch: str = 'tiny'
    device: str = 'cpu'
    dtype: str = 'float32'

    def title(self) -> str:
        return f'{self.attns} {self.form}'


def calls(case: Case) -> tuple[Callable, Callable]:
    """Return the call that warms up a case, on a small input, and the call to measure."""
    torch.manual_seed(0)
    model = RAVLT(case.arch, stage_attns=ATTNS[case.attns], drop_path_rate=0.0)
    model.train(case.mode == 'train').to(case.device)
    if case.form == 'deploy':
        model.switch_to_deploy()
    if case.form == 'reference':
        forward = lambda x: reference_ravlt.forward(model, x)  # noqa: E731
    elif case.form == 'compiled':
        # static shapes: each case has one size, and inductor's dynamic ones cost speed
        forward = torch.compile(model, fullgraph=case.mode == 'forward', dynamic=False)
    else:
        forward = model
    dtype = getattr(torch, case.dtype)

    def run(x):
        with torch.autocast(case.device, dtype, enabled=dtype != torch.float32):
            if case.mode == 'forward':
                with torch.no_grad():
                    return forward(x)
            outs = forward(x)
        model.zero_grad()
        sum(out.float().mean() for out in outs).backward()

    def at(size):
        x = torch.randn(case.batch, 3, *size, device=case.device)
        return lambda: run(x)

    return at(WARM_UP), at(case.size)


def times_of(cases: list[Case], repeats: int, threads: int) -> list[float]:
    torch.set_num_threads(threads)
    runs = {str(i): calls(case)[1] for i, case in enumerate(cases)}
    return list(measure.interleaved_times(runs, repeats).values())


def memory(case: Case, threads: int) -> int:
    if case.device == 'cuda':
        return measure.peak_cuda(calls(case)[1])
    return measure.peak_rss(calls, (case,), threads)


class Target(NamedTuple):
    """Bound of a ratio: at least ``value`` if ``least``, otherwise at most ``value``."""

    value: float
    least: bool

    def judge(self, ratio: float) -> str:
        met = ratio >= self.value if self.least else ratio <= self.value
        sign = '>=' if self.least else '<='
        return f'{sign} {self.value:g} | {"yes" if met else "**no**"}'


class Report:
    """Markdown report, printed line by line."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, *lines: str) -> None:
        for line in lines:
            print(line, flush=True)
        self.lines += lines

    def row(self, *cells) -> None:
        self.add('| ' + ' | '.join(str(cell) for cell in cells) + ' |')

    def table(self, *titles: str) -> None:
        self.add('')
        self.row(*titles)
        self.row(*['---'] * len(titles))


def ms(seconds: float) -> str:
    return f'{seconds * 1e3:.1f} ms' if seconds < 1 else f'{seconds:.2f} s'


def mib(size: float) -> str:
    return f'{size / measure.MIB:.0f} MiB'


def compare(report, title, ours, reference, unit, target) -> None:
    """Add a row with both values in ``unit`` and their ratio: reference / ours if ``target.least``, else ours /
    reference."""
    part, whole = (reference, ours) if target.least else (ours, reference)
    ratio = part / whole if whole else math.inf  # small images fit in memory that the process had
    report.row(title, unit(ours), unit(reference), f'{ratio:.2f}', target.judge(ratio))


def run_cpu(args, report: Report) -> None:
    shared = dict(arch=args.arch, batch=args.batch)
    big, train = tuple(args.forward_size), tuple(args.train_size)
    pairs = {
        'forward': [Case('hybrid', form, 'forward', big, **shared) for form in ('ours', 'reference')],
        'train': [Case('hybrid', form, 'train', train, **shared) for form in ('ours', 'reference')],
    }
    low, high = ((side, side) for side in args.linear_sizes)
    growth = [Case('linear', 'ours', 'forward', size, **shared) for size in (high, low)]
    pixels = high[0] ** 2 / low[0] ** 2
    names = dict(
        forward=f'forward {big[0]}x{big[1]}',
        train=f'forward + backward {train[0]}x{train[1]}',
        linear=f'fully linear, {high[0]}^2 against {low[0]}^2 ({pixels:.3g}x the pixels)',
    )
    targets = {
        ('forward', 'time'): Target(2.0, True),
        ('forward', 'memory'): Target(0.6, False),
        ('train', 'time'): Target(1.5, True),
        ('train', 'memory'): Target(0.6, False),
        # 10 % and 2 % over proportional
        ('linear', 'time'): Target(round(1.1 * pixels, 2), False),
        ('linear', 'memory'): Target(round(9.2 / 9 * pixels, 2), False),
    }
    wanted = [name for name in ('forward', 'train', 'linear') if name in args.cases]
    if {'time', 'memory'} & set(args.only):
        report.table('', 'ours', 'reference (or the smaller image)', 'ratio', 'target', 'met')
    if 'time' in args.only:
        for name in wanted:
            cases = growth if name == 'linear' else pairs[name]
            for title, environment in (('', None), (' (memory kept)', measure.KEEP_MEMORY)):
                arguments = times_of, cases, args.repeats, args.threads
                ours, other = measure.in_fresh_process(*arguments, environment=environment)
                compare(report, f'time, {names[name]}{title}', ours, other, ms, targets[name, 'time'])
    if 'memory' in args.only:
        for name in wanted:
            ours, other = (memory(case, args.threads) for case in (growth if name == 'linear' else pairs[name]))
            target = targets[name, 'memory']
            compare(report, f'peak extra memory, {names[name]}', ours, other, mib, target)
    if 'work' in args.only:
        forms = [('hybrid', 'ours'), ('hybrid', 'deploy'), ('linear', 'ours'), ('hybrid', 'reference')]
        work(args, report, [Case(a, form, 'forward', big, **shared) for a, form in forms])


def work(args, report: Report, cases: list[Case]) -> None:
    """Report the fraction of the machine's matrix-product rate that each case reaches, and its time by kind of
    operator."""
    device = cases[0].device
    product, product_work = measure.matmul_call(device, getattr(torch, cases[0].dtype))
    runs = {case.title(): calls(case)[1] for case in cases}
    times = measure.interleaved_times({'': product, **runs}, args.repeats, device)
    rate = 2 * product_work / times['']
    size = cases[0].size
    report.add(
        '',
        f'Matrix products of {cases[0].dtype} run at {rate / 1e9:.0f} GFLOP/s in the same run. '
        f'Forward, batch {cases[0].batch}, {size[0]}x{size[1]}; a multiply-add is two operations.',
    )
    report.table('model', 'multiply-adds', 'time', 'fraction of the rate', 'time by operator')
    for case in cases:
        build = partial(RAVLT, case.arch, stage_attns=ATTNS[case.attns])
        macs = measure.multiply_adds(build, case.batch, 3, *case.size)
        seconds = times[case.title()]
        shares = measure.breakdown(runs[case.title()], device)
        report.row(
            case.title(),
            f'{macs / 1e9:.2f} G',
            ms(seconds),
            f'{2 * macs / seconds / rate:.0%}',
            ', '.join(f'{group} {share:.0%}' for group, share in shares.items() if share >= 0.01),
        )


def run_cuda(args, report: Report) -> None:
    started = time.monotonic()
    shared = dict(arch=args.arch, batch=args.batch, device='cuda')
    sizes = dict(forward=tuple(args.forward_size), train=tuple(args.train_size))
    forms = [(attns, form) for form in ('ours', 'compiled') for attns in ('hybrid', 'linear', 'softmax')]
    for mode in [mode for mode in ('forward', 'train') if mode in args.cases]:
        size = sizes[mode]
        for dtype in args.dtypes:
            cases = [
                Case(attns, form, mode, size, dtype=dtype, **shared)
                for attns, form in [('hybrid', 'reference'), *forms]
            ]
            report.add('', f'### {mode}, {dtype}, batch {args.batch}, {size[0]}x{size[1]}')
            report.table('', 'time', 'against reference', 'against softmax', 'peak extra memory')
            runs = {}
            for case in cases:
                late = time.monotonic() - started > 60 * args.max_minutes
                if case.form == 'compiled' and (late or dtype != args.dtypes[0]):
                    continue  # compiling takes most of the time, and gains alike in both types
                runs[case] = calls(case)[1]
            used = {case: measure.peak_cuda(call) for case, call in runs.items()}
            for _ in range(3):
                measure.interleaved_times(runs, 1, 'cuda')
            times = measure.interleaved_times(runs, args.repeats, 'cuda')
            reference = times[cases[0]]
            for case in runs:
                softmax = times.get(case._replace(attns='softmax'))
                report.row(
                    case.title(),
                    ms(times[case]),
                    f'{reference / times[case]:.2f}x',
                    f'{softmax / times[case]:.2f}x' if softmax else '',
                    f'{mib(used[case])} ({used[case] / used[cases[0]]:.2f}x)',
                )
            skipped = [case.title() for case in cases if case not in runs]
            if skipped:
                report.add('', f'Not compiled here: {", ".join(skipped)}.')
            del runs
            torch.cuda.empty_cache()
    if 'work' in args.only:
        forms = [('hybrid', 'ours'), ('linear', 'ours'), ('softmax', 'ours'), ('hybrid', 'reference')]
        cases = [Case(a, form, 'forward', sizes['forward'], dtype=args.dtypes[0], **shared) for a, form in forms]
        work(args, report, cases)


def machine(device: str, threads: int) -> str:
    if device == 'cuda':
        return f'{torch.cuda.get_device_name()}, torch {torch.__version__}'
    name = platform.processor() or platform.machine()
    info = Path('/proc/cpuinfo')
    if info.exists():
        models = [li for li in info.read_text().splitlines() if li.startswith('model name')]
        name = models[0].split(':', 1)[1].strip() if models else name
    return f'{name}, {threads} threads, torch {torch.__version__}, float32'


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--device', choices=('cpu', 'cuda'), default='cpu')
    parser.add_argument('--arch', choices=tuple(RAVLT.arch_zoo), default='tiny')
    parser.add_argument('--batch', type=int, help='images at a time (1; on CUDA 8)')
    parser.add_argument('--threads', type=int, default=2, help='CPU threads of torch')
    parser.add_argument('--repeats', type=int, help='timed rounds (5; on CUDA 20)')
    parser.add_argument('--only', nargs='+', choices=('time', 'memory', 'work'), default=['time', 'memory', 'work'])
    parser.add_argument(
        '--cases', nargs='+', choices=('forward', 'train', 'linear'),
        default=['forward', 'train', 'linear'],
    )  # fmt: skip
    parser.add_argument('--forward-size', nargs=2, type=int, default=(800, 1216), metavar=('H', 'W'))
    parser.add_argument('--train-size', nargs=2, type=int, default=(640, 640), metavar=('H', 'W'))
    parser.add_argument(
        '--linear-sizes', nargs=2, type=int, default=(512, 1536), metavar=('LOW', 'HIGH'),
        help='sides of two square images, to compare their costs',
    )  # fmt: skip
    parser.add_argument(
        '--dtypes', nargs='+', choices=('bfloat16', 'float16', 'float32'),
        default=['bfloat16', 'float16'], help='CUDA: autocast types; the first is compiled as well',
    )  # fmt: skip
    parser.add_argument('--max-minutes', type=float, default=4, help='CUDA: compile no new case after this time')
    parser.add_argument('--out', type=Path, help='write the tables to this markdown file as well')
    args = parser.parse_args(argv)
    if args.device == 'cuda' and not torch.cuda.is_available():
        parser.error('--device=cuda: PyTorch finds no GPU')
    cuda = args.device == 'cuda'
    args.batch = args.batch or (8 if cuda else 1)
    args.repeats = args.repeats or (20 if cuda else 5)
    return args


def main(argv=None) -> None:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    report = Report()
    report.add(f'RAVLT-{args.arch[0].upper()}, {machine(args.device, args.threads)}')
    (run_cuda if args.device == 'cuda' else run_cpu)(args, report)
    if args.out:
        args.out.write_text('\n'.join(report.lines) + '\n')


if __name__ == '__main__':
    main()
