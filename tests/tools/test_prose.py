"""The rules of tools/prose.py find what they name, and nothing else."""

import pytest
from tools import prose


def found(rule: str, source: str) -> list[str]:
    return [finding.text for finding in prose.findings(rule, [prose.SourceFile("x.py", source)])]


@pytest.mark.parametrize(
    ("rule", "bad", "good"),
    [
        ("poor-beginnings", '"""What is kept of a row."""', '"""Saved state of a row."""'),
        ("poor-beginnings", '"""Of the first one."""', '"""Offset of the first block."""'),
        ("poor-beginnings", "x: int  # what it holds\n#: What it holds.\ny = 1", "#: Rows.\ny = 1"),
        (
            "vague-sentences",
            "x = 1  # all of these that one such has, and no others",
            "x = 1  # rows",
        ),
        ("long-sentences", "# A\n" + "# word\n" * 40, "# A word.\n" * 20 + "# B word.\n" * 20),
        ("poor-phrases", "# waits so many seconds", "# waits this number of seconds"),
        (
            "long-sentences",
            f'"""A {"word " * 40}."""',
            f'"""A {"word " * 20}. B {"word " * 20}."""',
        ),
        (
            "vague-sentences",
            '"""Nothing else is asked of those that this one asks."""',
            '"""Ignores the admission checks of sequences that already have blocks."""',
        ),
        (
            "fields-in-class-docstrings",
            'class Row:\n    """A row.\n\n    length: tokens of it.\n    """\n    length: int\n',
            'class Row:\n    """A row of a batch."""\n    #: Tokens.\n    length: int\n',
        ),
        (
            "functions-without-steps",
            "def f():\n" + "    pass\n" * 50,
            "def f():\n    # First, wait.\n" + "    pass\n" * 50,
        ),
        ("stale-names", '"""Calls `that_function`."""', '"""Calls `print` and `x.py`."""'),
    ],
)
def test_each_rule_finds_a_bad_example_and_accepts_a_good_one(
    rule: str, bad: str, good: str
) -> None:
    assert found(rule, bad) and not found(rule, good)


def test_names_in_code_and_in_strings_are_not_stale() -> None:
    source = 'def f(size, *, wait):\n    """Uses `size`, `wait` and `on`."""\n    return "on"\n'
    assert found("stale-names", source) == []


def test_code_blocks_and_lists_are_no_sentences() -> None:
    source = f'"""A file.\n\n    {"word " * 50}\n\n- {"word " * 50}\n"""'
    assert found("long-sentences", source) == []


def test_the_counts_of_all_rules_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert prose.main([str(prose.SOURCES / "distributed")]) == 0
    printed = capsys.readouterr().out
    assert all(rule in printed for rule in [*prose.RULES, "stale-names"])
