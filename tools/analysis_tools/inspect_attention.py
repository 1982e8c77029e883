#!/usr/bin/env python
# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Measure and draw the attentions of a detector, segmentor or classifier on your images.

    python tools/analysis_tools/inspect_attention.py CONFIG CHECKPOINT photo.jpg --out inspected --query 120 80

Writes plots and summary.json with one entry per block. CHECKPOINT may be none for random weights. See docs/inspect.md.
"""

import argparse
import json
import os.path as osp
import runpy
import sys
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().parents[1] / 'check_env.py'))  # finds the checkout and missing packages

from mmlinattn_console import add_model_arguments, tool_parser

WHAT = ('rank', 'confusion', 'locality', 'sharpness', 'ccs', 'maps')


def parse_args() -> argparse.Namespace:
    parser = tool_parser(__doc__)
    add_model_arguments(parser, may_be_random=True)
    parser.add_argument('images', nargs='+', metavar='IMAGE', help='images; numbers are means over them')
    parser.add_argument('--out', type=Path, required=True, help='folder for summary.json and the plots')
    parser.add_argument('--what', nargs='+', choices=WHAT, default=list(WHAT), help='what to measure [all]')
    parser.add_argument('--query', nargs=2, type=float, metavar=('X', 'Y'), help='pixel of the query token [middle]')
    parser.add_argument(
        '--shape', nargs=2, type=int, metavar=('H', 'W'), help='resize to this size, in place of the test pipeline'
    )
    parser.add_argument(
        '--num-queries',
        type=int,
        default=196,
        help='sampled queries: the most rows of an attention map in memory [196, the tokens of a DeiT at 224]',
    )
    parser.add_argument('--device', default='cpu', help='cpu, cuda:0, ... [cpu]')
    return parser.parse_args()


if __name__ == '__main__':
    args = parse_args()  # before PyTorch is imported: --help answers at once

import torch
from mmengine.config import Config
from mmengine.logging import MMLogger
from rich.console import Console
from rich.progress import Progress

from mmlinattn import __version__
from mmlinattn.tooling.analysis import loading, pictures
from mmlinattn.tooling.analysis.capture import arrangements, watched
from mmlinattn.tooling.analysis.inspecting import CONFUSION_DISTANCE, averaged, full_map, measure_block
from mmlinattn.tooling.command_line import check_device, clean_end, one_line_errors, writing
from mmlinattn.tooling.configs import PIP_NAMES, check_checkpoint, read_with_options
from mmlinattn.tooling.images import read_picture
from mmlinattn.utils.errors import RunError


def checked(args: argparse.Namespace) -> Config:
    """Return the config after all checks that do not need the model."""
    cfg = read_with_options(args)
    if args.checkpoint.lower() != 'none':
        args.checkpoint = check_checkpoint(args.checkpoint, 'checkpoint')
    scope = cfg.get('default_scope')
    if scope not in PIP_NAMES:
        raise RunError(f'{args.config}: default_scope={scope!r}: expected one of {tuple(PIP_NAMES)}.')
    if args.num_queries < 2:
        raise RunError(f'--num-queries={args.num_queries}: expected at least 2.')
    if args.shape and min(args.shape) < 32:
        raise RunError(f'--shape {args.shape[0]} {args.shape[1]}: expected at least 32 pixels per side.')
    for path in args.images:
        if not osp.isfile(path):
            raise RunError(f'image {path!r}: no such file.')
    check_device(args.device)
    with writing(args.out):
        args.out.mkdir(parents=True, exist_ok=True)
    return cfg


def inspect_picture(model, picture, args, progress, query, pixel) -> list:
    """Measure each block on an image, draw the attention maps of a query token, and return the entries of the blocks.

    ``query`` is the pixel (column, row) of the token in the preprocessed image, ``pixel`` the same in the original one.
    """
    entries, maps, full = [], [], []
    generator = torch.Generator().manual_seed(0)
    numbers = [name for name in args.what if name != 'maps']

    def measure(block):
        entries.append(measure_block(block, numbers, args.num_queries, generator))
        if 'maps' in args.what:
            if block.ratio:  # keys on no grid are in the full attention maps only
                maps.append(pictures.collect_query(block, picture, *query))
            full.append((block.name, block.mixer_name, full_map(block).cpu().numpy()))
        progress()

    with watched(model, measure):
        model.backbone(picture.inputs.to(args.device))
    folder = args.out / 'maps'
    if maps:
        path = folder / f'{picture.name}_query_{pixel[0]:g}_{pixel[1]:g}.png'
        pictures.plot_query(maps, picture, query, pixel, path)
    if full:
        pictures.plot_full(full, picture.name, folder / f'{picture.name}_full.png')
    return entries


def merged(per_image: list[list[dict]]) -> list[dict]:
    """Average the entries of each block over the images. Differing sizes of feature maps are listed."""
    blocks = []
    for entries in zip(*per_image):
        block = averaged([(entry, 1.0) for entry in entries])
        for key in ('map', 'key_map'):
            sizes = [entry[key] for entry in entries]
            if any(size != sizes[0] for size in sizes):
                block[key] = sizes
        blocks.append(block)
    return blocks


def main(args: argparse.Namespace) -> None:
    MMLogger.get_instance('mmengine', log_level='ERROR')
    with clean_end(), one_line_errors():
        cfg = checked(args)
        images = [(path, read_picture(path, None if args.shape else cfg)) for path in args.images]
        torch.manual_seed(0)  # random weights are the same on every call
        model = loading.load_model(cfg, args.checkpoint, args.device)
        try:
            per_image, records = [], []
            with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
                task = bar.add_task('blocks', total=len(arrangements(model)) * len(images))
                for i, (path, image) in enumerate(images):
                    name = f'{i}_{Path(path).stem}' if len(images) > 1 else Path(path).stem
                    picture = loading.prepare(cfg, model, image, name, args.shape)
                    pixel = args.query or [side // 2 for side in picture.size]
                    query, shown = picture.to_shown(*pixel), list(picture.shown.shape[:2])
                    records.append(dict(image=path, query=pixel, shown=shown, query_shown=list(query)))
                    per_image.append(inspect_picture(model, picture, args, lambda: bar.advance(task), query, pixel))
        except (NotImplementedError, ValueError) as error:
            raise RunError(str(error)) from error
        blocks = merged(per_image)
        title = Path(args.config).stem + (' (random weights)' if args.checkpoint.lower() == 'none' else '')
        summary = dict(
            version=__version__,
            config=args.config,
            checkpoint=args.checkpoint,
            images=records,
            settings=dict(
                num_queries=args.num_queries,
                confusion_distance=CONFUSION_DISTANCE,
                rank='singular values above max(rows, columns) * eps(float32) * the largest',
                above_1_percent='singular values above 1 % of the largest',
                effective='exp of the entropy of the singular values as a distribution',
            ),
            blocks=blocks,
        )
        made = pictures.plot_measures(blocks, args.what, args.out, title)
        (args.out / 'summary.json').write_text(json.dumps(summary, indent=1), encoding='utf-8')
        worst = max(blocks, key=lambda block: block['forward_error'])
        print(f'{len(blocks)} blocks; weights @ v against the forward pass: {worst["forward_error"]:.1e} at most')
        print(f'{args.out / "summary.json"} and {len(made)} plot(s)' + (', maps/' if 'maps' in args.what else ''))


if __name__ == '__main__':
    main(args)
