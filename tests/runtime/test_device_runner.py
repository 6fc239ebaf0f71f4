"""The whole path of a device in main memory: the tokens are those of the path without one.

Results come late (overlap), decode steps are static and replayed, the sampler's tokens never pass
through the host. Torch computes, so that nothing but this path differs.
"""

import random
from typing import Any

import pytest
import torch
from tests.engine.checkpoints import save_checkpoint
from tests.engine.crowding import preempt_much
from tests.engine.drafting import check_counts, recorded, use_proposer
from tests.runtime.device_path import CountedCalls, move_to_device

from quire.core.sampling_params import BeamSearchParams, SamplingParams
from quire.errors import InsufficientMemoryError
from quire.offline.llm import LLM
from quire.runtime.graphs import graph_sizes, mixed_graph_sizes

NUM_REQUESTS = 10
SMALL: dict[str, Any] = {"vocab_size": 97, "max_position_embeddings": 128}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """qwen2 has windows in some layers, and so several KV groups and holes."""
    return {
        family: str(save_checkpoint(family, tmp_path_factory.mktemp(family), **SMALL))
        for family in ("llama", "qwen2", "qwen3")
    }


def make_llm(folder: str, **options: Any) -> LLM:
    given: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "kernels": "torch",
        "max_model_len": 96,
        "block_size": 8,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 48,
    }
    return LLM(folder, **(given | options))


def make_crowd() -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    rng = random.Random(5)
    shared = [rng.randrange(2, 97) for _ in range(20)]
    prompts, params = [], []
    for index in range(NUM_REQUESTS):
        own = [rng.randrange(2, 97) for _ in range(rng.randrange(1, 30))]
        prompts.append({"prompt_token_ids": (shared if index % 3 == 0 else []) + own})
        params.append(
            SamplingParams(
                n=1 + index % 3,
                temperature=(0.0, 1.0, 1.5)[index % 3],
                top_p=(1.0, 0.9)[index % 2],
                frequency_penalty=(0.0, 0.4)[index % 2],
                repetition_penalty=(1.0, 1.2)[index % 3 == 1],
                seed=index,
                max_tokens=rng.randrange(1, 24),
                ignore_eos=index % 2 == 0,
                logprobs=(None, 2)[index % 2],
                prompt_logprobs=1 if index == 4 else None,
            )
        )
    return prompts, params


def answers(outputs: list[Any]) -> tuple[list[Any], list[float]]:
    """What a client sees: tokens and ends, and all log-probabilities. Where chunks are cut depends
    on the memory, and with torch these are equal to rounding only."""
    exact, logprobs = [], []
    for output in outputs:
        entries = list(output.prompt_logprobs or ())
        for branch in output.outputs:
            exact.append((branch.token_ids, branch.finish_reason))
            entries += branch.logprobs or ()
        exact += [list(entry) for entry in entries if entry is not None]
        logprobs += [logprob.logprob for entry in entries if entry for logprob in entry.values()]
    return exact, logprobs


@pytest.fixture(scope="module")
def expected(folders: dict[str, str]) -> dict[str, tuple[list[Any], Any]]:
    """By family, what the path without a device gives."""
    prompts, params = make_crowd()
    found = {}
    for family, folder in folders.items():
        outputs = make_llm(folder).generate(prompts, params, use_tqdm=False)
        exact, logprobs = answers(outputs)
        found[family] = (exact, pytest.approx(logprobs, abs=1e-4))
    return found


@pytest.mark.parametrize(
    ("family", "overlap", "static"),
    [
        ("llama", True, False),
        ("llama", True, True),
        ("qwen2", False, True),
        ("qwen2", True, True),
        ("qwen3", True, True),
    ],
)
def test_a_crowd_gets_the_tokens_that_it_gets_without_a_device(
    family: str, overlap: bool, static: bool, folders: dict[str, str], expected
) -> None:
    prompts, params = make_crowd()
    llm = make_llm(folders[family], num_blocks=40 if family == "qwen2" else 16)
    preempt_much(llm)
    capture = CountedCalls() if static else None
    runner = move_to_device(llm.engine, overlap=overlap, capture=capture)
    first = llm.generate(prompts, params, use_tqdm=False)
    assert answers(first) == expected[family]
    assert answers(llm.generate(prompts, params, use_tqdm=False)) == expected[family]  # warm cache
    # The device verifies drafts, too; then `sample` waits for the tokens of each round.
    use_proposer(llm.engine, recorded(first, params))
    assert answers(llm.generate(prompts, params, use_tqdm=False)) == expected[family]
    check_counts(llm.engine)
    assert llm.engine.stats().num_preemptions > 0
    if capture is not None:
        assert runner.graphs is not None
        assert runner.graphs.sizes == graph_sizes(6)
        assert set(runner.graphs.mixed_sizes) <= set(mixed_graph_sizes(48))
        assert {32, 48} <= set(runner.graphs.mixed_sizes)
        assert capture.num_captured == len(graph_sizes(6)) + len(runner.graphs.mixed_sizes)
        assert capture.num_replayed > 40


