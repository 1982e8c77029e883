# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import csv
import math
import os
import os.path as osp
import time
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np
import torch
from mmengine.dist import all_reduce, collect_results, get_rank, get_world_size, is_main_process
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import IterBasedTrainLoop

from ..data.checks import leaf_datasets
from ..data.detections import Boxes, count_confusion, objects_of, precision_over_recall
from .progress import position, scalars

CSV = 'results.csv'
KEYS = ('epoch', 'iteration', 'seconds', 'lr')  # the first columns

MOST_EVALUATED = 2_000_000  # images times classes that pycocotools evaluates in about a minute


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def read_rows(path: str, last: float = math.inf) -> list[dict]:
    """Read the rows of a ``results.csv`` up to an iteration."""
    if not osp.isfile(path):
        return []
    with open(path, newline='') as file:
        rows = [{key: _number(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
    return [row for row in rows if isinstance(row.get('iteration'), float) and row['iteration'] <= last]


class _Predictions:
    """Predictions of a validation or test beside its annotations, of detectors, segmentors or classifiers."""

    def __init__(self, loader):
        self.loader = loader
        self.size = len(loader.dataset)
        self.seen = 0
        self.boxes: list[tuple[str, Boxes]] = []  # of a detector, by path
        self.matrix: Optional[np.ndarray] = None  # of the others
        self.names = [str(name) for name in (getattr(loader.dataset, 'metainfo', None) or {}).get('classes') or ()]

    def add(self, samples: Sequence) -> None:
        for sample in samples:
            # beyond the size, samplers repeat images so that all processes have as many
            is_repeated = self.seen * get_world_size() + get_rank() >= self.size
            self.seen += 1
            if 'pred_instances' in sample and 'bboxes' in sample.pred_instances and 'img_path' in sample:
                found = sample.pred_instances
                boxes, labels, scores = (found[key].detach().float().cpu() for key in ('bboxes', 'labels', 'scores'))
                if boxes.ndim == 2 and boxes.shape[1] == 4:  # no rotated ones
                    arrays = Boxes(boxes.numpy(), labels.long().numpy(), scores.numpy())
                    self.boxes.append((sample.img_path, arrays))
            elif not is_repeated:
                self._count_labels(sample)

    def _count_labels(self, sample) -> None:
        if 'pred_sem_seg' in sample and 'gt_sem_seg' in sample:
            self._count(sample.gt_sem_seg.data, sample.pred_sem_seg.data)
        elif 'pred_label' in sample and 'gt_label' in sample and sample.gt_label.numel() == 1:
            self._count(sample.gt_label, sample.pred_label)

    def _count(self, truth: torch.Tensor, found: torch.Tensor) -> None:
        count = len(self.names)
        truth, found = truth.flatten().cpu().long(), found.flatten().cpu().long()
        if not count or truth.shape != found.shape:
            return
        if self.matrix is None:
            self.matrix = np.zeros((count, count))
        is_class = (truth >= 0) & (truth < count) & (found >= 0) & (found < count)  # ignored pixels are 255
        truth, found = truth[is_class], found[is_class]
        if len(truth) < count**2:
            np.add.at(self.matrix, (truth.numpy(), found.numpy()), 1)
        else:
            pairs = torch.bincount(truth * count + found, minlength=count**2)
            self.matrix += pairs.reshape(count, count).numpy()

    def write(self, folder: str, prefix: str) -> list[str]:
        """Write the plots from the main process; all processes have to call it. Returns their paths."""
        if get_world_size() > 1:
            boxes = collect_results(self.boxes, self.size, device='cpu')
            count = len(self.names)
            total = torch.as_tensor(np.zeros((count, count)) if self.matrix is None else self.matrix)
            all_reduce(total)
            self.boxes, self.matrix = boxes or [], total.numpy() if total.any() else None
        if not is_main_process():
            return []
        if self.boxes and self.names:
            return self._write_boxes(folder, prefix)
        if self.matrix is None:
            return []
        from ..plots import plot_confusion  # matplotlib takes a second

        path = osp.join(folder, f'{prefix}confusion_matrix.png')
        plot_confusion(path, self.matrix, self.names, 'confusion matrix')
        return [path]

    def _write_boxes(self, folder: str, prefix: str) -> list[str]:
        from ..plots import plot_confusion, plot_precision_recall

        objects = self._objects()
        pairs = [(objects[path], found) for path, found in self.boxes if path in objects]
        if not any(len(truth.labels) for truth, _ in pairs):  # no annotations, as of COCO's test-dev
            return []
        names = [*self.names, 'background']
        matrix = np.zeros((len(names), len(names)))
        for truth, found in pairs:
            count_confusion(matrix, truth, found)
        paths = [osp.join(folder, f'{prefix}{name}.png') for name in ('confusion_matrix', 'precision_recall')]
        plot_confusion(paths[0], matrix, names, 'confusion matrix of boxes (score from 0.3, IoU from 0.5)')
        if len(pairs) * len(self.names) > MOST_EVALUATED:
            return paths[:1]
        curves = precision_over_recall([truth for truth, _ in pairs], [found for _, found in pairs], len(self.names))
        plot_precision_recall(paths[1], *curves, self.names)
        return paths

    def _objects(self) -> dict[str, Boxes]:
        found = {}
        for dataset in leaf_datasets(self.loader.dataset):
            for index in range(len(dataset) if hasattr(dataset, 'get_data_info') else 0):
                info = dataset.get_data_info(index)
                if isinstance(info, dict) and 'instances' in info and 'img_path' in info:
                    found[info['img_path']] = objects_of(info['instances'])
        return found


@HOOKS.register_module(force=True)
class ResultsHook(Hook):
    """Write the course of a training, and plots of its predictions, into the work dir.

    - ``results.csv``: a row for each epoch (iteration-based: for each validation, and a hundredth of the training):
      learning rate, mean losses since the row before, and the metrics of the validation. A resumed run continues it.
    - ``results.png``: losses, learning rate and metrics, after the last iteration.
    - ``confusion_matrix.png``: of the last validation, also ``precision_recall.png`` of a detector. After a test, the
      same with ``test_`` before the name.

    Predictions are compared with the annotations that the data set holds: boxes of MMDetection's ``instances``, label
    maps and labels of the data samples. Other kinds of models have no confusion matrix.
    """

    priority = 'LOW'  # after RuntimeInfoHook, the source of the numbers

    def __init__(self) -> None:
        self.rows: list[dict] = []
        self._predictions: Optional[_Predictions] = None
        self._began = 0.0
        self._since = 0  # iteration of the last row

    # -- results.csv -------------------------------------------------------------------------------------------------

    def before_train(self, runner) -> None:
        self._began, self._since = time.time(), runner.iter
        self.rows = read_rows(osp.join(runner.work_dir, CSV), runner.iter) if runner.iter else []
        if self.rows:
            self._began -= self.rows[-1].get('seconds', 0.0)

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        every = max(1, runner.max_iters // 100)
        done = runner.iter + 1
        if isinstance(runner.train_loop, IterBasedTrainLoop) and (done % every == 0 or done == runner.max_iters):
            self._add_row(runner, done)

    def after_train_epoch(self, runner, metrics=None) -> None:
        if not isinstance(runner.train_loop, IterBasedTrainLoop):
            self._add_row(runner, runner.iter, runner.epoch + 1)

    def _add_row(self, runner, iteration: int, epoch: Optional[int] = None) -> dict:
        if self.rows and self.rows[-1]['iteration'] == iteration:
            return self.rows[-1]
        row: dict = dict(epoch=epoch) if epoch else {}
        row.update(iteration=iteration, seconds=round(time.time() - self._began, 1))
        new = max(1, iteration - self._since)
        for name, buffer in runner.message_hub.log_scalars.items():
            if name == 'train/lr':
                row['lr'] = buffer.current()
            elif name.startswith('train/') and 'loss' in name:
                row[name[len('train/') :]] = buffer.mean(new)
        self.rows.append(row)
        self._since = iteration
        self._write(runner)
        return row

    def _write(self, runner) -> None:
        if not is_main_process():
            return
        path = osp.join(runner.work_dir, CSV)
        columns = dict.fromkeys([*(key for key in KEYS if any(key in row for row in self.rows))])
        columns.update(dict.fromkeys(key for row in self.rows for key in row))
        with open(f'{path}.part', 'w', newline='') as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(
                {key: f'{value:.6g}' if isinstance(value, float) else value for key, value in row.items()}
                for row in self.rows
            )
        os.replace(f'{path}.part', path)

    # -- predictions -------------------------------------------------------------------------------------------------

    def before_val_epoch(self, runner) -> None:
        self._predictions = _Predictions(runner.val_dataloader)

    def before_test_epoch(self, runner) -> None:
        self._predictions = _Predictions(runner.test_dataloader)

    def after_val_iter(self, runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        if self._predictions is not None:
            self._predictions.add(outputs or ())

    def after_test_iter(self, runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        self.after_val_iter(runner, batch_idx, data_batch, outputs)

    def after_val_epoch(self, runner, metrics: Optional[dict[str, float]] = None) -> None:
        if not position(runner):
            return
        loop = runner.train_loop
        row = self._add_row(runner, loop.iter, None if isinstance(loop, IterBasedTrainLoop) else loop.epoch)
        row.update(scalars(metrics))
        self._write(runner)

    def after_test_epoch(self, runner, metrics: Optional[dict[str, float]] = None) -> None:
        self._say(runner, self._predictions.write(runner.work_dir, 'test_') if self._predictions else [])

    def after_train(self, runner) -> None:
        paths = [osp.join(runner.work_dir, CSV)]
        if is_main_process():
            paths.append(osp.join(runner.work_dir, 'results.png'))
            self._plot(runner, paths[-1])
        if self._predictions is not None:
            paths += self._predictions.write(runner.work_dir, '')
            self._predictions = None
        self._say(runner, paths)

    def _plot(self, runner, path: str) -> None:
        from ..plots import plot_training

        losses, rates = {}, {}
        for name, buffer in runner.message_hub.log_scalars.items():
            stage, _, key = name.partition('/')
            values = buffer.data[0]
            curve = np.arange(runner.iter - len(values) + 1, runner.iter + 1), values  # from before a resumption, too
            if stage == 'train' and 'loss' in key:
                losses[key] = curve
            elif name == 'train/lr':
                rates['lr'] = curve
        unit = 'iteration' if isinstance(runner.train_loop, IterBasedTrainLoop) else 'epoch'
        trained = {*KEYS, *losses}
        metrics: dict = {}
        for row in self.rows:
            for key, value in row.items():
                if key not in trained and value != -1:  # COCO's number for no object of that size
                    positions, values = metrics.setdefault(key, ([], []))
                    positions.append(row[unit])
                    values.append(value)
        plot_training(path, losses, rates, metrics, unit)

    @staticmethod
    def _say(runner, paths: list[str]) -> None:
        if paths and is_main_process():
            names = ', '.join(osp.basename(path) for path in paths)
            runner.logger.info(f'written to {runner.work_dir}: {names}')
