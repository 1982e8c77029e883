# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# Parameters without weight decay in Swin and its successors, besides norms and biases: position tables and learned
# scales.
no_decay = {
    key: dict(decay_mult=0.0)
    for key in ('relative_bias.table', 'position_table', 'cls_token', 'mixer.position', 'mixer.scale')
}
