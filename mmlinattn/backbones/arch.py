# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The architecture (``arch``) of a backbone: published sizes by name, a user's dict, and their checks."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import compress
from typing import Any, NamedTuple, Union

from ..attention import get_mixer

Spec = Union[str, dict]


def check_type(name: str, value, allowed):
    """Return ``value`` if it is of the type ``allowed``, or of one of these types.

    Raises:
        ValueError: If it is not; a bool does not count as an int.
    """
    types = allowed if isinstance(allowed, tuple) else (allowed,)
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise ValueError(f'{name}={value!r}: expected type {" or ".join(t.__name__ for t in types)}')
    return value


class Rule(NamedTuple):
    """Numbers that a key of an arch may hold.

    Attributes:
        expected (str): The allowed values, for messages.
        allows (Callable): Returns True for an allowed value.
    """

    expected: str
    allows: Callable[[Any], bool]


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


COUNT = Rule('ints >= 1', lambda value: type(value) is int and value >= 1)
COUNT_OR_NONE = Rule('ints >= 1 or None', lambda value: value is None or COUNT.allows(value))
COUNT_OR_ZERO = Rule('ints >= 0', lambda value: type(value) is int and value >= 0)
RATIO = Rule('numbers above 0', lambda value: is_number(value) and 0 < value < float('inf'))
NUMBER_OR_NONE = Rule('numbers or None', lambda value: value is None or is_number(value))


class Arch:
    """Sizes and attentions of a backbone, read from its ``arch``; see :class:`~mmlinattn.backbones.base.Backbone`."""

    arch: dict
    depths: tuple[int, ...]
    embed_dims: tuple[int, ...]
    frozen_stages: int
    arch_zoo: dict[str, dict] = {}
    arch_defaults: dict = dict(drop_path_rate=0.0)
    # the numbers that each key may hold, one for all stages or one per stage; keys that the arch lacks have no effect
    arch_rules: dict[str, Rule] = dict(
        depths=COUNT, embed_dims=COUNT, mlp_ratios=RATIO, attn_mlp_ratios=RATIO, layer_scales=NUMBER_OR_NONE
    )

    @classmethod
    def resolve_arch(cls, arch: Spec) -> dict:
        """Return the arch with all keys: the zoo's entry of this name, or the given dict, completed by
        :attr:`arch_defaults`. If no attention is named, all stages get softmax attention."""
        defaults = {'ffn': None, 'stage_attns': None, **cls.arch_defaults}
        if isinstance(arch, str) and arch in cls.arch_zoo:
            arch = cls.arch_zoo[arch]
        if not isinstance(arch, dict):
            raise ValueError(f'arch={arch!r} of {cls.__name__}: expected one of {list(cls.arch_zoo)} or a dict')
        needed = {'embed_dims', 'depths', 'num_heads'}
        unknown = sorted(set(arch) - needed - set(defaults))
        missing = sorted(needed - set(arch))
        if unknown or missing:
            raise ValueError(
                f'arch of {cls.__name__} needs the keys {sorted(needed)} and may have {sorted(defaults)}; '
                f'unknown: {unknown}, missing: {missing}'
            )
        for key in sorted(needed):
            check_type(f'arch: {key}', arch[key], (list, tuple))
        lengths = {key: len(arch[key]) for key in sorted(needed)}
        if len(set(lengths.values())) != 1:
            raise ValueError(f'arch of {cls.__name__}: embed_dims, depths and num_heads differ in length: {lengths}')
        resolved = deepcopy({**defaults, **arch})
        if resolved['stage_attns'] is None:
            resolved['stage_attns'] = ('softmax',) * len(arch['depths'])
        return resolved

    def per_stage(self, key: str) -> tuple:
        """Return the arch's value of ``key`` for every stage; a single value is repeated."""
        value = self.arch[key]
        values = tuple(value) if isinstance(value, (list, tuple)) else (value,) * len(self.depths)
        if len(values) != len(self.depths):
            raise ValueError(f'arch: {key}={value}: expected one entry for each of the {len(self.depths)} stages')
        return values

    @property
    def attn_blocks(self) -> list[list[bool]]:
        """Flags for each block of each stage, True if the block has an attention; by default all have."""
        return [[True] * depth for depth in self.depths]

    @property
    def attn_dims(self) -> tuple[int, ...]:
        """Channels of the attentions in each stage, a multiple of ``num_heads``."""
        return self.embed_dims

    def _check_sizes(self) -> None:
        """Check the numbers of the arch by :attr:`arch_rules`."""
        for key, rule in self.arch_rules.items():
            if key in self.arch and not all(map(rule.allows, self.per_stage(key))):
                raise ValueError(f'arch: {key}={self.arch[key]!r}: expected {rule.expected}')

    def _check_outputs(self, out_indices: Sequence[int], outputs: int) -> tuple[int, ...]:
        """Check that ``out_indices`` are ascending indices below ``outputs``, and return them as a tuple.

        Raises:
            ValueError: They are not, or ``frozen_stages`` is out of range for ``outputs`` stages or blocks.
        """
        indices = tuple(check_type('out_indices', out_indices, (list, tuple)))
        valid = indices and all(type(index) is int and 0 <= index < outputs for index in indices)
        if not valid or list(indices) != sorted(set(indices)):
            raise ValueError(f'out_indices={indices}: expected ascending values in [0, {outputs - 1}]')
        if not -1 <= self.frozen_stages <= outputs:
            raise ValueError(f'frozen_stages={self.frozen_stages}: expected a value in [-1, {outputs}]')
        return indices

    def _block_attns(self, stage_attns: Sequence) -> list[list[Any]]:
        """Return one :data:`Spec` for each block, by stage; None for a block without an attention."""
        if isinstance(stage_attns, (str, dict)) or len(stage_attns) != len(self.depths):
            raise ValueError(
                f'stage_attns={stage_attns!r}: expected one entry for each of the {len(self.depths)} stages'
            )
        blocks = []
        for i, (entry, attends) in enumerate(zip(stage_attns, self.attn_blocks)):
            depth = len(attends)
            specs: list[Any] = [entry] * depth if entry is None or isinstance(entry, (str, dict)) else list(entry)
            if len(specs) != depth:
                raise ValueError(f'stage_attns[{i}] names {len(specs)} attentions, stage {i} has {depth} blocks')
            specs = [spec if attends[j] else None for j, spec in enumerate(specs)]
            for spec in compress(specs, attends):
                get_mixer(spec)
            blocks.append(specs)
        return blocks

    @staticmethod
    def zoo(sizes: dict[str, dict], methods: dict[str, dict], **common) -> dict[str, dict]:
        """Combine every size with every method: ``{'method-size': arch}``."""
        return {
            f'{method}-{size}': {**common, **arch, **attns}
            for method, attns in methods.items()
            for size, arch in sizes.items()
        }
