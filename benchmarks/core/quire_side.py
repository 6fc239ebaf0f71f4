"""quire's side of `comparison.py`: its core's public methods, with a runner that only answers."""

from collections.abc import Callable

import numpy as np

from benchmarks.core.timing import (
    BLOCK_SIZE,
    LOOKUP_CONTEXT,
    NUM_LOOKUPS,
    NUM_POOL_BLOCKS,
    NUM_PREFIX_BLOCKS,
    NUM_SEQUENCES,
    NUM_STEPS,
    NUM_TAKEN_BLOCKS,
    NUM_WARM_UP_STEPS,
    VOCABULARY_SIZE,
    Clock,
    NewPrompts,
    Timing,
    make_fillers,
    make_prompts,
    num_pool_blocks,
    serve,
    settle,
    staggered,
    time_calls,
)
from quire.core.kv_groups import KVGroup, KVKind
from quire.core.memory.block_pool import BlockPool
from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.options import SchedulerConfig
from quire.core.scheduling.scheduler import Scheduler
from quire.core.sequence import Sequence
from quire.core.step import RowAdmission, StepPlan, StepResult
from quire.runtime.batch import RowBatch
from quire.version import __version__

# No more than the steps need: admission leaves room for what a sequence may still grow.
MAX_OUTPUT_TOKENS = 1 + NUM_WARM_UP_STEPS + NUM_STEPS + 1
GROUP = KVGroup((0,), KVKind.FULL, 4096)


def make_memory(num_blocks: int) -> KVCacheManager:
    return KVCacheManager(KVCacheConfig((GROUP,), num_blocks, BLOCK_SIZE, True, b"benchmark"))


def make_sequence(memory: KVCacheManager, name: str, prompt: list[int]) -> Sequence:
    params = DecodingParams(max_tokens=MAX_OUTPUT_TOKENS)
    return Sequence(name, list(prompt), params, chain_root=memory.prefixes.start_chain(""))


def fill(memory: KVCacheManager, sequence: Sequence) -> None:
    """Give a sequence blocks for its tokens and publish them as if they were computed."""
    num_tokens = len(sequence.token_ids)
    sequence.block_tables = ([],)
    memory.grow(sequence, num_tokens)
    sequence.num_computed_tokens = sequence.num_confirmed_tokens = num_tokens
    memory.publish(sequence, num_tokens)


# ---- tables and pool ------------------------------------------------------------------------


