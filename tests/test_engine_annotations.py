# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Broken annotation files: each row of the table is a fault and the line it ends in, before anything is trained."""

import json
import re
import runpy
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from mmengine.config import Config

from mmlinattn.engine import RunError, annotations, check_data_config
from mmlinattn.engine.annotations import (
    _checked,
    _counts_of_rle,
    check_annotations,
    check_coco,
    describe_extreme,
    is_extreme,
    read_coco,
)

pytest.importorskip('mmdet')
TOOLS = Path(__file__).resolve().parents[1] / 'tools'
CONFIG = TOOLS.parent / 'configs' / 'mmdet' / 'ravlt_shapes_quickstart.py'
CLASSES = ('disc', 'square')
FILE = Path('annotations/train.json')


def whole():
    """Three pictures of 64x48; the first has two objects, the second one, the third none."""
    box = dict(iscrowd=0, area=400, bbox=[8, 8, 20, 20], segmentation=[[8, 8, 28, 8, 28, 28]])
    return dict(
        images=[dict(id=i, file_name=f'{i}.png', width=64, height=48) for i in (1, 2, 3)],
        categories=[dict(id=i, name=name) for i, name in enumerate(CLASSES, 5)],
        annotations=[dict(box, id=i, image_id=image, category_id=5) for i, image in ((10, 1), (11, 1), (12, 2))],
    )


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for i in (1, 2, 3):
        (tmp_path / 'train').mkdir(exist_ok=True)
        cv2.imwrite(f'train/{i}.png', np.zeros((48, 64, 3), np.uint8))
    FILE.parent.mkdir()
    _checked.clear()
    return tmp_path


def check(content, with_mask=True, stage='train'):
    FILE.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    loading = dict(type='LoadAnnotations', with_bbox=True, with_mask=with_mask)
    dataset = dict(
        type='CocoDataset',
        ann_file=str(FILE),
        data_prefix=dict(img='train/'),
        metainfo=dict(classes=CLASSES),
        pipeline=[dict(type='LoadImageFromFile'), loading],
    )
    loader = dict(dataset=dict(type='RepeatDataset', times=2, dataset=dataset))
    check_data_config(Config({'default_scope': 'mmdet', f'{stage}_dataloader': loader}), [stage])


def rewritten(list_name, index=0, **values):
    """A row's file: one entry has other values; ``None`` takes a key away."""

    def make():
        data = whole()
        for key, value in values.items():
            data[list_name][index][key] = value
            if value is None:
                del data[list_name][index][key]
        return data

    return make


def without(key):
    return lambda: {name: value for name, value in whole().items() if name != key}


def box(*values):
    return rewritten('annotations', 1, bbox=list(values))


def mask(value):
    return rewritten('annotations', 1, segmentation=value)


