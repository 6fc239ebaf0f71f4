"""A block size that is left to be chosen: for the model alone."""

import pytest

from quire.assembly.build import build_engine
from quire.assembly.model_kind import choose_kind
from quire.assembly.reports.block_size import choose_block_size, numbers_per_token
from quire.errors import ConfigurationError
from quire.options.engine_options import EngineOptions


@pytest.mark.parametrize(
    ("max_model_len", "num_numbers", "expected"),
    [
        (4096, 1024, 16),
        (65_536, 1024, 16),
        (65_537, 1024, 32),
        (131_072, 8192, 32),
        (10_000_000, 8192, 256),
        (4096, 511, 32),
        (4096, 1, 256),
        (4096, 0, 16),
    ],
)
def test_long_sequences_and_small_tokens_have_larger_blocks(
    max_model_len: int, num_numbers: int, expected: int
) -> None:
    assert choose_block_size(max_model_len, num_numbers) == expected


def test_auto_becomes_a_size_with_the_model() -> None:
    options = EngineOptions.from_mapping({"block_size": "auto", "skip_tokenizer_init": True})
    assert EngineOptions.from_mapping(options.as_mapping()) == options
    kind = choose_kind(options)
    assert numbers_per_token(kind.config) == 4 * 2 * 2 * 64
    assert kind.options.block_size == 16
    engine = build_engine({**options.as_mapping(), "num_blocks": 20, "max_num_seqs": 2})
    assert engine.facts["block_size"] == 16


@pytest.mark.parametrize("value", ["Auto", 12, True, "16"])
def test_invalid_block_sizes_are_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match=r"block_size is .*, but must be"):
        EngineOptions.from_mapping({"block_size": value})
