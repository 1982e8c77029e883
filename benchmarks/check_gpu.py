# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Measures what to take on this GPU: eager, compiled (``--compile``) or Triton kernels (``MMLINATTN_OPS=triton``).

    python benchmarks/check_gpu.py --out DIR [--minutes M]
    python benchmarks/check_gpu.py --out DIR --interpret     # a rehearsal on a CPU: small, its times mean nothing

First whether each kernel is right, then a forward pass and a training step of each form, MMDetection's Swin-T beside
them. Each part is a process of its own: one that fails or hangs is reported, and the others go on. DIR gets
``report.md`` and ``report.json``; the last lines say which form to take. Needs mmengine and mmcv-lite; what needs
MMDetection or Triton is skipped without them.
"""

import argparse
import contextlib
import importlib
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Callable, Optional

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

INTERPRET = os.environ.get('TRITON_INTERPRET') == '1'
SWIN = dict(embed_dims=96, depths=[2, 2, 6, 2], num_heads=[3, 6, 12, 24], window_size=7, convert_weights=False)
PEER = "MMDetection's Swin-T"
if INTERPRET:
    DEVICE, IMAGES, REPEATS, COMPILER = 'cpu', (2, 3), 1, dict(backend='eager')
    SIDES = dict(forward=(64, 96), train=(64, 64))
    WIDTHS, TOKENS = (16,), (37,)
    arch = dict(embed_dims=(16, 16, 32, 32), depths=(1,) * 4, num_heads=(1,) * 4, mlp_ratios=(2,) * 4)
    rala, swin = dict(arch, stage_attns=('rala', 'rala', 'softmax', 'softmax')), dict(arch, stage_attns=('inline',) * 4)
    SWIN.update(embed_dims=16, depths=[1] * 4, num_heads=[1] * 4)
else:
    DEVICE, IMAGES, REPEATS, COMPILER = 'cuda', (2, 8), 20, {}
    SIDES = dict(forward=(800, 1216), train=(640, 640))
    WIDTHS, TOKENS = (32, 48, 64), (1000, 16411)
    rala, swin = 'tiny', 'inline-tiny'

MODELS: dict = {
    'RAVLT-T': dict(type='RAVLT', arch=rala),
    'RAVLT-T, fully linear': dict(type='RAVLT', arch=rala, stage_attns=('rala',) * 4),
    'InLine-Swin-T': dict(type='LinearSwin', arch=swin),
    PEER: dict(type='mmdet.SwinTransformer', **SWIN),
}
FORMS = ('eager', 'compiled', 'kernels')
OPS = {'rala elu': 'rala', 'linear elu': 'linear_attention', 'linear relu': 'linear_attention'}
FLOOR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # of a relative error: rounding of the type


class OnCPU:
    """The part of ``torch.cuda`` that this script uses, for a rehearsal."""

    @staticmethod
    def get_device_properties(device):
        return SimpleNamespace(name='none, a rehearsal', major=8, minor=0, total_memory=0)

    synchronize = empty_cache = reset_peak_memory_stats = staticmethod(lambda: None)
    memory_allocated = max_memory_allocated = staticmethod(lambda: 0)


cuda = OnCPU if INTERPRET else torch.cuda
clock = time.perf_counter


class Skip(Exception):
    """Why a part cannot run here, in one line."""


def require(module: str, name: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:  # MMDetection asserts versions
        raise Skip(f'{name} cannot be imported ({type(error).__name__}: {error})'.replace('\n', ' ')) from error


# --- parts, which yield rows ------------------------------------------------------------------------------------------


def machine():
    gpu, versions = cuda.get_device_properties(0), dict(python=platform.python_version(), cuda=str(torch.version.cuda))
    for name in ('torch', 'triton', 'mmlinattn', 'mmdet'):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    yield dict(gpu=gpu.name, capability=f'{gpu.major}.{gpu.minor}', GiB=round(gpu.total_memory / 2**30, 1), **versions)


def kernels(op: str):
    """Relative errors of output and gradients beside float64, by kernels and by PyTorch's operators in one type."""
    from mmlinattn import ops

    require('triton', 'Triton')
    if INTERPRET:
        sys.path.insert(0, str(ROOT / 'tests' / 'ops'))
        importlib.import_module('interpreter')  # for recent NumPy
    function, kernel, heads, batch = getattr(ops, OPS[op]), op.split()[1], 3, 2

    def results(choice: str, tensors, probe, **options) -> list:
        q, k, v = leaves = [t.detach().requires_grad_() for t in tensors]
        if 'mask' in options:
            v = v * options['mask'][..., None]  # has to be zero there; its gradient there says nothing
        with ops.use(choice):
            out = function(q, k, v, heads, kernel=kernel, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, probe)]

    def error(found: list, exact: list) -> float:
        errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, exact)]
        return max(value if math.isfinite(value) else 1e9 for value in errors)  # which JSON has, and max finds

    for dtype, width, tokens, masked in itertools.product(FLOOR, WIDTHS, TOKENS, (False, True)):
        torch.manual_seed(0)
        shape = batch, tokens, heads * width
        q, k, v, probe = (torch.randn(shape, device=DEVICE).to(dtype) for _ in range(4))
        options: dict = {}
        if masked:
            options['mask'] = torch.arange(tokens, device=DEVICE).expand(batch, -1) < 0.7 * tokens
        wide = options
        if OPS[op] == 'rala':
            angle = 6 * torch.rand(tokens, width // 2, device=DEVICE)
            options.update(rotary=torch.stack((angle.cos(), angle.sin()), dim=-1), weight_scale=width**-0.5)
            wide = dict(options, rotary=options['rotary'].double())
        exact = results('reference', [t.double() for t in (q, k, v)], probe.double(), **wide)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            found, again = (results('triton', (q, k, v), probe, **options) for _ in '12')
        ours, plain = error(found, exact), error(results('auto', (q, k, v), probe, **options), exact)
        same = all(map(torch.equal, found, again))
        yield dict(
            case=f'{str(dtype)[6:]}, heads of {width}, {tokens} tokens' + ', masked' * masked,
            kernel=ours,
            pytorch=plain,
            same_bits_twice=same,
            right=same and ours <= min(max(4 * plain, FLOOR[dtype]), 0.1),
            told=sorted({str(w.message) for w in caught if 'triton' in str(w.message)}),
        )


def steps(name: str, form: str):
    """Times and memory of one model in one form."""
    if name == PEER:
        require('mmdet.models', 'MMDetection')
    if form == 'kernels':
        require('triton', 'Triton')
    from mmengine.registry import MODELS as REGISTRY

    import mmlinattn  # noqa: F401  registers the backbones
    from mmlinattn import ops
    from mmlinattn.engine.hooks.compiling import compile_blocks

    torch.manual_seed(0)
    model = REGISTRY.build(dict(MODELS[name], drop_path_rate=0.0)).to(DEVICE)
    call: Callable = torch.compile(model, **COMPILER) if form == 'compiled' and name == PEER else model
    if form == 'compiled' and name != PEER:
        compile_blocks(model, **COMPILER)
    half = torch.bfloat16 if cuda.get_device_properties(0).major >= 8 else torch.float16

    def step(x, trains: bool) -> None:
        with torch.autocast(DEVICE, half), torch.set_grad_enabled(trains):
            outs = call(x)
        if trains:
            model.zero_grad()
            sum(out.float().mean() for out in outs).backward()

    for mode, images in itertools.product(SIDES, IMAGES):
        model.train(mode == 'train')
        try:
            cuda.empty_cache()
            x = torch.randn(images, 3, *SIDES[mode], device=DEVICE)
            with ops.use('triton' if form == 'kernels' else 'auto'):
                found = measured(partial(step, x, mode == 'train'))
        except Exception as error:  # what is left may still work
            found = dict(error=f'{type(error).__name__}: {error}'[:1000])
        yield dict(step=f'{mode}, {images} images', **found)


def measured(call: Callable[[], None]) -> dict:
    """Milliseconds (median) and MiB of a call, and seconds of the first, in which compiling happens."""
    seconds = []
    for i in range(REPEATS + 2):
        if i == 2:
            cuda.synchronize()
            before = cuda.memory_allocated()
            cuda.reset_peak_memory_stats()
        start = clock()
        call()
        cuda.synchronize()
        seconds.append(clock() - start)
    ms = 1e3 * statistics.median(seconds[2:])
    return dict(ms=ms, MiB=(cuda.max_memory_allocated() - before) / 2**20, first_s=seconds[0])


PARTS: dict = {'machine': machine, **{f'kernels, {op}': partial(kernels, op) for op in OPS}}
for name, form in itertools.product(MODELS, FORMS):
    if form != 'kernels' or name.startswith('RAVLT'):
        PARTS[f'{name}, {form}'] = partial(steps, name, form)


def run_here(name: str, file: Path) -> None:
    """Run a part and write what it has found so far after each row."""
    rows: list = []
    answer = dict(status='stopped', rows=rows)
    try:
        for row in PARTS[name]():
            rows.append(row)
            file.write_text(json.dumps(answer))
        answer['status'] = 'done'
    except Skip as reason:
        answer['status'] = f'skipped: {reason}'
    file.write_text(json.dumps(answer))


def run_part(name: str, interpret: bool, seconds: float) -> dict:
    """:func:`run_here` in a process of its own: status, rows, and the error that ended it."""
    environment = {key: value for key, value in os.environ.items() if key != 'TRITON_INTERPRET'}
    if interpret:
        environment.update(TRITON_INTERPRET='1', CUDA_VISIBLE_DEVICES='')
    with tempfile.TemporaryDirectory() as folder:
        file, log, error = Path(folder) / 'part.json', Path(folder) / 'log', ''
        command = [sys.executable, __file__, '--out', str(file), '--part', name]
        try:
            with log.open('w') as said:  # no pipe, which the compiler's processes may hold open
                status = subprocess.run(command, env=environment, stdout=said, stderr=said, timeout=seconds).returncode
            error = log.read_text().strip()[-3000:] or f'status {status}' if status else ''
        except subprocess.TimeoutExpired:
            error = f'no end within {seconds:.0f} s'
        answer = json.loads(file.read_text()) if file.exists() else dict(rows=[])
    return dict(answer, status='failed', error=error) if error else answer


# --- what it comes to -------------------------------------------------------------------------------------------------


def rows_of(parts: dict, *names: str) -> list[dict]:
    return [row for name in names for row in parts.get(name, {}).get('rows', [])]


def ms_of(parts: dict, name: str, form: str, step: str) -> Optional[float]:
    return next((row.get('ms') for row in rows_of(parts, f'{name}, {form}') if row['step'] == step), None)


def steps_of(parts: dict) -> list[str]:
    return list(dict.fromkeys(row['step'] for row in rows_of(parts, *parts) if 'step' in row))


def kernels_right(parts: dict) -> Optional[bool]:
    """None where they were not checked to the end, or PyTorch's operators ran in their place."""
    names = [f'kernels, {op}' for op in OPS]
    rows, status = rows_of(parts, *names), [parts.get(name, {}).get('status') for name in names]
    if 'failed' in status or not all(row['right'] for row in rows):
        return False
    return True if set(status) == {'done'} and not any(row['told'] for row in rows) else None


def advice(parts: dict) -> list[str]:
    """Which form to take, and whether kernels reach what makes them the default (docs/gpu.md)."""
    lines, worth, right = [], [], kernels_right(parts)
    flags = dict(eager='neither', compiled='--compile', kernels='MMLINATTN_OPS=triton')
    for name in (name for name in MODELS if name != PEER):
        for step in steps_of(parts):
            times = {form: ms_of(parts, name, form, step) for form in FORMS}
            gains = {form: times['eager'] / ms for form, ms in times.items() if ms and times['eager']}
            if step.startswith('train') and f'{name}, kernels' in PARTS:
                worth.append((gains.get('kernels'), gains.get('compiled')))
            if len(gains) < 2:
                lines.append(f'{name}, {step}: not measured')
                continue
            best = max((form for form in gains if form != 'kernels' or right), key=gains.__getitem__)
            told = ', '.join(f'{form} {gain:.2f}x' for form, gain in gains.items() if form != 'eager')
            lines.append(f'{name}, {step}: take {flags[best if gains[best] >= 1.05 else "eager"]} ({told} of eager)')
    known = bool(worth) and all(a and b for a, b in worth)
    reached = all(a >= 1.2 and a > b for a, b in worth) if known else None
    answers = {True: 'yes', False: 'no', None: 'not known'}
    lines.append(
        f'Kernels right: {answers[right]}. Each training step at least 1.2x of eager and ahead of --compile: '
        f'{answers[reached]}.'
    )
    return lines


def table(titles, rows) -> list[str]:
    return ['', *('| ' + ' | '.join(map(str, line)) + ' |' for line in (titles, ['---'] * len(titles), *rows))]


def cell(row: dict, peer: Optional[float]) -> str:
    if 'ms' not in row:
        return row.get('error', '')[:80].replace('\n', ' ')
    return f'{row["ms"]:.2f} ms, {row["MiB"]:.0f} MiB' + (f', {peer / row["ms"]:.2f}x' if peer else '')


def report(parts: dict) -> list[str]:
    lines = ['# mmlinattn on this GPU', '', *map(str, rows_of(parts, 'machine'))]
    lines += ['', '## Which to take', '', *(f'- {line}' for line in advice(parts)), '', '## Kernels beside float64']
    rows = []
    for op in OPS:
        for row in rows_of(parts, f'kernels, {op}'):
            errors = (f'{row[form]:.1e}' for form in ('kernel', 'pytorch'))
            rows.append((op, row['case'], *errors, 'yes' if row['right'] else '**no**', '; '.join(row['told'])))
    lines += table(('attention', 'case', 'error of the kernel', "of PyTorch's operators", 'right', 'warnings'), rows)
    lines += ['', '## Time and memory', '', 'Half precision, no stochastic depth. x: of the speed of eager']
    lines[-1] += f" {PEER}. The first step holds the compiler's time."
    rows = []
    for name, form in ((name, form) for name in MODELS for form in FORMS):
        found = {row['step']: row for row in rows_of(parts, f'{name}, {form}')}
        cells = [cell(found.get(step, {}), ms_of(parts, PEER, 'eager', step)) for step in steps_of(parts)]
        first = max((row.get('first_s', 0) for row in found.values()), default=0)
        rows += [(name, form, *cells, f'{first:.1f}')] if found else []
    lines += table(('', '', *steps_of(parts), 'longest first step, s'), rows)
    for name, part in parts.items():
        if part['status'] != 'done':
            lines += ['', f'{name}: {part["status"]}', *(['```', part['error'], '```'] if 'error' in part else [])]
    return lines


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, required=True, help='folder for the report')
    parser.add_argument('--minutes', type=float, default=60, help='begin no part after this time [60]')
    parser.add_argument('--interpret', action='store_true', help='a rehearsal on a CPU, kernels in the interpreter')
    parser.add_argument('--part', choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.part:
        run_here(args.part, args.out)
        return 0
    if not args.interpret and not torch.cuda.is_available():
        print('check_gpu.py: PyTorch sees no GPU here; --interpret rehearses on a CPU')
        return 1
    end = time.monotonic() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    parts: dict = {}
    for name in PARTS:
        left = end - time.monotonic()
        # one that hangs leaves time to others
        parts[name] = run_part(name, args.interpret, min(left, 1200)) if left > 0 else dict(status='no time left')
        print(f'{name}: {parts[name]["status"]}', flush=True)
        (args.out / 'report.json').write_text(json.dumps(dict(parts=parts, take=advice(parts)), indent=1))
        (args.out / 'report.md').write_text('\n'.join(report(parts)) + '\n')
    if args.interpret:
        print('A rehearsal: its times, and what they say to take, mean nothing.')
    else:
        print(f'Please send {args.out} to the authors of mmlinattn, as an issue of the repository.')
    print(*advice(parts), sep='\n')
    return int(kernels_right(parts) is False or any(part['status'] == 'failed' for part in parts.values()))


if __name__ == '__main__':
    sys.exit(main())