AT = r"annotation id 11 of '1.png' \(image id 1\) has "
FAULTS = {
    # the file
    'empty file': (lambda: b'', 'is empty'),
    'blank file': (lambda: b' \n', 'is empty'),
    'truncated': (lambda: json.dumps(whole()).encode()[:-20], 'is not JSON: .* It seems to be cut off'),
    'truncated in a text': (lambda: b'{"images": [{"file_name": "1.p', 'is not JSON: .* It seems to be cut off'),
    'not JSON': (lambda: b'images: 3, and so on', r'is not JSON: Expecting value: line 1 column 1 \(char 0\)\.$'),
    'binary': (lambda: bytes(range(128, 256)), 'is binary, not JSON'),
    'nested': (lambda: b'[' * 200_000, 'is nested too deeply'),
    'a list': (lambda: [whole()], 'holds a list; it has to be a dictionary with the lists images'),
    'a number': (lambda: b'3', 'holds a int; it has to be a dictionary'),
    'no images': (without('images'), "'images' is missing; it has to be a list"),
    'no categories': (without('categories'), "'categories' is missing; it has to be a list"),
    'no annotations': (without('annotations'), "'annotations' is missing; it has to be a list"),
    'images no list': (lambda: dict(whole(), images=dict()), "'images' is a dict; it has to be a list"),
    'an image is a text': (lambda: dict(whole(), images=['1.png']), r"images\[0\] is '1.png'; it has to be a dict"),
    'a later one is a number': (
        lambda: dict(whole(), annotations=[*whole()['annotations'], 7]),
        r'annotations\[3\] is 7; it has to be a dictionary',
    ),
    'a category is a text': (lambda: dict(whole(), categories=[dict(id=1), 'disc']), r"categories\[1\] is 'disc'; it"),
    # ids
    'no annotation id': (rewritten('annotations', 1, id=None), 'annotation image id 1 has id None, not a number'),
    'category id of a list': (rewritten('categories', 1, id=[6]), r"category 'square' has id \[6\], not a number"),
    'image id of a switch': (rewritten('images', 2, id=True), "image '3.png' has id True, not a number"),
    'image ids': (rewritten('images', 1, id=1), r"image id 1 is there twice \('1.png' and '2.png'\)"),
    'annotation ids': (rewritten('annotations', 1, id=10), r'annotation id 10 is there twice \(image id 1 and'),
    'category ids': (rewritten('categories', 1, id=5), r"category id 5 is there twice \('disc' and 'square'\)"),
    'no image id': (rewritten('images', 0, id=None), "image '1.png' has id None, not a number"),
    'unknown category': (rewritten('annotations', 1, category_id=9), AT + r'category_id 9; categories has \[5, 6\]'),
    'unknown among categories in no order': (
        lambda: dict(
            rewritten('annotations', 1, category_id=9)(), categories=[dict(id=i, name='disc') for i in (6, 'x', 5)]
        ),
        AT + r"category_id 9; categories has \[5, 6, 'x'\]",
    ),
    'no category': (rewritten('annotations', 1, category_id=None), AT + 'category_id None'),
    'category of a list': (rewritten('annotations', 1, category_id=[5]), AT + r'category_id \[5\]'),
    # pictures
    'no file name': (rewritten('images', 0, file_name=None), 'image id 1 has file_name None'),
    'empty file name': (rewritten('images', 0, file_name=''), "image id 1 has file_name '', not the name of a file"),
    'file name of a number': (rewritten('images', 0, file_name=3), 'image id 1 has file_name 3, not the name'),
    'width below one': (rewritten('images', 0, width=0.5), r"image id 1 \('1.png'\) has width 0.5, not a number of"),
    'no width': (rewritten('images', 0, width=None), r"image id 1 \('1.png'\) has width None"),
    'height of 0': (rewritten('images', 0, height=0), r"image id 1 \('1.png'\) has height 0"),
    'height in words': (rewritten('images', 0, height='48'), "has height '48', not a number of pixels"),
    'category without a name': (rewritten('categories', 0, name=None), 'category id 5 has name None'),
    # boxes
    'box of three': (box(8, 8, 20), AT + r'bbox \[8, 8, 20\] of 3 values; it has to be \[x, y, width, height\]'),
    'box of texts': (box('8', 8, 20, 20), AT + r"bbox \['8', 8, 20, 20\], whose values are not all finite"),
    'box with NaN': (box(8, 8, float('nan'), 20), AT + r'bbox \[8, 8, nan, 20\], whose values are not all finite'),
    'box with Inf': (box(8, 8, float('inf'), 20), AT + 'bbox .* not all finite'),
    'box beyond floats': (box(8, 8, 10**400, 20), AT + r'bbox \[8, 8, 10+\.\.\., whose values are not all finite'),
    'box at 1e30': (box(1e30, 8, 20, 20), AT + 'bbox .*1e.30.* outside of its 64x48 image'),
    'box of 1e30': (box(8, 8, 1e30, 20), AT + 'bbox .*1e.30.* far larger than its 64x48 image'),
    'box outside': (box(70, 8, 20, 20), AT + r'bbox \[70, 8, 20, 20\] outside of its 64x48 image'),
    'box below': (box(8, 50, 20, 15), AT + r'bbox \[8, 50, 20, 15\] outside of its 64x48 image'),
    'box left of it': (box(-25, 8, 20, 20), AT + r'bbox \[-25, 8, 20, 20\] outside of its 64x48 image'),
    'box above': (box(8, -22, 20, 20), AT + r'bbox \[8, -22, 20, 20\] outside of its 64x48 image'),
    'box of another scale': (box(8, 8, 200, 20), AT + 'bbox .* far larger than its 64x48 image'),
    'box far too high': (box(8, 8, 20, 70), AT + 'bbox .* far larger than its 64x48 image'),
    'box from far left': (box(-40, 8, 60, 20), AT + 'bbox .* far larger than its 64x48 image'),
    'box from far above': (box(8, -30, 20, 50), AT + 'bbox .* far larger than its 64x48 image'),
    'box backwards': (box(28, 28, -20, -20), AT + 'bbox .* of negative size'),
    'no box': (rewritten('annotations', 1, bbox=None), AT + 'bbox None'),
    'no area': (rewritten('annotations', 1, area=None), AT + 'area None, not a finite number'),
    'neither box nor area': (rewritten('annotations', 1, bbox=[7], area=None), AT + r'bbox \[7\] of 1 values'),
    # masks
    'no mask': (mask(None), AT + 'segmentation None; it has to be a list of polygons, or run lengths'),
    'empty mask': (mask([]), AT + 'an empty segmentation'),
    'empty polygon': (mask([[]]), AT + 'an empty segmentation'),
    'polygon of two points': (mask([[8, 8, 28, 8]]), AT + 'segmentation .* no polygon has x and y of at least 3'),
    'odd polygon': (mask([[8, 8, 28, 8, 28, 28, 3]]), AT + 'segmentation .* no polygon has'),
    'polygon of texts': (mask([['8', 8, 28, 8, 28, 28]]), AT + 'a polygon .* not all finite'),
    'polygon with NaN': (mask([[8, 8, float('nan'), 8, 28, 28]]), AT + 'a polygon .* not all finite'),
    'flat polygon': (mask([8, 8, 28, 8, 28, 28]), AT + 'a polygon 8; it has to be a list'),
    'RLE of another size': (mask(dict(size=[64, 48], counts=[3072])), AT + r'run lengths \(RLE\) of size \[64, 48\]'),
    'RLE that is short': (mask(dict(size=[48, 64], counts=[10, 10])), AT + 'run lengths .* do not fill its 64x48'),
    'RLE beyond 64 bits': (mask(dict(size=[48, 64], counts=[2**70])), AT + 'run lengths .* do not fill'),
    'RLE below 0': (mask(dict(size=[48, 64], counts=[-1, 3073])), AT + 'run lengths .* do not fill'),
    'RLE without counts': (mask(dict(size=[48, 64])), AT + r'run lengths \(RLE\) None'),
    'RLE of nonsense': (mask(dict(size=[48, 64], counts='\x00\xff!')), AT + 'run lengths .* do not fill'),
    'RLE without a size': (
        mask(dict(counts=[3072])),
        AT + r'run lengths \(RLE\) of size None; its image has \[48, 64\]\.$',
    ),
    'RLE of fractions': (
        mask(dict(size=[48, 64], counts=[3072.0])),
        AT + r'run lengths \(RLE\) \[3072.0\] that do not',
    ),
    'RLE of nothing': (mask(dict(size=[48, 64], counts=[])), AT + r'run lengths \(RLE\) \[\] that do not fill'),
    'RLE of a number': (mask(dict(size=[48, 64], counts=3072)), AT + r'run lengths \(RLE\) 3072 that do not fill'),
    'mask in words': (mask('all'), AT + "segmentation 'all'; it has to be a list of polygons, or run lengths"),
    'RLE of no counts': (mask(dict(size=[48, 64], counts='')), AT + 'run lengths .* do not fill'),
    'RLE cut off': (mask(dict(size=[48, 64], counts='PPP')), AT + 'run lengths .* do not fill'),
}


