# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Settings that nothing reads."""

import functools
import re

import pytest
from helpers.engine_toys import refused
from helpers.tool_runs import QUICK
from mmengine.config import Config
from mmengine.optim import OptimWrapper
from mmengine.registry import Registry
from mmengine.runner import EpochBasedTrainLoop
from torch.optim import SGD

from mmlinattn.tooling import settings

read = functools.cache(Config.fromfile)


VARIABLE = 'is a variable of the file, which is used already. Set '
INHERITED = 'is a variable that an inherited file has used already. Set '


@pytest.mark.parametrize(
    ('task', 'option', 'line'),
    [
        ('mmpretrain', 'max_epochs', f'{VARIABLE}train_cfg.max_epochs.'),
        ('mmpretrain', 'data_root', f'{VARIABLE}train_dataloader.dataset.data_root,'),
        ('mmpretrain', 'num_classes', f'{VARIABLE}data_preprocessor.num_classes, model.head.num_classes'),
        ('mmdet', 'data_preprocessor.mean', f'{VARIABLE}model.data_preprocessor.mean'),
        ('mmdet', 'optimizer.lr', 'nothing reads optimizer. Set optim_wrapper.optimizer.'),
        ('mmdet', 'runner.max_epochs', 'nothing reads runner. Set train_cfg'),
        ('mmdet', 'evaluation.interval', 'nothing reads evaluation. Set val_evaluator'),
        ('mmdet', 'optim_wrapper.optimizer.bettas', "nothing reads 'bettas' in optim_wrapper.optimizer. Expected one"),
        ('mmdet', 'train_dataloader.batchsize', 'Expected one of batch_size'),
        ('mmdet', 'train_dataloder.batch_size', 'Expected one of train_dataloader'),
        ('mmdet', 'default_hooks.checkpoint.save_bst', 'Expected one of save_best'),
        ('mmdet', 'train_dataloader.dataset.pipeline.1.with_boxes', 'Expected one of with_bbox'),
        ('mmdet', 'model.bbox_head.num_classes', "nothing reads 'bbox_head' in model. Expected one of roi_head"),
        ('mmdet', 'model.test_cfg.rcnn.score_thrs', 'Expected one of score_thr'),
        ('mmdet', 'foo', "nothing reads 'foo' in the config.$"),
        ('mmpretrain', 'train_cfg.max_epochs', ''),
        ('mmpretrain', 'param_scheduler.0.end', ''),
        ('mmpretrain', 'data_preprocessor.num_classes', ''),
        ('mmdet', 'optim_wrapper.accumulative_counts', ''),
        ('mmdet', 'optim_wrapper.paramwise_cfg.bypass_duplicate', ''),
        ('mmdet', 'optim_wrapper.loss_scale', ''),  # of --amp
        ('mmdet', 'model.test_cfg.rcnn.mask_thr_binary', ''),
        ('mmdet', 'model.backbone.drop_path_rate', ''),
        ('mmdet', 'train_dataloader.drop_last', ''),
        ('mmdet', 'train_dataloader.dataset.indices', ''),  # of a base class
        ('mmdet', 'randomness.seed', ''),
        ('mmdet', 'env_cfg.dist_cfg.timeout', ''),
        ('mmdet', 'load_from', ''),
    ],
)
def test_options(task, option, line):
    pytest.importorskip(f'{task}.registry')
    cfg = Config(read(QUICK[task])._cfg_dict.to_dict())
    content = cfg._cfg_dict.to_dict()
    cfg.merge_from_dict({option: 'x'})
    with refused(line and f'--cfg-options {re.escape(option)}: .*{line}'):
        settings.check_options(content, cfg, {option: 'x'})


def test_options_beside_a_new_type_are_its_arguments():
    content = dict(default_scope='mmengine', optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1)))
    cfg = Config(content)
    options = {'optim_wrapper.optimizer.type': 'AdamW', 'optim_wrapper.optimizer.amsgrad': True}
    cfg.merge_from_dict(options)
    settings.check_options(content, cfg, options)


@pytest.mark.parametrize(('value', 'line'), [([0, 1], r'\[0, 1\]: expected one number, as 0.1 before'), (0.01, '')])
def test_a_decimal_comma_makes_a_list(value, line):
    content, option = dict(optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1))), 'optim_wrapper.optimizer.lr'
    cfg = Config(content)
    cfg.merge_from_dict({option: value})
    with refused(line and f'--cfg-options {option}={line}'):
        settings.check_options(content, cfg, {option: value})


@pytest.mark.parametrize(
    ('name', 'kind', 'found'),
    [
        ('max_iters', EpochBasedTrainLoop, ['IterBasedTrainLoop']),
        ('loss_scale', OptimWrapper, ['AmpOptimWrapper', 'ApexOptimWrapper']),
        ('clip_grad', SGD, ['AmpOptimWrapper', 'ApexOptimWrapper', 'OptimWrapper']),
        ('interval', SGD, []),  # of many
        ('bettas', SGD, []),
    ],
)
def test_classes_that_take_an_argument(name, kind, found):
    assert set(found) <= set(takers := settings.takers(name, kind)) and bool(found) == bool(takers)


