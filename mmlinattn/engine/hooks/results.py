# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import csv
import io
import math
import os
import os.path as osp
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Optional

import numpy as np
import torch
from mmengine.dist import all_reduce, collect_results, get_rank, get_world_size, is_main_process
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import IterBasedTrainLoop
from mmengine.structures import BaseDataElement

from ...utils import atomic_write
from ..data.datasets import classes_of, infos_of
from ..data.detections import Boxes, count_confusion, objects_of, precision_over_recall
from .progress import scalars

CSV = 'results.csv'
KEYS = ('epoch', 'iteration', 'seconds', 'lr')  # the first columns
MAX_EVALUATED = 2_000_000  # images times classes that pycocotools evaluates in about a minute


def is_rate(key: str) -> bool:
    """Return True for the learning rate of one optimizer (``lr``) or of one among several (``generator.lr``)."""
    return key.rpartition('.')[2] == 'lr'


def read_rows(path: str, last: float = math.inf, key: str = 'iteration') -> list[dict]:
    """Return the rows of a ``results.csv`` up to ``last``, a value of the column ``key`` (``'iteration'`` or
    ``'epoch'``); [] for an unreadable file."""
    with suppress(OSError, ValueError, KeyError, TypeError), open(path, newline='') as file:
        rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
        return [row for row in rows if row[key] <= last and 'iteration' in row]
    return []


class _PredictionPlots:
    """Plots of the predictions of a validation or test: ``add`` the predicted samples, then ``write``. All tasks get a
    confusion matrix; detectors also get curves of precision over recall. Annotated boxes come from the data set of
    ``loader``, other labels from the samples."""

    def __init__(self, loader: Any):
        self.dataset, self.size, self.seen = loader.dataset, len(loader.dataset), 0
        self.names = [str(name) for name in classes_of(self.dataset)]
        self.boxes: list[tuple[str, Boxes]] = []  # of a detector, by path
        self.matrix = np.zeros((len(self.names), len(self.names)))  # of the others

    def add(self, samples: Sequence) -> None:
        """Add the data samples of a batch, with predictions and annotations."""
        for sample in samples:
            if not isinstance(sample, BaseDataElement):  # tensors of other models
                continue
            # beyond the size, samplers repeat images so that all processes have as many
            is_repeated = self.seen * get_world_size() + get_rank() >= self.size
            self.seen += 1
            if 'pred_instances' in sample and 'bboxes' in sample.pred_instances and 'img_path' in sample:
                found = sample.pred_instances
                boxes, labels, scores = (found[key].detach().float().cpu() for key in ('bboxes', 'labels', 'scores'))
                if boxes.ndim == 2 and boxes.shape[1] == 4:  # no rotated ones
                    arrays = Boxes(boxes.numpy(), labels.long().numpy(), scores.numpy())
                    self.boxes.append((sample.img_path, arrays))
            elif 'pred_sem_seg' in sample and 'gt_sem_seg' in sample and not is_repeated:
                self._count(sample.gt_sem_seg.data, sample.pred_sem_seg.data)
            elif 'pred_label' in sample and 'gt_label' in sample and sample.gt_label.numel() == 1 and not is_repeated:
                self._count(sample.gt_label, sample.pred_label)

    def _count(self, truth: torch.Tensor, found: torch.Tensor) -> None:
        count = len(self.names)
        rows, columns = (labels.flatten().cpu().long().numpy() for labels in (truth, found))
        if rows.shape == columns.shape:
            is_class = (rows >= 0) & (rows < count) & (columns >= 0) & (columns < count)  # ignored pixels are 255
            pairs = (rows * count + columns)[is_class]
            self.matrix += np.bincount(pairs, minlength=count * count).reshape(count, count)

    def write(self, folder: str, prefix: str) -> list[str]:
        """Write the plots in the main process and return their paths; file names begin with ``prefix``. All processes
        have to call this method."""
        if get_world_size() > 1:
            self.boxes = collect_results(self.boxes, self.size, device='cpu') or []
            all_reduce(torch.as_tensor(self.matrix))
        if not is_main_process():
            return []
        if self.boxes and self.names:
            return self._write_boxes(folder, prefix)
        if not self.matrix.any():
            return []
        from ..plots import plot_confusion  # matplotlib takes a second

        path = osp.join(folder, f'{prefix}confusion_matrix.png')
        plot_confusion(path, self.matrix, self.names, 'confusion matrix')
        return [path]

    def _write_boxes(self, folder: str, prefix: str) -> list[str]:
        """Write confusion matrix and precision-recall curves of a detector, and return the paths of the plots."""
        from ..plots import plot_confusion, plot_precision_recall

        infos = (info for info in infos_of(self.dataset) if 'instances' in info and 'img_path' in info)
        objects = {info['img_path']: objects_of(info['instances']) for info in infos}
        pairs = [(objects[path], found) for path, found in self.boxes if path in objects]
        if not any(len(truth.labels) for truth, _ in pairs):  # no annotations, as of COCO's test-dev
            return []
        names = [*self.names, 'background']
        matrix = np.zeros((len(names), len(names)))
        for truth, found in pairs:
            count_confusion(matrix, truth, found)
        paths = [osp.join(folder, f'{prefix}{name}.png') for name in ('confusion_matrix', 'precision_recall')]
        plot_confusion(paths[0], matrix, names, 'confusion matrix of boxes (score from 0.3, IoU from 0.5)')
        if len(pairs) * len(self.names) > MAX_EVALUATED:
            return paths[:1]
        curves = precision_over_recall([truth for truth, _ in pairs], [found for _, found in pairs], len(self.names))
        plot_precision_recall(paths[1], *curves, self.names)
        return paths


