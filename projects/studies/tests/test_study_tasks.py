# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What the tasks draw, ask for and count."""

import sys

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mmlinattn.utils.errors import RunError
from projects.studies.arms import STUDIES
from projects.studies.tasks import TASKS, Settings

SOFTMAX = STUDIES['inline']().arms['softmax'].backbone


@pytest.mark.parametrize('name', TASKS)
def test_pictures_are_those_of_the_seed(name):
    """Whatever else is drawn, and however many there are."""
    task = TASKS[name]
    images, targets = task.draw(3, task.settings, 1)
    assert images.dtype == torch.uint8 and images.shape == (3, 3, task.settings.size, task.settings.size)
    np.random.rand(3), torch.rand(3)
    more, other = task.draw(4, task.settings, 1), task.draw(3, task.settings, 2)
    assert torch.equal(images, more[0][:3]) and torch.equal(targets, more[1][:3])
    assert all(not torch.equal(one, two) for one in images for two in other[0])


@pytest.mark.parametrize('name', TASKS)
def test_mirroring(name):
    """Twice is as it was; only the images asked for, with what lies in them."""
    task, which = TASKS[name], torch.tensor([True, False] * 3)
    images, targets = task.draw(6, task.settings, 0)
    turned, moved = task.mirrored(images, targets, which)
    assert torch.equal(turned[::2], images[::2].flip(-1)) and torch.equal(turned[1::2], images[1::2])
    assert torch.equal(moved[1::2], targets[1::2])
    back = task.mirrored(turned, moved, which)
    assert torch.equal(back[0], images)
    torch.testing.assert_close(back[1], targets, rtol=0, atol=1e-4)
    side = task.settings.size
    if name == 'detection':
        for (x0, y0, x1, y1, label), box in zip(targets[::2].flatten(0, 1).tolist(), moved[::2].flatten(0, 1).tolist()):
            assert box == ([side - x1, y0, side - x0, y1, label] if label >= 0 else [-1] * 5)
    if name == 'recall':
        torch.testing.assert_close(moved[::2, :, 0], side - targets[::2, :, 0])


def test_labels_are_those_of_the_largest():
    images, labels = TASKS['largest'].draw(150, Settings(), 3)
    assert images.is_contiguous() and set(labels.tolist()) == set(range(6))


def test_recall_asks_for_the_spot_of_the_disc_in_the_same_colour():
    """Seen again in the images: at each place a disc without a spot, and one more of its colour around the answer."""
    task = TASKS['recall']
    images, targets = task.draw(8, task.settings, 0)
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


class Answers(nn.Module):
    """Gives logits that were prepared, batch by batch."""

    def __init__(self, logits):
        super().__init__()
        self.weight, self.logits, self.sizes = nn.Parameter(torch.zeros(1)), logits, []

    def forward(self, images):
        first = sum(self.sizes)
        self.sizes.append(len(images))
        return self.logits[first : first + len(images)]


def test_accuracy_is_top_1():
    labels = torch.tensor([0, 1, 2, 3, 4])
    logits = F.one_hot(torch.tensor([0, 1, 5, 3, 0]), 6).float()
    model, task = Answers(logits), TASKS['largest']
    assert task.score(model, torch.zeros(5, 3, 8, 8), labels, batch=2) == 60 and model.sizes == [2, 2, 1]
    loss = task.loss(lambda images: logits, None, labels)
    assert loss.item() == pytest.approx(F.cross_entropy(logits, labels, label_smoothing=0.1).item())


def test_scores_and_losses_at_points():
    """Maps of 2 x 4 cells of images of 16 x 24: 6 pixels wide and 8 high; points on the border are inside."""
    task = TASKS['recall']
    points = torch.tensor([[[5.9, 7.9, 0], [6.0, 8.0, 1], [24.0, 0.0, 2], [0.0, 16.0, 3]]]).repeat(3, 1, 1)
    logits = torch.zeros(3, 6, 2, 4)
    for row, column, label in ((0, 0, 0), (1, 1, 1), (0, 3, 2), (1, 0, 3)):
        logits[:, label, row, column] = 1
    logits[2] = 0
    logits[2, 3] = 1  # one in four right
    model = Answers(logits)
    assert task.score(model, torch.zeros(3, 3, 16, 24), points, batch=2) == 75 and model.sizes == [2, 1]
    loss = task.loss(lambda images: logits[:2], torch.zeros(2, 3, 16, 24), points[:2])
    right = F.cross_entropy(torch.eye(6)[:4], torch.arange(4), label_smoothing=0.1)
    assert loss.item() == pytest.approx(right.item())


