"""One engine after the other on a cache folder, each in a process of its own; for the crash matrix.

The embedded model, with windows in half of its layers, so that there are two KV groups. What a tier
has is always loaded, and what settles is stored at once: else so small a model would compute.
"""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.tiers.children import LIMIT_S, Child, in_child
from benchmarks.tiers.slow_disk import use_files
from benchmarks.tiers.trial_files import Trial, TrialFiles
from quire.assembly import tier_build
from quire.core.memory.tiers import write_behind
from quire.core.memory.tiers.load_rule import ComputeTime
from quire.core.sampling_params import SamplingParams
from quire.errors import ConfigurationError
from quire.offline.llm import LLM
from quire.tiers.disk.files import Files

LAYERS = ["sliding_attention", "full_attention"]
MODEL = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "hf_overrides": {
        "use_sliding_window": True,
        "sliding_window": 120,
        "layer_types": 2 * LAYERS,
    },
}
SIZES = {"block_size": 8, "num_blocks": 160, "max_num_seqs": 6, "max_model_len": 192}
BUDGET_BYTES = 3 << 20
"""So few that a life fills it: segments are evicted."""
OTHER = {"block_size": 16}
"""Of a life before, which another one's folder begins with."""

Found = list[list[list[float]]]
"""Of each request the tokens, with their log-probabilities."""


@dataclass(frozen=True, slots=True)
class Life:
    """The work of an engine in its process.

    folder: None: without a tier. files: that it uses. options: beside SIZES. seed: of its prompts;
    num_rounds: how often all are asked. closes: whether it ends in order; else it stays, when all
    is stored, until it is killed. patience_s: that it waits for a folder in use; None: as any.
    most_file_bytes: that the system lets a file have.
    """

    folder: Path | None
    trial: Trial | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 1
    num_rounds: int = 1
    closes: bool = True
    patience_s: float | None = None
    most_file_bytes: int | None = None


def crowd(seed: int) -> list[dict[str, Any]]:
    """Prompts; those with an even number begin alike."""
    numbers = random.Random(seed)
    shared = [numbers.randrange(300, 4000) for _ in range(75)]
    prompts = []
    for index in range(6):
        own = [numbers.randrange(300, 4000) for _ in range(numbers.randrange(20, 70))]
        prompts.append({"prompt_token_ids": shared[: 75 * (index % 2 == 0)] + own})
    return prompts


def run(life: Life, tell: Callable[[Any], None]) -> dict[str, Any]:
    """In a child. Sends "open" when the engine stands, and "stored" when all is on disk. Raises
    what the engine raises; returns what came, and what the tier has done."""
    setattr(ComputeTime, "predict_s", lambda *_: None)  # noqa: B010
    write_behind.STORE_DELAY_S = 0.0
    files = Files() if life.trial is None else TrialFiles(life.trial)
    use_files(files)
    if life.most_file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (life.most_file_bytes, resource.RLIM_INFINITY))
    if life.patience_s is not None:
        tier_build.TAKE_OVER_S = life.patience_s
    options: dict[str, Any] = {**MODEL, **SIZES}
    if life.folder is not None:
        options |= {"cache_dir": str(life.folder), "cache_size": BUDGET_BYTES}
    try:
        llm = LLM(**(options | dict(life.options)))
    except ConfigurationError as error:
        return {"refused": str(error), "changes": _changes(files)}
    tell("open")
    found, began_s = [], time.monotonic()
    for round_number in range(life.num_rounds):
        prompts = crowd(life.seed + 1000 * round_number)
        params = [
            SamplingParams(
                max_tokens=16, ignore_eos=True, logprobs=0, seed=index, temperature=index % 2
            )
            for index in range(len(prompts))
        ]
        found += _found(llm.generate(prompts, params, use_tqdm=False))
    answered_s = time.monotonic() - began_s
    told = {"found": found, "answered_s": answered_s, "kernels": llm.engine.facts["kernels"]}
    return told | _end(llm, life, tell) | {"changes": _changes(files)}


