"""Options: names, types, bounds and sizes."""

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from quire.cli.flags import engine_options
from quire.cli.parser import build_parser
from quire.compat.llm_options import ALIASES, COMPAT_OPTIONS
from quire.errors import ConfigurationError
from quire.offline.llm import LLM
from quire.option_fields import parse_bytes
from quire.options.engine_options import EngineOptions


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (12345, 12345),
        ("12345", 12345),
        ("2GiB", 2 << 30),
        ("500 MB", 500_000_000),
        ("1.5kib", 1536),
        ("3b", 3),
        ("2TB", 2 * 10**12),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_parse_bytes(text: object, expected: int) -> None:
    assert parse_bytes("kv_cache_memory", text) == expected


@pytest.mark.parametrize(
    "text", ["", "GiB", "2 apples", "-1GiB", None, True, 1.5, "1.5", "1.5b", "1..2MB", "9" * 5000]
)
def test_parse_bytes_refuses(text: object) -> None:
    with pytest.raises(ConfigurationError, match="kv_cache_memory is"):
        parse_bytes("kv_cache_memory", text)


def test_the_arguments_of_llm_are_the_options() -> None:
    """And a factory of another manager of the memory, for comparisons, settings of a profiler and
    of pooling, and other names."""
    taken = dict(inspect.signature(LLM).parameters)
    del taken["kv_allocator"], taken["profiler_config"], taken["pooler_config"]
    for alias, name in ALIASES.items():
        assert taken.pop(alias).annotation == taken[name].annotation
    assert taken == inspect.signature(EngineOptions).parameters


def test_a_model_may_be_a_path() -> None:
    options = EngineOptions.from_mapping({"model": Path("a") / "b", "tokenizer": Path("c")})
    assert (options.model, options.tokenizer) == ("a/b", "c")