@pytest.mark.parametrize('fault', FAULTS)
def test_fault(place, fault):
    make, line = FAULTS[fault]
    with pytest.raises(RunError) as found:
        check(make())
    message = str(found.value)
    assert re.search(line, message), message
    assert str(FILE) in message and '\n' not in message and len(message) < 500


def test_many_faults_are_counted_and_five_of_them_named(place):
    data = whole()
    data['annotations'] = [dict(data['annotations'][0], id=i, bbox=[1, 2, 3]) for i in range(7)]
    with pytest.raises(RunError) as found:
        check(data)
    message = str(found.value)
    assert message.startswith("train_dataloader.dataset.dataset.ann_file = 'annotations/train.json': 7 faults: ")
    assert message.count('bbox [1, 2, 3] of 3 values') == 5
    assert message.endswith(' and 2 more.')


def many(**lists):
    data = whole()
    for name, entries in lists.items():
        data[name] += entries
    return data


CROWD = dict(id=13, image_id=3, category_id=5, iscrowd=1, area=10, bbox=[0, 0, 9, 9])
TINY = dict(id=13, image_id=3, category_id=5, iscrowd=0, area=0, bbox=[3, 3, 0, 5], segmentation=[])
STAR = dict(id=9, name='star')  # none of CLASSES
OTHER = dict(id=13, image_id=3, category_id=9, iscrowd=0, area=81, bbox=[3, 3, 9, 9])
SILENT = {
    'as it should be': whole(),
    'crowd': many(annotations=[dict(CROWD, segmentation=dict(size=[48, 64], counts=[100, 50, 2922]))]),
    'tiny': many(annotations=[TINY]),
    'ignored': many(annotations=[dict(TINY, ignore=True, bbox=[0])]),
    'tiny and outside': many(annotations=[dict(TINY, bbox=[70, 8, 0.5, 0.5])]),
    'tiny and at the border': many(annotations=[dict(TINY, area=1, bbox=[-1.4, 5, 3, 0.5])]),
    'tiny and of no category': many(annotations=[dict(TINY, category_id=9)]),
    'ignored and of no category': many(annotations=[dict(TINY, ignore=1, category_id=9)]),
    'of a class that is not asked for': many(categories=[STAR], annotations=[dict(OTHER, segmentation=[])]),
    'outside, of a class that is not asked for': many(categories=[STAR], annotations=[dict(OTHER, bbox=[70, 8, 9, 9])]),
    'of a class that is not asked for, at the border': many(
        categories=[STAR], annotations=[dict(OTHER, bbox=[50, 8, 20, 20])]
    ),
    'no objects': dict(whole(), annotations=[]),
    'class that is not asked for': many(categories=[STAR]),
    'a scrap beside a polygon': mask([[1, 1, 2, 2], [8, 8, 28, 8, 28, 28]])(),
    'a pixel over the border': box(50, 30, 15, 19)(),
    'ids that are names': dict(whole(), images=[dict(image, id=str(image['id'])) for image in whole()['images']]),
}


