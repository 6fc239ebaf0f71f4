"""Budgets: the constant one, the paced one, and what the pacer remembers of steps."""

import pytest
from tests.core.harness import Harness, make_memory
from tests.core.hybrid_serving import FULL, PAGE, state, window
from tests.core.scheduling.test_pacing_cost_model import fitted, fitted_with_vocabulary, roofline

from quire.core.kv_groups import KVGroup, KVKind
from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.cost_model import StepCostModel, StepLoad
from quire.core.scheduling.pacing import (
    LARGEST_MARGIN,
    ConstantPacer,
    PacedBudget,
    PacingConfig,
    StepBudget,
    StepDemand,
    StepPacer,
)
from quire.errors import ConfigurationError


def make_pacer(
    ratio: float = 2.5, least: int = 4, late_rows: int = 0, model: StepCostModel | None = None
) -> StepPacer:
    """late_rows: 0: no step is late."""
    config = PacingConfig(
        ratio, least, late_share=0.125 if late_rows else 0, max_late_rows=late_rows
    )
    return StepPacer(config, model or fitted(roofline))


def open_paced(
    pacer: StepPacer,
    num_decodes: int = 4,
    num_prompts: int = 1,
    num_prompt_tokens: int = 0,
    num_expected: int = 0,
) -> PacedBudget:
    budget = pacer.open_step(
        StepDemand(
            2048,
            num_decodes,
            num_decodes * 100,
            num_prompts,
            num_prompt_tokens=num_prompt_tokens,
            count_expected=lambda: num_expected,
        )
    )
    assert isinstance(budget, PacedBudget)
    return budget


def may_be_late(budget: PacedBudget) -> bool:
    """Whether enough late intervals are left for the step to be late."""
    return budget.num_streams <= budget.num_late_left


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_itl_ratio": 1.0}, "max_itl_ratio is 1.0, but must be at least 1.1"),
        ({"max_itl_ratio": float("nan")}, "max_itl_ratio is nan"),
        ({"min_prefill_tokens": 0}, "min_prefill_tokens is 0, but must be at least 1"),
        ({"late_share": 1.5}, "late_share is 1.5 and max_late_rows 128"),
        ({"max_late_rows": -1}, "max_late_rows -1, but must be from 0 to 1, and at least 0"),
    ],
)
def test_a_pace_that_cannot_be_kept_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PacingConfig(**options)  # type: ignore[arg-type]


def test_the_constant_budget_is_given_out_in_turn() -> None:
    budget = ConstantPacer().open_step(StepDemand(10, 3, 900))
    assert (budget.take_chunk(0, 4), budget.take_chunk(5000, 9), budget.is_spent) == (4, 6, True)
    assert StepBudget(0).is_spent


def test_a_paced_step_takes_at_most_its_ratio_of_the_decodes_alone() -> None:
    pacer = make_pacer(ratio=2.5)
    budget = open_paced(pacer)
    alone_s = pacer.model.predict_s(budget.load)
    num_taken = budget.take_chunk(64, 1000)
    longest_s = 2.5 / pacer.margin * alone_s
    assert pacer.model.predict_s(budget.load) <= longest_s
    assert pacer.model.predict_s(StepLoad(4, 400).with_chunk(64, num_taken + 1)) > longest_s
    assert budget.is_spent
    assert budget.num_tokens == 2048 - num_taken


def test_prompts_behind_the_first_count_as_decoding_rows() -> None:
    """Whose contexts may be short: only those of the rows that decode are read for sure."""
    pacer = make_pacer(ratio=2.5)
    sizes = []
    for num_prompts in (0, 1, 2, 13):
        budget = open_paced(pacer, num_decodes=32, num_prompts=num_prompts)
        sizes.append(budget.take_chunk(64, 1000))
        num_rows = 32 + max(0, num_prompts - 1)
        limit_s = 2.5 / pacer.margin * pacer.model.predict_s(StepLoad(num_rows, 3200))
        assert pacer.model.predict_s(budget.load) <= limit_s
        longer = StepLoad(32, 3200).with_chunk(64, sizes[-1] + 1)
        assert pacer.model.predict_s(longer) > limit_s
    assert sizes[0] == sizes[1] < sizes[2] < sizes[3]


