"""Grammars are made a few at a time; tenants take turns, and none fills the queue alone."""

import asyncio
from collections import Counter

import pytest

from quire.core.structured_outputs import StructuredOutputsParams
from quire.engine_client.grammar_forms import WholeAnswer
from quire.engine_client.inputs import RequestOptions
from quire.engine_client.process.grammar_compilers import WorkerLostError
from quire.errors import InvalidRequestError, OverloadedError, ServerDrainingError
from quire.server.generation.grammar_checks import (
    MAX_WAITING,
    MAX_WORKERS_OF_TENANT,
    NUM_WORKERS,
    GrammarChecks,
)


class Maker:
    """Makes a grammar once it is let, and notes in what order. refuses: all are refused."""

    def __init__(self, *, is_open: bool = False, refuses: bool = False) -> None:
        self.go_on = asyncio.Event()
        if is_open:
            self.go_on.set()
        self.refuses = refuses
        self.begun: list[str] = []
        self.made: list[str] = []
        self.most_at_once = self.num_open = 0

    async def make(self, form: str, origin: str) -> str | None:
        self.begun.append(form)
        self.num_open += 1
        self.most_at_once = max(self.most_at_once, self.num_open)
        try:
            await self.go_on.wait()
        finally:
            self.num_open -= 1
        self.made.append(form)
        if self.refuses:
            raise InvalidRequestError(f"{origin}: not this one", "a field")
        return form


def form(text: str) -> WholeAnswer:
    return WholeAnswer(StructuredOutputsParams(regex=text))


async def ask(checks, *calls):
    """Tasks of calls (tenant, text), which have asked in this order."""
    asked = []
    for tenant, text in calls:
        options = RequestOptions(tenant=tenant)
        asked.append(asyncio.ensure_future(checks.grammar_for(form(text), options)))
        before = checks._num_calls.total()
        while checks._num_calls.total() == before and not asked[-1].done():
            await asyncio.sleep(0)
    return asked


def test_tenants_take_turns_and_none_has_all_workers():
    async def run():
        maker = Maker()
        checks = GrammarChecks(maker)
        many = [("alice", f"a{at}") for at in range(NUM_WORKERS + 6)]
        asked = await ask(checks, *many)
        assert len(maker.begun) == MAX_WORKERS_OF_TENANT
        asked += await ask(checks, ("bob", "b0"), ("bob", "b1"), ("eve", "e0"))
        assert len(maker.begun) == NUM_WORKERS and '"b0"' in maker.begun[-1]
        maker.go_on.set()
        assert len(set(await asyncio.gather(*asked))) == len(many) + 3
        # Behind those that were running: one of each tenant after the other, whatever came first.
        assert any('"e0"' in each for each in maker.begun[NUM_WORKERS : NUM_WORKERS + 3])
        assert any('"b1"' in each for each in maker.begun[NUM_WORKERS : NUM_WORKERS + 4])
        assert maker.most_at_once == NUM_WORKERS
        assert not checks._turns and not checks._num_running and not checks._num_calls

    asyncio.run(run())


def test_a_tenant_leaves_places_to_the_others():
    async def run():
        maker = Maker()
        checks = GrammarChecks(maker)
        asked = await ask(checks, *[("alice", f"a{at}") for at in range(MAX_WAITING // 2)])
        with pytest.raises(OverloadedError, match="the maximum; retry"):
            await checks.grammar_for(form("a"), RequestOptions(tenant="alice"))
        asked += await ask(checks, *[("bob", f"b{at}") for at in range(9)], ("eve", "e"))
        assert not any(task.done() for task in asked)
        for task in asked[: MAX_WAITING // 2]:
            task.cancel()
        await asyncio.sleep(0)
        maker.go_on.set()
        done = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(each, str) for each in done[MAX_WAITING // 2 :])
        assert all(isinstance(each, asyncio.CancelledError) for each in done[: MAX_WAITING // 2])
        assert '"a"' in await checks.grammar_for(form("a"), RequestOptions(tenant="alice"))
        assert not checks._turns and not checks._num_running and not checks._num_calls

    asyncio.run(run())


def test_grammars_are_compiled_once_per_cache_domain():
    """Counted, not timed: for each cache domain once, refusals too."""

    async def run(refuses: bool) -> Counter[str]:
        maker = Maker(is_open=True, refuses=refuses)
        checks = GrammarChecks(maker)
        for _ in range(3):
            for options in (
                RequestOptions(tenant="alice"),
                RequestOptions(tenant="bob"),
                RequestOptions(tenant="bob", cache_salt="salt"),
                RequestOptions(cache_salt="of a key that is not checked"),
            ):
                try:
                    assert "[a-z]" in await checks.grammar_for(form("[a-z]"), options)
                except InvalidRequestError as error:
                    assert refuses and error.param == "a field"
                    assert str(error) == "structured_outputs.regex: not this one"
        return Counter(maker.made)

    for refuses in (False, True):
        assert list(asyncio.run(run(refuses)).values()) == [4]


def test_a_crowd_with_one_form_has_it_made_by_the_first_alone():
    async def run():
        maker = Maker()
        checks = GrammarChecks(maker)
        asked = await ask(checks, *[("alice", "a")] * 20)
        maker.go_on.set()
        assert len(set(await asyncio.gather(*asked))) == 1
        assert len(maker.made) == MAX_WORKERS_OF_TENANT
        assert not checks._turns and not checks._num_running and not checks._num_calls

    asyncio.run(run())


@pytest.mark.parametrize("num_losses", [1, 2])
def test_a_form_whose_worker_was_lost_is_made_again(num_losses):
    class Losing(Maker):
        async def make(self, form: str, origin: str) -> str | None:
            if len(self.begun) < num_losses:
                self.begun.append(form)
                raise WorkerLostError(f"{origin}: it takes too much, or another ended the worker")
            return await super().make(form, origin)

    async def run():
        maker = Losing(is_open=True)
        checks = GrammarChecks(maker)
        if num_losses == 2:
            with pytest.raises(WorkerLostError):
                await checks.grammar_for(form("a"))
        assert '"a"' in await checks.grammar_for(form("a"))
        assert not checks._num_running and not checks._num_calls

    asyncio.run(run())


def test_without_a_form_nothing_is_made_and_without_a_maker_it_is_refused():
    async def run():
        assert await GrammarChecks().grammar_for(None) is None
        with pytest.raises(InvalidRequestError, match="need a tokenizer"):
            await GrammarChecks().grammar_for(form("a"))

    asyncio.run(run())


def test_calls_that_wait_when_the_server_ends_raise_the_reason() -> None:
    async def run() -> None:
        maker = Maker()
        checks = GrammarChecks(maker)
        asked = await ask(checks, *[(f"tenant {index}", f"{index}") for index in range(6)])
        while len(maker.begun) < NUM_WORKERS:
            await asyncio.sleep(0)
        asked[0].cancel()
        checks.end(ServerDrainingError("the server ends", 1.0))
        with pytest.raises(asyncio.CancelledError):
            await asked[0]
        for call in [*asked[1:], checks.grammar_for(form("later"))]:
            with pytest.raises(ServerDrainingError, match="the server ends"):
                await call
        assert maker.num_open == 0 and not maker.made

    asyncio.run(run())
