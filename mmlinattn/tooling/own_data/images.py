# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Inspect images: size, orientation, pages, pixel format, and masks among them."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Optional

import cv2
import numpy as np
from PIL import Image, ImageSequence

from ...engine.data.files import oriented_size
from ...utils.errors import RunError, described

_JPEG = ('.jpg', '.jpeg', '.jfif')
SUFFIXES = (*_JPEG, '.png', '.bmp', '.tif', '.tiff', '.webp')
MASKS_ONLY = ('.gif',)  # read by Pillow, as masks are, and not by OpenCV
_SEVERAL_PAGES = ('.tif', '.tiff', '.webp')
_NODATA, _SUBFILE, _ORIENTATION = 42113, 254, 274  # TIFF and EXIF tags
_NUM_READ = 50  # images that are decoded to infer their format
_MOST_VALUES = 64  # of a mask
_TAIL = 1 << 15  # bytes in which the end of an image is sought


def image_size(path: Path) -> tuple[int, int]:
    """Return width and height of an image from its header, after applying its EXIF orientation."""
    try:
        return oriented_size(path)
    except Exception as error:  # Pillow's plugins raise anything at a broken file
        raise RunError(f'{path} is no image that can be read: {described(error)}') from error


def end_of(path: Path) -> bytes:
    """Return the last bytes of a file."""
    with path.open('rb') as file:
        file.seek(-min(path.stat().st_size, _TAIL), 2)
        return file.read()


def check_whole(path: Path) -> None:
    """Raise an error if a file is no image, or is truncated, by its header and its end."""
    image_size(path)
    tail = end_of(path)
    ends = {'.png': b'IEND', '.jpg': b'\xff\xd9', '.jpeg': b'\xff\xd9'}
    if ends.get(path.suffix.lower(), b'') in tail:
        return
    try:
        with Image.open(path) as image:
            image.load()
    except Exception as error:  # Pillow's plugins raise anything at a broken file
        raise RunError(f'{path} is truncated: {described(error)}') from error


def is_mask(path: Path) -> bool:
    """Return True for an image with few different values, which is taken as a segmentation mask; False for JPEG."""
    if path.suffix.lower() in _JPEG:
        return False
    try:
        with Image.open(path) as image:
            pixels = np.asarray(image)
    except Exception:  # no image: its reader reports it
        return False
    flat = pixels.reshape(pixels.shape[0] * pixels.shape[1], -1)
    return len(np.unique(flat[:: max(1, len(flat) // 65536)], axis=0)) <= _MOST_VALUES


def file_notes(paths: Iterable[Path], are_drawn_on: bool = False) -> list[str]:
    """Return notes on image files: pages that loaders do not read, the nodata value, and EXIF rotations.
    ``are_drawn_on``: labels are drawn on these images, so that EXIF rotations matter."""
    found: dict[tuple[str, str], list[Path]] = {}
    for path in paths:
        has_pages = path.suffix.lower() in _SEVERAL_PAGES
        if not has_pages and not (are_drawn_on and path.suffix.lower() in _JPEG):
            continue
        with suppress(Exception), Image.open(path) as image:
            tags = getattr(image, 'tag_v2', {})
            nodata = str(tags.get(_NODATA, '')).strip(' \0')
            if nodata:
                found.setdefault((f'files say that {nodata} means no data', 'it is read as a value'), []).append(path)
            # smaller copies and masks of GeoTIFF are no pages
            pages = ImageSequence.Iterator(image) if has_pages else ()
            if [getattr(page, 'tag_v2', {}).get(_SUBFILE, 0) & 5 for page in pages].count(0) > 1:
                found.setdefault(('files have several pages', 'the first is read'), []).append(path)
            if not has_pages and image.getexif().get(_ORIENTATION, 1) > 1:
                meaning = 'labels are taken as drawn on the turned image, as loaders turn it'
                found.setdefault(('images are turned by EXIF', meaning), []).append(path)
    return [f'{len(files)} {said}, as {files[0].name}: {meaning}' for (said, meaning), files in found.items()]


class ImageFormat(NamedTuple):
    """Format of the images of a data set, inferred from a sample.

    Attributes:
        width, height: Medians in pixels.
        channels: Channels as read.
        mean, std: Statistics of each channel, colours as BGR; None for those of ImageNet.
        notes: Lines for the user.
    """

    width: int
    height: int
    channels: int
    mean: Optional[list[float]]
    std: Optional[list[float]]
    notes: list[str]


def image_format(paths: list[Path], channels: Optional[int] = None) -> ImageFormat:
    """Infer the image format from a sample.

    8-bit images, grey, RGB or both, are read as RGB to fit the released weights, unless ``channels`` is not 3.

    Raises:
        RunError: Other images differ in channels or dtype, or from ``channels``; or a file is unreadable or not finite.
    """
    found = []
    for path in paths[:: -(-len(paths) // _NUM_READ)]:
        image = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
        if image is None:
            raise RunError(f'{path} is no image that OpenCV can read, which takes up to four channels.')
        image = image[..., None] if image.ndim == 2 else image
        is_opaque = image.shape[2] == 4 and image.dtype == np.uint8 and bool((image[..., 3] == 255).all())
        values = image.reshape(-1, image.shape[2])[:: max(1, image[..., 0].size // 4096)]
        found.append((path, image_size(path), values, is_opaque))
    width, height = (int(side) for side in np.median([size for _, size, *_ in found], axis=0))
    # drop a fourth channel of 255 everywhere in all images
    drops = channels != 4 and all(is_opaque for *_, values, is_opaque in found if values.shape[1] == 4)
    pixels = [values[:, :3] if drops else values for *_, values, _ in found]
    kinds = {(values.shape[1], str(values.dtype)): path for (path, *_), values in reversed([*zip(found, pixels)])}
    allowed = (1, 3) if channels is None else (1, 3, 4)
    if channels in (None, 3) and all(count in allowed and dtype == 'uint8' for count, dtype in kinds):
        grey = any(count == 1 for count, _ in kinds)
        notes = ['grey images are read as three equal channels (--channels 1: as one, without weights)'] * grey
        return ImageFormat(width, height, 3, None, None, notes)
    listed = ', '.join(f'{path.name} {count} channel(s) of {dtype}' for (count, dtype), path in kinds.items())
    if len(kinds) > 1:
        raise RunError(
            f'the images are of several forms ({listed}): make them one, or read all as RGB by --channels 3.'
        )
    count = next(iter(kinds))[0]
    if channels not in (None, count):
        raise RunError(f'--channels {channels}: the images have others ({listed}).')
    values = np.concatenate(pixels).astype(np.float64)
    if not np.isfinite(values).all():
        raise RunError(f'the images ({listed}) have values that are NaN or infinite.')
    mean, std = values.mean(0).round(3).tolist(), np.maximum(values.std(0), 1e-3).round(3).tolist()
    notes = [f'{listed}: with their own mean and std, without released weights']
    return ImageFormat(width, height, count, mean, std, notes)
