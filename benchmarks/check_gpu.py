# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Whether the GPU kernels are right on this machine, and what they gain there.

    python benchmarks/check_gpu.py --out DIR [--minutes M]
    python benchmarks/check_gpu.py --out DIR --interpret     # the first half, on a CPU

Each kernel beside float64, the tests that want a GPU, then times: attention alone, RAVLT-T, Mask R-CNN. Every part is a
process of its own: one that fails is reported, and the others go on. Run again, it goes on where it was. DIR gets
``report.md``, ``report.json`` and ``attention.png``.

Needs Triton, pytest, hypothesis, mmengine and mmcv-lite; the last part MMDetection.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Optional

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

N = 16384  # tokens at which the goals of an attention are judged
ATTENTIONS = ('rala', 'inline_attention', 'linear_attention', 'focused_attention')


def run_part(name: str, interpret: bool, seconds: float) -> dict:
    """Status and result, or error, of a part."""
    start = time.monotonic()
    environment = {key: value for key, value in os.environ.items() if key != 'TRITON_INTERPRET'}
    if interpret:
        environment.update(TRITON_INTERPRET='1', CUDA_VISIBLE_DEVICES='')
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / 'result.json'
        command = [sys.executable, str(HERE / 'gpu_parts.py'), name, str(file)]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return dict(status='no time left')
        if done.returncode == 0 and file.exists():
            took = round(time.monotonic() - start, 1)
            return dict(status='done', seconds=took, result=json.loads(file.read_text()))
    error = done.stderr.strip()[-3000:] or f'status {done.returncode}'
    return dict(status='failed', error=error)


# --- goals ------------------------------------------------------------------------------------------------------------


def result_of(parts: dict, name: str) -> dict:
    return parts.get(name, {}).get('result', {})


def ratio(parts: dict, part: str, slow: str, fast: str) -> Optional[float]:
    times = result_of(parts, part).get('times', {})
    return times[slow] / times[fast] if slow in times and fast in times else None


def goals(parts: dict) -> list[tuple[str, Optional[bool], str]]:
    """What is to hold, whether it does (None: not measured), and what was found."""
    from gpu_parts import RIGHT

    finished = [result_of(parts, name)['right'] for name in RIGHT if 'right' in result_of(parts, name)]
    wrong = finished.count(False)
    right = False if wrong else (True if len(finished) == len(RIGHT) - 1 else None)  # one is the environment
    found = f'{len(finished)} of {len(RIGHT) - 1} parts, {wrong} with faults'
    told: list = [('every kernel is right, every test passes', right, found)]
    alone = f'attention {N}'
    served = result_of(parts, alone).get('served', {}).get('rala')
    for what, least in (('forward', 4.0), ('both', 3.0)):
        found = ratio(parts, alone, f'rala plain {what}', f'rala kernels {what}') if served else None
        title = 'forward' if what == 'forward' else 'forward and backward'
        told.append((f'RALA alone, {title}, {N} tokens: {least:g}x plain PyTorch', *judged(found, least)))
    for ours, other, least in (('fully linear', 'softmax twin', 1.3), ('RAVLT-T', 'literal', 1.8)):
        found = ratio(parts, 'eager train', other, ours)
        found = None if result_of(parts, 'eager train').get('told') else found
        told.append((f'training step, {ours} against {other}: {least:g}x', *judged(found, least)))
    return told


def judged(found: Optional[float], least: float):
    return (None, 'not measured') if found is None else (found >= least, f'{found:.2f}x')


# --- the report -------------------------------------------------------------------------------------------------------


def table(titles, rows) -> list[str]:
    lines = ['', '| ' + ' | '.join(titles) + ' |', '| ' + ' | '.join(['---'] * len(titles)) + ' |']
    return [*lines, *('| ' + ' | '.join(str(cell) for cell in row) + ' |' for row in rows)]


