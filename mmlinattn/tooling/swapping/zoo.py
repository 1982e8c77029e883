# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Find the backbones of this project's configs by name: their settings, weights and training recipes."""

import copy
import functools
from collections.abc import Sequence
from typing import NamedTuple, Optional

import torch
from mmengine.config import Config
from mmengine.registry import MODELS

from ...backbones.base import PyramidBackbone
from ...checkpoints.released import released_checkpoints
from ...utils.errors import RunError
from ...utils.files import project_files

# endings of config names; the usual one of each task first
_RECIPES = ('maskrcnn_1x', 'cascade_3x', 'retinanet_1x', 'maskrcnn_3x', 'upernet_160k', 'fpn_80k', 'in1k')
# settings of a config's backbone that belong to its task
_OF_THE_TASK = ('out_indices', 'out_norm', 'out_type', 'frozen_stages', 'init_cfg', 'deploy', '_scope_')


class FeatureMap(NamedTuple):
    """Channels and stride of a backbone's output. Vectors (B, C) and tokens (B, N, C) have ``stride`` None."""

    channels: int
    stride: Optional[int]


class ZooBackbone(NamedTuple):
    """A backbone of our configs.

    Attributes:
        name: Beginning of the names of its configs, such as ``inline_swin_s``.
        cfg: Config of the backbone without settings of the task.
        checkpoint: ``mmlinattn://NAME`` of the released ImageNet weights.
        stages: Channels and stride of each stage.
        plain: The backbone has one stage of blocks at stride 16.
    """

    name: str
    cfg: dict
    checkpoint: Optional[str]
    stages: tuple[FeatureMap, ...]
    plain: bool

    def with_outputs(self, stages: Sequence[int]) -> dict:
        """Return the config of the backbone with outputs at ``stages`` (indices). In a plain backbone with several
        stages, a stage is one of as many evenly spaced blocks."""
        cfg = copy.deepcopy(self.cfg)
        if self.plain:
            cfg['out_type'] = 'featmap'
            if len(self.stages) > 1:
                depth = MODELS.get(cfg['type']).resolve_arch(cfg['arch'])['depths'][0]
                cfg['out_indices'] = tuple((i + 1) * depth // len(self.stages) - 1 for i in stages)
        elif list(stages) != list(range(len(self.stages))):  # the default is all four
            cfg['out_indices'] = tuple(stages)
        return cfg


@functools.cache
def recipes() -> dict[tuple[str, str], dict[str, str]]:
    """Return the configs of this project: (backbone, task) -> recipe name -> path of the config."""
    table: dict[tuple[str, str], dict[str, str]] = {}
    for kind in _RECIPES:
        for path in project_files('configs').glob(f'mm*/*_{kind}.py'):
            table.setdefault((path.stem[: -len(kind) - 1], path.parent.name), {})[kind] = str(path)
    return table


def backbone_names() -> list[str]:
    """Return the names for :func:`find_backbone`, sorted."""
    return sorted({name for name, _ in recipes()})


def find_backbone(name: str, task: str) -> ZooBackbone:
    """Return a backbone such as ``ravlt_t``, as the task builds it: detectors synchronise batch norms.

    Raises:
        RunError: There is no such backbone; the message lists the names.
    """
    tasks = [other for other in (task, 'mmdet', 'mmseg', 'mmpretrain') if (name, other) in recipes()]
    if not tasks:
        raise RunError(f'BACKBONE={name!r}: expected one of ({", ".join(backbone_names())})')
    given = Config.fromfile(next(iter(recipes()[name, tasks[0]].values()))).model.backbone.to_dict()
    cfg = {key: value for key, value in given.items() if key not in _OF_THE_TASK}
    # a size for larger images starts from the weights of the smaller one; its config names them
    init_cfg = given.get('init_cfg') or {}
    checkpoint = f'mmlinattn://{name}' if name in released_checkpoints() else init_cfg.get('checkpoint')
    plain = not issubclass(MODELS.get(cfg['type']), PyramidBackbone)
    with torch.device('meta'):  # no memory and no random numbers
        info = MODELS.build(dict(cfg)).feature_info
    return ZooBackbone(name, cfg, checkpoint, tuple(FeatureMap(out['channels'], out['stride']) for out in info), plain)


def recipe(name: str, task: str, preferred: str = '') -> Config:
    """Return the config with the paper's optimizer for a backbone and task, else that of another size of the backbone,
    or of RAVLT. ``preferred`` is the recipe to take if there are several, such as ``fpn_80k``."""
    family = [name.rsplit('_', count)[0] for count in range(name.count('_') + 1)]
    fitting = (
        paths
        for prefix in [*family, 'ravlt']
        for (other, its_task), paths in sorted(recipes().items())
        if its_task == task and f'{other}_'.startswith(f'{prefix}_')
    )
    paths = next(fitting)
    return Config.fromfile(paths.get(preferred) or next(iter(paths.values())))
