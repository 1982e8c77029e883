# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Format configs as text, without the settings of the inherited config."""

import re
import textwrap
import zlib
from pathlib import Path
from typing import Any

from yapf.yapflib.yapf_api import FormatCode

from ...utils.errors import printable
from ...utils.registering import bare_name

_STYLE = dict(
    based_on_style='pep8', column_limit=110, dedent_closing_brackets=True, each_dict_entry_on_separate_line=True
)
_SIGNATURE = '# by tools/{} of mmlinattn, checksum '


def signed(body: str, tool: str, title: str) -> str:
    """Return the text ``body`` of a config below a comment: title, tool, and a checksum that shows later edits."""
    comment = ''.join(f'# {line}\n' for line in textwrap.wrap(printable(title), 118, break_on_hyphens=False))
    return f'{comment}{_SIGNATURE.format(tool)}{zlib.crc32(body.encode()):08x}\n{body}'


def is_own(file: Path, tool: str) -> bool:
    """Return True if a config is as ``tool`` wrote it by :func:`signed`, and False if it was edited since."""
    text = file.read_text(encoding='utf-8', errors='replace')
    found = re.search(f'^{re.escape(_SIGNATURE.format(tool))}([0-9a-f]{{8}})\n', text, re.MULTILINE)
    return found is not None and int(found[1], 16) == zlib.crc32(text[found.end() :].encode())


def difference(old: dict, new: dict) -> dict:
    """Return the settings of a config that inherits ``old`` and equals ``new``, with ``_delete_`` for removed keys."""
    out = {}
    for key, value in new.items():
        before = old.get(key)
        if key in old and before == value and type(before) is type(value):
            continue
        if not isinstance(value, dict) or key not in old:
            out[key] = value
        elif (
            isinstance(before, dict)
            and before.get('type') == value.get('type')
            and not set(before) - {*value, '_scope_'}
        ):
            out[key] = difference(before, value)
        else:
            out[key] = dict(_delete_=True, **value)
    return out


def changes(old: Any, new: Any, path: str = '') -> list[str]:
    """Return one line per changed value, such as ``neck.in_channels: [256, 512] -> [64, 128]``. ``Config.diff`` prints
    lines of both files without the keys around them."""
    if isinstance(old, dict) and isinstance(new, dict) and old.get('type') == new.get('type'):
        keys = [key for key in dict.fromkeys([*new, *old]) if key != '_scope_']
        return [line for key in keys for line in changes(old.get(key), new.get(key), f'{path}.{key}'.lstrip('.'))]
    if isinstance(old, (list, tuple)) and type(old) is type(new) and len(old) == len(new):
        if any(isinstance(item, dict) for item in old):
            return [line for i, pair in enumerate(zip(old, new)) for line in changes(*pair, f'{path}[{i}]')]
    return [] if old == new and type(old) is type(new) else [f'{path}: {_short(old)} -> {_short(new)}']


def _short(value: Any) -> str:
    """Format a value in at most 60 characters; of a dict, its class and a few settings."""
    if isinstance(value, dict):
        words = [bare_name(value['type'])] if 'type' in value else []
        words += [str(value['arch'])] if 'arch' in value else []
        words += [f'{key}={value[key]}' for key in ('lr', 'weight_decay') if key in value]
        if isinstance(value.get('optimizer'), dict):
            words.append(_short(value['optimizer']))
        return ' '.join(words) or 'dict'
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + '...'


def statement(name: str, value: Any) -> str:
    """Format ``name = value`` as Python in lines of 110 columns."""
    return FormatCode(f'{name} = {_flat(value)}\n', style_config=_STYLE)[0]


def _flat(value: Any) -> str:
    """Format a value as a Python expression in one line."""
    if isinstance(value, dict) and all(str(key).isidentifier() for key in value):
        return 'dict(' + ', '.join(f'{key}={_flat(item)}' for key, item in value.items()) + ')'
    if isinstance(value, dict):
        return '{' + ', '.join(f'{key!r}: {_flat(item)}' for key, item in value.items()) + '}'
    if isinstance(value, (list, tuple)):
        inside = ', '.join(map(_flat, value))
        if isinstance(value, list):
            return f'[{inside}]'
        return f'({inside},)' if len(value) == 1 else f'({inside})'
    return repr(value)
