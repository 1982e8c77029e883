# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Files of predictions, read as other programs read them."""

import argparse
import json
import os
from types import SimpleNamespace

import mmcv
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.dist import master_only
from mmengine.structures import BaseDataElement, InstanceData, PixelData

from mmlinattn.tooling import predictions
from mmlinattn.utils.errors import RunError

BOXES = [[10.0, 20.0, 30.0, 60.0], [0.0, 0.0, 100.0, 50.0], [5.0, 5.0, 6.0, 6.0]]


def detections(with_masks):
    found = InstanceData(
        bboxes=torch.tensor(BOXES), scores=torch.tensor([0.9, 0.5, 0.1]), labels=torch.tensor([1, 0, 1])
    )
    if with_masks:
        masks = torch.zeros(3, 50, 100, dtype=torch.bool)
        masks[0, 20:40, 10:30] = True
        masks[1, :, :] = True
        masks[1, 10:20, 10:20] = False  # a hole
        masks[2, 5, 5] = True  # no area
        found.masks = masks
    return BaseDataElement(metainfo=dict(ori_shape=(50, 100), img_path='a.jpg', img_id=7), pred_instances=found)


@pytest.mark.parametrize('with_masks', [True, False])
def test_coco_reads_its_results(tmp_path, with_masks):
    """Expect an AP of 1 for perfect boxes and masks."""
    mask_api, coco = pytest.importorskip('pycocotools.mask'), pytest.importorskip('pycocotools.coco')
    from pycocotools.cocoeval import COCOeval

    sample = detections(with_masks)
    entries = predictions.coco_results(sample, 7, {0: 30, 1: 20})
    assert [entry['category_id'] for entry in entries] == [20, 30, 20] and entries[0]['bbox'] == [10, 20, 20, 40]
    truth = coco.COCO()
    annotations = [
        dict({key: value for key, value in entry.items() if key != 'score'}, id=i, iscrowd=0, area=1000.0)
        for i, entry in enumerate(entries, start=1)
    ]
    truth.dataset = dict(
        images=[dict(id=7, height=50, width=100)], annotations=annotations, categories=[dict(id=20), dict(id=30)]
    )
    truth.createIndex()
    writer_of(save_json=str(tmp_path / 'a.json')).finish([entries])
    results = truth.loadRes(str(tmp_path / 'a.json'))
    for kind in ('bbox', 'segm')[: 1 + with_masks]:
        evaluator = COCOeval(truth, results, kind)
        evaluator.evaluate()
        evaluator.accumulate()
        evaluator.summarize()
        assert evaluator.stats[0] == pytest.approx(1)
    if with_masks:
        np.testing.assert_array_equal(mask_api.decode(entries[1]['segmentation']), sample.pred_instances.masks[1])


def writer_of(cfg=None, names=None, **options):
    absent = dict.fromkeys(['save_json', 'save_txt', 'save_labels', 'save_conf'])
    return predictions.PredictionWriter(argparse.Namespace(**{**absent, **options}), Config(cfg), names, 0.3)


def test_ids_without_an_annotation_file(tmp_path, capsys):
    writer = writer_of(save_json=str(tmp_path / 'a.json'))
    writer.write(detections(False), '', 'a', 'a.jpg')
    assert [entry['category_id'] for entry in writer.entries[0]] == [2, 1, 2]
    writer.finish(writer.entries)
    assert 'category_id is the label + 1' in capsys.readouterr().err


def test_ids_of_the_annotation_file(tmp_path):
    categories = [dict(id=9, name='cat'), dict(id=4, name='dog'), dict(id=5, name='cow')]
    images = [dict(id=i, file_name=name) for i, name in enumerate(['10.jpg', 'a/2.jpg', 'a/3.jpg', 'b/3.jpg'], 1)]
    (tmp_path / 'a.json').write_text(json.dumps(dict(images=images, annotations=[], categories=categories)))
    loader = dict(dataset=dict(type='CocoDataset', data_root=str(tmp_path), ann_file='a.json'))

    def ids(names):
        return predictions.annotation_ids(Config(dict(test_dataloader=loader)), names)

    file = str(tmp_path / 'a.json')  # of two images with one name, neither is known
    assert ids(('dog', 'cat')) == ({0: 4, 1: 9}, {'10.jpg': 1, '2.jpg': 2}, file)
    assert ids(('dog', 'bird')) == ids(None) == (None, {}, '')
    loader['dataset']['ann_file'] = 'gone.json'
    assert ids(('dog', 'cat')) == (None, {}, '')


