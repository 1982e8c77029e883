#!/usr/bin/env python
# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Draw the objects of a test on one sheet of enlarged grey images, ground truth beside prediction.

python tools/test.py CONFIG CHECKPOINT --save-json found.json
python tools/analysis_tools/contact_sheet.py found.json sheet.png --annotations val.json --images val2017
"""

import argparse
import contextlib
import io
import json
import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().parents[1] / 'check_env.py'))  # finds the checkout and missing packages

from mmlinattn_console import tool_parser


def parse_args() -> argparse.Namespace:
    parser = tool_parser(__doc__)
    parser.add_argument('results', type=Path, metavar='RESULTS', help='file of --save-json')
    parser.add_argument('out', type=Path, metavar='OUT.png', help='the sheet to write')
    parser.add_argument('--num', type=int, default=8, help='images, evenly spread over all [8]')
    parser.add_argument(
        '--annotations', required=True, type=Path, metavar='FILE', help='COCO annotations of the images'
    )
    parser.add_argument('--images', required=True, type=Path, metavar='DIR', help='folder of the images')
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

from mmlinattn.engine.data.coco import load_coco
from mmlinattn.tooling.analysis.pictures import evenly_spaced
from mmlinattn.tooling.command_line import check_out_file, clean_end, one_line_errors
from mmlinattn.tooling.images import read_picture
from mmlinattn.utils.errors import RunError

COLUMNS, WIDTH = 2, 6.4  # pairs of images in a row; inches of a pair, at 100 pixels each
KEYS = {'image_id', 'category_id', 'bbox', 'score'}  # of a result
LEAST_SCORE, SAME_OBJECT = 0.5, 0.6  # of a drawn box; overlap with a better box that hides it


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
    """Return the predictions to draw: of overlapping boxes of any classes, only the one with the highest score."""
    objects = [each for each in objects if each['score'] >= LEAST_SCORE]
    boxes = torch.tensor([each['bbox'] for each in objects], dtype=torch.float32).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    scores = torch.tensor([each['score'] for each in objects], dtype=torch.float32)
    return [objects[i] for i in nms(boxes, scores, SAME_OBJECT)]


def make_sheet(results: Path, annotations: Path, images: Path, number: int) -> tuple[Figure, int, int]:
    """Draw the objects of a COCO results file beside the annotations, on up to ``number`` evenly spaced images.

    Returns:
        tuple[Figure, int, int]: The figure, the number of drawn images, and the number of all images.
    """
    from pycocotools.coco import COCO

    try:
        content = json.loads(results.read_text(encoding='utf-8'))
    except ValueError as error:
        raise RunError(f'results {str(results)!r} cannot be read as JSON: {error}.') from error
    truth = COCO()
    truth.dataset, problem = load_coco(str(annotations))
    if problem:
        raise RunError(f'annotations {str(annotations)!r} {problem}.')
    with contextlib.redirect_stdout(io.StringIO()):
        truth.createIndex()
        ids = sorted(truth.getImgIds())
        if not isinstance(content, list) or not all(isinstance(each, dict) and KEYS <= {*each} for each in content):
            raise RunError(f'results {str(results)!r}: expected a list of COCO results, as of --save-json.')
        for key, known in (('image_id', ids), ('category_id', truth.getCatIds())):
            others = {each[key] for each in content} - {*known}
            if others:
                raise RunError(f'results {str(results)!r}: {key}={min(others, key=str)!r} is not in {annotations}.')
        found = truth.loadRes(content) if content else COCO()
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
            objects = coco.loadAnns(coco.getAnnIds(image_id)) if coco.anns else []
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
    with clean_end(), one_line_errors():
        if args.num < 1:
            raise RunError(f'--num={args.num}: expected at least 1.')
        if args.out.suffix.lower() != '.png':
            raise RunError(f'OUT.png={str(args.out)!r}: expected a name that ends with .png.')
        for name in ('results', 'annotations', 'images'):
            if not getattr(args, name).exists():
                raise RunError(f'{name} {str(getattr(args, name))!r}: no such file or folder.')
        check_out_file(args.out, args.results, args.annotations)
        figure, drawn, number = make_sheet(args.results, args.annotations, args.images, args.num)
        figure.savefig(args.out)
        print(f'{args.out}: {drawn} of {number} images')


if __name__ == '__main__':
    main(args)
