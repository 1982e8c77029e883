# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""tools/demo.py on ordinary pictures, for the three tasks, with small models and a checkpoint file."""

import runpy
import sys

import numpy as np
import pytest
import torch
from config_helpers import ROOT, build

mmcv = pytest.importorskip('mmcv')
TOOL = ROOT / 'tools' / 'demo.py'
SMALL = dict(embed_dims=(32, 64, 128, 160), depths=(1, 1, 1, 1), num_heads=(1, 2, 4, 5))
WIDTHS = list(SMALL['embed_dims'])
NAMES = {'mmdet': 'mmdet/ravlt_shapes_quickstart', 'mmseg': 'mmseg/ravlt_t_fpn_80k', 'mmpretrain': 'mmpretrain/ravlt_t_in1k'}


def options(task: str) -> dict:
    """Changes that make a config small and quick."""
    if task == 'mmdet':
        return {}
    small = dict(model__backbone__arch=SMALL)
    if task == 'mmpretrain':
        return dict(small, model__neck__layers=None) if False else small
    return dict(
        small,
        model__neck__in_channels=WIDTHS,
        model__decode_head__num_classes=3,
        test_pipeline__1__scale=(96, 64),
        test_dataloader__dataset__pipeline__1__scale=(96, 64),
    )
