# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""From a checkpoint of any accepted kind to a backbone that begins with its weights, or to a model that was trained.

All tools load by this file. A model counts as trained when a checkpoint gave it every parameter; frozen ones, which
adapters such as LoRA do not save, may come from the ``init_cfg`` that they had in training.
"""

import logging
import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional, Union

from mmengine.config import Config
from mmengine.logging import print_log
from mmengine.model import update_init_info
from mmengine.runner import CheckpointLoader
from torch import Tensor, nn

from ..utils.building import build_model, is_pretrained
from ..utils.errors import CheckpointError, RunError
from .states import (
    LoadReport,
    backbone_state,
    fit_backbone,
    fit_state,
    kind_of,
    model_state,
    not_compiled,
    not_finite,
    some,
    state_dict_of,
    strip_prefix,
)

_INSIDE = re.compile(r'\b(module|original_layer)\.')  # what LoRAModel and LoRALinear call what they adapt
UNUSED_IN_TESTS = ('auxiliary_head',)
_OTHER_SHAPE = re.compile(r'size mismatch for (\S+): .*?\[([\d, ]*)\]\D*\[([\d, ]*)\]')  # in PyTorch's own message


def load_pretrained(
    backbone: nn.Module,
    checkpoint: str,
    map_location: Any = 'cpu',
    logger: Union[logging.Logger, str, None] = 'current',
    prefix: Optional[str] = None,
) -> LoadReport:
    """Load pretrained weights into one of our backbones.

    Args:
        backbone: the model that takes the weights.
        checkpoint: anything MMEngine's CheckpointLoader takes (a path, a URL, ``mmlinattn://NAME``), holding a released
            file as its authors published it (a classifier, a dense backbone, or a whole detector or segmentor) or our
            own (a backbone, or a whole model with a ``backbone.`` part).
        map_location: as in :func:`torch.load`.
        logger: where MMEngine's ``print_log`` writes. Defaults to the current logger.
        prefix: the part of the file to take. Defaults to ``backbone.`` where there is one.

    Returns:
        What was loaded, missing, unexpected and of another shape. Head keys are skipped; the rest of what did not fit
        is listed in one warning.

    Raises:
        CheckpointError: the file cannot be read, or nothing of it fits (the backbone is then as it was).
        ValueError: ``checkpoint`` is no such text.
    """
    if not isinstance(checkpoint, str) or not checkpoint:
        raise ValueError(f'checkpoint={checkpoint!r} has to be a path, an address or mmlinattn://NAME')
    loaded = CheckpointLoader.load_checkpoint(checkpoint, map_location, logger)
    state, _, _ = backbone_state(loaded, checkpoint, prefix)
    fits, report = fit_backbone(backbone, state)
    kind = type(backbone).__name__
    if not fits:
        raise CheckpointError(
            f'nothing in {checkpoint} fits {kind}: the file has {some(state or state_dict_of(loaded, checkpoint))}; '
            f'the model has {some(backbone.state_dict())}'
            + (f'; of another shape or kind: {report.mismatched[0]}' if report.mismatched else '')
        )
    backbone.load_state_dict(fits, strict=False)
    if hasattr(backbone, '_params_init_info'):  # MMEngine's log of where each weight comes from
        update_init_info(backbone, f'load_pretrained: from {checkpoint}')
    problems = {
        'missing in the file': report.missing,
        'unexpected in the file': report.unexpected,
        'of another shape or kind, not loaded': report.mismatched,
        'NaN or infinite': not_finite(fits, fits),
    }
    listed = '; '.join(f'{title}: {", ".join(keys)}' for title, keys in problems.items() if keys)
    if listed:
        print_log(f'{checkpoint} and {kind} do not match exactly. {listed}', logger=logger, level=logging.WARNING)
    return report


# --- whole models -----------------------------------------------------------------------------------------------------


class Conversion(NamedTuple):
    """A checkpoint in the names of a model, and how it fits.

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


