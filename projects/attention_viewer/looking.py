# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The contents of the page, without the page."""

import functools
from typing import NamedTuple, Optional

import cv2
import numpy as np
import torch
from mmengine.config import Config
from mmengine.registry import VISUALIZERS

from mmlinattn.attention import TOKEN_MIXERS
from mmlinattn.tooling.analysis import loading
from mmlinattn.tooling.analysis.capture import BlockCall, watched
from mmlinattn.tooling.analysis.inspecting import measure_block
from mmlinattn.tooling.analysis.pictures import MAX_HEADS, collect_query, overlay, picked
from mmlinattn.tooling.class_names import num_classes
from mmlinattn.utils.errors import RunError

LONGEST, THUMB = 1024, 132
COLUMNS = ('block', 'attention', 'map', 'state rank', 'output rank', 'in 3x3', 'if uniform', 'entropy / log keys')


class Seen(NamedTuple):
    """An image and what the model's attentions saw of it.

    Attributes:
        picture (Picture): As the network sees it.
        scale (tuple[float, float]): From pixels of the image as uploaded to those of the image that was prepared,
            across and down.
        blocks (list[BlockCall]): One for each block.
        rows (list[list]): Numbers of each block, as :data:`COLUMNS` says.
        found (str): What the model says of the image.
        drawn (ndarray): The image with that drawn on it.
    """

    picture: loading.Picture
    scale: tuple[float, float]
    blocks: list[BlockCall]
    rows: list[list]
    found: str
    drawn: np.ndarray


class Looker:
    """A model to ask where it looks; the same weights under other attentions on request.

    Args:
        cfg (Config): Of a detector, segmentor or classifier.
        checkpoint (str): As in :func:`~mmlinattn.tooling.analysis.loading.load_model`.
        device (str): Where it runs.
    """

    def __init__(self, cfg: Config, checkpoint: str, device: str = 'cpu') -> None:
        self.cfg, self.checkpoint, self.device = cfg, checkpoint, device
        self.own = loading.load_model(cfg, checkpoint, device)
        if not hasattr(self.own.backbone, 'block_attns'):
            raise RunError(f'the backbone {type(self.own.backbone).__name__} is none of mmlinattn.')
        self.attentions = [list(blocks) for blocks in self.own.backbone.block_attns]
        self.stages = [f'stage {i + 1}' for i in range(len(self.attentions))]
        self.mixers = sorted(TOKEN_MIXERS.module_dict)
        number = num_classes(cfg)
        self.names = self.own.dataset_meta['classes'] or [f'class {i}' for i in range(number)]
        self.visualizer = None
        if cfg.get('default_scope') in ('mmdet', 'mmseg'):  # a label needs no drawing
            self.visualizer = VISUALIZERS.build(dict(cfg.visualizer, name='attention viewer', vis_backends=None))
            palette = np.random.default_rng(1).integers(0, 256, (number, 3)).tolist()
            self.visualizer.dataset_meta = dict(classes=self.names, palette=palette)
        # one model at a time beside the model itself, and the last two images
        self.switched = functools.lru_cache(1)(self._switched)
        self._look = functools.lru_cache(2)(self._seen)

    def _switched(self, stage: int, mixer: str):
        attns = [list(blocks) for blocks in self.attentions]
        attns[stage] = [mixer] * len(attns[stage])
        return loading.load_model(self.cfg, self.checkpoint, self.device, dict(stage_attns=attns))

    def look(self, image: np.ndarray, stage: int = 0, mixer: str = '') -> Seen:
        """Run the model, or the one with another attention in a stage, on an image, (H, W, 3) uint8 RGB.

        Raises:
            RunError: The image is too small or too narrow, or the attention does not fit.
        """
        if image.ndim != 3 or image.shape[2] != 3 or min(image.shape[:2]) < 8:
            raise RunError('the image has to be in colour and at least 8 pixels wide and high.')
        return self._look(image.tobytes(), image.shape, stage if mixer else 0, mixer)

    def _seen(self, pixels: bytes, shape: tuple, stage: int, mixer: str) -> Seen:
        model, image = (
            self.switched(stage, mixer) if mixer else self.own,
            np.frombuffer(pixels, np.uint8).reshape(shape),
        )
        small = resized(image, LONGEST)
        if min(small.shape[:2]) < 2:
            raise RunError(f'the image is too narrow: of {LONGEST} pixels by one, nothing is to be seen.')
        picture = loading.prepare(self.cfg, model, np.ascontiguousarray(small[..., ::-1]), 'picture')
        blocks, rows = [], []

        def keep(block):
            blocks.append(block)
            rows.append(numbers(measure_block(block, ('rank', 'locality', 'sharpness'), 64)))

        with watched(model, keep):
            model.backbone(picture.inputs.to(self.device))
        with torch.no_grad():
            (result,) = model(picture.inputs.to(self.device), [picture.sample], mode='predict')
        drawn = small
        if self.visualizer is not None:
            self.visualizer.add_datasample('picture', small, result.cpu(), draw_gt=False)
            drawn = self.visualizer.get_image()
        scale = small.shape[1] / shape[1], small.shape[0] / shape[0]  # each side is rounded by itself
        return Seen(picture, scale, blocks, rows, in_words(result, self.names), drawn)

    def maps(self, seen: Seen, x: float, y: float, local: bool = False) -> np.ndarray:
        """Attention of the token at a pixel of the uploaded image: a row a block, a column a head, as one image.

        Raises:
            RunError: The pipeline crops that pixel away.
        """
        column, row = seen.picture.to_shown(x * seen.scale[0], y * seen.scale[1])
        with torch.no_grad():
            found = [collect_query(block, seen.picture, column, row, local) for block in seen.blocks if block.ratio]
        if not found:
            raise RunError('the keys of this model lie on no map.')
        return mosaic(found, seen.picture, column, row)


