"""`quire plan`: says how to serve a load on this machine. Called by `main`."""

import argparse
import json
import math
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.cli.chat.terminal import Spinner
from quire.errors import ConfigurationError

NOT_ANSWERED = 1
"""The exit code if the plan has no answer, since nothing was measured."""


def make_plan(args: argparse.Namespace, given: Mapping[str, Any]) -> int:
    """Print a plan, and return the exit code. `given` has the engine's options by name.

    Raises ConfigurationError.
    """
    if args.price is not None and not 0 < args.price < math.inf:
        raise ConfigurationError(f"--price is {args.price:g}, but must be above 0")
    if not 0 < args.measure_time < math.inf:
        raise ConfigurationError(f"--measure-time is {args.measure_time:g}, but must be above 0")
    # These modules import torch, so the values are checked first.
    from quire.planning.lines import plan_data, plan_lines, size_data, size_lines
    from quire.planning.load import read_load
    from quire.planning.objectives import Objectives, parse_objectives
    from quire.planning.plan import OWN, Planner
    from quire.planning.step_cost_file import StepCostFile

    load = read_load(args.load)
    objectives = Objectives() if args.slo is None else parse_objectives(args.slo)
    planner = Planner(given, StepCostFile(Path(args.costs)))

    def measure(precision: str) -> None:
        print("measuring what steps take; this loads the model", file=sys.stderr)
        kv_format = given.get("kv_cache_dtype") or "auto"
        spinner = Spinner(sys.stderr, f"measuring for about {args.measure_time:g} s")
        try:
            planner.measure(precision, kv_format, load.longest, args.measure_time)
        finally:
            spinner.stop()

    if args.measure is not None:
        measure(args.measure)
    sizes = planner.tune(load) if planner.tunes else []
    plan = planner.plan(load, objectives, args.replicas)
    if args.json:
        data = plan_data(plan, args.price)
        print(json.dumps(data | ({"block_sizes": size_data(sizes)} if sizes else {}), indent=1))
        return 0 if plan.best is not None else NOT_ANSWERED
    if sizes:
        print("\n".join(size_lines(sizes, planner.block_size)))
    print("\n".join(plan_lines(plan, args.price)))
    if not plan.found and args.measure is None:
        if not _is_wanted(args):
            return NOT_ANSWERED
        measure(OWN)
        plan = planner.plan(load, objectives, args.replicas)
        print("\n".join(plan_lines(plan, args.price)))
    return 0 if plan.best is not None else NOT_ANSWERED


def _is_wanted(args: argparse.Namespace) -> bool:
    """Whether the user wants to measure now. Without a terminal, prints the command instead."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        print(f"measure with: {shlex.join(['quire', *args.words, '--measure'])}")
        return False
    question = f"measure now? It loads the model and takes about {args.measure_time:g} s [y/N] "
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False
