# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Read the names of folders and files: the split they name, and the part that a label and its image share."""

import re
import unicodedata
from collections.abc import Iterable
from functools import cache
from pathlib import PurePath
from typing import Optional

_SPLITS = dict.fromkeys(('train', 'training', 'trainval'), 'train')
_SPLITS.update(dict.fromkeys(('val', 'valid', 'validation', 'validate', 'dev'), 'val'))
_SPLITS.update(dict.fromkeys(('test', 'testing', 'eval'), 'test'))
# words for the role of a folder, not for its content
_ROLES = frozenset(
    """images image imgs img jpegimages jpeg jpg png photos pictures frames stills raw labels label labelled labeled
    annotations annotation annotated annot annots anns ann masks mask gt ground groundtruth truth xml xmls json
    jsons txt csv coco yolo voc data dataset datasets set sets list lists file files split splits part parts
    instances instance bbox bboxes boxes box objects input inputs ids obj""".split()
)
# fields whose images belong to one split
GROUPS = 'patientid patient subjectid subject lesionid group groupid videoid video sequenceid'.split()
MASK_ENDING = re.compile(r'[_-](masks?|labels?|seg|gt|L|P)([_-]?\d+)?$', re.IGNORECASE)
_JOINED = re.compile(r'(train|val|test)(annot|annotations?|labels?|masks?|images?|imgs?|data|set)')


def plain(name: str) -> str:
    """Return the ASCII letters and digits of a field's name in lower case."""
    return re.sub('[^a-z0-9]', '', name.lower())


def _words(name: str) -> list[str]:
    """Return the words of a name in small letters: ``'TrainData_v2'`` has train, data, v2, ``'val2017'`` val, 2017. A
    word with a number is one word (``v2``, ``oidv6``), unless it names a split or a kind of content (``images2``)."""
    name = re.sub('leftImg8bit|imgsFine', 'images', name).replace('gtFine', 'gt')  # of Cityscapes
    spaced = re.sub(r'(?<=[a-z0-9])(?=[A-Z])', ' ', name).lower()
    words: list[str] = []
    for chunk in re.findall(r'[^\W\d_]+\d*|\d+', _JOINED.sub(r'\1 \2', spaced)):
        word = chunk.rstrip('0123456789')
        is_known = word in _SPLITS or word in _ROLES
        words += [word, chunk[len(word) :]] if is_known else [chunk]
    return list(filter(None, words))


def has_role_only(name: str) -> bool:
    """Return True for a name of generic words (images, labels, part, ...) and numbers only, as ``images_part_1``."""
    words = [word for word in _words(name) if not any(map(str.isdigit, word))]
    return bool(words) and all(word in _ROLES for word in words)


def without_split(name: str) -> str:
    """Return a name in small letters without words for splits and other signs: ``'trainMasks'`` is ``'masks'``."""
    return ''.join(word for word in _words(name) if word not in _SPLITS)


def split_in(name: str) -> Optional[str]:
    """Return 'train', 'val' or 'test' for a name that consists of a word for a split, of roles and of numbers."""
    words = [word for word in _words(name) if word in _SPLITS or not any(map(str.isdigit, word))]
    found = {_SPLITS[word] for word in words if word in _SPLITS}
    return found.pop() if len(found) == 1 and all(word in _SPLITS or word in _ROLES for word in words) else None


def _template(name: str) -> tuple[str, Optional[str]]:
    """Return a name with its word for a split replaced by ``*``, and the split."""
    words = _words(name)
    found = [word for word in words if word in _SPLITS]
    if len(found) != 1:
        return name, None
    return ' '.join('*' if word in _SPLITS else word for word in words), _SPLITS[found[0]]


def _splits_by_template(names: Iterable[str]) -> dict[str, set]:
    """Return the splits that names give, by the template of :func:`_template`: ``{'seg_*': {'train', 'test'}}``."""
    found: dict[str, set] = {}
    for template, split in map(_template, names):
        if split:
            found.setdefault(template, set()).add(split)
    return found


class Splits:
    """Splits by names of folders and files.

    A folder or file names a split by its words alone (:func:`split_in`), or if another one differs by that word only
    (``seg_train`` and ``seg_test``). A file names one by its first or last word too.

    Args:
        folders: Names of all folders of the data set.
        files: Names of files with labels or lists, without suffix.
    """

    def __init__(self, folders: Iterable[str], files: Iterable[str] = ()):
        self._folders, self._files = _splits_by_template(folders), _splits_by_template(files)

    def of_folder(self, name: str) -> Optional[str]:
        template, split = _template(name)
        return split_in(name) or (split if len(self._folders.get(template, ())) > 1 else None)

    def of_file(self, stem: str) -> Optional[str]:
        template, split = _template(stem)
        words = template.split()
        is_at_end = ' ' not in stem.strip() and '*' in (words[:1] + words[-1:])
        is_named = is_at_end or len(self._files.get(template, ())) > 1
        return self.of_folder(stem) or (split if is_named else None)

    def of(self, path: PurePath, is_file: bool = False) -> Optional[str]:
        """Return the split by the last part of a relative path that names one; the last part may be a file."""
        own = self.of_file(path.stem) if is_file else self.of_folder(path.name)
        others = map(self.of_folder, path.parts[-2::-1])
        return own or next((split for split in others if split), None)


@cache
def shared_key(folder: PurePath) -> tuple[str, ...]:
    """Return the parts of a relative folder without words for roles: equal for the folders of labels and images.
    ``labels/train/cam1``, ``images/train/cam1`` and ``train/annotations/cam1`` have the key ``('train', 'cam1')``."""
    kept = (' '.join(_SPLITS.get(word, word) for word in _words(part) if word not in _ROLES) for part in folder.parts)
    return tuple(filter(None, kept))


def of_split(split: Optional[str]) -> str:
    """Return the split in brackets for messages, or ''."""
    return f' ({split})' if split else ''


def composed(name: str) -> str:
    """Return a class name in Unicode's composed form: macOS decomposes the names of folders."""
    return unicodedata.normalize('NFC', name)


def some(names: Iterable[str], count: int = 12) -> str:
    """Return a text with the first ``count`` names, and the number of the others."""
    listed = list(names)
    rest = f' and {len(listed) - count} more' if len(listed) > count else ''
    return ', '.join(listed[:count]) + rest
