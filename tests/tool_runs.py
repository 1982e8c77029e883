# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Command lines run as users run them, in processes of their own, for the tests of tools."""

import json
import os
import random
import re
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / 'tools'


def environment():
    """PYTHONPATH lets the tools of other packages find this checkout too, and configs the hook that holds a run."""
    folders = [str(ROOT), str(ROOT / 'tests'), str(ROOT / 'tests' / 'lean'), os.environ.get('PYTHONPATH')]
    path = os.pathsep.join(filter(None, folders))
    return dict(
        os.environ,
        PYTHONPATH=path,
        OMP_NUM_THREADS='1',
        CUDA_VISIBLE_DEVICES='',
        PYTHON=sys.executable,
    )


def run(*command, cwd, status=0, **env):
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=dict(environment(), **env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == status, done.stdout[-3000:]
    return done.stdout


def python(script, *args, **kwargs):
    return run(sys.executable, script, *args, **kwargs)


def in_one_process(jobs, folder):
    """Command lines of Python scripts one after the other, by name (``run_tools.py``): what each job printed, and its
    error, empty where there was none."""
    (folder / 'jobs.json').write_text(json.dumps(jobs))
    errors = dict.fromkeys(jobs, 'not reached')
    try:
        out = python(Path(__file__).with_name('run_tools.py'), 'jobs.json', 'errors.json', cwd=folder)
    except (AssertionError, subprocess.TimeoutExpired) as error:  # not again for each name
        return dict.fromkeys(jobs, str(error)), errors
    printed = dict(zip(jobs, re.split(r'^=== .*\n', out, flags=re.MULTILINE)[1:]))
    return printed, {**errors, **json.loads((folder / 'errors.json').read_text())}


def losses(work_dir):
    """Loss by iteration over all the runs in a work dir, the later run winning."""
    found = {}
    for log in sorted(work_dir.glob('*/vis_data/scalars.json')):
        for line in log.read_text().splitlines():
            record = json.loads(line)
            if 'loss' in record:
                found[record['step']] = record['loss']
    return found


def free_port():
    """Not of those that a system hands out by itself (from 32768 up), of which another program may be given this one
    before the run asks for it."""
    for port in random.SystemRandom().sample(range(15000, 30000), 100):
        with socket.socket() as listener:
            try:
                listener.bind(('', port))
            except OSError:
                continue
            return str(port)
    raise OSError('no free port in a hundred')
