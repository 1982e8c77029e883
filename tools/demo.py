#!/usr/bin/env python
# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Draw what a model finds in pictures: a detector, segmentor or classifier, as the config says."""

import argparse
import glob
import os.path as osp

from mmengine.device import get_device

from mmlinattn.engine import RunError
from mmlinattn.engine.cli import check_checkpoint, notice, one_line_errors, read_config

SUFFIXES = ('.jpg', '.jpeg', '.png', '.bmp', '.tif', '.tiff', '.webp')


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config file')
    parser.add_argument('checkpoint', help='checkpoint file, URL or mmlinattn://NAME')
    parser.add_argument('inputs', nargs='+', help='pictures, or folders of pictures')
    parser.add_argument('--out-dir', default='outputs', help='folder for the drawings [outputs]')
    parser.add_argument('--score-thr', type=float, default=0.3, help='lowest score drawn [0.3]')
    parser.add_argument('--device', default=get_device(), help='cpu, cuda:0, ... [the best here]')
    return parser.parse_args()


def find_pictures(inputs) -> list:
    """The pictures named, and those directly inside the folders named."""
    found = []
    for path in inputs:
        if osp.isdir(path):
            inside = sorted(glob.glob(osp.join(glob.escape(path), '*')))
            pictures = [name for name in inside if name.lower().endswith(SUFFIXES)]
            if not pictures:
                raise RunError(f'input {path!r}: no picture ({" ".join(SUFFIXES)}) in this folder.')
            found += pictures
        elif osp.isfile(path):
            found.append(path)
        else:
            raise RunError(f'input {path!r}: no such file or folder.')
    return found


def main() -> None:
    args = parse_args()
    with one_line_errors():
        scope = read_config(args.config).get('default_scope')
        weights = check_checkpoint(args.checkpoint, 'checkpoint')
        pictures = find_pictures(args.inputs)
        if scope == 'mmdet':
            from mmdet.apis import DetInferencer

            infer = DetInferencer(args.config, weights, args.device)
            infer(pictures, out_dir=args.out_dir, pred_score_thr=args.score_thr)
        elif scope == 'mmseg':
            from mmseg.apis import MMSegInferencer

            infer = MMSegInferencer(args.config, weights, device=args.device)
            infer(pictures, out_dir=args.out_dir)
        elif scope == 'mmpretrain':
            from mmpretrain import ImageClassificationInferencer

            infer = ImageClassificationInferencer(args.config, weights, device=args.device)
            infer(pictures, show_dir=args.out_dir)
        else:
            raise RunError(f'{args.config}: default_scope = {scope!r} is none of mmdet, mmseg, mmpretrain.')
        notice(f'pictures are in {osp.abspath(args.out_dir)}')


if __name__ == '__main__':
    main()
