# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Run torchrun with the exit status of the first failed process: ``python tools/launch.py [arguments of torchrun]``.

torchrun itself exits with a traceback and status 1 at every error. The status is 128 + N if signal N ended the run.
"""

import os
import runpy
import sys
import time
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().with_name('check_env.py')))  # finds the checkout and missing packages

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main


def run(arguments) -> int:
    """Run torchrun and return the exit status."""
    # after a restart, train.py resumes from checkpoints newer than this
    os.environ['MMLINATTN_LAUNCHED'] = str(time.time())
    try:
        main(arguments)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode  # the process printed the reason
        number = -failure.exitcode
        print(f'error: process {rank} of the run (pid {failure.pid}) was ended by signal {number}.', file=sys.stderr)
        return 128 + number
    return 0


if __name__ == '__main__':
    sys.exit(run(sys.argv[1:]))
