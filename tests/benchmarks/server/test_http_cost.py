"""The figures of the HTTP cost are what they are called."""

from collections.abc import Callable
from types import ModuleType

import pytest

from quire.hub.model_folder import EMBEDDED_MODEL
from quire.text.tokenizer import Tokenizer

LoadScript = Callable[[str], ModuleType]


@pytest.fixture
def http_cost(load_script: LoadScript) -> ModuleType:
    return load_script("benchmarks.server.http_cost")


def test_share_is_the_servers_part_of_both_processes(http_cost: ModuleType) -> None:
    cost = http_cost.Cost("chat", 1000, 2.0, 50.0, 450.0, 0.0)
    assert cost.share == 0.1
    assert cost.could_carry == 20_000


def test_the_unexplained_rest_of_the_cost_is_printed(http_cost: ModuleType) -> None:
    costs = [
        http_cost.Cost("a", 1000, 2.0, 50.0, 450.0, 0.0),
        http_cost.Cost("b", 1000, 2.0, 80.0, 720.0, 0.5),
    ]
    parts = {"text": 3.0, "JSON": 2.0, "(tokenization, per prompt token)": 1.0}
    text = http_cost.report(costs, parts, 32)
    assert "| a | 500 | 50.0 | 450 | 10.0% | 20,000 |" in text
    assert "| b (loud) | 500 | 80.0 | 720 | 10.0% | 12,500 |" in text
    assert "| event loop, HTTP, sockets | 45.0 |" in text


def test_every_part_is_measured(http_cost: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def once(action: Callable[[], object], num_per_call: int, num_calls: int = 1) -> float:
        calls.append(action())
        return 1.0 / num_per_call

    monkeypatch.setattr(http_cost, "time_us", once)
    parts = http_cost.parts_us(Tokenizer.from_folder(EMBEDDED_MODEL), 4)
    assert parts["message from the engine"] == 0.25
    message, _, event, tokens = calls
    assert len(message.outputs) == 4
    assert event.startswith(b"data: {") and b'" file"' in event
    assert len(tokens) > 8
    assert set(http_cost.FORMS) >= {"completions, streamed", "chat, streamed"}


def test_a_time_is_per_item_of_a_call(http_cost: ModuleType) -> None:
    def work() -> int:
        return sum(range(2000))

    one, ten = http_cost.time_us(work, 1, 50), http_cost.time_us(work, 10, 50)
    assert 0 < ten < one
