# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Small classification studies: arms that differ in one thing, trained on the same pictures for the same time.

The task is to name the form of the *largest* of a few shapes in clutter, which asks a model to tell forms apart and to
compare places of the picture. Pictures are drawn in memory.
"""

import json
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Callable, NamedTuple, Optional

import numpy as np
import torch
import torch.nn.functional as F
from mmengine.registry import MODELS
from torch import Tensor, nn

from .. import __version__
from ..attention import TOKEN_MIXERS, SoftmaxMixer
from ..datasets.shapes import SHAPES, draw_scene
from ..engine import RunError
from ..ops.memory import merge_heads, split_heads
from ..utils import written_whole
from .capture import watched
from .inspecting import averaged, measure_block
from .masking import masked


class Settings(NamedTuple):
    """What all arms of a study have in common.

    Attributes:
        iterations, batch: Steps and pictures a step.
        num_train, num_val: Pictures; the training ones are mirrored at random.
        size: Side of a picture in pixels.
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


class Arm(NamedTuple):
    """One variant of a study.

    Attributes:
        backbone (dict): Config of the backbone.
        paper (dict): What the papers print for it, by data set.
        masks (bool): Also measure the accuracy with masked weights (InLine Tab. 2).
    """

    backbone: dict
    paper: dict = {}
    masks: bool = False


class Study(NamedTuple):
    """Arms, and the pairs of them that a paper orders.

    Attributes:
        source (str): The paper's tables.
        arms (dict[str, Arm]): By name.
        pairs (list): (better, worse, metric of the paper); better as in the paper.
    """

    source: str
    arms: dict
    pairs: list


class ConfusedSoftmaxMixer(SoftmaxMixer):
    """Softmax attention with ``q := ReLU(q) / |ReLU(q)|`` by head: queries of one direction become one (InLine Tab. 1).
    Only for the study."""

    def _confuse(self, q: Tensor) -> Tensor:
        return merge_heads(F.normalize(F.relu(split_heads(q, self.num_heads)), dim=-1))

    def forward(self, q, k, v, grid, key_grid, **kwargs):
        return super().forward(self._confuse(q), k, v, grid, key_grid, **kwargs)

    def weights(self, q, k, grid, key_grid, **kwargs):
        return super().weights(self._confuse(q), k, grid, key_grid, **kwargs)


def _ravlt(mixer='rala', mlp_ratio: float = 2.0, **options) -> dict:
    """RAVLT in the paper's form, without the release's 5x5 term and rotary encoding, all stages alike."""
    arch = dict(embed_dims=(32, 64, 96), depths=(1, 2, 2), num_heads=(1, 2, 3), mlp_ratios=mlp_ratio)
    arch['drop_path_rate'] = 0.0
    plain = dict(rotary=False, local_kernel=None, out_indices=(2,))
    return dict(type='RAVLT', arch=arch, stage_attns=(mixer,) * 3, **{**plain, **options})


def _pvt(mixer) -> dict:
    """PVT of two stages, whole maps: nothing but the attention mixes tokens."""
    arch = dict(embed_dims=(48, 96), depths=(2, 3), num_heads=(3, 6), mlp_ratios=(2, 2), sr_ratios=1, grids=(16, 8))
    arch['drop_path_rate'] = 0.0
    return dict(type='LinearPVT', arch=arch, stage_attns=(mixer,) * 2, out_indices=(1,))


def _rala(**options) -> dict:
    return dict(type='rala', **options)


def _inline(**options) -> dict:
    return dict(type='inline', **{'local_residual': False, **options})


def _focused(**options) -> dict:
    return dict(type='focused', **{'local_kernel': None, **options})


