# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Common part of all readers of boxes: match images, check their sizes, name the classes."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Optional

from ...utils.errors import RunError, described
from .data import Data, Source
from .images import image_size
from .objects import Object, Photo, is_region


class Entry(NamedTuple):
    """Image in a label file, as the file has it."""

    name: str  # name, path or URL; '' for that of the label file
    content: Any  # for Reader.objects
    size: tuple = (None, None)  # width, height
    split: str = ''  # name of the split, or of folders that may name it
    group: Optional[str] = None


class Claim(NamedTuple):
    """Labelled images, as one reader understood them."""

    kind: str  # format
    photos: list[Photo]
    classes: list[str]  # in the order of the labels
    notes: list[str]  # for the user
    boxes: Optional[str] = None  # meaning of raw boxes: 'corners', 'sides' or 'centre'; None if the file does not say
    units: Optional[str] = None  # 'pixels' or 'shares'


class Reader:
    """Reader of a format. A subclass has the images of a file (:meth:`entries`) and their objects (:meth:`objects`).

    Attributes:
        boxes, units: Meaning of raw boxes (:class:`Claim`).
        lists: Names of files with a class name a line.
        is_upload: Label Studio's prefix may stand before the names of images.
        has_one_image: A file has the labels of one image, mostly of its own name.
        classes: Class names that the files list.
        notes: Notes for the user.
        lost: Shapes that are neither boxes nor polygons, by kind.
        unused: Fields of images that are not used.
    """

    boxes: Optional[str] = None
    units: Optional[str] = None
    lists: tuple[str, ...] = ('classes.txt', 'labels.txt', 'labelmap.txt')
    is_upload = False
    has_one_image = False

    def __init__(self, kind: str, data: Data):
        self.kind, self.data = kind, data
        self.classes, self.notes = list[str](), list[str]()
        self.lost, self.unused = Counter[str](), Counter[str]()

    def entries(self, source: Source) -> Iterable[Entry]:
        """Yield the images of a label file."""
        raise NotImplementedError

    def objects(self, content: Any, size: tuple[int, int]) -> Iterable[Object]:
        """Yield the objects of an entry; ``size`` is that of the image."""
        raise NotImplementedError

    def listed(self, found: set[str]) -> Optional[list[str]]:
        """Return the class names in the order of a list file, or of the label files with others that occur."""
        listed = self.data.names(*self.lists)
        if listed is None and self.classes:
            listed = [*self.classes, *sort_names(found - set(self.classes))]
        return listed

    def read(self, sources: list[Source]) -> Claim:
        """Read all files of a format.

        Raises:
            RunError: A file is damaged, or its images do not exist or have another size.
        """
        photos = self.photos(sources)
        found = {str(item.name) for photo in photos for item in photo.objects if not is_region(item.name)}
        order, names = name_table(found, self.listed(found))
        # without LabelMe's _background_
        classes = [name for name in order if name in names.values() or not name.startswith('_')]
        if any(name != label for label, name in names.items()):
            photos = [_renamed(photo, names) for photo in photos]
        notes = [*self.notes]
        if self.unused:
            notes.append(f'not used of the images in {self.kind}: {_counted(self.unused, "{key} ({count})")}')
        if self.lost:
            listed_kinds = _counted(self.lost, '{count} of kind {key}')
            notes.append(f'shapes that are no boxes or polygons are left out: {listed_kinds}')
        return Claim(self.kind, photos, classes, notes, self.boxes, self.units)

    def photos(self, sources: list[Source]) -> list[Photo]:
        photos, pictures = list[Photo](), self.data.pictures
        keys = {pictures.key(source.path) for source in sources}
        for source in sources:
            path = source.path
            with guarded(str(path)):
                entries = list(self.entries(source))
            if self.has_one_image:
                found = [pictures.of_label(path, entry.name, keys) for entry in entries]
            else:
                found = pictures.find(path, (entry.name for entry in entries), self.is_upload)
            of_file = None if self.has_one_image else self.data.splits.of(self.data.rel(path), is_file=True)
            for entry, picture in zip(entries, found):
                photo = self.photo(path, picture, entry)
                photos.append(photo._replace(split=self.data.splits.of(Path(entry.split)) or of_file))
        return photos

    def photo(self, path: Path, picture: Path, entry: Entry) -> Photo:
        size = checked_size(path, picture, *entry.size)
        with guarded(str(path) if self.has_one_image else f'{path}, image {entry.name!r}'):
            return Photo(picture, size, list(self.objects(entry.content, size)), None, path, entry.group)


@contextmanager
def guarded(place: str) -> Iterator[None]:
    """Raise the errors of damaged content as RunError that names the place."""
    try:
        yield
    except ValueError as error:
        raise RunError(f'{place}: {error}.') from error
    except (AttributeError, KeyError, TypeError, OSError) as error:
        raise RunError(f'{place} cannot be read: {described(error)}') from error


def _counted(counts: Counter, form: str) -> str:
    return ', '.join(form.format(key=key, count=count) for key, count in sorted(counts.items()))


def checked_size(file: Path, picture: Path, width: Any = None, height: Any = None) -> tuple[int, int]:
    """Return width and height of an image, after comparing them with those in its annotation file.

    Raises:
        RunError: The annotation file gives another size. Missing sizes and 0 are accepted.
    """
    size = image_size(picture)
    try:
        expected = (int(float(width or 0)), int(float(height or 0)))
    except (TypeError, ValueError):
        raise RunError(f'{file}: {width!r} x {height!r} is no size of an image.') from None
    if all(expected) and expected != size:
        text = f'{file} has an image of {expected[0]}x{expected[1]}'
        raise RunError(f'{text}, and {picture} is {size[0]}x{size[1]} (turned by EXIF?).')
    return size


def sort_names(names: Iterable[str]) -> list[str]:
    """Sort class names alphabetically; names that are numbers come first, sorted by value."""
    return sorted(names, key=lambda name: (0, float(name), '') if re.fullmatch(r'\d+', name) else (1, 0.0, name))


def name_table(found: set[str], listed: Optional[list[str]]) -> tuple[list[str], dict[str, str]]:
    """Return the class names in the order of the labels, and the name of each label that occurs.

    Args:
        found: Labels that occur.
        listed: Names of the user's list, if any; labels may be their numbers from 0.

    Raises:
        RunError: A label is not in the list.
    """
    if not listed:
        return sort_names(found), {name: name for name in found}
    if found <= set(listed):
        return listed, {name: name for name in found}
    if '0' in found and found <= set(map(str, range(len(listed)))):
        return listed, {name: listed[int(name)] for name in found}
    lacking = sort_names(found - set(listed))[0]
    raise RunError(
        f'the label {lacking!r} is not in the list of classes ({", ".join(listed)}), and not all labels are its '
        'numbers from 0: correct classes.txt, or give --classes NAME ...'
    )


def _renamed(photo: Photo, names: dict[str, str]) -> Photo:
    objects = [item._replace(name=names.get(str(item.name), item.name)) for item in photo.objects]
    return photo._replace(objects=objects)
