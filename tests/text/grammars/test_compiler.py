"""Grammars over vocabularies of each kind: masks, states, copies, the cache."""

import llguidance
import pytest
from tests.text.grammars.walks import allowed, byte_tokens
from tests.text.small_tokenizers import PLAIN_DECODERS, make_plain

from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import GrammarTooComplexError, InvalidRequestError
from quire.text.grammars import compiler as compiler_module
from quire.text.grammars.compiler import GrammarCompiler
from quire.text.grammars.grammar_header import with_forced_tokens, with_origin
from quire.text.grammars.grammar_text import grammar_of
from quire.text.grammars.lark import literal
from quire.text.tokenizer import Tokenizer


def regex(pattern: str) -> str:
    return grammar_of(StructuredOutputsParams(regex=pattern))


def token(tokenizer: Tokenizer, text: str) -> int:
    found = tokenizer._backend.token_to_id(text)
    assert found is not None
    return int(found)


def test_all_tokenizations_of_a_forced_text_are_allowed(compiler: GrammarCompiler) -> None:
    tokenizer = compiler.tokenizer
    pieces = {
        token_id
        for token_id in range(tokenizer.vocab_size)
        if b"the dog".startswith(tokenizer.token_bytes(token_id))
    }
    assert len(pieces) > 2
    assert allowed(compiler.compile(regex("the dog")).start()) == pieces


@pytest.mark.parametrize("text", ["the dog", "\n\nx: é🙂 ", " a", '{"name": "f", "a": ""}'])
def test_a_forced_text_is_written_as_the_tokenizer_splits_it(
    compiler: GrammarCompiler, text: str
) -> None:
    grammar = with_forced_tokens(f"start: {literal(text)}")
    state = compiler.compile(with_origin(grammar, "here")).start()
    written: list[int] = []
    while not state.can_end:
        (token_id,) = allowed(state)
        state.consume([token_id])
        written.append(token_id)
    assert written == compiler.tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("text", ["e\u0301 the dog", "the <|im_end|> dog", "a"])
def test_text_that_the_tokenizer_would_change_may_have_any_tokens(
    text: str, compiler: GrammarCompiler, sentencepiece: Tokenizer
) -> None:
    """Where it normalizes, or reads the name of a special token."""
    grammar = with_forced_tokens(f"start: {literal(text)}")
    for each in (compiler, GrammarCompiler(sentencepiece, sentencepiece.vocab_size, [2])):
        state, written = each.compile(grammar).start(), b""
        while not state.can_end:
            token_id = max(allowed(state))
            assert token_id not in each.tokenizer.special_token_ids
            state.consume([token_id])
            written += each.tokenizer.token_bytes(token_id)
        assert written.decode() == text


def test_a_vocabulary_that_lacks_bytes_forces_no_tokens() -> None:
    """It can't write every text that a grammar may force."""
    tokenizer = Tokenizer(make_plain(PLAIN_DECODERS[sorted(PLAIN_DECODERS)[0]]))
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [])
    assert not compiler.vocabulary.writes_all_bytes
    text = tokenizer.token_bytes(token(tokenizer, "hello")).decode()
    compiled = [
        compiler.compile(with_origin(grammar, "here"))
        for grammar in (f'start: "{text}"', with_forced_tokens(f'start: "{text}"'))
    ]
    assert allowed(compiled[0].start()) == allowed(compiled[1].start()) != set()


def test_free_text_may_join_the_last_token_of_a_forced_text(
    compiler: GrammarCompiler,
) -> None:
    """Else what follows could not be written as the tokenizer splits the whole."""
    grammar = with_forced_tokens('start: "th" /[a-z]+/')
    state = compiler.compile(grammar).start()
    (whole,) = compiler.tokenizer.encode("the", add_special_tokens=False)
    assert whole in allowed(state)


def test_a_forcing_state_depends_on_tokens_alone(compiler: GrammarCompiler) -> None:
    compiled = compiler.compile(with_forced_tokens('start: "the " /[a-z]/ " and the dog"'))
    ids = compiler.tokenizer.encode("the x and the", add_special_tokens=False)
    whole, single = compiled.start(), compiled.start()
    whole.consume(ids)
    for token_id in ids:
        assert token_id in allowed(single)
        single.consume([token_id])
    assert whole.mask() == single.mask()