def resized(image: np.ndarray, longest: int) -> np.ndarray:
    """An image whose longer side is at most ``longest``; of a narrow one, a pixel of the other is left."""
    scale = longest / max(image.shape[:2])
    height, width = (max(1, round(side * scale)) for side in image.shape[:2])
    return image if scale >= 1 else cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA)


def numbers(entry: dict) -> list:
    """A row of :data:`COLUMNS`: means over heads."""

    def mean(values):
        return sum(values) / len(values)

    rank, near, sharp = entry['rank'], entry.get('locality'), entry['sharpness']
    state = rank.get('state')
    return [
        entry['block'].removeprefix('backbone.'),
        entry['mixer'],
        '{} x {}'.format(*entry['map']),
        '' if state is None else f'{mean(state["effective"]):.1f} of {state["at_most"]:.0f}',
        f'{mean(rank["output"]["effective"]):.1f} of {rank["output"]["at_most"]}',
        '' if near is None else f'{mean(near["share"]):.3f}',
        '' if near is None else f'{near["if_uniform"]:.3f}',
        f'{mean(sharp["entropy"]) / max(sharp["entropy_if_uniform"], 1e-9):.3f}',
    ]


def mosaic(found: list, picture: loading.Picture, x: int, y: int) -> np.ndarray:
    """Maps of all blocks and heads side by side, (h, w, 3) uint8 RGB. OpenCV: a page waits for it."""
    columns = 1 + max(min(len(maps.maps), MAX_HEADS) for maps in found)
    height = max(24, round(THUMB * picture.shown.shape[0] / picture.shown.shape[1]))
    label, head_line, gap, above = 150, 16, 4, 40  # the page writes its title over the top
    rows = above + len(found) * (height + head_line + gap)
    canvas = np.full((rows, label + columns * (THUMB + gap), 3), 255, np.uint8)

    def write(text, at, colour=(30, 30, 30)):
        cv2.putText(canvas, text, at, cv2.FONT_HERSHEY_SIMPLEX, 0.38, colour, 1, cv2.LINE_AA)

    mark = round(x * THUMB / picture.shown.shape[1]), round(y * height / picture.shown.shape[0])
    for i, maps in enumerate(found):
        top = above + i * (height + head_line + gap) + head_line
        write(maps.block.removeprefix('backbone.')[:22], (4, top + 14))
        write(f'{maps.mixer}, {maps.size[0]} x {maps.size[1]}', (4, top + 32))
        heads = picked(len(maps.maps), MAX_HEADS)
        for j, head in enumerate([None, *heads]):
            drawn, peak = overlay(maps.mean if head is None else maps.maps[head], picture)
            thumb = cv2.resize((drawn * 255).astype(np.uint8), (THUMB, height), interpolation=cv2.INTER_AREA)
            cv2.drawMarker(thumb, mark, (0, 200, 0), cv2.MARKER_CROSS, 9, 2)
            left = label + j * (THUMB + gap)
            canvas[top : top + height, left : left + THUMB] = thumb
            write(f'{"mean" if head is None else f"head {head}"}, max {peak:.2g}', (left, top - 4))
    return canvas


def in_words(result, names: list[str]) -> str:
    """The predictions of a model, by the names of its classes: labels, instances or shares of the pixels."""

    def say(labels, numbers, form='{}: {:.2f}'):
        return ', '.join(form.format(names[i], number) for i, number in zip(labels.tolist(), numbers.tolist()))

    if 'pred_score' in result:
        best = result.pred_score.float().cpu().topk(min(3, len(result.pred_score)))
        return say(best.indices, best.values)
    if 'pred_instances' in result:
        found = result.pred_instances[result.pred_instances.scores >= 0.3]
        return f'{len(found)} found with a score of 0.3 or more. {say(found.labels, found.scores)}'
    labels, counts = result.pred_sem_seg.data.unique(return_counts=True)
    order = counts.argsort(descending=True)
    return say(labels[order], counts[order] / counts.sum(), '{}: {:.0%} of the pixels')


def describe(stage: Optional[str], mixer: Optional[str]) -> tuple[int, str]:
    """Index of a stage and name of an attention as the page gives them; no switch where either is missing."""
    if not stage or not mixer:
        return 0, ''
    return int(stage.rpartition(' ')[2]) - 1, mixer
