# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Remedies for errors of upstream. Each error is raised by upstream itself."""

import os
import re
import signal
from pkgutil import resolve_name

import mmcv
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mmcv.cnn import build_norm_layer
from mmengine.dataset import default_collate
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS
from torch import nn

import mmlinattn  # noqa: F401
from mmlinattn.tooling import command_line
from mmlinattn.utils.errors import RunError


def build_sgd(**options):
    build_optim_wrapper(nn.Linear(1, 1), {'optimizer': dict(type='SGD', lr=0.1), **options})


def label_without_category():
    metric = resolve_name('mmdet.evaluation:CocoMetric')(metric='bbox')
    metric.cat_ids = [1]
    found = dict(img_id=1, bboxes=np.ones((1, 4)), labels=np.ones(1, dtype=int), scores=np.ones(1))
    metric.results2json([found], 'unused')


def image_without_mask():
    metric = resolve_name('mmseg.evaluation:IoUMetric')()
    metric.dataset_meta = dict(classes=('a', 'b'))
    metric.process({}, [dict(pred_sem_seg=dict(data=torch.zeros(1, 2, 2)))])


def mixed_images_of_unknown_classes():
    sample = resolve_name('mmpretrain.structures:DataSample')().set_gt_label(1)
    preprocess = resolve_name('mmpretrain.models:ClsDataPreprocessor')
    mixup = dict(augments=dict(type='Mixup', alpha=0.8))
    preprocess(batch_augments=mixup)(dict(inputs=torch.ones(1, 3, 4, 4), data_samples=[sample]), training=True)


# words of an error of upstream, and a call that raises it
ERRORS = {
    'Expected more than 1 value per channel': lambda: nn.BatchNorm2d(3)(torch.ones(1, 3, 1, 1)),
    'The image size in a batch should be the same': lambda: resolve_name('mmseg.models:SegDataPreProcessor')()(
        dict(inputs=[torch.ones(3, 4, 4), torch.ones(3, 4, 5)])
    ),
    'stack expects each tensor to be equal size': lambda: default_collate([torch.ones(4, 4), torch.ones(4, 5)]),
    'is not a subset of classes': lambda: resolve_name('mmseg.datasets:CityscapesDataset')(
        metainfo=dict(classes=('cat',)), lazy_init=True
    ),
    'gt_sem_seg': image_without_mask,
    # as heads of the DETR family, by max_per_img
    'selected index k out of range': lambda: torch.ones(2).topk(3),
    'accuracy is unavailable since the number of categories': lambda: resolve_name(
        'mmpretrain.evaluation:Accuracy'
    ).calculate(torch.rand(2, 3), torch.tensor([0, 1]), topk=(5,)),
    'inhomogeneous shape': lambda: resolve_name('mmdet.evaluation:eval_recalls')(
        [np.zeros((1, 4)), np.zeros((2, 4))], [np.zeros((3, 4)), np.zeros((5, 4))], [100]
    ),
    'list index out of range': label_without_category,
    'None is not a callable object': lambda: build_sgd(optimizer=dict(type='Nothing', lr=0.1)),
    'Cannot find None in registry': lambda: build_norm_layer(dict(type='Nothing'), 4),
    'Scale must be a number or tuple of int': lambda: mmcv.imrescale(np.zeros((4, 4, 3)), [8, 8]),
    'base_wd should not be None': lambda: build_sgd(paramwise_cfg=dict(norm_decay_mult=0.0)),
    'weight tensor should be defined': lambda: resolve_name('mmpretrain.models:CrossEntropyLoss')(
        class_weight=[1.0, 2.0]
    )(torch.rand(2, 3), torch.tensor([0, 1])),
    'Cannot generate one-hot format labels': mixed_images_of_unknown_classes,
    "unexpected keyword argument 'pretrained'": lambda: MODELS.build(
        dict(type='RAVLT', arch='tiny', pretrained='a.pth')
    ),
    '!_src.empty()': lambda: mmcv.bgr2rgb(np.zeros((0, 0, 3), np.uint8)),
    'is out of bounds.': lambda: F.cross_entropy(torch.rand(1, 3), torch.tensor([128])),
    'is out of bounds for dimension': lambda: resolve_name('mmseg.models:CrossEntropyLoss')(class_weight=[1.0, 2.0])(
        torch.rand(1, 2, 1, 2), torch.tensor([[[1, 255]]]), ignore_index=255
    ),
}


@pytest.mark.parametrize('words', ERRORS)
def test_the_remedy_beside_upstream_s_error(monkeypatch, words):
    for package in ('mmdet', 'mmseg', 'mmpretrain'):
        pytest.importorskip(package)
    monkeypatch.delenv('MMLINATTN_TRACEBACK', raising=False)
    given = dict(optimizer_cfg={'type': 'Nothing', 'lr': 0.1}, layer_type='Nothing')
    (remedy,) = [remedy for (_, _, each), remedy in command_line.ADVICE.items() if each == words]
    remedy = re.sub(r'\{(\w+)\}', lambda name: repr(given[name[1]]), remedy)
    line = rf'^c\.py: .*{re.escape(words)}.*\. {re.escape(remedy)}\.$'
    with pytest.raises(RunError, match=line):
        with command_line.setup_errors('c.py', whole=False):
            ERRORS[words]()


def test_every_remedy_has_its_error():
    assert sorted(words for _, _, words in command_line.ADVICE) == sorted(ERRORS)


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


@pytest.mark.parametrize(
    ('error', 'workers'), [('missing', 0), ('broken', 0), ('missing', 1), ('broken', 1), ('killed', 1)]
)
def test_errors_of_loading_data_are_one_line_with_the_checkpoint(tmp_path, error, workers):
    (tmp_path / 'last_checkpoint').write_text('work/epoch_2.pth')
    loader = torch.utils.data.DataLoader(BrokenDataset(error), num_workers=workers)
    with pytest.raises(RunError) as caught, command_line.setup_errors('c.py', False, str(tmp_path)):
        list(loader)
    line = str(caught.value)
    assert line.startswith('c.py: ') and len(line.splitlines()) == 1
    assert ('folder/a.jpg' in line) == (error != 'killed') and (error != 'killed' or 'num_workers' in line)
    assert "the last checkpoint is 'work/epoch_2.pth'; the same command with --resume continues." in line
