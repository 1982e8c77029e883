# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Speed and memory of InLine and focused linear attention, and of Swin with them.

    python benchmarks/run_linear.py --out linear_cpu.md
    python benchmarks/run_linear.py --only attention --tokens 16384
    python benchmarks/run_linear.py --only training backbones --threads 1 --clock cpu  # on a shared machine

Parts of ``--only``:

- attention, traffic: attentions against their equations (``reference_attention.py``);
- models, growth: Swin with a linear attention against Swin with softmax in 7x7 windows;
- training: training steps against MMDetection's own Swin-T;
- backbones: every backbone of the papers against itself with ``MMLINATTN_OPS=reference``.

All ratios are of one run, medians of interleaved repeats. See README.md in this folder.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import measure  # noqa: E402
import reference_attention  # noqa: E402
from run_ravlt import Report, Target, compare, machine, mib, ms  # noqa: E402

from mmlinattn import ops  # noqa: E402
from mmlinattn.backbones import LinearCSWin, LinearPVT, LinearPVTv2, LinearSwin  # noqa: E402

HEAD_DIM, POWER = 32, 3
MODELS = {
    'Swin-T (softmax 7x7)': dict(arch='softmax-tiny'),
    'InLine-Swin-T, global': dict(arch='inline-tiny', window_size=None),
    'FLatten-Swin-T': dict(arch='flatten-tiny'),
}
BACKBONES = {
    'InLine-Swin-T': (LinearSwin, 'inline-tiny'),
    'InLine-PVT-T': (LinearPVT, 'inline-tiny'),
    'InLine-CSWin-T': (LinearCSWin, 'inline-tiny'),
    'FLatten-Swin-T': (LinearSwin, 'flatten-tiny'),
    'FLatten-PVT-T': (LinearPVT, 'flatten-tiny'),
    'FLatten-PVTv2-B1': (LinearPVTv2, 'flatten-b1'),
    'FLatten-CSWin-T': (LinearCSWin, 'flatten-tiny'),
}
CLOCKS = dict(wall=time.perf_counter, cpu=time.process_time)


