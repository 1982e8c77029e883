# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What ``tools/train.py`` and ``tools/test.py`` share: arguments, configs, and errors of one
line."""

import argparse
import errno
import inspect
import os
import os.path as osp
import sys
import tempfile
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from traceback import walk_tb
from typing import Optional

from mmengine.config import Config, ConfigDict, DictAction
from mmengine.device import get_device
from mmengine.hooks import Hook
from mmengine.optim import AmpOptimWrapper, ApexOptimWrapper
from mmengine.registry import RUNNERS
from mmengine.runner import Runner
from mmengine.runner.checkpoint import CheckpointLoader

from ..checkpoints.released import find_released
from ..checkpoints.schemes import PREFIX
from ..utils.errors import RunError, described, printable, say_last
from ..utils.registering import bare_name
from .checkpoint_match import CheckpointMatchHook
from .distributed import prepare_distributed
from .label_check import check_labels
from .resume_guard import find_latest_checkpoint

# default_scope -> the distributions that provide it, as pip is told
PIP_NAMES = {
    'mmdet': '"mmdet>=3.3,<3.4"',
    'mmseg': '"mmsegmentation>=1.2.2,<1.3" ftfy regex',
    'mmpretrain': '"mmpretrain>=1.2,<1.3"',
}


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the tools of MMDetection, MMSegmentation and MMPretrain all have."""
    parser.add_argument('--work-dir', help='folder for logs and checkpoints [work_dirs/CONFIG]')
    parser.add_argument(
        '--data-root',
        help='folder of the data set, in place of the one in the config: sets data_root of every '
        'data set and the annotation files of the evaluators',
    )
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=DictAction,
        metavar='KEY=VALUE',
        help='override settings of the config, e.g. train_dataloader.batch_size=4 or '
        'model.backbone.init_cfg=None; lists as key="[a,b]" or key=a,b',
    )
    parser.add_argument(
        '--compile',
        action='store_true',
        help='compile the blocks of the backbone (torch.compile): the first iterations take minutes longer',
    )
    parser.add_argument('--no-pin-memory', action='store_true', help='do not pin loader memory')
    parser.add_argument('--launcher', choices=['none', 'pytorch', 'slurm', 'mpi'], default='none')
    # torch.distributed.launch passes it; everything here reads the environment
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0)


@contextmanager
def one_line_errors():
    """Print a RunError or CheckpointError as one line, without traceback, and exit with status 1."""
    try:
        yield
    except RunError as error:
        say_last(f'error: {printable(error)}')
        # Not sys.exit: waiting for data-loader workers and process groups could hang here.
        raise SystemExit(1) from None


@contextmanager
def writing(out):
    """A context in which an OSError becomes the RunError that ``--out`` cannot be written.

    Args:
        out (str | Path): What ``--out`` names.

    Raises:
        RunError: With the path and the reason, in one line.
    """
    try:
        yield
    except OSError as error:
        raise RunError(f'--out {str(out)!r} cannot be written: {error.strerror}.') from error


def check_out_file(out) -> None:
    """Make the folder of a file that a tool writes at its end, before it works.

    Args:
        out (str | Path): The file, which need not exist and stays as it is.

    Raises:
        RunError: It is a folder, or nothing can be written in the folder it is in.
    """
    out = Path(out)
    with writing(out):
        if out.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent) if not out.exists() else out.open('ab'):
            pass


def notice(message: str) -> None:
    """One line on stderr, from one process per machine."""
    if int(os.environ.get('LOCAL_RANK', 0)) == 0:
        print(f'notice: {message}', file=sys.stderr, flush=True)


def load_config(args: argparse.Namespace) -> Config:
    """Read the config, apply the arguments of :func:`add_common_arguments`, make the work dir.

    Raises:
        RunError: The config is missing or not readable, the package of its ``default_scope`` is not
            installed, or the work dir cannot be written.
    """
    os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    cfg = read_config(args.config)
    scope = cfg.get('default_scope')
    cfg.launcher = args.launcher
    if scope == 'mmpretrain':
        _set_mmpretrain_loader_defaults(cfg)
    if args.data_root:
        set_data_root(cfg, args.data_root)
    if args.cfg_options:
        try:
            cfg.merge_from_dict(args.cfg_options)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise RunError(f'--cfg-options {args.cfg_options} does not fit the config: {error}') from error
    if args.no_pin_memory:
        for stage in ('train', 'val', 'test'):
            if cfg.get(f'{stage}_dataloader'):
                cfg[f'{stage}_dataloader'].pin_memory = False
    stem = osp.splitext(osp.basename(args.config))[0]
    cfg.work_dir = args.work_dir or cfg.get('work_dir') or osp.join('work_dirs', stem)
    _check_writable(cfg.work_dir)
    return cfg


