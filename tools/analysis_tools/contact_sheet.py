# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Collect images that ``--show-dir`` wrote into one labelled sheet.

Example: ``python tools/analysis_tools/contact_sheet.py work_dirs/shapes/show sheet.png --num 8``
"""

import argparse
import math
import os
import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

SUFFIXES = ('.jpg', '.jpeg', '.png', '.bmp')
MARGIN, HEADER = 12, 44
INK, PAPER = (30, 30, 30), (255, 255, 255)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage is one --help away."""

    def error(self, message):
        self.exit(2, f'{self.prog}: error: {message}\n')


def parse_args(argv):
    parser = _Parser(
        description="Collect images that mmdet's or mmseg's visualiser wrote with --show-dir "
        '(ground truth beside prediction) into one labelled sheet.'
    )
    parser.add_argument('show_dir', type=Path, metavar='SHOW_DIR', help='searched with its sub-folders')
    parser.add_argument('out', type=Path, metavar='OUT.png', help='the sheet to write')
    parser.add_argument('--num', type=int, default=8, help='images, evenly spread over all (default: 8)')
    parser.add_argument('--cols', type=int, default=2, help='columns (default: 2)')
    parser.add_argument('--width', type=int, default=640, help='width of an image in pixels (default: 640)')
    parser.add_argument(
        '--heads',
        nargs='*',
        default=['ground truth', 'prediction'],
        help='what the equal parts of each image show, from left to right '
        '(default: "ground truth" "prediction"); none: no such labels',
    )
    args = parser.parse_args(argv)
    for name, least in (('num', 1), ('cols', 1), ('width', 32)):
        if getattr(args, name) < least:
            parser.error(f'argument --{name}: must be at least {least}, got {getattr(args, name)}')
    if args.out.suffix.lower() != '.png':
        parser.error(f'argument OUT.png: must end in .png, got {args.out}')
    return parser, args


def find_pictures(show_dir: Path, sheet: Path) -> list[Path]:
    """All images below ``show_dir`` by path, without an earlier ``sheet`` among them."""
    found = (path for path in show_dir.rglob('*') if path.suffix.lower() in SUFFIXES)
    return sorted(path for path in found if path.resolve() != sheet.resolve())


def spread(items: list, num: int) -> list:
    """At most ``num`` of the items, evenly spread from the first to the last."""
    if len(items) <= num:
        return items
    if num == 1:
        return items[:1]
    return [items[round(i * (len(items) - 1) / (num - 1))] for i in range(num)]


def load(path: Path, width: int) -> Image.Image:
    """Read an image and bring it to ``width`` pixels; raises what Pillow raises if it cannot be read."""
    with Image.open(path) as picture:
        height = max(1, round(picture.height * width / picture.width))
        return picture.convert('RGB').resize((width, height), Image.Resampling.LANCZOS)


def font(size: int):
    try:
        return ImageFont.load_default(size)
    except (TypeError, OSError, ImportError):  # Pillow < 10.1, or built without FreeType: one small bitmap font
        return ImageFont.load_default()


def write_above(draw: ImageDraw.ImageDraw, at: tuple[float, float], words: str, font) -> None:
    """Write with the middle of the base line at ``at``."""
    if isinstance(font, ImageFont.FreeTypeFont):
        draw.text(at, words, INK, font, anchor='ms')
    else:  # bitmap fonts know no anchor
        _, _, width, height = font.getbbox(words)
        draw.text((at[0] - width / 2, at[1] - height), words, INK, font)


def make_sheet(pictures: list[tuple[str, Image.Image]], cols: int, heads: list[str]) -> Image.Image:
    """Lay out captioned images of equal width, row by row.

    Args:
        images: Captions and images.
        cols: Columns; fewer where there are fewer images.
        heads: Labels above the equal parts of each image.
    """
    cols = min(cols, len(pictures))
    rows = [pictures[i : i + cols] for i in range(0, len(pictures), cols)]
    heights = [max(picture.height for _, picture in row) + HEADER for row in rows]
    width = pictures[0][1].width
    size = (
        MARGIN + cols * (width + MARGIN),
        MARGIN + sum(height + MARGIN for height in heights),
    )
    sheet = Image.new('RGB', size, PAPER)
    draw = ImageDraw.Draw(sheet)
    top = MARGIN
    for row, height in zip(rows, heights):
        for col, (caption, picture) in enumerate(row):
            left = MARGIN + col * (width + MARGIN)
            draw.text((left, top), caption, INK, font(15))
            for i, head in enumerate(heads):
                centre = left + width * (2 * i + 1) / (2 * len(heads))
                write_above(draw, (centre, top + HEADER - 4), head, font(16))
            sheet.paste(picture, (left, top + HEADER))
        top += height + MARGIN
    return sheet


def main(argv=None) -> int:
    parser, args = parse_args(argv)
    if not args.show_dir.is_dir():
        parser.error(f'argument SHOW_DIR: no such folder: {args.show_dir}')
    found = find_pictures(args.show_dir, args.out)
    if not found:
        parser.error(
            f'argument SHOW_DIR: no images ({" ".join(SUFFIXES)}) in {args.show_dir} '
            'or below; did the test run with --show-dir?'
        )
    pictures = []
    for path in spread(found, args.num):
        try:
            pictures.append((path.name, load(path, args.width)))
        except Exception as error:  # damaged PNG files raise SyntaxError, too large ones an error of Pillow's own
            print(f'warning: left out, cannot be read: {path}: {error}', file=sys.stderr)
    if not pictures:
        parser.error(f'argument SHOW_DIR: none of the images in {args.show_dir} can be read')
    sheet = make_sheet(pictures, args.cols, args.heads)
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        partial = args.out.with_name(f'.{args.out.name}.{os.getpid()}')
        try:
            sheet.save(partial, format='PNG')
            partial.replace(args.out)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        parser.error(f'argument OUT.png: cannot write {args.out}: {error}')
    rows = math.ceil(len(pictures) / args.cols)
    print(f'{args.out}: {len(pictures)} of {len(found)} images in {rows} rows')
    return 0


if __name__ == '__main__':
    sys.exit(main())
