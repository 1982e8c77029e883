# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Raise errors for settings of a config that nothing reads."""

import ast
import inspect
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, Optional

import mmengine.registry
from mmengine.config import Config
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from mmengine.registry import Registry
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, LogProcessor, Runner, TestLoop, ValLoop
from mmengine.visualization import Visualizer
from torch.utils.data import DataLoader

from ..utils.building import scope_of
from ..utils.errors import RunError

# settings at the top of a config that Runner, MMEngine's Config or the tools read
READ = {
    *inspect.signature(Runner.__init__).parameters,
    *('runner_type', 'custom_imports', 'activation_checkpointing', 'efficient_conv_bn_eval', 'find_unused_parameters'),
    *('model_wrapper_cfg', 'compile', 'sync_bn', 'tta_model', 'tta_pipeline', 'rehearsal', 'strategy', 'gpu_ids'),
} - {'self', 'cfg'}

# settings of OpenMMLab 1.x, and those that replace them
SUCCESSORS = {
    'data': 'train_dataloader, val_dataloader and test_dataloader',
    'optimizer': 'optim_wrapper.optimizer',
    'optimizer_config': 'optim_wrapper (clip_grad, accumulative_counts)',
    'lr_config': 'param_scheduler',
    'momentum_config': 'param_scheduler',
    'runner': 'train_cfg (max_epochs or max_iters)',
    'total_epochs': 'train_cfg.max_epochs',
    'total_iters': 'train_cfg.max_iters',
    'workflow': 'train_cfg',
    'evaluation': 'val_evaluator, train_cfg.val_interval and default_hooks.checkpoint.save_best',
    'evaluator': 'val_evaluator and test_evaluator',
    'checkpoint_config': 'default_hooks.checkpoint',
    'log_config': 'default_hooks.logger and visualizer',
    'resume_from': 'load_from with resume=True (--resume CHECKPOINT)',
    'auto_resume': 'resume=True (--resume)',
    'fp16': "optim_wrapper.type='AmpOptimWrapper' (--amp)",
    'dist_params': 'env_cfg.dist_cfg',
    'cudnn_benchmark': 'env_cfg.cudnn_benchmark',
    'mp_start_method': 'env_cfg.mp_cfg.mp_start_method',
    'opencv_num_threads': 'env_cfg.mp_cfg.opencv_num_threads',
    'seed': 'randomness.seed',
    'deterministic': 'randomness.deterministic',
}

_OF_LOADERS = (DataLoader.__init__, 'dataset', 'sampler', 'batch_sampler', 'collate_fn', 'num_batch_per_epoch')
# classes and names of settings that have no type
_UNTYPED: dict[str, tuple] = {
    **dict.fromkeys(('train_dataloader', 'val_dataloader', 'test_dataloader'), _OF_LOADERS),
    'train_cfg': (EpochBasedTrainLoop.__init__, IterBasedTrainLoop.__init__, 'by_epoch'),
    'val_cfg': (ValLoop.__init__,),
    'test_cfg': (TestLoop.__init__,),
    'optim_wrapper': (OptimWrapper.__init__, AmpOptimWrapper.__init__, 'constructor', 'paramwise_cfg'),
    'log_processor': (LogProcessor.__init__,),
    'visualizer': (Visualizer.__init__,),
    'randomness': ('seed', 'diff_rank_seed', 'deterministic'),
    'auto_scale_lr': ('enable', 'base_batch_size'),
    'env_cfg': ('cudnn_benchmark', 'mp_cfg', 'dist_cfg', 'resource_limit'),
}
# settings that builders take out of a dict with a type
_OF_BUILDERS = {'type', '_scope_', '_delete_', 'priority', 'convert_to_iter_based', 'init_cfg', 'data_preprocessor'}


_OF_NUMBERS = {
    'optim_wrapper',
    'param_scheduler',
    'train_cfg',
    'model',
    'auto_scale_lr',
    'default_hooks',
    'custom_hooks',
}
_EXPONENT = re.compile(r'([-+]?\d+)(\.\d*)?([eE])([-+]?\d+)')


def _parameters(function: Any) -> tuple[set[str], bool]:
    """Return the parameters of a function, and True if it takes any other keyword."""
    parameters = inspect.signature(function).parameters.values()
    is_open = any(each.kind is each.VAR_KEYWORD for each in parameters)
    return {each.name for each in parameters if each.kind is not each.VAR_KEYWORD} - {'self'}, is_open


def accepted(kind: Any) -> tuple[set[str], bool]:
    """Return the keywords that a class, or a function, takes, and True if it takes any other."""
    if not isinstance(kind, type):
        return _parameters(kind)
    names, is_open = set(), True
    for base in kind.__mro__:
        if is_open and '__init__' in vars(base):
            more, is_open = _parameters(vars(base)['__init__'])
            names |= more
    return names, is_open


ROOTS: list[Registry] = [each for each in vars(mmengine.registry).values() if isinstance(each, Registry)]


