# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Every attention with its options, and what it is by its paper's equation, with N x N maps."""

import math

import reference
import torch
from torch import nn

from mmlinattn.attention import Attention, Grid

DIM, HEADS = 16, 2
HEAD_DIM = DIM // HEADS
STEPS = [('ihh', 'chh'), ('chh', 'ihh'), ('ihh',), ('chh',), ()]
ATTENTIONS = {
    'softmax': dict(type='softmax'),
    'rala': dict(type='rala'),
    'rala, paper': dict(type='rala', scale_weights=False),
    'rala, no weights': dict(type='rala', augment_kv=False),
    'rala, no gate': dict(type='rala', output_gate=None),
    'rala, identity': dict(type='rala', output_gate='identity'),
    'rala, tanh': dict(type='rala', output_gate='tanh'),
    'rala, relu': dict(type='rala', kernel='relu'),
    'rala, softmax': dict(type='rala', kernel='softmax'),
    'inline': dict(type='inline'),
    'inline, relu': dict(type='inline', kernel='relu'),
    'inline, leakyrelu': dict(type='inline', kernel='leakyrelu'),
    'inline, exp': dict(type='inline', kernel='exp', local_residual=False),
    # by sums of either sign a division says nothing about rounding: no identity, no leaky ReLU
    'inline, division': dict(type='inline', kernel='exp', injective=False),
    'inline, division, relu': dict(type='inline', kernel='relu', injective=False, local_residual=False),
    'focused': dict(type='focused'),
    'focused, no convolution': dict(type='focused', local_kernel=None),
    'focused, 3x3': dict(type='focused', local_kernel=3),
    'focused, relu': dict(type='focused', focus=False),
    'focused, power 1': dict(type='focused', power=1),
    'focused, power 32': dict(type='focused', power=32),
    **{'hallucinated ' + '-'.join(steps): dict(type='hallucinated', steps=steps) for steps in STEPS},
    'hydra': dict(type='hydra'),
    'efficient': dict(type='efficient'),
    'enhanced': dict(type='enhanced'),
    'angular': dict(type='angular'),
    'angular, sequence': dict(type='angular', conv='sequence'),
    'angular, paper': dict(type='angular', form='paper'),
    'angular, paper, alone': dict(type='angular', form='paper', conv=None),
}


def filled(module, std=0.4):
    """In float64, with weights that hide no term."""
    module = module.double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    return module


def build(name, **options):
    return filled(Attention(DIM, HEADS, ATTENTIONS.get(name, name), **options))


def tokens(batch, count, learns=True):
    return torch.randn(batch, count, DIM, dtype=torch.float64, requires_grad=learns)


def unit(x):
    return x / x.square().sum(dim=-1, keepdim=True).sqrt()


def sum_of(kernels, v, grid, prefix):
    """Each item of the patches of ``v`` convolved with ``kernels`` (B or 1, C, 1, k, k)."""
    kernels = kernels.expand(len(v), *kernels.shape[1:])
    local = [reference.local_term(v[i : i + 1, prefix:], kernels[i], 0, *grid[:2]) for i in range(len(v))]
    return torch.cat((torch.zeros_like(v[:, :prefix]), torch.cat(local)), dim=1)


def rala(mixer, spec, q, k, v, grid, size, bias, context):
    scale = HEAD_DIM**-0.5 if spec.get('scale_weights', True) else 1.0
    scale = scale if spec.get('augment_kv', True) else None
    q, k = (reference.kernel(t, spec.get('kernel', 'elu')) for t in (q, k))
    return reference.side_by_side(reference.rala_map(q, k, size, scale) @ v)


def softmax(mixer, spec, q, k, v, grid, size, bias, context):
    return reference.side_by_side(reference.softmax_map(q, k, size, bias) @ v)


def inline(mixer, spec, q, k, v, grid, size, bias, context):
    q, k = (reference.inline_kernel(t, spec.get('kernel', 'identity')) for t in (q, k))
    injective = spec.get('injective', True)
    weights = reference.inline_map(q, k, HEAD_DIM**-0.5) if injective else reference.linear_map(q, k)
    out, values = reference.side_by_side(weights @ v), reference.side_by_side(v)
    if not spec.get('local_residual', True):
        return out
    kernels = reference.predicted_kernels(context.mean(dim=1), mixer.residual.fc1, mixer.residual.fc2, HEADS)
    return out + sum_of(kernels, values, grid, grid.prefix)


def focused(mixer, spec, q, k, v, grid, size, bias, context):
    """The map goes over all channels, before the split into heads; positions are added to the keys before it."""
    q, k, values = (reference.side_by_side(t) for t in (q, k, v))
    if mixer.position is not None:  # class tokens have no position
        table = mixer.position.on(Grid(grid.height, grid.width))
        k = k + torch.nn.functional.pad(table, (0, 0, grid.prefix, 0))
    if spec.get('focus', True):
        q, k = (reference.focused(t, mixer.scale, spec.get('power', 3)) for t in (q, k))
    else:
        q, k = (t.clamp(min=0) + 1e-6 for t in (q, k))
    out = reference.side_by_side(reference.linear_map(*(reference.by_head(t, HEADS) for t in (q, k))) @ v)
    if mixer.local is None:
        return out
    assert mixer.local.kernel_size[0] == spec.get('local_kernel', 5)
    kernels, shared = (torch.cat([t] * HEADS) for t in (mixer.local.weight, mixer.local.bias))
    out = out + sum_of(kernels[None], values, grid, grid.prefix)
    return out + torch.arange(out.shape[1]).ge(grid.prefix)[:, None] * shared  # class tokens have no bias either


