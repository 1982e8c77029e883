# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..ops.leaves import Leaf, shared_casts
from ..ops.linear import check_kernel
from ..ops.tokens import on_grid, unflatten
from .mixer import TOKEN_MIXERS, LocalMixer


class GroupedLinear(Leaf, nn.Conv1d):
    """A grouped 1x1 convolution of vectors (B, C), computed by one batched matmul."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = shared_casts(self.weight, self.bias, x)
        weight = unflatten(weight.squeeze(-1), 0, (self.groups, -1))  # (groups, outputs, inputs)
        x = unflatten(x, -1, (self.groups, -1)).transpose(0, 1)
        # not einsum: traces do not record its casts under autocast
        out = torch.bmm(x, weight.transpose(1, 2)).transpose(0, 1).flatten(1)
        return out if bias is None else out + bias


class PredictedConv(nn.Module):
    """Depth-wise convolution with kernels predicted for each image from its mean token (InLine Eq. 6).

    Two 1x1 convolutions, grouped by head, with GELU between, map the mean token (B, C) to a 3x3 kernel for each
    channel.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.fc1 = GroupedLinear(dim, dim, 1, groups=num_heads)
        self.fc2 = GroupedLinear(dim, dim * 3**2, 1, groups=num_heads)

    def kernels(self, mean: Tensor) -> Tensor:
        """Predict the kernels (B, C, 3, 3) from mean tokens (B, C)."""
        return unflatten(self.fc2(F.gelu(self.fc1(mean))), 1, (-1, 3, 3))

    def forward(self, image: Tensor, mean: Tensor) -> Tensor:
        """Convolve ``image`` (B, C, h, w) with a zero-padded 3x3 kernel for each image and channel.

        The kernels are predicted from the mean tokens ``mean`` (B, C). The result is (B, C, h, w).
        """
        return ops.dynamic_depthwise_conv2d(image, self.kernels(mean).to(image.dtype))


@TOKEN_MIXERS.register_module('inline')
class InLineMixer(LocalMixer):
    """Injective linear attention with a local residual, a convolution of the values (InLine Eq. 3-6).

    Args:
        dim (int): Channels C.
        num_heads (int): Number of heads.
        kernel (str): phi: ``'identity'``, ``'relu'``, ``'leakyrelu'`` or ``'exp'`` (``exp(0.2 x)``).
        local_residual (bool): Add the depth-wise 3x3 convolution of the values with predicted kernels (Tab. 4).
        injective (bool): False takes plain linear attention with division, the ablation of Tab. 3. It needs a kernel
            without negative results, ``'relu'`` or ``'exp'``.

    Raises:
        ValueError: For an unknown ``kernel``, and for one with negative results without ``injective``.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid=None,
        kernel: str = 'identity',
        local_residual: bool = True,
        injective: bool = True,
        init_cfg=None,
    ) -> None:
        super().__init__(dim, num_heads, grid, init_cfg)
        self.kernel = check_kernel(kernel, ('identity', 'relu', 'leakyrelu', 'exp'))
        if not injective and kernel in ('identity', 'leakyrelu'):
            raise ValueError(
                f"kernel={kernel!r} with injective=False: expected 'relu' or 'exp', whose sums are positive"
            )
        self.injective = injective
        self.context = local_residual
        self.residual = PredictedConv(dim, num_heads) if local_residual else None

    def attend(self, q, k, v, key_grid, mask=None) -> Tensor:
        if self.injective:
            return ops.inline_attention(q, k, v, self.num_heads, self.head_dim**-0.5, self.kernel, mask)
        return ops.linear_attention(q, k, v, self.num_heads, self.kernel, mask)

    def convolve(self, v, key_grid, context=None):
        residual = self.residual
        return None if residual is None else on_grid(lambda image: residual(image, context), v, key_grid)
