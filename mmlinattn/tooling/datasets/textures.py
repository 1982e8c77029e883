# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Backgrounds, colours and fills of the synthetic images; colours are float RGB in ``[0, 255]``."""

import colorsys

import cv2
import numpy as np

BACKGROUNDS = ('gradient', 'clouds', 'stripes', 'checker')
FILLS = ('plain', 'striped')


def draw_background(rng: np.random.Generator, size: tuple[int, int], kind: str) -> tuple[np.ndarray, list[np.ndarray]]:
    """Draw a background ``(H, W, 3)``, float32, in a pale colour that is typical of its type, one of ``BACKGROUNDS``.
    Return it with its two colours.

    With random mean colours, small models would need hundreds of iterations more.
    """
    hue = (BACKGROUNDS.index(kind) + 0.3) / len(BACKGROUNDS) + rng.normal(0, 0.03)
    saturation, value = rng.uniform(0.2, 0.45), rng.uniform(0.5, 0.9)
    ends = [_rgb(hue, saturation, value), _rgb(hue, saturation, value * rng.uniform(0.75, 0.92))]
    mix = _mix(rng, size, kind)[..., None]
    return (ends[0] * (1 - mix) + ends[1] * mix).astype(np.float32), ends


def _rgb(hue: float, saturation: float, value: float) -> np.ndarray:
    return np.array(colorsys.hsv_to_rgb(hue % 1, saturation, value)) * 255


def _mix(rng: np.random.Generator, size: tuple[int, int], kind: str) -> np.ndarray:
    """Return the weight of the second colour in each pixel of a background, ``(H, W)`` in [0, 1]."""
    if kind == 'clouds':
        return cv2.resize(rng.random((9, 9)), size, interpolation=cv2.INTER_CUBIC).clip(0, 1)
    angle = rng.uniform(0, 2 * np.pi)
    ramp = _ramp(size, angle)
    if kind == 'gradient':
        return (ramp - ramp.min()) / np.ptp(ramp)
    period = min(size) * rng.uniform(0.08, 0.2)
    one = _bands(ramp, period)
    if kind == 'stripes':
        return one
    two = _bands(_ramp(size, angle + np.pi / 2), period)
    return one * (1 - two) + two * (1 - one)


def _ramp(size: tuple[int, int], angle: float) -> np.ndarray:
    """Return the signed distance in pixels from a rotated line through the centre, ``(H, W)``."""
    x, y = (np.arange(side) - side / 2 for side in size)
    return x * np.cos(angle) + y[:, None] * np.sin(angle)


def _bands(distance: np.ndarray, period: float) -> np.ndarray:
    """Return bands of 0 and 1, each half a ``period`` wide, with edges of about one pixel."""
    phase = np.abs(np.mod(distance / period, 1.0) - 0.5)  # 0.5 at band starts, 0.25 at the edges
    return np.clip((phase - 0.25) * period + 0.5, 0, 1)


def contrasting_colour(rng: np.random.Generator, others: list[np.ndarray], hue: float | None) -> np.ndarray:
    """Draw eight random colours, of ``hue`` if given, and return the one (3,) that differs most from ``others``."""
    if hue is None:
        candidates = rng.uniform(0, 255, (8, 3))
    else:
        shades = zip(hue + rng.normal(0, 0.05, 8), rng.uniform(0.6, 1, 8), rng.uniform(0.35, 1, 8))
        candidates = np.stack([_rgb(*shade) for shade in shades])
    distances = np.linalg.norm(candidates[:, None] - np.stack(others), axis=-1).min(axis=1)
    return candidates[distances.argmax()]


def draw_fill(
    rng: np.random.Generator, size: tuple[int, int], colour: np.ndarray, fill: str, diameter: float
) -> np.ndarray:
    """Return the texture of a shape of ``diameter`` pixels: ``(H, W, 3)``, or ``(3,)`` if it has one colour."""
    if fill == 'plain':
        return colour
    # bands towards the further of black and white are always visible
    target = 0 if colour.mean() > 127 else 255
    bands = _bands(_ramp(size, rng.uniform(0, 2 * np.pi)), diameter * rng.uniform(0.16, 0.24))
    return colour + (target - colour) * (0.9 * bands[..., None])
