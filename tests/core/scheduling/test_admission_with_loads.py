"""Admission where prefixes are loaded for those that wait."""

from tests.core.harness import Harness, launch, make_groups
from tests.core.memory.tiers.slow_tiers import SlowTiers

from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.memory.tiers.loads import Loads
from quire.core.scheduling.admission import MAX_OVERTAKEN
from quire.core.scheduling.policy import Policy, PriorityPolicy
from quire.core.sequence import SequenceState


class LoadingHarness(Harness):
    """A harness whose memory has tiers with the prompts given, and nothing in the pool."""

    def __init__(
        self, num_blocks: int, prompts: list[list[int]], policy: Policy | None = None
    ) -> None:
        self.tiers = SlowTiers()
        groups = make_groups(1)
        config = KVCacheConfig(groups, num_blocks, 4, True, b"secret", tiers=self.tiers)
        super().__init__(KVCacheManager(config), max_num_seqs=32, budget=400, policy=policy)
        self.tiers.store = self.runner.store
        for number, prompt in enumerate(prompts):
            self.add(f"before {number}", prompt, 1)
            self.turns(40)
        self.memory.prefixes.clear()

    @property
    def loads(self) -> Loads:
        assert self.memory.moves is not None
        return self.memory.moves.loads

    def turn(self, *, ends_loads: bool = True) -> None:
        """A step, if one can be planned; what was ordered before it has ended."""
        self.now_s += 0.01
        self.tiers.end([*self.tiers.stores, *(self.tiers.loads if ends_loads else ())])
        plan = self.scheduler.schedule(self.now_s)
        self.check()
        if plan is not None:
            launch(self.runner, plan)
            self.land()

    def turns(self, most: int) -> int:
        """Until all is answered; returns how many turns that took."""
        for number in range(most):
            if not self.scheduler.has_unfinished:
                return number
            self.turn()
        return most


def test_blocks_loaded_for_later_requests_do_not_delay_earlier_ones() -> None:
    prompts = [[10 * number + at for at in range(24)] for number in range(100, 114)]
    harness = LoadingHarness(160, prompts)
    long = harness.add("long", 20, 150)
    harness.turn()
    harness.add("filler", 280, 30)
    harness.turn()
    # It needs more than is free until the filler has ended; those behind it load meanwhile.
    big = harness.add("big", 400, 2)
    big.num_overtaken = MAX_OVERTAKEN - 1
    behind = [
        harness.add(f"behind {number}", [*prompt, 7], 2) for number, prompt in enumerate(prompts)
    ]
    for _ in range(5):
        harness.turn()
    assert big.num_overtaken == MAX_OVERTAKEN
    assert harness.loads.num_held(behind) > 40
    for _ in range(50):
        harness.turn()
    assert big.is_finished
    assert all(sequence.is_finished for sequence in behind)
    assert not long.is_finished
    harness.turns(200)
    harness.check_answers()


def test_a_useless_load_is_dropped_when_the_only_running_sequence_preempts_itself() -> None:
    """The first block of a preempted sequence can't be loaded, so that it can't use the others that
    its load holds. It needs these blocks in the step in which nothing else can run."""
    prompt = list(range(1000, 1036))
    harness = LoadingHarness(15, [prompt], PriorityPolicy())
    head = harness.add("head", prompt, 8, priority=1)
    harness.turn()
    harness.turn()
    harness.add("urgent", 57, 1, priority=0)
    for _ in range(3):
        harness.turn(ends_loads=False)
    assert head.state is SequenceState.PREEMPTED and not harness.scheduler.running
    other = harness.add("other", 16, 24, priority=2)
    for _ in range(2):
        harness.turn(ends_loads=False)
    first, *rest = harness.tiers.loads
    harness.tiers.end([first], is_done=False)
    harness.tiers.end(rest)
    harness.turn()
    assert harness.loads.num_held([head]) == 8 and harness.scheduler.running == [other]
    while harness.scheduler.running == [other]:
        harness.turn()
    assert harness.scheduler.running == [head] and other.state is SequenceState.PREEMPTED
    harness.turns(100)
    harness.check_answers()
