# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Files of labelling tools: boxes, outlines, and every further statement about an object."""

import base64
import io
import json
import unicodedata
from xml.sax.saxutils import quoteattr

import numpy as np
import pytest
from helpers.own_files import (
    HEIGHT,
    WIDTH,
    assert_refused,
    boxes_of,
    coco_dict,
    counts,
    images,
    picture,
    read,
    text,
    voc,
)
from PIL import Image
from pycocotools import mask as coco_masks

from mmlinattn.tooling.own_data.data import Data
from mmlinattn.utils.errors import RunError

CAR, BUS = ('car', (4, 8, 24, 38)), ('bus', (30, 10, 60, 40))
OBJECTS = {name: [CAR, BUS] if number % 2 else [CAR] for number, name in enumerate('abcdef')}
TRIANGLE = [[4, 8], [24, 8], [24, 38]]


def annotations_of(data, *splits):
    """Annotations by (image, class, left, top, right, bottom), of all splits."""
    return {
        (file.rpartition('/')[2], name, x, y, round(x + w, 3), round(y + h, 3)): entry
        for (file, name, (x, y, w, h)), entry in boxes_of(data, *splits).items()
    }


def labelme(root, objects=OBJECTS, shape_type='rectangle', **more):
    for name, items in objects.items():
        points = [(label, np.reshape(box, (-1, 2)).tolist()) for label, box in items]
        shapes = [dict(label=label, points=each, shape_type=shape_type, **more) for label, each in points]
        content = dict(version='5.5', flags={}, shapes=shapes, imagePath=f'{name}.jpg', imageHeight=HEIGHT)
        text(root / 'images' / f'{name}.json', dict(content, imageWidth=WIDTH, imageData=None))


def cvat(root, objects=OBJECTS, shape=None, **more):
    rows = []
    for number, (name, items) in enumerate(objects.items()):
        rows.append(f'<image id="{number}" name="{name}.jpg" width="{WIDTH}" height="{HEIGHT}">')
        for label, box in items:
            edges = dict(zip(('xtl', 'ytl', 'xbr', 'ybr'), box), label=label, occluded=0, z_order=0, **more)
            rows.append('<box ' + ' '.join(f'{key}={quoteattr(str(value))}' for key, value in edges.items()) + '/>')
        rows.append(f'{shape or ""}</image>')
    labels = '<labels><label><name>bus</name></label><label><name>car</name></label></labels>'
    body = f'<version>1.1</version><meta><task>{labels}</task></meta>{"".join(rows)}'
    text(root / 'annotations.xml', f'<annotations>{body}</annotations>')


def studio_value(box, **more):
    left, top, right, bottom = box
    value = dict(x=left / WIDTH * 100, y=top / HEIGHT * 100, rotation=0)
    return dict(value, width=(right - left) / WIDTH * 100, height=(bottom - top) / HEIGHT * 100, **more)


def label_studio(root, objects=OBJECTS, value=None, **more):
    tasks, size = [], dict(original_width=WIDTH, original_height=HEIGHT)
    for number, (name, items) in enumerate(objects.items()):
        values = [{**studio_value(box, rectanglelabels=[label]), **(value or {})} for label, box in items]
        results = [dict(type='rectanglelabels', value=each, **size, **more) for each in values]
        address = f'/data/upload/1/0a1b2c3d-{name}.jpg'
        tasks.append(dict(id=number, data=dict(image=address), annotations=[dict(id=number, result=results)]))
    text(root / 'project-1.json', tasks)


def label_studio_min(root, objects=OBJECTS):
    tasks = [
        dict(
            image=f'/data/local-files/?d=images/{name}.jpg',
            label=[dict(studio_value(box, rectanglelabels=[label]), original_width=WIDTH) for label, box in items],
        )
        for name, items in objects.items()
    ]
    text(root / 'min.json', tasks)


