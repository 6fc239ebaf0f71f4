"""Lists and removes the models on this machine: cached ones and those from Python packages.

There is no store of quire's own: models of the hub lie in the cache of Hugging Face's client, where
every other program finds them. Called by the commands `list` and `rm`, and by the server's model
store. Imports the hub's client.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import CacheNotFound, constants, scan_cache_dir

from quire.errors import CheckpointError, shown
from quire.hub import packaged_models
from quire.hub.aliases import alias_of, hub_id_of
from quire.hub.gguf.choice import split_choice
from quire.hub.gguf.naming import SUFFIX
from quire.hub.weight_files import has_weights

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, HFCacheInfo


class ModelNotHereError(CheckpointError):
    """No model on this machine has the name."""

    http_status = 404
    code = "model_not_here"


class ModelInUseError(CheckpointError):
    """The model can't be removed, since a server needs its files."""

    http_status = 409
    code = "model_in_use"


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model whose weights are on this machine."""

    #: The name that commands take: a hub id, or a packaged model's name in Ollama's library.
    name: str
    #: "safetensors", "GGUF" or both.
    format: str
    size_bytes: int
    #: Time of the last access, in seconds since 1970.
    used_s: float


def local_models() -> list[LocalModel]:
    """All models on this machine: those of the cache by name, then those from packages."""
    return sorted(_cached(), key=lambda model: model.name) + [
        LocalModel(_name_of(path), "GGUF", path.stat().st_size, path.stat().st_atime)
        for path in _packaged()
    ]


def remove_model(name: str, in_use: Collection[str] = ()) -> int:
    """Remove all revisions of a model from the cache, and the file of it that a Python package
    brought. Returns the number of bytes that are free again.

    `in_use` has models that must stay, as names or as paths of their files. Raises
    ModelNotHereError, ModelInUseError, and CheckpointError for a name that chooses one file.
    """
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
        raise ModelNotHereError(f"{shown(name)} is not in the cache; quire list shows what is")
    places = [*files, *(repo.repo_path for repo in found)]
    if any(_needs(each, repository, places) for each in in_use):
        raise ModelInUseError(f"{shown(name)} is being served, so its files must stay")
    num_bytes = sum(path.stat().st_size for path in files)
    for path in files:
        path.unlink()
    if cache is not None and found:
        commits = [revision.commit_hash for repo in found for revision in repo.revisions]
        strategy = cache.delete_revisions(*commits)
        strategy.execute()
        num_bytes += strategy.expected_freed_size
    return num_bytes


def _needs(model: str, repository: str, places: Collection[Path]) -> bool:
    """Whether `model`, a name or a path, is the repository or lies in one of the places. The name
    of a packaged model counts, too, if one of the places is its file."""
    path = Path(model).expanduser()
    if path.is_absolute():
        return any(path.resolve().is_relative_to(place.resolve()) for place in places)
    named = split_choice(hub_id_of(model) or model)[0]
    package = packaged_models.PACKAGES.get(named)
    held = None if package is None else packaged_models.path_of(package)
    return named == repository or held in places


def _scan() -> "HFCacheInfo | None":
    """The hub client's cache; None if there is no folder for it."""
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


def _cached() -> Iterator[LocalModel]:
    for repo in _models_of(_scan()):
        kinds = sorted({_format(_names(each)) for each in repo.revisions} - {""})
        yield LocalModel(repo.repo_id, ", ".join(kinds), repo.size_on_disk, repo.last_accessed)


def _packaged() -> list[Path]:
    """The files of models that came in Python packages."""
    return sorted(packaged_models.MODELS.expanduser().glob(f"*{SUFFIX}"))


def _name_of(path: Path) -> str:
    """The name of a model from a package; its path if no package is known for it."""
    for hub_id, package in packaged_models.PACKAGES.items():
        if packaged_models.path_of(package) == path:
            return alias_of(hub_id) or hub_id
    return str(path)
