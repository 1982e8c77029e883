# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Make batches of two random images with annotations for each task, for a training step of any upstream model."""

from typing import Any

import numpy as np
import torch
from mmengine.structures import InstanceData, PixelData
from torch import nn

from .upstream import Upstream

Batch = dict[str, Any]
Size = tuple[int, int]


def _images(size: Size, count: int = 2) -> list[torch.Tensor]:
    """Return random images (3, height, width), uint8."""
    return [torch.randint(0, 255, (3, *size), dtype=torch.uint8) for _ in range(count)]


def _metainfo(size: Size) -> dict:
    return dict(img_shape=size, ori_shape=size, pad_shape=size, scale_factor=(1.0, 1.0))


def detection_batch(size: Size, masks: bool = True, proposals: bool = False) -> Batch:
    """Return two images of ``size`` (height, width) with two objects of class 0 each, and a segmentation mask.

    Boxes are (left, top, right, bottom) in pixels.

    Args:
        size (tuple[int, int]): Height and width in pixels.
        masks (bool): Add a mask for each object. The segmentation mask of the image is always there.
        proposals (bool): Add four region proposals for each image.
    """
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks

    height, width = size
    meta = dict(_metainfo(size), batch_input_shape=size, flip=False, flip_direction=None)
    meta.update(border=np.array([0, height, 0, width], np.float32))  # CenterNet's: no padding
    meta.update(text='thing .', custom_entities=False)  # for detectors with a language model
    boxes = torch.tensor([(0.1, 0.1, 0.6, 0.7), (0.4, 0.3, 0.9, 0.95)]) * torch.tensor([width, height] * 2)
    samples = []
    for number in range(2):
        sample = DetDataSample(metainfo=dict(meta, img_id=number, img_path=f'{number}.jpg'))
        sample.gt_instances = InstanceData(bboxes=boxes.clone(), labels=torch.zeros(2, dtype=torch.long))
        if masks:  # the assigner of RTMDet reads them if there are any
            bitmaps = np.zeros((2, height, width), np.uint8)
            for bitmap, (left, top, right, bottom) in zip(bitmaps, boxes.int().tolist()):
                bitmap[top:bottom, left:right] = 1
            sample.gt_instances.masks = BitmapMasks(bitmaps, height, width)
        sample.ignored_instances = InstanceData(bboxes=torch.zeros(0, 4), labels=torch.zeros(0, dtype=torch.long))
        if proposals:
            sample.proposals = InstanceData(bboxes=torch.cat((boxes, boxes + 4)), scores=torch.ones(4))
        # panoptic heads count things from 0 and stuff after them
        sample.gt_sem_seg = PixelData(sem_seg=torch.zeros(1, height, width, dtype=torch.long))
        samples.append(sample)
    return dict(inputs=_images(size), data_samples=samples)


def segmentation_batch(size: Size) -> Batch:
    """Return two images with one class in each half, the edge between them, and depths."""
    from mmseg.structures import SegDataSample

    middle, samples = size[1] // 2, []
    for _ in range(2):
        labels, edges = torch.zeros(2, 1, *size, dtype=torch.long)
        labels[..., middle:] = 1
        edges[..., middle - 1 : middle + 1] = 1
        sample = SegDataSample(metainfo=_metainfo(size))
        sample.gt_sem_seg, sample.gt_edge_map = PixelData(data=labels), PixelData(data=edges)
        sample.gt_depth_map = PixelData(data=torch.rand(1, *size) + 0.5)
        samples.append(sample)
    return dict(inputs=_images(size), data_samples=samples)


def classification_batch(size: Size, num_classes: int) -> Batch:
    """Return two images with the labels 0 and 1, as numbers and as multi-label scores."""
    from mmpretrain.structures import DataSample

    samples = []
    for label, scores in enumerate(torch.eye(max(num_classes, 2))[:2]):
        sample = DataSample(metainfo=dict(_metainfo(size), sample_idx=label))
        samples.append(sample.set_gt_label(label).set_gt_score(scores))
    return dict(inputs=_images(size), data_samples=samples)


def batch_for(model: nn.Module, source: Upstream, network: dict, size: Size) -> Batch:
    """Return a batch of images of ``size`` (height, width) for a built network and its config."""
    batch = _of_three_channels(model, source, network, size)
    channels = torch.arange(source.image_channels) % 3
    return dict(batch, inputs=[image.index_select(-3, channels) for image in batch['inputs']])


def _of_three_channels(model: nn.Module, source: Upstream, network: dict, size: Size) -> Batch:
    """Return the batch of :func:`batch_for` with images of three channels, whatever the model takes."""
    if source.task == 'mmdet':
        from mmdet.structures import ReIDDataSample, TrackDataSample

        kind = type(model.data_preprocessor).__name__
        if kind == 'ReIDDataPreprocessor':  # two images of each of two people, for a triplet loss
            samples = [ReIDDataSample(metainfo=_metainfo(size)).set_gt_label(person) for person in (0, 0, 1, 1)]
            return dict(inputs=_images(size, 4), data_samples=samples)
        # two-stage detectors without an RPN read proposals from the data set
        batch = detection_batch(size, source.has_masks, 'roi_head' in network and not network.get('rpn_head'))
        if kind == 'TrackDataPreprocessor':  # a video of two frames that show the same two objects
            for sample in batch['data_samples']:
                sample.gt_instances.instances_ids = torch.arange(2)
            video = TrackDataSample()
            video.video_data_samples = batch['data_samples']
            return dict(inputs=[torch.stack(batch['inputs'])], data_samples=[video])
        return batch
    if source.task == 'mmseg':
        return segmentation_batch(size)
    head: Any = network['head'] if isinstance(network.get('head'), dict) else {}
    batch = classification_batch(size, head.get('num_classes') or 2)
    if is_self_supervised(model):
        crops = head.get('loss', {}).get('num_crops')
        views = sum(crops) if isinstance(crops, (list, tuple)) else 2
        batch['inputs'] = [torch.stack(_images(size)) for _ in range(views)]
    return batch


def is_self_supervised(model: nn.Module) -> bool:
    """Return True if a model of MMPretrain trains without labels."""
    from mmpretrain.models.selfsup.base import BaseSelfSupervisor

    return isinstance(model, BaseSelfSupervisor)