@pytest.mark.parametrize('kind', [kind for kind in SILENT if kind != 'ids that are names'])
def test_what_mmdetection_drops_for_good_reason_is_silent(place, capsys, kind):
    check(SILENT[kind])
    assert capsys.readouterr().err == ''


@pytest.mark.parametrize('values', [dict(bbox=[3, 3, 9]), dict(bbox=[3, 3, 9, 'x']), dict(area=None)])
def test_objects_of_other_categories_have_what_mmdetection_reads_of_all(place, values):
    """It fails on them before it asks for the category."""
    with pytest.raises(RunError, match='annotation id 13 .* has (bbox|area) '):
        check(many(categories=[STAR], annotations=[dict(OTHER, **values)]))


def test_all_categories_are_looked_at_where_the_classes_name_none_of_them():
    data = box(70, 8, 20, 20)()
    for classes in (None, (), ('star',), CLASSES, ('disc', 'star')):
        assert len(check_coco(data, classes=classes).faults) == 1
    assert check_coco(data, classes=('square', 'star')).faults == []


def test_classes_are_read_as_the_data_set_reads_them(place):
    """From ``metainfo``, or a file that it names; LVIS keeps all categories, whatever the classes."""
    FILE.write_text(json.dumps(box(70, 8, 20, 20)()))
    Path('classes.txt').write_text('square\nstar\n')
    for classes in ('classes.txt', ['square', 'star']):
        args = (str(FILE), 'key', False, True, None, dict(classes=classes))
        assert check_annotations('CocoDataset', *args) == []
        with pytest.raises(RunError, match='outside of its 64x48 image'):
            check_annotations('LVISV1Dataset', *args)
    with pytest.raises(RunError, match='outside of its 64x48 image'):  # checked for other classes only
        check_annotations('CocoDataset', *args[:-1], dict(classes=CLASSES))


