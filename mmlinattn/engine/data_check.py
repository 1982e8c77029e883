# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import logging
import os
import os.path as osp
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Optional

from mmengine.config import Config
from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.registry import DATASETS, HOOKS
from mmengine.runner import IterBasedTrainLoop
from mmengine.runner.base_loop import BaseLoop

from ..utils.errors import RunError
from ..utils.registering import bare_name
from .annotations import check_annotations, describe_extreme, listed
from .cli import notice
from .loading_check import Unreadable, allowed_labels, read_samples, watch_loading

__all__ = ['DataCheckHook', 'check_data_config', 'explained_empty_data', 'find_missing_files']

LOADERS = ('train_dataloader', 'val_dataloader', 'test_dataloader')
# of MMPretrain's data sets those that read the folder `split`; in others it names a list, or a part of an archive
SPLIT_IS_FOLDER = ('ImageNet', 'ImageNet21k')
DOWNLOADED = ('CIFAR10', 'CIFAR100', 'MNIST', 'FashionMNIST')  # which make their folder


def _is_local(path, config=None) -> bool:
    backend = ((config or {}).get('backend_args') or {}).get('backend', 'local')
    return backend == 'local' and '://' not in str(path)


def _leaf_configs(config, key: str) -> Iterator[tuple[str, dict]]:
    """The data sets inside wrappers such as ``RepeatDataset`` and ``ConcatDataset``."""
    if not isinstance(config, dict):
        return
    if isinstance(config.get('dataset'), dict):
        yield from _leaf_configs(config['dataset'], f'{key}.dataset')
    elif isinstance(config.get('datasets'), (list, tuple)):
        for index, child in enumerate(config['datasets']):
            yield from _leaf_configs(child, f'{key}.datasets.{index}')
    else:
        yield key, config


def _check_leaf(config: dict, key: str) -> None:
    root = config.get('data_root') or ''
    if not _is_local(root, config):
        return
    kind = bare_name(config.get('type'))
    if kind in DOWNLOADED and config.get('download', True):
        return
    where, prefix = 'data_prefix', config.get('data_prefix')
    if not prefix and kind in SPLIT_IS_FOLDER:
        where, prefix = 'split', config.get('split')
    prefixes = dict(prefix) if isinstance(prefix, dict) else {'': prefix or ''}
    ann_files = config.get('ann_file') or ''
    ann_files = [ann_files] if isinstance(ann_files, str) else ann_files
    if root and not osp.isdir(root):
        held = ', '.join(repr(p) for p in (*ann_files, *prefixes.values()) if p)
        raise RunError(
            f'{key}.data_root = {root!r}: no such folder. It has to be the root of the data set'
            + (f', holding {held}' if held else '')
            + '.'
        )
    for ann_file in ann_files:
        path = osp.join(root, ann_file)
        if ann_file and _is_local(path) and not osp.exists(path):
            raise RunError(
                f'{key}.ann_file = {ann_file!r}: no such file {path!r}. '
                'The path is relative to data_root unless it is absolute.'
            )
    for name, value in prefixes.items():
        folder = osp.join(root, value) if isinstance(value, str) else ''
        if value and folder and _is_local(folder) and not osp.isdir(folder):
            dotted = f'{key}.{where}.{name}' if name else f'{key}.{where}'
            raise RunError(
                f'{dotted} = {value!r}: no such folder {folder!r}. '
                'The path is relative to data_root unless it is absolute.'
            )


