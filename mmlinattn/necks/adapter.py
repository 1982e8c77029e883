# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from collections.abc import Sequence
from fractions import Fraction
from typing import Optional, Union

import torch.nn.functional as F
from mmengine.model import BaseModule, ModuleList
from mmengine.registry import MODELS
from torch import Tensor, nn

from ..ops.tokens import round_up


@MODELS.register_module()
class MapAdapter(BaseModule):
    """Convert feature maps to the channels and strides that the next module expects.

    Each output is a 1x1 convolution of one input, resized (bilinear) if the strides differ.

    Args:
        in_channels (Sequence[int]): Channels of the inputs.
        out_channels (Sequence[int]): Channels of the outputs.
        sources (Sequence[int | None], optional): Index of the input for each output; by default output i takes input i.
            The entry None gives zeros with one pixel, for an output that the head does not read.
        scales (Sequence[float], optional): Size of each output relative to its input, 1 by default.
        inference_output (int, optional): In eval mode, return the output of this index alone, not in a tuple. Heads of
            networks with branches (DDRNet, PIDNet) then read one branch. None returns all outputs.
        init_cfg (dict, optional): MMEngine's initialisation. None takes uniform Xavier for convolutions.

    Raises:
        ValueError: If the arguments have different numbers of outputs, or name an input or output that does not exist.
            Also for inputs with other channels, and for a scale that is not above 0.

    Shape: sequence of (B, in_channels[i], h_i, w_i) -> tuple of (B, out_channels[j], ceil(h * scales[j]), ceil(w *
    scales[j])) with h, w of input ``sources[j]``.

    Examples:
        >>> import torch
        >>> neck = MapAdapter([64, 128], [512, 1024], scales=[1, 2])
        >>> [tuple(out.shape) for out in neck((torch.rand(1, 64, 8, 8), torch.rand(1, 128, 4, 4)))]
        [(1, 512, 8, 8), (1, 1024, 8, 8)]
    """

    def __init__(
        self,
        in_channels: Sequence[int],
        out_channels: Sequence[int],
        sources: Optional[Sequence[Optional[int]]] = None,
        scales: Optional[Sequence[float]] = None,
        inference_output: Optional[int] = None,
        init_cfg: Optional[dict] = None,
    ) -> None:
        super().__init__(init_cfg or dict(type='Xavier', layer='Conv2d', distribution='uniform'))
        num = len(out_channels)
        sources = range(num) if sources is None else sources
        scales = [1.0] * num if scales is None else scales
        if not len(sources) == len(scales) == num or not all(i is None or 0 <= i < len(in_channels) for i in sources):
            raise ValueError(
                f'sources={tuple(sources)} and scales={tuple(scales)}: expected one entry for each of the {num} '
                f'out_channels, and sources in [0, {len(in_channels) - 1}]'
            )
        if not all(isinstance(scale, (int, float)) and 0 < scale < float('inf') for scale in scales):
            raise ValueError(f'scales={tuple(scales)}: expected numbers above 0')
        if inference_output is not None and not 0 <= inference_output < num:
            raise ValueError(f'inference_output={inference_output}: expected a value in [0, {num - 1}]')
        self.in_channels = tuple(in_channels)
        self.inference_output = inference_output
        self.sources = tuple(sources)
        self.scales = tuple(float(scale) for scale in scales)
        self.out_channels = tuple(out_channels)
        self.convs = ModuleList(
            nn.Identity() if i is None else nn.Conv2d(in_channels[i], dim, 1)
            for i, dim in zip(self.sources, out_channels)
        )

    def forward(self, feats: Union[Tensor, Sequence[Tensor]]) -> Union[Tensor, tuple[Tensor, ...]]:
        feats = (feats,) if isinstance(feats, Tensor) else tuple(feats)
        widths = tuple(feat.shape[1] for feat in feats)
        if widths != self.in_channels:
            raise ValueError(f'feats have the widths {widths}, in_channels={self.in_channels}')
        outs = []
        alone = None if self.training else self.inference_output
        for place, (i, scale, width, conv) in enumerate(zip(self.sources, self.scales, self.out_channels, self.convs)):
            if alone not in (None, place):
                continue
            if i is None:
                outs.append(feats[0].new_zeros(len(feats[0]), width, 1, 1))
                continue
            out = conv(feats[i])
            if scale != 1:
                # rounded up, as strided convolutions round; in integers, also in graphs of dynamic sizes
                rows, per = Fraction(scale).limit_denominator(10**6).as_integer_ratio()
                size = [round_up(side * rows, per) // per for side in out.shape[2:]]
                out = F.interpolate(out, size=size, mode='bilinear', align_corners=False)
            outs.append(out)
        return tuple(outs) if alone is None else outs[0]