# header and row of an object
CSV = {
    'TensorFlow': (
        'filename,width,height,class,xmin,ymin,xmax,ymax',
        lambda name, label, box: (f'{name}.jpg', WIDTH, HEIGHT, label, *box),
    ),
    'RetinaNet': ('', lambda name, label, box: (f'images/{name}.jpg', *box, label)),
    'sides': ('image_id;label;x;y;w;h;split', lambda name, label, box: (name, label, *sides(box), '')),
    'Kaggle': (
        'image_id,width,height,bbox,class',
        lambda name, label, box: (name, WIDTH, HEIGHT, '"[{}, {}, {}, {}]"'.format(*sides(box)), label),
    ),
    'Open Images': (
        'ImageID,LabelName,Confidence,XMin,XMax,YMin,YMax,IsGroupOf',
        lambda name, label, b: (name, label, 1, b[0] / WIDTH, b[2] / WIDTH, b[1] / HEIGHT, b[3] / HEIGHT, 0),
    ),
}


def sides(box):
    return box[0], box[1], box[2] - box[0], box[3] - box[1]


def table(kind):
    header, row = CSV[kind]

    def write(root, objects=OBJECTS):
        rows = [map(str, row(name, *item)) for name, items in objects.items() for item in items]
        delimiter = ';' if ';' in header else ','
        text(root / 'labels.csv', '\n'.join(filter(None, [header, *map(delimiter.join, rows)])))

    return write


def kitti(root, objects=OBJECTS, more=''):
    (root / 'images').rename(root / 'image_2')
    numbers = f'1.6 1.6 3.7 1 1.5 8.2 -1.5{more}'
    for name, items in objects.items():
        lines = [f'{label} 0.00 0 -1.58 {" ".join(map(str, box))} {numbers}' for label, box in items]
        text(root / 'label_2' / f'{name}.txt', '\n'.join(lines))


FORMATS = {write.__name__: write for write in (labelme, cvat, label_studio, label_studio_min, kitti)}
FORMATS.update({f'CSV of {kind}': table(kind) for kind in CSV})


@pytest.mark.parametrize('write', FORMATS.values(), ids=FORMATS)
def test_boxes_of_each_format(tmp_path, write):
    images(tmp_path / 'images')
    write(tmp_path)
    boxes = {'CSV of sides': 'sides', 'CSV of Kaggle': 'sides', 'CSV of RetinaNet': 'corners'}
    data = read(tmp_path, boxes=next((boxes[name] for name in boxes if write is FORMATS[name]), None))
    expected = {(f'{name}.jpg', label, *map(float, box)) for name, items in OBJECTS.items() for label, box in items}
    assert set(annotations_of(data)) == expected
    assert data.classes == ['bus', 'car'] and not data.masks and data.densest == 2
    assert counts(data) == [5, 1]
    assert not [note for note in data.notes if 'not used' in note or 'left out' in note], data.notes


def drawn(points):
    mask = coco_masks.frPyObjects([np.ravel(points).tolist()], HEIGHT, WIDTH)
    return coco_masks.decode(mask)[..., 0]


def pixels_of(entry):
    outline = entry['segmentation']
    rle = coco_masks.merge(coco_masks.frPyObjects(outline, HEIGHT, WIDTH)) if isinstance(outline, list) else outline
    return coco_masks.decode(rle)


def labelme_outlines(root):
    labelme(root, {name: [('car', TRIANGLE)] for name in OBJECTS}, shape_type='polygon')


def labelme_masks(root):
    file = io.BytesIO()
    Image.fromarray(drawn(TRIANGLE)[8:39, 4:25] * 255).save(file, 'PNG')
    mask = base64.b64encode(file.getvalue()).decode()
    labelme(root, {name: [('car', (4, 8, 24, 38))] for name in OBJECTS}, shape_type='mask', mask=mask)


def cvat_outlines(root):
    points = ';'.join(f'{x},{y}' for x, y in TRIANGLE)
    cvat(root, dict.fromkeys(OBJECTS, ()), f'<polygon label="car" points="{points}" occluded="0"/>')


def cvat_masks(root):
    part = drawn(TRIANGLE)[8:39, 4:25].ravel()
    ends = [0, *(np.flatnonzero(np.diff(part)) + 1).tolist(), len(part)]
    runs = ([0] if part[0] else []) + np.diff(ends).tolist()
    more = f'left="4" top="8" width="21" height="31" rle="{", ".join(map(str, runs))}"'
    cvat(root, dict.fromkeys(OBJECTS, ()), f'<mask label="car" occluded="0" {more}/>')