def check_data_config(cfg: Config, stages: Sequence[str]) -> None:
    """Check that the folders and annotation files a config names are there.

    Args:
        cfg: The whole config.
        stages: Those of ``'train'``, ``'val'`` and ``'test'`` that will run.

    Raises:
        RunError: One is missing, or annotations in COCO's format cannot be used. The message has the config key, its
            value and what belongs there.
    """
    for stage in stages:
        loader = cfg.get(f'{stage}_dataloader')
        for key, leaf in _leaf_configs(loader, f'{stage}_dataloader'):
            if key != f'{stage}_dataloader':
                _check_leaf(leaf, key)
        evaluators = cfg.get(f'{stage}_evaluator') or []
        for evaluator in [evaluators] if isinstance(evaluators, dict) else evaluators:
            path = evaluator.get('ann_file')
            if isinstance(path, str) and _is_local(path, evaluator) and not osp.isfile(path):
                raise RunError(
                    f'{stage}_evaluator.ann_file = {path!r}: no such file. It has to be the '
                    f'annotation file of {stage}_dataloader, and is not relative to data_root.'
                )
    if cfg.get('default_scope') != 'mmdet' or int(os.environ.get('RANK', os.environ.get('SLURM_PROCID', 0))) != 0:
        return
    for stage in stages:
        for key, leaf in _leaf_configs(cfg.get(f'{stage}_dataloader'), f'{stage}_dataloader'):
            path = osp.join(leaf.get('data_root') or '', leaf.get('ann_file') or '')
            if leaf.get('type') and leaf.get('ann_file') and _is_local(path, leaf):
                steps = leaf.get('pipeline') or []
                loadings = [step for step in steps if bare_name(step.get('type')) == 'LoadAnnotations']
                with_masks = any(step.get('with_mask') for step in loadings)
                is_training, metainfo = stage == 'train', leaf.get('metainfo')
                key = f'{key}.ann_file'
                for line in check_annotations(leaf['type'], path, key, with_masks, is_training, None, metainfo):
                    notice(line)


def _explain_empty_data(cfg: Config, stages: Sequence[str]) -> str:
    for stage in stages:
        for key, leaf in _leaf_configs(cfg.get(f'{stage}_dataloader'), f'{stage}_dataloader'):
            bare = dict(leaf, serialize_data=False, pipeline=[])
            if len(DATASETS.build(dict(bare))) > 0:
                continue
            everything = DATASETS.build(dict(bare, filter_cfg=None))
            source = leaf.get('ann_file') or leaf.get('data_prefix')
            if len(everything) == 0:
                return f'{key}: {source!r} in data_root {leaf.get("data_root")!r} names no image.'
            return (
                f'{key}: none of the {len(everything)} images of {source!r} is left after '
                f'filter_cfg = {dict(leaf.get("filter_cfg") or {})}. The class names searched for '
                f'are metainfo.classes = {everything.metainfo.get("classes")}; '
                'they have to be the category names of the annotation file.'
            )
    return ''


@contextmanager
def explained_empty_data(cfg: Config, stages: Sequence[str]):
    """Say why a data set holds no image where MMEngine fails on it with a NumPy error.

    The annotations are read once more, and only after such a failure.

    Raises:
        RunError: Building or running failed with a ``ValueError``, and a data set of ``stages`` is
            empty.
    """
    try:
        yield
    except ValueError:
        error = None
        with suppress(Exception):  # what went wrong first is what counts
            reason = _explain_empty_data(cfg, stages)
            if reason:
                error = RunError(reason)
        if error is not None:
            raise error from None
        raise


def _leaf_datasets(dataset) -> Iterator:
    if hasattr(dataset, 'datasets'):
        for child in dataset.datasets:
            yield from _leaf_datasets(child)
        return
    inner = vars(dataset).get('dataset', vars(dataset).get('_dataset'))
    if inner is not None:
        yield from _leaf_datasets(inner)
    else:
        yield dataset


def _reads_segmentation(dataset) -> bool:
    return any(
        type(loading).__name__ == 'LoadAnnotations' and getattr(loading, 'with_seg', True)
        for transform in getattr(getattr(dataset, 'pipeline', None), 'transforms', ())
        for loading in [getattr(transform, 'loading', transform)]  # inside of a CheckedLoading
    )


