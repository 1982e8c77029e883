# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import numpy as np

from mmlinattn.tooling.datasets import draw_scene


def scene(seed, size, **options):
    return draw_scene(np.random.default_rng(seed), size, **options)


def test_masks_are_the_visible_pixels():
    """Compare two scenes of one seed; without the last shape, only its pixels differ."""
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