def test_the_rest_of_a_budget_goes_to_the_next_prompt_if_enough_tokens_fit() -> None:
    pacer = make_pacer(least=4)
    whole = open_paced(pacer).take_chunk(0, 1000)
    budget = open_paced(pacer)
    assert (budget.take_chunk(0, whole - 10), budget.is_spent) == (whole - 10, False)
    assert 9 <= budget.take_chunk(0, 1000) <= 10  # its first tokens attend to less
    assert budget.is_spent
    crumbs = open_paced(pacer)
    crumbs.take_chunk(0, whole - 2)
    assert crumbs.is_spent


def test_the_first_prompt_goes_on_however_long_it_takes() -> None:
    """By the least, no more; and never beyond the tokens of a step."""
    pacer = make_pacer(ratio=1.1, least=6)
    budget = open_paced(pacer)
    assert budget.take_chunk(1_000_000, 100) == 6
    assert budget.is_spent
    narrow = pacer.open_step(StepDemand(2, 4, 400))
    assert (narrow.take_chunk(1_000_000, 100), narrow.is_spent) == (2, True)
    full = pacer.open_step(StepDemand(0, 4, 400))
    assert full.is_spent


def test_a_further_prompt_after_a_long_context_gets_one_token_at_least() -> None:
    """It was admitted, so it has to be in the step."""
    budget = open_paced(make_pacer())
    budget.take_chunk(0, 5)
    assert not budget.is_spent
    assert budget.take_chunk(10_000_000, 50) == 1


def test_a_share_of_the_intervals_may_be_longer() -> None:
    """Eight rows at the start: two steps of four take any prompts, then an eighth of them."""
    pacer = make_pacer(late_rows=16)
    for step_id in range(2):
        budget = open_paced(pacer, num_prompts=2)
        assert (budget.take_chunk(0, 1000), budget.take_chunk(0, 900), budget.is_spent) == (
            1000,
            900,
            False,
        )
        assert (budget.take_chunk(0, 900), budget.is_spent) == (148, True)
        pacer.launch(step_id)
    num_between = 0
    while not may_be_late(open_paced(pacer, num_prompts=2)):
        pacer.launch(10 + num_between)
        num_between += 1
    assert num_between == 6  # one row is left, and each step adds half a row
    margin = pacer.margin
    pacer.observe(1, 1000.0)  # nothing that a paced step could learn from
    assert pacer.margin == margin


def test_rows_that_pause_wait_for_the_step_as_those_that_decode() -> None:
    pacer = make_pacer(ratio=2.5)
    beside = open_paced(pacer, num_decodes=4).take_chunk(64, 1000)
    budget = pacer.open_step(StepDemand(2048, 0, 0, 1, num_paused=4))
    assert isinstance(budget, PacedBudget)
    assert abs(budget.take_chunk(64, 1000) - beside) <= 4 + beside // 4, "not full speed"
    assert pacer.model.predict_s(budget.load) <= 2.5 * pacer.model.predict_s(StepLoad(4))
    pacer.launch(1)
    pacer.observe(1, 1e-4)
    alone = pacer.open_step(StepDemand(2048, 0, 0, 1))
    assert alone.take_chunk(64, 1000) == 1000, "no stream waits"


def test_more_rows_than_may_be_saved_up_are_late_at_times_too() -> None:
    pacer = make_pacer(late_rows=16)
    steps = 0
    while not may_be_late(open_paced(pacer, num_decodes=40, num_prompts=9)):
        pacer.launch(steps)
        steps += 1
        assert steps < 100
    assert steps >= (40 - 8) // 5, "an eighth of forty a step"
    budget = open_paced(pacer, num_decodes=40, num_prompts=9)
    assert budget.take_chunk(0, 1000) == 1000 and budget.is_late
    pacer.launch(steps)
    assert not may_be_late(open_paced(pacer, num_decodes=40, num_prompts=9))


def test_a_step_is_late_only_where_that_saves_steps() -> None:
    fitting = open_paced(make_pacer(), num_prompts=2).take_chunk(0, 1000)
    pacer = make_pacer(late_rows=8)
    budget = open_paced(pacer, num_prompts=2)
    assert may_be_late(budget) and budget.take_chunk(0, 2 * fitting - 10) <= fitting + 1
    assert budget.is_spent and not budget.is_late
    crowd = open_paced(pacer, num_decodes=9, num_prompts=2)
    assert not may_be_late(crowd) and crowd.take_chunk(0, 1000) < 1000


