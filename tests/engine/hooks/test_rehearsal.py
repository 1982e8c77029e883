# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""A validation of two images before the first step."""

import logging
import os
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.engine_toys import At, Count, ToyDataset, make_runner, refused, validation, warnings_of
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.registry import DATASETS
from mmengine.runner import ValLoop
from mmengine.structures import BaseDataElement, InstanceData

from mmlinattn.engine.hooks import rehearsal

HOOK = [dict(type='RehearsalHook')]


class Broken(Count):
    """Metric of a missing key, which MMEngine would meet at the end of the first epoch."""

    def compute_metrics(self, results):
        return dict(acc=dict()['gt_label'])


class Named(Count):
    def __init__(self, **metrics):
        super().__init__()
        self.values, self.seen = metrics, []

    def process(self, data_batch, data_samples):
        super().process(data_batch, data_samples)
        self.seen += data_samples

    def compute_metrics(self, results):
        random.random()
        np.random.rand()
        torch.rand(3)
        print('a table')
        print_log('a logged table', 'current', logging.ERROR)
        return dict(self.values)


class Watch(Hook):
    """Count the calls of the hooks of a validation."""

    calls = 0

    def before_val_iter(self, *args, **kwargs):
        self.calls += 1


@pytest.fixture(autouse=True)
def no_traceback(monkeypatch):
    monkeypatch.delenv('MMLINATTN_TRACEBACK', raising=False)


class Speaks(Hook):
    """Log a line before the rehearsal: MMLogger then keeps its answer that the level is on."""

    def before_train(self, runner):
        print_log('a first line', 'current', logging.ERROR)


def weights_after(work_dir, hooks, **more):
    made = make_runner(work_dir, hooks, randomness=dict(seed=3), **validation(Named(acc=1.0)), **more)
    made.register_hook(Speaks(), 'HIGHEST')
    made.train()
    return made.model.state_dict()


def test_the_training_is_the_same_bit_for_bit(tmp_path, capfd):
    plain, rehearsed = (weights_after(tmp_path / str(i), hooks) for i, hooks in enumerate(([], HOOK)))
    assert all(torch.equal(plain[key], rehearsed[key]) for key in plain)
    out, errors = capfd.readouterr()
    assert out.count('a table') == (out + errors).count('a logged table') == 4  # of the validations alone


@pytest.mark.skipif(not hasattr(torch.compiler, 'set_stance'), reason='needs PyTorch 2.6')
def test_compiled_blocks_run_eagerly(tmp_path):
    compiled = []
    add = torch.compile(lambda x: x + 1, backend=lambda graph, _: compiled.append(graph) or graph.forward)
    with rehearsal.unchanged(make_runner(tmp_path, [])):
        add(torch.zeros(1))
    assert not compiled
    add(torch.zeros(1))
    assert compiled


class Silent(ValLoop):
    """Loop that tells its metrics to hooks alone, as MMDetection's of teacher and student."""

    def run(self):
        super().run()


@pytest.mark.parametrize('loop', [{}, dict(type=Silent)], ids=['', 'silent'])
def test_two_images_and_no_other_hook(tmp_path, loop):
    watch, metric, found = Watch(), Named(acc=1.0), []
    settings = dict(validation(metric), val_cfg=loop)
    made = make_runner(tmp_path, [watch], dict(by_epoch=True, max_epochs=1), **settings)
    made.register_hook(At(0, lambda runner: found.append(rehearsal.rehearse(runner))))
    made.train()
    assert found == [dict(acc=1.0)]
    assert watch.calls == 3 and len(metric.seen) == 12  # the metric of the run has seen the run alone


def test_an_error_of_the_validation_comes_first(tmp_path):
    made = make_runner(tmp_path, HOOK, **validation(Broken()))
    with refused(r'the validation would fail, .*: KeyError: gt_label \(in Broken\). Correct val_data'):
        made.train()
    assert made.iter == 0
    tests = {f'test{key[3:]}': value for key, value in validation(Broken()).items()}
    with refused(r'the test would fail, .*: KeyError: gt_label \(in Broken\). Correct test_data'):
        make_runner(tmp_path, HOOK, **tests).test()
    make_runner(tmp_path, [dict(type='RehearsalHook', enabled=False)], **validation(Named(acc=1.0))).train()


def best(name, **more):
    return dict(default_hooks=dict(checkpoint=dict(type='CheckpointHook', save_best=name, **more)))


