# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Load a released checkpoint or one of this project, as pretrained weights of a backbone or as a whole trained model.

A model counts as trained if a checkpoint holds all its parameters. Adapters such as LoRA do not save frozen parameters;
these may come from the ``init_cfg`` used in training.
"""

import logging
import re
from collections import OrderedDict
from typing import Any, Optional, Union

from mmengine.config import Config
from mmengine.logging import print_log
from mmengine.model import update_init_info
from mmengine.runner import CheckpointLoader
from torch import Tensor, nn

from ..utils.building import build_model
from ..utils.errors import CheckpointError, RunError
from .fit import Fit, compare, listed, needed, some
from .states import backbone_state, model_state, not_compiled, state_dict_of

_INSIDE = re.compile(r'\b(module|original_layer)\.')  # names of the adapted module in LoRAModel and LoRALinear
UNUSED_IN_TESTS = ('auxiliary_head',)


def load_pretrained(
    backbone: nn.Module,
    checkpoint: str,
    map_location: Any = 'cpu',
    logger: Union[logging.Logger, str, None] = 'current',
    prefix: Optional[str] = None,
) -> Fit:
    """Load pretrained weights into one of our backbones.

    Args:
        backbone (nn.Module): The model that takes the weights.
        checkpoint (str): A path, URL, ``mmlinattn://NAME`` or other address of MMEngine's CheckpointLoader. The file is
            a released one as its authors published it (a classifier, a backbone for dense prediction, or a whole
            detector or segmentor) or one of this project (a backbone, or a whole model with a ``backbone.`` part).
        map_location: As in :func:`torch.load`.
        logger: Argument of MMEngine's ``print_log``. Defaults to the current logger.
        prefix (str, optional): Prefix of the weights to take. Defaults to ``backbone.`` if the file has such keys.

    Returns:
        Fit: The comparison. One warning lists its differences, except for keys of heads and those skipped on purpose.

    Raises:
        CheckpointError: The file cannot be read, or none of its weights can be loaded. The backbone is then unchanged.
        ValueError: ``checkpoint`` is not a non-empty string.
    """
    if not isinstance(checkpoint, str) or not checkpoint:
        raise ValueError(f'checkpoint={checkpoint!r}: expected a path, an address or mmlinattn://NAME')
    loaded = CheckpointLoader.load_checkpoint(checkpoint, map_location, logger)
    state, _, _ = backbone_state(loaded, checkpoint, prefix)
    fit = compare(backbone, state)
    other = listed({**fit.mismatched, **{key: f'{kind}, not real' for key, kind in fit.not_real.items()}})
    kind = type(backbone).__name__
    if fit.is_empty:
        raise CheckpointError(
            f'nothing in {checkpoint} fits {kind}: the file has {some(state or state_dict_of(loaded, checkpoint))}; '
            f'the model has {some(backbone.state_dict())}'
            + (f'; of another shape or kind: {other[0]}' if other else '')
        )
    backbone.load_state_dict(fit.weights, strict=False)
    if hasattr(backbone, '_params_init_info'):  # MMEngine's log of the source of each weight
        update_init_info(backbone, f'load_pretrained: from {checkpoint}')
    problems = {
        'missing in the file': fit.missing,
        'unexpected in the file': fit.unexpected,
        'of another shape or kind, not loaded': other,
        'NaN or infinite': fit.nonfinite,
    }
    text = '; '.join(f'{title}: {", ".join(keys)}' for title, keys in problems.items() if keys)
    if text:
        print_log(f'{checkpoint} and {kind} do not match exactly. {text}', logger=logger, level=logging.WARNING)
    return fit


def convert_state(checkpoint: Any, source: str, model: nn.Module) -> Fit:
    """Rename the weights of a loaded checkpoint to the names in ``model``, and compare them with ``model``.

    Args:
        checkpoint (dict): A released classifier, backbone, MMDetection 2.x detector or MMSegmentation 0.x segmentor, or
            a model of this project.
        source (str): Path or address of the checkpoint, for messages.
        model (nn.Module): An MMDetection, MMSegmentation or MMPretrain model with a ``backbone``.

    Returns:
        Fit: The comparison. For strict loading, its ``weights`` get the model's ``num_batches_tracked`` if the file
            lacks them.

    Raises:
        CheckpointError: The checkpoint holds no weights, or the model has no backbone.
    """
    if not isinstance(getattr(model, 'backbone', None), nn.Module):
        raise CheckpointError(f'{source}: {type(model).__name__} has no backbone to convert a file for')
    state, dropped = model_state(checkpoint, source)
    fit = compare(model, state)
    for key, value in model.state_dict().items():
        if key.endswith('num_batches_tracked'):
            fit.weights.setdefault(key, value)
    return fit._replace(ignored=dropped + fit.ignored)


# --- whole models -----------------------------------------------------------------------------------------------------


def rename_wrapped(state: dict, model: nn.Module) -> None:
    """Rename keys of ``state`` in place to match ``model``.

    Drop the ``_orig_mod.`` prefix if the model is not compiled, and insert the adapter's prefix if only ``model`` is
    wrapped (MMPretrain's LoRA).
    """
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
    """Return the weights that MMEngine's Runner would load from a checkpoint, with keys renamed in place to match
    ``model``."""
    state = checkpoint.get('state_dict', checkpoint)
    rename_wrapped(state, model)
    # MMEngine's own pattern: its unescaped dot also cuts `module_` of a part named module_list, which then does not
    # load
    tensors = OrderedDict((re.sub('^module.', '', key), v) for key, v in state.items() if isinstance(v, Tensor))
    tensors._metadata = getattr(state, '_metadata', OrderedDict())  # type: ignore[attr-defined]  # module versions
    return tensors


def check_trained(model: nn.Module, checkpoint: dict) -> None:
    """Load a checkpoint as MMEngine's Runner would, but raise if it leaves weights of ``model`` untrained.

    Raises:
        RunError: The checkpoint holds no weights, or it has backbone weights that the model lacks. Or parameters are
            missing, have another shape, or are not finite real numbers.
    """
    state = runner_state(checkpoint, model)
    if not state:
        raise RunError(f"no weights under 'state_dict'; the file has {some(checkpoint)}.")
    fit = compare(model, state)
    fit.check_values()
    fit = needed(model, fit, UNUSED_IN_TESTS)
    if fit.missing or fit.unexpected or fit.mismatched:
        raise RunError(f'{fit}Use the config of the checkpoint.')
    model.load_state_dict(fit.weights, strict=False)


def trained_model(
    cfg: Config, source: str, part: str = '', name: str = 'the config'
) -> tuple[nn.Module, Optional[dict]]:
    """Build the model of a config with the weights of a checkpoint.

    ``init_cfg`` is read only if the checkpoint lacks frozen weights.

    Args:
        cfg (Config): Config of a detector, segmentor or classifier.
        source (str): A file, URL or ``mmlinattn://NAME``, with released keys or those of this project.
        part (str): Prefix of the keys that the checkpoint has to provide. Defaults to all keys; auxiliary heads may
            always be missing.
        name (str): Name of the config, for messages.

    Returns:
        tuple[nn.Module, dict | None]: The model, and ``meta`` of the checkpoint (None if it has none).

    Raises:
        RunError: The model cannot be built, the checkpoint cannot be read, or a required weight is missing, of another
            shape, unexpected or not a finite real number.
    """
    checkpoint: Any = CheckpointLoader.load_checkpoint(source, 'cpu', logger='silent')

    def counts(key: str) -> bool:
        return key.startswith(part) and not key.startswith(UNUSED_IN_TESTS)

    for pretrained in (False, True):
        model: Any = build_model(cfg, pretrained)
        if pretrained:
            model.init_weights()
        fit = convert_state(checkpoint, source, model).only(counts)
        missing, weights = needed(model, fit).missing, dict(model.named_parameters())
        trains = [key for key in missing if key in weights and weights[key].requires_grad]
        if trains or not missing:  # a weight that trains is in the checkpoint or nowhere
            missing = trains
            break
    own_parts = {child for child, _ in model.named_children()} - {'data_preprocessor'}  # its mean is in the config
    problems = dict(
        mismatched=listed(fit.mismatched),
        unexpected=[key for key in fit.unexpected if key.partition('.')[0] in own_parts],
        missing=missing,
    )
    reasons = [f'{kind}: {some(keys)}' for kind, keys in problems.items() if keys]
    if not reasons and not any(map(counts, fit.weights)):
        reasons = [f'it has {some(state_dict_of(checkpoint, source))}']
    if reasons:
        raise RunError(f'checkpoint {source!r} does not fit the model of {name}; {reasons[0]}.')
    try:
        fit.check_values()
    except RunError as error:
        raise RunError(f'{source}: {error}') from error
    model.load_state_dict(fit.weights, strict=False)
    return model, checkpoint.get('meta') if isinstance(checkpoint, dict) else None
