# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Random backbones with a random attention per block, at random sizes, against reference implementations in float64."""

import copy
import random

import pytest
import torch
from helpers import goldens
from helpers.references import ATTENTIONS
from helpers.small_backbones import ARCHS
from mmengine.registry import MODELS

from mmlinattn import ops

SPECS = list(ATTENTIONS.values())
FFNS = [
    None,
    'mlp',
    'conv',
    'dwconv',
    *(dict(type='compact', matrix=matrix, r=r) for matrix in ('M1', 'M2') for r in (1, 3)),
]
ARGUMENTS = {
    'RAVLT': dict(rotary=(True, True, False), cpe=(True, True, False), local_kernel=(5, 3, None)),
    'LinearSwin': dict(window_size=('trained', 'trained', None, 5)),
    'LinearNextViT': dict(key_reduction=(None, 'grid', 'sequence'), stage_norms=(None, True, False)),
    'LinearDeiT': dict(out_type=('featmap', 'cls_token', 'raw', 'avg_featmap')),
}
ARCH_VALUES = {
    'RAVLT': dict(layer_scales=(1.0, 0.1, None)),
    'LinearPVT': dict(sr_ratios=(1, 2, 3)),
    'LinearPVTv2': dict(sr_ratios=(1, 2, 3)),
    'LinearSwin': dict(window=(2, 3, 7), linear_windows=(3, 7, 12)),
    'LinearCSWin': dict(stripes=(1, 2, 3)),
    'LinearNextViT': dict(sr_ratios=(1, 2), attn_every=(0, 1, 2)),
    'LinearDeiT': dict(grid=(2, 5), qkv_bias=(True, False), absolute_position=(True, False)),
}


def drawn(draw):
    """Draw the config of a backbone; some attentions may not support it."""
    backbone = draw.choice(list(ARCHS))
    stages = len(ARCHS[backbone]['depths'])
    heads = [draw.choice((1, 2, 4)) for _ in range(stages)]
    arch = dict(
        ARCHS[backbone],
        depths=tuple(draw.randint(1, 2) for _ in range(stages)),
        mlp_ratios=draw.choice((1, 2, 3.5)),
        ffn=[draw.choice(FFNS) for _ in range(stages)],
    )
    if backbone != 'LinearNextViT':
        arch['embed_dims'] = tuple(8 * count for count in heads)
        arch['num_heads'] = tuple(max(count // draw.choice((1, 2)), 1 + (backbone == 'LinearCSWin')) for count in heads)
    arch |= {key: draw.choice(values) for key, values in ARCH_VALUES[backbone].items()}
    options = {key: draw.choice(values) for key, values in ARGUMENTS.get(backbone, {}).items()}
    attns = [[copy.deepcopy(draw.choice(SPECS)) for _ in range(depth)] for depth in arch['depths']]
    if backbone == 'LinearDeiT':
        outs = [arch['depths'][0] - 1]
    else:
        outs = sorted(draw.sample(range(stages), draw.randint(1, stages)))
    shared = dict(out_norm=draw.random() < 0.7, with_cp=draw.random() < 0.3, drop_path_rate=0.0, out_indices=outs)
    return dict(type=backbone, arch=arch, stage_attns=attns, **shared, **options)


def model_of(draw):
    """Return the config of a random backbone, and the model; at most 99 of 100 configs may be unsupported."""
    for attempt in range(100):
        config = drawn(draw)
        try:
            return config, goldens.fill(MODELS.build(config)).eval()
        except ValueError:  # an attention that this backbone does not support
            if attempt == 99:
                raise


def as_list(outs):
    return [t for out in outs for t in (out if isinstance(out, (list, tuple)) else [out])]


def learnt(model, x):
    """Return outputs and gradients: of the image, and of all parameters in one vector."""
    x = x.clone().requires_grad_()
    outs = as_list(model(x))
    loss = sum((out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum() for out in outs)
    leaves = [x, *model.parameters()]
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    flat = [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found)]
    return [*(out.detach() for out in outs), flat[0], torch.cat([grad.flatten() for grad in flat[1:]])]


def inferred(model, x):
    with torch.no_grad():
        return as_list(model(x))


def on_gpu(model, x):
    with ops.dispatch.as_on_gpu():
        return [*learnt(model, x), *inferred(model, x)]


def one_by_one(model, x):
    return [torch.cat(outs) for outs in zip(*(inferred(model, image[None]) for image in x))]


def channels_last(model, x):
    return inferred(model, x.to(memory_format=torch.channels_last))


def cut_out(model, x):
    """Infer on a view into a larger image."""
    return inferred(model, torch.nn.functional.pad(x, (3, 4, 2, 1), value=9.0)[..., 2:-1, 3:-4])


def merged(model, x):
    return inferred(copy.deepcopy(model).switch_to_deploy(), x)


def training(model, x):
    """Return outputs and gradients with batch statistics."""
    return learnt(copy.deepcopy(model).train(), x)


FORMS = [learnt, inferred, on_gpu, one_by_one, channels_last, cut_out, merged, training]


def error(found, exact):
    return max((a.double() - b).norm().item() / max(b.norm().item(), 1e-12) for a, b in zip(found, exact))


@pytest.mark.parametrize('seed', range(8))
def test_forms_of_random_backbones(seed):
    """Check two ways to run a random model. Errors may be as large as those of the reference in the same dtype."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    config, model = model_of(draw)
    x = torch.randn(draw.randint(1, 3), 3, draw.randint(32, 90), draw.randint(32, 90))
    wide = copy.deepcopy(model).double()
    for form in draw.sample(FORMS, 2):
        with ops.use('reference'):
            learn = training if form is training else learnt
            exact, usual = learn(wide, x.double()), learn(model, x)
        of_equations = error(usual, exact)
        for used, images, tolerance in (
            (model, x, 1e-4 + 30 * of_equations),
            (wide, x.double(), 1e-9 + 1e-5 * of_equations),
        ):
            found = form(used, images)
            again = found[len(exact) :]
            wrong = max(error(found, exact), error(again, exact[: len(again)]) if again else 0)
            assert wrong < tolerance, f'seed {seed}: {form.__name__} in {images.dtype} is {wrong:.2g} off: {config}'
