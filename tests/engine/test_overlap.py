"""The loop with a step planned ahead: what comes when, and that nothing else differs."""

import logging
import socket
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from tests.engine.checkpoints import save_checkpoint
from tests.engine.crowding import preempt_much
from tests.engine.test_engine import GROUPS, LIMITS, MODEL, request, run, tokens
from tests.engine.test_law import make_crowd

from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.request import FinishReason, Request
from quire.core.sampling_params import BeamSearchParams, DecodingParams, SamplingParams
from quire.core.scheduling.invariants import check_idle, check_scheduler
from quire.core.scheduling.options import SchedulerConfig
from quire.core.scheduling.pacing import ConstantPacer
from quire.core.scheduling.scheduler import Scheduler
from quire.core.step import StepPlan, StepResult, TokenMasks
from quire.engine.engine import Engine
from quire.engine_client.messages import AddRequest, Outputs, Shutdown, decode_to_server
from quire.engine_process.engine_loop import Channel, EngineLoop
from quire.errors import InvalidRequestError
from quire.ipc import FrameSplitter, encode
from quire.observability.step_trace import StepTrace, read_step_trace
from quire.offline.llm import LLM
from quire.simulation.fakes.fake_model import FakeModel
from quire.simulation.fakes.fake_runner import FakeRunner, Faults

ENDS_OFTEN = FakeModel(vocab_size=1000, end_rate=0.2)


class WatchedRunner:
    """Notes the order of calls; the laws of the scheduler hold at each."""

    def __init__(self, runner: FakeRunner) -> None:
        self.runner = runner
        self.calls: list[str] = []
        self.scheduler: Scheduler | None = None
        self._step_ids: deque[int] = deque()

    def execute(self, plan: StepPlan) -> None:
        assert self.scheduler is not None
        check_scheduler(self.scheduler)
        self._step_ids.append(plan.step_id)
        self.calls.append(f"execute {plan.step_id}")
        self.runner.execute(plan)

    def sample(self, masks: TokenMasks | None = None) -> None:
        self.calls.append(f"sample {self._step_ids[-1]}")
        self.runner.sample(masks)

    def result(self) -> StepResult:
        self.calls.append(f"result {self._step_ids.popleft()}")
        return self.runner.result()

    def reset(self) -> None:
        self.calls.append("reset")
        self._step_ids.clear()
        self.runner.reset()


def make_engine(
    *,
    num_blocks: int = 40,
    num_seqs: int = 8,
    faults: Faults | None = None,
    model: FakeModel = MODEL,
    clock: Any = lambda: 0.0,
) -> tuple[Engine, WatchedRunner]:
    memory = KVCacheManager(KVCacheConfig(GROUPS, num_blocks, 8, True, b"secret"))
    scheduler = Scheduler(SchedulerConfig(num_seqs, 64), memory)
    runner = WatchedRunner(
        FakeRunner(
            GROUPS,
            num_blocks,
            8,
            max_num_rows=num_seqs,
            max_num_tokens=100,
            model=model,
            faults=faults,
        )
    )
    runner.scheduler = scheduler
    return Engine(scheduler, runner, LIMITS, clock=clock, overlap=True), runner


def check_answer(wanted: Request, outputs: list[Any], branch: int = 0, model: FakeModel = MODEL):
    expected = model.expected_output(wanted, branch, LIMITS.max_model_len)
    assert tokens(outputs) == list(expected.token_ids)
    assert outputs[-1].finish_reason is expected.finish_reason


# ---- the order of things ------------------------------------------------------------------------


def test_the_next_step_is_launched_before_a_result_is_fetched() -> None:
    engine, runner = make_engine()
    engine.add(request("a", max_tokens=3))
    assert engine.step() == [] and engine.has_work()
    assert runner.calls == ["execute 0", "sample 0"]
    (first,) = engine.step()
    assert runner.calls[2:] == ["execute 1", "sample 1", "result 0"]
    (second,) = engine.step()
    assert runner.calls[5:] == ["execute 2", "sample 2", "result 1"]
    (third,) = engine.step()
    assert runner.calls[8:] == ["result 2"], "its end is known by count: no step more"
    assert third.finish_reason is FinishReason.LENGTH and not engine.has_work()
    check_answer(request("a", max_tokens=3), [first, second, third])
    check_idle(engine.scheduler)


