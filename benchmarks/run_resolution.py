# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Latency and peak memory of backbones by the size of the image, batch 1, inference, one CPU thread.

    python benchmarks/run_resolution.py --results work_dirs/resolution.json --out resolution.md --plot resolution.png
    python benchmarks/run_resolution.py --only memory --models 'RAVLT-T, fully linear' --sides 4096

Times are CPU seconds of the process: with one thread that is the latency on a quiet machine, and other programs add
little to it. A size is left out if the growth so far predicts more than ``--max-gib`` or ``--max-seconds``, and so are
all larger ones. With ``--results`` an interrupted run continues. See README.md in this folder.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Callable, NamedTuple, Optional

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import measure  # noqa: E402
from run_ravlt import Report, machine, mib, ms  # noqa: E402

from mmlinattn.backbones import RAVLT, LinearPVT, LinearSwin  # noqa: E402

WARM_UP = 64
# Above so many seconds, time and memory are of one pass. There malloc gives back large blocks only, as by default: that
# hardly changes either number.
ONE_PASS = 4.0
RETURN_BLOCKS = dict(MALLOC_MMAP_THRESHOLD_=str(2**23))


def resnet50():
    from torchvision.models import resnet50

    model = resnet50(weights=None)
    model.fc = torch.nn.Identity()
    return model


class Model(NamedTuple):
    """Backbone and style of its curve.

    Attributes:
        build: Constructor.
        colour: Colour of the backbone.
        line: Solid for linear attention, dashed for global softmax attention, dotted for other softmax models.
    """

    build: Callable
    colour: str
    line: str


MODELS = {
    'RAVLT-T, hybrid (as released)': Model(lambda: RAVLT('tiny'), 'tab:cyan', '-'),
    'RAVLT-T, fully linear': Model(lambda: RAVLT('tiny', stage_attns=('rala',) * 4), 'tab:blue', '-'),
    'RAVLT-T, softmax': Model(lambda: RAVLT('tiny', stage_attns=('softmax',) * 4), 'tab:blue', '--'),
    'InLine-Swin-T, global': Model(lambda: LinearSwin('inline-tiny', window_size=None), 'tab:red', '-'),
    'Swin-T (softmax, 7x7 windows)': Model(lambda: LinearSwin('softmax-tiny'), 'tab:red', ':'),
    'FLatten-PVT-T': Model(lambda: LinearPVT('flatten-tiny'), 'tab:green', '-'),
    'PVT-T, softmax over whole feature maps': Model(
        lambda: LinearPVT(dict(LinearPVT.arch_zoo['softmax-tiny'], sr_ratios=1)), 'tab:green', '--'
    ),
    'PVT-T (softmax, reduced keys)': Model(lambda: LinearPVT('softmax-tiny'), 'tab:green', ':'),
    'ResNet-50': Model(resnet50, 'black', '-.'),
}


class Point(NamedTuple):
    """Time and memory of one forward pass.

    Attributes:
        side: of the square image.
        seconds: CPU time, the shortest of the repeats; None if not requested.
        bytes: largest growth of the resident memory; None if not requested.
        spent: CPU seconds of the pass that measured memory, slower by malloc; decides when to stop.
    """

    side: int
    seconds: Optional[float] = None
    bytes: Optional[int] = None
    spent: Optional[float] = None


def calls(name: str, side: int):
    """Return calls of a model on an image of the warm-up size, and on one of ``side`` x ``side`` pixels."""
    torch.manual_seed(0)
    model = MODELS[name].build().eval()

    def at(size):
        x = torch.randn(1, 3, size, size)

        def call():
            with torch.inference_mode():
                return model(x)

        return call

    return at(WARM_UP), at(side)


def seconds_of(name: str, side: int, repeats: int) -> float:
    small, large = calls(name, side)
    small()
    found = []
    for _ in range(repeats):
        start = time.process_time()
        large()
        found.append(time.process_time() - start)
    return min(found)


def bytes_of(name: str, side: int) -> tuple[int, float]:
    """Return the growth of the resident memory in bytes during a forward pass, and the CPU seconds of the pass."""
    spent = []

    def prepare(*case):
        small, large = calls(*case)

        def timed():
            start = time.process_time()
            large()
            spent.append(time.process_time() - start)

        return small, timed

    return measure._rss_growth(prepare, (name, side), threads=1), spent[0]


