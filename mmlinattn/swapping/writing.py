# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Configs as text: what differs from the inherited one, and no more."""

from typing import Any

WIDTH = 110


class Code(str):
    """An expression that goes into the file as it is."""


def difference(old: dict, new: dict) -> dict:
    """What a config that inherits ``old`` has to say to be ``new``, with MMEngine's ``_delete_`` where keys go."""
    out = {}
    for key, value in new.items():
        if key in old and old[key] == value and type(old[key]) is type(value):
            continue
        before = old.get(key)
        if not isinstance(value, dict) or key not in old:
            out[key] = value
        elif not isinstance(before, dict):
            out[key] = dict(_delete_=True, **value)
        elif set(before) - set(value) - {'_scope_'} or before.get('type') != value.get('type'):
            out[key] = dict(_delete_=True, **value)
        else:
            out[key] = difference(before, value)
    return out


def changes(old: Any, new: Any, path: str = '') -> list[str]:
    """One line a changed value: ``neck.in_channels: [256, 512] -> [64, 128]``."""
    if isinstance(old, dict) and isinstance(new, dict) and (old.get('type') == new.get('type')):
        keys = [*new, *(key for key in old if key not in new)]
        found = [changes(old.get(key), new.get(key), f'{path}.{key}'.lstrip('.')) for key in keys if key != '_scope_']
        return [line for lines in found for line in lines]
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)) and len(old) == len(new):
        if any(isinstance(item, dict) for item in old):
            found = [changes(a, b, f'{path}[{i}]') for i, (a, b) in enumerate(zip(old, new))]
            return [line for lines in found for line in lines]
    if old == new and type(old) is type(new):
        return []
    return [f'{path}: {_short(old)} -> {_short(new)}']


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ' '.join(str(value[key]) for key in ('type', 'arch') if key in value) or 'dict'
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + '...'


def as_text(value: Any, indent: int = 0, used: int = 0) -> str:
    """A value as Python, broken into lines where it is longer than one.

    Args:
        indent: Columns of the line it begins in.
        used: Columns before it in that line.
    """
    flat = _flat(value)
    if indent + used + len(flat) <= WIDTH or not isinstance(value, (dict, list, tuple)) or not value:
        return flat
    inner, pad = ' ' * (indent + 4), ' ' * indent
    if isinstance(value, dict):
        if _has_names(value):
            rows = [f'{key}={as_text(item, indent + 4, len(key) + 2)}' for key, item in value.items()]
            return 'dict(\n' + ''.join(f'{inner}{row},\n' for row in rows) + f'{pad})'
        rows = [f'{key!r}: {as_text(item, indent + 4, len(repr(key)) + 3)}' for key, item in value.items()]
        return '{\n' + ''.join(f'{inner}{row},\n' for row in rows) + f'{pad}}}'
    opening, closing = '[]' if isinstance(value, list) else '()'
    rows = [as_text(item, indent + 4, 1) for item in value]
    return f'{opening}\n' + ''.join(f'{inner}{row},\n' for row in rows) + f'{pad}{closing}'


def _has_names(value: dict) -> bool:
    import keyword

    return all(isinstance(key, str) and key.isidentifier() and not keyword.iskeyword(key) for key in value)


def _flat(value: Any) -> str:
    if isinstance(value, Code):
        return str(value)
    if isinstance(value, dict):
        if _has_names(value):
            return 'dict(' + ', '.join(f'{key}={_flat(item)}' for key, item in value.items()) + ')'
        return '{' + ', '.join(f'{key!r}: {_flat(item)}' for key, item in value.items()) + '}'
    if isinstance(value, tuple):
        return '(' + ', '.join(_flat(item) for item in value) + (',)' if len(value) == 1 else ')')
    if isinstance(value, list):
        return '[' + ', '.join(_flat(item) for item in value) + ']'
    return repr(value)
