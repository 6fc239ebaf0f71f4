"""Flags that other engines' users bring: taken, or refused with what to use instead."""

import re

import pytest

from quire.cli.flags import engine_options, server_options
from quire.cli.parser import build_parser
from quire.compat.flags import ALWAYS, FIXED, KNOWN, REFUSED, SAME, TRANSLATED
from quire.errors import ConfigurationError


def _refusal(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        build_parser().parse_args(words.split())
    assert stop.value.code == 2
    return capsys.readouterr().err.removeprefix("quire: error: ").rstrip("\n")


@pytest.fixture(scope="module")
def serve_flags() -> set[str]:
    """Of `quire serve`, as its help lists them."""
    (commands,) = [action for action in build_parser()._actions if action.dest == "command"]
    assert isinstance(commands.choices, dict)
    return set(commands.choices["serve"]._option_string_actions)


def test_a_flag_is_in_one_table_and_none_is_ours(serve_flags: set[str]) -> None:
    tables = (SAME, TRANSLATED, ALWAYS, FIXED, REFUSED)
    assert len(KNOWN) == sum(map(len, tables))
    assert not KNOWN & serve_flags


def test_flags_named_in_hints_exist(serve_flags: set[str]) -> None:
    assert set(SAME.values()) <= serve_flags
    hints = " ".join([*REFUSED.values(), *(why for _, why in FIXED.values())])
    named = set(re.findall(r"--[a-z][a-z-]*[a-z]", hints))
    assert named
    assert named <= serve_flags


def test_flags_of_equal_meaning_become_ours() -> None:
    words = (
        "serve -m org/model -np 8 -t=2 --context-length 512 --page-size=32 --random-seed 3"
        " --alias mine --disable-radix-cache --mem-fraction-static 0.5 --watchdog-timeout 9"
        " --tp-size 2 --disable-cuda-graph --disable-overlap-schedule"
    )
    args = build_parser().parse_args(words.split())
    assert engine_options(args) == {
        "model": "org/model",
        "max_num_seqs": 8,
        "num_threads": 2,
        "max_model_len": 512,
        "block_size": 32,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.5,
        "tensor_parallel_size": 2,
        "enforce_eager": True,
        "async_scheduling": False,
    }
    assert server_options(args) == {"served_model_name": ("mine",), "heartbeat_timeout_s": 9.0}
    assert args.seed == 3


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 5}'],
            {"speculation": "ngram", "num_draft_tokens": 5},
        ),
        (
            ['--speculative-config={"method": "suffix", "prompt_lookup_min": 2}'],
            {"speculation": "ngram,siblings,history", "ngram_min_match": 2},
        ),
        (["--speculative-config", "null"], {}),
        (["--spec-type", "none"], {"speculation": "off"}),
        (
            ["--spec-type=ngram-mod,ngram-simple", "--draft-max", "16"],
            {"speculation": "ngram", "num_draft_tokens": 16},
        ),
        (["--draft", "4"], {"num_draft_tokens": 4}),
        (
            ["-md", "x.gguf", "--draft-max=4"],
            {"speculative_model": "x.gguf", "num_draft_tokens": 4},
        ),
        (
            ["--spec-type=ngram-mod,draft-simple", "--model-draft=x"],
            {"speculation": "ngram,draft_model", "speculative_model": "x"},
        ),
        (["--draft-n-max=9"], {"num_draft_tokens": 9}),
    ],
)
def test_flags_of_speculation_become_ours(words: list[str], expected: dict[str, object]) -> None:
    assert engine_options(build_parser().parse_args(["serve", *words])) == expected


