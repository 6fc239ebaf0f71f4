"""`python -m quire.simulation --seed N --num-steps N ...`: run one simulation, print its report.

If an invariant is broken, it exits with status 1 and prints the command that repeats the
simulation. With `fleet TRACE ...` it simulates replicas behind a router instead: see
`python -m quire.simulation fleet --help`.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import logging
import re
import sys
import time
from collections.abc import Callable, Sequence

from quire.errors import ConfigurationError
from quire.plugins import add_plugin_flag, load_plugins_of
from quire.simulation.fleet import fleet_command
from quire.simulation.report import SimulationReport, add_up, printed_lines
from quire.simulation.simulator import SimulationError, run
from quire.simulation.workload import SimulationConfig
from quire.simulation.worlds import (
    draw_content_world,
    draw_draft_world,
    draw_hybrid_world,
    draw_world,
    draw_worlds,
)

DrawWorld = Callable[[int, int, int, int], SimulationConfig]
DRAWN_WORLDS: dict[str, tuple[DrawWorld, str]] = {
    "--everything": (draw_world, "worlds with everything, drawn from the seed"),
    "--hybrids": (draw_hybrid_world, "the same, of models with windows, latents or states"),
    "--drafts": (draw_draft_world, "both kinds of worlds, with drafts and contents"),
    "--contents": (draw_content_world, "the same, with contents and adapters in prompts"),
}
"""Flag -> the function that draws random simulations for it, and its help. The last flag that
is given counts."""
DEFAULT = SimulationConfig()
DEFAULT_NUM_STEPS = 20_000  # with --everything, --hybrids, --drafts or --contents


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        load_plugins_of(words)
        if words[:1] == ["fleet"]:
            return fleet_command.main(words[1:])
        config, draw = _parse(arguments)
        report = run(config) if draw is None else _run_everything(config, draw)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except SimulationError as error:
        print(f"{error}\nreplay: {replay_command(error.config)}", file=sys.stderr)
        return 1
    print("\n".join(printed_lines(report)))
    return 0


def _run_everything(config: SimulationConfig, draw: DrawWorld) -> SimulationReport:
    """Run random simulations (worlds) of all features, and print a line for each. Returns the sum
    of their reports."""
    num_steps = DEFAULT_NUM_STEPS if config.num_steps is None else config.num_steps
    for option in dataclasses.fields(SimulationConfig):
        is_default = getattr(config, option.name) == getattr(DEFAULT, option.name)
        if option.name not in ("seed", "num_steps", "check_every") and not is_default:
            raise ConfigurationError(
                f"{option.name} is {getattr(config, option.name)}, but --everything draws it from"
                " the seed; leave one of them out"
            )
    reports: list[SimulationReport] = []
    started_s = time.perf_counter()
    for world in draw_worlds(config.seed, num_steps, config.check_every, draw):
        reports.append(run(world))
        print(f"world {len(reports)}: {reports[-1].num_steps} steps", file=sys.stderr)
    total = add_up(reports, config.seed)
    total.steps_per_s = total.num_steps / (time.perf_counter() - started_s)
    return total


def replay_command(config: SimulationConfig) -> str:
    """The shell command that runs the same simulation again."""
    words = ["python -m quire.simulation", f"--seed {config.seed}"]
    for option in dataclasses.fields(SimulationConfig):
        value = getattr(config, option.name)
        if option.name == "seed" or value == getattr(DEFAULT, option.name):
            continue
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        if option.name in ("policy_options", "tier"):
            text = ",".join(f"{name}={number}" for name, number in value)
        words.append(f"--{option.name.replace('_', '-')} {text}")
    return " ".join(words)


def _parse(arguments: Sequence[str] | None) -> tuple[SimulationConfig, DrawWorld | None]:
    """(the simulation that the options describe, the function that draws random simulations for
    --everything, --hybrids, --drafts or --contents). The function is None if no such option is
    given."""
    parser = argparse.ArgumentParser(
        prog="python -m quire.simulation",
        description=f"{__doc__}\n{SimulationConfig.__doc__}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for flag, (_, note) in DRAWN_WORLDS.items():
        parser.add_argument(flag, action="store_true", help=note)
    add_plugin_flag(parser)
    notes = field_comments(SimulationConfig)
    for option in dataclasses.fields(SimulationConfig):
        default = getattr(DEFAULT, option.name)
        shown = "NAME=NUMBER,... (none)" if default == () else f"default: {default}"
        parser.add_argument(
            f"--{option.name.replace('_', '-')}",
            type=_reader(default),
            default=default,
            help=f"{notes.get(option.name, '')} ({shown})".lstrip(),
        )
    options = vars(parser.parse_args(arguments))
    del options["plugins"]  # they are loaded
    drawn = DRAWN_WORLDS.items()
    asked = [draw for flag, (draw, _) in drawn if options.pop(flag.removeprefix("--"))]
    return SimulationConfig(**options), asked[-1] if asked else None


def field_comments(owner: type) -> dict[str, str]:
    """The `#:` comment above each field of a class, by field name: the help of the options."""
    found: dict[str, str] = {}
    lines: list[str] = []
    for line in map(str.strip, inspect.getsource(owner).splitlines()):
        field = re.match(r"(\w+): .* = ", line)
        if line.startswith("#: "):
            lines.append(line.removeprefix("#: "))
        elif field and lines:
            found[field[1]], lines = " ".join(lines), []
    return found


def _reader(default: object) -> Callable[[str], object]:
    if isinstance(default, bool):
        return _bool
    if isinstance(default, tuple):
        return _range if default else _numbers_by_name
    if isinstance(default, float):
        return float
    return str if isinstance(default, str) else int


def _bool(text: str) -> bool:
    if text not in ("True", "False"):
        raise argparse.ArgumentTypeError(f"{text!r} must be True or False")
    return text == "True"


def _numbers_by_name(text: str) -> tuple[tuple[str, float], ...]:
    try:
        pairs = [word.split("=") for word in text.split(",")]
        return tuple((name, float(number)) for name, number in pairs)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=NUMBER,NAME=NUMBER") from error


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(",")
    return int(low), int(high or low)


if __name__ == "__main__":
    logging.disable(logging.ERROR)  # the engine logs each step whose failure was injected
    sys.exit(main())
