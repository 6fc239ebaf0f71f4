"""A custom tool's text is read out of its JSON the same however it is cut."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.server.routes.openai.responses.text_argument import TextArgument


def read(pieces):
    argument = TextArgument()
    return "".join([argument.push(piece) for piece in pieces])


@given(st.text(), st.booleans(), st.lists(st.integers(0, 300)), st.sampled_from([None, 1]))
def test_it_is_the_text_for_every_split(text, is_ascii, cuts, indent):
    source = json.dumps({"input": text}, ensure_ascii=is_ascii, indent=indent)
    at = [0, *sorted(min(cut, len(source)) for cut in cuts), len(source)]
    pieces = [source[begin:end] for begin, end in pairwise(at)]
    assert read(pieces) == read([source]) == read(source) == text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (r'{"input": "a\ud83d', "a"),  # the other half may come
        (r'{"input": "a\ud83d"}', "a\ufffd"),
        (r'{"input": "a\ud83d\n"}', "a\ufffd\n"),
        (r'{"input": "a\udc00b"}', "a\ufffdb"),
        (r'{"input": "\ud83d\ude00"}', "\U0001f600"),
        (r'{"input": "a\\', "a\\"),
        (r'{"input": "\u00', ""),
        ('{"input": "line\nbreak"} "more"', "line\nbreak"),
        ('{"inp', ""),
        ("", ""),
    ],
)
def test_incomplete_arguments_are_read_as_far_as_they_go(source, text):
    assert read([source]) == read(source) == text
