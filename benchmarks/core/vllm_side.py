"""vLLM's side of `comparison.py`: its v1 core, driven as its engine drives it, without a model.

Made for 0.32 (CPU build or other); runs in an environment that has vLLM and no quire. Prefix
caching is on, the hash is the default one, statistics are off, and scheduling is synchronous, as on
quire's side.
"""
# mypy: disable-error-code="import-not-found"

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import vllm
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker import block_table

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

MAX_MODEL_LEN = 1 << 17
MAX_OUTPUT_TOKENS = 1_000

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": VOCABULARY_SIZE,
    "max_position_embeddings": MAX_MODEL_LEN,
    "torch_dtype": "float32",
}
"""A config.json; nothing but its lengths and its kind of attention is ever read here."""


def make_config(num_tokens_of_step: int, num_blocks: int) -> VllmConfig:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        model = ModelConfig(model=folder, skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN)
        scheduler = SchedulerConfig(
            max_num_seqs=NUM_SEQUENCES,
            max_num_batched_tokens=max(MAX_MODEL_LEN, num_tokens_of_step),
            max_model_len=MAX_MODEL_LEN,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=False,
        )
        cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
        cache.num_gpu_blocks = num_blocks
        return VllmConfig(
            model_config=model,
            scheduler_config=scheduler,
            cache_config=cache,
            device_config=DeviceConfig("cpu"),
        )


def make_kv_config(num_blocks: int) -> KVCacheConfig:
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.float32
    )
    return KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])


def make_manager(num_blocks: int) -> KVCacheManager:
    return KVCacheManager(make_kv_config(num_blocks), MAX_MODEL_LEN, BLOCK_SIZE, BLOCK_SIZE)


def make_hasher() -> object:
    hash_function = get_hash_fn_by_name(CacheConfig().prefix_caching_hash_algo)
    init_none_hash(hash_function)
    return get_request_block_hasher(BLOCK_SIZE, hash_function)


HASHER = make_hasher()


def make_request(name: str, prompt: list[int]) -> Request:
    params = SamplingParams(max_tokens=MAX_OUTPUT_TOKENS, ignore_eos=True)
    return Request(name, list(prompt), params, None, block_hasher=HASHER)


# ---- tables and pool ------------------------------------------------------------------------


