# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Files that are there and cannot be used: unreadable images, segmentation maps that do not fit."""

import copy
import pickle
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from engine_toys import Augmented, ToyModel, Wrapped, make_runner
from mmcv.transforms import LoadAnnotations, LoadImageFromFile
from mmengine.dataset import BaseDataset
from mmengine.registry import DATASETS
from mmengine.structures import BaseDataElement
from torch import nn

from mmlinattn.engine import DataCheckHook, RunError, data_check, loading_check
from mmlinattn.engine.loading_check import (
    AllowedLabels,
    CheckedLoading,
    SegMapCheck,
    Unreadable,
    allowed_labels,
    read_samples,
    watch_loading,
)

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
    message = stops(runner_of(unreadable='skip'))
    assert '12 of 12' in message and 'trains without them' not in message


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


@pytest.mark.parametrize('is_segmenter', [True, False])
def test_map_of_another_size_than_its_image(is_segmenter):
    """Whether or not the model says which labels it takes."""
    write_map(2, np.zeros((6, 4), np.uint8))
    runner = runner_of(dataset=dict(maps=True))
    message = stops(segmenting(runner) if is_segmenter else runner)
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
    model.decode_head = nn.Identity()
    assert allowed_labels(model) == (7, 255)  # of a head that does not say
    model.num_classes = None
    assert allowed_labels(model) is None
    del model.num_classes
    assert allowed_labels(model) is None
    del model.decode_head
    model.num_classes = 7
    assert allowed_labels(model) is None  # a classifier


def test_allowed_labels_are_those_of_the_model_in_its_wrappers():
    model = ToyModel()
    model.num_classes, model.decode_head = 7, nn.Identity()
    for wrapped in (Wrapped(model), Augmented(model), Wrapped(Augmented(model))):
        assert allowed_labels(wrapped) == (7, 255)


def test_what_is_watched_is_watched_once():
    allowed = AllowedLabels(3, 255)
    boxes, maps = LoadAnnotations(with_seg=False), LoadAnnotations(with_seg=True)
    dataset = SimpleNamespace(pipeline=SimpleNamespace(transforms=[LoadImageFromFile(), boxes, maps, pack]))
    watch_loading(dataset, allowed, 'skipped.txt')
    image, same, labels, check, last = found = list(dataset.pipeline.transforms)
    assert (image.key, image.skipped_list) == ('img_path', 'skipped.txt')
    assert (labels.key, labels.skipped_list, labels.loading) == ('seg_map_path', 'skipped.txt', maps)
    assert same is boxes and last is pack and isinstance(check, SegMapCheck) and check.allowed is allowed
    watch_loading(dataset, None, None)
    assert dataset.pipeline.transforms == found
    watch_loading([1, 2])  # no pipeline
    assert repr(labels) == repr(maps) and labels.with_seg


def test_the_line_about_a_file_that_cannot_be_read(tmp_path):
    def fails(results):
        raise ValueError('bad\n  magic')

    reason = '0.png cannot be read (ValueError: bad magic)'
    with pytest.raises(RunError) as found:
        CheckedLoading(fails, 'img_path')(dict(img_path='0.png'))
    assert str(found.value) == (
        f'{reason}. Mend the file or take it out of the data set. DataCheckHook(num_read=None) reads every file '
        "before training, DataCheckHook(unreadable='skip') trains without such files."
    )
    listing = tmp_path / 'new' / 'skipped.txt'
    skipping = CheckedLoading(fails, 'img_path', str(listing))
    assert skipping(dict(img_path='0.png')) is skipping(dict(img_path='0.png')) is None
    assert listing.read_text() == f'{reason}\n{reason}\n'
    with pytest.raises(Unreadable):
        skipping.read(dict(img_path='0.png'))

    def full(results):
        raise MemoryError

    with pytest.raises(MemoryError):  # no fault of the file
        CheckedLoading(full, 'img_path', str(listing))(dict(img_path='0.png'))


def test_only_whole_sizes_of_pictures_are_compared():
    def load(results):
        return dict(results, ori_shape=(4, 6))

    for sample in (dict(height=4), dict(width=4), dict()):
        assert CheckedLoading(load, 'img_path')(dict(sample, img_path='a'))
    assert CheckedLoading(load, 'seg_map_path')(dict(height=1, width=1))
    assert CheckedLoading(lambda results: results, 'img_path')(dict(height=1, width=1))  # it does not say
    assert CheckedLoading(lambda results: None, 'img_path')(dict(height=1, width=1)) is None