@pytest.mark.parametrize(
    ('data', 'values'),
    [
        (dict(type='BaseSegDataset', metainfo=dict(classes=('a', 'b', 'c'))), [0, 1, 2]),
        (dict(type='BaseSegDataset', metainfo=dict(classes=('a', 'b', 'c')), reduce_zero_label=True), [1, 2, 3]),
        (dict(type='ADE20KDataset', metainfo=dict(classes=('sky', 'wall', 'building'))), [3, 1, 2]),
        (dict(type='CityscapesDataset', metainfo=dict(classes=('car', 'road'))), [13, 0]),
        (dict(type='NoSuchDataset', metainfo=dict(classes=('a', 'b', 'c'))), [0, 1, 2]),
    ],
)
def test_values_of_the_annotation_files(data, values):
    pytest.importorskip('mmseg.datasets')
    cfg = Config(dict(default_scope='mmseg', model={}, test_dataloader=dict(dataset=data)))
    assert predictions.label_values(cfg, data['metainfo']['classes']) == values


def test_yolo_lines():
    lines = predictions.yolo_lines(detections(False), 0.4, True)
    assert lines == ['1 0.200000 0.800000 0.200000 0.800000 0.900000', '0 0.500000 0.500000 1.000000 1.000000 0.500000']
    first, second = (line.split() for line in predictions.yolo_lines(detections(True), 0.0))
    points = np.array(first[1:], float).reshape(-1, 2) * (100, 50)
    assert {tuple(point) for point in points.round().astype(int).tolist()} == {(10, 20), (10, 39), (29, 39), (29, 20)}
    assert first[0] == '1' and second[0] == '0' and len(second) == 9


@pytest.mark.parametrize(('largest', 'kind'), [(200, np.uint8), (300, np.uint16)])
def test_segmentation_masks(tmp_path, monkeypatch, largest, kind, capsys):
    labels = torch.arange(12).reshape(1, 3, 4)
    # floats of a model with one channel
    sample, values = BaseDataElement(pred_sem_seg=PixelData(data=labels.float())), [largest, *range(2, 13)]
    monkeypatch.setattr(predictions, 'label_values', lambda cfg, names: values)
    writer_of({}, ('sky', 'tree'), save_labels=str(tmp_path / 'new')).write(sample, 'a', 0, 'a.jpg')
    image = mmcv.imread(str(tmp_path / 'new' / 'a.png'), 'unchanged')
    assert image.dtype == kind
    np.testing.assert_array_equal(image, np.array(values)[labels[0]])
    assert f'values {largest} sky, 2 tree' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('paths', 'drawings', 'stems'),
    [
        (['v/a/1.jpg', 'v/b/1.jpg', 'v/1.jpg'], ['a/1.jpg', 'b/1.jpg', '1.jpg'], ['a/1', 'b/1', '1']),
        (['v/a/1.jpg', 'v/b/2.tif', 'v/3.JPEG'], ['1.jpg', '2.tif.png', '3.JPEG.png'], ['1', '2', '3']),
        (['v/1.jpg', 'v/1.png', 'v/2.png'], ['1.jpg', '1.png', '2.png'], ['1.jpg', '1.png', '2']),
        (['v/1.jpg', 'v/1.jpg'], ['1.jpg', '1.jpg'], ['1', '1']),  # the same image twice
        (['v/a/1.jpg', 'v/a/1.jpg', 'v/b/2.jpg'], ['1.jpg', '1.jpg', '2.jpg'], ['1', '1', '2']),
        ([], [], []),
    ],
)
def test_names_of_files_of_images(paths, drawings, stems):
    assert predictions.names_below(paths) == drawings and predictions.stems_below(paths) == stems


