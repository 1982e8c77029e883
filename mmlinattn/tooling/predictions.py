# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Write predictions for other programs: COCO results, YOLO text, segmentation masks, drawings."""

import argparse
import itertools
import json
import os
import os.path as osp
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Optional

import cv2
import mmcv
import numpy as np
import torch
from mmengine.config import Config
from mmengine.dist import collect_results, get_rank, get_world_size, is_main_process
from mmengine.dist import utils as dist_utils
from mmengine.fileio import get as read_bytes
from mmengine.hooks import Hook
from mmengine.registry import DATASETS

from ..engine.data.coco import load_coco
from ..engine.data.datasets import infos_of
from ..utils.errors import RunError
from .class_names import dataset_configs, first_test_data, num_classes
from .command_line import check_out_file, notice, writing

DRAWN = ('.jpg', '.png')  # suffixes of drawings; .png is appended to others, such as .tif and .JPEG
# scope and kind of model by flag
FLAGS = {
    '--save-json': ('mmdet', 'detector'),
    '--save-txt': ('mmdet', 'detector'),
    '--save-labels': ('mmseg', 'segmentor'),
}


def check_prediction_arguments(args: argparse.Namespace, scope: str, config: str, *sources) -> None:
    """Make the folders of the options of :func:`mmlinattn_console.add_prediction_arguments`. Raise a RunError if an
    option is for another task, or its path cannot be written."""
    for flag, (task, kind) in FLAGS.items():
        path = getattr(args, flag[2:].replace('-', '_'))
        if not path:
            continue
        if scope != task:
            others = [other for other, (own, _) in FLAGS.items() if own == scope]
            advice = f' Use {" or ".join(others)}.' if others else ''
            raise RunError(f'{flag}: {config} is no {kind} (default_scope={scope!r}).{advice}')
        if flag == '--save-json':
            if not path.endswith('.json'):
                raise RunError(f'--save-json={path!r}: expected a name that ends with .json.')
            check_out_file(path, *sources, name=flag)
        else:
            with writing(path, flag):
                os.makedirs(path, exist_ok=True)
    if args.save_conf and not args.save_txt:
        raise RunError('--save-conf: --save-txt is missing.')


class AnnotationIds(NamedTuple):
    """Ids of a COCO annotation file.

    Attributes:
        categories (dict[int, int], optional): Category id of each label; None without such a file.
        images (dict[str, Any]): Image id of each file name without folders.
        file (str): Path of the annotation file.
    """

    categories: Optional[dict[int, int]] = None
    images: dict[str, Any] = {}
    file: str = ''


def annotation_ids(cfg: Config, names: Optional[Sequence[str]]) -> AnnotationIds:
    """Return the category and image ids of a COCO file of the test data.

    The first file with categories of all class ``names`` is used. Images that share a file name are left out. The
    result is empty if no file fits.
    """
    for _, dataset in dataset_configs(cfg, 'test_dataloader'):
        path = osp.join(dataset.get('data_root') or '', dataset.get('ann_file') or '')
        if names and path.endswith('.json') and osp.isfile(path):
            content, _ = load_coco(path)
            ids = {entry.get('name'): entry.get('id') for entry in content.get('categories', ())}
            if set(names) <= set(ids):
                images = content.get('images', ())
                files = [osp.basename(str(entry.get('file_name'))) for entry in images]
                seen = Counter(files)
                found = {file: entry.get('id') for file, entry in zip(files, images) if seen[file] == 1}
                return AnnotationIds({label: ids[name] for label, name in enumerate(names)}, found, path)
    return AnnotationIds()


def label_values(cfg: Config, names: Optional[Sequence[str]]) -> list[int]:
    """Return the value of each label in the annotation files of the test data: the label itself, unless
    ``reduce_zero_label`` or ``label_map`` of the data set changes labels on loading."""
    count = max(num_classes(cfg), len(names or ()), 2)
    for _, given in dataset_configs(cfg, 'test_dataloader'):
        with DATASETS.switch_scope_and_registry(cfg.get('default_scope')) as registry, suppress(Exception):
            dataset = registry.build(dict(given, pipeline=[], lazy_init=True))  # data sets of any project
            mapping = {new: old for old, new in (dataset.label_map or {}).items()}
            return [mapping.get(label, label) + bool(dataset.reduce_zero_label) for label in range(count)]
    return list(range(count))


def _instances(sample, threshold: float = 0.0) -> Iterator[tuple[int, float, list[float], Optional[np.ndarray]]]:
    """Yield label, score, box (x1, y1, x2, y2 in pixels) and mask (or None) of detections with a score from
    ``threshold``."""
    found = sample.pred_instances
    masks = found.masks if 'masks' in found else None
    masks = masks.cpu().numpy() if isinstance(masks, torch.Tensor) else masks
    for i, (label, score, box) in enumerate(zip(found.labels.tolist(), found.scores.tolist(), found.bboxes.tolist())):
        if score >= threshold:
            yield label, score, box, None if masks is None else np.asarray(masks[i]).astype(np.uint8)