def slot_lookup() -> Timing:
    """One position at a time, in the core's own table."""
    memory = make_memory(1_024)
    sequence = make_sequence(memory, "one", make_prompts(1, LOOKUP_CONTEXT, seed=1)[0])
    fill(memory, sequence)
    positions = [(index * 977) % LOOKUP_CONTEXT for index in range(NUM_LOOKUPS)]
    table, size = sequence.block_tables[0], memory.block_size

    def look_up() -> list[int]:
        return [table[position // size] * size + position % size for position in positions]

    return time_calls(look_up, NUM_LOOKUPS)


def slots_of_batch() -> Timing:
    """One position of each row, in the runner's tables. The input ids are gathered along."""
    params, num_blocks = DecodingParams(1), LOOKUP_CONTEXT // BLOCK_SIZE + 1
    token_ids = make_prompts(1, LOOKUP_CONTEXT + 1, seed=1)[0]
    batch = RowBatch(
        num_rows=NUM_SEQUENCES,
        max_model_len=LOOKUP_CONTEXT + BLOCK_SIZE,
        max_num_tokens=NUM_SEQUENCES,
        num_groups=1,
        block_size=BLOCK_SIZE,
    )
    admitted = []
    for row in range(NUM_SEQUENCES):
        table = tuple(range(row * num_blocks, (row + 1) * num_blocks))
        admitted.append(
            RowAdmission(row, token_ids, LOOKUP_CONTEXT, LOOKUP_CONTEXT, (table,), params)
        )
    batch.change(StepPlan(0, NUM_SEQUENCES, NUM_SEQUENCES, admit=tuple(admitted)))
    rows = np.arange(NUM_SEQUENCES)
    # Nothing public does this part of `build` alone, which vLLM has as a function of its own.
    return time_calls(lambda: batch._fill_decodes(rows), NUM_SEQUENCES)


def take_release(count: int) -> Timing:
    """Blocks without content."""
    pool = BlockPool(NUM_POOL_BLOCKS)

    def cycle() -> None:
        for _ in range(NUM_TAKEN_BLOCKS // count):
            taken, _evicted = pool.take(count)
            pool.release_all(reversed(taken))

    return time_calls(cycle, NUM_TAKEN_BLOCKS)


def take_publish_release(num_blocks: int) -> Timing:
    """Each block of a pool of num_blocks evicts a content, is given one and is freed; the hashes
    are known."""
    memory = make_memory(num_blocks)
    prompts = NewPrompts(num_blocks)
    sequences: list[Sequence] = []

    def draw() -> None:
        sequences[:] = [make_sequence(memory, "new", prompt) for prompt in prompts.draw()]
        for sequence in sequences:
            memory.prefixes.hash_prompt([sequence])

    def cycle() -> None:
        for sequence in sequences:
            fill(memory, sequence)
            memory.free(sequence)

    # The first call finds an empty pool, the second fills what is remembered of evictions.
    return time_calls(cycle, num_blocks, draw, num_warm_up=3)


# ---- a cached prefix ------------------------------------------------------------------------


def _cached_prefix() -> tuple[KVCacheManager, Sequence]:
    memory = make_memory(NUM_POOL_BLOCKS)
    prompt = make_prompts(1, NUM_PREFIX_BLOCKS * BLOCK_SIZE + 1, seed=3)[0]
    first = make_sequence(memory, "first", prompt)
    fill(memory, first)
    memory.free(first)
    return memory, make_sequence(memory, "second", prompt)


def hash_prefix() -> Timing:
    memory, sequence = _cached_prefix()
    return time_calls(lambda: memory.prefixes.hash_prompt([sequence]), 1, sequence.chain.clear)


def find_prefix() -> Timing:
    memory, sequence = _cached_prefix()
    memory.prefixes.hash_prompt([sequence])
    assert memory.match(sequence).num_tokens == NUM_PREFIX_BLOCKS * BLOCK_SIZE
    return time_calls(lambda: memory.match(sequence), 1)


def hash_and_find_prefix() -> Timing:
    memory, sequence = _cached_prefix()
    return time_calls(lambda: memory.match(sequence), 1, sequence.chain.clear)


# ---- a step ---------------------------------------------------------------------------------


def answer(plan: StepPlan, rows: list[int]) -> StepResult:
    """A token, never an end token, for each row that closes its gap."""
    token_id = 1 + plan.step_id % (VOCABULARY_SIZE - 1)
    return StepResult(plan.step_id, rows, [(token_id,)] * len(rows))


def compute_all(scheduler: Scheduler) -> None:
    """One step in which all sequences reach their first token."""
    plan = scheduler.schedule(0.0)
    assert plan is not None and len(plan.admit) == plan.num_rows
    scheduler.apply(answer(plan, [admission.row for admission in plan.admit]))


def make_decoding(context: int) -> Scheduler:
    """A scheduler whose sequences decode, over a pool in which nearly all blocks have content."""
    num_blocks = num_pool_blocks(context)
    memory = make_memory(num_blocks)
    config = SchedulerConfig(NUM_SEQUENCES, num_blocks * BLOCK_SIZE)
    scheduler = Scheduler(config, memory)
    lengths = staggered(context)
    fillers = [make_sequence(memory, "filler", part) for part in make_fillers(context)]
    for filler in fillers:
        scheduler.add([filler])
    compute_all(scheduler)
    for filler in fillers:
        scheduler.abort(filler)
    for index, prompt in enumerate(make_prompts(NUM_SEQUENCES, context, seed=5)):
        scheduler.add([make_sequence(memory, str(index), prompt[: lengths[index]])])
    compute_all(scheduler)
    return scheduler


def step(context: int) -> Timing:
    scheduler = make_decoding(context)
    clock = run_steps(scheduler, NUM_WARM_UP_STEPS)
    settle()
    clock = run_steps(scheduler, NUM_STEPS)
    assert len(scheduler.running) == NUM_SEQUENCES
    return clock.timing(NUM_STEPS)


def run_steps(scheduler: Scheduler, num_steps: int) -> Clock:
    """The fake runner's part is not timed."""
    clock = Clock()
    rows = list(range(NUM_SEQUENCES))
    for _ in range(num_steps):
        with clock:
            plan = scheduler.schedule(0.0)
        assert plan is not None and plan.num_tokens == NUM_SEQUENCES
        result = answer(plan, rows)
        with clock:
            outputs = scheduler.apply(result)
        assert len(outputs) == NUM_SEQUENCES
    return clock


CASES: dict[str, Callable[..., Timing]] = {
    "slot_lookup": slot_lookup,
    "slots_of_batch": slots_of_batch,
    "take_release": take_release,
    "take_publish_release": take_publish_release,
    "hash_prefix": hash_prefix,
    "find_prefix": find_prefix,
    "hash_and_find_prefix": hash_and_find_prefix,
    "step": step,
}

if __name__ == "__main__":
    serve("quire", __version__, CASES)