def written(parts: dict, out: Path) -> list[str]:
    machine = {key: value for key, value in result_of(parts, 'environment').items() if key != 'identity'}
    lines = ['# mmlinattn on this GPU', '', ', '.join(f'{key} {value}' for key, value in machine.items())]
    answers = {True: 'holds', False: '**does not hold**', None: 'not known'}
    lines += ['', '## Goals', *table(('goal', '', 'found'), [(a, answers[b], c) for a, b, c in goals(parts)])]
    lines += ['', '## Kernels beside float64']
    rows = []
    for name, part in parts.items():
        if name.startswith('kernels') and part['status'] == 'done':
            found = part['result']['rows']
            largest = max((x for row in found for x in row['deviations'].values()), default=float('nan'))
            faults = [f'{row["variant"]}: {row["faults"]}' for row in found if row['faults']]
            rows.append((name[8:], len(found), f'{largest:.1e}', f'{part["result"]["bound"]:.0e}', '; '.join(faults)))
    lines += table(('type, op', 'variants', 'largest deviation', 'bound', 'faults'), rows)
    tests = result_of(parts, 'tests')
    if tests:
        lines += ['', f'Tests: {tests["counts"]}', *(f'- {name}' for name in tests['failed'])]
    timed = {name: part for name, part in parts.items() if 'times' in part.get('result', {})}
    if any(name.startswith('attention') for name in timed):
        lines += [
            '',
            '## Attention alone, bfloat16, 16 heads of 64',
            '',
            'ms, kernels / plain PyTorch. The share is that',
        ]
        lines[-1] += ' of the bandwidth of a copy, of what has to be read and written; a star: no kernel served.'
    for name, part in timed.items():
        result = part['result']
        times = result['times']
        if name.startswith('attention'):
            rows = []
            for op in ATTENTIONS:
                star = '' if result['served'][op] else ' *'
                pairs = [
                    [times[f'{op} {form} {what}'] for form in ('kernels', 'plain')] for what in ('forward', 'both')
                ]
                # a copy reads and writes 8 of the maps, a forward pass has to 4
                share = times['copy'] / 2 / pairs[0][0]
                cells = [f'{a:.3f} / {b:.3f}, {b / a:.2f}x' for a, b in pairs]
                rows.append((op + star, *cells, f'{share:.0%}'))
            for op in ('softmax', 'flash_bla'):
                if f'{op} forward' in times:
                    rows.append((op, *(f'{times[f"{op} {what}"]:.3f}' for what in ('forward', 'both')), ''))
            title = f'N {result["tokens"]}, B {result["batch"]}'
            lines += table((title, 'forward', 'forward and backward', 'share, forward'), rows)
        else:
            lines += [
                '',
                f'## {name}, bfloat16, {result["batch"]} images',
                *(f'- {line}' for line in result.get('told', ())),
            ]
            memory = result.get('memory', {})
            rows = [
                (key, f'{value:.1f}', f'{memory[key]:.0f}' if key in memory else '') for key, value in times.items()
            ]
            lines += table(('', 'ms', 'peak MiB'), rows)
    missing = [(name, part) for name, part in parts.items() if part['status'] != 'done']
    if missing:
        lines += ['', '## Not measured']
        for name, part in missing:
            lines += ['', f'{name}: {part["status"]}', *(['', '```', part['error'], '```'] if 'error' in part else [])]
    if (out / 'attention.png').exists():
        lines += ['', '![times of attention by tokens](attention.png)']
    lines += ['', f'Please send this folder ({out.name}) to the authors of mmlinattn, as an issue of the repository.']
    return lines


def draw(parts: dict, file: Path) -> None:
    """Times of a forward pass by the number of tokens."""
    points = [result_of(parts, name) for name in parts if name.startswith('attention')]
    points = sorted((p for p in points if p), key=lambda p: p['tokens'])
    if len(points) < 2:
        return
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    axes = (figure := Figure(figsize=(7, 4.5))).subplots()
    for name in ('rala kernels', 'rala plain', 'linear_attention kernels', 'softmax', 'flash_bla'):
        drawn = [
            (p['tokens'], p['times'][f'{name} forward'] / p['batch']) for p in points if f'{name} forward' in p['times']
        ]
        if drawn:
            axes.loglog(*zip(*drawn), marker='o', label=name)
    axes.set(xlabel='tokens', ylabel='ms an image, forward', title='Attention alone, bfloat16, 16 heads of 64')
    axes.legend()
    figure.savefig(file, dpi=120, bbox_inches='tight')


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, required=True, help='folder of the report')
    parser.add_argument(
        '--minutes', type=float, default=90, help='start nothing after so long; run again to go on [90]'
    )
    parser.add_argument('--interpret', action='store_true', help="correctness alone, in Triton's interpreter on a CPU")
    parser.add_argument('--only', nargs='+', help='parts whose names begin with one of these')
    args = parser.parse_args(argv)
    import torch

    if not args.interpret and not torch.cuda.is_available():
        print('check_gpu.py: PyTorch sees no GPU here; --interpret checks the kernels on a CPU')
        return 1
    from gpu_parts import PARTS, RIGHT

    end = time.monotonic() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / 'report.json'
    before = json.loads(file.read_text())['parts'] if file.exists() else {}
    parts = {'environment': run_part('environment', args.interpret, 300)}
    if result_of(before, 'environment') == result_of(parts, 'environment'):
        parts.update({name: part for name, part in before.items() if part['status'] == 'done'})

    def save() -> None:
        draw(parts, args.out / 'attention.png')
        told = [dict(goal=goal, holds=holds, found=found) for goal, holds, found in goals(parts)]
        new = file.with_suffix('.new')
        new.write_text(json.dumps(dict(parts=parts, goals=told), indent=1))
        new.replace(file)
        (args.out / 'report.md').write_text('\n'.join(written(parts, args.out)) + '\n')

    for name in RIGHT if args.interpret else PARTS:
        if name in parts or (args.only and not name.startswith(tuple(args.only))):
            continue
        left = end - time.monotonic()
        parts[name] = run_part(name, args.interpret, left) if left > 0 else dict(status='no time left')
        print(f'{name}: {parts[name]["status"]}', flush=True)
        save()
    save()
    for goal, holds, found in goals(parts):
        print({True: 'holds', False: 'DOES NOT HOLD', None: 'not known'}[holds], f'- {goal} ({found})')
    print(f'Please send {args.out} to the authors of mmlinattn, as an issue of the repository.')
    return 1 if goals(parts)[0][1] is False or any(part['status'] == 'failed' for part in parts.values()) else 0


if __name__ == '__main__':
    sys.exit(main())
