"""How words are taken: no abbreviations, values that look like flags, the nearest name."""

import argparse

import pytest

from quire.cli.words import Parser


def test_an_own_parser_without_commands_needs_none() -> None:
    assert Parser(prog="x").parse_args([]) == argparse.Namespace()


def test_a_mistake_tells_where_the_words_come_from(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="x")
    parser.blame = "file.yaml, line 3: "
    with pytest.raises(SystemExit):
        parser.parse_args(["--nothing"])
    assert capsys.readouterr().err == (
        "quire: error: file.yaml, line 3: there is no option --nothing (see 'x --help')\n"
    )


def test_the_value_of_a_flag_before_the_command_is_no_command() -> None:
    parser = Parser(prog="x", commands=["run"])
    parser.add_argument("--colour")
    parser.add_subparsers(dest="command").add_parser("run")
    assert parser.parse_args(["--colour", "red", "run"]).colour == "red"


@pytest.mark.parametrize(("takes_foreign", "expected"), [(True, 4), (False, None)])
def test_flags_of_others_are_known_where_that_is_asked_for(
    takes_foreign: bool, expected: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = Parser(prog="x", takes_foreign=takes_foreign)
    parser.add_argument("--num-threads", type=int)
    if expected is not None:
        assert parser.parse_args(["--threads", "4"]).num_threads == expected
        return
    with pytest.raises(SystemExit):
        parser.parse_args(["--threads", "4"])
    assert "there is no option --threads; did you mean --num-threads?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("topic", "shown"),
    [
        ("Memory", ["--blocks", "--pages"]),  # a group, with an option that lacks the word
        ("red", ["--colour"]),
        ("--pa", ["--pages"]),
        ("ES", ["--blocks", "--pages"]),
    ],
)
def test_help_is_searched(topic: str, shown: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="x")
    parser.add_argument("--colour", help="such as red, not memory")
    memory = parser.add_argument_group("memory")
    memory.add_argument("--blocks", help="how many pages")
    memory.add_argument("--pages")
    with pytest.raises(SystemExit) as stop:
        parser.parse_args([f"--help={topic}"])
    printed = capsys.readouterr().out
    assert stop.value.code == 0
    assert [flag for flag in ("--blocks", "--pages", "--colour") if f"{flag} " in printed] == shown


def test_a_word_that_no_option_has_is_answered_with_the_groups(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        Parser(prog="x").parse_args(["--help=blocks"])
    assert stop.value.code == 2
    assert "no option is about 'blocks'; the groups of options are options (" in (
        capsys.readouterr().err
    )
