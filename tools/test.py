#!/usr/bin/env python
# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Test a detector, segmentor or classifier: the config's ``default_scope`` says which."""

import argparse
import itertools
import os
import os.path as osp
import runpy
from functools import partial
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().with_name('check_env.py')))  # finds the checkout, and what is missing

import mmengine
import torch
from mmengine.config import ConfigDict
from mmengine.device import get_device
from mmengine.evaluator import DumpResults

from mmlinattn.engine.data.checks import leaf_datasets
from mmlinattn.tooling.class_names import dataset_configs
from mmlinattn.tooling.command_line import (
    add_common_arguments,
    check_out_file,
    clean_end,
    explained_setup,
    notice,
    one_line_errors,
    writing,
)
from mmlinattn.tooling.configs import check_checkpoint, check_data_config, load_config, require
from mmlinattn.tooling.console import quiet_upstream
from mmlinattn.tooling.running import add_checks, build_runner
from mmlinattn.utils.errors import RunError


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config file')
    parser.add_argument('checkpoint', help='checkpoint file, URL or mmlinattn://NAME')
    parser.add_argument('--out', help='write the predictions to this .pkl file')
    parser.add_argument(
        '--out-item',
        choices=['metrics', 'pred'],
        default='pred',
        help='what --out writes: of each image the boxes and masks, label map or label (pred), or the numbers of the '
        'evaluator (metrics, also to .json) [pred]',
    )
    parser.add_argument('--show', action='store_true', help='show predictions in a window')
    parser.add_argument('--show-dir', help='draw predictions into this folder')
    parser.add_argument('--interval', type=int, default=1, help='draw every n-th image [1]')
    parser.add_argument('--wait-time', type=float, default=2, help='seconds --show waits [2]')
    parser.add_argument('--tta', action='store_true', help='test-time augmentation of the config')
    parser.add_argument('--amp', action='store_true', help='mixed precision (fp32 where there is no accelerator)')
    add_common_arguments(parser)
    return parser.parse_args()


def configure(args: argparse.Namespace):
    """The config as it will run, with everything checked that can be checked before."""
    suffixes = ('.pkl', '.pickle') + ('.json',) * (args.out_item == 'metrics')
    if args.out and not args.out.endswith(suffixes):
        raise RunError(f'--out {args.out!r} has to end with {" or ".join(suffixes)}.')
    if args.out_item == 'metrics' and not args.out:
        raise RunError('--out-item metrics: --out has to name the file to write.')
    if args.interval < 1:
        raise RunError(f'--interval {args.interval} has to be at least 1.')
    cfg = load_config(args)
    require(cfg, args.config, 'model', 'test_dataloader', 'test_cfg', 'test_evaluator')
    add_checks(cfg)
    cfg.load_from = check_checkpoint(args.checkpoint, 'checkpoint')
    cfg.resume = False
    check_data_config(cfg, ['test'])
    if args.out:
        check_out_file(args.out)
    if args.amp and get_device() in ('cpu', 'mps'):
        notice('no accelerator: mixed precision is off, testing in fp32.')
    elif args.amp:
        cfg.test_cfg.fp16 = True
    if args.show or args.show_dir:
        draw_predictions(cfg, args)
    if args.tta:
        augment(cfg, args.config)
    return cfg


# what upstream's tools take where a config has none
TTA_MODELS = dict(
    mmdet=dict(type='DetTTAModel', tta_cfg=dict(nms=dict(type='nms', iou_threshold=0.5), max_per_img=100)),
    mmpretrain=dict(type='AverageClsScoreTTA'),
)


def augment(cfg, config: str) -> None:
    """Test-time augmentation of the config, else the image and its mirror image."""
    model = cfg.get('tta_model') or TTA_MODELS.get(cfg.get('default_scope'))
    if not model:
        raise RunError(f'--tta: {config} has no tta_model.')
    cfg.model = ConfigDict(dict(model, module=cfg.model))
    for _, dataset in dataset_configs(cfg, 'test_dataloader'):
        dataset['pipeline'] = cfg.get('tta_pipeline') or with_mirror_image(dataset['pipeline'])


def with_mirror_image(pipeline: list) -> list:
    *steps, pack = pipeline
    pack = {key: value for key, value in pack.items() if key != 'meta_keys'}  # by default flips are among them
    flips = [dict(type='RandomFlip', prob=prob) for prob in (0.0, 1.0)]
    return [*steps, dict(type='TestTimeAug', transforms=[flips, [pack]])]