class Visualizer:
    def add_datasample(self, name, image, out_file=None, **kwargs):
        mmcv.imwrite(image[..., ::-1], out_file)


class IdleVisualizer:
    def add_datasample(self, *args, **kwargs):
        pass


class Data(list):
    metainfo = dict(classes=('a', 'b'))

    def get_data_info(self, index):
        return dict(img_path=self[index])


@pytest.fixture
def tested(tmp_path):
    """Run the hook over detections of three images, two with the same name."""
    paths = [str(tmp_path / name) for name in ('x/1.png', 'y/1.png', 'y/2.png')]
    for path in paths:
        mmcv.imwrite(np.zeros((50, 100, 3), np.uint8), path)

    def run(visualizer=None, **options):
        absent = dict.fromkeys(['show_dir', 'save_json', 'save_txt', 'save_labels', 'score_thr', 'show', 'save_conf'])
        args = argparse.Namespace(**{**absent, 'interval': 1, 'wait_time': 0, **options})
        cfg = Config(dict(default_hooks=dict(visualization=dict(score_thr=0.4))))
        hook = predictions.PredictionFilesHook(args, cfg)
        loader = SimpleNamespace(dataset=Data(paths))
        runner = SimpleNamespace(test_dataloader=loader, visualizer=visualizer or Visualizer())
        hook.before_test_epoch(runner)
        for i, path in enumerate(paths):
            sample = detections(False)
            sample.set_metainfo(dict(img_path=path, img_id=i))
            hook.after_test_iter(runner, i, None, [sample])
        hook.after_test_epoch(runner)
        return sorted(os.path.relpath(path, tmp_path / 'out') for path in (tmp_path / 'out').rglob('*.*'))

    return run


def test_files_of_a_test(tested, tmp_path):
    out = str(tmp_path / 'out')
    assert tested(show_dir=out, interval=2) == ['x/1.png', 'y/2.png']
    found = tested(save_txt=out, save_json=f'{out}/all.json')
    assert found == ['all.json', 'x/1.png', 'x/1.txt', 'y/1.txt', 'y/2.png', 'y/2.txt']
    assert len((tmp_path / 'out/y/1.txt').read_text().splitlines()) == 2  # above the config's threshold
    entries = json.loads((tmp_path / 'out/all.json').read_text())
    assert [entry['image_id'] for entry in entries] == [0] * 3 + [1] * 3 + [2] * 3
    assert [entry['file_name'] for entry in entries] == ['1.png'] * 6 + ['2.png'] * 3
    tested(save_txt=out, score_thr=0.0)
    assert len((tmp_path / 'out/y/1.txt').read_text().splitlines()) == 3


@pytest.mark.parametrize('flag', predictions.FLAGS)
def test_a_second_run_writes_to_the_same_place(tmp_path, flag):
    options = {each[2:].replace('-', '_'): str(tmp_path / 'new.json') * (each == flag) for each in predictions.FLAGS}
    for _ in range(2):
        args = argparse.Namespace(save_conf=False, **options)
        predictions.check_prediction_arguments(args, predictions.FLAGS[flag][0], 'config.py')
        if flag == '--save-json':
            (tmp_path / 'new.json').touch()


def test_a_visualizer_that_writes_nothing_is_an_error(tested, tmp_path):
    with pytest.raises(RunError, match="visualizer.type='IdleVisualizer' of the config draws no file"):
        tested(IdleVisualizer(), show_dir=str(tmp_path / 'out'))


def test_every_process_draws_its_images(monkeypatch):
    monkeypatch.setattr('mmengine.dist.utils.is_main_process', lambda: False)
    draw = master_only(lambda: 'drawn')
    with predictions.drawing_in_every_process():
        assert draw() == 'drawn'
    assert draw() is None
