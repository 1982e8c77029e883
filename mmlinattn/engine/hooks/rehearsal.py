# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import contextlib
import copy
import io
import logging
import os
import os.path as osp
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from traceback import walk_tb
from typing import Any, Optional

import numpy as np
import torch
from mmengine.dataset import Compose
from mmengine.dist import get_rank, get_world_size
from mmengine.hooks import CheckpointHook, Hook
from mmengine.registry import HOOKS
from mmengine.runner.base_loop import BaseLoop
from mmengine.structures import InstanceData
from torch.utils.data import BatchSampler, DataLoader

from ...checkpoints.states import some
from ...utils.building import unwrapped
from ...utils.errors import RunError, described, meant, raising_object
from ...utils.quietness import log_level
from ..data.datasets import all_datasets
from ..data.heads import counts_of_stages
from ..optimizers.saved_groups import all_schedulers
from .progress import is_error, scalars

_IMAGES = 2  # of a loop; of each data set with MultiDatasetsEvaluator
_FILES = ('outfile_prefix', 'out_file_path', 'output_dir', 'out_dir')  # attributes of metrics that write files
_BOXES = {'bboxes', 'labels', 'scores', 'masks'}


@contextlib.contextmanager
def unchanged(runner) -> Iterator[contextlib.ExitStack]:
    """Restore random state, training flags, logging and the visualizer's backends at the end of this context. Nothing
    is printed inside, and compiled blocks run eagerly. The caller may add contexts to the yielded stack."""
    visualizer = runner.visualizer
    with contextlib.ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.callback(logging.disable, logging.root.manager.disable)
        for module in runner.model.modules():
            stack.callback(setattr, module, 'training', module.training)
        if getattr(visualizer, '_vis_backends', None) is not None:
            stack.callback(setattr, visualizer, '_vis_backends', visualizer._vis_backends)
            visualizer._vis_backends = {}
        quiet = contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(), log_level(logging.CRITICAL)
        for context in (*quiet, torch.random.fork_rng(), torch.no_grad()):
            stack.enter_context(context)
        warnings.simplefilter('ignore')
        logging.disable(logging.CRITICAL)
        if 'torch._dynamo' in sys.modules and hasattr(torch.compiler, 'set_stance'):  # since PyTorch 2.6
            stack.enter_context(torch.compiler.set_stance('force_eager'))
        yield stack


