"""Spans of a prompt that are not token ids, such as the embeddings of an image.

A prompt stays a flat list of token ids. A span covers some of its positions, which have placeholder
ids: there, the model reads the embeddings of the content that the span's digest names. Two
positions are equal if both are of the same token, or both at the same offset in equal contents.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from string import hexdigits
from typing import NamedTuple

from quire.core.sampling_params import ModelLimits
from quire.errors import InvalidRequestError, shown

DIGEST_CHARACTERS = 32


class ContentSpan(NamedTuple):
    """Consecutive positions of a prompt that stand for one content."""

    first_position: int
    num_tokens: int
    #: Digest of the content and of everything else that its embeddings depend on: 16 bytes, in
    #: lower-case hexadecimal.
    digest: str
    #: Frames, rows and columns of the content's embeddings, whose product is num_tokens. None if
    #: the model's rotary positions have one axis.
    grid: tuple[int, int, int] | None = None
    #: Whether the span's tokens attend to each other, so that one step must compute the whole span.
    in_one_step: bool = False

    @property
    def end(self) -> int:
        """The position after the span's last one."""
        return self.first_position + self.num_tokens


class Content(NamedTuple):
    """The input of the model's encoder for one content, such as the patches of an image.

    Called an item where adapters and contents are handled alike (`scheduling.residency`).
    """

    #: The digest that spans name the content by.
    digest: str
    #: Shape of the array of `values`.
    shape: tuple[int, ...]
    #: The encoder's input: fp32 numbers in the machine's byte order, row by row.
    values: bytes
    #: Frames, rows and columns of patches, before an encoder merges any.
    grid: tuple[int, int, int] = (1, 1, 1)


def spans_between(spans: Sequence[ContentSpan], first: int, end: int) -> Sequence[ContentSpan]:
    """The spans with a position from `first` to `end`; spans: in ascending order."""
    if first >= end:
        return ()
    begin = bisect_right(spans, first, key=lambda span: span.end)
    return spans[begin : bisect_left(spans, end, begin, key=lambda span: span.first_position)]


def _split_at(spans: Sequence[ContentSpan], position: int) -> ContentSpan | None:
    """The span that is computed in one step, and that steps which end at `position` would split."""
    if spans:
        for span in spans_between(spans, position, position + 1):
            if span.in_one_step and span.first_position < position:
                return span
    return None


def last_cut(spans: Sequence[ContentSpan], most: int) -> int:
    """The last position, at most `most`, at which a step may end."""
    span = _split_at(spans, most)
    return most if span is None else span.first_position


def first_cut(spans: Sequence[ContentSpan], least: int) -> int:
    """The first position, at least `least`, at which a step may end."""
    span = _split_at(spans, least)
    return least if span is None else span.end


def chunk_within(spans: Sequence[ContentSpan], first: int, most: int) -> int:
    """Length of the longest chunk from `first` on that has at most `most` tokens and splits no span
    that is computed in one step. If such a span is at `first` and is longer than `most`, the chunk
    has all of it."""
    end = last_cut(spans, first + most)
    return (end if end > first else first_cut(spans, first + most)) - first


def longest_in_one_step(spans: Sequence[ContentSpan]) -> int:
    """Number of tokens of the longest span that is computed in one step; 0 if there is none."""
    return max((span.num_tokens for span in spans if span.in_one_step), default=0)


def check_content_spans(
    spans: Sequence[ContentSpan],
    num_prompt_tokens: int,
    limits: ModelLimits,
    *,
    in_one_step: bool = False,
) -> None:
    """Raise InvalidRequestError for spans that the model can't compute.

    Spans ascend and don't overlap. A token follows the last span, because a step samples after a
    token. in_one_step: whether the request's whole prompt must be computed in one step; then all
    contents would need slots at once.
    """
    # First, refuse all contents if the model or the request takes none.
    if not spans:
        return
    if not limits.max_content_tokens:
        raise InvalidRequestError(
            "the prompt has content beside its text, but this model takes text only", "prompt"
        )
    if in_one_step:
        raise InvalidRequestError(
            "the prompt is computed in one step, so it must be text only", "prompt"
        )
    # Then check each span.
    end = 0
    for span in spans:
        if span.first_position < end or span.num_tokens < 1 or span.end >= num_prompt_tokens:
            raise InvalidRequestError(
                f"{span} must have at least 1 position, begin at {end} or later and end before the"
                f" last of the prompt's {num_prompt_tokens} tokens",
                "prompt",
            )
        if span.num_tokens > limits.max_content_tokens:
            raise InvalidRequestError(
                f"{span} is longer than {limits.max_content_tokens} tokens, the most that this"
                " model takes of one content",
                "prompt",
            )
        is_lower = span.digest == span.digest.lower() and set(span.digest) <= set(hexdigits)
        if len(span.digest) != DIGEST_CHARACTERS or not is_lower:
            raise InvalidRequestError(
                f"the digest of a content is {shown(span.digest)}, but must be {DIGEST_CHARACTERS}"
                " lower-case hexadecimal digits",
                "prompt",
            )
        end = span.end
