"""Fetches a model of the hub: a list, small files, then weights.

The small files are config, index of the weights, tokenizer and template. What is missing, or can't
be served, is said by the list and by them, before gigabytes are fetched. Where the hub gives
nothing, the cache does. Called by `model_folder`, for hub ids alone: it brings the hub's client.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from quire.hub.download import fetch_files, missing_files
from quire.hub.failures import CLIENT_ERRORS, named_failures
from quire.hub.found_model import Check, FoundModel, OnProgress
from quire.hub.model_files import shown_text
from quire.hub.repository import Repository, list_repository
from quire.hub.weight_files import weight_paths
from quire.observability.log import get_logger

_SERVER_FAILURES = 500
"""HTTP's statuses from here on say that the hub is not well, not that it refuses."""

logger = get_logger(__name__)


def fetch_model(
    name: str,
    revision: str | None,
    *,
    check: Check | None,
    needs_tokenizer: bool,
    on_progress: OnProgress | None,
) -> Path:
    """As `model_folder.resolve_model_folder`, of a hub id."""
    with named_failures(name, revision):
        repository = _list(name, revision)
        if isinstance(repository, Exception):
            return _cached_folder(name, revision, repository)
        repository.check(needs_tokenizer=needs_tokenizer)
        folder = repository.fetch_text()
        files = repository.weight_files(folder)
        if check is not None:
            check(folder)
        _fetch_weights(repository, folder, files, on_progress)
    return folder


def find_fetched(name: str, revision: str | None, *, needs_tokenizer: bool) -> FoundModel:
    """As `model_folder.find_model`, of a hub id."""
    with named_failures(name, revision):
        repository = _list(name, revision)
        if isinstance(repository, Exception):
            return FoundModel(_cached_folder(name, revision, repository))
        repository.check(needs_tokenizer=needs_tokenizer)
        folder = repository.fetch_text()
        has_weights = all((folder / each).exists() for each in repository.weight_files(folder))
    return FoundModel(folder, has_weights, folder.name)


def fetch_text(name: str, revision: str | None) -> Path:
    """As `model_folder.resolve_text_folder`, of a hub id."""
    with named_failures(name, revision):
        repository = _list(name, revision)
        if isinstance(repository, Exception):
            return _cached_text_folder(name, revision, repository)
        repository.check_text(needs_tokenizer=True)
        return repository.fetch_text()


def _list(name: str, revision: str | None) -> Repository | Exception:
    """What the hub has, or why it does not say: what is in the cache may serve then."""
    validate_repo_id(name)
    try:
        return list_repository(name, revision)
    except RevisionNotFoundError:
        raise
    except CLIENT_ERRORS as error:
        return error


def _fetch_weights(
    repository: Repository, folder: Path, files: Sequence[str], on_progress: OnProgress | None
) -> None:
    missing = missing_files(folder, files)
    if not missing:
        return
    sizes = [repository.sizes[file] or 0 for file in missing]
    logger.info(
        "fetching %d of %d files of weights, %d bytes, of %s into %s",
        *(len(missing), len(files), sum(sizes), repository.name, folder),
    )
    text = f"downloading {repository.name}"
    fetch_files(
        repository.name, folder, files, None if on_progress is None else partial(on_progress, text)
    )


def _cached_folder(name: str, revision: str | None, reason: Exception) -> Path:
    """Of a model that was fetched before. reason: why the hub gives nothing now."""
    folder = _cached_text_folder(name, revision, reason)
    weight_paths(folder)  # all of them are there
    return folder


def _cached_text_folder(name: str, revision: str | None, reason: Exception) -> Path:
    for file in ("config.json", "tokenizer.json"):
        path = try_to_load_from_cache(name, file, revision=revision)
        if isinstance(path, str):
            logger.warning(
                "the hub does not give %s (%s), so what was fetched of it before is served",
                *(name, shown_text(reason)),
            )
            return Path(path).parent
    if isinstance(reason, HfHubHTTPError) and reason.response.status_code < _SERVER_FAILURES:
        raise reason  # the hub has answered
    raise LocalEntryNotFoundError(f"{name} is not in the cache") from reason
