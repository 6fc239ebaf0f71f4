"""Packed positions agree as bytes exactly as far as they agree as positions, and sort alike."""

from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.memory.memory_truth import digest_of, make_spans

from quire.core.content_spans import ContentSpan
from quire.core.memory.hash_chain import HashChains, hash_block
from quire.core.memory.packed_tokens import NOT_A_TOKEN, num_packed, pack, pack_tokens, unpack
from quire.core.memory.prefix_cache import PrefixCache

Position = int | tuple[str, int]
SIZE = 4
SPANS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(0, 1)), max_size=3)
# Two digests that begin alike, and two tokens, of which one is the placeholder.
PROMPTS = st.builds(
    lambda ids, spans: (ids, make_spans(spans, len(ids))),
    st.lists(st.integers(0, 1), min_size=1, max_size=20),
    SPANS,
)
Prompt = tuple[list[int], tuple[ContentSpan, ...]]


def positions(prompt: Prompt) -> list[Position]:
    found: list[Position] = list(prompt[0])
    for span in prompt[1]:
        for offset in range(span.num_tokens):
            found[span.first_position + offset] = span.digest, offset
    return found


def num_common(first: list[Position], second: list[Position]) -> int:
    pairs = zip(first, second, strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def common_bytes(first: bytes, second: bytes) -> bytes:
    pairs = zip(first, second, strict=False)
    return bytes(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@settings(max_examples=150, deadline=None, database=None)
@given(PROMPTS, PROMPTS, st.integers(0, 12), st.integers(0, 20))
def test_bytes_agree_as_far_as_positions(
    left: Prompt, right: Prompt, first: int, count: int
) -> None:
    end = first + count
    packed = [pack(ids, first, end, spans) for ids, spans in (left, right)]
    ranges = [positions(prompt)[first:end] for prompt in (left, right)]
    assert [num_packed(data) for data in packed] == [len(each) for each in ranges]
    assert num_packed(common_bytes(*packed)) == num_common(*ranges)
    assert (packed[0] == packed[1]) == (ranges[0] == ranges[1])
    assert packed[1].startswith(packed[0]) == (ranges[1][: len(ranges[0])] == ranges[0])
    tokens = [each if isinstance(each, int) else NOT_A_TOKEN for each in ranges[0]]
    assert unpack(packed[0]) == tokens


@settings(max_examples=80, deadline=None, database=None)
@given(PROMPTS, PROMPTS)
def test_blocks_are_equal_exactly_if_their_positions_and_all_before_are(
    left: Prompt, right: Prompt
) -> None:
    chains = HashChains(b"secret", SIZE)
    first, second = (chains.of_prompt(ids, spans=spans) for ids, spans in (left, right))
    common = num_common(positions(left), positions(right))
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))))
    assert shared == common // SIZE
    assert not set(first[shared:]) & set(second[shared:])


@settings(max_examples=80, deadline=None, database=None)
@given(PROMPTS, st.integers(0, 20))
def test_a_chain_grown_in_parts_equals_one_made_at_once(prompt: Prompt, cut: int) -> None:
    ids, spans = prompt
    chains = HashChains(b"secret", SIZE)
    chain: list[bytes] = []
    root = chains.root("")
    packed = chains.extend(chain, root, ids[:cut], spans) + chains.extend(chain, root, ids, spans)
    assert chain == chains.of_prompt(ids, spans=spans)
    ends = range(SIZE, len(ids) + 1, SIZE)
    assert packed == [pack(ids, end - SIZE, end, spans) for end in ends]


@settings(max_examples=80, deadline=None, database=None)
@given(st.lists(PROMPTS, min_size=1, max_size=8), PROMPTS, st.booleans())
def test_the_neighbour_agrees_as_long_as_any(
    prompts: list[Prompt], wanted: Prompt, is_whole: bool
) -> None:
    cache = PrefixCache(1, SIZE, b"secret")
    root = cache.root("")
    blocks = {pack(ids, 0, SIZE, spans): positions((ids, spans))[:SIZE] for ids, spans in prompts}
    for block, tokens in enumerate(blocks):
        cache.insert_run(0, [hash_block(root, tokens)], [block], [tokens], root)
    cache.check()
    own = positions(wanted)[:SIZE]
    near = cache.closest_block(root, pack(*wanted[:1], 0, SIZE, wanted[1]), is_whole=is_whole)
    if is_whole:
        whole = [len(each) for each in blocks.values() if own[: len(each)] == each]
        assert (0 if near is None else near.num_common_tokens) == max(whole, default=0)
    else:
        assert near is not None
        assert near.num_common_tokens == max(num_common(each, own) for each in blocks.values())
    if near is not None:
        assert num_common(blocks[near.tokens], own) == near.num_common_tokens


def test_text_alone_takes_four_bytes_a_token() -> None:
    assert pack([1, 256, 2**31 - 1], 0, 3) == pack_tokens([1, 256, 2**31 - 1])
    assert pack_tokens([1, 256]) == bytes([0, 0, 0, 1, 0, 0, 1, 0])


def test_a_span_takes_its_digest_once_in_each_block() -> None:
    spans = (ContentSpan(2, 5, digest_of(7)),)
    first, second = (pack([0] * 8, start, start + 4, spans) for start in (0, 4))
    assert len(first) == len(second) == 4 * 4 + 16
    assert bytes.fromhex(digest_of(7)) in first and bytes.fromhex(digest_of(7)) in second


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_full_block_of_contents_is_no_tail(size: int) -> None:
    """Its bytes may be as many as those of a partly filled block."""
    cache = PrefixCache(1, size, b"secret")
    spans = (ContentSpan(0, size, digest_of(1)),)
    tokens = pack([0] * size, 0, size, spans)
    cache.insert_run(0, [b"full"], [0], [tokens], cache.root(""))
    assert cache.tail(b"full") is None and cache.num_tokens(b"full") == size


def test_no_position_inside_a_span_takes_no_bytes() -> None:
    spans = (ContentSpan(0, 4, digest_of(1)),)
    assert pack([0] * 4, 1, 1, spans) == pack([0] * 4, 5, 9, spans) == b""
