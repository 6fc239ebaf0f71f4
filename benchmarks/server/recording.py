"""The cost of recording, and how closely a replay matches the recorded load.

    python -m benchmarks.server.recording cost [--rounds 8]
    python -m benchmarks.server.recording fidelity [--rounds 2] [--model FOLDER]

The load: conversations of several turns over a few system prompts, whose lengths are no multiples
of anything, in a closed loop. Prompts are equal to the token where they are to be (a trace with
blocks of one token), while a recording has blocks of 64.

cost: three servers, one of which records, get the same load in turns: processor time of API server
and engine, and time until all is answered, as the median of what each round's are to those of the
plain server's, with its standard error. Two don't record, for the error of the method. Many short
rounds tell more than few long ones on a machine that others use. Then what the recorder takes by
itself.

fidelity: a server gets the load and records it. Then new servers get the load and its replay in
turns. Beside what the two differ in stands what every other round of the load differs in from the
rest. The simulated engine gets both, too.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import pi, sqrt
from pathlib import Path
from statistics import NormalDist, median, quantiles
from typing import Any

from benchmarks.server.serving import Server, cpu_s, served
from quire.core.request import FinishReason, Request, SequenceOutput
from quire.core.sampling_params import DecodingParams, ModelLimits
from quire.replay.against_server import find_model, replay_to_server
from quire.replay.completion_client import ServerAddress
from quire.replay.figures import ReplayFigures
from quire.replay.script import ModelBounds, ReplayScript
from quire.server.telemetry.load_recorder import LoadRecorder
from quire.server.telemetry.monitor import Monitor
from quire.traces.read import read_trace
from quire.traces.trace import Trace, TraceRequest, in_order

SYSTEM_PROMPTS = (411, 250, 97)
"""Tokens of the system prompts that conversations begin with."""


@dataclass(frozen=True, slots=True)
class TalkLoad:
    """num_talks conversations begin at random moments, talks_per_s in the mean. Turns: 1 to 4.
    question, answer: (fewest, most) tokens. think_s: the mean."""

    num_talks: int
    talks_per_s: float
    question: tuple[int, int] = (20, 180)
    answer: tuple[int, int] = (10, 90)
    think_s: float = 1.5
    seed: int = 0


class _TalkWriter:
    """Numbers the tokens of one conversation's growing text."""

    def __init__(self, system: tuple[int, ...], first_id: int) -> None:
        self.ids = list(system)
        self.next_id = first_id

    def fresh(self, num_tokens: int) -> tuple[int, ...]:
        """Ids of tokens beyond the vocabulary."""
        ids = tuple(range(self.next_id, self.next_id + num_tokens))
        self.next_id += num_tokens
        self.ids += ids
        return ids


def draw_talks(load: TalkLoad) -> Trace:
    """A trace with an id for each token, so that prompts share exactly what they are to share."""
    chance = random.Random(load.seed)
    next_id, systems = 0, []
    for length in SYSTEM_PROMPTS:
        systems.append(tuple(range(next_id, next_id + length)))
        next_id += length
    drafts: list[tuple[int, int, TraceRequest]] = []  # talk, turn, request
    at_s = 0.0
    for talk in range(load.num_talks):
        at_s += chance.expovariate(load.talks_per_s)
        writer = _TalkWriter(chance.choice(systems), next_id)
        turn_s = at_s
        for turn in range(chance.randint(1, 4)):
            writer.fresh(chance.randint(*load.question))
            prompt, think_s = tuple(writer.ids), chance.expovariate(1 / load.think_s)
            answer = writer.fresh(chance.randint(*load.answer))
            turn_s += think_s if turn else 0.0
            request = TraceRequest(
                turn_s, len(prompt), len(answer), prompt, answer, think_s=think_s if turn else 0.0
            )
            drafts.append((talk, turn, request))
        next_id = writer.next_id
    return _linked(drafts)


def _linked(drafts: Sequence[tuple[int, int, TraceRequest]]) -> Trace:
    """In order of arrival, each turn with its parent's number."""
    ordered = sorted(drafts, key=lambda draft: (draft[2].at_s, draft[:2]))
    places = {draft[:2]: place for place, draft in enumerate(ordered)}
    requests = []
    for talk, turn, request in ordered:
        parent = places[talk, turn - 1] if turn else None
        requests.append(
            TraceRequest(
                request.at_s,
                request.num_prompt_tokens,
                request.num_output_tokens,
                request.prefix_ids,
                request.output_ids,
                parent=parent,
                think_s=request.think_s,
            )
        )
    return Trace(1, in_order(requests))


