# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What is done to move less memory changes no value and no gradient: slices, blocks, overwriting, large kernels."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from test_masks import DIM, HEADS, build, every_mixer

from mmlinattn import ops
from mmlinattn.attention import Grid, grid
from mmlinattn.layers import rotary_table
from mmlinattn.ops import memory, onednn
from mmlinattn.ops.elementwise import reference as elementwise_reference
from mmlinattn.ops.memory import gradients_like, product, split

pytestmark = pytest.mark.usefixtures('fast_forms')


class Fill(torch.autograd.Function):
    """Gradients 1, 2, ... in memory made for them."""

    @staticmethod
    def forward(ctx, *parts):
        ctx.save_for_backward(*parts)
        return sum(part.sum() for part in parts)

    @staticmethod
    def backward(ctx, grad):
        grads = gradients_like(*ctx.saved_tensors)
        for value, part in enumerate(grads, 1):
            part.fill_(value)
        return tuple(grads)


@pytest.mark.parametrize('shape', [(2, 3, 7), (1, 1, 7), (4, 7)], ids=str)
def test_gradients_of_slices_become_one_without_a_copy(shape):
    x = torch.randn(shape, requires_grad=True)
    hidden = x * 1
    seen = []
    hidden.register_hook(seen.append)
    parts = split(hidden, (2, 4, 1))
    parts[0].register_hook(seen.append)
    Fill.apply(*parts).backward()
    torch.testing.assert_close(x.grad, torch.tensor([1.0, 1, 2, 2, 2, 2, 3]).expand(shape))
    part, whole = seen
    assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@pytest.mark.parametrize('order', [(0, 1, 2), (2, 0, 1)], ids=str)