@pytest.mark.parametrize(
    'data, line',
    [
        (box(50, 8, 20, 20)(), '1 boxes reach out of their image and are clipped'),
        (rewritten('annotations', 1, image_id=99)(), '1 annotations are of images that the file lacks'),
        (SILENT['ids that are names'], '3 annotations are of images that the file lacks'),
        (
            many(images=[dict(id=i, file_name='a.png', width=w, height=h) for i, w, h in [(7, 1, 1), (8, 20000, 20)]]),
            '2 pictures have a side below 8 pixels or are over 50 times as long as wide, so that resizing leaves '
            'little of them: a.png (1x1), a.png (20000x20).',
        ),
    ],
)
def test_what_is_unusual_is_said_once(place, capsys, data, line):
    for _ in range(2):
        check(data)
    assert [line in text for text in capsys.readouterr().err.splitlines()] == [True]


def test_masks_that_are_not_used_are_not_looked_at(place):
    check(mask([])(), with_mask=False)


def test_test_data_have_no_annotations(place):
    check(without('annotations')(), stage='test')


@pytest.mark.parametrize(
    ('annotations', 'line'), [(None, "'annotations' is a NoneType"), ([5], r'annotations\[0\] is 5;')]
)
def test_annotations_that_test_data_have_are_some(place, annotations, line):
    with pytest.raises(RunError, match=line):
        check(dict(whole(), annotations=annotations), stage='test')


def test_run_lengths_are_those_of_pycocotools():
    coco_mask = pytest.importorskip('pycocotools.mask')
    generator = np.random.default_rng(0)
    for density in (0.0, 0.02, 0.5, 0.98, 1.0):
        pixels = np.asfortranarray(generator.random((48, 64)) < density, dtype=np.uint8)
        encoded = coco_mask.encode(pixels)
        counts = _counts_of_rle(encoded['counts'].decode())
        assert counts.sum() == pixels.size
        assert counts[1::2].sum() == pixels.sum()
        assert coco_mask.frPyObjects(dict(size=[48, 64], counts=counts.tolist()), 48, 64)['counts'] == encoded['counts']
        data = mask(dict(size=[48, 64], counts=encoded['counts'].decode()))()
        assert check_coco(data, with_masks=True).faults == []


@pytest.mark.parametrize(
    'text, counts',
    [
        ('o0', [31]),  # 31 and a 6th bit that is not set, in two characters
        ('oo0', [1023]),
        ('n1', [62]),
        ('O', [-1]),  # the 5th bit is the sign
        ('1111', [1, 1, 1, 2]),  # from the fourth on, what differs from the last but one
        ('PPPPPP0', [0]),  # 35 bits
        ('PPPPPPP0', None),
        ('p', None),  # beyond 6 bits
        ('/', None),
        ('P', None),
        ('', None),
    ],
)
def test_run_lengths_by_hand(text, counts):
    found = _counts_of_rle(text)
    assert found is counts is None or found.tolist() == counts


def test_files_are_read_where_they_are(monkeypatch):
    asked = []
    monkeypatch.setattr(
        annotations, 'read_bytes', lambda *args, **kwargs: asked.append((args, kwargs)) or json.dumps(whole()).encode()
    )
    assert read_coco('s3://a.json', dict(backend='petrel')) == read_coco('a.json') == whole()
    assert asked == [
        (('s3://a.json',), dict(backend_args=dict(backend='petrel'))),
        (('a.json',), dict(backend_args=None)),
    ]


