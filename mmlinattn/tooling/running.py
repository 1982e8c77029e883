# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Build a Runner of a config."""

import inspect
import os
import os.path as osp
from typing import Any, Optional

import torch
from filelock import FileLock, Timeout
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.logging import MMLogger
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from mmengine.optim.scheduler.param_scheduler import INF
from mmengine.registry import RUNNERS
from mmengine.runner import Runner
from mmengine.runner.base_loop import BaseLoop

from ..engine import SafeRunner, prepare_distributed
from ..engine.optimizers.saved_groups import named_wrappers
from ..utils.errors import RunError
from ..utils.registering import bare_name
from .command_line import notice
from .console import quiet_console, quiet_programs
from .environment import lacking_on_gpu

# hooks that the tools add to any config, in the order of docs/configs.md
TOOL_HOOKS = (
    'DataCheckHook',  # classes, labels and annotation files that do not fit: before training
    'FiniteLossHook',  # NaN or infinity: stop, naming the images
    'ExactResumeHook',  # --resume continues the same loss curve
    'CheckpointMatchHook',  # a checkpoint of other classes: name the weights left out
    'StopHook',  # SIGTERM: save a checkpoint, then end
    'UnusedParametersHook',  # maps that nothing reads: named after the first iteration
    'RehearsalHook',  # a validation of two images
    'ScheduleCheckHook',
    'ProgressHook',
    'ResultsHook',
)


class ToolRunner(SafeRunner):
    """SafeRunner for a command line: a quiet console, and learning rates scaled by the batch of an update."""

    has_stepped = False  # an iteration of the training or test is done

    def call_hook(self, fn_name: str, **kwargs) -> None:
        super().call_hook(fn_name, **kwargs)
        self.has_stepped = self.has_stepped or fn_name in ('after_train_iter', 'after_test_iter')

    def build_logger(self, *args, **kwargs) -> MMLogger:
        logger = super().build_logger(*args, **kwargs)
        quiet_console(logger)
        return logger

    def _log_env(self, env_cfg: dict) -> None:
        with quiet_programs():
            super()._log_env(env_cfg)

    def build_train_loop(self, loop: Any) -> BaseLoop:
        built = super().build_train_loop(loop)
        loader = built.dataloader
        if getattr(loader, 'drop_last', False) and len(loader) == 0:
            size = f'train_dataloader.batch_size={loader.batch_size} exceeds the {len(loader.dataset)} images of the'
            raise RunError(f'{size} data set, and drop_last=True leaves no batch. Set a smaller batch_size.')
        return built

    def train(self) -> torch.nn.Module:
        """Train, with a lock on the work dir. Raise a RunError if another run trains in it."""
        if self.rank != 0:
            return super().train()
        path = osp.join(self.work_dir, '.locks', 'train.lock')
        os.makedirs(osp.dirname(path), exist_ok=True)
        lock = FileLock(path, timeout=0)
        try:
            with lock:
                return super().train()
        except Timeout as error:
            if error.lock_file != path:
                raise
            raise RunError(f'--work-dir {self.work_dir!r}: another run trains in it. Set another folder.') from error

    def scale_lr(self, optim_wrapper: OptimWrapper, auto_scale_lr: Optional[dict] = None) -> None:
        """Multiply learning rates by (images of an optimizer update) / ``base_batch_size``.

        Accumulated batches count, other than in MMEngine. With scaling off, one line reports that the numbers differ.
        """
        settings: dict[str, Any] = dict(auto_scale_lr or {})
        base, is_on = settings.get('base_batch_size', 0), settings.get('enable', False)
        if is_on and not base:
            raise RunError('auto_scale_lr.enable=True: auto_scale_lr.base_batch_size is missing.')
        loader: Any = self._train_dataloader
        size = loader['batch_size'] if isinstance(loader, dict) else loader.batch_size
        for wrapper in named_wrappers(optim_wrapper).values():
            steps = getattr(wrapper, '_accumulative_counts', 1)
            batch = (size or 1) * self.world_size * steps
            parts = f'{size} images x {self.world_size} process(es) x {steps} accumulated step(s)'
            if is_on:
                super().scale_lr(wrapper, dict(settings, base_batch_size=base / steps))
                notice(f'learning rate x {batch / base:g}: {batch} images an update ({parts}), base_batch_size {base}.')
            elif base and base != batch:
                made_for = f'the learning rate is for {base} images an update (auto_scale_lr.base_batch_size)'
                notice(f'{made_for}, and this run has {batch} ({parts}). --auto-scale-lr scales it.')


