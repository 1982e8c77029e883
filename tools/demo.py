#!/usr/bin/env python
# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Predict and draw: an image, a folder of images, a video, a URL or a webcam.

    python tools/demo.py CONFIG CHECKPOINT IMAGE --out FILE

The task (detection, segmentation, classification) is the config's ``default_scope``.
"""

import argparse
import contextlib
import itertools
import os
import os.path as osp
import runpy
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional
from urllib.parse import urlsplit

runpy.run_path(str(Path(__file__).resolve().with_name('check_env.py')))  # finds the checkout and missing packages

from mmlinattn_console import add_model_arguments, add_prediction_arguments, tool_parser


def parse_args() -> argparse.Namespace:
    parser = tool_parser(__doc__)
    add_model_arguments(parser)
    parser.add_argument(
        'image', metavar='IMAGE', help='image, folder of images, video, URL of one, or number of a webcam'
    )
    parser.add_argument('--out', help='image or video to write; for a folder of images, a folder')
    add_prediction_arguments(parser)
    parser.add_argument('--show', action='store_true', help='show drawings in a window; q ends')
    parser.add_argument('--max-frames', type=int, metavar='N', help='end a video or webcam after N frames')
    parser.add_argument(
        '--score-thr', type=float, default=0.3, help='lowest score in drawings and --save-txt, detectors only [0.3]'
    )
    parser.add_argument('--classes', nargs='+', metavar='NAME', help="class names [the checkpoint's or data set's]")
    parser.add_argument('--device', help='cpu, cuda:0, ... [the best here]')
    args = parser.parse_args()
    if args.checkpoint.endswith(('.py', '.yaml', '.yml', '.json')):  # IMAGE CONFIG CHECKPOINT, as upstream's demos
        args.image, args.config, args.checkpoint = args.config, args.checkpoint, args.image
    return args


if __name__ == '__main__':
    args = parse_args()  # before PyTorch is imported: --help answers at once

import cv2
import mmcv
import numpy as np
import torch
from mmcv.transforms import Compose
from mmengine import fileio
from mmengine.dataset import pseudo_collate
from mmengine.device import get_device
from mmengine.logging import MMLogger
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import VISUALIZERS
from mmengine.runner.checkpoint import CheckpointLoader

from mmlinattn.checkpoints.loading import check_trained
from mmlinattn.engine.hooks.data_check import extended
from mmlinattn.tooling.class_names import class_names, kind_metainfo, num_classes
from mmlinattn.tooling.command_line import (
    check_device,
    check_display,
    check_out_file,
    clean_end,
    notice,
    one_line_errors,
    setup_errors,
    writing,
)
from mmlinattn.tooling.configs import PIP_NAMES, check_checkpoint, read_with_options, require
from mmlinattn.tooling.console import quiet_console, quiet_upstream
from mmlinattn.tooling.images import image_channels, image_dtype, is_8_bit, preprocessor, read_picture, test_pipeline
from mmlinattn.tooling.predictions import PredictionWriter, check_prediction_arguments, draw, names_below, stems_below
from mmlinattn.utils.building import build_model
from mmlinattn.utils.errors import RunError, described

SUFFIXES = ('.jpg', '.jpeg', '.png', '.bmp', '.tif', '.tiff', '.webp')
VIDEOS = ('.mp4', '.avi', '.mov', '.mkv', '.webm', '.m4v', '.mpg', '.mpeg', '.wmv', '.flv', '.ts', '.3gp')
MANY_SIZES = 8  # more sizes in a folder limit the caches of oneDNN
CODECS = {'.mp4': 'mp4v', '.avi': 'MJPG', '.mkv': 'mp4v', '.mov': 'mp4v'}  # of the videos that are written


def is_video(source: str, out: Optional[str] = None) -> bool:
    """Return True for a video file, the number of a webcam, and a URL unless it or ``--out`` ends as images do."""
    if '://' in source:
        return not any(name.lower().endswith(SUFFIXES) for name in (urlsplit(source).path, out or ''))
    return source.lower().endswith(VIDEOS) or (source.isdecimal() and not osp.exists(source))


def find_pictures(path: str) -> list:
    """Return the named image, or all images directly inside a folder, without hidden files (macOS's ``._a.jpg``)."""
    if osp.isfile(path):
        return [path]
    if not osp.isdir(path):
        raise RunError(f'image {path!r}: no such file or folder.')
    inner = [file for file in Path(path).iterdir() if not file.name.startswith('.')]
    files, folders = ([file for file in inner if file.is_file()], [file.name for file in inner if file.is_dir()])
    if folders:
        notice(f'{len(folders)} folder(s) inside {path!r}, as {min(folders)!r}, are not read.')
    pictures = sorted(str(file) for file in files if file.suffix.lower() in SUFFIXES)
    if not pictures:
        raise RunError(f'image {path!r}: no image ({" ".join(SUFFIXES)}) in this folder.')
    return pictures


def read_sizes(pictures: list, cfg) -> tuple[dict, list[str]]:
    """Read all images before the model is built.

    If the images have many sizes, environment variables limit PyTorch's caches of oneDNN primitives. PyTorch reads them
    at the first operation.

    Returns:
        tuple[dict, list[str]]: Array shape by path of each readable image, and the errors of the others.

    Raises:
        RunError: No image can be read.
    """
    shapes: dict = {}
    errors: list[str] = []
    for path in pictures:
        try:
            shapes[path] = read_picture(path, cfg).shape
        except RunError as error:
            errors.append(str(error))
    if not shapes:
        raise RunError(errors[0])
    if len(set(shapes.values())) > MANY_SIZES:
        for variable in ('LRU_CACHE_CAPACITY', 'ONEDNN_PRIMITIVE_CACHE_CAPACITY'):
            os.environ.setdefault(variable, '64')
    return shapes, errors


def download(url: str, folder: str) -> str:
    path = Path(folder, osp.basename(urlsplit(url).path) or 'image')
    try:
        path.write_bytes(fileio.get(url))
    except Exception as error:  # each backend has its own
        raise RunError(f'image {url!r} cannot be downloaded: {described(error)}.') from error
    return str(path)


def open_video(source: str) -> cv2.VideoCapture:
    """Open a video file, a stream or a webcam, or raise a RunError."""
    video = cv2.VideoCapture(int(source) if source.isdecimal() else source)
    if not video.isOpened():
        raise RunError(f'{"webcam" if source.isdecimal() else "video"} {source!r} cannot be opened.')
    return video


def frames_of(video: cv2.VideoCapture) -> Iterator[np.ndarray]:
    """Iterate over the frames (H, W, 3) of a video, uint8 BGR."""
    is_read, frame = video.read()
    while is_read:
        yield frame
        is_read, frame = video.read()


def check_frames(cfg) -> None:
    """Raise a RunError if the normalisation or a test image shows that the model takes pixels beyond 8 bits."""
    given = preprocessor(cfg)
    largest = max(np.max(given[key]) if given.get(key) is not None else 0 for key in ('mean', 'std'))
    dtype = None if is_8_bit(cfg) else image_dtype(cfg)
    if largest > 255 or dtype not in (None, np.dtype(np.uint8)):
        found = f'its test images are {dtype}' if dtype else f'data_preprocessor has mean or std {largest}'
        raise RunError(f'the model takes pixels beyond 8 bits ({found}). Save the frames of the video as such images.')


@contextlib.contextmanager
def frame_file(frame: np.ndarray, cfg) -> Iterator[str]:
    """Write a frame as a temporary PNG file, so that the test pipeline loads it like any image. Models of one channel
    get a grey image."""
    grey = image_channels(cfg) == 1
    with tempfile.TemporaryDirectory() as folder:
        path = osp.join(folder, 'frame.png')
        cv2.imwrite(path, cv2.cvtColor(frame, cv2.COLOR_BGR2GRAY) if grey else frame, [cv2.IMWRITE_PNG_COMPRESSION, 1])
        yield path


def check_out(args: argparse.Namespace, pictures: list) -> None:
    """Raise a RunError if --out cannot be written or is an input, or no output is requested."""
    if not args.out:
        if not (args.show or args.save_json or args.save_txt or args.save_labels):
            raise RunError('--out is missing: name the file or folder to write.')
        return
    out = Path(args.out)
    if osp.isdir(args.image):
        if out.is_file() or (out.suffix.lower() in (*SUFFIXES, *VIDEOS) and not out.is_dir()):
            raise RunError(f'--out={str(out)!r}: expected a folder, as {args.image} is one.')
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=out).close()
        read = {osp.realpath(path): path for path in pictures}
        for path in (out / name for name in names_below(pictures)):
            if osp.realpath(path) in read or path.is_dir():
                check_out_file(path, *read.values())
        return
    suffixes = tuple(CODECS) if is_video(args.image, args.out) else SUFFIXES
    if out.suffix.lower() not in suffixes:
        raise RunError(f'--out={str(out)!r}: expected a name that ends with {" or ".join(suffixes)}.')
    check_out_file(out, *pictures, args.image)


