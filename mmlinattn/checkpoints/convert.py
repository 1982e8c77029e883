# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""From a published file to one that a config's model loads with ``strict=True``."""

import os
from pathlib import Path
from typing import Any, NamedTuple, Union

import torch
from mmengine.config import Config
from mmengine.runner import CheckpointLoader
from torch import Tensor, nn

from ..utils import written_whole
from ..utils.building import build_model
from ..utils.errors import CheckpointError
from ..version import __version__
from .states import LoadReport, fit_backbone, fit_state, model_state, strip_prefix

PathLike = Union[str, 'os.PathLike[str]']


class Conversion(NamedTuple):
    """A converted state dict and how it fits the model.

    Attributes:
        state_dict: the tensors that fit, under the model's names.
        report: what fits and what does not.
        dropped: keys left out on purpose.
    """

    state_dict: dict[str, Tensor]
    report: LoadReport
    dropped: list[str]

    @property
    def complete(self) -> bool:
        """Whether the state dict is the model's, key by key."""
        return not (self.report.missing or self.report.unexpected or self.report.mismatched)


def convert_state(checkpoint: Any, source: str, model: nn.Module) -> Conversion:
    """Rewrite a loaded checkpoint in the names of ``model``.

    Args:
        checkpoint: a released classifier, backbone, MMDetection 2.x detector or MMSegmentation 0.x segmentor, or a
            model of this project.
        source: where it came from, for messages.
        model: an MMDetection, MMSegmentation or MMPretrain model with a ``backbone``.

    Raises:
        CheckpointError: the checkpoint holds no weights, or the model has no backbone.
    """
    backbone = getattr(model, 'backbone', None)
    if not isinstance(backbone, nn.Module):
        raise CheckpointError(f'{source}: {type(model).__name__} has no backbone to convert a file for')
    state, dropped = model_state(checkpoint, source)
    of_backbone, report = fit_backbone(backbone, strip_prefix(state, 'backbone'))
    own, rest = ({k: v for k, v in s.items() if not k.startswith('backbone.')} for s in (model.state_dict(), state))
    of_rest, rest_report = fit_state(own, rest)
    fits = {**{f'backbone.{key}': value for key, value in of_backbone.items()}, **of_rest}
    report = LoadReport(*([f'backbone.{key}' for key in keys] + others for keys, others in zip(report, rest_report)))
    # Batch counters are the one thing a file may lack: PyTorch's own strict loading wants them.
    for key, value in model.state_dict().items():
        if key.endswith('num_batches_tracked'):
            fits.setdefault(key, value)
    return Conversion(fits, report, dropped + report.ignored)


def convert_checkpoint(source: PathLike, target: PathLike, config: PathLike) -> Conversion:
    """Write ``source`` to ``target`` in the names of the model of ``config``.

    ``target`` appears whole, and only when the conversion is complete; ``source`` is never written to.

    Raises:
        RunError: ``source`` cannot be read (:class:`CheckpointError`), ``target`` is the same file, a folder, or cannot
            be written, or the model of ``config`` cannot be built.
    """
    target = Path(target).expanduser()
    if target.is_dir():
        raise CheckpointError(f'DST {target} is a folder; name a file in it')
    if target.exists() and os.path.exists(given := os.path.expanduser(source)) and target.samefile(given):
        raise CheckpointError(f'DST {target} is SRC itself, which is never overwritten')
    if not os.access(target.parent, os.W_OK):
        raise CheckpointError(f'the folder of DST {target} does not exist or cannot be written to')
    checkpoint = CheckpointLoader.load_checkpoint(str(source), 'cpu', logger='silent')
    model = build_model(Config.fromfile(config))
    conversion = convert_state(checkpoint, str(source), model)
    if not conversion.complete:
        return conversion
    model.load_state_dict(conversion.state_dict)  # key by key, or nothing is written
    meta: dict = dict(source=os.path.basename(source), config_name=os.path.basename(config))
    meta.update(mmlinattn_version=__version__, **_dataset_meta(checkpoint.get('meta') or {}))
    try:
        with written_whole(target) as file:
            torch.save(dict(state_dict=conversion.state_dict, meta=meta), file)
    except (OSError, RuntimeError) as error:  # PyTorch reports a full disk as RuntimeError
        raise CheckpointError(f'cannot write {target}: {str(error).splitlines()[0]}') from error
    return conversion


def _dataset_meta(meta: dict) -> dict:
    """``dataset_meta``, if there is any: class names and colours, which today's inferencers look for in one place."""
    old_names = dict(CLASSES='classes', PALETTE='palette')
    names = {new: meta[old] for old, new in old_names.items() if meta.get(old) is not None}
    known = meta.get('dataset_meta') or names
    return dict(dataset_meta=known) if known else {}
