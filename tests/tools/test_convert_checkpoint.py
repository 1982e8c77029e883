# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""``tools/convert_checkpoint.py`` on files as their authors would have published them."""

import pytest
import torch
from helpers.checkpoint_helpers import ARCH, released_ravlt
from helpers.tool_runs import in_this_process
from mmengine.config import Config
from mmengine.runner import load_checkpoint

from mmlinattn.checkpoints import load_file
from mmlinattn.utils.building import build_model

WIDTHS = list(ARCH['embed_dims'])
# Nothing may be fetched to build a model: this name is unknown.
BACKBONE = (
    f"dict(_delete_=True, type='RAVLT', arch={ARCH}, init_cfg=dict(type='Pretrained', checkpoint='mmlinattn://nobody'))"
)
MODELS = {
    'mmdet mask-rcnn_r50_fpn': f'backbone={BACKBONE}, neck=dict(in_channels={WIDTHS})',
    # as the configs have it: the file's norm of the first map is left out
    'mmdet retinanet_r50_fpn': f'backbone={BACKBONE[:-1]}, out_indices=(1, 2, 3)), '
    f'neck=dict(in_channels={WIDTHS[1:]}, start_level=0)',
    'mmseg upernet_r50': f'backbone={BACKBONE}, decode_head=dict(in_channels={WIDTHS}), '
    f"auxiliary_head=dict(in_channels={WIDTHS[2]}), pretrained='mmlinattn://nobody'",
}


class Files:
    """Paths SRC, DST and CONFIG in a folder, and a method that runs the tool on them."""

    def __init__(self, folder, capsys):
        self.source, self.target, self.config = folder / 'released.pth', folder / 'ours.pth', folder / 'config.py'
        self.capsys = capsys
        self.configure()

    def configure(self, name='mmdet mask-rcnn_r50_fpn'):
        scope, base = name.split()
        pytest.importorskip(scope)
        self.config.write_text(
            f"_base_ = '{scope}::_base_/models/{base}.py'\ndefault_scope = '{scope}'\n"
            f"custom_imports = dict(imports=['mmlinattn'])\nmodel = dict({MODELS[name]})\n"
        )

    def model(self):
        return build_model(Config.fromfile(self.config))

    def publish(self, change=lambda state: None) -> dict:
        state = {key: v for key, v in self.model().state_dict().items() if not key.startswith('backbone.')}
        state.update({f'backbone.{key}': v for key, v in released_ravlt(dense=True).items()})
        change(state)
        torch.save({'state_dict': state, 'meta': {'CLASSES': ('cat', 'dog')}, 'optimizer': {}}, self.source)
        return state

    def run(self, status=0, source=None, target=None):
        paths = source or self.source, target or self.target
        with pytest.raises(SystemExit) as end:
            in_this_process('convert_checkpoint.py', *paths, '--config', self.config)
        assert end.value.code == status
        assert self.target.exists() == (status == 0)
        return [part.splitlines() for part in self.capsys.readouterr()]


@pytest.fixture
def files(tmp_path, capsys):
    return Files(tmp_path, capsys)


@pytest.mark.parametrize('name', MODELS)
def test_a_released_model_loads_strictly(files, name):
    files.configure(name)
    state = files.publish()
    out, _ = files.run()
    assert out[-1] == f'wrote {files.target}: {len(files.model().state_dict())} tensors'
    assert any(line.startswith('dropped') and line.endswith('backbone.layers.0.RoPE.angle') for line in out)
    model = files.model()
    load_checkpoint(model, str(files.target), strict=True)
    stem = model.state_dict()['backbone.patch_embeds.0.layers.0.weight']
    assert torch.equal(stem, state['backbone.patch_embed.proj.0.weight'])
    # a second conversion changes nothing
    again = files.target.with_name('again.pth')
    files.run(source=files.target, target=again)
    first, second = (load_file(path)['state_dict'] for path in (files.target, again))
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize(
    'spoil, title, listed',
    [
        (lambda s: s.pop('rpn_head.rpn_cls.weight'), '1 missing in SRC:', '  rpn_head.rpn_cls.weight'),
        (lambda s: s.update({'odd.weight': torch.ones(1)}), '1 left over from SRC:', '  odd.weight'),
        (
            lambda s: s.update({'roi_head.bbox_head.fc_cls.bias': torch.ones(4)}),
            '1 of another shape:',
            '  roi_head.bbox_head.fc_cls.bias (4 in the file, 81 in the model)',
        ),
    ],
    ids=['missing', 'left over', 'shape'],
)
def test_any_key_that_does_not_fit_is_listed_and_nothing_written(files, spoil, title, listed):
    files.publish(spoil)
    _, err = files.run(status=1)
    assert [title, listed] == err[1:3] and str(files.source) in err[0] and str(files.config) in err[0]


@pytest.mark.parametrize('dense', [False, True])
def test_a_backbone_alone_does_not_make_a_detector(files, dense):
    torch.save({'model': released_ravlt(dense)}, files.source)
    _, listed = files.run(status=1)
    assert {'  neck.fpn_convs.0.conv.weight', '  roi_head.bbox_head.fc_cls.weight'} <= set(listed)
    assert ('  backbone.out_norms.0.weight' in listed) != dense
    assert ('  head.fc.weight' in listed) != dense  # left over from the classifier
    assert listed[-1].startswith('Hint') and f"init_cfg.checkpoint='{files.source}'" in listed[-1]
