#!/usr/bin/env python
# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Put a backbone into any config of MMDetection, MMSegmentation or MMPretrain.

    python tools/swap_backbone.py mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py ravlt_t --out dino_ravlt_t.py

The written config inherits the upstream config. It sets the backbone with its released ImageNet weights, the channels
of necks and heads, the returned feature maps, this package's hooks, and the paper's optimizer. Before it is written,
the model is built, trained for one step and asked for one prediction.
"""

import argparse
import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().with_name('check_env.py')))  # finds the checkout and missing packages

from mmlinattn_console import tool_parser


def parse_args() -> argparse.Namespace:
    parser = tool_parser(__doc__)
    parser.add_argument(
        'upstream', metavar='UPSTREAM', help='config: mmdet::FOLDER/CONFIG.py, mmseg::..., mmpretrain::..., or a path'
    )
    parser.add_argument(
        'backbone',
        metavar='BACKBONE',
        help="beginning of this project's config names: ravlt_t, inline_swin_s, flatten_pvt_v2_b1",
    )
    parser.add_argument('--out', required=True, help='config file to write')
    parser.add_argument(
        '--keep-optimizer', action='store_true', help="leave upstream's optimizer in place of the backbone's"
    )
    return parser.parse_args()


if __name__ == '__main__':
    args = parse_args()  # before PyTorch is imported: --help answers at once

from mmlinattn.tooling.command_line import check_out_file, clean_end, one_line_errors
from mmlinattn.utils.errors import RunError


def main(args: argparse.Namespace) -> None:
    with clean_end(), one_line_errors():
        from mmlinattn.tooling.swapping import swap_backbone

        if not args.out.endswith('.py'):
            raise RunError(f'--out={args.out!r}: expected a name that ends with .py.')
        check_out_file(args.out, args.upstream)
        swapped = swap_backbone(args.upstream, args.backbone, args.out, args.keep_optimizer)
        for line in swapped.changes:
            print(f'  {line}')
        for remark in swapped.remarks:
            print(f'note: {remark}')
        result = swapped.result
        predicted = '' if result.failure else ' and predicted'
        print(
            f'{args.out}: trained one step (loss {result.loss:.4g}){predicted}; every parameter of the backbone has a '
            'gradient'
        )


if __name__ == '__main__':
    main(args)