def studio_outlines(root):
    points = (np.array(TRIANGLE) / (WIDTH, HEIGHT) * 100).tolist()
    value = dict(points=points, polygonlabels=['car'], rectanglelabels=[])
    label_studio(root, dict.fromkeys(OBJECTS, [CAR]), value, score=None)


def yolo_outlines(root):
    for name in OBJECTS:
        numbers = (np.array(TRIANGLE) / (WIDTH, HEIGHT)).ravel().tolist()
        text(root / 'labels' / f'{name}.txt', ' '.join(map(str, [0, *numbers])))
    text(root / 'data.yaml', 'names: [car]')


def voc_files(root, *objects):
    for name in OBJECTS:
        text(root / 'images' / f'{name}.xml', voc(*objects, size=(0, 0)))


def voc_outlines(root):
    tags = ''.join(f'<x{i}>{x}</x{i}><y{i}>{y}</y{i}>' for i, (x, y) in enumerate(TRIANGLE, 1))
    voc_files(root, (*CAR, f'<polygon>{tags}</polygon>'))


@pytest.mark.parametrize(
    'write',
    [labelme_outlines, labelme_masks, cvat_outlines, cvat_masks, studio_outlines, yolo_outlines, voc_outlines],
    ids=lambda write: write.__name__,
)
def test_outlines_of_each_format(tmp_path, write):
    images(tmp_path / 'images')
    write(tmp_path)
    data = read(tmp_path)
    assert data.masks and len(annotations_of(data)) == len(OBJECTS)
    for entry in annotations_of(data).values():
        assert np.abs(pixels_of(entry).astype(int) - drawn(TRIANGLE)).sum() <= 2
        assert entry['area'] == pytest.approx(300, abs=40)


TURNED = ('bar', (10, 18, 54, 30))  # its upright box after a turn by 90 degrees is (26, 2, 38, 46)


def rotated_coco(root):
    more = dict(bbox=[10, 18, 44, 12], area=528, iscrowd=0, segmentation=[], attributes=dict(rotation=90.0))
    text(root / 'all.json', coco_dict([f'images/{name}.jpg' for name in OBJECTS], ['bar'], **more))


def rotated_cvat(root):
    cvat(root, dict.fromkeys(OBJECTS, [TURNED]), rotation=90.0)


def rotated_studio(root):  # around the upper left corner, at (38, 2) after the turn
    x, y = 38 / WIDTH * 100, 2 / HEIGHT * 100
    label_studio(root, dict.fromkeys(OBJECTS, [TURNED]), dict(x=x, y=y, rotation=90))


def rotated_voc(root):
    box = '<robndbox><cx>32</cx><cy>24</cy><w>44</w><h>12</h><angle>1.5707963</angle></robndbox>'
    voc_files(root, ('bar', (), '<type>robndbox</type>', box))


@pytest.mark.parametrize(
    'write', [rotated_coco, rotated_cvat, rotated_studio, rotated_voc], ids=lambda write: write.__name__
)
def test_rotated_rectangles(tmp_path, write):
    images(tmp_path / 'images')
    write(tmp_path)
    data = read(tmp_path)
    assert {key[2:] for key in annotations_of(data)} == {(26, 2, 38, 46)}
    assert '6 objects: rotated, the upright boxes around them are learnt' in data.notes


def voc_marks(**marks):
    tags = ''.join(f'<{key}>{value}</{key}>' for key, value in marks.items())
    return lambda root: voc_files(root, CAR, (*CAR, tags))


def coco_marks(**marks):
    def write(root):
        rotated_coco(root)
        content = json.loads((root / 'all.json').read_text())
        plain = [dict(entry, attributes={}) for entry in content['annotations']]
        marked = [dict(entry, id=entry['id'] + 10, **marks) for entry in plain]
        text(root / 'all.json', dict(content, annotations=plain + marked))

    return write


