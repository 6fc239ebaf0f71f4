"""A crowd of streaming clients on one server for a bounded time, with bad neighbours among them.

    python -m benchmarks.server.clients --clients 500 --seconds 60 --out clients.json

starts `quire serve` (the embedded model, unless --model says otherwise; what follows `--` is given
to it as it stands), lets clients ask for one streamed answer after the other, and beside
them: clients that never read, that read or send a byte a second, and that vanish in the middle. It
prints a table and ends with 1 unless every answer was whole, none got stuck, and the engine holds
no block afterwards. Clients and server share the machine's cores.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.cpu.tables import number, table
from benchmarks.server.crowd import NEIGHBOURS, CrowdPlan, Tally, run_crowd
from benchmarks.server.serving import Server, ServingError, cpu_s, resident_bytes, served

MIB = 1 << 20
LOG = Path(tempfile.gettempdir()) / "quire_clients.log"
DEFAULT_NEIGHBOURS = {
    "never_read": 5,
    "slow_read": 5,
    "slow_body": 5,
    "slow_head": 5,
    "vanish": 20,
}


@dataclass(frozen=True, slots=True)
class Sample:
    """The two processes at one moment after the start."""

    at_s: float
    api_server_bytes: int
    engine_bytes: int


class Watch:
    """Samples of a server's memory, one a second."""

    def __init__(self, server: Server) -> None:
        self.samples: list[Sample] = []
        self._server = server
        self._engine = server.engine
        self._start_s = time.perf_counter()

    async def look(self) -> None:
        self.samples.append(
            Sample(
                time.perf_counter() - self._start_s,
                resident_bytes(self._server.api_server),
                resident_bytes(self._engine),
            )
        )


def growth_bytes(values: Sequence[int]) -> int:
    """Between the medians of the second and of the last quarter: what start-up took is left out."""
    if len(values) < 4:
        return values[-1] - values[0]
    quarter = len(values) // 4
    early, late = values[quarter : 2 * quarter], values[-quarter:]
    return round(statistics.median(late) - statistics.median(early))


def quantile(values: Sequence[float], share: float) -> float | None:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def summary(
    plan: CrowdPlan, tally: Tally, watch: Watch, cpu: Sequence[float], after: dict[str, Any]
) -> dict[str, Any]:
    """Everything that was measured, as JSON has it. cpu: seconds of the API server and of the
    engine."""
    api_server = [sample.api_server_bytes for sample in watch.samples]
    engine = [sample.engine_bytes for sample in watch.samples]
    seconds = watch.samples[-1].at_s
    return {
        "plan": asdict(plan),
        "seconds": seconds,
        "num_answers": tally.num_answers,
        "num_refused": tally.num_refused,
        "num_stuck": tally.num_stuck,
        "problems": dict(tally.problems),
        "num_tokens": tally.num_tokens,
        "tokens_per_s": tally.num_tokens / seconds,
        "num_comments": tally.num_comments,
        "longest_gap_s": tally.gap_s,
        "ttft_p50_s": quantile(tally.first_s, 0.5),
        "ttft_p99_s": quantile(tally.first_s, 0.99),
        "answer_p50_s": quantile(tally.whole_s, 0.5),
        "answer_p99_s": quantile(tally.whole_s, 0.99),
        "neighbours": dict(tally.happenings),
        "api_server_cpu_s": cpu[0],
        "engine_cpu_s": cpu[1],
        "api_server_bytes": api_server[-1],
        "api_server_growth_bytes": growth_bytes(api_server),
        "engine_bytes": engine[-1],
        "engine_growth_bytes": growth_bytes(engine),
        "num_held_blocks_after": after["num_held_blocks"],
        "num_running_after": after["num_running"] + after["num_waiting"],
        "samples": [asdict(sample) for sample in watch.samples],
    }


def measure(server: Server, plan: CrowdPlan) -> dict[str, Any]:
    watch, engine = Watch(server), server.engine
    before = cpu_s(server.api_server), cpu_s(engine)
    tally = asyncio.run(run_crowd(plan, watch.look))
    cpu = [cpu_s(server.api_server) - before[0], cpu_s(engine) - before[1]]
    return summary(plan, tally, watch, cpu, server.wait_until_quiet())


def is_good(found: dict[str, Any]) -> bool:
    """Nobody was harmed and nothing was left behind."""
    bad = ("num_stuck", "problems", "num_held_blocks_after", "num_running_after")
    return bool(found["num_answers"]) and not any(found[name] for name in bad)


def report(found: dict[str, Any]) -> str:
    plan = found["plan"]
    clients = plan["num_clients"]
    neighbours = ", ".join(f"{plan[name]} {name}" for name in NEIGHBOURS if plan[name])
    rows = [
        ["clients, seconds", f"{clients}, {found['seconds']:.0f}"],
        ["bad neighbours", neighbours or "none"],
        ["whole answers; tokens/s", f"{found['num_answers']}; {found['tokens_per_s']:.0f}"],
        ["refused (429, 503)", str(found["num_refused"])],
        ["wrong or cut answers", str(sum(found["problems"].values()))],
        ["stuck answers", str(found["num_stuck"])],
        ["TTFT p50, p99, s", f"{_seconds(found, 'ttft_p50_s')}, {_seconds(found, 'ttft_p99_s')}"],
        ["longest wait for a byte, s", number(found["longest_gap_s"])],
        ["keep-alive comments", str(found["num_comments"])],
        ["API server: CPU s; MiB; growth", _process(found, "api_server")],
        ["engine: CPU s; MiB; growth", _process(found, "engine")],
        ["blocks held afterwards", str(found["num_held_blocks_after"])],
    ]
    return table(["what", "measured"], rows)


def _seconds(found: dict[str, Any], name: str) -> str:
    return "-" if found[name] is None else number(found[name])


def _process(found: dict[str, Any], name: str) -> str:
    mib, growth = found[f"{name}_bytes"] / MIB, found[f"{name}_growth_bytes"] / MIB
    return f"{found[f'{name}_cpu_s']:.1f}; {mib:.0f}; {growth:+.1f}"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", help="a folder; default: the embedded model")
    add("--clients", type=int, default=500)
    add("--seconds", type=float, default=60.0)
    add("--max-tokens", type=int, default=64)
    add("--answer-limit", type=float, default=120.0, help="seconds; longer ones are stuck")
    for name, count in DEFAULT_NEIGHBOURS.items():
        add(f"--{name.replace('_', '-')}", type=int, default=count)
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="everything as JSON, samples of the memory included")
    add("--markdown", type=Path)
    add("--log", type=Path, default=LOG, help="the server's error output (%(default)s)")
    add("serve_arguments", nargs="*", help="for quire serve, behind --")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    arguments = [*([args.model] if args.model else []), *args.serve_arguments]
    try:
        with served(arguments, args.log) as server:
            plan = CrowdPlan(
                server.host,
                server.port,
                args.clients,
                args.seconds,
                max_tokens=args.max_tokens,
                answer_limit_s=args.answer_limit,
                seed=args.seed,
                **{name: getattr(args, name) for name in NEIGHBOURS},
            )
            found = measure(server, plan)
    except ServingError as error:
        sys.exit(f"clients.py: error: {error}")
    text = report(found)
    print(text)
    for problem, count in found["problems"].items():
        print(f"{count} x {problem}", file=sys.stderr)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(text + "\n")
    sys.exit(0 if is_good(found) else 1)


if __name__ == "__main__":
    main()
