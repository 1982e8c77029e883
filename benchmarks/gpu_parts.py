# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The parts of ``check_gpu.py``, each run in a process of its own: ``python benchmarks/gpu_parts.py PART FILE``.

A part returns what goes into ``report.json``. What does not fit a GPU's memory is measured with half the images.
"""

import gc
import json
import math
import os
import platform
import re
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / 'benchmarks'), str(ROOT), str(ROOT / 'tests' / 'ops')]

import measure  # noqa: E402

INTERPRET = os.environ.get('TRITON_INTERPRET') == '1'
DEVICE = 'cpu' if INTERPRET else 'cuda'
if INTERPRET:
    import interpreter  # noqa: F401

from mmlinattn import ops  # noqa: E402
from mmlinattn.ops import dispatch  # noqa: E402

ATTENTIONS = ('rala', 'inline_attention', 'linear_attention', 'focused_attention')
DTYPES = ('float32', 'float16', 'bfloat16')
TOKENS = tuple(2**i for i in range(10, 17))
BATCH, HEADS, WIDTH, IMAGES, REPEATS = 8, 16, 64, 8, 20
SIDES = dict(forward=(800, 1216), train=(640, 640))


# --- what is right ----------------------------------------------------------------------------------------------------


def environment() -> dict:
    import triton

    from mmlinattn.ops.triton import canary

    found = dict(python=platform.python_version(), torch=torch.__version__, triton=triton.__version__)
    if not INTERPRET:
        properties = torch.cuda.get_device_properties(0)
        found.update(gpu=properties.name, capability=f'{properties.major}.{properties.minor}', cuda=torch.version.cuda)
        found.update(gib=round(properties.total_memory / 2**30, 1), multiprocessors=properties.multi_processor_count)
    return dict(found, identity=canary.environment(torch.device(DEVICE, None if INTERPRET else 0)))


def tests() -> dict:
    """The project's own tests of a GPU, or of the interpreter."""
    files = ['tests/test_cuda.py', 'tests/ops/test_triton.py::test_kernels_on_the_gpu']
    if INTERPRET:
        files = ['tests/ops/triton_checks.py', '-m', 'not slow']
    command = [sys.executable, '-m', 'pytest', '-q', '-rfE', '--tb=line', '-p', 'no:cacheprovider', *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    counts = {word: int(number) for number, word in re.findall(r'(\d+) (passed|failed|skipped|error)', done.stdout)}
    if not counts:
        raise RuntimeError((done.stdout + done.stderr)[-2000:])
    failed = re.findall(r'^(?:FAILED|ERROR) (.*)$', done.stdout, re.MULTILINE)
    return dict(counts=counts, failed=failed, right=done.returncode == 0)


def variants(dtype: torch.dtype, op: str):
    """What is compiled, of one op and type."""
    from mmlinattn.ops.triton import attention_launch, attention_op

    device = torch.device(DEVICE, None if INTERPRET else 0)
    widths = [d for d in (16, 24, 32, 48, 64, 96, 128) if d <= attention_launch.WIDEST_HEAD[dtype]]
    maps = dict(rala='elu', inline_attention='identity', linear_attention='relu', focused_attention='focused')
    shared = dict(power=3.0 if op == 'focused_attention' else 1.0, dtype=dtype, device=device, weighted=op == 'rala')
    for d in widths[:2] if INTERPRET else widths:
        every = dict(masked=True, rotary=op == 'rala', offset=op == 'focused_attention', aligned=True)
        none = dict.fromkeys(every, False)
        for flags in [every] if d not in (32, 64) else [every, none, dict(none, aligned=True)]:
            yield attention_op.Variant(op, maps[op], d=d, e=d, **shared, **flags)


def kernels(dtype: str, op: str) -> dict:
    """Trials of kernels beside float64."""
    from mmlinattn.ops.triton import attention, attention_launch, canary, trial

    assert attention  # the ops are registered
    rows = []
    for variant in variants(getattr(torch, dtype), op):
        if INTERPRET:
            trial.TOKENS, attention_launch.FEWEST_TOKENS = 71, 16
            answer = trial.trial(variant)
        else:
            answer = canary.ask(variant)  # in a process that an illegal access may end
        faults = {direction: answer[direction] for direction in canary.DIRECTIONS if answer[direction]}
        numbers = {key: value for key, value in answer.get('deviations', {}).items() if math.isfinite(value)}
        rows.append(dict(variant=canary.name_of(variant), faults=faults, deviations=numbers))
    return dict(rows=rows, bound=canary.BOUNDS[getattr(torch, dtype)], right=not any(row['faults'] for row in rows))


# --- what it takes ----------------------------------------------------------------------------------------------------


def shrinking(batch: int, run) -> dict:
    """``run(batch)``, with half the batch where memory does not suffice."""
    while True:
        try:
            return dict(batch=batch, **run(batch))
        except torch.cuda.OutOfMemoryError:
            if batch == 1:
                raise
        batch //= 2
        gc.collect()
        torch.cuda.empty_cache()


def fallbacks(caught) -> list[str]:
    return sorted({str(w.message) for w in caught if 'plain PyTorch' in str(w.message)})


def times_of(calls: dict) -> dict[str, float]:
    return {key: 1e3 * value for key, value in measure.interleaved_times(calls, REPEATS, DEVICE).items()}


def attention(tokens: int, dtype: torch.dtype = torch.bfloat16) -> dict:
    """Milliseconds of each op by kernels and in plain PyTorch, of fused softmax attention, and of a public kernel."""

    def run(batch: int) -> dict:
        x = torch.randn(batch, tokens, 3 * HEADS * WIDTH, device=DEVICE, dtype=dtype)
        leaves = [part.detach().requires_grad_() for part in x.chunk(3, dim=-1)]  # no form joins their gradients
        grad = torch.randn(batch, tokens, HEADS * WIDTH, device=DEVICE, dtype=dtype)
        angle = torch.rand(tokens, WIDTH // 2, device=DEVICE)
        scale = torch.rand(HEADS * WIDTH, device=DEVICE) + 0.5
        options = dict(
            rala=dict(rotary=torch.stack((angle.cos(), angle.sin()), dim=-1), weight_scale=WIDTH**-0.5),
            inline_attention=dict(scale=WIDTH**-0.5),
            linear_attention=dict(kernel='elu'),
            focused_attention=dict(inverse_scale=scale, power=3),
        )
        calls, served = {}, {}

        def add(name: str, function, choice: str, tensors=leaves, probe=grad) -> None:
            def forward():
                with torch.no_grad(), ops.use(choice):
                    function(*tensors)

            def both():
                with ops.use(choice):
                    torch.autograd.grad(function(*tensors), tensors, probe)

            calls.update({f'{name} forward': forward, f'{name} both': both})

        for name in ATTENTIONS:
            function = partial(getattr(ops, name), num_heads=HEADS, **options[name])
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter('always')
                served[name] = 'mmlinattn' in str(function(*leaves).grad_fn)
            served[f'{name} told'] = fallbacks(caught)
            add(f'{name} kernels', function, 'auto')
            add(f'{name} plain', function, 'eager')
        by_head = [leaf.detach().unflatten(-1, (HEADS, -1)).transpose(1, 2).requires_grad_() for leaf in leaves]
        probe = grad.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        add('softmax', F.scaled_dot_product_attention, 'auto', by_head, probe)
        try:
            from flash_bla.ops.linear_attn.fused import linear_attention as peer
        except ImportError:
            pass
        else:
            mapped = [F.elu(t.detach()) + 1 for t in by_head[:2]] + [by_head[2].detach()]
            add('flash_bla', peer, 'auto', [t.contiguous().requires_grad_() for t in mapped], probe.contiguous())
        source, target = (torch.empty(4 * x.numel() // 3, device=DEVICE, dtype=dtype) for _ in range(2))
        calls['copy'] = lambda: target.copy_(source)  # reads and writes twice what a forward pass has to
        return dict(times=times_of(calls), served=served)

    return dict(shrinking(BATCH, run), tokens=tokens, megabytes=2 * HEADS * WIDTH * tokens / 1e6)


def step(model, mode: str, images: int, call=None):
    """A forward pass, or a training step, under autocast to bfloat16."""
    x = torch.randn(images, 3, *SIDES[mode], device=DEVICE)
    call = model if call is None else call  # what torch.compile gives has no truth value

    def run():
        with torch.autocast(DEVICE, torch.bfloat16):
            if mode == 'forward':
                with torch.no_grad():
                    return call(x)
            outs = call(x)
        model.zero_grad()
        sum(out.float().mean() for out in outs).backward()

    return run


def by_kernels(*tensors) -> str:
    """In place of ``dispatch.backend``, which gives graphs the reference."""
    return 'triton'


def backbones(mode: str, compiled: bool) -> dict:
    """Milliseconds and memory of RAVLT-T, of its fully linear form and of its softmax twin."""
    import literal_ravlt

    from mmlinattn.backbones import RAVLT

    def build(attention=None):
        torch.manual_seed(0)
        options = {} if attention is None else dict(stage_attns=(attention,) * 4)
        return RAVLT('tiny', drop_path_rate=0.0, **options).to(DEVICE).train(mode == 'train')

    def inside_graph(call):
        def run():
            with mock.patch.object(dispatch, 'backend', by_kernels):
                call()

        return run

    def chosen(call, choice: str):
        def run():
            with ops.use(choice):
                call()

        return run

    def run(images: int) -> dict:
        models = {'RAVLT-T': build(), 'fully linear': build('rala'), 'softmax twin': build('softmax')}
        calls = {}
        torch._dynamo.reset()
        torch._dynamo.config.cache_size_limit = 64  # of one code, that all these models have
        for name, model in models.items():
            if not compiled:
                calls[name] = step(model, mode, images)
                calls[f'{name}, plain'] = chosen(calls[name], 'eager')
                continue
            calls[name] = step(model, mode, images, torch.compile(model, dynamic=False))
            if name != 'softmax twin':
                inside = torch.compile(build(None if name == 'RAVLT-T' else 'rala'), dynamic=False)
                calls[f'{name}, kernels inside'] = inside_graph(step(inside, mode, images))
        if not compiled:
            calls['literal'] = step(models['RAVLT-T'], mode, images, partial(literal_ravlt.forward, models['RAVLT-T']))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            times = times_of(calls)
        memory = {name: measure.peak_cuda(call) / measure.MIB for name, call in calls.items()}
        return dict(times=times, memory=memory, told=fallbacks(caught))

    return shrinking(IMAGES, run)


def detector() -> dict:
    """Milliseconds of a training iteration of Mask R-CNN."""
    from mmdet.registry import MODELS
    from mmdet.testing import demo_mm_inputs
    from mmengine.config import Config

    ours = Config.fromfile(ROOT / 'configs' / 'mmdet' / 'ravlt_t_maskrcnn_1x.py').model
    resnet = Config.fromfile('mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py').model
    ours.backbone.init_cfg = resnet.backbone.init_cfg = None
    configs = {'RAVLT-T': ours, 'ResNet-50': resnet}
    for name, attention in (('fully linear', 'rala'), ('softmax twin', 'softmax')):
        configs[name] = {**ours, 'backbone': {**ours.backbone, 'stage_attns': (attention,) * 4}}

    def run(images: int) -> dict:
        calls = {}
        for name, config in configs.items():
            model = MODELS.build(config).train().to(DEVICE)
            shapes = [[3, 800, 1333]] * images
            batch = demo_mm_inputs(images, shapes, num_items=[8] * images, num_classes=80, with_mask=True)

            def iteration(model=model, batch=batch):
                with torch.autocast(DEVICE, torch.bfloat16):
                    losses = model(**model.data_preprocessor(batch, True), mode='loss')
                model.zero_grad()
                model.parse_losses(losses)[0].backward()

            calls[name] = iteration
        return dict(times=times_of(calls))

    return shrinking(2, run)


PARTS = {
    'environment': environment,
    'tests': tests,
    **{f'kernels {t} {op}': partial(kernels, t, op) for t in DTYPES for op in ATTENTIONS},
}
RIGHT = tuple(PARTS)  # those that tell right from wrong; they run in the interpreter, too
PARTS.update({f'attention {tokens}': partial(attention, tokens) for tokens in TOKENS})
for compiled in (False, True):
    for mode in ('forward', 'train'):
        PARTS[f'{"compiled" if compiled else "eager"} {mode}'] = partial(backbones, mode, compiled)
PARTS['detector'] = detector

if __name__ == '__main__':
    part, file = sys.argv[1:]
    Path(file).write_text(json.dumps(PARTS[part]()))