def _rala_study() -> Study:
    names = ('ImageNet', 'COCO box AP', 'ADE20K mIoU')

    def printed(*values):
        return dict(zip(names, values))

    arms = {
        'full': Arm(_ravlt(), printed(82.8, 47.3, 47.9)),
        'without KV augmentation': Arm(_ravlt(_rala(augment_kv=False)), printed(82.1, 43.7, 43.6)),
        # the FFN is widened by what the gate's projection takes, as in the paper
        'without output gate': Arm(_ravlt(_rala(output_gate=None), mlp_ratio=2.5), printed(82.5, 46.3, 47.0)),
        'without CPE': Arm(_ravlt(cpe=False), printed(82.7, 47.0, 47.6)),
        'gate: identity': Arm(_ravlt(_rala(output_gate='identity'), mlp_ratio=2.5), printed(82.8)),
        'gate: tanh': Arm(_ravlt(_rala(output_gate='tanh'), mlp_ratio=2.5), printed(82.7)),
        'kernel: relu': Arm(_ravlt(_rala(kernel='relu')), printed(82.8)),
        'kernel: softmax': Arm(_ravlt(_rala(kernel='softmax')), printed(82.7)),
    }
    pairs = [('full', arm, 'ImageNet') for arm in ('without KV augmentation', 'without output gate', 'without CPE')]
    return Study('RALA Tab. 9 and 10, Fig. 8', arms, pairs)


def _inline_study() -> Study:
    def printed(value):
        return {'ImageNet': value}

    arms = {
        'softmax': Arm(_pvt('softmax'), printed(72.2), masks=True),
        'softmax, confused': Arm(_pvt(dict(type=ConfusedSoftmaxMixer)), printed(70.6)),
        'relu, linear': Arm(_pvt(_inline(kernel='relu', injective=False))),
        'relu, injective': Arm(_pvt(_inline(kernel='relu'))),
        'exp, linear': Arm(_pvt(_inline(kernel='exp', injective=False))),
        'exp, injective': Arm(_pvt(_inline(kernel='exp'))),
        'identity, injective': Arm(_pvt(_inline()), masks=True),
        'identity, injective, local residual': Arm(_pvt(_inline(local_residual=True)), masks=True),
    }
    pairs = [
        ('softmax', 'softmax, confused', 'ImageNet'),
        # Tab. 3 prints the gain, not the two ends
        ('relu, injective', 'relu, linear', 2.5),
        ('exp, injective', 'exp, linear', None),
        ('identity, injective, local residual', 'identity, injective', None),
    ]
    return Study('InLine Tab. 1-4', arms, pairs)


def _flatten_study() -> Study:
    arms = {
        'relu linear': Arm(_pvt(_focused(focus=False))),
        'relu linear, depth-wise': Arm(_pvt(_focused(focus=False, local_kernel=5))),
        'focused': Arm(_pvt(_focused())),
        'focused, depth-wise': Arm(_pvt(_focused(local_kernel=5))),
        **{f'focused, depth-wise, p = {p}': Arm(_pvt(_focused(local_kernel=5, power=p))) for p in (2, 4, 8, 32)},
    }
    pairs = [
        ('focused', 'relu linear', None),
        ('relu linear, depth-wise', 'relu linear', None),
        ('focused, depth-wise', 'focused', None),
    ]
    return Study('FLatten Tab. 4 and 5', arms, pairs)


def _hallucinated_study() -> Study:
    def printed(value):
        return {'Tiny-ImageNet': value}

    def steps(*names):
        return dict(type='hallucinated', steps=names)

    arms = {
        'plain': Arm(_pvt('softmax'), printed(69.3)),
        'copies': Arm(_pvt(steps()), printed(68.8)),
        'IHH': Arm(_pvt(steps('ihh')), printed(69.4)),
        'CHH': Arm(_pvt(steps('chh')), printed(69.2)),
        'IHH, CHH': Arm(_pvt(steps('ihh', 'chh')), printed(69.7)),
        'CHH, IHH': Arm(_pvt(steps('chh', 'ihh')), printed(69.3)),
    }
    pairs = [('IHH, CHH', arm, 'Tiny-ImageNet') for arm in arms if arm != 'IHH, CHH']
    return Study('hMHSA Tab. 2 and 3', arms, pairs)


def _attentions_study() -> Study:
    arms = {name: Arm(_pvt(name)) for name in sorted(TOKEN_MIXERS.module_dict)}
    return Study('every attention in one host', arms, [])


STUDIES: dict[str, Callable[[], Study]] = dict(
    rala=_rala_study,
    inline=_inline_study,
    flatten=_flatten_study,
    hallucinated=_hallucinated_study,
    attentions=_attentions_study,
)