@pytest.mark.parametrize(
    ("num_decodes", "num_prompts", "num_prompt_tokens", "is_late"),
    [
        (1, 1, 150, True),  # a long prompt delays a single stream
        (1, 1, 50, False),  # a short prompt needs no more than two steps
        (8, 1, 150, False),  # it saves steps for one prompt, and delays eight streams
        (8, 8, 600, True),  # the same streams are delayed for eight prompts
        (30, 8, 600, False),  # too much of what is saved up
        (33, 40, 9000, False),  # more streams than late intervals are saved up
        (32, 40, 9000, True),
    ],
)
def test_late_intervals_are_used_up_where_they_save_many_steps(
    num_decodes: int, num_prompts: int, num_prompt_tokens: int, is_late: bool
) -> None:
    pacer = make_pacer(late_rows=64)
    budget = open_paced(pacer, num_decodes, num_prompts, num_prompt_tokens)
    size = num_prompt_tokens // num_prompts
    while not budget.is_spent and num_prompts:
        budget.take_chunk(0, size)
        num_prompts -= 1
    assert budget.is_late == is_late


@pytest.mark.parametrize(
    ("num_late_rows", "num_expected", "most"),
    [(64, 0, 64), (64, 128, 80), (0, 2000, 128), (-128, 2000, 0)],
)
def test_late_intervals_are_borrowed_from_those_expected(
    num_late_rows: float, num_expected: int, most: int
) -> None:
    """An eighth of the expected intervals, and no more than may be saved up."""
    config = PacingConfig(2.5, 4, late_share=0.125, max_late_rows=128)
    for num_decodes in range(max(1, most - 1), most + 3):
        pacer = StepPacer(config, fitted(roofline), num_late_rows)
        budget = open_paced(pacer, num_decodes, 400, 400 * 300, num_expected)
        budget.take_chunk(0, 300)
        assert budget.is_late == (num_decodes <= most)


def test_borrowed_intervals_are_paid_back() -> None:
    config = PacingConfig(2.5, 4, late_share=0.125, max_late_rows=128)
    pacer = StepPacer(config, fitted(roofline), num_late_rows=0.0)
    budget = open_paced(pacer, 8, 4, 4 * 500, num_expected=80)
    assert take_all(budget, 500, wants_logprobs=False) == 2048 and budget.is_late
    pacer.launch(0)
    num_steps = 0
    while open_paced(pacer, 8).num_late_left < 0:
        num_steps += 1
        pacer.launch(num_steps)
    assert num_steps == 7, "the late step and seven more decoded 64 rows"


def test_a_late_step_in_time_uses_up_nothing() -> None:
    """Cached prompts have less to compute than was estimated."""
    pacer = make_pacer(late_rows=64)
    budget = open_paced(pacer, 8, 8, 600)
    assert budget.take_chunk(0, 10) == 10 and budget.is_late and budget.is_in_time
    before = budget.num_late_left
    pacer.launch(0)
    assert open_paced(pacer).num_late_left == min(64, before + 1)


@pytest.mark.parametrize(("factor", "is_over"), [(0.1, False), (10.0, True)])
def test_a_late_step_that_used_up_nothing_is_observed_as_one_in_time(
    factor: float, is_over: bool
) -> None:
    """The margin follows it, and it uses up nothing, however long it takes."""
    pacer = make_pacer(late_rows=64)
    budget = open_paced(pacer, 8, 8, 600)
    budget.take_chunk(0, 10)
    assert budget.is_late and budget.is_in_time
    pacer.launch(0)
    before, margin = open_paced(pacer).num_late_left, pacer.margin
    pacer.observe(0, factor * pacer.config.max_itl_ratio * budget.alone_s)
    assert open_paced(pacer).num_late_left == before
    assert (pacer.margin > margin) == is_over


def test_a_late_step_that_was_paid_for_owes_nothing_more() -> None:
    pacer = make_pacer(late_rows=64)
    budget = open_paced(pacer, 8, 8, 600)
    assert budget.take_chunk(0, 600) == 600 and budget.is_late and not budget.is_in_time
    before = budget.num_late_left
    pacer.launch(0)
    assert before - open_paced(pacer).num_late_left == 8 - 1, "and a row is saved"
    pacer.observe(0, 1000.0)
    assert before - open_paced(pacer).num_late_left == 8 - 1
    assert pacer.margin == 1.05