@pytest.mark.parametrize(
    'write, said',
    [
        (coco_marks(iscrowd=1), 'ignored, neither learnt nor counted: 6 crowd'),
        (coco_marks(ignore=1), 'ignored, neither learnt nor counted: 6 ignore'),
        (coco_marks(attributes=dict(ignored=True)), 'ignored, neither learnt nor counted: 6 ignore'),
        (voc_marks(difficult=1, truncated=0), 'ignored, neither learnt nor counted: 6 difficult'),
        (voc_marks(truncated=1, pose='Unspecified'), '6 objects: truncated'),
        (voc_marks(occluded=1, pose='Left'), 'not used of the annotations: pose (6)'),
        (coco_marks(keypoints=[1, 2, 2], num_keypoints=1), '6 objects: keypoints, boxes are learnt'),
        (coco_marks(score=0.7), '6 objects: score, as predictions have'),
        (lambda root: kitti(root, more=' 0.7'), '9 objects: score, as predictions have'),
        (coco_marks(track_id=3, attributes=dict(colour='red', occluded=True)), 'colour (6), track_id (6)'),
        (coco_marks(attributes=dict(occluded=True)), '6 objects: occluded'),
        (
            coco_marks(bbox=[0, 0, 9, 9], segmentation=[np.ravel(TRIANGLE).tolist()]),
            'boxes of 6 of 6 objects lie elsewhere than their',
        ),
    ],
)
def test_every_statement_about_an_object_is_used_or_named(tmp_path, write, said):
    images(tmp_path / 'images')
    write(tmp_path)
    data = read(tmp_path)
    assert any(said in note for note in data.notes), data.notes
    is_ignored = 'ignored' in said
    assert data.ignores == is_ignored and data.densest == (1 if is_ignored else 2)
    entries = [entry for content in data.annotations.values() for entry in json.loads(content)['annotations']]
    assert {entry['iscrowd'] for entry in entries} == ({0, 1} if is_ignored else {0})
    assert 'ignore' not in data.annotations['train']


def test_shapes_of_a_group_are_parts_of_one_object(tmp_path):
    images(tmp_path / 'images')
    two = [('car', TRIANGLE), ('car', (np.array(TRIANGLE) + (30, 0)).tolist())]
    labelme(tmp_path, dict.fromkeys(OBJECTS, two), shape_type='polygon', group_id=7)
    data = read(tmp_path)
    assert {key[2:] for key in annotations_of(data)} == {(4, 8, 54, 38)} and data.masks
    assert all(len(entry['segmentation']) == 2 for entry in annotations_of(data).values())
    assert '6 objects: parts, each is one object of several polygons' in data.notes


def test_shapes_that_are_no_objects_are_named(tmp_path):
    images(tmp_path / 'images')
    labelme(tmp_path)
    file = tmp_path / 'images/a.json'
    content = json.loads(file.read_text())
    content['shapes'] += [dict(label='car', points=[[1, 1]], shape_type='point')]
    content['shapes'] += [dict(label='car', points=[[20, 20], [20, 26]], shape_type='circle')]
    text(file, dict(content, flags=dict(blurred=True)))
    text(tmp_path / 'images/b.json', dict(content, shapes=[], imagePath='b.jpg'))
    data = read(tmp_path)
    assert '1 of 6 images have no object: they are background' in data.notes
    assert 'shapes that are no boxes or polygons are left out: 1 of kind point' in data.notes
    assert 'not used of the images in LabelMe JSON: flag blurred (1)' in data.notes
    assert ('a.jpg', 'car', 14, 14, 26, 26) in annotations_of(data)


def test_regions_without_label_are_named(tmp_path):
    images(tmp_path / 'images')
    label_studio(tmp_path, id='a')
    content = json.loads((tmp_path / 'project-1.json').read_text())
    for name in 'ab':  # the one of a has its label in another result
        shape = dict(
            type='rectangle', value=studio_value(CAR[1]), original_width=WIDTH, original_height=HEIGHT, id=name
        )
        content[0]['annotations'][0]['result'].append(shape)
    text(tmp_path / 'project-1.json', content)
    data = read(tmp_path)
    assert 'shapes that are no boxes or polygons are left out: 1 of kind rectangle without label' in data.notes


def test_decomposed_letters_of_a_class_are_the_composed_ones(tmp_path):
    """As macOS writes names of folders."""
    images(tmp_path / 'images')
    names = [unicodedata.normalize(form, 'Fußgänger') for form in ('NFC', 'NFD')]
    labelme(tmp_path, {name: [(names[number % 2], CAR[1])] for number, name in enumerate(OBJECTS)})
    data = read(tmp_path)
    assert data.classes == names[:1] and len(annotations_of(data)) == 6
    for number in range(8):
        picture(tmp_path / 'folders' / ('train', 'val')[number % 2] / names[number % 2] / f'{number}.jpg')
        picture(tmp_path / 'folders' / ('train', 'val')[number % 2] / 'bus' / f'{number + 8}.jpg')
    assert read(tmp_path / 'folders', 'classification').classes == sorted(['bus', names[0]])