@pytest.mark.parametrize('name', ['largest', 'recall'])
def test_heads_see_the_last_map(name):
    """Its mean where an image has one label, each place where points have one; of normalised images."""
    model = TASKS[name].build({**SOFTMAX, 'out_indices': (0, 1)}).eval()
    images = torch.randint(256, (2, 3, 64, 64), dtype=torch.uint8)
    last = model.backbone((images.float() - 127.5) / 64)[-1]
    last = last.mean(dim=(2, 3), keepdim=True) if name == 'largest' else last
    weight = model.head.weight.flatten(1)
    expected = torch.einsum('oc,bchw->bohw', weight, last) + model.head.bias[:, None, None]
    torch.testing.assert_close(model(images), expected.squeeze(), rtol=1e-4, atol=1e-4)


class Finds(nn.Module):
    """A detector that finds what it is told of each image: (whose box, score), or nothing."""

    def __init__(self, boxes, found):
        super().__init__()
        self.weight, self.boxes, self.found = nn.Parameter(torch.zeros(1)), boxes, iter(found)
        self.detector = self

    def predict(self, images, samples, rescale):
        assert not rescale and not torch.is_grad_enabled() and images.is_floating_point()
        for sample in samples:
            index, score = next(self.found) or (0, 0.0)
            kept = slice(0, int(score > 0))
            truth, label = sample.gt_instances, torch.full((1,), 2)
            sample.pred_instances = type(truth)(
                bboxes=self.boxes[[index]][kept], labels=label[kept], scores=torch.tensor([score])[kept]
            )
        return samples


@pytest.mark.parametrize('batch', [1, 3, 64])
def test_box_ap_is_cocos(batch, capsys):
    """Two of four are found, and one where another image has its box: the precision is 1 up to a recall of a quarter,
    2/3 up to a half and 0 beyond, at COCO's 101 points. In silence."""
    pytest.importorskip('mmdet')
    task = TASKS['detection']
    boxes = torch.tensor([[8.0, 8, 40, 40], [48, 8, 80, 40], [8, 48, 40, 80], [48, 48, 80, 80]])
    targets = torch.full((4, 5, 5), -1.0)
    targets[:, 0, :4], targets[:, 0, 4] = boxes, 2
    images = torch.zeros(4, 3, 96, 96, dtype=torch.uint8)
    found = [(0, 0.9), (2, 0.8), None, (3, 0.7)]
    expected = 100 * (26 + 25 * 2 / 3) / 101
    assert task.score(Finds(boxes, found), images, targets, batch) == pytest.approx(expected, abs=0.1)
    assert task.score(Finds(boxes, [None] * 4), images, targets, batch) == 0
    shifted = Finds(boxes + 4, [(i, 0.9) for i in range(4)])
    assert 10 < task.score(shifted, images, targets, batch) < 90
    assert capsys.readouterr().out == ''


@pytest.mark.parametrize(('study', 'arm', 'strides'), [('rala', 'full', (8, 16)), ('flatten', 'focused', (4, 8))])
def test_the_small_detector(study, arm, strides):
    """The last two maps of a backbone, anchors from 20 to 64 pixels, three an octave; its losses are MMDetection's."""
    pytest.importorskip('mmdet')
    task, backbone = TASKS['detection'], STUDIES[study]().arms[arm].backbone
    model = task.build(backbone)
    generator = model.detector.bbox_head.prior_generator
    sides = [(boxes[:, 2] - boxes[:, 0]).tolist() for boxes in generator.base_anchors]
    assert sides == [pytest.approx([side * 2 ** (i / 3) for i in range(3)], rel=1e-4) for side in (20, 40)]
    assert [stride[0] for stride in generator.strides] == list(strides)
    last = len(backbone['stage_attns']) - 1
    assert model.detector.backbone.out_indices == (last - 1, last)
    images, targets = task.draw(2, task.settings, 0)
    assert torch.isfinite(task.loss(model.train(), images, targets))
    nothing = torch.full_like(targets, -1)
    losses = [task.loss(model, images, boxes).item() for boxes in (targets, nothing)]
    assert losses[0] != pytest.approx(losses[1])


def test_detection_without_mmdetection_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, 'mmdet.utils', None)
    with pytest.raises(RunError, match='detection needs MMDetection: '):
        TASKS['detection'].build(SOFTMAX)
