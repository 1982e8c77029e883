# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Recognise annotation formats from the content of files."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Optional

from ...utils.errors import RunError
from .csv_files import kind_of_table
from .finding import find

_GLIMPSE = 1 << 16  # characters at each end of a file
_MAX_OPENED = 200  # label files that are opened
BOXES = (
    'COCO JSON, VOC XML, YOLO text files (labels/NAME.txt), LabelMe JSON, CVAT XML 1.1, Label Studio JSON, CSV and '
    'KITTI text files'
)
_AS_COCO = 'export it as COCO JSON'

# suffix -> (format, patterns that all occur, remedy if it is not read); the first match counts
_PATTERNS: dict[str, list[tuple[str, Sequence[str], str]]] = {
    '.json': [
        ('LabelMe JSON', [r'"shapes"\s*:', r'"(imagePath|imageHeight)"'], ''),
        ('VGG Image Annotator JSON', [r'"(_via_\w+|shape_attributes)"\s*:'], f'{_AS_COCO} (Annotation, Export)'),
        ('Supervisely JSON', [r'"(classTitle|geometryType|projectMeta)"\s*:'], _AS_COCO),
        ('Datumaro JSON', [r'"(dm_format_version|media_type)"\s*:'], 'convert it by datum convert -f coco_instances'),
        ('Darwin JSON of V7', [r'"(schema_ref|bounding_box)"\s*:'], _AS_COCO),
        ('Labelbox JSON', [r'"(data_row|Labeled Data|featureId)"\s*:'], _AS_COCO),
        ('BDD100K JSON', [r'"(box2d|poly2d)"\s*:'], 'convert it by bdd100k.label.to_coco'),
        ('CreateML JSON', [r'"coordinates"\s*:', r'"(label|annotations)"\s*:'], f'{_AS_COCO} or VOC XML'),
        ('Cityscapes polygons', [r'"imgHeight"\s*:', r'"objects"\s*:'], 'take its label images: --task segmentation'),
        ('COCO panoptic JSON', [r'"segments_info"\s*:'], 'take the file instances_*.json'),
        ('Label Studio JSON', [r'\A\s*\[', r'"(result|original_width|completions)"\s*:'], ''),
        ('COCO JSON', [r'\A\s*\{', r'"(images|annotations)"\s*:'], ''),
    ],
    '.xml': [
        ('CVAT XML', [r'<annotations[\s>]', r'<(image|meta)[\s>]'], ''),
        ('CVAT XML', [r'<annotations[\s>]', r'<track[\s>]'], ''),
        ('LabelMe XML', [r'<annotation[\s>]', r'<pt>'], 'export it as COCO JSON or VOC XML'),
        ('VOC XML', [r'<annotation[\s>]'], ''),
        ('dlib XML', [r'<dataset[\s>]', r'<box[\s>]'], f'{_AS_COCO} or VOC XML'),
    ],
    '.csv': [
        ('VGG Image Annotator CSV', ['region_shape_attributes'], f'{_AS_COCO} (Annotation, Export)'),
        ('CSV', [r'[,;\t]'], ''),
    ],
    '.tsv': [('CSV', [r'\t'], '')],
    '.txt': [
        ('KITTI text files', [r'^[A-Za-z_]\S*( -?[\d.]+){14,15}\s*$'], ''),
        ('DOTA text files', [r'^(-?[\d.]+ ){8}\S+ [012]\s*$'], 'convert them by BboxToolkit, or draw upright boxes'),
        ('VisDrone text files', [r'^-?\d+,-?\d+,\d+,\d+,[01],\d+,-?\d+,-?\d+,?\s*$'], 'convert them to COCO JSON'),
        ('MOT text files', [r'^\d+,-?\d+(,-?[\d.]+){5,8}\s*$'], 'convert them by MMDetection, mot2coco.py'),
        ('YOLO text files', [r'^\d+( -?[\d.]+(e-?\d+)?){4,}\s*$'], ''),
    ],
}
_CONTAINERS = {
    '.tfrecord': 'a TFRecord',
    '.parquet': 'a Parquet table',
    '.ndjson': 'NDJSON',
    '.jsonl': 'JSON lines',
    '.manifest': 'a manifest of SageMaker Ground Truth',
    '.mdb': 'an LMDB',
    '.mat': 'a MATLAB file',
    '.pkl': 'a pickle',
    '.h5': 'an HDF5 file',
    '.zip': 'an archive',
    '.tar': 'an archive',
}


