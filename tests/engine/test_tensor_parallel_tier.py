"""Two ranks with a cache on disk: the tokens of one rank without, whatever happens to its files."""

import gc
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.engine.checkpoints import save_checkpoint
from tests.engine.crowding import preempt_much

from quire.core.memory.tiers import loads, write_behind
from quire.core.memory.tiers.block_moves import BlockMoves
from quire.core.memory.tiers.load_rule import ComputeTime
from quire.core.sampling_params import SamplingParams
from quire.errors import ConfigurationError
from quire.offline.llm import LLM
from quire.tiers.disk.folder import CacheFolder
from quire.tiers.fingerprint import read_description

PROMPTS = [{"prompt_token_ids": list(range(40 + 7 * i, 120 + 9 * i))} for i in range(6)]
PARAMS = [
    SamplingParams(temperature=float(i % 2), seed=i, max_tokens=24, ignore_eos=True)
    for i in range(6)
]
Tokens = list[list[int]]


def make_llm(folder: Path, num_ranks: int = 2, **options: Any) -> LLM:
    options = {"dtype": "float32", "max_model_len": 192, "block_size": 8, "seed": 0} | options
    if "cache_dir" in options:
        options["cache_size"] = "16MiB"
    llm = LLM(folder, skip_tokenizer_init=True, tensor_parallel_size=num_ranks, **options)
    preempt_much(llm)
    return llm


def generate(llm: LLM) -> Tokens:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def moves_of(llm: LLM) -> BlockMoves:
    moves = llm.engine.scheduler.memory.moves
    assert moves is not None
    return moves


def end(llm: LLM) -> None:
    """After which nothing is held, and another engine may have the folder."""
    llm.engine.finish_steps()
    assert llm.engine.tier_work.wait_for_moves()
    assert llm.engine.stats().num_held_blocks == 0
    llm.engine.tier_work.close()


@pytest.fixture(autouse=True)
def load_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a tier has is loaded: of these models computing takes less time. However slow the
    machine is, loads are waited for."""
    monkeypatch.setattr(ComputeTime, "predict_s", lambda *_: None)
    monkeypatch.setattr(write_behind, "STORE_DELAY_S", 0.0)
    monkeypatch.setattr(loads, "MIN_PATIENCE_S", 60.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: Path) -> Tokens:
    return generate(make_llm(model, 1))


KILLED = """
import json, os, signal, sys
from tests.engine.test_tensor_parallel_tier import (
    ComputeTime, Path, generate, loads, make_llm, moves_of, write_behind
)

ComputeTime.predict_s = lambda *_: None  # as the fixture load_always
write_behind.STORE_DELAY_S, loads.MIN_PATIENCE_S = 0.0, 60.0
llm = make_llm(Path(sys.argv[1]), cache_dir=sys.argv[2], num_blocks=24)
print(json.dumps([generate(llm), generate(llm)]))
while llm.engine.tier_work.advance_idle() is not None:
    llm.engine.tier_work.wait()
num_loaded = moves_of(llm).loads.stats.num_loaded_tokens
print(moves_of(llm).stores.num_stored, num_loaded, llm.engine.stats().num_preemptions, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def filled(model: Path, expected: Tokens, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder in which two ranks have stored all, while sequences were swapped, until rank 0
    was killed: the other one has ended by itself, and with it the folder is free."""
    cache = tmp_path_factory.mktemp("filled")
    words = [sys.executable, "-c", KILLED, str(model), str(cache)]
    killed = subprocess.run(
        words, check=False, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    assert killed.returncode == -signal.SIGKILL
    tokens, counts = killed.stdout.splitlines()
    assert json.loads(tokens) == [expected, expected]
    assert all(int(count) > 0 for count in counts.split()), "stored, loaded, preempted"
    CacheFolder.open(cache, wait_s=60).close()
    return cache


def segments_of(cache: Path, rank: int) -> list[Path]:
    for path in cache.glob("*.json"):
        described = read_description(cache, path.stem)
        assert described is not None and described.pages["ranks"] == 2
        if described.pages["rank"] == rank:
            return sorted((cache / path.stem).glob("*.seg"))
    raise AssertionError("the rank has stored nothing")


def leave_alone(_: Path) -> None:
    pass


def damage(cache: Path) -> None:
    """Of rank 1: every third page of all segments but the footers, and the last segment whole."""
    *segments, last = segments_of(cache, 1)
    last.unlink()
    for path in segments:
        data = bytearray(path.read_bytes())
        for at in range(6000, len(data) * 3 // 4, 3 * 4096):
            data[at] ^= 1
        path.write_bytes(data)


@pytest.mark.parametrize("change", [leave_alone, damage])
def test_the_tokens_of_one_rank_after_kill_9(
    change: Callable[[Path], None], model: Path, expected: Tokens, filled: Path, tmp_path: Path
) -> None:
    """What a rank lacks is a miss, is computed and stored again."""
    before = set(psutil.Process().children())
    cache = Path(shutil.copytree(filled, tmp_path / "cache"))
    change(cache)
    llm = make_llm(model, cache_dir=str(cache))
    assert generate(llm) == expected
    moves = moves_of(llm)
    stats = moves.loads.stats
    assert (stats.num_failed_blocks > 0) == (change is not leave_alone)
    assert stats.num_loaded_tokens > 0
    llm.engine.finish_steps()
    assert generate(llm) == expected
    end(llm)
    assert moves.stores.num_stored > 0 or change is leave_alone
    assert [len(segments_of(cache, rank)) > 0 for rank in range(2)] == [True, True]
    del llm, moves
    gc.collect()
    assert set(psutil.Process().children()) <= before, "ranks end with their engine"


def test_another_number_of_ranks_finds_nothing(
    model: Path, expected: Tokens, filled: Path, tmp_path: Path
) -> None:
    cache = Path(shutil.copytree(filled, tmp_path / "cache"))
    llm = make_llm(model, 1, cache_dir=str(cache))
    assert generate(llm) == expected
    end(llm)
    assert moves_of(llm).loads.stats.num_loads == 0


def test_a_folder_that_is_too_small_for_all_ranks_is_refused(model: Path, tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    with pytest.raises(ConfigurationError, match="in each of 2 ranks need at least"):
        LLM(
            model,
            skip_tokenizer_init=True,
            tensor_parallel_size=2,
            cache_dir=str(tmp_path),
            cache_size="2MiB",
        )
    assert set(psutil.Process().children()) <= before
    CacheFolder.open(tmp_path).close()
