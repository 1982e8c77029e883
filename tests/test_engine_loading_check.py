# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Files that are there and cannot be used: unreadable images, segmentation maps that do not fit."""

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from engine_toys import make_runner
from mmcv.transforms import LoadImageFromFile
from mmengine.dataset import BaseDataset
from mmengine.registry import DATASETS
from mmengine.structures import BaseDataElement
from torch import nn

from mmlinattn.engine import DataCheckHook, RunError
from mmlinattn.engine.loading_check import AllowedLabels, CheckedLoading, SegMapCheck, allowed_labels

SIZE = 12


def pack(results):
    inputs = torch.full((4,), float(results['img'].mean()) / 255)
    return dict(inputs=inputs, data_samples=BaseDataElement(metainfo=dict(img_path=results['img_path'])))


@DATASETS.register_module(force=True)
class PictureDataset(BaseDataset):
    """Pictures ``0.png`` ... of a folder, with maps ``0_map.png`` ... where ``maps`` is set."""

    def __init__(self, maps=False, reduce_zero_label=False, **kwargs):
        self.maps = maps
        self.reduce_zero_label = reduce_zero_label
        pipeline = [LoadImageFromFile(), *([self.load_maps()] if maps else []), pack]
        super().__init__(pipeline=pipeline, **kwargs)

    @staticmethod
    def load_maps():
        return pytest.importorskip('mmseg.datasets.transforms').LoadAnnotations()

    def load_data_list(self):
        labels = dict(reduce_zero_label=self.reduce_zero_label, seg_fields=[])
        return [dict(img_path=f'{i}.png', seg_map_path=f'{i}_map.png', **labels) for i in range(SIZE)]


