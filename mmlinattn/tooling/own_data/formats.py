# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Table of the formats of label files: a test of the content, and the reader or a remedy."""

import itertools
import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Union

from ...utils.errors import RunError, described
from .coco import Coco
from .csv_files import BoxTable, Table
from .data import Data, Source, container, read_text
from .labelling_tools import Cvat, LabelMe, LabelStudio, Voc
from .names import some, split_in
from .reading import Reader
from .text_files import Kitti, Yolo

UNKNOWN = 'of no known format'
_AS_COCO = 'export it as COCO JSON'
_AS_VOC, _VIA = f'{_AS_COCO} or VOC XML', f'{_AS_COCO} (Annotation, Export)'
_DATUM = 'run datum convert -f coco_instances'
_HEADER = 'filename,class,xmin,ymin,xmax,ymax'
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
        'one folder of images per class, and CSV files with a header (filename, label)',
    ),
}
_GLIMPSE = 1 << 16  # characters of text files
_LISTS = ('.yaml', '.yml', '.names', '.labels', '.data')


class Format(NamedTuple):
    """Format of label files; several rows of the tables below may share a name.

    Attributes:
        name: Name of the format, for messages.
        matches: Test of parsed JSON (:class:`_Json`), the root of XML, a table, or a line of text.
        use: Reader, or the remedy for a format that is not read.
    """

    name: str
    matches: Callable[[Any], object]
    use: Union[type[Reader], str] = _AS_COCO


def _first(value: Any) -> dict:
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    first = next(iter(entries), None)
    return first if isinstance(first, dict) else {}


class _Json:
    """Parsed JSON, with the attributes by which rows of the table of formats recognise it."""

    def __init__(self, content: Any):
        self.is_list, self.top = isinstance(content, list), content if isinstance(content, dict) else {}
        self.keys, self.first, self.annotation = self.top.keys(), _first(content), _first(self.top.get('annotations'))
        self.inner = _first(self.first.get('annotations')) or _first(self.first.get('labels'))

    def has(self, key: str, kind: type) -> bool:
        return isinstance(self.top.get(key), kind)


def _is_label_studio(j: _Json) -> object:
    lists = (value for value in j.first.values() if isinstance(value, list))  # of JSON-MIN, beside the image
    shapes = (each.keys() for each in itertools.chain(*lists) if isinstance(each, dict))
    are_shapes = (keys & {'x', 'points'} and any(key.endswith('labels') for key in keys) for keys in shapes)
    is_whole = 'data' in j.first and {'annotations', 'completions'} & j.first.keys()
    return j.is_list and (is_whole or any(are_shapes))


_LISTED = {'images', 'categories'}
# of each table the first that matches
_JSON = [
    Format('LabelMe JSON', lambda j: j.has('shapes', list), LabelMe),
    Format('VGG Image Annotator JSON', lambda j: 'regions' in j.first or '_via' in {key[:4] for key in j.keys}, _VIA),
    Format('Supervisely JSON', lambda j: 'projectType' in j.keys or 'classTitle' in _first(j.top.get('objects'))),
    Format('Datumaro JSON', lambda j: j.keys & {'dm_format_version', 'media_type'}, _DATUM),
    Format('Datumaro JSON', lambda j: j.keys >= {'categories', 'items'}, _DATUM),
    Format('Darwin JSON of V7', lambda j: 'schema_ref' in j.keys or j.keys >= {'item', 'annotations'}),
    Format('Darwin JSON of V7', lambda j: 'bounding_box' in j.annotation),
    Format('Labelbox JSON', lambda j: {'data_row', 'Labeled Data'} & {*j.first, *j.keys}),
    Format('Scale AI JSON', lambda j: 'task_id' in j.first),
    Format('BDD100K JSON', lambda j: j.is_list and {'box2d', 'poly2d'} & {*j.inner}, 'run bdd100k.label.to_coco'),
    Format('CreateML JSON', lambda j: j.is_list and 'coordinates' in j.inner, _AS_VOC),
    Format('Cityscapes polygons', lambda j: j.keys >= {'imgHeight', 'objects'}, 'take its masks: --task segmentation'),
    Format('Segment Anything JSON (SA-1B)', lambda j: j.has('image', dict)),
    Format('COCO panoptic JSON', lambda j: 'segments_info' in j.annotation, 'take the file instances_*.json'),
    Format('Label Studio JSON', _is_label_studio, LabelStudio),
    Format('captions of COCO', lambda j: 'caption' in j.annotation),
    Format('a list of images', lambda j: j.keys >= _LISTED and j.top['images'] and 'annotations' not in j.keys),
    Format(
        'COCO JSON of classes',
        lambda j: j.keys >= _LISTED and j.annotation and not {'bbox', 'segmentation'} & {*j.annotation},
    ),
    Format('COCO JSON', lambda j: j.has('images', list) and j.has('annotations', list), Coco),
]
_XML = [
    Format('CVAT XML', lambda x: x.tag == 'annotations' and {'image', 'meta', 'track'} & {e.tag for e in x}, Cvat),
    Format('LabelMe XML', lambda x: x.tag == 'annotation' and x.find('.//pt') is not None, _AS_VOC),
    Format('VOC XML', lambda x: x.tag == 'annotation' and {'object', 'size', 'filename'} & {e.tag for e in x}, Voc),
    Format('dlib XML', lambda x: x.tag == 'dataset' and x.find('.//box') is not None, _AS_VOC),
]
_TABLES = [
    Format('VGG Image Annotator CSV', lambda t: 'regionshapeattributes' in t.columns, _VIA),
    Format('Label Studio CSV', lambda t: 'annotator' in t.columns and not t.has_choices, 'export JSON'),
    Format(
        'CSV of run lengths (EncodedPixels)', lambda t: 'encodedpixels' in t.columns, 'write COCO JSON, or masks as PNG'
    ),
    Format(
        'CSV of PredictionString', lambda t: 'predictionstring' in t.columns, f'write a row for each box: {_HEADER}'
    ),
    Format('CSV of quadrilaterals', lambda t: 'x3' in t.columns, f'write upright boxes: {_HEADER}'),
    Format('Google AutoML CSV', lambda t: len(t.names) >= 9 and split_in(t.names[0]), f'write a header {_HEADER}'),
    Format('CSV of boxes', lambda t: t.image and t.rows and t.box, BoxTable),
    Format('CSV of classes', lambda t: t.image and t.rows and t.has_classes),
]
_NUMBER = r'-?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?'
_DOTA, _MOT = rf'({_NUMBER} ){{8}}[A-Za-z]\S*( \d)?', rf'\d+,-?\d+(,{_NUMBER}){{5,8}}'
_LINES = [
    Format('KITTI text files', re.compile(rf'[A-Za-z_]\S*( {_NUMBER}){{14,15}}').fullmatch, Kitti),
    Format('DOTA text files', re.compile(_DOTA).fullmatch, 'convert them by BboxToolkit, or draw upright boxes'),
    Format('VisDrone text files', re.compile(r'(-?\d+,){2}(\d+,){2}[01],\d+,-?\d+,-?\d+,?').fullmatch),
    Format('MOT text files', re.compile(_MOT).fullmatch, 'convert them by MMDetection, mot2coco.py'),
    Format('YOLO text files', re.compile(rf'\d+(\.0*)?(\s+({_NUMBER}|nan)){{4,}}').fullmatch, Yolo),
]
FORMATS = {each.name: each.use for each in (*_JSON, *_XML, *_TABLES, *_LINES)}
READERS = {name: use for name, use in FORMATS.items() if not isinstance(use, str)}


