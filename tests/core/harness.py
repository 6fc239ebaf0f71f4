"""A scheduler over a small memory and the fake runner; laws are checked at every call."""

from collections.abc import Sequence as Ids
from dataclasses import replace
from typing import Any

from quire.core.adapters import AdapterRef
from quire.core.content_spans import ContentSpan
from quire.core.kv_groups import KVGroup, KVKind
from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.request import FinishReason, Request, SequenceOutput
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling import invariants
from quire.core.scheduling.options import SchedulerConfig
from quire.core.scheduling.policy import Policy
from quire.core.scheduling.residency import Residency
from quire.core.scheduling.scheduler import Scheduler
from quire.core.sequence import Sequence
from quire.core.step import Runner, StepPlan, StepResult
from quire.simulation.baselines import NoGrowth, WholePreemption
from quire.simulation.fakes.fake_model import FakeModel
from quire.simulation.fakes.fake_runner import FakeRunner, Faults, InjectedFailureError

MAX_MODEL_LEN = 512
NEVER_ENDS = FakeModel(end_rate=0.0)


def make_groups(num_groups: int) -> tuple[KVGroup, ...]:
    return tuple(KVGroup((index,), KVKind.FULL, 64) for index in range(num_groups))


def make_memory(
    num_blocks: int = 16,
    block_size: int = 4,
    num_groups: int = 1,
    caching: bool = True,
    *,
    preempts_whole: bool = False,
) -> KVCacheManager:
    groups = make_groups(num_groups)
    manager = WholePreemption if preempts_whole else KVCacheManager
    return manager(KVCacheConfig(groups, num_blocks, block_size, caching, b"secret"))


def make_sequence(
    memory: KVCacheManager,
    token_ids: Ids[int],
    *,
    max_tokens: int = 100,
    domain: str = "",
    name: str = "s",
    prompt_logprobs: int | None = None,
) -> Sequence:
    params = DecodingParams(max_tokens, prompt_logprobs=prompt_logprobs)
    root = memory.prefixes.start_chain(domain)
    return Sequence(name, list(token_ids), params, chain_root=root)


def launch(runner: Runner, plan: StepPlan) -> None:
    """Execute and sample a step; its result stays to come."""
    runner.execute(plan)
    runner.sample()


