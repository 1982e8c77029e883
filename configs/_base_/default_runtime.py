# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# Goes beside the default_runtime.py of MMDetection, MMSegmentation or MMPretrain. It holds only
# keys that theirs leave free, as MMEngine lets one base file set a key. To add hooks of your own:
# custom_hooks = [*_base_.custom_hooks, dict(...)]
custom_imports = dict(imports=['mmlinattn'], allow_failed_imports=False)

runner_type = 'SafeRunner'  # a full disk leaves the last checkpoint intact
custom_hooks = [
    dict(type='DataCheckHook'),  # classes, labels and annotation files that do not fit: before training
    dict(type='FiniteLossHook'),  # NaN or Inf: stop, naming the images
    dict(type='ExactResumeHook'),  # --resume continues the same loss curve
    dict(type='CheckpointMatchHook'),  # a checkpoint of other classes: what is left out of it
    dict(type='StopHook'),  # SIGTERM: save a checkpoint, then end
    dict(type='UnusedParametersHook'),  # maps that nothing reads: named after the first iteration
]
