# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import numpy as np

from mmlinattn.tooling.datasets import draw_scene
from mmlinattn.tooling.datasets.shapes import MIN_VISIBLE


def scene(seed, size, **options):
    return draw_scene(np.random.default_rng(seed), size, **options)


def test_masks_are_the_visible_pixels():
    """Two scenes from the same randomness, the second without its last shape, differ just there."""
    compared = 0
    for seed in range(40):
        more, less = (scene(seed, (120, 90), num_shapes=number) for number in (4, 3))
        assert more.image.shape == (90, 120, 3) and more.masks.shape[1:] == (90, 120)
        assert (more.masks.sum(axis=0) <= 1).all()
        if len(more.labels) != 4:
            continue
        top = more.masks[3]
        assert (more.masks[:3] == less.masks & ~top).all()
        compared += (less.masks & top).any()
    assert compared >= 5  # occlusions did occur


def test_mostly_hidden_shapes_are_not_drawn():
    """Shapes of one form and size: no visible area falls far below the largest one."""
    for seed in range(30):
        drawn = scene(seed, (160, 160), num_shapes=6, kinds=['disc'], diameters=(0.4, 0.4))
        smallest_disc = np.pi * 32**2 * np.exp(-0.12)
        assert (drawn.masks.sum(axis=(1, 2)) >= 0.98 * MIN_VISIBLE * smallest_disc).all()
