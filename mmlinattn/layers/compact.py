# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Compact feed-forward networks with a factorised matrix (cFFN), and the choice of a feed-forward network by name."""

from typing import Any, Optional, Union

import torch
from mmcv.cnn import build_norm_layer
from mmengine.model import BaseModule, ModuleList
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_linear_bn_weights

from ..ops.batch_norms import is_foldable
from ..ops.leaves import Linear
from ..ops.tokens import unflatten
from ..utils.private_apis import is_altered
from .block import MLP, ConvFFN, DWConvFFN

FFNS = {'mlp': MLP, 'conv': ConvFFN, 'dwconv': DWConvFFN}
MATRICES = {'M1': 'fc1', 'M2': 'fc2'}


class BranchedLinear(BaseModule):
    """Sum of parallel linear layers, each followed by a batch norm over the tokens.

    The branches serve training (structural re-parameterisation) and are merged into one linear layer for inference.

    Args:
        in_features, out_features (int): Channels.
        branches (int): Number of branches.
        norm_cfg (dict): Batch norm of (rows, channels): ``BN1d`` or ``SyncBN``.

    Raises:
        ValueError: For another norm.
    """

    def __init__(self, in_features: int, out_features: int, branches: int, norm_cfg: dict, init_cfg=None) -> None:
        super().__init__(init_cfg)
        self.in_features, self.out_features = in_features, out_features
        self.linears = ModuleList(Linear(in_features, out_features, bias=False) for _ in range(branches))
        self.norms = ModuleList(build_norm_layer(norm_cfg, out_features)[1] for _ in range(branches))
        if not isinstance(self.norms[0], (nn.BatchNorm1d, nn.SyncBatchNorm)):
            raise ValueError(f"norm_cfg={norm_cfg} of a compact FFN: expected type 'BN1d' or 'SyncBN'")

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        out = sum(norm(layer(rows)) for layer, norm in zip(self.linears, self.norms))
        return unflatten(out, 0, x.shape[:-1])

    @torch.no_grad()
    def merged(self) -> Linear:
        """Return the linear layer that equals the sum of the branches in eval mode.

        Raises:
            ValueError: For a branch that cannot be merged (altered layer, norm without running statistics).
        """
        branches: list[Any] = list(zip(self.linears, self.norms))
        for layer, norm in branches:
            if type(layer) not in (nn.Linear, Linear) or is_altered(self, layer) or not is_foldable(norm):
                raise ValueError(
                    f'switch_to_deploy: {type(layer).__name__} and {type(norm).__name__} of a compact FFN cannot be '
                    'merged; allowed are linear layers, and batch norms with weights and running statistics, of '
                    "PyTorch's own forward"
                )
        pairs = [
            fuse_linear_bn_weights(
                layer.weight, layer.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
            )
            for layer, norm in branches
        ]
        weight, bias = (torch.stack(parts).sum(0) for parts in zip(*pairs))
        layer = Linear(self.in_features, self.out_features, device=weight.device, dtype=weight.dtype)
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
        return layer.requires_grad_(self.linears[0].weight.requires_grad)