def slot_lookup() -> Timing:
    """One position at a time, in the core's own table."""
    manager = make_manager(1_024)
    request = make_request("one", make_prompts(1, LOOKUP_CONTEXT, seed=1)[0])
    assert manager.allocate_slots(request, request.num_tokens) is not None
    positions = [(index * 977) % LOOKUP_CONTEXT for index in range(NUM_LOOKUPS)]
    table = manager.coordinator.single_type_managers[0].req_to_blocks[request.request_id]
    size = BLOCK_SIZE

    def look_up() -> list[int]:
        return [table[position // size].block_id * size + position % size for position in positions]

    return time_calls(look_up, NUM_LOOKUPS)


class _OneRank:
    """Stands for the process groups of context parallelism, which nobody has set up here."""

    world_size = 1
    rank_in_group = 0


def slots_of_batch() -> Timing:
    """One position of each row, in the worker's tables; on the CPU its own C++ kernel."""
    # For so few positions a second thread only adds its waiting to the CPU time.
    torch.set_num_threads(1)
    block_table.get_dcp_group = block_table.get_pcp_group = _OneRank
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    num_blocks = LOOKUP_CONTEXT // BLOCK_SIZE + 1
    table = block_table.BlockTable(
        BLOCK_SIZE, NUM_SEQUENCES, num_blocks, NUM_SEQUENCES, False, torch.device("cpu"), 1
    )
    for row in range(NUM_SEQUENCES):
        table.add_row(list(range(row * num_blocks, (row + 1) * num_blocks)), row)
    table.commit_block_table(NUM_SEQUENCES)
    query_start = torch.arange(NUM_SEQUENCES + 1, dtype=torch.int32)
    positions = torch.full((NUM_SEQUENCES,), LOOKUP_CONTEXT, dtype=torch.int64)
    table.compute_slot_mapping(NUM_SEQUENCES, query_start, positions)
    expected = [(row + 1) * num_blocks * BLOCK_SIZE - BLOCK_SIZE for row in range(NUM_SEQUENCES)]
    assert table.slot_mapping.gpu.tolist() == expected
    return time_calls(
        lambda: table.compute_slot_mapping(NUM_SEQUENCES, query_start, positions), NUM_SEQUENCES
    )


def take_release(count: int) -> Timing:
    """Blocks without content."""
    pool = BlockPool(NUM_POOL_BLOCKS, True, BLOCK_SIZE)

    def cycle() -> None:
        for _ in range(NUM_TAKEN_BLOCKS // count):
            taken = pool.get_new_blocks(count)
            pool.free_blocks(reversed(taken))

    return time_calls(cycle, NUM_TAKEN_BLOCKS)


def take_publish_release(num_blocks: int) -> Timing:
    """Each block of a pool of num_blocks evicts a content, is given one and is freed; the hashes
    are known."""
    manager = make_manager(num_blocks)
    prompts = NewPrompts(num_blocks)
    requests: list[Request] = []

    def draw() -> None:
        requests[:] = [
            make_request(str(index), prompt) for index, prompt in enumerate(prompts.draw())
        ]

    def cycle() -> None:
        for request in requests:
            assert manager.allocate_slots(request, request.num_tokens) is not None
            manager.free(request)

    # The first call finds an empty pool, the second fills what is remembered of evictions.
    return time_calls(cycle, num_blocks, draw, num_warm_up=3)


# ---- a cached prefix ------------------------------------------------------------------------


def _cached_prefix() -> tuple[KVCacheManager, Request]:
    manager = make_manager(NUM_POOL_BLOCKS)
    prompt = make_prompts(1, NUM_PREFIX_BLOCKS * BLOCK_SIZE + 1, seed=3)[0]
    first = make_request("first", prompt)
    assert manager.allocate_slots(first, first.num_tokens) is not None
    manager.free(first)
    return manager, make_request("second", prompt)


def hash_prefix() -> Timing:
    _manager, request = _cached_prefix()
    return time_calls(request.update_block_hashes, 1, request.block_hashes.clear)


def find_prefix() -> Timing:
    manager, request = _cached_prefix()
    assert manager.get_computed_blocks(request)[1] == NUM_PREFIX_BLOCKS * BLOCK_SIZE
    return time_calls(lambda: manager.get_computed_blocks(request), 1)


def hash_and_find_prefix() -> Timing:
    manager, request = _cached_prefix()

    def call() -> None:
        request.update_block_hashes()
        manager.get_computed_blocks(request)

    return time_calls(call, 1, request.block_hashes.clear)


# ---- a step ---------------------------------------------------------------------------------


def answer(num_scheduled: dict[str, int], index: int) -> ModelRunnerOutput:
    """A token, never an end token, for each request of the step."""
    names = list(num_scheduled)
    token_id = 1 + index % (VOCABULARY_SIZE - 1)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: place for place, name in enumerate(names)},
        sampled_token_ids=[[token_id] for _ in names],
    )


def compute_all(scheduler: Scheduler) -> None:
    """One step in which all requests reach their first token."""
    plan = scheduler.schedule()
    assert len(plan.num_scheduled_tokens) == len(scheduler.requests)
    scheduler.update_from_output(plan, answer(plan.num_scheduled_tokens, 0))


def make_decoding(context: int) -> Scheduler:
    """A scheduler whose requests decode, over a pool in which nearly all blocks have content."""
    num_blocks = num_pool_blocks(context)
    config = make_config(num_blocks * BLOCK_SIZE, num_blocks)
    scheduler = Scheduler(
        config, make_kv_config(num_blocks), StructuredOutputManager(config), BLOCK_SIZE
    )
    lengths = staggered(context)
    for index, part in enumerate(make_fillers(context)):
        scheduler.add_request(make_request(f"filler {index}", part))
    compute_all(scheduler)
    scheduler.finish_requests(list(scheduler.requests), RequestStatus.FINISHED_ABORTED)
    for index, prompt in enumerate(make_prompts(NUM_SEQUENCES, context, seed=5)):
        scheduler.add_request(make_request(str(index), prompt[: lengths[index]]))
    compute_all(scheduler)
    return scheduler


def step(context: int) -> Timing:
    scheduler = make_decoding(context)
    run_steps(scheduler, NUM_WARM_UP_STEPS)
    settle()
    clock = run_steps(scheduler, NUM_STEPS)
    assert len(scheduler.running) == NUM_SEQUENCES
    return clock.timing(NUM_STEPS)


def run_steps(scheduler: Scheduler, num_steps: int) -> Clock:
    """The fake runner's part is not timed."""
    clock = Clock()
    for index in range(num_steps):
        with clock:
            plan = scheduler.schedule()
        assert plan.total_num_scheduled_tokens == NUM_SEQUENCES
        result = answer(plan.num_scheduled_tokens, index)
        with clock:
            outputs = scheduler.update_from_output(plan, result)
        assert sum(len(entry.outputs) for entry in outputs.values()) == NUM_SEQUENCES
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
    serve("vLLM", vllm.__version__, CASES)
