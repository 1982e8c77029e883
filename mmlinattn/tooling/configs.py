# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Read, change and check configs for the tools."""

import argparse
import os
import os.path as osp
import re
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.device import get_device
from mmengine.utils import get_installed_path

from ..checkpoints.released import find_released
from ..checkpoints.schemes import PREFIX
from ..engine import hooks as engine_hooks
from ..engine.data.checks import check_names
from ..engine.runner import find_latest_checkpoint
from ..utils.building import scope_of
from ..utils.errors import RunError, closest, described
from ..utils.files import link_checkout, project_files
from ..utils.private_apis import checkpoint_loaders
from ..utils.registering import bare_name
from .class_names import dataset_configs, num_classes
from .command_line import check_display, notice, writing
from .environment import PIP, describe_failure, use
from .running import add_checks, fit_schedule
from .settings import check_numbers, check_options, check_single, check_variables

# arguments of pip by default_scope
PIP_NAMES = {scope: PIP[scope] for scope in ('mmdet', 'mmseg', 'mmpretrain')}

LOADERS = ('train_dataloader', 'val_dataloader', 'test_dataloader')
EVALUATORS = ('val_evaluator', 'test_evaluator')
DOWNLOADED = ('CIFAR10', 'CIFAR100', 'MNIST', 'FashionMNIST')  # data sets of MMPretrain that make their own folder


def load_config(args: argparse.Namespace) -> Config:
    """Read the config, apply the arguments of :func:`mmlinattn_console.add_common_arguments`, and make the work dir.
    Raise a RunError if one of these fails, or a setting is wrong."""
    os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    cfg = read_config(args.config)
    scope = cfg.get('default_scope')
    cfg.launcher = args.launcher
    check_variables(cfg)
    add_checks(cfg)
    if args.data_root:
        set_data_root(cfg, args.data_root)
    if args.cfg_options:
        before = dict(cfg.get('train_cfg') or {})
        content, options = merge_options(cfg, args.cfg_options)
        check_options(content, cfg, options)
        fit_schedule(cfg, before, args.cfg_options, bool(getattr(args, 'resume', None) or cfg.get('resume')))
    check_single(cfg)
    check_numbers(cfg)
    for name, hook in (cfg.get('default_hooks') or {}).items():
        if hook and hook.get('show') and (hook.get('draw') or hook.get('enable')):
            check_display(f'default_hooks.{name}.show=True')
    if scope == 'mmpretrain':
        adapt_inherited_classes(cfg)
    for loader in filter(None, map(cfg.get, LOADERS)):
        if scope == 'mmpretrain':  # its own tools fill these in, and its configs rely on them
            loader.setdefault('collate_fn', dict(type='default_collate'))
            loader.setdefault('pin_memory', get_device() != 'cpu')
            loader.setdefault('persistent_workers', True)
        if not loader.get('num_workers'):
            loader.persistent_workers = False  # PyTorch raises for True without workers
        if args.no_pin_memory:
            loader.pin_memory = False
    stem = osp.splitext(osp.basename(args.config))[0]
    cfg.work_dir = osp.expanduser(args.work_dir or cfg.get('work_dir') or osp.join('work_dirs', stem))
    with writing(cfg.work_dir, 'work dir'):
        os.makedirs(cfg.work_dir, exist_ok=True)
        tempfile.TemporaryFile(dir=cfg.work_dir).close()
    return cfg


def merge_options(cfg: Config, given: dict[str, Any]) -> tuple[dict, dict[str, Any]]:
    """Apply ``--cfg-options``, and return the content of the config before, and the options.

    Names of hooks (``custom_hooks.StopHook.interval``) become MMEngine's list indices. Hooks of this package that the
    config lacks are added to it.

    Raises:
        RunError: An option does not fit the config, or its hook is neither in the config nor in this package.
    """
    options = {}
    try:
        for key, value in given.items():
            head, *rest = key.split('.')
            if head == 'custom_hooks' and len(rest) > 1:
                hooks = cfg.get('custom_hooks') or []
                names = [bare_name(hook.get('type')) for hook in hooks]
                if rest[0] not in names and rest[0] in engine_hooks.__all__:
                    names.append(rest[0])
                    cfg.custom_hooks = [*hooks, dict(type=rest[0])]
                if rest[0] not in names and not rest[0].isdecimal():
                    raise RunError(f'--cfg-options {key}: there is no such hook; custom_hooks has {", ".join(names)}.')
                rest[0] = str(names.index(rest[0])) if rest[0] in names else rest[0]
            options['.'.join([head, *rest])] = value
        content = cfg._cfg_dict.to_dict()
        cfg.merge_from_dict(options)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise RunError(f'--cfg-options {given} does not fit the config: {error}') from error
    return content, options


