# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Changed layers: every parametrised layer, each change (hook, adapter, parametrization, ...), each form of the model.

The expected result is that of a plain model with the weights that a change amounts to, in float64, by the equations
(``ops.use('reference')``).
"""

import copy
import functools
import itertools
from collections import defaultdict
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from helpers import small_backbones
from helpers.references import FORMS, filled, form
from helpers.small_backbones import ARCHS, Adapter, image, relative_error
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.overrides import TorchFunctionMode

from mmlinattn import ops
from mmlinattn.attention import GlobalAttention
from mmlinattn.backbones import RAVLT
from mmlinattn.layers import ConvFFN, PositionTable
from mmlinattn.ops import leaves

WIDE, FACTOR = torch.float64, 1.1
# convolutions of y = gelu(x), and y + conv(y): their weights alone do not say their results
COMPOSED = ('ConvOfGELU', 'ResidualDWConv')
NORMS = nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d


def is_affine(layer):
    return (is_product(layer) or isinstance(layer, (*NORMS, PositionTable))) and type(layer).__name__ not in COMPOSED


def is_product(layer):
    return isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d))


def replace(model, path, layer):
    owner, _, name = path.rpartition('.')
    setattr(model.get_submodule(owner), name, layer)


def scale(layer, *names):
    """Multiply parameters by :data:`FACTOR`: those named, or weight and bias."""
    for name in names or ('weight', 'bias'):
        if getattr(layer, name, None) is not None:
            getattr(layer, name).data *= FACTOR


def noise(tensor):
    generator = torch.Generator().manual_seed(tensor.numel())
    return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) * tensor.std(unbiased=False) / 4


class Scaled(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args):
        return FACTOR * self.layer(*args)


def scale_output(reference, path, layer):
    scale(layer) if is_affine(layer) else replace(reference, path, Scaled(layer))


def hooked(model, reference, path, layer, plain):
    layer.register_forward_hook(lambda module, args, out: FACTOR * out)
    scale_output(reference, path, plain)


def hooked_before(model, reference, path, layer, plain):
    layer.register_forward_pre_hook(lambda module, args: FACTOR * args[0])
    scale(plain, 'weight')


def own_forward(model, reference, path, layer, plain):
    forward = layer.forward
    layer.forward = lambda *args: FACTOR * forward(*args)
    scale_output(reference, path, plain)


def subclassed(model, reference, path, layer, plain):
    kind = type(layer)
    layer.__class__ = type('Own', (kind,), dict(forward=lambda self, *args: FACTOR * kind.forward(self, *args)))
    scale_output(reference, path, plain)


def parameters_of(layer):
    return [(name, value) for name, value in layer._parameters.items() if value is not None]


def parametrised(model, reference, path, layer, plain):
    for name, _ in parameters_of(layer):
        parametrize.register_parametrization(layer, name, Scaled(nn.Identity()))
        scale(plain, name)


def pruned(model, reference, path, layer, plain):
    """Prune a third of the weights, then scale the stored ones, as loading a checkpoint would."""
    for name, value in parameters_of(layer):
        mask = (torch.arange(value.numel()) % 3 > 0).view_as(value)
        prune.custom_from_mask(layer, name, mask)
        getattr(layer, f'{name}_orig').data *= FACTOR
        getattr(plain, name).data *= mask.to(WIDE) * FACTOR


def adapted(model, reference, path, layer, plain):
    delta = copy.deepcopy(layer)
    delta.weight.data = noise(delta.weight.data)
    delta.bias = None
    replace(model, path, Adapter(layer, delta))
    if is_affine(plain):
        plain.weight.data += delta.weight.data
    else:
        replace(reference, path, Adapter(plain, copy.deepcopy(delta)))


def adapted_by_a_property(model, reference, path, layer, plain):
    delta = noise(layer.weight.data)
    layer.base, layer.delta = nn.Parameter(layer.weight.data), nn.Parameter(delta.clone())
    del layer.weight
    layer.__class__ = type('LoRA', (type(layer),), dict(weight=property(lambda self: self.base + self.delta)))
    plain.weight.data += delta


def stored_by(register):
    """Replace parameters by scaled buffers, or by plain tensors, as replicas of ``nn.DataParallel`` have them."""

    def change(model, reference, path, layer, plain):
        for name, value in parameters_of(layer):
            delattr(layer, name)
            register(layer, name, FACTOR * value.data)
            scale(plain, name)

    return change


with_buffers, with_tensors = stored_by(nn.Module.register_buffer), stored_by(setattr)
CHANGES = {
    hooked: lambda layer: is_affine(layer) or is_product(layer) or hasattr(layer, 'table'),
    hooked_before: lambda layer: is_affine(layer) and is_product(layer),
    **dict.fromkeys((own_forward, subclassed), lambda layer: is_affine(layer) or is_product(layer)),
    **dict.fromkeys((parametrised, pruned, with_buffers, with_tensors), lambda layer: True),
    adapted: is_product,
    adapted_by_a_property: lambda layer: 'weight' in layer._parameters,
}


CASES = [(backbone, mix) for backbone in ARCHS for mix in range(len(small_backbones.mixes(backbone)))]
every_model = pytest.mark.parametrize(
    ('backbone', 'mix'),
    [pytest.param(*case, marks=mix.marks) for case, mix in zip(CASES, small_backbones.every_mix(), strict=True)],
)
every_change = pytest.mark.parametrize('change', CHANGES)


@functools.cache
def build(backbone, mix):
    ffn = [None, dict(type='compact'), dict(type='compact', matrix='M1', ffn='dwconv'), None]
    ffn = dict(type='compact') if backbone == 'LinearDeiT' else ffn
    arch, attns = dict(ARCHS[backbone], ffn=ffn), small_backbones.mixes(backbone)[mix]
    model = small_backbones.build(backbone, arch=arch, stage_attns=attns, drop_path_rate=0.0).to(WIDE).eval()
    for module in model.modules():
        if hasattr(module, 'momentum'):
            module.momentum = 0.0  # statistics stay, whichever form runs first
    return model


def layers_of(model):
    return {path: m for path, m in model.named_modules() if path and any(True for _ in m.parameters(recurse=False))}


@functools.cache
def layers_by_kind():
    """Return the layers of all models as (case, path, layer), grouped by kind; a case is (backbone, mix)."""
    kinds = defaultdict(list)
    for case in CASES:
        model = build(*case)
        for path, layer in layers_of(model).items():
            owner, _, name = path.rpartition('.')
            kinds[type(model.get_submodule(owner)), name, type(layer)].append((case, path, layer))
    return kinds.values()


def mixed_changes(case):
    """Return a change for each layer by path. Layers of one kind cycle through their changes and no change."""
    plan = {}
    for places in layers_by_kind():
        options = [*(change for change, takes in CHANGES.items() if takes(places[0][2])), None]
        for turn, (place, path, _) in enumerate(places):
            if place == case and options[turn % len(options)]:
                plan[path] = options[turn % len(options)]
    return plan


def changed(model, changes):
    model, reference = copy.deepcopy(model), copy.deepcopy(model)
    for path, change in changes.items():
        change(model, reference, path, model.get_submodule(path), reference.get_submodule(path))
    return model.eval(), reference.eval()


def with_gradient(model, x):
    x = x.clone().requires_grad_()
    outs = model(x)
    probes = [torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out) for out in outs]
    loss = sum((out * probe).sum() for out, probe in zip(outs, probes))
    return [*(out.detach() for out in outs), torch.autograd.grad(loss, x)[0]]


def without_gradient(model, x):
    with torch.no_grad():
        return model(x)


def training(model, x):
    found = with_gradient(model.train(), x)
    model.eval()
    return found


def narrowed(model):
    """Convert a model to float32, including plain tensor attributes, which ``Module.float`` skips."""
    for module in model.float().modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                setattr(module, name, value.float())
    return model


def assert_near(found, wanted, tolerance=1e-6):
    assert relative_error(found, wanted) < tolerance


def check_forms(model, reference, x):
    """Compare a model with its reference. Errors may be as large as those of the reference in the same dtype."""
    with ops.use('reference'):
        in_eval, in_training = with_gradient(reference, x), training(reference, x)
        reference, small = narrowed(reference), x.float()
        runs = (with_gradient, in_eval), (training, in_training)
        narrow = [relative_error(run(reference, small), wanted) for run, wanted in runs]
    outs = in_eval[:-1]
    wide = [1e-8 + 1e-5 * usual for usual in narrow]
    assert_near(with_gradient(model, x), in_eval, wide[0])
    with ops.dispatch.as_on_gpu():
        assert_near(with_gradient(model, x), in_eval, wide[0])
    assert_near(training(model, x), in_training, wide[1])
    assert_near(without_gradient(model, x), outs, wide[0])
    assert_near(without_gradient(narrowed(model), x.float()), outs, 1e-4 + 30 * narrow[0])


@every_model
def test_changed_layers_act_in_every_form(backbone, mix):
    check_forms(*changed(build(backbone, mix), mixed_changes((backbone, mix))), image(2, 46, 39).to(WIDE))


@pytest.mark.parametrize('backbone', ARCHS)
def test_parameters_have_the_same_gradients_in_every_form(backbone):
    model, x, found = copy.deepcopy(build(backbone, 1)).train(), image(2, 46, 39).to(WIDE), []
    for which in FORMS:
        with form(which):
            loss = sum((out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum() for out in model(x))
            found.append(torch.autograd.grad(loss, list(model.parameters())))
    for fast in found[:-1]:
        torch.testing.assert_close(fast, found[-1], rtol=1e-5, atol=1e-7)


@functools.cache
def merged_model():
    arch, attns = dict(ARCHS['RAVLT'], ffn=[None, dict(type='compact'), None, None]), ('rala', 'softmax') * 2
    return small_backbones.build('RAVLT', arch=arch, stage_attns=attns, out_indices=(0, 1)).to(WIDE).eval()


def check_merging(changes, may_raise):
    model, reference = changed(merged_model(), changes)
    x = image(2, 46, 39).to(WIDE)
    with ops.use('reference'), torch.no_grad():
        wanted = reference(x)
    try:
        model.switch_to_deploy()
    except ValueError as error:
        assert str(error).startswith('switch_to_deploy: ') and may_raise
    assert_near(with_gradient(model, x)[:-1], wanted)
    assert_near(without_gradient(model, x), wanted)


@every_change
def test_layer_scales_beside_changed_layers(change):
    layers = layers_of(merged_model()).items()
    paths = [p for p, m in layers if p.startswith('stages.') and '.down.' not in p and '.up.' not in p]
    check_merging({path: change for path, m in layers if path in paths and CHANGES[change](m)}, False)


@every_change
def test_changed_layers_are_folded_right_or_refused(change):
    names = 'layers.0', 'layers.4', 'layers.9', 'layers.conv', 'layers.norm', 'linears.0', 'norms.1'
    for path, layer in layers_of(merged_model()).items():
        if path.endswith(names) and CHANGES[change](layer):
            check_merging({path: change}, change not in (with_buffers, with_tensors))


def test_branches_may_have_a_bias():
    model, x = copy.deepcopy(build('LinearPVT', 2)), image(2, 46, 39).to(WIDE)
    for part in (model.stages[1][0].ffn.fc2.down, model.stages[1][0].ffn.fc2.up):
        part.linears[0] = filled(nn.Linear(part.in_features, part.out_features)).eval()
    with ops.use('reference'), torch.no_grad():
        wanted = model(x)
    assert_near(without_gradient(model, x), wanted)
    assert_near(without_gradient(model.switch_to_deploy(), x), wanted)


class Tagged(torch.Tensor):
    """Weight of a subclass that replaces ``linear``, as quantised weights are."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is not F.linear:
            return super().__torch_function__(func, types, args, kwargs or {})
        x, weight, *bias = (t.as_subclass(torch.Tensor) if isinstance(t, Tagged) else t for t in args)
        return F.linear(x, 2 * weight, *bias)


