# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Check links and named files of the documentation. Code blocks: ``test_docs_code.py``."""

import json
import re

import pytest
from helpers.config_helpers import ROOT

PAGES = sorted(
    path for pattern in ('*.md', 'docs/**/*.md', 'docs/*.ipynb', 'projects/**/*.md') for path in ROOT.glob(pattern)
)


def prose(path) -> str:
    text = path.read_text(encoding='utf-8')
    if path.suffix == '.ipynb':
        cells = json.loads(text)['cells']
        text = '\n\n'.join(''.join(cell['source']) for cell in cells if cell['cell_type'] == 'markdown')
    return re.sub(r'^```.*?^```', '', text, flags=re.M | re.S)


def anchors(path) -> set:
    found = set()
    for heading in re.findall(r'^#+ (.+)$', prose(path), re.M):
        plain = re.sub(r'\[([^]]*)\]\([^)]*\)', r'\1', heading).strip().lower()
        found.add(re.sub(r'[^\w\- ]', '', plain).replace(' ', '-'))
    return found


@pytest.mark.parametrize('path', PAGES, ids=[path.relative_to(ROOT).as_posix() for path in PAGES])
def test_links_and_named_files_are_there(path):
    broken, text = [], prose(path)
    for link in re.findall(r'\[[^]]*\]\(([^)\s]+)[^)]*\)', text) + re.findall(r'src="([^"]+)"', text):
        target, _, anchor = link.partition('#')
        file = (path.parent / target).resolve() if target else path
        is_there = file.exists() and (not anchor or file.suffix != '.md' or anchor in anchors(file))
        if not is_there and not re.match(r'[a-z]+:', link):
            broken.append(link)
    assert broken == []
    named = re.findall(
        r'(?<![\w/.])((?:tools|configs|docs|tests|benchmarks|projects)/[\w/.-]+\.(?:py|sh|md|csv))\b', path.read_text()
    )
    assert [name for name in named if not (ROOT / name).exists()] == []