class FactorisedLinear(BaseModule):
    """Linear layer factorised through a narrow middle, ``up(down(x)) + bias``.

    Both factors are :class:`BranchedLinear` in training and plain linear layers after merging. Xu et al. 2023 do not
    mention ``bias``. With it, the printed sizes of all four models (4.68, 17.91, 12.15 and 27.26 M) are met.

    Args:
        in_features, out_features (int): Channels.
        rank (int): Channels k of the middle.
        branches (int): Branches r of each factor.
        norm_cfg (dict, optional): Batch norm of the branches, ``dict(type='BN1d')`` by default.
        gain (float): Initial gain of the batch norms of ``up``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        branches: int = 2,
        norm_cfg: Optional[dict] = None,
        gain: float = 1.0,
        init_cfg=None,
    ) -> None:
        super().__init__(init_cfg)
        self.in_features, self.out_features = in_features, out_features
        norm_cfg = norm_cfg or dict(type='BN1d')
        last = dict(type='Constant', layer='_BatchNorm', val=gain, bias=0.0)
        self.down: nn.Module = BranchedLinear(in_features, rank, branches, norm_cfg)
        self.up: nn.Module = BranchedLinear(rank, out_features, branches, norm_cfg, last)
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x)) + self.bias

    def merged(self) -> tuple[nn.Module, nn.Module]:
        """Return ``down`` and ``up`` as plain linear layers, see :meth:`BranchedLinear.merged`."""
        if isinstance(self.down, BranchedLinear) and isinstance(self.up, BranchedLinear):
            return self.down.merged(), self.up.merged()
        return self.down, self.up

    def switch_to_deploy(self) -> None:
        """Replace both factors by linear layers with merged branches."""
        self.down, self.up = self.merged()


def compact(
    ffn: MLP,
    t: float = 2 / 3,
    r: int = 2,
    matrix: str = 'M2',
    norm_cfg: Optional[dict] = None,
) -> MLP:
    """Factorise one matrix of ``ffn`` in place: the compact feed-forward network, cFFN (Xu et al. 2023, Sec. 3.3).

    ``ffn`` has the matrices M1 (input to hidden channels) and M2 (hidden to output channels). The rank
    ``k = t m C / (m + 1)``, with m = hidden channels / C, keeps the fraction t of the parameters of the matrix.

    The paper does not specify the initialisation. The weights of the last batch norm of M2 start at zero, as in ResNet
    (Goyal et al. 2017, Sec. 5.1). With weights of one, small models learned far less. Those of M1 start at the value
    that keeps the output variance of the replaced linear layer (weights of deviation 0.02, inputs of unit variance).

    Args:
        ffn (MLP): Any feed-forward network of the backbones; its depth-wise convolution stays.
        t (float): Share of parameters, in (0, 1] (Tab. 6).
        r (int): Parallel branches of each factor in training (Tab. 5).
        matrix (str): ``'M1'``, input to hidden, or ``'M2'``, hidden to output (Tab. 7).
        norm_cfg (dict, optional): Batch norm of the branches, ``BN1d`` (default) or ``SyncBN``.

    Raises:
        ValueError: For values out of range.
    """
    if not 0 < t <= 1:
        raise ValueError(f't={t} of a compact FFN: expected a value in (0, 1]')
    if type(r) is not int or r < 1:
        raise ValueError(f'r={r} of a compact FFN: expected an int >= 1')
    if matrix not in MATRICES:
        raise ValueError(f"matrix={matrix!r} of a compact FFN: expected 'M1' or 'M2'")
    layer = getattr(ffn, MATRICES[matrix])
    widths = layer.in_features, layer.out_features
    rank = max(int(t * widths[0] * widths[1] / sum(widths) + 1e-6), 1)
    gain = 0.0 if matrix == 'M2' else 0.02 * (widths[0] / r) ** 0.5
    setattr(ffn, MATRICES[matrix], FactorisedLinear(*widths, rank, r, norm_cfg, gain))
    return ffn


def build_ffn(spec: Union[None, str, dict], default: type, dim: int, hidden_dim: int) -> Any:
    """Build the feed-forward network that an arch names under ``ffn``.

    Args:
        spec (str | dict, optional): None for ``default``; ``'mlp'``, ``'conv'`` (RAVLT's), ``'dwconv'`` (PVTv2's).
            ``dict(type='compact', ffn=None, **options)`` builds the network that its ``ffn`` names in the same way, and
            factorises a matrix by :func:`compact` with the options.
        default (type): Class of the backbone's own feed-forward network.
        dim, hidden_dim (int): Channels.

    Raises:
        ValueError: For an unknown name.
    """
    options = dict(spec) if isinstance(spec, dict) else {}
    if options.pop('type', None) == 'compact':
        return compact(build_ffn(options.pop('ffn', None), default, dim, hidden_dim), **options)
    if spec is None:
        return default(dim, hidden_dim)
    if not isinstance(spec, str) or spec not in FFNS:
        raise ValueError(f"arch: ffn={spec!r}: expected None, one of {list(FFNS)}, or dict(type='compact', ...)")
    return FFNS[spec](dim, hidden_dim)
