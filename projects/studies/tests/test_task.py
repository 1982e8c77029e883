# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Images of the studies."""

import numpy as np
import torch

from projects.studies.task import Settings, draw


def test_pictures_are_those_of_the_seed():
    """Independent of other random numbers and of the number of images."""
    images, labels = draw(3, Settings(), 1)
    assert images.dtype == torch.uint8 and images.shape == (3, 3, Settings().size, Settings().size)
    np.random.rand(3), torch.rand(3)
    more, other = draw(4, Settings(), 1), draw(3, Settings(), 2)
    assert torch.equal(images, more[0][:3]) and torch.equal(labels, more[1][:3])
    assert all(not torch.equal(one, two) for one in images for two in other[0])
