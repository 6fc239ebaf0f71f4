"""Every slot is counted once, for what it is; averages are weighted with time."""

import pytest
from benchmarks.memory.load import Budget
from benchmarks.memory.meter import PARTS, MemoryMeter, count_slots
from benchmarks.memory.study import simulated_engine

from quire.core.request import Request
from quire.core.sampling_params import DecodingParams
from quire.engine.engine import Engine

BUDGET = Budget(num_slots=20 * 16, max_num_seqs=8)


def make_engine(allocator: str = "paged", placement: str = "first_fit", **options) -> Engine:
    engine, _ = simulated_engine(allocator, 128, BUDGET, placement=placement, **options)
    return engine


def add(engine: Engine, name: str, num_prompt: int, num_output: int, n: int = 1) -> None:
    first = 1000 * len(name) + ord(name[0])
    params = DecodingParams(num_output, temperature=0.0)
    engine.add(Request(name, range(first, first + num_prompt), params, n=n))


def slots(engine: Engine, **expected: int) -> None:
    """The parts are as expected, those not named are empty, and `free` is the rest."""
    found = count_slots(engine.scheduler)
    assert sum(found.values()) == 320
    free = found.pop("free")
    assert found == dict.fromkeys(found, 0) | expected
    assert free == 320 - sum(expected.values())


def test_pages_hold_tokens_and_unfilled_ends() -> None:
    engine = make_engine()
    add(engine, "a", 20, 30)
    add(engine, "b", 5, 30)
    engine.step()
    slots(engine, useful=25, unfilled=23)
    engine.step()
    slots(engine, useful=27, unfilled=21)


def test_blocks_taken_ahead_are_reserved() -> None:
    engine = make_engine()
    add(engine, "a", 16, 60)
    engine.step()
    slots(engine, useful=16)
    engine.step()
    num_ahead = engine.scheduler.config.num_lookahead_blocks
    slots(engine, useful=17, unfilled=15, reserved=16 * num_ahead)


def test_blocks_shared_by_branches_count_once() -> None:
    engine = make_engine()
    add(engine, "a", 20, 30, n=3)
    engine.step()
    slots(engine, useful=20, unfilled=12)
    engine.step()  # each has its own second block now
    slots(engine, useful=16 + 3 * 5, unfilled=3 * 11)


def test_blocks_of_an_ended_sequence_count_as_cached() -> None:
    engine = make_engine()
    add(engine, "a", 40, 1)
    engine.step()
    assert not engine.has_work()
    found = count_slots(engine.scheduler)
    assert found["cached"] >= 32 and found["useful"] == found["unfilled"] == 0


def test_without_a_prefix_cache_nothing_is_cached() -> None:
    engine = make_engine(enable_prefix_caching=False)
    add(engine, "a", 40, 1)
    engine.step()
    slots(engine)


@pytest.mark.parametrize(
    ("allocator", "placement", "held"),
    [
        ("contiguous_oracle", "first_fit", 64),  # 20 + 30 tokens, in whole blocks
        ("contiguous_oracle", "buddy", 64),
        ("contiguous_pow2", "first_fit", 64),  # 20 + 32
        ("contiguous_max", "buddy", 128),
    ],
)
def test_a_reservation_is_used_later_or_never(allocator: str, placement: str, held: int) -> None:
    engine = make_engine(allocator, placement)
    add(engine, "a", 20, 30)
    engine.step()
    # The 50th token is sampled, but its K and V are never written.
    slots(engine, useful=20, reserved=29, internal=held - 49)
    engine.step()
    slots(engine, useful=21, reserved=28, internal=held - 49)


def test_buddy_rounding_counts_as_internal_fragmentation() -> None:
    engine = make_engine("contiguous_oracle", "buddy")
    add(engine, "a", 60, 9)  # 5 blocks, of 8
    engine.step()
    slots(engine, useful=60, reserved=8, internal=128 - 68)


def test_free_slots_are_external_where_only_their_places_are_wrong() -> None:
    engine = make_engine("contiguous_oracle")
    for name, num_prompt, num_output in (("a", 63, 1), ("b", 63, 60), ("c", 63, 1), ("d", 50, 14)):
        add(engine, name, num_prompt, num_output)  # 4, 8, 4 and 4 of the 20 blocks
    engine.step()  # a and c end
    held = {"useful": 63 + 50, "reserved": 59 + 13, "internal": 6 + 1}
    slots(engine, **held)
    add(engine, "e", 63, 60)  # 8 blocks, but there are two holes of 4
    slots(engine, **held, external=8 * 16)
    engine.abort("e")
    add(engine, "f", 40, 20)  # 4 blocks fit
    slots(engine, **held)


def test_averages_are_weighted_with_time() -> None:
    engine = make_engine()
    meter = MemoryMeter(num_requests=2)
    add(engine, "a", 20, 2)
    meter.observe(engine.scheduler, engine.step(), 3.0, num_to_come=1)
    add(engine, "b", 16, 3)
    meter.observe(engine.scheduler, engine.step(), 1.0, num_to_come=0)
    use = meter.use()
    assert not use.is_steady  # no request waited after another had ended
    assert use.measured_s == 4.0
    assert use.mean_running == pytest.approx((3 * 1 + 1 * 2) / 4)
    assert use.most_running == 2
    assert use.shares["useful"] == pytest.approx((3 * 20 + 1 * 16) / 4 / 320)
    assert use.useful_share == pytest.approx((3 * 20 + 16) / (3 * 32 + 16))
    assert sum(use.shares.values()) == pytest.approx(1) and list(use.shares) == list(PARTS)
    assert use.output_tokens_per_s == pytest.approx(3 / 4)
    assert use.requests_per_s == pytest.approx(1 / 4)


def test_a_look_at_the_slots_stands_for_the_steps_up_to_the_next() -> None:
    engine = make_engine()
    meter = MemoryMeter(num_requests=1, ledger_interval=2)
    add(engine, "a", 20, 9)
    for seconds in (1.0, 2.0, 4.0):
        meter.observe(engine.scheduler, engine.step(), seconds, num_to_come=0)
    assert meter.use().shares["useful"] == pytest.approx((3 * 20 + 4 * 22) / 7 / 320)


def test_only_the_time_counts_in_which_the_load_presses() -> None:
    engine = make_engine()
    meter = MemoryMeter(num_requests=2)
    add(engine, "a", 16, 1)
    meter.observe(engine.scheduler, engine.step(), 100.0, num_to_come=1)  # warming up
    add(engine, "b", 16, 9)
    meter.observe(engine.scheduler, engine.step(), 2.0, num_to_come=1)
    meter.observe(
        engine.scheduler, engine.step(), 100.0, num_to_come=0
    )  # no request is left to come
    use = meter.use()
    assert use.is_steady and use.measured_s == 2.0
    assert use.output_tokens_per_s == pytest.approx(1 / 2)
