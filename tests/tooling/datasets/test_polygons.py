# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import cv2
import numpy as np
import pytest

from mmlinattn.tooling.datasets.layouts import mask_to_polygons


def rasterise(polygons, shape):
    mask_utils = pytest.importorskip('pycocotools.mask')
    return mask_utils.decode(mask_utils.merge(mask_utils.frPyObjects(polygons, *shape))) > 0


def test_polygons_rasterise_to_exactly_the_mask():
    rng = np.random.default_rng(0)
    ring = cv2.circle(np.zeros((40, 50), np.uint8), (25, 20), 15, 1, 4)
    nested = cv2.circle(ring.copy(), (25, 20), 6, 1, 2)  # a hole with an island with a hole
    masks = [ring, nested, np.ones((4, 5)), np.eye(6), 1 - np.eye(6)]
    masks += [rng.random((17, 23)) < density for density in np.linspace(0.05, 0.95, 60)]
    for mask in masks:
        polygons = mask_to_polygons(mask)
        assert all(len(polygon) >= 8 for polygon in polygons)
        assert (rasterise(polygons, mask.shape) == (np.asarray(mask) > 0)).all()
    assert mask_to_polygons(np.zeros((5, 5))) == []
