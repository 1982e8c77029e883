# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Text of a config that inherits one config and equals another."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mmengine.config import Config

from mmlinattn.tooling.swapping import swap
from mmlinattn.tooling.swapping.writing import changes, difference, statement

KEYS = st.sampled_from(['type', 'a', 'b', 'x.y'])
LEAVES = st.none() | st.booleans() | st.integers(-9, 9) | st.text('ab\'"\\ ', max_size=9) | st.tuples(st.integers(0, 9))
TREES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4))


@settings(deadline=None, max_examples=100, derandomize=True)
@given(value=TREES)
def test_text_is_the_value(value):
    found = {}
    exec(statement('value', value), found)
    assert found['value'] == value and type(found['value']) is type(value)


NAMED = st.recursive(
    st.integers(0, 3) | st.booleans() | st.lists(st.integers(0, 3), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from(['type', 'a', 'b']), inner, max_size=3),
)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(old=st.dictionaries(st.sampled_from('abc'), NAMED), new=st.dictionaries(st.sampled_from('abc'), NAMED))
def test_a_child_with_the_difference_is_the_new_one(old, new):
    new = {**dict.fromkeys(old, 0), **new}  # whole keys do not go
    child = Config._merge_a_into_b(Config(difference(old, new))._cfg_dict, Config(old)._cfg_dict)
    assert child.to_dict() == new
    assert (changes(old, new) == []) == (old == new and repr(difference(old, new)) == '{}')


@pytest.mark.parametrize(
    ('old', 'new', 'said'),
    [
        (dict(a=1, b=(1,)), dict(a=True, b=(1,)), dict(a=True)),
        (dict(a=dict(x=1, _scope_='s')), dict(a=dict(x=2)), dict(a=dict(x=2))),
        (dict(a=dict(type='A', x=1)), dict(a=dict(type='B', x=1)), dict(a=dict(_delete_=True, type='B', x=1))),
        (dict(a=dict(b=dict(c=1, d=1))), dict(a=dict(b=dict(c=1, d=2))), dict(a=dict(b=dict(d=2)))),
    ],
)
def test_differences(old, new, said):
    assert difference(old, new) == said


def test_changes_line_by_line():
    old = dict(a=1, b=dict(type='X', c=2), e=[dict(f=1), dict(f=2)], g=[1, 2], h=dict(type='P'), gone=4, t=(1,))
    new = dict(a=1, b=dict(type='X', c=5), e=[dict(f=1), dict(f=3)], g=[1], h=dict(type='Q', arch='big', lr=1), t=[1])
    lines = changes(old, dict(new, _scope_='mmdet', long='x' * 90))
    assert lines[:5] == ['b.c: 2 -> 5', 'e[1].f: 2 -> 3', 'g: [1, 2] -> [1]', 'h: P -> Q big lr=1', 't: (1,) -> [1]']
    assert lines[-1] == 'gone: 4 -> None' and lines[5].startswith('long: None -> ') and len(lines[5]) < 80
    assert changes(dict(a=0), dict(a=False)) == ['a: 0 -> False']


@pytest.mark.parametrize('inside', [True, False])
def test_a_preprocessor_stays_in_or_beside_its_model(inside):
    old, new = (dict(type='M', data_preprocessor=dict(type='P', mean=mean)) for mean in (1, 2))
    source = SimpleNamespace(base='a.py', is_whole=False, model=old, cfg=Config(dict(model=old if inside else {})))
    text = swap._text(source, 'ravlt_t', new, {})
    assert ('\ndata_preprocessor = ' in text) != inside and text.count('mean=2') == 1