def available_gib() -> float:
    """Return the memory available to new programs; infinite on systems other than Linux."""
    info = Path('/proc/meminfo')
    if not info.exists():
        return float('inf')
    fields = dict(line.split(':') for line in info.read_text().splitlines())
    return int(fields['MemAvailable'].split()[0]) / 2**20


def next_cost(points: list[Point], side: int, field: str) -> Optional[float]:
    """Extrapolate ``field`` of the measured points to ``side``. With a single point, it grows with the number of
    pixels."""
    known = [(point.side**2, getattr(point, field)) for point in points if getattr(point, field)]
    if not known:
        return None
    power = 1.0
    if len(known) > 1:
        (a, first), (b, last) = known[-2:]
        power = max(1.0, math.log(last / first) / math.log(b / a))
    pixels, cost = known[-1]
    return cost * (side**2 / pixels) ** min(power, 2.0)


def too_much(points: list[Point], side: int, args) -> Optional[str]:
    """Return the reason to skip ``side`` (memory or time is predicted to exceed the limit), or None."""
    memory = next_cost(points, side, 'bytes')
    late = next_cost(points, side, 'seconds' if 'time' in args.only else 'spent')
    limit = min(args.max_gib, available_gib() - 2)
    if memory is not None and memory > limit * 2**30:
        return f'about {memory / 2**30:.0f} GiB, more than the {limit:.0f} GiB there are for it'
    if late is not None and late > args.max_seconds:
        return f'about {late:.0f} s, more than the {args.max_seconds:g} s allowed'
    return None


def measured(name: str, point: Point, late: Optional[float], args, in_process: Callable) -> Point:
    """Measure time and memory of a model at one resolution, unless ``point`` has them.

    Memory is measured in one process for all points. Its malloc gives back freed memory, and its peak is reset before
    each pass. Above ``ONE_PASS`` seconds, a single pass in a new process gives time and memory.
    """
    if len(args.only) == 2 and point == Point(point.side) and late is not None and late > ONE_PASS:
        size, seconds = measure.in_fresh_process(bytes_of, name, point.side, environment=RETURN_BLOCKS)
        return Point(point.side, seconds, size, seconds)
    if 'memory' in args.only and point.bytes is None:
        size, spent = in_process(bytes_of, name, point.side)
        point = point._replace(bytes=size, spent=spent)
    if 'time' in args.only and point.seconds is None:
        expected = late or point.spent or 1.0
        repeats = max(1, min(args.repeats, int(30 / expected)))
        point = point._replace(seconds=seconds_of(name, point.side, repeats))
    return point


# --- results ----------------------------------------------------------------------------------------------------------


def load(path: Optional[Path]) -> dict[str, list[Point]]:
    """Return the points of earlier runs by model, in ascending order of sides."""
    if path is None or not path.exists():
        return {}
    kept = json.loads(path.read_text(encoding='utf-8'))
    return {name: sorted(Point(**point) for point in points) for name, points in kept.items()}


def save(path: Optional[Path], found: dict[str, list[Point]]) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix('.part')
    part.write_text(
        json.dumps({name: [point._asdict() for point in points] for name, points in found.items()}, indent=1)
    )
    part.replace(path)


def run(args, in_process: Callable) -> tuple[dict[str, list[Point]], dict[str, tuple[int, str]]]:
    """Return the points of each model, and the size and reason of an early end.

    All models are measured at one size, then at the next, so that an interrupted run has points of every model.
    """
    found, ends = load(args.results), {}
    for side in sorted(args.sides):
        for name in args.models:
            if name in ends or args.draw:
                continue
            points = found.setdefault(name, [])
            known = next((point for point in points if point.side == side), Point(side))
            smaller = [point for point in points if point.side < side]
            if known.side not in [point.side for point in points] and (reason := too_much(smaller, side, args)):
                ends[name] = side, reason
                continue
            point = measured(name, known, next_cost(smaller, side, 'seconds'), args, in_process)
            if point != known:
                found[name] = sorted([other for other in points if other.side != side] + [point])
                save(args.results, found)
                print(f'{name}, {side}: {cells(point)}', file=sys.stderr, flush=True)
    return {name: [point for point in found.get(name, []) if point.side in args.sides] for name in args.models}, ends


def cells(point: Point) -> str:
    values = [] if point.seconds is None else [ms(point.seconds)]
    return ', '.join(values + ([] if point.bytes is None else [mib(point.bytes)]))


