"""What the command line understands, and what it says of what it doesn't."""

import argparse

import pytest

from quire.cli.parser import BENCHMARKS, build_parser


def _refusal(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The sentence for a usage error, checked to be one line and exit code 2."""
    with pytest.raises(SystemExit) as stop:
        build_parser().parse_args(words.split())
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("quire: error: ")
    assert printed.err.count("\n") == 1
    return printed.err.removeprefix("quire: error: ").rstrip("\n")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "",
            "name a command: generate, run, chat, serve, pull, list, rm, show, ps, top, batch,"
            " replay, bench, plan, doctor, cluster, cache",
        ),
        ("srve", "there is no command 'srve'; did you mean serve? (see 'quire --help')"),
        ("xyzzy", "there is no command 'xyzzy' (see 'quire --help')"),
        ("cache", "name a command: inspect, verify, empty (see 'quire cache --help')"),
        ("cache verfy x", "there is no command 'verfy'; did you mean verify?"),
        ("cache verify", "the following arguments are required: FOLDER"),
        ("--verson", "there is no option --verson; did you mean --version?"),
        (
            "generate --max-modle-len 3 x",
            "there is no option --max-modle-len; did you mean --max-model-len?"
            " (see 'quire generate --help')",
        ),
        ("generate x --max-modle-len=3", "there is no option --max-modle-len; did you mean"),
        ("serve --prot 80", "there is no option --prot; did you mean --port?"),
        ("serve -x", "there is no option -x"),
        ("chat --max-tok 3", "there is no option --max-tok; did you mean --max-tokens?"),
        ("chat --prompt", "argument -p/--prompt: expected one argument"),
        ("chat model other", "unrecognized arguments: other"),
        ("chat model --model other", "the model is given twice: "),
        ("generate x --max-tokens many", "argument --max-tokens: invalid int value: 'many'"),
    ],
)
def test_a_mistake_gets_one_sentence(
    words: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _refusal(words, capsys).startswith(expected)


def test_no_option_may_be_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no option --max-num" in _refusal("serve --max-num 3", capsys)


def test_words_that_only_look_like_options_are_values() -> None:
    parser = build_parser()
    assert parser.parse_args(["generate", "--", "-x"]).prompts == ["-x"]
    assert parser.parse_args(["generate", "-"]).prompts == ["-"]
    assert parser.parse_args(["generate", "-3.5", "- a list"]).prompts == ["-3.5", "- a list"]
    assert parser.parse_args(["chat", "--system=--x"]).system == "--x"
    assert parser.parse_args(["chat", "--seed", "-1"]).seed == -1


@pytest.mark.parametrize("words", [["--debug", "chat"], ["chat", "--debug"]])
def test_debug_may_stand_before_or_after_the_command(words: list[str]) -> None:
    assert build_parser().parse_args(words).debug
    assert not build_parser().parse_args(["chat"]).debug


def test_benchmarks_bring_their_own_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--num-requests", type=int)

    parser = build_parser({"throughput": add_arguments})
    args = parser.parse_args(["bench", "throughput", "--num-requests", "3"])
    assert (args.benchmark, args.num_requests, args.debug) == ("throughput", 3, False)
    for words, expected in [
        ("bench", "name a command: throughput (see 'quire bench --help')"),
        ("bench throughptu", "'throughptu'; did you mean throughput?"),
        ("bench claims", "no command 'claims'; run `python -m benchmarks.claims` in a checkout"),
        ("bench memory --help", "'memory'; run `python -m benchmarks.memory` in a checkout"),
        ("bench throughput --num-request 3", "did you mean --num-requests?"),
    ]:
        with pytest.raises(SystemExit):
            parser.parse_args(words.split())
        assert expected in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--help", "generate --help", "chat -h", "serve -h", "bench -h"])
def test_help_is_printed_and_ends_well(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        build_parser({"throughput": lambda parser: None}).parse_args(words.split())
    assert not stop.value.code
    assert capsys.readouterr().out.startswith("usage: quire")


def test_the_benchmarks_are_listed_with_what_they_measure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        build_parser(dict.fromkeys(BENCHMARKS, lambda parser: None)).parse_args(["bench", "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert all(f"{name} {text}" in printed for name, text in BENCHMARKS.items())


def test_a_model_and_a_prompt_go_by_place_and_by_flag() -> None:
    for words in (["chat", "some/model"], ["chat", "--model", "some/model"]):
        assert build_parser().parse_args(words).model == "some/model"
    args = build_parser().parse_args(["generate", "one", "-p", "two", "--prompt", "three"])
    assert (args.prompts, args.prompt) == (["one"], ["two", "three"])


def test_a_shell_is_not_taken_for_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--print-completion", "zsh"], ["--print-completion=zsh"]):
        assert build_parser().parse_args(words).print_completion == "zsh"
    assert "invalid choice: 'ksh'" in _refusal("--print-completion ksh", capsys)


def test_doctor_takes_a_port_and_may_leave_out_the_measurement() -> None:
    args = build_parser().parse_args(["doctor"])
    assert (args.port, args.measure) == (8000, True)
    args = build_parser().parse_args(["doctor", "--port", "81", "--no-measure"])
    assert (args.port, args.measure) == (81, False)
