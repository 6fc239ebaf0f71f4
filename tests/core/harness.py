"""A scheduler over a small memory and the fake runner; laws are checked at every call."""

from collections.abc import Sequence as Ids

from quire.core import invariants
from quire.core.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.kv_groups import KVGroup, KVKind
from quire.core.policy import Policy, fcfs
from quire.core.request import FinishReason, Request, SequenceOutput
from quire.core.sampling_params import DecodingParams
from quire.core.scheduler import Scheduler, SchedulerConfig
from quire.core.sequence import Sequence
from quire.core.step import Runner, StepPlan, StepResult
from quire.simulation.fake_model import FakeModel
from quire.simulation.fake_runner import FakeRunner, Faults, InjectedFailureError

MAX_MODEL_LEN = 512
NEVER_ENDS = FakeModel(end_rate=0.0)


def make_groups(num_groups: int) -> tuple[KVGroup, ...]:
    return tuple(KVGroup((index,), KVKind.FULL, 64) for index in range(num_groups))


def make_memory(
    num_blocks: int = 16, block_size: int = 4, num_groups: int = 1, caching: bool = True
) -> KVCacheManager:
    groups = make_groups(num_groups)
    return KVCacheManager(KVCacheConfig(groups, num_blocks, block_size, caching, b"secret"))


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
    return Sequence(name, list(token_ids), params, chain_root=memory.start_chain(domain))


def launch(runner: Runner, plan: StepPlan) -> None:
    """Execute and sample a step; its result stays to come."""
    runner.execute(plan)
    runner.sample()


class Harness:
    """The loop of the engine, cut into its calls. Attribute `received`: the tokens by request."""

    def __init__(
        self,
        memory: KVCacheManager | None = None,
        *,
        max_num_seqs: int = 4,
        budget: int = 64,
        policy: Policy = fcfs,
        model: FakeModel = NEVER_ENDS,
        faults: Faults | None = None,
    ) -> None:
        self.memory = memory or make_memory()
        self.scheduler = Scheduler(SchedulerConfig(max_num_seqs, budget), self.memory, policy)
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
        self.requests: dict[str, tuple[Request, Sequence]] = {}
        self.received: dict[str, list[int]] = {}
        self.ended: dict[str, SequenceOutput] = {}

    def add(
        self,
        name: str,
        prompt: int | Ids[int],
        max_tokens: int = 8,
        *,
        priority: int = 0,
        domain: str = "",
        params: DecodingParams | None = None,
    ) -> Sequence:
        """prompt: token ids, or how many tokens (then different from those of all other names)."""
        if isinstance(prompt, int):
            prompt = [1 + (hash_name(name) + 7 * index) % 997 for index in range(prompt)]
        params = params or DecodingParams(max_tokens, seed=hash_name(name))
        request = Request(name, prompt, params, priority=priority, cache_domain=domain)
        sequence = Sequence(
            name,
            list(prompt),
            params,
            priority=priority,
            max_num_tokens=MAX_MODEL_LEN,
            chain_root=self.memory.start_chain(domain),
        )
        self.scheduler.add(sequence)
        self.requests[name] = request, sequence
        self.received[name] = []
        self.check()
        return sequence

    def check(self) -> None:
        invariants.check_scheduler(self.scheduler)

    def launch(self) -> StepPlan:
        """Plan a step and execute it; its result stays to come."""
        plan = self.scheduler.schedule(0.0)
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
        plan = self.scheduler.schedule(0.0)
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
        for name, (request, sequence) in self.requests.items():
            expected = self.model.expected_output(request, max_model_len=MAX_MODEL_LEN)
            got = tuple(self.received[name])
            if sequence.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                assert got == expected.token_ids[: len(got)], name
            else:
                assert got == expected.token_ids, name
                assert sequence.finish_reason is expected.finish_reason, name

    def _note(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.ended, "an output after the end"
            self.received[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                self.ended[output.request_id] = output


def hash_name(name: str) -> int:
    """A small number, the same in every process."""
    return sum(ord(letter) * 31**index for index, letter in enumerate(name)) % 9973
