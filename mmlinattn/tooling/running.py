# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""From a config to a Runner."""

import inspect
import os
import os.path as osp

from mmengine.config import Config
from mmengine.device import get_device
from mmengine.optim import AmpOptimWrapper, ApexOptimWrapper
from mmengine.registry import RUNNERS
from mmengine.runner import Runner

from ..engine import CheckpointMatchHook, CompileHook, DataCheckHook, SafeRunner, prepare_distributed
from ..utils.errors import RunError
from ..utils.registering import bare_name
from .command_line import notice
from .environment import lacking_on_gpu


def add_checks(cfg: Config) -> None:
    """See to it that data sets are compared with the config, and weights with the model, in configs of others too."""
    hooks = cfg.get('custom_hooks') or []
    names = [bare_name(hook.get('type')) for hook in hooks]
    missing = [kind.__name__ for kind in (DataCheckHook, CheckpointMatchHook) if kind.__name__ not in names]
    cfg.custom_hooks = [*hooks, *(dict(type=name) for name in missing)]


def was_restarted(work_dir: str) -> bool:
    """Whether torchrun started this process anew and the run before has left a checkpoint to go on from.

    One that was there when ``tools/launch.py`` began belongs to another run: what began without ``--resume`` begins
    anew. Without ``tools/launch.py`` nothing tells the two apart, and the answer is no.
    """
    if int(os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)) == 0 or 'MMLINATTN_LAUNCHED' not in os.environ:
        return False
    pointer = osp.join(work_dir, 'last_checkpoint')
    return osp.isfile(pointer) and osp.getmtime(pointer) >= float(os.environ['MMLINATTN_LAUNCHED']) - 1


def drop_amp_on_cpu(cfg: Config, is_asked: bool) -> None:
    """Mixed precision where there is an accelerator; fp32 and a notice where there is none."""
    wrapper = cfg.get('optim_wrapper')
    if not wrapper:
        return
    given = wrapper.get('type', 'OptimWrapper')
    kind = bare_name(given)
    device = get_device()
    if device in ('cpu', 'mps'):  # where MMEngine's wrappers refuse to work
        mixed = {cls.__name__: cls for cls in (AmpOptimWrapper, ApexOptimWrapper)}.get(kind)
        if mixed or is_asked:
            why = 'no accelerator' if device == 'cpu' else f'{device} is no device of AmpOptimWrapper'
            notice(f'{why}: mixed precision is off, training in fp32.')
        if mixed:
            wrapper.type = 'OptimWrapper'
            for key in inspect.signature(mixed).parameters:
                wrapper.pop(key, None)
    elif is_asked and kind != 'AmpOptimWrapper':
        if kind != 'OptimWrapper':
            raise RunError(f"--amp: optim_wrapper.type is {given!r}; only 'OptimWrapper' can be switched.")
        wrapper.type = 'AmpOptimWrapper'
        wrapper.setdefault('loss_scale', 'dynamic')


def build_runner(cfg: Config, compiles: bool = False) -> Runner:
    """Join the processes where there are several, and build a SafeRunner (or ``runner_type``).

    Args:
        cfg (Config): The config as it will run.
        compiles (bool): Compile the blocks of the backbone.

    Raises:
        RunError: Of :func:`~mmlinattn.engine.prepare_distributed`, or MMCV's operators, which a detector calls, do not
            run on the GPU that is there.
    """
    prepare_distributed(cfg)
    lacking = lacking_on_gpu() if cfg.get('default_scope') == 'mmdet' and get_device() == 'cuda' else ''
    if lacking:
        raise RunError(lacking)
    hooks = cfg.get('custom_hooks') or []
    if compiles and not any(bare_name(hook.get('type')) == CompileHook.__name__ for hook in hooks):
        cfg.custom_hooks = [*hooks, dict(type=CompileHook.__name__)]
    return RUNNERS.build(cfg) if 'runner_type' in cfg else SafeRunner.from_cfg(cfg)
