# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Checks of labels, folders and label images before the first step."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.data_checks import CLASSIFIER, DETECTOR, SEGMENTOR, Data, build, model
from mmengine.registry import METRICS
from PIL import Image
from torch import nn

from mmlinattn.engine.data import checks, label_images

TWO = SimpleNamespace(num_classes=2)
OBJECT = dict(instances=[dict(bbox_label=2)])


def kind(name, **parts):
    """A model of a class that upstream has."""
    made = type(name, (nn.Module,), {})()
    vars(made).update(parts)
    return made


@pytest.mark.parametrize(
    ('made', 'name', 'info'),
    [
        (kind('A', head=TWO), 'head', dict(gt_label=2)),
        (kind('A', head=TWO), 'head', dict(gt_label=[0, 2])),
        (kind('A', bbox_head=TWO), 'bbox_head', OBJECT),
        (kind('A', roi_head=SimpleNamespace(bbox_head=TWO)), 'bbox_head', OBJECT),
        (kind('A', roi_head=SimpleNamespace(mask_head=TWO)), 'mask_head', OBJECT),
    ],
)
def test_a_label_beyond_the_head(look, made, name, info):
    for stage in ('train', 'val'):
        line, _ = look(made, **{stage: [Data(dict(info, img_path='a.jpg'), classes=['a', 'b', 'c'])]})
        text = 'num_classes = 2 of the head is too small for the data: a.jpg has label 2 (c), and the '
        assert line.startswith(f'{stage}_dataloader: {text}') and f'Set num_classes of the {name}, or' in line


def test_labels_that_are_no_outputs_of_a_head(look):
    """Upstream's heads of proposals, depth and edges; positions in a text; objects that do not count."""
    pytest.importorskip('mmdet')
    pytest.importorskip('mmseg')
    from mmdet.models.dense_heads import RPNHead
    from mmseg.models.decode_heads import STDCHead, VPDDepthHead

    data = Data(dict(OBJECT), classes=list('abc'))
    edges = STDCHead(in_channels=4, channels=4, num_classes=2, boundary_threshold=0.1)
    for head in (dict(bbox_head=RPNHead(4)), dict(decode_head=VPDDepthHead()), dict(auxiliary_head=edges)):
        assert look(kind('A', **head), train=[data]) == ('', [])
    assert look(kind('A', bbox_head=TWO, language_model=0), train=[data]) == ('', [])
    ignored = Data(dict(instances=[dict(bbox_label=-1, ignore_flag=1), dict(bbox_label=1)]), classes=list('abc'))
    assert look(DETECTOR, train=[ignored])[0] == ''


def compares(how):
    """A model that compares images, and its head of two classes."""
    if how == 'prototype':
        return kind('A', head=TWO, prototype=None)
    pytest.importorskip('mmdet')
    from mmdet.models.reid import LinearReIDHead

    loss = dict(type='mmpretrain.CrossEntropyLoss')
    return kind('A', head=LinearReIDHead(1, 4, 4, 4, num_classes=2, loss_cls=loss))


@pytest.mark.parametrize('how', ['prototype', 'triplets'])
def test_models_that_compare_images(look, how):
    """Validation searches for other classes than training."""
    train, val = (Data(dict(gt_label=label)) for label in (1, 8))
    train.folder_to_idx, val.folder_to_idx = dict(a=0, b=1), dict(c=0)
    assert look(compares(how), train=[train], val=[val]) == ('', [])
    assert 'too small' in look(compares(how), train=[val])[0]
    assert 'the folder' in look(model(head=9), train=[train], val=[val])[0]


def test_objects_that_the_sample_may_miss(look, monkeypatch):
    monkeypatch.setattr(checks, '_NUM_READ', 2)
    empty, found = dict(instances=[]), dict(instances=[dict(bbox_label=0)])
    assert look(DETECTOR, train=[Data(empty, found, empty, found, classes=list('abc'))])[0] == ''
    assert look(DETECTOR, train=[Data({}, {}, classes=list('abc'))])[0] == ''  # samples without objects
    line, warnings = look(DETECTOR, train=[Data(found, found, classes=list('abc'))])
    assert not line and "none of its 2 images has an object of ('b', 'c')" in warnings[0]


def test_one_hot_labels_of_another_number_of_classes(look):
    """A recipe of ImageNet's mixed images with another head."""
    made = model(head=3)
    vars(made).update(data_preprocessor=SimpleNamespace(to_onehot=True, num_classes=1000))
    data = [Data(dict(gt_label=2))]
    line, _ = look(made, train=data)
    assert line.startswith('data_preprocessor.num_classes = 1000') and 'data_preprocessor=dict(num_classes=3)' in line
    assert look(made, test=data) == ('', [])
    for change in (dict(to_onehot=False), dict(num_classes=3), dict(num_classes=None)):
        vars(made).update(data_preprocessor=SimpleNamespace(**{**dict(to_onehot=True, num_classes=1000), **change}))
        assert look(made, train=data) == ('', [])