def test_large_files_take_seconds(place):
    """COCO has 860 thousand objects."""
    import time

    data = whole()
    data['annotations'] = [dict(data['annotations'][0], id=i) for i in range(20_000)]
    began = time.process_time()
    assert check_coco(data, with_masks=True).faults == []
    assert time.process_time() - began < 2


def test_extreme_sizes():
    assert is_extreme(1, 1) and is_extreme(20000, 20) and is_extreme(20, 20000)
    assert not is_extreme(8, 8) and not is_extreme(400, 8)


def test_the_bounds_of_extreme_sizes():
    found = [(7, 7), (7, 100), (100, 7), (401, 8), (8, 401)]
    assert all(is_extreme(*size) for size in found)
    assert not is_extreme(8, 400) and not is_extreme(8, 9)
    line = describe_extreme([(f'{i}.png', 7, i) for i in range(7)])
    assert line == (
        '7 pictures have a side below 8 pixels or are over 50 times as long as wide, so that resizing leaves little of '
        'them: 0.png (7x0), 1.png (7x1), 2.png (7x2), 3.png (7x3), 4.png (7x4) and 2 more.'
    )


BAD_MASK = [[1, 2]]


@pytest.mark.parametrize(
    'values, faults, clipped',
    [
        # bounds of what is outside, of what is far larger, and of what reaches out; pictures are 64x48
        (dict(bbox=[-20, 8, 20, 20]), 0, 1),
        (dict(bbox=[64, 8, 20, 20]), 0, 1),
        (dict(bbox=[8, -20, 20, 20]), 0, 1),
        (dict(bbox=[8, 48, 20, 20]), 0, 1),
        (dict(bbox=[-32, -24, 128, 96]), 0, 1),
        (dict(bbox=[-33, 8, 60, 20]), 1, 0),
        (dict(bbox=[8, -25, 20, 60]), 1, 0),
        (dict(bbox=[8, 8, 89, 20]), 1, 0),
        (dict(bbox=[8, 8, 20, 65]), 1, 0),
        (dict(bbox=[-1, -1, 66, 50]), 0, 0),
        (dict(bbox=[-1.5, 8, 20, 20]), 0, 1),
        (dict(bbox=[8, -1.5, 20, 20]), 0, 1),
        (dict(bbox=[8, 8, 58, 20]), 0, 1),
        (dict(bbox=[8, 8, 20, 42]), 0, 1),
        # masks of what MMDetection leaves out are not looked at
        (dict(segmentation=BAD_MASK), 1, 0),
        (dict(segmentation=BAD_MASK, bbox=[8, 8, 1, 1], area=0.1), 1, 0),
        (dict(segmentation=BAD_MASK, bbox=[8, 8, 0.5, 20]), 0, 0),
        (dict(segmentation=BAD_MASK, bbox=[8, 8, 20, 0.5]), 0, 0),
        (dict(segmentation=BAD_MASK, area=0), 0, 0),
        # of a box that is wrong nothing else is said
        (dict(segmentation=BAD_MASK, bbox=[8, 8, -1, 20], area=None), 1, 0),
        (dict(category_id=9, bbox=[1]), 2, 0),
        (dict(bbox=[8, 8, 20, True]), 1, 0),
        (dict(area=float('nan')), 1, 0),
        (dict(ignore=True, bbox=None, area=None), 0, 0),
        (dict(ignore=1, bbox=None, area=None), 0, 0),
        (dict(ignore=False, bbox=None), 1, 0),
        (dict(ignore=0, bbox=[8, 8, 58, 20]), 0, 1),
        (dict(id=True), 1, 0),
        (dict(image_id=[1]), 0, None),
    ],
    ids=str,
)
def test_the_bounds_of_an_object(values, faults, clipped):
    data = whole()
    data['annotations'][1].update(values)
    found = check_coco(data, with_masks=True)
    assert len(found.faults) == faults
    notice = f'{clipped} boxes reach out of their image and are clipped.'
    orphan = '1 annotations are of images that the file lacks, and are left out.'
    assert found.notices == ([orphan] if clipped is None else [notice] * clipped)