def _not_installed(scope: str, config: str) -> str:
    return f'{config} needs {scope}, which is not installed in {sys.executable}: pip install {PIP_NAMES[scope]}'


def read_config(path: str) -> Config:
    """Read a config whose task can run here.

    Raises:
        RunError: It is missing or not readable, or the package of its ``default_scope`` is not
            installed.
    """
    cfg = _parse(path)
    scope = cfg.get('default_scope')
    if scope in PIP_NAMES and find_spec(scope) is None:
        raise RunError(_not_installed(scope, path))
    return cfg


def _parse(path: str) -> Config:
    if not osp.isfile(path):
        raise RunError(f'config {path!r}: no such file.')
    try:
        return Config.fromfile(path)
    except ModuleNotFoundError as error:
        # MMEngine's message begins with the distribution; Python's own has it in `name`.
        missing = error.name or str(error).split()[0]
        for scope, pip_names in PIP_NAMES.items():
            if missing in (scope, pip_names.replace('"', '').split('>')[0]):
                raise RunError(_not_installed(scope, path)) from error
        raise RunError(f'config {path!r} cannot be read: {error}') from error
    except (Exception, SystemExit) as error:
        # A config is a program: anything may be raised by one with a mistake in it.
        raise RunError(f'config {path!r} cannot be read: {type(error).__name__}: {error}') from error


def _set_mmpretrain_loader_defaults(cfg: Config) -> None:
    """Loader settings that MMPretrain's own tools fill in and its configs rely on."""
    for stage in ('train', 'val', 'test'):
        loader = cfg.get(f'{stage}_dataloader')
        if loader:
            loader.setdefault('collate_fn', dict(type='default_collate'))
            loader.setdefault('pin_memory', get_device() != 'cpu')
            if loader.get('num_workers', 0) > 0:
                loader.setdefault('persistent_workers', True)


def set_data_root(cfg: Config, root: str) -> None:
    """Let all data sets of a config lie in another folder, and what its evaluators read from the folder they were in.

    Args:
        cfg (Config): The config, which is changed.
        root (str): ``data_root`` of every data set, in any wrappers. One without, where others have one, has its whole
            paths elsewhere and stays.
    """
    from .data_check import LOADERS, _leaf_configs  # which needs this module

    old_roots = set()

    def visit(node):
        if isinstance(node, dict):
            if 'data_root' in node and 'type' in node:
                old_roots.add(_without_dot(str(node['data_root'] or '')))
                node['data_root'] = root
            for child in node.values():
                visit(child)
        elif isinstance(node, (list, tuple)):
            for child in node:
                visit(child)

    def moved(node):
        if isinstance(node, dict):
            for key, value in node.items():
                node[key] = moved(value)
        elif isinstance(node, (list, tuple)):
            return type(node)(moved(child) for child in node)
        elif isinstance(node, str):
            path = _without_dot(node)
            # the longest first, as one root may lie in another; whole names, as data/coco is no part of data/coco_2
            for old in sorted(filter(None, old_roots), key=len, reverse=True):
                if osp.join(path, '').startswith(osp.join(old, '')):
                    return osp.join(root, path[len(old) :].lstrip('/'))
        return node

    for loader in LOADERS:
        visit(cfg.get(loader))
    if not old_roots:
        for loader in LOADERS:
            for key, leaf in _leaf_configs(cfg.get(loader), loader):
                if key != loader:
                    leaf['data_root'] = root
    for stage in ('train', 'val', 'test'):
        if cfg.get(f'{stage}_evaluator'):
            cfg[f'{stage}_evaluator'] = moved(cfg[f'{stage}_evaluator'])


def _without_dot(path: str) -> str:
    return path[2:].lstrip('/') if path.startswith('./') else path


def _check_writable(work_dir: str) -> None:
    try:
        os.makedirs(work_dir, exist_ok=True)
        with tempfile.TemporaryFile(dir=work_dir) as probe:
            probe.write(b'x')
    except OSError as error:
        raise RunError(f'work dir {work_dir!r} cannot be written: {error.strerror}.') from error


