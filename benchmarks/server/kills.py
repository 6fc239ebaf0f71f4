"""Who is blamed when something else kills the engine: kill -9 at random moments, through HTTP.

    python -m benchmarks.server.kills --rounds 14 --streams 36 --kills 3 [--killer segfault]

A server on the embedded model serves all streams of a round at once. One more request, unless
--killer none, makes the engine crash or hang when it has some tokens, so that after its first death
the API server tries one request after the other; meanwhile the engine is killed from outside,
--kills times a round. Every other stream must bring the very tokens that it brings alone, and the
killer must end as `request_kills_engine`. The exit code is 1 if anything else happened.
"""

import argparse
import asyncio
import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

OPTIONS = {"num_blocks": 768, "max_num_seqs": 48, "max_model_len": 512, "speculation": "off"}
"""A killer counts steps, so each of its steps has to sample one token."""
POISON = (7, 9, 7, 9, 7, 9)
"""A prompt that begins with these tokens kills the engine. The next tokens are the index of its
kind in KINDS, and the number of tokens at which it kills."""
KINDS = ("none", "segfault", "hang")
HEARTBEAT_S = 3.0
LIMIT_S = 120.0


# ---- the server's processes: this script again --------------------------------------------------


class MortalRunner:
    """The runner of an engine, which the poison kills."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._rows: dict[int, tuple[str, int]] = {}  # row -> how it kills, after how many steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def execute(self, plan: Any) -> None:
        for row in plan.release:
            self._rows.pop(row, None)
        for entry in plan.admit:
            if tuple(entry.token_ids[: len(POISON)]) == POISON:
                kind, count = entry.token_ids[len(POISON) : len(POISON) + 2]
                num_outputs = len(entry.token_ids) - entry.num_prompt_tokens
                self._rows[entry.row] = KINDS[kind], count - num_outputs
        for row, (kind, count) in list(self._rows.items()):
            if count <= 0 and kind == "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            if count <= 0 and kind == "hang":
                time.sleep(LIMIT_S)
            self._rows[row] = kind, count - 1
        self._runner.execute(plan)


def run_engine(argv: Sequence[str]) -> int:
    """An engine process with a MortalRunner."""
    from quire.assembly.build import build_engine
    from quire.engine_process.engine_main import main

    def build(options: Mapping[str, object], on_progress: Any) -> Any:
        engine = build_engine(options, on_progress)
        engine._runner = MortalRunner(engine._runner)
        return engine

    return main(argv, build)


def run_api_server() -> int:
    """A server whose engine process is this script."""
    from quire.server import fleet_launch, launch

    start = fleet_launch.start_one_engine
    patience = fleet_launch.RecoveryConfig(
        max_restarts=10**6, heartbeat_timeout_s=HEARTBEAT_S, first_backoff_s=0.0, max_backoff_s=0.0
    )
    command = (sys.executable, "-m", "benchmarks.server.kills", "--engine")
    fleet_launch.start_one_engine = functools.partial(start, command=command)  # type: ignore[assignment]
    fleet_launch.RecoveryConfig = lambda *_, **__: patience  # type: ignore[assignment, misc]
    return launch.serve(OPTIONS, launch.ServerConfig(port=0))


# ---- the clients --------------------------------------------------------------------------------


def make_bodies(count: int) -> list[dict[str, Any]]:
    rng = random.Random(1)
    return [
        {
            "prompt": [rng.randrange(300, 4000) for _ in range(rng.randint(4, 120))],
            "max_tokens": rng.randint(40, 100),
            "temperature": index % 3 / 2,
            "seed": index,
            "n": 1 + (index % 9 == 8),
        }
        for index in range(count)
    ]


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, list[list[int]]]:
    """How a stream ended: "answered" or an error's code; and the tokens of its branches."""
    body = body | {"stream": True, "return_token_ids": True, "ignore_eos": True}
    found: list[list[int]] = [[] for _ in range(body.get("n", 1))]
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            await response.aread()
            return response.json()["error"]["code"], found
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                return chunk["error"]["code"], found
            for choice in chunk["choices"]:
                found[choice["index"]] += choice["token_ids"] or []
    return "answered", found


