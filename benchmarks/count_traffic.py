# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Count kernel launches, Python calls and kept memory of a training step. No GPU needed.

    python benchmarks/count_traffic.py
    python benchmarks/count_traffic.py --only detectors

Tables:

- attentions: one call of each linear attention on one projection. Column "kept": memory that the backward pass reads
  besides queries, keys, values and given tables, in tensors of the queries' size;
- memory: the same of whole models, in MB;
- backbones: launches and Python calls of each backbone;
- detectors: a whole Mask R-CNN step with its optimizer.

Launches of backbones and detectors are counted in bfloat16, see launches.py. reference: the reference implementations
under autograd (``MMLINATTN_OPS=reference``). CPU, GPU: the path of these devices.
"""

import argparse
import contextlib
import logging
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Optional

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from launches import (  # noqa: E402
    BACKBONES,
    SWIN,
    adamw_launches,
    autocast,
    backbone_step,
    build,
    cuda_autocast,
    detector_step,
    gpu_path,
    launches,
)

from mmlinattn import ops  # noqa: E402
from mmlinattn.attention import TOKEN_MIXERS, Grid, LocalMixer  # noqa: E402

PATHS = ('reference', 'CPU', 'GPU')
CONFIGS = Path(__file__).resolve().parents[1] / 'configs' / 'mmdet'
DETECTORS = {  # name: config, and the architecture of its backbone if it is another one
    SWIN: ('mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py', None),
    'RAVLT-T': ('ravlt_t_maskrcnn_1x.py', None),
    'RAVLT-T, fully linear': ('ravlt_t_maskrcnn_1x.py', dict(stage_attns=('rala',) * 4)),
    'RALA-Swin-T': ('rala_swin_t_maskrcnn_1x.py', None),
    'InLine-Swin-T': ('rala_swin_t_maskrcnn_1x.py', dict(arch='inline-tiny')),
    'FLatten-Swin-T': ('rala_swin_t_maskrcnn_1x.py', dict(arch='flatten-tiny')),
    'InLine-PVT-T': ('inline_pvt_t_maskrcnn_1x.py', None),
    'FLatten-PVT-T': ('flatten_pvt_t_maskrcnn_1x.py', None),
    'hMHSA-PVTv2-B1': ('hmhsa_pvt_v2_b1_maskrcnn_1x.py', None),
    'InLine-CSWin-T': ('inline_cswin_t_maskrcnn_1x.py', None),
    'FLatten-CSWin-T': ('flatten_cswin_t_maskrcnn_1x.py', None),
    'InLine-DeiT-T': ('inline_deit_t_maskrcnn_1x.py', None),
    'hMHSA-Next-ViT-S': ('hmhsa_nextvit_s_maskrcnn_1x.py', None),
}


@contextlib.contextmanager
def path_of(name: str) -> Iterator[None]:
    with ops.use('reference' if name == 'reference' else 'auto'), gpu_path(is_gpu=name == 'GPU'):
        yield


def kept(function, *leaves: Tensor, own=()):
    """Return the result, and the bytes that its backward pass keeps besides ``leaves`` and ``own``."""
    storages, given = {}, {t.untyped_storage().data_ptr() for t in (*leaves, *own)}

    def pack(t: Tensor) -> Tensor:
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = function(*leaves)
    return out, sum(size for place, size in storages.items() if place not in given)


def row(*cells) -> None:
    print('| ' + ' | '.join(map(str, cells)) + ' |', flush=True)


def head(*titles: str) -> None:
    print()
    row(*titles)
    row(*['---'] * len(titles))


def attentions(tokens: int, width: int, heads: int) -> tuple[dict, list[Tensor]]:
    """Return the registered linear attentions by name, without the convolutions of the values, and their tensors."""
    calls, grid, rotary = {}, Grid(1, tokens), ops.rotary_table(1, tokens, width // heads)
    tables = [rotary]
    for name, kind in sorted(TOKEN_MIXERS.module_dict.items()):
        if kind.quadratic:
            continue
        mixer = kind(width, heads, grid=grid[:2])
        tables += [*mixer.parameters(), *mixer.buffers()]
        if isinstance(mixer, LocalMixer):
            calls[name] = partial(mixer.attend, key_grid=grid)
        else:
            calls[name] = partial(mixer, grid=grid, key_grid=grid, rotary=rotary)
    return calls, tables


def count_attentions(args) -> None:
    width = args.heads * args.head_dim
    calls, tables = attentions(args.tokens, width, args.heads)
    for dtype in (torch.float32, torch.bfloat16):
        head(str(dtype)[6:], *(title for name in PATHS for title in (f'{name}: kept', 'launches, backward')))
        for name, function in calls.items():
            cells = []
            for path in PATHS:
                x = torch.randn(args.batch, args.tokens, 3 * width).to(dtype).requires_grad_()
                parts = x.chunk(3, dim=-1)
                with path_of(path):
                    size = kept(function, *parts, own=tables)[1] / (args.batch * args.tokens * width * dtype.itemsize)
                    out = function(*parts)
                    forward = launches(function, *parts)
                    backward = launches(torch.autograd.backward, out, torch.ones_like(out))
                cells += [f'{size:.2f}', f'{forward}, {backward}']
            row(name, *cells)


def count_memory(args) -> None:
    for side in args.sides:
        head(f'MB kept, {args.batch} images, {side} pixels', *PATHS, 'GPU, bfloat16')
        for name in (SWIN, *BACKBONES):
            model = build(name, shrink=1)
            model.train()
            images, weights = torch.randn(args.batch, 3, side, side), list(model.parameters())
            cells = []
            for path in PATHS:
                with path_of(path):
                    cells.append(f'{kept(model, images, own=weights)[1] / 1e6:.0f}')
            with path_of('GPU'), cuda_autocast(), autocast():
                cells.append(f'{kept(model, images, own=weights)[1] / 1e6:.0f}')
            row(name, *cells)


def count_backbones(args) -> None:
    for side in args.sides:
        titles = 'inference', 'training: forward', 'backward', 'sum', 'of Swin-T', 'Python calls: inference', 'training'
        head(f'{side} pixels', *titles)
        peer = None
        for name in (SWIN, *BACKBONES):
            found = backbone_step(build(name), torch.randn(args.batch, 3, side, side))
            total = found['forward'] + found['backward']
            peer = peer or total
            counts = found['inference'], found['forward'], found['backward'], total
            row(name, *counts, f'{total / peer:.2f}', found['inference_calls'], found['forward_calls'])


def detector(name: str, constructor: Optional[str] = None, device: str = 'cpu') -> tuple:
    """Build the model and the optimizer of :data:`DETECTORS`, without checkpoints.

    Args:
        name (str): Key of :data:`DETECTORS`.
        constructor (str, optional): Constructor of the optimizer in place of the config's.
        device (str): Device of the weights.
    """
    from mmengine.config import Config
    from mmengine.hub import get_config
    from mmengine.optim import build_optim_wrapper
    from mmengine.registry import MODELS, init_default_scope

    path, backbone = DETECTORS[name]
    cfg = get_config(path) if '::' in path else Config.fromfile(CONFIGS / path)
    init_default_scope(cfg.default_scope)
    cfg.model.backbone.update(backbone or {}, init_cfg=None)
    if constructor:
        cfg.optim_wrapper.constructor = constructor
    model = MODELS.build(cfg.model).to(device)
    logging.disable(logging.CRITICAL)  # some constructors log three lines for each parameter
    optimizer = build_optim_wrapper(model, cfg.optim_wrapper).optimizer
    logging.disable(logging.NOTSET)
    return model, optimizer


def count_detectors(args) -> None:
    from mmdet.testing import demo_mm_inputs

    head('whole Mask R-CNN step', 'backbone', 'neck, heads', 'optimizer', 'its groups', 'sum', 'of Swin-T')
    peer = None
    for name in DETECTORS:
        model, optimizer = detector(name)
        data = demo_mm_inputs(2, [[3, 192, 192]] * 2, num_classes=80, num_items=[3, 3], with_mask=True)
        found, step = detector_step(model, data), adamw_launches(optimizer)
        total = sum(found.values()) + step
        peer = peer or total
        row(name, *found.values(), step, len(optimizer.param_groups), total, f'{total / peer:.2f}')


PARTS = dict(
    attentions=count_attentions, memory=count_memory, backbones=count_backbones, detectors=count_detectors
)  # fmt: skip


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--only', nargs='+', choices=PARTS, default=list(PARTS), help='tables to print [all]')
    parser.add_argument('--sides', type=int, nargs='+', default=[224, 640], help='image sizes of backbones, pixels')
    parser.add_argument('--batch', type=int, default=2)
    parser.add_argument('--heads', type=int, default=4, help='size of the attentions')
    parser.add_argument('--tokens', type=int, default=4096, help='size of the attentions')
    parser.add_argument('--head-dim', type=int, default=64, help='size of the attentions')
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    for part in args.only:
        PARTS[part](args)


if __name__ == '__main__':
    main()