@contextlib.contextmanager
def _one_line(reason: Callable[[Exception], str]) -> Iterator[None]:
    """Convert errors in this context to a RunError with the message ``reason(error)``, but for RunErrors and with
    ``MMLINATTN_TRACEBACK=1``."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        if os.environ.get('MMLINATTN_TRACEBACK') == '1':
            raise
        raise RunError(reason(error)) from error


def _few_images(loop: Any) -> DataLoader:
    """Return a loader of two images of a loop; with MultiDatasetsEvaluator, of two of each data set."""
    loader, dataset = loop.dataloader, loop.dataloader.dataset
    batches = [list(batch)[:_IMAGES] for batch in islice(loader.batch_sampler, _IMAGES)]
    sizes = getattr(dataset, 'cumulative_sizes', None)
    if sizes and hasattr(getattr(loop, 'evaluator', None), 'dataset_prefixes'):
        parts = [range(start, end)[:_IMAGES] for start, end in zip((0, *sizes), sizes)]
        batches = [[i] for part in parts for i in part]
    elif batches:
        batches = batches[:1] if len(batches[0]) == _IMAGES else batches
        if type(loader.batch_sampler) is BatchSampler:  # often sorted by class: some metrics need two
            batches[-1][-1] = len(dataset) - 1
    return DataLoader(dataset, batch_sampler=batches, collate_fn=loader.collate_fn)


@contextlib.contextmanager
def _borrowed(metric: Any, folder: str) -> Iterator[None]:
    """Let a metric write its files to ``folder`` in this context, and restore the state of the metric at the end."""
    state = vars(metric)
    before = dict(state)
    for key, value in before.items():
        if isinstance(value, (list, dict, set, np.ndarray)):
            state[key] = copy.copy(value)
        elif isinstance(value, torch.Tensor):
            state[key] = value.clone()
        elif key in _FILES and isinstance(value, str):
            state[key] = osp.join(folder, osp.basename(value.rstrip('/')) or key)
            if osp.isdir(value):
                os.makedirs(state[key], exist_ok=True)
    metric.results = []
    try:
        yield
    finally:
        state.clear()
        state.update(before)


def _add_boxes(sample: Any, label: int, counts: list[int]) -> None:
    """Add boxes of the whole image and the class ``label`` to the predictions of a detector for one image. The new
    number of boxes is not yet in ``counts``, and is appended. Without predictions, metrics have no names. Some metrics
    fail only for the last label, or for different numbers of boxes."""
    found = sample.get('pred_instances') if hasattr(sample, 'get') else None
    if found is None or not {'bboxes', 'labels', 'scores'} <= {*found.keys()} <= _BOXES:
        return
    boxes, masks, shape = found.bboxes, found.get('masks'), sample.get('ori_shape')
    has_boxes = type(boxes) is torch.Tensor and boxes.shape[1:] == (4,)  # not rotated
    if shape is None or not has_boxes or not isinstance(masks, (torch.Tensor, type(None))):
        return
    made = InstanceData(bboxes=boxes.new_tensor([[0, 0, shape[1], shape[0]]]), scores=found.scores.new_ones(1))
    made.labels = found.labels.new_full((1,), label)
    if masks is not None:
        made.masks = masks.new_ones(1, *shape[:2])
    found = InstanceData.cat([found, made]) if len(found) else made
    while len(found) in counts:
        found = InstanceData.cat([found, made])
    counts.append(len(found))
    sample.pred_instances = found


def _rehearsal_evaluator(evaluator: Any, label: int) -> Any:
    """Return a copy of an evaluator that judges the images of the rehearsal alone, with the same metrics. ``label`` is
    the label of the boxes added to each image (:func:`_add_boxes`)."""
    made = copy.copy(evaluator)
    ids: list = []
    counts: list[int] = []

    def process(data_samples, data_batch=None) -> None:
        for sample in data_samples:
            _add_boxes(sample, label, counts)
            ids.append(sample.get('img_id') if hasattr(sample, 'get') else None)
        type(made).process(made, data_samples=data_samples, data_batch=data_batch)

    def evaluate(size: int) -> dict:
        for metric in evaluator.metrics:
            if getattr(metric, '_coco_api', None) is not None and hasattr(metric, 'img_ids'):
                metric.img_ids = [number for number in dict.fromkeys(ids) if number is not None]
        if hasattr(made, '_get_cumulative_sizes'):  # MMDetection's MultiDatasetsEvaluator
            each = _IMAGES * get_world_size()
            sizes = [each * (i + 1) for i in range(len(made._get_cumulative_sizes()))]
            made._get_cumulative_sizes = lambda: sizes
        return type(made).evaluate(made, len(ids) * get_world_size())

    made.process, made.evaluate = process, evaluate
    return made


class _RehearsalRunner:
    """Stand-in for the runner in :func:`rehearse`: it calls visualization hooks only, and keeps the metrics."""

    def __init__(self, runner: Any):
        self._runner, self.metrics = runner, None
        self._drawing_hooks = [copy.copy(hook) for hook in runner.hooks if hasattr(hook, '_visualizer')]
        self._drawing_hooks = [
            hook for hook in self._drawing_hooks if getattr(hook, 'draw', getattr(hook, 'enable', False))
        ]
        for hook in self._drawing_hooks:
            vars(hook).update(interval=1, show=False, out_dir=None)
            if isinstance(getattr(hook, 'draw_args', None), dict):
                hook.draw_args = dict(hook.draw_args, show=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        if fn_name == 'after_val_iter':
            for hook in self._drawing_hooks:
                hook.after_val_iter(self, **kwargs)
        elif fn_name == 'after_val_epoch':
            self.metrics = kwargs.get('metrics')


def rehearse(runner: Any, stage: str = 'val') -> Optional[dict]:
    """Run the validation loop (``stage`` 'val') or test loop ('test') on two images, and return its metrics.

    The result is None without such a loop, without batches of indices, and for models that compare images with
    prototypes. Model, metrics, drawing hooks and collectives run as in a validation. Weights, random state, metrics and
    files stay as they are, and nothing is logged.

    Raises:
        RunError: The loop fails. With ``MMLINATTN_TRACEBACK=1`` its error is raised unchanged.
    """
    loop = getattr(runner, f'_{stage}_loop')
    if not isinstance(getattr(loop, 'dataloader', None), DataLoader) or loop.dataloader.batch_sampler is None:
        return None
    if hasattr(unwrapped(runner.model), 'prototype'):  # embeds a whole gallery
        return None
    made: Any = copy.copy(loop)
    made._runner = stand_in = _RehearsalRunner(runner)
    label = max(min(counts_of_stages(unwrapped(runner.model)).get('bbox_head', [1])) - 1, 0)
    name = dict(val='validation').get(stage, stage)

    def reason(error: Exception) -> str:
        return (
            f'the {name} would fail, by a rehearsal with two images: {described(error)} (in {raising_object(error)}). '
            f'Correct {stage}_dataloader, {stage}_evaluator or the model; --cfg-options rehearsal=False runs without '
            'this check, and MMLINATTN_TRACEBACK=1 shows where it fails.'
        )

    with _one_line(reason), unchanged(runner) as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        for metric in getattr(loop.evaluator, 'metrics', ()):
            stack.enter_context(_borrowed(metric, folder))
        made.dataloader = _few_images(loop)
        made.evaluator = _rehearsal_evaluator(loop.evaluator, label)
        if isinstance(getattr(made, 'val_loss', None), dict):
            made.val_loss = {}
        metrics = made.run()
    metrics = metrics if metrics is not None else stand_in.metrics
    return metrics if isinstance(metrics, dict) else None


def rehearse_training_data(runner: Any) -> None:
    """Load two training images, and compare masks with boxes and image: some transforms move boxes alone.

    Raises:
        RunError: Loading fails, or masks do not fit. With ``MMLINATTN_TRACEBACK=1`` an error is raised unchanged.
    """
    dataset: Any = getattr(getattr(runner._train_loop, 'dataloader', None), 'dataset', None)
    if not hasattr(dataset, '__getitem__') or not hasattr(dataset, '__len__') or not len(dataset):
        return
    steps = getattr(dataset, 'pipeline', ())
    names = ', '.join(type(step).__name__ for step in getattr(steps, 'transforms', steps))

    def misfit(masks: Any, boxes: Any, size: Any) -> str:
        if masks is None or boxes is None or not hasattr(masks, 'height') or not len(masks):
            return ''
        if (len(masks), masks.height, masks.width) == (len(boxes), *size):
            return ''
        return (
            f'Masks do not fit: {len(masks)} masks of {masks.height}x{masks.width} for {len(boxes)} boxes in an image '
            f'of {size[0]}x{size[1]}. One of the transforms ({names}) moves boxes and leaves masks behind: leave it '
            'out where masks are learnt.'
        )

    switch: Any = None

    def reason(error: Exception) -> str:
        if switch is not None:
            remedy = f'Correct switch_pipeline of {type(switch).__name__}; MMLINATTN_TRACEBACK=1 shows where it fails.'
            return f'train_dataloader: loading would fail after the switch: {described(error)}. {remedy}'
        known = (frame.f_locals.get('results') for frame, _ in walk_tb(error.__traceback__))
        images = (each for each in known if isinstance(each, dict) and 'img' in each)
        found = (misfit(each.get('gt_masks'), each.get('gt_bboxes'), each['img'].shape[:2]) for each in images)
        remedy = f'Correct its data set or transforms ({names}); MMLINATTN_TRACEBACK=1 shows where it fails.'
        remedy = next((each for each in found if each), remedy)
        return f'train_dataloader: loading fails: {described(error)} (in {raising_object(error)}). {remedy}'

    with _one_line(reason), unchanged(runner) as stack:
        for each in all_datasets(dataset):  # some transforms keep images
            if 'pipeline' in getattr(each, '__dict__', ()):
                stack.callback(setattr, each, 'pipeline', each.pipeline)
                with contextlib.suppress(Exception):  # open files and locks cannot be copied
                    each.pipeline = copy.deepcopy(each.pipeline)
        # MMDetection's PipelineSwitchHook replaces the transforms in a later epoch
        later = [hook for hook in runner.hooks if hasattr(hook, 'switch_pipeline')]
        has_transforms = 'pipeline' in getattr(dataset, '__dict__', ())  # those of most wrappers are inside
        for switch in (None, *(later if has_transforms else ())):
            if switch is not None:
                dataset.pipeline = Compose(switch.switch_pipeline)
            for index in sorted({0, len(dataset) // 2}):
                sample = dataset[index]
                packed: Any = sample.get('data_samples') if isinstance(sample, dict) else None
                found = packed.get('gt_instances') if hasattr(packed, 'get') else None
                if found is not None:
                    line = misfit(found.get('masks'), found.get('bboxes'), sample['inputs'].shape[-2:])
                    if line:
                        raise RunError(f'train_dataloader: {line}')


def monitored(runner: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield name of the setting, name of the metric, and rule (``'greater'``, ``'less'`` or None) of each hook and
    scheduler that reads a metric of the validation."""
    for hook in runner.hooks:
        if isinstance(hook, CheckpointHook) and hook.save_best:
            rules = getattr(hook, 'rules', [])
            for i, name in enumerate(hook.save_best):
                yield 'default_hooks.checkpoint.save_best', name, rules[i] if i < len(rules) else None
        elif isinstance(getattr(hook, 'monitor', None), str):
            yield f'{type(hook).__name__}.monitor', hook.monitor, getattr(hook, 'rule', None)
    for scheduler in all_schedulers(runner.param_schedulers):
        if getattr(scheduler, 'need_val_args', False):
            yield f'{type(scheduler).__name__}.monitor', scheduler.monitor, scheduler.rule


