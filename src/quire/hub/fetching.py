"""Fetches a model from the hub: first its file list, then small files, then weights.

The small files are the config, the index of the weights, the tokenizer and the chat template.
The list and these files show whether a file is missing or the model is unsupported, before
gigabytes are fetched. A GGUF model is fetched if the name chooses it, or if the repository has no
weights in Hugging Face's format. The headers of its files then take the place of the small files.
If the hub can't be reached, the cached files are used, or a Python package that holds the model.
Called by `model_folder` for hub ids only, since this module imports the hub's client.
"""

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from quire.errors import QuireError
from quire.hub.download import fetch_files, missing_files
from quire.hub.failures import CLIENT_ERRORS, named_failures
from quire.hub.found_model import Check, FoundModel, OnProgress
from quire.hub.gguf.choice import choose_encoder, choose_gguf, label_of, split_choice
from quire.hub.gguf.header import read_gguf
from quire.hub.gguf.image_encoder import read_encoder
from quire.hub.gguf.naming import gguf_paths, models_of
from quire.hub.gguf.remote_headers import LATER_BYTES, fetch_headers
from quire.hub.model_files import shown_text
from quire.hub.packaged_models import packaged_model
from quire.hub.repository import TOKENIZER_FILE, Repository, list_repository
from quire.hub.weight_files import has_weights, weight_paths
from quire.observability.log import get_logger

_SERVER_FAILURES = 500
"""HTTP statuses of this value or more mean that the hub failed, lower statuses that it refused."""

logger = get_logger(__name__)


def fetch_model(
    name: str,
    revision: str | None,
    *,
    check: Check | None,
    needs_tokenizer: bool,
    on_progress: OnProgress | None,
    takes_images: bool = True,
) -> Path:
    """Implements `model_folder.resolve_model_folder` for hub ids."""
    name, choice = split_choice(name)
    with named_failures(name, revision):
        repository = _list(name, revision)
        if isinstance(repository, Exception):
            return _cached_model(name, choice, revision, repository)
        gguf_files = _chosen(repository, choice, takes_images=takes_images)
        if gguf_files:
            if check is not None:
                check(_gguf_or_header(repository, gguf_files)[0])
            return _fetch_gguf(repository, gguf_files, on_progress)
        repository.check(needs_tokenizer=needs_tokenizer)
        folder = repository.fetch_text()
        files = repository.weight_files(folder)
        if check is not None:
            check(folder)
        _fetch_weights(repository, folder, files, on_progress)
    return folder


def find_fetched(
    name: str, revision: str | None, *, needs_tokenizer: bool, takes_images: bool
) -> FoundModel:
    """Implements `model_folder.find_model` for hub ids."""
    name, choice = split_choice(name)
    with named_failures(name, revision):
        repository = _list(name, revision)
        if isinstance(repository, Exception):
            return FoundModel(_cached_model(name, choice, revision, repository))
        gguf_files = _chosen(repository, choice, takes_images=takes_images)
        if gguf_files:
            path, is_whole = _gguf_or_header(repository, gguf_files)
            return FoundModel(path, is_whole, repository.commit)
        repository.check(needs_tokenizer=needs_tokenizer)
        folder = repository.fetch_text()
        has_all = all((folder / each).exists() for each in repository.weight_files(folder))
    return FoundModel(folder, has_all, folder.name)


def fetch_text(name: str, revision: str | None) -> Path:
    """Implements `model_folder.resolve_text_folder` for hub ids."""
    name, choice = split_choice(name)
    with named_failures(name, revision):
        repository = _list(name, revision)
        if isinstance(repository, Exception):
            if choice is None and isinstance(_cached(name, TOKENIZER_FILE, revision), Path):
                return _cached_text_folder(name, revision, repository)
            return _cached_model(name, choice, revision, repository)
        files = repository.gguf_files(choice, is_needed=TOKENIZER_FILE not in repository.sizes)
        if files:
            return _gguf_or_header(repository, files[:1])[0]
        repository.check_text(needs_tokenizer=True)
        return repository.fetch_text()


def _list(name: str, revision: str | None) -> Repository | Exception:
    """The hub's file list, or the error that prevented it (the model may still be in the cache)."""
    validate_repo_id(name)
    try:
        return list_repository(name, revision)
    except RevisionNotFoundError:
        raise
    except CLIENT_ERRORS as error:
        return error


def _chosen(repository: Repository, choice: str | None, *, takes_images: bool) -> Sequence[str]:
    """The files of the chosen GGUF model, with its encoder of images if `takes_images` and the
    encoder fits; empty if the repository's model in Hugging Face's format is used instead. If
    `choice` is None, logs which GGUF model is used."""
    files = repository.gguf_files(choice)
    if files and choice is None:
        labels = [label_of(first) for first in models_of(repository.sizes)]
        others = f"; {repository.name}:{labels[-1]} would name another" if len(labels) > 1 else ""
        logger.warning("%s is served in GGUF format, from %s%s", repository.name, files[0], others)
    if not files or not takes_images:
        return files
    # Prefer an encoder that is in the cache, since two encoders in one folder would not be used.
    snapshot = repository.snapshot()
    here = [name for name in repository.sizes if (snapshot / name).exists()]
    if encoder := choose_encoder(here, files[0]):
        return *files, encoder
    encoder = choose_encoder(repository.sizes, files[0])
    return (*files, encoder) if encoder and _fits(repository, files, encoder) else files