def by_head(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def inline(q, k, v, heads, reference):
    if not reference:
        return ops.inline_attention(q, k, v, heads, HEAD_DIM**-0.5)
    parts = (by_head(t, heads) for t in (q, k, v))
    return reference_attention.inline(*parts, HEAD_DIM**-0.5).transpose(1, 2).flatten(2)


def focused(q, k, v, heads, reference):
    scale = q.new_zeros(q.shape[-1])
    if reference:
        return reference_attention.focused(q, k, v, scale, POWER, heads)
    return ops.focused_attention(q, k, v, heads, 1 / F.softplus(scale), POWER)


ATTENTIONS = dict(inline=inline, focused=focused)


def attention_calls(name, reference, train, tokens, heads):
    """Return a call of an attention on a few tokens, to warm up, and one on ``tokens`` tokens. Queries, keys and values
    are slices of one projection."""

    def at(tokens):
        qkv = torch.randn(1, tokens, 3 * heads * HEAD_DIM, requires_grad=train)
        probe = torch.randn(1, tokens, heads * HEAD_DIM)

        def call():
            with torch.set_grad_enabled(train):
                parts = qkv.chunk(3, dim=-1)
                out = ATTENTIONS[name](*parts, heads, reference)
            if train:
                qkv.grad = None
                out.backward(probe)

        return call

    return at(256), at(tokens)


def report_attention(args: argparse.Namespace, report: Report) -> None:
    """Add the times and peak memory of the attentions beside their reference implementations to the report."""
    report.add('', f'### Attention, N = {args.tokens}, d = {HEAD_DIM}, {args.heads} heads, batch 1')
    report.table('', 'ours', 'reference', 'ratio', 'target', 'met')
    for name in ATTENTIONS:
        for train in (False, True):
            title = f'{name}, ' + ('forward + backward' if train else 'forward')
            cases = [(name, reference, train, args.tokens, args.heads) for reference in (False, True)]
            times = measure.interleaved_times(
                {str(i): attention_calls(*case)[1] for i, case in enumerate(cases)}, args.repeats
            )
            compare(report, f'time, {title}', times['0'], times['1'], ms, Target(1.5, True))
            ours, reference = (measure.peak_rss(attention_calls, case, args.threads) for case in cases)
            compare(report, f'peak extra memory, {title}', ours, reference, mib, Target(0.5, False))


def report_traffic(args: argparse.Namespace, report: Report) -> None:
    """Time focused attention beside one pass that reads q, k and v and writes the result."""
    width = args.heads * HEAD_DIM
    qkv = torch.randn(1, args.map_tokens, 3 * width).chunk(3, dim=-1)
    with torch.no_grad():
        times = measure.interleaved_times(
            {
                'q + k * v (three reads, one write: the ideal)': lambda: torch.addcmul(*qkv),
                'ours': lambda: focused(*qkv, args.heads, reference=False),
                'reference': lambda: focused(*qkv, args.heads, reference=True),
            },
            args.repeats,
        )
    moved = 4 * args.map_tokens * width * qkv[0].element_size()
    report.add('', f'### Focused attention of {args.map_tokens} x {width}: {mib(moved)} read and written at least')
    report.table('', 'time', 'rate if nothing else were moved', 'against the ideal')
    ideal = next(iter(times.values()))
    for name, seconds in times.items():
        report.row(name, ms(seconds), f'{moved / seconds / 1e9:.1f} GB/s', f'{seconds / ideal:.2f}x')


def model_call(name, size):
    torch.manual_seed(0)
    model, x = LinearSwin(**MODELS[name]).eval(), torch.randn(1, 3, *size)

    def call():
        with torch.no_grad():
            model(x)

    return call


def report_models(args: argparse.Namespace, report: Report) -> None:
    """Add the multiply-adds, times and operators of Swin-T with each attention to the report."""
    size = tuple(args.size)
    report.add('', f'### Swin-T at {size[0]}x{size[1]}, forward, batch 1')
    report.table('', 'multiply-adds', 'time', 'against softmax (at least 1)', 'time by operator')
    runs = {name: model_call(name, size) for name in MODELS}
    times = measure.interleaved_times(runs, args.repeats)
    softmax = next(iter(times.values()))
    for name, seconds in times.items():
        macs = measure.multiply_adds(partial(LinearSwin, **MODELS[name]), 1, 3, *size)
        shares = measure.breakdown(runs[name])
        where = ', '.join(f'{group} {share:.0%}' for group, share in shares.items() if share >= 0.02)
        report.row(name, f'{macs / 1e9:.2f} G', ms(seconds), f'{softmax / seconds:.2f}x', where)


def training_step(model, x):
    """Return a function that clears the gradients and runs one forward and backward pass."""
    model.train()

    def call():
        for parameter in model.parameters():
            parameter.grad = None
        sum(out.mean() for out in model(x)).backward()

    return call


def report_training(args: argparse.Namespace, report: Report) -> None:
    """Add the times of a training step of backbones beside MMDetection's Swin-T to the report."""
    from mmdet.models.backbones.swin import SwinTransformer

    side = args.train_side
    report.add('', f'### Training step of backbones at {side}x{side}, batch 1')
    report.table('', 'time', 'against MMDetection (at most 1)')
    torch.manual_seed(0)
    x, kept = torch.randn(1, 3, side, side), dict(drop_path_rate=0.0)
    models = {
        "MMDetection's Swin-T": SwinTransformer(**kept),
        'InLine-Swin-T, windows of the release': LinearSwin('inline-tiny', **kept),
        'InLine-Swin-T, global': LinearSwin('inline-tiny', window_size=None, **kept),
        'FLatten-Swin-T': LinearSwin('flatten-tiny', **kept),
    }
    calls = {name: training_step(model, x) for name, model in models.items()}
    times = measure.interleaved_times(calls, args.repeats, clock=CLOCKS[args.clock])
    theirs = next(iter(times.values()))
    for name, seconds in times.items():
        report.row(name, ms(seconds), f'{seconds / theirs:.2f}x')


def report_backbones(args: argparse.Namespace, report: Report) -> None:
    """Compare each backbone with itself under ``ops.use('reference')``."""
    batch, side = args.batch, args.backbone_side
    report.add('', f'### Backbones at {batch} x {side}x{side} against the reference implementations of their ops')
    columns = ('reference', 'ratio (goal 1.5)', 'forward + backward', 'reference', 'ratio (goal 1.3)')
    report.table('', 'forward', *columns)
    x = torch.randn(batch, 3, side, side)
    for name, (backbone, arch) in BACKBONES.items():
        torch.manual_seed(0)
        model = backbone(arch, drop_path_rate=0.0)
        cells = []
        for step in (inference, training_step):
            call = step(model, x)
            runs = {form: partial(in_form, form, call) for form in ('auto', 'reference')}
            times = measure.interleaved_times(runs, args.repeats, clock=CLOCKS[args.clock])
            cells += [ms(times['auto']), ms(times['reference']), f'{times["reference"] / times["auto"]:.2f}']
        report.row(name, *cells)


def inference(model, x):
    model.eval()

    def call():
        with torch.no_grad():
            model(x)

    return call


def in_form(form, call):
    with ops.use(form):
        call()


def report_growth(args: argparse.Namespace, report: Report) -> None:
    """Add the time per pixel of a global InLine-Swin-T at growing image sizes to the report."""
    name = 'InLine-Swin-T, global'
    runs = {side: model_call(name, (side, side)) for side in args.sides}
    times = measure.interleaved_times(runs, args.repeats)
    report.add('', f'### {name}, time a pixel')
    report.table('side', 'time', 'ns a pixel', 'against the smallest (within 10 %)')
    first = times[args.sides[0]] / args.sides[0] ** 2
    for side, seconds in times.items():
        each = seconds / side**2
        report.row(side, ms(seconds), f'{each * 1e9:.0f}', f'{each / first:.3f}')


PARTS = dict(
    attention=report_attention,
    traffic=report_traffic,
    models=report_models,
    growth=report_growth,
    training=report_training,
    backbones=report_backbones,
)


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--only', nargs='+', choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument('--threads', type=int, default=2, help='CPU threads of torch')
    parser.add_argument('--repeats', type=int, default=5, help='timed rounds')
    parser.add_argument('--tokens', type=int, default=16384, help='N of the attentions')
    parser.add_argument('--heads', type=int, default=8)
    parser.add_argument('--map-tokens', type=int, default=200 * 304, help='N of the traffic part')
    parser.add_argument('--size', nargs=2, type=int, default=(800, 1216), metavar=('H', 'W'))
    parser.add_argument('--sides', nargs='+', type=int, default=[448, 896, 1344], help='square images, ascending')
    parser.add_argument('--train-side', type=int, default=640, help='image of the training part')
    parser.add_argument('--backbone-side', type=int, default=224, help='side of the images of the backbones part')
    parser.add_argument('--batch', type=int, default=8, help='batch size of the backbones part')
    parser.add_argument(
        '--clock', choices=tuple(CLOCKS), default='wall', help='of training and backbones; cpu for a busy machine'
    )
    parser.add_argument('--out', type=Path, help='write the tables to this markdown file as well')
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    report = Report()
    report.add(f'InLine and focused linear attention, {machine("cpu", args.threads)}')
    for part in args.only:
        PARTS[part](args, report)
    if args.out:
        args.out.write_text('\n'.join(report.lines) + '\n')


if __name__ == '__main__':
    main()
