# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""RAVLT as a backbone of Hugging Face Transformers: copy this file into your project."""

from transformers import AutoBackbone, AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BackboneOutput
from transformers.utils import backbone_utils as utils

from mmlinattn.backbones import RAVLT


class RAVLTConfig(utils.BackboneConfigMixin, PretrainedConfig):
    model_type = 'ravlt'

    def __init__(self, arch='tiny', out_features=None, out_indices=None, **kwargs):
        super().__init__(**kwargs)
        self.arch, self.stage_names = arch, ['stage1', 'stage2', 'stage3', 'stage4']
        self._out_features, self._out_indices = utils.get_aligned_output_features_output_indices(
            out_features, out_indices, self.stage_names
        )


class RAVLTBackbone(PreTrainedModel, utils.BackboneMixin):
    config_class = RAVLTConfig

    def __init__(self, config):
        super().__init__(config)
        self._init_backbone(config)
        self.model = RAVLT(config.arch, out_indices=config.out_indices)
        self.num_features = self.model.embed_dims

    def forward(self, pixel_values, **kwargs):
        return BackboneOutput(feature_maps=self.model(pixel_values))


AutoConfig.register('ravlt', RAVLTConfig)
AutoBackbone.register(RAVLTConfig, RAVLTBackbone)
