# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Run tools in this process, in a process of their own, or many in one process.

``python tool_runs.py JOBS.json ERRORS.json`` runs many. Python's start, the import of PyTorch and upstream's model
indices take longer than the trainings of the tests.
"""

import json
import os
import random
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / 'tools'
# config of the small model of each task, for a data set of shapes
QUICK = {task: str(ROOT / 'configs' / task / 'ravlt_shapes_quickstart.py') for task in ('mmdet', 'mmseg', 'mmpretrain')}

# quick-start config for a run that is stopped: few epochs on a data set beside it, with a hook that waits
HELD = """
_base_ = {base!r}
train_cfg = dict(max_epochs=3, val_interval=3)
train_dataloader = dict(batch_size={batch}, num_workers=1, dataset=dict(data_root='shapes'))
val_dataloader = dict(num_workers=1, dataset=dict(data_root='shapes'))
test_dataloader = val_dataloader
default_hooks = dict(logger=dict(interval=1))
log_processor = dict(window_size=1)
custom_imports = dict(imports=['mmlinattn', 'helpers.engine_toys'], allow_failed_imports=False)
custom_hooks = [*_base_.custom_hooks, dict(type='HoldHook')]
"""


def environment(**more):
    """Return environment variables with a PYTHONPATH of this checkout, for upstream's tools, and of ``helpers``."""
    folders = [str(ROOT), str(ROOT / 'tests'), str(ROOT / 'tests' / 'lean'), os.environ.get('PYTHONPATH')]
    path = os.pathsep.join(filter(None, folders))
    own = dict(PYTHONPATH=path, OMP_NUM_THREADS='1', CUDA_VISIBLE_DEVICES='', PYTHON=sys.executable, PORT=free_port())
    return {**os.environ, **own, **{key: str(value) for key, value in more.items()}}


def options(cwd, env):
    return dict(cwd=cwd, env=environment(**env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(*command, cwd, **env):
    done = subprocess.run([str(word) for word in command], timeout=300, **options(cwd, env))
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def start(*command, cwd, **env):
    """Start a command in its own process group.

    With ``HOLD=i`` in ``env``, ``HoldHook`` makes it wait in iteration i.
    """
    return subprocess.Popen(
        [str(word) for word in command],
        start_new_session=True,
        # a shell starts background jobs with SIGINT ignored, and the tool would inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options(cwd, env),
    )


def wait_for(process, condition):
    """Wait for a condition while a process runs, for at most 200 seconds."""
    deadline = time.monotonic() + 200
    while not condition():
        assert process.poll() is None, process.stdout.read()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def python(script, *args, **kwargs):
    return run(sys.executable, script, *args, **kwargs)


def in_this_process(tool, *args):
    with mock.patch.object(sys, 'argv', [tool, *map(str, args)]):
        runpy.run_path(str(TOOLS / tool), run_name='__main__')


def in_one_process(jobs, folder):
    """Run several jobs in one new process; a job ends at its first error, and the others still run.

    Args:
        jobs (dict): List of command lines of tools by name of the job.
        folder (Path): Working folder of the process.

    Returns:
        tuple[dict, dict]: Printed output, and error message ('' without an error), by name of the job.
    """
    (folder / 'jobs.json').write_text(json.dumps(jobs))
    try:
        out = python(__file__, 'jobs.json', 'errors.json', cwd=folder)
    except (AssertionError, subprocess.TimeoutExpired) as error:  # not again for each name
        return (dict.fromkeys(jobs, str(error)),) * 2
    printed = dict(zip(jobs, re.split(r'^=== .*\n', out, flags=re.MULTILINE)[1:]))
    return printed, json.loads((folder / 'errors.json').read_text())


def losses(work_dir):
    """Return the loss of each iteration in a work dir; later runs replace earlier ones."""
    found = {}
    for log in sorted(work_dir.glob('*/vis_data/scalars.json')):
        for line in log.read_text().splitlines():
            record = json.loads(line)
            if 'loss' in record:
                found[record['step']] = record['loss']
    return found


def free_port():
    """Return a free port below 32768, as the system gives ephemeral ports to other programs."""
    for port in random.SystemRandom().sample(range(15000, 30000), 100):
        with socket.socket() as listener:
            try:
                listener.bind(('', port))
            except OSError:
                continue
            return str(port)
    raise OSError('no free port in a hundred')


def error_of(job) -> str:
    """Run command lines one after the other, and return the first error, or ''."""
    from conftest import end_workers, forget_instances  # it has MMEngine read indices once, as in the tests

    for command in job:
        forget_instances()  # upstream's configs share names
        try:
            in_this_process(*command)
        except SystemExit as end:
            if end.code:
                return f'{command[0]} ended with {end.code}'
        except Exception:
            return traceback.format_exc()
        finally:
            end_workers()
    return ''


if __name__ == '__main__':
    errors = {}
    for name, job in json.loads(Path(sys.argv[1]).read_text()).items():
        print(f'=== {name}', flush=True)
        errors[name] = error_of(job)
        print(errors[name], flush=True)
    Path(sys.argv[2]).write_text(json.dumps(errors))
