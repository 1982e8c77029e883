#!/usr/bin/env python
# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Draw curves of losses and metrics from the log of a work dir."""

import argparse
import json
import sys
from pathlib import Path

import matplotlib

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout serves without being installed

from mmlinattn.apis.cli import one_line_errors, writing
from mmlinattn.utils.errors import RunError

NOT_CURVES = ('step', 'epoch', 'iter', 'time', 'data_time', 'memory')
# metrics have the prefix of their evaluator, but for MMSegmentation's IoUMetric
NO_PREFIX = ('aAcc', 'mIoU', 'mAcc', 'mDice', 'mFscore', 'mPrecision', 'mRecall')


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('work_dir', type=Path, help='work dir of a training run, or a scalars.json')
    parser.add_argument(
        '--keys',
        nargs='+',
        metavar='KEY',
        help='what to draw, e.g. loss bbox_mAP; a key without its prefix (coco/) is enough [loss and all metrics]',
    )
    parser.add_argument('--out', type=Path, required=True, help='image to write (.png, .svg, .pdf)')
    return parser.parse_args()


def find_logs(work_dir: Path) -> list:
    """The logs of all runs in a work dir, oldest first: a resumed training has several."""
    if work_dir.is_file():
        return [work_dir]
    logs = sorted(work_dir.rglob('vis_data/scalars.json'))
    if not logs:
        raise RunError(f'work_dir {str(work_dir)!r}: no vis_data/scalars.json below it.')
    return logs


def read_curves(logs: list) -> dict:
    """Key -> {step: value}. Where runs overlap (one resumed from before the other's end), the later one counts."""
    curves = {}
    for log in logs:
        for number, line in enumerate(log.read_text(encoding='utf-8').splitlines(), 1):
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise RunError(f'{log}: line {number} is not JSON.') from error
            for key, value in record.items():
                if isinstance(value, (int, float)) and key not in NOT_CURVES:
                    curves.setdefault(key, {})[record.get('step', number)] = value
    return curves


def choose(curves: dict, keys) -> list:
    """The curves asked for by full key or by its last part; without any, the loss and the metrics."""
    if not keys:
        metrics = [key for key in curves if '/' in key or key in NO_PREFIX]
        return ['loss'] * ('loss' in curves) + metrics
    chosen = []
    for asked in keys:
        found = [key for key in curves if asked in (key, key.rpartition('/')[2])]
        if not found:
            raise RunError(f'--keys {asked}: not in the log; it has {", ".join(sorted(curves))}.')
        chosen += found
    return chosen


def plot(curves: dict, keys: list, out: Path) -> None:
    """One panel a key; training steps to the right."""
    matplotlib.use('Agg')
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(keys), figsize=(7, 2.4 * len(keys)), squeeze=False, layout='constrained')
    for axis, key in zip(axes[:, 0], keys):
        steps, values = zip(*sorted(curves[key].items()))
        axis.plot(steps, values, marker='.' if len(steps) < 30 else None)
        axis.set_ylabel(key)
        axis.grid(alpha=0.3)
    axes[-1, 0].set_xlabel('step (iterations; metrics of epoch-based runs: epochs)')
    try:
        with writing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(out, dpi=120)
    except ValueError as error:
        raise RunError(f'--out {str(out)!r}: {error}') from error
    pyplot.close(figure)


def main() -> None:
    args = parse_args()
    with one_line_errors():
        curves = read_curves(find_logs(args.work_dir))
        keys = choose(curves, args.keys)
        if not keys:
            raise RunError(f'work_dir {str(args.work_dir)!r}: neither a loss nor a metric in its log.')
        plot(curves, keys, args.out)
    print(args.out)


if __name__ == '__main__':
    main()
