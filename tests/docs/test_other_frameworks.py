# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Run the page on other frameworks with those that are installed."""

import runpy

import pytest
import torch
from helpers.config_helpers import ROOT
from test_docs_code import blocks_of


def test_timm():
    pytest.importorskip('timm')
    path, found = ROOT / 'docs' / 'other_frameworks.md', {'__name__': 'page'}
    (block,) = (each for each in blocks_of(path, path.read_text(encoding='utf-8')) if each.note.endswith('::test_timm'))
    exec(compile(block.text, str(block), 'exec'), found)
    assert found['info'].channels()[-2:] == [x.shape[1] for x in found['maps']]
    assert found['info'].reduction()[-2:] == [64 // x.shape[2] for x in found['maps']]
    scales = {group['lr_scale'] for group in found['optimizer'].param_groups}
    assert len(scales) == sum(found['model'].depths) + 2 and max(scales) == 1


def test_detr(tmp_path):
    pytest.importorskip('transformers')
    from transformers import DetrConfig, DetrForObjectDetection

    example = runpy.run_path(str(ROOT / 'docs' / 'examples' / 'huggingface_detr.py'))
    options = dict(use_timm_backbone=False, use_pretrained_backbone=False, num_labels=3)
    detr = DetrForObjectDetection(DetrConfig(backbone_config=example['RAVLTConfig']('tiny'), **options))
    x = torch.rand(1, 3, 64, 96)
    labels = [dict(class_labels=torch.tensor([1]), boxes=torch.tensor([[0.5, 0.5, 0.4, 0.3]]))]
    detr(pixel_values=x, labels=labels).loss.backward()
    backbone = detr.model.backbone.conv_encoder.model.model
    assert not [name for name, parameter in backbone.named_parameters() if parameter.grad is None]
    detr.save_pretrained(tmp_path)
    again = DetrForObjectDetection.from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(detr.eval()(x).logits, again.eval()(x).logits)
