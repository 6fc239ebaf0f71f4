"""A running request in the caller's hand: read, branched, given up."""

import pytest

from quire import LLM, SamplingParams
from quire.bench.baselines.contiguous import contiguous
from quire.errors import InvalidRequestError

PROMPT = "def fibonacci(n):\n"
WISH = SamplingParams(max_tokens=24, temperature=1.2, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", num_blocks=120, max_model_len=256, block_size=8, speculation="off")


def test_a_generation_reads_what_generate_gives(llm: LLM) -> None:
    alone = llm.generate(PROMPT, WISH, use_tqdm=False)[0].outputs[0]
    with llm.start(PROMPT, WISH) as generation:
        assert "".join(generation) == alone.text
    assert generation.output.token_ids == alone.token_ids
    assert llm.engine.stats().num_held_blocks == 0


def test_forks_get_the_tokens_that_they_would_get_alone(llm: LLM) -> None:
    alone = llm.generate(PROMPT, WISH, use_tqdm=False)[0].outputs[0]
    branches = llm.generate(PROMPT, SamplingParams(**{**_values(WISH), "n": 3}), use_tqdm=False)[
        0
    ].outputs
    greedy = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    with llm.start(PROMPT, WISH) as trunk:
        for _ in range(11):
            trunk.step()
        child, other = trunk.fork(), trunk.fork(greedy)
        assert child.output.token_ids == trunk.output.token_ids == alone.token_ids[:11]
        assert child.output.text == trunk.output.text
        grandchild = child.fork()
        ended = [branch.finish() for branch in (trunk, child, other, grandchild)]
    assert ended[0].token_ids == alone.token_ids
    assert len({tuple(branch.token_ids) for branch in ended}) == 4
    assert all(branch.token_ids[:11] == alone.token_ids[:11] for branch in ended)
    # The same noise as that of a parallel sample with this index, from the fork on, needs the same
    # tokens before it; so compare with a prompt that has them, decoded greedily.
    ids = llm.get_tokenizer().encode(PROMPT) + alone.token_ids[:11]
    rest = SamplingParams(max_tokens=13, temperature=0, ignore_eos=True)
    expected = llm.generate({"prompt_token_ids": ids}, rest, use_tqdm=False)[0].outputs[0]
    assert ended[2].token_ids[11:] == expected.token_ids
    assert branches[0].token_ids == alone.token_ids
    assert llm.engine.stats().num_held_blocks == 0


def test_a_fork_in_the_beginning_is_a_parallel_sample(llm: LLM) -> None:
    wish = SamplingParams(**{**_values(WISH), "n": 3})
    together = llm.generate(PROMPT, wish, use_tqdm=False)[0].outputs
    with llm.start(PROMPT, WISH) as trunk:
        forks = [trunk.fork(), trunk.fork()]
        ended = [branch.finish() for branch in (trunk, *forks)]
    assert [branch.token_ids for branch in ended] == [branch.token_ids for branch in together]


def test_forks_share_blocks(llm: LLM) -> None:
    with llm.start({"prompt_token_ids": list(range(100, 164))}, WISH) as trunk:
        trunk.step()
        before = llm.engine.stats().num_held_blocks
        forks = [trunk.fork() for _ in range(4)]
        trunk.step()
        trunk.step()
        assert all(len(branch.output.token_ids) > 1 for branch in forks)
        # 64 prompt tokens in 8 blocks for all; beyond them a block for each, and those reserved.
        assert llm.engine.stats().num_held_blocks <= before + 2 * len(forks)
        for branch in forks:
            branch.close()
    assert llm.engine.stats().num_held_blocks == 0


def test_a_fork_inherits_penalties_logprobs_and_limits(llm: LLM) -> None:
    wish = SamplingParams(
        max_tokens=20, temperature=0, repetition_penalty=1.4, logprobs=2, ignore_eos=True
    )
    alone = llm.generate(PROMPT, wish, use_tqdm=False)[0].outputs[0]
    with llm.start(PROMPT, wish) as trunk:
        for _ in range(7):
            trunk.step()
        ended = trunk.fork().finish()
    assert ended.token_ids == alone.token_ids
    assert ended.logprobs is not None and alone.logprobs is not None
    assert [list(entry) for entry in ended.logprobs] == [list(entry) for entry in alone.logprobs]
    assert ended.cumulative_logprob == pytest.approx(alone.cumulative_logprob)


def test_generations_that_cannot_fork_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="fork the generation"):
        llm.start(PROMPT, SamplingParams(n=2))
    with llm.start(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True)) as trunk:
        trunk.step()
        trunk.step()
        with pytest.raises(InvalidRequestError, match="max_tokens is 1, but the branch"):
            trunk.fork(SamplingParams(max_tokens=1))
        with pytest.raises(InvalidRequestError, match="logprobs"):
            trunk.fork(SamplingParams(logprobs=1))
        with pytest.raises(InvalidRequestError, match="one branch"):
            trunk.fork(SamplingParams(n=2))
        trunk.finish()
        with pytest.raises(InvalidRequestError, match="has ended"):
            trunk.fork()
    unshared = LLM(
        dtype="float32", num_blocks=64, max_model_len=256, kv_allocator=contiguous("max")
    )
    with unshared.start(PROMPT, WISH) as trunk:
        trunk.step()
        with pytest.raises(InvalidRequestError, match="shares no blocks"):
            trunk.fork()


def test_closing_gives_everything_back(llm: LLM) -> None:
    trunk = llm.start(PROMPT, WISH)
    trunk.step()
    fork = trunk.fork()
    trunk.close()
    assert trunk.output.finish_reason == "abort"
    assert fork.step() or not fork.output.finished
    fork.close()
    fork.close()
    assert llm.engine.stats().num_held_blocks == 0 and not llm.engine.has_work()


def _values(wish: SamplingParams) -> dict[str, object]:
    return {
        name: getattr(wish, name) for name in ("max_tokens", "temperature", "seed", "ignore_eos")
    }