class MissingWeights(NamedTuple):
    """The weights that a model still lacks after a checkpoint was loaded.

    Attributes:
        mismatched: keys of another shape, with both shapes.
        missing: parameters and running statistics that nobody trained: neither the checkpoint nor, of frozen ones,
            ``init_cfg`` gave them.
        unexpected: weights that a backbone of this package has no place for: it computes something else than the one
            that was trained.
        nothing_fits: whether the checkpoint gave no weight at all.
    """

    mismatched: list[str]
    missing: list[str]
    unexpected: list[str]
    nothing_fits: bool

    def __str__(self) -> str:
        parts = [f'left out for its shape: {", ".join(self.mismatched)}'] * bool(self.mismatched)
        parts += [f'{len(self.missing)} parameters not in the file: {some(self.missing)}'] * bool(self.missing)
        parts += [f'{len(self.unexpected)} weights not in the model: {some(self.unexpected)}'] * bool(self.unexpected)
        return f'the checkpoint does not fit the model; {"; ".join(parts)}. '


def fill(model: nn.Module, state: Mapping[str, Tensor], left_out: tuple[str, ...] = ()) -> MissingWeights:
    """Load what fits of a state dict, and find what the model lacks then.

    Modules may rename and resize weights while they load, and adapters keep frozen ones out of ``state_dict``, so what
    counts is which parameters were written. Keys that begin as one of ``left_out`` may lack or differ.
    """
    parameters = trained_weights(model)
    versions = {name: parameter._version for name, parameter in parameters.items()}
    differing = {}
    unexpected: list[str] = []
    try:
        unexpected = getattr(model.load_state_dict(state, strict=False), 'unexpected_keys', [])
    except RuntimeError as error:
        for key, *shapes in _OTHER_SHAPE.findall(str(error)):
            theirs, ours = (shape.replace(', ', 'x') or 'scalar' for shape in shapes)
            differing[key] = f'{key} ({theirs} in the file, {ours} in the model)'
        if not differing:
            raise
    given = tuple(
        f'{name}.' if name else ''
        for name, module in model.named_modules()
        if getattr(module, 'is_init', False) and is_pretrained(getattr(module, 'init_cfg', None))
    )
    untouched = [name for name, parameter in parameters.items() if parameter._version == versions[name]]
    missing = [
        name
        for name in untouched
        if name not in state
        and not name.startswith(left_out)
        and (parameters[name].requires_grad or not name.startswith(given))
    ]
    backbones = [(f'{n}.' if n else '', part) for n, part in model.named_modules() if hasattr(part, 'ignorable_keys')]
    return MissingWeights(
        [text for key, text in differing.items() if not key.startswith(left_out)],
        missing,
        [
            key
            for key in unexpected
            for beginning, backbone in backbones
            if key.startswith(beginning) and not key.startswith(left_out)
            if not backbone.ignorable_keys(key.removeprefix(beginning))
        ],
        len(untouched) == len(parameters) > 0,
    )


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """What training changes, by its keys: parameters and running statistics. Masks and tables among the other buffers
    may well be infinite."""
    return {**dict(model.named_parameters()), **running_statistics(model)}


def running_statistics(model: nn.Module) -> dict[str, Tensor]:
    """Running means and variances of the norms of a model, by their keys."""
    return {key: buffer for key, buffer in model.named_buffers() if key.endswith(('running_mean', 'running_var'))}


def check_values(
    model: nn.Module, state: Mapping[str, Tensor], allow_nonfinite: bool = False, advice: str = ''
) -> None:
    """Refuse weights that no model computes with.

    Raises:
        RunError: weights of the model are no real numbers in ``state``, or NaN or infinite.
    """
    own = [key for key, value in model.state_dict().items() if key in state and kind_of(value) == 'real']
    other = [f'{key} ({kind_of(state[key])})' for key in own if kind_of(state[key]) != 'real']
    if other:
        raise RunError(f'the checkpoint does not fit the model; no real numbers in memory: {some(other)}.')
    broken = [] if allow_nonfinite else not_finite(state, trained_weights(model))
    if broken:
        raise RunError(
            f'{len(broken)} weights of the checkpoint are NaN or infinite: {some(broken)}. It was saved by a run that '
            f'had failed; take an earlier one.{advice}'
        )


