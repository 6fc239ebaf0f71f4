"""Everything that may happen to a prefix in a tier, for models of all kinds of memory.

    python -m tests.engine.tier_law

runs all combinations, and prints how often what each is about has happened; `test_tier_law` runs a
few. One engine's tier is behind a large pool, which is emptied in between; the next one comes after
a restart; the last has a small pool. Each answers the same crowd, which must come out the same.
"""

import itertools
import random
import tempfile
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.hybrid_family import LAYERS, registered, save_hybrid

from quire.core.memory.tiers import loads, write_behind
from quire.core.memory.tiers.contract import MoveEnd
from quire.core.memory.tiers.load_rule import ComputeTime
from quire.core.sampling_params import SamplingParams
from quire.core.scheduling.growth_forecast import GrowthForecast
from quire.offline.llm import LLM
from quire.tiers.disk.disk_tier import DiskTier

MAX_MODEL_LEN, SHARED_TOKENS = 144, 45
KINDS = {
    "full": ["full", "full"],
    "windows": ["window", "full", "window", "full", "window"],
    "latents": ["latent", "full", "latent"],
    "states": ["delta", "full", "conv", "delta"],
    "all kinds": list(LAYERS),
    "nothing but states": ["delta", "conv", "delta"],
}
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
}
WITH_LATENTS = ("latents", "all kinds")
"""Kinds for which the native kernels have no int8 pages: the engine refuses them by name."""
CHUNKS = (2048, 64, 24)
BLOCK_SIZES = (8, 16, 32)

Found = list[list[list[tuple[int, float]]]]
"""Of each request and branch the tokens, with their log-probabilities."""


@dataclass(frozen=True, slots=True)
class Case:
    """One combination."""

    kind: str
    number_format: str
    chunk: int
    block_size: int

    @property
    def options(self) -> dict[str, Any]:
        return FORMATS[self.number_format] | {
            "max_num_batched_tokens": self.chunk,
            "block_size": self.block_size,
        }


@dataclass(slots=True)
class Crowd:
    """Requests, half of which begin alike."""

    prompts: list[dict[str, list[int]]] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)


def make_crowd(num_requests: int = 5) -> Crowd:
    rng, crowd = random.Random(3), Crowd()
    shared = [rng.randrange(499) for _ in range(SHARED_TOKENS)]
    for index in range(num_requests):
        own = [rng.randrange(499) for _ in range(rng.randrange(10, 60))]
        crowd.prompts.append({"prompt_token_ids": shared * (index % 2 == 0) + own})
        crowd.params.append(
            SamplingParams(
                n=1 + index % 2,
                temperature=(0.0, 1.0)[index % 2],
                seed=index,
                max_tokens=16 + 6 * index,
                ignore_eos=True,
                logprobs=0,
            )
        )
    return crowd


CROWD = make_crowd()


def make_llm(folder: Path, **options: Any) -> LLM:
    sizes = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 12, "num_blocks": 1024}
    return LLM(str(folder), skip_tokenizer_init=True, **(sizes | options))


def answers(llm: LLM) -> Found:
    """To the crowd."""
    outputs = llm.generate(CROWD.prompts, CROWD.params, use_tqdm=False)
    return [
        [
            [
                (token, entry[token].logprob)
                for token, entry in zip(branch.token_ids, branch.logprobs, strict=True)
            ]
            for branch in output.outputs
        ]
        for output in outputs
    ]


def answers_alone(folder: Path, number_format: str) -> Found | None:
    """Of an engine without cache and tier; None where torch multiplies, whose products have other
    bits in other steps."""
    options = FORMATS[number_format] | {"enable_prefix_caching": False, "max_num_seqs": 1}
    llm = make_llm(folder, **options)
    return None if llm.engine.facts["kernels"] == "torch" else answers(llm)