def test_objects_of_a_picture_without_a_size_are_not_compared_with_it():
    data = rewritten('images', width=None)()
    data['annotations'][0].update(bbox=[1e9, 0, 1, 1], category_id=9)
    first, second = check_coco(data, with_masks=True).faults
    assert first == "image id 1 ('1.png') has width None, not a number of pixels"
    assert second == "annotation id 10 of '1.png' (image id 1) has category_id 9; categories has [5, 6]"


def test_which_files_are_checked_and_how_often(place, monkeypatch):
    calls = []
    FILE.write_text(json.dumps(box(50, 8, 20, 20)()))
    monkeypatch.setattr(
        annotations, 'read_coco', lambda *args, **kwargs: calls.append((args, kwargs)) or read_coco(*args, **kwargs)
    )
    path, backend = str(FILE), dict(backend='local')

    def check_as(kind, with_masks=False, is_training=True):
        return check_annotations(kind, path, 'key', with_masks, is_training, backend)

    for kind in ('CocoPanopticDataset', 'VOCDataset', 'NoSuchDataset', dict):
        assert check_as(kind) == [] and not calls
    from mmdet.datasets import CocoDataset, CocoPanopticDataset

    assert check_as(type('OfUsers', (CocoPanopticDataset,), {})) == [] and not calls  # reads as its parent does
    line = f'{path}: 1 boxes reach out of their image and are clipped.'
    assert check_as(type('OfUsers', (CocoDataset,), {})) == [line] and calls.pop()
    _checked.clear()
    assert check_as('CocoDataset', is_training=False) == [line]
    assert check_as('mmdet.CocoDataset') == []
    assert check_as('CocoDataset', with_masks=True) == [line]  # which were not looked at before
    assert calls == [((path, backend), dict(need_annotations=needed)) for needed in (False, True)]
    FILE.write_text(json.dumps(box(1)()))
    _checked.clear()
    for _ in range(2):  # a file with faults is not forgotten
        with pytest.raises(RunError) as found:
            check_as('CocoDataset')
        assert str(found.value) == (
            f"key = {path!r}: annotation id 11 of '1.png' (image id 1) has bbox [1] of 1 values; it has to be "
            '[x, y, width, height].'
        )


@pytest.fixture
def fails(monkeypatch, capsys):
    def run(*args):
        monkeypatch.setattr(sys, 'argv', ['train.py', *map(str, args)])
        with pytest.raises(SystemExit) as exit_:
            runpy.run_path(str(TOOLS / 'train.py'), run_name='__main__')
        assert exit_.value.code == 1
        return [line for line in capsys.readouterr().err.splitlines() if line.startswith('error: ')]

    return run


def shapes():
    from mmlinattn.datasets import DatasetSpec, write_dataset

    write_dataset('data', DatasetSpec('coco', 3, 1, size=(64, 64)))
    return [CONFIG, '--data-root', 'data', '--work-dir', 'work']


def test_the_tool_says_it_before_anything_is_built(fails, place, monkeypatch):
    args = shapes()
    monkeypatch.setattr('mmengine.runner.Runner.from_cfg', None)
    path = Path('data/annotations/instances_train2017.json')
    path.write_bytes(path.read_bytes()[:500])
    (line,) = fails(*args)
    assert str(path) in line and 'It seems to be cut off' in line


def test_a_picture_of_another_size_than_declared(fails, place):
    args = shapes()
    path = Path('data/annotations/instances_train2017.json')
    name = json.loads(path.read_bytes())['images'][1]['file_name']
    picture = str(Path('data/train2017', name))
    cv2.imwrite(picture, cv2.imread(picture)[:-4])
    (line,) = fails(*args)
    assert f'{picture} has 60x64 pixels (height x width), its annotation file says 64x64' in line
