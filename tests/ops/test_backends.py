# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The fast backends of the equations give the values and gradients of their references, in every type and layout."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmlinattn import ops
from mmlinattn.layers import rotary_table
from mmlinattn.ops import products

pytestmark = pytest.mark.usefixtures('fast_forms')
draws = settings(max_examples=25, deadline=None, derandomize=True, database=None)
HEAD = 4


@st.composite
def calls(draw):
    """An attention as a function of queries, keys, values and what else learns, with these tensors."""
    name = draw(st.sampled_from(['rala', 'inline', 'focused', 'linear', 'softmax', 'efficient', 'angular', 'hydra']))
    batch, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    height, width = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    tokens, channels = height * width, heads * HEAD
    masked = draw(st.booleans())
    mask = None
    if masked:
        mask = torch.arange(tokens) < torch.tensor([draw(st.integers(0, tokens)) for _ in range(batch)])[:, None]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    tensors = list(random(batch, tokens, 3 * channels).split(channels, dim=-1))  # slices of one projection
    if masked:
        tensors[2] = tensors[2] * mask[..., None]
    if name == 'rala':
        rotary = rotary_table(height, width, HEAD, dtype=torch.float64) if draw(st.booleans()) else None
        options = dict(kernel=draw(st.sampled_from(['elu', 'relu', 'softmax'])), rotary=rotary, mask=mask)
        options.update(weight_scale=draw(st.sampled_from([None, 0.5])), eps=draw(st.sampled_from([1e-6, 0.1])))
        return lambda q, k, v: ops.rala(q, k, v, heads, **cast(options, q)), tensors
    if name == 'inline':
        kernel = draw(st.sampled_from(['identity', 'relu', 'exp']))
        return lambda q, k, v: ops.inline_attention(q, k, v, heads, 0.3, kernel, mask), tensors
    if name == 'focused':
        power = draw(st.sampled_from([1, 3, 4.5]))
        tensors += [random(channels).abs() + 0.5, random(1, tokens, channels)]
        return lambda q, k, v, scale, offset: ops.focused_attention(q, k, v, heads, scale, power, offset, mask), tensors
    if name == 'linear':
        return lambda q, k, v: ops.linear_attention(q, k, v, heads, 'elu', mask), tensors
    if name == 'softmax':
        bias = random(1, heads, tokens, tokens) if draw(st.booleans()) else None
        return lambda q, k, v: ops.softmax_attention(q, k, v, heads, mask=mask, bias=bias), tensors
    if name == 'hydra':
        return lambda q, k, v: ops.hydra_attention(q, k, v, mask), tensors
    function = ops.efficient_attention if name == 'efficient' else ops.angular_attention
    return lambda q, k, v: function(q, k, v, heads, mask), tensors


def cast(options, like):
    """Angles are in float32 beside half precision."""
    rotary = options['rotary']
    wide = torch.promote_types(like.dtype, torch.float32)
    return options if rotary is None else dict(options, rotary=rotary.to(wide))


def gradients(function, tensors, seed):
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out = function(*leaves)
    return out, *torch.autograd.grad(out, leaves, torch.ones_like(out) + seed * out.detach())


@draws
@given(calls())
def test_values_and_gradients_are_the_references(call):
    function, tensors = call
    found = gradients(function, tensors, 0.3)
    with ops.use('reference'):
        expected = gradients(function, tensors, 0.3)
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs)