@pytest.mark.parametrize(
    ("name", "expected"), [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16")]
)
def test_a_dtype_goes_by_its_usual_names(name: str, expected: str) -> None:
    assert EngineOptions.from_mapping({"dtype": name}).dtype == expected


def test_defaults() -> None:
    options = EngineOptions.from_mapping({})
    assert (options.block_size, options.max_num_batched_tokens) == (16, 2048)
    assert EngineOptions.from_mapping({"max_num_seqs": 5000}).max_num_batched_tokens == 5000
    assert EngineOptions.from_mapping({"max_num_batched_tokens": None}) == options


def test_prefixes_are_cached_unless_told_otherwise() -> None:
    for given in ({}, {"enable_prefix_caching": None}):
        assert EngineOptions.from_mapping(given).enable_prefix_caching is True


def test_options_that_ask_for_the_default_are_accepted() -> None:
    """As scripts for vLLM do; None asks for nothing, whatever the option."""
    asked = {name: harmless[0] for name, (harmless, _) in COMPAT_OPTIONS.items() if harmless}
    nothing = dict.fromkeys(COMPAT_OPTIONS)
    assert EngineOptions.from_mapping(asked) == EngineOptions.from_mapping(nothing)
    assert EngineOptions.from_mapping({"swap_space": 4}) == EngineOptions()
    nothing = dict.fromkeys(field.name for field in fields(EngineOptions))
    assert EngineOptions.from_mapping(nothing) == EngineOptions()


def test_a_model_that_drafts_turns_speculation_on() -> None:
    options = EngineOptions.from_mapping({"speculative_model": "small", "num_draft_tokens": 4})
    assert options.speculation == "auto"
    given = {"speculative_model": "small", "speculation": "ngram,draft_model"}
    assert EngineOptions.from_mapping(given).speculation == "ngram,draft_model"


def test_drafts_may_be_bounded_where_there_are_any() -> None:
    given = {"num_draft_tokens": 3, "ngram_min_match": 1}
    options = EngineOptions.from_mapping({"speculation": "ngram", **given})
    assert (options.num_draft_tokens, options.ngram_min_match) == (3, 1)
    defaults = {name: getattr(EngineOptions, name) for name in given}
    assert EngineOptions.from_mapping(defaults) == EngineOptions()


@pytest.mark.parametrize(
    ("given", "taken"), [("4k", 4000), ("4K", 4096), (512, 512), ("auto", None), (-1, None)]
)
def test_a_number_of_tokens_may_be_written_in_thousands(given: Any, taken: int | None) -> None:
    assert EngineOptions.from_mapping({"max_model_len": given}).max_model_len == taken
    args = build_parser().parse_args(["serve", "--max-model-len", str(given)])
    assert EngineOptions.from_mapping(engine_options(args)).max_model_len == taken
    for wrong in ("4 kk", "1.5", "-2"):
        with pytest.raises(ConfigurationError, match=r"max_model_len: .* is no number"):
            EngineOptions.from_mapping({"max_model_len": wrong})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocksize": 16}, "unknown option blocksize; did you mean block_size"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0, but must be at least 1"),
        (
            {"attention_backend": "flash"},
            "attention_backend is 'flash', but must be None or one of",
        ),
        ({"async_scheduling": "yes"}, "async_scheduling is 'yes', but must be True, False or None"),
        ({"async_scheduling": 1}, "async_scheduling is 1, but must be True, False or None"),
        ({"batch_invariant": 1}, "batch_invariant is 1, but must be True or False"),
        ({"device": "cuda:"}, "device is 'cuda:'"),
        ({"device": 0}, "device is 0"),
        ({"block_size": 12}, "block_size is 12, but must be a power of two"),
        ({"block_size": 4096}, "block_size is 4096, but must be a power of two"),
        ({"block_size": "16"}, "block_size is '16', but must be a whole number"),
        ({"block_size": 4}, "block_size is 4, but must be at least 8"),
        ({"dtype": "int3"}, "dtype is 'int3'"),
        ({"dtype": 7}, "dtype is 7"),
        ({"dtype": ["half"]}, "dtype is .'half'."),
        ({"max_logprobs": -2}, "max_logprobs is -2, but must be at least -1"),
        ({"max_logprobs": "5"}, "max_logprobs is '5', but must be a whole number"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"quantization": "int3"}, "quantization is 'int3', but must be None or one of"),
        ({"quantization": "none"}, "quantization is 'none'"),
        ({"quantization": 8}, "quantization is 8"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": True}, "seed is True"),
        ({"model": ""}, "model is ''"),
        ({"model": 3}, "model is 3"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_model_len": 1}, "max_model_len is 1, but must be at least 2"),
        ({"enforce_eager": 1}, "enforce_eager is 1, but must be True or False"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5"),
        ({"gpu_memory_utilization": True}, "gpu_memory_utilization is True"),
        ({"max_itl_ratio": 1.0}, "max_itl_ratio is 1.0, but must be 0 .no limit. or a number from"),
        ({"max_itl_ratio": -3}, "max_itl_ratio is -3"),
        ({"max_itl_ratio": True}, "max_itl_ratio is True"),
        ({"max_itl_ratio": float("inf")}, "max_itl_ratio is inf"),
        ({"max_itl_ratio": "2"}, "max_itl_ratio is '2'"),
        ({"kv_cache_memory": 1, "kv_cache_memory_bytes": 1}, "given twice"),
        ({"kv_cache_memory": "1GiB", "num_blocks": 4}, "give one of them"),
        (
            {"kv_cache_memory": 4096, "gpu_memory_utilization": 0.5},
            "kv_cache_memory and gpu_memory_u",
        ),
        ({"kv_cache_memory": 10}, "must be at least 1024 bytes; did you mean 10GiB"),
        ({"kv_cache_memory": "16"}, "kv_cache_memory is 16, but must be at least 1024 bytes"),
        ({"kv_cache_memory": "1000B"}, "kv_cache_memory is 1000, but must be at least 1024$"),
        ({"quantization": "awq"}, "stored in AWQ, GPTQ, FP8, MXFP4 or GGUF is served as it is"),
        ({"num_blocks": 1, "gpu_memory_utilization": 0.5}, "num_blocks and gpu_memory_utilization"),
        ({"tokenizer": "x", "skip_tokenizer_init": True}, "tokenizer is 'x', but skip_tokenizer"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching is 1, but must be True, False or"),
        (
            {"eviction": "lru", "enable_prefix_caching": False},
            "eviction is 'lru', but enable_prefix_caching is False",
        ),
        (
            {"cache_size": "1GiB"},
            "cache_size is 1073741824, but it has no effect without cache_dir",
        ),
        (
            {"cache_writes_per_day": 0},
            "cache_writes_per_day is 0, but it has no effect without cache_dir",
        ),
        ({"cache_dir": "a", "enable_prefix_caching": False}, "cache_dir is 'a', but no prefixes"),
        ({"cache_dir": "a", "cache_size": "1MB"}, "cache_size is 1000000, but must be at least 1"),
        (
            {"host_cache_size": "1GiB", "enable_prefix_caching": False},
            "host_cache_size is 1073741824, but no prefixes",
        ),
        (
            {"host_cache_size": "1GiB", "tensor_parallel_size": 2},
            "host_cache_size is 1073741824, but tensor_parallel_size is 2",
        ),
        (
            {"num_draft_tokens": 3, "speculation": "off"},
            "^num_draft_tokens is 3, but it has no effect without speculation; set",
        ),
        (
            {"ngram_min_match": 1, "speculation": "off"},
            "^ngram_min_match is 1, but it has no effect without speculation; set",
        ),
        (
            {"speculation": "ngram,draft_model"},
            "^speculation is 'ngram,draft_model', but no model drafts; name one with specul",
        ),
        (
            {"speculation": "off", "speculative_model": "small"},
            "^speculative_model is 'small', but speculation is 'off', which does not use it",
        ),
        (
            {"speculation": "ngram", "speculative_model": "small"},
            "^speculative_model is 'small', but speculation is 'ngram', which does not use it",
        ),
        ({"speculative_model": ""}, "^speculative_model is '', but must be a folder, a GGUF"),
        ({"kv_offloading_size": 8}, "kv_offloading_size is 8, but must be left out: host_cache_s"),
        ({"cache_dir": ""}, "cache_dir is '', but must be a folder"),
        ({"trust_remote_code": 1}, "trust_remote_code is 1, but must be False or True: code from"),
        ({"trust_remote_code": 0}, "trust_remote_code is 0, but must be False or True"),
        ({"pipeline_parallel_size": True}, "pipeline_parallel_size is True, but must be 1"),
        ({"download_dir": "x"}, "download_dir is 'x', but must be left out: models are kept"),
        ({"load_format": "pt"}, "load_format is 'pt', but must be 'auto' or 'safetensors'"),
        ({"kernels": "sse"}, "kernels is 'sse', but must be one of .*'portable'"),
        ({"num_threads": 0}, "num_threads is 0, but must be at least 1"),
        ({"num_threads": 1025}, "num_threads is 1025, but must be at most 1024"),
        ({"num_threads": "2"}, "num_threads is '2'"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        EngineOptions.from_mapping(options)


def test_the_kernels_that_pytest_was_asked_for_are_the_default(pytestconfig: pytest.Config) -> None:
    name = pytestconfig.getoption("--kernels")
    assert EngineOptions().kernels == name
    assert EngineOptions.from_mapping({"num_threads": 2}).kernels == name
    assert EngineOptions.from_mapping({"kernels": "torch"}).kernels == "torch"
