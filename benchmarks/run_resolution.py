# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Latency and peak memory of backbones by the size of the image, batch 1, inference.

    python benchmarks/run_resolution.py --out resolution.md --plot docs/images/resolution.png
    python benchmarks/run_resolution.py --only memory --models 'RAVLT-T, fully linear' --sides 4096

A size is left out where, by the growth from the sizes before, it would take more than ``--max-gib`` or
``--max-seconds``, and so are all larger ones. Memory does not care for other work on the machine, times do. See
README.md in this folder.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import NamedTuple, Optional

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import measure  # noqa: E402
from run_ravlt import Report, machine, mib, ms  # noqa: E402

from mmlinattn.backbones import RAVLT, LinearPVT, LinearSwin  # noqa: E402

WARM_UP = 64


def resnet50():
    from torchvision.models import resnet50

    model = resnet50(weights=None)
    model.fc = torch.nn.Identity()
    return model


MODELS = {
    'RAVLT-T, hybrid (as released)': lambda: RAVLT('tiny'),
    'RAVLT-T, fully linear': lambda: RAVLT('tiny', stage_attns=('rala',) * 4),
    'RAVLT-T, softmax': lambda: RAVLT('tiny', stage_attns=('softmax',) * 4),
    'InLine-Swin-T, global': lambda: LinearSwin('inline-tiny', window_size=None),
    'Swin-T (softmax, 7x7 windows)': lambda: LinearSwin('softmax-tiny'),
    'FLatten-PVT-T': lambda: LinearPVT('flatten-tiny'),
    'PVT-T (softmax, reduced keys)': lambda: LinearPVT('softmax-tiny'),
    'ResNet-50': resnet50,
}


class Point(NamedTuple):
    """What one forward pass takes.

    Attributes:
        side: of the square image.
        seconds: median of the repeats, None where not asked for.
        bytes: largest growth of the resident memory, None where not asked for.
        spent: seconds of the pass whose memory was measured, which malloc slows down; says when to stop.
    """

    side: int
    seconds: Optional[float]
    bytes: Optional[int]
    spent: Optional[float] = None