def check_checkpoint(path: str, name: str) -> str:
    """Check that a checkpoint argument is a file, or an address MMEngine has a loader for.

    Raises:
        RunError: ``path`` is local and there is no such file.
    """
    is_address = '://' in path and any(path.startswith(prefix) for prefix in CheckpointLoader._schemes if prefix)
    local = osp.expanduser(path)
    if not is_address and not osp.isfile(local):
        what = 'no such file' if not osp.exists(local) else 'a folder' if osp.isdir(local) else 'a pipe or a device'
        raise RunError(f'{name} {path!r}: {what}{"" if what == "no such file" else ", not a file"}.')
    if path.startswith(PREFIX):
        find_released(path[len(PREFIX) :])
    return path


class _Begin(Hook):
    """Notes that a run has been set up, and looks at labels once the data is there."""

    priority = 'VERY_HIGH'
    has_begun = False

    def before_train(self, runner) -> None:
        check_labels(runner.train_dataloader.dataset, runner.model)

    def _before_iter(self, *args, **kwargs) -> None:
        self.has_begun = True


@contextmanager
def explained_setup(config: str):
    """Give an error of the setting up of a run in one line; what happens from the first batch on keeps its traceback.

    A wrong argument of a model, data set, optimizer or hook shows when MMEngine builds it, in errors of any kind.

    Args:
        config: the config file, for messages.

    Yields:
        A function that takes the runner, to know when the first batch comes.

    Raises:
        RunError: with the class that was being built, if any, and why it failed. ``MMLINATTN_TRACEBACK=1``
            keeps the error as it is.
    """
    begin = _Begin()
    try:
        yield lambda runner: runner.register_hook(begin)
    except RunError:
        raise
    except Exception as error:
        if begin.has_begun or os.environ.get('MMLINATTN_TRACEBACK') == '1':
            raise
        what = ': '.join([*_failed_class(error), described(error)])
        raise RunError(f'{config} cannot be run: {what} (MMLINATTN_TRACEBACK=1 shows where)') from error


def _failed_class(error: Exception) -> list[str]:
    """Name of what MMEngine was building when it failed, the innermost; none where it was building nothing."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code.co_name == 'build_from_cfg']
    built = [frame.f_locals['obj_cls'] for frame in frames if frame.f_locals.get('obj_cls') is not None]
    return [getattr(built[-1], '__name__', str(built[-1]))] if built else []


def require(cfg: Config, config: str, *keys: str) -> None:
    """Check that a config has the settings a tool works with, and that batches are not empty.

    Raises:
        RunError: One is missing, or a batch size is no positive integer.
    """
    missing = [key for key in keys if cfg.get(key) is None]
    if missing:
        raise RunError(f'{config} has no {", no ".join(missing)}.')
    for key in ('train_dataloader', 'val_dataloader', 'test_dataloader'):
        size = (cfg.get(key) or {}).get('batch_size', 1)
        if type(size) is not int or size < 1:
            raise RunError(f'{key}.batch_size = {size!r} has to be an integer from 1 up.')


def check_match(cfg: Config) -> None:
    """See to it that weights are compared with the model, in configs of others too."""
    hooks = cfg.get('custom_hooks') or []
    if not any(bare_name(hook.get('type')) == CheckpointMatchHook.__name__ for hook in hooks):
        cfg.custom_hooks = [*hooks, dict(type=CheckpointMatchHook.__name__)]


def resume_point(work_dir: str) -> Optional[str]:
    """The checkpoint ``--resume`` continues from, or None to begin from the start."""
    return find_latest_checkpoint(work_dir)


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
    """Join the processes where there are several, and build the Runner (or ``runner_type``).

    Args:
        cfg (Config): The config as it will run.
        compiles (bool): Compile the blocks of the backbone.

    Raises:
        RunError: ``compiles``, and the model has no backbone of this package.
    """
    prepare_distributed(cfg)
    runner = RUNNERS.build(cfg) if 'runner_type' in cfg else Runner.from_cfg(cfg)
    if compiles:
        from .compiling import compile_blocks  # tools that do not compile start without the compiler

        notice(f'--compile: {compile_blocks(runner.model)} kinds of blocks are compiled as they are first used.')
    return runner


def as_config(value: dict) -> ConfigDict:
    """A plain dict as what ``Config`` holds inside, for attribute access."""
    return ConfigDict(value)
