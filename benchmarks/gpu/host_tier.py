"""The tier in the host's memory: how fast blocks come and go, and what it is worth.

Copies are held against one plain copy of as many page-locked bytes, which nothing beats. A swap is
held against computing anew: prompts that the pool has no room for come a second time.
"""

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.harness import GIB, QWEN3_600M, Answer, Bench, Load, drive, make_model
from benchmarks.gpu.harness import random_prompts as prompts_of
from quire.assembly.tier_build import new_copies
from quire.tiers.host.staged_copies import Copy, StagedCopies

COPY_GOAL = 0.80
SWAP_GOAL = 1.1
COPIED_BYTES = GIB
BLOCKS = {"192 KiB": 192 << 10, "24 KiB": 24 << 10, "2 MiB": 2 << 20}
NUM_PROMPTS, PROMPT_TOKENS, NUM_TOKENS = 16, 2048, 8
PROMPTS_IN_POOL = 5


def measure_copies(bench: Bench) -> None:
    """Blocks that lie anywhere in the pool, by the size of a block; every byte is compared."""
    for name, block_bytes in {"4 KiB": 4096}.items() if bench.small else BLOCKS.items():
        count = 16 if bench.small else COPIED_BYTES // block_bytes
        pool = torch.randint(0, 256, (count, block_bytes), dtype=torch.uint8, device=bench.device)
        before = pool.clone()
        copies = new_copies(pool, count)
        blocks = random.Random(3).sample(range(count), count)
        slots = list(range(count))
        _measure(bench, copies, f"stored blocks of {name}", partial(copies.store, blocks, slots))
        pool.zero_()
        bench.sync()
        _measure(bench, copies, f"loaded blocks of {name}", partial(copies.load, slots, blocks))
        bench.check(f"blocks of {name} come back as they were", torch.equal(pool, before))
        copies.close()


def _measure(bench: Bench, copies: StagedCopies, name: str, copy_all: Callable[[], Copy]) -> None:
    """The median of a few; beside a plain copy of the same memory, in the same direction."""
    host = torch.from_numpy(copies.slots)
    device = torch.empty(host.shape, dtype=torch.uint8, device=bench.device)
    there, to = (host, device) if name.startswith("loaded") else (device, torch.empty_like(host))
    if to.device.type == "cpu" and not bench.small:
        to = to.pin_memory()
    plain_s = bench.time_s(lambda: to.copy_(there, non_blocking=True), reps=5)
    took, launched = [], []
    for _ in range(1 if bench.small else 6):
        began_s = time.perf_counter()
        copy = copy_all()
        launched.append(time.perf_counter() - began_s)
        while not copy.is_over():
            time.sleep(1e-4)
        took.append(copy.seconds)
    seconds = sorted(took)[len(took) // 2]
    note = f"{host.nbytes / seconds / 1e9:.1f} GB/s, plain {host.nbytes / plain_s / 1e9:.1f} GB/s"
    note += f"; the engine's thread {1e6 * min(launched) / len(host):.2f} us a block"
    bench.at_least(name, plain_s / seconds, COPY_GOAL, "of a plain copy", note)


def check_swap(bench: Bench) -> None:
    """Check that tokens and log-probabilities are bitwise equal with and without the tier, and
    measure both times."""
    folder = make_model(bench, "host-tier", QWEN3_600M, std=0.04)
    length, count = (17, 2) if bench.small else (PROMPT_TOKENS, NUM_TOKENS)
    num_prompts = 3 if bench.small else NUM_PROMPTS
    vocab_size = 61 if bench.small else int(QWEN3_600M["vocab_size"])
    prompts = prompts_of([length] * num_prompts, vocab_size, int(time.time()))
    load = Load(prompts, [count] * num_prompts, {"temperature": 0.0, "logprobs": 0})
    size = "1MiB" if bench.small else "6GiB"
    without_s, expected, _ = _rounds(bench, folder, load)
    with_s, found, num_loaded = _rounds(bench, folder, load, host_cache_size=size)
    note = f"{num_loaded} tokens were loaded"
    bench.check("a swap changes no bit", found == expected and num_loaded > 0, note)
    note = f"{with_s:.3f} s instead of {without_s:.3f} s, {num_loaded} tokens loaded"
    bench.at_least("prompts that come again", without_s / with_s, SWAP_GOAL, "x as fast", note)


def _rounds(
    bench: Bench, folder: Any, load: Load, **options: Any
) -> tuple[float, list[tuple[list[int], list[float]]], int]:
    """Seconds of the second round, its answers, and how many tokens a tier had for them."""
    block_size = 8 if bench.small else 16
    tokens = len(load.prompts[0]) + load.num_tokens[0]
    num_blocks = (2 if bench.small else PROMPTS_IN_POOL) * (tokens // block_size + 1)
    engine = bench.engine(
        folder,
        batch_invariant=True,
        enable_prefix_caching=True,
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=32 if bench.small else 4096,
        max_num_seqs=2 if bench.small else 4,
        **options,
    )
    drive(engine, load)
    began_s = time.perf_counter()
    while engine.tier_work.advance_idle() is not None and time.perf_counter() - began_s < 10:
        time.sleep(1e-3)
    answers, seconds = drive(engine, load)
    engine.finish_steps()
    num_loaded = int(engine.stats().tiers.get("num_loaded_tokens", 0))
    engine.tier_work.close()
    return seconds, [_bits(answer) for answer in answers], num_loaded


def _bits(answer: Answer) -> tuple[list[int], list[float]]:
    return answer.token_ids, answer.logprobs
