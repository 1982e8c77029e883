# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Replacement of MMCV's compiled module by torchvision and PyTorch.

Names and arguments are those of MMCV's C++ and CUDA module, as ``mmcv.ops`` calls it. Most functions fill tensors
that the caller allocates. Python imports a compiled ``mmcv/_ext.*.so`` beside this file first. float16 and bfloat16
are computed in float32, as in torchvision under autocast.
"""

import contextlib
import functools
import sys

import numpy as np
import torch
import torch.nn.functional as F
import torchvision

KERNELS = torch.ops.torchvision
COMPILE = 'bash tools/setup_env.sh --compiled'
TINY = torch.finfo(torch.float32).tiny
HEAD, WIDTH = 255, 128  # boxes of a block of NMS
ROTATED_PAIRS = 2**17


def __getattr__(name: str):
    """Return a function that raises ``NotImplementedError``, for every operator missing below."""
    if name.startswith('__'):
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')

    def missing(*args, **kwargs):
        raise NotImplementedError(
            f"MMCV's operator {name}, asked for by {_asker()}, is only in compiled MMCV, which is not installed; "
            f'compile it: {COMPILE}'
        )

    missing.__name__ = name
    return missing


def _asker() -> str:
    """Return file and line of the innermost caller outside MMCV and PyTorch, else of the innermost one."""
    frame = caller = sys._getframe(2)
    while frame is not None and frame.f_globals.get('__name__', '').split('.')[0] in ('mmcv', 'torch'):
        frame = frame.f_back
    frame = frame or caller
    return f'{frame.f_code.co_filename}:{frame.f_lineno}'


def _wide(*tensors):
    """Return the tensors in float32, float64 ones unchanged."""
    return [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]


def _without_autocast(device):
    """Keep autocast, where a device has it, from products in lower precision."""
    has_it = torch.amp.is_autocast_available(device)
    return torch.autocast(device, enabled=False) if has_it else contextlib.nullcontext()


def _gradients(function, inputs, grad_output):
    """Return the gradients of ``function(*inputs)`` for each input, by autograd."""
    with torch.enable_grad():
        inputs = [tensor.detach().requires_grad_() for tensor in inputs]
        return torch.autograd.grad(function(*inputs), inputs, grad_output)


# --- versions: the lines "MMCV Compiler" and "MMCV CUDA Compiler" of collect_env ---


def get_compiler_version() -> str:
    return f'none: torchvision {torchvision.__version__} and PyTorch {torch.__version__} run its operators'


def get_compiling_cuda_version() -> str:
    return f'none: PyTorch of CUDA {torch.version.cuda}' if torch.version.cuda else 'not available'


# --- non-maximum suppression: keep the best box, drop its overlapping boxes, repeat ---


def nms(boxes, scores, iou_threshold, offset):
    """Return the indices of the kept boxes, best score first.

    CUDA tensors go to torchvision, with the boxes widened by the offset. On CPUs the best remaining boxes
    are compared with each other and then with the rest, in blocks. This is faster than torchvision's loop and rounds
    like MMCV. PyTorch runs an operator of fewer than 32768 numbers by the calling thread alone. Blocks are smaller
    than that, because threads that wait for each other in such short steps are slow on a busy machine.
    """
    boxes, scores = _wide(boxes, scores)
    if boxes.is_cuda:
        return torchvision.ops.nms(torch.cat((boxes[:, :2], boxes[:, 2:] + offset), dim=1), scores, iou_threshold)
    order, kept = scores.sort(descending=True).indices, []  # unstable as MMCV's: equal scores come in the same order
    low, high = boxes[order].T.contiguous().split(2)
    size = high - low + offset
    area = size[:1] * size[1:]
    # A box without a finite area overlaps nothing. This replacement has no overlap either, and gives no NaN.
    nothing = boxes.new_tensor([[0.0], [0.0], [-2.0], [-2.0], [1.0]])
    left = torch.where((area > 0) & (area < torch.inf), torch.cat((low, high, area)), nothing)
    while len(order):
        head, rest = left[:, :HEAD], left[:, HEAD:]
        above = (_overlaps(head, head, offset) - iou_threshold).relu_().triu_(1)
        stays, before = torch.ones_like(head[0]), None
        while before is None or not torch.equal(stays, before):  # each turn settles one box more at least
            stays, before = (stays @ above == 0).to(head.dtype), stays
        stays = stays.bool()
        kept.append(order[:HEAD][stays])
        head = head[:, stays]
        worst = [_overlaps(head, part, offset).amax(0) for part in rest.split(WIDTH, dim=1)]
        alive = torch.cat(worst) <= iou_threshold
        left, order = rest[:, alive], order[HEAD:][alive]
    return torch.cat(kept) if kept else order


def _overlaps(a, b, offset):
    """Return intersection over union (N, M) of boxes (5, N) and (5, M), with rows x1, y1, x2, y2 and area."""
    a = a.unsqueeze(2)
    common, height = (torch.minimum(a[i], b[i]).sub_(torch.maximum(a[i - 2], b[i - 2])) for i in (2, 3))
    if offset:
        common.add_(offset)
        height.add_(offset)
    common.clamp_(min=0).mul_(height.clamp_(min=0))
    return common.div_((a[4] + b[4]).sub_(common))


def _overlap(box, others, offset):
    """Return the same for one box (5,) and others (5, N), NaN for two boxes without area as in MMCV."""
    width = np.maximum(np.minimum(box[2], others[2]) - np.maximum(box[0], others[0]) + offset, 0)
    height = np.maximum(np.minimum(box[3], others[3]) - np.maximum(box[1], others[1]) + offset, 0)
    common = width * height
    union = box[4] + others[4] - common
    return np.divide(common, union, out=np.full_like(union, np.nan), where=union != 0)


def softnms(boxes, scores, dets, iou_threshold, sigma, min_score, method, offset):
    """Soft-NMS (https://arxiv.org/abs/1704.04503): lower the scores of overlapping boxes.

    ``method`` 0 sets them to zero, 1 lowers them linearly, 2 by a Gaussian. Tensors are on the CPU. ``dets`` (N, 5)
    gets boxes and new scores; the indices of its first rows are returned.
    """
    boxes, scores = (tensor.numpy() for tensor in _wide(boxes.detach(), scores.detach()))
    x1, y1, x2, y2 = boxes.T
    left = np.stack((x1, y1, x2, y2, (x2 - x1 + offset) * (y2 - y1 + offset), scores))
    indices, first, end = np.arange(len(scores)), 0, len(scores)
    while first < end:
        best = first + left[5, first:end].argmax()
        left[:, [first, best]], indices[[first, best]] = left[:, [best, first]], indices[[best, first]]
        first += 1
        others = left[:, first:end]
        overlap = _overlap(left[:, first - 1], others, offset)
        if method == 2:
            overlap = np.nan_to_num(overlap)
            others[5] *= np.exp((-(overlap * overlap) / sigma).astype(np.float64)).astype(left.dtype)
        else:
            others[5] *= np.where(overlap >= iou_threshold, 1 - overlap if method == 1 else 0, 1)
        goes = others[5] < min_score
        if goes.any():
            # The last boxes replace the dropped ones, as in MMCV: the order decides between equal scores.
            end -= np.count_nonzero(goes)
            gaps = first + np.flatnonzero(goes[: end - first])
            fillers = end + np.flatnonzero(~goes[end - first :])[::-1]
            left[:, gaps], indices[gaps] = left[:, fillers], indices[fillers]
    dets[:end] = torch.from_numpy(left[[0, 1, 2, 3, 5], :end].T)
    return torch.from_numpy(indices[:end])


def nms_match(dets, iou_threshold):
    """Return a list of indices for each kept box: itself, then the boxes it suppresses, best score first.

    ``dets`` (N, 5) has boxes and scores, on the CPU. Unlike in :func:`nms`, an overlap equal to the threshold
    suppresses.
    """
    (dets,) = _wide(dets)
    order = dets[:, 4].sort(descending=True).indices.numpy()
    x1, y1, x2, y2 = dets[:, :4].numpy()[order].T
    left, matched = np.stack((x1, y1, x2, y2, (x2 - x1) * (y2 - y1))), []
    while len(order):
        goes = _overlap(left[:, 0], left, 0) >= np.asarray(iou_threshold, left.dtype)
        goes[0] = True
        matched.append([order[0], *order[1:][goes[1:]]])
        left, order = left[:, ~goes], order[~goes]
    return [[int(index) for index in group] for group in matched]


# --- rotated boxes (x, y, w, h, angle): centre, size, and radians, clockwise in the image ---


def _rotated_common(a, b):
    """Return the area of intersection (...) of rotated boxes (..., 5), by Green's theorem.

    In the frame of ``b``, clamping to ``b`` maps the outline of ``a`` to a closed curve around the intersection. The
    area is the integral of clamped y over clamped x, exact for each edge and continuous in both boxes.
    """
    half = b[..., 2:4].abs() / 2
    width, height = half[..., :1], half[..., 1:]
    shift, turn = a[..., :2] - b[..., :2], a[..., 4] - b[..., 4]
    cos, sin = b[..., 4].cos(), b[..., 4].sin()
    x = (shift[..., 0] * cos + shift[..., 1] * sin).unsqueeze(-1)
    y = (shift[..., 1] * cos - shift[..., 0] * sin).unsqueeze(-1)
    cos, sin = turn.cos().unsqueeze(-1), turn.sin().unsqueeze(-1)
    right, down = a[..., 2:3] / 2 * a.new_tensor([-1, 1, 1, -1]), a[..., 3:4] / 2 * a.new_tensor([-1, -1, 1, 1])
    x, y = x + right * cos - down * sin, y + right * sin + down * cos
    step_x, step_y = x.roll(-1, -1) - x, y.roll(-1, -1) - y
    start, end = (torch.minimum(torch.maximum(end, -width), width) for end in (x, x + step_x))
    length = torch.where(step_x == 0, 1, step_x)
    ends = [y + ((end - x) / length).clamp(0, 1) * step_y for end in (start, end)]
    low, high = torch.minimum(*ends), torch.maximum(*ends)
    inner_low, inner_high = (torch.minimum(torch.maximum(end, -height), height) for end in (low, high))
    below = (torch.minimum(high, -height) - low).clamp(min=0)
    above = (high - torch.maximum(low, height)).clamp(min=0)
    total = (inner_high - inner_low) * (inner_high + inner_low) / 2 + height * (above - below)
    mean = torch.where(high > low, total / torch.where(high > low, high - low, 1), inner_low)
    return (mean * (end - start)).sum(-1).abs()


def _rotated_overlaps(a, b, mode_flag=0):
    """Return intersection over union (mode 0) or over the area of ``a`` (mode 1), 0 for a box without area."""
    reach = (a[..., 2:4].norm(dim=-1) + b[..., 2:4].norm(dim=-1)) / 2
    near = (a[..., :2] - b[..., :2]).norm(dim=-1) <= reach  # most pairs are apart: their circles do not meet
    overlaps = torch.zeros_like(reach)
    a, b = (box[near] for box in torch.broadcast_tensors(a, b))
    common, areas = _rotated_common(a, b), [box[..., 2] * box[..., 3] for box in (a, b)]
    base = areas[0] if mode_flag else areas[0] + areas[1] - common
    overlaps[near] = torch.where(torch.minimum(*areas) < 1e-14, 0, common / base)
    return overlaps


def box_iou_rotated(boxes1, boxes2, ious, mode_flag, aligned):
    """Fill ``ious``: (N,) of aligned boxes (N, 5), else (N * M,) of boxes (N, 5) and (M, 5)."""
    boxes1, boxes2 = boxes1.double(), boxes2.double()
    if aligned:
        ious.copy_(_rotated_overlaps(boxes1, boxes2, mode_flag))
        return
    rows = max(ROTATED_PAIRS // max(len(boxes2), 1), 1)  # bounds the memory
    for part, result in zip(boxes1.split(rows), ious.view(len(boxes1), len(boxes2)).split(rows)):
        result.copy_(_rotated_overlaps(part[:, None], boxes2, mode_flag))


def nms_rotated(dets, scores, order, dets_sorted, labels, iou_threshold, multi_label):
    """Return the indices of the kept boxes, best score first.

    As in MMCV's kernels, labels do not separate boxes. An overlap equal to the threshold suppresses on CPUs only.
    """
    boxes, kept = dets_sorted[:, :5].double(), []
    suppresses = torch.gt if dets.is_cuda else torch.ge
    while len(boxes):
        kept.append(order[:1])
        stays = ~suppresses(_rotated_overlaps(boxes[:1], boxes[1:]).to(_wide(scores)[0].dtype), iou_threshold)
        boxes, order = boxes[1:][stays], order[1:][stays]
    return torch.cat(kept) if kept else order


# --- RoIAlign ---


def roi_align_forward(
    input,
    rois,
    output,
    argmax_y,
    argmax_x,
    aligned_height,
    aligned_width,
    spatial_scale,
    sampling_ratio,
    pool_mode,
    aligned,
):
    """Mean (``pool_mode`` 1) by torchvision; maximum (0) of torchvision's means of one sample each."""
    input, rois = _wide(input, rois)
    if aligned and not rois.is_cuda and not (rois[:, 3:] >= rois[:, 1:3]).all():
        raise ValueError('roi_align: rois must be (index, x1, y1, x2, y2) with x1 <= x2 and y1 <= y2')
    if pool_mode == 1:
        result = KERNELS.roi_align(input, rois, spatial_scale, aligned_height, aligned_width, sampling_ratio, aligned)
        output.copy_(result)
        return
    start = rois[:, [2, 1]] * spatial_scale - 0.5 * aligned
    size = rois[:, [4, 3]] * spatial_scale - 0.5 * aligned - start
    bins = (size if aligned else size.clamp(min=1)) / rois.new_tensor([aligned_height, aligned_width])
    samples = torch.full_like(bins, sampling_ratio) if sampling_ratio > 0 else bins.ceil()
    # values of boxes without a sample, as in MMCV
    output.fill_(-10000), argmax_y.fill_(-1), argmax_x.fill_(-1)
    for down, right in samples.unique(dim=0).int().tolist():
        if min(down, right) < 1:
            continue
        chosen = (samples == samples.new_tensor([down, right])).all(dim=1).nonzero()[:, 0]
        height, width = aligned_height * down, aligned_width * right
        for part in chosen.split(max(1, 2**24 // (input.shape[1] * height * width))):
            each = KERNELS.roi_align(input, rois[part], spatial_scale, height, width, 1, aligned)
            best, where = F.max_pool2d(each, (down, right), return_indices=True)
            origin, step = (tensor[part, :, None, None, None].unbind(1) for tensor in (start, bins))
            output[part] = best.to(output.dtype)
            argmax_y[part] = (origin[0] + (where // width + 0.5) * step[0] / down).to(output.dtype)
            argmax_x[part] = (origin[1] + (where % width + 0.5) * step[1] / right).to(output.dtype)


def roi_align_backward(
    grad_output,
    rois,
    argmax_y,
    argmax_x,
    grad_input,
    aligned_height,
    aligned_width,
    spatial_scale,
    sampling_ratio,
    pool_mode,
    aligned,
):
    grad_output, rois, y, x = _wide(grad_output, rois, argmax_y, argmax_x)
    images, channels, height, width = grad_input.shape
    if pool_mode == 1:
        result = KERNELS._roi_align_backward(
            grad_output,
            rois,
            spatial_scale,
            aligned_height,
            aligned_width,
            images,
            channels,
            height,
            width,
            sampling_ratio,
            aligned,
        )
        grad_input.copy_(result)
        return
    # The four neighbours of the sample that was the maximum.
    pooled = (y != -1) & (y >= -1) & (y <= height) & (x >= -1) & (x <= width)
    grad_output = grad_output * pooled
    y, x = y.clamp(0, height - 1), x.clamp(0, width - 1)
    top, left = y.floor(), x.floor()
    plane = rois[:, 0].long()[:, None] * channels + torch.arange(channels, device=rois.device)
    result = grad_output.new_zeros(grad_input.numel())
    for row, down in ((top, 1 - (y - top)), ((top + 1).clamp(max=height - 1), y - top)):
        for column, right in ((left, 1 - (x - left)), ((left + 1).clamp(max=width - 1), x - left)):
            index = plane[:, :, None, None] * (height * width) + row.long() * width + column.long()
            result.index_add_(0, index.flatten(), (grad_output * down * right).flatten())
    grad_input.copy_(result.view_as(grad_input))


# --- RoI pooling ---


def roi_pool_forward(input, rois, output, argmax, pooled_height, pooled_width, spatial_scale):
    """Return the maximum of each bin, with borders rounded outwards.

    torchvision rounds the box first. Its kernel therefore gets each bin as a box of whole numbers. An empty bin gives 0
    and no gradient.
    """
    input, rois = _wide(input, rois)
    borders, valid = [], True
    for first, last, count, limit in ((1, 3, pooled_width, input.shape[3]), (2, 4, pooled_height, input.shape[2])):
        start = rois[:, first, None] * spatial_scale
        size = (rois[:, last, None] + 1) * spatial_scale - start
        steps = torch.arange(count + 1, device=rois.device) * (size / count) + start
        borders.append((steps[:, :-1].floor().clamp(0, limit), steps[:, 1:].ceil().clamp(0, limit)))
        valid = valid & (size > 0)
    (left, right), (top, bottom) = borders
    bins = torch.stack(
        torch.broadcast_tensors(
            rois[:, 0, None, None], left[:, None], top[:, :, None], right[:, None] - 1, bottom[:, :, None] - 1
        ),
        dim=-1,
    )
    filled = valid[:, None] & (right > left)[:, None] & (bottom > top)[:, :, None]
    best, where = KERNELS.roi_pool(input, bins.flatten(0, 2), 1.0, 1, 1)
    best, where = (t.view(*bins.shape[:3], input.shape[1]).permute(0, 3, 1, 2) for t in (best, where))
    output.copy_(best.masked_fill(~filled[:, None], 0))
    argmax.copy_(where.masked_fill(~filled[:, None], -1))


def roi_pool_backward(grad_output, rois, argmax, grad_input, pooled_height, pooled_width, spatial_scale):
    grad_output, rois = _wide(grad_output, rois)
    result = KERNELS._roi_pool_backward(
        grad_output.contiguous(), rois, argmax, spatial_scale, pooled_height, pooled_width, *grad_input.shape
    )
    grad_input.copy_(result)


# --- focal loss (https://arxiv.org/abs/1708.02002), without the reduction ---


@functools.lru_cache(maxsize=32)
def _constants(classes, gamma, dtype, device):
    """Return class indices, 0 and 1 / gamma on a device; made anew they would be three launches a call."""
    return (
        torch.arange(classes, device=device),
        torch.zeros((), dtype=dtype, device=device),
        torch.tensor(1 / (gamma or 1.0), dtype=dtype, device=device),
    )


def _focal_terms(input, target, gamma):
    """Return softplus(z), sigmoid(z), the mask of the target's class, and constants.

    z is the logit, with the other sign for the target's class: a loss is ``factor * sigmoid(z)**gamma * softplus(z)``.
    """
    (logits,) = _wide(input)
    classes, *constants = _constants(logits.shape[1], gamma, logits.dtype, logits.device)
    positive = target[:, None] == classes
    z = torch.addcmul(logits, logits, positive, value=-2)
    return F.softplus(z, 1.0, 40.0), torch.sigmoid(z), positive, *constants  # above 40 it is z, in float64 as well


def _write_focal(result, zero, power, term, positive, target, weight, factors):
    """Write the product of ``power``, ``term``, the factor of each entry (others, target's class) and the weights."""
    others, own = factors
    others = others or 2.0**-60  # own is divided by it
    product = torch.addcmul(zero, power, term, value=others)
    if weight.numel():  # target C is background of weight 1
        product = product * F.pad(weight.to(product.dtype), (0, 1), value=1.0)[target][:, None]
    is_same = result.dtype == product.dtype
    scaled = torch.addcmul(product, product, positive, value=own / others - 1, out=result if is_same else None)
    if not is_same:
        result.copy_(scaled)


def sigmoid_focal_loss_forward(input, target, weight, output, gamma, alpha):
    """Logits (N, C), classes (N,), weights of classes (C,) or none, to losses (N, C)."""
    softplus, p, positive, zero, _ = _focal_terms(input, target, gamma)
    _write_focal(output, zero, p.pow_(gamma), softplus, positive, target, weight, (1 - alpha, alpha))


def sigmoid_focal_loss_backward(input, target, weight, grad_input, gamma, alpha):
    """The derivative by z is ``factor * p**gamma * (gamma * (1 - p) * softplus(z) + p)`` with p = sigmoid(z)."""
    softplus, p, positive, zero, inverse = _focal_terms(input, target, gamma)
    slope = softplus.lerp_(inverse, p) if gamma else p.clone()
    factors = (1 - alpha) * (gamma or 1.0), -alpha * (gamma or 1.0)
    _write_focal(grad_input, zero, p.pow_(gamma), slope, positive, target, weight, factors)


def _softmax_focal(softmax, target, weight, alpha):
    """Return the target's probability, one minus it, and alpha times its weight; a negative target has no loss."""
    p = softmax.gather(1, target.clamp(min=0)[:, None])[:, 0]
    factor = alpha * (target >= 0).to(p.dtype)
    if weight.numel():
        factor = factor * weight.to(p.dtype)[target.clamp(min=0)]
    return p, (1 - p).clamp(min=TINY), factor


def softmax_focal_loss_forward(softmax, target, weight, output, gamma, alpha):
    """Probabilities (N, C), classes (N,), weights of classes (C,) or none, to losses (N,)."""
    p, rest, factor = _softmax_focal(*_wide(softmax), target, weight, alpha)
    output.copy_(-factor * rest**gamma * p.clamp(min=TINY).log())


def softmax_focal_loss_backward(softmax, target, weight, buff, grad_input, gamma, alpha):
    (softmax,) = _wide(softmax)
    p, rest, factor = _softmax_focal(softmax, target, weight, alpha)
    slope = factor * (gamma * rest ** (gamma - 1) * p * p.clamp(min=TINY).log() - rest**gamma)
    own = target[:, None] == torch.arange(softmax.shape[1], device=softmax.device)
    buff.copy_(slope)
    grad_input.copy_(slope[:, None] * (own.to(p.dtype) - softmax))


# --- deformable convolution (https://arxiv.org/abs/1703.06211, modulated: https://arxiv.org/abs/1811.11168) ---
# torchvision's, with the offsets in MMCV's order: y and x of each tap, group by group.


def _plain(kW, kH, dW, dH, padW, padH, dilationW, dilationH, group, deformable_group, im2col_step):
    """Return the settings of a deformable convolution without a mask in torchvision's order."""
    return dH, dW, padH, padW, dilationH, dilationW, group, deformable_group, False


def deform_conv_forward(input, weight, offset, output, columns, ones, **settings):
    tensors = _wide(input, weight, offset, input.new_zeros(len(input), 1), input.new_zeros(len(weight)))
    output.copy_(KERNELS.deform_conv2d(*tensors, *_plain(**settings)))


def deform_conv_backward_input(input, offset, gradOutput, gradInput, gradOffset, weight, columns, **settings):
    """Compute all gradients; that of the weight is kept in ``columns`` for the next function."""
    tensors = _wide(gradOutput, input, weight, offset, input.new_zeros(len(input), 1), input.new_zeros(len(weight)))
    grad_input, grad_weight, grad_offset, *_ = KERNELS._deform_conv2d_backward(*tensors, *_plain(**settings))
    gradInput.copy_(grad_input)
    gradOffset.copy_(grad_offset)
    columns.set_(grad_weight.to(columns.dtype))


def deform_conv_backward_parameters(input, offset, gradOutput, gradWeight, columns, ones, scale, **settings):
    """Add ``scale`` times the gradient of the weight."""
    if columns.shape != gradWeight.shape:
        unused = torch.empty_like(input), torch.empty_like(offset)
        deform_conv_backward_input(input, offset, gradOutput, *unused, gradWeight, columns, **settings)
    gradWeight.add_(columns, alpha=scale)
    columns.set_(columns.new_empty(0))  # of this backward pass; of another one of the graph it would be too old


def _modulated(
    kernel_h,
    kernel_w,
    stride_h,
    stride_w,
    pad_h,
    pad_w,
    dilation_h,
    dilation_w,
    group,
    deformable_group,
):
    return stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, group, deformable_group, True


def _packed(x, output):
    """Crop offsets or masks of a map larger than the output, as in DyHead, to the output's size.

    Like MMCV, take the first values in memory.
    """
    size = output.shape[-2:]
    return x if x.shape[-2:] == size else x.flatten(1)[:, : x.shape[1] * size.numel()].unflatten(1, (-1, *size))


def _fill(target, result):
    """Write the gradient of the result of :func:`_packed`, into memory of any format."""
    packed = target.new_zeros(target.shape)
    packed.flatten(1)[:, : result[0].numel()] = result.flatten(1)
    target.copy_(packed)


def modulated_deform_conv_forward(input, weight, bias, ones, offset, mask, output, columns, with_bias, **settings):
    bias = bias if with_bias else weight.new_zeros(len(weight))
    tensors = _wide(input, weight, _packed(offset, output), _packed(mask, output), bias)
    output.copy_(KERNELS.deform_conv2d(*tensors, *_modulated(**settings)))


def modulated_deform_conv_backward(
    input,
    weight,
    bias,
    ones,
    offset,
    mask,
    columns,
    grad_input,
    grad_weight,
    grad_bias,
    grad_offset,
    grad_mask,
    grad_output,
    with_bias,
    **settings,
):
    bias = bias if with_bias else weight.new_zeros(len(weight))
    tensors = _wide(grad_output, input, weight, _packed(offset, grad_output), _packed(mask, grad_output), bias)
    results = KERNELS._deform_conv2d_backward(*tensors, *_modulated(**settings))
    for target, result in zip((grad_input, grad_weight), results):
        target.copy_(result)
    for target, result in zip((grad_offset, grad_mask), results[2:]):
        _fill(target, result)
    if with_bias:
        grad_bias.copy_(results[4])


# --- multi-scale deformable attention (https://arxiv.org/abs/2010.04159, equation 3) ---


def _samples(locations, weights, shapes, starts, keys):
    """Return the rows of the values (B * keys * heads, D) read by each query and head, and their weights.

    Both are (B, Q, heads, samples): the four pixels around each location, bilinear. The weight is 0 outside the maps.
    """
    batch, _, heads = locations.shape[:3]
    shapes, starts = shapes.to(locations.device), starts.to(locations.device)
    height, width = (side[:, None] for side in shapes.unbind(1))
    place = locations * shapes.flip(1)[:, None] - 0.5
    corner = place.detach().floor()
    right, lower = (place - corner).unbind(-1)
    left, top = corner.long().unbind(-1)
    first = (torch.arange(batch, device=left.device) * keys).view(-1, 1, 1, 1, 1) + starts[:, None]
    head = torch.arange(heads, device=left.device).view(-1, 1, 1)
    rows, parts = [], []
    for y, share in ((top, 1 - lower), (top + 1, lower)):
        for x, part in ((left, 1 - right), (left + 1, right)):
            is_inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
            rows.append(torch.where(is_inside, (first + y * width + x) * heads + head, 0))
            parts.append(torch.where(is_inside, share * part * weights, 0))
    return torch.stack(rows, -1).flatten(3), torch.stack(parts, -1).flatten(3)


def _sums(values, rows, weights):
    """Return weighted sums (M, D) of the rows of values (N, D) with indices ``rows`` (M, samples)."""
    return F.embedding_bag(rows, values, mode='sum', per_sample_weights=weights)


def _takes_rows(value):
    """Return True on CPUs and with deterministic algorithms: on GPUs ``grid_sample`` has no deterministic gradient."""
    return value.is_cpu or torch.are_deterministic_algorithms_enabled()


def _sizes(shapes, starts):
    """Return [height, width, start] of each level as numbers.

    Reading them waits for the GPU. All layers of a model share the tensor, and it keeps them until it changes.
    """
    tensors = shapes, starts
    versions = None if any(map(torch.Tensor.is_inference, tensors)) else [tensor._version for tensor in tensors]
    known = getattr(shapes, '_sizes', None)
    if versions is None or known is None or known[0] is not starts or known[1] != versions:
        known = starts, versions, torch.cat((shapes, starts[:, None].to(shapes)), 1).tolist()
        shapes._sizes = known
    return known[2]


class _Levels:
    """Arguments of ``grid_sample`` for each level, of values (B, K, heads, D) and locations (B, Q, heads, L, P, 2).

    Yields ``level, maps (B * heads, D, H, W), grid (B * heads, Q, P, 2), slice of the keys``.
    """

    def __init__(self, value, locations, sizes):
        self.value = value.transpose(1, 2).flatten(0, 1).transpose(1, 2)  # (B * heads, D, K), channels last in memory
        grid = locations.permute(0, 2, 3, 1, 4, 5).flatten(0, 1)
        # from 0..1 over the map to -1..1
        self.grid, self.sizes = torch.rsub(grid, -1, alpha=-2), sizes

    def __iter__(self):
        for level, (height, width, start) in enumerate(self.sizes):
            keys = slice(start, start + height * width)
            maps = self.value[:, :, keys].unflatten(2, (height, width))
            yield level, maps, self.grid[:, level], keys


def _by_head(x):
    """Rearrange (B, Q, heads, L, P) to (L, B * heads, Q, P)."""
    return x.permute(3, 0, 2, 1, 4).flatten(1, 2)


def ms_deform_attn_forward(
    value, value_spatial_shapes, value_level_start_index, sampling_locations, attention_weights, im2col_step
):
    """Values (B, K, heads, D), locations (B, Q, heads, levels, points, 2), weights without the 2: (B, Q, heads * D).

    Zeros outside the maps; a location of 0 is the outer edge of the first pixel.
    """
    values, *tensors = _wide(value, sampling_locations, attention_weights)
    batch, _, heads, width = value.shape
    queries = sampling_locations.shape[1]
    if _takes_rows(value) or not queries:
        rows, weights = _samples(*tensors, value_spatial_shapes, value_level_start_index, value.shape[1])
        output = _sums(values.flatten(0, 2), rows.flatten(0, 2), weights.flatten(0, 2))
        return output.view(batch, queries, heads * width).to(value.dtype)
    locations, weights = tensors
    weights, output = _by_head(weights), None
    for level, maps, grid, _ in _Levels(values, locations, _sizes(value_spatial_shapes, value_level_start_index)):
        samples = F.grid_sample(maps, grid, align_corners=False).mul_(weights[level][:, None]).sum(-1)
        output = samples if output is None else output.add_(samples)
    return output.view(batch, heads * width, queries).transpose(1, 2).to(value.dtype).contiguous()


def ms_deform_attn_backward(
    value,
    value_spatial_shapes,
    value_level_start_index,
    sampling_locations,
    attention_weights,
    grad_output,
    grad_value,
    grad_sampling_loc,
    grad_attn_weight,
    im2col_step,
):
    value, locations, weights, grad_output = _wide(value, sampling_locations, attention_weights, grad_output)
    if not _takes_rows(value) and locations.shape[1]:
        tensors = value, locations, weights, grad_output
        _backward_by_level(
            tensors,
            grad_value,
            grad_sampling_loc,
            grad_attn_weight,
            _sizes(value_spatial_shapes, value_level_start_index),
        )
        return
    keys, grad_output = value.shape[1], grad_output.reshape(-1, value.shape[-1])
    value, read = value.flatten(0, 2), []

    def attention(locations, weights):
        rows, weights = _samples(locations, weights, value_spatial_shapes, value_level_start_index, keys)
        read.extend((rows.flatten(), weights.detach().flatten(), rows.shape[-1]))
        return _sums(value, rows.flatten(0, 2), weights.flatten(0, 2))

    results = _gradients(attention, (locations, weights), grad_output)
    for target, result in zip((grad_sampling_loc, grad_attn_weight), results):
        target.copy_(result)
    # gradient of the values: sums over the queries that read each row, in the order of the rows
    rows, weights, samples = read
    order = rows.argsort()
    count = rows.bincount(minlength=len(value))
    result = F.embedding_bag(
        order // samples, grad_output, count.cumsum(0) - count, mode='sum', per_sample_weights=weights[order]
    )
    grad_value.copy_(result.view_as(grad_value))


def _backward_by_level(tensors, grad_value, grad_locations, grad_weights, sizes):
    value, locations, weights, grad_output = tensors
    batch, _, heads, width = value.shape
    weights = _by_head(weights)
    grad = grad_output.unflatten(2, (heads, width)).permute(0, 2, 3, 1).flatten(0, 1)[..., None]  # (B * heads, D, Q, 1)
    for level, maps, grid, keys in _Levels(value, locations, sizes):
        samples = F.grid_sample(maps, grid, align_corners=False).mul_(grad).sum(1)
        grad_weights[:, :, :, level].copy_(samples.unflatten(0, (batch, heads)).transpose(1, 2))
        at_samples = grad * weights[level][:, None]
        of_maps, of_grid = torch.ops.aten.grid_sampler_2d_backward(at_samples, maps, grid, 0, 0, False, (True, True))
        grad_value[:, keys].copy_(of_maps.flatten(2).unflatten(0, (batch, heads)).permute(0, 3, 1, 2))
        of_locations = grad_locations[:, :, :, level]
        torch.mul(of_grid.unflatten(0, (batch, heads)).transpose(1, 2), 2, out=of_locations)


# --- CARAFE (https://arxiv.org/abs/1905.02188): weighted sums of the pixels around the source of each output pixel ---


def _windows(features, kernel_size, groups):
    """Return the windows around the pixels of features (N, C, H, W) as (N * H * W * groups, K * K, C / groups)."""
    margin = kernel_size // 2
    padded = F.pad(features.permute(0, 2, 3, 1), (0, 0, margin, margin, margin, margin))
    windows = padded.unfold(1, kernel_size, 1).unfold(2, kernel_size, 1).unflatten(3, (groups, -1))
    return windows.permute(0, 1, 2, 3, 5, 6, 4).flatten(4, 5).flatten(0, 3)


def _by_source(x, groups, scale):
    """Split maps (N, groups * C, H * scale, W * scale) by the source pixel: (N, H, W, groups, scale, scale, C)."""
    height, width = (size // scale for size in x.shape[2:])
    x = x.unflatten(3, (width, scale)).unflatten(2, (height, scale)).unflatten(1, (groups, -1))
    return x.permute(0, 3, 5, 1, 4, 6, 2)


def carafe_naive_forward(features, masks, output, kernel_size, group_size, scale_factor):
    """Features (N, C, H, W), masks (N, groups * K * K, H * scale, W * scale): (N, C, H * scale, W * scale).

    The output pixels of a source pixel are the product of their masks and its window.
    """
    features, masks = _wide(features, masks)
    masks, target = (_by_source(x, group_size, scale_factor) for x in (masks, output))
    with _without_autocast(features.device.type):
        result = masks.flatten(4, 5).flatten(0, 3) @ _windows(features, kernel_size, group_size)
    target.copy_(result.view(target.shape))


def carafe_naive_backward(top_grad, features, masks, bottom_grad, mask_grad, kernel_size, group_size, scale_factor):
    top_grad, features, masks = _wide(top_grad, features, masks)
    height, width = features.shape[2:]
    masks, top_grad, of_masks = (_by_source(x, group_size, scale_factor) for x in (masks, top_grad, mask_grad))
    grad = top_grad.flatten(4, 5).flatten(0, 3)  # (N * H * W * groups, scale * scale, C / groups)
    with _without_autocast(features.device.type):
        result = grad @ _windows(features, kernel_size, group_size).mT
        of_windows = masks.flatten(4, 5).flatten(0, 3).mT @ grad
    of_masks.copy_(result.view(of_masks.shape))
    result = of_windows.unflatten(0, (len(features), height * width, group_size)).permute(0, 2, 4, 3, 1).flatten(1, 3)
    bottom_grad.copy_(F.fold(result, (height, width), kernel_size, padding=kernel_size // 2))


def carafe_forward(features, masks, rfeatures, routput, rmasks, output, kernel_size, group_size, scale_factor):
    """Same as the naive one; ``rfeatures`` gets the features for the backward function."""
    rfeatures.copy_(features)
    carafe_naive_forward(features, masks, output, kernel_size, group_size, scale_factor)


def carafe_backward(
    top_grad,
    rfeatures,
    masks,
    rtop_grad,
    rbottom_grad_hs,
    rbottom_grad,
    rmask_grad,
    bottom_grad,
    mask_grad,
    kernel_size,
    group_size,
    scale_factor,
):
    carafe_naive_backward(top_grad, rfeatures, masks, bottom_grad, mask_grad, kernel_size, group_size, scale_factor)


# --- convolution at chosen pixels (MaskedConv2d) ---


def masked_im2col_forward(im, mask_h_idx, mask_w_idx, col, kernel_h, kernel_w, pad_h, pad_w):
    """Write the windows around the chosen pixels of ``im`` (1, C, H, W) to columns of ``col`` (C * window, pixels)."""
    below, right = max(kernel_h - 1 - pad_h, 0), max(kernel_w - 1 - pad_w, 0)
    padded = F.pad(im[0], (pad_w, right, pad_h, below))
    rows = mask_h_idx + torch.arange(kernel_h, device=im.device)[:, None, None]
    columns = mask_w_idx + torch.arange(kernel_w, device=im.device)[:, None]
    col.copy_(padded[:, rows, columns].flatten(0, 2))


def masked_col2im_forward(col, mask_h_idx, mask_w_idx, im, height, width, channels):
    """Write the columns of ``col`` (C, pixels) to their pixels of ``im`` (1, C, H, W)."""
    im[0, :, mask_h_idx, mask_w_idx] = col


# --- point-wise spatial attention (PSANet, https://hszhao.github.io/papers/eccv18_psanet.pdf) ---


def _pick(source, rows, columns):
    """Gather entries (N, R, S, H, W) of ``source`` (N, A, B, H, W) at ``rows`` (R, H) and ``columns`` (S, W).

    Indices outside A or B give zero.
    """
    inside = [(index >= 0) & (index < size) for index, size in zip((rows, columns), source.shape[1:3])]
    rows, columns = rows.clamp(0, source.shape[1] - 1), columns.clamp(0, source.shape[2] - 1)
    h, w = (torch.arange(size, device=source.device) for size in source.shape[3:])
    picked = source[:, rows[:, None, :, None], columns[None, :, None, :], h[:, None], w]
    return picked.masked_fill(~(inside[0][:, None, :, None] & inside[1][None, :, None, :]), 0)


def psamask_forward(input, output, psa_type, num_, h_feature, w_feature, h_mask, w_mask, half_h_mask, half_w_mask):
    """Spread the mask of each pixel, (N, h_mask * w_mask, H, W), over the map around it: (N, H * W, H, W).

    With ``psa_type`` 0 (collect) the channels are pixels of the map and positions are those of the masks; with 1
    (distribute) they are exchanged.
    """
    y, x = torch.arange(h_feature, device=input.device), torch.arange(w_feature, device=input.device)
    masks = input.view(num_, h_mask, w_mask, h_feature, w_feature)
    spread = _pick(masks, y[:, None] - y + half_h_mask, x[:, None] - x + half_w_mask)
    spread = spread.permute(0, 3, 4, 1, 2) if psa_type else spread
    output.copy_(spread.reshape_as(output))


def psamask_backward(
    grad_output, grad_input, psa_type, num_, h_feature, w_feature, h_mask, w_mask, half_h_mask, half_w_mask
):
    y, x, rows, columns = (
        torch.arange(size, device=grad_output.device) for size in (h_feature, w_feature, h_mask, w_mask)
    )
    grad = grad_output.reshape(num_, h_feature, w_feature, h_feature, w_feature)
    grad = grad.permute(0, 3, 4, 1, 2) if psa_type else grad
    picked = _pick(grad, rows[:, None] + y - half_h_mask, columns[:, None] + x - half_w_mask)
    grad_input.copy_(picked.reshape_as(grad_input))