def load_model(args: argparse.Namespace, cfg) -> tuple:
    """Return the model with trained weights, and the metadata of the checkpoint. Raise a RunError if the task is not
    supported, or class names or the checkpoint belong to another model."""
    if args.classes and num_classes(cfg) not in (0, len(args.classes)):
        raise RunError(f'--classes: {len(args.classes)} names given, the model has {num_classes(cfg)} classes.')
    head = cfg.model.get('head')
    if isinstance(head, dict) and head.get('task_heads'):
        raise RunError(f'{args.config}: labels of several tasks are not drawn; tools/test.py --out writes them.')
    check_device(args.device)
    with setup_errors(args.config):
        model: Any = build_model(cfg, pretrained=True)
    checkpoint = CheckpointLoader.load_checkpoint(args.checkpoint, 'cpu', logger='silent')
    try:
        check_trained(model, checkpoint)
    except RunError as error:
        raise RunError(f'{args.checkpoint}: {error}') from error
    model = revert_sync_batchnorm(model)
    model.to(args.device or get_device()).eval()  # not chained: distillers of MMDetection return None
    return model, checkpoint.get('meta') or {}


def build_visualizer(cfg, names: Optional[list], meta: dict):
    """Build the visualizer of a config, and set its class names and colours.

    Colours are the palette of the checkpoint (``meta``), else that of the data set, else random.
    """
    kind = dict(mmdet='DetLocalVisualizer', mmseg='SegLocalVisualizer', mmpretrain='UniversalVisualizer')
    given = cfg.get('visualizer') or dict(type=kind[cfg.default_scope])
    visualizer: Any = VISUALIZERS.build(dict(given, name=f'demo_{time.time()}', vis_backends=None))
    visualizer.dataset_meta = dict(classes=names)
    if cfg.default_scope != 'mmpretrain':
        classes = names or [f'class {i}' for i in range(num_classes(cfg) or 256)]
        known = [(each or {}).get('palette') for each in (meta.get('dataset_meta'), kind_metainfo(cfg))]
        palette = next((each for each in known if isinstance(each, (list, tuple))), ())
        visualizer.dataset_meta = dict(classes=classes, palette=extended(palette, len(classes)))
    if cfg.default_scope == 'mmseg':
        visualizer.alpha = 0.8  # as MMSegmentation's inferencer
    return visualizer


