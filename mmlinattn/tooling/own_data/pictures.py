# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Find the images that label files name."""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ...utils.errors import RunError
from .images import MASKS_ONLY, is_mask
from .names import MASK_ENDING, Splits, composed, has_role_only, shared_key, without_split

# folders, in small letters
_MASKS = frozenset(
    """masks mask labels label annotations ann_dir segmentationclass segmentationclasspng gtfine semantic semantic_rgb
    gt labeledapproved_full groundtruth ground_truth segmentation segmentations""".split()
)
_ROLES = _MASKS | {'img_dir', 'image_2', '701_stillsraw_full'}
MASK_SUFFIXES = ('.png', '.tif', '.tiff', '.bmp', *MASKS_ONLY)
_BESIDE = re.compile(r'(.+?)[_-]?(annot|annotations?|labels?|masks?|gt)$', re.IGNORECASE)  # train and trainannot
_OF_IMAGES = ('_leftImg8bit', '_sat', '_image', '_img', '_rgb')  # endings of images
_UPLOAD = re.compile(r'[0-9a-f]{8}-')  # before names of files, by Label Studio


def _key(name: str) -> str:
    return composed(name).casefold()


class Pictures:
    """Index of the images of a data set, to find an image by its name or path in a label file.

    The best image has all folders of that path, else most of them. An image with the base name alone is found if it is
    the only one, and no folder contradicts.
    """

    def __init__(self, root: Path, images: Sequence[Path], splits: Splits):
        self.root, self.splits, self._by_name = root, splits, dict[str, list[Path]]()
        for path in images:
            for name in {_key(path.name), _key(path.stem)}:
                self._by_name.setdefault(name, []).append(path)
        folders = {self.rel(path).parent for path in images}
        self._folders = {part for folder in folders for part in folder.parts if not has_role_only(part)}
        self._keys = {shared_key(folder) for folder in folders}

    def named(self, name: str) -> list[Path]:
        """Return the images with the base name of a name, path or URL; a prefix of Label Studio is removed."""
        base = _parts(name)[-1]
        plain = unquote(base)
        names = [base, plain, plain.partition('?')[0], _parts(unquote(name).partition('?d=')[2])[-1]]
        names += [_UPLOAD.sub('', each, count=1) for each in names[1:] if _UPLOAD.match(each)]
        found = next((self._by_name[_key(each)] for each in names if each and _key(each) in self._by_name), [])
        return [path for path in found if base in (path.name, path.stem)] or found

    def find(self, file: Path, names: Iterable[str]) -> list[Path]:
        """Return the image of each name, path or URL in a label ``file``; no image, or several, raise a RunError."""
        names = list(map(str, names))
        folders = {part for name in names for part in _parts(name)[:-1]}
        return [self._find(file, name, folders) for name in names]

    def _find(self, file: Path, name: str, named: set[str]) -> Path:
        """Return the image of a ``name`` in a label file; ``named`` are all folders that the file names."""
        folders, split = _parts(name)[:-1], self.splits.of(self.rel(file), is_file=True)
        is_exact, tail = self._is_exact(file, name), _tail(folders)
        picture = self._best(
            file,
            name,
            self.named(name),
            is_exact,
            lambda path: (tail(path), sum(part in folders for part in self.rel(path).parts[:-1])),
            lambda path: self.splits.of(self.rel(path).parent) == split,
        )
        ours = self.rel(picture).parts[:-1]
        if not is_exact(picture) and tail(picture) < len(folders):
            lacking = [part for part in folders if part in self._folders and part not in ours]
            foreign = [part for part in ours if part in named and part not in folders and not has_role_only(part)]
            if lacking or foreign:
                raise RunError(
                    f'{file} names the image {name!r}, and its name is in another folder alone: {picture}. Correct '
                    'the path, or give --images DIR.'
                )
        return picture

    def of_label(self, file: Path, name: str, keys: set) -> Path:
        """Return the image of a label file for one image.

        Args:
            file: The label file.
            name: Name or path of the image in the file; the name of the file replaces a missing or unknown one.
            keys: :func:`~.names.shared_key` of the folders of all label files of the format.
        """
        named, own = self.named(name) if name else [], self.named(file.stem)
        if named and own and not set(named) & set(own):
            raise RunError(
                f'{file}: its name is that of {own[0].name}, and the image that it names (<filename>, imagePath) is '
                f'another, {name!r}: correct one.'
            )
        key, folder, base = self.key(file), _tail(_parts(name)[-2:-1]), _parts(name)[-1]
        name = name or file.stem

        def same(path: Path) -> bool:
            return path.name == base if base else path.stem == file.stem

        sure = (
            self._is_exact(file, name),
            lambda path: path.parent == file.parent,
            lambda path: self.key(path) == key,
            lambda path: folder(path) == 1,
        )
        picture = self._best(file, name, named or own, same, *sure)
        if any(rank(picture) for rank in sure):
            return picture
        if is_mask(picture):
            raise RunError(f'{file}: the only image of its name is {picture}, a mask: give --images DIR.')
        if {key} & self._keys - {()} or {self.key(picture)} & keys - {()}:
            raise RunError(
                f'{file} has no image in its folder, and {picture} is in another: give --images DIR, or '
                '--labels DIR for the labels of one folder.'
            )
        return picture

    def _best(self, file: Path, name: str, found: list[Path], *ranks: Callable[[Path], Any]) -> Path:
        """Return the image of ``found`` with the highest first rank, among equals with the highest next rank. The last
        ranks are the nearness to the label file, and being no mask. No or several images raise a RunError."""
        if not found:
            raise RunError(
                f'{file} names the image {name!r}, which is in no folder below {self.root}. Correct the name, or give '
                '--labels FILE or DIR of other label files.'
            )
        for rank in (*ranks, self._nearness(file), lambda path: not is_mask(path)):
            if len(found) > 1:
                found = _leading(found, rank)
        if len(found) > 1:
            raise RunError(f'{file}: {name!r} may be {found[0]} or {found[1]}: give --images DIR, or keep one.')
        return found[0]

    def nearest(self, file: Path, images: list[Path]) -> list[Path]:
        """Return those of ``images`` that share most upper folders with a file."""
        return _leading(images, self._nearness(file))

    def _nearness(self, file: Path) -> Callable[[Path], int]:
        of_file = self.rel(file).parts[:-1]
        return lambda path: len(os.path.commonprefix([of_file, self.rel(path).parts[:-1]]))

    def _is_exact(self, file: Path, name: str) -> Callable[[Path], bool]:
        """Return a test of image paths: True if ``name`` is the path, relative to DATA or to the folder of the label
        ``file``."""
        paths = [Path(os.path.normpath(top / name.replace('\\', '/'))) for top in (self.root, file.parent)]
        return lambda path: path in paths

    def separate_masks(self, images: Iterable[Path]) -> tuple[dict[Path, tuple], dict[Path, tuple]]:
        """Separate images and segmentation masks by the names of their folders and files. Each path has its key
        (:func:`~.names.shared_key`), which is equal for an image and its mask."""
        found: tuple[dict[Path, tuple], dict[Path, tuple]] = {}, {}
        images = list(images)
        masks = self._masks_by_name(images)
        for path in images:
            parts = [part for part in self.rel(path).parent.parts if part.lower() not in _ROLES]
            parts = [_BESIDE.sub(r'\1', part) for part in parts] if path in masks else parts
            found[path in masks][path] = shared_key(Path(*parts))
        return found

    def _masks_by_name(self, images: list[Path]) -> set[Path]:
        """Return the masks: all files in folders with a name for masks, without such folders the files with such an
        ending, else PNG files beside JPEG files of the same name."""
        folders = {folder for path in images for folder in self.rel(path).parents}
        beside = {folder: _BESIDE.match(folder.name) for folder in folders}
        of_masks = {folder for folder, match in beside.items() if match and folder.with_name(match[1]) in folders}
        of_masks |= {folder for folder in folders if {folder.name.lower(), without_split(folder.name)} & _MASKS}
        found = {path for path in images if of_masks & {*self.rel(path).parents}}
        if found:
            return found
        files = {*images}
        stems = {(path.parent, stem) for path in files for stem in stems_of_image(path)}
        ended = {path for path in files if MASK_ENDING.search(path.stem) and path.suffix.lower() in MASK_SUFFIXES}
        ended = {path for path in ended if (path.parent, MASK_ENDING.sub('', path.stem)) in stems}
        jpegs = {path.with_suffix('') for path in files if path.suffix.lower() in ('.jpg', '.jpeg')}
        return ended or {path for path in files if path.suffix.lower() == '.png' and path.with_suffix('') in jpegs}

    def masks_among(self, images: Iterable[Path]) -> set[Path]:
        """Return the ``images`` that are masks of others by their paths and their few values."""
        others, masks = self.separate_masks(images)
        stems = {(key, stem) for path, key in others.items() for stem in stems_of_image(path)}
        owned = (path for path, key in masks.items() if any((key, stem) in stems for stem in beginnings(path.stem)))
        return {path for path in owned if is_mask(path)}

    def rel(self, path: Path) -> Path:
        return path.relative_to(self.root)

    def key(self, path: Path) -> tuple[str, ...]:
        return shared_key(self.rel(path).parent)


