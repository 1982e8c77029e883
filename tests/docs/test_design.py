# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Compare the imports of the package with the table of docs/design.md."""

import ast
import re

from helpers.config_helpers import ROOT

ROWS = re.findall(r'^\| `([\w/]+)` \|.*\|([^|]*)\|$', (ROOT / 'docs' / 'design.md').read_text(encoding='utf-8'), re.M)
ROOMS = {room: set(re.findall('`([^`]+)`', imports)) for room, imports in ROWS}


def room_of(path: str) -> str:
    return max((room for room in ROOMS if f'{path}/'.startswith(f'{room}/')), key=len, default='')


def test_rooms_import_only_the_rooms_of_the_table():
    package, found = ROOT / 'mmlinattn', {room: set() for room in ROOMS}
    rooms = [path.parent for path in package.glob('*/__init__.py')]
    files = [file for room in rooms for file in room.rglob('*.py')]
    for file in files + [file for file in package.glob('*.py') if file.stem in ROOMS]:
        place = file.relative_to(package).with_suffix('').parts
        for node in ast.walk(ast.parse(file.read_text(encoding='utf-8'))):
            if isinstance(node, ast.ImportFrom) and (node.level or (node.module or '').startswith('mmlinattn.')):
                base = place[: -node.level] if node.level else ()
                module = '/'.join((*base, *(node.module or '').removeprefix('mmlinattn.').split('.'))).strip('/')
                found[room_of('/'.join(place))] |= {room_of(f'{module}/{each.name}'.strip('/')) for each in node.names}
    assert {room: others - {room, ''} for room, others in found.items()} == ROOMS
    assert {room.name for room in rooms} <= ROOMS.keys()
