"""Several threads in one LLM: one crowd, each with the tokens that it gets alone."""

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from quire.core.sampling_params import BeamSearchParams, SamplingParams
from quire.errors import InvalidRequestError, PromptTooLongError
from quire.offline.llm import LLM

PROMPTS = [f"def function_{index}(self, " * (1 + index % 4) for index in range(12)]
QUESTION = [{"role": "user", "content": "What does os.path.join do?"}]
TIMEOUT_S = 60.0


def wish(index: int) -> SamplingParams:
    """Of different lengths, sampled and greedy."""
    return SamplingParams(
        max_tokens=1 + 5 * (index % 5), temperature=float(index % 2), seed=index, ignore_eos=True
    )


@pytest.fixture(scope="module")
def llm() -> LLM:
    torch.set_num_threads(1)
    # Room for six sequences or so: threads' requests wait for each other's memory, and preempt.
    return LLM(
        dtype="float32",
        max_model_len=128,
        num_blocks=48,
        block_size=8,
        max_num_seqs=6,
        speculation="off",
    )


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    """The tokens of each prompt by itself."""
    return [tokens(llm, index) for index in range(len(PROMPTS))]


@pytest.fixture(autouse=True)
def all_memory_comes_back(llm: LLM) -> Iterator[None]:
    yield
    gc.collect()
    assert llm.engine.stats().num_held_blocks == 0 and not llm.engine.has_work()
    assert not llm._requests._open


def tokens(llm: LLM, index: int) -> list[int]:
    return llm.generate(PROMPTS[index], wish(index), use_tqdm=False)[0].outputs[0].token_ids


def together(*lives: Callable[[], None]) -> None:
    """Each in a thread of its own, all beginning at once."""
    start = threading.Barrier(len(lives))

    def begin(live: Callable[[], None]) -> None:
        start.wait(TIMEOUT_S)
        live()

    with ThreadPoolExecutor(len(lives)) as pool:
        for future in [pool.submit(begin, live) for live in lives]:
            future.result(TIMEOUT_S)


def test_many_threads_get_the_tokens_that_they_get_alone(llm: LLM, alone: list[list[int]]) -> None:
    """Six that generate, one whose requests are refused, one that abandons its streams."""

    def generate(first: int) -> None:
        for turn in range(12):
            index = (first + 5 * turn) % len(PROMPTS)
            assert tokens(llm, index) == alone[index]

    def err() -> None:
        for turn in range(12):
            with pytest.raises(PromptTooLongError):
                llm.generate([PROMPTS[turn], {"prompt_token_ids": [5] * 128}], use_tqdm=False)

    def abandon() -> None:
        for index in range(12):
            stream = llm.stream(PROMPTS[index], SamplingParams(max_tokens=60, ignore_eos=True))
            next(stream)
            if index % 2:
                lost: list[object] = [stream]  # in a cycle: whoever collects garbage ends it
                lost.append(lost)
            del stream

    num_steps = llm.engine.stats().num_steps
    together(*(lambda first=first: generate(first) for first in range(6)), err, abandon)
    # Alone 6 x 12 calls take 11 steps and more on average; in a crowd they share them.
    assert llm.engine.stats().num_steps - num_steps < 6 * 12 * 11


def test_calls_of_all_kinds_at_once(llm: LLM) -> None:
    greedy = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    beams = BeamSearchParams(beam_width=3, max_tokens=8)

    def chat() -> list[int]:
        return llm.chat(QUESTION, greedy, use_tqdm=False)[0].outputs[0].token_ids

    def beam() -> list[list[int]]:
        return [one.tokens for one in llm.beam_search("def f", beams, use_tqdm=False)[0].sequences]

    def stream() -> str:
        return "".join(llm.stream("import os", greedy))

    def stream_chat() -> str:
        return "".join(llm.stream_chat(QUESTION, greedy))

    def branch() -> tuple[list[int], list[int]]:
        with llm.start("class A:", greedy) as trunk:
            while len(trunk.output.token_ids) < 5:
                trunk.step()
            try:
                fork = trunk.fork()
            except InvalidRequestError:  # other threads' steps have brought it to its end
                assert trunk.output.finished
                fork = trunk
            return trunk.finish().token_ids, fork.finish().token_ids

    def several() -> list[list[int]]:
        found = llm.generate(["a", "b"], SamplingParams(n=2, seed=3, temperature=1.0), False)
        return [one.token_ids for output in found for one in output.outputs]

    def bar() -> list[int]:
        return [len(one.outputs[0].token_ids) for one in llm.generate(PROMPTS[:5], greedy)]

    def memory() -> None:
        assert llm.publish_prefix("import sys\n" * 4) >= 0
        # None are pinned where another thread's requests have evicted them meanwhile.
        assert llm.pin_prefix("import sys\n" * 4, published=True) % 8 == 0
        report = llm.memory_report()
        assert report.useful_bytes <= report.total_bytes
        assert len(llm.block_map().blocks) == 48

    kinds = (chat, beam, stream, stream_chat, branch, several, bar)
    expected = [kind() for kind in kinds]

    def live(first: int) -> None:
        for turn in range(len(kinds)):
            kind = (first + turn) % len(kinds)
            assert kinds[kind]() == expected[kind]
            memory()

    together(*(lambda first=first: live(first) for first in range(0, 7, 2)))


