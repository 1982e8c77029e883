# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Write docs/real_images.md from the results.json of a run of projects.bccd."""

import argparse
import json
from pathlib import Path
from statistics import mean

from mmengine.registry import MODELS, init_default_scope

from .__main__ import BACKBONES

SIZES, SEEDS = ('256x192', '512x384'), (0, 1)
NAMES = dict(
    ravlt_t='RAVLT-T',
    inline_swin_t='InLine-Swin-T',
    flatten_pvt_v2_b1='FLatten-PVTv2-B1',
    swin_t='Swin-T, MMDetection',
    resnet50='ResNet-50, MMDetection',
)
CLASSES = dict(RBC='red cells', WBC='white cells', Platelets='platelets')
PAGE = """# Real photographs

Detectors learnt from scratch on [BCCD][1], blood under a microscope at 640x480 pixels: 292 photographs to train on (its
`trainval`) and 72 of `test`, with 4155 red cells, 372 white cells and 361 platelets in all. Two boxes have no area and
are left out. The photographs are not part of this repository.

{table}

Where two seeds ran, a cell has their mean, and AP that of each in brackets. AP is COCO's box AP; AP50 counts a box from
an overlap of 0.5. Memory is the highest resident memory of the training process, everything in it. Times are left out:
the machine had other work.{missing}

![Ground truth beside the predictions of RAVLT-T](images/real_images.png)

Photographs of BCCD, copyright (c) 2017 shenggan, [MIT licence][2]. To the left the boxes of the data set, to the right
those of {shown} at scores from 0.4.

## What it shows

{ran} from 292 photographs by this project's tools, without a weight from elsewhere. The data set leaves some
red cells out (below left), which counts against every detector.

It does not show which backbone is better: 8 epochs of 73 steps are few, nobody tuned the recipe for any of them, 72
images and two seeds leave differences of a few points open, and with ImageNet weights, as one would train, the order
may be another. How accurate trained models are is in the [tables](tables.md).

## The recipe

RetinaNet on the maps of strides 8, 16 and 32, a pyramid of 128 channels, two convolutions in each head, anchors from 16
pixels up. AdamW 2e-4, weight decay 0.05 except on norms, 4 images a step, warm-up of 50 steps, the rate divided by ten
after epochs 6 and 7 of 8; flips; no stochastic depth; batch norms train. The config is `projects/bccd/retinanet.py`.

<!-- needs: data, minutes -->

```shell
git clone https://github.com/Shenggan/BCCD_Dataset
python -m projects.bccd BCCD_Dataset/BCCD --out work_dirs/bccd
```

This trains all rows, one after another; run again, it goes on where it stopped.

[1]: https://github.com/Shenggan/BCCD_Dataset
[2]: https://github.com/Shenggan/BCCD_Dataset/blob/master/LICENSE
"""


def parameters(backbone: str) -> float:
    """Of a backbone, in millions."""
    model = MODELS.build(dict(BACKBONES[backbone][0]))
    return sum(parameter.numel() for parameter in model.parameters()) / 1e6


def row_of(backbone: str, size: str, runs: list[dict]) -> str:
    """A line of the table."""
    both = ', '.join(f'{100 * run["AP"]:.1f}' for run in runs)
    each = f' ({both})' if len(runs) > 1 else ''
    scores = [mean(run[key] for run in runs) for key in ('AP50', 'AP75')]
    scores += [mean(run['by_class'][name] for run in runs) for name in CLASSES]
    cells = [size, NAMES[backbone], f'{parameters(backbone):.1f}', str(len(runs))]
    cells += [f'{100 * mean(run["AP"] for run in runs):.1f}{each}', *(f'{100 * score:.1f}' for score in scores)]
    return f'| {" | ".join(cells)} | {max(run["train_MiB"] for run in runs) / 1024:.1f} |'


def page_of(rows: list[dict]) -> str:
    """The page, with what was not run."""
    init_default_scope('mmdet')
    head = ['image size', 'backbone', 'parameters, M', 'seeds', 'AP', 'AP50', 'AP75']
    head += [*(f'AP50, {name}' for name in CLASSES.values()), 'memory, GiB']
    lines, missing = [f'| {" | ".join(head)} |', '| --- ' * len(head) + '|'], []
    for size in SIZES:
        for backbone in NAMES:
            runs = [row for row in rows if (row['size'], row['backbone']) == (size, backbone)]
            lines += [row_of(backbone, size, runs)] if runs else []
            gone = sorted(set(SEEDS) - {run['seed'] for run in runs})
            if gone:
                missing.append(f'| {size} | {NAMES[backbone]} | {", ".join(map(str, gone))} |')
    said = ''
    if missing:
        said = '\n\nNot run yet, as two busy cores had no time for it:\n\n'
        said += '| image size | backbone | seeds |\n| --- | --- | --- |\n'
    ran = [NAMES[backbone] for backbone in NAMES if any(row['backbone'] == backbone for row in rows)]
    learns = f'{" and ".join([", ".join(ran[:-1]), ran[-1]])} learn' if len(ran) > 1 else f'{ran[0]} learns'
    return PAGE.format(
        table='\n'.join(lines), missing=said + '\n'.join(missing), shown='RAVLT-T at 256x192', ran=learns
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog='python -m projects.bccd.page', description=__doc__)
    parser.add_argument('results', type=Path, help='results.json')
    parser.add_argument('--out', type=Path, default='docs/real_images.md')
    args = parser.parse_args()
    args.out.write_text(page_of(json.loads(args.results.read_text())), encoding='utf-8')


if __name__ == '__main__':
    main()