def tables(found: dict[str, list[Point]], ends: dict, args) -> Report:
    report = Report()
    report.add(f'Forward pass, batch 1, {machine("cpu", 1)}')
    sides = sorted(args.sides)
    report.table('backbone: ' + ', '.join(WORDS[what] for what in args.only), *(f'{side} x {side}' for side in sides))
    for name, points in found.items():
        by_side = {point.side: cells(point) for point in points}
        report.row(name, *(by_side.get(side, '-') for side in sides))
    if ends:
        left = '; '.join(f'{name} at {side}: {reason}' for name, (side, reason) in ends.items())
        report.add('', f'Left out: {left}.')
    return report


WORDS = dict(time='time', memory='peak memory')


def plot(found: dict[str, list[Point]], path: Path, what: list[str]) -> None:
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    panels = [('seconds', 'time of a forward pass, CPU seconds on one core', 1)] if 'time' in what else []
    panels += [('bytes', 'peak memory of the forward pass, GiB', 2**30)] if 'memory' in what else []
    figure, axes = pyplot.subplots(1, len(panels), figsize=(6.2 * len(panels), 6.4), squeeze=False)
    sides = sorted({point.side for points in found.values() for point in points})
    for axis, (field, label, unit) in zip(axes[0], panels):
        lowest = []
        for name, points in found.items():
            model = MODELS[name]
            known = [(point.side, getattr(point, field) / unit) for point in points if getattr(point, field)]
            if known:
                lowest.append(known[0][1])
                axis.plot(*zip(*known), model.line, color=model.colour, marker='o', markersize=4, label=name)
        guide = [min(lowest) * 0.6 * (side / sides[0]) ** 2 for side in sides]
        axis.plot(sides, guide, color='0.6', linewidth=5, alpha=0.4, label='slope of linear growth with the pixels')
        axis.set_xscale('log', base=2)
        axis.set_yscale('log')
        axis.set_xticks(sides, [f'{side} x {side}' for side in sides])
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f'{value:g}'))
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.set_xlabel('image, pixels')
        axis.set_title(label, fontsize=11)
        axis.grid(alpha=0.3, which='both')
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc='lower center',
        ncols=3 if len(panels) > 1 else 1,
        fontsize=9,
        frameon=False,
        handlelength=4,
    )
    figure.suptitle(
        'Cost of a forward pass by the size of the image, batch 1, float32\n'
        'solid: linear attention, dashed: softmax over all tokens, dotted: softmax in windows or on reduced keys',
        fontsize=11,
    )
    figure.tight_layout(rect=(0, 0.16, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--models', nargs='+', choices=list(MODELS), default=list(MODELS), metavar='NAME')
    parser.add_argument('--sides', nargs='+', type=int, default=[512, 1024, 2048, 4096], help='of square images')
    parser.add_argument('--only', nargs='+', choices=('time', 'memory'), default=['time', 'memory'])
    parser.add_argument('--repeats', type=int, default=5, help='timed passes; fewer if a pass is slow [5]')
    parser.add_argument('--max-gib', type=float, default=16, help='limit of the expected memory of a size [16]')
    parser.add_argument('--max-seconds', type=float, default=120, help='limit of its expected time [120]')
    parser.add_argument('--results', type=Path, help='JSON file of all points; run again to resume')
    parser.add_argument('--draw', action='store_true', help='only write table and plot of --results')
    parser.add_argument('--out', type=Path, help='write the table to this markdown file as well')
    parser.add_argument('--plot', type=Path, help='draw the curves into this image')
    args = parser.parse_args(argv)
    if min(args.sides) < 32:
        parser.error(f'--sides={min(args.sides)}: expected at least 32 pixels')
    if args.draw and not (args.results and args.results.exists()):
        parser.error(f'--draw: --results={args.results}: expected a file with points')
    if args.draw:
        kept = [point for name, points in load(args.results).items() if name in args.models for point in points]
        if not any(point.side in args.sides for point in kept):
            parser.error(f'--draw: --results={args.results}: no point of these --models and --sides')
    torch.set_num_threads(1)
    with measure.fresh_process(measure.RETURN_MEMORY) as in_process:
        found, ends = run(args, in_process)
    report = tables(found, ends, args)
    if args.out:
        args.out.write_text('\n'.join(report.lines) + '\n')
    if args.plot:
        plot(found, args.plot, args.only)


if __name__ == '__main__':
    main()
