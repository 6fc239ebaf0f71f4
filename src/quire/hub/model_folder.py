"""Finds a model's folder: embedded, local, or from the Hugging Face hub.

Called by the engine and by the server's front, so it imports no torch. Fetches no pickles.
"""

import errno
from pathlib import Path

from quire.errors import CheckpointError, ConfigurationError, shown
from quire.hub.model_files import GGUF_ADVICE, is_gguf, shown_text

EMBEDDED_MODEL = Path(__file__).parent.parent / "embedded_model"

# Weights, configs, tokenizer and chat template; never .bin or .pt, which hold pickles.
_WANTED_FILES = ["*.safetensors", "*.json", "*.jinja"]
# The same weights in other layouts, which would be fetched twice.
_UNWANTED_FILES = ["consolidated*", "*/*"]


def resolve_model_folder(name: str | None, revision: str | None = None) -> Path:
    """The local folder of model `name`, fetched first if it is a hub id. Waits for the network.

    name: a folder, a hub id such as "Qwen/Qwen3-0.6B", or None for the embedded model.
    revision: branch, tag or commit of a hub repository; refused for a folder.
    Raises CheckpointError where `name` is neither, or can't be fetched.
    """
    folder = EMBEDDED_MODEL if name is None else Path(name).expanduser()
    if name is not None and not (name and folder.is_dir()):
        _refuse_what_is_no_id(name, folder)
        return _fetch(name, revision)
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


def _fetch(name: str, revision: str | None) -> Path:
    # A quarter of a second of imports that a local folder doesn't need.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    # The errors of the HTTP library that this version of the hub's client happens to use.
    http_errors = tuple(
        kind
        for kind in HfHubHTTPError.__mro__
        if issubclass(kind, Exception) and kind is not Exception
    )
    caught: tuple[type[Exception], ...] = (*http_errors, ValueError)
    try:
        folder = snapshot_download(
            name,
            revision=revision,
            allow_patterns=_WANTED_FILES,
            ignore_patterns=_UNWANTED_FILES,
        )
    except caught as error:
        wanted = f"{name!r}" if revision is None else f"{name!r}, revision {revision!r},"
        raise CheckpointError(
            f"{wanted} is not a folder here, and {_why_not(name, error)}"
        ) from error
    return Path(folder)


def _why_not(name: str, error: Exception) -> str:
    """Why the hub did not give it, and what to do; of a repository what the hub says last."""
    # Loaded already where there is an error of it to explain.
    from huggingface_hub import errors

    token = "with HF_TOKEN=... in the environment, or after `hf auth login`"
    page = f"https://huggingface.co/{name}"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"the hub gives it only to those who accepted its terms: accept them at {page}, and"
            f" try again {token}"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"the hub has no such model, or shows it only to its owners; check the id ({page}),"
            f" or, if it is private, try again {token}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the hub's model has no such revision; see {page}/tree/main for those that it has"
    if isinstance(error, errors.HFValidationError):
        return (
            f"can't be a hub id ({shown_text(error)}); name a folder in Hugging Face's"
            " format, or a hub id such as 'Qwen/Qwen3-0.6B'"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk is full ({shown_text(error)}); free some of it, or let HF_HOME name a"
            " folder on another one"
        )
    if isinstance(error, PermissionError):
        return (
            f"the hub's files can't be written ({shown_text(error)}); let HF_HOME name a folder "
            "that may be written"
        )
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
        return (
            "the hub can't be reached from here (no network, or HF_HUB_OFFLINE is set), nor has it "
            "been fetched before; fetch it where there is a network with `hf download "
            f"{name} --local-dir FOLDER`, and name that folder"
        )
    return (
        f"can't be had from the hub as a model id: {shown_text(error)} -- name a folder in Hugging "
        "Face's format, or a hub id such as 'Qwen/Qwen3-0.6B' that this machine can reach"
    )
