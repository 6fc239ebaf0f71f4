"""Write requirements.lock from pip's own resolution. Called by scripts/lock.

    python tools/lock.py wanted          print the direct requirements, one a line
    python tools/lock.py write REPORT    write the lock from pip's --dry-run --report REPORT

The lock has names and exact versions only: where they come from is the installing machine's affair.
"""

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
HEADER = """\
# Every package of an install with all extras, at the versions that are tested.
# Written by scripts/lock; used as pip's constraints by the other scripts.
"""


def wanted() -> list[str]:
    """The direct requirements: of the build, the package and all its extras."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = pyproject["project"]
    lists = [pyproject["build-system"]["requires"], project["dependencies"]]
    lists += project["optional-dependencies"].values()
    return sorted({requirement for requirements in lists for requirement in requirements})


def canonical(name: str) -> str:
    """A package's name as PEP 503 spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement_name(requirement: str) -> str:
    """The name in a requirement like `torch>=2.11; extra == "x"`."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    if match is None:
        raise ValueError(f"{requirement!r} is no requirement")
    return canonical(match.group())


def lock_text(report: dict[str, Any], direct: list[str]) -> str:
    """The lock: one `name==version` a line, and below it what it is needed by.

    The local part of a version (`+cpu`) is left out: any build of that version will do.
    """
    packages = {canonical(item["metadata"]["name"]): item["metadata"] for item in report["install"]}
    needed_by: dict[str, set[str]] = {name: set() for name in packages}
    for requirement in direct:
        needed_by[requirement_name(requirement)].add("quire")
    for name, metadata in packages.items():
        for requirement in metadata.get("requires_dist", []):
            if "extra ==" in requirement:  # only somebody who asks for that extra needs it
                continue
            needed_by.get(requirement_name(requirement), set()).add(name)
    lines = []
    for name in sorted(packages):
        version = packages[name]["version"].partition("+")[0]
        lines.append(f"{name}=={version}\n")
        if needed_by[name]:
            lines.append(f"    # via {', '.join(sorted(needed_by[name]))}\n")
    return HEADER + "".join(lines)


def main(words: list[str]) -> int:
    match words:
        case ["wanted"]:
            print("\n".join(wanted()))
        case ["write", path]:
            report = json.loads(Path(path).read_text())
            (ROOT / "requirements.lock").write_text(lock_text(report, wanted()))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
