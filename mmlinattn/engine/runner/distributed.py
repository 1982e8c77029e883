# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import datetime
import gc
import os
import subprocess
import time
from contextlib import suppress

import torch
import torch.distributed
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.logging import print_log
from mmengine.model import MMDistributedDataParallel, revert_sync_batchnorm
from mmengine.registry import MODEL_WRAPPERS
from torch import nn

from ...utils.errors import RunError
from ...utils.registering import bare_name

# environment of launchers: rank of a process, number of processes, rank on its machine
_RANKS = {
    'pytorch': ('RANK', 'WORLD_SIZE', 'LOCAL_RANK'),
    'slurm': ('SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_LOCALID'),
    'mpi': ('OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_SIZE', 'OMPI_COMM_WORLD_LOCAL_RANK'),
}
_SYNC_BN = ('SyncBatchNorm', 'NaiveSyncBatchNorm')


@MODEL_WRAPPERS.register_module(force=True)
class CPUDistributedDataParallel(MMDistributedDataParallel):
    """MMEngine's data-parallel wrapper for processes without an accelerator.

    ``device_ids`` is ignored: MMEngine always passes it, and DDP raises an error for it on a CPU. SyncBatchNorm layers
    become BatchNorm, because PyTorch cannot synchronise their statistics on the CPU.
    """

    def __init__(self, module: nn.Module, **kwargs):
        kwargs.pop('device_ids', None)
        num_synced = sum(type(layer).__name__ in _SYNC_BN for layer in module.modules())
        if num_synced:
            module = revert_sync_batchnorm(module)
            line = f'On CPU {num_synced} SyncBatchNorm layers are trained as BatchNorm: '
            print_log(f'{line}statistics are those of each process alone.', logger='current')
        super().__init__(module=module, **kwargs)


def _slurm_master() -> str:
    nodes = os.environ['SLURM_NODELIST']
    found = subprocess.run(['scontrol', 'show', 'hostnames', nodes], capture_output=True, text=True, check=True)
    return found.stdout.split()[0]


def _export_rank(launcher: str) -> None:
    """Set PyTorch's environment variables (``RANK``, ``MASTER_ADDR`` ...) from those of the launcher."""
    names = _RANKS[launcher]
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise RunError(
            f'--launcher {launcher}: {", ".join(missing)} not set in the environment. Start through '
            'tools/dist_train.sh, tools/slurm_train.sh or mpirun, or leave --launcher away for a single process.'
        )
    for target, name in zip(('RANK', 'WORLD_SIZE', 'LOCAL_RANK'), names):
        os.environ[target] = os.environ[name]
    os.environ.setdefault('MASTER_PORT', '29500')
    if 'MASTER_ADDR' not in os.environ:
        os.environ['MASTER_ADDR'] = _slurm_master() if launcher == 'slurm' else '127.0.0.1'


def launched_rank(launcher: str) -> int:
    """Return the rank that a launcher gives this process in its environment, before there is a process group."""
    return int(os.environ.get(_RANKS[launcher][0], 0)) if launcher in _RANKS else 0


def prepare_distributed(cfg: Config) -> None:
    """Prepare this process and the config for ``cfg.launcher``, before the Runner is built.

    With GPUs, each process selects its own GPU. Without an accelerator, the gloo process group is created here, because
    MMEngine's own function needs CUDA, and the config gets the CPU model wrapper.

    Raises:
        RunError: There are more processes than GPUs. Without an accelerator: an environment variable of the launcher is
            missing, or the model wrapper of the config needs an accelerator.
    """
    if cfg.launcher == 'none':
        return
    if get_device() != 'cpu':
        if torch.cuda.is_available():
            rank, count = int(os.environ.get(_RANKS[cfg.launcher][2], 0)), torch.cuda.device_count()
            if rank >= count:
                remedy = 'Start at most that many processes per machine.'
                raise RunError(f'process {rank + 1} of this machine has no GPU: there are {count}. {remedy}')
            torch.cuda.set_device(rank)
        return

    given = cfg.get('model_wrapper_cfg') or {}
    kind = given.get('type', 'MMDistributedDataParallel')
    if bare_name(kind) not in ('MMDistributedDataParallel', CPUDistributedDataParallel.__name__):
        raise RunError(f'model_wrapper_cfg.type = {kind!r} needs an accelerator, and there is none.')
    # MMEngine's defaults without a wrapper config
    default = dict(broadcast_buffers=False, find_unused_parameters=cfg.get('find_unused_parameters', False))
    cfg.model_wrapper_cfg = {**default, **given, 'type': CPUDistributedDataParallel.__name__}
    _export_rank(cfg.launcher)
    if not torch.distributed.is_initialized():
        settings = (cfg.get('env_cfg') or {}).get('dist_cfg') or {}
        seconds = settings.get('timeout') or 1800  # as MMEngine's own, in seconds
        torch.distributed.init_process_group('gloo', timeout=datetime.timedelta(seconds=seconds))


def leave_process_group(failed: bool) -> None:
    """Destroy the process group, if there is one.

    If a group outlives the interpreter, its threads may abort the process after its last line (``terminate called
    without an active exception``, exit status -6). After an error or a signal (``failed``) it is aborted, because
    destroying it may wait for processes that have died.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    if failed:
        abort = getattr(torch.distributed.distributed_c10d, '_abort_process_group', None)  # since torch 2.6
        if abort is not None:
            with suppress(Exception):  # the error of the run counts
                abort()
        return
    # let gloo's thread free its last tensors first: it holds the group's lock and waits for the GIL, while destroying
    # the group holds the GIL and waits for the lock (PyTorch 2.11)
    time.sleep(0.1)
    torch.distributed.destroy_process_group()
    gc.collect()  # the threads of gloo end with the last model that holds the group
