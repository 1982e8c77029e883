# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Configs as the tools read, change and check them."""

import argparse
import os
import os.path as osp
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from mmengine.config import Config
from mmengine.device import get_device
from mmengine.runner import CheckpointLoader

from ..checkpoints.released import find_released
from ..checkpoints.schemes import PREFIX
from ..utils.errors import RunError
from ..utils.registering import bare_name

# default_scope -> the distributions that provide it, as pip is told
PIP_NAMES = {
    'mmdet': '"mmdet>=3.3,<3.4"',
    'mmseg': '"mmsegmentation>=1.2.2,<1.3" ftfy regex',
    'mmpretrain': '"mmpretrain>=1.2,<1.3"',
}


LOADERS = ('train_dataloader', 'val_dataloader', 'test_dataloader')
# of MMPretrain's data sets those that read the folder `split`; in others it names a list, or a part of an archive
SPLIT_IS_FOLDER = ('ImageNet', 'ImageNet21k')
DOWNLOADED = ('CIFAR10', 'CIFAR100', 'MNIST', 'FashionMNIST')  # which make their folder


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


def _is_local(path, config=None) -> bool:
    backend = ((config or {}).get('backend_args') or {}).get('backend', 'local')
    return backend == 'local' and '://' not in str(path)


def _leaf_configs(config, key: str) -> Iterator[tuple[str, dict]]:
    """The data sets inside wrappers such as ``RepeatDataset`` and ``ConcatDataset``."""
    if not isinstance(config, dict):
        return
    if isinstance(config.get('dataset'), dict):
        yield from _leaf_configs(config['dataset'], f'{key}.dataset')
    elif isinstance(config.get('datasets'), (list, tuple)):
        for index, child in enumerate(config['datasets']):
            yield from _leaf_configs(child, f'{key}.datasets.{index}')
    else:
        yield key, config


def _check_leaf(config: dict, key: str) -> None:
    root = config.get('data_root') or ''
    if not _is_local(root, config):
        return
    kind = bare_name(config.get('type'))
    if kind in DOWNLOADED and config.get('download', True):
        return
    where, prefix = 'data_prefix', config.get('data_prefix')
    if not prefix and kind in SPLIT_IS_FOLDER:
        where, prefix = 'split', config.get('split')
    prefixes = dict(prefix) if isinstance(prefix, dict) else {'': prefix or ''}
    ann_files = config.get('ann_file') or ''
    ann_files = [ann_files] if isinstance(ann_files, str) else ann_files
    if root and not osp.isdir(root):
        held = ', '.join(repr(p) for p in (*ann_files, *prefixes.values()) if p)
        raise RunError(
            f'{key}.data_root = {root!r}: no such folder. It has to be the root of the data set'
            + (f', holding {held}' if held else '')
            + '.'
        )
    for ann_file in ann_files:
        path = osp.join(root, ann_file)
        if ann_file and _is_local(path) and not osp.exists(path):
            raise RunError(
                f'{key}.ann_file = {ann_file!r}: no such file {path!r}. '
                'The path is relative to data_root unless it is absolute.'
            )
    for name, value in prefixes.items():
        folder = osp.join(root, value) if isinstance(value, str) else ''
        if value and folder and _is_local(folder) and not osp.isdir(folder):
            dotted = f'{key}.{where}.{name}' if name else f'{key}.{where}'
            raise RunError(
                f'{dotted} = {value!r}: no such folder {folder!r}. '
                'The path is relative to data_root unless it is absolute.'
            )


def check_data_config(cfg: Config, stages: Sequence[str]) -> None:
    """Check that the folders and annotation files a config names are there.

    Args:
        cfg: The whole config.
        stages: Those of ``'train'``, ``'val'`` and ``'test'`` that will run.

    Raises:
        RunError: One is missing. The message has the config key, its value and what belongs there.
    """
    for stage in stages:
        loader = cfg.get(f'{stage}_dataloader')
        for key, leaf in _leaf_configs(loader, f'{stage}_dataloader'):
            if key != f'{stage}_dataloader':
                _check_leaf(leaf, key)
        evaluators = cfg.get(f'{stage}_evaluator') or []
        for evaluator in [evaluators] if isinstance(evaluators, dict) else evaluators:
            path = evaluator.get('ann_file')
            if isinstance(path, str) and _is_local(path, evaluator) and not osp.isfile(path):
                raise RunError(
                    f'{stage}_evaluator.ann_file = {path!r}: no such file. It has to be the '
                    f'annotation file of {stage}_dataloader, and is not relative to data_root.'
                )
