"""What quire says that it does not serve is true, and what it names instead is there."""

import re
from collections.abc import Callable, Iterator

import pytest

from quire.cli.flags import engine_options
from quire.cli.parser import build_parser
from quire.compat import refusals
from quire.compat.flags import FAMILIES, FIXED, REFUSED
from quire.compat.llm_options import COMPAT_OPTIONS
from quire.compat.methods import COMPAT_METHODS
from quire.compat.vllm_names import ADVICE
from quire.engine_client.results import _ADVICE
from quire.errors import ConfigurationError
from quire.models.architectures import MODELS
from quire.options.engine_options import EngineOptions


def _sentences() -> Iterator[str]:
    yield from (text for name, text in vars(refusals).items() if name.isupper())
    yield from (why for _, why in (*COMPAT_OPTIONS.values(), *FIXED.values()))
    for table in (COMPAT_METHODS, REFUSED, FAMILIES, ADVICE, _ADVICE):
        yield from table.values()


SENTENCES = sorted(set(_sentences()))


def _no_model_encodes_and_decodes() -> bool:
    return not any("ConditionalGeneration" in name for name in MODELS)


def _adapters_need_one_rank() -> bool:
    with pytest.raises(ConfigurationError, match="enable_lora"):
        EngineOptions(enable_lora=True, tensor_parallel_size=2)
    return True


def _other_heads_draft_nothing() -> bool:
    with pytest.raises(ConfigurationError, match="drafts only with the heads"):
        EngineOptions.from_mapping({"speculative_config": {"method": "eagle"}})
    return True


DENIALS: dict[str, Callable[[], bool]] = {
    "adapters are served by one rank in this version": _adapters_need_one_rank,
    refusals.DRAFT_HEADS: _other_heads_draft_nothing,
    "no model here has an encoder beside its decoder": _no_model_encodes_and_decodes,
}
"""Sentences that deny a whole ability -> whether quire still lacks it."""
_DENYING = re.compile(r"no model here|models? here|this version|one (engine|machine) computes")


def test_whole_abilities_are_denied_only_where_they_are_lacking() -> None:
    denials = {sentence for sentence in SENTENCES if _DENYING.search(sentence)}
    assert denials == DENIALS.keys()
    assert all(is_lacking() for is_lacking in DENIALS.values())


@pytest.mark.parametrize("feature", ["expert", "recurrent", "kv_cache_dtype", "--replicas"])
def test_refusals_do_not_deny_served_features(feature: str) -> None:
    """Mixtures, recurrent states, formats of K and V, and fleets were once denied though served."""
    about = [sentence for sentence in SENTENCES if feature in sentence]
    assert about
    assert not [text for text in about if re.search(r"^(there is )?no (model|engine) ", text)]


def test_the_flags_that_are_named_exist() -> None:
    (commands,) = [action for action in build_parser()._actions if action.dest == "command"]
    assert isinstance(commands.choices, dict)
    flags = set(commands.choices["serve"]._option_string_actions)
    named = set(re.findall(r"--[a-z][a-z-]*[a-z]", " ".join(SENTENCES))) - {"--help"}
    assert named
    assert named <= flags


def test_the_options_that_are_named_exist() -> None:
    """Words with an underscore that are neither methods nor fields of other things."""
    options = {*EngineOptions.__dataclass_fields__, *vars(refusals)}
    named = {
        word
        for _, why in COMPAT_OPTIONS.values()
        for word in re.findall(r"\b[a-z]+_[a-z_]+\b", why)
    }
    elsewhere = {
        "get_metrics",
        "get_default_sampling_params",
        "generation_config",
        "preprocessor_config",
        "rope_parameters",
        "structured_outputs",
    }
    assert named - elsewhere <= options, named - elsewhere - options


@pytest.mark.parametrize(
    "words", ["--enable-expert-parallel", "--enable-eplb", "--all2all-backend=x", "--expert-x=2"]
)
def test_expert_parallelism_is_refused_with_what_is_done_instead(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", *words.split("=")])
    assert "each rank computes its share of every expert" in capsys.readouterr().err
    assert engine_options(build_parser().parse_args(["serve", "--no-enable-expert-parallel"])) == {}