def find_config(spec: str, argument: str = 'config') -> Path:
    """Return the file of a config, given as a path or as ``SCOPE::FOLDER/CONFIG.py`` of an installed project.

    Raises:
        RunError: There is no such file, project or config. The message begins with ``argument``.
    """
    scope, is_address, name = spec.partition('::')
    if not is_address:
        path = Path(spec).expanduser()
        if not path.is_file():
            raise RunError(f'{argument} {spec!r}: no such file (of an installed project: mmdet::FOLDER/CONFIG.py).')
        return path
    if scope not in ('mmlinattn', *PIP_NAMES):
        raise RunError(f'{argument} {spec!r}: expected one of {("mmlinattn", *PIP_NAMES)} before ::')
    if scope == 'mmlinattn':
        root = project_files('configs')
    elif find_spec(scope) is None:
        raise RunError(_how_to_install(spec, scope))
    else:
        root = Path(get_installed_path(scope), '.mim', 'configs')
    if not (root / name).is_file():
        near = closest(name, (path.relative_to(root).as_posix() for path in root.glob('*/*.py')))
        meant = f' Did you mean {f"{scope}::{near}"!r}?' if near else ''
        raise RunError(f'{argument} {spec!r}: {scope} has no such config.{meant}')
    return root / name


def read_config(path: str) -> Config:
    """Read a config and check that its task can run in this environment.

    Args:
        path: Path or address, see :func:`find_config`.

    Raises:
        RunError: The config is missing or not readable, or the package of its ``default_scope`` is not installed or
            fails. The message has the command to repair it.
    """
    file = find_config(path)
    link_checkout()
    try:
        cfg = Config.fromfile(file)
    except Exception as error:  # a config is a program and may raise anything
        message = f'config {path!r} cannot be read: {described(error)}'
        if isinstance(error, FileNotFoundError) and str(error.filename).endswith('.mim/model-index.yml'):
            message = (
                f'config {path!r} inherits one by its name, and mmlinattn is not installed. Run pip install -e . in '
                'the checkout of mmlinattn, or write the path of the config in place of its name'
            )
        cause: BaseException = error
        # MMEngine raises two errors on top of that of the module
        while str(cause).startswith('Failed to import ') and (inner := cause.__cause__ or cause.__context__):
            module, cause = str(cause).rpartition(' ')[2], inner
            message = f'config {path!r} cannot be read: custom_imports {module!r}: {described(cause)}'
            if isinstance(cause, ModuleNotFoundError) and f'{module}.'.startswith(f'{cause.name}.'):
                message += '. Add its folder to PYTHONPATH'
        if isinstance(cause, ModuleNotFoundError):  # MMEngine's message begins with the name of the distribution
            message = _how_to_install(path, cause.name or str(cause).split()[0]) or message
        raise RunError(message) from error
    scope = scope_of(cfg)
    if scope in PIP_NAMES:
        if find_spec(scope) is None:
            raise RunError(_how_to_install(path, scope))
        for module in ('mmcv.ops', f'{scope}.models') if scope == 'mmdet' else (f'{scope}.models',):
            try:
                use(module)
            except Exception as error:
                raise RunError(f'{path} needs {scope}: {describe_failure(module, error)}') from error
        cfg.default_scope = scope
    return cfg


def read_with_options(args: argparse.Namespace) -> Config:
    """Read the config of a tool that starts no run, and apply ``--cfg-options``; errors as of :func:`read_config`."""
    cfg = read_config(args.config)
    merge_options(cfg, args.cfg_options or {})
    return cfg


def _how_to_install(config: str, missing: str) -> str:
    for scope, pip_names in PIP_NAMES.items():
        if missing in (scope, pip_names.replace('"', '').split('>')[0]):
            return f'{config} needs {scope}, which is not installed in {sys.executable}: pip install {pip_names}'
    return ''


def adapt_inherited_classes(cfg: Config) -> None:
    """Set ``data_preprocessor.num_classes`` to that of the head, and remove ``split`` from ``CustomDataset``, as
    classifier configs inherit both from ImageNet. Each change prints a notice."""
    count = num_classes(cfg) if cfg.get('model') else 0
    inherited = (cfg.get('data_preprocessor') or {}).get('num_classes')
    if count and inherited and count != inherited:
        cfg.data_preprocessor.num_classes = count
        notice(f'data_preprocessor.num_classes = {inherited} is {count} here, as num_classes of the head.')
    for loader in LOADERS:
        for key, dataset in dataset_configs(cfg, loader):
            if bare_name(dataset.get('type')) == 'CustomDataset' and 'split' in dataset:
                split = dataset.pop('split')
                notice(f'{key}: CustomDataset knows no split; {split!r} is left out, all of data_root is read.')