def draw_predictions(cfg, args: argparse.Namespace) -> None:
    """Turn on the visualisation hook of the task; each of the three spells it its own way."""
    scope = cfg.get('default_scope')
    hook = (cfg.get('default_hooks') or {}).get('visualization')
    if hook is None:
        raise RunError('--show, --show-dir: the config has no default_hooks.visualization.')
    show_dir = osp.abspath(args.show_dir) if args.show_dir else None
    if show_dir:
        with writing(show_dir, '--show-dir'):
            os.makedirs(show_dir, exist_ok=True)
    hook.show = args.show
    hook.wait_time = args.wait_time
    if scope == 'mmpretrain':
        hook.enable = True
        hook.out_dir = show_dir
        hook.interval = args.interval
        return
    hook.draw = True
    hook.interval = 1  # every_nth below: MMDetection ignores it, MMSegmentation counts batches
    if scope == 'mmdet':
        hook.test_out_dir = show_dir
    elif show_dir:
        cfg.visualizer.save_dir = show_dir


def every_nth(runner, interval: int) -> None:
    """Let the visualisation hooks of MMDetection and MMSegmentation see every n-th image only."""
    for hook in runner.hooks:
        if type(hook).__name__ in ('DetVisualizationHook', 'SegVisualizationHook'):
            draw, counter = hook.after_test_iter, itertools.count()

            def draw_some(runner, batch_idx, data_batch, outputs, draw=draw, counter=counter):
                chosen = [output for output in outputs if next(counter) % interval == 0]
                draw(runner, batch_idx=batch_idx, data_batch=data_batch, outputs=chosen)

            hook.after_test_iter = draw_some


def keep_folders(runner) -> None:
    """Where images of several folders have one name, let hooks draw into folders of the same names. MMSegmentation's
    numbers its drawings."""
    leaves = [data for data in leaf_datasets(runner.test_dataloader.dataset) if hasattr(data, 'get_data_info')]
    infos = (data.get_data_info(i) for data in leaves for i in range(len(data)))
    paths = [str(info['img_path']) for info in infos if isinstance(info, dict) and 'img_path' in info]
    if len(set(map(osp.basename, paths))) == len(paths):
        return
    root = osp.commonpath([osp.dirname(osp.abspath(path)) for path in paths])
    for name in {'add_datasample', 'visualize_cls'} & set(dir(runner.visualizer)):
        setattr(runner.visualizer, name, partial(draw_below, getattr(runner.visualizer, name), root))


def draw_below(draw, root: str, *args, data_sample=None, out_file=None, **kwargs):
    path = getattr(data_sample, 'img_path', '')
    if out_file and path:
        folder = osp.relpath(osp.dirname(osp.abspath(path)), root)
        out_file = osp.join(osp.dirname(out_file), folder, osp.basename(out_file))
    return draw(*args, data_sample=data_sample, out_file=out_file, **kwargs)


class DumpLabelMaps(DumpResults):
    """Keeps the label map of each image, a byte a pixel; logits would be hundreds."""

    def process(self, data_batch, predictions) -> None:
        for prediction in predictions:
            kept = {key: value for key, value in prediction.items() if 'logits' not in key and key != 'gt_sem_seg'}
            if 'pred_sem_seg' in kept:  # of depth there is none
                labels = kept['pred_sem_seg']['data'].cpu()
                kept['pred_sem_seg'] = dict(data=labels.to(torch.uint8 if labels.max() < 256 else torch.int16))
            super().process(data_batch, [kept])


def dump_metric(cfg, path: str):
    """The metric that only writes predictions down, in the form of the task."""
    if cfg.get('default_scope') == 'mmdet':
        from mmdet.evaluation import DumpDetResults  # keeps masks encoded

        return DumpDetResults(out_file_path=path)
    return (DumpLabelMaps if cfg.get('default_scope') == 'mmseg' else DumpResults)(out_file_path=path)


def main() -> None:
    args = parse_args()
    quiet_upstream()
    with clean_end(), one_line_errors():
        with explained_setup(args.config):
            cfg = configure(args)
            runner = build_runner(cfg, compiles=args.compile)
            if args.interval > 1:
                every_nth(runner, args.interval)
            if args.show_dir:
                keep_folders(runner)
            if args.out and args.out_item == 'pred':
                runner.test_evaluator.metrics.append(dump_metric(cfg, args.out))
        with explained_setup(args.config, whole=False):
            metrics = runner.test()
        if args.out and args.out_item == 'metrics' and runner.rank == 0:
            mmengine.dump(metrics, args.out)
        if args.show_dir:
            notice(f'images are in {osp.abspath(args.show_dir)}')


if __name__ == '__main__':
    main()