def takers(name: str, kind: Any) -> list[str]:
    """Return the classes with an argument ``name`` in the registries that hold the class ``kind``.

    If these have none, MMEngine's root registries are searched. More than four classes give an empty list.
    """
    registries = [registry for root in ROOTS for registry in (root, *root.children.values())]
    beside = [each for each in registries if kind in {*each.module_dict.values()}]
    for group in (beside, ROOTS):
        found = set()
        for each in {kind for registry in group for kind in registry.module_dict.values() if isinstance(kind, type)}:
            with suppress(ValueError, TypeError):  # of C, without a signature
                found |= {each.__name__} if name in accepted(each)[0] else set()
        if found:
            return sorted(found) if len(found) <= 4 else []
    return []


def _expected(path: list[str], node: dict, scope: Optional[str]) -> tuple[set[str], bool]:
    """Return the settings that the object of a dict reads, and True if it may read others."""
    if not path:
        return READ, False
    own = [_parameters(each)[0] if callable(each) else {each} for each in _UNTYPED.get(path[0], ())]
    known: set[str] = set().union(*own) if len(path) == 1 else set()
    if 'type' not in node:
        return known, not known
    name = node['type']  # of any of MMEngine's registries, for the task of the config
    found = [root.children.get(scope, root).get(name) for root in ROOTS] if isinstance(name, str) else [name]
    each = [accepted(kind) for kind in found if kind is not None]
    return known.union(*(names for names, _ in each)), not each or any(is_open for _, is_open in each)