def _end(llm: LLM, life: Life, tell: Callable[[Any], None]) -> dict[str, Any]:
    """Check the memory, and end the engine."""
    engine = llm.engine
    assert engine.tier_work.wait_for_moves(LIMIT_S * 2 / 3), "a move does not end"
    memory = engine.scheduler.memory
    moves = memory.moves
    assert moves is None or (moves.num_in_flight == 0 and moves.blocks() == [])
    assert engine.stats().num_held_blocks == 0, "blocks are leaked"
    report = llm.memory_report()
    assert sum(report.parts.values()) == engine.facts["kv_cache_bytes"], report.parts
    if moves is None:
        return {}
    if life.closes:
        engine.tier_work.close()
    else:
        engine.tier_work.drain()
        tell("stored")
        signal.pause()
    counts = moves.counts()
    return {
        "loaded": counts["num_loaded_tokens"],
        "failed": counts["num_failed_blocks"],
        "stored": counts["num_stored_blocks"],
        "late": counts["num_late"],
        "loads": counts["num_loads"],
        "declined": counts["num_declined"],
        "disk": counts["by_tier"]["disk"],
    }


def _found(outputs: Sequence[Any]) -> Found:
    return [
        [
            [token, entry[token].logprob]
            for token, entry in zip(branch.token_ids, branch.logprobs, strict=True)
        ]
        for output in outputs
        for branch in output.outputs
    ]


def _tokens(found: Found) -> list[list[float]]:
    return [[token for token, _ in branch] for branch in found]


def _changes(files: Files) -> int:
    return files.num_changes if isinstance(files, TrialFiles) else 0


AFRESH = """
import json, sys
from pathlib import Path
from benchmarks.tiers import engine_lives
folder, options = sys.argv[1:]
life = engine_lives.Life(Path(folder), options=json.loads(options))
print(json.dumps(engine_lives.run(life, lambda _: None)))
"""


def run_afresh(folder: Path, options: Mapping[str, Any], **variables: str) -> dict[str, Any]:
    """A life in a process that is no fork of this one, with these variables in its environment."""
    command = [sys.executable, "-c", AFRESH, str(folder), json.dumps(options)]
    ended = subprocess.run(
        command, env=os.environ | variables, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S
    )
    assert ended.returncode == 0, f"it ended with {ended.returncode}"
    result: dict[str, Any] = json.loads(ended.stdout)
    return result


class Lives:
    """Lives, one by one, and what they must bring: what an engine without a tier brings."""

    def __init__(self, folder: Path) -> None:
        """folder: for cache folders; what is in it is the caller's to remove."""
        self._folder = folder
        self._expected: dict[str, Found] = {}
        self._number = 0
        self.num_lives = 0

    def new_folder(self, template: Path | None = None) -> Path:
        """One of its own, with the content of a template if there is one."""
        self._number += 1
        path = self._folder / f"cache{self._number}"
        if template is not None:
            shutil.copytree(template, path)
        return path

    def drop(self, path: Path) -> None:
        shutil.rmtree(path)

    def live(self, life: Life) -> dict[str, Any] | None:
        """Run one to its end and compare what it brought; None: it was killed, as it was to be."""
        ended = in_child(lambda: run(life, lambda _: None))
        self.num_lives += 1
        if ended.was_killed:
            assert life.trial is not None and life.trial.kill_at, "it was not to be killed"
            return None
        result: dict[str, Any] = ended.result
        result["seconds"] = ended.seconds
        if "found" in result:
            self.compare(life, result)
        return result

    def begin(self, life: Life) -> Child:
        """Run one that is the caller's to end."""
        self.num_lives += 1
        return Child(lambda tell: run(life, tell))

    def compare(self, life: Life, result: Mapping[str, Any]) -> None:
        """Raises AssertionError for a wrong token or log-probability."""
        found = result["found"]
        asked = life.options, life.seed, life.num_rounds
        key = repr(asked)
        if key not in self._expected:
            plain = Life(None, None, *asked)
            self._expected[key] = in_child(lambda: run(plain, lambda _: None)).result["found"]
        expected = self._expected[key]
        if result["kernels"] == "torch":  # the last bits of its products vary
            assert _tokens(found) == _tokens(expected), "WRONG TOKENS"
        else:
            assert found == expected, "WRONG TOKENS OR LOG-PROBABILITIES"
