"""Grammars are compiled a few at a time; tenants take turns, and none fills the queue alone."""

import asyncio
import threading

import pytest

from quire.errors import OverloadedError
from quire.server.generation.grammar_checks import MAX_WAITING, NUM_THREADS, GrammarChecks


class Inputs:
    """Compiles once it is let, and notes in what order."""

    def __init__(self):
        self.go_on = threading.Event()
        self.compiled = []

    def check_grammar(self, grammar):
        self.go_on.wait()
        self.compiled.append(grammar)


@pytest.fixture
def inputs():
    found = Inputs()
    yield found
    found.go_on.set()


async def ask(checks, inputs, *calls):
    """Tasks of calls (tenant, grammar), which have asked in this order."""
    asked = [
        asyncio.ensure_future(checks.grammar_for(inputs, None, grammar, tenant))
        for tenant, grammar in calls
    ]
    await asyncio.sleep(0)
    return asked


def test_tenants_take_turns(inputs):
    async def run():
        checks = GrammarChecks(lambda grammar: None)
        many = [("alice", f"a{at}") for at in range(NUM_THREADS + 6)]
        asked = await ask(checks, inputs, *many, ("bob", "b0"), ("bob", "b1"), ("eve", "e0"))
        inputs.go_on.set()
        assert await asyncio.gather(*asked) == [
            *(grammar for _, grammar in many),
            *("b0", "b1", "e0"),
        ]

    asyncio.run(run())
    # Behind those that were running: one of each tenant after the other, whatever came first.
    rest = inputs.compiled[NUM_THREADS:]
    assert {"b0", "e0"} <= set(rest[: 3 + NUM_THREADS - 1])
    assert len(rest) == 9


def test_a_tenant_leaves_places_to_the_others(inputs):
    async def run():
        checks = GrammarChecks(lambda grammar: None)
        asked = await ask(checks, inputs, *[("alice", "a")] * (MAX_WAITING // 2))
        with pytest.raises(OverloadedError, match="as many as may"):
            await checks.grammar_for(inputs, None, "a", "alice")
        asked += await ask(checks, inputs, *[("bob", "b")] * 9, ("eve", "e"))
        assert not any(task.done() for task in asked)
        for task in asked[: MAX_WAITING // 2]:
            task.cancel()
        await asyncio.sleep(0)
        inputs.go_on.set()
        done = await asyncio.gather(*asked, return_exceptions=True)
        assert done[MAX_WAITING // 2 :] == ["b"] * 9 + ["e"]
        assert await checks.grammar_for(inputs, None, "a", "alice") == "a"
        assert await checks.grammar_for(inputs, None, None, "alice") is None

    asyncio.run(run())