def tagged(model):
    layer = model.stages[0][0].ffn.fc1
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Tagged), requires_grad=False)


def other_settings(model):
    conv = model.patch_embeds[0].layers[2]
    conv.stride, conv.dilation, conv.padding = (2, 1), (2, 2), (2, 1)


def circular_padding(model):
    for conv in model.modules():
        if isinstance(conv, nn.Conv2d):
            conv.padding_mode = 'circular'
            conv._reversed_padding_repeated_twice = [side for side in reversed(conv.padding) for _ in '12']


def dense_position_encoding(model):
    conv = model.stages[0][0].position
    new = nn.Conv2d(len(conv.weight), len(conv.weight), 3, padding=1)
    conv.groups, conv.weight, conv.bias = 1, new.double().weight, None


def second_norm(model):
    model.patch_embeds[1].layers.append(filled(nn.BatchNorm2d(16)).eval())


@pytest.mark.parametrize('change', [tagged, other_settings, circular_padding, dense_position_encoding, second_norm])
@torch.no_grad()
def test_replaced_parts_act_without_gradients(change):
    model = filled(RAVLT(ARCHS['RAVLT'], drop_path_rate=0.5)).eval()
    x = torch.rand(2, 3, 70, 52, dtype=torch.float64)
    before = model(x)
    change(model)
    torch.manual_seed(0)
    with torch.enable_grad():
        expected = model(x)
    assert any(a.shape != b.shape or (a - b).abs().max() > 1e-3 for a, b in zip(before, expected))
    torch.manual_seed(0)
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize(
    ('kind', 'name'),
    [
        *((nn.Linear, 'forward'), (nn.Module, '__call__'), (nn.Module, '_call_impl')),
        *((ConvFFN, 'forward'), (GlobalAttention, 'mix'), (nn.Linear, '__call__')),  # that a class only inherits
    ],
)
@torch.no_grad()
def test_replaced_methods_are_called(monkeypatch, kind, name):
    model, x = filled(RAVLT(ARCHS['RAVLT'])).eval(), torch.rand(1, 3, 64, 64, dtype=torch.float64)
    inherited, seen = getattr(kind, name), []
    monkeypatch.setattr(kind, name, lambda self, *args, **kwargs: seen.append(self) or inherited(self, *args, **kwargs))
    model(x)
    count = len(seen)
    with torch.enable_grad():
        model(x)
    assert count > 0 and len(seen) == 2 * count