@pytest.fixture(autouse=True)
def pictures(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for i in range(SIZE):
        cv2.imwrite(f'{i}.png', np.full((4, 6, 3), i, np.uint8))
        cv2.imwrite(f'{i}_map.png', np.full((4, 6), i % 3, np.uint8))


def runner_of(loader=None, dataset=None, **hook):
    dataset = dict(type='PictureDataset', **(dataset or {}))
    return make_runner('work', [dict(type='DataCheckHook', **hook)], loader=dict(dataset=dataset, **(loader or {})))


def segmenting(runner, num_classes=3):
    runner.model.num_classes = num_classes
    runner.model.decode_head = nn.Identity()
    return runner


def break_picture(i):
    with open(f'{i}.png', 'wb') as stream:
        stream.write(b'no picture')


def stops(runner):
    with pytest.raises(RunError) as error:
        runner.train()
    return str(error.value)


def test_good_pictures_train():
    runner = segmenting(runner_of(dataset=dict(maps=True)))
    runner.train()
    assert runner.iter == 6


def test_unreadable_pictures_are_named_and_counted_before_training():
    for i in (0, 5, 11):
        break_picture(i)
    (open('7.png', 'w')).close()  # empty
    runner = runner_of(max_listed=2)
    message = stops(runner)
    assert runner.iter == 0
    assert message.startswith('train_dataloader (PictureDataset')
    assert '4 of 12 samples read (of 12) cannot be used: 0.png cannot be read' in message
    assert '5.png' in message and '11.png' not in message and 'and 2 more' in message
    assert "unreadable='skip'" in message


def test_few_samples_are_read_ahead_spread_evenly(monkeypatch):
    read = []
    load = LoadImageFromFile.transform
    monkeypatch.setattr(
        LoadImageFromFile, 'transform', lambda self, results: read.append(results['img_path']) or load(self, results)
    )
    runner = runner_of(num_read=3)
    runner.call_hook('before_run')
    assert read == []  # a loop that is not built does not run
    runner._train_loop = runner.build_train_loop(runner._train_loop)
    runner.call_hook('before_run')
    assert read == ['0.png', '5.png', '11.png']


@pytest.mark.parametrize('num_workers', [0, 1])
@pytest.mark.parametrize('by_epoch', [True, False])
def test_a_file_not_read_ahead_is_named_when_met(num_workers, by_epoch):
    break_picture(7)
    loader = dict(num_workers=num_workers, persistent_workers=num_workers > 0)
    dataset = dict(type='PictureDataset')
    train_cfg = dict(by_epoch=True, max_epochs=2) if by_epoch else dict(by_epoch=False, max_iters=6)
    runner = make_runner(
        'work', [dict(type='DataCheckHook', num_read=2)], train_cfg, loader=dict(dataset=dataset, **loader)
    )
    message = stops(runner)
    assert message.startswith('7.png cannot be read (')
    assert 'Traceback' not in message


@pytest.mark.parametrize('num_workers', [0, 2])
def test_skipping_names_and_counts(num_workers):
    break_picture(3)
    break_picture(8)
    runner = runner_of(dict(num_workers=num_workers), num_read=2, unreadable='skip')
    lines = []
    runner.logger.warning = lines.append
    seen = []
    step = runner.model.train_step
    runner.model.train_step = lambda data_batch, optim_wrapper: (
        seen.extend(sample.img_path for sample in data_batch['data_samples']) or step(data_batch, optim_wrapper)
    )
    runner.train()
    assert runner.iter == 6 and len(seen) == 2 * SIZE
    assert not {'3.png', '8.png'} & set(seen)
    (listing,) = Path('work').rglob('unreadable_files.txt')
    assert {line.split()[0] for line in listing.read_text().splitlines()} == {'3.png', '8.png'}
    warnings = [line for line in lines if 'unreadable' in line]
    assert warnings[-1].startswith('2 unreadable files skipped so far')
    assert all(any(name in line for line in warnings) for name in ('3.png', '8.png'))


def test_skipping_does_not_hide_that_nothing_can_be_read():
    for i in range(SIZE):
        break_picture(i)
    assert '12 of 12' in stops(runner_of(unreadable='skip'))


def test_evaluation_skips_nothing():
    break_picture(6)
    hook = DataCheckHook(num_read=0, unreadable='skip')
    runner = runner_of(num_read=0)
    val = dict(dataset=dict(type='PictureDataset', test_mode=True), sampler=dict(type='DefaultSampler'), batch_size=1)
    runner._train_loop = runner.build_train_loop(runner._train_loop)
    runner._val_loop = type(runner._train_loop)(runner, runner.build_dataloader(val), max_epochs=1)
    hook.before_run(runner)
    assert len(runner.train_loop.dataloader.dataset) and runner.train_loop.dataloader.dataset[6] is not None
    with pytest.raises(RunError, match=r'6\.png cannot be read'):
        runner.val_loop.dataloader.dataset[6]


@pytest.mark.parametrize('bad', [dict(unreadable='ignore'), dict(num_read=-1)])
def test_arguments_of_the_hook(bad):
    (name,) = bad
    with pytest.raises(ValueError, match=f'{name}='):
        DataCheckHook(**bad)


def write_map(i, labels):
    cv2.imwrite(f'{i}_map.png', labels)


def test_labels_out_of_range_before_training():
    labels = np.full((4, 6), 255, np.uint8)
    labels[0, :3] = (2, 3, 200)
    write_map(9, labels)
    message = stops(segmenting(runner_of(dataset=dict(maps=True))))
    assert '1 of 12 samples' in message and '9_map.png has labels 3, 200 in 2 pixels' in message
    assert 'allowed are 0 to 2' in message and 'num_classes=3' in message and 'ignore_index=255' in message


@pytest.mark.parametrize('num_workers', [0, 1])
def test_labels_out_of_range_when_met(num_workers):
    write_map(9, np.full((4, 6), 3, np.uint8))
    runner = segmenting(runner_of(dict(num_workers=num_workers), dict(maps=True), num_read=1, unreadable='skip'))
    assert stops(runner).startswith('9_map.png has labels 3 in 24 pixels')


def test_labels_are_checked_as_the_model_sees_them():
    """Zero becomes 255 and 3 becomes 2."""
    write_map(9, np.full((4, 6), 3, np.uint8))
    segmenting(runner_of(dataset=dict(maps=True, reduce_zero_label=True))).train()
    write_map(9, np.full((4, 6), 4, np.uint8))
    message = stops(segmenting(runner_of(dataset=dict(maps=True, reduce_zero_label=True))))
    assert 'labels 3 in 24 pixels (as in the file less 1' in message


def test_map_of_another_size_than_its_image():
    write_map(2, np.zeros((6, 4), np.uint8))
    message = stops(segmenting(runner_of(dataset=dict(maps=True))))
    assert '2_map.png has 6x4 pixels (height x width), its image 2.png has 4x6' in message


@pytest.mark.parametrize('declared', [(4, 6), (6, 4)], ids=str)
def test_a_picture_that_lies_on_its_side(declared):
    """As one whose camera noted down a turn that only some readers follow."""
    loading = CheckedLoading(lambda results: dict(results, ori_shape=(4, 6)), 'img_path')
    sample = dict(img_path='photo.jpg', height=declared[0], width=declared[1])
    if declared == (4, 6):
        assert loading(sample)['ori_shape'] == (4, 6)
        return
    with pytest.raises(RunError, match='photo.jpg has 4x6 pixels .* its annotation file says 6x4'):
        loading(sample)


def test_map_of_colours():
    write_map(2, np.zeros((4, 6, 3), np.uint8))
    assert '2_map.png has shape (4, 6, 3)' in stops(segmenting(runner_of(dataset=dict(maps=True))))


def test_labels_of_more_than_a_byte():
    """As MMSegmentation reads them, 256 is 0."""
    write_map(2, np.full((4, 6), 256, np.uint16))
    assert '2_map.png has labels up to 256' in stops(segmenting(runner_of(dataset=dict(maps=True))))


def test_sizes_with_channels_are_those_of_the_map():
    """Some loading transforms give the shape of the array as the size of the picture."""
    SegMapCheck()(dict(gt_seg_map=np.zeros((4, 6)), ori_shape=(4, 6, 3)))


def test_allowed_labels_of_models():
    assert allowed_labels(nn.Linear(2, 2)) is None
    model = nn.Module()
    model.num_classes = 7
    model.decode_head = nn.ModuleList([nn.Identity(), nn.Identity()])
    model.decode_head[-1].ignore_index = 250
    assert allowed_labels(model) == AllowedLabels(7, 250)
