# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Ctrl-C in the tools that do not train: one line, status 130, no traceback."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

TOOLS = Path(__file__).resolve().parents[2] / 'tools'


@pytest.mark.parametrize('tool', ['demo.py', 'convert_checkpoint.py'])
def test_ctrl_c_is_one_line(tool, tmp_path):
    """Interrupted while the tool waits for a config that does not come to an end."""
    config, started = tmp_path / 'endless.py', tmp_path / 'started'
    config.write_text(f'import time\nopen({str(started)!r}, "w").close()\ntime.sleep(100)\n')
    arguments = dict(
        zip(
            ('demo.py', 'convert_checkpoint.py'),
            (['x.jpg', config, 'y.pth', '--out', 'o.jpg'], ['y.pth', 'z.pth', '--config', config]),
        )
    )[tool]
    torch.save(dict(weight=torch.ones(2)), tmp_path / 'y.pth')
    process = subprocess.Popen(
        [sys.executable, TOOLS / tool, *map(str, arguments)],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        # what a shell starts in the background ignores it, and so would the tool
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    for _ in range(4000):
        if started.exists() or process.poll() is not None:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors.strip().splitlines()[-1] == 'interrupted.' and 'Traceback' not in errors
