# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Backgrounds and fills of the synthetic images.

Colours are float RGB in ``[0, 255]``. A background stays within a narrow range of colours, so
that a shape which contrasts with its two end colours contrasts with all of it.
"""

from __future__ import annotations

import colorsys

import cv2
import numpy as np

BACKGROUNDS = ('gradient', 'clouds', 'stripes', 'checker')
FILLS = ('plain', 'striped')

# Euclidean RGB distances. A background's two colours differ by about `BACKGROUND_SPREAD`; a shape
# keeps `FOREGROUND_CONTRAST` from both of them and `NEIGHBOUR_CONTRAST` from the other shapes.
BACKGROUND_SPREAD = (25.0, 65.0)
FOREGROUND_CONTRAST = 110.0
NEIGHBOUR_CONTRAST = 75.0
BAND_STRENGTH = 0.45  # of a striped fill's bands: 0 would not show, 1 is black or white


def draw_background(
    rng: np.random.Generator, size: tuple[int, int], kind: str, muted: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Draw one background.

    Args:
        rng: Source of randomness.
        size: Width and height in pixels.
        kind: One of ``BACKGROUNDS``.
        muted: Pale, and of a colour typical of the kind, in place of any colour. The mean colour of an image is by
            far its strongest signal: where it is random, small models spend their first hundreds of iterations on
            not heeding it.

    Returns:
        The image, ``(H, W, 3)`` float32, and its two end colours, ``(2, 3)``.
    """
    width, height = size
    first = _pale(rng, kind) if muted else rng.uniform(20, 235, 3)
    direction = rng.normal(size=3)
    step = direction / np.linalg.norm(direction) * rng.uniform(*BACKGROUND_SPREAD)
    second = np.clip(first + step, 0, 255)
    mix = _MIXES[kind](rng, width, height).astype(np.float32)[..., None]
    picture = first.astype(np.float32) * (1 - mix) + second.astype(np.float32) * mix
    return picture, np.stack([first, second])


def _pale(rng: np.random.Generator, kind: str) -> np.ndarray:
    """An unsaturated colour typical of a background, ``(3,)`` RGB; hues of backgrounds are spread evenly."""
    hue = (BACKGROUNDS.index(kind) + 0.3) / len(BACKGROUNDS) + rng.normal(0, 0.03)
    return np.array(colorsys.hsv_to_rgb(hue % 1, rng.uniform(0.2, 0.45), rng.uniform(0.5, 0.9))) * 255


def _ramp(rng: np.random.Generator, width: int, height: int) -> np.ndarray:
    """Signed distance in pixels from a randomly turned line through the centre, (H, W)."""
    angle = rng.uniform(0, 2 * np.pi)
    x = np.arange(width, dtype=np.float32) - width / 2
    y = np.arange(height, dtype=np.float32)[:, None] - height / 2
    return x * np.float32(np.cos(angle)) + y * np.float32(np.sin(angle))


def _gradient(rng, width, height):
    ramp = _ramp(rng, width, height)
    return (ramp - ramp.min()) / (np.ptp(ramp) + 1e-6)


def _clouds(rng, width, height):
    """Smooth noise of three octaves."""
    total = np.zeros((height, width), np.float32)
    for cells, weight in ((4, 1.0), (9, 0.6), (20, 0.35)):
        coarse = rng.random((cells, cells), dtype=np.float32)
        total += weight * cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
    low, high = np.percentile(total, (2, 98))
    return np.clip((total - low) / (high - low + 1e-6), 0, 1)


def _stripes(rng, width, height):
    period = min(width, height) * rng.uniform(0.05, 0.15)
    return _soft_square_wave(_ramp(rng, width, height), period)


