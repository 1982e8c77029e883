# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# Goes beside the default_runtime.py of MMDetection, MMSegmentation or MMPretrain. It holds only
# keys that theirs leave free, as MMEngine lets one base file set a key. To add hooks of your own:
# custom_hooks = [*_base_.custom_hooks, dict(...)]
custom_imports = dict(imports=['mmlinattn'], allow_failed_imports=False)

custom_hooks = []  # the tools of mmlinattn add checks, exact resumption and more: docs/configs.md
