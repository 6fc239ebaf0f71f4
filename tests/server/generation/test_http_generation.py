"""One call's requests: what is given when, what ends a call, and that nothing is left behind."""

import asyncio
import math
import threading
import time
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
from tests.server.working import StepClock
from tests.virtual_loop import run_virtually

from quire.core.request import FinishReason, Request, SequenceOutput
from quire.core.sampling_params import DecodingParams, ModelLimits, SamplingParams
from quire.core.step import TokenLogprobs
from quire.engine_client.inputs import RequestOptions
from quire.engine_client.outputs import RequestAssembler
from quire.errors import (
    DeadlineExceededError,
    EngineDeadError,
    InvalidRequestError,
    NoTokenLeftError,
    OverloadedError,
    ServerDrainingError,
    StepFailedError,
    TenantBusyError,
)
from quire.server.generation import http_generation as generation_module
from quire.server.generation.call_body import Params
from quire.server.generation.http_generation import (
    Caller,
    HTTPGeneration,
    Prompts,
    options_of,
    prepare,
)
from quire.server.http import long_work
from quire.server.http.long_work import WorkPieces
from quire.server.service import Service
from quire.server.telemetry.monitor import Monitor
from quire.server.tenants.tenants import Tenant, TenantBook

ALICE = Tenant("alice")


class FakeStream:
    """Satisfies what a generation needs of a RequestStream; the test pushes the outputs."""

    def __init__(self, requests, sink):
        self.open = {(request.request_id, b) for request in requests for b in range(request.n)}
        self.aborted = []
        self.num_closes = 0
        self.sink = sink

    def push(self, output):
        key = (output.request_id, output.branch_index)
        if key not in self.open:
            return
        if output.finish_reason is not None:
            self.open.discard(key)
        self.sink.on_output(output)
        if not self.open:
            self.end(None)

    def abort_branch(self, request_id, branch_index):
        self.aborted.append((request_id, branch_index))
        self.open.discard((request_id, branch_index))

    def close(self):
        self.num_closes += 1
        self.open.clear()

    def end(self, error):
        sink, self.sink = self.sink, None
        if sink is not None:
            sink.on_end(error)


LIMITS = ModelLimits(vocab_size=4096, max_model_len=512, end_token_ids=(0,))
NEVER_ASLEEP = SimpleNamespace(awake_since_s=-math.inf)


@dataclass
class FakeEngine:
    stream: FakeStream | None = None
    refusal: Exception | None = None
    requests: list = field(default_factory=list)
    limits: ModelLimits = LIMITS
    room: int = 1000
    sleeping: SimpleNamespace = field(default_factory=lambda: NEVER_ASLEEP)

    def check_room(self, num_generations):
        if num_generations > self.room:
            raise OverloadedError("no room")

    def generate(self, requests, sink):
        if self.refusal is not None:
            raise self.refusal
        self.requests += requests
        self.stream = FakeStream(requests, sink)
        return self.stream


class FakeHTTP:
    def __init__(self, **state):
        self.scope = {"state": state}


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def service(engine, tokenizer):
    return Service(engine, tokenizer, None, "model", monitor=Monitor(), tenants=TenantBook())


def make(service, tokenizer, *, params=None, num_prompts=1, deadline_s=None, arrival_s=None):
    """A generation of prompts with ids c-0, c-1, ..."""
    params = params or SamplingParams()
    requests = [
        Request(
            f"c-{index}",
            tokenizer.encode("print"),
            DecodingParams(max_tokens=99),
            params.n,
            deadline_s=deadline_s,
        )
        for index in range(num_prompts)
    ]
    arrival_s = time.monotonic() if arrival_s is None else arrival_s
    caller = Caller(ALICE, "http-1", "cmpl-c", arrival_s)
    assemblers = [
        RequestAssembler(request, params, tokenizer, "print", deltas_only=True)
        for request in requests
    ]
    return HTTPGeneration(service, assemblers, params, caller)


