"""Measures what an open page costs: throughput, inter-token latency and bytes.

    python -m benchmarks.page.cost --rounds 4 --seconds 8

Two servers of one model stand side by side, and one of them works at a time. On the first nobody
has ever asked for /stats. On the second the page is closed, or open: a client reads /stats/events
with every part four times a second, as the page's view Memory does. Each round has the three in
another order, with the same requests. The ratios are medians over the rounds, of an open and a
closed page to none. The reading client runs on the same cores; a browser's drawing does not count.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.server.crowd import Answer, request_bytes, stream_body
from benchmarks.server.serving import Server, cpu_s, served
from quire.server.stats.engine_view import PARTS

NEVER, CLOSED, OPEN = "never opened", "closed", "open"
PROMPT = "def read_lines(path, encoding):\n    with open(path) as file:\n        return "
LIMIT_S = 120.0


class TimedAnswer(Answer):
    """An answer with the times between its events."""

    def __init__(self, request: bytes, num_expected: int) -> None:
        super().__init__(request, num_expected)
        self.gaps_s: list[float] = []

    def data_received(self, data: bytes) -> None:
        before_s, had_begun = self.last_s, bool(self.first_s)
        super().data_received(data)
        if had_begun and b"data: {" in data:
            num_events = data.count(b"data: {")
            self.gaps_s += [(self.last_s - before_s) / num_events] * num_events


@dataclass(frozen=True, slots=True)
class Turn:
    """One measurement."""

    tokens_per_s: float
    #: 99th percentile of the times between tokens.
    gap_p99_s: float
    #: Bytes a second of the stream that the page reads.
    bytes_per_s: float
    #: Processor time of the API server and the engine for one token.
    cpu_s_per_token: float


class PageStream(asyncio.Protocol):
    """Reads /stats/events and counts its bytes."""

    def __init__(self, host: str) -> None:
        self.num_bytes = 0
        self._host = host

    def connection_made(self, transport: Any) -> None:
        path = f"/stats/events?parts={','.join(PARTS)}&interval=0.25"
        transport.write(f"GET {path} HTTP/1.1\r\nHost: {self._host}\r\n\r\n".encode())

    def data_received(self, data: bytes) -> None:
        self.num_bytes += len(data)


async def run_turn(server: Server, args: argparse.Namespace, *, is_open: bool, seed: int) -> Turn:
    """Keep --clients streams open for --seconds, with the page or without."""
    loop = asyncio.get_running_loop()
    page = PageStream(server.host)
    transport = None
    if is_open:
        transport, _ = await loop.create_connection(lambda: page, server.host, server.port)
        await asyncio.sleep(0.5)
    gaps_s: list[float] = []
    num_tokens = 0
    before_s = _cpu_s(server)
    began_s = time.perf_counter()
    end_s, bytes_before = began_s + args.seconds, page.num_bytes

    async def client(number: int) -> None:
        nonlocal num_tokens
        turn = 0
        while time.perf_counter() < end_s:
            words = " ".join(str((seed * 31 + number * 7 + turn * 3 + at) % 97) for at in range(40))
            body = stream_body(seed + number, args.tokens, prompt=PROMPT + words)
            request = request_bytes("/v1/completions", body)
            answer = TimedAnswer(request, args.tokens)
            await loop.create_connection(lambda answer=answer: answer, server.host, server.port)
            async with asyncio.timeout(LIMIT_S):
                await answer.done
            if answer.problem is not None:
                raise RuntimeError(answer.problem)
            num_tokens += answer.num_tokens
            gaps_s.extend(answer.gaps_s)
            turn += 1

    await asyncio.gather(*[client(number) for number in range(args.clients)])
    passed_s = time.perf_counter() - began_s
    if transport is not None:
        transport.close()
    gaps_s.sort()
    return Turn(
        num_tokens / passed_s,
        gaps_s[int(0.99 * len(gaps_s))],
        (page.num_bytes - bytes_before) / passed_s,
        (_cpu_s(server) - before_s) / num_tokens,
    )


def measure(args: argparse.Namespace) -> dict[str, list[Turn]]:
    """The turns of all rounds, by what they measure."""
    found: dict[str, list[Turn]] = {NEVER: [], CLOSED: [], OPEN: []}
    options = ["--num-blocks", str(args.num_blocks), "--max-num-seqs", str(args.clients)]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        first, second = (
            stack.enter_context(served(options, Path(folder, f"{name}.log"))) for name in "ab"
        )
        servers = {NEVER: first, CLOSED: second, OPEN: second}
        for server in (first, second):  # warm up
            asyncio.run(run_turn(server, args, is_open=False, seed=999))
        for at in range(args.rounds):
            names = list(found)
            for name in names[at % 3 :] + names[: at % 3]:
                turn = run_turn(servers[name], args, is_open=name == OPEN, seed=at)
                found[name].append(asyncio.run(turn))
                if name == OPEN:
                    time.sleep(args.pause)  # until the engine collects nothing any more
        asked = _stats(second)["engines"][0]
        assert asked["answers"]
    return found


def _cpu_s(server: Server) -> float:
    return cpu_s(server.api_server) + cpu_s(server.engine)


def _stats(server: Server) -> dict[str, Any]:
    url = f"http://{server.host}:{server.port}/stats?parts=stats"
    with urllib.request.urlopen(url, timeout=30) as answer:
        return dict(json.load(answer))


def ratios(turns: dict[str, list[Turn]], name: str) -> list[float]:
    """Medians over the rounds of `name` to NEVER: throughput, p99, processor time for a token."""
    pairs = list(zip(turns[name], turns[NEVER], strict=True))
    return [
        statistics.median([a.tokens_per_s / b.tokens_per_s for a, b in pairs]),
        statistics.median([a.gap_p99_s / b.gap_p99_s for a, b in pairs]),
        statistics.median([a.cpu_s_per_token / b.cpu_s_per_token for a, b in pairs]),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table; with --out also write all turns as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each turn")
    parser.add_argument("--pause", type=float, default=11.0, help="after a turn with the page open")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--num-blocks", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    turns = measure(args)
    rows = []
    for name, each in turns.items():
        throughput, latency, work = ratios(turns, name)
        rows.append(
            [
                name,
                f"{statistics.median([turn.tokens_per_s for turn in each]):,.0f}",
                f"{1e3 * statistics.median([turn.gap_p99_s for turn in each]):.2f}",
                f"{throughput:.3f}",
                f"{latency:.3f}",
                f"{work:.3f}",
                f"{statistics.median([turn.bytes_per_s for turn in each]):,.0f}",
            ]
        )
    head = [
        "page",
        "tokens/s",
        "ITL p99, ms",
        "tokens/s ratio",
        "ITL p99 ratio",
        "CPU ratio",
        "bytes/s",
    ]
    for cells in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(cells)} |")
    if args.out is not None:
        args.out.write_text(json.dumps({k: [asdict(t) for t in v] for k, v in turns.items()}))


if __name__ == "__main__":
    main()