def hallucinated(mixer, spec, q, k, v, grid, size, bias, context):
    """Twice the heads, half as wide; those of queries and keys are the real ones."""
    q, k = (reference.by_head(reference.side_by_side(t), HEADS) for t in (q, k))
    convs = dict(ihh=mixer.ihh, chh=mixer.chh)
    steps = [(name, (convs[name].weight, convs[name].bias)) for name in spec['steps']]
    real = reference.similarity(q, k) / math.sqrt(HEAD_DIM // 2)
    logits = torch.cat((real, reference.hallucinated_maps(real, steps, grid[:2], grid.prefix)), dim=1)
    logits = logits if bias is None else logits + bias
    values = reference.by_head(reference.side_by_side(v), 2 * HEADS)
    return reference.side_by_side(logits.softmax(dim=-1) @ values)


def hydra(mixer, spec, q, k, v, grid, size, bias, context):
    q, k, v = (reference.side_by_side(t) for t in (q, k, v))
    weights = torch.einsum('bic,bjc->bcij', unit(q), unit(k))  # a map for every channel
    return torch.einsum('bcij,bjc->bic', weights, v)


def efficient(mixer, spec, q, k, v, grid, size, bias, context):
    queries = q.exp() / q.exp().sum(dim=-1, keepdim=True)
    keys = k.exp() / k.exp().sum(dim=-2, keepdim=True)
    return reference.side_by_side(reference.similarity(queries, keys) @ v)


def enhanced(mixer, spec, q, k, v, grid, size, bias, context):
    return reference.side_by_side(reference.linear_map(q.clamp(min=0), k.clamp(min=0)) @ v)


def angular(mixer, spec, q, k, v, grid, size, bias, context):
    cosine = reference.similarity(unit(q), unit(k)) / math.pi
    if spec.get('form') == 'paper':
        weights = cosine + 0.5
        out = reference.side_by_side(weights / weights.sum(dim=-1, keepdim=True) @ v)
    else:
        out = reference.side_by_side(unit((cosine + torch.eye(q.shape[2], dtype=q.dtype) / 2) @ v))
    conv, values = spec.get('conv', 'grid'), reference.side_by_side(v)
    if conv is None:
        return out
    kernels = mixer.dconv.weight.repeat_interleave(HEAD_DIM, dim=0)
    if conv == 'grid':
        return out + sum_of(kernels[None], values, grid, grid.prefix)
    padded = torch.nn.functional.pad(values, (0, 0, 4, 4))
    return out + sum(padded[:, tap : tap + values.shape[1]] * kernels[:, 0, tap, 0] for tap in range(9))


def twin(attention, name, x, grid, kv=None, key_grid=None, size=None, bias=None, context=None):
    """``W_o ((mix(q, k, v) + DWConv(v)) * gate)``; ``size``: height and width where tokens are turned (rotary)."""
    spec, key_grid, widths = ATTENTIONS[name], key_grid or grid, attention.mixer.widths
    weights = attention.qkv.weight.split(attention.widths)
    biases = [0.0] * 4 if attention.qkv.bias is None else attention.qkv.bias.split(attention.widths)
    sources = x, x if kv is None else kv, x if kv is None else kv
    q, k, v = (source @ w.T + b for source, w, b in zip(sources, weights, biases))
    assert (q.shape[-1], k.shape[-1], v.shape[-1]) == widths
    mix = globals()[spec['type']]
    out = mix(
        attention.mixer, spec, *(reference.by_head(t, HEADS) for t in (q, k, v)), key_grid, size, bias,
        x if context is None else context,
    )  # fmt: skip
    if attention.local is not None:
        out = out + sum_of(attention.local.weight[None], v, grid, grid.prefix)
        out = out + torch.arange(out.shape[1]).ge(grid.prefix)[:, None] * attention.local.bias
    if attention.gate == 'projection':
        out = out * (x @ weights[3].T + biases[3])
    elif attention.gate is not None:
        out = out * (x if attention.gate == 'identity' else torch.sinh(x) / torch.cosh(x))
    return out @ attention.proj.weight.T + attention.proj.bias


def attend(attention, x, grid, kv=None, key_grid=None, source=None, mask=None, rotary=None, bias=None):
    """What arrangements do around the mixer, on tokens (B, N, C)."""
    if hasattr(attention, 'qkv'):
        q, k, v, *gate = attention.qkv(x).split(attention.widths, dim=-1)
        if kv is not None:
            k, v = attention.qkv(kv).split(attention.widths, dim=-1)[1:3]
    else:
        q, *gate = attention.q(x).split((attention.widths[0], *attention.widths[3:]), dim=-1)
        k, v = attention.kv(kv).split(attention.widths[1:3], dim=-1)
    v = v if mask is None else v * mask.unsqueeze(-1).to(v.dtype)
    context = attention.context_of(x if source is None else source, mask)
    out = attention.mix(q, k, v, grid, key_grid, mask, rotary, bias, context)
    return attention.proj(attention.gated(out, x, gate))


def gradients(out, leaves, probe):
    """Of a generic function of ``out``; zeros for what it does not depend on."""
    found = torch.autograd.grad((out * probe).sum(), leaves, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found)]


def assert_same(ours, theirs, leaves, rtol=1e-7, atol=1e-8):
    """Values and gradients; largest numbers of each gradient set its scale."""
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)
    probe = torch.randn_like(theirs)
    for mine, other in zip(gradients(ours, leaves, probe), gradients(theirs, leaves, probe)):
        torch.testing.assert_close(mine, other, rtol=rtol, atol=atol * max(1, other.abs().max().item()))
