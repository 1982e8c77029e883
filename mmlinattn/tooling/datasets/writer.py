# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Write a synthetic data set atomically."""

import json
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable

import numpy as np

from .layouts import LAYOUTS

SPLITS = ('train', 'val')
MIN_SIDE, MAX_SIDE = 64, 8192
NOTE, STAGING = '.shapes_dataset.json', '.partial'

GENERATOR_VERSION = 7  # raise it if the same arguments give other images or annotations


class SettingError(ValueError):
    """Raised for a setting out of range."""


@dataclass(frozen=True)
class DatasetSpec:
    """Settings of a synthetic data set.

    Args:
        format: ``'coco'``, ``'ade'`` or ``'imagenet'``.
        num_train, num_val: Images for training and validation, at least 1.
        seed: At least 0. An image depends on the seed, its split and its number only.
        size: Width and height in pixels, each in ``[MIN_SIDE, MAX_SIDE]``.
        size_jitter: Largest fraction, in [0, 0.5], by which width and height are reduced, drawn for each image.

    Raises:
        SettingError: An argument is out of range.
    """

    format: str
    num_train: int
    num_val: int
    seed: int = 0
    size: tuple[int, int] = (160, 160)
    size_jitter: float = 0.0

    def __post_init__(self):
        sides = f'a width and a height from {MIN_SIDE} to {MAX_SIDE} pixels'
        for name, fits, allowed in (
            ('format', self.format in LAYOUTS, f'one of {tuple(LAYOUTS)}'),
            ('num_train', self.num_train >= 1, 'at least 1'),
            ('num_val', self.num_val >= 1, 'at least 1'),
            ('seed', self.seed >= 0, 'at least 0'),
            ('size', len(self.size) == 2 and all(MIN_SIDE <= side <= MAX_SIDE for side in self.size), sides),
            ('size_jitter', 0 <= self.size_jitter <= 0.5, 'a number from 0 to 0.5'),
        ):
            if not fits:
                raise SettingError(f'{name}={getattr(self, name)!r}: expected {allowed}.')


def write_dataset(out: str | Path, spec: DatasetSpec, on_image: Callable[[], Any] = lambda: None) -> bool:
    """Write a synthetic data set; call ``on_image`` after each image.

    Files are written to a hidden folder inside ``out`` and moved to ``out`` at the end; the file with the settings
    ``spec`` is moved last. Other files are never changed or removed.

    Returns:
        False if ``out`` already holds this data set, True if it was written.

    Raises:
        FileExistsError: ``out`` has other content.
        OSError: ``out`` cannot be written.
    """
    out, staging, layout = Path(out), Path(out, STAGING), LAYOUTS[spec.format]
    content = {'made_by': 'mmlinattn', 'generator': GENERATOR_VERSION, **asdict(spec), 'size': list(spec.size)}
    with suppress(FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError):
        if json.loads((out / NOTE).read_text())['content'] == content:
            return False
    is_new = not out.exists()
    held = [] if is_new else sorted(path.name for path in out.iterdir() if path.name != STAGING)
    if held:
        found = 'a data set of other settings' if NOTE in held else held[0]
        raise FileExistsError(f'it holds {found}, and has to be empty')
    shutil.rmtree(staging, ignore_errors=True)  # of a run that was killed
    try:
        for folder in layout.folders:
            (staging / folder).mkdir(parents=True)
        records: dict[str, list] = {split: [] for split in SPLITS}
        for split, count in zip(SPLITS, (spec.num_train, spec.num_val)):
            for number in range(1, count + 1):
                rng = np.random.default_rng([spec.seed, SPLITS.index(split), number])
                records[split].append(layout.write_image(staging, split, number, rng, _size(spec, rng)))
                on_image()
        layout.write_index(staging, records)
        (staging / NOTE).write_text(json.dumps(dict(content=content), indent=1) + '\n')
        for path in sorted(staging.iterdir(), key=lambda path: path.name == NOTE):
            path.rename(out / path.name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if is_new and out.is_dir() and not any(out.iterdir()):
            out.rmdir()
    return True


def _size(spec: DatasetSpec, rng: np.random.Generator) -> tuple[int, int]:
    """Draw the width and height of an image."""
    if not spec.size_jitter:
        return spec.size
    width, height = np.rint(np.array(spec.size) * (1 - rng.uniform(0, spec.size_jitter, 2)))
    return max(MIN_SIDE, int(width)), max(MIN_SIDE, int(height))
