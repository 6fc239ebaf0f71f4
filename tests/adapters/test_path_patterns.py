"""Patterns match what `re` matches, in a time that grows with their length alone."""

import re
import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from quire.adapters import path_patterns
from quire.adapters.path_patterns import PathPatterns, PatternError

LETTERS = st.sampled_from("ab_1.^$")
ESCAPES = st.sampled_from([rf"\{letter}" for letter in ".AZbBdDwWsS"])
SETS = st.sampled_from(["[ab]", "[^a]", "[a-c.]", r"[\w.]", r"[^\d]", "(?:)"])
REPEATS = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "*?", "+?", "{1,2}?"])


def larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda each: f"({'|'.join(each)})"),
        st.tuples(inner, REPEATS).map(lambda each: f"(?:{each[0]}){each[1]}"),
    )


PATTERNS = st.recursive(LETTERS | ESCAPES | SETS, larger, max_leaves=8)
PATHS = st.text("ab.1_", min_size=1, max_size=7)


@given(st.lists(PATTERNS, min_size=1, max_size=3), st.lists(PATHS, max_size=20))
def test_the_first_that_re_matches_as_peft_asks_it(patterns: list[str], paths: list[str]) -> None:
    automaton = PathPatterns(patterns)
    for path in paths:
        matches = [re.match(rf"(.*\.)?({each})$", path) is not None for each in patterns]
        assert automaton.first(path) == (matches.index(True) if True in matches else None), path


@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")  # of brackets inside of brackets
@given(st.text("ab1.*+?{}()[]|\\^$,-<>=!:PDdwWsSbBxiu", max_size=12), PATHS)
def test_patterns_match_the_same_paths_as_re(pattern: str, path: str) -> None:
    try:
        found = PathPatterns([pattern]).first(path)
    except PatternError as error:
        if str(error) == "is no regular expression":
            with pytest.raises((re.error, OverflowError)):
                re.compile(pattern)
        return
    assume(")" not in re.sub(r"\\.|\[[^]]*]", "", pattern) or re.compile(pattern))
    assert (found == 0) == (re.match(rf"(.*\.)?({pattern})$", path) is not None)


def test_each_of_many_full_paths_finds_its_own() -> None:
    paths = [
        f"model.layers.{layer}.{part}_proj"
        for layer in range(24)
        for part in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.up")
    ]
    automaton = PathPatterns(paths)
    assert [automaton.first(path) for path in paths] == [*range(len(paths))]
    assert automaton.first(f"base.{paths[7]}") == 7 and automaton.first("layers.0.mlp") is None
    assert automaton._num_visits < path_patterns.MAX_VISITS / 10


DEADLY = ["(([a-z0-9._])*)*!", "(a|a)*b", "(.*.*.*.*.*.*)*x", r"(\w+\.?)+!", "((a?){30}){30}b"]


@pytest.mark.parametrize("pattern", DEADLY)
def test_patterns_that_stall_re_match_in_linear_time(pattern: str) -> None:
    began_s = time.process_time()
    assert PathPatterns([pattern]).first("model.layers.0.self_attn." + "a" * 60) is None
    assert time.process_time() - began_s < 5.0  # `re` takes years


REFUSED = {
    r"(a)\1": "has a reference to a group",
    r"(a)?(?(1)b|c)": "has a condition on a group",
    "(?=a)b": "has look-around",
    "a(?<!b)": "has look-around",
    "(?!)": "has look-around",
    "(?>a+)b": "has an atomic group",
    "a++b": "has a possessive repetition",
    "(?i)a": "has flags",
    "(?s:a)": "has flags",
    "a{99999999999999999999}": "is no regular expression",
    "(" * 900 + ")" * 900: "is no regular expression",
    "a" * 2001: "is longer than 2000 characters",
    "(((a{200}){200}){200}){200}": "repeats too much",
    "((a?){4000000000}){4000000000}": "repeats too much",
}


@pytest.mark.parametrize(("pattern", "why"), REFUSED.items(), ids=[*range(len(REFUSED))])
def test_patterns_without_an_automaton_are_refused(
    pattern: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(path_patterns, "MAX_STATES", 5000)
    with pytest.raises(PatternError, match=why) as raised:
        PathPatterns(["a", pattern])
    assert raised.value.pattern == pattern


def test_repetitions_of_nothing_end() -> None:
    assert PathPatterns(["(){4000000000}a", "((){3}){4000000000}b"]).first("b") == 1


def test_all_that_is_asked_together_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_patterns, "MAX_VISITS", 2000)
    automaton = PathPatterns(["(a|b)*a" + "(a|b)" * 12])
    with pytest.raises(PatternError, match="too many steps") as raised:
        for number in range(500):
            automaton.first(f"{number:b}".replace("0", "a").replace("1", "b"))
    assert raised.value.pattern is None


def test_large_sets_of_characters_count_by_their_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_patterns, "MAX_VISITS", 100_000)
    characters = "".join(map(chr, range(0x4E00, 0x5B00, 2)))
    assert PathPatterns(["([a-c]?){400}!"]).first("abc") is None
    with pytest.raises(PatternError, match="too many steps"):
        PathPatterns([f"([{characters}]?){{400}}!"]).first("abc")
