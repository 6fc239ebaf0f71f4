"""Intersections in Lark texts are found wherever they hide."""

import pytest

from quire.text.grammars.intersections.lark_check import check_lark
from quire.text.grammars.intersections.set_counts import TooManyMembersError

NINE = " & ".join(["/[a-z]/"] * 9)


@pytest.mark.parametrize(
    "grammar",
    [
        f"start: T\nT: {NINE}",
        f"start: T\nT: ({NINE})* | /b/",
        f"start: T\n_T[lazy]: /a/ (/b/ | ~({NINE}))",
        f"start: ~({NINE})",
        "start: T\nT: A & A & A\nA: B & B\nB: C & C\nC: /x/",
        "start: T\nT.2: ~~A & ~(~A)\nA: /a/ & /b/ & /c/ & /d/ & /e/",
        "start: T\nT: /a/ &\n  // a comment & \n" + NINE,
        'start: %json {"title": "&"} T\nT: ' + NINE,
        "start: T\nT: NUMBER & NUMBER & NUMBER & NUMBER & NUMBER & NUMBER\n%import common.NUMBER\n",
        f"start: T U\nT: U & T\nU: {NINE}",
        "start: T\nA: B\nB: A\nT: " + NINE,
        "start: %lark {\nstart: T\nT: " + NINE + "\n}",
    ],
)
def test_refused(grammar: str) -> None:
    with pytest.raises(TooManyMembersError):
        check_lark(grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        "start: T\nT: " + " & ".join(["/[a-z]/"] * 8),
        'start: T\nT: "& & & & & & & & &" /[&]&&&&&&&&&/ & "~"  // & & & & & & & &',
        "start: T T T T T T T T T\nT: /a/ & /b/",
        "start: T\nT: /(?s:.)*/" + ' & ~(/(?s:.*)/ "x" /(?s:.*)/)' * 20,
        "start: a~3..4 b ~ 2\na: T\nb: T\nT: /a/ & /b/ | /c/ & /d/ | /e/ & /f/ | /g/ & /h/ | /i/",
        "start: T\nT: U & U & U\nU: V\nV: U",
        "start: ((( & & ~",
        "",
    ],
)
def test_accepted(grammar: str) -> None:
    check_lark(grammar)


def test_brackets_and_chains_of_any_depth_are_followed() -> None:
    chain = "\n".join(f"T{i}: T{i + 1}" for i in range(3_000))
    check_lark(f"start: T0 & ~T0\n{chain}\nT3000: " + "(" * 3_000 + "/a/" + ")" * 3_000)
