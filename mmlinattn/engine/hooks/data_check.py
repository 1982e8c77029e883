# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np
from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from ...utils.building import unwrapped
from ...utils.errors import RunError
from ..data import checks, evaluation
from ..data.coco import check_coco
from ..data.datasets import Finding, View, all_datasets, leaf_datasets
from ..data.heads import is_metric_learning
from ..data.masks import check_masks


def extend_palette(meta: dict) -> dict:
    """Return the ``metainfo`` of a data set with random colours for classes beyond its palette, for drawing."""
    classes, palette = meta.get('classes'), meta.get('palette')
    if isinstance(classes, (list, tuple)) and isinstance(palette, (list, tuple)) and 0 < len(palette) < len(classes):
        meta = dict(meta, palette=extended(palette, len(classes)))
    return meta


def extended(palette: Sequence, count: int) -> list:
    """Return a palette of RGB colours with random ones appended up to ``count`` entries, equal in every call. A palette
    with ``count`` or more entries is returned whole."""
    more = np.random.default_rng(0).integers(0, 256, (max(count - len(palette), 0), 3)).tolist()
    return [*palette, *map(tuple, more)]


def _loops(runner) -> dict:
    """Return the built loops by stage, except those without a data set."""
    loops = {stage: getattr(runner, f'_{stage}_loop') for stage in ('train', 'val', 'test')}
    return {key: loop for key, loop in loops.items() if hasattr(getattr(loop, 'dataloader', None), 'dataset')}


@HOOKS.register_module(force=True)
class DataCheckHook(Hook):
    """Check that the data sets match the config, before the first iteration.

    The main process reads annotation files, folders and a sample of the images, in some seconds. MMDetection,
    MMSegmentation and MMPretrain do not report these errors:

    - class names given as one string, or in another order than the categories of a COCO file;
    - different classes or folders in training and validation, or in a tested or resumed checkpoint and the data;
    - segmentation masks with values beyond the classes, or with at most one class beside ignored values;
    - impossible boxes, ids and sizes in COCO files, more objects in an image than the detector returns, stuff
      categories before things in panoptic files.

    Training classes without objects, and objects marked ``ignore``, get a warning. Palettes get colours for all
    classes.

    Args:
        fault: ``'stop'`` the run at an error, ``'warn'`` of it, or ``'skip'`` the check.
        num_images: Number of masks to open in each data set of a segmentor.

    Raises:
        RunError: The first error, with the file, the values and the remedy.
        ValueError: ``fault`` is none of the three.
    """

    priority = 'VERY_HIGH'

    def __init__(self, fault: str = 'stop', num_images: int = 200) -> None:
        if fault not in ('stop', 'warn', 'skip'):
            raise ValueError(f"DataCheckHook: fault = {fault!r} has to be 'stop', 'warn' or 'skip'")
        self.fault, self.num_images = fault, num_images

    def before_run(self, runner) -> None:
        """Check the data sets of all loops of this run."""
        loops = _loops(runner)
        for dataset in chain.from_iterable(all_datasets(loop.dataloader.dataset) for loop in loops.values()):
            if isinstance(getattr(dataset, '_metainfo', None), dict):
                dataset._metainfo = extend_palette(dataset._metainfo)
        if isinstance(getattr(runner.visualizer, 'dataset_meta', None), dict):
            runner.visualizer.dataset_meta = extend_palette(runner.visualizer.dataset_meta)
        self._report(runner, self._check(runner, loops))

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        """Compare the classes of a tested or resumed checkpoint with those of the data."""
        loops = _loops(runner)
        if 'train' in loops:  # a fine-tuned model may have other classes
            loops = {'train': loops['train']} if runner._resume else {}
        elif is_metric_learning(unwrapped(runner.model)):
            return
        for stage, loop in loops.items():
            for dataset in leaf_datasets(loop.dataloader.dataset):
                self._report(runner, checks.check_trained_names(f'{stage}_dataloader', dataset, checkpoint))

    def _check(self, runner, loops: dict) -> Iterator[Finding]:
        """Yield the findings of all checks of data sets, samplers and evaluators; ``loops`` are by stage."""
        model, views = unwrapped(runner.model), []
        for stage, loop in loops.items():
            key, whole = f'{stage}_dataloader', loop.dataloader.dataset
            leaves = [dataset for dataset in leaf_datasets(whole) if hasattr(dataset, '__len__')]
            read = [checks.read_samples(dataset) for dataset in leaves]
            is_part = any(samples.labels for samples in read)
            for dataset, samples in zip(leaves, read):
                if len(dataset) == 0:
                    ann_file = getattr(dataset, 'ann_file', '')
                    yield Finding(f'{key} ({type(dataset).__name__}, ann_file {ann_file!r}) holds no image.')
                    continue
                view = View(key, dataset, model, samples._replace(is_part=is_part))
                if view.is_training or not is_metric_learning(model):
                    views.append(view)
                yield from checks.check_names(key, getattr(dataset, 'metainfo', None) or {})
                yield from check_coco(view)
                yield from checks.check_folders(key, dataset)
                yield from checks.check_labels(view)
                yield from check_masks(view, self.num_images)
            yield from evaluation.check_sampler(key, loop)
            key = f'{stage}_evaluator'
            yield from evaluation.check_evaluator(
                key, getattr(loop, 'evaluator', None), runner.cfg.get(key), whole, model
            )
        yield from checks.check_stages(views)

    def _report(self, runner, findings: Iterable[Finding]) -> None:
        """Run the checks in the main process and report their findings as set by ``fault``.

        ``'stop'`` raises a RunError at the first error, ``'warn'`` logs errors, and ``'skip'`` runs no check. Warnings
        are logged.
        """
        for finding in findings if is_main_process() and self.fault != 'skip' else ():
            if finding.is_error and self.fault == 'stop':
                option = f'--cfg-options custom_hooks.{type(self).__name__}.fault=warn'
                raise RunError(f'{finding.text} If it is meant: {option}')
            runner.logger.warning(finding.text)