def monitors(kind):
    return dict(type=kind, monitor='mIou', rule='greater')


class Unmonitored(Hook):
    monitor = None


SHARP = dict(sharpness=1.0)


@pytest.mark.parametrize(
    ('metrics', 'settings', 'line'),
    [
        (dict(bbox_mAP=1.0), best('bbox_mAp'), "save_best='bbox_mAp': .* Did you mean 'bbox_mAP'?"),
        ({'coco/bbox_mAP': 1.0}, best('bbox_mAP'), "Did you mean 'coco/bbox_mAP'?"),
        (dict(acc=1.0), best('acc'), ''),
        (dict(acc=1.0), best('auto'), ''),
        (dict(acc=1.0), dict(hooks=[*HOOK, Unmonitored()]), ''),
        (SHARP, best('auto'), "save_best='auto': the first metric is 'sharpness'"),
        (SHARP, best('auto', rule='greater'), ''),
        (SHARP, best('auto', greater_keys=['sharp']), ''),
        (dict(acc=[1.0]), best('acc'), "save_best='acc': expected a metric with one number, not a list"),
        (
            dict(mIoU=1.0),
            dict(hooks=[*HOOK, monitors('EarlyStoppingHook')]),
            "Hook.monitor='mIou': .* Did you mean 'mIoU'?",
        ),
        (dict(mIoU=1.0), dict(param_scheduler=[monitors('ReduceOnPlateauLR')]), "ReduceOnPlateauLR.monitor='mIou': "),
    ],
)
def test_names_of_monitored_metrics(tmp_path, metrics, settings, line):
    made = make_runner(tmp_path, **{'hooks': HOOK, **settings}, **validation(Named(**metrics)))
    with refused(line):
        made.train()
    assert made.iter == (0 if line else 6)


@pytest.mark.parametrize(('name', 'rule', 'better'), [('mIoU', 'less', 'higher'), ('val_loss', 'greater', 'lower')])
def test_a_rule_against_the_name_of_its_metric(tmp_path, name, rule, better):
    scheduler = [dict(type='ReduceOnPlateauLR', monitor=name, rule=rule)]
    made = make_runner(tmp_path, HOOK, param_scheduler=scheduler, **validation(Named(**{name: 1.0})))
    assert warnings_of(made, f'ReduceOnPlateauLR.monitor={name!r} with rule={rule!r}: {better} is better')


@pytest.mark.parametrize(
    ('settings', 'reason'),
    [
        ({}, 'the run has no validation'),
        (validation(Named()), 'two images of the validation give no metric'),
        (dict(validation(Named()), val_cfg=dict(type=Silent)), 'two images of the validation give no metric'),
    ],
)
def test_monitors_without_a_metric(tmp_path, settings, reason):
    hooks = dict(checkpoint=dict(type='CheckpointHook', save_best='acc'))
    made = make_runner(tmp_path, HOOK, default_hooks=hooks, **settings)
    assert warnings_of(made, f"save_best='acc' has no effect: {reason}")


def sample(size=0, **fields):
    found = dict(bboxes=torch.zeros(size, 4), labels=torch.zeros(size).long(), scores=torch.zeros(size), **fields)
    return BaseDataElement(pred_instances=InstanceData(**found), metainfo=dict(ori_shape=(6, 8)))


@pytest.mark.parametrize('has_masks', [False, True])
@pytest.mark.parametrize(('sizes', 'counts'), [((0, 0), [1, 2]), ((100, 100), [101, 102]), ((3, 2), [4, 3])])
def test_predictions_differ_in_number_and_have_the_last_label(sizes, counts, has_masks):
    """Metrics of no predictions have no names, and one class too many for the annotations shows in its index.

    ``CocoMetric`` fails for a label without category, and its ``proposal_fast`` for arrays of several lengths.
    """
    seen = []
    for size in sizes:
        made = sample(size, **dict(masks=torch.zeros(size, 6, 8, dtype=torch.bool)) if has_masks else {})
        rehearsal._add_boxes(made, 3, seen)
        found = made.pred_instances
        assert len(found) == seen[-1] and found.labels[-1] == 3 and found.bboxes[-1].tolist() == [0, 0, 8, 6]
        assert not has_masks or found.masks[-1].all()
    assert seen == counts
    made = sample(kernels=torch.zeros(0, 3))  # of other heads
    rehearsal._add_boxes(made, 0, [])
    assert len(made.pred_instances) == 0


