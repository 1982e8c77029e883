# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""From a checkpoint of any accepted kind to the weights of one backbone."""

import logging
from typing import Any, Optional, Union

from mmengine.logging import print_log
from mmengine.model import update_init_info
from mmengine.runner import CheckpointLoader
from torch import nn

from ..utils.errors import CheckpointError
from .states import LoadReport, backbone_state, fit_backbone, not_finite, some, state_dict_of


def load_pretrained(
    backbone: nn.Module,
    checkpoint: str,
    map_location: Any = 'cpu',
    logger: Union[logging.Logger, str, None] = 'current',
    prefix: Optional[str] = None,
) -> LoadReport:
    """Load pretrained weights into one of our backbones.

    Args:
        backbone: the model that takes the weights.
        checkpoint: anything MMEngine's CheckpointLoader takes (a path, a URL, ``mmlinattn://NAME``), holding a released
            file as its authors published it (a classifier, a dense backbone, or a whole detector or segmentor) or our
            own (a backbone, or a whole model with a ``backbone.`` part).
        map_location: as in :func:`torch.load`.
        logger: where MMEngine's ``print_log`` writes. Defaults to the current logger.
        prefix: the part of the file to take. Defaults to ``backbone.`` where there is one.

    Returns:
        What was loaded, missing, unexpected and of another shape. Head keys are skipped; the rest of what did not fit
        is listed in one warning.

    Raises:
        CheckpointError: the file cannot be read, or nothing of it fits (the backbone is then as it was).
    """
    loaded = CheckpointLoader.load_checkpoint(checkpoint, map_location, logger)
    state, _, _ = backbone_state(loaded, checkpoint, prefix)
    fits, report = fit_backbone(backbone, state)
    kind = type(backbone).__name__
    if not fits:
        raise CheckpointError(
            f'nothing in {checkpoint} fits {kind}: the file has {some(state or state_dict_of(loaded, checkpoint))}; '
            f'the model has {some(backbone.state_dict())}'
            + (f'; of another shape or kind: {report.mismatched[0]}' if report.mismatched else '')
        )
    backbone.load_state_dict(fits, strict=False)
    if hasattr(backbone, '_params_init_info'):  # MMEngine's log of where each weight comes from
        update_init_info(backbone, f'load_pretrained: from {checkpoint}')
    problems = {
        'missing in the file': report.missing,
        'unexpected in the file': report.unexpected,
        'of another shape or kind, not loaded': report.mismatched,
        'NaN or infinite': not_finite(fits, fits),
    }
    listed = '; '.join(f'{title}: {", ".join(keys)}' for title, keys in problems.items() if keys)
    if listed:
        print_log(f'{checkpoint} and {kind} do not match exactly. {listed}', logger=logger, level=logging.WARNING)
    return report