def test_steps_that_other_programs_make_slow_use_up_no_late_intervals() -> None:
    pacer = make_pacer(late_rows=16)
    before = open_paced(pacer).num_late_left
    for step_id in range(100):
        open_paced(pacer).take_chunk(0, 40)
        pacer.launch(step_id)
        pacer.observe(step_id, 60.0)
    assert open_paced(pacer).num_late_left == 16 > before


def test_where_nothing_decodes_the_budget_is_whole() -> None:
    budget = make_pacer().open_step(StepDemand(2048))
    assert (budget.take_chunk(0, 2000), budget.take_chunk(0, 100), budget.is_spent) == (
        2000,
        48,
        True,
    )


# ---- log-probabilities of prompts ---------------------------------------------------------------


def take_all(budget: StepBudget, num_wanted: int, *, wants_logprobs: bool) -> int:
    """Prompts of num_wanted tokens until the step is full; returns how many of their tokens it
    computes."""
    num_taken = 0
    while not budget.is_spent:
        num_taken += budget.take_chunk(0, num_wanted, wants_logprobs=wants_logprobs)
    return num_taken


def test_a_paced_step_knows_what_log_probabilities_of_prompts_take() -> None:
    pacer = make_pacer(ratio=2.5, model=fitted_with_vocabulary())
    plain, asked = open_paced(pacer), open_paced(pacer)
    num_plain = plain.take_chunk(0, 1000)
    num_asked = asked.take_chunk(0, 1000, wants_logprobs=True)
    assert 0 < num_asked < 0.5 * num_plain
    assert pacer.model.predict_s(asked.load) <= 2.5 / pacer.margin * asked.alone_s


@pytest.mark.parametrize("num_decodes", [0, 4])
@pytest.mark.parametrize("size", [180, 5000])
def test_a_step_at_full_speed_takes_no_longer_for_log_probabilities(
    num_decodes: int, size: int
) -> None:
    """They take three times what their tokens take: a quarter of the tokens fits."""
    pacer = make_pacer(late_rows=8, model=fitted_with_vocabulary())
    plain, asked = (open_paced(pacer, num_decodes, 12, 12 * 180) for _ in range(2))
    assert take_all(plain, size, wants_logprobs=False) == 2048
    num_asked = take_all(asked, size, wants_logprobs=True)
    assert plain.is_late and asked.is_late
    assert 0.2 * 2048 < num_asked < 0.3 * 2048
    assert pacer.model.predict_s(asked.load) <= pacer.model.predict_s(plain.load)


def test_prompts_with_and_without_log_probabilities_share_a_step() -> None:
    """What the first ones leave of its time is for all who follow, with them or without."""
    pacer = make_pacer(model=fitted_with_vocabulary())
    full_s = pacer.model.predict_s(StepLoad(0, 0, 2048, 0))
    budget = pacer.open_step(StepDemand(2048))
    assert isinstance(budget, PacedBudget)
    assert budget.take_chunk(0, 256, wants_logprobs=True) == 256
    assert not budget.is_spent
    num_plain = take_all(budget, 5000, wants_logprobs=False)
    assert budget.num_tokens > 0, "time was up before the tokens were"
    left_s = full_s - pacer.model.predict_s(budget.load._replace(num_chunk_pairs=0))
    assert num_plain > 1000 and 0 <= left_s < 0.01 * full_s


def test_a_prompt_with_log_probabilities_goes_on_however_long_it_takes() -> None:
    model = StepCostModel([*fitted(roofline)._coefficients[:-3], 10.0, 0.0, 0.0])
    for num_decodes in (0, 4):
        budget = open_paced(make_pacer(least=6, late_rows=8, model=model), num_decodes)
        assert budget.take_chunk(0, 1000, wants_logprobs=True) == 6
        assert budget.is_spent


def test_the_scheduler_tells_who_wants_log_probabilities() -> None:
    """Until they are computed; a prompt that wants none fills the step."""
    harness = Harness(make_memory(num_blocks=400), budget=256)
    harness.scheduler.pacer = make_pacer(model=fitted_with_vocabulary())
    harness.add("plain", 250, 2)
    assert harness.step().num_tokens == 250
    harness.run()
    harness.add("asked", 250, 2, params=DecodingParams(2, prompt_logprobs=1))
    sizes = []
    while not harness.received.get("asked"):
        sizes.append(harness.step().num_tokens)
    assert sum(sizes) == 250 and max(sizes) < 0.5 * 250
    harness.run()