@pytest.mark.parametrize('count', [0, 1, 4, 5])
def test_at_most_four_classes_with_an_argument(monkeypatch, count):
    class Other:
        pass

    kinds = [type(f'Kind{i}', (), dict(__init__=lambda self, wanted=1: None)) for i in range(count)]
    registry = Registry('toy')
    for kind in (Other, *kinds):
        registry.register_module(module=kind)
    monkeypatch.setattr(settings, 'ROOTS', [registry])
    assert settings.takers('wanted', Other) == ([kind.__name__ for kind in kinds] if count <= 4 else [])


@pytest.mark.parametrize(
    ('text', 'line'),
    [
        ('max_epochs = 3', f'max_epochs=3 {INHERITED}train_cfg.max_epochs'),
        ('max_epochs = 3\ntrain_cfg = dict(max_epochs=max_epochs)', ''),
        ('max_epochs = 3\ntrain_cfg = dict(max_epochs=3)', ''),
        ('steps = [5]', f'{INHERITED}param_scheduler.0.milestones'),
        ('steps = [5]\nparam_scheduler = [dict(milestones=[5])]', ''),
        ('lr = 3', ''),  # of the file alone
        ('runner = dict(max_epochs=3)', 'runner: nothing reads this setting of OpenMMLab 1.x. Set train_cfg'),
        ('optimizer = dict(lr=2)\noptim_wrapper = dict(optimizer=optimizer)', ''),
        ('param_schedulers = []', 'param_schedulers: nothing reads this setting. Did you mean param_scheduler?'),
    ],
)
def test_names_at_the_top_of_a_file(tmp_path, text, line):
    (tmp_path / 'base.py').write_text(
        'max_epochs = 12\ntrain_cfg = dict(max_epochs=max_epochs)\noptim_wrapper = dict(optimizer=dict(lr=1))\n'
        'steps = [8, 11]\nparam_scheduler = [dict(milestones=steps)]\n'
    )
    (tmp_path / 'mine.py').write_text(f"_base_ = 'base.py'\n{text}\n")
    (tmp_path / 'mine.yaml').write_text('_base_: ./mine.py\n')
    settings.check_variables(Config.fromfile(tmp_path / 'mine.yaml'))
    cfg = Config.fromfile(tmp_path / 'mine.py')
    with refused(re.escape(line)):
        settings.check_variables(cfg)


SINGLE, NUMBER = settings.check_single, settings.check_numbers
TRAIN = 'train_dataloader: {dataset: %s}'


@pytest.mark.parametrize(
    ('check', 'text', 'line'),
    [
        (
            SINGLE,
            'train_dataloader: [{batch_size: 1}]',
            r'train_dataloader is a list: expected one. Set train_dataloader.da',
        ),
        (SINGLE, TRAIN % '[{type: A}]', r'train_dataloader.dataset is a list: expected one. Set train_dataloader.data'),
        (SINGLE, TRAIN % '{data_root: [a, b]}', r"train_dataloader.dataset.data_root=\['a', 'b'\]: expected one path"),
        (SINGLE, TRAIN % '{dataset: {ann_file: [a, b]}}', 'train_dataloader.dataset.dataset.ann_file'),
        (SINGLE, TRAIN % '{datasets: [{data_root: a}, {data_root: b}]}', ''),
        # YAML reads these numbers as texts
        (NUMBER, 'optim_wrapper: {optimizer: {lr: 1e-4}}', "optim_wrapper.optimizer.lr='1e-4': .* set 1.0e-4."),
        (NUMBER, 'param_scheduler: [{eta_min: 2.5E7}]', "param_scheduler.0.eta_min='2.5E7': .* set 25000000."),
        (NUMBER, 'optim_wrapper: {optimizer: {lr: 1.0e-4}}\nwork_dir: 1e-4', ''),
        (NUMBER, 'optim_wrapper: {optimizer: {lr: 1e-3x}}', "optimizer.lr='1e-3x': expected a number, not a text"),
        (NUMBER, 'train_cfg: {max_epochs: 0}', 'train_cfg.max_epochs=0: expected a positive integer'),
        (NUMBER, 'train_cfg: {max_iters: many}', "train_cfg.max_iters='many': expected a positive integer"),
    ],
)
def test_lists_and_texts_in_place_of_one_data_set_and_of_numbers(tmp_path, check, text, line):
    (tmp_path / 'mine.yaml').write_text(text)
    cfg = Config.fromfile(tmp_path / 'mine.yaml')
    with refused(line):
        check(cfg)
