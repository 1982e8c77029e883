# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The config text inside a checkpoint, read without running it.

MMEngine keeps a run's config in its checkpoints as Python text and reads it back by running it. What
``Config.pretty_text`` writes is assignments of literals, so the syntax tree holds all that is needed; text that
computes, imports or inherits anything is somebody else's program.
"""

import ast
import re
import sys
from typing import Any, Optional

from mmengine.config import Config, ConfigDict
from mmengine.registry import Registry, root

from ..utils.errors import CheckpointError

_MAX_CHARACTERS = 4_000_000
_NUMBERS = dict(inf=float('inf'), nan=float('nan'))  # how floats print that have no literal
_SCOPES = ('mmengine', 'mmdet', 'mmseg', 'mmpretrain', 'mmlinattn')
_NOT_TEXT = (SyntaxError, ValueError, RecursionError, MemoryError)

# What upstream does with a value once it is built. Files that are run or unpickled as they are read (MMEngine's loader
# of YAML builds any object), from wherever the value says, links included: a teacher's config, the weights of classes.
_RUN = dict(py='a program', pyc='a program', pkl='a pickle', pickle='a pickle', yaml='YAML', yml='YAML')
# Values that are evaluated: MMDetection's CameraMotionCompensation, MMPretrain's wrapper of torchvision's transforms.
_EVALUATED, _NAME = ('warp_mode', 'dtype'), re.compile(r'[\w.]+')
# Names that are no registry's, by the key of the dict they are the type of: MMCV evaluates the one and looks the other
# up in mmcv.ops.
_NMS = ('nms', 'soft_nms', 'nms_match', 'nms_quadri', 'nms_rotated')
_ROI_LAYERS = (
    'DeformRoIPoolPack', 'ModulatedDeformRoIPoolPack', 'PrRoIPool', 'RoIAlign', 'RoIAlignRotated', 'RoIPool',
    'SimpleRoIAlign',
)  # fmt: skip
_OPS = dict(nms=_NMS, dqs_cfg=_NMS, roi_layer=_ROI_LAYERS)


class _NotLiteral(ValueError):
    pass


def _value(node: ast.AST) -> Any:
    """What a literal stands for; ``dict(...)`` and ``range(...)`` of literals count as such."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.List):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Tuple):
        return tuple(_value(item) for item in node.elts)
    if isinstance(node, ast.Set):
        return {_value(item) for item in node.elts}
    if isinstance(node, ast.Dict) and None not in node.keys:
        return {_value(key): _value(value) for key, value in zip(node.keys, node.values)}
    if isinstance(node, ast.Name) and node.id in _NUMBERS:
        return _NUMBERS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _value(node.operand)
        if type(value) in (int, float):
            return -value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        names = [keyword.arg for keyword in node.keywords]
        if node.func.id == 'dict' and len(node.args) <= 1 and None not in names:
            return dict(*map(_value, node.args), **{keyword.arg: _value(keyword.value) for keyword in node.keywords})
        numbers = [_value(argument) for argument in node.args]
        if node.func.id == 'range' and not names and all(type(number) is int for number in numbers):
            return range(*numbers)
    raise _NotLiteral(f'line {getattr(node, "lineno", "?")} is not a plain value')


def _assignments(text: Any) -> list[ast.stmt]:
    if not isinstance(text, str) or len(text) > _MAX_CHARACTERS:
        raise _NotLiteral('it is no text of a usual length')
    return ast.parse(text).body


def _assigned_name(statement: ast.stmt) -> Optional[str]:
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    return None


def count_gpus(text: Any) -> Optional[int]:
    """How many ``gpu_ids`` a config text names; None where it does not say so in a literal."""
    try:
        values = [_value(statement.value) for statement in _assignments(text) if _assigned_name(statement) == 'gpu_ids']
        return len(values[-1]) if values and isinstance(values[-1], (list, tuple, range)) else None
    except (*_NOT_TEXT, OverflowError, TypeError):
        return None


