# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What the page of ``tools/analysis_tools/attention_app.py`` shows, without the page."""

import hashlib
from collections import OrderedDict
from typing import NamedTuple, Optional

import cv2
import numpy as np
import torch
from mmengine.config import Config

from ..attention import TOKEN_MIXERS
from ..utils.errors import RunError
from . import loading
from .capture import BlockCall, watched
from .inspecting import measure_block
from .pictures import MAX_HEADS, collect_query, overlay, picked

LONGEST, KEPT, THUMB = 1024, 2, 132
COLUMNS = ('block', 'attention', 'map', 'state rank', 'output rank', 'in 3x3', 'if uniform', 'entropy / log keys')


class Seen(NamedTuple):
    """A picture and what the model's attentions saw of it.

    Attributes:
        picture (Picture): As the network sees it.
        scale (tuple[float, float]): From pixels of the picture as uploaded to those of the picture that was prepared,
            across and down.
        blocks (list[BlockCall]): One for each block.
        rows (list[list]): Numbers of each block, as :data:`COLUMNS` says.
        found (str): What the model says of the picture.
        drawn (ndarray): The picture with that drawn on it.
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
        checkpoint (str): As in :func:`~mmlinattn.analysis.loading.load_model`.
        device (str): Where it runs.
    """

    def __init__(self, cfg: Config, checkpoint: str, device: str = 'cpu') -> None:
        self.cfg, self.checkpoint, self.device = cfg, checkpoint, device
        self.models = {'': loading.load_model(cfg, checkpoint, device)}
        backbone = self.models[''].backbone
        if not hasattr(backbone, 'block_attns'):
            raise RunError(f'the backbone {type(backbone).__name__} is none of mmlinattn.')
        self.attentions = [list(blocks) for blocks in backbone.block_attns]
        self.seen: OrderedDict = OrderedDict()

    @property
    def stages(self) -> list[str]:
        """Names of the stages, from 1."""
        return [f'stage {i + 1}' for i in range(len(self.attentions))]

    @property
    def mixers(self) -> list[str]:
        return sorted(TOKEN_MIXERS.module_dict)

    def model(self, stage: int = 0, mixer: str = ''):
        """The model, with the attention of a stage (0: the first) switched where ``mixer`` is given.

        Raises:
            RunError: The attention does not fit there.
        """
        key = f'{stage}:{mixer}' if mixer else ''
        if key not in self.models:
            attns = [list(blocks) for blocks in self.attentions]
            attns[stage] = [mixer] * len(attns[stage])
            switched = loading.load_model(self.cfg, self.checkpoint, self.device, dict(stage_attns=attns))
            self.models = {'': self.models[''], key: switched}  # one at a time beside the model itself
        return self.models[key]

    def look(self, image: np.ndarray, stage: int = 0, mixer: str = '') -> Seen:
        """Run the model on a picture, (H, W, 3) uint8 RGB; the last ones are remembered.

        Raises:
            RunError: The picture is too small or too narrow, or the attention does not fit.
        """
        if image.ndim != 3 or image.shape[2] != 3 or min(image.shape[:2]) < 8:
            raise RunError('the picture has to be in colour and at least 8 pixels wide and high.')
        key = hashlib.sha1(image.tobytes()).hexdigest(), image.shape, stage if mixer else 0, mixer
        if key in self.seen:
            self.seen.move_to_end(key)
            return self.seen[key]
        model = self.model(stage, mixer)
        small = loading.resized(image, LONGEST)
        if min(small.shape[:2]) < 2:
            raise RunError(f'the picture is too narrow: of {LONGEST} pixels by one, nothing is to be seen.')
        picture = loading.prepare(self.cfg, model, np.ascontiguousarray(small[..., ::-1]), 'picture')
        blocks, rows = [], []

        def keep(block):
            blocks.append(block)
            rows.append(numbers(measure_block(block, ('rank', 'locality', 'sharpness'), 64)))

        with watched(model, keep):
            loading.run_backbone(model, picture.inputs.to(self.device))
        found, drawn = predict(model, picture, small)
        scale = small.shape[1] / image.shape[1], small.shape[0] / image.shape[0]  # each side is rounded by itself
        seen = Seen(picture, scale, blocks, rows, found, drawn)
        self.seen[key] = seen
        while len(self.seen) > KEPT:
            self.seen.popitem(last=False)
        return seen

    def maps(self, seen: Seen, x: float, y: float, local: bool = False) -> np.ndarray:
        """Where the token at a pixel of the picture as uploaded looks: a row a block, a column a head, as one picture.

        Raises:
            RunError: The pipeline crops that pixel away.
        """
        column, row = seen.picture.to_shown(x * seen.scale[0], y * seen.scale[1])
        with torch.no_grad():
            found = [collect_query(block, seen.picture, column, row, local) for block in seen.blocks if block.ratio]
        if not found:
            raise RunError('the keys of this model lie on no map.')
        return mosaic(found, seen.picture, column, row)


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