def test_the_lines_about_labels():
    maps = dict(seg_map_path='m.png', img_path='i.png')

    def line(labels, **results):
        with pytest.raises(RunError) as found:
            SegMapCheck(AllowedLabels(2, 9))(dict(maps, gt_seg_map=np.asarray(labels), **results))
        return str(found.value)

    allowed = 'allowed are 0 to 1, as the decode head has num_classes=2, and ignore_index=9.'
    assert line([[0, 1, 9, 2, -1]]) == f'm.png has labels -1, 2 in 2 pixels; {allowed}'
    many = ', '.join(map(str, range(10, 20)))
    assert line([list(range(10, 21))]) == f'm.png has labels {many}, ... in 11 pixels; {allowed}'
    assert line([list(range(10, 20))], reduce_zero_label=True) == (
        f'm.png has labels {many} in 10 pixels (as in the file less 1, for reduce_zero_label=True); {allowed}'
    )
    assert line([[[0, 0, 0]]]) == (
        'm.png has shape (1, 1, 3): a segmentation map has one channel, of labels and not of colours.'
    )
    assert line([[0, 0, 0]], ori_shape=(3, 1)) == (
        'm.png has 1x3 pixels (height x width), its image i.png has 3x1: they have to be of one size.'
    )
    SegMapCheck(AllowedLabels(2, 9))(dict(maps))  # a test without labels
    SegMapCheck()(dict(maps, gt_seg_map=np.full((2, 2), 77)))


def test_pictures_of_which_little_is_left_are_said_once(monkeypatch):
    cv2.imwrite('3.png', np.zeros((4, 300, 3), np.uint8))
    for i in range(SIZE):
        if i != 3:
            cv2.imwrite(f'{i}.png', np.zeros((8, 8, 3), np.uint8))
    lines = []
    monkeypatch.setattr(data_check, 'print_log', lambda *args: lines.append(args))
    runner = runner_of()
    runner.train()
    ((line, logger, level),) = lines
    assert line.startswith(
        "train_dataloader (PictureDataset, ann_file ''): 1 pictures have a side below 8 pixels or are "
    )
    assert line.endswith('little of them: 3.png (300x4).') and (logger, level) == ('current', 30)
    dataset = runner.train_dataloader.dataset
    info = dataset.get_data_info
    # sizes that the annotations declare were looked at before
    monkeypatch.setattr(
        dataset, 'get_data_info', lambda i: dict(info(i), height=(8, 4)[i == 3], width=(8, 300)[i == 3])
    )
    assert read_samples(dataset) == (12, [], [])


@pytest.mark.parametrize('num_read, hint', [(12, ''), (4, ' DataCheckHook(num_read=None) reads and counts all.')])
def test_how_unreadable_pictures_end_a_run(num_read, hint):
    for i in (0, 11):
        break_picture(i)
    message = stops(runner_of(num_read=num_read))
    assert f': 2 of {num_read} samples read (of 12) cannot be used: 0.png cannot be read (' in message
    assert message.endswith(f".{hint} DataCheckHook(unreadable='skip') trains without them.")
    assert message.count('DataCheckHook') == 1 + bool(hint)


def test_what_can_be_skipped_is_a_warning(monkeypatch):
    """No hint where it is done already, nor at maps that do not fit."""
    break_picture(0)
    lines = []
    monkeypatch.setattr(data_check, 'print_log', lambda *args: lines.append(args))
    hook, dataset = DataCheckHook(unreadable='skip'), PictureDataset(maps=True)
    watch_loading(dataset, AllowedLabels(3, 255))
    hook._check_samples(dataset, 'train_dataloader', may_skip=True)
    line = lines[-1][0]
    assert line.startswith(
        "train_dataloader (PictureDataset, ann_file ''): 1 of 12 samples read (of 12) cannot be used: "
    )
    assert line.endswith(' They are skipped.') and lines[-1][2] == 30
    with pytest.raises(RunError) as found:
        hook._check_samples(dataset, 'val_dataloader', may_skip=False)
    assert 'skip' not in str(found.value)
    write_map(5, np.full((4, 6), 7, np.uint8))
    with pytest.raises(RunError, match='2 of 12 samples') as found:
        hook._check_samples(dataset, 'train_dataloader', may_skip=True)
    assert 'skip' not in str(found.value)


@pytest.mark.parametrize(
    'errors, num_read, key, may_skip, end',
    [
        # skipping goes on only where a sample of those that were read is left, and only unreadable ones are missing
        ('a b', 3, 'train', True, None),
        ('a b', 2, 'train', True, ' DataCheckHook(num_read=None) reads and counts all.'),
        ('a b', 9, 'train', True, None),
        ('a X', 9, 'train', True, ''),
        (9 * 'a ', 9, 'train', True, ''),
        ('a b', 9, 'train', False, " DataCheckHook(unreadable='skip') trains without them."),
        ('a X', 9, 'train', False, ''),
        ('a b', 9, 'val', False, ''),
        (
            'a b',
            2,
            'train',
            False,
            " DataCheckHook(num_read=None) reads and counts all. DataCheckHook(unreadable='skip') trains without them.",
        ),
    ],
)
def test_where_unreadable_samples_are_skipped_and_what_else_is_said(monkeypatch, errors, num_read, key, may_skip, end):
    """Of nine samples; an error X is one that cannot be skipped."""
    made = [RunError(name) if name == 'X' else loading_check.Unreadable(name) for name in errors.split()]
    lines = []
    monkeypatch.setattr(data_check, 'read_samples', lambda dataset, count: (num_read, made, []))
    monkeypatch.setattr(data_check, 'print_log', lambda *args: lines.append(args))
    hook, dataset = DataCheckHook(num_read=num_read, max_listed=9), [None] * 9
    line = (
        f"{key}_dataloader (list, ann_file ''): {len(made)} of {num_read} samples read (of 9) cannot be used: "
        f'{"; ".join(errors.split())}.'
    )
    if end is None:
        hook._check_samples(dataset, f'{key}_dataloader', may_skip)
        assert lines == [(f'{line} They are skipped.', 'current', 30)]
    else:
        with pytest.raises(RunError) as found:
            hook._check_samples(dataset, f'{key}_dataloader', may_skip)
        assert str(found.value) == line + end and lines == []


