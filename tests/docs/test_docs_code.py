# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Run the code blocks of README and docs.

A comment before a block of ``bash``, ``shell`` or ``python`` gives its kind:

- none: Python, run in a temporary folder; the blocks of a page share names;
- ``<!-- slow -->``: Python, run by a slow test;
- ``<!-- config of mmdet::FOLDER/CONFIG.py -->``: the body of a config that inherits this one (a block with ``_base_``
  of its own needs no comment): loaded, its model and optimizer built, its backbone and neck run;
- ``<!-- tested in tests/FILE.py::FUNCTION -->``: run by that test, with its models;
- ``<!-- needs: data, weights -->`` and other ``NEEDS``: not run. Options, configs and checkpoint names are checked.
"""

import argparse
import ast
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers.config_helpers import ROOT, build_model
from helpers.tool_runs import in_this_process, python
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS

from mmlinattn.attention import TOKEN_MIXERS
from mmlinattn.checkpoints.released import find_released
from mmlinattn_console import TOOLS as COMMANDS

PAGES = sorted([*ROOT.glob('*.md'), *(ROOT / 'benchmarks').glob('*.md'), *(ROOT / 'docs').rglob('*.md')])
NEEDS = {'data', 'weights', 'GPU', 'network', 'minutes', 'several machines'}
# no code: a tree of folders, an equation, a diagram
PROSE = {'text', 'mermaid', 'console'}


@dataclass
class Block:
    page: str
    line: int
    language: str
    note: str
    text: str

    def __str__(self) -> str:
        return f'{self.page}:{self.line}'

    @property
    def kind(self) -> str:
        """Return the first word of its comment, else ``config`` for Python with a base, else ``run``."""
        if self.note:
            return re.split(r'[\s:]', self.note)[0]
        return 'config' if self.language == 'python' and '_base_ =' in self.text else 'run'


def blocks_of(path: Path, text: str) -> list[Block]:
    fences = re.finditer(r'(?:^<!-- ([^\n]*?) -->\n\s*)?^```([^\n]*)\n(.*?)^```', text, re.M | re.S)
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
    return [Block(name, text[: m.start()].count('\n') + 1, m[2].strip(), m[1] or '', m[3]) for m in fences]


BLOCKS = [block for path in PAGES for block in blocks_of(path, path.read_text(encoding='utf-8'))]
SHELL = [block for block in BLOCKS if block.language in ('bash', 'shell')]


@pytest.mark.parametrize('block', BLOCKS, ids=str)
def test_every_block_has_a_kind(block):
    assert block.language in {'python', 'bash', 'shell', *PROSE}, f'{block}: which language?'
    assert block.language not in PROSE or not block.note
    if block.language == 'python':
        ast.parse(block.text)
    elif block.language in ('bash', 'shell'):
        subprocess.run(['bash', '-n'], input=block.text, text=True, check=True)
    if block.kind == 'needs':
        assert set(re.split(r', ', block.note.partition(': ')[2])) <= NEEDS
    elif block.kind == 'tested':
        file, _, function = block.note.removeprefix('tested in ').partition('::')
        assert f'def {function}(' in (ROOT / file).read_text(encoding='utf-8')
    elif block.kind == 'config':
        assert '_base_ =' in block.text or block.note.startswith('config of mm')
    else:
        assert block.kind in ('run', 'slow') and block not in SHELL


def test_readme_begins_with_the_commands():
    front = next(block for block in BLOCKS if block.page == 'README.md')
    assert [words[0] for words in commands(front.text)] == ['git', 'bash', *['mmlinattn'] * 3]
    assert max(map(len, front.text.splitlines())) <= 80  # the site scrolls longer lines


def parser_of(tool: str) -> argparse.ArgumentParser:
    found = []

    def stop(self, *_, **__):
        found.append(self)
        raise SystemExit

    with mock.patch.object(argparse.ArgumentParser, 'parse_args', stop), pytest.raises(SystemExit):
        in_this_process(ROOT / tool)
    return found[0]


def commands(text: str) -> list[list]:
    """Return the words of each command of a shell block, without variables and comments."""
    found = []
    for line in text.replace('\\\n', ' ').splitlines():
        words = shlex.split(line, comments=True)
        while words and re.match(r'\w+=', words[0]):
            words = words[1:]
        if words:
            found.append(words)
    return found


def as_tool(words: list) -> list:
    """Return ``[tool, argument, ...]`` of a command, or []; of a launcher those of the tool that it starts."""
    if words[0] == 'mmlinattn':
        return [f'tools/{COMMANDS[words[1]]}', *words[2:]]
    if words[0] in ('python', 'bash'):
        words = words[1:]
    tool = words[0] if words else ''
    if tool.startswith('tools/dist_'):
        places = 2 if tool == 'tools/dist_test.sh' else 1  # arguments before the number of processes
        name = tool[len('tools/dist_') : -len('.sh')]
        return [f'tools/{name}.py', *words[1 : 1 + places], *words[2 + places :]]
    if tool == 'tools/slurm_train.sh':
        return ['tools/train.py', words[3], '--work-dir', *words[4:]]
    return words if tool.startswith(('tools/', 'benchmarks/')) else []


@pytest.mark.parametrize('block', [block for block in SHELL if block.kind == 'needs'], ids=str)
def test_commands_that_are_not_run_have_options_of_the_tools(block):
    for name in re.findall(r'mmlinattn://(\w+)', block.text):
        find_released(name)
    for name in re.findall(r'\b(?:configs|tools|benchmarks)/[\w/.-]+\.(?:py|sh)\b', block.text):
        assert (ROOT / name).is_file(), name
    for words in commands(block.text):
        tool = as_tool(words)
        if tool and tool[0].endswith('.py'):
            parser_of(tool[0]).parse_args(tool[1:])


def spoken(path: Path) -> list[list]:
    text = re.sub(r'^```.*?^```', '', path.read_text(encoding='utf-8'), flags=re.M | re.S)
    spans = re.findall(r'`((?:python |bash )?(?:tools|benchmarks)/[^`]+ [^`]+)`', text)
    return [shlex.split(re.sub(r'[\[\]]', '', ' '.join(span.split()))) for span in spans]


SPOKEN = {path.relative_to(ROOT).as_posix(): spoken(path) for path in PAGES if spoken(path)}


@pytest.mark.parametrize('page', SPOKEN)
def test_commands_in_sentences_have_options_of_the_tools(page):
    for words in SPOKEN[page]:
        tool = as_tool(words)
        assert (ROOT / tool[0]).is_file(), words
        options = {word.partition('=')[0] for word in tool[1:] if word.startswith('--')}
        if tool[0].endswith('.py') and options:
            assert options <= set(parser_of(tool[0])._option_string_actions), words
        else:
            assert all(option in (ROOT / tool[0]).read_text() for option in options), words


def scripts():
    pages = {}
    for block in BLOCKS:
        if block.language == 'python' and block.kind in ('run', 'slow'):
            pages.setdefault(block.page, []).append(block)
    for page, blocks in pages.items():
        is_slow = any(block.kind == 'slow' for block in blocks)
        yield pytest.param(blocks, id=page, marks=[pytest.mark.slow] if is_slow else [])


@pytest.mark.parametrize('blocks', scripts())
def test_python_runs(blocks, tmp_path, monkeypatch):
    """Run the blocks of a page as one file. Slow pages run in their own process, as they fill upstream's registries."""
    code = '\n'.join(block.text for block in blocks)
    if any(block.kind == 'slow' for block in blocks):
        (tmp_path / 'page.py').write_text(code)
        python('page.py', cwd=tmp_path)
        return
    monkeypatch.chdir(tmp_path)
    for registry in (MODELS, TOKEN_MIXERS):  # forget the example's classes afterwards
        monkeypatch.setattr(registry, '_module_dict', dict(registry.module_dict))
    exec(compile(code, blocks[0].page, 'exec'), {'__name__': '__main__'})