def test_measured_step_times_change_the_next_budgets() -> None:
    pacer = make_pacer()
    before = open_paced(pacer).take_chunk(0, 1000)
    for step_id in range(60):
        budget = open_paced(pacer)
        if step_id % 2:
            budget.take_chunk(0, before)
        pacer.launch(step_id)
        factor = 2.0 if step_id % 2 else 1.0
        pacer.observe(step_id, factor * roofline(budget.load))
    assert open_paced(pacer).take_chunk(0, 1000) < 0.75 * before


def test_the_margin_follows_the_steps_that_take_longer_than_predicted() -> None:
    pacer = make_pacer()

    def run(step_id: int, factor: float, chunk: int) -> None:
        budget = open_paced(pacer)
        if chunk:
            budget.take_chunk(0, chunk)
        pacer.launch(step_id)
        pacer.observe(step_id, factor * pacer.model.predict_s(budget.load))

    for step_id in range(100):
        run(step_id, 1.5, 0)  # decodes alone say nothing of it
    assert pacer.margin == 1.05
    for step_id in range(100, 150):
        run(step_id, 3.0, 10)
    assert pacer.margin == LARGEST_MARGIN
    for step_id in range(150, 1500):
        run(step_id, 1.0, 10)
    assert pacer.margin == 1.0


def test_only_steps_that_were_launched_with_decodes_are_learned_from() -> None:
    pacer = make_pacer()
    asked = StepLoad(4, 400)
    before_s = pacer.model.predict_s(asked)
    pacer.observe(7, 1.0)  # unknown
    pacer.open_step(StepDemand(100))
    pacer.launch(1)
    pacer.observe(1, 1.0)  # nothing decoded
    open_paced(pacer)  # opened, but no plan came of it
    pacer.open_step(StepDemand(100))
    pacer.launch(2)
    pacer.observe(2, 1.0)
    open_paced(pacer)
    pacer.launch(3)  # failed: no news
    open_paced(pacer)
    pacer.launch(4)
    assert pacer.model.predict_s(asked) == before_s
    pacer.observe(4, 1.0)
    learned_s = pacer.model.predict_s(asked)
    assert learned_s > before_s
    pacer.observe(3, 1.0)
    assert pacer.model.predict_s(asked) == learned_s


# ---- in the scheduler ---------------------------------------------------------------------------


class CountingPacer(ConstantPacer):
    """Remembers how many prompts the step was opened for."""

    num_prompts = num_prompt_tokens = num_expected = -1

    def open_step(self, demand: StepDemand) -> StepBudget:
        self.num_prompts = demand.num_prompts
        self.num_prompt_tokens = demand.num_prompt_tokens
        self.num_expected = demand.count_expected()
        return super().open_step(demand)


@pytest.mark.parametrize(
    ("num_blocks", "num_waiting", "expected"),
    [(100, 2, 1 + 2), (100, 9, 1 + 6), (38, 9, 1 + 4), (12, 9, 1 + 0)],
)
def test_prompts_count_that_have_room(num_blocks: int, num_waiting: int, expected: int) -> None:
    """Rows, and blocks as many as running sequences have on average: 8 rows, and here 11
    blocks that two hold."""
    harness = Harness(make_memory(num_blocks=num_blocks), max_num_seqs=8, budget=24)
    harness.scheduler.pacer = pacer = CountingPacer()
    harness.add("stream", 7, 4)
    harness.step()
    harness.add("partial", 31, 2)
    harness.step()
    assert pacer.num_prompts == 1
    for index in range(num_waiting):
        harness.add(f"waiting-{index}", 31, 2)
    harness.step()
    assert (len(harness.scheduler.running) >= 2, pacer.num_prompts) == (True, expected)
    harness.run()


def test_the_tokens_of_prompts_that_have_room_are_estimated() -> None:
    """One of 8 rows decodes, and one prompt lacks 31 - 23 tokens. Six of nine waiting prompts have
    room."""
    harness = Harness(make_memory(num_blocks=100), max_num_seqs=8, budget=24)
    harness.scheduler.pacer = pacer = CountingPacer()
    harness.add("stream", 7, 4)
    harness.step()
    assert (pacer.num_prompt_tokens, pacer.num_expected) == (7, 0)
    harness.add("partial", 31, 2)
    harness.step()
    for length in range(11, 20):
        harness.add(f"waiting-{length}", length, 2)
    harness.step()
    assert pacer.num_prompt_tokens == 8 + 6 * 15
    assert 1 + 2 <= pacer.num_expected <= 3 + 2
    harness.run()
    assert harness.scheduler.waiting.num_tokens == 0