def test_a_surplus_token_is_dropped() -> None:
    engine, runner = make_engine(model=FakeModel(end_rate=1.0))
    engine.add(Request("a", [5, 6], DecodingParams(9, end_token_ids=(0,))))
    assert engine.step() == []
    (output,) = engine.step()
    assert (tuple(output.token_ids), output.finish_reason) == ((0,), FinishReason.STOP)
    assert engine.has_work(), "the surplus step still holds its blocks"
    assert engine.stats().num_held_blocks == 1 and engine.sequences("a") == []
    assert engine.step() == [] and not engine.has_work()
    assert runner.calls[-1] == "result 1"
    check_idle(engine.scheduler)
    assert engine.stats().num_generated_tokens == 1


def test_settle_applies_only_results_that_no_call_waits_for() -> None:
    engine, runner = make_engine(model=FakeModel(end_rate=1.0))
    engine.add(Request("a", [5, 6], DecodingParams(9, end_token_ids=(0,))))
    engine.step()
    engine.finish_steps()
    assert "result 0" not in runner.calls, "somebody waits for it"
    engine.step()
    engine.finish_steps()
    check_idle(engine.scheduler)
    engine.finish_steps()
    assert runner.calls[-1] == "result 1"


def test_abort_in_flight() -> None:
    engine, _ = make_engine()
    engine.add(request("a", n=2, max_tokens=30))
    engine.add(request("b", max_tokens=9, start=50))
    engine.step()
    engine.abort("a", 1)
    engine.step()
    engine.abort("a")
    engine.add(request("a", max_tokens=4, start=70))  # the id is free again
    found = run(engine)
    assert set(found) == {("a", 0), ("b", 0)}
    check_answer(request("a", max_tokens=4, start=70), found["a", 0])
    engine.add(request("c", max_tokens=9))
    engine.step()
    engine.abort("c")
    assert engine.has_work()
    assert engine.step() == [] and not engine.has_work()
    check_idle(engine.scheduler)


def test_a_fork_goes_on_from_the_tokens_that_the_client_has() -> None:
    engine, _ = make_engine()
    wanted = request("a", max_tokens=12)
    engine.add(wanted)
    had: list[int] = []
    while len(had) < 4:
        had += [token_id for output in engine.step() for token_id in output.token_ids]
    assert engine.scheduler.running[0].num_pending_tokens == 1, "and one more that is to come"
    index = engine.fork("a", 0)
    found = run(engine)
    assert had + tokens(found["a", 0]) == list(MODEL.expected_output(wanted, 0, 100).token_ids)
    expected = MODEL.expected_output(wanted, index, 100, forked_token_ids=had)
    assert tokens(found["a", index]) == list(expected.token_ids)


def test_a_request_that_comes_while_a_step_runs_is_in_the_next() -> None:
    engine, runner = make_engine()
    engine.add(request("a", max_tokens=8))
    engine.step()
    engine.add(request("b", max_tokens=2, start=60))
    (output,) = engine.step()
    assert output.request_id == "a" and runner.calls[-1] == "result 0"
    assert {output.request_id for output in engine.step()} == {"a", "b"}
    run(engine)


# ---- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "faults",
    [
        Faults(execute_fails_at=frozenset({3})),
        Faults(sample_fails_at=frozenset({3})),
        Faults(execute_fails_at=frozenset({20}), sample_fails_at=frozenset({2})),
    ],
)
def test_a_failed_step_beside_another_changes_no_tokens(faults: Faults) -> None:
    engine, runner = make_engine(faults=faults, num_blocks=14)
    asked = [request("a", n=2), request("b", 20, start=100), request("c", 30, 9, start=300)]
    for wanted in asked:
        engine.add(wanted)
    found = run(engine)
    for wanted in asked:
        for branch in range(wanted.n):
            check_answer(wanted, found[wanted.request_id, branch], branch)
    assert engine.stats().num_failed_steps == runner.calls.count("reset") >= 1