def check_monitors(runner: Any, metrics: dict) -> None:
    """Raise a RunError if a monitored metric is not in ``metrics``, is no number, or has no rule (``'auto'``). A rule
    that contradicts the name of the metric gets a warning."""
    names = [*map(str, metrics)]
    for setting, name, rule in monitored(runner):
        if name == 'auto':
            name = names[0]
            hook = next(each for each in runner.hooks if isinstance(each, CheckpointHook) and each.save_best)
            keys = dict(greater_keys=hook.greater_keys, less_keys=hook.less_keys)
            try:
                rule = CheckpointHook(save_best=name, rule=rule, **keys).rules[0]
            except ValueError as error:
                raise RunError(
                    f"{setting}='auto': the first metric is {name!r}, and MMEngine does not know if higher is better. "
                    "Set save_best to one of the metrics, and default_hooks.checkpoint.rule='greater' or 'less'."
                ) from error
        if name not in metrics:
            hint = f'{meant(name, names)} Expected one of {some(names, 12)}.'
            raise RunError(f'{setting}={name!r}: the validation has no such metric.{hint}')
        if not scalars({name: metrics[name]}):
            kind = type(metrics[name]).__name__
            raise RunError(f'{setting}={name!r}: expected a metric with one number, not a {kind}.')
        is_score = any(key.lower() in name.lower() for key in CheckpointHook._default_greater_keys)
        if rule == 'greater' and is_error(name) or rule == 'less' and is_score and not is_error(name):
            better = 'lower' if is_error(name) else 'higher'
            runner.logger.warning(f'{setting}={name!r} with rule={rule!r}: {better} is better for this metric.')


