# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What the layouts share: encoding images, and which of them show no shapes."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np

JPEG_QUALITY = 95
EMPTY_EVERY, FIRST_EMPTY = 20, 4  # images 4, 24, 44, ...: even a small set has an empty one


def is_empty(number: int) -> bool:
    """Whether the ``number``-th image of a split (from 1) shows a background only."""
    return number % EMPTY_EVERY == FIRST_EMPTY


def save_jpeg(path: Path, image: np.ndarray) -> None:
    """Write an ``(H, W, 3)`` uint8 RGB image.

    Raises:
        OSError: The file cannot be written (``cv2.imwrite`` would only return False).
    """
    _save(path, '.jpg', image[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])


def save_png(path: Path, image: np.ndarray) -> None:
    """Write an ``(H, W)`` uint8 map of labels. Raises ``OSError`` as ``save_jpeg`` does."""
    _save(path, '.png', image, [])


def _save(path: Path, suffix: str, image: np.ndarray, params: list[int]) -> None:
    _, encoded = cv2.imencode(suffix, image, params)
    path.write_bytes(encoded.tobytes())