def test_regions_without_class_are_ignored_for_every_class(tmp_path):
    images(tmp_path / 'images')
    kitti(tmp_path, {name: [*items, ('DontCare', (1, 1, 9, 9))] for name, items in OBJECTS.items()})
    data = read(tmp_path)
    crowds = {key for key, entry in annotations_of(data).items() if entry['iscrowd']}
    assert {key[1:] for key in crowds} == {(name, 1, 1, 9, 9) for name in ('bus', 'car')} and len(crowds) == 12
    assert data.classes == ['bus', 'car'] and data.ignores


@pytest.mark.parametrize('kind', ['numbers in CSV', 'YOLO'])
def test_names_that_are_no_classes_keep_their_numbers(tmp_path, kind):
    """Classes that stand for the background or for regions to ignore count in the order of the names."""
    images(tmp_path / 'images')
    if kind == 'YOLO':
        lines = '0 0.2 0.2 0.1 0.1\n2 0.5 0.5 0.2 0.2'
        for name in OBJECTS:
            text(tmp_path / 'labels' / f'{name}.txt', lines)
    else:
        rows = [f'{name}.jpg,{label},4,8,24,38' for name in OBJECTS for label in (0, 2)]
        text(tmp_path / 'labels.csv', '\n'.join(['filename,class,xmin,ymin,xmax,ymax', *rows]))
    text(tmp_path / 'classes.txt', 'ignored regions\n_background_\ncar')
    data = read(tmp_path)
    classes = data.classes if kind == 'YOLO' else ['_background_', *data.classes]
    assert classes == ['_background_', 'car'] and data.ignores
    assert {key[1] for key, entry in annotations_of(data).items() if not entry['iscrowd']} == {'car'}


def test_splits_that_files_name(tmp_path):
    images(tmp_path / 'images')
    cvat(tmp_path)
    file = tmp_path / 'annotations.xml'
    content = file.read_text()
    for name, split in zip(OBJECTS, ('Train', 'Train', 'Train', 'Validation', 'Validation', 'Test')):
        content = content.replace(f'name="{name}.jpg"', f'name="{name}.jpg" subset="{split}"')
    text(file, content)
    assert counts(read(tmp_path)) == [3, 2, 1]


def test_tasks_of_label_studio_without_annotation(tmp_path):
    """An empty annotation means no objects; a task without annotation is unlabelled."""
    images(tmp_path / 'images')
    label_studio(tmp_path)
    file = tmp_path / 'project-1.json'
    tasks = json.loads(file.read_text())
    tasks[0]['annotations'], tasks[1]['annotations'][0]['result'] = [], []
    tasks[2]['annotations'].append(dict(result=[]))
    data = read(text(file, tasks).parent)
    assert '1 tasks without annotation are left out, predictions do not count' in data.notes
    assert '1 tasks have several annotations: the first is read' in data.notes
    assert sum(counts(data)) == 5


def test_names_of_classes_are_texts(tmp_path):
    """YAML would read them as booleans and numbers."""
    images(tmp_path / 'images')
    for name in OBJECTS:
        text(tmp_path / 'labels' / f'{name}.txt', '\n'.join(f'{i} 0.5 0.5 0.2 0.2' for i in range(4)))
    text(tmp_path / 'data.yaml', 'names: [yes, off, 1.0, null]')
    text(tmp_path / 'chart.yaml', '{{ if .Values.name }}')  # a template, no YAML
    assert read(tmp_path).classes == ['yes', 'off', '1.0', 'null']


