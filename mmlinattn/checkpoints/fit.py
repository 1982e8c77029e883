# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Compare a state dict with a model: one function for pretraining, testing, resuming, converting and analysis."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..utils.building import is_pretrained
from ..utils.errors import RunError
from ..utils.private_apis import before_loading, own_state

_COUNTER = 'num_batches_tracked'  # no weight: files converted from elsewhere lack it


class Fit(NamedTuple):
    """Result of comparing a state dict with a model.

    Keys are names in the model: modules first rename and resize the weights, as when loading.

    Attributes:
        weights (dict[str, Tensor]): Tensors that load.
        missing (list[str]): Parameters and buffers of the model without a tensor, except ``num_batches_tracked``.
        unexpected (list[str]): Keys of the state dict that the model lacks.
        ignored (list[str]): Keys skipped on purpose, such as those of stages that the configured backbone leaves out.
        mismatched (dict[str, str]): Keys of tensors with another shape, with both shapes as text.
        not_real (dict[str, str]): Keys of integer, complex, sparse or quantized tensors, with the dtype or layout.
        nonfinite (list[str]): Keys of weights that hold NaN or infinity.
    """

    weights: dict[str, Tensor]
    missing: list[str]
    unexpected: list[str]
    ignored: list[str]
    mismatched: dict[str, str]
    not_real: dict[str, str]
    nonfinite: list[str]

    @property
    def is_complete(self) -> bool:
        """True if all tensors of the model load and no key is unexpected, aside from ignored keys and
        ``num_batches_tracked``."""
        return not (self.missing or self.unexpected or self.mismatched or self.not_real)

    @property
    def is_empty(self) -> bool:
        """True if no tensor of the state dict can be loaded, except counters of batch norms."""
        return all(key.endswith(_COUNTER) for key in self.weights)

    def only(self, wanted: Callable[[str], bool]) -> 'Fit':
        """Return a copy with only the missing, unexpected and mismatched keys that ``wanted`` accepts."""
        return self._replace(
            missing=[key for key in self.missing if wanted(key)],
            unexpected=[key for key in self.unexpected if wanted(key)],
            mismatched={key: shapes for key, shapes in self.mismatched.items() if wanted(key)},
        )

    def check_values(self, allow_nonfinite: bool = False, remedy: str = '') -> None:
        """Check that all weights are finite real numbers.

        Args:
            allow_nonfinite (bool): Accept NaN and infinity.
            remedy (str): Sentence appended to the message.

        Raises:
            RunError: Weights are integer, complex, sparse or quantized, or are NaN or infinite.
        """
        if self.not_real:
            raise RunError(
                f'the checkpoint does not fit the model; no real numbers in memory: {some(listed(self.not_real))}.'
            )
        if self.nonfinite and not allow_nonfinite:
            raise RunError(
                f'{len(self.nonfinite)} weights of the checkpoint are NaN or infinite: {some(self.nonfinite)}. It was '
                f'saved by a run that had failed; take an earlier one.{remedy}'
            )

    def __str__(self) -> str:
        parts = []
        if self.mismatched:
            parts.append(f'left out for its shape: {", ".join(listed(self.mismatched))}')
        if self.missing:
            parts.append(f'{len(self.missing)} parameters not in the file: {some(self.missing)}')
        if self.unexpected:
            parts.append(f'{len(self.unexpected)} weights not in the model: {some(self.unexpected)}')
        return f'the checkpoint does not fit the model; {"; ".join(parts)}. '


