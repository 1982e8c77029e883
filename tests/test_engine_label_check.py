# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Labels that the head has no class for, in the data sets of detectors and classifiers."""

import numpy as np
import pytest
from engine_toys import Wrapped
from mmengine.dataset import BaseDataset, RepeatDataset
from torch import nn

from mmlinattn.engine.label_check import _NUM_READ, check_labels
from mmlinattn.utils.errors import RunError


class Labelled(BaseDataset):
    """Samples as MMDetection's (``instances``) or MMPretrain's (``gt_label``) data sets have them."""

    METAINFO = dict(classes=('disc', 'square', 'star'))

    def __init__(self, samples):
        self.samples = samples
        super().__init__()

    def load_data_list(self):
        return [dict(sample, img_path=f'{i}.png') for i, sample in enumerate(self.samples)]


def boxes(*labels):
    return dict(instances=[dict(bbox_label=label, bbox=[0, 0, 1, 1]) for label in labels])


def head(num_classes):
    module = nn.Identity()
    module.num_classes = num_classes
    return module


def model(**parts):
    """A model with heads by name; ``roi_head`` holds the box head of a two-stage detector."""
    made = nn.Module()
    for name, part in parts.items():
        made.add_module(name, part)
    return made


def two_stage(*counts):
    heads = [head(count) for count in counts]
    roi_head = nn.Module()
    roi_head.bbox_head = heads[0] if len(heads) == 1 else nn.ModuleList(heads)
    return model(roi_head=roi_head)


MODELS = dict(
    classifier=lambda n: model(head=head(n)),
    one_stage=lambda n: model(bbox_head=head(n)),
    two_stages=two_stage,
    cascade=lambda n: two_stage(n + 4, n, n + 4),  # the fewest count
    of_processes=lambda n: Wrapped(model(head=head(n))),
    in_two_wrappers=lambda n: Wrapped(Wrapped(model(head=head(n)))),
)


@pytest.mark.parametrize('name', MODELS)
@pytest.mark.parametrize(
    'sample',
    [boxes(0, 1, 2), dict(gt_label=2), dict(gt_label=[0, 2]), dict(gt_label=np.array([0, 2])), boxes(np.int64(2))],
    ids=['boxes', 'label', 'labels', 'array', 'NumPy'],
)
@pytest.mark.parametrize('wrap', [lambda data: data, lambda data: RepeatDataset(data, 2)], ids=['bare', 'repeated'])
def test_a_label_beyond_the_head(name, sample, wrap):
    """Also after pictures without objects, or without a label."""
    dataset = wrap(Labelled([boxes(), boxes(0), dict(), dict(gt_label=1), sample]))
    check_labels(dataset, MODELS[name](3))
    with pytest.raises(RunError) as found:
        check_labels(dataset, MODELS[name](2))
    assert str(found.value).startswith(
        'num_classes = 2 of the head is too small for the data: 4.png has label 2 (star), and the data set 3 classes.'
    )


def test_labels_without_names():
    for label in (3, 7):
        with pytest.raises(RunError) as found:
            check_labels(Labelled([boxes(label)]), MODELS['classifier'](3))
        assert str(found.value) == (
            f'num_classes = 3 of the head is too small for the data: 0.png has label {label}, and the data set 3 '
            'classes. Set num_classes of the head, or metainfo.classes of the data set to those that count.'
        )


@pytest.mark.parametrize('data', [boxes(9), dict(gt_label=9)])
def test_models_without_a_number_of_classes_are_passed_over(data):
    check_labels(Labelled([data]), model(decode_head=head(2)))
    check_labels(Labelled([data]), model(head=head(None)))
    check_labels([data], MODELS['classifier'](2))  # no data set of MMEngine's


def test_samples_without_labels_are_passed_over():
    check_labels(Labelled([dict(), dict(instances=[]), dict(instances=None), boxes(None), dict(gt_label=[])]), model())
    for label in ([], (), None, True, 'star', 9.0, dict(task=9)):
        check_labels(Labelled([dict(), boxes(None), dict(gt_label=label)]), MODELS['classifier'](2))


def test_of_many_samples_some_are_read_spread_evenly():
    class Many:
        metainfo = dict(classes=())
        read = ()

        def __len__(self):
            return 10 * _NUM_READ

        def get_data_info(self, index):
            self.read += (index,)
            return dict(gt_label=0)

    dataset = Many()
    check_labels(dataset, MODELS['classifier'](2))
    assert dataset.read == tuple(range(0, 10 * _NUM_READ, 10))
