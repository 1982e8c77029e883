# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""MMCV's operators by torchvision and PyTorch, on CPU and GPU, beside compiled MMCV's results and definitions."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from helpers import cases
from launches import launches
from mmcv import ops
from mmcv.ops import multi_scale_deform_attn as attention

RECORDS = np.load(cases.RECORDS)
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')


@pytest.fixture(autouse=True, params=['cpu', pytest.param('cuda', marks=GPU)])
def device(request):
    with torch.device(request.param), torch.backends.cudnn.flags(allow_tf32=False):
        yield request.param


def assert_close(result, expected, tolerance=1e-5):
    assert result.shape == expected.shape and result.dtype == expected.dtype
    assert (result - expected).abs().max() <= tolerance * expected.abs().max()


def assert_same(ours, theirs, *inputs, tolerance=1e-5):
    pairs = zip(*(cases.with_gradients(function, *inputs) for function in (ours, theirs)))
    for result, expected in pairs:
        assert_close(result, expected, tolerance)


@pytest.mark.parametrize('name', cases.make_cases())
def test_results_are_those_of_compiled_mmcv(name):
    result, expected = cases.summary(cases.make_cases()[name]()), RECORDS[name]
    assert result.shape == expected.shape
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=2e-5 * np.abs(expected).max(initial=0))


def test_two_boxes_without_area_suppress_nothing():
    """Keep both boxes: their overlap is 0 / 0, and NaN exceeds no threshold."""
    dets = torch.tensor([[0, 0, 0, 0, 0.9], [5, 5, 5, 5, 0.8], [5, 5, 5, 5, 0.7], [0, 0, 4, 4, 0.6], [4, 4, 8, 8, 0.5]])
    # with one area, an overlap of 0 is the threshold
    assert [[int(i) for i in group] for group in ops.nms_match(dets.cpu(), 0.0)] == [[0, 3, 4], [1], [2]]
    for method in ('naive', 'linear'):
        found = ops.soft_nms(dets[:3, :4].contiguous(), dets[:3, 4].contiguous(), 0.0, 0.5, 0.1, method)
        assert torch.equal(found[0], dets[:3])
    assert ops.nms(dets[:3, :4].contiguous(), dets[:3, 4].contiguous(), 0.0)[1].tolist() == [0, 1, 2]
    boxes, scores = torch.tensor([[1.0, 1, 1, 1], [1, 1, 1, 1], [5, 5, 9, 9]]), torch.tensor([0.9, 0.8, 0.7])
    found, kept = ops.soft_nms(boxes, scores, method='gaussian')
    assert torch.equal(found[:, 4], scores) and kept.tolist() == [0, 1, 2]


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_lower_precision(dtype):
    """Keep the boxes that float32 keeps. Pooled and sampled values are close to float32 on average."""
    boxes, scores = (tensor.to(dtype) for tensor in cases.boxes(1, 200))
    kept = ops.nms(boxes, scores, 0.5)[1]
    assert torch.equal(kept, ops.nms(boxes.float(), scores.float(), 0.5)[1]) and 0 < len(kept) < 200
    x, rois = cases.normal(1, 2, 3, 25, 38).to(dtype), cases.rois(2, 5).to(dtype)
    pairs = []
    for mode in ('avg', 'max'):
        half = cases.with_gradients(lambda x, mode=mode: ops.roi_align(x, rois, 3, 0.25, 2, mode), x)
        full = cases.with_gradients(lambda x, mode=mode: ops.roi_align(x, rois.float(), 3, 0.25, 2, mode), x.float())
        pairs += zip(half, full)
    for modulated in (False, True):
        settings = modulated, 1, 2, 1, 1, 1, (3, 3)
        pairs += zip(cases.convolution(*settings, dtype=dtype), cases.convolution(*settings))
    for half, full in pairs:
        assert half.dtype == dtype and (half.float() - full).norm() < 0.1 * full.norm()


def test_roi_align_refuses_a_box_that_ends_before_it_starts(device):
    if device == 'cuda':
        pytest.skip('there it would wait for the GPU')
    with pytest.raises(ValueError, match='x1 <= x2'):
        ops.roi_align(torch.zeros(1, 1, 8, 8), torch.tensor([[0.0, 5, 1, 2, 3]]), 2)