def caller(call_id):
    return Caller.of(FakeHTTP(), call_id, "text_completion")


def test_calls_of_a_batch_can_t_go_before_live_ones():
    body = SimpleNamespace(priority=-(1 << 20), cache_salt=None, deadline_s=None)
    http = FakeHTTP(added_priority=1 << 20)
    http.state = SimpleNamespace(tenant=ALICE)
    limits = SimpleNamespace(reads_priority=True)
    service = SimpleNamespace(default_deadline_s=None, engine=SimpleNamespace(limits=limits))
    assert options_of(http, body, service).priority == 0
    body.priority -= 1
    with pytest.raises(InvalidRequestError, match="must be at least -1048576") as caught:
        options_of(http, body, service)
    assert caught.value.param == "priority"
    http.scope["state"].pop("added_priority")
    assert options_of(http, body, service).priority == -(1 << 20) - 1


def token(tokenizer, text, branch=0, finish=None, request_id="c-0", **fields):
    return SequenceOutput(request_id, branch, tuple(tokenizer.encode(text)), 0, finish, **fields)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 10))


def test_waiting_outputs_are_given_in_one_batch_and_merged_by_choice(service, engine, tokenizer):
    async def play():
        params, batches = SamplingParams(n=2), []
        async with make(service, tokenizer, params=params, num_prompts=2) as generation:
            push = engine.stream.push
            push(token(tokenizer, "a", 1))
            push(token(tokenizer, "x", 0, request_id="c-1"))
            push(token(tokenizer, " b", 1))
            batches.append(await anext(generation.batches()))
            push(token(tokenizer, " c", 1, FinishReason.LENGTH))
            batches.append(await anext(generation.batches()))
        return batches

    first, second = run(play())
    assert [(choice, delta.text) for choice, delta in first] == [(1, "a b"), (2, "x")]
    assert [(choice, delta.text, delta.finish_reason) for choice, delta in second] == [
        (1, " c", "length")
    ]


def test_batches_end_when_every_choice_has_ended(service, engine, tokenizer):
    async def play():
        async with make(service, tokenizer, params=SamplingParams(n=2)) as generation:
            loop = asyncio.get_running_loop()
            for delay, branch in enumerate((0, 1)):
                output = token(tokenizer, "a", branch, FinishReason.LENGTH)
                loop.call_later(0.01 * delay, engine.stream.push, output)
            return [batch async for batch in generation.batches()], generation.results

    batches, results = run(play())
    assert [choice for batch in batches for choice, _ in batch] == [0, 1]
    assert [len(choice.token_ids) for choice in results[0].outputs] == [1, 1]


def test_the_rest_comes_once_with_each_choice_in_order_and_one_wake(service, engine, tokenizer):
    async def play():
        async with make(service, tokenizer, params=SamplingParams(n=2)) as generation:
            task = asyncio.ensure_future(generation.rest())
            await asyncio.sleep(0)
            for text in ("a", " b", " c"):
                engine.stream.push(token(tokenizer, text, 1))
                await asyncio.sleep(0)
                assert not generation._waiter.done()
            engine.stream.push(token(tokenizer, "z", 1, FinishReason.LENGTH))
            engine.stream.push(token(tokenizer, "d", 0, FinishReason.LENGTH))
            return await task

    assert [(choice, delta.text) for choice, delta in run(play())] == [(0, "d"), (1, "a b cz")]


def test_a_stop_string_ends_its_branch_in_the_engine_read_or_not(service, engine, tokenizer):
    async def play():
        async with make(service, tokenizer, params=SamplingParams(stop=["!"])) as generation:
            engine.stream.push(token(tokenizer, "a !"))
            aborted = list(engine.stream.aborted)  # nothing was read yet
            engine.stream.end(None)
            return aborted, await generation.rest()

    aborted, ((_, delta),) = run(play())
    assert aborted == [("c-0", 0)]
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("a ", "stop", "!")
    assert service.monitor.finished == {("stop", "alice"): 1}