def read_config_text(text: Any, source: str) -> ConfigDict:
    """The config that a checkpoint carries, for building its model.

    Args:
        text: what MMEngine saved as ``Config.pretty_text``.
        source: the checkpoint it comes from, for messages.

    Returns:
        The settings. Nothing is inherited or imported; ``custom_imports`` is left out.

    Raises:
        CheckpointError: the text holds more than assignments of literals, names something to build that is not
            registered with MMEngine (which would import and call any function by its name), or a value that upstream
            would run, evaluate or unpickle.
    """
    settings = {}
    try:
        for statement in _assignments(text):
            name = _assigned_name(statement)
            if name is None or name == '_base_':
                raise _NotLiteral(f'line {statement.lineno} is more than "name = value"')
            settings[name] = _value(statement.value)
    except (*_NOT_TEXT, TypeError) as error:
        reason = str(error).splitlines()[0] if isinstance(error, _NotLiteral) else type(error).__name__
        raise CheckpointError(
            f'the config inside {source} was refused: {reason}; nothing of it was run. Give the config as a file'
        ) from None
    if 'model' not in settings:
        raise CheckpointError(f'the config inside {source} has no model. Give the config as a file')
    settings.pop('custom_imports', None)
    _check_names(settings, source)
    try:
        return Config(settings)._cfg_dict
    except KeyError as error:  # names that Config keeps for itself
        raise CheckpointError(f'the config inside {source} was refused: {error.args[0]}') from None


def _check_names(settings: dict, source: str) -> None:
    registries = list(_registries())
    for parent, key, value in _entries(settings):
        text = value if isinstance(value, str) else ''
        if key == 'type' and text not in _OPS.get(parent, ()) and not _is_registered(value, registries):
            reason = f'it builds {value!r}, which is not registered with MMEngine (import its package first)'
        elif key in ('_scope_', 'default_scope') and value not in (None, *_SCOPES, *(r.scope for r in registries)):
            reason = f'its {key} = {value!r} is unknown'
        elif text.rpartition('.')[2] in _RUN:
            reason = f'its {key} = {value!r} is {_RUN[text.rpartition(".")[2]]}'
        elif key == 'teacher_config' and text:  # of JSON, too, MMEngine runs the base and imports what it names
            reason = f'its {key} = {value!r} is a config file, which is run'
        elif key in _EVALUATED and text and not _NAME.fullmatch(text):
            reason = f'its {key} = {value!r} is evaluated, and more than a name'
        elif key == 'trust_remote_code' and value:
            reason = f'its {key} = {value!r} runs code of others'
        else:
            continue
        raise CheckpointError(f'the config inside {source} was refused: {reason}. Give the config as a file')


def _entries(node: Any, parent: Any = None, name: Any = None):
    """All values, with their keys and the keys of the dicts that these are in; those of a list have the list's."""
    for key, value in node.items() if isinstance(node, dict) else ((name, item) for item in node):
        yield parent, key, value
        if isinstance(value, (dict, list, tuple, set)):
            yield from _entries(value, key, key) if isinstance(node, dict) else _entries(value, parent, name)


def _registries():
    stack = [thing for thing in vars(root).values() if isinstance(thing, Registry)]
    augments = getattr(sys.modules.get('mmpretrain.registry'), 'BATCH_AUGMENTS', None)
    stack += [augments] if augments is not None else []  # which has no parent
    while stack:
        registry = stack.pop()
        yield registry
        stack.extend(registry.children.values())


def _is_registered(name: Any, registries: list[Registry]) -> bool:
    if not isinstance(name, str):
        return False
    scope, _, own_name = name.rpartition('.')
    for registry in registries:
        if scope in ('', registry.scope):
            registry.import_from_location()
            if own_name in registry.module_dict:
                return True
    # A dumped config of the pure Python style names classes by their modules. Only what is imported already counts.
    parts = name.split('.')
    for end in range(len(parts) - 1, 0, -1):
        thing = sys.modules.get('.'.join(parts[:end]))
        if thing is not None:
            for part in parts[end:]:
                thing = getattr(thing, part, None)
            return any(thing is known for registry in registries for known in registry.module_dict.values())
    return False
