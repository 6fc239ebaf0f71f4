"""The commands for models on this machine: pull, list, rm, ps.

They have the words of Ollama. There is no second store: `pull` fetches into the cache of Hugging
Face's client, where every other program finds the model, and `list` and `rm` read and clean it.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from quire.core.memory.memory_report import format_bytes
from quire.errors import CheckpointError, EngineDeadError, shown
from quire.hub import packaged_models
from quire.hub.aliases import hub_id_of
from quire.hub.gguf.choice import split_choice
from quire.hub.gguf.naming import SUFFIX
from quire.hub.weight_files import has_weights

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, HFCacheInfo

TIMEOUT_S = 10.0
"""Maximum seconds to wait for a server's answer."""

Row = tuple[str, ...]


def pull(name: str, revision: str | None, examine: Callable[[str, str | None], int]) -> int:
    """Fetch a model, after a report on it. Returns the exit code.

    `examine` prints the report, and returns an exit code other than 0 if the model can't be served;
    then nothing is fetched. Raises CheckpointError.
    """
    from quire.hub.model_folder import resolve_model_folder  # brings the hub's client

    if status := examine(name, revision):
        return status
    path = resolve_model_folder(name, revision, needs_tokenizer=True)
    print(f"\n{name} is here: {path}")
    print(f"talk with it: quire run {name}; serve it: quire serve {name}")
    return 0


def list_models() -> int:
    """Print the models on this machine. Returns the exit code."""
    rows = sorted(_cached_rows()) + [_row(path) for path in _packaged()]
    if not rows:
        print("there are no models here; quire pull NAME fetches one, such as smollm2")
        return 0
    _print_table([("NAME", "FORMAT", "SIZE", "USED"), *rows])
    return 0


def remove(name: str) -> int:
    """Remove all revisions of a model from the cache, and the file of it that a Python package
    brought. Returns the exit code. Raises CheckpointError if there is neither."""
    repository, choice = split_choice(hub_id_of(name) or name)
    if choice is not None:
        raise CheckpointError(
            f"{shown(name)} names a file; quire rm {repository} removes all of the model's files"
        )
    package = packaged_models.PACKAGES.get(repository)
    held = None if package is None else packaged_models.path_of(package)
    files = [path for path in _packaged() if path == held or name in (path.name, path.stem)]
    cache = _scan()
    found = [repo for repo in _models_of(cache) if repo.repo_id == repository]
    if not files and not found:
        raise CheckpointError(f"{shown(name)} is not in the cache; quire list shows what is")
    num_bytes = sum(path.stat().st_size for path in files)
    for path in files:
        path.unlink()
    if cache is not None and found:
        commits = [revision.commit_hash for repo in found for revision in repo.revisions]
        strategy = cache.delete_revisions(*commits)
        strategy.execute()
        num_bytes += strategy.expected_freed_size
    print(f"removed {name}: {format_bytes(num_bytes)}")
    return 0


def list_running(url: str, api_key: str | None) -> int:
    """Print the models that the server at `url` has in memory. Returns the exit code. Raises
    EngineDeadError if it does not answer."""
    request = Request(f"{url.rstrip('/')}/api/ps")
    if api_key is not None:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with urlopen(request, timeout=TIMEOUT_S) as answer:
            models: list[dict[str, Any]] = json.load(answer)["models"]
    except (URLError, OSError, ValueError, KeyError) as error:
        raise EngineDeadError(
            f"no server answers at {url}: {error}; start one with quire serve"
        ) from error
    rows = [
        (each["name"], format_bytes(each["size"]), f"{each['context_length']:,}") for each in models
    ]
    _print_table([("NAME", "SIZE", "CONTEXT"), *rows])
    return 0


def _scan() -> "HFCacheInfo | None":
    """The hub client's cache; None if there is no folder for it."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir  # slow to import

    try:
        return scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return None


def _models_of(cache: "HFCacheInfo | None") -> Iterator["CachedRepoInfo"]:
    """The models of which a revision has weights."""
    for repo in () if cache is None else cache.repos:
        if repo.repo_type == "model" and any(_format(_names(each)) for each in repo.revisions):
            yield repo


def _names(revision: Any) -> list[str]:
    return [file.file_name for file in revision.files]


def _format(names: Iterable[str]) -> str:
    """The format of a model with files of these names; empty if there are no weights."""
    names = list(names)
    if has_weights(names):
        return "safetensors"
    return "GGUF" if any(name.lower().endswith(SUFFIX) for name in names) else ""


def _cached_rows() -> Iterator[Row]:
    for repo in _models_of(_scan()):
        kinds = sorted({_format(_names(each)) for each in repo.revisions} - {""})
        size, used = format_bytes(repo.size_on_disk), _ago(repo.last_accessed)
        yield repo.repo_id, ", ".join(kinds), size, used


def _packaged() -> list[Path]:
    """The files of models that came in Python packages."""
    return sorted(packaged_models.MODELS.expanduser().glob(f"*{SUFFIX}"))


def _row(path: Path) -> Row:
    found = path.stat()
    return str(path), "GGUF", format_bytes(found.st_size), _ago(found.st_atime)


def _ago(time_s: float) -> str:
    hours = max(0.0, time.time() - time_s) / 3600
    return "today" if hours < 24 else f"{hours / 24:.0f} days ago"


def _print_table(rows: list[Row]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        print("   ".join(cells).rstrip(), file=sys.stdout)