class Failed(Exception):
    """Raised if the model fails on an image, for example on one that is too small."""


class Predictor:
    """Predict and draw images and frames of video."""

    def __init__(self, args: argparse.Namespace, cfg):
        self.args, self.cfg, self.scope = args, cfg, cfg.default_scope
        self.model, meta = load_model(args, cfg)
        self.names = args.classes or class_names(cfg, meta)
        self.visualizer = build_visualizer(cfg, self.names, meta)
        self.pipeline = Compose(test_pipeline(cfg))
        self.writer = PredictionWriter(args, cfg, self.names, args.score_thr)
        self.num_named = self.num_unnamed = 0  # images with an id of the annotation file, and others
        self.scores: list[float] = []  # of detectors: the highest of each image

    def predict(self, path: str, name: str, file_name: str):
        """Predict an image, write the requested files, and return the data sample.

        Args:
            path: Image file.
            name: Name of the written files, without suffix.
            file_name: Name of the image in ``--save-json``.

        Raises:
            Failed: The model fails on the image.
        """
        try:
            data = pseudo_collate([self.pipeline(dict(img_path=path, img_id=0))])
            with torch.no_grad():
                (sample,) = self.model.test_step(data)
        except (AssertionError, RuntimeError, ValueError, cv2.error) as error:  # cv2's of a side that shrinks to 0
            if os.environ.get('MMLINATTN_TRACEBACK') == '1' or isinstance(error, RunError):
                raise
            reason = f'it cannot be predicted: {described(error)} (MMLINATTN_TRACEBACK=1 shows where)'
            raise Failed(reason) from error
        if self.scope == 'mmdet' and 'pred_instances' in sample:
            self.scores.append(max(sample.pred_instances.scores.tolist(), default=0.0))
        images = self.writer.ids.images
        self.num_named += file_name in images
        self.num_unnamed += file_name not in images
        self.writer.write(sample, name, images.get(file_name, file_name), file_name)
        return sample

    def draw(self, image, sample) -> np.ndarray:
        """Return the drawing of a path or frame, (H, W, 3) uint8 BGR."""
        rgb = mmcv.imread(image, channel_order='rgb') if isinstance(image, str) else image[..., ::-1]
        draw(self.visualizer, np.ascontiguousarray(rgb), sample, self.args.score_thr, draw_gt=False)
        return np.ascontiguousarray(self.visualizer.get_image()[..., ::-1])

    def describe(self, sample) -> str:
        """Return the predicted labels of a classifier with their scores, as text."""
        labels = sample.pred_label.flatten().tolist()  # none or several of some heads
        names = dict(enumerate(self.names or ()))
        found = ', '.join(f'{names.get(label, label)} ({sample.pred_score[label]:.3f})' for label in labels)
        return found or 'no class'

    def finish(self) -> None:
        if self.scores and max(self.scores) < self.args.score_thr:
            best = max(self.scores)
            notice(f'no box has a score of at least --score-thr {self.args.score_thr:g}; the highest is {best:.2g}.')
        if self.args.save_json:
            self.writer.finish(self.writer.entries)
            file = self.writer.ids.file or 'the test data'
            if self.num_named:
                notice(f'--save-json: image_id of {self.num_named} image(s) by file name from {file}')
            if self.num_unnamed:
                notice(f'--save-json: image_id of {self.num_unnamed} image(s) is the file name: not in {file}')


