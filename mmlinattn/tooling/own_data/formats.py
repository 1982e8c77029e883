# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Table of the formats of label files: how each is recognised by its content, its reader, or the remedy."""

import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Optional

from ...utils.errors import RunError, described
from .coco import Coco
from .csv_files import BoxTable, Table
from .data import Data, Source, container, read_text
from .labelling_tools import Cvat, LabelMe, LabelStudio
from .names import some
from .reading import Reader
from .text_files import Kitti, Yolo
from .voc import Voc

UNKNOWN = 'of no known format'
_AS_COCO = 'export it as COCO JSON'
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
_GLIMPSE = 1 << 16  # characters of text files
_LISTS = ('.yaml', '.yml', '.names', '.labels', '.data')


class Format(NamedTuple):
    """Format of label files."""

    name: str
    matches: Callable[[Any], object]  # of parsed JSON (_Json), the root of XML, or a line
    reader: Optional[type[Reader]] = None  # None if it is not read
    remedy: str = _AS_COCO


class _Json:
    """Parsed JSON, its keys, its first entry, the first label of that entry and the first annotation of COCO."""

    def __init__(self, content: Any):
        self.content, self.is_list = content, isinstance(content, list)
        self.keys = set(content) if isinstance(content, dict) else set()
        self.first = self._first(content)
        self.inner = self._first(self.first.get('annotations')) or self._first(self.first.get('labels'))
        self.annotation = self.one('annotations')
        # shapes beside the image, as in Label Studio's JSON-MIN
        self.lists = [value for value in self.first.values() if isinstance(value, list) and any(map(_is_result, value))]

    @staticmethod
    def _first(value: Any) -> dict:
        entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        first = next(iter(entries), None)
        return first if isinstance(first, dict) else {}

    def one(self, key: str) -> dict:
        return self._first(self.content.get(key)) if key in self.keys else {}

    def has(self, key: str, kind: type) -> bool:
        return key in self.keys and isinstance(self.content[key], kind)


def _is_result(value: Any) -> bool:
    return (
        isinstance(value, dict) and any(key.endswith('labels') for key in value) and bool({'x', 'points'} & set(value))
    )


# the first that matches
_JSON = [
    Format('LabelMe JSON', lambda j: j.has('shapes', list), LabelMe),
    Format(
        'VGG Image Annotator JSON',
        lambda j: any(key.startswith('_via') for key in j.keys) or 'regions' in j.first,
        remedy=f'{_AS_COCO} (Annotation, Export)',
    ),
    Format('Supervisely JSON', lambda j: 'projectType' in j.keys or 'classTitle' in j.one('objects')),
    Format(
        'Datumaro JSON',
        lambda j: j.keys & {'dm_format_version', 'media_type'} or j.keys >= {'categories', 'items'},
        remedy='convert it by datum convert -f coco_instances',
    ),
    Format(
        'Darwin JSON of V7',
        lambda j: 'schema_ref' in j.keys or {'item', 'annotations'} <= j.keys or 'bounding_box' in j.annotation,
    ),
    Format('Labelbox JSON', lambda j: {'data_row', 'Labeled Data'} & (set(j.first) | j.keys)),
    Format('Scale AI JSON', lambda j: 'task_id' in j.first),
    Format(
        'BDD100K JSON',
        lambda j: j.is_list and {'box2d', 'poly2d'} & set(j.inner),
        remedy='convert it by bdd100k.label.to_coco',
    ),
    Format('CreateML JSON', lambda j: j.is_list and 'coordinates' in j.inner, remedy=f'{_AS_COCO} or VOC XML'),
    Format(
        'Cityscapes polygons',
        lambda j: {'imgHeight', 'objects'} <= j.keys,
        remedy='take its segmentation masks: --task segmentation',
    ),
    Format('Segment Anything JSON (SA-1B)', lambda j: j.has('image', dict)),
    Format('COCO panoptic JSON', lambda j: 'segments_info' in j.annotation, remedy='take the file instances_*.json'),
    Format(
        'Label Studio JSON',
        lambda j: j.is_list and ('data' in j.first and {'annotations', 'completions'} & set(j.first) or j.lists),
        LabelStudio,
    ),
    Format('captions of COCO', lambda j: 'caption' in j.annotation),
    Format(
        'a list of images',
        lambda j: j.keys >= {'images', 'categories'} and j.content['images'] and not j.content.get('annotations'),
    ),
    Format(
        'COCO JSON of classes',
        lambda j: (
            j.keys >= {'images', 'categories'} and j.annotation and not {'bbox', 'segmentation'} & {*j.annotation}
        ),
    ),
    Format(
        'COCO JSON',
        lambda j: j.has('images', list) and (j.has('annotations', list) or j.has('categories', list)),
        Coco,
    ),
]
_XML = [
    Format(
        'CVAT XML',
        lambda x: x.tag == 'annotations' and any(x.find(tag) is not None for tag in ('image', 'meta', 'track')),
        Cvat,
    ),
    Format(
        'LabelMe XML', lambda x: x.tag == 'annotation' and x.find('.//pt') is not None, remedy=f'{_AS_COCO} or VOC XML'
    ),
    Format('VOC XML', lambda x: x.tag == 'annotation' and {'object', 'size', 'filename'} & {e.tag for e in x}, Voc),
    Format('dlib XML', lambda x: x.tag == 'dataset' and x.find('.//box') is not None, remedy=f'{_AS_COCO} or VOC XML'),
]
_NUMBER = r'-?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?'
_LINES = [
    Format('KITTI text files', re.compile(rf'[A-Za-z_]\S*( {_NUMBER}){{14,15}}').fullmatch, Kitti),
    Format(
        'DOTA text files',
        re.compile(rf'({_NUMBER} ){{8}}[A-Za-z]\S*( \d)?').fullmatch,
        remedy='convert them by BboxToolkit, or draw upright boxes',
    ),
    Format(
        'VisDrone text files',
        re.compile(r'-?\d+,-?\d+,\d+,\d+,[01],\d+,-?\d+,-?\d+,?').fullmatch,
        remedy='convert them to COCO JSON',
    ),
    Format(
        'MOT text files',
        re.compile(rf'\d+,-?\d+(,{_NUMBER}){{5,8}}').fullmatch,
        remedy='convert them by MMDetection, mot2coco.py',
    ),
    Format('YOLO text files', re.compile(rf'\d+(\.0*)?(\s+({_NUMBER}|nan)){{4,}}').fullmatch, Yolo),
]


