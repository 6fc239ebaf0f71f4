"""Numbers of blocks: equal where the whole prefix is, and nothing that tells the tokens."""

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.traces.prefix_ids import BlockNumbers, PrefixIds

SIZE = 4
prompts = st.lists(st.integers(0, 1), max_size=14)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from("ab"), prompts, prompts), max_size=6))
def test_numbers_are_equal_exactly_where_prefixes_are(
    requests: list[tuple[str, list[int], list[int]]],
) -> None:
    ids = PrefixIds(SIZE)
    seen: dict[int, tuple[str, tuple[int, ...]]] = {}
    for number, (domain, prompt, output) in enumerate(requests):
        found = ids.add(number, domain, prompt, [output, output])
        assert len(found.prefix_ids) == len(prompt) // SIZE
        assert found.output_ids[0] == found.output_ids[1]
        chain = found.prefix_ids + found.output_ids[0]
        assert len(chain) == (len(prompt) + len(output)) // SIZE
        for place, block_id in enumerate(chain, start=1):
            prefix = domain, tuple([*prompt, *output][: place * SIZE])
            assert seen.setdefault(block_id, prefix) == prefix
    assert len(set(seen.values())) == len(seen)
    assert sorted(seen) == list(range(len(seen)))


def test_a_later_turn_has_the_blocks_of_the_answer_and_its_parent() -> None:
    ids = PrefixIds(SIZE)
    first = ids.add(3, "", [1, 2, 3, 4, 5], [[6, 7, 8, 9], [6, 7]])
    assert first == BlockNumbers((0,), ((1,), ()), None)
    assert ids.add(4, "", [1, 2, 3, 4, 5, 6, 0, 0], [[]]) == BlockNumbers((0, 2), ((),), None)
    assert ids.add(5, "", [1, 2, 3, 4, 5, 6, 7, 8, 9], [[]]) == BlockNumbers((0, 1), ((),), 3)
    again = ids.add(6, "", [1, 2, 3, 4, 5], [[6, 7, 8]])
    assert again == BlockNumbers((0,), ((1,),), None)
    assert ids.add(7, "", [1, 2, 3, 4, 5, 6, 7, 8], [[]]).parent == 6  # the latest
    ids.add(9, "", [1, 2, 3, 4, 5], [[6, 7, 8]], ended_ms=70)
    assert ids.add(10, "", [1, 2, 3, 4, 5, 6, 7, 8], [[]]).parent_ended_ms == 70
    assert ids.add(8, "b", [1, 2, 3, 4, 5, 6, 7, 8], [[]]).parent is None


def test_placeholders_of_other_contents_have_other_numbers() -> None:
    ids = PrefixIds(SIZE)
    prompt = [1, 2, 9, 9, 9, 9, 9, 3]
    found = [
        ids.add(number, "", prompt, [[4]], contents=[(2, count, digest)]).prefix_ids
        for number, (count, digest) in enumerate([(5, "a"), (5, "b"), (5, "a"), (4, "a")])
    ]
    assert found == [(0, 1), (2, 3), (0, 1), (0, 4)]  # the last has a token behind its content
    assert ids.add(4, "", prompt, [[4]]).prefix_ids == (5, 6)
    # "b" shares the two tokens before it, and so does the text.
    assert ids.overlap._num_common_tokens == 2 + 2


def test_without_a_key_nothing_is_numbered() -> None:
    one, other = PrefixIds(SIZE), PrefixIds(SIZE)
    assert one._key != other._key
    assert not set(one._digest(b"x", b"") for _ in range(2)) & {other._digest(b"x", b"")}
    one.add(0, "", [1] * 8, [[]])
    one.forget()
    assert one._key == b"" and not one._ids and not one.overlap._heads


def test_it_says_when_there_are_enough_blocks() -> None:
    ids = PrefixIds(SIZE, max_blocks=3)
    ids.add(0, "", [1] * 8, [[]])
    assert not ids.is_full
    ids.add(1, "", [1] * 12, [[]])
    assert ids.is_full
