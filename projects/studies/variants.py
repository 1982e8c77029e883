# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Variants of each study, and their order in the papers."""

from typing import Callable, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from mmlinattn.attention import TOKEN_MIXERS, SoftmaxMixer
from mmlinattn.ops.tokens import merge_heads, split_heads


class Variant(NamedTuple):
    """Variant of a study.

    Attributes:
        backbone (dict): Config of the backbone.
        paper (dict): Accuracy printed in the paper, in percent by data set.
    """

    backbone: dict
    paper: dict = {}


class Study(NamedTuple):
    """Variants of a study, and the pairs that its paper compares.

    Attributes:
        variants (dict[str, Variant]): Variants by name.
        pairs (list): (better variant in the paper, worse variant, difference). The difference is the data set of
            :attr:`Variant.paper`, a number of percent, or None if the paper prints no number.
    """

    variants: dict
    pairs: list


class ConfusedSoftmaxMixer(SoftmaxMixer):
    """Softmax attention with ``q := ReLU(q) / |ReLU(q)|`` in each head (InLine Tab. 1), for the study only.

    Queries of the same direction become equal.
    """

    def _confuse(self, q: Tensor) -> Tensor:
        return merge_heads(F.normalize(F.relu(split_heads(q, self.num_heads)), dim=-1))

    def forward(self, q, k, v, grid, key_grid, **kwargs):
        return super().forward(self._confuse(q), k, v, grid, key_grid, **kwargs)


def _ravlt(mixer='rala', mlp_ratio: float = 2.0, **options) -> dict:
    """Return RAVLT as in the paper, without the release's 5x5 term and rotary encoding; one mixer in all stages."""
    arch = dict(embed_dims=(32, 64, 96), depths=(1, 2, 2), num_heads=(1, 2, 3), mlp_ratios=mlp_ratio)
    arch['drop_path_rate'] = 0.0
    plain = dict(rotary=False, local_kernel=None, out_indices=(2,))
    return dict(type='RAVLT', arch=arch, stage_attns=(mixer,) * 3, **{**plain, **options})


def _pvt(mixer, **changed) -> dict:
    """Return the config of a two-stage PVT with ``mixer`` in all blocks; only attention mixes tokens."""
    arch = dict(embed_dims=(48, 96), depths=(2, 3), num_heads=(3, 6), mlp_ratios=(2, 2), sr_ratios=1, grids=(16, 8))
    arch = {**arch, 'drop_path_rate': 0.0, **changed}
    return dict(type='LinearPVT', arch=arch, stage_attns=(mixer,) * 2, out_indices=(1,))


def _rala(**options) -> dict:
    return dict(type='rala', **options)


def _inline(**options) -> dict:
    return dict(type='inline', **{'local_residual': False, **options})


def _focused(**options) -> dict:
    return dict(type='focused', **{'local_kernel': None, **options})


def _on_imagenet(value: float) -> dict:
    return {'ImageNet': value}


def _rala_study() -> Study:
    variants = {
        'full': Variant(_ravlt(), _on_imagenet(82.8)),
        'without KV augmentation': Variant(_ravlt(_rala(augment_kv=False)), _on_imagenet(82.1)),
        # the FFN gets the parameters of the gate's projection, as in the paper
        'without output gate': Variant(_ravlt(_rala(output_gate=None), mlp_ratio=2.5), _on_imagenet(82.5)),
        'without CPE': Variant(_ravlt(cpe=False), _on_imagenet(82.7)),
        'gate: identity': Variant(_ravlt(_rala(output_gate='identity'), mlp_ratio=2.5), _on_imagenet(82.8)),
        'gate: tanh': Variant(_ravlt(_rala(output_gate='tanh'), mlp_ratio=2.5), _on_imagenet(82.7)),
        'kernel: relu': Variant(_ravlt(_rala(kernel='relu')), _on_imagenet(82.8)),
        'kernel: softmax': Variant(_ravlt(_rala(kernel='softmax')), _on_imagenet(82.7)),
    }
    pairs = [
        ('full', variant, 'ImageNet') for variant in ('without KV augmentation', 'without output gate', 'without CPE')
    ]
    return Study(variants, pairs)


