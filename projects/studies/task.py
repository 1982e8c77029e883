# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Task of the studies: images drawn in memory, a classifier, and its accuracy."""

import numpy as np
import torch
from mmengine.registry import MODELS
from torch import Tensor, nn

from mmlinattn.tooling.datasets.shapes import SHAPES, draw_scene

from .arguments import Settings

QUESTION = 'name the form of the largest of three to five shapes in clutter'
CHANCE = 100 / len(SHAPES)  # accuracy of a guess, in percent


def draw(number: int, settings: Settings, seed: int) -> tuple[Tensor, Tensor]:
    """Draw images and the class of the largest shape in each.

    The largest shape covers at least 1.3 times the pixels of the second. Models thus compare distant regions.

    Args:
        number (int): Number of images.
        settings (Settings): Size of the images, and colours.
        seed (int): Seed of the random generator.

    Returns:
        tuple[Tensor, Tensor]: Images (number, 3, size, size) uint8 RGB, and labels (number,) int64.
    """
    rng, size = np.random.default_rng(seed), settings.size
    images = np.empty((number, size, size, 3), np.uint8)
    labels = np.empty(number, np.int64)
    done = 0
    while done < number:
        count = int(rng.integers(3, 6))
        scene = draw_scene(rng, (size, size), num_shapes=count, diameters=(0.2, 0.55), tinted=settings.tinted)
        areas = np.sort(scene.masks.sum(axis=(1, 2)))
        if len(areas) > 1 and areas[-1] < 1.3 * areas[-2]:
            continue
        images[done] = scene.image
        labels[done] = scene.labels[scene.masks.sum(axis=(1, 2)).argmax()]
        done += 1
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels)


class Classifier(nn.Module):
    """Classify uint8 images (B, 3, H, W) by a linear layer on the backbone's last feature map, averaged over pixels."""

    def __init__(self, backbone: dict) -> None:
        super().__init__()
        self.backbone = MODELS.build(dict(backbone))
        self.backbone.init_weights()
        self.head = nn.Conv2d(self.backbone.feature_info[-1]['channels'], len(SHAPES), 1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.backbone((images.float() - 127.5) / 64)[-1]
        return self.head(x.mean(dim=(2, 3), keepdim=True)).flatten(1)


@torch.no_grad()
def score(model: nn.Module, images: Tensor, labels: Tensor, batch: int = 128) -> float:
    """Return the top-1 accuracy in percent."""
    device = next(model.parameters()).device
    parts = zip(images.split(batch), labels.split(batch))
    return 100 * float(sum((model(x.to(device)).argmax(1).cpu() == y).sum() for x, y in parts)) / len(labels)
