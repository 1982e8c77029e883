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

Train detectors from scratch on [BCCD][1], blood under a microscope: 292 photographs for training, 72 for testing, with
4155 red cells, 372 white cells and 361 platelets. Run the command again to resume:

<!-- needs: data, minutes -->

```shell
git clone https://github.com/Shenggan/BCCD_Dataset
python -m projects.bccd BCCD_Dataset/BCCD --out work_dirs/bccd
```

{table}

Columns: AP, the mean of the seeds (each in brackets); AP50 of all and of each class; peak resident memory.{missing}

![Ground truth beside the predictions of RAVLT-T](images/real_images.png)

Photographs of BCCD, copyright (c) 2017 shenggan, [MIT licence][2]. Left: boxes of the data set, which leaves some red
cells out. Right: RAVLT-T at 256x192, scores from 0.4.

The tools train from few images without weights. The table does not rank backbones: 8 epochs of 73 steps are few (two
seeds of InLine-Swin-T are 10 points apart), and nobody tuned the recipe (`projects/bccd/retinanet.py`). The
[tables](tables.md) have the accuracy of trained models.

[1]: https://github.com/Shenggan/BCCD_Dataset
[2]: https://github.com/Shenggan/BCCD_Dataset/blob/master/LICENSE
"""


def parameters(backbone: str) -> float:
    """Count the parameters of a backbone, in millions."""
    model = MODELS.build(dict(BACKBONES[backbone][0]))
    return sum(parameter.numel() for parameter in model.parameters()) / 1e6


def row_of(backbone: str, size: str, runs: list[dict]) -> str:
    """Return the table row of a backbone and an image size, from its runs with different seeds."""
    both = ', '.join(f'{100 * run["AP"]:.1f}' for run in runs)
    each = f' ({both})' if len(runs) > 1 else ''
    scores = [mean(run['AP50'] for run in runs), *(mean(run['by_class'][name] for run in runs) for name in CLASSES)]
    cells = [size, NAMES[backbone], f'{parameters(backbone):.1f}']
    cells += [f'{100 * mean(run["AP"] for run in runs):.1f}{each}', *(f'{100 * score:.1f}' for score in scores)]
    return f'| {" | ".join(cells)} | {max(run["train_MiB"] for run in runs) / 1024:.1f} |'


def page_of(rows: list[dict]) -> str:
    """Return the page; it names missing runs."""
    init_default_scope('mmdet')
    head = ['image size', 'backbone', 'params M', 'AP', 'AP50', *CLASSES.values(), 'GiB']
    lines: list[str] = [f'| {" | ".join(head)} |', '| --- ' * len(head) + '|']
    missing: dict[str, list[str]] = {}
    for size in SIZES:
        for backbone in NAMES:
            runs = [row for row in rows if (row['size'], row['backbone']) == (size, backbone)]
            lines += [row_of(backbone, size, runs)] if runs else []
            gone = sorted(set(SEEDS) - {run['seed'] for run in runs})
            if gone:
                missing.setdefault(f'seed {" and ".join(map(str, gone))} at {size}', []).append(NAMES[backbone])
    notes = ''.join(f'\n\nNot run yet, {which}: {", ".join(names)}.' for which, names in missing.items())
    return PAGE.format(table='\n'.join(lines), missing=notes)


def main() -> None:
    parser = argparse.ArgumentParser(prog='python -m projects.bccd.page', description=__doc__)
    parser.add_argument('results', type=Path, help='results.json')
    parser.add_argument('--out', type=Path, default='docs/real_images.md')
    args = parser.parse_args()
    args.out.write_text(page_of(json.loads(args.results.read_text())), encoding='utf-8')


if __name__ == '__main__':
    main()
