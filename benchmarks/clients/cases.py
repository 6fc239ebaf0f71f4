"""Cases of Python clients against a running server: their registry, what they share, their runner.

Runs in the clients' environment, so it needs nothing of quire. The embedded model answers nonsense
in the right form, so a case holds where the client raises nothing and finds the form that it asked
for.
"""

import argparse
import asyncio
import enum
import importlib.metadata
import os
import sys
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, Field

CASES: dict[tuple[str, str], Callable[[str, str], Any]] = {}
"""(package, what) -> a function of the server's URL and the model's name."""

PROMPT = "Which unit has the temperature of the sea?"
KEY = "none"

# These libraries would call their makers.
os.environ |= {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "AGNO_TELEMETRY": "false",
}


class Unit(enum.StrEnum):
    """So few values that any model ends soon."""

    C = "C"
    F = "F"


class Reading(BaseModel):
    """A temperature."""

    unit: Unit
    degrees: int = Field(ge=0, le=9)


PARAMETERS = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "degrees": {"enum": [1, 2, 3]}},
    "required": ["unit", "degrees"],
    "additionalProperties": False,
}
FUNCTION = {"name": "report", "description": "Report a temperature.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
MESSAGES: list[dict[str, str]] = [{"role": "user", "content": PROMPT}]


def case(package: str, what: str) -> Callable[[Callable[[str, str], Any]], Any]:
    """Register a case."""

    def register(function: Callable[[str, str], Any]) -> Any:
        CASES[package, what] = function
        return function

    return register


def is_reading(value: Any) -> bool:
    """Whether it has the form of a Reading."""
    return Reading.model_validate(value).unit in Unit


def main() -> None:
    """Run the registered cases and print a table; exit with 1 if a case failed."""
    parser = argparse.ArgumentParser(description="Runs clients against a server.")
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--only", help="a package's name")
    args = parser.parse_args()
    num_failed = 0
    for (package, what), run in CASES.items():
        if args.only not in (None, package):
            continue
        version = _version(package)
        result = "skipped: not installed" if version is None else _result(run, args.url, args.model)
        num_failed += version is not None and result != "works"
        print(f"| {package} {version or ''} | {what} | {result} |", flush=True)
    sys.exit(1 if num_failed else 0)


def _result(run: Callable[[str, str], Any], url: str, model: str) -> str:
    try:
        found = run(url, model)
        if asyncio.iscoroutine(found):
            asyncio.run(found)
    except Exception as error:  # what any client may raise is the result
        return f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
    return "works"


def _version(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    name = "pydantic-ai-slim" if package == "pydantic-ai" else package
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