@pytest.mark.parametrize('used', [(0, 1, 2), (0, 2), (1,)], ids=str)
def test_gradients_of_slices_made_by_anybody(used, order):
    """Unused slices, gradients of other memory, and those of another order."""
    widths = (3, 3, 3)
    results = []
    for cut in (split, lambda x, widths: x.split(widths, dim=-1)):
        x = torch.randn(2, 5, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        parts = cut(x * 1, widths)
        sum((parts[order[i]] ** (i + 2)).sum() for i in used).backward()
        results.append(x.grad)
    torch.testing.assert_close(*results)
    swapped = split(x * 1, widths)
    (grad,) = torch.autograd.grad(Fill.apply(*(swapped[i] for i in order)), x)
    expected = [1.0 + order.index(i) for i in range(3)]
    torch.testing.assert_close(grad, torch.tensor(expected, dtype=x.dtype).repeat_interleave(3).expand(2, 5, 9))


def test_gradients_of_gradients_that_lie_as_the_slices():
    """Of x cubed, put together again: six times x, in all slices."""
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    whole = torch.cat(split(x * 1, (2, 3)), dim=-1)
    (first,) = torch.autograd.grad((whole**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 6 * x.detach())


@pytest.mark.parametrize('moved', range(3))
def test_gradients_of_which_one_lies_elsewhere_are_copied(moved):
    """All but one are slices of one memory, which looks like the whole from its first slice."""

    class Scattered(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *parts):
            ctx.save_for_backward(*parts)
            return sum(part.sum() for part in parts)

        @staticmethod
        def backward(ctx, grad):
            grads = gradients_like(*ctx.saved_tensors)
            for value, part in enumerate(grads, 1):
                part.fill_(value)
            whole = grads[moved].clone()
            grads[moved].fill_(99)
            grads[moved] = whole
            return tuple(grads)

    x = torch.randn(2, 5, 9, requires_grad=True)
    Scattered.apply(*split(x * 1, (3, 3, 3))).backward()
    expected = torch.tensor([1.0, 2, 3]).repeat_interleave(3)
    torch.testing.assert_close(x.grad, expected.expand(2, 5, 9))


def test_slices_in_another_order_are_no_whole():
    first, second, third = torch.randn(2, 6).split(2, dim=-1)
    shape, widths = torch.Size((2, 6)), (2, 2, 2)
    assert torch.equal(memory._whole([first, second, third], shape, widths), torch.cat((first, second, third), dim=-1))
    assert memory._whole([first, third, second], shape, widths) is None
    assert memory._whole([second, first, third], shape, widths) is None


def test_keys_that_somebody_keeps_are_not_written_over():
    """With gradients on, also those that ask for none."""
    q, k, v = (torch.randn(2, 6, 8) for _ in range(3))
    kept, scale = k.clone(), torch.ones(8, requires_grad=True)
    ops.focused_attention(q, k, v, 2, scale, 3, offset=torch.ones(1, 6, 8))
    assert torch.equal(k, kept)


def test_gradients_of_tensors_that_are_no_slices():
    x = torch.randn(2, 3, 8)
    overlapping = gradients_like(x[..., :5], x[..., 2:])
    assert overlapping[0].untyped_storage().data_ptr() != overlapping[1].untyped_storage().data_ptr()
    expanded, same, other = torch.randn(2, 1, 3).expand(2, 4, 3), x, torch.randn(3)
    for made, tensor in zip(gradients_like(expanded, same, other), (expanded, same, other)):
        assert made.shape == tensor.shape
        made.fill_(1)
        assert made.sum() == tensor.numel()  # expanded memory would be written over


def test_gradients_come_in_the_order_of_their_tensors():
    """Of whichever memories, and one for each place of a tensor that is given twice."""
    first, second = torch.randn(2, 6).split((2, 4), dim=-1)
    other = torch.randn(3)
    for tensors in ((first, other, second), (other, second, first), (first, other, first)):
        made = gradients_like(*tensors)
        assert [grad.shape for grad in made] == [tensor.shape for tensor in tensors]
    for place, grad in enumerate(made := gradients_like(first, other, second)):
        grad.fill_(place)
    assert [grad.unique().tolist() for grad in made] == [[0], [1], [2]]


@pytest.mark.parametrize('batch', [1, 3, 40])
@pytest.mark.parametrize('shifted', [True, False])
def test_product_lays_heads_side_by_side(batch, shifted):
    x, matrix, shift = torch.randn(batch, 2, 5, 3), torch.randn(batch, 2, 3, 4), torch.randn(batch, 2, 1, 4)
    out = product(x, matrix, shift if shifted else None)
    torch.testing.assert_close(out, x @ matrix + (shift if shifted else 0))
    assert out.transpose(1, 2).is_contiguous()
    memory = torch.full((batch, 2, 5, 6), 7.0)  # a part of what somebody else has
    written = product(x, matrix, shift if shifted else None, out=memory[..., 1:5])
    assert written.data_ptr() == memory[..., 1:5].data_ptr() and (memory[..., [0, 5]] == 7).all()
    torch.testing.assert_close(memory[..., 1:5], out)


@pytest.mark.parametrize('batch', [1, 2, 40])
@every_mixer
def test_inference_that_overwrites_gives_what_training_gives(mixer, batch):
    attention = build(mixer, local_kernel=5)
    x, rotary = torch.randn(batch, 6, DIM, dtype=torch.float64), rotary_table(2, 3, DIM // HEADS, dtype=torch.float64)
    before = x.clone()
    expected = attention(x, Grid(2, 3), rotary=rotary)
    with torch.no_grad():
        torch.testing.assert_close(attention(x, Grid(2, 3), rotary=rotary), expected)
    assert torch.equal(x, before)


def test_a_block_has_so_many_numbers_for_each_thread(monkeypatch):
    monkeypatch.setattr(memory, 'BLOCK_NUMEL', 100)
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 2)

    def lengths(width, tokens, device, **options):
        return [
            len(range(tokens)[part]) for part in memory.token_blocks(width, tokens, torch.device(device), **options)
        ]

    assert lengths(10, 45, 'cpu') == [20, 20, 5] and lengths(10, 40, 'cpu') == [20, 20]
    assert lengths(10, 45, 'cpu', least=15) == [30, 15]
    assert lengths(1000, 3, 'cpu') == [1, 1, 1]
    assert lengths(1000, 45, 'cuda') == [45]
    assert lengths(10, 0, 'cpu') == lengths(10, 0, 'cuda') == []

    def parts(*shape):
        return [
            (len(range(shape[0])[images]), len(range(shape[1])[rows]))
            for images, rows in memory.blocks(torch.empty(shape))
        ]

    assert parts(3, 7, 10) == [(2, 7), (1, 7)]  # several small images
    assert parts(2, 45, 10) == [(1, 20), (1, 20), (1, 5)] * 2  # parts of one


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize('learns', [False, True])
def test_a_map_is_assembled_from_its_regions(learns, dtype):
    """Row by row; in inference each is in its place before the next is made, so that all may use one memory. The map
    has their type."""
    x = torch.arange(48, dtype=dtype).reshape(2, 4, 6, 1).requires_grad_(learns)

    def regions():
        for rows in (slice(0, 3), slice(3, 4)):
            for columns in (slice(0, 4), slice(4, 6)):
                part = x[:, rows, columns].clone()
                yield rows, columns, part
                if not learns:
                    part.fill_(-1)

    with torch.set_grad_enabled(learns):
        out = memory.assemble(x.shape, regions())
    torch.testing.assert_close(out, x)
    if learns:
        out.sum().backward()
        assert (x.grad == 1).all()


@pytest.mark.parametrize('learns', [False, True])
def test_sums_and_products_are_made_in_place_in_inference_only(learns):
    """And only where the memory holds the type of the result; never in what is not theirs."""
    x, out, factor = (torch.full((2, 3), value) for value in (1.0, 2.0, 3.0))
    with torch.set_grad_enabled(learns):
        added = ops.add(x, out)
        assert (added is out) is not learns and (added == 3).all() and (x == 1).all()
        assert learns is (out == 2).all().item()
        out = torch.full((2, 3), 2.0)
        product = ops.multiply(out, factor[:, :1])
        assert (product is out) is not learns and (product == 6).all() and (factor == 3).all()
        half = torch.full((2, 3), 2.0, dtype=torch.bfloat16)
        for result in (ops.add(x, half), ops.multiply(half, factor)):
            assert result.dtype == torch.float32 and (half == 2).all()
        fine = torch.full((2, 3), 1.001)  # no bfloat16
        assert torch.equal(elementwise_reference.multiply(half, fine), 2 * fine)


@pytest.mark.parametrize('gated', [False, True])
@pytest.mark.parametrize('reduced', [False, True])
@pytest.mark.parametrize('bias', [False, True])
@pytest.mark.parametrize('form', ['reference', 'eager', 'cpu'])
def test_projections_of_every_form(form, bias, reduced, gated):
    """GPUs get ``eager``: no other test on a CPU does. Rows of the weight: queries, keys, values, gate."""
    widths = (3, 4, 5, 6)[: 3 + gated]
    layer, x = torch.nn.Linear(7, sum(widths), bias=bias), torch.randn(2, 6, 7)
    kv = torch.randn(2, 4, 7) if reduced else None
    sources = (x, kv, kv, x) if reduced else (x,) * 4
    rows = ((0, 3), (3, 7), (7, 12), (12, 18))
    expected = [
        source @ layer.weight[a:b].T + (layer.bias[a:b] if bias else 0)
        for source, (a, b) in zip(sources, rows[: len(widths)])
    ]
    project = importlib.import_module(f'mmlinattn.ops.projection.{form}').project
    adapter = torch.nn.Sequential(layer)
    for learns in (True, False):
        for convolves in (True, False):
            for module in (layer, adapter):
                with torch.set_grad_enabled(learns):
                    found = project(module, x, widths, kv, convolves)
                torch.testing.assert_close(list(found), expected)


def memories(tensors):
    """Which of the tensors are slices of one memory, as numbers from 0."""
    starts = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [sorted(set(starts), key=starts.index).index(start) for start in starts]


@pytest.mark.parametrize(
    ('form', 'learns', 'convolves', 'reduced', 'shared'),
    [
        ('cpu', True, True, False, [0, 0, 1, 2]),
        ('cpu', False, True, False, [0, 0, 1, 2]),
        ('cpu', False, False, False, [0, 0, 0, 0]),
        ('cpu', True, True, True, [0, 1, 1, 2]),
        ('eager', True, True, False, [0, 0, 1, 1]),
        ('eager', False, False, False, [0, 0, 0, 0]),
        ('eager', False, True, True, [0, 1, 1, 2]),
    ],
)
def test_what_lies_in_one_memory(form, learns, convolves, reduced, shared):
    """Values that are convolved lie alone on CPUs; what attentions map lies apart from what autograd keeps."""
    layer, x = torch.nn.Linear(8, 32), torch.randn(2, 6, 8)
    project = importlib.import_module(f'mmlinattn.ops.projection.{form}').project
    with torch.set_grad_enabled(learns):
        parts = project(layer, x, (8, 8, 8, 8), x[:, ::2] if reduced else None, convolves)
    assert memories(parts) == shared


@pytest.mark.parametrize('missing', ['operator', 'backend'])
def test_builds_without_the_fused_operators(missing, monkeypatch):
    """They are private to PyTorch, and can be switched off."""
    x, layer, conv = torch.randn(2, 5, 6), torch.nn.Linear(6, 4), torch.nn.Conv2d(5, 4, 1)
    inputs = x, layer.weight, layer.bias
    with torch.no_grad():
        assert onednn.LINEAR is None or onednn.takes(x, layer.weight)
        assert not onednn.takes(x.double(), layer.weight) and not onednn.takes(x, layer.weight.double())
        expected = ops.linear(*inputs, gelu=True), ops.gelu_of_conv(x[..., None], conv)
        if missing == 'operator':
            monkeypatch.setattr(onednn, 'LINEAR', None)
            monkeypatch.setattr(onednn, 'CONV', None)
        with torch.backends.mkldnn.flags(enabled=missing != 'backend'):
            assert not onednn.takes(x, layer.weight)
            torch.testing.assert_close((ops.linear(*inputs, gelu=True), ops.gelu_of_conv(x[..., None], conv)), expected)


@pytest.fixture(params=[1, 40, 2 * 7 * DIM, 5000], ids='{} numbers a block'.format)
def blocks(request, monkeypatch):
    monkeypatch.setattr(memory, 'BLOCK_NUMEL', request.param)
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 1)


def compare_forms(op, leaves, **options):
    """Values and gradients of the fast form, with and without autograd, are those of the reference."""
    with ops.use('reference'):
        slow = op(*leaves, **options)
        wanted = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        probe = torch.randn_like(slow)
        expected = torch.autograd.grad((slow * probe).sum(), wanted, retain_graph=True)
    fast = op(*leaves, **options)
    assert fast.is_contiguous()
    torch.testing.assert_close(fast, slow)
    for ours, theirs in zip(torch.autograd.grad((fast * probe).sum(), wanted, retain_graph=True), expected):
        assert theirs.abs().max() > 1e-3
        torch.testing.assert_close(ours, theirs)
    v = leaves[2].clone()
    with torch.no_grad():
        scratch = [leaf.clone() if i < 2 else leaf for i, leaf in enumerate(leaves)]
        torch.testing.assert_close(op(*scratch, **options), slow)
    assert torch.equal(v, leaves[2])


def leaves_and_mask(masked, *lengths):
    """Slices of one projection where the lengths agree."""
    if len(set(lengths)) == 1:
        leaves = torch.randn(3, lengths[0], 3 * DIM, dtype=torch.float64).requires_grad_().split(DIM, dim=-1)
    else:
        leaves = [torch.randn(3, n, DIM, dtype=torch.float64, requires_grad=True) for n in lengths]
    if not masked:
        return list(leaves), None
    mask = torch.rand(3, lengths[1]) > 0.4
    mask[2] = False  # an item of padding alone
    # padded values are zero, and what reaches them goes no further
    values = (leaves[2] * mask[..., None]).detach().requires_grad_()
    values.register_hook(lambda grad: grad * mask[..., None])
    return [*leaves[:2], values], mask


@pytest.mark.parametrize('masked', [True, False], ids=['masked', ''])
@pytest.mark.parametrize('weight_scale', [None, 0.5])
@pytest.mark.parametrize('rotary', [True, False], ids=['rotary', ''])
@pytest.mark.parametrize('kernel', ['elu', 'relu', 'softmax'])
def test_rala_in_blocks_of_any_size(blocks, kernel, rotary, weight_scale, masked):
    leaves, mask = leaves_and_mask(masked, 6, 6, 6)
    table = rotary_table(2, 3, DIM // HEADS, dtype=torch.float64) if rotary else None
    compare_forms(ops.rala, [*leaves, HEADS, kernel, table, mask, weight_scale])


@pytest.mark.parametrize('masked', [True, False], ids=['masked', ''])
@pytest.mark.parametrize('power', [1, 3, 4.5, 32])
def test_focused_attention_in_blocks_of_any_size(blocks, power, masked):
    leaves, mask = leaves_and_mask(masked, 5, 7, 7)
    scale = torch.rand(DIM, dtype=torch.float64).add_(0.5).requires_grad_()
    compare_forms(ops.focused_attention, [*leaves, HEADS, scale, power], mask=mask)


@pytest.mark.parametrize('masked', [True, False], ids=['masked', ''])
@pytest.mark.parametrize('kernel', ['identity', 'relu', 'exp'])
def test_inline_attention(kernel, masked):
    leaves, mask = leaves_and_mask(masked, 5, 7, 7)
    compare_forms(ops.inline_attention, [*leaves, HEADS, 0.3, kernel, mask])


def test_products_with_a_state_keep_nothing_of_their_own():
    """Extra memory of the training step: the result, and one gradient as large as the projection."""
    tokens, made = 4096, []
    qkv = torch.randn(1, tokens, 3 * DIM, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: made.append(t) or t, lambda t: t):
        ops.inline_attention(*split(qkv, [DIM] * 3), HEADS, 1.0)
        ops.focused_attention(*split(qkv, [DIM] * 3), HEADS, torch.ones(DIM), 3)
        ops.rala(*split(qkv, [DIM] * 3), HEADS)
    large = [t for t in made if t.numel() > tokens * HEADS]
    assert len(large) == 9
    assert all(t.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr() for t in large)


@pytest.mark.parametrize('frozen', [(), (0,), (1,), (2,), (0, 2)], ids=str)
@pytest.mark.parametrize('bias', [False, True])
@pytest.mark.parametrize('kernel', [5, 9])
def test_depthwise_gradients_that_are_wanted(kernel, bias, frozen):
    leaves = [torch.randn(2, 3, 6, 7), torch.randn(3, 1, kernel, kernel), torch.randn(3) if bias else None]
    leaves = [t if t is None else t.double().requires_grad_(i not in frozen) for i, t in enumerate(leaves)]
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    outs = ops.depthwise_conv2d(*leaves), F.conv2d(*leaves, padding=kernel // 2, groups=3)
    torch.testing.assert_close(*outs)
    probe = torch.randn_like(outs[0])
    for ours, theirs in zip(*(torch.autograd.grad(out, wanted, probe) for out in outs)):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize('form', ['cpu', 'eager', 'reference'])
def test_half_precision_adds_the_input_after_the_convolution(form):
    """As a tap of the kernel, 1 + 2^-8 is 1 in bfloat16. Here the right neighbour takes the 1 away again."""
    module = importlib.import_module(f'mmlinattn.ops.depthwise.{form}')
    weight = torch.zeros(2, 1, 3, 3, dtype=torch.bfloat16)
    weight[:, 0, 1, 1:] = torch.tensor([2**-8, -1])
    x, bias = torch.ones(1, 2, 1, 2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)
    for learns in (True, False):
        with torch.set_grad_enabled(learns):
            out = module.residual_depthwise_conv2d(x, weight, bias)
        assert out.dtype == torch.bfloat16 and (out[..., 0] == 2**-8).all()


@pytest.mark.parametrize('size', [(9, 11), (1, 6), (2, 2)], ids=str)
@pytest.mark.parametrize('kernel', [3, 5, 7])
def test_depthwise_gradients_put_together(kernel, size):
    x = torch.randn(2, 4, *size, dtype=torch.float64).contiguous(memory_format=torch.channels_last).requires_grad_()
    conv = grid.DepthwiseConv2d(4, kernel).double()
    leaves = (x, conv.weight, conv.bias)
    outs = conv(x), F.conv2d(x, conv.weight, conv.bias, padding=kernel // 2, groups=4)
    torch.testing.assert_close(*outs)
    probe = torch.randn_like(outs[0])
    for ours, theirs in zip(*(torch.autograd.grad((out * probe).sum(), leaves) for out in outs)):
        torch.testing.assert_close(ours, theirs)


def test_large_kernels_train_under_autocast():
    """Of float32 images and weights, whose convolution is rounded."""
    x, weight, bias = torch.randn(1, 4, 9, 8), torch.randn(4, 1, 5, 5), torch.randn(4)
    inputs = [t.requires_grad_() for t in (x, weight, bias)]
    grad = torch.randn(1, 4, 9, 8)
    with torch.autocast('cpu', torch.bfloat16):
        out = ops.depthwise_conv2d(*inputs)
    assert out.dtype == torch.bfloat16
    found = torch.autograd.grad(out, inputs, grad.bfloat16())
    expected = torch.autograd.grad(F.conv2d(x, weight, bias, padding=2, groups=4), inputs, grad)
    for ours, theirs in zip(found, expected):
        assert ours.dtype == torch.float32 and (ours - theirs).norm() < 0.02 * theirs.norm()


@pytest.mark.parametrize('kernel_dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
def test_predicted_kernels_under_autocast(dtype, kernel_dtype):
    """As of any convolution, maps and kernels may differ in their types, and what comes out is of autocast's."""
    x, kernels = torch.randn(2, 4, 9, 8), torch.randn(2, 4, 3, 3)
    each = [F.conv2d(x[i : i + 1], kernels[i, :, None], padding=1, groups=4) for i in range(2)]
    with torch.autocast('cpu', torch.bfloat16):
        out = ops.predicted_conv2d(x.to(dtype), kernels.to(kernel_dtype))
    assert out.dtype == torch.bfloat16
    assert (out - torch.cat(each)).norm() < 0.02 * torch.cat(each).norm()


def test_split_under_transforms():
    x = torch.randn(2, 6)
    found = torch.func.grad(lambda t: split(t, (2, 4))[0].square().sum())(x)
    torch.testing.assert_close(found, F.pad(2 * x[:, :2], (0, 4)))
    with ops.use('reference'):
        assert type(split(x.requires_grad_(), (2, 4))[0].grad_fn).__name__ == 'SplitWithSizesBackward0'