def set_data_root(cfg: Config, root: str) -> None:
    """Change the root folder of all data sets of a config, and of the annotation files of its evaluators.

    Absolute paths below the old root are moved too. A missing ``ann_file`` at another absolute path is taken from the
    new root, if it is there. If only some data sets have a ``data_root``, the others keep their paths.
    """
    datasets = [dataset for loader in LOADERS for _, dataset in dataset_configs(cfg, loader)]
    rooted = [dataset for dataset in datasets if 'data_root' in dataset]
    old_roots = {osp.normpath(dataset['data_root'] or '') for dataset in rooted}
    old_roots |= {osp.abspath(old) for old in old_roots - {'.'}}
    for dataset in rooted or datasets:
        dataset['data_root'] = root

    for key in EVALUATORS:
        if cfg.get(key):
            cfg[key] = _moved(cfg[key], root, old_roots)
    for dataset in rooted or datasets:
        prefixes = dataset['data_prefix'] if isinstance(dataset.get('data_prefix'), dict) else {}
        for node, key in [(dataset, 'ann_file'), (dataset, 'data_prefix'), *((prefixes, key) for key in prefixes)]:
            if isinstance(node.get(key), str) and osp.isabs(node[key]):
                node[key] = osp.abspath(_moved(node[key], root, old_roots, key))  # as data_root is put before others


def _moved(node: Any, root: str, old_roots: set[str], key: str = '') -> Any:
    """Replace the old root folders at the beginning of paths below a setting by ``root``; ``key`` is its name."""
    if isinstance(node, dict):
        # dict.items: MMEngine's would turn types of pure Python configs into classes, and a dump fails on these
        return type(node)({key: _moved(value, root, old_roots, key) for key, value in dict.items(node)})
    if isinstance(node, (list, tuple)):
        return type(node)(_moved(child, root, old_roots, key) for child in node)
    path = osp.normpath(node) if isinstance(node, str) else ''
    # the longest first: roots may be nested; whole names: data/coco is no part of data/coco_2
    for old in sorted(old_roots, key=len, reverse=True):
        if old != '.' and osp.join(path, '').startswith(osp.join(old, '')):
            return osp.join(root, path[len(old) :].lstrip('/'))
    beside = osp.join(root, osp.basename(path))
    if key == 'ann_file' and osp.isabs(path) and not osp.exists(path) and osp.exists(beside):
        return beside
    # without a root, files were relative to the current folder; join leaves absolute paths alone
    if '.' in old_roots and key == 'ann_file' and path not in ('', '.') and '://' not in node:
        return osp.join(root, path)
    return node


def check_checkpoint(path: str, name: str) -> str:
    """Return a checkpoint file, the last one of a work dir, or an address for which MMEngine has a loader. Raise a
    RunError for other local paths."""
    is_address = '://' in path and any(re.match(prefix, path) for prefix in filter(None, checkpoint_loaders()))
    local = osp.expanduser(path)
    if not is_address and osp.isdir(local):
        last = find_latest_checkpoint(local)
        if last is None:
            raise RunError(f'{name} {path!r}: no last_checkpoint in this folder.{_checkpoints_in(local)}')
        notice(f'{name} {path!r}: {last}')
        return last
    if not is_address and not osp.isfile(local):
        if osp.exists(local):
            raise RunError(f'{name} {path!r}: a pipe or a device, not a file.')
        raise RunError(f'{name} {path!r}: no such file.{_checkpoints_in(osp.dirname(local) or ".")}')
    if path.startswith(PREFIX):
        find_released(path[len(PREFIX) :])
    return path


def _checkpoints_in(folder: str) -> str:
    """Return a blank and a sentence that lists the five newest checkpoints in a folder, newest first, or ''."""
    files = sorted(Path(folder).glob('*.pth'), key=osp.getmtime, reverse=True) if osp.isdir(folder) else []
    more = ', ...' if len(files) > 5 else ''
    return f' There are: {", ".join(str(file) for file in files[:5])}{more}.' if files else ''


def require(cfg: Config, config: str, *keys: str) -> None:
    """Raise a RunError if a config lacks one of its top-level ``keys``, or the batch size of any loader is invalid.

    A batch size is valid if it is a positive integer. ``config`` is the name of the config, for messages.
    """
    missing = [key for key in keys if cfg.get(key) is None]
    if missing:
        raise RunError(f'{config} has no {", no ".join(missing)}.')
    for key in LOADERS:
        size = (cfg.get(key) or {}).get('batch_size', 1)
        if type(size) is not int or size < 1:
            raise RunError(f'{key}.batch_size={size!r}: expected an integer of at least 1.')


def check_data_config(cfg: Config, stages: Sequence[str]) -> None:
    """Raise a RunError if the ``data_root`` of a data set does not exist, or if its class names are no list.

    ``stages`` are ``'train'``, ``'val'`` or ``'test'``. Remote and downloadable data sets may be missing.
    """
    for stage in stages:
        for key, dataset in dataset_configs(cfg, f'{stage}_dataloader'):
            root = str(dataset.get('data_root') or '.')
            is_local = '://' not in root and (dataset.get('backend_args') or {}).get('backend', 'local') == 'local'
            if is_local and not osp.isdir(root) and bare_name(dataset.get('type')) not in DOWNLOADED:
                remedy = 'Set the folder that ann_file and data_prefix are relative to.'
                raise RunError(f'{key}.data_root = {root!r}: no such folder. {remedy}')
            for finding in check_names(key, dataset.get('metainfo') or {}):
                raise RunError(finding.text)