def test_segmentors_are_compared_by_names(look):
    three, four = [Data(0, classes=list('abc'))], [Data(0, classes=list('abcd'))]
    assert look(model(decode_head=3), train=three) == ('', [])
    more = look(model(decode_head=4), train=three)[1][0]
    assert 'num_classes = 4 of the decode_head is more than the 3 classes' in more
    forgotten = look(model(decode_head=4, auxiliary_head=3), train=four)[0]
    assert 'num_classes = 3 of the head is too small for the 4 classes' in forgotten and 'auxiliary_head' in forgotten


@pytest.mark.parametrize(
    ('train', 'val', 'words'),
    [
        ('abc', 'acb', "label 1 is 'b' in train_dataloader and 'c' in val_dataloader"),
        ('abc', 'ABC', ''),
        ('abc', 'ab', ''),  # the last has no image
        ('a', 'b', ''),  # one class by two names
        ('abc', '', ''),
    ],
)
def test_a_validation_with_other_classes(look, train, val, words):
    sets = [Data(0, classes=list(names)) for names in (train, val)]
    line, _ = look(nn.Module(), train=[sets[0]], val=[sets[1]])
    assert words in line and bool(words) == bool(line)
    joined = Data(0, datasets=sets)
    joined.metainfo = [one.metainfo for one in sets]
    assert bool(look(nn.Module(), train=[joined])[0]) == bool(words)
    for one in sets:
        one.return_classes = True  # names are text that the model reads
    assert look(nn.Module(), train=[sets[0]], val=[sets[1]])[0] == ''


@pytest.mark.parametrize(
    ('tested', 'stops', 'warns'),
    [
        ('abc', '', False),
        ('bac', "label 0 is 'a' in the checkpoint and 'b' in test_dataloader: the classes have another order", False),
        ('abd', '', True),  # may be another language
    ],
)
def test_a_checkpoint_of_other_classes(look, tested, stops, warns):
    data = Data(0, classes=list(tested))
    checkpoint = dict(state_dict={}, meta=dict(dataset_meta=dict(classes=['a', 'b', 'c'])))
    line, warnings = look(nn.Module(), test=[data], checkpoint=checkpoint)
    assert stops in line and bool(line) == bool(stops) and bool(warnings) == warns
    resumed = look(nn.Module(), train=[data], checkpoint=checkpoint, resumes=True)
    assert bool(resumed[0]) == bool(stops)
    assert look(nn.Module(), train=[data], checkpoint=checkpoint) == ('', [])  # fine-tuned
    for meta in (None, dict(dataset_meta=3), dict(dataset_meta=dict(classes='abc'))):
        assert look(nn.Module(), test=[data], checkpoint=dict(meta=meta, state_dict={})) == ('', [])


@pytest.mark.parametrize(
    ('meta', 'words'),
    [
        (dict(CLASSES=('a', 'b')), "CLASSES is read by nobody. Write metainfo=dict(classes=('a', 'b'))"),
        (dict(classes='nowhere.txt'), "metainfo.classes = 'nowhere.txt': there is no such file"),
    ],
)
def test_names_that_nobody_reads(look, meta, words):
    data = Data(0)
    data.metainfo = meta
    assert words in look(nn.Module(), train=[data])[0]


def test_data_sets_of_others_pass(look):
    class Bare:
        def __len__(self):
            return 3

    assert look(DETECTOR, train=[Bare()], val=[[1, 2]], test=[Data(1, 2, 3)]) == ('', [])


# -- folders ----------------------------------------------------------------------------------------------------------


def folders(root, names, **settings):
    for name in names:
        (root / name).mkdir(parents=True)
        Image.new('RGB', (8, 8)).save(root / name / 'a.png')
    return build('mmpretrain', dict(type='CustomDataset', data_prefix=str(root), pipeline=[], **settings))


@pytest.mark.parametrize(
    ('val', 'words'),
    [
        (('bee', 'cat'), "label 0 is the folder 'ant' in train_dataloader and the folder 'bee' in val_dataloader"),
        (('ant', 'bee', 'dog'), "label 2 is the folder 'cat' in train_dataloader and the folder 'dog' in val"),
        (('ant', 'bee', 'cat', 'dog'), "label 3 is no folder in train_dataloader and the folder 'dog' in val"),
        (('ant', 'bee'), ''),
        (('ant', 'bee', 'cat'), ''),
    ],
)
@pytest.mark.parametrize('named', [False, True])
def test_folders_that_differ(look, tmp_path, val, words, named):
    """``metainfo.classes`` names folders, and does not move labels."""
    names = [dict(metainfo=dict(classes=tuple(f'my {i}' for i in range(n)))) if named else {} for n in (3, len(val))]
    train = folders(tmp_path / 'train', ('ant', 'bee', 'cat'), **names[0])
    line, _ = look(model(head=4), train=[train], val=[folders(tmp_path / 'val', val, **names[1])])
    assert words in line and bool(words) == bool(line)


