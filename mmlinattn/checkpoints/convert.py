# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""From a published file to one that a config's model loads with ``strict=True``."""

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner.checkpoint import CheckpointLoader
from torch import Tensor, nn

from ..utils import written_whole
from ..utils.errors import CheckpointError, described
from ..version import __version__
from .schemes import local_path, register
from .states import LoadReport, fit_backbone, fit_state, model_state, strip_prefix

PathLike = Union[str, os.PathLike]


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


def build_model(config: PathLike) -> nn.Module:
    """The model of a config, randomly initialised: nothing is downloaded.

    Raises:
        CheckpointError: the config has no model, its model has no backbone or a part of it refuses its arguments, in
            one line; ``MMLINATTN_TRACEBACK=1`` keeps errors of parts as they are.
    """
    cfg = Config.fromfile(config)
    if 'model' not in cfg:
        raise CheckpointError(f'config {config} has no model')
    init_default_scope(cfg.get('default_scope') or 'mmengine')
    try:
        model = MODELS.build(_without_init(cfg.model))
    except Exception as error:  # a wrong argument shows in errors of any kind
        if os.environ.get('MMLINATTN_TRACEBACK') == '1':
            raise
        raise CheckpointError(
            f'the model of {config} cannot be built: {described(error)} (MMLINATTN_TRACEBACK=1 shows where)'
        ) from error
    if not hasattr(model, 'backbone'):
        raise CheckpointError(f'the model of {config} has no backbone to convert a file for')
    return model


def _without_init(node: Any) -> Any:
    if isinstance(node, dict):
        kept = {k: _without_init(v) for k, v in node.items() if k not in ('init_cfg', 'pretrained')}
        return type(node)(kept)
    if isinstance(node, (list, tuple)):
        return type(node)(_without_init(value) for value in node)
    return node


def convert_state(checkpoint: Any, source: str, model: nn.Module) -> Conversion:
    """Rewrite a loaded checkpoint in the names of ``model``.

    Args:
        checkpoint: a released classifier, backbone, MMDetection 2.x detector or MMSegmentation
            0.x segmentor, or a model of this project.
        source: where it came from, for messages.
        model: an MMDetection, MMSegmentation or MMPretrain model with a ``backbone``.
    """
    state, dropped = model_state(checkpoint, source)
    of_backbone, report = fit_backbone(model.backbone, strip_prefix(state, 'backbone'))
    of_rest, rest_report = fit_state(_rest(model.state_dict()), _rest(state))
    fits = {**{f'backbone.{key}': value for key, value in of_backbone.items()}, **of_rest}
    report = LoadReport(*([f'backbone.{key}' for key in keys] + rest for keys, rest in zip(report, rest_report)))
    # Batch counters are the one thing a file may lack: PyTorch's own strict loading wants them.
    for key, value in model.state_dict().items():
        if key.endswith('num_batches_tracked'):
            fits.setdefault(key, value)
    return Conversion(fits, report, dropped + report.ignored)


def _rest(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if not key.startswith('backbone.')}


def convert_checkpoint(source: PathLike, target: PathLike, config: PathLike) -> Conversion:
    """Write ``source`` to ``target`` in the names of the model of ``config``.

    ``target`` appears whole, and only when the conversion is complete; ``source`` is never
    written to.

    Raises:
        CheckpointError: ``source`` cannot be read, or ``target`` is the same file, a folder, or
            cannot be written.
    """
    target = Path(target).expanduser()
    _check_target(source, target)
    register()
    checkpoint = CheckpointLoader.load_checkpoint(str(source), 'cpu', logger='silent')
    model = build_model(config)
    conversion = convert_state(checkpoint, str(source), model)
    if not conversion.complete:
        return conversion
    model.load_state_dict(conversion.state_dict)
    meta = dict(
        source=os.path.basename(str(source)),
        mmlinattn_version=__version__,
        config=os.path.basename(config),
    )
    old_meta = checkpoint.get('meta') if isinstance(checkpoint, dict) else None
    dataset_meta = _dataset_meta(old_meta)
    if dataset_meta:
        meta['dataset_meta'] = dataset_meta
    _save(dict(state_dict=conversion.state_dict, meta=meta), target)
    return conversion


def _dataset_meta(meta: Any) -> Optional[dict]:
    """Class names and colours, which today's inferencers look for in one place."""
    if not isinstance(meta, dict):
        return None
    if isinstance(meta.get('dataset_meta'), dict):
        return meta['dataset_meta']
    old_names = dict(CLASSES='classes', PALETTE='palette')
    return {new: meta[old] for old, new in old_names.items() if meta.get(old) is not None} or None


def _check_target(source: PathLike, target: Path) -> None:
    if target.is_dir():
        raise CheckpointError(f'DST {target} is a folder; name a file in it')
    given = local_path(str(source))
    if target.exists() and given.exists() and given.samefile(target):
        raise CheckpointError(f'DST {target} is SRC itself, which is never overwritten')
    if not target.parent.is_dir():
        raise CheckpointError(f'the folder of DST {target} does not exist')
    if not os.access(target.parent, os.W_OK):
        raise CheckpointError(f'the folder of DST {target} cannot be written to')


def _save(checkpoint: dict, target: Path) -> None:
    try:
        with written_whole(target) as file:
            torch.save(checkpoint, file)
    except (OSError, RuntimeError) as error:  # PyTorch reports a full disk as RuntimeError
        raise CheckpointError(f'cannot write {target}: {str(error).splitlines()[0]}') from error


def _explain(conversion: Conversion, source: str, config: str) -> str:
    report = conversion.report
    lines = [f'{source} was not converted: it does not match the model of {config} key by key.']
    for title, keys in (
        ('missing in SRC', report.missing),
        ('left over from SRC', report.unexpected),
        ('of another shape', report.mismatched),
    ):
        if keys:
            lines += [f'{len(keys)} {title}:', *(f'  {key}' for key in keys)]
    if {key.split('.')[0] for key in report.loaded} == {'backbone'}:
        lines.append(
            'Hint: of this model SRC holds the backbone alone. To train from it nothing needs to '
            f"be converted: --cfg-options model.backbone.init_cfg.checkpoint='{source}'"
        )
    elif report.mismatched and not report.missing:
        lines.append('Hint: CONFIG has another number of classes or another size than SRC.')
    return '\n'.join(lines)


def main(args: Optional[list[str]] = None) -> int:
    """The command line of ``tools/convert_checkpoint.py``; returns the exit status."""
    parser = argparse.ArgumentParser(
        description='Convert a published checkpoint (a classifier, or an MMDetection 2.x or '
        "MMSegmentation 0.x model) into one that CONFIG's model loads key by key."
    )
    parser.add_argument('src', metavar='SRC', help='a file, a link, or mmlinattn://NAME')
    parser.add_argument('dst', metavar='DST', help='the file to write; never SRC itself')
    parser.add_argument('--config', required=True, help='config of the model DST is for')
    options = parser.parse_args(args)
    try:
        conversion = convert_checkpoint(options.src, options.dst, options.config)
    except (CheckpointError, FileNotFoundError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 1
    for key in conversion.dropped:
        print(f'dropped (the model derives it or has no such part): {key}')
    if not conversion.complete:
        print(_explain(conversion, options.src, options.config), file=sys.stderr)
        return 1
    print(f'wrote {options.dst}: {len(conversion.state_dict)} tensors')
    return 0
