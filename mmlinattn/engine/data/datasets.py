# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Walk data sets, their transforms and class names; results of their checks."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional

from torch import nn

from .files import spread

MAX_NAMES = 30  # that are printed


class Finding(NamedTuple):
    """Message of a check, in one line; ``is_error`` is True if training or testing would give wrong results."""

    text: str
    is_error: bool = True


class Samples(NamedTuple):
    """Labels read from samples of a data set.

    Attributes:
        num: Number of samples read.
        labels: Labels of objects, images or pixels, each with the path of a file that has it.
        folders: Labels by the first folder below the prefix of the images.
        error: Message on an image that cannot be loaded, or ''.
        is_part: The data sets joined with this one have labels, so that it may be background only.
    """

    num: int = 0
    labels: dict[int, str] = {}
    folders: dict[str, set[int]] = {}
    error: str = ''
    is_part: bool = False


class View(NamedTuple):
    """Data set of a dataloader, without wrappers such as ``RepeatDataset``, as the checks take it.

    Attributes:
        key: Config key of its dataloader, e.g. ``'train_dataloader'``.
        dataset: The data set.
        model: Model of the run.
        samples: Labels found in some of its images.
    """

    key: str
    dataset: Any
    model: nn.Module
    samples: Samples = Samples()

    @property
    def is_training(self) -> bool:
        return self.key.startswith('train')

    @property
    def classes(self) -> list:
        return classes_of(self.dataset)


def inner_datasets(dataset: Any) -> Sequence:
    """Return the data sets inside a wrapper such as ``RepeatDataset`` or ``ConcatDataset``."""
    known = getattr(dataset, '__dict__', {})
    if isinstance(known.get('datasets'), (list, tuple)):
        return dataset.datasets
    inner = known.get('dataset', known.get('_dataset'))
    return [] if inner is None else [inner]


def all_datasets(dataset: Any) -> Iterator[Any]:
    """Yield a data set and all data sets inside it."""
    yield dataset
    for child in inner_datasets(dataset):
        yield from all_datasets(child)


def leaf_datasets(dataset: Any) -> Iterator[Any]:
    """Yield the data sets that are not wrappers, from inside all wrappers."""
    return (each for each in all_datasets(dataset) if not inner_datasets(each))


def infos_of(dataset: Any, count: Optional[int] = None) -> Iterator[dict]:
    """Yield the data info of all images, or of ``count`` evenly spaced images in each data set inside wrappers."""
    for leaf in leaf_datasets(dataset):
        if hasattr(leaf, 'get_data_info'):
            infos = map(leaf.get_data_info, range(len(leaf)) if count is None else spread(len(leaf), count))
            yield from (info for info in infos if isinstance(info, dict))


def transforms_of(dataset: Any) -> Sequence:
    """Return the transforms in the pipeline of a data set."""
    return getattr(getattr(dataset, 'pipeline', None), 'transforms', ())


def reads_local_files(*parts: Any) -> bool:
    """Return True if ``parts``, a data set and its loading transforms, read local files."""
    backends = (getattr(part, 'backend_args', None) or {} for part in parts)
    return all(backend.get('backend', 'local') == 'local' for backend in backends)


def classes_of(dataset: Any) -> list:
    """Return ``metainfo.classes`` of a data set, or an empty list if it has none."""
    meta = getattr(dataset, 'metainfo', None)  # a list, of joined data sets that differ
    names = meta.get('classes') if isinstance(meta, dict) else None
    return list(names) if isinstance(names, (list, tuple)) else []


def format_names(names: Sequence) -> str:
    """Format class names as a tuple in a config, at most :data:`MAX_NAMES` of them."""
    shown = ', '.join(repr(name) for name in names[:MAX_NAMES])
    return f'({shown}{"," if len(names) == 1 else ", ..." if len(names) > MAX_NAMES else ""})'
