# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Two CPU tasks under a real Slurm of one node: a run, its SIGTERM, and the requeued job that goes on from there."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / 'tools'))
from test_stopping import NUM_ITERS, place, weights  # noqa: F401
from tool_runs import TOOLS, environment, free_port, losses

PATH = f'{os.environ["PATH"]}:/usr/sbin:/sbin'
MISSING = [name for name in ('munged', 'slurmctld', 'slurmd', 'srun') if shutil.which(name, path=PATH) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.slurm,
    pytest.mark.skipif(bool(MISSING), reason=f'not installed: {", ".join(MISSING)}'),
]
JOB = """#!/bin/bash
#SBATCH --ntasks=2 --requeue --open-mode=append --output=job.log
bash {tools}/slurm_train.sh test job config.py job --resume
status=$?
if [ $status = 143 ]; then scontrol requeue $SLURM_JOB_ID; fi
exit $status
"""


@pytest.fixture(scope='module')
def slurm(tmp_path_factory, place):  # noqa: F811
    """Runs a command in the place, beside the daemons."""
    folder, script = tmp_path_factory.mktemp('slurm'), Path(__file__).with_name('cluster.sh')
    variables = environment(
        PATH=PATH, SLURM_CONF=folder / 'slurm.conf', GPUS=2, GPUS_PER_NODE=0, CPUS_PER_TASK=1, MASTER_PORT=free_port()
    )

    def run(*command, **more):
        words = [str(word) for word in command]
        done = subprocess.run(
            words, cwd=place, env=dict(variables, **more), capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return done.stdout + done.stderr

    with open(folder / 'start.log', 'wb') as log:  # the daemons would hold a pipe open
        started = subprocess.run(['bash', str(script), 'start', str(folder)], stdout=log, stderr=log, env=variables)
    assert started.returncode == 0, (folder / 'start.log').read_text()[-3000:]
    try:
        yield run
    finally:
        subprocess.run(['bash', str(script), 'stop', str(folder)], check=True)


def test_terminated_job_is_requeued_and_ends_with_the_undisturbed_curve(slurm, place):  # noqa: F811
    out = slurm('bash', TOOLS / 'slurm_train.sh', 'test', 'whole', 'config.py', 'under_slurm')
    assert sorted(losses(place / 'under_slurm')) == list(range(1, NUM_ITERS + 1)), out[-3000:]

    (place / 'job.sh').write_text(JOB.format(tools=TOOLS))
    number = slurm('sbatch', '--parsable', 'job.sh', HOLD='6').strip()  # in the second of three epochs
    log, work = place / 'job.log', place / 'job'

    def wait_for(condition):
        deadline = time.monotonic() + 300
        while not condition():
            state = slurm('scontrol', 'show', 'job', number)
            assert time.monotonic() < deadline, state + log.read_text()[-3000:]
            time.sleep(0.2)

    wait_for(lambda: len(losses(work)) == 5)
    slurm('scancel', '--signal=TERM', number)  # to all processes of the tasks, data-loader workers too
    wait_for(lambda: 'PENDING' in slurm('squeue', '-h', '-j', number, '-o', '%T'))
    text = log.read_text()
    assert text.count('is saved in') == 1 and 'Exited with exit code 143' in text, text[-3000:]
    assert 'Traceback' not in text
    assert (work / 'last_checkpoint').read_text().endswith('stopped.pth')

    wait_for(lambda: 'COMPLETED' in slurm('scontrol', 'show', 'job', number))
    assert losses(work) == losses(place / 'under_slurm'), log.read_text()[-3000:]
    ours, theirs = weights(work / 'epoch_3.pth'), weights(place / 'under_slurm' / 'epoch_3.pth')
    assert all(ours[key].equal(theirs[key]) for key in theirs)
