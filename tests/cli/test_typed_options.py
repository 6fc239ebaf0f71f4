"""How errors name what was typed: fields of Python become flags, keys and variables."""

import argparse

import pytest

from quire.cli.typed_options import Typed, told, typed_words


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    made.add_argument("--kv-cache-memory")
    made.add_argument("--num-blocks", type=int)
    made.add_argument("--max-num-seqs", type=int)
    made.add_argument("--enable-lora", action=argparse.BooleanOptionalAction)
    made.add_argument("--device")
    made.add_argument("--kernels")
    return made


LINE = ["--kv-cache-memory", "900GiB", "-np=3", "--enable-lora", "model"]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "kv_cache_memory=966367641600 asks for 900.0 GiB; lower num_blocks, kv_cache_memory",
            "--kv-cache-memory 900GiB asks for 900.0 GiB; lower --num-blocks, --kv-cache-memory",
        ),
        ("kv_cache_memory is 966367641600 (5)", "--kv-cache-memory is 900GiB (5)"),
        ("max_num_seqs is 3, too many", "-np is 3, too many"),
        ("say device='cpu', or leave kernels out", "say --device cpu, or leave --kernels out"),
        (
            "device is 'gpu', but must be None or one of ('a', 'b')",
            "--device is 'gpu', but must be one of a, b",
        ),
        ("(enable_lora=False)", "(--no-enable-lora)"),
        ("(enable_lora is False)", "(--no-enable-lora)"),
        ("x: enable_lora=True does it", "x: --enable-lora does it"),
        # Ordinary words, and advice for Python, stay as they are.
        ("the device of the kernels is a device", "the device of the kernels is a device"),
        ("LLM(enable_lora=True) in Python", "LLM(enable_lora=True) in Python"),
        ("give kv_cache_memory=50 in Python", "give kv_cache_memory=50 in Python"),
        ("/tmp/num_blocks.json is missing", "/tmp/num_blocks.json is missing"),
        ("no '/tmp/num_blocks=3/x'", "no '/tmp/num_blocks=3/x'"),
        ("'device=cpu' is no model", "'device=cpu' is no model"),
    ],
)
def test_fields_become_what_was_typed(
    message: str, expected: str, parser: argparse.ArgumentParser
) -> None:
    typed = typed_words(LINE, parser._option_string_actions)
    assert told(message, parser, typed) == expected


def test_an_opposite_that_was_typed_is_named_once(parser: argparse.ArgumentParser) -> None:
    typed = typed_words(["--no-enable-lora"], parser._option_string_actions)
    assert told("(enable_lora is False)", parser, typed) == "(--no-enable-lora)"


def test_keys_and_variables_have_their_own_form(parser: argparse.ArgumentParser) -> None:
    typed = {
        "device": Typed("device", "cuda", ": ", "a.yaml, line 3"),
        "num_blocks": Typed("QUIRE_NUM_BLOCKS", "5", "="),
    }
    message = "device='cuda', device='cpu', num_blocks=5, lower num_blocks"
    assert told(message, parser, typed) == (
        "device: cuda (a.yaml, line 3), device: cpu, QUIRE_NUM_BLOCKS=5, lower QUIRE_NUM_BLOCKS"
    )