class Server:
    """An API server, and how to kill its engine."""

    def __init__(self, log: Path) -> None:
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.server.kills", "--api-server"],
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        deadline_s = time.monotonic() + LIMIT_S
        while not (found := re.search(r"at (http://\S+) ", log.read_text())):
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"the server did not start:\n{log.read_text()}")
            time.sleep(0.05)
        self.url = found[1]

    async def kill(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        """At a random moment soon after the engine has become ready."""
        while (await client.get("/ready")).status_code != 200:
            await asyncio.sleep(0.02)
        await asyncio.sleep(rng.uniform(0.0, rng.choice([0.05, 0.15, 0.4])))
        for child in psutil.Process(self.process.pid).children():
            if child.status() != psutil.STATUS_ZOMBIE:
                os.kill(child.pid, signal.SIGKILL)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(LIMIT_S)


async def num_restarts(client: httpx.AsyncClient) -> int:
    return int((await client.get("/health")).json()["num_restarts"])


async def run_round(
    server: Server, bodies: list[dict[str, Any]], kind: str, num_kills: int, rng: random.Random
) -> tuple[list[tuple[str, list[list[int]]]], str, int]:
    """The results of the streams, how the killer ended, and the number of engine restarts."""
    limits = httpx.Limits(max_connections=len(bodies) + 8)
    async with httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S, limits=limits) as client:
        before = await num_restarts(client)
        streams = [asyncio.ensure_future(ask(client, body)) for body in bodies]
        killer: asyncio.Future[tuple[str, list[list[int]]]] | None = None
        if kind != "none":
            await asyncio.sleep(0.1)
            poison = [*POISON, KINDS.index(kind), rng.randrange(60)]
            killer = asyncio.ensure_future(ask(client, {"prompt": poison, "max_tokens": 99}))
            while await num_restarts(client) == before and not killer.done():
                await asyncio.sleep(0.02)
        for _ in range(num_kills):
            await server.kill(client, rng)
            await asyncio.sleep(0.1)
        found = [await stream for stream in streams]
        end = "" if killer is None else (await killer)[0]
        return found, end, await num_restarts(client) - before


async def alone(server: Server, bodies: list[dict[str, Any]]) -> list[tuple[str, list[list[int]]]]:
    async with httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S) as client:
        return [await ask(client, body) for body in bodies]


def summary(log: str, ends: Counter[str], killers: Counter[str], num_wrong: int) -> str:
    outside = re.findall(r"gone \(outside\) while it was (\w+): .*; to be tried: (\d+)", log)
    doings = Counter(doing for doing, _ in outside)
    return (
        f"kills from outside {len(outside)} ({dict(doings)}), while requests were to be tried:"
        f" {sum(count != '0' for _, count in outside)}; streams {ends.total()}: {dict(ends)};"
        f" with other tokens than alone: {num_wrong}; killers: {dict(killers)}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=14)
    parser.add_argument("--streams", type=int, default=36)
    parser.add_argument("--kills", type=int, default=3, help="from outside, in a round")
    parser.add_argument("--killer", choices=KINDS, default="segfault")
    parser.add_argument("--seed", type=int, default=0)
    wish = parser.parse_args(argv)
    rng = random.Random(wish.seed)
    bodies = make_bodies(wish.streams)
    ends: Counter[str] = Counter()
    killers: Counter[str] = Counter()
    num_wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder) / "log")
        try:
            expected = asyncio.run(alone(server, bodies))
            for number in range(wish.rounds):
                found, end, restarts = asyncio.run(
                    run_round(server, bodies, wish.killer, wish.kills, rng)
                )
                ends.update(one for one, _ in found)
                if end:
                    killers[end] += 1
                wrong = [
                    one
                    for one, other in zip(found, expected, strict=True)
                    if one[0] == "answered" and one != other
                ]
                num_wrong += len(wrong)
                print(f"round {number}: restarts {restarts}, killer: {end or '-'}", flush=True)
        finally:
            server.close()
        print(summary(server.log.read_text(), ends, killers, num_wrong))
    is_good = not num_wrong and set(ends) == {"answered"} and set(killers) <= {KILLS}
    return 0 if is_good else 1


KILLS = "request_kills_engine"

if __name__ == "__main__":
    if "--engine" in sys.argv:
        sys.exit(run_engine(sys.argv[sys.argv.index("--engine") + 1 :]))
    sys.exit(run_api_server() if "--api-server" in sys.argv else main())
