"""Values are counted as they are, and no further than the bound."""

import json

from hypothesis import given
from hypothesis import strategies as st

from quire.text.json_values import has_more_values, text_has_more_values

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.just('",[{\\'),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=30,
)


def count(value):
    if not isinstance(value, (dict, list)):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return len(value) + sum(map(count, inner))


@given(VALUES, st.integers(0, 20))
def test_values_at_any_depth_count(value, bound):
    assert has_more_values(value, bound) == (count(value) > bound)


@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=4), st.integers(0, 20), st.booleans())
def test_values_are_counted_in_json_text_as_in_the_value(value, bound, is_ascii):
    text = json.dumps(value, ensure_ascii=is_ascii)
    if count(value) > bound:
        assert text_has_more_values(text, bound)
    if text_has_more_values(text, 2 * bound + 1):  # empty ones count twice
        assert count(value) > bound


def test_signs_inside_of_texts_are_no_values():
    text = json.dumps({"csv": '1,2,"3",[4],{5}\\\n' * 1000})
    assert not text_has_more_values(text, 1)
    assert text_has_more_values(text[:-2] + "," * 10, 5) is False, "an open text goes on to the end"
    assert not text_has_more_values("[" + "1," * 1000, 5), "arguments are an object"
