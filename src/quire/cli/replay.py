"""`quire replay`: replays a recorded load against another configuration. Called by `main`."""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.errors import ConfigurationError
from quire.replay.figures import ReplayFigures
from quire.traces.azure import azure_lines
from quire.traces.mooncake import mooncake_lines
from quire.traces.read import read_trace
from quire.traces.trace import Trace

MEASURE_S = 10.0
FORMATS = {"mooncake": mooncake_lines, "azure": azure_lines}
"""Maps the name of each target format to the function that makes its lines."""


def replay(args: argparse.Namespace, given: Mapping[str, Any]) -> int:
    """Replay or convert a trace. Returns the exit code. `given` has the engine's options by name.

    Raises ConfigurationError.
    """
    _check_together(args, given)
    trace = _asked_for(args)
    if args.convert is not None:
        return _convert(trace, args.convert, Path(args.output))
    if args.url is not None:
        figures = asyncio.run(_against_server(trace, args))
    else:
        figures = _in_simulation(trace, args, given)
    if args.json:
        print(json.dumps(figures.data(), indent=1))
    else:
        print("\n".join(figures.lines()))
    return 0 if any(reply.first_s is not None for reply in figures.replies) else 1


def _check_together(args: argparse.Namespace, given: Mapping[str, Any]) -> None:
    if (args.convert is None) != (args.output is None):
        raise ConfigurationError("--convert and -o belong together: the format, and the new file")
    if args.convert is not None and args.url is not None:
        raise ConfigurationError("--convert writes a file and asks no server; leave out --url")
    for_servers = {
        "--api-key": args.api_key,
        "--served-model-name": args.served_model_name,
        "--vocab-size": args.vocab_size,
    }
    for flag, value in for_servers.items():
        if value is not None and args.url is None:
            raise ConfigurationError(f"{flag} is about a server; name it with --url")
    if (given or args.measure) and (args.url is not None or args.convert is not None):
        names = ", ".join(sorted([*given, *(["--measure"] if args.measure else [])]))
        raise ConfigurationError(
            f"{names} would describe an engine to simulate; leave it out with --url and --convert"
        )


def _asked_for(args: argparse.Namespace) -> Trace:
    """Read the trace, and apply --first, --copies and --speed."""
    trace = read_trace(Path(args.file))
    if args.first is not None:
        trace = trace.first(args.first)
    if not trace.requests:
        raise ConfigurationError(f"{args.file} has no requests")
    return trace.repeated(args.copies).at_speed(args.speed)


def _convert(trace: Trace, name: str, path: Path) -> int:
    """Write the trace in another format to a new file that only its owner may read."""
    lines = FORMATS[name](trace)
    try:
        with open(path, "x", encoding="utf-8", opener=_open_for_owner) as file:
            try:
                file.writelines(lines)
                file.flush()
            except BaseException:
                path.unlink(missing_ok=True)
                raise
    except FileExistsError as error:
        raise ConfigurationError(f"{path} is there already; name a new file with -o") from error
    except OSError as error:
        raise ConfigurationError(f"{path} can't be written: {error.strerror}") from error
    except OverflowError as error:
        raise ConfigurationError(f"the trace has times that {name} can't say: {error}") from error
    num_left_out = sum(request.end == "refused" for request in trace.requests)
    left_out = f"; {num_left_out} refused requests are left out" if num_left_out else ""
    print(f"{len(trace.requests) - num_left_out} requests written to {path}{left_out}")
    return 0


def _open_for_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _in_simulation(
    trace: Trace, args: argparse.Namespace, given: Mapping[str, Any]
) -> ReplayFigures:
    # These modules import torch, so the arguments are checked first.
    from quire.planning.plan import OWN, Planner
    from quire.planning.step_cost_file import StepCostFile
    from quire.replay.against_simulation import replay_in_simulation
    from quire.server.config import MAX_QUEUED_REQUESTS

    planner = Planner(given, StepCostFile(Path(args.costs)))
    found = planner.as_given()
    if found.fit is None:
        raise ConfigurationError(f"no engine can be simulated: {found.obstacle}")
    if args.measure:
        print("measuring what steps take; this loads the model", file=sys.stderr)
        longest = max(
            request.num_prompt_tokens + request.num_output_tokens for request in trace.requests
        )
        name = found.options.quantization or OWN
        planner.measure(name, found.kv_format, longest, MEASURE_S)
        found = planner.as_given()
    if found.fit is None or found.costs is None:
        raise ConfigurationError(
            "the step times of this model and configuration"
            f"{'' if found.options.cache_dir is None else ', or the speeds of cache_dir,'}"
            " were not measured on this machine; --measure does it, which loads the model"
        )
    return replay_in_simulation(
        trace,
        found.shape,
        found.costs,
        bounds=found.costs.bounds,
        max_queued_requests=MAX_QUEUED_REQUESTS,
        is_closed=not args.open_loop,
    )


async def _against_server(trace: Trace, args: argparse.Namespace) -> ReplayFigures:
    # A simulation does not need these.
    from quire.replay.against_server import find_model, replay_to_server
    from quire.replay.completion_client import ServerAddress

    address = ServerAddress.of(args.url, args.api_key)
    model = await find_model(address, args.served_model_name, args.vocab_size)
    shows = sys.stderr.isatty()
    num_ended = 0

    def on_reply(_: object) -> None:
        nonlocal num_ended
        num_ended += 1
        if shows:
            print(f"\r{num_ended} of {len(trace.requests)} requests", end="", file=sys.stderr)

    figures = await replay_to_server(
        trace, address, model, is_closed=not args.open_loop, on_reply=on_reply
    )
    if shows:
        print(file=sys.stderr)
    return figures
