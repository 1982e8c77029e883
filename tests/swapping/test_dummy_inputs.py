# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Invented batches: what each task's data sets give."""

import pytest
import torch

from mmlinattn.swapping import dummy_inputs

for project in ('mmdet', 'mmseg', 'mmpretrain'):
    pytest.importorskip(project)


def test_detection_batch():
    batch = dummy_inputs.detection_batch((50, 100))
    assert [tuple(image.shape) for image in batch['inputs']] == [(3, 50, 100)] * 2
    first, second = batch['data_samples']
    assert (first.img_id, second.img_id) == (0, 1)
    for key in ('img_shape', 'ori_shape', 'pad_shape', 'batch_input_shape'):
        assert first.metainfo[key] == (50, 100)
    boxes = [[10.0, 5.0, 60.0, 35.0], [40.0, 15.0, 90.0, 47.5]]  # x before y
    torch.testing.assert_close(first.gt_instances.bboxes, torch.tensor(boxes))
    assert first.gt_instances.labels.tolist() == [0, 0] and len(first.ignored_instances) == 0
    masks = first.gt_instances.masks.masks
    assert masks.shape == (2, 50, 100) and masks.sum(axis=(1, 2)).tolist() == [50 * 30, 50 * 32]
    assert masks[0, 5:35, 10:60].all() and masks[1, 15:47, 40:90].all()
    assert first.gt_sem_seg.sem_seg.shape == (1, 50, 100) and first.gt_sem_seg.sem_seg.count_nonzero() == 0
    assert 'proposals' not in first
    bare, _ = dummy_inputs.detection_batch((50, 100), masks=False, proposals=True)['data_samples']
    assert 'masks' not in bare.gt_instances and bare.proposals.scores.tolist() == [1] * 4
    torch.testing.assert_close(bare.proposals.bboxes[2:], torch.tensor(boxes) + 4)


def test_batches_of_other_tasks():
    video = dummy_inputs.video_batch((32, 64))
    assert [tuple(frames.shape) for frames in video['inputs']] == [(2, 3, 32, 64)]
    (track,) = video['data_samples']
    ids = [frame.gt_instances.instances_ids.tolist() for frame in track.video_data_samples]
    assert ids == [[0, 1], [0, 1]]
    people = dummy_inputs.reid_batch((32, 64))
    assert len(people['inputs']) == 4 and [s.gt_label.label.item() for s in people['data_samples']] == [0, 0, 1, 1]
    sample = dummy_inputs.segmentation_batch((4, 10))['data_samples'][1]
    labels, edges = sample.gt_sem_seg.data[0], sample.gt_edge_map.data[0]
    assert labels.tolist() == [[0] * 5 + [1] * 5] * 4 and edges.tolist() == [[0] * 4 + [1] * 2 + [0] * 4] * 4
    assert sample.gt_depth_map.data.shape == (1, 4, 10) and sample.gt_depth_map.data.min() >= 0.5
    views = dummy_inputs.views_batch((8, 16), 3)
    assert [tuple(view.shape) for view in views['inputs']] == [(2, 3, 8, 16)] * 3 and len(views['data_samples']) == 2
    assert len({tuple(view.flatten().tolist()) for view in views['inputs']}) == 3  # of which each is another one
    one, two = dummy_inputs.classification_batch((8, 8), 4, channels=1)['data_samples']
    assert (one.gt_label.item(), two.gt_label.item()) == (0, 1)
    assert one.gt_score.tolist() == [1, 0, 0, 0] and two.gt_score.tolist() == [0, 1, 0, 0]
    assert len(dummy_inputs.classification_batch((8, 8), 1)['data_samples'][0].gt_score) == 2
