# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Check the backbones on this GPU and time them: eager, compiled, and MMDetection's Swin-T.

    python benchmarks/check_gpu.py --out DIR [--minutes M]
    python benchmarks/check_gpu.py --out DIR --rehearse     # on a CPU: small models, times without meaning

values: outputs and gradients of every backbone beside float64. steps: a forward pass and a training step of a backbone.
detectors: whole Mask R-CNN steps, with an optimizer group for each parameter (MMEngine) and with merged groups (ours).
layouts: backbones with the weights of convolutions in both memory formats.

Each part is a process, so a part that fails or hangs leaves the others alone. DIR gets ``report.md`` and
``report.json``; the last lines name the options to choose. Needs mmengine and mmcv-lite; without MMDetection
its parts are skipped.
"""

import argparse
import contextlib
import importlib
import itertools
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, NamedTuple, Optional

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / 'benchmarks'), str(ROOT)]

# fmt: off
BACKBONES = ('RAVLT-T', 'RAVLT-T, fully linear', 'InLine-Swin-T', 'FLatten-Swin-T', 'RALA-Swin-T', 'InLine-PVT-T',
         'FLatten-PVT-T', 'FLatten-PVTv2-B0', 'hMHSA-PVTv2-B1', 'InLine-CSWin-T', 'FLatten-CSWin-T', 'InLine-DeiT-T',
         'hMHSA-Next-ViT-S')
# fmt: on
PEER = 'Swin-T of MMDetection'
TIMED = (*BACKBONES[:4], PEER)
FORMS = ('eager', 'compiled')
DETECTORS = ('RAVLT-T', PEER)
GROUPS = {'one per parameter': 'DefaultOptimWrapperConstructor', 'merged': 'MergedOptimWrapperConstructor'}
LAYOUTS = {'channels last': torch.channels_last, 'contiguous': torch.contiguous_format}
FLOOR = {torch.float32: 1e-5, torch.bfloat16: 3e-2}  # relative error by rounding of the type alone


class Setup(NamedTuple):
    """Sizes of a check.

    Attributes:
        device (str): Device of the tensors.
        shrink (int): Divisor of the published channels.
        images (tuple[int, ...]): Batch sizes.
        sides (dict): Height and width by mode.
        repeats (int): Timed calls.
        compiler (dict): Arguments of ``torch.compile``.
    """

    device: str
    shrink: int
    images: tuple[int, ...]
    sides: dict[str, tuple[int, int]]
    repeats: int
    compiler: dict[str, Any]


REAL = Setup('cuda', 1, (2, 8), dict(forward=(800, 1216), train=(640, 640)), 20, {})
REHEARSAL = Setup('cpu', 8, (2,), dict(forward=(64, 96), train=(64, 64)), 1, dict(backend='eager'))
setup = REAL


class OnCPU:
    """Stand-in for the used part of ``torch.cuda``, for a rehearsal on a CPU."""

    @staticmethod
    def get_device_properties(device):
        return SimpleNamespace(name='none, a rehearsal', major=8, minor=0, total_memory=0)

    synchronize = empty_cache = reset_peak_memory_stats = staticmethod(lambda: None)
    memory_allocated = max_memory_allocated = staticmethod(lambda: 0)


cuda: Any = torch.cuda
clock = time.perf_counter


class Skip(Exception):
    """Raised with the reason, in one line, why a part cannot run."""


def require(module: str, name: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:  # MMDetection asserts versions
        raise Skip(f'{name} cannot be imported ({type(error).__name__}: {error})'.replace('\n', ' ')) from error


def half() -> torch.dtype:
    return torch.bfloat16 if cuda.get_device_properties(0).major >= 8 else torch.float16


# --- parts: generators of rows ----------------------------------------------------------------------------------------


def machine():
    gpu, versions = cuda.get_device_properties(0), dict(python=platform.python_version(), cuda=str(torch.version.cuda))
    for name in ('torch', 'mmlinattn', 'mmdet'):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    yield dict(gpu=gpu.name, capability=f'{gpu.major}.{gpu.minor}', GiB=round(gpu.total_memory / 2**30, 1), **versions)


def values(name: str):
    """Yield a row for each dtype and variant of a backbone: relative errors of outputs and gradients against float64,
    and those of the reference implementation."""
    import launches

    from mmlinattn import ops
    from mmlinattn.engine.hooks.compiling import compile_blocks

    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False
    state, probes = launches.build(name, shrink=setup.shrink).state_dict(), []
    images = torch.randn(2, 3, 96, 128, device=setup.device)

    def results(dtype: torch.dtype, path: str) -> list:
        net = launches.build(name, shrink=setup.shrink).to(setup.device).train()
        net.load_state_dict(state)
        net.to(torch.float64 if dtype == torch.float64 else torch.float32)
        if path == 'compiled':
            compile_blocks(net, **setup.compiler)
        is_half = dtype not in (torch.float32, torch.float64)
        with ops.use('reference' if path == 'plain' else 'auto'):
            with torch.autocast(setup.device, half(), enabled=is_half):
                outs = net(images.to(next(net.parameters()).dtype))
            if not probes:
                probes.extend(torch.randn_like(out) for out in outs)
            sum((out.to(probe.dtype) * probe).sum() for out, probe in zip(outs, probes)).backward()
        grads = [parameter.grad.flatten().double() for parameter in net.parameters() if parameter.grad is not None]
        return [torch.cat([out.detach().flatten().double() for out in outs]), torch.cat(grads)]

    def error(found: list, exact: list) -> float:
        errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found, exact)]
        return max(value if math.isfinite(value) else 1e9 for value in errors)  # JSON has no infinity

    exact = results(torch.float64, 'plain')
    for dtype, path in itertools.product(FLOOR, FORMS if name in TIMED else FORMS[:1]):
        ours, plain = (error(results(dtype, each), exact) for each in (path, 'plain'))
        is_right = ours <= max(4 * plain, FLOOR[dtype])
        yield dict(case=f'{path}, {str(dtype)[6:]}', error=ours, plain=plain, right=is_right)


def steps(name: str, form: str):
    """Yield a row for each mode and batch size of a backbone: median time, peak memory, and time of the first call.

    Args:
        name (str): Backbone.
        form (str): One of ``FORMS``, such as ``'compiled'``.
    """
    if name == PEER:
        require('mmdet.models', 'MMDetection')
    import launches

    from mmlinattn.engine.hooks.compiling import compile_blocks

    torch.manual_seed(0)
    model = launches.build(name, shrink=setup.shrink).to(setup.device)
    call: Callable = torch.compile(model, **setup.compiler) if form == 'compiled' and name == PEER else model
    if form == 'compiled' and name != PEER:
        compile_blocks(model, **setup.compiler)

    for mode, images in itertools.product(setup.sides, setup.images):
        model.train(mode == 'train')
        yield dict(step=f'{mode}, {images} images', **guarded(partial(step_of, model, call), images, mode))


def step_of(model: Any, call: Callable, x: torch.Tensor, trains: bool) -> None:
    """Run a forward pass, or a training step without optimizer."""
    with torch.autocast(setup.device, half()), torch.set_grad_enabled(trains):
        outs = call(x)
    if trains:
        model.zero_grad()
        sum(out.float().mean() for out in outs).backward()


def guarded(step: Callable, images: int, mode: str) -> dict:
    try:
        cuda.empty_cache()
        x = torch.randn(images, 3, *setup.sides[mode], device=setup.device)
        return measured(partial(step, x, mode == 'train'))
    except Exception as error:  # other steps may still work
        return dict(error=f'{type(error).__name__}: {error}'[:1000])


def detectors(name: str, form: str, groups: str):
    """Yield a row with the times of a Mask R-CNN training step and of its optimizer.

    Args:
        name (str): Backbone.
        form (str): One of ``FORMS``, such as ``'compiled'``.
        groups (str): Key of ``GROUPS``, the constructor of the parameter groups.
    """
    require('mmdet.models', 'MMDetection')
    import count_traffic
    from mmdet.testing import demo_mm_inputs
    from mmengine.optim import OptimWrapper
    from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS

    from mmlinattn.engine.hooks.compiling import compile_blocks

    constructor = GROUPS[groups]
    if constructor not in OPTIM_WRAPPER_CONSTRUCTORS:
        raise Skip(f'{constructor} is not registered')
    model, optimizer = count_traffic.detector(name, constructor, setup.device)
    model.train()
    if form == 'compiled':
        compile_blocks(model, **setup.compiler)
    height, width = setup.sides['train']
    data = demo_mm_inputs(2, [[3, height, width]] * 2, num_classes=80, num_items=[5, 5], with_mask=True)
    wrapper = OptimWrapper(optimizer)  # bfloat16 needs no scaler

    def step() -> None:
        batch = model.data_preprocessor(dict(data), training=True)
        with torch.autocast(setup.device, half()):
            losses = model(**batch, mode='loss')
        wrapper.update_params(model.parse_losses(losses)[0])

    row = dict(step='train, 2 images', groups=len(optimizer.param_groups), **measured(step))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    yield dict(row, optimizer_ms=measured(optimizer.step)['ms'])


def layouts(name: str):
    """Yield a row for each memory format of the convolution weights, mode and batch size: time and memory."""
    if name == PEER:
        require('mmdet.models', 'MMDetection')
    import launches

    torch.manual_seed(0)
    model = launches.build(name, shrink=setup.shrink).to(setup.device)
    for layout, kind in LAYOUTS.items():
        model.to(memory_format=kind)
        for mode, images in itertools.product(setup.sides, setup.images):
            model.train(mode == 'train')
            step = partial(step_of, model, model)
            yield dict(layout=layout, work=f'{mode}, {images} images', **guarded(step, images, mode))


def measured(call: Callable[[], Any]) -> dict:
    """Return the median time of a call (``ms``), its peak memory (``MiB``), and the time of the first call
    (``first_s``)."""
    seconds = []
    cuda.synchronize()
    for i in range(setup.repeats + 2):
        if i == 2:
            cuda.reset_peak_memory_stats()
            before = cuda.memory_allocated()
        start = clock()
        call()
        cuda.synchronize()
        seconds.append(clock() - start)
    ms = 1e3 * statistics.median(seconds[2:])
    return dict(ms=ms, MiB=(cuda.max_memory_allocated() - before) / 2**20, first_s=seconds[0])


PARTS: dict = {'machine': machine}
PARTS.update({f'values, {name}': partial(values, name) for name in BACKBONES})
for name, form, groups in itertools.product(DETECTORS, FORMS, GROUPS):
    if name != PEER or form == 'eager':
        PARTS[f'detectors, {name}, {form}, {groups}'] = partial(detectors, name, form, groups)
PARTS.update({f'steps, {name}, {form}': partial(steps, name, form) for name, form in itertools.product(TIMED, FORMS)})
PARTS.update({f'layouts, {name}': partial(layouts, name) for name in TIMED})


def run_here(name: str, file: Path) -> None:
    """Run a part of the check in this process, and rewrite ``file`` after each result, so that a crash loses none."""
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


def run_part(name: str, rehearse: bool, seconds: float) -> dict:
    """Run a part of the check in a process of its own, for at most ``seconds``; return its status, result rows, and
    error."""
    with tempfile.TemporaryDirectory() as folder:
        file, log, error = Path(folder) / 'part.json', Path(folder) / 'log', ''
        command = [sys.executable, __file__, '--out', str(file), *['--rehearse'] * rehearse, '--part', name]
        try:
            with log.open('w') as output:  # the compiler's processes may hold a pipe open
                status = subprocess.run(command, stdout=output, stderr=output, timeout=seconds).returncode
            error = log.read_text().strip()[-3000:] or f'status {status}' if status else ''
        except subprocess.TimeoutExpired:
            error = f'no end within {seconds:.0f} s'
        answer = json.loads(file.read_text()) if file.exists() else dict(rows=[])
    return dict(answer, status='failed', error=error) if error else answer


# --- conclusions ------------------------------------------------------------------------------------------------------


def rows_of(parts: dict, *names: str) -> list[dict]:
    return [row for name in names for row in parts.get(name, {}).get('rows', [])]


def ms_of(parts: dict, name: str, step: str) -> Optional[float]:
    return next((row.get('ms') for row in rows_of(parts, name) if row['step'] == step), None)


def steps_of(parts: dict) -> list[str]:
    return list(dict.fromkeys(row['step'] for row in rows_of(parts, *parts) if 'step' in row))


def values_right(parts: dict) -> Optional[bool]:
    """Return True if all backbones are right, False if one is wrong or its check failed, None if some were left out."""
    names = [f'values, {name}' for name in BACKBONES]
    status = [parts.get(name, {}).get('status') for name in names]
    if 'failed' in status or not all(row['right'] for row in rows_of(parts, *names)):
        return False
    return True if set(status) == {'done'} else None


def advice(parts: dict) -> list[str]:
    """Name the faster form of each backbone and step, and the times of the optimizer with both kinds of groups."""
    lines = []
    cases = [(f'steps, {name}', '') for name in TIMED if name != PEER]
    cases += [(f'detectors, {name}', ', merged') for name in DETECTORS if name != PEER]
    for (prefix, suffix), step in itertools.product(cases, steps_of(parts)):
        kind, name = prefix.split(', ', 1)
        if not any(row.get('step') == step for part in parts if part.startswith(kind) for row in rows_of(parts, part)):
            continue
        times = {form: ms_of(parts, f'{prefix}, {form}{suffix}', step) for form in FORMS}
        peer = ms_of(parts, f'{kind}, {PEER}, eager{suffix}', step)
        label = f'{"Mask R-CNN with " if kind == "detectors" else ""}{name}, {step}'
        if not all(times.values()):
            lines.append(f'{label}: not measured')
            continue
        gain = times['eager'] / times['compiled']
        beside = f', eager {peer / times["eager"]:.2f}x of Swin-T' if peer else ''
        lines.append(f'{label}: take {"--compile" if gain >= 1.05 else "eager"} ({gain:.2f}x of eager{beside})')
    one, merged = (
        next((row for row in rows_of(parts, f'detectors, RAVLT-T, eager, {groups}')), None) for groups in GROUPS
    )
    if one and merged:
        lines.append(f'Optimizer of Mask R-CNN: {one["optimizer_ms"]:.2f} ms, merged {merged["optimizer_ms"]:.2f} ms')
    lines.append(f'Backbones right: { {True: "yes", False: "no", None: "not known"}[values_right(parts)] }.')
    return lines


def table(titles, rows) -> list[str]:
    return ['', *('| ' + ' | '.join(map(str, line)) + ' |' for line in (titles, ['---'] * len(titles), *rows))]


def cell(row: dict, peer: Optional[float]) -> str:
    if 'ms' not in row:
        return row.get('error', '')[:80].replace('\n', ' ')
    return f'{row["ms"]:.2f} ms, {row["MiB"]:.0f} MiB' + (f', {peer / row["ms"]:.2f}x' if peer else '')


def report(parts: dict) -> list[str]:
    lines = ['# mmlinattn on this GPU', '', *map(str, rows_of(parts, 'machine'))]
    lines += ['', '## Variant to take', '', *(f'- {line}' for line in advice(parts)), '', '## Values beside float64']
    rows = [
        (name, row['case'], f'{row["error"]:.1e}', f'{row["plain"]:.1e}', 'yes' if row['right'] else '**no**')
        for name in BACKBONES
        for row in rows_of(parts, f'values, {name}')
    ]
    lines += table(('backbone', 'case', 'error', 'of the reference implementations', 'right'), rows)
    lines += ['', '## Whole Mask R-CNN steps']
    rows = []
    for name, form, groups in itertools.product(DETECTORS, FORMS, GROUPS):
        for row in rows_of(parts, f'detectors, {name}, {form}, {groups}'):
            peer = ms_of(parts, f'detectors, {PEER}, eager, {groups}', row['step'])
            optimizer = f'{row["optimizer_ms"]:.2f} ms'
            rows.append((name, form, f'{groups}: {row["groups"]}', cell(row, peer), optimizer, f'{row["first_s"]:.1f}'))
    lines += table(('', '', 'optimizer groups', 'step', 'optimizer', 'first step, s'), rows)
    lines += ['', '## Backbones', '', f'Half precision, no stochastic depth. x: of the speed of eager {PEER}.']
    lines[-1] += ' The first step holds the compilation.'
    rows, titles = [], [step for step in steps_of(parts) if any(f', {n} ' in step for n in setup.images)]
    for name, form in itertools.product(TIMED, FORMS):
        found = {row['step']: row for row in rows_of(parts, f'steps, {name}, {form}')}
        cells = [cell(found.get(step, {}), ms_of(parts, f'steps, {PEER}, eager', step)) for step in titles]
        first = max((row.get('first_s', 0) for row in found.values()), default=0)
        rows += [(name, form, *cells, f'{first:.1f}')] if found else []
    lines += table(('', '', *titles, 'longest first step, s'), rows)
    lines += ['', '## Memory format of the weights of convolutions']
    rows = []
    for name in TIMED:
        found = {(row['work'], row['layout']): row for row in rows_of(parts, f'layouts, {name}')}
        for work in dict.fromkeys(work for work, _ in found):
            rows.append((name, work, *(cell(found.get((work, layout), {}), None) for layout in LAYOUTS)))
    lines += table(('', '', *LAYOUTS), rows)
    for name, part in parts.items():
        if part['status'] != 'done':
            lines += ['', f'{name}: {part["status"]}', *(['```', part['error'], '```'] if 'error' in part else [])]
    return lines


def main(argv=None) -> int:
    global setup, cuda
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, required=True, help='folder for the report')
    parser.add_argument('--minutes', type=float, default=60, help='start no part after this time [60]')
    parser.add_argument('--rehearse', action='store_true', help='run all parts on a CPU with small models')
    parser.add_argument('--part', choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if not args.rehearse and not torch.cuda.is_available():
        print('check_gpu.py: PyTorch sees no GPU; --rehearse runs the parts on a CPU')
        return 1
    setup, cuda = (REHEARSAL, OnCPU) if args.rehearse else (REAL, torch.cuda)
    if args.part:
        run_here(args.part, args.out)
        return 0
    end = time.monotonic() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    parts: dict = {}
    for name in PARTS:
        left = end - time.monotonic()
        # a hanging part leaves time to the others
        parts[name] = run_part(name, args.rehearse, min(left, 1200)) if left > 0 else dict(status='no time left')
        print(f'{name}: {parts[name]["status"]}', flush=True)
        (args.out / 'report.json').write_text(json.dumps(dict(parts=parts, take=advice(parts)), indent=1))
        (args.out / 'report.md').write_text('\n'.join(report(parts)) + '\n')
    if args.rehearse:
        print('A rehearsal: its times mean nothing.')
    else:
        print(f'Please send {args.out} to the authors of mmlinattn, as an issue of the repository.')
    print(*advice(parts), sep='\n')
    return int(values_right(parts) is False or any(part['status'] == 'failed' for part in parts.values()))


if __name__ == '__main__':
    sys.exit(main())