@pytest.mark.parametrize('kernel', [(3, 3), (3, 1)])
def test_gradients_of_channels_last_offsets_and_masks(kernel):
    """Take offsets and masks in the memory format that convolutions of channels-last maps give."""
    taps = kernel[0] * kernel[1]
    x, offset, mask = (cases.normal(i, 2, c, 7, 9) for i, c in enumerate((4, 2 * taps, taps)))
    weight, padding = cases.normal(3, 5, 4, *kernel), [size // 2 for size in kernel]
    found = []
    for memory in (torch.contiguous_format, torch.channels_last):
        leaves = [t.to(memory_format=memory).requires_grad_() for t in (x, offset, mask)]
        out = ops.modulated_deform_conv2d(*leaves, weight, None, 1, padding)
        found.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
    assert all(tensor.abs().max() > 0 for tensor in found[0])
    torch.testing.assert_close(*found)


def test_several_backward_passes_without_input_gradient():
    x, offset, weight = cases.normal(1, 2, 4, 6, 6), cases.normal(2, 2, 18, 6, 6), cases.normal(3, 4, 4, 3, 3)
    out = ops.deform_conv2d(x, offset, weight.requires_grad_(), 1, 1).sum()
    one, two = (torch.autograd.grad(out * scale, weight, retain_graph=True)[0] for scale in (1, 2))
    torch.testing.assert_close(two, 2 * one)
    ops.deform_conv2d(x.requires_grad_(), offset, weight, 1, 1).sum().backward()
    assert torch.equal(one, weight.grad)


def pooled(x, rois, size, scale):
    output = x.new_zeros(len(rois), x.shape[1], size, size)
    for n, (image, *box) in enumerate(rois.tolist()):
        x1, y1, x2, y2 = box[0] * scale, box[1] * scale, (box[2] + 1) * scale, (box[3] + 1) * scale
        for i in range(size):
            for j in range(size):
                top, bottom = (y1 + (i + k) * (y2 - y1) / size for k in (0, 1))
                left, right = (x1 + (j + k) * (x2 - x1) / size for k in (0, 1))
                rows = slice(max(int(np.floor(top)), 0), max(int(np.ceil(bottom)), 0))
                columns = slice(max(int(np.floor(left)), 0), max(int(np.ceil(right)), 0))
                part = x[int(image), :, rows, columns].flatten(1)
                if part.shape[1] and x2 > x1 and y2 > y1:
                    output[n, :, i, j] = part.amax(1)
    return output


def test_roi_pool_is_its_definition():
    x, rois = cases.normal(1, 2, 3, 25, 38).double(), cases.rois(2, 6).double()
    rois[1, 3] = rois[1, 1] - 3
    assert_same(lambda x: ops.roi_pool(x, rois, 3, 0.25), lambda x: pooled(x, rois, 3, 0.25), x, tolerance=1e-12)
    assert ops.roi_pool(x, rois[:0], 3, 0.25).shape == (0, 3, 3, 3)


@pytest.mark.parametrize('weight', [None, torch.tensor([1.0, 2, 3, 4]).double()])
def test_focal_losses_are_their_definitions(weight, device):
    """Give background no weight, and backpropagate the softmax loss as a sum."""
    weight = weight if weight is None else weight.to(device)
    x, target = cases.normal(1, 6, 4).double() * 3, torch.tensor([0, 1, 2, 3, 4, 4])
    own = F.one_hot(target, 5)[:, :4].double()
    rows = torch.cat((torch.ones(4).double() if weight is None else weight, torch.ones(2).double()))

    def sigmoid(x):
        return torchvision.ops.sigmoid_focal_loss(x, own, 0.25, 2.0) * rows[:, None]

    def softmax(x):
        p = x[:4].softmax(1)[range(4), range(4)]
        return torch.cat((-0.25 * rows[:4] * (1 - p) ** 2 * p.log(), p.new_zeros(2)))

    for ours, plain, classes in (
        (ops.sigmoid_focal_loss, sigmoid, target),
        (ops.softmax_focal_loss, softmax, torch.where(target == 4, -1, target)),
    ):
        assert_close(ours(x, classes, 2.0, 0.25, weight, 'none'), plain(x), 1e-12)
        options = classes, 2.0, 0.25, weight, 'sum'
        assert_same(lambda x: ours(x, *options), lambda x: plain(x).sum(), x, tolerance=1e-12)  # noqa: B023
    assert ops.sigmoid_focal_loss(x[:0], target[:0], 2.0, 0.25, None, 'none').shape == (0, 4)


@pytest.mark.parametrize('scale, groups', [(1, 1), (2, 2), (3, 1)])
def test_carafe_is_its_definition(scale, groups):
    inputs = cases.normal(1, 2, 4, 5, 3), cases.uniform(2, 2, 9 * groups, 5 * scale, 3 * scale)

    def by_hand(x, masks):
        windows = F.unfold(x, 3, padding=1).view(2, groups, 4 // groups, 9, 5, 3)
        windows = windows.repeat_interleave(scale, 4).repeat_interleave(scale, 5)
        return (windows * masks.view(2, groups, 1, 9, 5 * scale, 3 * scale)).sum(3).flatten(1, 2)

    assert_same(lambda *inputs: ops.carafe(*inputs, 3, groups, scale), by_hand, *inputs)
    assert_close(ops.CARAFENaive(3, groups, scale)(*inputs), by_hand(*inputs))


@pytest.mark.parametrize('kernel, padding', [(1, 0), ((3, 5), (1, 2))])
def test_masked_convolution_is_the_convolution_at_the_mask(kernel, padding):
    layer, x, mask = ops.MaskedConv2d(3, 4, kernel, padding=padding), cases.normal(1, 1, 3, 7, 8), torch.zeros(1, 7, 8)
    mask[0, [0, 3, 6], [7, 2, 0]] = 1
    assert_close(layer(x, mask), layer(x) * mask)
    assert not layer(x, torch.zeros_like(mask)).any()


@pytest.fixture(params=['rows', 'levels'])
def form(request, ext, monkeypatch):
    """Choose deformable attention by rows (CPUs, deterministic algorithms) or by levels (other devices)."""
    monkeypatch.setattr(ext, '_takes_rows', lambda value: request.param == 'rows')


def deformable_attention():
    shapes, starts = torch.tensor([[20, 30], [10, 15], [5, 8], [3, 4]]), torch.tensor([0, 600, 750, 790])
    locations = cases.uniform(2, 2, 50, 2, 4, 4, 2) * 1.4 - 0.2

    def run(value, at, weights):
        return attention.MultiScaleDeformableAttnFunction.apply(value, shapes, starts, at, weights, 64)

    return run, shapes, cases.normal(1, 2, 802, 2, 4), locations, cases.uniform(3, 2, 50, 2, 4, 4)


@pytest.mark.usefixtures('form')
def test_deformable_attention_is_that_of_mmcv_on_cpus():
    ours, shapes, value, locations, weights = deformable_attention()

    def theirs(value, at, weights):
        return attention.multi_scale_deformable_attn_pytorch(value, shapes, at, weights)

    assert_same(ours, theirs, value, locations, weights)
    nothing = value.requires_grad_(), locations[:, :0], weights[:, :0]
    assert ours(*nothing).shape == (2, 0, 8)
    assert not torch.autograd.grad(ours(*nothing).sum(), value)[0].any()


@pytest.mark.usefixtures('form')
def test_shapes_that_change_in_place():
    shapes, starts = torch.tensor([[4, 6]]), torch.tensor([0])
    value, weights = cases.normal(1, 1, 24, 1, 2), torch.ones(1, 1, 1, 1, 1)
    locations = torch.full((1, 1, 1, 1, 1, 2), 0.3)
    found = []
    for height, width in ((4, 6), (6, 4)):
        shapes.copy_(torch.tensor([[height, width]]))
        found.append(attention.MultiScaleDeformableAttnFunction.apply(value, shapes, starts, locations, weights, 64))
        expected = attention.multi_scale_deformable_attn_pytorch(value, shapes, locations, weights)
        torch.testing.assert_close(found[-1], expected)
    with torch.inference_mode():
        again = attention.MultiScaleDeformableAttnFunction.apply(value, shapes.clone(), starts, locations, weights, 64)
    assert torch.equal(again, found[1]) and not torch.equal(*found)


def focal_loss():
    target = torch.arange(90) % 6  # the last is background
    return lambda x: ops.sigmoid_focal_loss(x, target, 2.0, 0.25, None, 'none'), cases.normal(1, 90, 5)


def carafe():
    return lambda x, masks: ops.carafe(x, masks, 5, 1, 2), cases.normal(1, 2, 8, 6, 7), cases.uniform(2, 2, 25, 12, 14)


@pytest.mark.parametrize(
    'make, forward, backward', [(deformable_attention, 20, 41), (focal_loss, 8, 10), (carafe, 10, 18)]
)
def test_kernels_that_a_gpu_starts(ext, monkeypatch, make, forward, backward):
    """Count at most the kernels of compiled MMCV, including its zero fills, a copy and a product."""
    monkeypatch.setattr(ext, '_takes_rows', lambda value: False)
    run, *tensors = make()
    leaves = [tensor.requires_grad_() for tensor in tensors if tensor.is_floating_point()]
    gradient = torch.ones_like(run(*leaves))  # fills the caches
    assert launches(run, *leaves) <= forward
    result = run(*leaves)
    assert launches(torch.autograd.grad, result, leaves, gradient) <= backward


def test_carafe_is_not_computed_in_lower_precision_by_autocast(device):
    run, *tensors = carafe()
    expected = cases.with_gradients(run, *tensors)
    with torch.autocast(device, torch.bfloat16):
        found = cases.with_gradients(run, *tensors)
    for result, reference in zip(found, expected):
        assert_close(result, reference)


def test_offsets_of_a_map_larger_than_the_output():
    """Read the first values in memory for each pixel of the output, as compiled MMCV does for DyHead."""
    x, weight, small = torch.randn(2, 4, 5, 6), torch.randn(6, 4, 3, 3), torch.randn(2, 18, 5, 6)
    large, masks = torch.randn(2, 18, 10, 12), torch.rand(2, 9, 10, 12)
    large.flatten(1)[:, : 18 * 30] = small.flatten(1)
    fitting = masks.flatten(1)[:, : 9 * 30].reshape(2, 9, 5, 6)
    found = []
    for offset, mask in ((small, fitting), (large, masks)):
        leaf = offset.clone().requires_grad_()
        out = ops.modulated_deform_conv2d(x, leaf, mask, weight, None, 1, 1)
        found.append((out, *torch.autograd.grad(out.sin().sum(), leaf)))
    (expected, gradient), (out, whole) = found
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(whole.flatten(1)[:, : 18 * 30], gradient.flatten(1))
    assert not whole.flatten(1)[:, 18 * 30 :].any()