def add_checks(cfg: Config) -> None:
    """Add the hooks that compare data, weights and schedule with the config, and show the course of a run."""
    given = cfg.get('custom_hooks') or []
    names = [bare_name(hook.get('type')) for hook in given]
    cfg.custom_hooks = [*given, *(dict(type=name) for name in TOOL_HOOKS if name not in names)]
    for hook in cfg.custom_hooks if cfg.get('rehearsal') is False else ():
        if bare_name(hook.get('type')) == 'RehearsalHook':
            hook['enabled'] = False


def set_precision(cfg: Config, is_requested: bool) -> None:
    """Set up mixed precision in ``optim_wrapper``, if ``is_requested`` (``--amp``) or it is an AmpOptimWrapper.

    It is bfloat16 without loss scaling if the GPU has units for it, else float16 with it, and off without an
    accelerator. One line names the precision.

    Raises:
        RunError: ``--amp`` beside an optimizer wrapper that is neither OptimWrapper nor AmpOptimWrapper.
    """
    wrapper = cfg.get('optim_wrapper')
    if not wrapper:
        return
    kind = bare_name(wrapper.get('type', 'OptimWrapper'))
    device = get_device()
    if device in ('cpu', 'mps'):  # MMEngine's wrappers refuse to work there
        is_mixed = kind == 'AmpOptimWrapper'
        if is_mixed or is_requested:
            reason = 'no accelerator' if device == 'cpu' else f'{device} is no device of AmpOptimWrapper'
            notice(f'{reason}: mixed precision is off, training in fp32.')
        if is_mixed:
            wrapper.type = 'OptimWrapper'
            for key in inspect.signature(AmpOptimWrapper).parameters:
                wrapper.pop(key, None)
        return
    if is_requested and kind == 'OptimWrapper':
        wrapper.type = kind = 'AmpOptimWrapper'
        if has_bfloat16(device):
            wrapper.setdefault('dtype', 'bfloat16')
        if wrapper.get('dtype') == 'bfloat16':  # has float32's range: no gradient is too small
            wrapper.setdefault('loss_scale', dict(enabled=False))
        wrapper.setdefault('loss_scale', 'dynamic')
    elif is_requested and kind != 'AmpOptimWrapper':
        raise RunError(f"--amp: optim_wrapper.type={wrapper.type!r}: expected 'OptimWrapper' or 'AmpOptimWrapper'.")
    if kind == 'AmpOptimWrapper':
        scale = wrapper.get('loss_scale', 'dynamic')
        scaled = 'without' if isinstance(scale, dict) and scale.get('enabled') is False else 'with'
        notice(f'mixed precision: {wrapper.get("dtype") or "float16"} {scaled} loss scaling.')
    elif device == 'cuda' and not torch.version.hip and has_bfloat16(device):  # TF32 came with the same GPUs
        is_on = torch.get_float32_matmul_precision() != 'highest'
        tf32 = 'uses TF32' if is_on else 'does not use TF32; TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 before the command does'
        notice(f'training in float32, which {tf32}. --amp trains in bfloat16.')


def has_bfloat16(device: str) -> bool:
    """Return True if the accelerator multiplies bfloat16 matrices in hardware."""
    if device == 'cuda':
        if not torch.cuda.is_available():
            return False
        return bool(torch.version.hip) or torch.cuda.get_device_capability() >= (8, 0)
    return device in ('npu', 'musa')