PYTHON = [block for block in BLOCKS if block.language == 'python']
CONFIGS = [block for block in PYTHON if '_base_ =' in block.text or block.kind == 'config']


@pytest.mark.slow
@pytest.mark.parametrize('block', CONFIGS, ids=str)
def test_configs_load_and_build(block, tmp_path, monkeypatch):
    for module in re.findall(r"imports=\['mmlinattn', '(\w+)'\]", block.text):  # module of the page, on the PYTHONPATH
        first = next(other for other in PYTHON if other.page == block.page)
        (tmp_path / f'{module}.py').write_text(first.text)
        monkeypatch.syspath_prepend(tmp_path)
    inherited = '' if '_base_ =' in block.text else f'_base_ = {block.note.removeprefix("config of ")!r}\n'
    (tmp_path / 'config.py').write_text(inherited + block.text)
    cfg = Config.fromfile(tmp_path / 'config.py')
    if block.kind == 'needs':
        return
    model = build_model(cfg, random_init=False).eval()
    assert 'mmlinattn' in type(model.backbone).__module__
    with torch.no_grad():
        model.extract_feat(torch.zeros(1, 3, 64, 64))  # a neck raises on other channels
    assert build_optim_wrapper(model, cfg.optim_wrapper).optimizer.param_groups


