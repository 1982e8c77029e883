# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import pytest
import torch
from mmengine.registry import MODELS
from torch.nn import functional as F

from mmlinattn.heads import ConvProjectionNeck


def test_is_the_classifier_of_the_release():
    """1x1 convolution, batch norm, SiLU, global average; of the last of several maps."""
    torch.manual_seed(0)
    neck = MODELS.build(dict(type='ConvProjectionNeck', in_channels=6, out_channels=5)).double()
    x = torch.randn(3, 6, 4, 7, dtype=torch.double)
    neck.train()(x * 2 + 1)  # running statistics other than 0 and 1
    neck.eval()
    y = torch.einsum('oc,bchw->bohw', neck.proj.weight[:, :, 0, 0], x)
    y = y + neck.proj.bias[:, None, None]
    y = F.batch_norm(
        y, neck.norm.running_mean, neck.norm.running_var, neck.norm.weight, neck.norm.bias
    )
    expected = (y * y.sigmoid()).flatten(2).mean(2)
    outs = neck((torch.zeros(3, 2, 8, 14), x))
    assert isinstance(outs, tuple) and len(outs) == 1
    torch.testing.assert_close(outs[0], expected)
    torch.testing.assert_close(neck(x)[0], expected)


def test_another_width_is_named():
    with pytest.raises(ValueError, match='in_channels=6'):
        ConvProjectionNeck(6)((torch.rand(1, 4, 2, 2),))
