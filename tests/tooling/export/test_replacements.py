# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mmlinattn.tooling.export.replacements import BinMeans, StridedPools, replace_modules


@pytest.mark.parametrize('bins', [(1, 1), (2, 2), (3, 3), (6, 6), (2, 5)], ids=str)
@pytest.mark.parametrize('size', [(1, 1), (4, 7), (13, 6), (32, 32)], ids=str)
def test_bin_means_are_adaptive_pools(bins, size):
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    torch.testing.assert_close(BinMeans(bins)(x), nn.AdaptiveAvgPool2d(bins)(x))


def upsample(module='mmseg.models.utils.wrappers', size=None, name='Upsample'):
    found = type(name, (nn.Module,), dict(__module__=module))()
    found.size, found.scale_factor, found.mode, found.align_corners = size, 2.0, 'bilinear', False
    return found


def test_upsampling_of_mmsegmentation_by_a_factor_is_pytorchs():
    model = nn.Sequential(
        nn.Sequential(upsample()), upsample(size=(4, 5)), upsample('mmdet.models'), upsample(name='U')
    )
    kept = list(model)[1:]
    replace_modules(model)
    assert list(model)[1:] == kept
    new = model[0][0]
    assert type(new) is nn.Upsample
    assert (new.size, new.scale_factor, new.mode, new.align_corners) == (None, 2.0, 'bilinear', False)


def test_slices_are_of_pools_of_one_pixel_and_stride_2_alone():
    x = torch.randn(1, 2, 9, 8)
    calls = [(1, 3), (1, (2, 3)), (3, 2), (3, 2, 1), (1,), (1, 2)]
    expected = [F.max_pool2d(x, *args) for args in calls]
    with StridedPools():
        assert all(torch.equal(F.max_pool2d(x, *args), truth) for args, truth in zip(calls, expected))
        with pytest.raises(RuntimeError):  # padding above half of the kernel: PyTorch's to refuse
            F.max_pool2d(x, 1, 2, 1)