@pytest.mark.parametrize('write', [labelme, cvat, table('TensorFlow'), kitti])
def test_the_last_images_of_a_class_stay_in_train(tmp_path, write):
    """Two images of a class of 25: one trains, one validates; with one alone, it trains."""
    names = [f'{i:02}' for i in range(25)]
    images(tmp_path / 'images', names)
    rare = {'07': [CAR, BUS], '19': [BUS], '11': [CAR, ('van', (1, 1, 9, 9))]}
    write(tmp_path, {name: rare.get(name, [CAR]) for name in names})
    data = read(tmp_path)
    seen = {split: [key[1] for key in annotations_of(data, split)] for split in ('train', 'val')}
    assert seen['train'].count('bus') == seen['val'].count('bus') == 1 and 'van' in seen['train']
    assert seen['val'].count('car') == 5
    assert 'no image of van in val: not measured' in data.notes


KITTI_LINE = 'Car 0 0 0 1 2 3 4 5 6 7 8 9 10 11'
UNREAD = {
    'via.json': ({'_via_img_metadata': {'a': {'regions': []}}}, 'VGG Image Annotator JSON', 'COCO JSON'),
    'a.jpg.json': ({'objects': [{'classTitle': 'car', 'geometryType': 'rectangle'}]}, 'Supervisely JSON', 'COCO'),
    'export.json': ([{'data_row': {'id': 1}, 'projects': {}}], 'Labelbox JSON', 'COCO JSON'),
    'bdd.json': ([{'name': 'a.jpg', 'labels': [{'box2d': {'x1': 1}}]}], 'BDD100K JSON', 'to_coco'),
    'create.json': ([{'image': 'a.jpg', 'annotations': [{'label': 'a', 'coordinates': {}}]}], 'CreateML JSON', 'VOC'),
    'dm.json': ({'infos': {}, 'dm_format_version': '1', 'items': []}, 'Datumaro JSON', 'datum convert'),
    'v7.json': ({'item': {'name': 'a'}, 'annotations': [{'bounding_box': {}}]}, 'Darwin JSON', 'COCO JSON'),
    'v7_1.json': ({'image': {}, 'annotations': [{'bounding_box': {}}]}, 'Darwin JSON', 'COCO JSON'),
    'panoptic.json': ({'images': [], 'annotations': [{'segments_info': []}]}, 'COCO panoptic JSON', 'instances_'),
    'via.csv': ('filename,region_shape_attributes\na.jpg,"{}"', 'VGG Image Annotator CSV', 'COCO JSON'),
    'train.csv': (f'ImageId,EncodedPixels\na.jpg,{"1 1 " * 40000}', 'run lengths', 'write COCO JSON, or masks as PNG'),
    'labelTxt/a.txt': ('1 1 9 1 9 9 1 9 plane 0', 'DOTA text files', 'upright boxes'),
    'gt.txt': ('1,1,10,20,30,40,1,-1,-1,-1', 'MOT text files', 'mot2coco'),
    'annotations/a.txt': ('10,20,30,40,1,4,0,0', 'VisDrone text files', 'COCO JSON'),
    'a.tfrecord': ('x', 'a TFRecord', 'COCO JSON'),
    'labels.xlsx': ('x', 'a spreadsheet', 'save it as CSV'),
    'old.xml': ('<annotation><object><polygon><pt><x>1</x></pt></polygon></object></annotation>', 'LabelMe XML', 'VOC'),
    'dlib.xml': ('<dataset><images><image file="a.jpg"><box top="1"/></image></images></dataset>', 'dlib XML', 'COCO'),
}


@pytest.mark.parametrize('name', UNREAD)
def test_formats_that_are_not_read_are_named(tmp_path, name):
    content, kind, remedy = UNREAD[name]
    images(tmp_path / 'images')
    text(tmp_path / name, content)
    line = assert_refused((kind, name.rpartition('/')[2]), read, tmp_path)
    assert remedy in line.partition(' It takes ')[0]  # which every refusal has


TWO_IMAGES = [dict(data=dict(before='a.jpg', after='b.jpg'), annotations=[dict(result=[])])]


