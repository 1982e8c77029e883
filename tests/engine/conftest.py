# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import pytest
import torch

from mmlinattn.engine.runner import leave_process_group


@pytest.fixture
def one_process():
    """A process group of this process alone."""
    torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    leave_process_group(failed=False)
    assert not torch.distributed.is_initialized()
