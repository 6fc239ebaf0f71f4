"""Finds a model's folder: embedded, local, or from the Hugging Face hub.

Of a hub's model the list of files is asked for first, then come the small ones (config, index,
tokenizer, template), then the weights: so what is missing or can't be served is said before
gigabytes are fetched. Called by the engine and by the server's front, so it imports no torch.
Fetches no pickles.
"""

from pathlib import Path

from quire.errors import CheckpointError, ConfigurationError, shown
from quire.hub.found_model import Check, FoundModel, OnProgress
from quire.hub.model_files import GGUF_ADVICE, is_gguf

EMBEDDED_MODEL = Path(__file__).parent.parent / "embedded_model"


def resolve_model_folder(
    name: str | None,
    revision: str | None = None,
    *,
    check: Check | None = None,
    needs_tokenizer: bool = False,
    on_progress: OnProgress | None = None,
) -> Path:
    """The local folder of model `name`, fetched first if it is a hub id. Waits for the network.

    name: a folder, a hub id such as "Qwen/Qwen3-0.6B", or None for the embedded model.
    revision: branch, tag or commit of a hub repository; refused for a folder.
    check, needs_tokenizer: what keeps the weights from being fetched; neither is asked of a folder.
    on_progress: None: a bar on stderr.
    Raises CheckpointError where `name` is neither, or can't be fetched.
    """
    folder = _local_folder(name, revision)
    if folder is not None:
        return folder
    assert name is not None
    # A quarter of a second of imports that a local folder doesn't need.
    from quire.hub.fetching import fetch_model

    return fetch_model(
        name, revision, check=check, needs_tokenizer=needs_tokenizer, on_progress=on_progress
    )


def find_model(
    name: str | None, revision: str | None = None, *, needs_tokenizer: bool = False
) -> FoundModel:
    """The folder of a model without its weights, unless these are there already; arguments and
    errors are those of `resolve_model_folder`, which fetches the rest."""
    folder = _local_folder(name, revision)
    if folder is not None:
        return FoundModel(folder)
    assert name is not None
    from quire.hub.fetching import find_fetched  # as above

    return find_fetched(name, revision, needs_tokenizer=needs_tokenizer)


def resolve_text_folder(name: str | None, revision: str | None = None) -> Path:
    """The folder of a tokenizer: of a model of the hub all but the weights is fetched. Arguments
    and errors are those of `resolve_model_folder`."""
    folder = _local_folder(name, revision)
    if folder is not None:
        return folder
    assert name is not None
    from quire.hub.fetching import fetch_text  # as above

    return fetch_text(name, revision)


def _local_folder(name: str | None, revision: str | None) -> Path | None:
    """The folder that is named; None: `name` may be a hub id."""
    folder = EMBEDDED_MODEL if name is None else Path(name).expanduser()
    if name is not None and not (name and folder.is_dir()):
        _refuse_what_is_no_id(name, folder)
        return None
    if revision is not None:
        raise ConfigurationError(
            f"revision is {revision!r}, but {folder} is a local folder, which has no revisions; "
            "leave it out"
        )
    return folder


def _refuse_what_is_no_id(name: str, folder: Path) -> None:
    """Raises CheckpointError for a file, and for a path that leads nowhere: neither is looked up at
    the hub."""
    if name and folder.is_file():
        if is_gguf(folder):
            raise CheckpointError(f"{name} is a file in GGUF format; {GGUF_ADVICE}")
        raise CheckpointError(
            f"{name} is a file, but a model is a folder (config.json, tokenizer.json, "
            f"*.safetensors); name the folder: {folder.parent}"
        )
    if name.lower().endswith(".gguf"):
        raise CheckpointError(f"{name} is not here, and a model in GGUF format; {GGUF_ADVICE}")
    if name.startswith((".", "~", "/")) or name.count("/") > 1 or "\\" in name:
        near = folder.parent
        there = "" if near.is_dir() else f" (nor is there a folder {near})"
        raise CheckpointError(
            f"{shown(name)} is not a folder here{there}; name a folder in Hugging Face's format,"
            " or a hub id such as 'Qwen/Qwen3-0.6B'"
        )