def test_special_tokens_are_no_text(compiler: GrammarCompiler) -> None:
    anything = allowed(compiler.compile(regex(r"(?s:.)*")).start())
    special = compiler.tokenizer.special_token_ids
    assert anything & special == set(compiler.vocabulary.end_token_ids)
    assert max(anything) < compiler.tokenizer.vocab_size


def test_special_token_by_name_and_by_id(compiler: GrammarCompiler) -> None:
    start_id = token(compiler.tokenizer, "<|im_start|>")
    for rule in ("<|im_start|>", f"<[{start_id}]>"):
        grammar = grammar_of(StructuredOutputsParams(grammar=f'start: {rule} "a"'))
        state = compiler.compile(grammar).start()
        assert allowed(state) == {start_id}
        state.consume([start_id, *byte_tokens(compiler, "a")])
        assert state.is_finished


@pytest.mark.parametrize("end", ["<[5]>", "<[5-9]>", "<|im_start|>", '"é"'])
def test_asking_for_forced_tokens_changes_nothing(compiler: GrammarCompiler, end: str) -> None:
    """Also before tokens that the grammar names, behind a limit on tokens of any text."""
    grammar = f'start: "the dog" <[20-400]>{{0,2}} {end} "a" <[7]>'
    compiled = compiler.compile(grammar_of(StructuredOutputsParams(grammar=grammar)))
    ends = {
        "<[5]>": [5],
        "<[5-9]>": [],
        "<|im_start|>": [token(compiler.tokenizer, "<|im_start|>")],
        '"é"': compiler.tokenizer.encode("é", add_special_tokens=False),
    }
    asked, other = compiled.start(), compiled.start()
    ids = compiler.tokenizer.encode("the dog", add_special_tokens=False)
    assert asked.forced_tokens(99) == ids
    assert asked.forced_tokens(1) == ids[:1]
    for token_id in [*ids, 30, 31]:
        asked.forced_tokens(5)
        assert asked.mask() == other.mask()
        asked.consume([token_id])
        other.consume([token_id])
    forced = ends[end] and [*ends[end], *byte_tokens(compiler, "a"), 7]
    assert asked.forced_tokens(9) == forced
    assert asked.forced_tokens(1) == forced[:1]
    assert asked.mask() == other.mask()


def test_added_token_that_is_not_special_is_text(compiler: GrammarCompiler) -> None:
    """Whole or in pieces; and a grammar may ask for the token itself."""
    whole = token(compiler.tokenizer, "<tool_call>")
    state = compiler.compile(regex("<tool_call>")).start()
    assert {whole, *byte_tokens(compiler, "<")} <= allowed(state)
    state.consume(byte_tokens(compiler, "<tool_call>"))
    assert state.is_finished
    alone = grammar_of(StructuredOutputsParams(grammar=f"start: <[{whole}]>"))
    assert allowed(compiler.compile(alone).start()) == {whole}


def test_end_tokens(byte_level: Tokenizer) -> None:
    compiler = GrammarCompiler(byte_level, 512, [3, 500])
    state = compiler.compile(regex("a+")).start()
    assert not state.can_end
    assert not {3, 500} & allowed(state)
    state.consume(byte_tokens(compiler, "a"))
    assert state.can_end
    assert not state.is_finished
    assert {3, 500} < allowed(state)
    state.consume([500])
    assert state.is_finished


def test_without_end_tokens_the_mask_of_a_finished_answer_is_empty(byte_level: Tokenizer) -> None:
    compiler = GrammarCompiler(byte_level, 509, [])
    state = compiler.compile(regex("a")).start()
    state.consume(byte_tokens(compiler, "a"))
    assert state.is_finished
    assert state.mask() == bytes(compiler.vocabulary.mask_bytes) == bytes(64)


def test_copies_go_their_own_ways(compiler: GrammarCompiler) -> None:
    state = compiler.compile(regex("ab|cd")).start()
    other = state.copy()
    state.consume(byte_tokens(compiler, "a"))
    other.consume(byte_tokens(compiler, "c"))
    assert allowed(state) == set(byte_tokens(compiler, "b"))
    assert allowed(other) == set(byte_tokens(compiler, "d"))