def show(drawn: np.ndarray, wait: int) -> bool:
    """Show a drawing for ``wait`` milliseconds (0: until a key is pressed), and return True after q or Escape."""
    try:
        cv2.imshow('mmlinattn', drawn)
        return cv2.waitKey(wait) & 0xFF in (ord('q'), 27)
    except cv2.error as error:
        raise RunError(f'--show: no window can be opened: {error.err}.') from error


def run_images(predictor: Predictor, pictures: list, errors: list[str]) -> None:
    """Predict images one by one. If the model fails on some, or ``errors`` has messages of unreadable ones, raise a
    RunError at the end."""
    args, count = predictor.args, 0
    for picture, drawing, name in zip(pictures, names_below(pictures), stems_below(pictures)):
        try:
            sample = predictor.predict(picture, name, osp.basename(picture))
        except Failed as error:
            errors.append(f'image {picture!r}: {error}')
            continue
        count += 1
        if predictor.scope == 'mmpretrain':
            print(f'{picture if osp.exists(args.image) else args.image}: {predictor.describe(sample)}')
        if args.out or args.show:
            drawn = predictor.draw(picture, sample)
            if args.out:
                path = osp.join(args.out, drawing) if osp.isdir(args.image) else args.out
                with writing(path):
                    mmcv.imwrite(drawn, path)
            if args.show and show(drawn, 0):
                break
    predictor.finish()
    print_outputs(args, f'{count} image(s)')
    for error in errors[1:]:
        notice(error)
    if errors:
        more = f' {len(errors) - 1} more image(s) failed.' if len(errors) > 1 else ''
        raise RunError(errors[0] + more)


