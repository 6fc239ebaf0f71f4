"""Options as an object, and as flags of a script's own parser."""

import argparse
from dataclasses import asdict

import pytest

from quire.cli.engine_args import EngineArgs, FlexibleArgumentParser
from quire.errors import ConfigurationError
from quire.options.engine_options import EngineOptions


def test_engine_args_hold_and_check_the_engine_options() -> None:
    args = EngineArgs(max_model_len="4k", trust_remote_code=False, dtype=None)
    assert asdict(args) == asdict(EngineOptions(max_model_len=4000))
    args.max_num_seqs = 3
    assert EngineArgs(**asdict(args)) == args and args.max_num_seqs == 3
    with pytest.raises(ConfigurationError, match="max_num_seqs is 0"):
        args.max_num_seqs = 0
    with pytest.raises(ConfigurationError, match="unknown option max_num_seq; did you mean"):
        args.max_num_seq = 1
    with pytest.raises(AttributeError, match="EngineArgs has no lora_dtype: adapters"):
        args.lora_dtype  # noqa: B018 - the access is the test


def test_flags_may_be_written_as_in_vllm() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser("script"))
    parser.add_argument("--own", type=int)
    parser.set_defaults(block_size=32, enforce_eager=True)
    words = ["--max_model_len", "4k", "--max-num-seqs=2", "--trust_remote_code=no", "--own", "3"]
    with pytest.raises(SystemExit):
        parser.parse_args(words)
    words.remove("--trust_remote_code=no")
    found = parser.parse_args(words)
    args = EngineArgs.from_cli_args(found)
    assert (args.max_model_len, args.max_num_seqs, args.block_size) == (4000, 2, 32)
    given = vars(found)
    assert given.pop("own") == 3
    assert EngineArgs(**given) == args


def test_a_plain_parser_will_do() -> None:
    found = EngineArgs.add_cli_args(argparse.ArgumentParser()).parse_args([])
    assert EngineArgs.from_cli_args(found) == EngineArgs()
