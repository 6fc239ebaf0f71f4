"""When steps are captured and what is replayed, with calls that are repeated in place of graphs."""

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from quire.runtime.graphs import (
    CudaGraphCapture,
    GraphForward,
    RepeatedCalls,
    graph_sizes,
    mixed_graph_sizes,
)


class Doubling:
    """A forward pass: twice the token ids; counts its calls, of `plan` too."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.logits = lambda hidden: hidden

    def plan(self, step) -> None:
        self.calls.append(("plan", step.static_size))

    def __call__(self, step) -> torch.Tensor:
        self.calls.append(("run", step.static_size))
        return 2 * step.token_ids


def make_step(*token_ids: int, static_size: int = 0, variant: tuple[int, ...] | None = None):
    lens, slots = (torch.full((len(token_ids),), number) for number in (9, 3))
    groups = [SimpleNamespace(slot_mapping=slots)]
    mixed = None if variant is None else SimpleNamespace(variant=variant)
    attention = SimpleNamespace(context_lens=lens, groups=groups, mixed=mixed)
    tokens = torch.tensor(token_ids)
    return SimpleNamespace(
        token_ids=tokens, static_size=static_size, attention=attention, gather=None
    )


def padding(size: int):
    return make_step(*[0] * size, static_size=size)


def run(forward: GraphForward, step) -> list[int]:
    forward.plan(step)
    return forward(step).tolist()


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (5, (1, 2, 4, 5)),
        (64, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)),
        (70, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 70)),
        (100, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100)),
    ],
)
def test_the_sizes_end_with_the_most_sequences(most: int, expected: tuple[int, ...]) -> None:
    assert graph_sizes(most) == expected


def test_no_size_adds_more_than_31_rows_and_there_are_few() -> None:
    sizes = graph_sizes(512)
    assert max(b - a for a, b in pairwise(sizes)) == 32
    assert len(sizes) < 32
    assert len(graph_sizes(256)) == 23


def test_mixed_steps_are_padded_by_at_most_an_eighth_or_31_tokens() -> None:
    sizes = mixed_graph_sizes(2048)
    assert len(sizes) == 35 and sizes[:6] == (4, 8, 16, 32, 64, 96) and sizes[-2:] == (1920, 2048)
    assert all(b - a <= max(32, a // 8) for a, b in pairwise(mixed_graph_sizes(9000)))
    assert mixed_graph_sizes(2) == (2,) and mixed_graph_sizes(8) == (4, 8)
    assert mixed_graph_sizes(70) == (4, 8, 16, 32, 64, 70)


def test_mixed_steps_are_captured_for_each_size_and_variant_and_share_their_result() -> None:
    eager = Doubling()
    forward = GraphForward(eager, RepeatedCalls(), padding)
    results = []
    for size, variant in ((4, (64,)), (2, (64,)), (4, (128,)), (4, (64,))):
        step = make_step(*range(size), static_size=size, variant=variant)
        forward.plan(step)
        results.append(forward(step))
        assert results[-1].tolist() == [2 * token for token in range(size)]
        assert step.attention.context_lens.tolist() == [9] * size, "a mixed step is not padding"
    sizes = [size for name, size in eager.calls if name == "run"]
    assert sizes == [4, 4, 2, 2, 4, 4, 4], "captured and replayed, then replayed alone"
    assert len({result.data_ptr() for result in results}) == 1
    assert (forward.sizes, forward.mixed_sizes) == ((), (2, 4))
    assert run(forward, make_step(1, 2, static_size=2)) == [2, 4]
    forward.drop()
    assert (forward.sizes, forward.mixed_sizes) == ((), ())
    forward.capture_anew()
    assert (forward.sizes, forward.mixed_sizes) == ((2,), ())
    assert run(forward, make_step(3, 4, static_size=2, variant=(64,))) == [6, 8]


def test_a_static_step_is_captured_once_and_then_replayed_with_new_values() -> None:
    eager = Doubling()
    forward = GraphForward(eager, RepeatedCalls(), padding)
    step = make_step(1, 2, static_size=2)
    assert run(forward, step) == [2, 4]
    # Captured, then replayed: each time both planned and run.
    assert eager.calls == [("plan", 2), ("run", 2)] * 2
    step.token_ids[:] = torch.tensor([5, 6])
    later = make_step(static_size=2)  # only the first step's tensors count
    assert run(forward, later) == [10, 12]
    assert forward.sizes == (2,)
    assert forward.capture_s > 0
    assert forward.num_bytes == 0


class Counting(Doubling):
    """A forward pass with a state for each sequence: how many tokens each has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.states = torch.zeros(2, dtype=torch.int64)

    def __call__(self, step) -> torch.Tensor:
        self.states += step.attention.context_lens > 0
        return super().__call__(step)


@pytest.mark.parametrize("has_memory", [True, False])
def test_a_step_moves_states_once_when_its_size_is_captured_too(has_memory: bool) -> None:
    eager = Counting()
    forward = GraphForward(eager, RepeatedCalls() if has_memory else FullBehind(), padding)
    step = make_step(1, 2, static_size=2)
    step.attention.context_lens[1] = 0
    for count in (1, 2):
        assert run(forward, step) == [2, 4]
        assert eager.states.tolist() == [count, 0]
    assert step.attention.context_lens.tolist() == [9, 0]
    assert step.attention.groups[0].slot_mapping.tolist() == [3, 3]


