"""The whole scheduler under random requests, forks, beams and failures, over all kinds of groups.

Its runner reads back every context; laws after each call; at the end each request got its tokens.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.core.harness import Harness, launch, make_groups

from quire.core.kv_groups import KVGroup
from quire.core.memory.growth import Growth
from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.memory.prefix_cache import PUBLIC_DOMAIN
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling import invariants
from quire.core.scheduling.drafts import Drafting
from quire.core.scheduling.policy import POLICIES
from quire.core.sequence import Sequence
from quire.simulation.baselines import NoGrowth, WholePreemption
from quire.simulation.fakes.fake_model import FakeModel
from quire.simulation.fakes.fake_speculator import FakeSpeculator
from quire.simulation.workload import read_groups

TOKENS = st.integers(1, 2)
PROMPTS = st.lists(TOKENS, min_size=1, max_size=11)
MAX_NUM_STEPS = 3000
HYBRIDS = (
    "full,window:3",
    "window:5",
    "full,state:2",
    "state:3",
    "latent,window:2,state:1",
    "full,window:6,latent,state:2",
)
GROUPS = st.one_of(st.integers(1, 2).map(make_groups), st.sampled_from(HYBRIDS).map(read_groups))


class SchedulerMachine(RuleBasedStateMachine):
    """Prompts over two tokens, so that they are often equal, in a pool that is soon full."""

    @initialize(
        num_blocks=st.integers(12, 30),
        size=st.sampled_from([1, 2, 4, 8]),
        groups=GROUPS,
        caching=st.sampled_from([True, True, False]),
        policy=st.sampled_from(sorted(POLICIES)),
        options=st.tuples(st.integers(0, 2), st.booleans(), st.booleans()),
        max_num_seqs=st.integers(3, 6),
        drafts=st.sampled_from([None, (2, 0.3), (5, 0.1), (3, 0.7)]),
    )
    def start(
        self,
        num_blocks: int,
        size: int,
        groups: tuple[KVGroup, ...],
        caching: bool,
        policy: str,
        options: tuple[int, bool, bool],
        max_num_seqs: int,
        drafts: tuple[int, float] | None,
    ) -> None:
        num_lookahead_blocks, preempts_whole, forecasts = options
        # No chain gets longer than 16 tokens, no search wider than 3.
        num_blocks = len(groups) * num_blocks + 3 * Growth(groups, size).most_to_hold(16)
        manager = WholePreemption if preempts_whole else KVCacheManager
        memory = manager(KVCacheConfig(groups, num_blocks, size, caching, b"secret"))
        memory.snapshots.interval = 2 * size
        self.harness = Harness(
            memory,
            max_num_seqs=max_num_seqs,
            budget=max_num_seqs + num_blocks % 9,
            policy=POLICIES.make(policy),
            model=FakeModel(end_rate=0.1),
            num_lookahead_blocks=num_lookahead_blocks,
        )
        if drafts is not None:
            most, error_rate = drafts
            let_draft(self.harness, most, error_rate)
        if not forecasts:
            self.harness.scheduler.admission.capacity.forecast.lengths = NoGrowth()
        self.num_made = 0

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 5),
        n=st.sampled_from([1, 1, 2, 3]),
        priority=st.integers(0, 2),
        domain=st.sampled_from(["", "b", PUBLIC_DOMAIN]),
        prompt_logprobs=st.sampled_from([None, None, 1]),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        n: int,
        priority: int,
        domain: str,
        prompt_logprobs: int | None,
    ) -> None:
        ends = (self.harness.model.end_token_id,)
        params = DecodingParams(
            max_tokens, seed=len(prompt), end_token_ids=ends, prompt_logprobs=prompt_logprobs
        )
        self.harness.add_branches(
            self.new_name(), prompt, n=n, priority=priority, domain=domain, params=params
        )

    @rule(prompt=PROMPTS, max_tokens=st.integers(1, 5), width=st.integers(1, 3))
    def add_beams(self, prompt: list[int], max_tokens: int, width: int) -> None:
        self.harness.add(
            self.new_name(), prompt, params=DecodingParams(max_tokens, beam_width=width)
        )

    @precondition(lambda self: self.live())
    @rule(index=st.integers(0, 9))
    def fork(self, index: int) -> None:
        parent = self.chosen(index)
        if not parent.is_beam and len(parent.token_ids) < parent.max_num_tokens:
            self.num_made += 1
            self.harness.fork(parent, 10 + self.num_made)

    @precondition(lambda self: self.live())
    @rule(index=st.integers(0, 9))
    def abort(self, index: int) -> None:
        self.harness.scheduler.abort(self.chosen(index))

    @rule()
    def launch(self) -> None:
        self.harness.now_s += 1.0
        if self.harness.scheduler.num_steps_in_flight < 2:
            plan = self.harness.scheduler.schedule(self.harness.now_s)
            if plan is not None:
                launch(self.harness.runner, plan)

    @precondition(lambda self: self.harness.scheduler.num_steps_in_flight)
    @rule()
    def land(self) -> None:
        self.harness.land()

    @rule(count=st.integers(1, 6))
    def run_some(self, count: int) -> None:
        while self.harness.scheduler.num_steps_in_flight:
            self.harness.land()
        for _ in range(count):
            if self.harness.scheduler.has_unfinished:
                self.harness.now_s += 1.0
                self.harness.step()

    @rule()
    def fail(self) -> None:
        """A step is interrupted, and no request is at fault."""
        self.harness.runner.reset()
        assert self.harness.scheduler.recover(None) == []

    @rule()
    def clear_cache(self) -> None:
        self.harness.memory.prefixes.clear()

    @invariant()
    def all_agree(self) -> None:
        if hasattr(self, "harness"):
            invariants.check_scheduler(self.harness.scheduler)

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.run(MAX_NUM_STEPS)

    def live(self) -> list[Sequence]:
        return [*self.harness.scheduler.running, *self.harness.scheduler.waiting]

    def chosen(self, index: int) -> Sequence:
        return self.live()[index % len(self.live())]

    def new_name(self) -> str:
        self.num_made += 1
        return f"r{self.num_made}"


def let_draft(harness: Harness, most: int, error_rate: float) -> None:
    """Have steps verify drafts, if the model has no states."""
    scheduler, memory = harness.scheduler, harness.memory
    if not memory.growth.states:
        proposer = FakeSpeculator(harness.model, most=most, error_rate=error_rate, seed=most)
        slots = scheduler._slots
        scheduler.drafting = Drafting(proposer, memory, scheduler.running_set, slots, most)


SchedulerMachine.TestCase.settings = settings(
    max_examples=50, stateful_step_count=50, deadline=None, database=None
)
TestSchedulerMachine = SchedulerMachine.TestCase
