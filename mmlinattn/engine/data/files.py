# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Open images, read their sizes, and choose evenly spaced samples."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from PIL import Image

_ROTATED = (5, 6, 7, 8)  # values of the EXIF orientation
_ORIENTATION = 274


def spread(length: int, count: int) -> list[int]:
    """Return up to ``count`` evenly spaced indices below ``length``, in a fixed random order.

    So the first few indices are spread out, too.
    """
    chosen = np.unique(np.linspace(0, max(length - 1, 0), min(length, count)).round().astype(int))
    return [int(i) for i in np.random.default_rng(0).permutation(chosen)]


@contextmanager
def open_image(path: Any) -> Iterator[Image.Image]:
    """Open an image with Pillow, without its limit on the number of pixels.

    OpenMMLab's transforms read images with OpenCV, which accepts such sizes.
    """
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        with Image.open(path) as image:
            yield image
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def oriented_size(path: Any, turns: bool = True) -> tuple[int, int]:
    """Return width and height of an image in pixels from its header; ``turns`` applies the EXIF rotation. Pillow's
    plugins raise errors of any type for a broken file."""
    with open_image(path) as image:
        is_turned = turns and image.getexif().get(_ORIENTATION) in _ROTATED
        return image.size[::-1] if is_turned else image.size