@HOOKS.register_module(force=True)
class RehearsalHook(Hook):
    """Run the validation on two images before the first step, so that its errors show at once.

    The names of its metrics are compared with those that ``save_best``, ``EarlyStoppingHook`` and ``ReduceOnPlateauLR``
    monitor. Two training images are loaded, too. The training is the same, bit for bit, with and without this hook.

    Args:
        enabled (bool): Run the rehearsal.

    Raises:
        RunError: Validation, test or loading fails, or masks do not fit boxes. Or a monitored metric is missing, no
            number, or without a rule.
    """

    priority = 'VERY_HIGH'

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled

    def before_train(self, runner) -> None:
        if not self.enabled:
            return
        rehearse_training_data(runner)
        is_validated = isinstance(runner._val_loop, BaseLoop)
        metrics = rehearse(runner) if is_validated else {}
        if metrics and get_rank() == 0:
            check_monitors(runner, metrics)
        for setting, name, _ in monitored(runner) if metrics == {} else ():
            reason = 'two images of the validation give no metric' if is_validated else 'the run has no validation'
            runner.logger.warning(f'{setting}={name!r} has no effect: {reason}.')

    def before_test(self, runner) -> None:
        """Run the test on two images: some metrics fail only at the end, after all images."""
        if self.enabled:
            rehearse(runner, 'test')
