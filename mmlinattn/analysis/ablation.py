# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Small classification studies: arms that differ in one thing, trained on the same pictures for the same time.

The task is to name the form of the *largest* of a few shapes in clutter, which asks a model to tell forms apart and to
compare places of the picture. Pictures are drawn in memory.
"""

import contextlib
import json
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Callable, NamedTuple, Optional

import numpy as np
import torch
import torch.nn.functional as F
from mmengine.registry import MODELS
from torch import Tensor, nn

from .. import __version__
from ..datasets.shapes import SHAPES, draw_scene
from ..engine import RunError
from ..utils import locked, written_whole
from .capture import watched
from .inspecting import averaged, measure_block
from .masking import masked
from .studies import STUDIES, Arm


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


def load_results(path: Path, name: Optional[str], settings: Settings) -> dict:
    """Results so far, or none.

    Args:
        path (Path): The file.
        name (str, optional): The study; None takes any.
        settings (Settings): What they have to have been made with.

    Raises:
        RunError: The file is not of this study, or was made with other settings.
    """
    empty = dict(study=name, version=__version__, settings=settings._asdict(), runs=[])
    if not path.exists():
        return empty
    try:
        results = json.loads(path.read_text(encoding='utf-8'))
        known = results['study'] in STUDIES if name is None else results['study'] == name
        same = known and results['settings'] == settings._asdict()
        runs = isinstance(results['runs'], list)
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f'{path} is no results file of a study: {error}') from error
    if not same or not runs:
        wanted = 'a known study' if name is None else f'{name!r}, which needs another --out,'
        raise RunError(
            f'{path} is of study {results["study"]!r} with {results["settings"]}, not of {wanted} with '
            f'{settings._asdict()}.'
        )
    return results


def write_atomically(path: Path, text: str) -> None:
    """Whole or not at all, also when the machine stops."""
    with written_whole(path) as file:
        file.write(text.encode('utf-8'))


def reusable_runs(name: str, results: dict) -> list[dict]:
    """The runs of some study that are runs of the study ``name`` as well: of the same backbone, under its arm's name.

    Studies share arms: ``plain`` of `hallucinated`, ``softmax`` of `inline` and of `attentions` are one model. What an
    arm wants measured with masked weights has to have been.
    """
    source, found = STUDIES[results['study']]().arms, []
    for arm_name, arm in STUDIES[name]().arms.items():
        for run in results['runs']:
            same = run['arm'] in source and source[run['arm']].backbone == arm.backbone
            if same and ('masked' in run or not arm.masks):
                wanted = {key: value for key, value in run.items() if key != 'masked' or arm.masks}
                found.append({**wanted, 'arm': arm_name})
    return found


def reuse(name: str, out: Path, settings: Settings, folders: Iterable[Path]) -> list[dict]:
    """Add to the results in ``out`` the runs of other folders, other studies' or other machines', that it lacks.

    Returns:
        list[dict]: The runs that were added.

    Raises:
        RunError: A folder has no results, or of other settings; nothing is added then.
    """
    runs = []
    for path in (folder / 'results.json' for folder in folders):
        if not path.is_file():
            raise RunError(f'--reuse {str(path.parent)!r} has no results.json.')
        runs += reusable_runs(name, load_results(path, None, settings))
    return _add(name, out, settings, runs)


def _add(name: str, out: Path, settings: Settings, runs: list[dict]) -> list[dict]:
    """Add runs to ``results.json``, which other processes may be adding to; not those that it has."""
    path, added = out / 'results.json', []
    with locked(_lock(out, 'results'), f'writes {path}'):
        results = load_results(path, name, settings)
        done = _done(results)
        for run in runs:
            if (run['arm'], run['seed']) not in done:
                done.add((run['arm'], run['seed']))
                added.append(run)
        results['runs'] += added
        if added:
            write_atomically(path, json.dumps(results, indent=1))
    return added


def _done(results: dict) -> set[tuple[str, int]]:
    return {(run['arm'], run['seed']) for run in results['runs']}


@contextlib.contextmanager
def _claimed(out: Path, arm: str, seed: int) -> Iterator[bool]:
    """Whether the run is this process's to do. The system drops the claim of a process that dies."""
    ours = True
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(_claim(out, arm, seed), f'trains {arm}, seed {seed}', wait=False))
        except BlockingIOError:
            ours = False
        yield ours


def _claim(out: Path, arm: str, seed: int) -> Path:
    return _lock(out, f'{"".join(c if c.isalnum() else "_" for c in arm)}-{seed}')


def _lock(out: Path, name: str) -> Path:
    """The file of a lock among the processes that work on ``out``."""
    folder = out / '.locks'
    folder.mkdir(exist_ok=True)
    return folder / name


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

    Each result is in ``results.json`` before the next arm begins. Several processes may call this with the same
    ``out``: what one is at, the others leave alone. With ``max_minutes`` no arm is begun that would, by the slowest so
    far, end later; the first one that is missing always runs, so that every call gets further.

    Returns:
        dict: The results, those of earlier runs and of other processes included.

    Raises:
        RunError: For unknown arms, or results of other settings in ``out``.
    """
    study = STUDIES[name]()
    unknown = sorted(set(arms or ()) - set(study.arms))
    if unknown:
        raise RunError(f'--arms {unknown}: study {name!r} has {list(study.arms)}.')
    path = out / 'results.json'
    chosen = list(arms or study.arms)
    wanted = [(arm, seed) for seed in range(seeds) for arm in chosen]

    def missing() -> list[tuple[str, int]]:
        done = _done(load_results(path, name, settings))
        return [run for run in wanted if run not in done]

    todo = missing()
    if todo:
        train = draw_pictures(settings.num_train, settings.size, 1, settings.tinted)
        val = draw_pictures(settings.num_val, settings.size, 2, settings.tinted)
    started, slowest = time.monotonic(), 0.0
    for arm, seed in todo:
        begun = time.monotonic()
        if max_minutes is not None and slowest and begun - started + slowest > 60 * max_minutes:
            break
        with _claimed(out, arm, seed) as ours:
            if not ours or (arm, seed) not in missing():
                continue
            result = train_arm(study.arms[arm], seed, settings, train, val, device, on_step)
            _add(name, out, settings, [dict(arm=arm, seed=seed, device=device, **result)])
        slowest = max(slowest, time.monotonic() - begun)
        count = f'[{len(wanted) - len(missing())}/{len(wanted)}]'
        progress(f'{count} {arm}, seed {seed}: {result["accuracy"]:.1f} %  ({result["seconds"]:.0f} s)')
    if left := len(missing()):
        progress(f'{left} of {len(wanted)} runs are left: under way elsewhere, or for next time (--max-minutes)')
    return load_results(path, name, settings)