def test_an_unread_stream_delays_no_other_stream(llm: LLM, alone: list[list[int]]) -> None:
    """Nor do calls by the consumer of a stream, in the same thread."""
    wanted = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    expected = "".join(llm.stream("import os", wanted))
    stream = llm.stream("import os", wanted)
    text = next(stream)
    together(lambda: None, lambda: _assert_tokens(llm, 4, alone))
    for piece in stream:
        text += piece
        assert tokens(llm, 1) == alone[1]
    assert text == expected


def test_one_generation_may_be_used_by_two_threads(llm: LLM) -> None:
    wanted = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    expected = llm.generate("import os", wanted, use_tqdm=False)[0].outputs[0]
    with llm.start("import os", wanted) as generation:
        pieces: list[str] = []

        def step() -> None:
            while not generation.output.finished:
                pieces.append(generation.step())

        together(step, step)
        assert generation.output.token_ids == expected.token_ids
        assert sum(map(len, pieces)) == len(expected.text)


def test_a_generation_closed_by_another_thread_ends_for_its_reader(llm: LLM) -> None:
    generation = llm.start("import os", SamplingParams(max_tokens=100, ignore_eos=True))
    has_begun = threading.Event()

    def read() -> None:
        for _ in generation:
            has_begun.set()

    def close() -> None:
        assert has_begun.wait(TIMEOUT_S)
        generation.close()

    together(read, close)
    assert generation.output.finish_reason in ("abort", "length")


def test_an_interrupted_thread_strands_no_other(llm: LLM, alone: list[list[int]]) -> None:
    """Real signals to the main thread, which leads or follows, while three others generate."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    main, is_over = threading.get_ident(), threading.Event()
    long = SamplingParams(max_tokens=100, ignore_eos=True)

    def generate(first: int) -> None:
        turn = 0
        while not is_over.is_set():
            index = (first + turn) % len(PROMPTS)
            assert tokens(llm, index) == alone[index]
            turn += 1

    def interrupt() -> None:
        """While it leads, follows, or wants the turn."""
        while main not in llm._requests._turns._present:
            time.sleep(0)  # lets it run
        signal.pthread_kill(main, signal.SIGINT)

    try:
        with ThreadPoolExecutor(4) as pool:
            others = [pool.submit(generate, first) for first in range(3)]
            for _ in range(8):
                sent = pool.submit(interrupt)
                with pytest.raises(KeyboardInterrupt):
                    while True:
                        llm.generate("class A:", long, use_tqdm=False)
                sent.result(TIMEOUT_S)
            is_over.set()
            for other in others:
                other.result(TIMEOUT_S)
    finally:
        is_over.set()
        signal.signal(signal.SIGINT, before)


def test_a_step_that_fails_ends_the_leaders_call_alone(
    llm: LLM, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure that no request is to blame for is raised once, by the call whose step it was."""
    step, failures = llm.engine.step, iter([3, 9, 20])
    num_steps, next_failure = 0, next(failures)

    def fail_at_times() -> list:
        nonlocal num_steps, next_failure
        num_steps += 1
        if num_steps == next_failure:
            next_failure = next(failures, -1)
            raise ArithmeticError
        return step()

    num_failed = []

    def generate(first: int) -> None:
        for turn in range(4):
            index = (first + turn) % len(PROMPTS)
            try:
                assert tokens(llm, index) == alone[index]
            except ArithmeticError:
                num_failed.append(index)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", fail_at_times)
        together(*(lambda first=first: generate(first) for first in range(4)))
    assert len(num_failed) == 3


def test_a_refused_call_runs_nothing_beside_a_running_one(llm: LLM) -> None:
    generation = llm.start("import os", SamplingParams(max_tokens=30, ignore_eos=True))
    generation.step()
    with pytest.raises(InvalidRequestError, match="empty"):
        llm.generate(["a good one", ""], use_tqdm=False)
    assert list(llm._requests._open) == [generation.request.request_id]
    generation.close()


def _assert_tokens(llm: LLM, index: int, alone: list[list[int]]) -> None:
    assert tokens(llm, index) == alone[index]
