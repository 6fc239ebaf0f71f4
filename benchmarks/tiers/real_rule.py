"""Load or compute on a real engine: the rule, always loading and always computing, by the disk.

    python -m benchmarks.tiers.real_rule MODEL [--rates 5,20,50,100,500,inf] \\
        [--lengths 500,1000,2000,4000]

Prompts of random tokens are computed once and kept in a cache folder. For each rate three engines
are built in turn on that folder, behind a disk that is throttled to the rate in MB/s (inf: as fast
as the page cache), and asked for all prompts, one after the other. Each begins without having seen
a request, so that its first choices count as well. The folder is only read meanwhile. Seconds are
those to the first token, summed. """

import argparse
import random
import tempfile
import time
from collections.abc import Sequence

from benchmarks.tiers.slow_disk import ThrottledFiles, use_files
from quire import LLM, SamplingParams
from quire.core.memory.tiers.load_rule import ComputeTime

DECISIONS = ("compute", "load", "rule")


class FixedTime(ComputeTime):
    """Predicts the same for all computing, whatever steps took."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def predict_s(self, first_token: int, end_token: int) -> float | None:
        return self._seconds


def ask(llm: LLM, prompts: Sequence[Sequence[int]]) -> tuple[list[float], list[int]]:
    """The seconds to the first token of each prompt, and how many of its tokens were found."""
    params = SamplingParams(temperature=0.0, max_tokens=1)
    taken_s, num_found = [], []
    for prompt in prompts:
        begun_s = time.perf_counter()
        (output,) = llm.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)
        taken_s.append(time.perf_counter() - begun_s)
        num_found.append(output.num_cached_tokens or 0)
    return taken_s, num_found


def keep(model: str | None, folder: str, prompts: Sequence[Sequence[int]]) -> None:
    """Compute them, and store them in the folder."""
    llm = LLM(model, cache_dir=folder)
    ask(llm, prompts)
    llm.engine.tier_work.close()


def run(
    model: str | None, folder: str, rate_mb: float, decides: str, prompts: Sequence[Sequence[int]]
) -> tuple[list[float], list[int]]:
    """By a new engine on the folder; decides: one of DECISIONS."""
    use_files(ThrottledFiles(rate_mb * 1e6))
    llm = LLM(model, cache_dir=folder, cache_writes_per_day="0")
    moves = llm.engine.scheduler.memory.moves
    assert moves is not None, "with a folder there are moves"
    if decides != "rule":
        moves.loads.compute_time = FixedTime(0.0 if decides == "compute" else float("inf"))
    try:
        return ask(llm, prompts)
    finally:
        llm.engine.tier_work.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--rates", default="5,20,50,100,500,inf")
    parser.add_argument("--lengths", default="500,1000,2000,4000")
    options = parser.parse_args(arguments)
    rng = random.Random(0)
    prompts = [
        [rng.randrange(100, 30_000) for _ in range(int(length))]
        for length in options.lengths.split(",")
    ]
    print("| disk | always compute | always load | the rule | beside the better | rule loaded |")
    print("|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="quire-cache-") as folder:
        keep(options.model, folder, prompts)
        for rate in map(float, options.rates.split(",")):
            found = {each: run(options.model, folder, rate, each, prompts) for each in DECISIONS}
            computed, loaded, ruled = (sum(found[each][0]) for each in DECISIONS)
            num_loaded = sum(count > 0 for count in found["rule"][1])
            print(
                f"| {rate:g} MB/s | {computed:.2f} s | {loaded:.2f} s | {ruled:.2f} s |"
                f" {ruled / min(computed, loaded):.2f} | {num_loaded} of {len(prompts)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
