# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Files of a data set: its images, possible label files, and the options of the command line that choose among them."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Optional, TypeVar

import numpy as np
import yaml

from ...utils.errors import RunError, described, printable
from .images import MASKS_ONLY, SUFFIXES
from .names import Splits, composed, some
from .pictures import Pictures

_T = TypeVar('_T')
_LABELS = ('.json', '.xml', '.csv', '.tsv', '.txt', '.yaml', '.yml', '.names', '.labels', '.data')
_CLASSES = ('class_names.txt', 'label_list.txt')  # beside classes.txt; of Paddle's tools
_WITH_LABELS = ('.json', '.xml')  # others may be lists
_NO_IMAGES = '.gif .heic .heif .avif .ppm .pgm .pnm .jp2 .dcm .nii .npy .npz .svg .raw .dng .psd'.split()
_CONTAINERS = {
    'a TFRecord': ('.tfrecord', '.record'),
    'a Parquet table': ('.parquet',),
    'an Arrow table': ('.arrow',),
    'NDJSON': ('.ndjson',),
    'JSON lines': ('.jsonl',),
    'ODGT of CrowdHuman': ('.odgt',),
    'a manifest of SageMaker Ground Truth': ('.manifest',),
    'GeoJSON': ('.geojson',),
    'an LMDB': ('.mdb',),
    'a MATLAB file': ('.mat',),
    'a spreadsheet': ('.xlsx', '.xls', '.ods'),
    'a pickle': ('.pkl',),
    'an HDF5 file': ('.h5',),
    'an archive': ('.zip', '.tar', '.gz'),
}
_ABOUT = re.compile(r'(readme|license|licence|copying|changelog|citation|attribution|requirements)', re.IGNORECASE)
_PLACEHOLDER = re.compile(r'(sample_?)?submission', re.IGNORECASE)  # of Kaggle: labels that stand for none


class ConfigArgs(NamedTuple):
    """Arguments of ``tools/make_config.py``, see its ``--help``.

    ``boxes`` is ``'corners'``, ``'sides'`` or ``'centre'``; ``units`` is ``'pixels'`` or ``'shares'`` of the image (0
    to 1). ``size`` is in pixels, ``batch`` in images per step. ``train`` and ``val`` are lists, folders or label files.
    """

    data: Path
    task: str
    backbone: str
    out: Path
    batch: Optional[int] = None
    size: Optional[int] = None
    channels: Optional[int] = None
    classes: Optional[list[str]] = None
    scratch: bool = False
    boxes: Optional[str] = None
    units: Optional[str] = None
    images: Optional[Path] = None
    labels: Optional[Path] = None
    train: Optional[Path] = None
    val: Optional[Path] = None
    overwrite: bool = False

    @property
    def root(self) -> Path:
        """Folder to which paths of the data are relative."""
        return self.data if self.data.is_dir() else self.data.parent


class Source(NamedTuple):
    """Label file, its format, and its content: parsed JSON or XML, a table, or None."""

    path: Path
    kind: str
    content: Any = None


def container(path: Path) -> str:
    """Return the kind of a container file that is not read (``'a TFRecord'``, ``'an archive'``), or ''."""
    name = path.name.lower()
    for kind, suffixes in _CONTAINERS.items():
        if name.endswith(suffixes) or any(f'{suffix}-' in name for suffix in suffixes):
            return kind
    return ''


