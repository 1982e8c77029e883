# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Write a synthetic data set, whole or not at all."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Callable

import cv2
import numpy as np

from . import ade, coco, imagenet
from .shapes import MAX_SIDE, MIN_SIDE
from .staging import StagedFolder

LAYOUTS = dict(coco=coco, ade=ade, imagenet=imagenet)
SPLITS = ('train', 'val')

GENERATOR_VERSION = 6
"""To be raised whenever the same arguments give other images or annotations."""


@dataclass(frozen=True)
class DatasetSpec:
    """Everything that a data set's content depends on.

    Args:
        format: ``'coco'``, ``'ade'`` or ``'imagenet'``.
        num_train: Images for training, at least 1.
        num_val: Images for validation, at least 1.
        seed: At least 0. An image depends on the seed, its split and its number only.
        size: Width and height in pixels, each in ``[MIN_SIDE, MAX_SIDE]``.
        size_jitter: Each side of an image is shortened by a random fraction from 0 to this, at
            most 0.5.

    Raises:
        ValueError: An argument is outside what is allowed above.
    """

    format: str
    num_train: int
    num_val: int
    seed: int = 0
    size: tuple[int, int] = (160, 160)
    size_jitter: float = 0.0

    def __post_init__(self):
        if self.format not in LAYOUTS:
            raise ValueError(f'format must be one of {", ".join(LAYOUTS)}, got {self.format!r}')
        for name, least in (('num_train', 1), ('num_val', 1), ('seed', 0)):
            if getattr(self, name) < least:
                raise ValueError(f'{name} must be at least {least}, got {getattr(self, name)}')
        if len(self.size) != 2 or not all(MIN_SIDE <= side <= MAX_SIDE for side in self.size):
            raise ValueError(f'size must be a width and a height from {MIN_SIDE} to {MAX_SIDE} pixels, got {self.size}')
        if not 0 <= self.size_jitter <= 0.5:
            raise ValueError(f'size_jitter must be from 0 to 0.5, got {self.size_jitter}')


def write_dataset(
    out: str | Path,
    spec: DatasetSpec,
    *,
    workers: int = 1,
    overwrite: bool = False,
    on_picture: Callable[[], Any] = lambda: None,
) -> bool:
    """Write a synthetic data set.

    The files take their places in ``out`` only once all are written; a run that is interrupted
    leaves at most a hidden folder, which the next run that draws clears away. ``out`` keeps a hidden note of
    ``spec``. A data set that this function made is replaced when ``spec`` differs.

    Args:
        out: The folder to write; made when missing.
        spec: What to write.
        workers: Processes to draw in. The result is the same for any number.
        overwrite: Replace the layout's files and folders in ``out`` even if this function did not
            make them. Other files in ``out`` stay.
        on_picture: Called after each image.

    Returns:
        False if ``out`` already holds this very data set, else True.

    Raises:
        ValueError: ``workers`` is below 1.
        FileExistsError: ``out`` has content that this function did not make.
        OSError: ``out`` cannot be written, or another process is writing it.
    """
    if workers < 1:
        raise ValueError(f'workers must be at least 1, got {workers}')
    layout = LAYOUTS[spec.format]
    note = dict(made_by='mmlinattn', generator=GENERATOR_VERSION, **asdict(spec))
    note['size'] = list(spec.size)
    folder = StagedFolder(Path(out), note)
    if folder.is_current:
        return False
    with folder:
        if folder.is_current:  # written by another process since
            return False
        folder.claim(layout.TOP_LEVEL, overwrite)
        for name in layout.FOLDERS:
            (folder.staging / name).mkdir(parents=True)
        records: dict[str, list] = {split: [] for split in SPLITS}
        for split, record in _draw_all(folder.staging, spec, workers):
            records[split].append(record)
            on_picture()
        layout.write_index(folder.staging, records)
        folder.commit(layout.TOP_LEVEL)
    return True


def _draw_all(root: Path, spec: DatasetSpec, workers: int) -> Iterator[tuple[str, Any]]:
    tasks = [
        (split, number)
        for split, count in zip(SPLITS, (spec.num_train, spec.num_val))
        for number in range(1, count + 1)
    ]
    draw = partial(_draw_one, root, spec)
    if workers == 1:
        yield from map(draw, tasks)
        return
    # Not forked: OpenCV's and PyTorch's threads do not survive a fork.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context('spawn'), _init_worker)
    try:
        yield from pool.map(draw, tasks, chunksize=16)
    finally:
        pool.shutdown(cancel_futures=True)


def _init_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops the pool
    cv2.setNumThreads(1)


def _draw_one(root: Path, spec: DatasetSpec, task: tuple[str, int]) -> tuple[str, Any]:
    split, number = task
    rng = np.random.default_rng([spec.seed, SPLITS.index(split), number])
    size = spec.size
    if spec.size_jitter:
        shortened = np.array(size) * (1 - rng.uniform(0, spec.size_jitter, 2))
        size = tuple(max(MIN_SIDE, int(side)) for side in np.rint(shortened))
    return split, LAYOUTS[spec.format].write_picture(root, split, number, rng, size)