# --- data -------------------------------------------------------------------------------------------------------------


def draw_pictures(number: int, size: int, seed: int, tinted: float) -> tuple[Tensor, Tensor]:
    """Pictures (number, 3, size, size) uint8 of three to five shapes, and the form of the largest one, (number,).

    The largest one covers at least 1.3 times the pixels of the next.
    """
    rng = np.random.default_rng(seed)
    images = np.empty((number, size, size, 3), np.uint8)
    labels = np.empty(number, np.int64)
    done = 0
    while done < number:
        count = int(rng.integers(3, 6))
        scene = draw_scene(rng, (size, size), num_shapes=count, diameters=(0.2, 0.55), tinted=tinted)
        areas = np.sort(scene.masks.sum(axis=(1, 2)))
        if len(areas) > 1 and areas[-1] < 1.3 * areas[-2]:
            continue
        images[done] = scene.image
        labels[done] = scene.labels[scene.masks.sum(axis=(1, 2)).argmax()]
        done += 1
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels)


# --- one arm ----------------------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """A backbone's last map, its mean, and a linear layer."""

    def __init__(self, backbone: dict, num_classes: int) -> None:
        super().__init__()
        self.backbone = MODELS.build(dict(backbone))
        self.backbone.init_weights()
        self.head = nn.Linear(self.backbone.feature_info[-1]['channels'], num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.backbone((images.float() - 127.5) / 64)[-1].mean(dim=(2, 3)))


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor, batch: int = 128) -> float:
    """Top-1 in percent."""
    device = next(model.parameters()).device
    right = [(model(x.to(device)).argmax(1).cpu() == y).sum() for x, y in zip(images.split(batch), labels.split(batch))]
    return 100 * float(sum(right)) / len(labels)


def train_arm(
    arm: Arm, seed: int, settings: Settings, train: tuple, val: tuple, device: str = 'cpu', on_step=lambda: None
) -> dict:
    """Train one arm with one seed; the seed decides weights, order of pictures and mirroring, alike for every arm.

    Returns:
        dict: ``accuracy`` in percent, ``curve`` of it, ``loss``, ``params``, ``seconds``, and measures of the trained
        attention.

    Raises:
        RunError: The loss is not finite.
    """
    started = time.perf_counter()
    torch.manual_seed(seed)
    model = Classifier(arm.backbone, len(SHAPES)).to(device)
    order = torch.Generator().manual_seed(seed)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([dict(params=decayed), dict(params=others, weight_decay=0.0)], weight_decay=0.05)
    images, labels = train
    losses, curve, index = [], [], torch.empty(0, dtype=torch.long)
    for step in range(settings.iterations):
        done, warm = step / settings.iterations, 0.05
        factor = (done / warm) if done < warm else 0.5 * (1 + math.cos(math.pi * (done - warm) / (1 - warm)))
        for group in optimizer.param_groups:
            group['lr'] = settings.lr * max(factor, 0.01)
        if len(index) < settings.batch:
            index = torch.randperm(len(images), generator=order)
        now, index = index.split([settings.batch, len(index) - settings.batch])
        x, y = images[now].to(device), labels[now].to(device)
        flipped = (torch.rand(len(now), generator=order) < 0.5).to(device)
        x = torch.where(flipped[:, None, None, None], x.flip(-1), x)
        loss = F.cross_entropy(model.train()(x), y, label_smoothing=0.1)
        if not loss.isfinite():
            raise RunError(f'seed {seed}: the loss is {float(loss)} at step {step}.')
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        on_step()
        if (step + 1) % max(1, settings.iterations // 4) == 0:
            curve.append([step + 1, accuracy(model.eval(), *val)])
    model.eval()
    result = dict(
        accuracy=accuracy(model, *val),
        curve=curve,
        loss=sum(losses[-20:]) / len(losses[-20:]),
        params=sum(p.numel() for p in model.parameters()),
        attention=attention_measures(model, val[0][:4].to(device)),
    )
    if arm.masks:
        result['masked'] = {}
        for window in (3, 5, 7):
            for others in (False, True):
                with masked(model, window, others):
                    name = f'{window**2} others' if others else f'{window}x{window}'
                    result['masked'][name] = accuracy(model, *val)
    return {**result, 'seconds': time.perf_counter() - started}


def attention_measures(model: nn.Module, images: Tensor) -> list[dict]:
    """Rank, confusion, locality and sharpness of each block, mean over images and heads."""
    found: dict[str, list] = {}
    for image in images.split(1):

        def keep(block):
            entry = measure_block(block, ('rank', 'confusion', 'locality', 'sharpness'), 64)
            found.setdefault(block.name, []).append((_over_heads(entry), 1.0))

        with watched(model, keep):
            model(image)
    return [averaged(entries) for entries in found.values()]


def _over_heads(entry):
    if isinstance(entry, dict):
        return {key: _over_heads(value) for key, value in entry.items()}
    if isinstance(entry, list) and entry and all(isinstance(value, (int, float)) for value in entry):
        return sum(entry) / len(entry)
    return entry


# --- a study ----------------------------------------------------------------------------------------------------------


def load_results(path: Path, name: str, settings: Settings) -> dict:
    """Results so far, or none.

    Raises:
        RunError: The file is not of this study, or was made with other settings.
    """
    empty = dict(study=name, version=__version__, settings=settings._asdict(), runs=[])
    if not path.exists():
        return empty
    try:
        results = json.loads(path.read_text(encoding='utf-8'))
        same = results['study'] == name and results['settings'] == settings._asdict()
        runs = isinstance(results['runs'], list)
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f'{path} is no results file of a study: {error}') from error
    if not same or not runs:
        raise RunError(
            f'{path} is of study {results["study"]!r} with {results["settings"]}; this one is {name!r} with '
            f'{settings._asdict()}. Give another --out.'
        )
    return results