def compare(model: nn.Module, state: Mapping[str, Tensor]) -> Fit:
    """Compare a state dict with a model, without changing the model.

    ``model.load_state_dict`` is run without copying tensors. Modules thus rename and resize weights as usual.
    Parameters that adapters (LoRA) remove from ``model.state_dict()`` are compared too.

    Args:
        model (nn.Module): The model, without wrappers.
        state (Mapping[str, Tensor]): Weights under the names that ``model.load_state_dict`` takes.
    """
    own: dict[str, Tensor] = {}
    given: dict[str, Tensor] = {}

    def take(module: nn.Module, local: dict, prefix: str, *_: Any) -> None:
        for name, tensor in own_state(module).items():
            own[prefix + name] = tensor
            if prefix + name in local:
                given[prefix + name] = local.pop(prefix + name)  # PyTorch copies nothing then

    with before_loading(model, take):
        result = model.load_state_dict(state, strict=False)
    unexpected = list(getattr(result, 'unexpected_keys', ()))
    parts = [entry for entry in named_prefixes(model) if hasattr(type(entry[1]), 'ignorable_keys')]
    ignored = [
        key
        for key in unexpected
        if any(key.startswith(prefix) and part.ignorable_keys(key[len(prefix) :]) for prefix, part in parts)
    ]
    not_real, mismatched, weights = {}, {}, {}
    for key, value in given.items():
        if kind_of(own[key]) == 'real' and kind_of(value) != 'real':
            not_real[key] = kind_of(value)
        elif own[key].shape != value.shape:
            mismatched[key] = f'{_shape(value)} in the file, {_shape(own[key])} in the model'
        else:
            weights[key] = value
    found = {id(own[key]) for key in given}  # a shared weight has several names
    return Fit(
        weights=weights,
        missing=[key for key, tensor in own.items() if id(tensor) not in found and not key.endswith(_COUNTER)],
        unexpected=[key for key in unexpected if key not in ignored],
        ignored=ignored,
        mismatched=mismatched,
        not_real=not_real,
        nonfinite=not_finite(weights, trained_weights(model)),
    )


def needed(model: nn.Module, fit: Fit, left_out: tuple[str, ...] = ()) -> Fit:
    """Return a fit with only the differences that change the outputs of a trained model.

    - ``missing`` keeps parameters and running statistics. Frozen weights that ``init_cfg`` has loaded are left out.
    - ``unexpected`` keeps keys of backbones of this package: the trained backbone had layers that this backbone lacks.

    Args:
        fit (Fit): Comparison of ``model`` with a state dict.
        left_out (tuple[str, ...]): Prefixes of keys that may be missing or differ.
    """
    weights = trained_weights(model)
    backbones = tuple(prefix for prefix, part in named_prefixes(model) if hasattr(type(part), 'ignorable_keys'))
    initialised = tuple(
        prefix
        for prefix, part in named_prefixes(model)
        if getattr(part, 'is_init', False) and is_pretrained(getattr(part, 'init_cfg', None))
    )
    fit = fit.only(lambda key: not key.startswith(left_out))
    return fit._replace(
        missing=[
            key
            for key in fit.missing
            if key in weights and (weights[key].requires_grad or not key.startswith(initialised))
        ],
        unexpected=[key for key in fit.unexpected if key.startswith(backbones)],
    )


def named_prefixes(model: nn.Module) -> list[tuple[str, Any]]:
    """Return (prefix of its keys, module) for a model and its submodules; the model's own prefix is ''."""
    return [(f'{name}.' if name else '', module) for name, module in model.named_modules()]


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and running statistics by key. Other buffers (masks, tables) are left out, as they may be
    infinite."""
    return {**dict(model.named_parameters()), **running_statistics(model)}


def running_statistics(model: nn.Module) -> dict[str, Tensor]:
    """Return the running means and variances of normalisation layers by key."""
    return {key: buffer for key, buffer in model.named_buffers() if key.endswith(('running_mean', 'running_var'))}


def kind_of(tensor: Tensor) -> str:
    """Return ``'real'`` for a dense floating-point tensor, its layout if it is not dense, and its dtype otherwise."""
    if tensor.layout != torch.strided:
        return str(tensor.layout).replace('torch.', '')
    return 'real' if tensor.is_floating_point() else str(tensor.dtype).replace('torch.', '')


def not_finite(state: Mapping[str, Tensor], keys: Iterable[str]) -> list[str]:
    """Return those ``keys`` of ``state`` that hold NaN or infinity."""
    real = [key for key in keys if key in state and kind_of(state[key]) == 'real']
    return [key for key in real if not state[key].float().isfinite().all()]


def _shape(tensor: Tensor) -> str:
    return 'x'.join(map(str, tensor.shape)) or 'scalar'


def listed(keys: Mapping[str, str]) -> list[str]:
    """Return ``'key (remark)'`` for each entry of ``keys``, for a message."""
    return [f'{key} ({remark})' for key, remark in keys.items()]


def some(keys: Iterable[object], limit: int = 3) -> str:
    """Format the first ``limit`` keys for a message, with ``...`` for the others; ``'nothing'`` without keys."""
    names = [str(key) for key in keys]
    return (', '.join(names[:limit]) + (', ...' if len(names) > limit else '')) or 'nothing'
