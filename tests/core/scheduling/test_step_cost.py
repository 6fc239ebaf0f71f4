"""What a step costs, counted in calls, not seconds: the same whatever the context's length."""

import sys
from types import FrameType

from quire.core.kv_groups import KVGroup, KVKind
from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.options import SchedulerConfig
from quire.core.scheduling.scheduler import Scheduler
from quire.core.sequence import Sequence
from quire.core.step import StepResult

BLOCK_SIZE = 16
NUM_SEQUENCES = 8
NUM_STEPS = 4 * BLOCK_SIZE


def _make_decoding(context: int) -> Scheduler:
    """Sequences that have their first token; half of the pool is cached content to be evicted."""
    num_blocks = 2 * NUM_SEQUENCES * (context + 2 * NUM_STEPS) // BLOCK_SIZE
    group = KVGroup((0,), KVKind.FULL, 64)
    memory = KVCacheManager(KVCacheConfig((group,), num_blocks, BLOCK_SIZE, True, b"secret"))
    scheduler = Scheduler(SchedulerConfig(NUM_SEQUENCES + 1, num_blocks * BLOCK_SIZE), memory)
    filler = _sequence(memory, 0, num_blocks * BLOCK_SIZE // 2 - 2, max_tokens=1)
    scheduler.add([filler])
    _step(scheduler)
    for index in range(NUM_SEQUENCES):
        scheduler.add([_sequence(memory, index + 1, context, max_tokens=2 * NUM_STEPS)])
    _step(scheduler)
    assert len(scheduler.running) == NUM_SEQUENCES
    return scheduler


def _sequence(memory: KVCacheManager, index: int, num_tokens: int, max_tokens: int) -> Sequence:
    prompt = [1 + (index * 7919 + 31 * place) % 9973 for place in range(num_tokens)]
    root = memory.prefixes.start_chain("")
    return Sequence(str(index), prompt, DecodingParams(max_tokens), chain_root=root)


def _step(scheduler: Scheduler) -> None:
    plan = scheduler.schedule(0.0)
    assert plan is not None
    rows = [sequence.row for sequence in scheduler.running if sequence.row is not None]
    scheduler.apply(StepResult(plan.step_id, rows, [(1 + plan.step_id % 97,)] * len(rows)))


def _num_calls(scheduler: Scheduler) -> int:
    """Calls of Python functions and of built-in ones in NUM_STEPS steps."""
    count = 0

    def on_event(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    previous = sys.getprofile()
    sys.setprofile(on_event)
    try:
        for _ in range(NUM_STEPS):
            _step(scheduler)
    finally:
        sys.setprofile(previous)
    return count


def test_calls_of_a_step_do_not_grow_with_the_context() -> None:
    short, long = (_num_calls(_make_decoding(context)) for context in (128, 4_096))
    assert short > NUM_STEPS * NUM_SEQUENCES, "nothing was counted"
    assert long <= 1.02 * short