linear = F.linear


class Halved(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out / 2 if func is linear else out


@pytest.mark.parametrize('change', [Halved, lambda: mock.patch.object(F, 'linear', lambda *args: linear(*args) / 2)])
@torch.no_grad()
def test_replaced_functions_are_called(change):
    """In float32, which has operators of its own."""
    model, x = filled(RAVLT(ARCHS['RAVLT'])).float().eval(), torch.rand(1, 3, 64, 64)
    before = model(x)
    with change():
        with torch.enable_grad():
            expected = model(x)
        assert (expected[0] - before[0]).abs().max() > 1e-3
        torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-4)


STRIDES = lambda bias: torch.stack((bias, bias + 9), 1)[:, 0], lambda bias: bias[:1].expand_as(bias)


@pytest.mark.parametrize(
    ('change', 'is_conv'), [*itertools.product(STRIDES, (False, True)), (lambda bias: bias[:1], False)]
)
@torch.no_grad()
def test_biases_of_other_strides_and_sizes(change, is_conv):
    """In float32, of which oneDNN's operators would read something else."""
    layer = leaves.Conv2d(6, 8, 1) if is_conv else leaves.Linear(6, 8)
    layer.bias, x = nn.Parameter(change(layer.bias)), torch.randn(2, 6, 6, 6)
    with torch.enable_grad():
        expected = F.gelu(layer(x))
    torch.testing.assert_close(leaves.chain(x, layer, F.gelu), expected)


def test_a_device_as_a_context_replaces_nothing():
    """Expect the bitwise result of the fused modules, which differs in rounding from the plain ones."""
    model, x = filled(RAVLT(ARCHS['RAVLT'])).float().eval(), torch.rand(1, 3, 64, 64)
    fused = without_gradient(model, x)
    with torch.device('cpu'):
        found = without_gradient(model, x)
    assert all(torch.equal(*pair) for pair in zip(found, fused))
    assert not torch.equal(model(x)[0], fused[0])