class Harness:
    """The loop of the engine, cut into its calls.

    A branch goes by the name of its request, further ones by name/branch_index.
    Attributes, by such names: `received`: the tokens; `ended`: the last output; `requests`: what
    was asked for, and its sequence; `expected`: the tokens and the end that must come.
    """

    def __init__(
        self,
        memory: KVCacheManager | None = None,
        *,
        max_num_seqs: int = 4,
        budget: int = 64,
        policy: Policy | None = None,
        model: FakeModel = NEVER_ENDS,
        faults: Faults | None = None,
        num_lookahead_blocks: int = 0,
        adapters: Residency | None = None,
    ) -> None:
        #: The contents in the prompts of the requests that are added next.
        self.content_spans: tuple[ContentSpan, ...] = ()
        self.memory = memory or make_memory()
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs, budget, num_lookahead_blocks),
            self.memory,
            policy,
            adapters=adapters,
        )
        config = self.memory.config
        self.runner = FakeRunner(
            config.groups,
            config.num_blocks,
            config.block_size,
            max_num_rows=max_num_seqs,
            max_num_tokens=MAX_MODEL_LEN + 1,
            model=model,
            faults=faults,
        )
        self.model = model
        self.now_s = 0.0
        self.requests: dict[str, tuple[Request, Sequence]] = {}
        self.expected: dict[str, tuple[tuple[int, ...], FinishReason]] = {}
        self.received: dict[str, list[int]] = {}
        self.ended: dict[str, SequenceOutput] = {}

    def add(self, name: str, prompt: int | Ids[int], max_tokens: int = 8, **more: Any) -> Sequence:
        """`add_branches` with one branch, or the first of a beam search."""
        return self.add_branches(name, prompt, max_tokens, **more)[0]

    def add_branches(
        self,
        name: str,
        prompt: int | Ids[int],
        max_tokens: int = 8,
        *,
        n: int = 1,
        priority: int = 0,
        domain: str = "",
        params: DecodingParams | None = None,
        adapter: str = "",
    ) -> list[Sequence]:
        """prompt: token ids, or how many tokens (then different from those of all other names)."""
        if isinstance(prompt, int):
            prompt = [1 + (hash_name(name) + 7 * index) % 997 for index in range(prompt)]
        params = params or DecodingParams(max_tokens, seed=hash_name(name))
        request = Request(name, prompt, params, n=n, priority=priority, cache_domain=domain)
        request = replace(request, content_spans=self.content_spans)
        if adapter:
            request = replace(request, adapter=AdapterRef(adapter, "", adapter))
        root = self.memory.prefixes.start_chain(domain, adapter)
        branches = [
            Sequence(
                name,
                list(prompt),
                params,
                branch_index=index,
                priority=priority,
                max_num_tokens=MAX_MODEL_LEN,
                chain_root=root,
            )
            for index in range(n)
        ]
        for sequence in branches:
            sequence.adapter, sequence.content_spans = adapter, self.content_spans
        self.scheduler.add(branches, self.now_s)
        if params.beam_width:
            self._expect_beams(request, branches[0])
        else:
            for sequence in branches:
                self._expect(request, sequence)
        self.check()
        return branches

    def fork(
        self, parent: Sequence, branch_index: int, params: DecodingParams | None = None
    ) -> Sequence:
        """A new branch of a sequence that lives; its own tokens are those after the fork."""
        child = self.scheduler.fork(parent, branch_index, params or parent.params, self.now_s)
        request = self.requests[key_of(parent.request_id, parent.branch_index)][0]
        self._expect(replace(request, params=child.params), child)
        self.check()
        return child

    def _expect(self, request: Request, sequence: Sequence) -> None:
        key = key_of(sequence.request_id, sequence.branch_index)
        expected = self.model.expected_output(
            request,
            sequence.branch_index,
            MAX_MODEL_LEN,
            forked_token_ids=sequence.token_ids[sequence.num_prompt_tokens :],
        )
        self.requests[key], self.received[key] = (request, sequence), []
        self.expected[key] = expected.token_ids, expected.finish_reason

    def _expect_beams(self, request: Request, leader: Sequence) -> None:
        found = self.model.expected_beams(request, MAX_MODEL_LEN)
        for index in range(request.params.beam_width):
            key = key_of(request.request_id, index)
            self.requests[key], self.received[key] = (request, leader), []
            self.expected[key] = (
                (found[index].token_ids, found[index].finish_reason)
                if index < len(found)
                else ((), FinishReason.ERROR)
            )

    def check(self) -> None:
        invariants.check_scheduler(self.scheduler)

    def launch(self) -> StepPlan:
        """Plan a step and execute it; its result stays to come."""
        plan = self.scheduler.schedule(self.now_s)
        self.check()
        assert plan is not None, "nothing was planned"
        launch(self.runner, plan)
        return plan

    def land(self) -> list[SequenceOutput]:
        """Take in the result of the oldest step in flight."""
        return self.take_in(self.runner.result())

    def take_in(self, result: StepResult) -> list[SequenceOutput]:
        outputs = self.scheduler.apply(result)
        self.check()
        self._note(outputs)
        return outputs

    def step(self) -> StepPlan:
        """One whole step, or the recovery from it."""
        plan = self.scheduler.schedule(self.now_s)
        self.check()
        assert plan is not None, "nothing was planned"
        try:
            launch(self.runner, plan)
            self.land()
        except InjectedFailureError as failure:
            self.recover(str(failure))
        return plan

    def recover(self, message: str = "it failed") -> list[SequenceOutput]:
        self.runner.reset()
        outputs = self.scheduler.recover(message)
        self.check()
        self._note(outputs)
        return outputs

    def run(self, max_num_steps: int = 2000) -> int:
        """Step until all is answered as it must be, and nothing is held; returns the steps."""
        num_steps = 0
        while self.scheduler.num_steps_in_flight:
            self.land()
        while self.scheduler.has_unfinished:
            self.step()
            num_steps += 1
            assert num_steps < max_num_steps, "no end in sight"
        invariants.check_idle(self.scheduler)
        self.check_answers()
        return num_steps

    def check_answers(self) -> None:
        """Everyone got exactly the tokens that it gets alone, or a prefix if it ended early."""
        for key, (token_ids, finish_reason) in self.expected.items():
            got, sequence = tuple(self.received[key]), self.requests[key][1]
            if sequence.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                assert got == token_ids[: len(got)], key
            else:
                assert got == token_ids, key
                assert self.ended[key].finish_reason is finish_reason, key

    def _note(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            key = key_of(output.request_id, output.branch_index)
            assert key not in self.ended, "an output after the end"
            self.received[key] += output.token_ids
            if output.finish_reason is not None:
                self.ended[key] = output


def greedy_harness(memory: KVCacheManager | None = None, **more: Any) -> Harness:
    """Each sequence that fits now is admitted, however the others will grow: so blocks run out."""
    harness = Harness(memory, **more)
    harness.scheduler.admission.capacity.forecast.lengths = NoGrowth()
    return harness


def key_of(request_id: str, branch_index: int) -> str:
    """What the harness calls a branch."""
    return f"{request_id}/{branch_index}" if branch_index else request_id


def hash_name(name: str) -> int:
    """A small number, the same in every process."""
    value = 0
    for letter in reversed(name):
        value = 31 * value + ord(letter)
    return value % 9973
