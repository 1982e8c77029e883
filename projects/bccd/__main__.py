# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Train and test each size, seed and backbone on BCCD; run again to resume."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from mmengine.config import Config
from mmengine.utils import mkdir_or_exist
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

import mmlinattn
from mmlinattn.tooling.own_data.boxes import as_coco, without_small
from mmlinattn.tooling.own_data.data import Data
from mmlinattn.tooling.own_data.formats import recognise
from mmlinattn.tooling.own_data.labelling_tools import Voc

HERE = Path(__file__).resolve().parent
SPLITS = {'train': 'trainval', 'test': 'test'}  # 292 and 72 images

_swin = dict(type='mmdet.SwinTransformer', out_indices=(1, 2, 3), drop_path_rate=0.0)  # its defaults are Swin-T's
_resnet = dict(type='mmdet.ResNet', depth=50, out_indices=(1, 2, 3), norm_eval=False)
# name -> backbone, channels of the feature maps of strides 8, 16 and 32
BACKBONES = {
    'ravlt_t': (
        dict(type='RAVLT', arch='tiny', out_indices=(1, 2, 3), norm_cfg=dict(type='BN'), drop_path_rate=0.0),
        [128, 256, 512],
    ),
    'swin_t': (_swin, [192, 384, 768]),
    'resnet50': (_resnet, [512, 1024, 2048]),
    'inline_swin_t': (
        dict(type='LinearSwin', arch='inline-tiny', out_indices=(1, 2, 3), drop_path_rate=0.0),
        [192, 384, 768],
    ),
    'flatten_pvt_v2_b1': (
        dict(type='LinearPVTv2', arch='flatten-b1', out_indices=(1, 2, 3), drop_path_rate=0.0),
        [128, 320, 512],
    ),
}


def convert(data: Path, out: Path) -> None:
    """Convert BCCD's VOC annotations in ``data`` to a COCO file for each split in ``out``."""
    mkdir_or_exist(out)
    classes, reader = Config.fromfile(HERE / 'retinanet.py').metainfo.classes, Voc('VOC XML', Data(data))
    for split, listed in SPLITS.items():
        stems = (data / 'ImageSets' / 'Main' / f'{listed}.txt').read_text().split()
        photos = reader.images([recognise(data / 'Annotations' / f'{stem}.xml') for stem in stems])
        coco = as_coco([without_small(photo) for photo in photos], list(classes), data / 'JPEGImages')
        (out / f'{split}.json').write_text(json.dumps(coco))
        boxes, given = len(coco['annotations']), sum(len(photo.objects) for photo in photos)
        print(f'{split}: {len(stems)} images, {boxes} boxes, {given - boxes} without area left out', flush=True)


def make_config(data: Path, out: Path, backbone: str, size: tuple, seed: int) -> Config:
    """Return the shared recipe with a backbone, image size (width, height) and seed, for the data in ``data`` and the
    COCO files in ``out``."""
    text = (HERE / 'retinanet.py').read_text().replace('size = (256, 192)', f'size = {size}')
    text = text.replace('../../', f'{HERE.parents[1]}/')
    cfg = Config.fromstring(text, '.py')
    cfg.model.backbone, cfg.model.neck.in_channels = BACKBONES[backbone]
    for loader, split in (('train', 'train'), ('val', 'test'), ('test', 'test')):
        cfg[f'{loader}_dataloader'].dataset.update(data_root=f'{data}/', ann_file=str(out / f'{split}.json'))
    for evaluator in (cfg.val_evaluator, cfg.test_evaluator):
        evaluator.update(ann_file=str(out / 'test.json'))
    cfg.test_evaluator.outfile_prefix = str(out / f'{backbone}_{size[0]}x{size[1]}_{seed}' / 'found')
    cfg.randomness = dict(seed=seed)
    return cfg


def run(tool: str, *args: str, log: Path) -> float:
    """Run a script of ``tools/`` in a new process that writes to ``log``, and return its peak resident memory in
    MiB."""
    with log.open('ab') as file:
        command = [sys.executable, str(HERE.parents[1] / 'tools' / tool), *args]
        process = subprocess.Popen(command, stdout=file, stderr=file)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f'{tool} {" ".join(args)} ended with status {status}: {log}')
    return usage.ru_maxrss / 1024


def score(truth: Path, found: Path) -> dict:
    """Evaluate COCO results by pycocotools: box AP, AP50, AP75, and AP50 of each class."""
    coco = COCO(str(truth))
    results = COCOeval(coco, coco.loadRes(str(found)), 'bbox')
    results.evaluate()
    results.accumulate()
    results.summarize()
    numbers = dict(zip(('AP', 'AP50', 'AP75'), map(float, results.stats[:3])))
    precision = results.eval['precision'][0, :, :, 0, 2]  # at IoU 0.5, all areas, 100 boxes: (recalls, classes)
    names = [coco.cats[i]['name'] for i in results.params.catIds]
    return dict(numbers, by_class={name: float(precision[:, i].mean()) for i, name in enumerate(names)})


def main() -> None:
    parser = argparse.ArgumentParser(prog='python -m projects.bccd', description=__doc__)
    parser.add_argument('data', type=Path, help='BCCD: Annotations/ ImageSets/ JPEGImages/')
    parser.add_argument('--out', type=Path, required=True, help='folder of results.json, configs, checkpoints, logs')
    parser.add_argument('--sizes', nargs='+', default=['256x192', '512x384'], help='image sizes [256x192 512x384]')
    parser.add_argument('--seeds', nargs='+', type=int, default=[0, 1])
    parser.add_argument('--backbones', nargs='+', choices=BACKBONES, default=list(BACKBONES), metavar='NAME')
    args = parser.parse_args()
    data, out = args.data.resolve(), args.out.resolve()
    convert(data, out)
    results = out / 'results.json'
    rows = json.loads(results.read_text()) if results.exists() else []
    for size in args.sizes:
        for seed in args.seeds:
            for backbone in args.backbones:
                key = dict(backbone=backbone, size=size, seed=seed)
                if any(key.items() <= row.items() for row in rows):
                    continue
                work = out / f'{backbone}_{size}_{seed}'
                mkdir_or_exist(work)
                config = str(work / 'config.py')
                make_config(data, out, backbone, tuple(map(int, size.split('x'))), seed).dump(config)
                log = work / 'log.txt'
                last = work / 'epoch_8.pth'
                print(f'{backbone} at {size}, seed {seed}: {log}', flush=True)
                memory = run('train.py', config, '--work-dir', str(work), '--resume', '--no-validate', log=log)
                shown = [] if seed else ['--show-dir', str(work / 'shown')]
                run('test.py', config, str(last), '--work-dir', str(work / 'test'), *shown, log=log)
                row = dict(key, **score(out / 'test.json', work / 'found.bbox.json'), train_MiB=round(memory))
                rows.append(dict(row, version=mmlinattn.__version__))
                results.write_text(json.dumps(rows, indent=1))
                last.unlink()
    print(results)


if __name__ == '__main__':
    main()
