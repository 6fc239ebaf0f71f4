"""`python -m quire.simulation fleet TRACE`: compares routing policies on a trace.

    python -m quire.simulation fleet mooncake.jsonl --replicas 8 --num-blocks 4000 --speed 3.3

prints a line for each policy. The defaults describe a model of 8 billion parameters on a GPU that
computes 20,480 prompt tokens per second.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from quire.core.memory.eviction import DEFAULT_ORDER, EVICTION_ORDERS
from quire.core.scheduling.cost_model import NUM_SEGMENTS, StepCostModel
from quire.errors import ConfigurationError
from quire.plugins import add_plugin_flag
from quire.routing.find import ROUTING_POLICIES
from quire.simulation.fleet.fleet_report import HEADER
from quire.simulation.fleet.fleet_simulator import simulate_fleet
from quire.simulation.fleet.replica_engine import ReplicaShape
from quire.traces.read import read_trace


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status. Raises ConfigurationError for invalid options."""
    options = _parser().parse_args(arguments)
    trace = read_trace(options.trace)
    if options.first is not None:
        trace = trace.first(options.first)
    trace = trace.at_speed(options.speed).repeated(options.copies)
    shape = _shape(options, trace.block_tokens)
    if not options.slow > 0 or options.num_slow > options.replicas:
        raise ConfigurationError(
            f"slow is {options.slow:g} and num_slow {options.num_slow}, but must be above 0, and at"
            f" most {options.replicas}, as many as there are replicas"
        )
    shapes = [replace(shape, slowness=options.slow) for _ in range(options.num_slow)]
    shapes += [shape] * (options.replicas - options.num_slow)
    names = options.policy or list(ROUTING_POLICIES)
    policies = [ROUTING_POLICIES.make(*_named(name)) for name in names]
    num_requests = sum(each.end != "refused" for each in trace.requests)
    print(
        f"{num_requests} requests in {trace.duration_s:.0f} s to {options.replicas} replicas"
        f" of {shape.num_blocks} blocks; no cache could have more hits than"
        f" {trace.best_hit_rate():.2%}\n"
    )
    print("\n".join(HEADER), flush=True)
    for name, policy in zip(names, policies, strict=True):
        report = simulate_fleet(trace, shapes, policy, name)
        print(report.line(), flush=True)
    return 0


def step_costs(
    tokens_per_s: float, step_s: float, row_s: float, context_token_s: float, step_tokens: int
) -> StepCostModel:
    """The cost model of an engine that computes tokens_per_s prompt tokens in steps of step_tokens.

    Each step takes step_s, plus row_s for each generating sequence and context_token_s for each
    token that a generating sequence attends to. Raises ConfigurationError if a step at that rate
    would be shorter than step_s, or a time is negative.
    """
    if not tokens_per_s > 0:
        raise ConfigurationError(f"prefill_rate is {tokens_per_s:g}, but must be above 0")
    token_s = 1.0 / tokens_per_s - step_s / step_tokens
    if min(token_s, step_s, row_s, context_token_s) < 0:
        raise ConfigurationError(
            f"prefill_rate is {tokens_per_s:g} and step_s {step_s:g}, but a step of {step_tokens}"
            f" tokens at that rate takes {step_tokens / tokens_per_s:g} s; lower prefill_rate or"
            " step_s, and give no negative times"
        )
    return StepCostModel([step_s, *[token_s] * NUM_SEGMENTS, row_s, context_token_s, *[0.0] * 4])


def _shape(options: argparse.Namespace, block_tokens: int) -> ReplicaShape:
    EVICTION_ORDERS.get(options.eviction)
    return ReplicaShape(
        options.num_blocks,
        options.block_size or block_tokens,
        step_costs(
            options.prefill_rate,
            options.step_s,
            options.row_s,
            options.context_token_s,
            options.max_num_batched_tokens,
        ),
        options.max_num_batched_tokens,
        options.max_num_seqs,
        options.max_itl_ratio,
        options.eviction,
    )


def _named(text: str) -> tuple[str, dict[str, float]]:
    """The name and the options of a policy given as NAME or NAME:OPTION=NUMBER,..."""
    name, _, listed = text.partition(":")
    try:
        pairs = [pair.split("=") for pair in listed.split(",") if pair]
        return name, {option: float(number) for option, number in pairs}
    except ValueError as error:
        raise ConfigurationError(
            f"policy is {text!r}, but must be NAME or NAME:OPTION=NUMBER,OPTION=NUMBER"
        ) from error


def _at_least_1(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1 up")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m quire.simulation fleet",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", type=Path, help="file in Mooncake's or Azure's format")
    add_plugin_flag(parser)
    add = parser.add_argument
    add("--replicas", type=_at_least_1, default=8, help="number of replicas (8)")
    add("--slow", type=float, default=1.0, help="actual / reported step time of slow replicas (1)")
    add("--num-slow", type=int, choices=range(64), metavar="N", default=0, help="slow replicas (0)")
    add("--policy", action="append", help="NAME or NAME:OPTION=NUMBER,...; may be repeated (all)")
    add("--speed", type=float, default=1.0, help="factor on the rate of requests (1)")
    add("--copies", type=_at_least_1, default=1, help="copies of the trace, with own prefixes (1)")
    add("--first", type=_at_least_1, help="number of requests of the trace (all)")
    add("--num-blocks", type=_at_least_1, default=4000, help="blocks of each replica's pool (4000)")
    add("--block-size", type=_at_least_1, help="tokens in a block (as in the trace)")
    add("--eviction", default=DEFAULT_ORDER, help=f"order of eviction ({DEFAULT_ORDER})")
    add("--max-num-seqs", type=_at_least_1, default=64, help="rows of each replica (64)")
    add("--max-num-batched-tokens", type=_at_least_1, default=2048, help="tokens of a step (2048)")
    add("--max-itl-ratio", type=float, default=0.0, help="pacing of each replica; 0: none (0)")
    add("--prefill-rate", type=float, default=20480.0, help="prompt tokens a second (20480)")
    add("--step-s", type=float, default=8e-3, help="seconds of any step (0.008)")
    add("--row-s", type=float, default=2e-5, help="seconds per generating sequence (2e-5)")
    add("--context-token-s", type=float, default=4e-8, help="seconds per token attended to (4e-8)")
    return parser
