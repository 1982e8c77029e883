# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import pytest
from mmengine.config import Config
from mmengine.model import PretrainedInit
from mmengine.registry import MODELS, DefaultScope
from torch import nn

from mmlinattn.utils.building import build_model, without_pretrained
from mmlinattn.utils.errors import RunError

PRETRAINED = dict(type='Pretrained', checkpoint='nobody.pth')


@MODELS.register_module(force=True)
class Given(nn.Module):
    def __init__(self, backbone=None, data_preprocessor=None, **kwargs):
        super().__init__()
        self.given = dict(kwargs, backbone=backbone, data_preprocessor=data_preprocessor)
        if kwargs.get('bad'):
            raise KeyError('bad is not known')


@pytest.mark.parametrize('kind', ['Pretrained', PretrainedInit, 'mmengine.model.weight_init.PretrainedInit'])
def test_configs_without_pretrained_weights(kind):
    other, named = dict(type='Normal', layer='Linear'), dict(PRETRAINED, type=kind)
    a = [dict(init_cfg=named, b=2), (dict(pretrained='x.pth', init_cfg=[other, named]), 'init_cfg')]
    without = [dict(init_cfg=None, b=2), (dict(pretrained=None, init_cfg=None), 'init_cfg')]
    kept = dict(pretrained=True, keep=dict(init_cfg=other))
    found = without_pretrained(dict(kept, a=a, teacher_ckpt='y.pth'))
    assert found == dict(kept, a=without, teacher_ckpt=None)
    assert a[0]['init_cfg'] is named  # the caller's own stays


def test_models_are_built_like_those_of_a_runner():
    model = dict(type='Given', backbone=dict(depth=1, init_cfg=PRETRAINED))
    cfg = Config(dict(model=model, data_preprocessor=dict(mean=3), default_scope='mmseg'))
    given = build_model(cfg).given
    assert given == dict(backbone=dict(depth=1, init_cfg=None), data_preprocessor=dict(mean=3))
    assert DefaultScope.get_current_instance().scope_name == 'mmseg'
    assert cfg.model.backbone.depth == 1 and 'data_preprocessor' not in cfg.model
    own = Config(dict(model=dict(model, data_preprocessor=1), data_preprocessor=2))
    assert build_model(own).given['data_preprocessor'] == 1


def test_unbuildable_models_are_one_line(tmp_path, monkeypatch):
    monkeypatch.delenv('MMLINATTN_TRACEBACK', raising=False)
    with pytest.raises(RunError, match='^the config has no model$'):
        build_model(Config(dict(a=1)))
    (tmp_path / 'c.py').write_text("model = dict(type='Given', bad=True)\n")
    cfg = Config.fromfile(tmp_path / 'c.py')
    with pytest.raises(RunError, match=f'^the model of {tmp_path}/c.py cannot be built: .*bad is not known'):
        build_model(cfg)
    monkeypatch.setenv('MMLINATTN_TRACEBACK', '1')
    with pytest.raises(KeyError):
        build_model(cfg)
