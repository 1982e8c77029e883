# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Recognise the formats of label files by their content."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from ...utils.errors import RunError, described
from .csv_files import Table
from .data import Data, container, read_text
from .names import some

UNKNOWN = 'of no known format'
_AS_COCO = 'export it as COCO JSON'
# formats of boxes that are read
READ = frozenset(
    'COCO JSON,CVAT XML,VOC XML,LabelMe JSON,Label Studio JSON,CSV of boxes,KITTI text files,YOLO text files'.split(',')
)
# remedy and formats by task
_TASKS = {
    'detection': (
        _AS_COCO,
        'COCO JSON, VOC XML, YOLO text files, LabelMe JSON, CVAT XML 1.1, Label Studio JSON, CSV with a header '
        '(filename, class, xmin, ymin, xmax, ymax) and KITTI text files',
    ),
    'segmentation': (
        'write masks as PNG files of class numbers',
        'segmentation masks: folders images beside masks (or labels, annotations), train beside trainannot, '
        'leftImg8bit beside gtFine',
    ),
    'classification': (
        'write a CSV file with filename,label',
        'a folder of images a class, and CSV files of images and classes',
    ),
}
_GLIMPSE = 1 << 16  # characters of XML and text files
# formats that are not read -> remedy
_REMEDIES = {
    'VGG Image Annotator JSON': f'{_AS_COCO} (Annotation, Export)',
    'VGG Image Annotator CSV': f'{_AS_COCO} (Annotation, Export)',
    'Label Studio CSV': 'export JSON',
    'Google AutoML CSV': 'write a header filename,class,xmin,ymin,xmax,ymax and the corners below it',
    'CSV of PredictionString': 'write a row for each box: filename,class,xmin,ymin,xmax,ymax',
    'CSV of run lengths (EncodedPixels)': 'write segmentation masks as PNG, or COCO JSON',
    'CSV of quadrilaterals': 'write corners of upright boxes: xmin,ymin,xmax,ymax',
    'CSV of several classes an image': 'one class an image is learnt',
    'Datumaro JSON': 'convert it by datum convert -f coco_instances',
    'BDD100K JSON': 'convert it by bdd100k.label.to_coco',
    'CreateML JSON': f'{_AS_COCO} or VOC XML',
    'Cityscapes polygons': 'take its segmentation masks: --task segmentation',
    'COCO panoptic JSON': 'take the file instances_*.json',
    'LabelMe XML': f'{_AS_COCO} or VOC XML',
    'dlib XML': f'{_AS_COCO} or VOC XML',
    'DOTA text files': 'convert them by BboxToolkit, or draw upright boxes',
    'VisDrone text files': 'convert them to COCO JSON',
    'MOT text files': 'convert them by MMDetection, mot2coco.py',
}


class Source(NamedTuple):
    """Label file and its content: parsed JSON, a table, or None."""

    path: Path
    kind: str
    content: Any = None


def _first(value: Any) -> dict:
    """Return the first entry of a list or object if it is an object, else {}."""
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    first = next(iter(entries), None)
    return first if isinstance(first, dict) else {}


def _json_kind(content: Any) -> str:
    """Return the format of parsed JSON by its keys, or ''."""
    keys = set(content) if isinstance(content, dict) else set()
    first = _first(content)
    inner = _first(first.get('annotations')) or _first(first.get('labels'))
    is_list = isinstance(content, list)
    of_coco = _first(content.get('annotations')) if isinstance(content, dict) else {}
    results = [value for value in first.values() if isinstance(value, list) and any(map(_is_result, value))]
    rules: list[tuple[str, object]] = [
        ('LabelMe JSON', isinstance(content, dict) and isinstance(content.get('shapes'), list)),
        ('VGG Image Annotator JSON', any(key.startswith('_via') for key in keys) or 'regions' in first),
        ('Supervisely JSON', 'projectType' in keys or 'objects' in keys and 'classTitle' in _first(content['objects'])),
        ('Datumaro JSON', keys & {'dm_format_version', 'media_type'} or keys >= {'categories', 'items'}),
        ('Darwin JSON of V7', 'schema_ref' in keys or {'item', 'annotations'} <= keys or 'bounding_box' in of_coco),
        ('Labelbox JSON', {'data_row', 'Labeled Data'} & (set(first) | keys)),
        ('Scale AI JSON', 'task_id' in first),
        ('BDD100K JSON', is_list and {'box2d', 'poly2d'} & set(inner)),
        ('CreateML JSON', is_list and 'coordinates' in inner),
        ('Cityscapes polygons', {'imgHeight', 'objects'} <= keys),
        ('Segment Anything JSON (SA-1B)', isinstance(content, dict) and isinstance(content.get('image'), dict)),
        ('COCO panoptic JSON', 'segments_info' in of_coco),
        ('Label Studio JSON', is_list and ('data' in first and {'annotations', 'completions'} & set(first) or results)),
        ('captions of COCO', 'caption' in of_coco),
        ('a list of images', keys >= {'images', 'categories'} and content['images'] and not content.get('annotations')),
        (
            'COCO JSON of classes',
            of_coco and {'images', 'categories'} <= keys and not {'bbox', 'segmentation'} & set(of_coco),
        ),
        ('COCO JSON', isinstance(content, dict) and _is_coco(content)),
    ]
    return next((kind for kind, is_so in rules if is_so), '')


def _is_coco(content: dict) -> bool:
    lists = [key for key in ('images', 'annotations', 'categories') if isinstance(content.get(key), list)]
    return lists[:1] == ['images'] and len(lists) > 1