def rename_wrapped(state: dict, model: nn.Module) -> None:
    """Give weights of a state dict, in place, the names that they have in ``model``: without ``_orig_mod`` where it is
    not compiled; inside of adapters (MMPretrain's LoRA), where they are of a model that has none."""
    keys = [key for key in state if '_orig_mod.' in key]
    if keys and not any('_orig_mod.' in key for key in model.state_dict()):
        for key in keys:
            state[not_compiled(key)] = state.pop(key)
    own = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}  # adapters save some of them
    for name in own:
        plain = _INSIDE.sub('', name)
        for key in (plain, f'module.{plain}'):  # which DDP's wrapper puts before all keys
            if key in state and key not in own and name not in state:
                state[name] = state.pop(key)


def runner_state(checkpoint: dict, model: nn.Module) -> OrderedDict:
    """The weights that MMEngine's Runner loads from a checkpoint, which get the names they have in ``model``."""
    state = checkpoint.get('state_dict', checkpoint)
    rename_wrapped(state, model)
    # the runner's own pattern, whose dot is any character: it loads nothing into a part named module_list
    tensors = OrderedDict((re.sub('^module.', '', key), v) for key, v in state.items() if isinstance(v, Tensor))
    vars(tensors)['_metadata'] = getattr(state, '_metadata', OrderedDict())  # the versions of its modules
    return tensors


def check_trained(model: nn.Module, checkpoint: dict) -> None:
    """Refuse a checkpoint that leaves a model with weights nobody trained; it is loaded by this, as a Runner would.

    Raises:
        RunError: parameters are missing, have another shape, are no real numbers or are not finite, or the backbone
            lacks some of the checkpoint's.
    """
    state = runner_state(checkpoint, model)
    check_values(model, state)
    lacking = fill(model, state, UNUSED_IN_TESTS)
    if any(lacking[:3]):
        raise RunError(f'{lacking}The config has to be the one of the checkpoint.')


def trained_model(
    cfg: Config, source: str, part: str = '', name: str = 'the config'
) -> tuple[nn.Module, Optional[dict]]:
    """The model of a config with the weights of a checkpoint, published or of this project.

    What ``init_cfg`` names is read only where frozen weights come from it.

    Args:
        cfg: of a detector, segmentor or classifier.
        source: a file, URL or ``mmlinattn://NAME``.
        part: beginning of the keys that have to be trained; all but auxiliary heads by default.
        name: of the config, for messages.

    Returns:
        The model, and ``meta`` of the checkpoint where it has one.

    Raises:
        RunError: the model cannot be built, the checkpoint cannot be read, or a weight that counts is missing, of
            another shape, left over or no finite number.
    """
    checkpoint: Any = CheckpointLoader.load_checkpoint(source, 'cpu', logger='silent')

    def wanted(keys: list[str]) -> list[str]:
        return [key for key in keys if key.startswith(part) and not key.startswith(UNUSED_IN_TESTS)]

    for pretrained in (False, True):
        model: Any = build_model(cfg, pretrained)
        if pretrained:
            model.init_weights()
        state, report, _ = convert_state(checkpoint, source, model)
        parameters = dict(model.named_parameters())
        missing = wanted(fill(model, state).missing)
        trains = [key for key in missing if key in parameters and parameters[key].requires_grad]
        if trains or not missing:  # what trains is in the checkpoint or nowhere
            missing = trains
            break
    own_parts = {child for child, _ in model.named_children()} - {'data_preprocessor'}  # whose mean is in the config
    problems = dict(
        mismatched=wanted(report.mismatched),
        unexpected=wanted([key for key in report.unexpected if key.partition('.')[0] in own_parts]),
        missing=[*dict.fromkeys(missing + wanted([key for key in report.missing if key not in parameters]))],
    )
    what, wrong = next(((what, keys) for what, keys in problems.items() if keys), ('', []))
    if wrong:
        raise RunError(f'checkpoint {source!r} does not fit the model of {name}; {what}: {some(wrong)}.')
    if not wanted(report.loaded):
        raise RunError(
            f'checkpoint {source!r} does not fit the model of {name}; it has {some(state_dict_of(checkpoint, source))}.'
        )
    try:
        check_values(model, state)
    except RunError as error:
        raise RunError(f'{source}: {error}') from error
    return model, checkpoint.get('meta') if isinstance(checkpoint, dict) else None