def test_images_of_each_data_set_that_is_judged_apart():
    from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

    data = [TensorDataset(torch.arange(*ends)) for ends in ((5,), (10, 14), (20, 21))]
    parts, last = ConcatDataset(data[:2]), ConcatDataset(data)
    apart = SimpleNamespace(dataset_prefixes=['a', 'b'])
    for dataset, size, evaluator, expected in (
        (parts, 1, apart, [[0], [1], [10], [11]]),
        (last, 1, apart, [[0], [1], [10], [11], [20]]),
        (parts, 3, None, [[0, 13]]),  # the last image may be of another class
        (parts, 1, None, [[0], [13]]),
    ):
        loop = SimpleNamespace(dataloader=DataLoader(dataset, batch_size=size), evaluator=evaluator)
        assert [batch[0].tolist() for batch in rehearsal._few_images(loop)] == expected


def test_state_and_files_of_metrics_are_left_alone(tmp_path):
    for name in ('results', 'rehearsal'):
        (tmp_path / name).mkdir()
    metric = SimpleNamespace(outfile_prefix='results/a', out_file_path=None, output_dir=str(tmp_path / 'results'))
    metric.results, metric.names = [1], ['a']
    before = dict(vars(metric))
    with rehearsal._borrowed(metric, str(tmp_path / 'rehearsal')):
        metric.names.append('b')
        metric.found = 1
        assert metric.outfile_prefix == str(tmp_path / 'rehearsal/a') and metric.out_file_path is None
        assert metric.results == [] == os.listdir(metric.output_dir)
        assert metric.output_dir == str(tmp_path / 'rehearsal/results')
    assert vars(metric) == before and metric.names == ['a'] and metric.results == [1]


class Masks:
    height, width = 6, 8

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count


@DATASETS.register_module(force=True)
class MaskedData(torch.utils.data.Dataset):
    """Two boxes and some masks in an image, as left by transforms that keep state."""

    def __init__(self, masks, size):
        self.masks, self.size, self.pipeline = masks, size, [[]]

    def __len__(self):
        return 3

    def __getitem__(self, index):
        self.pipeline[0].append(index)
        found = InstanceData(bboxes=torch.zeros(2, 4))
        vars(found)['_data_fields'].add('masks')
        vars(found)['masks'] = self.masks
        return dict(inputs=torch.zeros(3, *self.size), data_samples=BaseDataElement(gt_instances=found))


def load(dataset, *hooks):
    loop = SimpleNamespace(dataloader=SimpleNamespace(dataset=dataset))
    runner = SimpleNamespace(_train_loop=loop, model=torch.nn.Identity(), visualizer=None, hooks=hooks)
    rehearsal.rehearse_training_data(runner)


@pytest.mark.parametrize(
    ('masks', 'size', 'line'),
    [
        (Masks(2), (6, 8), ''),
        (Masks(1), (6, 8), '1 masks of 6x8 for 2 boxes in an image of 6x8. One of the transforms .list. moves boxes'),
        (Masks(2), (12, 16), '2 masks of 6x8 for 2 boxes in an image of 12x16'),
        (None, (-1, 1), 'train_dataloader: loading fails: RuntimeError: .* .in MaskedData.. Correct its data'),
    ],
)
def test_masks_that_transforms_leave_behind(masks, size, line):
    data = MaskedData(masks, size)
    with refused(line):
        load(data)
    assert data.pipeline == [[]]


class LateSwitchHook(Hook):
    """Change transforms in a later epoch, as MMDetection's PipelineSwitchHook does."""

    def __init__(self, transform):
        self.switch_pipeline = [transform]


@pytest.mark.parametrize('fails', [True, False])
def test_data_that_a_hook_switches_in_a_later_epoch(tmp_path, fails):
    switch = LateSwitchHook(lambda info: dict()['scale'] if fails else info)
    made = make_runner(tmp_path, [*HOOK, switch], loader=dict(dataset=dict(type='Piped')))
    with refused('KeyError: scale. Correct switch_pipeline of LateSwitch' if fails else ''):
        made.train()
    assert made.iter == (0 if fails else 6)


def test_wrappers_get_no_transforms_of_a_switch():
    data = torch.utils.data.Subset(MaskedData(Masks(2), (6, 8)), [0, 1])
    load(data, LateSwitchHook(dict))
    assert 'pipeline' not in vars(data)


@DATASETS.register_module(force=True)
class Piped(ToyDataset):
    def __getitem__(self, index):
        self.pipeline(dict())
        return super().__getitem__(index)
