"""What the command line understands, and what it says of what it doesn't."""

import argparse

import pytest

from quire.cli_parser import ENGINE_OPTIONS, Parser, build_parser, engine_options, sampling_options
from quire.config import EngineOptions
from quire.core.sampling_params import SamplingParams


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
        ("", "name a command: generate, chat, serve, bench (see 'quire --help')"),
        ("srve", "there is no command 'srve'; did you mean serve? (see 'quire --help')"),
        ("xyzzy", "there is no command 'xyzzy' (see 'quire --help')"),
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
        ("chat --prompt", "argument --prompt: expected one argument"),
        ("chat hello", "unrecognized arguments: hello"),
        ("generate", "the following arguments are required: PROMPT"),
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


def test_only_what_was_given_reaches_the_engine() -> None:
    assert engine_options(build_parser().parse_args(["chat"])) == {}
    words = (
        "serve org/model --max-model-len 512 --kv-cache-memory 2GiB --no-enable-prefix-caching"
        " --block-size 32 --seed 3"
    )
    args = build_parser().parse_args(words.split())
    assert engine_options(args) == {
        "model": "org/model",
        "max_model_len": 512,
        "kv_cache_memory": "2GiB",
        "enable_prefix_caching": False,
        "block_size": 32,
    }


def test_the_engine_knows_every_option_that_is_handed_to_it() -> None:
    assert set(ENGINE_OPTIONS) <= set(EngineOptions.__dataclass_fields__)


@pytest.mark.parametrize("name", ENGINE_OPTIONS)
@pytest.mark.parametrize("command", ["generate x", "chat", "serve"])
def test_every_engine_option_is_a_flag_of_every_command(name: str, command: str) -> None:
    args = build_parser().parse_args(command.split())
    assert getattr(args, name) is None


def test_sampling_goes_by_the_names_of_sampling_params() -> None:
    words = "generate x --max-tokens 7 --temperature 0.5 --top-p 0.9 --top-k 3 --min-p 0.1 --seed 4"
    args = build_parser().parse_args([*words.split(), "--stop", "a b", "--stop", "\n"])
    params = SamplingParams(**sampling_options(args))
    assert (params.max_tokens, params.temperature, params.top_p) == (7, 0.5, 0.9)
    assert (params.top_k, params.min_p, params.seed) == (3, 0.1, 4)
    assert params.stop == ("a b", "\n")


@pytest.mark.parametrize(("command", "max_tokens"), [("generate x", 128), ("chat", None)])
def test_without_options_the_model_decides(command: str, max_tokens: int | None) -> None:
    params = SamplingParams(**sampling_options(build_parser().parse_args(command.split())))
    assert params == SamplingParams(max_tokens=max_tokens)


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


def test_an_own_parser_without_commands_needs_none() -> None:
    assert Parser(prog="x").parse_args([]) == argparse.Namespace()