LENGTHS = dict(max_epochs=True, max_iters=False)  # by_epoch of schedules by key of train_cfg


def fit_schedule(cfg: Config, before: dict, options: dict, resumes: bool = False) -> None:
    """Stretch the learning rate schedule to the length of the training given by ``options`` (``--cfg-options``), unless
    one is for ``param_scheduler``. ``before`` is ``train_cfg`` of the file. A notice names the schedulers, and with
    ``resumes`` that a checkpoint has its own."""
    schedules = cfg.get('param_scheduler')
    if not schedules or any(key.split('.')[0] == 'param_scheduler' for key in options):
        return
    for key, by_epoch in LENGTHS.items():
        old: Any = before.get(key)
        new: Any = (cfg.get('train_cfg') or {}).get(key)
        if f'train_cfg.{key}' not in options or not all(type(each) is int and each > 0 for each in (old, new)):
            continue
        listed = schedules if isinstance(schedules, (list, tuple)) else [schedules]
        of_unit = [each for each in listed if each.get('by_epoch', True) is by_epoch]
        made_for = max([old, *(each['end'] for each in of_unit if 0 < each.get('end', 0) < INF)])
        changed = [bare_name(each['type']) for each in of_unit if stretch(each, new / made_for, new)]
        if by_epoch and new < made_for:  # a warm-up by iteration would be a larger part of the training
            others = [each for each in listed if not each.get('by_epoch', True)]
            changed += [bare_name(each['type']) for each in others if stretch(each, new / made_for, INF)]
        if changed:
            names = ', '.join(changed)
            line = f'param_scheduler is fitted to train_cfg.{key}={new} (it was made for {made_for}): {names}.'
            notice(f'{line} A resumed run keeps the schedule of its checkpoint.' if resumes else line)


def stretch(schedule: dict, ratio: float, length: int) -> bool:
    """Multiply the steps in the config of a scheduler by ``ratio``, in place, and return True if any changed.

    Steps are rounded, and limited to 1 to ``length``. Milestones from ``length`` on are dropped.
    """

    def scaled(step: int) -> int:
        return min(max(1, round(step * ratio)), length) if 0 < step < INF else step

    old = dict(schedule)
    for key in ('begin', 'end', 'step_size'):
        if isinstance(schedule.get(key), (int, float)):
            schedule[key] = scaled(schedule[key])
    if schedule.get('milestones'):
        milestones = {scaled(step) for step in schedule['milestones']}
        schedule['milestones'] = sorted(step for step in milestones if step + schedule.get('begin', 0) < length)
    if schedule.get('begin', 0) >= length:  # rounded up, as a warm-up shorter than a step
        schedule['begin'] = length - 1
    for key in ('T_max', 'total_steps'):  # from begin on
        if isinstance(schedule.get(key), (int, float)):
            schedule[key] = scaled(old.get('begin', 0) + schedule[key]) - schedule.get('begin', 0)
    return old != dict(schedule)


def build_runner(cfg: Config, compiles: bool = False) -> Runner:
    """Join the processes of a distributed run, and build a ToolRunner (or another ``runner_type``). With ``compiles``,
    the blocks of the backbone are compiled.

    Raises:
        RunError: The processes do not join, or MMCV's operators of a detector do not run on the GPU.
    """
    prepare_distributed(cfg)
    lacking = lacking_on_gpu() if cfg.get('default_scope') == 'mmdet' and get_device() == 'cuda' else ''
    if lacking:
        raise RunError(lacking)
    hooks = cfg.get('custom_hooks') or []
    if compiles and not any(bare_name(hook.get('type')) == 'CompileHook' for hook in hooks):
        cfg.custom_hooks = [*hooks, dict(type='CompileHook')]
    is_own = bare_name(cfg.get('runner_type', SafeRunner)) == SafeRunner.__name__
    return ToolRunner.from_cfg(cfg) if is_own else RUNNERS.build(cfg)
