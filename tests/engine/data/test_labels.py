# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Labels, class names and folders against the heads and against each other."""

from types import SimpleNamespace

import pytest
from helpers.data_checks import CLASSIFIER, DETECTOR, Data, build, model
from PIL import Image
from torch import nn

from mmlinattn.engine.data import checks

TWO = SimpleNamespace(num_classes=2)
OBJECT = dict(instances=[dict(bbox_label=2)])


def kind(name, **parts):
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


def test_class_names_that_are_not_read(look):
    data = Data(0)
    for data.metainfo, words in (
        (dict(CLASSES=('a', 'b')), "CLASSES is read by nobody. Write metainfo=dict(classes=('a', 'b'))"),
        (dict(classes='nowhere.txt'), "metainfo.classes = 'nowhere.txt': there is no such file"),
    ):
        assert words in look(nn.Module(), train=[data])[0]


def test_data_sets_of_others_pass(look):
    class Bare:
        def __len__(self):
            return 3

    assert look(DETECTOR, train=[Bare()], val=[[1, 2]], test=[Data(1, 2, 3)]) == ('', [])


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