@torch.no_grad()
def predict(model, picture: loading.Picture, image: np.ndarray) -> tuple[str, np.ndarray]:
    """What the model finds, in words and drawn on the picture (H, W, 3) uint8 RGB.

    Labels have the names of ``model.dataset_meta``, or are ``class 3`` where there are none.
    """
    device = next(model.parameters()).device
    (result,) = model(picture.inputs.to(device), [picture.sample], mode='predict')
    names = (getattr(model, 'dataset_meta', None) or {}).get('classes') or ()
    drawn = image.copy()

    def name(label: int) -> str:
        return names[label] if label < len(names) else f'class {label}'

    if 'pred_score' in result:
        scores = result.pred_score.float().cpu()
        best = scores.topk(min(3, len(scores)))
        return ', '.join(f'{name(i)}: {s:.2f}' for s, i in zip(best.values.tolist(), best.indices.tolist())), drawn
    if 'pred_instances' in result:
        found = result.pred_instances
        found = found[found.scores >= 0.3]
        said = [f'{name(i)}: {s:.2f}' for i, s in zip(found.labels.tolist(), found.scores.tolist())]
        boxes = found.bboxes.round().int().tolist()
        for box in boxes:
            cv2.rectangle(drawn, box[:2], box[2:], (255, 60, 0), 2)
        for box, words in reversed(list(zip(boxes, said))):  # over all boxes, the surest ones over the others
            _label(drawn, words, (box[0], box[1]))
        return f'{len(said)} found with a score of 0.3 or more. {", ".join(said)}', drawn
    if 'pred_sem_seg' in result:
        labels = result.pred_sem_seg.data[0].cpu().numpy()
        colours = np.random.default_rng(1).integers(40, 256, (labels.max() + 1, 3))
        labels = cv2.resize(labels.astype(np.int32), drawn.shape[1::-1], interpolation=cv2.INTER_NEAREST_EXACT)
        drawn = (drawn * 0.5 + colours[labels] * 0.5).astype(np.uint8)
        kinds, counts = np.unique(labels, return_counts=True)
        shares = sorted(zip((counts / labels.size).tolist(), kinds.tolist()), reverse=True)
        for share, kind in shares:
            if share >= 0.01:
                rows, columns = np.nonzero(labels == kind)
                inside = np.argmin(np.hypot(rows - np.median(rows), columns - np.median(columns)))
                _label(drawn, name(kind), (int(columns[inside]), int(rows[inside])))
        return ', '.join(f'{name(kind)}: {share:.0%} of the pixels' for share, kind in shares), drawn
    return '', drawn


def _label(image: np.ndarray, words: str, at: tuple[int, int]) -> None:
    """Write white on black into a picture, whole where it fits. OpenCV's letters are ASCII, others become ``?``."""
    words = words.encode('ascii', 'replace').decode()
    scale = min(max(image.shape[1] / 800, 0.3), 0.6)
    (width, height), below = cv2.getTextSize(words, cv2.FONT_HERSHEY_SIMPLEX, scale, 1)
    x = max(0, min(at[0], image.shape[1] - width))
    y = max(height, min(at[1], image.shape[0] - below))
    cv2.rectangle(image, (x, y - height), (x + width, y + below), (0, 0, 0), -1)
    cv2.putText(image, words, (x, y), cv2.FONT_HERSHEY_SIMPLEX, scale, (255, 255, 255), 1, cv2.LINE_AA)


def describe(stage: Optional[str], mixer: Optional[str]) -> tuple[int, str]:
    """Index of a stage and name of an attention as the page gives them; no switch where either is missing."""
    if not stage or not mixer:
        return 0, ''
    return int(stage.rpartition(' ')[2]) - 1, mixer
