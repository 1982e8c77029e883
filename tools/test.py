#!/usr/bin/env python
# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Test a detector, segmentor or classifier: the task of ``default_scope`` in the config."""

import argparse
import os
import os.path as osp
import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().with_name('check_env.py')))  # finds the checkout and missing packages

from mmlinattn_console import add_common_arguments, add_model_arguments, add_prediction_arguments, tool_parser


def parse_args() -> argparse.Namespace:
    parser = tool_parser(__doc__)
    add_model_arguments(parser)
    parser.add_argument('--out', help='write the predictions to this .pkl file')
    parser.add_argument(
        '--out-item',
        choices=['metrics', 'pred'],
        default='pred',
        help='content of --out: boxes and masks, label map or label of each image (pred), or the metrics (also to '
        '.json) [pred]',
    )
    add_prediction_arguments(parser)
    parser.add_argument('--show', action='store_true', help='show predictions in a window')
    parser.add_argument('--show-dir', help='draw predictions into this folder')
    parser.add_argument(
        '--score-thr',
        type=float,
        help='lowest score in drawings and --save-txt [default_hooks.visualization.score_thr, or 0.3]',
    )
    parser.add_argument('--interval', type=int, default=1, help='draw every n-th image [1]')
    parser.add_argument('--wait-time', type=float, default=2, help='seconds --show waits [2]')
    parser.add_argument('--tta', action='store_true', help='test-time augmentation of the config')
    parser.add_argument(
        '--amp',
        action='store_true',
        help='float16, as metrics of upstream do not take bfloat16 (off without an accelerator)',
    )
    add_common_arguments(parser)
    return parser.parse_args()


if __name__ == '__main__':
    args = parse_args()  # before PyTorch is imported: --help answers at once

import mmengine
import torch
from mmengine.config import ConfigDict
from mmengine.device import get_device
from mmengine.evaluator import DumpResults
from mmengine.registry import MODELS

from mmlinattn.tooling.class_names import dataset_configs
from mmlinattn.tooling.command_line import (
    check_display,
    check_out_file,
    clean_end,
    notice,
    one_line_errors,
    setup_errors,
    writing,
)
from mmlinattn.tooling.configs import check_checkpoint, check_data_config, load_config, require
from mmlinattn.tooling.console import quiet_upstream
from mmlinattn.tooling.predictions import PredictionFilesHook, check_prediction_arguments
from mmlinattn.tooling.running import add_checks, build_runner
from mmlinattn.utils.errors import RunError
from mmlinattn.utils.registering import bare_name


def configure(args: argparse.Namespace):
    suffixes = ('.pkl', '.pickle', '.json') if args.out_item == 'metrics' else ('.pkl', '.pickle')
    if args.out and not args.out.endswith(suffixes):
        raise RunError(f'--out={args.out!r}: expected a name that ends with {" or ".join(suffixes)}.')
    if args.out_item == 'metrics' and not args.out:
        raise RunError('--out-item metrics: --out is missing. Name the file to write.')
    if args.interval < 1:
        raise RunError(f'--interval={args.interval}: expected at least 1.')
    cfg = load_config(args)
    require(cfg, args.config, 'model', 'test_dataloader', 'test_cfg', 'test_evaluator')
    add_checks(cfg)
    if args.tta:
        augment(cfg, args.config)
    cfg.load_from = check_checkpoint(args.checkpoint, 'checkpoint')
    cfg.resume = False
    check_data_config(cfg, ['test'])
    if args.out:
        check_out_file(args.out)
    if args.amp and get_device() in ('cpu', 'mps'):
        notice('no accelerator: mixed precision is off, testing in fp32.')
    elif args.amp:
        cfg.test_cfg.fp16 = True
    if args.show:
        check_display()
    if args.show_dir:
        with writing(args.show_dir, '--show-dir'):
            os.makedirs(args.show_dir, exist_ok=True)
    if (args.show or args.show_dir) and not cfg.get('visualizer'):
        raise RunError(f'--show, --show-dir: {args.config} has no visualizer.')
    check_prediction_arguments(args, cfg.get('default_scope'), args.config, args.checkpoint)
    return cfg


# test-time augmentation of upstream's tools for configs without tta_model
TTA_MODELS = dict(
    mmdet=dict(type='DetTTAModel', tta_cfg=dict(nms=dict(type='nms', iou_threshold=0.5), max_per_img=100)),
    mmpretrain=dict(type='AverageClsScoreTTA'),
)
MASK_METRICS = ('CocoPanopticMetric', 'CityScapesMetric', 'CocoOccludedSeparatedMetric', 'SemSegMetric')


