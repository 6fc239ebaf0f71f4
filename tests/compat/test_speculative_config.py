"""vLLM's speculative_config, as an option of Python's classes."""

from typing import Any

import pytest

from quire.cli.engine_args import EngineArgs
from quire.errors import ConfigurationError
from quire.options.engine_options import EngineOptions


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, {}),
        ({"method": "ngram"}, {"speculation": "ngram"}),
        ({"model": "[ngram]", "method": None}, {"speculation": "ngram"}),
        ({"method": "ngram", "model": "ngram"}, {"speculation": "ngram"}),
        (
            {
                "method": "ngram",
                "num_speculative_tokens": 5,
                "prompt_lookup_min": 2,
                "prompt_lookup_max": 4,
            },
            {"speculation": "ngram", "num_draft_tokens": 5, "ngram_min_match": 2},
        ),
        (
            {"method": "ngram", "prompt_lookup_max": 4},
            {"speculation": "ngram", "ngram_min_match": 4},
        ),
        (
            {"method": "suffix", "num_speculative_tokens": 32},
            {"speculation": "ngram,siblings,history", "num_draft_tokens": 32},
        ),
        (
            {"method": "draft_model", "model": "org/small", "num_speculative_tokens": 4},
            {
                "speculation": "draft_model",
                "speculative_model": "org/small",
                "num_draft_tokens": 4,
            },
        ),
        (
            {"model": "org/small"},
            {"speculation": "draft_model", "speculative_model": "org/small"},
        ),
        (
            {"method": "mtp", "num_speculative_tokens": 1},
            {"speculation": "mtp", "num_draft_tokens": 1},
        ),
        (
            {"method": "eagle3", "model": "org/head"},
            {"speculation": "eagle3", "speculative_model": "org/head"},
        ),
    ],
)
def test_a_config_stands_for_options(config: Any, expected: dict[str, Any]) -> None:
    given = EngineOptions.from_mapping({"speculative_config": config, "block_size": 32})
    assert given == EngineOptions.from_mapping({**expected, "block_size": 32})


@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_other_heads_are_refused_by_name(method: str) -> None:
    with pytest.raises(
        ConfigurationError,
        match=f"asks for '{method}', but this version drafts only with the heads 'mtp'",
    ):
        EngineOptions.from_mapping({"speculative_config": {"method": method}})
    given = {"method": method, "model": "org/head", "num_speculative_tokens": 3}
    with pytest.raises(ConfigurationError, match="the option speculation names a proposer"):
        EngineOptions.from_mapping({"speculative_config": given})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("ngram", "speculative_config is 'ngram', but must be a mapping"),
        ({}, "names no method, but must have one of ngram, suffix, draft_mod"),
        ({"method": "guess"}, "has the method 'guess', but must have one of"),
        ({"method": ["ngram"]}, "has the method .'ngram'., but must have one of"),
        ({"method": "draft_model"}, "has the method 'draft_model', but no model; name one"),
        ({"method": "eagle3"}, "has the method 'eagle3', but no model; name one as 'model'"),
        ({"method": "mtp", "model": "org/head"}, "has 'model', which is not supported"),
        ({"method": "ngram", "model": "org/small"}, "has 'model', which is not supported"),
        ({"method": "ngram", "promt_lookup_min": 2}, "did you mean prompt_lookup_min"),
        ({"method": "ngram", "disable_by_batch_size": 4}, "has 'disable_by_batch_size', which is"),
        ({"method": "ngram", 3: 4}, "has 3, which is not supported"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 9}, "suffix_decoding_max_tree_d"),
        ({"method": "ngram", "prompt_lookup_min": 0}, "has prompt_lookup_min 0, but it must be"),
        ({"method": "ngram", "prompt_lookup_min": True}, "has prompt_lookup_min True, but it must"),
        ({"method": "ngram", "num_speculative_tokens": 2.5}, "has num_speculative_tokens 2.5"),
        (
            {"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4},
            "has prompt_lookup_max 4, below prompt_lookup_min, 5",
        ),
    ],
)
def test_all_that_is_not_obeyed_is_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        EngineOptions.from_mapping({"speculative_config": config})


def test_an_option_is_given_once() -> None:
    config = {"method": "ngram", "num_speculative_tokens": 5}
    same = EngineOptions.from_mapping({"speculative_config": config, "num_draft_tokens": 5})
    assert same.num_draft_tokens == 5
    with pytest.raises(ConfigurationError, match=r"says num_draft_tokens 5, but .* is 4; give it"):
        EngineOptions.from_mapping({"speculative_config": config, "num_draft_tokens": 4})


def test_engine_args_take_it() -> None:
    args = EngineArgs(speculative_config={"method": "ngram"})
    assert args.speculation == "ngram"
    args.speculative_config = {"method": "ngram", "num_speculative_tokens": 3}
    assert (args.speculation, args.num_draft_tokens) == ("ngram", 3)