@pytest.mark.parametrize(
    'write, said',
    [
        (lambda root: text(root / 'a.xml', '<annotations><meta/><track id="0"/></annotations>'), 'CVAT XML for videos'),
        (lambda root: label_studio(root, value=dict(rle=[1], format='rle')), 'has brush masks'),
        (lambda root: text(root / 'a.json', TWO_IMAGES), 'a task has several images, a.jpg and b.jpg'),
        (lambda root: label_studio(root, image_rotation=90), 'was turned in Label Studio'),
        (lambda root: labelme(root, {'z': [CAR]}), "names the image 'z.jpg', which is in no folder"),
        (lambda root: labelme(root, {'a': [('car', (1, 1, float('nan'), 9))]}), 'a.json: a point that is no number'),
        (voc_marks(polygon='<x1/>' + '<y>1</y>' * 5), 'a.xml: a point that is no number'),
        (lambda root: text(root / 'b.csv', 'image,x,y,w,h,label\na.jpg,1,2,3,x,car'), 'has no box of four numbers'),
        (lambda root: text(root / 'b.csv', 'image,x,y,w,h,label\na.jpg,1,2,3,4,'), 'has no class'),
        (lambda root: text(root / 'label_2/a.txt', KITTI_LINE + '\nCar 0 0'), 'Car is not followed by the 14 numbers'),
    ],
)
def test_files_of_labelling_tools_that_are_refused(tmp_path, write, said):
    images(tmp_path / 'images')
    write(tmp_path)
    assert_refused(said, read, tmp_path)


# -- one class per image ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'rows',
    [
        ['filename,label', *(f'{name}.jpg,{"car" if name < "d" else "bus"}' for name in OBJECTS)],
        ['id\tbreed', *(f'{name}\t{"car" if name < "d" else "bus"}' for name in OBJECTS)],
        ['image,bus,car', *(f'{name},{int(name >= "d")},{int(name < "d")}' for name in OBJECTS)],
        ['image,label,label_name', *(f'{name},{int(name < "d")},{"car" if name < "d" else "bus"}' for name in OBJECTS)],
        ['sep=;', 'image;label', *(f'{name};{"car" if name < "d" else "bus"}' for name in OBJECTS)],
        ['image;label;seen', *(f'{name};{"car" if name < "d" else "bus"};far,wet,by,night' for name in OBJECTS)],
        ['annotator,choice,id,image', *(f'1,{"car" if name < "d" else "bus"},7,/data/{name}.jpg' for name in OBJECTS)],
    ],
    ids=['label', 'no endings', 'column per class', 'number and name', 'of Excel', 'commas in cells', 'Label Studio'],
)
def test_tables_of_classes(tmp_path, rows):
    images(tmp_path / 'images')
    text(tmp_path / 'labels.csv', '\n'.join(rows))
    data = read(tmp_path, 'classification')
    assert (data.kind, data.classes) == ('CSV of classes', ['bus', 'car'])
    listed = dict(line.split() for text in data.annotations.values() for line in text.splitlines())
    assert listed == {f'images/{name}.jpg': str(int(name < 'd')) for name in OBJECTS}
    assert counts(data, 'train', 'val') == [4, 2]


def test_tables_of_classes_with_splits_and_numbers(tmp_path):
    images(tmp_path / 'images')
    rows = [f'{name}.jpg,{i % 2 * 8 + 2},{"val" if i > 3 else "train"},x' for i, name in enumerate(OBJECTS)]
    text(tmp_path / 'labels.csv', '\n'.join(['image,class,split,photographer', *rows]))
    text(tmp_path / 'names.csv', 'id,name\n2,x\n10,y')
    data = read(tmp_path, 'classification')
    assert data.classes == ['x', 'y'] and counts(data, 'train', 'val') == [4, 2]
    assert 'not used of labels.csv: columns photographer' in data.notes