def recognise(path: Path) -> Source:
    """Recognise the format of a label file by its suffix and content; other files have the format :data:`UNKNOWN`.

    Raises:
        RunError: The file is broken JSON, or a broken annotation in XML.
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
        except (OSError, ValueError, ElementTree.ParseError) as error:  # ValueError: of encodings such as GBK
            if b'<annotation' in path.read_bytes():
                raise RunError(f'{path} cannot be read: {described(error)}') from error
            return Source(path, UNKNOWN)
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
    """Return the label files of a data set by format. Text files with the name of an image take the most frequent
    format of such files in their folder. If all files there are empty, it is that of the data set."""
    found: dict[str, list[Source]] = {}
    texts: dict[Path, list[Source]] = {}
    files = data.labels
    if not data.options.labels and len(files) <= 2 and {*files} == {data.options.train, data.options.val}:
        kinds = {recognise(path).kind for path in files}
        if not kinds & ({*READERS} | ({'CSV of classes'} if data.options.task == 'classification' else set())):
            files = [path for path in data.files if path not in files]
    for path in files + data.containers:
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


def described_kind(data: Data, source: Source) -> str:
    """Return a sentence about a label file of a format that does not fit the task, for messages."""
    path, kind, content = source
    name, columns = data.name(path), some(content.names) if isinstance(content, Table) else ''
    if kind in (UNKNOWN, 'CSV of classes') and columns:
        return f'{name} is a table without a known header; its columns are {columns}'
    why = f', which {data.options.task} does not take' if kind in READERS else ', which is not read here'
    return f'{name} is {kind}{f" (columns {columns})" if columns else ""}{why}'


def refusal(data: Data, kinds: dict[str, list[Source]]) -> RunError:
    """Return the error for data without usable labels: it names a file that was found, its format and a remedy."""
    task = data.options.task
    remedy, takes = _TASKS[task]
    unread = f'; images of a kind that is not read: {data.unread}' if data.unread else ''
    if task == 'segmentation' and unread:
        return data.error(f': no masks in it that are read{unread}. It takes {takes}.')
    for kind, (source, *_) in kinds.items():
        if kind == UNKNOWN or task == 'detection' and (kind in READERS or kind == 'CSV of classes'):
            continue
        if kind in ('an archive', 'a spreadsheet'):
            remedy = 'unpack it' if kind == 'an archive' else 'save it as CSV'
        elif task == 'detection':
            remedy = str(FORMATS.get(kind, remedy))
        return data.error(f': {described_kind(data, source)}: {remedy}. It takes {takes}.')
    others = [*kinds.get(UNKNOWN, ()), *kinds.get('CSV of classes', ())]
    tables = [source for source in others if isinstance(source.content, Table)]
    if tables and not any(data.pictures.named(source.path.stem) for source in others):
        return data.error(f': {described_kind(data, tables[0])}. It takes {takes}.')
    unknown = some((data.name(source.path) for source in kinds.get(UNKNOWN, [])), 4)
    there = f' ({unknown}: {UNKNOWN})' if unknown else ''
    masks = data.pictures.masks_among(data.images) if task != 'segmentation' else ()
    if masks:
        remedy = f'for the masks of its images, as {data.name(min(masks))}, set --task segmentation; else {remedy}'
    return data.error(f': no annotations in it that are read{there}{unread}: {remedy}. It takes {takes}.')
