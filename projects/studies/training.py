# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Train a variant of a study, and measure its attention."""

import copy
import math
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmlinattn.layers.compact import FactorisedLinear
from mmlinattn.tooling.analysis.capture import watched
from mmlinattn.tooling.analysis.inspecting import averaged, measure_block
from mmlinattn.utils.errors import RunError

from .task import Classifier, Settings, score
from .variants import Variant


def train_variant(
    variant: Variant,
    seed: int,
    settings: Settings,
    train: tuple,
    val: tuple,
    device: str = 'cpu',
    on_step=lambda: None,
) -> dict:
    """Train a variant on images (N, 3, H, W) uint8 and labels (N,).

    ``seed`` determines initial weights, and order and mirroring of images for all variants alike.

    Returns:
        dict: ``accuracy`` in percent, its ``curve``, ``loss``, ``params``, ``seconds``, and ``attention`` measures.

    Raises:
        RunError: The loss is not finite.
    """
    started = time.perf_counter()
    torch.manual_seed(seed)
    model = Classifier(variant.backbone).to(device)
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
        mirrored = torch.rand(len(now), 1, 1, 1, generator=order) < 0.5
        x = torch.where(mirrored, images[now].flip(-1), images[now]).to(device)
        loss = F.cross_entropy(model.train()(x), labels[now].to(device), label_smoothing=0.1)
        if not loss.isfinite():
            raise RunError(f'seed {seed}: the loss is {float(loss)} at step {step}.')
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        on_step()
        if (step + 1) % max(1, settings.iterations // 4) == 0:
            curve.append([step + 1, score(model.eval(), *val)])
    model.eval()
    result = {
        'accuracy': score(model, *val),
        'curve': curve,
        'loss': sum(losses[-20:]) / len(losses[-20:]),
        'params': num_parameters(model),
        'attention': attention_measures(model, val[0][:4].to(device)),
    }
    return {**result, 'seconds': time.perf_counter() - started}


def num_parameters(model: nn.Module) -> int:
    """Count parameters, with the factors of compact FFNs merged as in the paper."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, FactorisedLinear):
            module.switch_to_deploy()
    return sum(p.numel() for p in model.parameters())


def attention_measures(model: nn.Module, images: Tensor) -> list[dict]:
    """Measure rank, confusion, locality and sharpness of each block, averaged over images and heads."""
    found: dict[str, list] = {}
    for image in images.split(1):

        def keep(block):
            entry = measure_block(block, ('rank', 'confusion', 'locality', 'sharpness'), 64)
            found.setdefault(block.name, []).append((_over_heads(entry), 1.0))

        with watched(model, keep):
            model(image)
    return [averaged(entries) for entries in found.values()]


def _over_heads(entry):
    """Average the lists of numbers in a nested dict."""
    if isinstance(entry, dict):
        return {key: _over_heads(value) for key, value in entry.items()}
    if isinstance(entry, list) and entry and all(isinstance(value, (int, float)) for value in entry):
        return sum(entry) / len(entry)
    return entry
