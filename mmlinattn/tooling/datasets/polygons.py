# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Masks to COCO polygons that rasterise back to the very same mask.

By hand because pycocotools only goes from polygons to masks, and OpenCV's contours run through the middles of pixels,
which loses half a pixel on every side.
"""

from __future__ import annotations

import cv2
import numpy as np


def mask_to_polygons(mask: np.ndarray) -> list[list[int]]:
    """Trace the edges of the pixels of a mask.

    The polygons run along pixel edges, at whole coordinates with pixel ``(r, c)`` covering
    ``[c, c + 1] x [r, r + 1]``, as pycocotools reads them: it rasterises them to exactly ``mask``.
    COCO's polygons have no holes, so a region with a hole is cut through it into more polygons.

    Args:
        mask: ``(H, W)`` bool or uint8.

    Returns:
        Polygons ``[x0, y0, x1, y1, ...]``, at least four corners each; none for an empty mask.
    """
    mask = np.ascontiguousarray(mask, np.uint8)
    # Regions that touch at a corner only stay apart: no polygon touches itself from outside.
    count, regions = cv2.connectedComponents(mask, connectivity=4)
    polygons = []
    for region in range(1, count):
        polygons += _trace_region((regions == region).astype(np.uint8))
    return polygons


def _trace_region(region: np.ndarray) -> list[list[int]]:
    # Enlarged twice, the pixels of a contour lie on the two sides of the edges between the
    # original pixels, and (x + 1) // 2 maps both sides of an edge to its coordinate.
    doubled = region.repeat(2, axis=0).repeat(2, axis=1)
    contours, hierarchy = cv2.findContours(doubled, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_NONE)
    outer = next(i for i, node in enumerate(hierarchy[0]) if node[3] < 0)
    hole = hierarchy[0][outer][2]
    if hole < 0:
        return [_corners((contours[outer][:, 0] + 1) // 2)]
    x, _, width, _ = cv2.boundingRect(contours[hole])
    # The border of a hole is traced on the pixels around it, one to each side.
    cut = (x + width // 2 + 1) // 2
    polygons = []
    for part in (slice(None, cut), slice(cut, None)):
        half = np.zeros_like(region)
        half[:, part] = region[:, part]
        polygons += mask_to_polygons(half)
    return polygons


def _corners(points: np.ndarray) -> list[int]:
    """Leave out repeated points and those inside straight runs; (P, 2) to a flat list."""
    points = points[(points != np.roll(points, 1, axis=0)).any(axis=1)]
    arriving, leaving = points - np.roll(points, 1, axis=0), np.roll(points, -1, axis=0) - points
    turns = arriving[:, 0] * leaving[:, 1] != arriving[:, 1] * leaving[:, 0]
    return points[turns].ravel().tolist()
