"""Which spans of contents a model takes, and what the sentences say that refuse the others."""

import msgspec
import pytest

from quire.core.content_spans import ContentSpan, check_content_spans
from quire.core.request import Request
from quire.core.sampling_params import DecodingParams, ModelLimits
from quire.core.sequence import make_sequences
from quire.errors import InvalidRequestError

DIGEST = "0123456789abcdef" * 2
LIMITS = ModelLimits(100, 64, max_content_tokens=8)


def test_text_is_taken_by_all_models():
    check_content_spans((), 4, ModelLimits(100, 64), in_one_step=True)


@pytest.mark.parametrize(
    "spans",
    [
        [ContentSpan(0, 3, DIGEST)],
        [ContentSpan(2, 8, DIGEST), ContentSpan(10, 1, DIGEST)],
        [ContentSpan(18, 1, DIGEST)],
    ],
)
def test_spans_in_order_are_taken(spans):
    check_content_spans(spans, 20, LIMITS)


@pytest.mark.parametrize(
    ("spans", "text"),
    [
        ([ContentSpan(-1, 3, DIGEST)], "begin at 0 or later"),
        ([ContentSpan(4, 0, DIGEST)], "at least 1 position"),
        ([ContentSpan(15, 5, DIGEST)], "end before the last of the prompt's 20 tokens"),
        ([ContentSpan(4, 3, DIGEST), ContentSpan(6, 1, DIGEST)], "begin at 7 or later"),
        ([ContentSpan(4, 9, DIGEST)], "longer than 8 tokens"),
        ([ContentSpan(4, 3, DIGEST[1:])], "32 lower-case hexadecimal digits"),
        ([ContentSpan(4, 3, DIGEST.upper())], "32 lower-case hexadecimal digits"),
        ([ContentSpan(4, 3, "x" * 32)], "32 lower-case hexadecimal digits"),
    ],
)
def test_other_spans_are_refused(spans, text):
    with pytest.raises(InvalidRequestError, match=text):
        check_content_spans(spans, 20, LIMITS)


def test_a_model_without_an_encoder_takes_text_only():
    with pytest.raises(InvalidRequestError, match="this model takes text only"):
        check_content_spans([ContentSpan(0, 3, DIGEST)], 20, ModelLimits(100, 64))


def test_a_prompt_in_one_step_is_text_only():
    with pytest.raises(InvalidRequestError, match="in one step, so it must be text only"):
        check_content_spans([ContentSpan(0, 3, DIGEST)], 20, LIMITS, in_one_step=True)


def test_spans_travel_between_processes_and_survive_a_resumption():
    spans = (ContentSpan(1, 3, DIGEST),)
    request = Request("r", [0] * 6, DecodingParams(4), n=2, content_spans=spans)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request)
    assert again.content_spans == spans and again.content_spans[0].end == 4
    resumed = again.resume({1: (5,)}, has_output=True, elapsed_s=1.0)
    ((sequence,),) = make_sequences(resumed, 64, b"", 0.0)
    assert sequence.content_spans == spans
    assert sequence.branch(2, sequence.params).content_spans == spans
