#!/usr/bin/env python
# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Export every backbone in every format, and run the files at other sizes than the export's.

    python benchmarks/run_graphs.py --results graphs.jsonl --out graphs.md

Cases in ``--results`` are skipped: an interrupted run resumes.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from mmengine.registry import MODELS
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / 'tests'))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers import goldens, graphs

from mmlinattn.tooling.export import FORMATS, ExportableModel
from mmlinattn.tooling.export.models import deviation

SHAPES = [(batch, 3, height, width) for batch, height, width in graphs.SHAPES]
ONE_PIXEL = (1, 3, 32, 32)  # of the last feature map


class Pyramid(nn.Module):
    """Detector that consists of a backbone only, in the form that :class:`ExportableModel` takes."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.extract_feat = backbone


def build(backbone: str, mix: tuple) -> ExportableModel:
    """Build a small model for export, with one attention of ``mix`` per stage, or per block of DeiT."""
    arch = dict(graphs.ARCHS[backbone])
    options = dict(out_indices=(0, 1, 2, 3), stage_attns=mix)
    if backbone == 'LinearDeiT':
        arch['depths'], options = (len(mix),), dict(out_type='featmap', stage_attns=(mix,))
    elif backbone == 'LinearNextViT':
        arch['depths'] = (1, 1, 2, 1)  # the second block of the third stage has the attention
    torch.manual_seed(0)
    return ExportableModel(Pyramid(goldens.fill(MODELS.build(dict(type=backbone, arch=arch, **options)))))


@torch.no_grad()
def measure(backbone: str, form: str, mix: tuple, folder: Path) -> dict:
    """Export a model and compare the graph with it at several sizes.

    Args:
        backbone (str): Type of the backbone.
        form (str): Key of ``FORMATS``.
        mix (tuple): One attention per stage.
        folder (Path): Folder for the file.

    Returns:
        dict: ``largest`` deviation, ``one_pixel`` (the same for a last feature map of one pixel, or ``'refused'``), and
            CPU ``seconds`` of the export.
    """
    model, backend = build(backbone, mix), FORMATS[form]
    torch.manual_seed(1)
    example = torch.randn(graphs.TRACED_AT[0], 3, *graphs.TRACED_AT[1:])
    images = [torch.randn(shape) for shape in [*SHAPES, ONE_PIXEL]]
    expected = [model(image) for image in images]
    model.fold()
    names = model.output_names(expected[0])
    path = folder / f'graph{backend.suffix}'
    began = time.process_time()
    backend.write(model, example, path, 32, dict(outputs=names))
    seconds = time.process_time() - began
    run = backend.load(path)
    errors = [deviation(run(image), outs) for image, outs in zip(images[:-1], expected)]
    try:
        last = deviation(run(images[-1]), expected[-1])
    except Exception:  # each runtime has its own error
        last = 'refused'
    return dict(largest=max(errors), one_pixel=last, seconds=seconds)


def table(results: list[dict]) -> str:
    """Format the largest deviation over all mixes as a table."""
    lines = ['| backbone | ' + ' | '.join(f'`{form}`' for form in FORMATS) + ' |', '| --- ' * (len(FORMATS) + 1) + '|']
    for backbone in graphs.BACKBONES:
        cells = []
        for form in FORMATS:
            found = [r for r in results if (r['backbone'], r['format']) == (backbone, form)]
            errors = [r['error'] for r in found if 'error' in r]
            if errors or not found:
                cells.append(errors[0] if errors else '-')
                continue
            values = [r['largest'] for r in found]
            ones = [r['one_pixel'] for r in found]
            values += [one for one in ones if one != 'refused']
            remark = ' (32x32 unsupported)' if 'refused' in ones else ''
            cells.append(f'{max(values):.0e}{remark}')
        lines.append(f'| `{backbone}` | ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines) + '\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--results', type=Path, required=True, help='file of measurements; run again to resume')
    parser.add_argument('--out', type=Path, help='table to write')
    parser.add_argument('--backbones', nargs='+', choices=graphs.BACKBONES, default=graphs.BACKBONES, metavar='NAME')
    parser.add_argument('--formats', nargs='+', choices=list(FORMATS), default=list(FORMATS), metavar='FORMAT')
    mixes = graphs.one_per_stage()
    parser.add_argument('--mixes', nargs='+', type=int, default=range(len(mixes)), metavar='N', help='models to export')
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    results = [json.loads(line) for line in lines]
    keys = ('backbone', 'format', 'mix')
    done = {tuple(result[key] for key in keys) for result in results}
    for number in options.mixes:
        for form in options.formats:
            for backbone in options.backbones:
                case = dict(zip(keys, (backbone, form, '-'.join(mixes[number]))))
                if tuple(case.values()) in done:
                    continue
                with TemporaryDirectory() as folder:
                    try:
                        case.update(measure(backbone, form, mixes[number], Path(folder)))
                    except Exception as error:  # goes into the table
                        case['error'] = f'{type(error).__name__}: {" ".join(str(error).split())[:300]}'
                results.append(case)
                with open(options.results, 'a') as file:
                    file.write(json.dumps(case) + '\n')
                print(json.dumps(case), flush=True)
    text = table(results)
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == '__main__':
    main()