def test_each_waiting_choice_is_assembled_when_its_turn_comes(
    service, engine, tokenizer, monkeypatch
):
    """A thousand long ones at once would hold up all other calls."""
    taken = []
    take_delta = RequestAssembler.pop_delta

    def note_and_take(assembler, branch):
        taken.append(branch)
        return take_delta(assembler, branch)

    monkeypatch.setattr(RequestAssembler, "pop_delta", note_and_take)

    async def play():
        async with make(service, tokenizer, params=SamplingParams(n=3)) as generation:
            for branch in (2, 0, 1):
                engine.stream.push(token(tokenizer, "a", branch, FinishReason.LENGTH))
            return await generation.rest()

    for choice, delta in run(play()):
        assert delta.text == "a"
        assert taken == list(range(choice + 1))
    assert taken == [0, 1, 2]


def test_outputs_are_given_before_the_error_that_ended_them(service, engine, tokenizer):
    async def play():
        async with make(service, tokenizer) as generation:
            engine.stream.push(token(tokenizer, "a"))
            engine.stream.end(EngineDeadError("gone"))
            batches = generation.batches()
            assert [delta.text for _, delta in await anext(batches)] == ["a"]
            await anext(batches)

    with pytest.raises(EngineDeadError, match="gone"):
        run(play())
    assert service.monitor.finished == {("error", "alice"): 1}
    assert service.tenants.num_open() == {"alice": 0}


@pytest.mark.parametrize("whole", [False, True])
def test_a_failed_step_ends_the_call_and_frees_the_other_branches(
    service, engine, tokenizer, whole
):
    async def play():
        async with make(service, tokenizer, params=SamplingParams(n=2)) as generation:
            engine.stream.push(
                SequenceOutput("c-0", 0, (), 0, FinishReason.ERROR, error="NaN in layer 3")
            )
            assert engine.stream.num_closes == 1  # before the answer is read
            if whole:
                await generation.rest()
            await anext(generation.batches())

    with pytest.raises(StepFailedError, match="NaN in layer 3"):
        run(play())


def failed(tokenizer, text):
    """An error behind accepted drafts, each with a log-probability."""
    ids = tokenizer.encode(text)
    entries = tuple(TokenLogprobs(token_id, -0.5, 1, (), ()) for token_id in ids)
    return token(tokenizer, text, finish=FinishReason.ERROR, logprobs=entries, error="NaN")


@pytest.mark.parametrize("is_read_between", [False, True])
def test_tokens_of_the_failed_step_are_given_before_its_error(
    service, engine, tokenizer, is_read_between
):
    found = []

    async def play():
        async with make(service, tokenizer, params=SamplingParams(logprobs=0)) as generation:
            first = token(tokenizer, "a", logprobs=failed(tokenizer, "a").logprobs)
            engine.stream.push(first)
            if is_read_between:
                found.extend(await anext(generation.batches()))
            engine.stream.push(failed(tokenizer, " b c"))
            async for batch in generation.batches():
                found.extend(batch)

    with pytest.raises(StepFailedError, match="NaN"):
        run(play())
    assert "".join(delta.text for _, delta in found) == "a b c"
    ids = [token_id for _, delta in found for token_id in delta.token_ids]
    assert ids == [*tokenizer.encode("a"), *tokenizer.encode(" b c")]
    assert [entry.token_id for _, delta in found for entry in delta.logprobs] == ids
    assert [delta.finish_reason for _, delta in found] == [None] * (1 + is_read_between)


def test_a_whole_answer_whose_step_failed_is_only_the_error(service, engine, tokenizer):
    async def play():
        params = SamplingParams(logprobs=0)
        async with make(service, tokenizer, params=params) as generation:
            engine.stream.push(failed(tokenizer, "a"))
            await generation.rest()

    with pytest.raises(StepFailedError, match="NaN"):
        run(play())


