# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What the attentions are, side by side: where they come from, what they cost, what they keep, in every host.

python -m projects.pages.attentions
"""

import argparse
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from mmengine.logging import MMLogger
from mmengine.registry import MODELS

import mmlinattn  # noqa: F401  registers the backbones
from mmlinattn.analysis.counting import Count
from mmlinattn.apis.cli import check_out_file, one_line_errors
from mmlinattn.attention import TOKEN_MIXERS, Grid

from .tables import markdown_table

OUT = Path(__file__).resolve().parents[2] / 'docs' / 'attentions.md'


class About(NamedTuple):
    """One attention.

    Attributes:
        source: Paper, with what to look for there.
        equation: In one line of text; sums run over the tokens j.
        complexity: Operations of one layer, N tokens of width C, heads of width d.
        position: What of it sees positions.
    """

    source: str
    equation: str
    complexity: str
    position: str


ABOUT = {
    'softmax': About(
        'Vaswani et al. 2017, Eq. 1',
        'softmax(q_i · k_j / √d) v_j',
        'N² C',
        'rotary encoding or relative bias, if the host has one',
    ),
    'rala': About(
        'RALA, Eq. 3-6',
        'φ(q_i) Σ a_j φ(k_j)ᵀ v_j / φ(q_i) · Σ a_j φ(k_j); a = softmax over tokens of mean(q) · k_j; φ = ELU + 1',
        'N C d',
        'rotary encoding, if the host has one',
    ),
    'inline': About(
        'InLine, Eq. 3-6',
        'mean(v) + q_i cov(k, v) / √d, plus a 3x3 convolution of v whose kernel is predicted for each image',
        'N C d',
        'the convolution',
    ),
    'focused': About(
        'FLatten, Eq. 5-12',
        'φ(q_i) Σ φ(k_j)ᵀ v_j / φ(q_i) · Σ φ(k_j), plus a 5x5 convolution of v; φ(x) = ‖r‖ / ‖r³‖ r³, r = ReLU(x) / s',
        'N C d',
        'a table added to the keys, the convolution',
    ),
    'hallucinated': About(
        'hMHSA, Eq. 2',
        'softmax([A, H]_ij) v_j; A = q_i · k_j / √d for half of the heads, H: a 3x3 convolution over the keys of A, '
        'then a mixture of its heads',
        'N² C',
        'the convolution, relative bias',
    ),
    'hydra': About('Bolya et al. 2022, Eq. 5-7', 'q_i/‖q_i‖ * Σ k_j/‖k_j‖ * v_j, channel by channel', 'N C', 'none'),
    'efficient': About(
        'Shen et al. 2021, Eq. 4-6',
        'softmax over channels of q_i, times Σ of (softmax over tokens of k)_jᵀ v_j',
        'N C d',
        'none',
    ),
    'angular': About(
        'Castling-ViT (You et al. 2023), Eq. 4-6',
        'x_i / ‖x_i‖, x_i = v_i / 2 + q_i/‖q_i‖ Σ (k_j/‖k_j‖)ᵀ v_j / π, plus a 3x3 (DeiT: 9x1) convolution of v',
        'N C d',
        'the convolution',
    ),
    'enhanced': About(
        'EfficientViT (Cai et al. 2022), Sec. 3.2',
        'φ(q_i) Σ φ(k_j)ᵀ v_j / φ(q_i) · Σ φ(k_j), φ = ReLU',
        'N C d',
        'none; a 3x3 convolution in the feed-forward network',
    ),
}
# a published arch of each host, all of whose stages get the attention
HOSTS = {
    'RAVLT': 'tiny',
    'LinearPVT': 'softmax-tiny',
    'LinearPVTv2': 'softmax-b1',
    'LinearSwin': 'softmax-tiny',
    'LinearCSWin': 'softmax-tiny',
    'LinearDeiT': 'softmax-tiny',
    'LinearNextViT': 'softmax-small',
}


def kept_for_backward(name: str, dim: int = 64, num_heads: int = 2, side: int = 32) -> float:
    """What an attention keeps of a forward pass for the backward pass, in maps of N x C numbers; queries, keys and
    values included where it keeps them. Measured, in float32 on the CPU."""
    mixer = TOKEN_MIXERS.get(name)(dim, num_heads, grid=(side, side))
    grid = Grid(side, side)
    widths = mixer.widths
    tokens = [torch.randn(1, side * side, width, requires_grad=True) for width in widths]
    context = torch.randn(1, dim, requires_grad=True) if mixer.context else None
    weights = {p.untyped_storage().data_ptr() for p in mixer.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            mixer(*tokens, grid, grid, context=context)
    finally:
        torch.set_num_threads(threads)
    return sum(size for size, _ in kept.values()) / (4 * side * side * dim)


def cost_in(host: str, name: str) -> tuple[float, float]:
    """M parameters and G multiply-adds at 224x224 of a host with one attention in all stages; no classifier."""
    arch = HOSTS[host]
    depth = len(MODELS.get(host).arch_zoo[arch]['depths'])
    with torch.device('meta'):
        model = MODELS.build(dict(type=host, arch=arch, stage_attns=(name,) * depth)).eval()
        with torch.no_grad(), Count(model) as count:
            model(torch.empty(1, 3, 224, 224))
    return sum(p.numel() for p in model.parameters()) / 1e6, sum(count.macs.values()) / 1e9


def gate_of(name: str) -> str:
    gate = TOKEN_MIXERS.get(name).gate
    return 'a projection of the input' if gate == 'projection' else 'the host’s, if it has one'


def page() -> str:
    """The Markdown page ``docs/attentions.md``.

    Raises:
        KeyError: For a registered attention that :data:`ABOUT` does not describe.
    """
    hosts = [host for host in HOSTS if MODELS.get(host) is not None]
    names = [name for name in ABOUT if name in TOKEN_MIXERS.module_dict]
    missing = sorted(set(TOKEN_MIXERS.module_dict) - set(names))
    if missing:
        raise KeyError(f'projects/pages/attentions.py does not describe {missing}')
    rows = []
    for name in names:
        about = ABOUT[name]
        kept = f'{kept_for_backward(name):.1f}'
        rows.append([f'`{name}`', about.source, about.equation, about.complexity, kept, gate_of(name), about.position])
    header = ('attention', 'source', 'equation', 'operations', 'kept', 'gate', 'sees positions through')
    square = []
    for name in names:
        costs = (cost_in(host, name) for host in hosts)
        square.append([f'`{name}`', *(f'{params:.2f}, {macs:.2f}' for params, macs in costs)])
    text = [
        '# Attentions',
        'Written by `python -m projects.pages.attentions`.',
        'Every attention is one file in `mmlinattn/attention/`, its equation one file in `mmlinattn/ops/`. Memory '
        'grows with N for all of them: none builds an N x N map. Their options (ablations of the papers, released and '
        "printed forms) are in the classes' docstrings.",
        markdown_table(header, rows),
        '**operations**: of one layer, up to a factor; N tokens of width C, heads of width d. **kept**: what training '
        'keeps of one forward pass of the mixer, in maps of N x C numbers, queries, keys and values included '
        '(measured on the CPU in float32, N = 1024, C = 64, d = 32; `inline`, `focused`, `angular`: with their '
        'convolutions). **gate**: what the output is multiplied with before the last projection.',
        '## Every attention in every host',
        'Parameters in M, multiply-adds in G at 224x224, the attention in all stages, without classifier: '
        '`stage_attns=(name,) * 4`. Quadratic attentions see windows in Swin and CSWin and reduced keys in PVT; linear '
        'ones see the window of the stage in training (at 224, the whole map) in Swin and the whole map elsewhere. '
        'Hallucinated attention is counted as in its paper, as if maps were built.',
        markdown_table(['attention', *(f'`{host}` {HOSTS[host].split("-")[-1]}' for host in hosts)], square),
        'Feed-forward networks are the hosts’ own; `hmhsa-*` and `enhanced-*` archs change them too, see '
        '`mmlinattn.layers.build_ffn`.',
    ]
    return '\n\n'.join(text) + '\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, default=OUT, help='[docs/attentions.md]')
    args = parser.parse_args()
    warnings.simplefilter('ignore')  # of model constructors, once a model
    MMLogger.get_instance('mmengine', log_level='ERROR')
    with one_line_errors():
        check_out_file(args.out)
        args.out.write_text(page(), encoding='utf-8')
    print(args.out)


if __name__ == '__main__':
    main()
