#!/usr/bin/env python
# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Draw what a model finds in an image, or in each image of a folder. The config's ``default_scope`` says whether it
is a detector, segmentor or classifier."""

import argparse
import os
import os.path as osp
import runpy
import shutil
import tempfile
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().with_name('check_env.py')))  # finds the checkout, and what is missing

import mmcv
import numpy as np
from mmengine.device import get_device
from mmengine.registry import init_default_scope
from mmengine.runner.checkpoint import CheckpointLoader

from mmlinattn.checkpoints.loading import check_trained
from mmlinattn.engine.hooks.data_check import enough_colours
from mmlinattn.tooling.class_names import class_names, num_classes
from mmlinattn.tooling.command_line import check_out_file, clean_end, explained_setup, notice, one_line_errors, writing
from mmlinattn.tooling.configs import check_checkpoint, read_config, require
from mmlinattn.tooling.images import read_picture
from mmlinattn.utils.errors import RunError, described

SUFFIXES = ('.jpg', '.jpeg', '.png', '.bmp', '.tif', '.tiff', '.webp')


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('image', help='image, or folder of images')
    parser.add_argument('config', help='config file')
    parser.add_argument('checkpoint', help='checkpoint file, URL or mmlinattn://NAME')
    parser.add_argument('--out', required=True, help='image to write; for a folder of images, a folder')
    parser.add_argument('--score-thr', type=float, default=0.3, help='lowest score drawn, detectors only [0.3]')
    parser.add_argument('--classes', nargs='+', metavar='NAME', help="class names [the checkpoint's or data set's]")
    parser.add_argument('--device', default=get_device(), help='cpu, cuda:0, ... [the best here]')
    return parser.parse_args()


def find_pictures(path: str) -> list:
    """The image named, or those directly inside the folder named; what is hidden (macOS's ``._a.jpg``) is none."""
    if osp.isfile(path):
        return [path]
    if not osp.isdir(path):
        raise RunError(f'image {path!r}: no such file or folder.')
    files = (file for file in Path(path).iterdir() if file.is_file() and not file.name.startswith('.'))
    pictures = sorted(str(file) for file in files if file.suffix.lower() in SUFFIXES)
    if not pictures:
        raise RunError(f'image {path!r}: no image ({" ".join(SUFFIXES)}) in this folder.')
    return pictures


def check_out(out: str, is_folder: bool, pictures: list) -> Path:
    out = Path(out)
    if is_folder and out.is_file():
        raise RunError(f'--out {str(out)!r} is a file; for a folder of images it has to be a folder.')
    if not is_folder and out.suffix.lower() not in SUFFIXES:
        raise RunError(f'--out {str(out)!r} has to end in one of {" ".join(SUFFIXES)}.')
    if is_folder:
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=out).close()
        read = {osp.realpath(path): path for path in pictures}
        # MMDetection and MMSegmentation keep the names of the images
        for path in (out / name for name in (*drawing_names(pictures), *map(osp.basename, pictures))):
            if osp.realpath(path) in read or path.is_dir():
                check_out_file(path, *read.values())
    else:
        check_out_file(out, *pictures)
    return out


def name_classes(inferencer, classes) -> None:
    """Give labels these names, and each a colour."""
    meta = dict(getattr(inferencer.model, 'dataset_meta', None) or {})
    if classes and list(meta.get('classes') or ()) != list(classes):
        meta['classes'] = tuple(classes)
        if len(meta.get('palette', ())) != len(classes) or isinstance(meta['palette'], str):
            meta['palette'] = [*map(tuple, np.random.default_rng(0).integers(0, 256, (len(classes), 3)).tolist())]
    inferencer.model.dataset_meta = inferencer.visualizer.dataset_meta = enough_colours(meta)


def build_inferencer(args: argparse.Namespace, scope: str):
    """The task's own inferencer."""
    init_default_scope(scope)
    if scope == 'mmdet':
        from mmdet.apis import DetInferencer

        return DetInferencer(args.config, args.checkpoint, args.device, show_progress=False)
    if scope == 'mmseg':
        from mmseg.apis import MMSegInferencer

        inferencer = MMSegInferencer(args.config, args.checkpoint, device=args.device)
        inferencer.show_progress = False
        return inferencer
    from mmpretrain import ImageClassificationInferencer
    from mmpretrain.utils import progress

    progress.disable_progress_bar = True  # of each image
    return ImageClassificationInferencer(args.config, args.checkpoint, device=args.device)