def _is_result(value: Any) -> bool:
    """Return True for a shape of Label Studio's JSON-MIN."""
    return (
        isinstance(value, dict) and any(key.endswith('labels') for key in value) and bool({'x', 'points'} & set(value))
    )


_XML = [
    ('CVAT XML', r'<annotations[\s>].*<(image|meta|track)[\s>]'),
    ('LabelMe XML', r'<annotation[\s>].*<pt>'),
    ('VOC XML', r'<annotation(\s[^>]*)?>.*<(object|size|filename)>'),
    ('dlib XML', r'<dataset[\s>].*<box[\s>]'),
]
_NUMBER = r'-?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?'
_LINES = [
    ('KITTI text files', rf'[A-Za-z_]\S*( {_NUMBER}){{14,15}}'),
    ('DOTA text files', rf'({_NUMBER} ){{8}}[A-Za-z]\S*( \d)?'),
    ('VisDrone text files', r'-?\d+,-?\d+,\d+,\d+,[01],\d+,-?\d+,-?\d+,?'),
    ('MOT text files', rf'\d+,-?\d+(,{_NUMBER}){{5,8}}'),
    ('YOLO text files', rf'\d+(\.0*)?(\s+({_NUMBER}|nan)){{4,}}'),
]


def _text_kind(text: str) -> str:
    """Return the format of most of the first lines of a text file, or ''."""
    lines = [line.strip() for line in text.splitlines() if line.strip()][:20]
    counts = Counter(kind for line in lines for kind, pattern in _LINES if re.fullmatch(pattern, line))
    kind, count = next(iter(counts.most_common(1)), ('', 0))
    return kind if 2 * count >= len(lines) - 2 and count else ''


def recognise(path: Path) -> Source:
    """Return the format of a label file by its content; the kind is :data:`UNKNOWN` if it is none of the known.

    Raises:
        RunError: JSON is damaged, or a table cannot be read.
    """
    suffix = path.suffix.lower()
    if container(path):
        return Source(path, container(path))
    if suffix == '.json':
        try:
            content = json.loads(read_text(path))
        except ValueError as error:
            raise RunError(f'{path} is no whole JSON file: {described(error)}') from error
        if isinstance(content, dict):
            content.pop('imageData', None)
        return Source(path, _json_kind(content) or UNKNOWN, content)
    if suffix in ('.csv', '.tsv'):
        table = Table(path)
        return Source(path, table.kind or UNKNOWN, table)
    with path.open(encoding='utf-8-sig', errors='replace') as file:
        text = file.read(_GLIMPSE)
    if suffix == '.xml':
        found = (kind for kind, pattern in _XML if re.search(pattern, text, re.DOTALL))
        return Source(path, next(found, UNKNOWN))
    return Source(path, (_text_kind(text) if suffix == '.txt' else '') or UNKNOWN)


def recognise_all(data: Data) -> dict[str, list[Source]]:
    """Return the label files of a data set by format.

    Empty text files and those with other lines count as labels if they lie beside labels of an image.
    """
    found: dict[str, list[Source]] = {}
    texts: dict[Path, list[Source]] = {}
    for path in data.labels + data.containers:
        if path.suffix.lower() not in ('.yaml', '.yml', '.names', '.labels', '.data'):
            source = recognise(path)
            if path.suffix.lower() == '.txt':
                texts.setdefault(path.parent, []).append(source)
            else:
                found.setdefault(source.kind, []).append(source)
    ours = {source for sources in texts.values() for source in sources if data.pictures.named(source.path.stem)}
    whole = Counter(source.kind for source in ours if source.kind != UNKNOWN)
    for sources in texts.values():
        here = Counter(source.kind for source in sources if source in ours and source.kind != UNKNOWN)
        is_empty = all(not source.path.stat().st_size for source in sources)
        kind, _ = next(iter((whole if is_empty else here).most_common(1)), (UNKNOWN, 0))
        for source in sources:
            known = source.kind if source.kind in _REMEDIES else UNKNOWN
            found.setdefault(kind if source in ours else known, []).append(source)
    return found


def refusal(data: Data, kinds: dict[str, list[Source]], task: str) -> RunError:
    """Return the error for data without a claim: it names a file that was found and its format, and a remedy."""
    remedy, takes = _TASKS[task]
    tables = [source for kind in (UNKNOWN, 'CSV of classes') for source in kinds.get(kind, [])]
    tables = [source for source in tables if isinstance(source.content, Table)]
    for kind, ((path, _, content), *_) in kinds.items():
        if kind == UNKNOWN or task == 'detection' and kind in READ | {'CSV of classes'}:
            continue
        why = f' (columns {some(content.names)})' if isinstance(content, Table) else ''
        if kind in READ:
            why += f', which {task} does not take'
        else:
            why += ', which is not read here'
            remedies = {**(_REMEDIES if task == 'detection' else {}), 'an archive': 'unpack it'}
            remedy = remedies.get(kind, remedy)
        return RunError(f'DATA {str(data.root)!r}: {data.name(path)} is {kind}{why}: {remedy}. It takes {takes}.')
    if tables:
        return RunError(
            f'DATA {str(data.root)!r}: {data.name(tables[0].path)} is a table without a known header; its columns are '
            f'{some(tables[0].content.names)}. It takes {takes}.'
        )
    unknown = some((data.name(source.path) for source in kinds.get(UNKNOWN, [])), 4)
    there = f' ({unknown}: {UNKNOWN})' if unknown else ''
    there += f'; images of a kind that is not read: {data.unread}' if data.unread else ''
    return RunError(f'DATA {str(data.root)!r}: no annotations in it that are read{there}: {remedy}. It takes {takes}.')