@draws
@given(calls(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_inference_is_the_reference_in_float64_up_to_rounding(call, dtype):
    """Inference writes over queries and keys, never over values."""
    function, tensors = call
    with ops.use('reference'):
        exact = function(*tensors)
    cast_tensors = [tensor.to(dtype) for tensor in tensors]
    kept = cast_tensors[2].clone()
    with torch.inference_mode():
        out = function(*cast_tensors)
    assert out.dtype == dtype and torch.equal(cast_tensors[2], kept)
    error = (out.double() - exact).norm() / exact.norm().clamp(min=1e-3)
    assert error < {torch.float32: 1e-5, torch.float16: 0.02, torch.bfloat16: 0.15}[dtype]


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize('name', ['rala', 'inline_attention', 'focused_attention', 'linear_attention'])
def test_gradients_of_half_precision(name, dtype):
    """Close to those of the same rounded inputs in float64."""
    options = dict(
        inline_attention=dict(scale=0.5),
        linear_attention=dict(kernel='elu'),
        focused_attention=dict(inverse_scale=torch.rand(8) + 0.5, power=3.0),
    ).get(name, {})
    tensors = [torch.randn(2, 40, 8).to(dtype) for _ in range(3)]

    def found(kind):
        leaves = [tensor.to(kind).requires_grad_() for tensor in tensors]
        out = getattr(ops, name)(*leaves, num_heads=2, **options)
        return torch.autograd.grad(out.float().sin().sum(), leaves)

    for ours, exact in zip(found(dtype), found(torch.float64)):
        assert ours.dtype == dtype and (ours - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize('learning', [(0,), (1,), (2,), (0, 2), (3,), (4,)], ids=str)
def test_gradients_of_some_inputs_alone(learning):
    tensors = [torch.randn(2, 6, 8, dtype=torch.float64) for _ in range(3)]
    tensors += [torch.rand(8, dtype=torch.float64) + 0.5, torch.randn(1, 6, 8, dtype=torch.float64)]

    def found():
        leaves = [tensor.clone().requires_grad_(i in learning) for i, tensor in enumerate(tensors)]
        out = ops.focused_attention(*leaves[:3], 2, leaves[3], 3, leaves[4])
        return torch.autograd.grad(out.sin().sum(), [leaves[i] for i in learning])

    ours = found()
    with ops.use('reference'):
        torch.testing.assert_close(ours, found())


@pytest.mark.parametrize('batch', [1, 2, 5, 9])
@pytest.mark.parametrize('heads', [1, 3, 9])
@pytest.mark.parametrize('large', [False, True])
def test_products_by_head_or_image_where_these_are_few_and_large(batch, heads, large, monkeypatch):
    monkeypatch.setattr(ops.tensors, '_LARGE_STEP', 0 if large else 2**16)
    x, matrix = torch.randn(batch, 7, heads, 4).transpose(1, 2), torch.randn(batch, heads, 4, 5)
    torch.testing.assert_close(ops.tensors.product(x, matrix), torch.einsum('bhnd,bhde->bhne', x, matrix))


@pytest.mark.parametrize('choice', ['torch', 'onednn', 'auto'])
@pytest.mark.parametrize('size', [(300, 300), (70, 310)], ids=str)
def test_softmax_attention_by_either_products(choice, size, monkeypatch):
    """In blocks of rows where oneDNN's products are preferred; values and gradients are close whichever it is."""
    monkeypatch.setenv(products.VARIABLE, choice)
    monkeypatch.setattr(ops.softmax, '_MIN_MACS', 1)
    monkeypatch.setattr(ops.softmax, '_BLOCK_NUMEL', 20_000)
    tensors = [torch.randn(2, length, 24) for length in (size[0], size[1], size[1])]
    found = gradients(lambda *t: ops.softmax_attention(*t, 3), tensors, 0.3)
    with ops.use('reference'):
        expected = gradients(lambda *t: ops.softmax_attention(*t, 3), tensors, 0.3)
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('choice', ['torch', 'onednn'])
@pytest.mark.parametrize('width', [70, 200])
@pytest.mark.parametrize('learning', [(0, 1, 2), (0,), (1,), (2,)], ids=str)
def test_linear_layers_train_by_either_products(choice, width, learning, monkeypatch):
    """Frozen ones, too."""
    monkeypatch.setenv(products.VARIABLE, choice)
    monkeypatch.setattr(ops.products, '_MIN_TRAINED_MACS', 1)
    tensors = [torch.randn(2, 30, 100), torch.randn(width, 100), torch.randn(width)]

    def found(**options):
        leaves = [tensor.clone().requires_grad_(i in learning) for i, tensor in enumerate(tensors)]
        out = ops.linear(*leaves, **options)
        return [out, *torch.autograd.grad(out.sin().sum(), [leaves[i] for i in learning])]

    for options in (dict(), dict(gelu=True), dict(residual=torch.randn(2, 30, width))):
        ours = found(**options)
        with ops.use('reference'):
            for mine, theirs in zip(ours, found(**options)):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize('bias', [False, True])
def test_linear_layers_in_inference(dtype, bias):
    x, weight = torch.randn(3, 11, 12, dtype=dtype), torch.randn(10, 12, dtype=dtype)
    bias = torch.randn(10, dtype=dtype) if bias else None
    residual = torch.randn(3, 11, 10, dtype=dtype)
    plain = torch.nn.functional.linear(x, weight, bias)
    tolerance = dict(rtol=0.05, atol=0.1) if dtype == torch.bfloat16 else {}
    with torch.inference_mode():
        torch.testing.assert_close(ops.linear(x, weight, bias), plain, **tolerance)
        torch.testing.assert_close(ops.linear(x, weight, bias, gelu=True), torch.nn.functional.gelu(plain), **tolerance)
        torch.testing.assert_close(ops.linear(x, weight, bias, residual=residual), plain + residual, **tolerance)
        strided = torch.randn(3, 11, 30, dtype=dtype)[..., 6:18]
        torch.testing.assert_close(
            ops.linear(strided, weight, bias), torch.nn.functional.linear(strided, weight, bias), **tolerance
        )
        assert ops.linear(x[:0], weight, bias, residual=residual[:0]).shape == (0, 11, 10)
        with torch.autocast('cpu', torch.bfloat16):
            mixed = ops.linear(x.float(), weight.float(), None if bias is None else bias.float())
        assert mixed.dtype == torch.bfloat16
        torch.testing.assert_close(mixed.float(), plain.float(), rtol=0.05, atol=0.2)


def test_without_onednns_operators(monkeypatch):
    """A build of PyTorch may lack them: its own operators serve."""
    monkeypatch.setattr(ops.private, 'HAS_ONEDNN', False)
    x, weight, residual = torch.randn(2, 5, 6), torch.randn(4, 6), torch.randn(2, 5, 4)
    with torch.inference_mode():
        torch.testing.assert_close(ops.linear(x, weight, residual=residual), x @ weight.T + residual)
        image, kernel = torch.randn(1, 4, 6, 5), torch.randn(4, 1, 3, 3)
        expected = torch.nn.functional.conv2d(image, kernel, padding=1, groups=4)
        torch.testing.assert_close(ops.depthwise_conv2d(image, kernel, onto=image.clone()), image + expected)
        gelu = torch.nn.functional.gelu(expected)
        torch.testing.assert_close(ops.gelu_of_conv(image, kernel, None, 1, 1, 4), gelu)


# --- which products ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('maker', ['GenuineIntel', 'AuthenticAMD', None])
def test_products_are_onednns_where_mkl_is_slow(maker, tmp_path, monkeypatch):
    """MKL runs at half its rate on AMD's cores. Whichever is taken, the result is the same up to rounding."""
    monkeypatch.delenv(products.VARIABLE, raising=False)
    info = tmp_path / 'cpuinfo'
    if maker:
        info.write_text(f'processor : 0\nvendor_id : {maker}\n')
    monkeypatch.setattr(products, '_CPU_INFO', info)
    a, b = torch.randn(64, 32), torch.randn(16, 32)
    products._slows_mkl.cache_clear()
    try:
        taken = products.prefers_onednn(a, b)
    finally:
        products._slows_mkl.cache_clear()
    if maker:
        assert taken is (maker == 'AuthenticAMD' and torch.backends.mkl.is_available())
    torch.testing.assert_close(products.product(a, b), a @ b.T, rtol=1e-5, atol=1e-5)


def test_the_variable_says_which_products(monkeypatch):
    a, b = torch.randn(64, 32), torch.randn(16, 32)
    for choice in ('torch', 'onednn'):
        monkeypatch.setenv(products.VARIABLE, choice)
        assert products.prefers_onednn(a, b) is (choice == 'onednn')
        assert not products.prefers_onednn(a.double(), b.double())
    monkeypatch.setenv(products.VARIABLE, 'fast')
    with pytest.raises(ValueError, match=r"MMLINATTN_PRODUCTS='fast' has to be one of \('auto', 'torch', 'onednn'\)"):
        products.prefers_onednn(a, b)