def calls(name: str, side: int):
    """The model on a small image, and on the one to measure."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()

    def at(size):
        x = torch.randn(1, 3, size, size)

        def call():
            with torch.inference_mode():
                return model(x)

        return call

    return at(WARM_UP), at(side)


def seconds_of(name: str, side: int, repeats: int, threads: int) -> float:
    torch.set_num_threads(threads)
    small, large = calls(name, side)
    small()
    if repeats > 1:
        return measure.interleaved_times({name: large}, repeats)[name]
    start = time.perf_counter()
    large()
    return time.perf_counter() - start


def bytes_of(name: str, side: int, threads: int) -> tuple[int, float]:
    """Growth of the resident memory during a pass, and the seconds of that pass."""
    spent = []

    def prepare(*case):
        small, large = calls(*case)

        def timed():
            start = time.perf_counter()
            large()
            spent.append(time.perf_counter() - start)

        return small, timed

    return measure._rss_growth(prepare, (name, side), threads), spent[0]


def available_gib() -> float:
    """Memory that is free for new programs (Linux); without a word where the system does not say."""
    info = Path('/proc/meminfo')
    if not info.exists():
        return float('inf')
    fields = dict(line.split(':') for line in info.read_text().splitlines())
    return int(fields['MemAvailable'].split()[0]) / 2**20


def next_cost(points: list[Point], side: int, field: str) -> Optional[float]:
    """What a size will take by the growth so far; proportional to the pixels where a single size is known."""
    known = [(point.side**2, getattr(point, field)) for point in points if getattr(point, field)]
    if not known:
        return None
    power = 1.0
    if len(known) > 1:
        (a, first), (b, last) = known[-2:]
        power = max(1.0, torch.log(torch.tensor(last / first)).item() / torch.log(torch.tensor(b / a)).item())
    pixels, cost = known[-1]
    return cost * (side**2 / pixels) ** min(power, 2.0)


def run_model(name: str, args, report: Report) -> tuple[list[Point], Optional[str]]:
    """Points of one model, ascending, and why it ends before the largest size."""
    points: list[Point] = []
    for side in sorted(args.sides):
        memory, late = (
            next_cost(points, side, 'bytes'),
            next_cost(points, side, 'seconds' if 'time' in args.only else 'spent'),
        )
        limit = min(args.max_gib, available_gib() - 2)
        if memory is not None and memory > limit * 2**30:
            return points, f'{side}: about {memory / 2**30:.0f} GiB, more than the {limit:.0f} GiB there are for it'
        if late is not None and late > args.max_seconds:
            return points, f'{side}: about {late:.0f} s, more than the {args.max_seconds:g} s allowed'
        seconds = size = None
        spent = None
        if 'memory' in args.only:
            arguments = bytes_of, name, side, args.threads
            size, spent = measure.in_fresh_process(*arguments, environment=measure.RETURN_MEMORY)
        if 'time' in args.only:
            repeats = args.repeats if late is None or late < args.max_seconds / args.repeats else 1
            seconds = measure.in_fresh_process(seconds_of, name, side, repeats, args.threads)
        points.append(Point(side, seconds, size, spent))
        report.row(name, side, '' if seconds is None else ms(seconds), '' if size is None else mib(size))
    return points, None


def plot(found: dict[str, list[Point]], path: Path, what: list[str]) -> None:
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot

    panels = [('seconds', 'seconds a picture', 1)] if 'time' in what else []
    panels += [('bytes', 'peak memory of the forward pass, GiB', 2**30)] if 'memory' in what else []
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(6.5 * len(panels), 4.6), squeeze=False, layout='constrained'
    )
    for axis, (field, label, unit) in zip(axes[0], panels):
        for name, points in found.items():
            style = dict(linestyle='--') if 'softmax' in name or 'ResNet' in name else {}
            known = [(point.side, getattr(point, field) / unit) for point in points if getattr(point, field)]
            if known:
                axis.plot(*zip(*known), marker='o', label=name, **style)
        sides = sorted({point.side for points in found.values() for point in points})
        axis.set_xscale('log', base=2)
        axis.set_yscale('log')
        axis.set_xticks(sides, [f'{side}²' for side in sides])
        axis.set_xlabel('image, pixels')
        axis.set_ylabel(label)
        axis.grid(alpha=0.3, which='both')
    axes[0, 0].legend(fontsize=7.5)
    figure.suptitle(
        'Backbones by the size of the image, batch 1, float32 (solid: linear attention, dashed: others)', fontsize=10
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--models', nargs='+', choices=list(MODELS), default=list(MODELS), metavar='NAME')
    parser.add_argument('--sides', nargs='+', type=int, default=[512, 1024, 2048, 4096], help='of square images')
    parser.add_argument('--only', nargs='+', choices=('time', 'memory'), default=['time', 'memory'])
    parser.add_argument('--threads', type=int, default=2, help='CPU threads of torch')
    parser.add_argument('--repeats', type=int, default=5, help='timed passes; one where a pass is slow')
    parser.add_argument('--max-gib', type=float, default=16, help='expected memory above which a size is left out')
    parser.add_argument('--max-seconds', type=float, default=120, help='expected time above which a size is left out')
    parser.add_argument('--out', type=Path, help='write the table to this markdown file as well')
    parser.add_argument('--plot', type=Path, help='draw the curves into this picture')
    args = parser.parse_args(argv)
    if min(args.sides) < 32:
        parser.error(f'--sides {min(args.sides)}: images have to be 32 pixels at least')
    torch.set_num_threads(args.threads)
    report, found, ends = Report(), {}, []
    report.add(f'Forward pass, batch 1, {machine("cpu", args.threads)}')
    report.table('backbone', 'side', 'time', 'peak extra memory')
    for name in args.models:
        found[name], end = run_model(name, args, report)
        if end:
            ends.append(f'{name}, {end}')
    if ends:
        report.add('', 'Left out: ' + '; '.join(ends) + '.')
    if args.out:
        args.out.write_text('\n'.join(report.lines) + '\n')
    if args.plot:
        plot(found, args.plot, args.only)


if __name__ == '__main__':
    main()
