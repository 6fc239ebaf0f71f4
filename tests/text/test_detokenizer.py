"""Streamed text equals decoded text, token by token and stop string by stop string."""

from collections.abc import Callable, Sequence
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text.detokenizer import IncrementalDetokenizer, StopStrings
from quire.text.tokenizer import Tokenizer


def stream(
    tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], *, skip: bool = True
) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [*(detokenizer.append(token_id) for token_id in output), detokenizer.finish()]


def expected_output(
    decode: Callable[[list[int]], str], prompt: list[int], output: list[int]
) -> str:
    """The text of all tokens without that of the prompt, whose cut last character does not count
    if the output completes it."""
    before, whole = decode(prompt), decode([*prompt, *output])
    if whole.startswith(before):
        return whole[len(before) :]
    assert before[-1] == "\ufffd" and whole.startswith(before[:-1])
    return whole[len(before) - 1 :]


def draw_tokens(data: st.DataObject, tokenizer: Tokenizer) -> list[int]:
    """Any tokens, or those of a text: whole characters out of parts are rare among the former."""
    anything = st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=12)
    written = st.text(max_size=8).map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    return list(chain(*data.draw(st.lists(st.one_of(anything, written), max_size=3))))


@settings(deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_byte_level_stream_is_decode(
    byte_level: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    prompt, output = draw_tokens(data, byte_level), draw_tokens(data, byte_level)

    def decode(token_ids: list[int]) -> str:
        return byte_level.decode(token_ids, skip_special_tokens=skip)

    text = "".join(stream(byte_level, prompt, output, skip=skip))
    assert text == expected_output(decode, prompt, output)


def reference_decode(tokenizer: Tokenizer, token_ids: list[int], skip: bool) -> str:
    """The library's decoding with malformed runs of byte tokens treated as Unicode advises."""
    skipped = tokenizer.special_token_ids if skip else frozenset()
    kept = [
        token_id
        for token_id in token_ids
        if token_id not in skipped and token_id < tokenizer.vocab_size
    ]
    raw = b"".join(tokenizer.token_bytes(token_id) for token_id in kept)
    if kept and tokenizer.decode(kept[:1], skip_special_tokens=False) != tokenizer.token_text(
        kept[0]
    ):
        raw = raw.removeprefix(b" ")
    return raw.decode(errors="replace")


@settings(deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_sentencepiece_stream_is_decode(
    sentencepiece: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    prompt, output = draw_tokens(data, sentencepiece), draw_tokens(data, sentencepiece)

    def decode(token_ids: list[int]) -> str:
        return reference_decode(sentencepiece, token_ids, skip)

    text = "".join(stream(sentencepiece, prompt, output, skip=skip))
    assert text == expected_output(decode, prompt, output)


@settings(deadline=None)
@given(texts=st.lists(st.text(max_size=10), min_size=2, max_size=5), skip=st.booleans())
def test_sentencepiece_stream_of_well_formed_text_is_decode(
    sentencepiece: Tokenizer, texts: list[str], skip: bool
) -> None:
    pieces = [sentencepiece.encode(text) for text in texts]  # each with a BOS token: special inside
    prompt, output = pieces[0], list(chain(*pieces[1:]))
    text = "".join(stream(sentencepiece, prompt, output, skip=skip))
    before = sentencepiece.decode(prompt, skip_special_tokens=skip)
    whole = sentencepiece.decode([*prompt, *output], skip_special_tokens=skip)
    assert before + text == whole


@settings(deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_plain_stream_is_decode(plain: Tokenizer, data: st.DataObject, skip: bool) -> None:
    prompt, output = draw_tokens(data, plain), draw_tokens(data, plain)

    def decode(token_ids: list[int]) -> str:
        return plain.decode(token_ids, skip_special_tokens=skip)

    text = "".join(stream(plain, prompt, output, skip=skip))
    assert text == expected_output(decode, prompt, output)


def test_characters_come_out_as_soon_as_they_are_whole(byte_level: Tokenizer) -> None:
    output = byte_level.encode("a\U00010348b")
    assert stream(byte_level, [], output) == ["a", "", "", "", "\U00010348", "b", ""]


def test_cut_character_is_replaced_when_it_is_known_to_be_cut(byte_level: Tokenizer) -> None:
    lead, *_, last = byte_level.encode("\U00010348")
    letter = byte_level.encode("b")[0]
    assert stream(byte_level, [], [letter, lead, letter]) == ["b", "", "\ufffdb", ""]
    assert stream(byte_level, [], [letter, lead]) == ["b", "", "\ufffd"]
    assert stream(byte_level, [], [last, letter]) == ["\ufffd", "b", ""]


def test_character_that_the_prompt_began(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    for tokenizer in (byte_level, sentencepiece):
        parts = tokenizer.encode("a\U00010348", add_special_tokens=False)
        letter = tokenizer.encode("xb", add_special_tokens=False)[-1]
        completed = stream(tokenizer, parts[:-2], [*parts[-2:], letter])
        assert "".join(completed) == "\U00010348b"
        assert "".join(stream(tokenizer, parts[:-2], [letter])) == "b"
        assert "".join(stream(tokenizer, parts[:-2], parts[-2:-1])) == ""


def test_replacement_character_that_the_model_wrote_is_not_withheld(byte_level: Tokenizer) -> None:
    output = byte_level.encode("\ufffd")
    assert stream(byte_level, [], output)[-2:] == ["\ufffd", ""]


def test_endless_run_of_stray_bytes_is_neither_withheld_nor_kept(byte_level: Tokenizer) -> None:
    stray = byte_level.encode("\U00010348")[-1]
    detokenizer = IncrementalDetokenizer(byte_level, [], skip_special_tokens=True)
    assert all(detokenizer.append(stray) == "\ufffd" for _ in range(5000))
    assert detokenizer.finish() == ""


def test_malformed_run_of_byte_tokens_keeps_its_whole_characters(sentencepiece: Tokenizer) -> None:
    whole = sentencepiece.encode("\n世", add_special_tokens=False)[-3:]
    run = [*whole, whole[-1]]
    assert "".join(stream(sentencepiece, [], run)) == "世\ufffd"
    assert sentencepiece.decode(run) == "\ufffd" * 4  # the library gives up the whole run


def test_special_tokens_are_left_out_or_written(byte_level: Tokenizer) -> None:
    output = byte_level.encode("the<|im_end|> dog<tool_call>")
    assert "".join(stream(byte_level, [], output, skip=True)) == "the dog<tool_call>"
    assert "".join(stream(byte_level, [], output, skip=False)) == "the<|im_end|> dog<tool_call>"


def test_special_token_inside_a_character(byte_level: Tokenizer) -> None:
    parts = byte_level.encode("\U00010348")
    special = byte_level.eos_token_id or 0
    output = [*parts[:2], special, *parts[2:]]
    assert "".join(stream(byte_level, [], output)) == "\U00010348"
    assert "<|im_end|>" in "".join(stream(byte_level, [], output, skip=False))


def test_leading_space_is_dropped_only_at_the_start_of_the_text(sentencepiece: Tokenizer) -> None:
    bos, the = sentencepiece.encode("the")
    assert "".join(stream(sentencepiece, [], [the])) == "the"
    assert "".join(stream(sentencepiece, [bos], [the, the])) == "the the"
    assert "".join(stream(sentencepiece, [bos, the], [the])) == " the"
    assert "".join(stream(sentencepiece, [bos], [the], skip=False)) == " the"


def expected_stop(text: str, stop: Sequence[str], include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        found = [string for string in stop if text[:end].endswith(string)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def may_begin_a_stop(text: str, stop: Sequence[str]) -> int:
    """How long an end of `text` begins a stop string."""
    ends = [text[at:] for at in range(len(text))]
    return max((len(e) for e in ends if any(s.startswith(e) for s in stop)), default=0)


WORDS = st.text(alphabet="ab\n", min_size=1, max_size=5)


@settings(deadline=None)
@given(
    stop=st.lists(WORDS, max_size=4),
    pieces=st.lists(st.text(alphabet="ab\nc", max_size=6), max_size=8),
    include=st.booleans(),
)
def test_stop_strings_depend_on_the_text_and_not_on_its_pieces(
    stop: list[str], pieces: list[str], include: bool
) -> None:
    stopper = StopStrings(stop, include_in_output=include)
    emitted, matched, seen = "", None, ""
    for piece in pieces:
        seen += piece
        text, matched = stopper.push(piece)
        emitted += text
        if matched is not None:
            break
        assert len(emitted) == len(seen) - may_begin_a_stop(seen, stop)
    emitted += stopper.finish()
    assert (emitted, matched) == expected_stop("".join(pieces), stop, include)


@settings(deadline=None)
@given(
    stop=st.lists(WORDS, min_size=1, max_size=3),
    unarmed=st.lists(st.text(alphabet="ab\n", max_size=6), max_size=4),
    armed=st.lists(st.text(alphabet="ab\n", max_size=6), max_size=4),
)
def test_text_before_min_tokens_is_no_part_of_a_stop_string(
    stop: list[str], unarmed: list[str], armed: list[str]
) -> None:
    stopper = StopStrings(stop, include_in_output=False)
    for piece in unarmed:
        assert stopper.push(piece, armed=False) == (piece, None)
    emitted, matched = "", None
    for piece in armed:
        text, matched = stopper.push(piece)
        emitted += text
        if matched is not None:
            break
    assert (emitted + stopper.finish(), matched) == expected_stop("".join(armed), stop, False)


def test_unarmed_text_releases_what_was_held() -> None:
    stopper = StopStrings(["abc"], include_in_output=False)
    assert stopper.push("xab") == ("x", None)
    assert stopper.push("c", armed=False) == ("abc", None)
    assert stopper.push("abc") == ("", "abc")


def test_stop_string_over_several_tokens() -> None:
    stopper = StopStrings(["\n\nUser:"], include_in_output=False)
    pushed = [stopper.push(piece) for piece in ("Yes.", "\n", "\n", "Us", "ed.\n", "\nUser", ": x")]
    assert pushed == [
        ("Yes.", None),
        ("", None),
        ("", None),
        ("", None),
        ("\n\nUsed.", None),
        ("", None),
        ("", "\n\nUser:"),
    ]


@pytest.mark.parametrize(
    "stop, text, emitted, matched",
    [
        (["b", "ab"], "xab", "x", "ab"),  # both end here; "ab" began first
        (["abcd", "bc"], "abcd", "a", "bc"),  # "bc" is complete first
        (["ab", "ab"], "ab", "", "ab"),
        (["aab"], "aaab", "a", "aab"),  # a failed start must not hide the next one
        (["\n"], "\n\n", "", "\n"),
    ],
)
def test_the_first_stop_string_in_the_text_wins(
    stop: list[str], text: str, emitted: str, matched: str
) -> None:
    assert StopStrings(stop, include_in_output=False).push(text) == (emitted, matched)


def test_text_behind_the_stop_string_is_dropped_even_with_the_string_included() -> None:
    stopper = StopStrings(["END"], include_in_output=True)
    assert stopper.push("so it EN") == ("so it ", None)
    assert stopper.push("D and on") == ("END", "END")
    assert stopper.finish() == ""


def test_no_stop_strings_hold_nothing_back() -> None:
    stopper = StopStrings([], include_in_output=False)
    assert stopper.push("anything") == ("anything", None)
    assert stopper.finish() == ""


def test_very_long_stop_string_costs_nothing_until_it_matches() -> None:
    stop = "a" * 1_000_000 + "b"
    stopper = StopStrings([stop], include_in_output=False)
    assert stopper.push("xaaa") == ("x", None)
    assert stopper.push("c") == ("aaac", None)
    assert stopper.push(stop[-1000:]) == (stop[-1000:], None)