async def ask(trace: Trace, server: Server) -> ReplayFigures:
    """All of it, in a closed loop."""
    address = ServerAddress.of(f"http://{server.host}:{server.port}", None)
    return await replay_to_server(trace, address, await find_model(address, None, None))


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds: of the processor by the API server and the engine, and until all was answered."""

    api_server_s: float
    engine_s: float
    wall_s: float

    @property
    def cpu_s(self) -> float:
        return self.api_server_s + self.engine_s


def measure(trace: Trace, server: Server) -> Round:
    server.wait_until_quiet()
    before = cpu_s(server.api_server), cpu_s(server.engine)
    began_s = time.perf_counter()
    figures = asyncio.run(ask(trace, server))
    wall_s = time.perf_counter() - began_s
    assert not figures.data()["refused"], figures.data()
    server.wait_until_quiet()
    return Round(cpu_s(server.api_server) - before[0], cpu_s(server.engine) - before[1], wall_s)


def compare_cost(options: argparse.Namespace, folder: Path) -> None:
    """Prints a table of the servers, and what recording takes by itself."""
    arguments = ["--num-threads", "1", *_model(options)]
    more: dict[str, list[str]] = {
        "plain": [],
        "plain again": [],
        "recording": ["--record", str(folder / "load")],
    }
    names, num_requests = list(more), 0
    rounds: dict[str, list[Round]] = {name: [] for name in names}
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(served([*arguments, *more[name]], folder / f"{name}.log"))
            for name in names
        }
        for number in range(options.rounds + 1):
            trace = draw_talks(TalkLoad(options.talks, 1e4, think_s=0.01, seed=number))
            first = number % len(names)
            for name in [*names[first:], *names[:first]]:
                found = measure(trace, servers[name])
                if number:  # the first warms up
                    rounds[name].append(found)
            num_requests += len(trace.requests) if number else 0
    print("| server | CPU s | API server | engine | wall s | CPU, to plain | wall, to plain |")
    print("|---|---|---|---|---|---|---|")
    plain = _sum(rounds["plain"])
    for name in names:
        found = _sum(rounds[name])
        pairs = list(zip(rounds[name], rounds["plain"], strict=True))
        print(
            f"| {name} | {found.cpu_s:.2f} | {found.api_server_s:.2f} | {found.engine_s:.2f} |"
            f" {found.wall_s:.2f} | {_ratio([one.cpu_s / other.cpu_s for one, other in pairs])} |"
            f" {_ratio([one.wall_s / other.wall_s for one, other in pairs])} |"
        )
    each_s, request_s = recording_s(trace, folder), plain.cpu_s / num_requests
    print(
        f"recording by itself takes {1e6 * each_s:.0f} us of processor time a request, in the loop"
        f" and in its thread: {100 * each_s / request_s:.2f}% of the {1e3 * request_s:.1f} ms that"
        " a request takes"
    )


def recording_s(trace: Trace, folder: Path) -> float:
    """Processor time that the recorder takes for each request of the trace, with a token at a time,
    beside a monitor without one: the least of five rounds of each."""
    times: dict[bool, list[float]] = {False: [], True: []}
    script = ReplayScript(trace, ModelBounds(4096, 1 << 20))
    asked = [
        (Request(str(number), script.prompt(number), DecodingParams(99)), each.num_output_tokens)
        for number, each in enumerate(trace.requests)
    ]
    for number in range(10):
        is_recorded, recorder = bool(number % 2), None
        began_s = time.process_time()
        if is_recorded:
            recorder = LoadRecorder(folder / f"by itself {number}", 64)
            recorder.begin(ModelLimits(4096, 1 << 20), {})
        monitor = Monitor(recorder=recorder)
        for request, num_tokens in asked:
            record = monitor.open_call([request], "", "")
            for left in range(num_tokens, 0, -1):
                end = FinishReason.LENGTH if left == 1 else None
                record.on_output(SequenceOutput(request.request_id, 0, [7], 0, end))
            record.close()
        monitor.close()
        times[is_recorded].append(time.process_time() - began_s)
    return (min(times[True]) - min(times[False])) / len(asked)


def _ratio(ratios: Sequence[float]) -> str:
    """The median, and the standard error of it."""
    _, middle, _ = quartiles = quantiles(ratios, n=4) if len(ratios) > 1 else 3 * list(ratios)
    spread = (quartiles[2] - quartiles[0]) / NormalDist().inv_cdf(0.75) / 2
    error = sqrt(pi / 2) * spread / sqrt(len(ratios))
    return f"{100 * (middle - 1):+.2f}% +- {100 * error:.2f}"


def _sum(rounds: Sequence[Round]) -> Round:
    return Round(
        sum(each.api_server_s for each in rounds),
        sum(each.engine_s for each in rounds),
        sum(each.wall_s for each in rounds),
    )


def compare_replays(options: argparse.Namespace, folder: Path) -> None:
    """Prints a table of hit rates and times, and how the replay's compare with the load's."""
    trace = draw_talks(TalkLoad(options.talks, options.rate))
    record = options.record or folder / "load"
    print("| | hit rate | TTFT p50 ms | p90 | ITL p50 ms | e2e p50 ms | duration s |")
    print("|---|---|---|---|---|---|---|", flush=True)
    if not record.exists():
        send_to_new(trace, options, folder, "the load, recorded", ["--record", str(record)])
    recorded = read_trace(record)
    loads = {"the load": trace, "its replay": recorded}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in loads}
    for number in range(options.rounds):
        for name in list(loads)[:: -1 if number % 2 else 1]:
            found[name].append(send_to_new(loads[name], options, folder, name))
    if options.costs is not None:
        for name, load in loads.items():
            print_row(f"{name}, simulated", simulate(load, options))
    print(
        f"recorded: {len(recorded.requests)} requests,"
        f" {sum(request.parent is not None for request in recorded.requests)} with a parent, blocks"
        f" of {recorded.block_tokens}, shared_tail_tokens {recorded.shared_tail_tokens},"
        f" continued_share {recorded.continued_share}, hit_rate {recorded.hit_rate}"
    )
    rounds = found["the load"]
    for name, one, other in (
        ("the replay is to the load", found["its replay"], rounds),
        ("every other round of the load is to the rest", rounds[::2], rounds[1::2]),
    ):
        if one and other:
            print(f"{name}: {compare_rounds(one, other)}")


def compare_rounds(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> str:
    """By the medians of both."""
    points = 100 * (median(run["hit_rate"] for run in one) - median(r["hit_rate"] for r in other))
    parts = [f"hit rate {points:+.2f} points"]
    for times, shown in (("ttft_s", "TTFT"), ("itl_s", "ITL"), ("e2e_s", "e2e")):
        ratio = median(run[times]["p50"] for run in one) / median(r[times]["p50"] for r in other)
        parts.append(f"{shown} p50 {100 * (ratio - 1):+.1f}%")
    return ", ".join(parts)


def send_to_new(
    trace: Trace, options: argparse.Namespace, folder: Path, name: str, more: Sequence[str] = ()
) -> dict[str, Any]:
    """All of a load to a new server, with more arguments; prints its row."""
    arguments = [*_model(options), "--num-blocks", str(options.num_blocks), *more]
    with served(arguments, folder / "server.log") as server:
        data = asyncio.run(ask(trace, server)).data()
    print_row(name, data)
    return data


def print_row(name: str, data: dict[str, Any]) -> None:
    print(
        f"| {name} | {100 * data['hit_rate']:.2f}% | {1e3 * data['ttft_s']['p50']:.1f} |"
        f" {1e3 * data['ttft_s']['p90']:.1f} | {1e3 * data['itl_s']['p50']:.2f} |"
        f" {1e3 * data['e2e_s']['p50']:.1f} | {data['duration_s']:.1f} |",
        flush=True,
    )


def simulate(trace: Trace, options: argparse.Namespace) -> dict[str, Any]:
    """On the simulated engine, with steps that are measured now if they were not before."""
    from quire.planning.plan import OWN, Planner
    from quire.planning.step_cost_file import StepCostFile
    from quire.replay.against_simulation import replay_in_simulation

    given: dict[str, Any] = {"num_blocks": options.num_blocks}
    if options.model is not None:
        given["model"] = options.model
    planner = Planner(given, StepCostFile(options.costs))
    found = planner.as_given()
    if found.costs is None:
        planner.measure(OWN, found.kv_format, 2000, 10.0)
        found = planner.as_given()
    assert found.fit is not None and found.costs is not None
    figures = replay_in_simulation(trace, found.shape, found.costs, max_queued_requests=1024)
    return figures.data()


def _model(options: argparse.Namespace) -> list[str]:
    return [] if options.model is None else [options.model]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("cost", "fidelity"))
    parser.add_argument("--model", help="the embedded one, if none is named")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--talks", type=int, default=80)
    parser.add_argument("--rate", type=float, default=1.5, help="talks a second")
    parser.add_argument("--num-blocks", type=int, default=2048)
    parser.add_argument("--record", type=Path, help="keep it there, or use what is there")
    parser.add_argument("--costs", type=Path, help="simulate too, with the costs kept there")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="quire-recording-") as name:
        compare = compare_cost if options.what == "cost" else compare_replays
        compare(options, Path(name))


if __name__ == "__main__":
    main()
