# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Linear attention on a GPU: the kernels alone, backbones with them, and a detector's training iteration.

    python benchmarks/run_gpu.py --out gpu.md
    python benchmarks/run_gpu.py --only attention crossing

Needs torch with Triton, mmengine and mmcv-lite; ``detector`` also MMDetection. All ratios are of one run, medians of
interleaved repeats. Goals are in the last column.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import literal_ravlt  # noqa: E402
import measure  # noqa: E402
from run_ravlt import Report, ms  # noqa: E402

from mmlinattn import ops  # noqa: E402
from mmlinattn.backbones import RAVLT, LinearSwin  # noqa: E402

PARTS = ('attention', 'crossing', 'models', 'profile', 'detector')
GOALS = dict(rala=4, inline=3, focused=3)


# --- attention alone --------------------------------------------------------------------------------------------------


def attentions(args, tokens: int):
    """The three ops as functions of (q, k, v)."""
    from mmlinattn.ops.triton.attention import focused_attention, inline_attention, rala

    angle = torch.rand(tokens, args.head_dim // 2, device=args.device)
    rotary = torch.stack((angle.cos(), angle.sin()), dim=-1)
    scale = torch.rand(args.heads * args.head_dim, device=args.device) + 0.5
    return dict(
        rala=(rala, ops.rala, dict(rotary=rotary, weight_scale=args.head_dim**-0.5)),
        inline=(inline_attention, ops.inline_attention, dict(scale=args.head_dim**-0.5)),
        focused=(focused_attention, ops.focused_attention, dict(inverse_scale=scale, power=3)),
    )


def tokens_of(args, tokens: int):
    """Several projections of random tokens: what repeats reads memory, not the cache."""
    width = 3 * args.heads * args.head_dim
    made = [torch.randn(args.batch, tokens, width, device=args.device).to(args.dtype) for _ in range(args.copies)]
    return [x.requires_grad_() for x in made]


def forward(op, options, inputs):
    state = dict(i=0)

    @torch.no_grad()
    def call():
        state['i'] += 1
        return op(*inputs[state['i'] % len(inputs)].chunk(3, dim=-1), **options)

    return call


def both_passes(op, options, inputs):
    """Forward and backward."""
    state = dict(i=0)
    grad = None

    def call():
        nonlocal grad
        state['i'] += 1
        x = inputs[state['i'] % len(inputs)]
        out = op(*x.chunk(3, dim=-1), **options)
        grad = torch.randn_like(out) if grad is None else grad
        torch.autograd.grad(out, x, grad)

    return call


def plainly(op):
    def call(*tensors, **options):
        with ops.use('reference'):
            return op(*tensors, **options)

    return call


def softmax(q, k, v, num_heads):
    q, k, v = (t.unflatten(-1, (num_heads, -1)).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def attention(args, report: Report) -> None:
    inputs = tokens_of(args, args.tokens)
    size = inputs[0].numel() // 3 * inputs[0].element_size()  # of one tensor of all tokens
    source, target = (torch.empty(size * 4, dtype=torch.uint8, device=args.device) for _ in range(2))
    copy = measure.interleaved_times({'copy': lambda: target.copy_(source)}, args.repeats, args.device)['copy']
    rate = 8 * size / copy
    report.add(
        '',
        f'### Attention, B {args.batch}, {args.heads} heads of {args.head_dim}, N {args.tokens}, {args.dtype}',
        '',
        f'A copy reads and writes {rate / 1e9:.0f} GB/s. The ideal reads q, k, v and writes the result; backward it '
        'reads those and writes three gradients.',
    )
    report.table('', 'kernels', 'plain form', 'ratio', 'rate of the ideal bytes', 'of a copy', 'goal')
    for name, (kernel, plain, options) in attentions(args, args.tokens).items():
        options = dict(num_heads=args.heads, **options)
        start = time.perf_counter()
        both_passes(kernel, options, inputs)()
        measure.synchronise(args.device)
        first = time.perf_counter() - start
        calls = {}
        for form, op in (('ours', kernel), ('plain', plainly(plain))):
            calls[f'{form} forward'] = forward(op, options, inputs)
            calls[f'{form} both'] = both_passes(op, options, inputs)
        times = measure.interleaved_times(calls, args.repeats, args.device)
        for part, ideal in (('forward', 4), ('backward', 7)):
            # the backward pass is the difference of both and the first
            ours, plain_time = (
                times[f'{form} forward'] if part == 'forward' else times[f'{form} both'] - times[f'{form} forward']
                for form in ('ours', 'plain')
            )
            reached = ideal * size / ours
            cells = [f'{plain_time / ours:.2f}', f'{reached / 1e9:.0f} GB/s', f'{reached / rate:.0%}']
            report.row(f'{name}, {part}', ms(ours), ms(plain_time), *cells, f'{GOALS[name]}x, 50%')
        report.row(f'{name}, first call', ms(first), '', '', '', '', '')


def crossing(args, report: Report) -> None:
    names = ('rala', 'inline', 'focused', 'softmax')
    for part, timed in (('forward', forward), ('forward and backward', both_passes)):
        report.add('', f'### Against fused softmax attention, {part}, B {args.batch}, {args.heads} heads')
        report.table('N', *names)
        for tokens in args.crossing:
            inputs = tokens_of(args, tokens)
            calls = {
                name: timed(kernel, dict(num_heads=args.heads, **options), inputs)
                for name, (kernel, _, options) in attentions(args, tokens).items()
            }
            calls['softmax'] = timed(softmax, dict(num_heads=args.heads), inputs)
            times = measure.interleaved_times(calls, args.repeats, args.device)
            report.row(tokens, *(ms(times[name]) for name in names))


# --- backbones --------------------------------------------------------------------------------------------------------


def step(args, model, mode: str, call=None):
    size = args.train_size if mode == 'train' else args.forward_size
    image = torch.randn(args.images, 3, *size, device=args.device)
    model.train(mode == 'train').to(args.device)
    call = call or model

    def run():
        with torch.autocast(args.device, args.dtype, enabled=args.dtype != torch.float32):
            if mode == 'forward':
                with torch.no_grad():
                    return call(image)
            outs = call(image)
        model.zero_grad()
        sum(out.float().mean() for out in outs).backward()

    return run


def build(args, kind: type, arch: str, **options):
    torch.manual_seed(0)
    if args.tiny:
        options['out_indices'] = (0,)
    return kind(arch, drop_path_rate=0.0, **options)


def models(args, report: Report) -> None:
    ravlt, swin = partial(build, args, RAVLT, 'tiny'), partial(build, args, LinearSwin)
    hybrid, linear, twin = ravlt(), ravlt(stage_attns=('rala',) * 4), ravlt(stage_attns=('softmax',) * 4)
    swins = {arch: swin(f'{arch}-tiny') for arch in ('softmax', 'inline', 'flatten')}
    report.add('', f'### Backbones, {args.images} images, {args.dtype} autocast, eager')
    report.table('', 'ours', 'against', 'ratio', 'goal')
    goals = dict(forward=('4.5x', '3x', '1.2x'), train=('1.8x', '1.3x', '1.2x'))
    for mode in ('forward', 'train'):
        calls = {'RAVLT-T': step(args, hybrid, mode)}
        if not args.tiny:  # the literal model has four stages
            calls['literal'] = step(args, hybrid, mode, partial(literal_ravlt.forward, hybrid))
        calls['fully linear'], calls['softmax twin'] = step(args, linear, mode), step(args, twin, mode)
        calls.update({f'{arch} Swin-T': step(args, model, mode) for arch, model in swins.items()})
        times = measure.interleaved_times(calls, args.repeats, args.device)
        rows = [('RAVLT-T', 'literal', 0), ('fully linear', 'softmax twin', 1)]
        rows += [(f'{arch} Swin-T', 'softmax Swin-T', 2) for arch in ('inline', 'flatten')]
        for ours, other, goal in rows:
            if other in times:
                ratio = times[other] / times[ours]
                report.row(
                    f'{mode}, {ours} / {other}', ms(times[ours]), ms(times[other]), f'{ratio:.2f}', goals[mode][goal]
                )
        if mode == 'train' and args.device == 'cuda':
            ours, other = (measure.peak_cuda(calls[name]) for name in ('fully linear', 'softmax twin'))
            cells = (f'{x / measure.MIB:.0f} MiB' for x in (ours, other))
            report.row('train, memory, fully linear / softmax twin', *cells, f'{ours / other:.2f}', '0.45')


def profile(args, report: Report) -> None:
    """Where the time goes, by group of operations."""
    cases = {
        'RAVLT-T': (RAVLT, 'tiny', {}),
        'RAVLT-T fully linear': (RAVLT, 'tiny', dict(stage_attns=('rala',) * 4)),
        'InLine-Swin-T': (LinearSwin, 'inline-tiny', {}),
        'FLatten-Swin-T': (LinearSwin, 'flatten-tiny', {}),
    }
    report.add('', '### Where the time goes')
    report.table('', 'forward', 'training step')
    for name, (kind, arch, options) in cases.items():
        model, cells = build(args, kind, arch, **options), []
        for mode in ('forward', 'train'):
            shares = measure.breakdown(step(args, model, mode), args.device)
            cells.append(', '.join(f'{group} {share:.0%}' for group, share in shares.items() if share >= 0.02))
        report.row(name, *cells)


def detector(args, report: Report) -> None:
    """A training iteration of Mask R-CNN on synthetic batches."""
    try:
        from mmdet.registry import MODELS
        from mmdet.testing import demo_mm_inputs
        from mmengine.config import Config
    except ImportError as error:
        report.add('', f'Mask R-CNN: not measured, {error.name} is not installed.')
        return
    root = Path(__file__).resolve().parent.parent / 'configs' / 'mmdet'
    ours = Config.fromfile(root / 'ravlt_t_maskrcnn_1x.py').model
    ours.backbone.init_cfg = None
    resnet = Config.fromfile('mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py').model
    resnet.backbone.init_cfg = None
    twin = {**ours, 'backbone': {**ours.backbone, 'stage_attns': ('softmax',) * 4}}
    report.add('', '### Mask R-CNN, one training iteration, 2 images of 800x1333')
    report.table('', 'time')
    calls = {}
    for name, config in (('RAVLT-T', ours), ('softmax twin', twin), ('ResNet-50', resnet)):
        model = MODELS.build(config).train().to(args.device)
        batch = demo_mm_inputs(2, [[3, 800, 1333]] * 2, num_items=[8, 8], num_classes=80, with_mask=True)

        def iteration(model=model, batch=batch):
            with torch.autocast(args.device, args.dtype, enabled=args.dtype != torch.float32):
                data = model.data_preprocessor(batch, True)
                losses = model(**data, mode='loss')
            model.zero_grad()
            model.parse_losses(losses)[0].backward()

        calls[name] = iteration
    for name, seconds in measure.interleaved_times(calls, args.repeats, args.device).items():
        report.row(name, ms(seconds))


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--only', nargs='+', choices=PARTS, default=PARTS)
    parser.add_argument('--device', default='cuda')
    parser.add_argument('--dtype', default='bfloat16', choices=['float32', 'float16', 'bfloat16'])
    parser.add_argument('--batch', type=int, default=8)
    parser.add_argument('--heads', type=int, default=16)
    parser.add_argument('--head-dim', type=int, default=64)
    parser.add_argument('--tokens', type=int, default=16384)
    parser.add_argument('--crossing', type=int, nargs='+', default=[2**i for i in range(10, 17)])
    parser.add_argument('--copies', type=int, default=2, help='sets of inputs that take turns [2]')
    parser.add_argument('--images', type=int, default=8)
    parser.add_argument('--forward-size', type=int, nargs=2, default=[800, 1216])
    parser.add_argument('--train-size', type=int, nargs=2, default=[640, 640])
    parser.add_argument('--tiny', action='store_true', help='first stages only: to see that everything runs')
    parser.add_argument('--repeats', type=int, default=20)
    parser.add_argument('--out', help='write the report to this file as well')
    args = parser.parse_args(argv)
    args.dtype = getattr(torch, args.dtype)
    report = Report()
    device = torch.cuda.get_device_name() if args.device == 'cuda' else 'CPU (times mean nothing)'
    report.add(f'Device: {device}; torch {torch.__version__}.')
    for part in PARTS:
        if part in args.only:
            globals()[part](args, report)
    if args.out:
        Path(args.out).write_text('\n'.join(report.lines) + '\n')


if __name__ == '__main__':
    main()