class Data:
    """Files below a folder. Links are followed, except for loops; hidden names and ``__MACOSX`` are skipped.

    Args:
        path: Folder, or a label file in it, which stands for ``--labels``.
        options: Arguments of the command line; a path that does not exist raises a RunError.
    """

    def __init__(self, path: Path, options: Optional[ConfigArgs] = None):
        options = options or ConfigArgs(path, 'detection', '', path)
        self.root = options.root
        given: dict[str, Any] = {
            key: self._given(key, getattr(options, key)) for key in ('images', 'labels', 'train', 'val')
        }
        self.options = options._replace(**given | ({'labels': path} if path.is_file() else {}))
        every = self._walk()
        folders = {part for path in every for part in path.relative_to(self.root).parts[:-1]}
        self.splits = Splits(folders, {path.stem for path in every if path.suffix.lower() in _LABELS})
        chosen = self.options.images
        read = {*SUFFIXES, *(MASKS_ONLY if self.options.task == 'segmentation' else ())}
        self.images = [path for path in every if path.suffix.lower() in read and _is_in(path, chosen)]
        # that may hold labels, lists or names
        self.files = [path for path in every if path.suffix.lower() in _LABELS and not _ABOUT.match(path.name)]
        self.containers = [path for path in every if container(path) and _is_in(path, self.options.labels)]
        self.no_images = [path for path in every if path.suffix.lower() in {*_NO_IMAGES} - read]
        self.used = set[Path]()  # files that were read; readers add theirs
        self.lost = dict[Path, int]()  # numbers of lines that name no image, by list

    def _walk(self) -> list[Path]:
        found: list[Path] = []
        self.empty = list[Path]()
        for folder, inner, files in os.walk(self.root, followlinks=True):
            self.empty += [] if inner or files else [Path(folder)]
            shown = [name for name in inner if not name.startswith('.') and name != '__MACOSX']
            inner[:] = [name for name in shown if not _is_loop(Path(folder, name))]
            found += [Path(folder, name) for name in files if not name.startswith('.')]
        return sorted(found)

    def _given(self, option: str, path: Optional[Path]) -> Optional[Path]:
        """Return the absolute path of an option, found from the data folder or the working folder."""
        if path is None:
            return None
        found = next((each.absolute() for each in (self.root / path, Path(path)) if each.exists()), None)
        if found is None:
            raise RunError(f'--{option}={str(path)!r}: expected a file or folder, by its path or from {self.root}.')
        return Path(os.path.normpath(found))

    @cached_property
    def pictures(self) -> Pictures:
        return Pictures(self.root, self.images, self.splits)

    @property
    def labels(self) -> list[Path]:
        """Files that may hold labels, without Kaggle's placeholders: those of ``--labels``, else ``--train`` and
        ``--val`` if both are label files."""
        splits = [path for path in (self.options.train, self.options.val) if path]
        chosen = splits if all(path.suffix in _WITH_LABELS for path in splits) else []
        chosen = [self.options.labels] if self.options.labels else chosen
        if chosen:
            return [path for path in self.files if any(_is_in(path, each) for each in chosen)]
        return [path for path in self.files if not _PLACEHOLDER.match(path.stem)]

    def rel(self, path: Path) -> Path:
        return path.relative_to(self.root)

    def name(self, path: Path) -> str:
        return self.rel(path).as_posix() if self.root in path.parents else str(path)

    def folders_of(self, paths: Iterable[Path]) -> str:
        """Return the folders of some files with the number of files in each, as text."""
        counts = Counter('.' if path.parent == self.root else self.name(path.parent) for path in paths)
        return some((f'{folder}/ ({count})' for folder, count in counts.items()), 6)

    def error(self, said: str) -> RunError:
        """Return an error that begins with the data folder and ends with ``said``."""
        return RunError(f'DATA {str(self.root)!r}{said}')

    @property
    def unread(self) -> str:
        """Text with the counts of unreadable images by suffix, and the first such file."""
        counts = Counter(path.suffix.lower() for path in self.no_images)
        first = f', as {self.name(self.no_images[0])}' if self.no_images else ''
        return some(f'{count} of {suffix}' for suffix, count in counts.items()) + first

    def need_images(self) -> None:
        """Raise a RunError if there are no images; it names other files that were found."""
        there = [f'{container(path)} ({self.name(path)})' for path in self.containers[:1]]
        there += [self.unread] if self.unread else []
        found = f', but {some(there)}: unpack or convert them to PNG or JPEG' if there else ''
        if not self.images:
            raise self.error(f': no image in it{found}.')

    def agreed(self, found: dict[Path, _T], subject: str) -> Optional[_T]:
        """Return the common content of the files in ``found`` (content by file), or None without files.

        The files count as used. If two differ, a RunError says "FILE and FILE differ in ``subject``".
        """
        for path, content in found.items():
            first = next(iter(found))
            if content != found[first]:
                raise RunError(f'{first} and {path} differ in {subject}.')
        self.used.update(found)
        return next(iter(found.values()), None)

    def names(self, *files: str) -> Optional[list[str]]:
        """Return the class names of ``--classes``, else of the files with a name or suffix in ``files``, else None.

        Each line has a name, perhaps after its number from 0 or 1. In CVAT's ``labelmap.txt`` a name ends at the colon.
        In other files, empty lines and comments raise a RunError. Files that differ raise one, too.
        """
        if self.options.classes:
            return list(map(composed, self.options.classes))
        found: dict[Path, list[str]] = {}
        files += _CLASSES if 'classes.txt' in files else ()
        for path in [path for file in files for path in self.files if file in (path.name, path.suffix)]:
            lines = [line.strip() for line in composed(read_text(path)).rstrip().splitlines()]
            if path.name == 'labelmap.txt':
                lines = [line.split(':')[0] for line in lines if line and not line.startswith('#')]
            odd = next((number for number, line in enumerate(lines, 1) if not line or line.startswith('#')), None)
            if odd:
                raise RunError(
                    f'{path}: line {odd} is {lines[odd - 1]!r}, which some tools count as a class and others skip: '
                    'remove it, or give --classes NAME ...'
                )
            numbered = [re.fullmatch(r'(\d+)[:,\s]\s*(.+)', line) for line in lines]
            if any(all(match and int(match[1]) == i for i, match in enumerate(numbered, first)) for first in (0, 1)):
                lines = [match[2] for match in numbered if match]
            found[path] = lines
        return self.agreed(found, 'the names of classes: keep one, or give --classes NAME ...')

    @cached_property
    def settings(self) -> tuple[Optional[Path], dict]:
        """YAML file with ``names``, else darknet's ``.data`` file, and its content; (None, {}) without both."""
        found: dict[Path, dict] = {}
        for path in [path for path in self.files if path.suffix.lower() in ('.yaml', '.yml')]:
            text = read_text(path)
            try:  # names are texts: YAML would read yes, no, on and 1.0 otherwise
                content = yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506
            except yaml.YAMLError as error:
                if not re.search(r'^names\s*:', text, re.MULTILINE):  # of another program
                    continue
                raise RunError(f'{path} cannot be read: {printable(described(error))}') from error
            if isinstance(content, dict) and content.get('names'):
                found[path] = content
        # the same lists are others in another folder
        compared = {path: (each, path.parent if each.get('train') else None) for path, each in found.items()}
        if self.agreed(compared, 'names or splits: keep one YAML file'):
            return next(iter(found.items()))
        for path in [path for path in self.files if path.suffix.lower() == '.data']:
            self.used.add(path)
            pairs = {key.strip(): value.strip() for key, _, value in (line.partition('=') for line in read_lines(path))}
            return path, {'train': pairs.get('train'), 'val': pairs.get('valid')}
        return None, {}

    def unused(self) -> list[str]:
        """Return notes on the files that were not read."""
        files = [path for path in self.files + self.containers if path not in self.used]
        notes = [f'files not used: {some(map(self.name, files), 6)}'] if files else []
        notes += [f'{count} lines of {self.name(path)} name no image' for path, count in self.lost.items()]
        notes += [f'folders without a file: {some(map(self.name, self.empty), 6)}'] if self.empty else []
        return notes + ([f'images of a kind that is not read are left out: {self.unread}'] if self.unread else [])


