# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Time, memory and growth of every registered attention by the number of tokens, beside fused softmax attention.

    python benchmarks/run_attentions.py --out attentions_cpu.md --plot attentions_cpu.png
    python benchmarks/run_attentions.py --only softmax rala --sides 14 56

Mixers with their convolutions, from projected queries, keys and values to mixed values; without projections and gates.
Cases that would take longer than ``--max-seconds`` by the growth so far are shown as a dash.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Callable, Optional

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import measure  # noqa: E402
from run_ravlt import Report, machine, ms  # noqa: E402

from mmlinattn.attention import TOKEN_MIXERS, Grid  # noqa: E402

BASELINE = 'softmax'
MODES = dict(forward='forward', train='forward + backward')
SIDES = (14, 28, 56, 112, 256)  # N = 196, 784, 3136, 12544, 65536


def names() -> list[str]:
    """Return the names of all registered attentions, softmax first."""
    return sorted(TOKEN_MIXERS.module_dict, key=lambda name: (name != BASELINE, name))


def calls(name: str, mode: str, side: int, dim: int, heads: int) -> tuple[Callable, Callable]:
    """Return a function that makes inputs, and one that runs an attention on them. Inputs are new for each run, as
    mixers may overwrite them.

    Args:
        name (str): Attention.
        mode (str): ``'train'`` adds the backward pass.
        side (int): Height and width of the feature map in tokens.
        dim, heads (int): Channels and heads.
    """
    torch.manual_seed(0)
    grid = Grid(side, side)
    mixer = TOKEN_MIXERS.module_dict[name](dim, heads, grid=grid[:2])
    learns = mode == 'train'
    sources = [torch.randn(1, grid.num_tokens, width) for width in mixer.widths]
    probe = torch.randn(1, grid.num_tokens, mixer.widths[2])
    context = torch.randn(1, dim) if mixer.context else None

    def prepare():
        mixer.zero_grad()
        return [source.clone().requires_grad_(learns) for source in sources]

    def call(tokens):
        with torch.set_grad_enabled(learns):
            out = mixer(*tokens, grid, grid, context=context)
        if learns:
            out.backward(probe)

    return prepare, call


def at_once(name: str, mode: str, sides: tuple[int, int], dim: int, heads: int) -> tuple[Callable, Callable]:
    """Return calls without arguments at each of two ``sides``. Their inputs exist beforehand, so that they do not count
    as memory of the call. Other arguments as in :func:`calls`."""
    runs = []
    for side in sides:
        prepare, call = calls(name, mode, side, dim, heads)
        runs.append((call, prepare()))
    return tuple(lambda call=call, tokens=tokens: call(tokens) for call, tokens in runs)


def run_times(args, mode: str) -> dict[tuple[str, int], float]:
    """Measure run times in seconds, by (attention, side of the square feature map in tokens).

    The attentions run in turns at each side. Those with a predicted time above ``args.max_seconds`` are skipped.
    ``mode`` is ``'forward'`` or ``'train'`` (forward and backward).
    """
    seconds: dict[tuple[str, int], float] = {}
    for i, side in enumerate(args.sides):
        pairs = {}
        for name in args.only:
            if i == 0:
                predicted = 0.0
            else:
                power = 4 if TOKEN_MIXERS.module_dict[name].quadratic else 2
                last = seconds.get((name, args.sides[i - 1]), math.inf)
                predicted = last * (side / args.sides[i - 1]) ** power
            if predicted <= args.max_seconds:
                pairs[name] = calls(name, mode, side, args.dim, args.heads)
        found = measure.interleaved_minima(pairs, args.repeats, args.max_seconds)
        seconds.update({(name, side): value for name, value in found.items()})
    return seconds


def run_memory(args, mode: str, seconds: dict) -> dict[tuple[str, int], int]:
    """Measure the peak memory in bytes, by (attention, side of the square feature map in tokens).

    Of the sides with a time in ``seconds``, the result of :func:`run_times`, the two largest of each attention are
    measured. ``mode`` is ``'forward'`` or ``'train'`` (forward and backward).
    """
    found = {}
    for name in args.only:
        for side in [side for side in args.sides if (name, side) in seconds][-2:]:
            case = (name, mode, (args.sides[0], side), args.dim, args.heads)
            found[name, side] = measure.peak_rss(at_once, case, args.threads)
    return found