def test_a_stop_string_before_an_error_ends_the_answer(service, engine, tokenizer):
    async def play():
        params = SamplingParams(stop=["!"], logprobs=0)
        async with make(service, tokenizer, params=params) as generation:
            engine.stream.push(failed(tokenizer, "a ! b"))
            return await generation.rest()

    ((_, delta),) = run(play())
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("a ", "stop", "!")


def test_options_that_leave_no_token_are_the_callers_to_change(service, engine, tokenizer):
    async def play():
        async with make(service, tokenizer) as generation:
            failed = SequenceOutput(
                "c-0", 0, (), 0, FinishReason.ERROR, error=NoTokenLeftError.TEXT
            )
            engine.stream.push(failed)
            await generation.rest()

    with pytest.raises(NoTokenLeftError, match="allowed_token_ids") as raised:
        run(play())
    assert raised.value.http_status == 422


def test_a_fault_in_one_calls_text_is_raised_there_and_not_in_the_connection(
    service, engine, tokenizer
):
    async def play():
        async with make(service, tokenizer) as generation:
            broken = SequenceOutput("c-0", 7, (1,))  # there is no branch 7
            engine.stream.sink.on_output(broken)
            engine.stream.sink.on_output(token(tokenizer, "a"))  # too late: it has failed
            await anext(generation.batches())

    with pytest.raises(IndexError):
        run(play())


def test_leaving_closes_everything_whatever_the_reason(service, engine, tokenizer):
    class LeavingError(Exception):
        pass

    async def play():
        async with make(service, tokenizer, deadline_s=60.0):
            raise LeavingError

    with pytest.raises(LeavingError):
        run(play())
    assert engine.stream.num_closes == 1
    assert service.tenants.num_open() == {"alice": 0}
    assert service.monitor.num_open_generations == 0


def test_a_client_that_leaves_while_it_waits_counts_as_one_that_left(service, engine, tokenizer):
    async def read():
        async with make(service, tokenizer) as generation:
            await generation.rest()

    async def play():
        task = asyncio.ensure_future(read())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(play())
    assert engine.stream.num_closes == 1
    assert service.monitor.finished == {("disconnect", "alice"): 1}


def test_a_tenant_at_its_bound_is_refused_and_a_refusal_of_the_engine_gives_the_place_back(
    service, engine, tokenizer
):
    book = TenantBook(max_requests=1)
    service = replace(service, tenants=book)

    async def play():
        async with make(service, tokenizer):
            with pytest.raises(TenantBusyError):
                await make(service, tokenizer).__aenter__()
        engine.refusal = OverloadedError("the queue is full")
        with pytest.raises(OverloadedError, match="queue"):
            await make(service, tokenizer).__aenter__()

    run(play())
    assert book.num_open() == {"alice": 0}
    assert len(engine.requests) == 1  # the refused ones never reached the engine
    assert service.monitor.num_open_generations == 0


def test_generated_tokens_are_counted_as_they_come(service, engine, tokenizer):
    book = TenantBook(max_tokens_per_minute=1000, clock=lambda: 0.0)
    service = replace(service, tenants=book)

    async def play():
        async with make(service, tokenizer):
            before = book._accounts["alice"].level
            engine.stream.push(token(tokenizer, "a"))
            return before - book._accounts["alice"].level

    assert run(play()) == len(tokenizer.encode("a"))


def test_at_its_deadline_a_call_ends_in_the_engine_and_then_for_its_reader(
    service, engine, tokenizer
):
    async def play():
        async with make(service, tokenizer, deadline_s=60.0) as generation:
            engine.stream.push(token(tokenizer, "a"))
            batches = generation.batches()
            await anext(batches)
            await anext(batches)

    with pytest.raises(DeadlineExceededError, match=r"60 s after arrival, with \d+ tokens"):
        run_virtually(play())
    assert engine.stream.num_closes == 2  # at the deadline, and on leaving
    assert service.monitor.finished == {("deadline", "alice"): 1}


