# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Write a config for a user's data, and test it with one training step."""

import copy
import io
import itertools
import math
from contextlib import redirect_stdout
from typing import Optional

from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmengine.runner import Runner

from ...utils.errors import RunError, described, printable
from ...utils.files import project_files
from ..command_line import quiet
from ..configs import read_config
from ..swapping.smoke import SmokeResult, smoke_test
from ..swapping.upstream import Upstream
from ..swapping.writing import is_own, signed, statement
from ..swapping.zoo import recipes
from .boxes import read_boxes
from .data import ConfigArgs, Data, OwnData
from .drawing import draw_examples, is_drawn
from .folders import read_classes
from .images import file_notes, image_format
from .masks import read_masks
from .settings import TASKS, annotation_file, config_values

_TOOL = 'make_config.py'
# the import makes the scope known to upstream's tools; MMEngine evaluates this line before all others
_BASE = "_base_ = __import__('mmlinattn').__name__ + '::%s.py'\n"


def make_config(args: ConfigArgs) -> tuple[list[str], SmokeResult]:
    """Read the data, write the config and its annotation files, and run one training step and one prediction.

    Returns:
        tuple[list[str], SmokeResult]: Notes for the user, and the result of the training step.

    Raises:
        RunError: The data does not fit the task or has errors, no config has the backbone, or ``args.out`` lies in the
            data or was edited.
    """
    if not args.data.exists():
        raise RunError(f'DATA {str(args.data)!r}: no such folder.')
    args = args._replace(data=args.data.resolve(), out=args.out.resolve())
    if args.data in args.out.parents:
        raise RunError(f'--out {str(args.out)!r} is inside of DATA: write it beside, as annotation files go with it.')
    if args.data in (annotation_file(args, split) for split in ('train', 'val', 'test')):
        raise RunError(f'--out {str(args.out)!r}: an annotation file beside it would be written over DATA; rename it.')
    if args.out.exists() and not args.overwrite and not is_own(args.out, _TOOL):
        raise RunError(f'--out {str(args.out)!r} was edited or written by hand. Set --overwrite, or name another file.')
    picture = args.out.with_name('labels.png')
    if picture.exists() and not is_drawn(picture):
        raise RunError(f'{picture} is not a drawing of this tool, which would be written over it: move it, or --out.')
    files = Data(args.data, args)
    if args.task == 'detection':
        data = read_boxes(files)
    elif args.task == 'segmentation':
        data = read_masks(files, args.out.with_name(f'{args.out.stem}_labels'))
    else:
        data = read_classes(files)
    data.notes.extend(files.unused())
    used = itertools.chain(*data.images.values())
    data.notes.extend(file_notes(used, args.task != 'classification'))
    pixels = image_format(data.images['train'], args.channels)
    base = _base(args, data)
    if data.masks and base.endswith('retinanet_1x'):
        data = data._replace(masks=False)
        data.notes.append(f'the only detector of {args.backbone} is RetinaNet: boxes alone are learnt')
    cfg = Config.fromfile(str(project_files('configs') / f'{base}.py'))
    values, notes = config_values(args, data, pixels, cfg, base.rpartition('/')[2])
    for split, text in data.annotations.items():
        annotation_file(args, split).write_text(text, encoding='utf-8')
    counts = ', '.join(f'{len(paths)} of {split}' for split, paths in data.images.items())
    found = f'{data.kind}: {counts}; {len(data.classes)} classes: {", ".join(data.classes)}'
    body = f'{_BASE % base}\n' + ''.join(statement(key, value) for key, value in values.items())
    args.out.write_text(signed(body, _TOOL, found), encoding='utf-8')
    trial = _try(args)
    draw_examples(data, picture)
    notes.append(f'{picture} shows {min(6, len(data.items["train"]))} training images with their labels: look at it')
    return [found, *data.notes, *pixels.notes, *notes, *_durations(args, values, data, trial)], trial


def _base(args: ConfigArgs, data: OwnData) -> str:
    """Return the name of the config of this project that the new config inherits."""
    order = ['retinanet_1x', 'maskrcnn_1x', 'cascade_3x', 'fpn_80k', 'upernet_160k', 'in1k']
    order = order[1:] + order[:1] if data.masks else order
    scope = TASKS[args.task]
    known = {name: kinds for (name, other), kinds in recipes().items() if other == scope}
    kind = next((kind for kind in order if kind in known.get(args.backbone, ())), None)
    if kind is None:
        raise RunError(
            f'--backbone {args.backbone!r} has no config for {args.task}; these have: {", ".join(sorted(known))}'
        )
    return f'{scope}/{args.backbone}_{kind}'


def _durations(args: ConfigArgs, values: dict, data: OwnData, trial: Optional[SmokeResult]) -> list[str]:
    """Return a line with the measured time of a step (``trial``) and an estimate for the whole training. ``values`` are
    the settings of the new config."""
    if trial is None:
        return []
    height, width = trial.size
    pixels = math.prod(values['train_pipeline'][2]['scale']) if args.task == 'detection' else width * height
    epochs, batch = values.get('max_epochs', 0), values['train_dataloader']['batch_size']
    images = epochs * len(data.images['train']) or values['max_iters'] * batch
    hours = trial.seconds / 2 * images * pixels / (width * height) / 3600
    duration = f'{hours:.1f} h' if hours >= 1 else f'{max(1, round(60 * hours))} min'
    length = f'{epochs} epochs' if epochs else f'{values["max_iters"]} steps of {batch}'
    step = f'a step of 2 images of {width}x{height} took {trial.seconds:.1f} s on the CPU'
    return [f'{step}; the whole, {length}, takes about {duration} on it, validation aside']


def _try(args: ConfigArgs) -> SmokeResult:
    """Run one training step and one prediction on images of the data; a detector's images are made smaller."""
    cfg, scope = read_config(str(args.out)), TASKS[args.task]
    init_default_scope(scope)
    source = Upstream(str(args.out), cfg, scope)
    try:
        batches = []
        for key, batch in (('train_dataloader', 2), ('val_dataloader', 1)):
            loader = copy.deepcopy(cfg[key])
            loader.update(batch_size=batch, num_workers=0, persistent_workers=False)
            if scope == 'mmpretrain':
                loader.setdefault('collate_fn', dict(type='default_collate'))
            for step in loader.dataset.pipeline:
                if scope == 'mmdet' and step.type == 'Resize':
                    step.scale = tuple(max(32, side * 384 // max(384, *step.scale)) for side in step.scale)
            with quiet(), redirect_stdout(io.StringIO()):  # pycocotools prints
                batches.append(next(iter(Runner.build_dataloader(loader, seed=0))))
    except Exception as error:  # data sets and transforms raise errors of any kind
        raise RunError(f'{args.out}: the data cannot be read: {printable(described(error))}') from error
    size = source.image_size or (384, 384)
    trial = smoke_test(source.model, source, size, cfg.optim_wrapper.to_dict(), (batches[0], batches[1]))
    if trial.failure:
        raise RunError(f'{args.out}: {trial.failure}')
    return trial