def coco_results(sample, image_id, ids: Optional[dict[int, int]] = None, file_name: str = '') -> list[dict[str, Any]]:
    """Return the detections of an image in COCO's result format.

    ``ids`` maps labels to category ids, by default label + 1. Each entry also has the ``file_name``.
    """
    from pycocotools import mask as coco_mask

    entries = []
    for label, score, (x1, y1, x2, y2), mask in _instances(sample):
        entry: dict[str, Any] = dict(image_id=image_id, category_id=label + 1 if ids is None else ids[label])
        entry.update(score=score, bbox=[x1, y1, x2 - x1, y2 - y1], file_name=file_name)
        if mask is not None:
            rle = coco_mask.encode(np.asfortranarray(mask))
            entry['segmentation'] = dict(rle, counts=rle['counts'].decode())
        entries.append(entry)
    return entries


def yolo_lines(sample, threshold: float, with_score: bool = False) -> list[str]:
    """Return the detections of an image in YOLO's label format, relative to the size of the image.

    A box is ``class x_centre y_centre width height``. A mask is ``class x1 y1 x2 y2 ...``, its largest polygon.
    """
    height, width = sample.ori_shape[:2]
    lines = []
    for label, score, (x1, y1, x2, y2), mask in _instances(sample, threshold):
        numbers = [(x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height]
        if mask is not None:
            polygons, _ = cv2.findContours(mask, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
            polygon = max(polygons, key=cv2.contourArea, default=np.zeros((0, 1, 2)))
            if len(polygon) < 3:  # no area
                continue
            numbers = (polygon[:, 0] / (width, height)).flatten().tolist()
        numbers = [min(max(number, 0.0), 1.0) for number in numbers]
        if with_score:
            numbers.append(score)
        lines.append(' '.join([str(label), *(f'{number:.6f}' for number in numbers)]))
    return lines


def draw(visualizer, image: np.ndarray, sample, threshold: float, name: str = '', **options) -> None:
    """Draw predictions on an RGB image by the visualizer of any project; ``threshold`` is for detections."""
    if hasattr(visualizer, 'visualize_cls'):
        visualizer.visualize_cls(image, data_sample=sample, name=name, **options)
    else:
        more = dict(pred_score_thr=threshold) if 'pred_instances' in sample else {}
        visualizer.add_datasample(name, image, data_sample=sample, **more, **options)


class PredictionWriter:
    """Write predictions as the options of :func:`mmlinattn_console.add_prediction_arguments` say.

    ``cfg`` has the test data, ``names`` are those of the classes, ``threshold`` is the lowest score of ``--save-txt``.
    """

    def __init__(self, args: argparse.Namespace, cfg: Config, names: Optional[Sequence[str]], threshold: float) -> None:
        self.args, self.threshold = args, threshold
        self.ids = annotation_ids(cfg, names) if args.save_json else AnnotationIds()
        self.entries: list[list[dict]] = []  # COCO results of each image
        if args.save_labels:
            values = label_values(cfg, names)
            self.values = np.array(values, np.uint8 if max(values) < 256 else np.uint16)
            named = [f'{value} {name}' for value, name in itertools.zip_longest(values, names or (), fillvalue='')]
            listed = named if len(named) <= 12 else [*named[:10], '...', named[-1]]
            if is_main_process():
                notice(f'--save-labels: values {", ".join(listed)}'.rstrip())

    def write(self, sample, stem: str, image_id, file_name: str) -> None:
        """Write YOLO text (empty without detections), or a grey PNG in the values of :func:`label_values`, of an image,
        and keep its :func:`coco_results`. ``stem`` is the name of the files without suffix."""
        args = self.args
        if args.save_txt:
            path = Path(args.save_txt, f'{stem}.txt')
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(''.join(f'{line}\n' for line in yolo_lines(sample, self.threshold, args.save_conf)))
        if args.save_labels:
            labels = sample.pred_sem_seg.data.squeeze(0).cpu().numpy().astype(int)  # floats of models of one channel
            mmcv.imwrite(self.values[labels], osp.join(args.save_labels, f'{stem}.png'))
        if args.save_json:
            self.entries.append(coco_results(sample, image_id, self.ids.categories, file_name))

    def finish(self, entries: Iterable[list[dict]]) -> None:
        """Write the COCO results of all images, with a notice if no annotation file gives the category ids."""
        with writing(self.args.save_json, '--save-json'), open(self.args.save_json, 'w') as file:
            json.dump(list(itertools.chain.from_iterable(entries)), file)
        if self.ids.categories is None:
            notice('--save-json: category_id is the label + 1, as no COCO file of the test data names the classes.')


def _names(paths: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return image files by their whole paths, and by their names, with folders if names repeat."""
    full = [osp.abspath(path) if '://' not in path else path for path in paths]
    names = [osp.basename(path) for path in full]
    if len(set(names)) < len(set(full)):
        root = osp.commonpath([osp.dirname(path) for path in full])
        names = [osp.relpath(path, root) for path in full]
    return full, names


def names_below(paths: Sequence[str]) -> list[str]:
    """Return a unique name of a drawing, relative to an output folder, for each image file. ``.png`` is appended to
    formats that are not drawn."""
    return [name if name.endswith(DRAWN) else f'{name}.png' for name in _names(paths)[1]]


def stems_below(paths: Sequence[str]) -> list[str]:
    """Return a unique name, relative to an output folder, for each image file, with its suffix if it would repeat."""
    full, names = _names(paths)
    stems = [osp.splitext(name)[0] for name in names]
    counts = Counter(stem for stem, _ in {*zip(stems, full)})
    return [stem if counts[stem] == 1 else name for stem, name in zip(stems, names)]


@contextmanager
def drawing_in_every_process() -> Iterator[None]:
    """Let each process draw its own images; MMEngine's visualizers draw in the main process only."""
    kept = dist_utils.is_main_process
    dist_utils.is_main_process = lambda *args: True
    try:
        yield
    finally:
        dist_utils.is_main_process = kept


class PredictionFilesHook(Hook):
    """Write the predictions of each image in a test, as the options of ``tools/test.py`` say; drawings for any
    ``vis_backends`` of the config's visualizer."""

    priority = 'LOWEST'

    def __init__(self, args: argparse.Namespace, cfg: Config) -> None:
        self.args, self.cfg = args, cfg
        hook = (cfg.get('default_hooks') or {}).get('visualization') or {}
        self.threshold = hook.get('score_thr', 0.3) if args.score_thr is None else args.score_thr
        self.seen = 0
        self.stems: dict[str, str] = {}  # names of files by image, without suffix
        self.drawings: dict[str, str] = {}

    def before_test_epoch(self, runner) -> None:
        dataset, args = runner.test_dataloader.dataset, self.args
        names = (getattr(dataset, 'metainfo', None) or {}).get('classes')
        self.writer = PredictionWriter(args, self.cfg, names, self.threshold)
        with drawing_in_every_process():
            if getattr(runner.visualizer, 'dataset_meta', {}) is None:  # set in the first process only
                runner.visualizer.dataset_meta = getattr(dataset, 'metainfo', None)
        if args.show_dir or args.save_txt or args.save_labels:
            paths = [str(info['img_path']) for info in infos_of(dataset) if info.get('img_path')]
            self.stems, self.drawings = (dict(zip(paths, find(paths))) for find in (stems_below, names_below))

    def after_test_iter(self, runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        args = self.args
        for i, sample in enumerate(outputs or ()):
            index, self.seen = self.seen * get_world_size() + get_rank(), self.seen + 1
            path = str(sample.get('img_path') or '')
            if (args.show or args.show_dir) and index % args.interval == 0:
                # some data sets of MMPretrain have images in memory only
                image = self._read(path) if path else data_batch['inputs'][i].permute(1, 2, 0).byte().cpu().numpy()
                self._draw(runner.visualizer, sample, image, self.drawings.get(path, f'{index}.png'), index)
            name = osp.basename(path)
            self.writer.write(sample, self.stems.get(path, ''), sample.get('img_id', name), name)

    def after_test_epoch(self, runner, metrics=None) -> None:
        if self.args.save_json:
            entries = collect_results(self.writer.entries, len(runner.test_dataloader.dataset), device='cpu')
            if is_main_process():
                self.writer.finish(entries or ())

    def _read(self, path: str) -> np.ndarray:
        backend = first_test_data(self.cfg).get('backend_args')
        return mmcv.imfrombytes(read_bytes(path, backend_args=backend), channel_order='rgb')

    def _draw(self, visualizer, sample, image: np.ndarray, name: str, step: int) -> None:
        args = self.args
        out_file = osp.join(args.show_dir, name) if args.show_dir else None
        options = dict(show=args.show, wait_time=args.wait_time, out_file=out_file, step=step)
        with drawing_in_every_process():
            draw(visualizer, image, sample, self.threshold, name, **options)
        if out_file and not osp.isfile(out_file):
            raise RunError(f'--show-dir: visualizer.type={type(visualizer).__name__!r} of the config draws no file.')
