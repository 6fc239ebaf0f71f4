"""Finds the folder of a model: the embedded one, a local folder, or a repository of the hub.

Called by the engine and by the server's front, so it imports no torch. Fetches no pickles.
"""

from pathlib import Path

from quire.errors import CheckpointError, ConfigurationError

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
        return _fetch(name, revision)
    if revision is not None:
        raise ConfigurationError(
            f"revision is {revision!r}, but {folder} is a local folder, which has no revisions; "
            "leave it out"
        )
    return folder


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
            f"{wanted} is not a folder here, and can't be had from the hub as a model id: {error} "
            "-- name a folder in Hugging Face's format, or a hub id such as 'Qwen/Qwen3-0.6B' "
            "that this machine can reach"
        ) from error
    return Path(folder)
