# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""MMCV's compiled module by torchvision and PyTorch.

``mmcv.ops`` calls these functions by the names and arguments of MMCV's own C++ and CUDA module. Most of them fill
tensors that the caller has made. A compiled ``mmcv/_ext.*.so`` beside this file comes first in Python's order of
imports.
"""

import sys

import torch
import torchvision

COMPILE = 'bash tools/setup_env.sh --compiled'


def __getattr__(name: str):
    """A function that raises ``NotImplementedError`` when it is called, for every operator that is not below."""
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
    """File and line of the innermost caller outside MMCV and PyTorch, else of the innermost one."""
    frame = caller = sys._getframe(2)
    while frame is not None and frame.f_globals.get('__name__', '').split('.')[0] in ('mmcv', 'torch'):
        frame = frame.f_back
    frame = frame or caller
    return f'{frame.f_code.co_filename}:{frame.f_lineno}'


# --- what runs ---


def get_compiler_version() -> str:
    return f'none (torchvision {torchvision.__version__} and PyTorch {torch.__version__})'


def get_compiling_cuda_version() -> str:
    return f'none (PyTorch runs CUDA {torch.version.cuda})' if torch.version.cuda else 'not available'


# --- non-maximum suppression ---


def nms(boxes, scores, iou_threshold, offset=0):
    """Indices of the boxes that are kept, best score first (int64). ``offset`` is added to each width and height."""
    if offset:
        boxes = torch.cat((boxes[:, :2], boxes[:, 2:] + offset), dim=1)
    return torchvision.ops.nms(boxes, scores, iou_threshold)


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
    if pool_mode == 0:
        raise NotImplementedError('roi_align: pool_mode 0 (max)')
    output.copy_(
        torch.ops.torchvision.roi_align(
            input, rois, spatial_scale, aligned_height, aligned_width, sampling_ratio, aligned
        )
    )


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
    grad_input.copy_(
        torch.ops.torchvision._roi_align_backward(
            grad_output,
            rois,
            spatial_scale,
            aligned_height,
            aligned_width,
            *grad_input.shape,
            sampling_ratio,
            aligned,
        )
    )