def find_missing_files(dataset) -> list[str]:
    """Local image and label files that a built data set names and that are not there.

    Each folder is listed once, which for 118 thousand images takes a fraction of a second where
    asking for every file takes minutes on a network disk.
    """
    if not hasattr(dataset, 'get_data_info') or not _is_local('', vars(dataset)):
        return []
    keys = ['img_path'] + ['seg_map_path'] * _reads_segmentation(dataset)
    wanted: dict[str, list[str]] = defaultdict(list)
    for index in range(len(dataset)):
        info = dataset.get_data_info(index)
        for key in keys:
            path = info.get(key)
            if isinstance(path, str) and _is_local(path):
                folder, name = osp.split(path)
                wanted[folder].append(name)
    missing = []
    for folder, names in wanted.items():
        try:
            with os.scandir(folder or '.') as entries:
                present = {entry.name for entry in entries}
        except (FileNotFoundError, NotADirectoryError):
            present = set()
        missing += [osp.join(folder, name) for name in names if name not in present]
    return missing


class _LateStart:
    """Batches without end whose loader starts its workers at the first of them."""

    def __init__(self, endless: type, loader):
        self.endless = endless
        self.loader = loader
        self.iterator = None

    def __iter__(self):
        return self

    def __next__(self):
        if self.iterator is None:
            self.iterator = self.endless(self.loader)
        return next(self.iterator)


def start_workers_late(loop: IterBasedTrainLoop) -> None:
    """Put off to the first iteration what MMEngine does when it builds the loop: starting the loader's workers."""
    if loop.dataloader.num_workers > 0 and not isinstance(loop.dataloader_iterator, _LateStart):
        loop.dataloader._iterator = None  # those that persist
        loop.dataloader_iterator = _LateStart(type(loop.dataloader_iterator), loop.dataloader)


