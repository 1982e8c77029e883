# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Write the model index from the configs, the papers' tables and the list of released checkpoints.

Files: ``model-index.yml`` and ``configs/FAMILY/metafile.yml``. Run it after adding a config:

    python -m projects.pages.metafiles
"""

import argparse
from collections import Counter
from pathlib import Path

import yaml

from mmlinattn.attention import TOKEN_MIXERS
from mmlinattn.checkpoints.released import find_released

from .published import Row, read_rows

ROOT = Path(__file__).resolve().parents[2]
TASKS = {'mmdet': 'COCO', 'mmseg': 'ADE20K', 'mmpretrain': 'ImageNet-1K'}
COMPARED = 'Linear attentions compared in the papers'
PAPERS = {
    'RALA': (
        'https://arxiv.org/abs/2411.07635',
        'Breaking the Low-Rank Dilemma of Linear Attention',
        'https://github.com/qhfan/RALA',
    ),
    'InLine': (
        'https://arxiv.org/abs/2412.06590',
        'Bridging the Divide: Reconsidering Softmax and Linear Attention',
        'https://github.com/LeapLabTHU/InLine',
    ),
    'FLatten': (
        'https://arxiv.org/abs/2308.00442',
        'FLatten Transformer: Vision Transformer using Focused Linear Attention',
        'https://github.com/LeapLabTHU/FLatten-Transformer',
    ),
    'hMHSA': (
        'https://arxiv.org/abs/2306.10875',
        'Vision Transformer with Attention Map Hallucination and FFN Compaction',
        None,
    ),
}
# first word of a config's name: folder of its metafile, collection; any other attention is COMPARED
FAMILIES = {
    'ravlt': ('ravlt', 'RALA'),
    'rala': ('ravlt', 'RALA'),
    'inline': ('inline', 'InLine'),
    'flatten': ('flatten', 'FLatten'),
    'hmhsa': ('hmhsa', 'hMHSA'),
}


def family_of(config_name: str) -> tuple[str, str]:
    """Return the folder of a config's metafile and its collection.

    Raises:
        SystemExit: If ``config_name`` begins with neither a family nor a registered attention.
    """
    family = config_name.split('_')[0]
    if family in FAMILIES:
        return FAMILIES[family]
    if family in TOKEN_MIXERS.module_dict:
        return 'compared', COMPARED
    known = ', '.join([*FAMILIES, *sorted(TOKEN_MIXERS.module_dict)])
    raise SystemExit(f'error: config {config_name!r} begins with {family!r}: expected one of ({known})')


def find_configs(root: Path) -> list:
    """Return every config as ``task/config_name``."""
    return [f'{task}/{path.stem}' for task in TASKS for path in sorted((root / 'configs' / task).glob('*.py'))]


def results(row: Row) -> list:
    """Return the published metrics by task, as in upstream's metafiles."""
    dataset = TASKS[row.task]
    if row.task != 'mmdet':
        task = 'Semantic Segmentation' if row.task == 'mmseg' else 'Image Classification'
        return [dict(Task=task, Dataset=dataset, Metrics=row.metrics)] if row.metrics else []
    entries = []
    for task, kind in (('Object Detection', 'box'), ('Instance Segmentation', 'mask')):
        metrics = {name: value for name, value in row.metrics.items() if name.startswith(kind)}
        if metrics:
            entries.append(dict(Task=task, Dataset=dataset, Metrics=metrics))
    return entries


def entry(name: str, collection: str, row: Row = None) -> dict:
    """Return the entry of a config under ``Models``; ``row`` is None for unpublished models."""
    task, config_name = name.split('/')
    model = {'Name': config_name, 'In Collection': collection, 'Config': f'configs/{name}.py'}
    if row is None:
        data = 'synthetic shapes' if 'shapes' in config_name else TASKS[task]
        return {**model, 'Metadata': {'Training Data': data}}
    metadata = {'Training Data': TASKS[task], 'Metrics Source': f'published in {row.source}; not retrained here'}
    params = row.released_params or row.params
    if params:
        metadata['Parameters'] = round(float(params) * 1e6)
    if row.flops:
        metadata['FLOPs'] = round(float(row.flops) * 1e9)
    model['Metadata'] = metadata
    if results(row):
        model['Results'] = results(row)
    if row.link:
        # `mim download` takes links only; mmlinattn.checkpoints.schemes recognises and converts them. The part after
        # the last slash names the file: links like `.../?dl=1` get a fragment, never sent to a server
        link, file_name = row.link, find_released(config_name).file_name
        model['Weights'] = link if link.endswith(f'/{file_name}') else f'{link}#/{file_name}'
        model['Converted From'] = {'Weights': row.link}
        if row.paper in PAPERS:
            model['Converted From']['Code'] = PAPERS[row.paper][2]
    return model


def collection_entry(collection: str) -> dict:
    kind = 'Hallucinated attention' if collection == 'hMHSA' else 'Linear attention'
    described = {'Name': collection, 'Metadata': {'Architecture': [kind]}}
    if collection in PAPERS:
        url, title, code = PAPERS[collection]
        described['Paper'] = dict(URL=url, Title=title)
        if code:
            described['Code'] = dict(URL=code)
    return described


def make_files(root: Path = ROOT) -> dict:
    """Return the texts of ``model-index.yml`` and of all ``metafile.yml``, by path relative to ``root``."""
    rows = {row.name: row for task in TASKS for row in read_rows(task)}
    models, collections = {}, {}
    for name in find_configs(root):
        folder, collection = family_of(name.split('/')[1])
        collections[folder] = collection
        models.setdefault(folder, []).append(entry(name, collection, rows.get(name)))
    number = Counter(model['Name'] for entries in models.values() for model in entries)
    for model in (model for entries in models.values() for model in entries):
        if number[model['Name']] > 1:  # one name for several tasks
            model['Name'] += '_' + model['Config'].split('/')[1]
    head = '# Written by python -m projects.pages.metafiles\n'
    paths = {folder: f'configs/{folder}/metafile.yml' for folder in models}
    files = {
        path: head + dump(dict(Collections=[collection_entry(collections[folder])], Models=models[folder]))
        for folder, path in paths.items()
    }
    files['model-index.yml'] = head + dump(dict(Import=sorted(paths.values())))
    return files


def dump(content: dict) -> str:
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=200)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for path, text in make_files().items():
        target = ROOT / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding='utf-8')
        print(target)


if __name__ == '__main__':
    main()
