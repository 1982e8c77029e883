# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

__all__ = ['CompileHook']


@HOOKS.register_module(force=True)
class CompileHook(Hook):
    """Compile the blocks of the backbone with ``torch.compile``; ``--compile`` of the tools adds it.

    Raises:
        RunError: The model has no backbone of this package.
    """

    def before_run(self, runner) -> None:
        """Wrap the blocks; each kind is compiled when it is first used."""
        from ..runner.compiling import compile_blocks  # runs without it start without the compiler

        runner.logger.info(f'{compile_blocks(runner.model)} kinds of blocks are compiled as they are first used.')