def test_a_deadline_counts_from_the_arrival(service, engine, tokenizer):
    late = make(service, tokenizer, deadline_s=5.0, arrival_s=time.monotonic() - 6.0)
    with pytest.raises(DeadlineExceededError):
        run(late.__aenter__())
    assert engine.requests == []
    assert service.tenants.num_open() == {}


def test_an_answer_within_its_deadline_is_not_touched(service, engine, tokenizer):
    async def play():
        async with make(service, tokenizer, deadline_s=60.0) as generation:
            engine.stream.push(token(tokenizer, "a", finish=FinishReason.LENGTH))
            await asyncio.sleep(90.0)  # the timer fires: nothing is left to end
            assert len(list(await generation.rest())) == 1

    run_virtually(play())


def test_while_the_server_ends_nothing_is_taken(service):
    service.drain.begin()
    with pytest.raises(ServerDrainingError):
        run(
            prepare(
                service,
                caller("cmpl-c"),
                Prompts(["a"]),
                Params(SamplingParams()),
                RequestOptions(),
            )
        )


def test_calls_without_room_are_refused_before_any_work(service, engine, monkeypatch):
    def never(*_):
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(generation_module, "_tokenize", never)
    engine.room = 5
    with pytest.raises(OverloadedError):
        run(
            prepare(
                service,
                caller("c"),
                Prompts(["a"] * 2),
                Params(SamplingParams(n=3)),
                RequestOptions(),
            )
        )


def test_requests_are_made_prompt_by_prompt_while_others_go_on(service, engine):
    service = replace(service, work=WorkPieces(StepClock()))

    async def play():
        prompts = [[5 + index] for index in range(100)]
        making = asyncio.ensure_future(
            prepare(
                service, caller("c"), Prompts(prompts), Params(SamplingParams()), RequestOptions()
            )
        )
        num_turns = 0
        while not making.done():
            num_turns += 1
            await asyncio.sleep(0)
        return num_turns, await making

    num_turns, generation = run(play())
    assert [request.prompt_token_ids for request in generation.requests] == [
        [5 + at] for at in range(100)
    ]
    assert num_turns > 10


def test_a_caller_is_who_the_middlewares_found():
    found = Caller.of(FakeHTTP(tenant=ALICE, request_id="q", arrival_s=3.0), "chatcmpl-c", "chat")
    assert found == Caller(ALICE, "q", "chatcmpl-c", 3.0, "chat")
    assert found.operation == "chat"
    unnamed = Caller.of(FakeHTTP(), "cmpl-c", "text_completion")
    assert (unnamed.tenant.name, unnamed.request_id) == ("", "")
    assert unnamed.operation == "text_completion"


@pytest.mark.parametrize(
    ("prompts", "bad_words", "in_thread"),
    [
        (["123456789"], None, False),
        (["1234567890"], None, True),
        (["12345", "67890"], None, True),
        (["12345", [1, 2, 3, 4, 5]], None, False),  # token ids are there already
        (["12345"], ["a"], False),
        (["12345"], ["ab"], True),  # each is encoded four times
    ],
)
def test_long_texts_are_tokenized_in_a_thread(monkeypatch, service, prompts, bad_words, in_thread):
    threads = []

    def refuse(*_):
        threads.append(threading.current_thread())
        raise InvalidRequestError("seen")

    monkeypatch.setattr(long_work, "LONG_TEXT_CHARACTERS", 10)
    monkeypatch.setattr(generation_module, "_tokenize", refuse)
    params = SamplingParams(bad_words=bad_words)
    with pytest.raises(InvalidRequestError, match="seen"):
        asyncio.run(
            prepare(service, caller("call"), Prompts(prompts), Params(params), RequestOptions())
        )
    assert (threads != [threading.current_thread()]) == in_thread