def leaves(node: Any, path: str = '') -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each node below a config node."""
    node = dict(enumerate(node)) if isinstance(node, (list, tuple)) else node
    for key, child in dict.items(node) if isinstance(node, dict) else ():
        below = f'{path}.{key}' if path else str(key)
        yield below, child
        yield from leaves(child, below)


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(type(one) is type(other) and one == other)
    except Exception:  # arrays, and classes with a comparison of their own
        return False


def _places(cfg: dict, name: str, value: Any) -> list[str]:
    """Return the dotted keys of up to three settings that a variable of a config file was probably used for.

    These are settings with the variable's ``name``. Without such settings, strings, lists and dicts are compared by
    ``value``.
    """
    read = [*leaves({key: cfg[key] for key in cfg if key in READ})]
    named = [path for path, _ in read if path.rpartition('.')[2] == name]
    is_telling = isinstance(value, (str, list, tuple, dict)) and len(value) > 0
    return (named or [path for path, other in read if is_telling and _equal(other, value)])[:3]


def check_options(content: dict, cfg: Config, options: dict) -> None:
    """Raise a RunError if a setting of ``--cfg-options`` is never read.

    The message suggests similar names. For a variable of the config file, it lists the settings with its value. A
    setting is read in two cases: it is in the config below a key of Runner, or the configured class has an argument of
    this name.

    Args:
        content (dict): Config before the options are merged.
        cfg (Config): Config with the options.
        options (dict): Values by dotted key.
    """
    scope, merged = scope_of(cfg), cfg._cfg_dict.to_dict()
    for option in options:
        top, *rest = option.split('.')
        if top in SUCCESSORS:
            raise RunError(f'--cfg-options {option}: nothing reads {top}. Set {SUCCESSORS[top]}.')
        is_inner = top == 'data_preprocessor' and (content.get('model') or {}).get(top)
        if is_inner or (top in content and top not in READ):
            places = _places(content, (rest or [top])[-1], None if rest else content[top])
            where = f'model.{option}' if is_inner else ', '.join(places) or 'the setting that it went into'
            used = f'{top} is a variable of the file, which is used already'
            raise RunError(f'--cfg-options {option}: {used}. Set {where}.')
        _check_path(option, content, merged, scope)


def _check_path(option: str, node: Any, merged: Any, scope: Optional[str]) -> None:
    path: list[str] = []
    for key in option.split('.'):
        if isinstance(node, (list, tuple)) and key.isdecimal() and int(key) < len(node):
            node, merged = node[int(key)], merged[int(key)]
        elif isinstance(node, dict) and key in node:
            node, merged = node[key], merged[key]
        elif isinstance(node, dict):
            expected, is_open = _expected(path, merged, scope)
            if key in expected or key in _OF_BUILDERS:
                return
            near = get_close_matches(key, {*node, *expected}, 3, 0.8 if is_open else 0.6)
            if near or not is_open:
                known = near or (sorted(expected) if path else [])
                listed = f' Expected one of {", ".join(known)}.' if known else ''
                where = '.'.join(path) or 'the config'
                raise RunError(f'--cfg-options {option}: nothing reads {key!r} in {where}.{listed}')
            return
        else:
            return
        path.append(key)
    is_number = isinstance(node, (int, float)) and not isinstance(node, bool)
    if path[0] in _OF_NUMBERS - {'model'} and is_number and isinstance(merged, (list, tuple)):
        remedy = 'A comma makes a list: write decimals with a point.'
        raise RunError(f'--cfg-options {option}={merged!r}: expected one number, as {node!r} before. {remedy}')


def check_variables(cfg: Config) -> None:
    """Raise a RunError if nothing reads a name that a Python config sets at its top: neither a Runner, nor the file as
    a variable. Files of upstream are not checked."""
    if not (cfg.filename or '').endswith('.py') or f'{os.sep}.mim{os.sep}' in cfg.filename:
        return
    with open(cfg.filename, encoding='utf-8') as file:
        tree = ast.parse(file.read())
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    targets = (target for line in tree.body if isinstance(line, ast.Assign) for target in line.targets)
    own = [target.id for target in targets if isinstance(target, ast.Name)]
    content = cfg._cfg_dict.to_dict()
    unread = [key for key in dict.fromkeys(own) if not (key in READ or key in used or content.get(key) is None)]
    inherited = _inherited(cfg.filename, tree) if unread else {}
    for key in unread:
        value, place = content[key], f'{cfg.filename}: {key}'
        if key in SUCCESSORS:
            raise RunError(f'{place}: nothing reads this setting of OpenMMLab 1.x. Set {SUCCESSORS[key]}.')
        near = get_close_matches(key, READ, 1, 0.9)
        if near:
            raise RunError(f'{place}: nothing reads this setting. Did you mean {near[0]}?')
        if key not in inherited or _equal(inherited[key], value):
            continue
        places = _places(content, key, inherited[key])
        values = (other for path, other in leaves(content) if path in places)
        if places and not any(_equal(other, value) for other in values):
            taken = f'{value!r:.60} is a variable that an inherited file has used already'
            raise RunError(f'{place}={taken}. Set {" and ".join(places)}.')


def _inherited(path: str, tree: ast.Module) -> dict:
    """Return the content of the files that a config names in ``_base_``."""
    for line in tree.body:
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name) and line.targets[0].id == '_base_':
            bases = eval(compile(ast.Expression(line.value), path, 'eval'), {})  # MMEngine has run the file already
            bases = [bases] if isinstance(bases, str) else bases
            folder = os.path.dirname(os.path.abspath(path))
            bases = [base if '::' in base else os.path.join(folder, base) for base in bases]
            with suppress(OSError):  # a path with predefined variables, such as {{ fileDirname }}
                return Config.fromstring(f'_base_ = {bases!r}', '.py')._cfg_dict.to_dict()
    return {}


def check_numbers(cfg: Config) -> None:
    """Check that ``max_epochs`` and ``max_iters`` are positive, and that no number is a string.

    YAML reads ``1e-4``, without a dot, as a string.

    Raises:
        RunError: ``max_epochs`` or ``max_iters`` is below 1. Or a string is a number with an exponent, or begins with a
            digit in the optimizer or a scheduler.
    """
    for key in ('max_epochs', 'max_iters'):
        length = (cfg.get('train_cfg') or {}).get(key, 1)
        if not isinstance(length, (int, float)) or length < 1:
            raise RunError(f'train_cfg.{key}={length!r}: expected a positive integer.')
    for path, value in leaves({key: cfg.get(key) for key in _OF_NUMBERS if cfg.get(key)}):
        found = _EXPONENT.fullmatch(value) if isinstance(value, str) else None
        if found:
            whole, rest, letter, exponent = found.groups()
            written = f'{whole}{rest or ".0"}{letter}{exponent}' if float(value) < 1 else f'{float(value):.15g}'
            remedy = f'YAML needs a dot before the exponent: set {written}.'
            raise RunError(f'{path}={value!r}: expected a number, not a text. {remedy}')
        is_of_numbers = path.startswith(('optim_wrapper.', 'param_scheduler.'))
        if is_of_numbers and isinstance(value, str) and re.match(r'[-+.]?\d', value):
            raise RunError(f'{path}={value!r}: expected a number, not a text.')


def check_single(cfg: Config) -> None:
    """Raise a RunError for a list of loaders, of data sets in a loader, or of root folders or annotation files in a
    data set."""
    for loader in ('train_dataloader', 'val_dataloader', 'test_dataloader'):
        node = cfg.get(loader) or {}
        for name, each in ((loader, node), (f'{loader}.dataset', isinstance(node, dict) and node.get('dataset'))):
            if isinstance(each, (list, tuple)):
                remedy = f"Set {loader}.dataset=dict(type='ConcatDataset', datasets=[...])."
                raise RunError(f'{name} is a list: expected one. {remedy}')
        for path, value in leaves(dict(dataset=node.get('dataset') or {}), loader):
            if path.endswith(('.data_root', '.ann_file')) and isinstance(value, (list, tuple)):
                remedy = "Set type='ConcatDataset' with a data set for each, in its datasets."
                raise RunError(f'{path}={value!r:.80}: expected one path. {remedy}')
