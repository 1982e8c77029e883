# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The tasks of the small models of a study: images drawn in memory, a head, a loss and a score."""

from typing import NamedTuple

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from mmengine.registry import MODELS
from torch import Tensor, nn

from mmlinattn.tooling.datasets.shapes import SHAPES, draw_scene


class Settings(NamedTuple):
    """The settings that all arms of a study share.

    Attributes:
        iterations, batch: Steps and images a step.
        num_train, num_val: Images; the training ones are mirrored at random.
        size: Side of an image in pixels.
        lr: Peak learning rate of AdamW (weight decay 0.05), after a warm-up over 5 % of the steps, then a cosine to 0.
        tinted: Fraction of the shapes in a colour typical of their form; with all of them, colours alone would do.
    """

    iterations: int = 300
    batch: int = 32
    num_train: int = 4096
    num_val: int = 512
    size: int = 64
    lr: float = 2e-3
    tinted: float = 0.5


class Task:
    """Base of the tasks.

    Attributes:
        what (str): What is asked, for the help and the table.
        chance (float): Accuracy of a guess, in percent.
        unused (tuple[str]): Settings without a meaning here.
    """

    what: str
    chance: float
    unused: tuple = ()

    def draw(self, number: int, settings: Settings, seed: int) -> tuple[Tensor, Tensor]:
        """Images (number, 3, size, size) uint8 and targets (number, ...)."""
        raise NotImplementedError

    def mirrored(self, images: Tensor, targets: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        """The images where ``which`` (number,) is true mirrored, with their targets."""
        return torch.where(which[:, None, None, None], images.flip(-1), images), targets

    def build(self, backbone: dict) -> nn.Module:
        """A model of images, (B, 3, size, size) uint8, with initial weights."""
        raise NotImplementedError

    def loss(self, model: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
        raise NotImplementedError

    def score(self, model: nn.Module, images: Tensor, targets: Tensor, batch: int = 128) -> float:
        """In percent, of a model in eval mode."""
        raise NotImplementedError


def _normalised(images: Tensor) -> Tensor:
    return (images.float() - 127.5) / 64


class Classifier(nn.Module):
    """A backbone's last map and a linear layer: of its mean, (B, classes), or at each place, (B, classes, h, w)."""

    def __init__(self, backbone: dict, num_classes: int, pooled: bool = True) -> None:
        super().__init__()
        self.backbone = MODELS.build(dict(backbone))
        self.backbone.init_weights()
        self.pooled = pooled
        self.head = nn.Conv2d(self.backbone.feature_info[-1]['channels'], num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.backbone(_normalised(images))[-1]
        return self.head(x.mean(dim=(2, 3), keepdim=True)).flatten(1) if self.pooled else self.head(x)


class Largest(Task):
    """Name the form of the largest of three to five shapes in clutter: tell forms apart, and compare places.

    The largest one covers at least 1.3 times the pixels of the next.
    """

    what = 'name the form of the largest of three to five shapes in clutter'
    chance = 100 / len(SHAPES)

    def draw(self, number, settings, seed):
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
        return _channels_first(images), torch.from_numpy(labels)

    def build(self, backbone):
        return Classifier(backbone, len(SHAPES))

    def loss(self, model, images, targets):
        return F.cross_entropy(model(images), targets, label_smoothing=0.1)

    @torch.no_grad()
    def score(self, model, images, targets, batch=128):
        """Top-1."""
        device = next(model.parameters()).device
        parts = zip(images.split(batch), targets.split(batch))
        return 100 * float(sum((model(x.to(device)).argmax(1).cpu() == y).sum() for x, y in parts)) / len(targets)


class Recall(Task):
    """Associative recall: four discs have a spot, four others have not; name, at each of these, the colour of the spot
    of the disc that has its colour.

    Colours of discs and of spots are drawn independently from the palette, four of each. Places are random: the answer
    lies elsewhere in the image, a different place for each of the four. A model that knows which spots there are, and
    not which is whose, gets one in four right. Targets are (number, 4, 3): x, y and label.
    """

    what = 'four discs with and four without a spot: name at each of these the spot of the disc that has its colour'
    palette = ((220, 40, 40), (40, 180, 60), (50, 80, 230), (235, 210, 40), (200, 60, 210), (50, 210, 220))
    pairs = 4
    chance = 100 / pairs
    unused = ('tinted',)

    def draw(self, number, settings, seed):
        rng, size = np.random.default_rng(seed), settings.size
        colours = np.array(self.palette)
        images = np.empty((number, size, size, 3), np.uint8)
        targets = np.empty((number, self.pairs, 3), np.float32)
        radius = 0.1 * size
        shift = 4  # OpenCV's circles in sixteenths of a pixel
        for image, target in zip(images, targets):
            canvas = np.full((size, size, 3), rng.integers(90, 150), np.int16)
            outer, inner = (rng.permutation(len(colours))[: self.pairs] for _ in range(2))
            places = _apart(rng, 2 * self.pairs, size, radius)
            for i, place in enumerate(places):
                at = tuple(int(round(value * 2**shift)) for value in place - 0.5)  # pixels' centres are whole numbers
                discs = [(1.0, outer[i % self.pairs])] + ([(0.5, inner[i])] if i < self.pairs else [])
                for scale, colour in discs:
                    cv2.circle(canvas, at, int(scale * radius * 2**shift), colours[colour].tolist(), -1, shift=shift)
            image[:] = np.clip(np.rint(canvas + rng.normal(0, 12, canvas.shape)), 0, 255)
            target[:, :2], target[:, 2] = places[self.pairs :], inner
        return _channels_first(images), torch.from_numpy(targets)

    def mirrored(self, images, targets, which):
        turned = torch.cat((images.shape[-1] - targets[..., :1], targets[..., 1:]), dim=-1)
        return super().mirrored(images, targets, which)[0], torch.where(which[:, None, None], turned, targets)

    def build(self, backbone):
        return Classifier(backbone, len(self.palette), pooled=False)

    def loss(self, model, images, targets):
        logits = self._at(model(images), images, targets)
        return F.cross_entropy(logits, targets[..., 2].flatten().long(), label_smoothing=0.1)

    @torch.no_grad()
    def score(self, model, images, targets, batch=128):
        """Share of the discs without a spot that are named rightly."""
        device, right = next(model.parameters()).device, 0
        for x, y in zip(images.split(batch), targets.split(batch)):
            found = self._at(model(x.to(device)), x, y.to(device)).argmax(1).cpu()
            right += int((found == y[..., 2].flatten()).sum())
        return 100 * right / (len(targets) * self.pairs)

    @staticmethod
    def _at(logits: Tensor, images: Tensor, targets: Tensor) -> Tensor:
        """Logits of the cells that the points lie in, (B * points, classes)."""
        height, width = logits.shape[-2:]
        column = (targets[..., 0] * width / images.shape[-1]).long().clamp(0, width - 1)
        row = (targets[..., 1] * height / images.shape[-2]).long().clamp(0, height - 1)
        cells = (row * width + column)[:, None].expand(-1, logits.shape[1], -1)
        return logits.flatten(2).gather(2, cells).transpose(1, 2).flatten(0, 1)


def _apart(rng: np.random.Generator, number: int, size: int, radius: float) -> np.ndarray:
    """Centres (number, 2) of discs in the image that do not touch."""
    places: list[np.ndarray] = []
    while len(places) < number:
        place = rng.uniform(radius + 1, size - radius - 1, 2)
        if all(np.linalg.norm(place - other) > 2 * radius + 1 for other in places):
            places.append(place)
        elif rng.random() < 0.01:
            places.clear()  # those so far may leave no room
    return np.array(places)


def _channels_first(images: np.ndarray) -> Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()


TASKS: dict[str, Task] = dict(largest=Largest(), recall=Recall())

FIRST_TASK = 'largest'
"""What results without a word of their task are of."""