def test_class_names_in_another_order_than_the_folders(look, tmp_path):
    names = dict(metainfo=dict(classes=('cat', 'ant', 'bee')))
    line, _ = look(CLASSIFIER, train=[folders(tmp_path / 'a', ('ant', 'bee', 'cat'), **names)])
    assert "label 0 is the folder 'ant', and 'cat' in the config. Write classes=('ant', 'bee', 'cat')" in line


def test_lists_that_number_folders_otherwise(look, tmp_path):
    made = {}
    for name, lines in dict(
        train=('x/a.png 0', 'y/b.png 1'),
        val=('x/c.png 1', 'y/d.png 0'),
        days=('x/a.png 0', 'x/b.png 1'),
        more=('x/a.png 0', 'z/b.png 2'),
    ).items():
        (tmp_path / f'{name}.txt').write_text('\n'.join(lines))
        config = dict(type='ImageNet', ann_file=str(tmp_path / f'{name}.txt'), data_prefix=str(tmp_path), pipeline=[])
        made[name] = [build('mmpretrain', dict(config, metainfo=dict(classes=('x', 'y', 'z'))))]
    line, _ = look(CLASSIFIER, train=made['train'], val=made['val'])
    assert "label 1 is the folder 'y' in train_dataloader and the folder 'x' in val_dataloader" in line
    assert look(CLASSIFIER, train=made['train'], val=made['days'])[0] == ''  # its folders are no classes
    assert look(CLASSIFIER, train=made['train'], val=made['more'])[0] == ''  # a sample may miss some folders


# -- label images -----------------------------------------------------------------------------------------------------


def segmentation(root, *pictures, names=('sky', 'bird'), dtype=np.uint8, loading=None, **settings):
    for i, values in enumerate(pictures):
        for kind in ('img', 'ann'):
            (root / kind).mkdir(parents=True, exist_ok=True)
        Image.new('RGB', (8, 8)).save(root / 'img' / f'{i}.jpg')
        labels = np.resize(np.array(values, dtype), (8, 8) + np.shape(values)[1:])
        Image.fromarray(labels).save(root / 'ann' / f'{i}.png')
    prefix = dict(img_path=str(root / 'img'), seg_map_path=str(root / 'ann'))
    pipeline = [
        dict(type='LoadImageFromFile'),
        dict(type='LoadAnnotations', **(loading or {})),
        dict(type='PackSegInputs'),
    ]
    config = dict(type='BaseSegDataset', data_prefix=prefix, metainfo=dict(classes=names), pipeline=pipeline)
    return build('mmseg', dict(config, **settings))


REDUCED = dict(reduce_zero_label=True)


@pytest.mark.parametrize(
    ('pictures', 'settings', 'words'),
    [
        (
            [[0, 255]],
            {},
            r'have label 0 sky, and 255, which is ignored .* Write the number of the class in place of 255',
        ),
        ([[0, 128]], {}, r'ann/0.png has the label 128, which num_classes = 2 .* Write the numbers 0 to 1'),
        ([[0, 1], [0, 1, 2]], {}, 'ann/1.png has the label 2, .* or reduce_zero_label=True'),
        (
            [[0, 1]],
            REDUCED,
            r'have label 0 sky, and 255 \(the value 0 or 255 in the file\).*reduce_zero_label=True ignores the value',
        ),
        ([[0, 255]], REDUCED, 'no label at all'),
        ([[1, 2, 5]], REDUCED, r'the label 4 \(the value 5 in the file\)'),
        ([[[9, 9, 9]]], {}, 'ann/0.png has 3 channels'),
        ([[0, 257]], dict(dtype=np.uint16), 'has the value 257, of which MMSegmentation keeps 8 bits: 1'),
        ([[0, 1]], dict(loading=REDUCED), 'ann/0.png cannot be loaded: '),
        ([[0, 1, 255]], {}, ''),
        ([[0, 1, 2]], REDUCED, ''),
    ],
)
def test_values_of_label_images(look, tmp_path, pictures, settings, words):
    dataset = segmentation(tmp_path / 'data', *pictures, **settings)
    line, warnings = look(SEGMENTOR, train=[dataset])
    assert re.search(words, line) and bool(words) == bool(line), line
    assert warnings == []
    line, warnings = look(SEGMENTOR, test=[dataset])  # no fault of a test
    assert bool(warnings) == ('no label' in words or 'label 0' in words) and bool(words) == bool(line or warnings)