def test_forks_of_a_prompt_add_no_tokens_to_the_estimate() -> None:
    """Five of six branches wait for the first, whose prompt lacks 40 - 23 tokens."""
    harness = Harness(make_memory(num_blocks=100), max_num_seqs=8, budget=24)
    harness.scheduler.pacer = pacer = CountingPacer()
    harness.add("stream", 7, 4)
    harness.step()
    harness.add_branches("many", 40, 2, n=6)
    harness.step()
    assert (pacer.num_prompts, pacer.num_prompt_tokens) == (6, 40)
    harness.step()
    assert (pacer.num_prompts, pacer.num_prompt_tokens) == (6, 40 - 23)
    harness.run()
    assert harness.scheduler.waiting.num_tokens == 0


def test_beams_that_lose_their_rows_in_a_plan_count_as_waiting_only() -> None:
    """Both beams compute their prompt again, and need blocks of the windows. The first finds some;
    the second does not, and both are preempted."""
    second = KVGroup((3,), KVKind.WINDOW, PAGE, 10)
    groups = (FULL, window(10), second, state(1))
    memory = KVCacheManager(KVCacheConfig(groups, 900, 4, True, b"secret"))
    harness = Harness(memory, budget=400)
    harness.scheduler.pacer = pacer = CountingPacer()
    leader = harness.add("beams", 400, params=DecodingParams(8, beam_width=2))
    while len(harness.scheduler.beams.members_with(leader)) < 2:
        harness.step()
    harness.scheduler.running_set.preempt(leader, 900)
    memory.pool.release_all(memory._take_blocks(memory.pool.num_free, leader))  # evicts all
    harness.step()
    beams = harness.scheduler.beams.members_with(leader)
    assert [beam.num_computed_tokens for beam in beams] == [256, 144]
    for beam in beams:
        memory.forget_passed(beam)
    memory._take_blocks(memory.pool.num_free - 3, leader)
    harness.scheduler.schedule(0.0)
    assert harness.scheduler.running_set.stats.num_preemptions == 4, "of each beam, once more"
    assert (pacer.num_prompts, pacer.num_prompt_tokens) == (0, 0), "none has room"


def test_while_blocks_are_lacking_no_prompt_counts_that_waits() -> None:
    """Two run in 5 blocks of 30, and the first of two that wait needs 26."""
    harness = Harness(make_memory(num_blocks=30), max_num_seqs=8, budget=24)
    harness.scheduler.pacer = pacer = CountingPacer()
    for name in ("first", "second"):
        harness.add(name, 7, 6)
    harness.step()
    harness.add("long", 104, 2)
    harness.add("short", 7, 2)
    harness.step()
    assert pacer.num_prompts == 2
    harness.step()
    assert harness.scheduler.admission.capacity.is_crowded and pacer.num_prompts == 0
    harness.run()


def test_a_long_prompt_is_sliced_only_while_others_decode() -> None:
    harness = Harness(make_memory(num_blocks=200), budget=256)
    harness.scheduler.pacer = make_pacer(ratio=2.0, least=4)
    harness.add("stream", 20, 30)
    assert harness.step().num_tokens == 20
    harness.add("long", 300, 4)
    sizes = []
    while "long" not in harness.received or not harness.received["long"]:
        sizes.append(harness.step().num_tokens - 1)
    assert sum(sizes) == 300
    assert len(sizes) > 8
    assert max(sizes) < 40
    harness.run()
    harness.add("alone", 300, 2)
    assert harness.step().num_tokens == 256


def test_prompts_are_served_one_after_the_other() -> None:
    harness = Harness(make_memory(num_blocks=400), budget=256)
    harness.scheduler.pacer = make_pacer(ratio=2.0)
    harness.add("stream", 4, 60)
    harness.step()
    for name in "abc":
        harness.add(name, 60, 2)
    order = []
    for _ in range(40):
        harness.step()
        order += [name for name in "abc" if harness.received.get(name) and name not in order]
        begun = [
            sequence
            for _, sequence in harness.requests.values()
            if 0 < sequence.num_computed_tokens < 60
        ]
        assert len([sequence for sequence in begun if sequence.request_id != "stream"]) <= 1
    assert order == ["a", "b", "c"]
    harness.run()
