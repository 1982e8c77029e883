# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Serve a page that shows the attention maps of a clicked pixel, block by block and head by head.

    pip install "mmlinattn[app]"
    python -m projects.attention_viewer CONFIG CHECKPOINT

CHECKPOINT may be none for random weights. Only this machine can open the page, unless --host is given.
"""

import argparse
import os
from pathlib import Path

from mmengine.logging import MMLogger

from mmlinattn.tooling.command_line import one_line_errors
from mmlinattn.tooling.configs import check_checkpoint, read_config
from mmlinattn.utils.errors import RunError
from mmlinattn_console import add_model_arguments

from .viewer import AttentionViewer


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser, may_be_random=True)
    parser.add_argument('--port', type=int, default=7860, help='[7860]')
    parser.add_argument('--host', default='127.0.0.1', help='address to listen on [127.0.0.1: this machine only]')
    parser.add_argument('--device', default='cpu', help='cpu, cuda:0, ... [cpu]')
    return parser.parse_args()


def build_page(viewer: AttentionViewer, title: str):
    """Build the page as gradio blocks."""
    import gradio as gr

    def show(image, click, local):
        if image is None:
            return None
        x, y = click or (image.shape[1] / 2, image.shape[0] / 2)
        try:
            return viewer.maps(viewer.run(image), x, y, local)
        except RunError as error:
            raise gr.Error(str(error)) from error

    def clicked(event: gr.SelectData):
        return tuple(event.index)

    with gr.Blocks(title=title) as page:
        gr.Markdown(
            f'## {title}\nDrop an image and click on it. Red: positive weight, blue: negative, dark: cannot look.'
        )
        click = gr.State(None)
        image = gr.Image(type='numpy', image_mode='RGB', sources=['upload', 'clipboard'], label='image: click it')
        local = gr.Checkbox(label='with the convolutions of the values (mean over channels)')
        maps = gr.Image(label='where the clicked token looks', interactive=False, elem_id='maps')
        inputs, private = [image, click, local], dict(api_name=False, show_progress='minimal')
        image.upload(lambda: None, None, click, api_name=False).then(show, inputs, maps, **private)
        image.select(clicked, None, click, api_name=False).then(show, inputs, maps, **private)
        local.change(show, inputs, maps, **private)
    return page


def main() -> None:
    args = parse_args()
    MMLogger.get_instance('mmengine', log_level='ERROR')
    os.environ.setdefault('GRADIO_ANALYTICS_ENABLED', 'False')  # nothing leaves this machine
    with one_line_errors():
        cfg = read_config(args.config)
        if args.checkpoint.lower() != 'none':
            args.checkpoint = check_checkpoint(args.checkpoint, 'checkpoint')
        try:
            import gradio  # noqa: F401
        except ImportError as error:
            raise RunError('the page needs gradio: pip install "mmlinattn[app]" or pip install gradio') from error
        viewer = AttentionViewer(cfg, args.checkpoint, args.device)
        page = build_page(viewer, f'Attention of {Path(args.config).stem}')
        try:
            options = dict(share=False, max_file_size='20mb', inbrowser=False)
            page.launch(server_name=args.host, server_port=args.port, **options)
        except OSError as error:
            raise RunError(f'--port {args.port}: {error}') from error


if __name__ == '__main__':
    main()
