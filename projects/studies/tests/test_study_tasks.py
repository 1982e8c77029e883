# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What the tasks draw, ask for and count."""

import cv2
import numpy as np
import pytest
import torch

from projects.studies.tasks import TASKS, Settings


@pytest.mark.parametrize('name', TASKS)
def test_pictures_are_those_of_the_seed(name):
    """Whatever else is drawn, and however many there are."""
    task = TASKS[name]
    images, targets = task.draw(3, Settings(), 1)
    assert images.dtype == torch.uint8 and images.shape == (3, 3, Settings().size, Settings().size)
    np.random.rand(3), torch.rand(3)
    more, other = task.draw(4, Settings(), 1), task.draw(3, Settings(), 2)
    assert torch.equal(images, more[0][:3]) and torch.equal(targets, more[1][:3])
    assert all(not torch.equal(one, two) for one in images for two in other[0])


@pytest.mark.parametrize('name', TASKS)
def test_mirroring(name):
    """Twice is as it was; only the images asked for, with what lies in them."""
    task, which = TASKS[name], torch.tensor([True, False] * 3)
    images, targets = task.draw(6, Settings(), 0)
    turned, moved = task.mirrored(images, targets, which)
    assert torch.equal(turned[::2], images[::2].flip(-1)) and torch.equal(turned[1::2], images[1::2])
    assert torch.equal(moved[1::2], targets[1::2])
    back = task.mirrored(turned, moved, which)
    assert torch.equal(back[0], images)
    torch.testing.assert_close(back[1], targets, rtol=0, atol=1e-4)
    side = Settings().size
    if name == 'recall':
        torch.testing.assert_close(moved[::2, :, 0], side - targets[::2, :, 0])


def test_recall_asks_for_the_spot_of_the_disc_in_the_same_colour():
    """Seen again in the images: at each place a disc without a spot, and one more of its colour around the answer."""
    task = TASKS['recall']
    images, targets = task.draw(8, Settings(), 0)
    palette = torch.tensor(task.palette).float()
    others = 0
    for picture, points in zip(*task.mirrored(images, targets, torch.tensor([True, False] * 4))):
        pixels = picture.permute(1, 2, 0).float()
        rows, columns = torch.meshgrid(torch.arange(64) + 0.5, torch.arange(64) + 0.5, indexing='ij')
        distance, colour = torch.cdist(pixels.flatten(0, 1), palette).view(64, 64, 6).min(dim=-1)
        answers, discs = [], []
        for x, y, label in points.tolist():
            away = ((rows - y) ** 2 + (columns - x) ** 2).sqrt()
            own = colour[away < 5].mode().values
            assert (colour[away < 5] == own).float().mean() > 0.95 and distance[away < 5].mean() < 40  # no spot
            ring = (colour == own) & (distance < 40) & (away > 9)
            around = [colour[int(v) - 1 : int(v) + 2, int(u) - 1 : int(u) + 2] for u, v in middles(ring)]
            assert int(label) in [patch.flatten().mode().values.item() for patch in around]
            answers.append(int(label))
            discs.append(int(own))
        assert len(set(answers)) == len(set(discs)) == 4
        others += set(answers) != set(discs)
    assert others >= 4  # of 8: the spots' colours are drawn for themselves


def middles(mask):
    """Of the pieces of a mask that are as large as a disc, or its ring."""
    _, _, boxes, _ = cv2.connectedComponentsWithStats(mask.numpy().astype('uint8'), connectivity=8)
    return [(x + w / 2, y + h / 2) for x, y, w, h, _ in boxes[1:] if min(w, h) >= 10]
