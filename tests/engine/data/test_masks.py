# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Segmentation masks against the classes of a segmentor."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.data_checks import CLASSIFIER, SEGMENTOR, Data, model, segmentation
from PIL import Image
from torch import nn

from mmlinattn.engine.data.files import spread

REDUCED = dict(reduce_zero_label=True)


@pytest.mark.parametrize(
    ('pictures', 'settings', 'words'),
    [
        ([[0, 255]], {}, 'have label 0 sky, and 255, which is ignored .* Write the number of the class in'),
        ([[0, 128]], {}, r'ann/0.png has the label 128, which num_classes = 2 .* Write the numbers 0 to 1'),
        ([[0, 1], [0, 1, 2]], {}, 'ann/1.png has the label 2, .* or reduce_zero_label=True'),
        ([[0, 1]], REDUCED, r'have label 0 sky, and 255 \(the value 0 or 255 in the file\).*ignores the value'),
        ([[0, 255]], REDUCED, 'no label at all'),
        ([[1, 2, 5]], REDUCED, r'the label 4 \(the value 5 in the file\)'),
        ([[[9, 9, 9]]], {}, 'ann/0.png has 3 channels'),
        ([[0, 256]], dict(dtype=np.uint16), 'has the value 256, of which MMSegmentation keeps 8 bits: 0'),
        ([[0, 1]], dict(loading=REDUCED), 'ann/0.png cannot be loaded: '),
        ([[0, 1, 255]], {}, ''),
        ([[0, 1, 2]], REDUCED, ''),
    ],
)
def test_values_of_masks(look, tmp_path, pictures, settings, words):
    dataset = segmentation(tmp_path / 'data', *pictures, **settings)
    line, warnings = look(SEGMENTOR, train=[dataset])
    assert re.search(words, line) and bool(words) == bool(line) and warnings == [], line
    line, warnings = look(SEGMENTOR, test=[dataset])  # a note in a test
    assert bool(warnings) == ('no label' in words or 'label 0' in words) and bool(words) == bool(line or warnings)


def test_one_channel_tells_two_classes(look, tmp_path):
    dataset = segmentation(tmp_path / 'data', [0, 1, 255], names=('road',))
    made = nn.Module()
    made.decode_head = SimpleNamespace(num_classes=1, out_channels=1, ignore_index=None)
    assert look(made, train=[dataset]) == ('', [])
    dataset.METAINFO = dataset._metainfo = dict(classes=('background', 'road'))
    assert look(made, train=[dataset]) == ('', [])
    made.decode_head.loss_decode = SimpleNamespace(use_sigmoid=False)
    assert 'the label 1' in look(made, train=[dataset])[0]


@pytest.mark.parametrize(
    ('settings', 'ignored', 'said'),
    [(dict(seg_pad_val=255), 255, False), (dict(seg_pad_val=0), 255, True), ({}, 254, False)],  # it pads nothing
)
def test_padding_that_trains(look, tmp_path, settings, ignored, said):
    made = model(decode_head=2)
    made.decode_head.ignore_index = ignored
    made.data_preprocessor = SimpleNamespace(**settings)
    dataset = segmentation(tmp_path / 'data', [0, 1])
    line, warnings = look(made, train=[dataset])
    assert look(made, val=[dataset]) == ('', [])
    assert not line and ['seg_pad_val = 0 and ignore_index = 255' in warning for warning in warnings] == [True] * said


def test_classes_that_do_not_train_are_named(look, tmp_path):
    """Classes of a segmentor and of a classifier without image, and a last class that ignored zeros may have moved.
    Validation needs no object of each class."""
    dataset = segmentation(tmp_path / 'data', [0, 2], names=('sky', 'bird', 'bat'))
    line, (warning,) = look(model(decode_head=3), train=[dataset])
    assert not line and "masks has ('bird',): nothing of it trains" in warning
    assert look(model(decode_head=3), val=[dataset]) == ('', [])
    dataset = segmentation(tmp_path / 'zero', [0, 1, 2], names=('sky', 'bird', 'bat'), **REDUCED)
    line, (warning,) = look(model(decode_head=3), train=[dataset])
    assert not line and 'and 1 is the first class sky; the last, bat, then' in warning
    data = Data(dict(gt_label=0, img_path='a.jpg'), dict(gt_label=2, img_path='b.jpg'), classes=['a', 'b', 'c'])
    line, (warning,) = look(CLASSIFIER, train=[data])
    assert not line and "none of its 2 images is of ('b',)" in warning


def test_broken_and_missing_masks(look, tmp_path):
    dataset = segmentation(tmp_path / 'data', [0, 1], [0, 1])
    Image.new('RGB', (4, 8)).save(tmp_path / 'data/img/0.jpg')
    assert re.search('ann/0.png is 8x8, and its image .*img/0.jpg 4x8', look(SEGMENTOR, train=[dataset])[0])
    Image.new('RGB', (8, 8)).save(tmp_path / 'data/img/0.jpg')
    assert look(SEGMENTOR, train=[dataset]) == ('', [])
    path = tmp_path / 'data/ann/1.png'
    path.write_text('no image')
    assert f'the segmentation mask {path} cannot be read as an image' in look(SEGMENTOR, train=[dataset])[0]
    path.unlink()
    assert look(SEGMENTOR, train=[dataset])[0] == f'train_dataloader: the segmentation mask {path} is not there.'
    dataset.pipeline.transforms = dataset.pipeline.transforms[:1]  # a test without labels
    assert look(SEGMENTOR, test=[dataset]) == ('', [])


def test_a_sample_of_many(look, tmp_path, monkeypatch):
    """Open twenty if they show several classes, else up to ten times as many."""
    pictures = [[0, 255]] * 41
    pictures[spread(41, 200)[-1]] = [0, 1]
    assert look(SEGMENTOR, train=[segmentation(tmp_path / 'data', *pictures)], num_images=20) == ('', [])
    opened, load = [], Image.open
    monkeypatch.setattr(Image, 'open', lambda path: opened.append(path) or load(path))
    other = segmentation(tmp_path / 'other', *[[0, 1]] * 40)
    assert look(SEGMENTOR, train=[other], num_images=20) == ('', [])
    assert len({str(path) for path in opened if 'ann' in str(path)}) == 20
    assert look(SEGMENTOR, train=[other]) == ('', [])
    assert len({str(path) for path in opened if 'ann' in str(path)}) == 40  # by default, up to 200
