# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Hook for tests that stop a run: it waits at an iteration, so that no test depends on timing."""

import os
import time
from pathlib import Path

from mmengine.hooks import Hook
from mmengine.registry import HOOKS


@HOOKS.register_module()
class HoldHook(Hook):
    """Wait in iteration ``HOLD`` (from 1) for a file ``go_on`` in the work dir or a SIGTERM seen by ``StopHook``."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter + 1 != int(os.environ.get('HOLD', '0')):
            return
        go_on = Path(runner.work_dir, 'go_on')
        while not (go_on.exists() or any(getattr(hook, 'is_signalled', False) for hook in runner.hooks)):
            time.sleep(0.02)