def test_a_request_that_fails_every_step_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    engine, _ = make_engine(faults=Faults(poison_token_id=999))
    good = [request("a", max_tokens=30), request("b", 20, 30, start=100)]
    engine.add(good[0])
    engine.step()
    engine.add(Request("bad", [5, 999, 6], DecodingParams(max_tokens=5)))
    engine.add(good[1])
    with caplog.at_level(logging.ERROR):
        found = run(engine)
    assert found["bad", 0][-1].finish_reason is FinishReason.ERROR
    assert "also when it runs alone" in (found["bad", 0][-1].error or "")
    for wanted in good:
        check_answer(wanted, found[wanted.request_id, 0])


def test_a_row_that_fails_alone_ends_although_it_is_in_the_next_step_too() -> None:
    engine, runner = make_engine(faults=Faults(nan_token_id=999))
    good = request("a", max_tokens=9)
    engine.add(good)
    engine.add(Request("bad", [5, 999], DecodingParams(max_tokens=5)))
    engine.step()
    first = {output.request_id: output for output in engine.step()}
    assert first["bad"].finish_reason is FinishReason.ERROR
    assert first["bad"].error is not None and "NaN" in first["bad"].error
    assert runner.calls.count("reset") == 0
    found = run(engine)  # the surplus step fails for that row again, and nobody is told
    assert set(found) == {("a", 0)}
    check_answer(good, [first["a"], *found["a", 0]])


@pytest.mark.parametrize("method", ["execute", "sample", "result"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, AssertionError])
def test_an_interruption_with_a_step_in_flight_leaves_a_working_engine(
    monkeypatch: pytest.MonkeyPatch, method: str, error: type[BaseException]
) -> None:
    engine, runner = make_engine()
    asked = [request("a"), request("b", 20, start=100)]
    for wanted in asked:
        engine.add(wanted)
    engine.step()
    had = {output.request_id: output for output in engine.step()}

    def interrupt(*_: object) -> None:
        raise error("not the request's fault")

    with monkeypatch.context() as patch:
        patch.setattr(runner, method, interrupt)
        with pytest.raises(error, match="not the request's fault"):
            engine.step()
    assert engine.scheduler.num_steps_in_flight == 0
    found = run(engine)
    for wanted in asked:
        name = wanted.request_id
        check_answer(wanted, [had[name], *found[name, 0]])