def test_state_depends_on_tokens_alone(compiler: GrammarCompiler) -> None:
    """Not on how many were consumed at once, nor on the masks made between."""
    compiled = compiler.compile(grammar_of(StructuredOutputsParams(json_object=True)))
    ids = byte_tokens(compiler, '{"a": [1, "é"]')
    whole = compiled.start()
    whole.consume(ids)
    single = compiled.start()
    for token_id in ids:
        single.mask()
        single.consume([token_id])
    assert whole.mask() == single.mask()


def test_a_token_that_is_not_allowed(compiler: GrammarCompiler) -> None:
    state = compiler.compile(regex("a")).start()
    with pytest.raises(ValueError, match="does not allow"):
        state.consume(byte_tokens(compiler, "b"))


def test_answers_that_used_up_a_lexer_leave_the_next_one_a_new_one(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = llguidance.LLParserLimits(max_lexer_states=100)
    monkeypatch.setattr(compiler_module, "parser_limits", lambda: limits)
    compiler = GrammarCompiler(byte_level, byte_level.vocab_size, [])
    grammar = regex("[abx]*x[abx]{12}y")
    compiled = compiler.compile(grammar, "alice")
    of_others = compiler.compile(grammar, "bob")
    assert compiler.compile(grammar, "alice") is compiled
    state = compiled.start()
    with pytest.raises(GrammarTooComplexError, match="too many states"):
        for letter in "xabxxaxbxaabxxbaxxbaxxxaabxbxxaxb" * 3:
            state.mask()
            state.consume(byte_tokens(compiler, letter))
    with pytest.raises(GrammarTooComplexError):
        compiled.start().mask()
    assert allowed(compiler.compile(grammar, "alice").start())
    assert compiler.compile(grammar, "bob") is of_others and allowed(of_others.start())


def test_sentencepiece(sentencepiece: Tokenizer) -> None:
    compiler = GrammarCompiler(sentencepiece, sentencepiece.vocab_size, [2])
    state = compiler.compile(regex(" é\n")).start()
    written = b""
    while not state.is_finished:
        token_id = max(allowed(state))
        written += sentencepiece.token_bytes(token_id)
        state.consume([token_id])
    assert written.decode() == " é\n"


@pytest.mark.parametrize("decoder", sorted(PLAIN_DECODERS))
def test_whole_word_tokenizers(decoder: str) -> None:
    tokenizer = Tokenizer(make_plain(PLAIN_DECODERS[decoder]))
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [])
    hello = token(tokenizer, "hello")
    text = tokenizer.token_bytes(hello).decode()
    assert hello in allowed(compiler.compile(regex(text)).start())


def test_cache_forgets_the_least_recently_used(byte_level: Tokenizer) -> None:
    compiler = GrammarCompiler(byte_level, 512, [3], max_cached=2)
    first = compiler.compile(regex("a"))
    compiler.compile(regex("b"))
    assert compiler.compile(regex("a")) is first
    compiler.compile(regex("c"))
    assert compiler.compile(regex("a")) is first
    tiny = GrammarCompiler(byte_level, 512, [3], max_cached_bytes=10)
    assert tiny.compile(regex("a")) is not tiny.compile(regex("a"))


def test_compiled_grammars_are_shared_only_within_a_cache_domain(byte_level: Tokenizer) -> None:
    compiler = GrammarCompiler(byte_level, 512, [3])
    made: list[str] = []
    make_matcher = compiler._matcher

    def count(grammar: str) -> llguidance.LLMatcher:
        made.append(grammar)
        return make_matcher(grammar)

    compiler._matcher = count  # type: ignore[method-assign]
    for domain in ("5:alice", "3:bob", "5:alice", "3:bob"):
        compiler.compile(regex("a"), domain)
    assert made == [regex("a")] * 2


def test_refusal_names_the_field(compiler: GrammarCompiler) -> None:
    grammar = grammar_of(StructuredOutputsParams(grammar="start: <|no_such_token|>"))
    with pytest.raises(InvalidRequestError, match="no_such_token") as refused:
        compiler.compile(grammar)
    assert refused.value.param == "structured_outputs.grammar"
