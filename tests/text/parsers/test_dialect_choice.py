"""Which dialect a model speaks: by words of its chat template, or by name."""

import tomllib
from pathlib import Path

import pytest
from tests.registering import restored

from quire.errors import ConfigurationError
from quire.text.parsers.dialect import Dialect
from quire.text.parsers.dialect_choice import (
    DIALECTS,
    dialect_names,
    find_dialect,
)

TEMPLATES: dict[str, str] = tomllib.loads(
    (Path(__file__).parent / "templates.toml").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_a_template_tells_its_dialect(name: str) -> None:
    assert find_dialect(TEMPLATES[name]).name == name


def test_no_template_is_the_generic_dialect() -> None:
    assert find_dialect(None).name == "json"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hermes", "hermes"),
        ("qwen3_xml", "qwen3_coder"),
        ("llama3_json", "llama3"),
        ("deepseek_v31", "deepseek_v31"),
        ("glm45", "glm"),
        ("openai", "harmony"),
        ("phi4_mini_json", "phi4"),
        ("llama4_pythonic", "pythonic"),
    ],
)
def test_names_of_other_engines_are_understood(name: str, expected: str) -> None:
    assert find_dialect(TEMPLATES["mistral"], name).name == expected
    assert name in dialect_names()


def test_reasoning_may_be_of_another_dialect() -> None:
    dialect = find_dialect(TEMPLATES["hermes"], None, "mistral")
    assert dialect.name == "hermes"
    assert dialect.reasoning is not None and dialect.reasoning.begin == ("[THINK]",)
    assert "[THINK]" in dialect.special_tokens
    assert find_dialect(None, "openai", "openai_gptoss") == DIALECTS.get("harmony")
    with pytest.raises(ConfigurationError, match="can't be combined"):
        find_dialect(None, "hermes", "openai_gptoss")


@pytest.mark.parametrize(
    ("arguments", "suggested"),
    [((None, "hermess"), "hermes"), ((None, None, "deepseek_r2"), "deepseek_r1")],
)
def test_an_unknown_name_is_refused_with_the_nearest(
    arguments: tuple[str | None, ...], suggested: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"did you mean {suggested}"):
        find_dialect(*arguments)


def test_names_are_of_one_dialect_each() -> None:
    for aliases in (
        [name for _, each in DIALECTS.items() for name in (each.name, *each.aliases)],
        [name for _, each in DIALECTS.items() for name in each.reasoning_aliases],
    ):
        assert len(aliases) == len(set(aliases))
    assert {"qwen3", "deepseek_r1", "mistral", "granite"} <= set(dialect_names(for_reasoning=True))


def test_a_dialect_from_outside_is_found_by_name_and_by_template() -> None:
    with restored(DIALECTS):
        arrows = Dialect(name="arrows", aliases=("arrow",), template_words=(("->>->>->>",),))
        DIALECTS.register("arrows", arrows)
        assert find_dialect(None, "arrow") is arrows
        assert find_dialect("{{ '->>->>->>' }}") is arrows


def test_two_dialects_of_one_name_are_refused() -> None:
    with restored(DIALECTS):
        DIALECTS.register("arrows", Dialect(name="arrows", aliases=("qwen3_xml",)))
        with pytest.raises(ConfigurationError, match="both have the name 'qwen3_xml'; give one"):
            find_dialect(None, "hermes")
