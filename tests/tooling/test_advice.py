# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Remedies for errors of upstream. Each error is raised by upstream itself."""

import os
import re
import signal

import mmcv
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mmengine.config import Config
from mmengine.dataset import default_collate
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS
from torch import nn

import mmlinattn  # noqa: F401
from mmlinattn.tooling import command_line
from mmlinattn.utils.errors import RunError


def persistent_workers_without_workers():
    torch.utils.data.DataLoader([1], num_workers=0, persistent_workers=True)


def one_image_in_batch_norm():
    nn.BatchNorm2d(3)(torch.ones(1, 3, 1, 1))


def segmentor_images_of_two_sizes():
    from mmseg.models import SegDataPreProcessor

    SegDataPreProcessor()(dict(inputs=[torch.ones(3, 4, 4), torch.ones(3, 4, 5)]))


def samples_of_two_sizes():
    default_collate([torch.ones(3, 4, 4), torch.ones(3, 4, 5)])


def other_classes_of_a_segmentor():
    from mmseg.datasets import CityscapesDataset

    CityscapesDataset(metainfo=dict(classes=('cat',)), lazy_init=True)


def three_boxes_of_two():
    torch.ones(2).topk(3)  # as heads of the DETR family, by max_per_img


def five_best_of_three():
    from mmpretrain.evaluation import Accuracy

    Accuracy.calculate(torch.rand(2, 3), torch.tensor([0, 1]), topk=(5,))


def recalls_of_several_numbers_of_boxes():
    from mmdet.evaluation import eval_recalls

    eval_recalls([np.zeros((1, 4)), np.zeros((2, 4))], [np.zeros((3, 4)), np.zeros((5, 4))], [100])


def label_without_category():
    from mmdet.evaluation import CocoMetric

    metric = CocoMetric(metric='bbox')
    metric.cat_ids = [1]
    found = dict(img_id=1, bboxes=np.ones((1, 4)), labels=np.ones(1, dtype=int), scores=np.ones(1))
    metric.results2json([found], 'unused')


def unknown_optimizer():
    build_optim_wrapper(nn.Linear(1, 1), dict(optimizer=dict(type='Nothing', lr=0.1)))


def scale_in_a_list():
    mmcv.imrescale(np.zeros((4, 4, 3)), [8, 8])


def factor_of_no_weight_decay():
    build_optim_wrapper(
        nn.Linear(1, 1), dict(optimizer=dict(type='SGD', lr=0.1), paramwise_cfg=dict(norm_decay_mult=0.0))
    )


def weights_of_two_of_three_classes():
    from mmpretrain.models import CrossEntropyLoss

    CrossEntropyLoss(class_weight=[1.0, 2.0])(torch.rand(2, 3), torch.tensor([0, 1]))


def mixed_images_of_unknown_classes():
    from mmpretrain.models import ClsDataPreprocessor
    from mmpretrain.structures import DataSample

    data = dict(inputs=torch.ones(1, 3, 4, 4), data_samples=[DataSample().set_gt_label(1)])
    ClsDataPreprocessor(batch_augments=dict(augments=dict(type='Mixup', alpha=0.8)))(data, training=True)


def argument_of_older_backbones():
    MODELS.build(dict(type='RAVLT', arch='tiny', pretrained='a.pth'))


def image_that_is_none():
    mmcv.bgr2rgb(np.zeros((0, 0, 3), np.uint8))


def inferencer_of_a_detector():
    from mmdet.apis import DetInferencer

    pipeline = [dict(type='LoadMyImage'), dict(type='PackDetInputs')]
    DetInferencer._init_pipeline(
        DetInferencer.__new__(DetInferencer), Config(dict(test_dataloader=dict(dataset=dict(pipeline=pipeline))))
    )


def label_beyond_the_head():
    F.cross_entropy(torch.rand(1, 3), torch.tensor([128]))