def _leading(paths: list[Path], rank: Callable[[Path], Any]) -> list[Path]:
    """Return the paths with the highest ``rank``."""
    ranks = {path: rank(path) for path in paths}
    return [path for path in paths if ranks[path] == max(ranks.values())]


def _tail(folders: list[str]) -> Callable[[Path], int]:
    """Return a function that counts the parent folders that a path shares with ``folders``, innermost first.
    ``folders`` are those of an image name in a label file. For ``['a', 'b']``, ``x/a/b/1.jpg`` counts 2, ``x/b/1.jpg``
    1 and ``a/x/1.jpg`` 0."""
    named = [*map(_key, reversed(folders))]
    return lambda path: len(os.path.commonprefix([[*map(_key, path.parts[-2::-1])], named]))


def _parts(name: str) -> list[str]:
    parts = [part for part in str(name).replace('\\', '/').split('/') if part not in ('', '.', '..')]
    return parts or ['']


def beginnings(stem: str) -> list[str]:
    """Return a name and its beginnings before ``_``, ``.`` or ``-``, the longest first: ``a_b-c``, ``a_b``, ``a``."""
    return [stem, *(stem[: match.start()] for match in reversed(list(re.finditer('[_.-]', stem))))]


def stems_of_image(path: Path) -> set[str]:
    """Return the name of an image without suffix, also without an ending such as ``_leftImg8bit``."""
    return {path.stem, *map(path.stem.removesuffix, _OF_IMAGES)}