@pytest.mark.parametrize(
    'rows, said',
    [
        (['image,a,b', 'a,1,1'], 'has 2 classes; one an image is learnt'),
        (['annotator,choice,image', '1,{"choices": ["a"]},a.jpg'], 'is Label Studio CSV'),
        (['image,sex,x,y,z', 'a.jpg,F,1.0,,1.0', 'b.jpg,M,-1.0,,0.0'], 'x, y, z are several classes of one image'),
        (['image,label', 'a.jpg,'], 'has 0 classes'),
        (['image,tags', 'a.jpg,clear water', 'b.jpg,clear road'], 'several classes'),
        (['image,label', 'a.jpg,x', 'b.jpg,x;y'], 'several classes'),
        (['image,age', 'a.jpg,1.5', 'b.jpg,2.5'], 'a table without a known header; its columns are image, age'),
        (['image,label', 'z.jpg,a'], "names the image 'z.jpg'"),
        (
            ['image,label', 'a.jpg,a', 'a.jpg,b'],
            "a.jpg is labelled twice: 'a' in labels.csv, and 'b' in labels.csv: remove one of the two rows",
        ),
        (['image,label', "a.jpg,\"['x', 'y']\"", "b.jpg,['x']"], "['x', 'y']\", several classes"),
        (['image,label', 'a.jpg,16 0', 'b.jpg,5', 'c.jpg,5'], "'16 0', several classes"),
        (['image,label', 'a.jpg,0.5', 'b.jpg,0.25', 'c.jpg,0.5'], 'are numbers, not classes'),
        (['image,label', 'a.jpg,p1', 'b.jpg,p2', 'c.jpg,p3'], 'are of one image each'),
    ],
)
def test_tables_of_classes_that_are_refused(tmp_path, rows, said):
    images(tmp_path)
    text(tmp_path / 'labels.csv', '\n'.join(rows))
    assert_refused(said, read, tmp_path, 'classification')


def test_boxes_in_place_of_classes_are_refused(tmp_path):
    images(tmp_path)
    cvat(tmp_path)
    said = 'annotations.xml is CVAT XML, which classification does not take: write a CSV'
    assert_refused(said, read, tmp_path, 'classification')


@pytest.mark.parametrize(
    'paths, file, name, expected',
    [
        (['a.jpg', 'train/a.jpg', 'val/a.jpg'], 'all.csv', 'train/a.jpg', 'train/a.jpg'),
        (['a.jpg', 'train/a.jpg', 'val/a.jpg'], 'all.csv', r'C:\data\val\a.jpg', 'val/a.jpg'),
        (['a.jpg', 'train/a.jpg', 'val/a.jpg'], 'val/all.csv', 'a.jpg', 'val/a.jpg'),
        (['train/a.jpg', 'val/a.jpg'], 'val.csv', 'a.jpg', 'val/a.jpg'),
        (['train/a.jpg', 'val/a.jpg'], 'all.csv', 'a.jpg', 'may be .*train/a.jpg or .*val/a.jpg: give --images'),
        (['cam1/b.jpg', 'cam2/a.jpg'], 'all.csv', 'a.jpg', 'cam2/a.jpg'),
        (['cam1/b.jpg', 'cam2/a.jpg'], 'all.csv', 'cam1/a.jpg', 'is in another folder alone: .*cam2/a.jpg'),
        (['train2017/a.jpg'], 'val.json', 'http://coco.org/train2017/a.jpg', 'train2017/a.jpg'),
        (['one/a b.jpg', 'one/a%20b.jpg'], 'all.csv', 'a%20b.jpg', 'one/a%20b.jpg'),
        (['one/a b.jpg'], 'all.csv', 's3://bucket/a%20b.jpg?w=9', 'one/a b.jpg'),
        (['one/a.jpg'], 'all.csv', 'site-a.jpg', 'is in no folder'),
        (['one/a.jpg'], 'all.csv', 'upload/1/0a1b2c3d-a.jpg', 'one/a.jpg'),  # of Label Studio
        (['one/f\u00fcr.jpg'], 'all.csv', 'fu\u0308r.jpg', 'one/f\u00fcr.jpg'),
    ],
)
def test_an_image_belongs_to_a_label_by_its_path(tmp_path, paths, file, name, expected):
    for path in paths:
        picture(tmp_path / path)
    find = Data(tmp_path).pictures.find
    if expected in paths:
        assert find(tmp_path / file, [name]) == [tmp_path / expected]
    else:
        with pytest.raises(RunError, match=expected):
            find(tmp_path / file, [name])


def test_labels_of_a_folder_do_not_go_to_another(tmp_path):
    for name in ('cam1/a', 'cam1/b', 'cam2/c', 'cam2/d'):
        picture(tmp_path / 'images' / f'{name}.jpg')
        text(tmp_path / 'labels' / f'{name}.xml', voc(CAR))
    assert len(annotations_of(read(tmp_path))) == 4
    (tmp_path / 'labels/cam2/d.xml').rename(tmp_path / 'labels/cam1/d.xml')
    assert_refused(('cam1/d.xml has no image in its folder, and', 'cam2/d.jpg is in another'), read, tmp_path)