def _fits(repository: Repository, files: Sequence[str], encoder: str) -> bool:
    """Whether a GGUF model, which is in `files`, can read images by the encoder in another file.
    Fetches the encoder's header."""
    size = repository.sizes[encoder]
    if not size:
        return False
    model, _ = _gguf_or_header(repository, files)
    header: Path | None = None
    try:
        header = fetch_headers(
            repository.name, repository.commit, {encoder: size}, first_bytes=LATER_BYTES
        )
        found = read_encoder(header, read_gguf(model).metadata)
        reason = found if isinstance(found, str) else None
    except QuireError as error:
        reason = str(error)
    if reason is None:
        return True
    if header is not None:  # else it would be found beside the model's header
        header.unlink(missing_ok=True)  # another process may have done the same
    _warn_once(f"{repository.name}: {encoder} is not fetched, and no images are taken: {reason}")
    return False


def _fetch_gguf(
    repository: Repository, files: Sequence[str], on_progress: OnProgress | None
) -> Path:
    """Fetch all files of a GGUF model. Returns the path of the first one."""
    folder = repository.snapshot()
    _fetch_weights(repository, folder, files, on_progress)
    return folder / files[0]


def _gguf_or_header(repository: Repository, files: Sequence[str]) -> tuple[Path, bool]:
    """(path of the model's first file, True) if the whole model is in the cache, else (path of a
    copy of that file's header, False)."""
    folder = repository.snapshot()
    sizes = {file: repository.sizes[file] or 0 for file in files}
    if missing_files(folder, files) and all(sizes.values()):
        return fetch_headers(repository.name, repository.commit, sizes), False
    return _fetch_gguf(repository, files, None), True


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


def _cached_model(name: str, choice: str | None, revision: str | None, reason: Exception) -> Path:
    """The path of a model in the cache, or else in a Python package that holds it. `reason` is the
    hub's error, which messages quote."""
    snapshot = _cached_snapshot(name, revision)
    if snapshot is None and choice is None and revision is None:
        packaged = packaged_model(name)
        if packaged is not None:
            _warn_once(
                f"the hub can't be reached ({shown_text(reason)}); {packaged} is used, from a"
                " Python package"
            )
            return packaged
    names = [] if snapshot is None else [path.name for path in snapshot.iterdir()]
    # Without a choice, a model in Hugging Face's format is preferred to GGUF files.
    if choice is None and (snapshot is None or has_weights(names) or not _ggufs(snapshot)):
        folder = _cached_text_folder(name, revision, reason)
        weight_paths(folder)  # raises if a file is missing
        return folder
    if snapshot is None:
        raise _not_cached(name, reason)
    where = f" in the cache, and the hub gives nothing now ({shown_text(reason)})"
    files = choose_gguf(name, _ggufs(snapshot), choice, where)
    path = gguf_paths(snapshot / files[0])[0]  # raises if a file is missing
    _log_cached_files(f"{name}:{label_of(files[0])}", reason)
    return path


def _cached_snapshot(name: str, revision: str | None) -> Path | None:
    """The folder of the cached snapshot, which may be incomplete; None if there is none."""
    try:
        found = snapshot_download(name, revision=revision, local_files_only=True, allow_patterns=[])
    except CLIENT_ERRORS:
        return None
    return Path(found)


def _ggufs(snapshot: Path) -> list[str]:
    """The paths of the snapshot's GGUF files, relative to its folder."""
    return [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.[gG][gG][uU][fF]")]


def _cached_text_folder(name: str, revision: str | None, reason: Exception) -> Path:
    for file in ("config.json", TOKENIZER_FILE):
        path = _cached(name, file, revision)
        if path is not None:
            _log_cached_files(name, reason)
            return path.parent
    raise _not_cached(name, reason)


def _cached(name: str, file: str, revision: str | None) -> Path | None:
    path = try_to_load_from_cache(name, file, revision=revision)
    return Path(path) if isinstance(path, str) else None


def _log_cached_files(name: str, reason: Exception) -> None:
    _warn_once(
        f"the hub does not give {name} ({shown_text(reason)}), so the files in the cache are served"
    )


@cache
def _warn_once(message: str) -> None:
    """Log a warning that a command would otherwise repeat, since it looks a model up several
    times."""
    logger.warning("%s", message)


def _not_cached(name: str, reason: Exception) -> Exception:
    if isinstance(reason, HfHubHTTPError) and reason.response.status_code < _SERVER_FAILURES:
        return reason  # the hub has answered and refused
    missing = LocalEntryNotFoundError(f"{name} is not in the cache")
    missing.__cause__ = reason
    return missing
