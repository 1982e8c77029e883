# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Files of a data set: its images, possible label files, and the options of the command line that choose among them."""

import itertools
import operator
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Optional
from urllib.parse import unquote

import numpy as np

from ...utils.errors import RunError, described
from .images import SUFFIXES, is_mask
from .names import Splits, has_role_only, is_hidden, relative, shared_key, some

_LABELS = ('.json', '.xml', '.csv', '.tsv', '.txt', '.yaml', '.yml', '.names', '.labels', '.data')
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
    'a pickle': ('.pkl',),
    'an HDF5 file': ('.h5',),
    'an archive': ('.zip', '.tar', '.gz'),
}
_ABOUT = re.compile(r'(readme|license|licence|copying|changelog|citation|attribution|requirements)', re.IGNORECASE)
_PLACEHOLDER = re.compile(r'(sample_?)?submission', re.IGNORECASE)  # of Kaggle: labels that stand for none
_UPLOAD = re.compile(r'[0-9a-f]{8}-')  # before names of files, by Label Studio


class Options(NamedTuple):
    """Options that choose between two readings of the data."""

    boxes: Optional[str] = None  # 'corners', 'sides' or 'centre'
    units: Optional[str] = None  # 'pixels' or 'shares'
    images: Optional[Path] = None
    labels: Optional[Path] = None
    train: Optional[Path] = None
    val: Optional[Path] = None
    classes: Optional[list[str]] = None


class Source(NamedTuple):
    """Label file, its format, and its content: parsed JSON or XML, a table, or None."""

    path: Path
    kind: str
    content: Any = None


def container(path: Path) -> str:
    """Return the kind of a file that holds images or labels in a form that is not read, or ''."""
    name = path.name.lower()
    for kind, suffixes in _CONTAINERS.items():
        if name.endswith(suffixes) or any(f'{suffix}-' in name for suffix in suffixes):
            return kind
    return ''


class Data:
    """Files below a folder. Links are followed, except for loops; hidden folders and those of macOS are skipped.

    Args:
        path: Folder, or a label file in it.
        options: Options of the command line.

    Attributes:
        images: Images, sorted by path.
        files: Files that may hold labels, lists or names.
        used: Files that were read. Readers add theirs.
    """

    def __init__(self, path: Path, options: Optional[Options] = None):
        options = options or Options()
        self.root = path if path.is_dir() else path.parent
        self.options = options._replace(
            images=self._given('--images', options.images),
            labels=path if path.is_file() else self._given('--labels', options.labels),
            train=self._given('--train', options.train),
            val=self._given('--val', options.val),
        )
        every = self._walk()
        self.splits = Splits({part for path in every for part in path.relative_to(self.root).parts[:-1]})
        chosen = self.options.images
        self.images = [path for path in every if path.suffix.lower() in SUFFIXES and _is_in(path, chosen)]
        self.files = [path for path in every if path.suffix.lower() in _LABELS and not _ABOUT.match(path.name)]
        self.containers = [path for path in every if container(path) and _is_in(path, self.options.labels)]
        self.no_images = [path for path in every if path.suffix.lower() in _NO_IMAGES]
        self.used: set[Path] = set()

    def _walk(self) -> list[Path]:
        found: list[Path] = []
        for folder, inner, files in os.walk(self.root, followlinks=True):
            inner[:] = [name for name in inner if not is_hidden(name) and not _is_loop(Path(folder, name))]
            found += [Path(folder, name) for name in files if not name.startswith('.')]
        return sorted(found)

    def _given(self, argument: str, path: Optional[Path]) -> Optional[Path]:
        if path is None:
            return None
        found = next((each.absolute() for each in (self.root / path, Path(path)) if each.exists()), None)
        if found is None:
            raise RunError(f'{argument}={str(path)!r}: expected a file or folder, by its path or from {self.root}.')
        return Path(os.path.normpath(found))

    @cached_property
    def pictures(self) -> 'Pictures':
        return Pictures(self)

    @property
    def labels(self) -> list[Path]:
        """Files that may hold labels: all, or those of ``--labels``; placeholders of Kaggle do not."""
        return [
            path
            for path in self.files
            if _is_in(path, self.options.labels) and (self.options.labels or not _PLACEHOLDER.match(path.stem))
        ]

    def rel(self, path: Path) -> Path:
        return path.relative_to(self.root)

    def name(self, path: Path) -> str:
        return relative(path, self.root)

    @property
    def unread(self) -> str:
        """Numbers of images by suffix that is not read, and the first, as text."""
        counts = Counter(path.suffix.lower() for path in self.no_images)
        first = f', as {self.name(self.no_images[0])}' if self.no_images else ''
        return some(f'{count} of {suffix}' for suffix, count in counts.items()) + first

    def need_images(self) -> None:
        """Raise an error without images: it names the files that are there."""
        if self.images:
            return
        there = [f'{container(path)} ({self.name(path)})' for path in self.containers[:1]]
        there += [self.unread] if self.unread else []
        found = f', but {some(there)}: unpack or convert them to PNG or JPEG' if there else ''
        raise RunError(f'DATA {str(self.root)!r}: no image in it{found}.')

    def names(self, *files: str) -> Optional[list[str]]:
        """Return class names: those of ``--classes``, or of the only file of one of the names or suffixes, or None.

        Each line has a name, perhaps after its number from 0. In CVAT's ``labelmap.txt`` a name ends at the colon.

        Raises:
            RunError: Two such files differ.
        """
        if self.options.classes:
            return self.options.classes
        found: dict[Path, list[str]] = {}
        for path in [path for file in files for path in self.files if file in (path.name, path.suffix)]:
            lines = read_lines(path)
            if path.name == 'labelmap.txt':
                lines = [line.split(':')[0] for line in lines if not line.startswith('#')]
            numbered = [re.fullmatch(r'(\d+)[:,\s]\s*(.+)', line) for line in lines]
            if all(match and int(match[1]) == i for i, match in enumerate(numbered)):
                lines = [match[2] for match in numbered if match]
            found[path] = lines
        if not found:
            return None
        (first, names), *others = found.items()
        for path, lines in others:
            if lines != names:
                raise RunError(f'{first} and {path} differ: keep one, or give --classes NAME ...')
        self.used.update(found)
        return names

    def unused(self) -> list[str]:
        """Return notes on the files that were not read."""
        files = [path for path in self.files + self.containers if path not in self.used]
        notes = [f'files not used: {some(map(self.name, files), 6)}'] if files else []
        return notes + ([f'images of a kind that is not read are left out: {self.unread}'] if self.unread else [])


