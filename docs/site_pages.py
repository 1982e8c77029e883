# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Pages of the site that are made when it is built: one a backbone, the reference, and the navigation."""

import inspect
import re
from pathlib import Path

import yaml
from mkdocs.structure.files import File, Files

import mmlinattn.backbones
from mmlinattn.attention import get_mixer
from mmlinattn.backbones.base import Backbone

ROOT = Path(__file__).resolve().parents[1]
GUIDES = [
    'install',
    'get_started',
    'tutorial',
    'own_data',
    'real_images',
    'configs',
    'checkpoints',
    'deploy',
    'inspect',
    'gpu',
    'distributed',
    'studies',
    'tables',
    'upstream',
    'other_frameworks',
]
INSIDE = ['design', 'attentions', 'add_an_attention', 'add_a_host', 'testing']
REFERENCE = [
    'attention',
    'layers',
    'necks',
    'engine',
    'checkpoints',
    'utils',
    'tooling.datasets',
    'tooling.swapping',
]


def hosts() -> dict:
    """Every registered host by name."""
    found = inspect.getmembers(mmlinattn.backbones, inspect.isclass)
    return {name: host for name, host in found if issubclass(host, Backbone) and host.arch_zoo}


def models() -> list:
    """All entries of the model index."""
    index = yaml.safe_load((ROOT / 'model-index.yml').read_text(encoding='utf-8'))
    pages = (yaml.safe_load((ROOT / path).read_text(encoding='utf-8')) for path in index['Import'])
    return [model for page in pages for model in page['Models']]


def attentions(arch: dict) -> list:
    """What the stages of an arch look with, as text."""
    stages = []
    for stage in arch['stage_attns']:
        entries = stage if isinstance(stage, (list, tuple)) else [stage]
        names = [entry if isinstance(entry, str) else entry['type'] for entry in entries]
        stages.append(' + '.join(dict.fromkeys(names)))
    return stages


def figure(host: type, arch: dict) -> str:
    """The stages of an arch as a diagram."""
    lines = ['```mermaid', 'flowchart LR', '    image["image<br>H x W"]']
    before = 'image'
    strides = [4 * 2**i for i in range(len(arch['depths']))] if len(arch['depths']) > 1 else [16]
    for i, (dim, depth, names) in enumerate(zip(arch['embed_dims'], arch['depths'], attentions(arch))):
        kind = 'quadratic' if all(get_mixer(name)[0].quadratic for name in names.split(' + ')) else 'linear'
        label = f'stage {i + 1}: {depth} x {names}<br>({kind})<br>{dim} channels, H/{strides[i]} x W/{strides[i]}'
        lines += [f'    stage{i}["{label}"]', f'    {before} --> stage{i}']
        before = f'stage{i}'
    return '\n'.join([*lines, '```'])


def backbone_page(name: str, host: type) -> str:
    """Sizes, a figure, the configs and the reference of one host."""
    summary = inspect.cleandoc(host.__doc__ or '').partition('\n\n')[0].replace('\n', ' ')
    first = next(iter(host.arch_zoo))
    lines = [f'# {name}', '', summary, '', f'`{first}`:', '', figure(host, host.resolve_arch(first)), '']
    lines += [
        '## Sizes',
        '',
        '| `arch` | channels | blocks | heads | attention by stage |',
        '| --- | --- | --- | --- | --- |',
    ]
    for arch_name in host.arch_zoo:
        arch = host.resolve_arch(arch_name)
        numbers = [' '.join(map(str, arch[key])) for key in ('embed_dims', 'depths', 'num_heads')]
        lines.append(f'| `{arch_name}` | {" | ".join(numbers)} | {", ".join(attentions(arch))} |')
    lines += ['', '## Configs', '', "Figures are the papers'; nothing was retrained here.", '']
    lines += ['| config | published |', '| --- | --- |']
    for model in models():
        if built_with(model['Config']) == name:
            results = [
                f'{key} {value}' for result in model.get('Results', []) for key, value in result['Metrics'].items()
            ]
            lines.append(f'| `{model["Config"]}` | {", ".join(results)} |')
    return '\n'.join([*lines, '', '## Reference', '', f'::: mmlinattn.backbones.{name}', ''])


def built_with(path: str) -> str:
    """The host of a config, from its text or that of the config it inherits."""
    text = (ROOT / path).read_text(encoding='utf-8')
    for name in hosts():
        if f"type='{name}'" in text:
            return name
    for line in text.splitlines():
        if line.startswith("_base_ = './"):
            return built_with(f'{Path(path).parent}/{line.split("./")[1].rstrip(chr(39))}')
    return ''


def reference_page(package: str) -> str:
    """What a package of mmlinattn has for others."""
    module = __import__(f'mmlinattn.{package}', fromlist=['__all__'])
    summary = inspect.cleandoc(module.__doc__ or '')
    parts = [f'::: mmlinattn.{package}.{name}' for name in sorted(getattr(module, '__all__', []), key=str.lower)]
    return '\n\n'.join([f'# mmlinattn.{package}', summary, *parts]) + '\n'


def pages() -> dict:
    """Path -> text of every page that is made here."""
    made = {f'backbones/{name}.md': backbone_page(name, host) for name, host in hosts().items()}
    made.update({f'reference/{package}.md': reference_page(package) for package in REFERENCE})
    return made


def on_config(config):
    """The navigation: guides, backbones, what is inside, reference."""
    existing = {path.stem: path.name for kind in ('*.md', '*.ipynb') for path in (ROOT / 'docs').glob(kind)}
    others = sorted(existing.keys() - {*GUIDES, *INSIDE, 'index'})
    config.nav = [
        'index.md',
        {'Guides': [existing[name] for name in [*GUIDES, *others] if name in existing]},
        {'Backbones': [{name: f'backbones/{name}.md'} for name in hosts()]},
        {'Inside': [existing[name] for name in INSIDE if name in existing]},
        {'Reference': [{name: f'reference/{name}.md'} for name in REFERENCE]},
    ]
    return config


def on_files(files: Files, config) -> Files:
    """Add the pages that are made."""
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_content(html: str, page, **kwargs) -> str:
    """Links of notebooks to other pages, which MkDocs resolves in Markdown only."""
    return re.sub(r'href="(\w+)\.md"', r'href="../\1/"', html) if page.file.src_uri.endswith('.ipynb') else html
