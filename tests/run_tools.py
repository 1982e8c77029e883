# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Run jobs of command lines in one process: ``python run_tools.py JOBS.json RESULTS.json``.

Jobs: ``{name: [[script, argument, ...], ...]}``. Results: ``{name: error}``, empty where all commands of a job ended
well; a job ends at its first error, the others still run. To start Python, import PyTorch, read upstream's model
indices and lay out the dumped configs by yapf takes longer than what the tests train.
"""

import functools
import json
import runpy
import sys
import traceback
from pathlib import Path

import mmengine.config.config as config_module
import mmengine.config.utils as config_utils
from conftest import end_workers, forget_instances


def run(commands) -> str:
    for command in commands:
        sys.argv = command
        forget_instances()  # upstream's configs name them alike
        try:
            runpy.run_path(command[0], run_name='__main__')
        except SystemExit as end:
            if end.code:
                return f'{command[0]} ended with {end.code}'
        except Exception:
            return traceback.format_exc()
        finally:
            end_workers()
    return ''


if __name__ == '__main__':
    jobs, results = Path(sys.argv[1]), Path(sys.argv[2])
    config_utils.load = functools.cache(config_utils.load)
    config_module.is_installed = functools.cache(config_module.is_installed)
    config_module.FormatCode = lambda text, **_: (text, False)
    errors = {}
    for name, commands in json.loads(jobs.read_text()).items():
        print(f'=== {name}', flush=True)
        errors[name] = run(commands)
        print(errors[name], flush=True)
        results.write_text(json.dumps(errors))
