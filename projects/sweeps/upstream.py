# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Swap the backbone of one config per folder of the installed upstream projects, and write the outcomes.

    python -m projects.sweeps.upstream --out docs/upstream.md

Each config runs in a new process with a time limit. Results are kept (``--results``, JSON lines); run again to resume.
The sweep takes an hour or two on one core.
"""

import argparse
import json
import multiprocessing
import os
import re
import sys
import tempfile
import textwrap
import time
from collections import Counter
from pathlib import Path

from mmengine.utils import get_installed_path

from mmlinattn.tooling.command_line import check_out_file, one_line_errors
from mmlinattn.utils.errors import RunError

PROJECTS = ('mmdet', 'mmseg', 'mmpretrain')
# The config of a folder is the first one with the first possible of these words in its name.
USUAL = ('r50', 'resnet50', 'small', 'tiny', '_s_', 'base', 'b0', '')


def pick(folder: Path) -> list[Path]:
    """Return the usual config of a folder as a list of one path; [] if the folder has no config."""
    files = sorted(path for path in folder.glob('[!_]*.py') if '_base_' not in path.parts)
    for word in USUAL:
        found = [path for path in files if word in path.stem]
        if found:
            return found[:1]
    return []


def sample() -> list[str]:
    """Return one config per folder of each project, as ``mmdet::FOLDER/CONFIG.py``."""
    names = []
    for project in PROJECTS:
        root = Path(get_installed_path(project), '.mim', 'configs')
        for folder in sorted(root.iterdir()):
            if folder.is_dir() and folder.name != '_base_':
                names += [f'{project}::{path.relative_to(root).as_posix()}' for path in pick(folder)]
    return names


def attempt(name: str, backbone: str, send) -> None:
    """Swap a backbone in this process, and pass (outcome, reason) to ``send``."""
    sys.stdout = sys.stderr = open(os.devnull, 'w')
    from mmlinattn.tooling.swapping import NoModel, Unsupported, swap_backbone

    try:
        with tempfile.TemporaryDirectory() as folder:
            swapped = swap_backbone(name, backbone, Path(folder, 'swapped.py'))
        send.send(('works', '; '.join(remark for remark in swapped.remarks if 'MapAdapter' in remark)))
    except Unsupported as error:
        send.send(('unsupported', str(error)))
    except NoModel as error:
        send.send(('no model', str(error)))
    except RunError as error:
        send.send(('upstream fails too', str(error)))
    except Exception as error:
        send.send(('error', f'{type(error).__name__}: {error}'))


def outcome(name: str, backbone: str, seconds: float) -> tuple[str, str]:
    """Swap the backbone of an upstream config in a process of its own, and return (outcome, reason).

    Args:
        name (str): Config as ``mmdet::FOLDER/CONFIG.py``.
        backbone (str): Name of the new backbone.
        seconds (float): Time limit.

    Returns:
        tuple[str, str]: ``'works'``, ``'unsupported'``, ``'no model'``, ``'upstream fails too'``, ``'error'`` or, after
            the time limit, ``'time'``; and remarks or the text of the error.
    """
    receive, send = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.Process(target=attempt, args=(name, backbone, send))
    process.start()
    send.close()
    try:
        found = receive.recv() if receive.poll(seconds) else ('time', f'no result within {seconds:g} s')
    except EOFError:
        found = ('error', 'the process died')
    process.terminate()
    process.join()
    return found


# beginnings of errors that repeat the outcome
OUTCOME_PREFIXES = (
    'it: no other backbone fits: ',
    'it does not run here with its own backbone either: ',
    'it has no model: ',
)


def family_of(result: dict) -> str:
    """Return the folder of a config within its project."""
    return result['config'].partition('::')[2].partition('/')[0]


def page(results: list[dict], backbone: str, total: int) -> str:
    """Return the Markdown page.

    Args:
        results (list[dict]): Config, outcome and reason of each attempt.
        backbone (str): Name of the new backbone.
        total (int): Number of all folders.
    """
    counted = Counter(result['outcome'] for result in results)
    folders = {result['config'].rpartition('/')[0] for result in results}
    lines = [
        '# Upstream configs with another backbone',
        '',
        f'`python tools/swap_backbone.py UPSTREAM {backbone}`, tried on configs of the upstream projects:',
        'built, trained for a step, asked for a prediction, every parameter of the backbone with a gradient.',
        'This page is written by `python -m projects.sweeps.upstream`. BoxInst, LAD and PAA need `pip install '
        'scikit-image scikit-learn`.',
        '',
        f'Tried: {len(results)} configs of {len(folders)} of the {total} folders; '
        + ', '.join(f'{kind}: {number}' for kind, number in counted.most_common())
        + '.',
        'Folders that are not listed work. Upstream fails too: it does not run here with its own backbone either. '
        'Unsupported: it can use no other backbone.',
        '',
    ]
    tried = Counter((result['config'].partition('::')[0], family_of(result)) for result in results)
    for project in PROJECTS:
        groups: dict = {}
        for row in results:
            if row['config'].startswith(f'{project}::') and (row['outcome'] != 'works' or row['why']):
                why = re.sub(r"^config '\S+'", 'it', row['why'].replace(row['config'], 'it'))  # by its name, or path
                why = why.replace('|', '/').replace('<', '&lt;')
                for prefix in OUTCOME_PREFIXES:
                    why = why.removeprefix(prefix)
                why = re.sub(r'^[A-Z]\w+(?= )|(?<= from )\w+$', 'it', why)  # a class name; groups equal reasons
                groups.setdefault((row['outcome'], textwrap.shorten(why, 100, placeholder=' ...')), []).append(row)
        if groups:
            lines += [f'## {project}', '', '| outcome | why | folder, or config of a folder |']
            lines += ['| --- | --- | --- |']
            for (kind, why), rows in sorted(groups.items(), key=lambda group: group[0]):
                alike = Counter(map(family_of, rows))
                names = dict.fromkeys(
                    family_of(row)
                    if alike[family_of(row)] == tried[project, family_of(row)]
                    else row['config'].partition('::')[2].removesuffix('.py')
                    for row in rows
                )
                lines.append(f'| {kind} | {why} | {", ".join(names)} |')
            lines.append('')
    return '\n'.join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', help='Markdown page to write')
    parser.add_argument('--results', default='work_dirs/upstream.jsonl', help='file of the results [%(default)s]')
    parser.add_argument('--backbone', default='ravlt_t')
    parser.add_argument('--configs', nargs='+', help='configs to try [one per folder]')
    parser.add_argument('--seconds', type=float, default=180, help='time limit of a config [%(default)s]')
    args = parser.parse_args()
    if args.out:
        with one_line_errors():
            check_out_file(args.out)
    kept = Path(args.results)
    kept.parent.mkdir(parents=True, exist_ok=True)
    results = {}
    if kept.is_file():
        rows = map(json.loads, kept.read_text().splitlines())
        results = {row['config']: row for row in rows if row.get('backbone') == args.backbone}
    names = args.configs or sample()
    for project in PROJECTS:  # once, not in every process
        __import__(f'{project}.models')
    __import__('mmlinattn.tooling.swapping')
    for name in names:
        if name in results:
            continue
        before = time.monotonic()
        kind, why = outcome(name, args.backbone, args.seconds)
        results[name] = dict(config=name, backbone=args.backbone, outcome=kind, why=why)
        print(f'{kind:18} {time.monotonic() - before:5.0f} s  {name}  {why}', flush=True)
        with kept.open('a') as file:
            file.write(json.dumps(results[name]) + '\n')
    if args.out:
        rows = [results[name] for name in sorted(results)]
        Path(args.out).write_text(page(rows, args.backbone, len(sample())), encoding='utf-8')


if __name__ == '__main__':
    main()
