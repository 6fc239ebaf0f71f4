"""Registries: names, their order, what is refused, and what is imported late."""

import sys
import types

import pytest

from quire.errors import ConfigurationError
from quire.registry import Registry, imported


class Fast:
    def __init__(self, width: int = 1) -> None:
        self.width = width


class Slow(Fast):
    pass


def register_from(module: str, registry: Registry, name: str, value: object) -> None:
    """As a module of that name would do it."""
    exec("registry.register(name, value)", {"__name__": module, **locals()})


@pytest.fixture
def registry() -> Registry:
    return Registry("engine", {"fast": Fast, "slow": f"{__name__}:Slow"})


def test_names_are_in_their_order_and_found(registry: Registry) -> None:
    register_from("outside", registry, "abacus", Fast)
    assert [*registry] == ["fast", "slow", "abacus"] and len(registry) == 3
    assert "slow" in registry and "sloe" not in registry
    assert registry.get("fast") is Fast
    assert dict(registry.items()) == {"fast": Fast, "slow": Slow, "abacus": Fast}


def test_an_unknown_name_is_refused_with_all_names(registry: Registry) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"^engine is 'sloe', but must be one of fast, slow; did you mean slow\?$",
    ):
        registry.get("sloe")


def test_a_name_belongs_to_one_module(registry: Registry) -> None:
    register_from("one", registry, "abacus", Fast)
    register_from("one", registry, "abacus", Slow)  # as after a reload
    assert registry.get("abacus") is Slow
    with pytest.raises(ConfigurationError) as caught:
        register_from("two", registry, "abacus", Fast)
    assert str(caught.value) == (
        "engine 'abacus' is registered by one and by two; give one of them another name"
    )
    with pytest.raises(ConfigurationError, match="'fast' is registered by quire and by two"):
        register_from("two", registry, "fast", Fast)
    assert registry.get("fast") is Fast and registry.get("abacus") is Slow


def test_a_reserved_name_is_refused() -> None:
    registry: Registry = Registry("engine", {"fast": Fast}, {"wheel": "a part"})
    with pytest.raises(ConfigurationError) as caught:
        register_from("outside", registry, "wheel", Slow)
    assert str(caught.value) == (
        "engine 'wheel' is registered by outside, but a part has this name; give it another name"
    )
    assert [*registry] == ["fast"]


def test_quires_own_may_be_read_late_and_come_first() -> None:
    num_calls = 0

    def own() -> dict[str, type[Fast]]:
        nonlocal num_calls
        num_calls += 1
        return {"fast": Fast}

    late: Registry = Registry("engine", own)
    register_from("outside", late, "abacus", Slow)
    assert num_calls == 0
    assert [*late] == [*late] == ["fast", "abacus"] and num_calls == 1
    clashing: Registry = Registry("engine", own)
    register_from("outside", clashing, "fast", Slow)
    with pytest.raises(ConfigurationError, match="'fast' is registered by quire and by outside"):
        clashing.get("fast")


def test_text_is_imported_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    registry: Registry = Registry("engine", {"late": "made_later:ENGINE", "gone": "made_later:NO"})
    assert [*registry] == ["late", "gone"]
    with pytest.raises(ConfigurationError, match="made_later:ENGINE can't be imported: No module"):
        registry.get("late")
    module = types.ModuleType("made_later")
    module.ENGINE = Fast  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_later", module)
    assert registry.get("late") is Fast and imported("made_later:ENGINE") is Fast
    with pytest.raises(ConfigurationError, match=r"made_later:NO can't be imported: .*attribute"):
        registry.get("gone")


def test_a_factory_takes_its_own_options_and_no_others(registry: Registry) -> None:
    assert registry.make("fast").width == 1
    assert registry.make("slow", {"width": 3}).width == 3
    with pytest.raises(
        ConfigurationError, match=r"^engine 'fast' has no option 'depth'; its options: width$"
    ):
        registry.make("fast", {"depth": 1})
