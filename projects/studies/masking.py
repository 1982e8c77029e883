# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The masking experiment of InLine (Tab. 2): what a trained model loses without its local, or some other, weights.

    python -m projects.studies.masking CONFIG CHECKPOINT --out DIR --num 240 --data-root data/shapes_imagenet

Accuracy of a classifier on the first images of its test data, as it is and with weights masked: DIR/masking.{json,png}.
"""

import argparse
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Callable, Optional

import torch
import torch.nn.functional as F
from einops import rearrange
from matplotlib.figure import Figure
from mmengine.dataset import pseudo_collate
from mmengine.logging import MMLogger
from mmengine.registry import DATASETS
from rich.progress import Progress
from torch import Tensor, nn

from mmlinattn.attention import Grid, TokenMixer
from mmlinattn.tooling.analysis.capture import arrangements, reduction_of, watch_mixers
from mmlinattn.tooling.analysis.loading import load_model
from mmlinattn.tooling.analysis.measures import neighbours
from mmlinattn.tooling.analysis.weights import mixer_weights
from mmlinattn.tooling.command_line import one_line_errors, writing
from mmlinattn.tooling.configs import check_checkpoint, read_config, set_data_root
from mmlinattn.utils.errors import RunError

BLOCK_NUMEL = 2**24  # weights built at a time


def masked_weights(
    weights: Tensor,
    near: Tensor,
    others: Optional[int] = None,
    generator: Optional[torch.Generator] = None,
    divide: bool = True,
) -> Tensor:
    """Weights with some set to zero and the rest divided by their sum.

    Args:
        weights (Tensor): (B, heads, n, M).
        near (Tensor): (n, M) bool, the neighbourhood of each query.
        others (int, optional): Mask so many random keys outside of the neighbourhood instead of the keys in it, of
            those that have a weight in some head: padding and other parts of a rolled window have none to lose.
        generator (torch.Generator, optional): Of the random keys.
        divide (bool): False leaves the rest as it is.

    Returns:
        Tensor: As ``weights``; rows sum to one where they are divided.
    """
    hidden = near
    if others is not None:
        open_ = (weights != 0).any(dim=1, keepdim=True) & ~near
        order = torch.rand(near.shape, generator=generator).to(near.device).where(open_, -1)
        count = min(others, near.shape[-1])
        hidden = torch.zeros_like(open_).scatter_(-1, order.topk(count, dim=-1).indices, True) & open_
    weights = weights.masked_fill(hidden, 0)
    if not divide:
        return weights
    total = weights.sum(dim=-1, keepdim=True)
    return weights / total.where(total.abs() > 1e-6, torch.full_like(total, 1e-6).copysign(total))


@contextlib.contextmanager
def masked(model: nn.Module, window: int, others: bool = False, seed: int = 0) -> Iterator[None]:
    """A context in which every attention of a model ignores the ``window`` x ``window`` keys around each query, or as
    many random other ones. Convolutions beside the attention stay. Where weights sum to one, what is left does, too;
    outputs that an attention divides by their length still have that length; Hydra's other keys keep their weights.

    Args:
        model (nn.Module): Any model with attentions of this project, for inference.
        window (int): Odd side of the neighbourhood; on reduced keys, in cells of the reduced map.
        others (bool): Mask ``window ** 2`` random keys outside of it instead, of those that have a weight.
        seed (int): Of the random keys.

    Raises:
        ValueError: For a window that is even or below 1, or keys that lie on no map.
    """
    if window < 1 or window % 2 == 0:
        raise ValueError(f'window={window} has to be odd and at least 1')
    generator, ratios = torch.Generator().manual_seed(seed), {}
    for name, attention in arrangements(model).items():
        ratios.update(
            {mixer: reduction_of(attention) for mixer in attention.modules() if isinstance(mixer, TokenMixer)}
        )
        if not reduction_of(attention):
            raise ValueError(f'the keys of {name} are averages over the sequence of tokens: they have no neighbourhood')

    def without(mixer, given, out):
        q, k, v = given['q'], given['k'], given['v']
        grid, key_grid = given['grid'], given['key_grid']
        key_places, places = token_places(key_grid, v.device, -1), token_places(grid, v.device, 1)
        places = torch.div(places, ratios.get(mixer, 1), rounding_mode='floor')
        size = max(1, BLOCK_NUMEL // (q.shape[0] * mixer.num_heads * k.shape[1]))
        changes = []
        for rows in torch.arange(q.shape[1], device=v.device).split(size):
            shared = dict(mask=given['mask'], rotary=given['rotary'], bias=given['bias'], rows=rows)
            weights = mixer_weights(mixer, q, k, grid, key_grid, **shared)
            near = neighbours(places[rows], key_places, window // 2)
            rest = masked_weights(weights, near, window**2 if others else None, generator, mixer.normalised)
            values = rearrange(v.to(weights.dtype), 'b m (heads e) -> b heads m e', heads=weights.shape[1])
            if mixer.unit_output:  # what is divided is the output
                change = F.normalize(rest @ values, dim=-1) - F.normalize(weights @ values, dim=-1)
            else:
                change = (rest - weights) @ values
            changes.append(rearrange(change, 'b heads n e -> b n (heads e)'))
        return out + torch.cat(changes, dim=1).to(out.dtype)

    handles = watch_mixers(model, without)
    try:
        with torch.no_grad():
            yield
    finally:
        for handle in handles:
            handle.remove()


def token_places(grid: Grid, device, side: int) -> Tensor:
    """Row and column of each token, (N, 2); class tokens far away, on opposite sides as queries and as keys: they are
    in no neighbourhood."""
    index = torch.arange(grid.height * grid.width, device=device)
    patches = torch.stack((index // grid.width, index % grid.width), dim=-1)
    return torch.cat((patches.new_full((grid.prefix, 2), side * 10**6), patches))


def masking_accuracies(model: nn.Module, loader: dict, num: int, on_images: Callable = lambda n, total: None) -> dict:
    """Top-1 of a classifier of MMPretrain as it is and with masked weights, on the first images of a data set.

    Args:
        model (nn.Module): An MMPretrain classifier in eval mode.
        loader (dict): Config of the data loader.
        num (int): How many images, at least 1; fewer where the data set has fewer.
        on_images (Callable): Called with the images just done and their number in all.

    Returns:
        dict: ``images`` and ``accuracy``, in percent: ``none`` masked, ``3x3``, ``9 others``, ...

    Raises:
        RunError: The data set cannot be read.
    """
    try:
        data = DATASETS.build(loader['dataset'])
        count = min(num, len(data))
        samples = [data[i] for i in range(count)]
    except (OSError, ValueError, KeyError, AssertionError) as error:
        raise RunError(f'the test data cannot be read: {error}; --data-root names its folder.') from error
    variants: list[tuple[str, Optional[tuple[int, bool]]]] = [('none', None)]
    for window in (3, 5, 7):
        variants += [(f'{window}x{window}', (window, False)), (f'{window**2} others', (window, True))]
    found = {}
    for name, variant in variants:
        right = 0
        for start in range(0, count, 16):
            batch = pseudo_collate(samples[start : start + 16])
            with torch.no_grad(), contextlib.nullcontext() if variant is None else masked(model, *variant):
                results = model.test_step(batch)  # type: ignore[operator]
            right += sum(int(result.pred_label.item() in result.gt_label.tolist()) for result in results)
            on_images(len(results), count * len(variants))
        found[name] = 100 * right / count
    return dict(images=count, accuracy=found)


def plot(accuracies: dict, path: Path, title: str) -> None:
    """Bars: the accuracy as it is, without local weights, without as many others."""
    figure = Figure(figsize=(6, 3.6), layout='constrained')
    axis, names = figure.subplots(), list(accuracies)
    colours = ['0.4' if name == 'none' else 'tab:red' if 'x' in name else 'tab:blue' for name in names]
    axis.bar_label(axis.bar(names, list(accuracies.values()), color=colours), fmt='%.1f', fontsize=8)
    axis.tick_params('x', rotation=30, labelsize=8)
    axis.set_xlabel('keys masked for each query (red: around it, blue: random others)', fontsize=9)
    axis.set_ylabel('top-1 accuracy, %', fontsize=9)
    axis.set_title(f'{title}: accuracy with masked attention weights (InLine Tab. 2)', fontsize=9)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='config of a classifier')
    parser.add_argument('checkpoint', help='checkpoint file, URL, mmlinattn://NAME, or none for random weights')
    parser.add_argument('--out', type=Path, required=True, help='folder for masking.json and masking.png')
    parser.add_argument('--num', type=int, default=1000, help='images of the test data [1000]')
    parser.add_argument('--data-root', help='folder of the data set, in place of the one in the config')
    args = parser.parse_args()
    MMLogger.get_instance('mmengine', log_level='ERROR')
    with one_line_errors():
        cfg = read_config(args.config)
        if args.num < 1 or cfg.get('default_scope') != 'mmpretrain':
            raise RunError(f'--num {args.num} has to be at least 1, and the config of a classifier (MMPretrain).')
        if args.checkpoint.lower() != 'none':
            check_checkpoint(args.checkpoint, 'checkpoint')
        if args.data_root:
            set_data_root(cfg, args.data_root)
        with writing(args.out):
            args.out.mkdir(parents=True, exist_ok=True)
        model = load_model(cfg, args.checkpoint)
        with Progress() as bar:
            task = bar.add_task('masking', total=None)
            done = masking_accuracies(
                model, cfg.test_dataloader, args.num, lambda n, total: bar.update(task, advance=n, total=total)
            )
        (args.out / 'masking.json').write_text(json.dumps(done, indent=1))
        plot(done['accuracy'], args.out / 'masking.png', Path(args.config).stem)
        print(done)


if __name__ == '__main__':
    main()
