# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import os
import os.path as osp
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from mmengine.config import Config
from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.registry import DATASETS, HOOKS
from mmengine.runner.base_loop import BaseLoop

from .errors import RunError

__all__ = ['DataCheckHook', 'check_data_config', 'explained_empty_data', 'find_missing_files']

LOADERS = ('train_dataloader', 'val_dataloader', 'test_dataloader')


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
    prefix = config.get('data_prefix') or config.get('split') or {}
    prefixes = dict(prefix) if isinstance(prefix, dict) else {'': prefix}
    ann_file = config.get('ann_file') or ''
    if root and not osp.isdir(root):
        held = ', '.join(repr(p) for p in (ann_file, *prefixes.values()) if p)
        raise RunError(
            f'{key}.data_root = {root!r}: no such folder. It has to be the root of the data set'
            + (f', holding {held}' if held else '')
            + '.'
        )
    path = osp.join(root, ann_file)
    if ann_file and _is_local(path) and not osp.exists(path):
        raise RunError(
            f'{key}.ann_file = {ann_file!r}: no such file {path!r}. '
            'The path is relative to data_root unless it is absolute.'
        )
    for name, value in prefixes.items():
        folder = osp.join(root, value) if isinstance(value, str) else ''
        if value and folder and _is_local(folder) and not osp.isdir(folder):
            dotted = f'{key}.data_prefix.{name}' if name else f'{key}.data_prefix'
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
        RunError: One is missing. The message has the config key, its value and what belongs there.
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
        with suppress(Exception):  # what went wrong first is what counts
            reason = _explain_empty_data(cfg, stages)
            if reason:
                error = RunError(reason)
        if isinstance(error, RunError):
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
        type(transform).__name__ == 'LoadAnnotations' and getattr(transform, 'with_seg', True)
        for transform in getattr(getattr(dataset, 'pipeline', None), 'transforms', ())
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


@HOOKS.register_module(force=True)
class DataCheckHook(Hook):
    """Look for missing images before the first iteration instead of in a worker hours later.

    Only the main process looks; the others wait for it where the model is first synchronised.

    Args:
        max_listed: How many missing files the message names.

    Raises:
        RunError: Annotations name files that are not there, or a data set holds no image.
    """

    priority = 'VERY_HIGH'

    def __init__(self, max_listed: int = 5):
        self.max_listed = max_listed

    def before_run(self, runner) -> None:
        """Check the data sets of all loops that will run."""
        if not is_main_process():
            return
        for stage in ('train', 'val', 'test'):
            loop = getattr(runner, f'_{stage}_loop')
            if not isinstance(loop, BaseLoop):  # not built: this run does not use it
                continue
            for dataset in _leaf_datasets(loop.dataloader.dataset):
                self._check(dataset, f'{stage}_dataloader')

    def _check(self, dataset, key: str) -> None:
        name = f'{key} ({type(dataset).__name__}, ann_file {getattr(dataset, "ann_file", "")!r})'
        if len(dataset) == 0:
            raise RunError(f'{name} holds no image.')
        missing = find_missing_files(dataset)
        if missing:
            listed = ', '.join(missing[: self.max_listed])
            more = len(missing) - self.max_listed
            raise RunError(
                f'{name}: {len(missing)} of the files its {len(dataset)} samples name are missing: '
                + listed
                + (f' and {more} more.' if more > 0 else '.')
            )
