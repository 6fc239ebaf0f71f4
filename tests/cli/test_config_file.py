"""`--config FILE` and the environment: the flags' names, the same checks, and who wins."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.cli.flags import engine_options, server_options
from quire.cli.parser import build_parser

Parse = Callable[..., Any]

FILE = """
# a server
model: org/model
port: 8080
max_num_seqs: 32
enable-prefix-caching: false
revision: 1.10
api-key: [alice:alice-key, bob:bob-key-1]
allowed_origins:
  - https://a.example
data-parallel-size: 1
enable-chunked-prefill: true
disable-log-stats: false
max-itl-ratio: 3
"""


@pytest.fixture
def parse(tmp_path: Path) -> Parse:
    def parse(text: str, *words: str) -> Any:
        path = tmp_path / "server.yaml"
        path.write_text(text)
        return build_parser().parse_args(["serve", "--config", str(path), *words])

    return parse


def test_a_file_says_what_flags_say(parse: Parse) -> None:
    args = parse(FILE)
    assert engine_options(args) == {
        "model": "org/model",
        "revision": "1.10",  # as it is written, not the number that YAML makes of it
        "max_num_seqs": 32,
        "enable_prefix_caching": False,
        "max_itl_ratio": 3.0,
    }
    assert server_options(args) == {
        "port": 8080,
        "api_keys": ("alice:alice-key", "bob:bob-key-1"),
        "allowed_origins": ("https://a.example",),
    }
    assert args.disable_log_stats is None


def test_flags_given_on_the_command_line_win(parse: Parse) -> None:
    words = ["--port", "81", "--enable-prefix-caching", "--api-key", "carol:carol-key", "my/model"]
    args = parse(FILE, *words)
    assert engine_options(args)["model"] == "my/model"
    assert engine_options(args)["enable_prefix_caching"] is True
    assert server_options(args)["port"] == 81
    assert server_options(args)["api_keys"] == ("carol:carol-key",)
    assert engine_options(args)["max_num_seqs"] == 32


def test_an_alias_on_the_command_line_wins_too(parse: Parse) -> None:
    assert engine_options(parse("max-num-seqs: 3", "-np", "5")) == {"max_num_seqs": 5}
    assert engine_options(parse("parallel: 3")) == {"max_num_seqs": 3}
    assert engine_options(parse("disable-radix-cache: true")) == {"enable_prefix_caching": False}


def test_an_empty_file_changes_nothing(parse: Parse) -> None:
    for text in ("", "# nothing\n"):
        assert (engine_options(parse(text)), server_options(parse(text))) == ({}, {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host: x\nprot: 80", "line 2: there is no option --prot; did you mean --port?"),
        ("prot:", "line 1: prot has no value; give it one, or take the line out"),
        ("port: many", "line 1: argument --port: invalid int value: 'many'"),
        ("port: true", "line 1: --port needs a value, but has true"),
        ("port: [1, 2]", "line 1: --port takes one value, but has a list of 2"),
        ("host: x\nmax-num-seqs: [1]", "line 2: --max-num-seqs takes one value, but has a list"),
        ("host: x\nlog-format: xml", "line 2: log-format is 'xml', but must be one of text, json"),
        ("kv-cache-memory: 4 apples", "line 1: kv-cache-memory is '4 apples', but must be"),
        ("max_body_bytes: 4 apples", "line 1: max_body_bytes is '4 apples', but must be"),
        ("quantization: int2", "line 1: quantization is 'int2', but must be one of int8, int4"),
        ("port: {a: 1}", "line 1: port must be a value or a list of values"),
        ("api-key: [[a]]", "line 1: api-key must be a value or a list of values"),
        ("api-key: []", "line 1: api-key has no value"),
        ("port: 1\nhost: x\nport: 2", "line 3: port stands in line 1 already"),
        ("max-n: 1\nmax_n: 2", "line 2: max_n stands in line 1 already"),
        ("enable-prefix-caching: maybe", "line 1: --enable-prefix-caching must be true or false"),
        ("no-enable-prefix-caching: false", "line 1: --no-enable-prefix-caching can't be false"),
        ("enable-chunked-prefill: false", "line 1: there is no option --no-enable-chunked-prefill"),
        ("data-parallel-size: 2", "line 1: --data-parallel-size is '2', but must be 1"),
        ("config: other.yaml", "line 1: --config belongs on the command line"),
        ("- port", "must hold flags and values, as in 'port: 8000'"),
        ("port: [1", "line 1: not YAML"),
        ("a: \x07", "not YAML"),
    ],
)
def test_errors_name_the_line_of_the_file(
    parse: Parse, text: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(text)
    assert stop.value.code == 2
    printed = capsys.readouterr().err
    assert "server.yaml" in printed
    assert expected in printed
    assert printed.count("\n") == 1


def test_a_missing_or_binary_file_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, expected in [
        (tmp_path / "nothing.yaml", "nothing.yaml can't be read: No such file"),
        (tmp_path, "can't be read: Is a directory"),
        (binary, "binary.yaml is not text in UTF-8"),
    ]:
        with pytest.raises(SystemExit):
            build_parser().parse_args(["serve", "--config", str(path)])
        assert expected in capsys.readouterr().err


def served(variables: dict[str, str], *words: str) -> Any:
    return build_parser(environment=variables).parse_args(["serve", *words])


def test_the_environment_says_what_flags_say() -> None:
    args = served(
        {
            "QUIRE_MODEL": "org/model",
            "QUIRE_PORT": "8080",
            "QUIRE_MAX_NUM_SEQS": "32",
            "QUIRE_ENABLE_PREFIX_CACHING": "false",
            "QUIRE_DISABLE_LOG_STATS": "1",
            "QUIRE_API_KEY": "alice:alice-key,bob:bob-key-1",
            "QUIRE_API_KEYS": "read elsewhere",
            "PORT": "1",
        }
    )
    assert args.disable_log_stats is True
    assert engine_options(args) == {
        "model": "org/model",
        "max_num_seqs": 32,
        "enable_prefix_caching": False,
    }
    keys = ("alice:alice-key", "bob:bob-key-1")
    assert server_options(args) == {"port": 8080, "api_keys": keys}


def test_the_command_line_wins_over_the_environment_and_this_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("port: 1\nmax-num-seqs: 2\nmodel: a/b\n")
    variables = {"QUIRE_CONFIG": str(path), "QUIRE_PORT": "3", "QUIRE_MAX_NUM_SEQS": "4"}
    args = served(variables, "--port", "5", "my/model")
    assert (args.port, args.max_num_seqs, args.model) == (5, 4, "my/model")


def test_a_pod_beside_a_service_named_quire_starts() -> None:
    args = served({"QUIRE_PORT": "tcp://10.0.0.1:8000", "QUIRE_SERVICE_HOST": "10.0.0.1"})
    assert args.port is None


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("QUIRE_PORT", "x", "QUIRE_PORT: "),
        ("QUIRE_MAX_NUM_SEQS", "0", "error: QUIRE_MAX_NUM_SEQS is 0, but must be at least 1"),
        ("QUIRE_ENABLE_LORA", "maybe", "QUIRE_ENABLE_LORA is 'maybe', but must be true or false"),
        ("QUIRE_MAX_NUM_SEQ", "1", "stands for no option; did you mean --max-num-seqs?"),
    ],
)
def test_errors_name_the_variable(
    capsys: pytest.CaptureFixture[str], name: str, value: str, words: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        served({name: value})
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("words", [["chat"], ["generate", "a text"], ["run", "a/b"]])
def test_other_commands_take_their_own_flags_alone(words: list[str]) -> None:
    variables = {"QUIRE_PORT": "x", "QUIRE_MAX_NUM_SEQ": "1", "QUIRE_NUM_THREADS": "2"}
    args = build_parser(environment=variables).parse_args(words)
    assert args.num_threads == 2