def _is_loop(path: Path) -> bool:
    return path.is_symlink() and path.resolve() in {parent.resolve() for parent in path.parents}


def _is_in(path: Path, chosen: Optional[Path]) -> bool:
    return chosen is None or path == chosen or chosen in path.parents


def read_lines(path: Path) -> list[str]:
    """Return the stripped, non-empty lines of a text file.

    Raises:
        RunError: The file cannot be read as UTF-8 text.
    """
    return list(filter(None, map(str.strip, read_text(path).splitlines())))


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding='utf-8-sig')
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f'{path} cannot be read as text of UTF-8: {described(error)}') from error


def _key(name: str) -> str:
    return unicodedata.normalize('NFC', name).casefold()


def _common(first: Iterable, second: Iterable) -> int:
    """Return the number of equal elements at the start of two sequences."""
    return len([*itertools.takewhile(bool, map(operator.eq, first, second))])


class Pictures:
    """Images by the names and paths in label files.

    An image belongs to a label by its path: by all folders that the label names, else by most of them, else by its
    base name if that is the only one and no folder contradicts.
    """

    def __init__(self, data: Data):
        self.data, self._by_name = data, dict[str, list[Path]]()
        for path in data.images:
            for name in {_key(path.name), _key(path.stem)}:
                self._by_name.setdefault(name, []).append(path)
        folders = {data.rel(path).parent for path in data.images}
        self._folders = {part for folder in folders for part in folder.parts if not has_role_only(part)}
        self._keys = {shared_key(folder) for folder in folders}

    def named(self, name: str, is_upload: bool = False) -> list[Path]:
        """Return the images with the base name of a name, path or URL; ``is_upload`` allows Label Studio's prefix."""
        base = _parts(name)[-1]
        plain = unquote(base)
        names = [base, plain, plain.partition('?')[0], _parts(unquote(name).partition('?d=')[2])[-1]]
        names += [_UPLOAD.sub('', each, count=1) for each in names[1:] if is_upload and _UPLOAD.match(each)]
        found = next((self._by_name[_key(each)] for each in names if each and _key(each) in self._by_name), [])
        return [path for path in found if base in (path.name, path.stem)] or found

    def find(self, file: Path, names: Iterable[str], is_upload: bool = False) -> list[Path]:
        """Return an image for each name, path or URL in a label file.

        Raises:
            RunError: No image has the name, or several have, or a folder contradicts.
        """
        names = list(map(str, names))
        folders = {part for name in names for part in _parts(name)[:-1]}
        return [self._find(file, name, folders, is_upload) for name in names]

    def _find(self, file: Path, name: str, named: set[str], is_upload: bool) -> Path:
        found, folders = self._known(file, name, self.named(name, is_upload)), _parts(name)[:-1]
        exact = self._exact(file, name, found)

        def score(path: Path) -> tuple[int, int]:
            tail = _common(map(_key, path.parts[-2::-1]), map(_key, reversed(folders)))
            return tail, sum(part in folders for part in self.data.rel(path).parts[:-1])

        best = max(map(score, found))
        found = exact or [path for path in found if score(path) == best]
        picture = self._one(file, name, found, self.data.splits.of(self.data.rel(file), is_file=True))
        ours = self.data.rel(picture).parts[:-1]
        if not exact and best[0] < len(folders):
            lacking = [part for part in folders if part in self._folders and part not in ours]
            foreign = [part for part in ours if part in named and part not in folders and not has_role_only(part)]
            if lacking or foreign:
                raise RunError(
                    f'{file} names the image {name!r}, and its name is in another folder alone: {picture}. Correct '
                    'the path, or give --images DIR.'
                )
        return picture

    def of_label(self, file: Path, name: str, keys: set) -> Path:
        """Return the image of a file with the labels of one image.

        Args:
            file: The label file.
            name: Name or path of the image in the file; the name of the file stands for a missing or unknown one.
            keys: :func:`~.names.shared_key` of the folders of all such files.

        Raises:
            RunError: No image has the name, several have, two names are of two images, or a folder contradicts.
        """
        named, own = self.named(name) if name else [], self.named(file.stem)
        if named and own and not set(named) & set(own):
            raise RunError(
                f'{file}: its name is that of {own[0].name}, and the image that it names (<filename>, imagePath) is '
                f'another, {name!r}: correct one.'
            )
        found, key = self._known(file, name or file.stem, named or own), self.key(file)
        sure = self._exact(file, name, found) or [path for path in found if path.parent == file.parent]
        sure = sure or [path for path in found if self.key(path) == key]
        picture = self._one(file, name or file.stem, sure or found, None)
        if not sure and is_mask(picture):
            raise RunError(f'{file}: the only image of its name is {picture}, a mask: give --images DIR.')
        if not sure and ({key} & self._keys - {()} or {self.key(picture)} & keys - {()}):
            raise RunError(f'{file} has no image in its folder, and {picture} is in another: give --images DIR.')
        return picture

    def key(self, path: Path) -> tuple[str, ...]:
        return shared_key(self.data.rel(path).parent)

    def _known(self, file: Path, name: str, found: list[Path]) -> list[Path]:
        if not found:
            raise RunError(f'{file} names the image {name!r}, which is in no folder below {self.data.root}.')
        return found

    def _exact(self, file: Path, name: str, found: list[Path]) -> list[Path]:
        """Return the image with just this path, from DATA or from the folder of the label file."""
        paths = [Path(os.path.normpath(top / name.replace('\\', '/'))) for top in (self.data.root, file.parent)]
        return [path for path in found if path in paths]

    def _one(self, file: Path, name: str, found: list[Path], split: Optional[str]) -> Path:
        """Return the image of the same split as the label file, or nearest to it; masks are no images."""

        def near(path: Path) -> int:
            return _common(self.data.rel(file).parts[:-1], self.data.rel(path).parts[:-1])

        if len(found) > 1:
            found = [path for path in found if self.data.splits.of(self.data.rel(path).parent) == split] or found
            best = max(map(near, found))
            found = [path for path in found if near(path) == best]
        if len(found) > 1:
            found = [path for path in found if not is_mask(path)] or found
        if len(found) > 1:
            raise RunError(f'{file}: {name!r} may be {found[0]} or {found[1]}: give --images DIR, or keep one.')
        return found[0]


