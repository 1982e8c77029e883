# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Reference implementations of all attentions: the equation of the paper with its attention map A, (B, heads, N, N),
and ``out = A v``.

A new attention adds rows to :data:`ATTENTIONS` and :data:`ERRORS`, and a function with the name of its type. Equations
take (B, heads, N, d) tensors; use float64.
"""

import contextlib
import math

import torch
from torch import nn
from torch.nn.functional import conv2d, pad

from mmlinattn import ops
from mmlinattn.attention import Attention
from mmlinattn.attention.base import mean_token

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
OWN_VALUE = {'angular', 'angular, sequence'}  # add the value of each query: keys are the queries' tokens
OVERFLOWING = {'efficient', *(name for name, spec in ATTENTIONS.items() if spec.get('kernel') == 'exp')}  # exp
FIRST = {spec['type']: name for name, spec in reversed(ATTENTIONS.items())}  # type: its first row
_STEPS = "steps={!r}: expected some of 'ihh' and 'chh'"
ERRORS = [  # options of an attention, words of the error; DIM = 16, HEADS = 2
    (dict(type='focused', local_kernel=4), ['local_kernel=4', 'None or an odd int >= 1']),
    *((dict(type='focused', power=p), [f'power={p}', '[1, 32]']) for p in (0.5, 0, -1, 33, None, '3')),
    *((dict(type='rala', kernel=name), [f'kernel={name!r}', 'elu']) for name in ('gelu', '', None)),
    *((dict(type='inline', kernel=name), [f'kernel={name!r}', 'leakyrelu']) for name in ('elu', '', None)),
    *((dict(type='hallucinated', steps=s), [_STEPS.format(s)]) for s in ('ihh', None, ('ihh', 'ihh'), ('dhh',))),
    (dict(type='inline', kernel='identity', injective=False), ["kernel='identity'", "'relu' or 'exp'"]),
    (dict(type='inline', kernel='leakyrelu', injective=False), ["kernel='leakyrelu'", "'relu' or 'exp'"]),
    (dict(type='angular', form='release'), ["form='release'", "'released' or 'paper'"]),
    (dict(type='angular', conv='9x1'), ["conv='9x1'", "'grid'", "'sequence'"]),
]


def filled(module, std=0.4):
    """Fill a module with random float64 weights that hide no term."""
    module = module.double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    return module


def build(name, **options):
    return filled(Attention(DIM, HEADS, ATTENTIONS.get(name, name), **options))


def tokens(batch, count, learns=True):
    return torch.randn(batch, count, DIM, dtype=torch.float64, requires_grad=learns)


FORMS = ['auto', 'elsewhere', 'reference']  # elsewhere: the code path of a GPU, on this CPU


@contextlib.contextmanager
def form(name):
    with ops.use('reference' if name == 'reference' else 'auto'):
        with ops.dispatch.as_on_gpu() if name == 'elsewhere' else contextlib.nullcontext():
            yield


def side_by_side(x):
    return x.transpose(1, 2).flatten(2)


def by_head(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def rotate(x, height, width, base=10000.0):
    """Apply the released rotary encoding by complex numbers ``x[2c] + i x[2c + 1]``, (B, heads, N, d / 2).

    The first half of them rotates with the row, the second with the column: number c of a half by
    ``base ** -(c / (d / 4 - 1))`` radians per token.
    """
    quarter = x.shape[-1] // 4
    speed = base ** -(torch.arange(quarter, dtype=x.dtype) / max(quarter - 1, 1))
    rows, columns = (torch.arange(size, dtype=x.dtype) for size in (height, width))
    angles = (torch.cartesian_prod(rows, columns)[..., None] * speed).flatten(1)
    return torch.complex(x[..., 0::2], x[..., 1::2]) * torch.polar(torch.ones_like(angles), angles)


def similarity(q, k, size=None):
    """Return ``q_i . k_j`` (B, heads, N, N); with ``size`` = (height, width) after the rotary encoding."""
    if size is None:
        return torch.einsum('bhid,bhjd->bhij', q, k)
    # the dot product of two vectors of pairs is the real part of one with the other's conjugate
    return torch.einsum('bhic,bhjc->bhij', rotate(q, *size), rotate(k, *size).conj()).real


def kernel(x, name):
    """Apply a feature map by name: kappa of RALA Tab. 10, phi of InLine."""
    if name in ('relu', 'leakyrelu'):
        return torch.where(x > 0, x, 0.01 * x if name == 'leakyrelu' else 0)
    if name == 'softmax':
        return x.exp() / x.exp().sum(dim=-1, keepdim=True)
    if name == 'elu':  # + 1
        return torch.where(x > 0, x, x.exp() - 1) + 1
    return (0.2 * x).exp() if name == 'exp' else x


def linear_map(q, k, size=None, eps=1e-6):
    """Return the attention map of linear attention for mapped queries and keys (InLine Eq. 2), (B, heads, N, N).

    ``A_ij = (R_i q_i) . (R_j k_j) / sum_m(q_i . k_m)``, with ``eps`` added to the mean over the keys. R is the rotary
    encoding of a feature map of ``size`` (height, width), or the identity.
    """
    normaliser = similarity(q, k).mean(dim=-1, keepdim=True) + eps
    return similarity(q, k, size) / k.shape[2] / normaliser


def rala_map(q, k, size=None, weight_scale=1.0, eps=1e-6):
    """Attention map of RALA, Eq. 2-4: the attention map of linear attention for keys ``a_j k_j``.

    ``a_j = N exp(q_g . k_j s) / sum_m exp(q_g . k_m s)``, with ``q_g = mean_i q_i`` and s the ``weight_scale``; without
    it all a_j are one.
    """
    if weight_scale is None:
        return linear_map(q, k, size, eps)
    score = torch.einsum('bhd,bhjd->bhj', q.mean(dim=2), k).mul(weight_scale).exp()
    a = k.shape[2] * score / score.sum(dim=-1, keepdim=True)
    return linear_map(q, a[..., None] * k, size, eps)


def focused_map(x, scale, power, eps=1e-6):
    """Apply the feature map phi_p of FLatten (Eq. 7-8) over all channels of ``x`` (..., C)."""
    r = (x.clamp(min=0) + eps) / torch.log1p(scale.exp())
    powered = r**power
    length = r.square().sum(dim=-1, keepdim=True).sqrt()
    return length / powered.square().sum(dim=-1, keepdim=True).sqrt() * powered


def unit(x):
    return x / x.square().sum(dim=-1, keepdim=True).sqrt()


def sum_of(kernels, v, grid):
    """Convolve the patches of ``v`` (B, N, C) with ``kernels`` (B or 1, C, 1, k, k); zero at class tokens."""
    images = v[:, grid.prefix :].unflatten(1, grid[:2]).permute(0, 3, 1, 2)
    kernels = kernels.expand(len(v), *kernels.shape[1:])
    local = [conv2d(x, w, padding=w.shape[-1] // 2, groups=len(w)) for x, w in zip(images, kernels)]
    return pad(torch.stack(local).flatten(2).transpose(1, 2), (0, 0, grid.prefix, 0))


def rala(mixer, spec, q, k, v, grid, size, bias, context):
    scale = HEAD_DIM**-0.5 if spec.get('scale_weights', True) else 1.0
    scale = scale if spec.get('augment_kv', True) else None
    q, k = (kernel(t, spec.get('kernel', 'elu')) for t in (q, k))
    return side_by_side(rala_map(q, k, size, scale) @ v)


def softmax(mixer, spec, q, k, v, grid, size, bias, context):
    score = similarity(q, k, size) / math.sqrt(HEAD_DIM)
    weights = (score if bias is None else score + bias).exp()
    return side_by_side(weights / weights.sum(dim=-1, keepdim=True) @ v)


def inline(mixer, spec, q, k, v, grid, size, bias, context):
    """Return InLine attention (B, N, heads * d) of queries, keys and values (B, heads, N, d).

    ``spec`` is the row of :data:`ATTENTIONS`, ``grid`` that of the keys, and ``context`` the input tokens (B, N, C).
    Predicted kernels take their weights from ``mixer``. ``size`` and ``bias`` are not used.

    ``A_ij = s q_i . k_j / N - mean_m(s q_i . k_m) / N + 1 / N`` (Eq. 3-5): rows sum to one without a division. Kernels
    of Eq. 6 are predicted per head from the mean token.
    """
    q, k = (kernel(t, spec.get('kernel', 'identity')) for t in (q, k))
    score = similarity(q, k) * HEAD_DIM**-0.5 / k.shape[2]
    weights = score - score.mean(dim=-1, keepdim=True) + 1 / k.shape[2]
    out = side_by_side((weights if spec.get('injective', True) else linear_map(q, k)) @ v)
    if not spec.get('local_residual', True):
        return out
    kernels = []
    for head, token in enumerate(context.mean(dim=1).chunk(HEADS, dim=1)):
        first, second = (
            (layer.weight.chunk(HEADS)[head][..., 0], layer.bias.chunk(HEADS)[head])
            for layer in (mixer.residual.fc1, mixer.residual.fc2)
        )
        hidden = token @ first[0].T + first[1]
        hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2  # GELU
        kernels.append((hidden @ second[0].T + second[1]).unflatten(1, (-1, 1, 3, 3)))
    return out + sum_of(torch.cat(kernels, dim=1), side_by_side(v), grid)


def focused(mixer, spec, q, k, v, grid, size, bias, context):
    """Return focused linear attention (FLatten Eq. 5-12) of tensors (B, heads, N, d), as (B, N, heads * d).

    The position table of ``mixer`` is added to the keys. The feature map is applied before the split into heads.
    """
    q, k, values = (side_by_side(t) for t in (q, k, v))
    if mixer.position is not None:  # class tokens have no position
        k = k + mixer.position(grid)
    if spec.get('focus', True):
        q, k = (focused_map(t, mixer.scale, spec.get('power', 3)) for t in (q, k))
    else:
        q, k = (t.clamp(min=0) + 1e-6 for t in (q, k))
    out = side_by_side(linear_map(*(by_head(t, HEADS) for t in (q, k))) @ v)
    if mixer.local is None:
        return out
    assert mixer.local.kernel_size[0] == spec.get('local_kernel', 5)
    kernels, shared = (torch.cat([t] * HEADS) for t in (mixer.local.weight, mixer.local.bias))
    out = out + sum_of(kernels[None], values, grid)
    return out + torch.arange(out.shape[1]).ge(grid.prefix)[:, None] * shared  # class tokens have no bias either


def hallucinated(mixer, spec, q, k, v, grid, size, bias, context):
    """Compute hMHSA, (B, N, heads * d), from ``HEADS`` maps of logits and as many hallucinated ones (hMHSA Eq. 2).

    ``spec['steps']`` names the steps: CHH mixes the maps of all heads, IHH convolves each over the keys' grid. Keys of
    class tokens have no neighbours. ``size`` and ``context`` are not used.
    """
    q, k = (by_head(side_by_side(t), HEADS) for t in (q, k))
    maps = real = similarity(q, k) / math.sqrt(HEAD_DIM // 2)
    for step in spec['steps']:
        conv = getattr(mixer, step)
        if step == 'chh':
            maps = torch.einsum('mi,binj->bmnj', conv.weight[:, :, 0, 0], maps)
        else:
            queries = maps.transpose(1, 2).flatten(0, 1)[..., grid.prefix :].unflatten(2, grid[:2])
            patches = conv2d(queries, conv.weight, padding=1, groups=len(conv.weight))
            patches = patches.unflatten(0, (len(maps), -1)).transpose(1, 2).flatten(3)
            maps = torch.cat((maps[..., : grid.prefix], patches), dim=-1)
        maps = maps if conv.bias is None else maps + conv.bias[:, None, None]
    logits = torch.cat((real, maps), dim=1)
    logits = logits if bias is None else logits + bias
    return side_by_side(logits.softmax(dim=-1) @ by_head(side_by_side(v), 2 * HEADS))


def hydra(mixer, spec, q, k, v, grid, size, bias, context):
    q, k, v = (side_by_side(t) for t in (q, k, v))
    weights = torch.einsum('bic,bjc->bcij', unit(q), unit(k))  # an attention map for every channel
    return torch.einsum('bcij,bjc->bic', weights, v)


def efficient(mixer, spec, q, k, v, grid, size, bias, context):
    queries = q.exp() / q.exp().sum(dim=-1, keepdim=True)
    keys = k.exp() / k.exp().sum(dim=-2, keepdim=True)
    return side_by_side(similarity(queries, keys) @ v)


def enhanced(mixer, spec, q, k, v, grid, size, bias, context):
    return side_by_side(linear_map(q.clamp(min=0), k.clamp(min=0)) @ v)


def angular(mixer, spec, q, k, v, grid, size, bias, context):
    cosine = similarity(unit(q), unit(k)) / math.pi
    if spec.get('form') == 'paper':
        weights = cosine + 0.5
        out = side_by_side(weights / weights.sum(dim=-1, keepdim=True) @ v)
    else:
        out = side_by_side(unit((cosine + torch.eye(q.shape[2], dtype=q.dtype) / 2) @ v))
    conv, values = spec.get('conv', 'grid'), side_by_side(v)
    if conv is None:
        return out
    kernels = mixer.dconv.weight.repeat_interleave(HEAD_DIM, dim=0)
    if conv == 'grid':
        return out + sum_of(kernels[None], values, grid)
    padded = pad(values, (0, 0, 4, 4))
    return out + sum(padded[:, tap : tap + values.shape[1]] * kernels[:, 0, tap, 0] for tap in range(9))


def reference(attention, name, x, grid, kv=None, key_grid=None, size=None, bias=None, context=None):
    """Compute ``W_o ((mix(q, k, v) + DWConv(v)) * gate)`` of tokens (B, N, C), rotated if a ``size`` is given."""
    spec, key_grid, widths = ATTENTIONS[name], key_grid or grid, attention.mixer.widths
    weights = attention.qkv.weight.split(attention.widths)
    biases = [0.0] * 4 if attention.qkv.bias is None else attention.qkv.bias.split(attention.widths)
    sources = x, x if kv is None else kv, x if kv is None else kv
    q, k, v = (source @ w.T + b for source, w, b in zip(sources, weights, biases))
    assert (q.shape[-1], k.shape[-1], v.shape[-1]) == widths
    mix = globals()[spec['type']]
    context = x if context is None else context
    out = mix(attention.mixer, spec, *(by_head(t, HEADS) for t in (q, k, v)), key_grid, size, bias, context)
    if attention.local is not None:
        out = out + sum_of(attention.local.weight[None], v, grid)
        out = out + torch.arange(out.shape[1]).ge(grid.prefix)[:, None] * attention.local.bias
    if attention.gate == 'projection':
        out = out * (x @ weights[3].T + biases[3])
    elif attention.gate is not None:
        out = out * (x if attention.gate == 'identity' else torch.sinh(x) / torch.cosh(x))
    return out @ attention.proj.weight.T + attention.proj.bias


def attend(attention, x, grid, kv=None, key_grid=None, source=None, mask=None, rotary=None, bias=None):
    if hasattr(attention, 'qkv'):
        q, k, v, *gate = attention.qkv(x).split(attention.widths, dim=-1)
        if kv is not None:
            k, v = attention.qkv(kv).split(attention.widths, dim=-1)[1:3]
    else:
        q, *gate = attention.q(x).split((attention.widths[0], *attention.widths[3:]), dim=-1)
        k, v = attention.kv(kv).split(attention.widths[1:3], dim=-1)
    v = v if mask is None else v * mask.unsqueeze(-1).to(v.dtype)
    source = x if source is None else source
    source = source if mask is None else source * mask.unsqueeze(-1).to(source.dtype)
    context = mean_token(source, mask) if attention.mixer.context else None
    out = attention.mix(q, k, v, grid, key_grid, mask, rotary, bias, context)
    return attention.proj(attention.apply_gate(out, x, gate))


def gradients(out, leaves, probe):
    """Return the gradients of ``(out * probe).sum()``, and zeros for leaves without one."""
    found = torch.autograd.grad((out * probe).sum(), leaves, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found)]


def assert_same(ours, theirs, leaves, rtol=1e-7, atol=1e-8):
    """Assert that two outputs, and their gradients with respect to ``leaves``, are equal up to tolerances.

    The absolute tolerance of a gradient is multiplied by its largest magnitude, if that exceeds one.
    """
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)
    probe = torch.randn_like(theirs)
    for mine, other in zip(gradients(ours, leaves, probe), gradients(theirs, leaves, probe)):
        torch.testing.assert_close(mine, other, rtol=rtol, atol=atol * max(1, other.abs().max().item()))
