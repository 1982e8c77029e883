# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Labels, class names and folders against the heads and against each other."""

from types import SimpleNamespace

import pytest
from helpers.data_checks import CLASSIFIER, DETECTOR, Data, build, model
from PIL import Image
from torch import nn

from mmlinattn.engine.data import checks

TWO = SimpleNamespace(num_classes=2)


def parts(**modules):
    made = nn.Module()
    vars(made).update(modules)
    return made


def named(names, *infos, **more):
    return Data(*infos or [0], classes=list(names), **more)


def labelled(label, ignored=0):
    return dict(img_path='a.jpg', instances=[dict(bbox_label=label, ignore_flag=ignored)])


def data_with(meta):
    data = Data(0)
    data.metainfo = meta
    return data


FOLDERS = dict(folder_to_idx=dict(a=0, b=1, c=2), data_prefix=dict(img_path=''))
SMALL = '{}_dataloader: num_classes = 2 of the head is too small for the data: a.jpg has label 2 (c), and the '
MORE = 'num_classes = 4 of the decode_head is more than the 3 classes'
OTHER = "label 1 is 'b' in train_dataloader and 'c' in val_dataloader"


@pytest.mark.parametrize(
    ('made', 'loops', 'words'),  # '' without a finding, a list for a note
    [
        *(
            (made, {stage: [named('abc', info)]}, SMALL.format(stage))
            for stage in ('train', 'val')
            for made, info in (
                (parts(head=TWO), dict(img_path='a.jpg', gt_label=2)),
                (parts(head=TWO), dict(img_path='a.jpg', gt_label=[0, 2])),
                (parts(bbox_head=TWO), labelled(2)),
                (parts(roi_head=SimpleNamespace(bbox_head=TWO)), labelled(2)),
                (parts(roi_head=SimpleNamespace(mask_head=TWO)), labelled(2)),
            )
        ),
        (
            parts(roi_head=SimpleNamespace(bbox_head=nn.ModuleList([parts(num_classes=3), parts(num_classes=80)]))),
            dict(train=[named('abc', labelled(2))]),
            'num_classes of the stages of bbox_head are [3, 80]: expected one number, 3.',
        ),
        (parts(bbox_head=TWO, language_model=0), dict(train=[named('abc', labelled(2))]), ''),  # positions in a text
        (DETECTOR, dict(train=[named('abc', labelled(-1, ignored=1), *map(labelled, range(3)))]), ''),
        (
            DETECTOR,  # of VOC
            dict(train=[named('abc', labelled(0), labelled(1), cat2label={})]),
            ["none of its 2 images has an object of ('c',)"],
        ),
        (model(decode_head=3), dict(train=[named('abc')]), ''),
        (model(decode_head=4), dict(train=[named('abc')]), [MORE]),
        (
            model(decode_head=4, auxiliary_head=3),
            dict(train=[named('abcd')]),
            'num_classes = 3 of the head is too small',
        ),
        (parts(), dict(train=[named('abc')], val=[named('acb')]), OTHER),
        (parts(), dict(train=[named('abc', **FOLDERS)], val=[named('acb')]), OTHER),
        (parts(), dict(train=[named('abc')], val=[named('ABC')]), ''),
        (parts(), dict(train=[named('abc')], val=[named('ab')]), ''),  # the last has no image
        (parts(), dict(train=[named('a')], val=[named('b')]), ''),  # one class by two names
        (parts(), dict(train=[named('abc')], val=[named('')]), ''),
        (parts(), {s: [named(names, return_classes=True)] for s, names in (('train', 'abc'), ('val', 'acb'))}, ''),
        (parts(), dict(train=[data_with(dict(CLASSES=('a', 'b')))]), "Write metainfo=dict(classes=('a', 'b'))"),
        (
            parts(),
            dict(train=[data_with(dict(classes='no.txt'))]),
            "metainfo.classes = 'no.txt': there is no such file",
        ),
        (DETECTOR, dict(train=[[1, 2]], test=[Data(1, 2, 3)]), ''),  # of others
    ],
)
def test_labels_and_names(look, made, loops, words):
    line, warnings = look(made, **loops)
    assert (words if isinstance(words, str) else '') in line and bool(line) == bool(isinstance(words, str) and words)
    assert not isinstance(words, list) or words[0] in warnings[0]


def test_heads_without_classes(look):
    """Upstream's heads of proposals, depth and edges."""
    pytest.importorskip('mmdet')
    pytest.importorskip('mmseg')
    from mmdet.models.dense_heads import RPNHead
    from mmseg.models.decode_heads import STDCHead, VPDDepthHead

    edges = STDCHead(in_channels=4, channels=4, num_classes=2, boundary_threshold=0.1)
    for head in (dict(bbox_head=RPNHead(4)), dict(decode_head=VPDDepthHead()), dict(auxiliary_head=edges)):
        assert look(parts(**head), train=[named('abc', labelled(2))]) == ('', [])


def compares(how):
    if how == 'prototype':
        return parts(head=TWO, prototype=None)
    pytest.importorskip('mmdet')
    from mmdet.models.reid import LinearReIDHead

    loss = dict(type='mmpretrain.CrossEntropyLoss')
    return parts(head=LinearReIDHead(1, 4, 4, 4, num_classes=2, loss_cls=loss))


@pytest.mark.parametrize('how', ['prototype', 'triplets'])
def test_models_that_compare_images(look, how):
    """Validation searches for other classes than training."""
    train, val = (Data(dict(gt_label=label)) for label in (1, 8))
    train.folder_to_idx, val.folder_to_idx = dict(a=0, b=1), dict(c=0)
    assert look(compares(how), train=[train], val=[val]) == ('', [])
    assert 'too small' in look(compares(how), train=[val])[0]
    assert 'the folder' in look(model(head=9), train=[train], val=[val])[0]