@HOOKS.register_module(force=True)
class DataCheckHook(Hook):
    """Find bad data before the first iteration where that is quick, and else by name when it is met.

    Before the run, the main process looks whether all image and label files are there, checks annotation files of
    COCO's format, and reads the files of some samples; the others wait for it where the model is first synchronised.
    While the run goes on, each file is checked as it is read, in the processes that read it: that it can be decoded;
    that a picture has the size its annotations declare; that a segmentation map has the size of its image and labels of
    the model's ``num_classes`` only.

    Args:
        max_listed: How many files a message names.
        num_read: How many samples of each data set are read ahead, spread evenly over it. 100 take about a second.
            None reads all.
        unreadable: ``'stop'`` or ``'skip'``: what happens in training at an image or segmentation map that cannot be
            decoded. In place of a skipped sample the data set draws another one; each skipped file is named in a
            warning, counted, and listed in ``unreadable_files.txt`` beside the log. Validation and test always stop:
            their figures would be of other data.

    Raises:
        ValueError: An argument is out of range.
        RunError: Annotations name files that are not there, a data set holds no image, a file cannot be read, or a
            segmentation map does not fit its image or the model.
    """

    priority = 'VERY_HIGH'

    def __init__(self, max_listed: int = 5, num_read: Optional[int] = 100, unreadable: str = 'stop'):
        if unreadable not in ('stop', 'skip'):
            raise ValueError(f"DataCheckHook: unreadable={unreadable!r} has to be 'stop' or 'skip'")
        if num_read is not None and num_read < 0:
            raise ValueError(f'DataCheckHook: num_read={num_read!r} has to be at least 0, or None for all samples')
        self.max_listed = max_listed
        self.num_read = num_read
        self.unreadable = unreadable
        self.skipped_list = None
        self._skipped: set[str] = set()
        self._list_size = 0

    def before_run(self, runner) -> None:
        """Check the data sets of all loops that will run, and have their files checked from here on."""
        if self.unreadable == 'skip':
            self.skipped_list = osp.join(runner.log_dir, 'unreadable_files.txt')
        for stage in ('train', 'val', 'test'):
            loop = getattr(runner, f'_{stage}_loop')
            if not isinstance(loop, BaseLoop):  # not built: this run does not use it
                continue
            may_skip = stage == 'train' and self.unreadable == 'skip'
            for dataset in _leaf_datasets(loop.dataloader.dataset):
                is_main = is_main_process()
                if is_main:
                    self._check_presence(dataset, f'{stage}_dataloader')
                    self._check_annotations(runner, dataset, stage)
                watch_loading(dataset, allowed_labels(runner.model), self.skipped_list if may_skip else None)
                if is_main:
                    self._check_samples(dataset, f'{stage}_dataloader', may_skip)
            if isinstance(loop, IterBasedTrainLoop):
                start_workers_late(loop)  # those started by now have copies of the data set that are not watched

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        """Name the files that were skipped since the last iteration."""
        if self.skipped_list is None or not is_main_process() or not osp.exists(self.skipped_list):
            return
        size = osp.getsize(self.skipped_list)
        if size == self._list_size:
            return
        self._list_size = size
        with open(self.skipped_list) as stream:
            found = dict.fromkeys(stream.read().splitlines())
        new = [line for line in found if line not in self._skipped]
        self._skipped.update(new)
        if new:
            runner.logger.warning(
                f'{len(self._skipped)} unreadable files skipped so far, all listed in {self.skipped_list}; '
                f'new: {self._listed(new)}'
            )

    def _listed(self, items: Sequence, separator: str = ', ') -> str:
        return listed(list(items), self.max_listed, separator)

    @staticmethod
    def _name(dataset, key: str) -> str:
        return f'{key} ({type(dataset).__name__}, ann_file {getattr(dataset, "ann_file", "")!r})'

    def _check_presence(self, dataset, key: str) -> None:
        name = self._name(dataset, key)
        if len(dataset) == 0:
            raise RunError(f'{name} holds no image.')
        missing = find_missing_files(dataset)
        if missing:
            raise RunError(
                f'{name}: {len(missing)} of the files its {len(dataset)} samples name are missing: '
                + self._listed(missing)
            )

    @staticmethod
    def _check_annotations(runner, dataset, stage: str) -> None:
        # Where tools/train.py runs, this was done before MMDetection read the file.
        path, backend = getattr(dataset, 'ann_file', None), getattr(dataset, 'backend_args', None)
        if runner.cfg.get('default_scope') != 'mmdet' or not isinstance(path, str) or not osp.isfile(path):
            return
        loadings = getattr(getattr(dataset, 'pipeline', None), 'transforms', ())
        with_masks = any(getattr(loading, 'with_mask', False) for loading in loadings)
        key = f'{stage}_dataloader.dataset.ann_file'
        metainfo = getattr(dataset, 'metainfo', None)
        for line in check_annotations(type(dataset), path, key, with_masks, stage == 'train', backend, metainfo):
            runner.logger.warning(line)

    def _check_samples(self, dataset, key: str, may_skip: bool) -> None:
        num_read, errors, extreme = read_samples(dataset, self.num_read)
        if extreme:
            print_log(f'{self._name(dataset, key)}: {describe_extreme(extreme)}', 'current', logging.WARNING)
        if not errors:
            return
        name = self._name(dataset, key)
        counted = f'{len(errors)} of {num_read} samples read (of {len(dataset)}) cannot be used: '
        if may_skip and len(errors) < num_read and all(isinstance(error, Unreadable) for error in errors):
            print_log(f'{name}: {counted}{self._listed(errors, "; ")} They are skipped.', 'current', logging.WARNING)
            return
        hint = '' if num_read == len(dataset) else ' DataCheckHook(num_read=None) reads and counts all.'
        if all(isinstance(error, Unreadable) for error in errors) and key == 'train_dataloader' and not may_skip:
            hint += " DataCheckHook(unreadable='skip') trains without them."
        raise RunError(f'{name}: {counted}{self._listed(errors, "; ")}{hint}')