def test_a_runner_that_can_not_be_reset_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a device whose context is lost: another process has to go on."""
    engine, runner = make_engine(faults=Faults(sample_fails_at=frozenset({0})))
    engine.add(request("a"))
    engine.step()

    def fail() -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(runner, "reset", fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.step()


# ---- what is told of steps ----------------------------------------------------------------------


class SlowRunner:
    """A device: each step takes 1 s, after the one before it; a launch takes 0.1 s."""

    def __init__(self, runner: FakeRunner) -> None:
        self.runner = runner
        self.now_s = 0.0
        self.ends_s: deque[float] = deque()
        self.free_s = 0.0

    def execute(self, plan: StepPlan) -> None:
        self.now_s += 0.1
        self.free_s = max(self.now_s, self.free_s) + 1.0
        self.ends_s.append(self.free_s)
        self.runner.execute(plan)

    def sample(self, masks: TokenMasks | None = None) -> None:
        self.runner.sample(masks)

    def result(self) -> StepResult:
        self.now_s = max(self.now_s, self.ends_s.popleft())
        return self.runner.result()

    def reset(self) -> None:
        raise AssertionError("nothing fails here")


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_are_timed_from_result_to_result(overlap: bool, tmp_path: Path) -> None:
    seen: list[tuple[int, float]] = []

    class Recorder(ConstantPacer):
        def observe(self, step_id: int, seconds: float) -> None:
            seen.append((step_id, round(seconds, 6)))

    memory = KVCacheManager(KVCacheConfig(GROUPS, 40, 8, True, b"secret"))
    scheduler = Scheduler(SchedulerConfig(8, 64), memory)
    fake = FakeRunner(GROUPS, 40, 8, max_num_rows=8, max_num_tokens=100, model=MODEL)
    device = SlowRunner(fake)
    engine = Engine(scheduler, device, LIMITS, clock=lambda: device.now_s, overlap=overlap)
    scheduler.pacer = Recorder()
    engine.add(request("a", max_tokens=4))
    with StepTrace(tmp_path / "trace") as trace:
        engine.trace = trace
        run(engine)
    first, *others = seen
    assert [step_id for step_id, _ in seen] == [0, 1, 2, 3]
    assert first == (0, 1.1)
    assert {seconds for _, seconds in others} == {1.0 if overlap else 1.1}
    assert device.now_s == pytest.approx(4.1 if overlap else 4.4)
    records = list(read_step_trace(tmp_path / "trace"))
    assert [record.step_id for record in records] == [0, 1, 2, 3]
    assert [round(record.elapsed_s, 6) for record in records] == [seconds for _, seconds in seen]
    assert records[1].wait_s == pytest.approx(0.9 if overlap else 1.0)
    assert sum(record.num_prefill_tokens for record in records) == 10
    assert engine.times.step_s.as_dict()["sum"] == pytest.approx(device.now_s)
    assert engine.times.num_computed_tokens == 13


# ---- behind a socket ----------------------------------------------------------------------------


def test_a_drained_process_ends_with_nothing_in_flight() -> None:
    """The loop neither ends before the surplus step nor spins while nothing can be planned."""
    engine, runner = make_engine(model=FakeModel(end_rate=1.0))
    calls: list[bool] = []
    step = engine.step

    def counted_step(*, launches: bool = True) -> list[Any]:
        calls.append(engine.has_work())
        return step(launches=launches)

    engine.step = counted_step  # type: ignore[method-assign]
    api_server, back = socket.socketpair()
    with api_server, back:
        wanted = Request("a", [5, 6], DecodingParams(9, end_token_ids=(0,)))
        api_server.sendall(encode(AddRequest(wanted)) + encode(Shutdown(drain=True)))
        EngineLoop(engine, Channel(back)).run()
        messages = [
            decode_to_server(body) for body in FrameSplitter().feed(api_server.recv(1 << 16))
        ]
    assert calls == [True] * 3, "plan, plan and fetch, fetch"
    assert runner.calls[-1] == "result 1" and not engine.has_work()
    check_idle(engine.scheduler)
    outputs = [message for message in messages if isinstance(message, Outputs)]
    assert [len(message.outputs) for message in outputs] == [1], "empty steps send nothing"


# ---- a real model -------------------------------------------------------------------------------

CROWDED: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 32, "max_num_seqs": 32, "scheduling_policy": "fair"},
    {"num_blocks": 20},
]


@pytest.fixture(scope="module")
def in_turn() -> list[Any]:
    llm = LLM(dtype="float32", max_model_len=256)
    assert not llm.engine.overlap, "the default on a CPU"
    prompts, params = make_crowd()
    return [
        [branch.token_ids for branch in output.outputs]
        for output in llm.generate(prompts, params, use_tqdm=False)
    ]


@pytest.mark.parametrize("options", CROWDED, ids=str)
def test_same_tokens_with_and_without_overlap(options: dict[str, Any], in_turn: list[Any]) -> None:
    llm = LLM(dtype="float32", max_model_len=256, async_scheduling=True, **options)
    assert llm.engine.overlap
    preempt_much(llm)
    prompts, params = make_crowd()
    for _ in range(2):  # the second time from the prefix cache
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found = [[branch.token_ids for branch in output.outputs] for output in outputs]
        assert found == in_turn
        check_idle(llm.engine.scheduler)
    if "num_blocks" in options:
        assert llm.engine.stats().num_preemptions > 0


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_beams_forks_and_logprobs_of_a_random_model(family: str, tmp_path: Path) -> None:
    folder = str(save_checkpoint(family, tmp_path))
    prompts = [{"prompt_token_ids": list(range(31 + index, 60 + 3 * index))} for index in range(4)]
    beams = BeamSearchParams(beam_width=3, max_tokens=10)
    wish = SamplingParams(
        n=2, temperature=1.0, seed=4, max_tokens=12, logprobs=2, prompt_logprobs=1
    )
    found: list[Any] = []
    for options in ({}, {"async_scheduling": True, "block_size": 8, "num_blocks": 90}):
        llm = LLM(folder, skip_tokenizer_init=True, dtype="float32", max_model_len=96, **options)
        searched = llm.beam_search(prompts, beams, use_tqdm=False)
        outputs = llm.generate(prompts, wish, use_tqdm=False)
        with llm.start(prompts[0], SamplingParams(max_tokens=9, seed=1)) as trunk:
            while len(trunk.output.token_ids) < 4:
                trunk.step()
            fork = trunk.fork(SamplingParams(max_tokens=9, temperature=0))
            ended = [fork.finish().token_ids, trunk.finish().token_ids]
        check_idle(llm.engine.scheduler)
        found.append(
            (
                [[beam.tokens for beam in output.sequences] for output in searched],
                [[branch.token_ids for branch in output.outputs] for output in outputs],
                [[list(step) for step in output.prompt_logprobs[1:]] for output in outputs],
                ended,
            )
        )
    assert found[0] == found[1]


def test_requests_may_come_and_go_while_a_step_is_in_flight() -> None:
    llm = LLM(dtype="float32", max_model_len=128, async_scheduling=True, num_blocks=64)
    wish = SamplingParams(max_tokens=20, temperature=1.0, seed=3, ignore_eos=True)
    alone = llm.generate("def f(x):", wish, use_tqdm=False)[0].outputs[0].token_ids
    first, second = llm.start("def f(x):", wish), llm.start("import os", wish)
    started_s = time.monotonic()
    while len(first.output.token_ids) < 5 and time.monotonic() < started_s + 60:
        first.step()
    second.close()
    with pytest.raises(InvalidRequestError, match="has ended"):
        second.fork()
    assert first.finish().token_ids == alone
    check_idle(llm.engine.scheduler)


def test_nothing_is_held_once_the_last_generation_was_stepped_to_its_end() -> None:
    llm = LLM(dtype="float32", max_model_len=128, async_scheduling=True, num_blocks=64)
    generation = llm.start("import os", SamplingParams(max_tokens=20, stop="o"))
    for _ in range(30):
        generation.step()
        if generation.output.finished:
            break
    assert generation.output.finish_reason == "stop"
    check_idle(llm.engine.scheduler)


def test_overlapped_answers_are_equal_on_the_gpu_path(tmp_path: Path) -> None:
    """Rows, sampler and attention as on a GPU, or attention alone, in Triton's interpreter."""
    pytest.importorskip("triton")
    changes = {"num_hidden_layers": 1, "vocab_size": 64, "eos_token_id": 1}
    folder = str(save_checkpoint("llama", tmp_path, **changes))
    prompts = [{"prompt_token_ids": list(range(31, 34 + 3 * index))} for index in range(3)]
    params = [
        SamplingParams(temperature=0.7 * index, seed=index, max_tokens=2 + index, ignore_eos=True)
        for index in range(3)
    ]
    found: list[Any] = []
    for options in (
        {"kernels": "torch"},
        {"kernels": "triton", "async_scheduling": True},
        {"kernels": "torch", "attention_backend": "triton", "async_scheduling": True},
    ):
        llm = LLM(
            folder,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=32,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            num_blocks=12,
            max_itl_ratio=0,
            **options,
        )
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append([output.outputs[0].token_ids for output in outputs])
        check_idle(llm.engine.scheduler)
    assert found[0] == found[1] == found[2]