def _is_loop(path: Path) -> bool:
    return path.is_symlink() and path.resolve() in {parent.resolve() for parent in path.parents}


def _is_in(path: Path, chosen: Optional[Path]) -> bool:
    """Return True for the path ``chosen``, and for paths below it; None chooses all."""
    return chosen is None or path == chosen or chosen in path.parents


def read_lines(path: Path) -> list[str]:
    """Return the stripped, non-empty lines of a text file in UTF-8."""
    return list(filter(None, map(str.strip, read_text(path).splitlines())))


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding='utf-8-sig')
    except (OSError, UnicodeDecodeError) as error:
        remedy = '; save it as UTF-8' if isinstance(error, UnicodeDecodeError) else ''
        raise RunError(f'{path} cannot be read as text of UTF-8: {described(error)}{remedy}.') from error


class OwnData(NamedTuple):
    """Data set of the user, as read by one of the readers.

    Attributes:
        kind: Format, for messages.
        classes: Class names in the order of the labels.
        items: Images with their labels (:class:`~.reading.Photo`) by split: ``'train'``, ``'val'``, perhaps ``'test'``.
        annotations: Text of the annotation file to write, by split.
        settings: Config settings of the data set beside the annotation file, e.g. ``data_prefix``, by split.
        notes: Lines for the user.
        masks: Objects have polygons, so that a detector can learn masks.
        densest: Largest number of learnt objects in an image.
        ignores: Some objects are neither learnt nor counted (crowds).
        labels_of: Function that reads a mask file as labels (H, W) uint8; None without masks.
    """

    kind: str
    classes: list[str]
    items: dict[str, list]
    annotations: dict[str, str]
    settings: dict[str, dict]
    notes: list[str]
    masks: bool = False
    densest: int = 0
    ignores: bool = False
    labels_of: Optional[Callable[[Path], np.ndarray]] = None

    @property
    def images(self) -> dict[str, list[Path]]:
        return {split: [item.path for item in items] for split, items in self.items.items()}