class FullOnce(CountedCalls):
    """Has no memory for the capture of this number; counts the calls of `drop`."""

    def __init__(self) -> None:
        super().__init__()
        self.full_at = -1
        self.num_drops = 0

    def capture(self, computation):
        if self.num_captured == self.full_at:
            self.full_at = -1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().capture(computation)

    def drop(self) -> None:
        self.num_drops += 1


def test_asleep_it_has_no_graphs_and_awake_the_same_answers(
    folders: dict[str, str], expected
) -> None:
    prompts, params = make_crowd()
    llm = make_llm(folders["llama"])
    capture = FullOnce()
    runner = move_to_device(llm.engine, overlap=True, capture=capture)
    llm.engine.kv_memory = runner
    sizes = graph_sizes(6)
    runner.capture_graphs(sizes)
    assert answers(llm.generate(prompts, params, use_tqdm=False)) == expected["llama"]
    assert runner.graphs is not None
    assert runner.graphs.sizes == sizes and runner.graphs.mixed_sizes
    llm.sleep()
    assert (runner.graphs.sizes, runner.graphs.mixed_sizes, capture.num_drops) == ((), (), 1)
    # Without memory for the second graph, it stays asleep, and gives back what it has allocated.
    capture.full_at = capture.num_captured + 1
    with pytest.raises(InsufficientMemoryError, match="call wake_up once more"):
        llm.wake_up()
    assert llm.is_sleeping() and (runner.graphs.sizes, capture.num_drops) == ((), 2)
    llm.wake_up()
    assert (runner.graphs.sizes, runner.graphs.mixed_sizes) == (sizes, ())
    assert answers(llm.generate(prompts, params, use_tqdm=False)) == expected["llama"]
    assert runner.graphs.sizes == sizes and runner.graphs.mixed_sizes


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
def test_beams_are_those_without_a_device(overlap: bool, folders: dict[str, str]) -> None:
    prompts = [{"prompt_token_ids": [5, 6, 7, 8, 9, 10, 11]}, {"prompt_token_ids": [20, 21]}]
    params = BeamSearchParams(beam_width=3, max_tokens=14, ignore_eos=True)

    def beams(llm: LLM) -> list[list[list[int]]]:
        found = llm.beam_search(prompts, params)
        return [[beam.tokens for beam in output.sequences] for output in found]

    expected = beams(make_llm(folders["llama"]))
    llm = make_llm(folders["llama"])
    move_to_device(llm.engine, overlap=overlap, capture=CountedCalls())
    assert beams(llm) == expected


def test_a_broken_row_ends_alone_though_its_next_step_is_under_way(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(folders["llama"])
    runner = move_to_device(llm.engine, overlap=True)
    prompts = [{"prompt_token_ids": [30, 31]}, {"prompt_token_ids": [40, 41, 42]}]
    wish = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    expected = llm.generate(prompts, wish, use_tqdm=False)
    plain, num_calls = runner._forward.logits, 0

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        logits = plain(hidden)
        if num_calls == 4:
            logits[0] = float("nan")
        return logits

    monkeypatch.setattr(runner._forward, "logits", broken)
    first, second = llm.generate(prompts, wish, use_tqdm=False)
    assert answers([second]) == answers(expected[1:])
    (branch,) = first.outputs
    assert (branch.finish_reason, len(branch.token_ids)) == ("error", 3)
    assert first.error is not None and "NaN" in first.error
    assert answers(llm.generate(prompts, wish, use_tqdm=False)) == answers(expected)
