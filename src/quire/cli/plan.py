"""`quire plan`: says how to serve a load on this machine. Called by `main`."""

import argparse
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    from quire.planning.plan import Planner
    from quire.planning.step_cost_file import StepCostFile

    load = read_load(args.load)
    objectives = Objectives() if args.slo is None else parse_objectives(args.slo)
    planner = Planner(given, StepCostFile(Path(args.costs)))
    if args.measure is not None:
        print("measuring what steps take; this loads the model", file=sys.stderr)
        kv_format = given.get("kv_cache_dtype") or "auto"
        planner.measure(args.measure, kv_format, load.longest, args.measure_time)
    sizes = planner.tune(load) if planner.tunes else []
    plan = planner.plan(load, objectives, args.replicas)
    if args.json:
        data = plan_data(plan, args.price)
        print(json.dumps(data | ({"block_sizes": size_data(sizes)} if sizes else {}), indent=1))
        return 0 if plan.best is not None else NOT_ANSWERED
    if sizes:
        print("\n".join(size_lines(sizes, planner.block_size)))
    for line in plan_lines(plan, args.price):
        print(line)
    return 0 if plan.best is not None else NOT_ANSWERED