def _inline_study() -> Study:
    variants = {
        'softmax': Variant(_pvt('softmax'), _on_imagenet(72.2)),
        'softmax, confused': Variant(_pvt(dict(type=ConfusedSoftmaxMixer)), _on_imagenet(70.6)),
        'relu, linear': Variant(_pvt(_inline(kernel='relu', injective=False))),
        'relu, injective': Variant(_pvt(_inline(kernel='relu'))),
        'exp, linear': Variant(_pvt(_inline(kernel='exp', injective=False))),
        'exp, injective': Variant(_pvt(_inline(kernel='exp'))),
        'identity, injective': Variant(_pvt(_inline())),
        'identity, injective, local residual': Variant(_pvt('inline')),
    }
    pairs = [
        ('softmax', 'softmax, confused', 'ImageNet'),
        # Tab. 3 prints the gain only
        ('relu, injective', 'relu, linear', 2.5),
        ('exp, injective', 'exp, linear', None),
        ('identity, injective, local residual', 'identity, injective', None),
    ]
    return Study(variants, pairs)


def _flatten_study() -> Study:
    variants = {
        'relu linear': Variant(_pvt(_focused(focus=False))),
        'relu linear, depth-wise': Variant(_pvt(_focused(focus=False, local_kernel=5))),
        'focused': Variant(_pvt(_focused())),
        'focused, depth-wise': Variant(_pvt('focused')),  # p = 3
        **{f'focused, depth-wise, p = {p}': Variant(_pvt(_focused(local_kernel=5, power=p))) for p in (2, 4, 8, 32)},
    }
    pairs = [
        ('focused', 'relu linear', None),
        ('relu linear, depth-wise', 'relu linear', None),
        ('focused, depth-wise', 'focused', None),
    ]
    return Study(variants, pairs)


def _hallucinated_study() -> Study:
    def printed(value):
        return {'Tiny-ImageNet': value}

    def steps(*names):
        return dict(type='hallucinated', steps=names)

    def compact(**options):
        return _pvt('hallucinated', ffn=dict(type='compact', **options))

    variants = {
        'plain': Variant(_pvt('softmax'), printed(69.3)),
        'copies': Variant(_pvt(steps()), printed(68.8)),
        'IHH': Variant(_pvt(steps('ihh')), printed(69.4)),
        'CHH': Variant(_pvt(steps('chh')), printed(69.2)),
        'IHH, CHH': Variant(_pvt('hallucinated'), printed(69.7)),
        'CHH, IHH': Variant(_pvt(steps('chh', 'ihh')), printed(69.3)),
    }
    pairs = [('IHH, CHH', variant, 'Tiny-ImageNet') for variant in variants if variant != 'IHH, CHH']
    variants.update(
        {
            # factorised M2 leaves (1 + t) / 2 of the two matrices, as a ratio of 2 (1 + t) / 2 = 5/3 does
            'smaller FFN ratio': Variant(_pvt('hallucinated', mlp_ratios=(5 / 3, 5 / 3)), printed(68.8)),
            'cFFN, r = 1': Variant(compact(r=1), printed(69.1)),
            'cFFN, r = 2': Variant(compact(), printed(70.2)),  # of M2, as released
            'cFFN, r = 3': Variant(compact(r=3), printed(70.0)),
            'cFFN of M1, r = 2': Variant(compact(matrix='M1'), printed(70.0)),
        }
    )
    others = ('IHH, CHH', 'smaller FFN ratio', 'cFFN, r = 1', 'cFFN, r = 3', 'cFFN of M1, r = 2')
    pairs += [('cFFN, r = 2', variant, 'Tiny-ImageNet') for variant in others]
    return Study(variants, pairs)


def _attentions_study() -> Study:
    variants = {name: Variant(_pvt(name)) for name in sorted(TOKEN_MIXERS.module_dict)}
    return Study(variants, [])


STUDIES: dict[str, Callable[[], Study]] = dict(
    rala=_rala_study,
    inline=_inline_study,
    flatten=_flatten_study,
    hallucinated=_hallucinated_study,
    attentions=_attentions_study,
)
