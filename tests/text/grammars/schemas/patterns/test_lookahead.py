"""Look-ahead: what the expressions match is what Python's engine says of the pattern."""

import itertools
import random
import re

import pytest

from quire.errors import InvalidRequestError
from quire.text.grammars.schemas.patterns.translation import MAX_AUTOMATA, PatternTranslator

TEXTS = ["".join(each) for n in range(4) for each in itertools.product("ab0\n", repeat=n)]
ATOMS = ("a", "b", "0", ".", "[ab]", "[^a]", r"\d", r"\w", r"\s", r"\S")
COUNTS = ("*", "+", "?", "{2}", "{1,2}", "*?", "{0,1}", "{2,}")


def as_python(pattern: str) -> re.Pattern[str]:
    """ECMA's pattern, or llguidance's expression, for Python's engine."""
    pattern = re.sub(r"\\x\{([0-9a-f]+)\}", lambda match: f"\\U{int(match[1], 16):08x}", pattern)
    return re.compile(pattern.replace("$", r"\Z").replace(".", "[^\\n\\r\\u2028\\u2029]"), re.ASCII)


def random_pattern(draw: random.Random, depth: int = 0) -> str:
    kind = draw.random()
    if depth > 3 or kind < 0.4:
        return draw.choice(ATOMS)
    if kind < 0.55:
        return "".join(random_pattern(draw, depth + 1) for _ in range(draw.randint(1, 3)))
    inside = random_pattern(draw, depth + 1)
    if kind < 0.65:
        return f"({inside}|{random_pattern(draw, depth + 1)})"
    if kind < 0.75:
        return f"(?:{inside}){draw.choice(COUNTS)}"
    return f"(?{draw.choice('=!')}{inside}{draw.choice(['', '$'])})"


@pytest.mark.parametrize("seed", range(4))
def test_random_patterns_match_as_in_python(seed: int) -> None:
    draw = random.Random(seed)
    num_checked = 0
    for _ in range(60):
        parts = [random_pattern(draw) for _ in range(draw.randint(1, 4))]
        pattern = draw.choice(["^", ""]) + "".join(parts) + draw.choice(["$", ""])
        try:
            all_found = PatternTranslator("json").conditions(pattern, "#", "pattern")
            one = PatternTranslator("json").single(pattern, "#", "pattern")
        except InvalidRequestError:  # a look-ahead that is counted, or too complex
            continue
        num_checked += 1
        expected = as_python(pattern)
        written = [as_python(each) for each in all_found]
        for text in TEXTS:
            is_match = expected.search(text) is not None
            assert all(each.search(text) for each in written) == is_match, (pattern, text)
            assert bool(as_python(one).search(text)) == is_match, (pattern, text)
        again = [PatternTranslator("json").single(each, "#", "pattern") for each in all_found]
        assert again == [PatternTranslator("json").single(each, "#", "pattern") for each in again]
    assert num_checked > 30


def test_conditions_at_the_start_stay_apart() -> None:
    """Together they would be an automaton with a state for each combination."""
    pattern = r"^(?=.*[a-z])(?=.*[A-Z])(?=.*\d)(?=.*[@$!%*?&])[A-Za-z\d@$!%*?&]{8,}$"
    assert len(PatternTranslator("json").conditions(pattern, "#", "pattern")) == 5


def test_number_of_lookahead_patterns_per_schema_is_bounded() -> None:
    patterns = PatternTranslator("json")
    for _ in range(2):
        for index in range(MAX_AUTOMATA):
            patterns.conditions(f"^(?!{index}$)", "#", "pattern")
    with pytest.raises(InvalidRequestError, match="more than 40 different patterns"):
        patterns.conditions("^(?!x)", "#", "pattern")


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        (r"^(a(?=b))*$", "look-ahead in a repeated part is not supported"),
        (r"^(?=a)+b$", "after a part that matches no character is not supported"),
        (r"^a?(?=^b)c$", r"\^ after a part that may be empty"),
        (r"^(?!\p{L})a$", r"\\p beside a look-ahead is not supported"),
        (r"^(?=a)(?=b)(?=c)(?=d)(?=e)(?=f)(?=g)(?=h)x", "more than 7 look-aheads"),
        (r"x(?=.*[A-Z])(?=.*[a-z])(?=.*\d)(?=.*[!-/]).{40,60}$", "its look-ahead"),
        (r"^(?!" + "a?" * 900 + ")x", "its look-ahead"),
        (r"^(?!.*a.{10}$).*b.{9}$", "its look-ahead has too many states"),
        (r"a(?<=b)", "look-behind and flags are not supported"),
        (r"(?i)a", "look-behind and flags are not supported"),
        (r"(a)\1", "back references are not supported"),
        (r"\bword", r"\\b is not supported"),
        (r"a**", "is followed by another quantifier"),
        (r"*a", "has nothing to repeat"),
        (r"a{3,2}", "has a maximum below its minimum"),
        (r"(a", "a group is not closed"),
        (r"a)", "has no matching"),
        (r"[a", "a class is not closed"),
        (r"[b-a]", "ends before it begins"),
        (r"[\d-z]", "a set is the end of a range"),
        ("(" * 200 + ")" * 200, "groups nest deeper than 100"),
        ("\\", "it ends with a backslash"),
        (r"\ud800", "half of a surrogate pair"),
    ],
)
def test_refusals(pattern: str, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says) as refused:
        PatternTranslator("json").conditions(pattern, "#/items", "pattern")
    assert "#/items: pattern '" in str(refused.value)