@contextmanager
def eager() -> Iterator[None]:
    """Whatever a tier has is loaded, and nothing settles: of these models computing is faster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ComputeTime, "predict_s", lambda *_: None)
        patch.setattr(write_behind, "STORE_DELAY_S", 0.0)
        patch.setattr(loads, "MIN_PATIENCE_S", 60.0)
        yield


@contextmanager
def held_back(tier: DiskTier, num_turns: int, *, is_late: bool) -> Iterator[None]:
    """What has ended is told of so many turns later, or at the end. is_late: and not waited for."""
    waiting = deque[list[MoveEnd]]([[]] * num_turns)
    ended = tier.ended

    def later() -> list[MoveEnd]:
        waiting.append(ended())
        return waiting.popleft()

    with pytest.MonkeyPatch.context() as patch:
        if is_late:
            patch.setattr(loads, "PATIENCE", 0.0)
            patch.setattr(loads, "MIN_PATIENCE_S", 0.0)
        patch.setattr(tier, "ended", later)
        yield
    tier._ended.extendleft(reversed(waiting))


class Engine:
    """Of a case, and of what was counted before."""

    def __init__(self, folder: Path, cache: Path, case: Case, **options: Any) -> None:
        self.llm = make_llm(folder, cache_dir=str(cache), **(case.options | options))
        moves = self.llm.engine.scheduler.memory.moves
        assert moves is not None
        assert isinstance(moves.tiers, DiskTier)
        self.moves, self.tier = moves, moves.tiers

    def forget(self) -> None:
        """What is in the pool; the tier has it."""
        assert self.llm.engine.tier_work.drain(60.0)
        self.llm.engine.scheduler.memory.prefixes.clear()

    def cancel_one(self) -> None:
        """A request is aborted while its prefix is being loaded."""
        with held_back(self.tier, 1000, is_late=False):
            handle = self.llm.start(CROWD.prompts[4], SamplingParams(max_tokens=4))
            self.llm.engine.step()
            assert self.moves.loads.num_in_flight > 0
            handle.close()
        assert self.moves.loads.num_ending == self.moves.loads.num_in_flight

    def close(self) -> None:
        assert self.llm.engine.tier_work.wait_for_moves(60.0)
        assert self.llm.engine.stats().num_held_blocks == 0, "a block is lost"
        self.llm.engine.tier_work.close()


def flip_bytes(cache: Path) -> None:
    """Of every third page but those of the footer."""
    for path in cache.glob("*/*.seg"):
        data = bytearray(path.read_bytes())
        for at in range(3000, len(data) * 3 // 4, 3 * 4096):
            data[at] ^= 1
        path.write_bytes(data)


def run_case(folder: Path, case: Case, alone: Found, place: Path) -> Counter[str]:
    """How often what has happened. Raises AssertionError where an answer is another one."""
    counts = Counter[str]()

    def check(name: str, engine: Engine, *, rounds: int = 1) -> None:
        for _ in range(rounds):
            assert answers(engine.llm) == alone, f"{case}: {name}"
        counts[name] += rounds

    with eager(), tempfile.TemporaryDirectory(dir=place) as path:
        cache = Path(path) / "cache"
        engine = Engine(folder, cache, case)
        stats = engine.moves.loads.stats
        check("never evicted", engine, rounds=2)
        assert stats.num_loads == 0 and engine.moves.stores.num_stored > 0
        engine.forget()
        check("from disk", engine)
        assert stats.num_loaded_tokens > 0
        engine.forget()
        engine.cancel_one()
        check("cancelled in the middle", engine)
        engine.forget()
        with held_back(engine.tier, 3, is_late=True):
            check("late", engine)
        assert stats.num_late > 0
        engine.close()
        engine = Engine(folder, cache, case)
        stats = engine.moves.loads.stats
        check("after a restart", engine)
        assert stats.num_loaded_tokens > 0 == stats.num_failed_blocks
        engine.forget()
        flip_bytes(cache)
        check("load failed", engine)
        assert stats.num_failed_blocks > 0
        engine.close()
        counts["preempted"] = check_swapped(folder, case, Path(path) / "swapped", check)
    return counts


def check_swapped(folder: Path, case: Case, cache: Path, check: Any) -> int:
    """In a pool that holds no more than the longest sequence; returns how many are preempted."""
    growth = make_llm(folder, **case.options).engine.scheduler.memory.growth
    num_blocks = growth.most_to_hold(MAX_MODEL_LEN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrowthForecast, "fits_later", lambda *_: True)  # so that much is preempted
        engine = Engine(folder, cache, case, num_blocks=num_blocks)
        check("swapped", engine, rounds=2)
        num_preemptions = engine.llm.engine.stats().num_preemptions
        assert engine.moves.loads.stats.num_loaded_tokens > 0
        engine.close()
    return num_preemptions


def main() -> None:
    """All combinations."""
    counts = Counter[str]()
    with registered(), tempfile.TemporaryDirectory() as place:
        for kind, layers in KINDS.items():
            (Path(place) / kind).mkdir()
            folder = save_hybrid(Path(place) / kind, layer_types=layers)
            for number_format in FORMATS:
                if number_format == "int8" and kind in WITH_LATENTS:
                    continue
                alone = answers_alone(folder, number_format)
                if alone is None:
                    print(f"{kind}, {number_format}: torch multiplies, left out", flush=True)
                    continue
                for chunk, size in itertools.product(CHUNKS, BLOCK_SIZES):
                    case = Case(kind, number_format, chunk, size)
                    counts += run_case(folder, case, alone, Path(place))
                print(f"{kind}, {number_format}: equal to the bit", flush=True)
    print(", ".join(f"{name} {count}" for name, count in counts.items()))


if __name__ == "__main__":
    main()