class Kinds(NamedTuple):
    """Annotation files of a folder, by format."""

    files: dict[str, list[Path]]  # of supported formats
    unread: dict[str, list[Path]]  # of others, and containers

    def refusal(self, root: Path, read: str) -> str:
        """Return the message for data without a supported format: it names the format that was found, and a remedy."""
        for kind, files in self.unread.items():
            if kind in _REMEDIES or not self.files:
                remedy = _REMEDIES.get(kind, 'unpack or convert it')
                return f'DATA {str(root)!r}: {files[0].name} is {kind}, which is not read here: {remedy}.'
        for kind, files in self.files.items():
            return f'DATA {str(root)!r}: {files[0].name} is {kind}, which this task does not take; it takes {read}.'
        others = find(root, '.json', '.xml', '.csv', '.txt', '.yaml')
        unknown = f' ({len(others)} files as {others[0].name} are of no known format)' if others else ''
        return f'DATA {str(root)!r}: no annotations in it{unknown}. It takes {read}.'


_REMEDIES = {kind: remedy for rows in _PATTERNS.values() for kind, _, remedy in rows if remedy}


def kind_of(path: Path) -> Optional[str]:
    """Return the annotation format of a file, or None if it is not recognised."""
    if path.suffix.lower() in _CONTAINERS:
        return _CONTAINERS[path.suffix.lower()]
    try:
        with path.open(encoding='utf-8-sig', errors='replace') as file:
            text, rest = file.read(_GLIMPSE), file.read()
    except OSError as error:
        raise RunError(f'{path} cannot be read: {error.strerror}') from error
    glimpse = text + rest[-_GLIMPSE:]
    for kind, patterns, _ in _PATTERNS.get(path.suffix.lower(), ()):
        if all(re.search(pattern, glimpse, re.MULTILINE) for pattern in patterns):
            return kind_of_table(path) if kind == 'CSV' else kind
    if '"categories"' in text and re.search(r'"(images|annotations)"\s*:', rest):
        return 'COCO JSON'  # categories may fill the beginning
    return None


def kinds_of(root: Path, files: Optional[list[Path]] = None) -> Kinds:
    """Group annotation files by format: those below ``root``, or only ``files`` if given."""
    found: dict[str, list[Path]] = {}
    texts: list[Path] = []
    for path in files or find(root, *_PATTERNS, *_CONTAINERS):
        if path.suffix.lower() == '.txt':
            texts.append(path)
            continue
        kind = kind_of(path)
        if kind is None and path.suffix.lower() == '.json' and _SPLIT_NAME.fullmatch(path.stem):
            kind = 'COCO JSON'  # its reader reports the fault
        if kind:
            found.setdefault(kind, []).append(path)
    counts: dict[str, list[Path]] = {}
    for path in texts[:: -(-len(texts) // _MAX_OPENED) or 1]:
        kind = kind_of(path)
        if kind:
            counts.setdefault(kind, []).append(path)
    if counts:
        kind = max(counts, key=lambda each: len(counts[each]))
        found[kind] = texts
    elif any(path.parent.name.lower() in ('labels', 'obj_train_data') for path in texts):
        found['YOLO text files'] = texts
    read = {row[0] for rows in _PATTERNS.values() for row in rows if not row[2]} | {'CSV of boxes', 'CSV of classes'}
    return Kinds(
        {kind: paths for kind, paths in found.items() if kind in read},
        {kind: paths for kind, paths in found.items() if kind not in read},
    )


_SPLIT_NAME = re.compile(r'(instances_|_annotations.*)?(train|val|test)?(?:ing|id|idation)?\d*(_annotations.*)?', re.I)
