# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""One start for all processes of a run: the checkpoint, the position and the weights."""

import os
import os.path as osp
import socket
import zlib
from typing import Any, Optional

import torch
from mmengine.dist import all_gather_object, broadcast_object_list, get_world_size, is_main_process
from mmengine.runner import EpochBasedTrainLoop
from torch.nn.parallel import DistributedDataParallel

from ...utils.building import unwrapped
from ...utils.errors import CheckpointError, RunError
from ..optimizers.saved_groups import PER_GROUP, all_schedulers


def find_latest_checkpoint(work_dir: str) -> Optional[str]:
    """Return the checkpoint named by ``last_checkpoint`` in a work dir, if it belongs to that run.

    A checkpoint belongs to the run if it is in the work dir, or in a folder of the same name (``out_dir`` of
    CheckpointHook). The path in ``last_checkpoint`` may be outdated, for example after the work dir was moved. So a
    file of the same name in the work dir is considered too, and the newer of both is returned. An address such as
    ``s3://`` needs that folder too; its existence is not checked. Without ``last_checkpoint``, the result is None.

    Raises:
        CheckpointError: The checkpoint does not exist or belongs to another run.
    """
    pointer = osp.join(work_dir, 'last_checkpoint')
    if not osp.lexists(pointer):
        return None
    with open(pointer, errors='replace') as file:
        latest = file.read().strip()
    folder, name = osp.split(latest if latest.isprintable() else '')
    same_name = osp.basename(folder) == osp.basename(osp.abspath(work_dir))
    is_own = same_name or osp.realpath(folder) == osp.realpath(work_dir)
    # addresses such as s3:// are checked by their loaders; http links are not accepted
    if is_own and '://' in latest and not latest.startswith(('http://', 'https://')):
        return latest
    candidates = [osp.join(work_dir, name)] if name else []
    candidates += [latest] if is_own else []
    found = [path for path in candidates if osp.exists(path)]
    if found:
        return max(found, key=osp.getmtime)
    raise CheckpointError(
        f'{pointer} names {latest[:200]!r}, which is not there or not of this run. Name a checkpoint to resume from, '
        'or delete that file to begin from the start.'
    )


def _checkpoint_of_restart(work_dir: str, launch_times: list[Optional[str]]) -> Optional[str]:
    """Return the last checkpoint if it was saved since the launch of this run, as after a restart by torchrun, else
    None.

    ``launch_times`` has one Unix time per process, as a string from ``tools/launch.py``, or None without that tool. The
    earliest time counts.
    """
    times, pointer = [float(time) for time in launch_times if time], osp.join(work_dir, 'last_checkpoint')
    # file systems round down
    if not times or not osp.isfile(pointer) or osp.getmtime(pointer) < min(times) - 1:
        return None
    return find_latest_checkpoint(work_dir)


def agree_on_start(work_dir: str, load_from: Optional[str], resume: bool) -> tuple[Optional[str], bool]:
    """Return ``load_from`` and ``resume`` of the main process, in all processes.

    A last checkpoint newer than the start of ``tools/launch.py`` comes first: torchrun has restarted the processes.

    Raises:
        CheckpointError: As for :func:`find_latest_checkpoint`.
        RunError: In some processes, the checkpoint is missing or has another size.
    """
    launch_times = all_gather_object(os.environ.get('MMLINATTN_LAUNCHED'))
    start: list[Any] = [None]
    if is_main_process():
        last = _checkpoint_of_restart(work_dir, launch_times)
        start = [(last, True) if last else (load_from, resume)]
    broadcast_object_list(start)
    load_from, resume = start[0]
    if load_from is None or '://' in load_from or get_world_size() == 1:
        return load_from, resume
    size = osp.getsize(load_from) if osp.isfile(load_from) else None
    sizes = all_gather_object((size, socket.gethostname()))
    others = sorted({f'{host} (rank {i})' for i, (each, host) in enumerate(sizes) if each != sizes[0][0]})
    if others:
        raise RunError(
            f'the checkpoint {load_from!r} of the first process is missing or another file on {", ".join(others)}. Set '
            '--work-dir to a folder that all machines share, or copy the checkpoint to each.'
        )
    return load_from, resume


def _fingerprint(model: Any) -> int:
    """Return a checksum of the parameters of a DistributedDataParallel model, and 0 of others (sharded models)."""
    if not isinstance(model, DistributedDataParallel):
        return 0
    total = 0
    for parameter in unwrapped(model).parameters():
        values = parameter.detach().cpu().reshape(-1).view(torch.uint8)
        total = zlib.crc32(values.numpy().data, total)
    return total


def check_same_start(runner: Any) -> None:
    """Check that all processes have the same epoch, iteration and weights before the first step.

    Raises:
        RunError: Processes differ.
    """
    if get_world_size() == 1:
        return
    here = (runner.epoch, runner.iter, _fingerprint(runner.model))
    for rank, there in enumerate(all_gather_object(here)):
        if there != here:
            raise RunError(
                f'processes start differently: (epoch, iteration, checksum of the weights) is {here} here and {there} '
                f'in process {rank}. Set --work-dir to a folder that all machines share.'
            )


def fit_iterations(runner: Any, meta: dict, fresh: list[dict]) -> None:
    """Recompute the iteration of a resumed epoch-based run if the number of iterations in an epoch has changed.

    The epoch is kept, and schedulers by iteration continue from the new iteration.

    Args:
        runner (Runner): Runner after resuming.
        meta (dict): ``meta`` of the checkpoint.
        fresh (list[dict]): Attributes of each scheduler as built from the config.
    """
    loop = runner.train_loop
    done, length = loop.iter, len(loop.dataloader)
    if not isinstance(loop, EpochBasedTrainLoop) or meta.get('stopped') or done == loop.epoch * length:
        return
    loop._iter = loop.epoch * length
    for scheduler, own in zip(all_schedulers(runner.param_schedulers), fresh):
        if not scheduler.by_epoch:
            kept = ('optimizer', *PER_GROUP)
            vars(scheduler).update({key: value for key, value in own.items() if key not in kept})
            scheduler._global_step = loop.iter
            scheduler.last_step = max(min(loop.iter, scheduler.end - 1) - scheduler.begin, -1)
    runner.logger.info(
        f'epochs have {length} iterations, other than before: epoch {loop.epoch} ends at iteration {loop.iter}, not '
        f'{done}. Schedules by iteration go on from there.'
    )