def test_skipped_files_are_said_as_they_are_met(tmp_path, monkeypatch):
    hook, lines = DataCheckHook(unreadable='skip', max_listed=1), []
    runner = SimpleNamespace(logger=SimpleNamespace(warning=lines.append))
    hook.skipped_list = path = str(tmp_path / 'skipped.txt')
    hook.after_train_iter(runner, 0)
    for text in ('a\na\n', 'a\na\n', 'a\na\nb\nc\n', 'a\na\nb\nc\nb\n'):
        Path(path).write_text(text)
        hook.after_train_iter(runner, 0)
    assert lines == [
        f'1 unreadable files skipped so far, all listed in {path}; new: a.',
        f'3 unreadable files skipped so far, all listed in {path}; new: b and 1 more.',
    ]
    monkeypatch.setattr(data_check, 'is_main_process', lambda: False)
    Path(path).write_text('a\nb\nc\nd\ne\n')
    hook.after_train_iter(runner, 0)
    assert len(lines) == 2


def test_samples_without_a_file_to_load_and_data_without_loading():
    dataset = PictureDataset(maps=True)
    watch_loading(dataset, AllowedLabels(3, 255))
    (loading, labels, *_) = dataset.pipeline.transforms
    labels.loading = lambda results: None  # `ignore_empty`
    assert read_samples(dataset, 5)[:2] == (5, [])
    assert read_samples(dataset, 100)[0] == SIZE and read_samples(dataset, 0) == (0, [], [])
    assert read_samples([1, 2, 3]) == (0, [], [])


def test_pictures_are_read_after_their_maps_too():
    """In whatever order a pipeline has them."""
    break_picture(3)
    dataset = PictureDataset(maps=True)
    dataset.pipeline.transforms[:2] = dataset.pipeline.transforms[1::-1]
    watch_loading(dataset, AllowedLabels(3, 255))
    count, (error,), _ = read_samples(dataset)
    assert count == SIZE and str(error).startswith('3.png cannot be read (')


def test_checked_loadings_travel_to_processes():
    """As they are pickled for those that are spawned, and copied with their data set."""
    loading = CheckedLoading(LoadImageFromFile(color_type='grayscale'), 'img_path', 'skipped.txt')
    found = pickle.loads(pickle.dumps(copy.deepcopy(loading)))
    assert (found.key, found.skipped_list, found.color_type) == ('img_path', 'skipped.txt', 'grayscale')
    with pytest.raises(AttributeError, match='no_such_name'):
        _ = found.no_such_name


def test_only_mmsegmentation_reads_a_byte_a_label():
    """MMCV's own transform keeps what is in the file."""
    write_map(2, np.full((4, 6), 300, np.uint16))
    maps = LoadAnnotations(with_bbox=False, with_label=False, with_seg=True, imdecode_backend='cv2')
    dataset = PictureDataset()
    dataset.pipeline.transforms[1:1] = [maps]
    watch_loading(dataset, AllowedLabels(301, 255))
    assert read_samples(dataset)[:2] == (SIZE, [])


def test_the_depth_of_a_map_is_looked_at_as_it_is_read(monkeypatch):
    read, decoded = [], []
    loading = SimpleNamespace(backend_args=dict(backend='petrel'), imdecode_backend='tifffile')
    monkeypatch.setattr(loading_check, 'read_bytes', lambda *args, **kwargs: read.append((args, kwargs)) or b'content')
    for largest in (255, 256):
        stored = np.array([[0, largest]])
        monkeypatch.setattr(
            loading_check.mmcv, 'imfrombytes', lambda *a, stored=stored, **k: decoded.append((a, k)) or stored
        )
        if largest == 255:
            loading_check._check_depth(loading, dict(seg_map_path='m.png'))
    with pytest.raises(RunError) as found:
        loading_check._check_depth(loading, dict(seg_map_path='m.png'))
    assert str(found.value) == 'm.png has labels up to 256; MMSegmentation reads labels of 0 to 255.'
    assert read == 2 * [(('m.png',), dict(backend_args=dict(backend='petrel')))]
    assert decoded == 2 * [((b'content',), dict(flag='unchanged', backend='tifffile'))]
