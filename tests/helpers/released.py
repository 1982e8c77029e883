# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Reference implementation of the released classifiers and of their training step, in plain PyTorch.

:class:`Released` holds float64 weights under the names of this package and calls none of its modules. Attention maps
are built as N x N matrices. Inputs are (B, 3, H, W) with sides that all strides and windows divide.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .references import focused_map, kernel, linear_map, rala_map, similarity


def by_head(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def to_map(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Convert tokens (B, N, C) to a map (B, C, h, w)."""
    return x.transpose(1, 2).unflatten(2, size)


def to_tokens(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


def cut(x: Tensor, window: tuple[int, int]) -> Tensor:
    """Cut a map (B, H, W, C) into windows (B * windows, tokens, C)."""
    x = x.unflatten(2, (-1, window[1])).unflatten(1, (-1, window[0]))
    return x.permute(0, 1, 3, 2, 4, 5).flatten(0, 2).flatten(1, 2)


def join(x: Tensor, window: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """Join windows of :func:`cut` to the map of ``size`` (height, width)."""
    rows, columns = size[0] // window[0], size[1] // window[1]
    x = x.unflatten(1, window).unflatten(0, (-1, rows, columns)).permute(0, 1, 3, 2, 4, 5)
    return x.flatten(3, 4).flatten(1, 2)


class Released:
    """A released classifier in training mode, without stochastic depth.

    Args:
        backbone (str): Type of the backbone.
        arch (dict): Its sizes, complete.
        state (dict): Weights and running statistics.
    """

    def __init__(self, backbone: str, arch: dict, state: dict) -> None:
        self.backbone, self.arch = backbone, arch
        state = {key: value.double() for key, value in state.items() if value.is_floating_point()}
        self.buffers = {key: value.clone() for key, value in state.items() if 'running' in key}
        self.weights = {k: v.clone().requires_grad_() for k, v in state.items() if k not in self.buffers}

    # --- layers -------------------------------------------------------------------------------------------------------

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f'{name}.weight'], self.weights.get(f'{name}.bias'))

    def conv(self, name: str, x: Tensor, stride: int = 1, padding: int = 0, groups: int = 1) -> Tensor:
        return F.conv2d(x, self.weights[f'{name}.weight'], self.weights[f'{name}.bias'], stride, padding, 1, groups)

    def depthwise(self, name: str, x: Tensor) -> Tensor:
        size = self.weights[f'{name}.weight'].shape[-1]
        return self.conv(name, x, padding=size // 2, groups=x.shape[1])

    def layer_norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        variance, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
        return (x - mean) / (variance + eps).sqrt() * self.weights[f'{name}.weight'] + self.weights[f'{name}.bias']

    def batch_norm(self, name: str, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, dim=(0, 2, 3), correction=0)
        count = x.numel() // x.shape[1]
        for key, value in dict(running_mean=mean, running_var=variance * count / (count - 1)).items():
            self.buffers[f'{name}.{key}'].mul_(0.9).add_(0.1 * value.detach())
        mean, variance, weight, bias = (
            t[:, None, None] for t in (mean, variance, self.weights[f'{name}.weight'], self.weights[f'{name}.bias'])
        )
        return (x - mean) / (variance + 1e-5).sqrt() * weight + bias

    # --- attentions, (B, N, C) -> (B, N, C) ---------------------------------------------------------------------------

    def mix(self, kind: str, name: str, q, k, v, heads: int, size, source, bias=0.0, rotary=False) -> Tensor:
        """Mix the values. InLine averages the tokens ``source``; ``size`` is the grid of the last h * w tokens."""
        prefix = q.shape[1] - size[0] * size[1]
        values, scale = v, (q.shape[-1] // heads) ** -0.5
        if kind == 'focused':
            k = k + self.weights[f'{name}.position.weight']
            q, k = (focused_map(t, self.weights[f'{name}.scale'], 3) for t in (q, k))
        q, k, v = (by_head(t, heads) for t in (q, k, v))
        if kind == 'softmax':
            weights = (similarity(q, k, size if rotary else None) * scale + bias).softmax(dim=-1)
        elif kind == 'rala':
            weights = rala_map(kernel(q, 'elu'), kernel(k, 'elu'), size, scale)
        elif kind == 'focused':
            weights = linear_map(q, k)
        else:
            logits = similarity(q, k) * scale
            weights = (logits + 1 - logits.mean(dim=-1, keepdim=True)) / q.shape[2]
        out = (weights @ v).transpose(1, 2).flatten(2)
        image = to_map(values[:, prefix:], size)
        if kind == 'focused':
            local = [self.depthwise(f'{name}.local', part) for part in image.chunk(heads, dim=1)]
            out = out + to_tokens(torch.cat(local, dim=1))
        if kind == 'inline':
            hidden = source.mean(dim=1)[..., None]
            for layer in ('fc1', 'fc2'):
                weight, offset = (self.weights[f'{name}.residual.{layer}.{leaf}'] for leaf in ('weight', 'bias'))
                hidden = F.conv1d(hidden if layer == 'fc1' else F.gelu(hidden), weight, offset, groups=heads)
            kernels = hidden.reshape(-1, 1, 3, 3)
            local = F.conv2d(image.flatten(0, 1)[None], kernels, padding=1, groups=len(kernels))
            local = to_tokens(local[0].unflatten(0, image.shape[:2]))
            out = torch.cat((out[:, :prefix], out[:, prefix:] + local), dim=1)
        return out

    def global_attention(self, kind, name, x, heads, size, source=None, **options) -> Tensor:
        q, k, v, *gate = self.linear(f'{name}.qkv', x).split(x.shape[-1], dim=-1)
        out = self.mix(kind, f'{name}.mixer', q, k, v, heads, size, x if source is None else source, **options)
        if f'{name}.local.weight' in self.weights:
            out = out + to_tokens(self.depthwise(f'{name}.local', to_map(v, size)))
        return self.linear(f'{name}.proj', out * gate[0] if gate else out)

    def reduced_attention(self, name, x, heads, size, ratio) -> Tensor:
        reduced = to_tokens(self.conv(f'{name}.sr', to_map(x, size), ratio))
        k, v = self.linear(f'{name}.kv', self.layer_norm(f'{name}.norm', reduced, 1e-5)).chunk(2, dim=-1)
        q, k, v = (by_head(t, heads) for t in (self.linear(f'{name}.q', x), k, v))
        out = (similarity(q, k) * q.shape[-1] ** -0.5).softmax(dim=-1) @ v
        return self.linear(f'{name}.proj', out.transpose(1, 2).flatten(2))

    def window_attention(self, kind, name, x, heads, size, window, shift) -> Tensor:
        """Compute Swin's attention in square windows; softmax windows are shifted and have a relative position bias."""
        x, bias = x.unflatten(1, size), 0.0
        shift = window // 2 if shift and window < size[0] and kind == 'softmax' else 0
        x = x.roll((-shift, -shift), (1, 2))
        if kind == 'softmax':
            places = torch.cartesian_prod(torch.arange(window), torch.arange(window))
            offsets = places[:, None] - places[None] + window - 1
            table = self.weights[f'{name}.relative_bias.table']
            bias = table[offsets[..., 0] * (2 * window - 1) + offsets[..., 1]].permute(2, 0, 1)
        if shift:
            regions = torch.zeros(1, *size, 1)
            ends = [(0, size[0] - window), (size[0] - window, size[0] - shift), (size[0] - shift, size[0])]
            for i, (top, bottom) in enumerate(ends):
                for j, (left, right) in enumerate(ends):
                    regions[:, top:bottom, left:right] = 3 * i + j
            regions = cut(regions, (window, window))[..., 0]
            hidden = -100.0 * (regions[:, :, None] != regions[:, None])
            bias = bias + hidden.double().repeat(len(x), 1, 1)[:, None]
        windows = cut(x, (window, window))
        q, k, v = self.linear(f'{name}.qkv', windows).chunk(3, dim=-1)
        out = self.mix(kind, f'{name}.mixer', q, k, v, heads, (window, window), windows, bias)
        out = join(self.linear(f'{name}.proj', out), (window, window), size)
        return out.roll((shift, shift), (1, 2)).flatten(1, 2)

    def stripe_attention(self, name, x, heads, size, stripe) -> Tensor:
        """Compute CSWin's attention, with half of the channels in vertical and half in horizontal stripes."""
        qkv = self.linear(f'{name}.qkv', x).chunk(3, dim=-1)
        halves = zip(*(part.chunk(2, dim=-1) for part in qkv))
        outs = []
        for i, (parts, window) in enumerate(zip(halves, ((size[0], stripe), (stripe, size[1])))):
            q, k, v = (cut(part.unflatten(1, size), window) for part in parts)
            branch = f'{name}.branches.{i}'
            out = self.mix('softmax', f'{branch}.mixer', q, k, v, heads // 2, window, None)
            out = out + to_tokens(self.depthwise(f'{branch}.local', to_map(v, window)))
            outs.append(join(out, window, size).flatten(1, 2))
        return self.linear(f'{name}.proj', torch.cat(outs, dim=-1))

    # --- blocks and networks -----------------------------------------------------------------------------------------

    def ffn(self, name: str, x: Tensor, size) -> Tensor:
        x = self.linear(f'{name}.fc1', x)
        if self.backbone == 'LinearPVTv2':
            x = F.gelu(to_tokens(self.depthwise(f'{name}.dwconv', to_map(x, size))))
        else:
            x = F.gelu(x)
            if self.backbone == 'RAVLT':
                x = x + to_tokens(self.depthwise(f'{name}.dwconv', to_map(x, size)))
        return self.linear(f'{name}.fc2', x)

    def attention(self, stage: int, index: int, name: str, x: Tensor, size, source) -> Tensor:
        arch, backbone = self.arch, self.backbone
        kind, heads = arch['stage_attns'][stage], arch['num_heads'][stage]
        if backbone == 'LinearSwin':
            window = arch['window'] if kind == 'softmax' else arch['linear_windows'][stage]
            return self.window_attention(kind, name, x, heads, size, window, index % 2 == 1)
        if kind == 'softmax' and backbone in ('LinearPVT', 'LinearPVTv2') and arch['sr_ratios'][stage] > 1:
            return self.reduced_attention(name, x, heads, size, arch['sr_ratios'][stage])
        if kind == 'softmax' and backbone == 'LinearCSWin' and arch['stripes'][stage]:
            return self.stripe_attention(name, x, heads, size, arch['stripes'][stage])
        source = source if backbone == 'LinearCSWin' else None  # before the norm
        return self.global_attention(kind, name, x, heads, size, source, rotary=backbone == 'RAVLT')

    def block(self, stage: int, index: int, name: str, x: Tensor, size) -> Tensor:
        eps = 1e-5 if self.backbone in ('LinearSwin', 'LinearCSWin') else 1e-6
        if self.backbone == 'RAVLT':
            x = x + to_tokens(self.depthwise(f'{name}.position', to_map(x, size)))
        branch = self.attention(stage, index, f'{name}.attn', self.layer_norm(f'{name}.norm1', x, eps), size, x)
        x = x + self.weights.get(f'{name}.gamma1', 1.0) * branch
        branch = self.ffn(f'{name}.ffn', self.layer_norm(f'{name}.norm2', x, eps), size)
        return x + self.weights.get(f'{name}.gamma2', 1.0) * branch

    def embed(self, stage: int, x: Tensor) -> Tensor:
        """Apply the stem or the down-sampling of a stage: (B, C, H, W) -> (B, C', h, w)."""
        name, backbone = f'backbone.patch_embeds.{stage}', self.backbone
        if backbone == 'RAVLT':
            if stage:
                return self.batch_norm(f'{name}.layers.norm', self.conv(f'{name}.layers.conv', x, 2, 1))
            for i, stride in enumerate((2, 1, 1, 2)):
                x = self.conv(f'{name}.layers.{3 * i}', F.gelu(x) if i else x, stride, 1)
                x = self.batch_norm(f'{name}.layers.{3 * i + 1}', x)
            return x
        if backbone == 'LinearSwin' and stage:
            x = x.permute(0, 2, 3, 1)
            x = torch.cat([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], dim=-1)
            return self.linear(f'{name}.reduction', self.layer_norm(f'{name}.norm', x, 1e-5)).permute(0, 3, 1, 2)
        stride = 2 if stage else 4
        padding = dict(LinearPVTv2=(3, 1), LinearCSWin=(2, 1)).get(backbone, (0, 0))[bool(stage)]
        x = self.conv(f'{name}.proj', x, stride, padding).permute(0, 2, 3, 1)
        return self.layer_norm(f'{name}.norm', x, 1e-5).permute(0, 3, 1, 2)

    def logits(self, x: Tensor) -> Tensor:
        weights = self.weights
        if self.backbone == 'LinearDeiT':
            x = self.conv('backbone.patch_embeds.0.proj', x, 16)
            size = tuple(x.shape[2:])
            x = torch.cat((weights['backbone.cls_token'].expand(len(x), -1, -1), to_tokens(x)), dim=1)
            x = x + weights['backbone.position_table.weight']
            for i in range(self.arch['depths'][0]):
                x = self.block(0, i, f'backbone.blocks.{i}', x, size)
            return self.linear('head.fc', self.layer_norm('backbone.out_norm', x, 1e-6)[:, 0])
        for stage, depth in enumerate(self.arch['depths']):
            x = self.embed(stage, x)
            size = tuple(x.shape[2:])
            x = to_tokens(x)
            if self.backbone == 'LinearPVT':
                x = x + weights[f'backbone.position_tables.{stage}.weight']
            for index in range(depth):
                x = self.block(stage, index, f'backbone.stages.{stage}.{index}', x, size)
            if f'backbone.out_norms.{stage}.weight' in weights:
                x = self.layer_norm(f'backbone.out_norms.{stage}', x, 1e-6 if self.backbone == 'LinearPVTv2' else 1e-5)
            x = to_map(x, size)
        if self.backbone == 'RAVLT':
            x = F.silu(self.batch_norm('neck.norm', self.conv('neck.proj', x)))
        return self.linear('head.fc', x.mean(dim=(2, 3)))


class AdamW:
    """AdamW (Loshchilov and Hutter 2019, Alg. 2), with weight decay of the given weights only.

    Args:
        weights (dict): Leaves by name.
        decays (set): Names of the weights that decay.
        weight_decay (float): Factor of the decay.
        clip (float, optional): Largest norm of the gradient.
    """

    def __init__(self, weights: dict, decays: set, weight_decay: float, clip=None) -> None:
        self.weights, self.decays, self.weight_decay, self.clip = weights, decays, weight_decay, clip
        self.moments = {key: [torch.zeros_like(value), torch.zeros_like(value)] for key, value in weights.items()}
        self.steps = 0

    @torch.no_grad()
    def step(self, loss: Tensor, lr: float) -> None:
        gradients = dict(zip(self.weights, torch.autograd.grad(loss, list(self.weights.values()))))
        if self.clip is not None:
            norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
            gradients = {key: value * min(1.0, self.clip / (norm + 1e-6)) for key, value in gradients.items()}
        self.steps += 1
        for key, gradient in gradients.items():
            weight, (first, second) = self.weights[key], self.moments[key]
            first.mul_(0.9).add_(0.1 * gradient)
            second.mul_(0.999).add_(0.001 * gradient.square())
            if key in self.decays:
                weight.mul_(1 - lr * self.weight_decay)
            ratio = first / (1 - 0.9**self.steps)
            weight.sub_(lr * ratio / ((second / (1 - 0.999**self.steps)).sqrt() + 1e-8))


def learning_rate(step: int, lr: float, warmup: int, total: int, least: float, start: float = 1e-3) -> float:
    """Return the rate of a linear warm-up that ends with step ``warmup - 1``, followed by a cosine."""
    if step < warmup:
        return lr * (start + (1 - start) * step / (warmup - 1))
    return least + (lr - least) * (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2


def soft_cross_entropy(logits: Tensor, shares: Tensor, smoothing: float = 0.1) -> Tensor:
    """Cross-entropy of mixed labels (B, classes) with label smoothing, in float32 as MMPretrain smooths them."""
    target = shares.float() * (1 - smoothing) + smoothing / shares.shape[1]
    return -(target * logits.log_softmax(dim=-1)).sum(dim=-1).mean()