def test_other_steps_are_planned_and_run_one_by_one() -> None:
    eager = Doubling()
    forward = GraphForward(eager, RepeatedCalls(), padding)
    assert run(forward, make_step(1)) == [2]
    assert run(forward, make_step(7, 8)) == [14, 16]
    assert eager.calls == [("plan", 0), ("run", 0)] * 2
    assert forward.sizes == ()


def test_all_sizes_may_be_captured_at_once_the_largest_first() -> None:
    eager = Doubling()
    forward = GraphForward(eager, RepeatedCalls(), padding)
    forward.capture_all((1, 4, 2))
    forward.capture_all((4,))
    assert [size for name, size in eager.calls if name == "run"] == [4, 2, 1]
    assert forward.sizes == (1, 2, 4)


class FakeCuda:
    """What torch.cuda does for a capture, written down; each capture takes 1,000 bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.free_bytes = 100_000
        self.streams: list[FakeStream] = []
        for name in ("current_stream", "stream", "graph", "mem_get_info"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "Stream", self.new_stream)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", self.new_graph)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.calls.append("wait"))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def new_stream(self, device: str) -> "FakeStream":
        self.streams.append(FakeStream(f"side {device}", self.calls))
        return self.streams[-1]

    def current_stream(self, device: str) -> "FakeStream":
        return FakeStream("main", self.calls)

    def mem_get_info(self, device: str) -> tuple[int, int]:
        return self.free_bytes, 200_000

    def new_graph(self) -> SimpleNamespace:
        replay = partial(self.calls.append, "replay")
        return SimpleNamespace(replay=replay, pool=lambda: "the pool")

    @contextmanager
    def stream(self, stream: "FakeStream") -> Iterator[None]:
        self.calls.append(f"on {stream.name}")
        yield

    @contextmanager
    def graph(self, graph, pool, stream, capture_error_mode) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        self.calls.append(f"capture on {stream.name} into {pool}")
        self.free_bytes -= 1000
        yield


class FakeGraph:
    def replay(self) -> None:
        pass

    def pool(self) -> str:
        return "the pool"


class FakeStream:
    def __init__(self, name: str, calls: list[str]) -> None:
        self.name = name
        self.calls = calls

    def wait_stream(self, other: "FakeStream") -> None:
        self.calls.append(f"{self.name} after {other.name}")


def test_cuda_graphs_are_captured_after_a_warm_up_and_share_a_pool(monkeypatch) -> None:
    cuda = FakeCuda(monkeypatch)
    capture = CudaGraphCapture("gpu")

    def compute() -> torch.Tensor:
        cuda.calls.append("compute")
        return torch.tensor([3])

    replay = capture.capture(compute)
    assert cuda.calls == [
        *("side gpu after main", "on side gpu", "compute", "main after side gpu"),
        *("wait", "capture on side gpu into None", "compute", "wait"),
    ]
    assert capture.num_bytes == 1000
    cuda.calls.clear()
    assert replay().tolist() == replay().tolist() == [3]
    assert cuda.calls == ["replay", "replay"]
    capture.capture(compute)
    assert "capture on side gpu into the pool" in cuda.calls
    assert (capture.num_bytes, len(cuda.streams)) == (2000, 1)
    cuda.calls.clear()
    capture.drop()
    capture.capture(compute)
    assert "capture on side gpu into None" in cuda.calls, "the pool has gone with its graphs"
    assert capture.num_bytes == 1000


def test_no_object_keeps_a_dropped_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    graphs: list[weakref.ref[FakeGraph]] = []

    def new_graph() -> "FakeGraph":
        graph = FakeGraph()
        graphs.append(weakref.ref(graph))
        return graph

    monkeypatch.setattr(torch.cuda, "CUDAGraph", new_graph)
    forward = GraphForward(Doubling(), CudaGraphCapture("gpu"), padding)
    forward.capture_all((1, 2))
    forward(make_step(1, 2, static_size=2, variant=(64,)))
    assert len(graphs) == 3 and all(graph() is not None for graph in graphs)
    forward.drop()
    assert [graph() for graph in graphs] == [None] * 3
    assert forward.num_bytes == 0
    forward.capture_anew()
    assert forward.sizes == (1, 2)


class Full(RepeatedCalls):
    def capture(self, computation):
        raise torch.OutOfMemoryError("CUDA out of memory")


class FullBehind(RepeatedCalls):
    """Without memory for the graph, when the computation has run once."""

    def capture(self, computation):
        computation()
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_without_memory_for_a_graph_its_steps_are_launched_singly(caplog, monkeypatch) -> None:
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    forward = GraphForward(Doubling(), Full(), padding)
    step = make_step(1, 2, static_size=2)
    with caplog.at_level(logging.WARNING):
        assert run(forward, step) == [2, 4]
        assert run(forward, step) == [2, 4]
    (record,) = caplog.records
    assert "no memory to capture the decode step of 2 sequences" in record.getMessage()
    assert "enforce_eager" in record.getMessage()


def test_capture_at_start_raises_out_of_memory() -> None:
    forward = GraphForward(Doubling(), Full(), padding)
    with pytest.raises(torch.OutOfMemoryError):
        forward.capture_all((1,))


def test_the_look_up_of_the_token_ids_is_captured_with_what_reads_them() -> None:
    step = make_step(1, 2, static_size=2)
    given = [3, 4]
    step.gather = lambda: step.token_ids.copy_(torch.tensor(given))
    forward = GraphForward(Doubling(), RepeatedCalls(), padding)
    assert run(forward, step) == [6, 8]
    given[:] = [5, 6]
    assert run(forward, step) == [10, 12]
