"""The registry of recurrent backends: what is chosen, and what is refused by name."""

from collections.abc import Iterator

import pytest
from tests.registering import restored

from quire.errors import ConfigurationError
from quire.recurrence.backends import BACKENDS, RecurrentEntry, select
from quire.recurrence.state_backend import StateBatch

CPU = frozenset({"cpu"})


class First:
    """Binds nothing, plans nothing."""

    serves_graphs = False

    def __init__(self, kernels: object) -> None:
        self.kernels = kernels

    @classmethod
    def create(cls, kernels: object) -> "First":
        return cls(kernels)

    def bind(self, specs: tuple, layers: tuple) -> None:
        raise AssertionError("not bound here")

    def plan(self, batch: StateBatch) -> None:
        raise AssertionError("not planned here")


class Second(First):
    """Another."""


@pytest.fixture(autouse=True)
def empty_registry() -> Iterator[None]:
    with restored(BACKENDS):
        BACKENDS._entries = {}
        yield


def test_the_last_that_was_registered_and_serves_the_device_is_chosen() -> None:
    BACKENDS.register("first", RecurrentEntry(f"{__name__}:First", CPU))
    BACKENDS.register("second", RecurrentEntry(f"{__name__}:Second", CPU, needs_kernels=True))
    BACKENDS.register("third", RecurrentEntry("nowhere:Third", frozenset({"cuda"})))
    kernels = object()
    assert type(select("cpu", None)) is First
    chosen = select("cpu", kernels)
    assert type(chosen) is Second and chosen.kernels is kernels


def test_devices_without_a_backend_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"recurrent.*'cpu'; the backends are: none"):
        select("cpu", None)
    BACKENDS.register("first", RecurrentEntry(f"{__name__}:First", CPU))
    with pytest.raises(ConfigurationError, match="device 'cuda'; the backends are: first"):
        select("cuda", None)