ERRORS = {
    persistent_workers_without_workers: 'persistent_workers option needs num_workers',
    one_image_in_batch_norm: 'Expected more than 1 value per channel',
    segmentor_images_of_two_sizes: 'The image size in a batch should be the same',
    samples_of_two_sizes: 'stack expects each tensor to be equal size',
    other_classes_of_a_segmentor: 'is not a subset of classes',
    three_boxes_of_two: 'selected index k out of range',
    five_best_of_three: 'accuracy is unavailable since the number of categories',
    recalls_of_several_numbers_of_boxes: 'inhomogeneous shape',
    label_without_category: 'list index out of range',
    unknown_optimizer: 'None is not a callable object',
    scale_in_a_list: 'Scale must be a number or tuple of int',
    factor_of_no_weight_decay: 'base_wd should not be None',
    weights_of_two_of_three_classes: 'weight tensor should be defined',
    mixed_images_of_unknown_classes: 'Cannot generate one-hot format labels',
    argument_of_older_backbones: "unexpected keyword argument 'pretrained'",
    image_that_is_none: '!_src.empty()',
    inferencer_of_a_detector: 'LoadImageFromFile is not found',
    label_beyond_the_head: 'is out of bounds',
}


@pytest.mark.parametrize('error', ERRORS, ids=lambda error: error.__name__)
def test_the_remedy_beside_upstream_s_error(monkeypatch, error):
    for package in ('mmdet', 'mmseg', 'mmpretrain'):
        pytest.importorskip(package)
    monkeypatch.delenv('MMLINATTN_TRACEBACK', raising=False)
    (advice,) = [each for each in command_line.ADVICE if each.words == ERRORS[error]]
    line = rf'^c\.py: .*{re.escape(advice.words)}.*\. {re.escape(advice.remedy)}\.$'
    with pytest.raises(RunError, match=line):
        with command_line.setup_errors('c.py', whole=False):
            error()


def test_every_remedy_has_its_error():
    assert sorted(each.words for each in command_line.ADVICE) == sorted(ERRORS.values())


@pytest.mark.parametrize(
    'error',
    [
        lambda: np.zeros(3)[5],  # of a user's own code
        lambda: nn.GroupNorm(1, 1)(torch.ones(1, 1, 1, 1)),
        lambda: exec("raise TypeError('None is not a callable object')"),
    ],
)
def test_the_same_words_of_another_origin_get_no_remedy(error):
    with pytest.raises(Exception) as caught, command_line.setup_errors('c.py', whole=False):
        error()
    assert not isinstance(caught.value, RunError)


class BrokenDataset(torch.utils.data.Dataset):
    """Data set with a missing image, a broken image, or a killed worker."""

    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 2

    def __getitem__(self, index):
        results = dict(img_path='folder/a.jpg')
        if self.error == 'killed':
            os.kill(os.getpid(), signal.SIGKILL)
        if self.error == 'broken':
            raise AssertionError(f'failed to load image: {results["img_path"]}')
        return open(results['img_path'])


@pytest.mark.parametrize('workers', [0, 1])
@pytest.mark.parametrize('error', ['missing', 'broken', 'killed'])
def test_errors_of_loading_data_are_one_line_with_the_checkpoint(tmp_path, error, workers):
    if error == 'killed' and not workers:
        return
    (tmp_path / 'last_checkpoint').write_text('work/epoch_2.pth')
    loader = torch.utils.data.DataLoader(BrokenDataset(error), num_workers=workers)
    with pytest.raises(RunError) as caught, command_line.setup_errors('c.py', False, str(tmp_path)):
        list(loader)
    line = str(caught.value)
    assert line.startswith('c.py: ') and len(line.splitlines()) == 1
    assert ('folder/a.jpg' in line) == (error != 'killed') and (error != 'killed' or 'num_workers' in line)
    assert "The last checkpoint is 'work/epoch_2.pth'; the same command with --resume continues." in line


@pytest.mark.parametrize('error', [OSError(28, 'No space left on device'), MemoryError('no memory')])
def test_a_full_disk_and_full_memory_are_one_line(error):
    with pytest.raises(RunError, match=f'c.py: {type(error).__name__}.*MMLINATTN_TRACEBACK=1'):
        with command_line.setup_errors('c.py', whole=False):
            raise error
