# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""torchrun for dist_train.sh and dist_test.sh, which ends as its processes do.

``python tools/launch.py [arguments of torchrun]``. torchrun itself ends with a traceback of its own and status 1,
for every error. Here the exit status is that of the first process that failed, and 128 + N where signal N ended the
run, which torchrun hands on to its processes.
"""

import os
import runpy
import sys
import time
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().with_name('check_env.py')))  # finds the checkout, and what is missing

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main


def run(arguments) -> int:
    """Run torchrun and return the exit status."""
    # After a restart, train.py takes what was saved since for its own.
    os.environ['MMLINATTN_LAUNCHED'] = str(time.time())
    try:
        main(arguments)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode  # the process has said why
        number = -failure.exitcode
        print(f'error: process {rank} of the run (pid {failure.pid}) was ended by signal {number}.', file=sys.stderr)
        return 128 + number
    return 0


if __name__ == '__main__':
    sys.exit(run(sys.argv[1:]))