def drawing_names(pictures: list) -> list:
    """A name for each drawing: ``a.png`` of a.jpg, ``a.jpg.png`` where another image has that already."""
    names: list = []
    for path in map(Path, pictures):
        name = f'{path.stem}.png'
        names.append(f'{path.name}.png' if name in names else name)
    return names


def draw(args: argparse.Namespace, cfg, pictures: list, folder: str) -> dict:
    """Write the drawings into ``vis`` below ``folder``, one an image, in any format; why by image that has none."""
    scope = cfg.get('default_scope')
    if scope not in ('mmdet', 'mmseg', 'mmpretrain'):
        raise RunError(f'{args.config}: default_scope = {scope!r} is none of mmdet, mmseg, mmpretrain.')
    require(cfg, args.config, 'model', 'test_dataloader')
    if args.classes and num_classes(cfg) not in (0, len(args.classes)):
        raise RunError(f'--classes: {len(args.classes)} names given, the model has {num_classes(cfg)} classes.')
    head = cfg.model.get('head')
    if isinstance(head, dict) and head.get('task_heads'):
        raise RunError(f'{args.config}: labels of several tasks are not drawn; tools/test.py --out writes them.')
    with explained_setup(args.config):
        inferencer = build_inferencer(args, scope)
    # Inferencers load what fits and draw with the rest as it was initialised.
    checkpoint = CheckpointLoader.load_checkpoint(args.checkpoint, 'cpu', logger='silent')
    try:
        check_trained(inferencer.model, checkpoint)
    except RunError as error:
        raise RunError(f'{args.checkpoint}: {error}') from error
    # Where the checkpoint has no names, inferencers take those of COCO or ImageNet for any classes.
    names = args.classes or class_names(cfg, checkpoint.get('meta'))
    if scope == 'mmpretrain':
        inferencer.classes = names
    else:
        name_classes(inferencer, names)
    Path(folder, 'vis').mkdir()
    refused = {}
    for picture, name in zip(pictures, drawing_names(pictures)):
        try:
            draw_one(inferencer, cfg, picture, args.score_thr, folder, name)
        except (AssertionError, RuntimeError, ValueError) as error:  # an image too small for the model, for example
            if os.environ.get('MMLINATTN_TRACEBACK') == '1':
                raise
            refused[picture] = described(error)
    return refused


def draw_one(inferencer, cfg, picture: str, threshold: float, folder: str, name: str) -> None:
    """Write the drawing of an image into ``vis`` below ``folder``; of a classifier, print the label too."""
    scope = cfg.default_scope
    if scope == 'mmdet':
        inferencer(picture, out_dir=folder, pred_score_thr=threshold, no_save_pred=True)
    elif scope == 'mmseg':
        inferencer(picture, out_dir=folder)
    else:
        # as the test pipeline reads it; of a path, the inferencer reads three channels of eight bits
        samples = inferencer(read_picture(picture, cfg), return_datasamples=True)
        labels = samples[0].pred_label.flatten().tolist()  # none or several of some heads
        scores = samples[0].pred_score
        # MMPretrain gives a.jpg and a.png the same name, and a.1.jpg and a.2.jpg
        inferencer.visualize([picture], samples, show_dir=folder)
        (drawn,) = Path(folder).glob('*.png')
        drawn.rename(Path(folder, 'vis', name))
        names = dict(enumerate(inferencer.classes or ()))
        said = ', '.join(f'{names.get(label, label)} ({scores[label]:.3f})' for label in labels)
        print(f'{picture}: {said or "no class"}')


def main() -> None:
    args = parse_args()
    with clean_end(), one_line_errors():
        cfg = read_config(args.config)
        args.checkpoint = check_checkpoint(args.checkpoint, 'checkpoint')
        pictures = find_pictures(args.image)
        for path in pictures:
            read_picture(path, cfg)  # before the model is built
        is_folder = osp.isdir(args.image)
        out = check_out(args.out, is_folder, pictures)
        with tempfile.TemporaryDirectory() as folder:
            refused = draw(args, cfg, pictures, folder)
            drawn = sorted(Path(folder, 'vis').iterdir())
            if is_folder:
                for path in drawn:
                    shutil.copy2(path, out / path.name)
            elif drawn:
                mmcv.imwrite(mmcv.imread(str(drawn[0])), str(out))
        notice(f'{len(drawn)} image(s) in {osp.abspath(out)}')
        for picture, why in list(refused.items())[:1]:
            more = f' and {len(refused) - 1} more' * (len(refused) > 1)
            raise RunError(f'image {picture!r}{more}: the model refuses it: {why} (MMLINATTN_TRACEBACK=1 shows where)')


if __name__ == '__main__':
    main()