def write_atomically(path: Path, text: str) -> None:
    """Whole or not at all, also when the machine stops."""
    with written_whole(path) as file:
        file.write(text.encode('utf-8'))


def run_study(
    name: str,
    out: Path,
    seeds: int,
    settings: Settings,
    max_minutes: Optional[float] = None,
    arms: Optional[Iterable[str]] = None,
    device: str = 'cpu',
    progress: Callable = lambda message: None,
    on_step: Callable = lambda: None,
) -> dict:
    """Run what is missing of a study: every arm with seed 0, then with seed 1, and so on.

    Each result is in ``results.json`` before the next arm begins. With ``max_minutes`` no arm is begun that would, by
    the slowest so far, end later; the first one that is missing always runs, so that every call gets further.

    Returns:
        dict: The results, those of earlier runs included.

    Raises:
        RunError: For unknown arms, or results of other settings in ``out``.
    """
    study = STUDIES[name]()
    unknown = sorted(set(arms or ()) - set(study.arms))
    if unknown:
        raise RunError(f'--arms {unknown}: study {name!r} has {list(study.arms)}.')
    path = out / 'results.json'
    results = load_results(path, name, settings)
    done = {(run['arm'], run['seed']) for run in results['runs']}
    chosen = list(arms or study.arms)
    todo = [(arm, seed) for seed in range(seeds) for arm in chosen if (arm, seed) not in done]
    if not todo:
        return results
    started, slowest = time.monotonic(), 0.0
    train = draw_pictures(settings.num_train, settings.size, 1, settings.tinted)
    val = draw_pictures(settings.num_val, settings.size, 2, settings.tinted)
    for number, (arm, seed) in enumerate(todo, 1):
        begun = time.monotonic()
        if max_minutes is not None and number > 1 and begun - started + slowest > 60 * max_minutes:
            progress(f'{len(todo) - number + 1} of {len(todo)} runs left for next time (--max-minutes)')
            break
        result = train_arm(study.arms[arm], seed, settings, train, val, device, on_step)
        results['runs'].append(dict(arm=arm, seed=seed, device=device, **result))
        write_atomically(path, json.dumps(results, indent=1))
        slowest = max(slowest, time.monotonic() - begun)
        progress(f'[{number}/{len(todo)}] {arm}, seed {seed}: {result["accuracy"]:.1f} %  ({result["seconds"]:.0f} s)')
    return results