def augment(cfg, config: str) -> None:
    """Enable the test-time augmentation of the config, or by default the average over the image and its mirror image.
    Raise a RunError without either, or for masks of a detector: MMDetection merges only boxes."""
    model = cfg.get('tta_model') or TTA_MODELS.get(cfg.get('default_scope'))
    if not model:
        raise RunError(f'--tta: {config} has no tta_model.')
    if bare_name(model['type']) == 'DetTTAModel':
        evaluators = cfg.test_evaluator if isinstance(cfg.test_evaluator, (list, tuple)) else [cfg.test_evaluator]
        for evaluator in evaluators:
            metric = evaluator.get('metric', 'bbox')
            if 'segm' in (metric if isinstance(metric, (list, tuple)) else [metric]):
                only = f'MMDetection merges boxes only, and test_evaluator.metric={metric!r} measures masks'
                raise RunError(f'--tta: {only}. Set --cfg-options test_evaluator.metric=bbox.')
            if bare_name(evaluator['type']) in MASK_METRICS:
                raise RunError(f'--tta: test_evaluator.type={evaluator["type"]!r}: expected a metric of boxes alone.')
        model = ConfigDict(model, type=box_tta_model())
    cfg.model = ConfigDict(model, module=cfg.model)
    for _, dataset in dataset_configs(cfg, 'test_dataloader'):
        dataset['pipeline'] = cfg.get('tta_pipeline') or with_mirror_image(dataset['pipeline'])


def box_tta_model() -> str:
    """Register a DetTTAModel that drops masks, and return its name."""
    from mmdet.models import DetTTAModel

    @MODELS.register_module(force=True)
    class BoxTTAModel(DetTTAModel):
        def merge_preds(self, data_samples_list: list) -> list:
            for sample in (sample for views in data_samples_list for sample in views):
                sample.pred_instances.pop('masks', None)
            return super().merge_preds(data_samples_list)

    return BoxTTAModel.__name__


def with_mirror_image(pipeline: list) -> list:
    *steps, pack = pipeline
    # dict.items: MMEngine's turns types of pure Python configs into classes, and a dump fails on these
    pack = {key: value for key, value in dict.items(pack) if key != 'meta_keys'}  # by default flips are among them
    flips = [dict(type='RandomFlip', prob=prob) for prob in (0.0, 1.0)]
    return [*steps, dict(type='TestTimeAug', transforms=[flips, [pack]])]


class DumpLabelMaps(DumpResults):
    """DumpResults that keeps only the label map of each image: one byte per pixel, while logits need hundreds."""

    def process(self, data_batch, predictions) -> None:
        for prediction in predictions:
            kept = {key: value for key, value in prediction.items() if 'logits' not in key and key != 'gt_sem_seg'}
            if 'pred_sem_seg' in kept:  # not of depth models
                labels = kept['pred_sem_seg']['data'].cpu()
                kept['pred_sem_seg'] = dict(data=labels.to(torch.uint8 if labels.max() < 256 else torch.int16))
            super().process(data_batch, [kept])


def dump_metric(cfg, path: str):
    """Return the metric that writes the predictions of the config's task to ``path``."""
    if cfg.get('default_scope') == 'mmdet':
        from mmdet.evaluation import DumpDetResults  # encodes masks

        return DumpDetResults(out_file_path=path)
    return (DumpLabelMaps if cfg.get('default_scope') == 'mmseg' else DumpResults)(out_file_path=path)


def main(args: argparse.Namespace) -> None:
    quiet_upstream()
    with clean_end(), one_line_errors():
        with setup_errors(args.config):
            cfg = configure(args)
            runner = build_runner(cfg, compiles=args.compile)
            runner.register_hook(PredictionFilesHook(args, cfg))
            if args.out and args.out_item == 'pred':
                runner.test_evaluator.metrics.append(dump_metric(cfg, args.out))
        with setup_errors(args.config, whole=False, runner=runner):
            metrics = runner.test()
        if args.out and args.out_item == 'metrics' and runner.rank == 0:
            if args.out.endswith('.json'):  # which has no tensors, such as a confusion matrix
                metrics = {key: each.tolist() if torch.is_tensor(each) else each for key, each in metrics.items()}
            mmengine.dump(metrics, args.out)
        written = (args.out, args.show_dir, args.save_json, args.save_txt, args.save_labels)
        for path in filter(None, written if runner.rank == 0 else ()):
            print(f'wrote {osp.abspath(path)}')


if __name__ == '__main__':
    main(args)
