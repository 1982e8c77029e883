#!/usr/bin/env python
# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Collect images of a test on one sheet, ground truth beside prediction: those that --show-dir wrote, or objects of
--save-json drawn on enlarged grey images, with one colour a class.

    python tools/analysis_tools/contact_sheet.py shown sheet.png
    python tools/analysis_tools/contact_sheet.py found.json sheet.png --annotations val.json --images val2017
"""

import argparse
import contextlib
import io
import runpy
from itertools import zip_longest
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().parents[1] / 'check_env.py'))  # finds the checkout and missing packages


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        'show_dir', type=Path, metavar='SHOW_DIR', help='searched with its sub-folders; or the file of --save-json'
    )
    parser.add_argument('out', type=Path, metavar='OUT.png', help='the sheet to write')
    parser.add_argument('--num', type=int, default=8, help='images, evenly spread over all [8]')
    parser.add_argument('--annotations', type=Path, metavar='FILE', help='COCO annotations of the images of a file')
    parser.add_argument('--images', type=Path, metavar='DIR', help='folder of the images of a file')
    return parser.parse_args()


if __name__ == '__main__':
    args = parse_args()  # before PyTorch is imported: --help answers at once

import cv2
import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torchvision.ops import nms

from mmlinattn.tooling.analysis.pictures import evenly_spaced
from mmlinattn.tooling.command_line import check_out_file, one_line_errors
from mmlinattn.tooling.images import read_picture
from mmlinattn.utils.errors import RunError

SUFFIXES = ('.jpg', '.jpeg', '.png', '.bmp')
COLUMNS, WIDTH = 2, 6.4  # inches of an image, at 100 pixels each
LEAST_SCORE, SAME_OBJECT = 0.5, 0.6  # boxes that are drawn; overlap of two boxes of which the better is drawn


def find_pictures(show_dir: Path, sheet: Path) -> list[Path]:
    """Return the sorted paths of all images below ``show_dir``, without the ``sheet`` of an earlier run."""
    found = (path for path in show_dir.rglob('*') if path.suffix.lower() in SUFFIXES)
    return sorted(path for path in found if path.resolve() != sheet.resolve())


def make_sheet(paths: list[Path]) -> Figure:
    images = [read_picture(path)[..., ::-1] for path in paths]
    columns = min(COLUMNS, len(paths))
    rows = -(-len(paths) // columns)
    tallest = max(image.shape[0] / image.shape[1] for image in images)
    figure = Figure(figsize=(WIDTH * columns, (WIDTH * tallest + 0.4) * rows), dpi=100, layout='constrained')
    for axis, path, image in zip_longest(figure.subplots(rows, columns, squeeze=False).flat, paths, images):
        axis.set_axis_off()
        if path is not None:
            axis.imshow(image)
            axis.set_title(path.name, loc='left', fontsize=9, pad=18)
            for label, at in (('ground truth', 0.25), ('prediction', 0.75)):
                axis.text(at, 1.01, label, transform=axis.transAxes, ha='center', va='bottom')
    return figure


def draw_objects(axis, objects: list, masks: list, colours: dict) -> None:
    """Draw boxes and masks of a grey image in the colours of their categories, with the scores of predictions."""
    for each, mask in zip(objects, masks):
        colour, (left, top, width, height) = colours[each['category_id']], each['bbox']
        axis.add_patch(Rectangle((left, top), width, height, fill=False, edgecolor=colour, linewidth=2))
        layer = np.zeros((*mask.shape, 4))
        layer[mask > 0] = (*colour[:3], 0.45)
        axis.imshow(layer)
        if 'score' in each:
            box = dict(facecolor=colour, edgecolor='none', pad=1)
            score = f'{each["score"]:.2f}'
            axis.text(left, max(top, 8), score, color='white', fontsize=9, va='bottom', bbox=box)


def found_objects(objects: list) -> list:
    """Return the predictions of an image that are drawn: of boxes on one object, whatever their classes, the best."""
    objects = [each for each in objects if each['score'] >= LEAST_SCORE]
    boxes = torch.tensor([each['bbox'] for each in objects], dtype=torch.float32).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    scores = torch.tensor([each['score'] for each in objects], dtype=torch.float32)
    return [objects[i] for i in nms(boxes, scores, SAME_OBJECT)]


def make_drawn_sheet(results: Path, annotations: Path, images: Path, number: int) -> tuple[Figure, int, int]:
    """Draw objects of a COCO results file beside the annotations, and return figure, drawn images and all images."""
    from pycocotools.coco import COCO

    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(annotations))
        found = truth.loadRes(str(results))
    ids = sorted(truth.getImgIds())
    shown = [ids[i] for i in evenly_spaced(len(ids), number)]
    names = {category['id']: category['name'] for category in truth.dataset['categories']}
    palette = colormaps['tab10' if len(names) <= 10 else 'hsv'].resampled(max(10, len(names)))
    colours = {key: palette(i) for i, key in enumerate(names)}
    rows = -(-len(shown) // COLUMNS)
    figure = Figure(figsize=(WIDTH * COLUMNS, WIDTH / 2 * rows + 0.5), dpi=100, layout='constrained')
    pairs = figure.subplots(rows, 2 * COLUMNS, squeeze=False).reshape(-1, 2)
    for axes in pairs[len(shown) :].flat:
        axes.set_axis_off()
    for image_id, axes in zip(shown, pairs):
        (info,) = truth.loadImgs(image_id)
        picture = cv2.cvtColor(read_picture(str(images / info['file_name'])), cv2.COLOR_BGR2GRAY)
        for axis, coco, title in zip(axes, (truth, found), ('ground truth', 'prediction')):
            objects = coco.loadAnns(coco.getAnnIds(image_id))
            objects = found_objects(objects) if coco is found else objects
            axis.set_axis_off()
            axis.imshow(picture, cmap='gray', vmin=0, vmax=255)
            axis.set_title(title, fontsize=9)
            masks = [coco.annToMask(each) if each.get('segmentation') else np.zeros((1, 1)) for each in objects]
            draw_objects(axis, objects, masks, colours)
            axis.set(xlim=(0, picture.shape[1]), ylim=(picture.shape[0], 0))
    handles = [Patch(color=colours[key], label=name) for key, name in names.items()]
    figure.legend(handles=handles, loc='outside lower center', ncols=min(8, len(names)), frameon=False)
    return figure, len(shown), len(ids)


def main(args: argparse.Namespace) -> None:
    with one_line_errors():
        if args.num < 1:
            raise RunError(f'--num={args.num}: expected at least 1.')
        if args.out.suffix.lower() != '.png':
            raise RunError(f'OUT.png={str(args.out)!r}: expected a name that ends with .png.')
        if args.show_dir.suffix == '.json':
            for name, path in (('--annotations', args.annotations), ('--images', args.images)):
                if path is None or not path.exists():
                    raise RunError(f'{name}={str(path)!r}: expected the path of the images of {str(args.show_dir)!r}.')
            check_out_file(args.out, args.show_dir, args.annotations)
            figure, drawn, number = make_drawn_sheet(args.show_dir, args.annotations, args.images, args.num)
            figure.savefig(args.out)
            print(f'{args.out}: {drawn} of {number} images')
            return
        found = find_pictures(args.show_dir, args.out)
        if not found:
            raise RunError(
                f'SHOW_DIR {str(args.show_dir)!r}: no image ({" ".join(SUFFIXES)}) in it; did the test run with '
                '--show-dir?'
            )
        check_out_file(args.out)
        shown = [found[i] for i in evenly_spaced(len(found), args.num)]
        make_sheet(shown).savefig(args.out)
    print(f'{args.out}: {len(shown)} of {len(found)} images')


if __name__ == '__main__':
    main(args)