def _parts(name: str) -> list[str]:
    parts = [part for part in str(name).replace('\\', '/').split('/') if part not in ('', '.', '..')]
    return parts or ['']


def folders_of(paths: Iterable[Path], root: Path) -> str:
    """Return the folders of some files with the number of files in each, as text."""
    counts = Counter(relative(path.parent, root) if path.parent != root else '.' for path in paths)
    return some((f'{folder}/ ({count})' for folder, count in counts.items()), 6)


class Example(NamedTuple):
    """Training image with its labels, to be drawn."""

    path: Path
    objects: Sequence = ()  # of objects.Object
    label_map: Optional[Callable[[], np.ndarray]] = None
    title: str = ''


class OwnData(NamedTuple):
    """Data set of the user, as read by one of the readers."""

    kind: str  # format, for messages
    classes: list[str]  # in the order of the labels
    images: dict[str, list[Path]]  # by split: 'train', 'val', perhaps 'test'
    annotations: dict[str, str]  # text of the annotation file by split
    settings: dict[str, dict]  # further settings of the data set by split
    notes: list[str]  # for the user, a line each
    examples: list[Example]  # of train
    masks: bool = False  # objects have polygons
    densest: int = 0  # most objects in an image
    ignores: bool = False  # some objects are neither learnt nor counted
