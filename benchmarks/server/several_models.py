"""Measures two models that share memory: first tokens, swaps, and calls under load.

    python -m benchmarks.server.several_models .models/smollm2-135m-instruct --memory 800MiB

A server has the given model and the embedded one, with memory for one of them at a time. First,
calls alternate: each loads its model in the other's place, and the time to its first token is
compared with that of a call whose model is there. Then, clients call both models at once. The exit
code is 1 if a call was not answered.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from benchmarks.server.serving import served

LIMIT_S = 240.0
PROMPT = "The capital of France is"


@dataclass(frozen=True, slots=True)
class Swaps:
    """Times to the first token in seconds, by the model that was called."""

    #: Times of calls whose model was in memory.
    there_s: dict[str, float]
    #: Times of calls that loaded their model in the other's place.
    swapped_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class Load:
    """Calls of clients that call both models at once."""

    num_calls: int
    num_answered: int
    num_loads: int
    #: Time to the first token in seconds: the median and the longest.
    median_s: float
    longest_s: float
    tokens_per_s: float


async def first_token_s(http: httpx.AsyncClient, model: str, max_tokens: int) -> float:
    """The time to the first token of a streamed call. Raises httpx.HTTPStatusError."""
    began_s = time.monotonic()
    body = {"model": model, "prompt": PROMPT, "max_tokens": max_tokens, "stream": True, "seed": 1}
    first_s = None
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and first_s is None:
                first_s = time.monotonic() - began_s
    assert first_s is not None, "an answer has a token"
    return first_s


async def measure_swaps(http: httpx.AsyncClient, models: Sequence[str], rounds: int) -> Swaps:
    """Alternate between the models, calling each twice."""
    there: dict[str, list[float]] = {name: [] for name in models}
    swapped: dict[str, list[float]] = {name: [] for name in models}
    for name in (*models, *list(models) * rounds):
        swapped[name].append(await first_token_s(http, name, 4))
        there[name].append(await first_token_s(http, name, 4))
    return Swaps(
        {name: statistics.median(times) for name, times in there.items()},
        {name: statistics.median(times[1:]) for name, times in swapped.items()},
    )


async def measure_load(
    http: httpx.AsyncClient, models: Sequence[str], num_clients: int, duration_s: float
) -> Load:
    """Clients that call one model each, one call after another."""
    before, end_s = await num_loads(http), time.monotonic() + duration_s
    times: list[float] = []
    num_calls, max_tokens = 0, 32

    async def client(name: str) -> None:
        nonlocal num_calls
        while time.monotonic() < end_s:
            num_calls += 1
            times.append(await first_token_s(http, name, max_tokens))

    began_s = time.monotonic()
    work = [client(models[number % len(models)]) for number in range(num_clients)]
    await asyncio.gather(*work, return_exceptions=True)
    elapsed_s = time.monotonic() - began_s
    loads = await num_loads(http) - before
    rate = len(times) * max_tokens / elapsed_s
    return Load(num_calls, len(times), loads, statistics.median(times), max(times), rate)


async def num_loads(http: httpx.AsyncClient) -> int:
    """The number of loads of all models since the server started."""
    text = (await http.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("quire_model_loads_total{")]
    return sum(int(float(line.rpartition(" ")[2])) for line in lines)


async def measure(url: str, models: Sequence[str], options: argparse.Namespace) -> int:
    """Print the measurements as JSON. Returns the exit code."""
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as http:
        swaps = await measure_swaps(http, models, options.rounds)
        load = await measure_load(http, models, options.clients, options.seconds)
    print(json.dumps({"swaps": asdict(swaps), "load": asdict(load)}, indent=2))
    return 0 if load.num_answered == load.num_calls else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="a folder or hub id; the other model is the embedded one")
    parser.add_argument("--memory", default="800MiB", help="the model's memory (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="swaps of each model (%(default)s)")
    parser.add_argument("--clients", type=int, default=8, help="clients of the load (%(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the load (%(default)s)")
    parser.add_argument(
        "--keep-processes", action="store_true", help="give the server --models-keep-processes"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "models.yaml"
        file.write_text(
            f"- name: large\n  model: {options.model}\n  memory: {options.memory}\n"
            "- name: small\n  memory: 256MiB\n"
        )
        words = ["--models", str(file), "--models-memory", options.memory]
        words += ["--models-keep-processes"] * options.keep_processes
        with served(words, Path(folder) / "log") as server:
            url = f"http://{server.host}:{server.port}"
            return asyncio.run(measure(url, ("large", "small"), options))


if __name__ == "__main__":
    raise SystemExit(main())