def _checker(rng, width, height):
    angle = rng.uniform(0, np.pi / 2)
    period = min(width, height) * rng.uniform(0.1, 0.25)
    x = np.arange(width, dtype=np.float32) - rng.uniform(0, width)
    y = np.arange(height, dtype=np.float32)[:, None] - rng.uniform(0, height)
    along = x * np.float32(np.cos(angle)) + y * np.float32(np.sin(angle))
    across = y * np.float32(np.cos(angle)) - x * np.float32(np.sin(angle))
    one, two = _soft_square_wave(along, period), _soft_square_wave(across, period)
    return one * (1 - two) + two * (1 - one)


_MIXES = dict(gradient=_gradient, clouds=_clouds, stripes=_stripes, checker=_checker)


def _soft_square_wave(distance: np.ndarray, period: float) -> np.ndarray:
    """0/1 bands of half a ``period`` each, with an edge about one pixel wide."""
    phase = np.abs(np.mod(distance / period, 1.0) - 0.5)  # 0.5 at band starts, 0.25 at the edges
    return np.clip((phase - 0.25) * period + 0.5, 0, 1)


def contrasting_colour(
    rng: np.random.Generator, background: np.ndarray, neighbours: list[np.ndarray], hue: float | None = None
) -> np.ndarray:
    """A random colour that stands out from the background's colours and from the neighbours'.

    Args:
        rng: Source of randomness.
        background: ``(K, 3)`` colours to keep ``FOREGROUND_CONTRAST`` from.
        neighbours: Colours to keep ``NEIGHBOUR_CONTRAST`` from.
        hue: Typical hue in [0, 1), which colours scatter around; any colour where None.

    Returns:
        ``(3,)`` RGB; the best candidate where none of them keeps both distances.
    """
    candidates = rng.uniform(0, 255, (24, 3)) if hue is None else _of_hue(rng, hue, 24)
    margin = _distances(candidates, background).min(axis=1) / FOREGROUND_CONTRAST
    if neighbours:
        near = _distances(candidates, np.stack(neighbours)).min(axis=1) / NEIGHBOUR_CONTRAST
        margin = np.minimum(margin, near)
    good = np.flatnonzero(margin >= 1)
    return candidates[good[0] if len(good) else int(np.argmax(margin))]


def _of_hue(rng: np.random.Generator, hue: float, count: int) -> np.ndarray:
    """Saturated colours around a hue, ``(count, 3)`` RGB; those of shapes, a seventh apart, overlap a little."""
    hues = (hue + rng.normal(0, 0.05, count)) % 1
    saturation, value = rng.uniform(0.6, 1, count), rng.uniform(0.35, 1, count)
    return np.array([colorsys.hsv_to_rgb(*hsv) for hsv in zip(hues, saturation, value)]) * 255


def _distances(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    return np.linalg.norm(one[:, None] - two[None], axis=-1)


def draw_fill(
    rng: np.random.Generator,
    side: int,
    colour: np.ndarray,
    fill: str,
    diameter: float,
    band_strength: float = BAND_STRENGTH,
) -> np.ndarray:
    """Surface of one shape: lightly shaded, with darker or lighter bands where ``striped``.

    Args:
        rng: Source of randomness.
        side: Height and width of the patch in pixels.
        colour: ``(3,)`` RGB.
        fill: One of ``FILLS``.
        diameter: Size of the shape in pixels; the bands scale with it.
        band_strength: How far the bands go towards black or white, from 0 to 1.

    Returns:
        ``(side, side, 3)`` float32.
    """
    shade = 1 + rng.uniform(0, 0.12) * _ramp(rng, side, side) / (side / 2)
    patch = np.clip(colour.astype(np.float32) * shade[..., None], 0, 255)
    if fill == 'striped':
        # Bands go towards whichever of black and white is further away, so they always show.
        target = np.float32(0 if colour.mean() > 127 else 255)
        bands = _soft_square_wave(_ramp(rng, side, side), diameter * rng.uniform(0.16, 0.24))
        patch += (target - patch) * (band_strength * bands[..., None])
    return patch
