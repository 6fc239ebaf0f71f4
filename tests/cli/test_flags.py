"""The flags that commands share, and what of them reaches the engine and the sampling."""

import pytest

from quire.cli.flags import ENGINE_GROUPS, engine_options, option_names, sampling_options
from quire.cli.parser import build_parser
from quire.core.sampling_params import SamplingParams
from quire.options.engine_options import EngineOptions

ENGINE_OPTIONS = option_names(EngineOptions, ENGINE_GROUPS)


def test_only_what_was_given_reaches_the_engine() -> None:
    assert engine_options(build_parser().parse_args(["chat"])) == {}
    words = (
        "serve org/model --max-model-len 512 --kv-cache-memory 2GiB --no-enable-prefix-caching"
        " --block-size 32 --seed 3 --max-logprobs 5 --gpu-memory-utilization 0.5 --dtype half"
    )
    args = build_parser().parse_args(words.split())
    assert engine_options(args) == {
        "model": "org/model",
        "max_model_len": 512,
        "kv_cache_memory": "2GiB",
        "enable_prefix_caching": False,
        "block_size": 32,
        "max_logprobs": 5,
        "gpu_memory_utilization": 0.5,
        "dtype": "half",
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