def _table(name: str, remedy: str, reader: Optional[type[Reader]] = None) -> Format:
    return Format(name, lambda table: table.kind == name, reader, remedy)


_TABLES = [
    _table('CSV of boxes', '', BoxTable),
    _table('CSV of classes', _AS_COCO),
    _table('VGG Image Annotator CSV', f'{_AS_COCO} (Annotation, Export)'),
    _table('Label Studio CSV', 'export JSON'),
    _table('Google AutoML CSV', 'write a header filename,class,xmin,ymin,xmax,ymax and the corners below it'),
    _table('CSV of PredictionString', 'write a row for each box: filename,class,xmin,ymin,xmax,ymax'),
    _table('CSV of run lengths (EncodedPixels)', 'write segmentation masks as PNG, or COCO JSON'),
    _table('CSV of quadrilaterals', 'write corners of upright boxes: xmin,ymin,xmax,ymax'),
]
FORMATS = {each.name: each for each in (*_JSON, *_XML, *_TABLES, *_LINES)}
READERS = {name: each.reader for name, each in FORMATS.items() if each.reader}


def recognise(path: Path) -> Source:
    """Return the format of a label file by its content; the kind is :data:`UNKNOWN` if it is none of the known.

    Raises:
        RunError: JSON or XML is damaged, or a table cannot be read.
    """
    suffix, content = path.suffix.lower(), None
    if container(path):
        return Source(path, container(path))
    if suffix == '.json':
        try:
            content = json.loads(read_text(path))
        except ValueError as error:
            raise RunError(f'{path} is no whole JSON file: {described(error)}') from error
        if isinstance(content, dict):
            content.pop('imageData', None)
        found = _kind(_JSON, _Json(content))
    elif suffix in ('.csv', '.tsv'):
        content = Table(path)
        found = _kind(_TABLES, content)
    elif suffix == '.xml':
        try:
            content = ElementTree.parse(path).getroot()
        except (OSError, ElementTree.ParseError) as error:
            raise RunError(f'{path} cannot be read: {described(error)}') from error
        found = _kind(_XML, content)
    else:
        with path.open(encoding='utf-8-sig', errors='replace') as file:
            lines = list(filter(None, map(str.strip, file.read(_GLIMPSE).splitlines())))[:20]
        kinds = Counter(filter(None, (_kind(_LINES, line) for line in lines)))
        found, count = next(iter(kinds.most_common(1)), ('', 0))
        found = found if 2 * count >= len(lines) - 2 else ''
    return Source(path, found or UNKNOWN, content)


def _kind(formats: list[Format], content: Any) -> str:
    return next((each.name for each in formats if each.matches(content)), '')


def recognise_all(data: Data) -> dict[str, list[Source]]:
    """Return the label files of a data set by format.

    Empty text files and those with other lines count as labels if they lie beside labels of an image.
    """
    found: dict[str, list[Source]] = {}
    texts: dict[Path, list[Source]] = {}
    for path in data.labels + data.containers:
        if path.suffix.lower() not in _LISTS:
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
            known = UNKNOWN if source.kind in READERS else source.kind
            found.setdefault(kind if source in ours else known, []).append(source)
    return found


def refusal(data: Data, kinds: dict[str, list[Source]], task: str) -> RunError:
    """Return the error for data without a claim: it names a file that was found and its format, and a remedy."""
    remedy, takes = _TASKS[task]
    root, takes = f'DATA {str(data.root)!r}', f'It takes {takes}.'
    for kind, ((path, _, content), *_) in kinds.items():
        if kind == UNKNOWN or task == 'detection' and (kind in READERS or kind == 'CSV of classes'):
            continue
        why = f' (columns {some(content.names)})' if isinstance(content, Table) else ''
        why += f', which {task} does not take' if kind in READERS else ', which is not read here'
        if kind == 'an archive':
            remedy = 'unpack it'
        elif task == 'detection' and kind in FORMATS:
            remedy = FORMATS[kind].remedy
        return RunError(f'{root}: {data.name(path)} is {kind}{why}: {remedy}. {takes}')
    for path, _, content in (*kinds.get(UNKNOWN, ()), *kinds.get('CSV of classes', ())):
        if isinstance(content, Table):
            columns = f'its columns are {some(content.names)}'
            return RunError(f'{root}: {data.name(path)} is a table without a known header; {columns}. {takes}')
    unknown = some((data.name(source.path) for source in kinds.get(UNKNOWN, [])), 4)
    there = f' ({unknown}: {UNKNOWN})' if unknown else ''
    there += f'; images of a kind that is not read: {data.unread}' if data.unread else ''
    return RunError(f'{root}: no annotations in it that are read{there}: {remedy}. {takes}')
