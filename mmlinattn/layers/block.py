# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import functools
from typing import Any, Optional

import torch
from mmcv.cnn import build_norm_layer
from mmcv.cnn.bricks import DropPath
from mmengine.model import BaseModule
from torch import Tensor, nn

from ..ops import dispatch
from .ffn import over_tokens
from .linear import takes_scale
from .plain import has_hooks


class Block(BaseModule):
    """Pre-norm transformer block with what any host may want of it.

    ``x = position(x); x = x + gamma1 * attn(norm1(x)); x = x + gamma2 * ffn(norm2(x))``, each branch under stochastic
    depth.

    Args:
        dim (int): Width C.
        attn (nn.Module): Takes and gives maps (or tokens) of width C; gets the stage's shared keyword arguments and,
            where its ``wants_input`` is true, what goes into ``norm1`` as ``context_tokens``. In inference, a branch
            whose ``adds_residual`` is true gets the ``residual`` to add to what it gives.
        ffn (nn.Module): Takes and gives maps of width C.
        norm_cfg (dict): Both norms, over the last axis.
        drop_path (float): Rate of stochastic depth.
        layer_scale (float, optional): Initial value of gamma; None for no layer scale. With it, ``attn`` and ``ffn``
            take an ``out_scale``, see :func:`~mmlinattn.layers.apply_linear`.
        position (nn.Module, optional): Position encoding that includes its own residual connection.
    """

    def __init__(
        self,
        dim: int,
        attn: nn.Module,
        ffn: nn.Module,
        norm_cfg: dict,
        drop_path: float = 0.0,
        layer_scale: Optional[float] = None,
        position: Optional[nn.Module] = None,
        init_cfg=None,
    ) -> None:
        super().__init__(init_cfg)
        self.position = position
        self.norm1 = build_norm_layer(norm_cfg, dim)[1]
        self.attn = attn
        self.norm2 = build_norm_layer(norm_cfg, dim)[1]
        self.ffn = ffn
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        gammas = [None if layer_scale is None else nn.Parameter(torch.full((dim,), float(layer_scale))) for _ in '12']
        self.gamma1, self.gamma2 = gammas

    def add_branch(self, x: Tensor, norm: nn.Module, branch: Any, gamma: Optional[Tensor], **shared) -> Tensor:
        if gamma is not None and takes_scale(x):
            shared['out_scale'], gamma = gamma, None
        drops = self.training and isinstance(self.drop_path, DropPath)
        if gamma is None and not drops and _adds_residual(branch):
            return branch(norm(x), residual=x, **shared)
        out = branch(norm(x), **shared)
        if gamma is None and not drops:
            return x + out
        # paths are dropped in a small tensor of scales, which saves passes over the map
        scale = x.new_ones(1) if gamma is None else gamma
        scale = self.drop_path(scale.expand(x.shape[0], *(1,) * (x.dim() - 2), len(scale)))
        return torch.addcmul(x, out, scale.to(x.dtype)) if x.dtype == out.dtype else x + out * scale

    def forward(self, x: Tensor, **shared) -> Tensor:
        if self.position is not None:
            x = self.position(x)
        if getattr(self.attn, 'wants_input', False):
            x = self.add_branch(x, self.norm1, self.attn, self.gamma1, context_tokens=x, **shared)
        else:
            x = self.add_branch(x, self.norm1, self.attn, self.gamma1, **shared)
        ffn: Any = self.ffn
        if 'grid' in shared and getattr(ffn, 'halo', None):  # tokens, and a convolution that needs their map
            ffn = functools.partial(over_tokens, ffn, grid=shared['grid'])
        return self.add_branch(x, self.norm2, ffn, self.gamma2)


def _adds_residual(branch) -> bool:
    """Whether the sum with the residual is the branch's: in inference, in the pass that writes its last product. Who
    watches the branch sees its output alone."""
    return getattr(branch, 'adds_residual', False) and not dispatch.records() and not has_hooks(branch)