def test_joined_data_sets_with_other_classes(look):
    for first, second, is_wrong in (('abc', 'acb', True), ('abc', 'ab', False), ('+-', '-+', True)):
        sets = [named(first), named(second)]
        joined = Data(0, datasets=sets)
        joined.metainfo = [one.metainfo for one in sets]
        assert bool(look(nn.Module(), train=[joined])[0]) == is_wrong


def test_classes_that_a_sample_may_miss(look, monkeypatch):
    monkeypatch.setattr(checks, '_NUM_READ', 2)
    empty, found = dict(instances=[]), dict(instances=[dict(bbox_label=0)])
    assert look(DETECTOR, train=[named('abc', empty, found, empty, found)])[0] == ''
    assert look(DETECTOR, train=[named('abc', {}, {})])[0] == ''  # samples without objects
    assert (
        "none of its 2 images has an object of ('b', 'c')" in look(DETECTOR, train=[named('abc', found, found)])[1][0]
    )


@pytest.mark.parametrize(
    ('tested', 'stops', 'warns'),
    [
        ('abc', '', False),
        ('bac', "label 0 is 'a' in the checkpoint and 'b' in test_dataloader: the classes have another order", False),
        ('abd', '', True),  # may be another language
    ],
)
def test_a_checkpoint_of_other_classes(look, tested, stops, warns):
    checkpoint = dict(state_dict={}, meta=dict(dataset_meta=dict(classes=['a', 'b', 'c'])))
    line, warnings = look(nn.Module(), test=[named(tested)], checkpoint=checkpoint)
    assert stops in line and bool(line) == bool(stops) and bool(warnings) == warns
    resumed = look(nn.Module(), train=[named(tested)], checkpoint=checkpoint, resumes=True)
    assert bool(resumed[0]) == bool(stops)
    assert look(nn.Module(), train=[named(tested)], checkpoint=checkpoint) == ('', [])  # fine-tuned
    assert look(compares('prototype'), test=[named(tested)], checkpoint=checkpoint) == ('', [])
    for meta in (None, dict(dataset_meta=3), dict(dataset_meta=dict(classes='abc'))):
        assert look(nn.Module(), test=[named(tested)], checkpoint=dict(meta=meta, state_dict={})) == ('', [])


# -- folders -----------------------------------------------------------------------------------------------------------


def folders(root, names, classes=None):
    for name in names:
        (root / name).mkdir(parents=True)
        Image.new('RGB', (8, 8)).save(root / name / 'a.png')
    meta = dict(metainfo=dict(classes=classes)) if classes else {}
    return build('mmpretrain', dict(type='CustomDataset', data_prefix=str(root), pipeline=[], **meta))


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
    names = [tuple(f'my {i}' for i in range(n * named)) for n in (3, len(val))]
    train = folders(tmp_path / 'train', ('ant', 'bee', 'cat'), names[0])
    line, _ = look(model(head=4), train=[train], val=[folders(tmp_path / 'val', val, names[1])])
    assert words in line and bool(words) == bool(line)


def test_class_names_in_another_order_than_the_folders(look, tmp_path):
    line, _ = look(CLASSIFIER, train=[folders(tmp_path / 'a', ('ant', 'bee', 'cat'), ('cat', 'ant', 'bee'))])
    assert "label 0 is the folder 'ant', and 'cat' in the config. Write classes=('ant', 'bee', 'cat')" in line


@pytest.mark.parametrize('name', ['.ipynb_checkpoints', '__MACOSX'])
def test_hidden_folders_are_no_class(look, tmp_path, name):
    line, _ = look(CLASSIFIER, train=[folders(tmp_path / 'a', (name, 'bee', 'cat'))])
    assert f'{tmp_path}/a/{name} counts as a class, of label 0. Remove it.' in line


def test_folders_of_joined_data_sets(look, tmp_path):
    """A later data set adds folders to the comparison, and none to the first data set."""
    found = ('ant', 'bee'), ('ant', 'bee', 'cat')
    first, more = (folders(tmp_path / str(i), names) for i, names in enumerate(found))
    val = folders(tmp_path / 'val', ('ant', 'bee', 'dog'))
    line, _ = look(CLASSIFIER, train=[SimpleNamespace(datasets=[first, more])], val=[val])
    assert "label 2 is the folder 'cat' in train_dataloader and the folder 'dog' in val_dataloader" in line
    assert first.folder_to_idx == dict(ant=0, bee=1)


def test_lists_that_number_folders_otherwise(look, tmp_path):
    def listed(*lines):
        (tmp_path / 'list.txt').write_text('\n'.join(lines))
        files = dict(ann_file=str(tmp_path / 'list.txt'), data_prefix=str(tmp_path))
        return [build('mmpretrain', dict(type='ImageNet', pipeline=[], metainfo=dict(classes=tuple('xyz')), **files))]

    train = listed('x/a.png 0', 'y/b.png 1')
    line, _ = look(CLASSIFIER, train=train, val=listed('x/c.png 1', 'y/d.png 0'))
    assert "label 1 is the folder 'y' in train_dataloader and the folder 'x' in val_dataloader" in line
    # folders that are no classes; a sample may miss some folders
    for lines in (('x/a.png 0', 'x/b.png 1'), ('x/a.png 0', 'z/b.png 2')):
        assert look(CLASSIFIER, train=train, val=listed(*lines))[0] == ''