@HOOKS.register_module(force=True)
class ResultsHook(Hook):
    """Write metrics of the training, and plots of the predictions, into the work dir.

    - ``results.csv``: learning rates, mean losses since the previous row, and metrics of the validation. There is a row
      per epoch, or in iteration-based training per validation and per hundredth of the training. A resumed run appends
      to the file.
    - ``results.png``: losses, learning rate and metrics, plotted after the last iteration.
    - ``confusion_matrix.png``: confusion matrix of the last validation; for a detector also ``precision_recall.png``.
      After a test, the file names begin with ``test_``.

    Annotations come from the data set: ``instances`` of MMDetection, or label maps and labels in the data samples.
    Models of other tasks have no confusion matrix.
    """

    priority = 'LOW'  # after RuntimeInfoHook, the source of the numbers

    def __init__(self) -> None:
        self.rows: list[dict] = []
        self.unit = ''  # of the positions of a training: epoch or iteration
        self._predictions: Optional[_PredictionPlots] = None
        self._began = 0.0
        self._since = 0  # iteration of the last row

    def before_train(self, runner) -> None:
        self._began = time.time()
        self.unit = 'iteration' if isinstance(runner.train_loop, IterBasedTrainLoop) else 'epoch'
        path = osp.join(runner.work_dir, CSV)
        if runner.iter:
            self.rows = read_rows(path, runner.iter if self.unit == 'iteration' else runner.epoch, self.unit)
        elif is_main_process() and osp.isfile(path):
            kept = f'{path[:-4]}_{time.strftime("%Y%m%d_%H%M%S", time.localtime(osp.getmtime(path)))}.csv'
            os.replace(path, kept)
            runner.logger.warning(
                f'{runner.work_dir} has results of an earlier run: its {CSV} is now {osp.basename(kept)}. Its '
                'checkpoints are replaced by those of the same name.'
            )
        if self.rows:
            self._began -= self.rows[-1].get('seconds', 0.0)
        if self.unit == 'epoch':  # its length may be another than before
            self._since = runner.epoch * len(runner.train_dataloader)
        else:
            self._since = int(self.rows[-1]['iteration']) if self.rows else runner.iter

    def _before_epoch(self, runner, mode: str = 'train') -> None:
        if mode != 'train':
            self._predictions = _PredictionPlots(getattr(runner, f'{mode}_dataloader'))

    def _after_iter(self, runner, batch_idx: int, data_batch=None, outputs=None, mode: str = 'train') -> None:
        if mode != 'train':
            self._predictions.add(outputs or ())  # type: ignore[union-attr]
        elif self.unit == 'iteration':
            done = runner.iter + 1
            if done % max(1, runner.max_iters // 100) == 0 or done == runner.max_iters:
                self._add_row(runner, done)

    def after_train_epoch(self, runner, metrics=None) -> None:
        if self.unit == 'epoch':
            self._add_row(runner, runner.iter, epoch=runner.epoch + 1)

    def after_val_epoch(self, runner, metrics: Optional[dict[str, float]] = None) -> None:
        if self.unit:  # the run trains
            epoch = dict(epoch=runner.epoch) if self.unit == 'epoch' else {}
            self._add_row(runner, runner.iter, scalars(metrics), **epoch)

    def after_test_epoch(self, runner, metrics: Optional[dict[str, float]] = None) -> None:
        self._log(runner, self._predictions.write(runner.work_dir, 'test_'))  # type: ignore[union-attr]

    def after_train(self, runner) -> None:
        paths = [osp.join(runner.work_dir, CSV)]
        if is_main_process():
            paths.append(osp.join(runner.work_dir, 'results.png'))
            self._plot(runner, paths[-1])
        if self._predictions is not None:
            paths += self._predictions.write(runner.work_dir, '')
            self._predictions = None
        self._log(runner, paths)

    def _add_row(self, runner, iteration: int, metrics: Optional[dict] = None, **epoch: int) -> None:
        """Append a row, or add metrics to the last row if it is of the same iteration or ``epoch``; write the file."""
        # the length of an epoch, and so the iteration at its end, may differ after resuming
        if not self.rows or self.rows[-1].get(self.unit) != epoch.get('epoch', iteration):
            row: dict[str, Any] = dict(epoch, iteration=iteration, seconds=round(time.time() - self._began, 1))
            for name, buffer in runner.message_hub.log_scalars.items():
                stage, _, key = name.partition('/')
                if stage == 'train' and is_rate(key):
                    row[key] = buffer.current()
                elif stage == 'train' and 'loss' in key:
                    row[key] = buffer.mean(max(1, iteration - self._since))
            self.rows.append(row)
            self._since = iteration
        self.rows[-1].update(metrics or {})
        if not is_main_process():
            return
        try:
            self._write(osp.join(runner.work_dir, CSV))
        except OSError as error:  # a full disk ends no training before the next checkpoint
            runner.logger.warning(f'{CSV} could not be written: {error.strerror}. It is written again with more rows.')

    def _write(self, path: str) -> None:
        """Write all rows as CSV, with a column for each key of a row."""
        keys = dict.fromkeys(key for row in self.rows for key in row)
        columns = [key for key in KEYS if key in keys] + [key for key in keys if key not in KEYS]
        text = io.StringIO(newline='')
        writer = csv.DictWriter(text, columns)
        writer.writeheader()
        writer.writerows(
            {key: f'{value:.6g}' if isinstance(value, float) else value for key, value in row.items()}
            for row in self.rows
        )
        with atomic_write(path) as file:
            file.write(text.getvalue().encode())

    def _plot(self, runner, path: str) -> None:
        """Plot losses and learning rates of the message hub, and metrics of :attr:`rows`, to a PNG file."""
        from ..plots import plot_training

        losses, rates = {}, {}
        for name, buffer in runner.message_hub.log_scalars.items():
            stage, _, key = name.partition('/')
            values = buffer.data[0]
            curve = np.arange(runner.iter - len(values) + 1, runner.iter + 1), values  # also before a resumption
            if stage == 'train' and 'loss' in key:
                losses[key] = curve
            elif stage == 'train' and is_rate(key):
                rates[key] = curve
        metrics: dict = {}
        for row in self.rows:
            for key, value in row.items():
                if key not in (*KEYS, *losses, *rates) and value != -1:  # COCO's number for no object of that size
                    positions, values = metrics.setdefault(key, ([], []))
                    positions.append(row[self.unit])
                    values.append(value)
        plot_training(path, losses, rates, metrics, self.unit)

    @staticmethod
    def _log(runner, paths: list[str]) -> None:
        if paths and is_main_process():
            names = ', '.join(osp.basename(path) for path in paths)
            runner.logger.info(f'written to {runner.work_dir}: {names}')