def run_video(predictor: Predictor, source: str) -> None:
    """Predict the frames of a video, stream or webcam until its end, q or Ctrl-C. Frames and predictions up to there
    are written."""
    args, writer, count = predictor.args, None, 0
    video = open_video(source)
    fps = video.get(cv2.CAP_PROP_FPS)
    stem = 'webcam' if source.isdecimal() else Path(urlsplit(source).path).stem
    try:
        for frame in itertools.islice(frames_of(video), args.max_frames):
            name = f'{stem}_{count:06d}'
            try:
                with frame_file(frame, predictor.cfg) as path:
                    sample = predictor.predict(path, name, name)
            except Failed as error:
                raise RunError(f'video {source!r}, frame {count}: {error}') from error
            count += 1
            if not (args.out or args.show):
                continue
            drawn = predictor.draw(frame, sample)
            if args.out:
                height, width = drawn.shape[:2]
                if writer is None:
                    codec = cv2.VideoWriter_fourcc(*CODECS[Path(args.out).suffix.lower()])
                    writer = cv2.VideoWriter(args.out, codec, fps if 0 < fps < 1000 else 25, (width, height))
                writer.write(drawn)
            if args.show and show(drawn, 1):
                break
    finally:
        if writer is not None:
            writer.release()
        if count:
            predictor.finish()
    if not count:
        raise RunError(f'video {source!r} has no frame that can be read.')
    if args.out and not (osp.isfile(args.out) and osp.getsize(args.out)):
        raise RunError(f'--out={args.out!r}: OpenCV here has no encoder for it. Name an .avi file.')
    print_outputs(args, f'{count} frame(s)')


def print_outputs(args: argparse.Namespace, count: str) -> None:
    for path in filter(None, (args.out, args.save_json, args.save_txt, args.save_labels)):
        print(f'{count} in {osp.abspath(path)}')


def main(args: argparse.Namespace) -> None:
    quiet_upstream()
    quiet_console(MMLogger.get_current_instance())
    with clean_end(), one_line_errors(), contextlib.ExitStack() as stack:
        if args.max_frames is not None and args.max_frames < 1:
            raise RunError(f'--max-frames={args.max_frames}: expected at least 1.')
        cfg = read_with_options(args)
        scope = cfg.get('default_scope')
        if scope not in PIP_NAMES:
            raise RunError(f'{args.config}: default_scope={scope!r}: expected one of {tuple(PIP_NAMES)}.')
        args.checkpoint = check_checkpoint(args.checkpoint, 'checkpoint')
        require(cfg, args.config, 'model', 'test_dataloader')
        pictures: list = []
        if not is_video(args.image, args.out):
            image = args.image
            if '://' in image:
                image = download(image, stack.enter_context(tempfile.TemporaryDirectory()))
            shapes, errors = read_sizes(find_pictures(image), cfg)
            pictures = list(shapes)
        elif '://' not in args.image and not args.image.isdecimal() and not osp.isfile(args.image):
            raise RunError(f'video {args.image!r}: no such file.')
        if not pictures:
            check_frames(cfg)
        if args.show:
            check_display()
        check_out(args, pictures)
        check_prediction_arguments(args, scope, args.config, args.checkpoint, *pictures)
        predictor = Predictor(args, cfg)
        if pictures:
            run_images(predictor, pictures, errors)
        else:
            run_video(predictor, args.image)


if __name__ == '__main__':
    main(args)
