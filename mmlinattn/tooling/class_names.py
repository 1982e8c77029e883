# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Find the data sets of a config and the class names of its model."""

from collections.abc import Iterator
from typing import Optional

from mmengine.config import Config
from mmengine.registry import DATASETS


def dataset_configs(cfg: Config, loader: str) -> Iterator[tuple[str, dict]]:
    """Yield (config key, data set config) of a loader, including data sets inside wrappers such as
    ``ConcatDataset``."""
    top = cfg.get(loader)
    nodes = [(f'{loader}.dataset', top.get('dataset'))] if isinstance(top, dict) else []
    while nodes:
        key, node = nodes.pop(0)
        if not isinstance(node, dict):
            continue
        if isinstance(node.get('dataset'), dict):
            nodes.append((f'{key}.dataset', node['dataset']))
        elif isinstance(node.get('datasets'), (list, tuple)):
            nodes += [(f'{key}.datasets.{i}', child) for i, child in enumerate(node['datasets'])]
        else:
            yield key, node


def num_classes(cfg: Config) -> int:
    """Return the number of classes of the final head, or 0 if the config does not set it."""
    model = cfg.model
    head = model.get('bbox_head') or model.get('decode_head') or model.get('head')
    if model.get('roi_head'):
        head = model.roi_head.bbox_head
    head = head[-1] if isinstance(head, (list, tuple)) else head
    return (head or {}).get('num_classes', 0)


def class_names(cfg: Config, checkpoint_meta: Optional[dict] = None) -> Optional[list[str]]:
    """Return the class name of each label, or None.

    They come from ``meta`` of the checkpoint, as MMEngine or MMCV 1.x (``CLASSES``) saves it. Else they come from the
    config of the test data set, or its class. A source whose number of names differs from that of the head is skipped,
    as for own data in a ``CocoDataset`` without ``metainfo``. The result is None if no source is left.
    """
    expected, data = num_classes(cfg), first_test_data(cfg)
    meta = checkpoint_meta if isinstance(checkpoint_meta, dict) else {}
    given = meta.get('dataset_meta')
    saved: dict = given if isinstance(given, dict) else {}
    classes = data.get('classes')  # of MMPretrain's data sets, after metainfo; a text is the name of a file
    known = [(data.get('metainfo') or {}).get('classes'), classes]
    known += [kind_metainfo(cfg).get('classes')] if not isinstance(classes, str) else []
    for names in (saved.get('classes'), saved.get('CLASSES'), meta.get('CLASSES'), *known):
        if isinstance(names, (list, tuple)) and names and expected in (0, len(names)):
            return [str(name) for name in names]
    return None


def first_test_data(cfg: Config) -> dict:
    """Return the config of the first test data set, or {}."""
    return next((data for _, data in dataset_configs(cfg, 'test_dataloader')), {})


def kind_metainfo(cfg: Config) -> dict:
    """Return ``METAINFO`` of the class of the test data set."""
    kind = first_test_data(cfg).get('type')
    with DATASETS.switch_scope_and_registry(cfg.get('default_scope')) as registry:
        return getattr(registry.get(kind) if isinstance(kind, str) else kind, 'METAINFO', {})