def test_one_channel_tells_two_classes(look, tmp_path):
    dataset = segmentation(tmp_path / 'data', [0, 1, 255], names=('road',))
    head = SimpleNamespace(num_classes=1, out_channels=1, ignore_index=None)
    made = nn.Module()
    made.decode_head = head
    assert look(made, train=[dataset]) == ('', [])
    dataset.METAINFO = dataset._metainfo = dict(classes=('background', 'road'))
    assert look(made, train=[dataset]) == ('', [])
    head.loss_decode = SimpleNamespace(use_sigmoid=False)
    assert 'the label 1' in look(made, train=[dataset])[0]


def test_label_images_of_another_size(look, tmp_path):
    dataset = segmentation(tmp_path / 'data', [0, 1])
    Image.new('RGB', (4, 8)).save(tmp_path / 'data' / 'img' / '0.jpg')
    assert re.search('ann/0.png is 8x8, and its image .*img/0.jpg 4x8', look(SEGMENTOR, train=[dataset])[0])
    Image.new('RGB', (8, 8)).save(tmp_path / 'data' / 'img' / '0.jpg')
    assert look(SEGMENTOR, train=[dataset]) == ('', [])  # the facts of an earlier run are outdated


@pytest.mark.parametrize(
    ('names', 'ignored', 'words'),
    [
        (('sky', 'bird'), 255, ''),
        (('bird',), 255, 'of one class, .* it counts every pixel as found. Write classes='),
        (('sky', 'bird'), 99, 'ignore_index = 99, and 255 of the decode_head'),
    ],
)
def test_metrics_that_count_otherwise(look, tmp_path, names, ignored, words):
    dataset = segmentation(tmp_path / 'data', [0, 1], names=names)
    metric = METRICS.build(dict(type='mmseg.IoUMetric', ignore_index=ignored))
    made = model(decode_head=2)
    made.decode_head.ignore_index = 255
    line, _ = look(made, val=[dataset, metric])
    assert re.search(words, line) and bool(words) == bool(line)


def test_zero_that_may_be_a_class(look, tmp_path):
    dataset = segmentation(tmp_path / 'data', [0, 1, 2], names=('sky', 'bird', 'bat'), **REDUCED)
    line, (warning,) = look(model(decode_head=3), train=[dataset])
    assert not line and 'and 1 is the first class sky; the last, bat, then' in warning


def test_classes_that_cannot_train_are_named(look, tmp_path):
    """By every task; those of validation need no object."""
    dataset = segmentation(tmp_path / 'data', [0, 2], names=('sky', 'bird', 'bat'))
    line, (warning,) = look(model(decode_head=3), train=[dataset])
    assert not line and "label images has ('bird',): nothing of it trains" in warning
    assert look(model(decode_head=3), val=[dataset]) == ('', [])
    data = Data(dict(gt_label=0, img_path='a.jpg'), dict(gt_label=2, img_path='b.jpg'), classes=['a', 'b', 'c'])
    line, (warning,) = look(CLASSIFIER, train=[data])
    assert not line and "none of its 2 images is of ('b',)" in warning


def test_label_images_that_are_not_there(look, tmp_path):
    dataset = segmentation(tmp_path / 'data', [0, 1], [0, 1])
    path = tmp_path / 'data' / 'ann' / '1.png'
    path.write_text('no image')
    assert f'the label image {path} cannot be read as an image' in look(SEGMENTOR, train=[dataset])[0]
    path.unlink()
    assert look(SEGMENTOR, train=[dataset])[0] == f'train_dataloader: the label image {path} is not there.'
    dataset.pipeline.transforms = dataset.pipeline.transforms[:1]  # a test without labels
    assert look(SEGMENTOR, test=[dataset]) == ('', [])


def test_a_sample_of_many(look, tmp_path, monkeypatch):
    """Twenty if they show several classes, else ten times as many."""
    dataset = segmentation(tmp_path / 'data', *[[0, 255]] * 40, [0, 1])
    assert look(SEGMENTOR, train=[dataset], num_images=20) == ('', [])
    opened = []
    load = label_images.Image.open
    monkeypatch.setattr(label_images.Image, 'open', lambda path: opened.append(path) or load(path))
    other = segmentation(tmp_path / 'other', *[[0, 1]] * 40)
    assert look(SEGMENTOR, train=[other], num_images=20) == ('', [])
    assert len({str(path) for path in opened if 'ann' in str(path)}) == 20
    opened.clear()
    assert look(SEGMENTOR, train=[other], num_images=20) == ('', []) and not opened
