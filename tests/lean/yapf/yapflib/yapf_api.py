# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.


def FormatCode(text, **_):  # noqa: N802, the name is YAPF's
    return text, False