@pytest.mark.slow
def test_page_on_deployment(tmp_path, monkeypatch, capsys):
    """Compare boxes and masks with MMDetection's, and export a user's model."""
    for package in ('mmdet', 'onnx', 'onnxscript', 'onnxruntime'):
        pytest.importorskip(package)
    import cv2
    from mmdet.apis import inference_detector

    from mmlinattn.backbones import RAVLT

    photo, paste, graphs = (block.text for block in PYTHON if block.note.endswith('::test_page_on_deployment'))
    monkeypatch.chdir(tmp_path)
    quickstart = ROOT / 'configs' / 'mmdet' / 'ravlt_shapes_quickstart.py'
    cfg = Config.fromfile(quickstart)
    model = build_model(cfg, random_init=True).eval()
    for weight in (model.rpn_head.rpn_cls.weight, model.roi_head.bbox_head.fc_cls.weight):
        torch.nn.init.normal_(weight, std=0.2)  # boxes in noise
    model.cfg, classes = cfg, cfg.metainfo['classes']
    torch.save(dict(state_dict=model.state_dict(), meta=dict(dataset_meta=dict(classes=classes))), 'mine.pth')
    words = 'mine.pth --format onnx --out mine.onnx --shape 96 128 --dynamic'.split()
    in_this_process(ROOT / 'tools' / 'export.py', quickstart, *words)
    pixels = torch.randint(0, 256, (40, 60, 3), dtype=torch.uint8).numpy()
    cv2.imwrite('photo.jpg', cv2.resize(pixels, (240, 150)))
    names: dict = {}
    capsys.readouterr()
    exec(photo, names)
    assert len(capsys.readouterr().out.splitlines()) == (names['scores'] > 0.3).sum()
    truth = inference_detector(model, 'photo.jpg').pred_instances
    number = len(truth)
    assert number > 5 and (names['scores'] > 0).sum() == number
    torch.testing.assert_close(torch.from_numpy(names['boxes'][:number]).float(), truth.bboxes, rtol=0, atol=0.01)
    torch.testing.assert_close(torch.from_numpy(names['scores'][:number]), truth.scores, rtol=0, atol=1e-4)
    assert names['labels'][:number].tolist() == truth.labels.tolist()
    for i in range(number):
        names['i'] = i
        exec(paste, names)
        assert (names['mask'] != truth.masks[i].numpy()).mean() < 0.002

    # one block a stage: exporters take seconds for each
    arch = dict(embed_dims=(8, 16, 24, 32), depths=(1,) * 4, num_heads=(1,) * 4, stage_attns=('rala', *['softmax'] * 3))
    names = {'torch': torch, 'model': RAVLT(arch).eval()}
    exec(graphs, names)
    image = torch.rand(1, 3, 96, 130)
    with torch.no_grad():
        expected = names['model'](image)
        for graph in (names['program'].module(), names['graph']):
            torch.testing.assert_close(tuple(graph(image)), tuple(expected), rtol=1e-3, atol=1e-4)
