#!/usr/bin/env python
# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Collect images that --show-dir wrote for a detector or segmentor, ground truth beside prediction, into one sheet."""

import argparse
import runpy
from itertools import zip_longest
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().parents[1] / 'check_env.py'))  # finds the checkout and missing packages

from matplotlib.figure import Figure

from mmlinattn.tooling.analysis.pictures import evenly_spaced
from mmlinattn.tooling.command_line import check_out_file, one_line_errors
from mmlinattn.tooling.images import read_picture
from mmlinattn.utils.errors import RunError

SUFFIXES = ('.jpg', '.jpeg', '.png', '.bmp')
COLUMNS, WIDTH = 2, 6.4  # inches of an image, at 100 pixels each


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('show_dir', type=Path, metavar='SHOW_DIR', help='searched with its sub-folders')
    parser.add_argument('out', type=Path, metavar='OUT.png', help='the sheet to write')
    parser.add_argument('--num', type=int, default=8, help='images, evenly spread over all [8]')
    return parser.parse_args()


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


def main() -> None:
    args = parse_args()
    with one_line_errors():
        if args.num < 1:
            raise RunError(f'--num {args.num} has to be at least 1.')
        if args.out.suffix.lower() != '.png':
            raise RunError(f'OUT.png {str(args.out)!r} has to end with .png.')
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
    main()
