# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from types import SimpleNamespace

import pytest
from engine_toys import make_runner
from torch import nn

from mmlinattn.engine import DataCheckHook, RunError
from mmlinattn.engine.hooks import data_check
from mmlinattn.engine.hooks.data_check import check_labels


def test_an_empty_data_set(tmp_path, monkeypatch):
    runner = make_runner(tmp_path, [dict(type='DataCheckHook')], loader=dict(dataset=dict(type='ToyDataset', size=0)))
    with pytest.raises(RunError, match='train_dataloader .ToyDataset, ann_file .* holds no image'):
        runner.train()
    # in a wrapper; one process looks for all
    runner.train_loop.dataloader = SimpleNamespace(
        dataset=SimpleNamespace(_dataset=runner.train_loop.dataloader.dataset)
    )
    with pytest.raises(RunError, match='holds no image'):
        DataCheckHook().before_run(runner)
    monkeypatch.setattr(data_check, 'is_main_process', lambda: False)
    DataCheckHook().before_run(runner)


class Data(list):
    """Samples with names of classes."""

    get_data_info = list.__getitem__

    def __init__(self, *infos, classes=()):
        super().__init__(infos)
        self.metainfo = dict(classes=classes)


def model(**heads):
    made = nn.Module()
    made.__dict__.update(heads)
    return made


@pytest.mark.parametrize('head', [
    dict(head=SimpleNamespace(num_classes=2)),
    dict(bbox_head=SimpleNamespace(num_classes=2)),
    dict(roi_head=SimpleNamespace(bbox_head=SimpleNamespace(num_classes=2))),
])  # fmt: skip
@pytest.mark.parametrize('info', [dict(gt_label=2), dict(gt_label=[0, 2]), dict(instances=[dict(bbox_label=2)])])
def test_a_label_beyond_the_head(head, info):
    good = {key: value for key, value in dict(gt_label=1, instances=[dict(bbox_label=1)]).items() if key in info}
    check_labels(Data(good, classes='ab'), model(**head))
    with pytest.raises(RunError, match=r'num_classes = 2 .* a.jpg has label 2 \(c\), and the data set 3 classes'):
        check_labels(Data(good, dict(info, img_path='a.jpg'), classes='abc'), model(**head))


def test_segmentors_are_compared_by_names():
    check_labels(Data(classes='abc'), model(decode_head=1, num_classes=3))
    with pytest.raises(RunError, match='num_classes = 2 of the head is too small for the 3 classes'):
        check_labels(Data(classes='abc'), model(decode_head=1, num_classes=2))
    check_labels(Data(dict(gt_label=9)), model())