def growth(values: dict, name: str, sides) -> Optional[float]:
    """Return the additional cost per token between the two largest measured ``sides`` of an attention."""
    measured = [side for side in sides if (name, side) in values][-2:]
    if len(measured) < 2:
        return None
    first, last = measured
    return (values[name, last] - values[name, first]) / (last**2 - first**2)


def cell(value: Optional[float], text: Callable) -> str:
    return '-' if value is None else text(value)


def report_times(report, args, mode: str, seconds: dict, memory: dict) -> None:
    report.add('', f'### {MODES[mode]}: time, and how many times as fast as {BASELINE}')
    report.table('attention', *(f'N = {side**2}' for side in args.sides), 'one more token', 'memory of one more')
    for name in args.only:
        cells = []
        for side in args.sides:
            value, base = seconds.get((name, side)), seconds.get((BASELINE, side))
            ratio = f' ({base / value:.2f}x)' if value and base and name != BASELINE else ''
            cells.append(cell(value, ms) + ratio)
        cells.append(cell(growth(seconds, name, args.sides), lambda s: f'{s * 1e9:.0f} ns'))
        cells.append(cell(growth(memory, name, args.sides), lambda b: f'{b / 1024:.2f} KiB'))
        report.row(name, *cells)


def draw(path: Path, args, seconds: dict) -> None:
    """Plot the time of every attention over N with logarithmic axes, one panel per mode."""
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(seconds), figsize=(6 * len(seconds), 4.5), squeeze=False)
    for panel, (mode, values) in zip(panels[0], seconds.items()):
        for name in args.only:
            sides = [side for side in args.sides if (name, side) in values]
            style = dict(color='black', linewidth=2.5) if name == BASELINE else {}
            panel.plot(
                [side**2 for side in sides], [1e3 * values[name, side] for side in sides], 'o-', label=name, **style
            )
        panel.set(xscale='log', yscale='log', xlabel='tokens', ylabel='ms', title=MODES[mode])
        panel.grid(which='major', alpha=0.3)
    panels[0][-1].legend(loc='lower right')
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--only', nargs='+', choices=names(), default=names(), help='attentions')
    parser.add_argument('--sides', nargs='+', type=int, default=list(SIDES), help='of square feature maps, ascending')
    parser.add_argument('--modes', nargs='+', choices=tuple(MODES), default=list(MODES))
    parser.add_argument('--dim', type=int, default=256, help='channels')
    parser.add_argument('--heads', type=int, default=8)
    parser.add_argument(
        '--threads',
        type=int,
        default=1,
        help='CPU threads of PyTorch; use one on a busy machine',
    )
    parser.add_argument('--repeats', type=int, default=7, help='timed rounds; the fastest counts')
    parser.add_argument('--max-seconds', type=float, default=20, help='limit of a call and of a size')
    parser.add_argument('--no-memory', action='store_true', help='times only')
    parser.add_argument('--out', type=Path, help='write the tables to this markdown file as well')
    parser.add_argument('--plot', type=Path, help='draw the times into this image')
    args = parser.parse_args(argv)
    if sorted(set(args.sides)) != args.sides or args.sides[0] < 1:
        parser.error(f'--sides={args.sides}: expected ascending numbers of at least 1')
    return args


def main(argv=None) -> None:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    report, all_seconds = Report(), {}
    report.add(f'Attentions, {args.heads} heads of {args.dim // args.heads}, {machine("cpu", args.threads)}')
    for mode in args.modes:
        seconds = all_seconds[mode] = run_times(args, mode)
        memory = {} if args.no_memory else run_memory(args, mode, seconds)
        report_times(report, args, mode, seconds, memory)
    if args.out:
        args.out.write_text('\n'.join(report.lines) + '\n')
    if args.plot:
        draw(args.plot, args, all_seconds)


if __name__ == '__main__':
    main()