def test_flags_that_ask_for_the_default_are_accepted() -> None:
    words = (
        "serve --enable-chunked-prefill --data-parallel-size 1 -pp=1 --swap-space 0 --metrics"
        " --disable-log-requests --load-format safetensors"
        " --distributed-executor-backend mp --trust-remote-code --response-role assistant"
        " --enable-prompt-tokens-details --enable-tokenizer-info-endpoint"
        " --guided-decoding-backend xgrammar --enable-reasoning"
    )
    args = build_parser().parse_args(words.split())
    assert (engine_options(args), server_options(args)) == ({}, {})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "serve --data-parallel-size 2",
            "--data-parallel-size is '2', but must be 1: tensor_parallel_size splits",
        ),
        ("serve -dp=4", "-dp is '4', but must be 1"),
        ("serve --convert embed", "--convert is 'embed', but must be auto or none: runner and"),
        (
            "serve --distributed-executor-backend ray",
            "--distributed-executor-backend is 'ray', but must be mp: the ranks of an engine",
        ),
        ("serve --max-model-len 4q", "argument --max-model-len: '4q' is no number"),
        (
            "serve --max-model-len 1.0003k",
            "argument --max-model-len: '1.0003k' is 1000.3",
        ),
        ("serve --n-gpu-layers 9", "there is no option --n-gpu-layers: --device says where"),
        ("serve --swap-space", "--swap-space is missing its value, but must be 0"),
        ("serve --load-format pt", "--load-format is 'pt', but must be auto or safetensors"),
        ("serve --enable-chunked-prefill=yes", "--enable-chunked-prefill takes no value"),
        ("serve --ctx-size 8192", "there is no option --ctx-size: --max-model-len bounds one"),
        ("serve --ssl-keyfile k", "there is no option --ssl-keyfile: put a reverse proxy"),
        ("serve --tool-parser-plugin x.py", "there is no option --tool-parser-plugin: a dialect"),
        ("serve --h11-max-header-count 9", "there is no option --h11-max-header-count: a call's"),
        ("serve --api-server-count 2", "--api-server-count is '2', but must be 1"),
        (
            "serve --spec-type draft-dflash",
            "--spec-type is 'draft-dflash', but this version drafts",
        ),
        ("serve --spec-type x", "--spec-type is 'x', but must be none, or some of ngram-simple"),
        ("serve --spec-type", "--spec-type is missing its value"),
        (
            "serve --draft-min 2",
            "there is no option --draft-min: --speculation names the proposers",
        ),
        (
            "serve --speculative-algorithm EAGLE",
            "there is no option --speculative-algorithm: --speculation names the proposers",
        ),
        (
            'serve --speculative-config {"method":"eagle"}',
            "--speculative-config asks for 'eagle', but this version drafts only with the heads",
        ),
        ("serve --speculative-config ngram", "--speculative-config is 'ngram', which is not JSON"),
        ("doctor --spec-type none", "there is no option --spec-type"),
        # Where the command lacks ours, theirs is as unknown as any other.
        ("chat --alias x", "there is no option --alias"),
        ("doctor --threads 2", "there is no option --threads"),
    ],
)
def test_unsupported_flags_are_refused_with_a_hint(
    words: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _refusal(words, capsys).startswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096),
        ("4k", 4000),
        ("4K", 4096),
        ("1.5k", 1500),
        ("2m", 2_000_000),
        ("1M", 1 << 20),
    ],
)
def test_a_length_may_be_written_in_thousands(text: str, expected: int) -> None:
    args = build_parser().parse_args(["serve", "--max-model-len", text])
    assert engine_options(args) == {"max_model_len": expected}


def test_origins_may_be_a_list_in_json() -> None:
    args = build_parser().parse_args(["serve", "--allowed-origins", '["http://a", "http://b"]'])
    assert server_options(args) == {"allowed_origins": ("http://a", "http://b")}
    for wrong in ('["a"', "[1]"):
        args = build_parser().parse_args(["serve", "--allowed-origins", wrong])
        with pytest.raises(ConfigurationError, match="allowed_origins is"):
            server_options(args)


def test_words_after_two_dashes_are_no_flags() -> None:
    args = build_parser().parse_args(["generate", "--", "--ctx-size", "-t"])
    assert args.prompts == ["--ctx-size", "-t"]
