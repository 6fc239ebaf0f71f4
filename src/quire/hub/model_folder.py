"""Finds a model's folder or GGUF file: embedded, local, or from the Hugging Face hub.

From the hub, the file list is fetched first, then the small files (config, index, tokenizer,
template), then the weights. So a missing file or an unsupported model is reported before gigabytes
are fetched. A model in GGUF format is one file with all contents. In the code, "model folder" may
also mean such a file. Called by the engine and by the API server, so it imports no torch.
Fetches no pickles.
"""

from pathlib import Path

from quire.errors import CheckpointError, ConfigurationError, shown
from quire.hub.aliases import hub_id_of
from quire.hub.found_model import Check, FoundModel, OnProgress
from quire.hub.gguf.choice import split_choice
from quire.hub.gguf.naming import SUFFIX, find_gguf, gguf_paths
from quire.hub.model_files import is_gguf
from quire.hub.weight_files import has_weights

_HUB_PAGES = ("https://huggingface.co/", "huggingface.co/", "https://hf.co/", "hf.co/")
"""Prefixes that browsers, and Ollama for models of the hub, put before a hub id."""

EMBEDDED_MODEL = Path(__file__).parent.parent / "embedded_model"
EMBEDDED_MODEL_NAME = "embedded"


def resolve_model_folder(
    name: str | None,
    revision: str | None = None,
    *,
    check: Check | None = None,
    needs_tokenizer: bool = False,
    takes_images: bool = True,
    on_progress: OnProgress | None = None,
) -> Path:
    """The local folder, or GGUF file, of model `name`, fetched first if it is a hub id. Waits for
    the network.

    `name`: a folder, a GGUF file, a hub id such as "Qwen/Qwen3-0.6B" or
        "Qwen/Qwen3-0.6B-GGUF:Q8_0", a name of Ollama's library such as "qwen3:0.6b". None, or
        "embedded" if no folder here has this name, is the embedded model.
    `revision`: branch, tag or commit of a hub repository; refused for a folder.
    `check`: called before the weights are fetched, to refuse unsupported models; see `Check`.
    `needs_tokenizer`: whether a hub repository of safetensors must have tokenizer.json.
        For a local folder or GGUF file, `check` and `needs_tokenizer` have no effect.
    `takes_images`: whether the encoder of images of a hub's GGUF model is fetched, too.
    `on_progress`: if None, a progress bar is drawn on stderr.
    Raises CheckpointError if `name` is none of these or can't be fetched.
    """
    folder = local_model(name, revision)
    if folder is not None:
        return folder
    assert name is not None
    # A local folder doesn't need this import, which takes a quarter of a second.
    from quire.hub.fetching import fetch_model

    name = hub_id_of(name) or name
    return fetch_model(
        name,
        revision,
        check=check,
        needs_tokenizer=needs_tokenizer,
        takes_images=takes_images,
        on_progress=on_progress,
    )


def find_model(
    name: str | None,
    revision: str | None = None,
    *,
    needs_tokenizer: bool = False,
    takes_images: bool = True,
) -> FoundModel:
    """Find a model without fetching its weights. The result has all other files, or a copy of its
    GGUF file's header; or the whole model if it is already on this machine. Arguments and errors
    are those of `resolve_model_folder`, which fetches the weights."""
    folder = local_model(name, revision)
    if folder is not None:
        return FoundModel(folder)
    assert name is not None
    from quire.hub.fetching import find_fetched  # imported here for the same reason

    return find_fetched(
        hub_id_of(name) or name,
        revision,
        needs_tokenizer=needs_tokenizer,
        takes_images=takes_images,
    )


def resolve_text_folder(name: str | None, revision: str | None = None) -> Path:
    """The folder of a tokenizer. For a model of the hub, all files except the weights are fetched,
    or a copy of a GGUF file's header. Arguments and errors are those of `resolve_model_folder`."""
    folder = local_model(name, revision)
    if folder is not None:
        return folder
    assert name is not None
    from quire.hub.fetching import fetch_text  # imported here for the same reason

    return fetch_text(hub_id_of(name) or name, revision)


def local_model(name: str | None, revision: str | None = None) -> Path | None:
    """The folder or GGUF file called `name`; None if `name` may be a hub id. Raises CheckpointError
    and ConfigurationError as `resolve_model_folder`, which fetches hub ids."""
    if name == EMBEDDED_MODEL_NAME and not Path(name).exists():
        name = None
    folder = EMBEDDED_MODEL if name is None else Path(name).expanduser()
    is_file = bool(name) and folder.is_file() and (is_gguf(folder) or _is_called_gguf(folder))
    if name is not None and not is_file and not (name and folder.is_dir()):
        _refuse_what_is_no_id(name, folder)
        return None
    if revision is not None:
        raise ConfigurationError(
            f"revision is {revision!r}, but {folder} is a local {'file' if is_file else 'folder'},"
            " which has no revisions; leave it out"
        )
    if is_file:
        return _whole_gguf(folder)
    if not has_weights([path.name for path in folder.iterdir()]):
        found = find_gguf(folder)
        return folder if found is None else _whole_gguf(found)
    return folder


def _is_called_gguf(path: Path) -> bool:
    return path.suffix.lower() == SUFFIX


def _whole_gguf(path: Path) -> Path:
    """Returns the path. Raises CheckpointError if it is a split model's file other than the first,
    if another file of the model is missing, or if a file called .gguf is in another format."""
    if is_gguf(path):
        return gguf_paths(path)[0]
    # This imports numpy, which is not needed to find a folder.
    from quire.hub.gguf.header import read_gguf

    return read_gguf(path).path  # raises an error that says what the file holds


def _refuse_what_is_no_id(name: str, folder: Path) -> None:
    """Raises CheckpointError for names that can't be hub ids: files, paths that don't exist, and
    the forms in which browsers and Ollama write hub ids."""
    if name and folder.is_file():
        raise CheckpointError(
            f"{name} is a file, but a model is a folder (config.json, tokenizer.json, "
            f"*.safetensors), or a file in GGUF format; name the folder: {folder.parent}"
        )
    for page in _HUB_PAGES:
        if name.startswith(page):
            raise CheckpointError(
                f"{shown(name)} is not a folder here; its hub id is"
                f" {shown(name.removeprefix(page))}"
            )
    repository, choice = split_choice(name)
    if choice is None and _is_called_gguf(folder):
        owner, _, file = name.rpartition("/")
        of_hub = f"; for a file of the hub, give {owner}:{file}" if owner.count("/") == 1 else ""
        raise CheckpointError(f"there is no file {shown(name)} here{of_hub}")
    if name.startswith((".", "~", "/")) or repository.count("/") > 1 or "\\" in name:
        near = folder.parent
        there = "" if near.is_dir() else f" (nor is there a folder {near})"
        raise CheckpointError(
            f"{shown(name)} is not a folder here{there}; name a folder in Hugging Face's format,"
            " or a hub id such as 'Qwen/Qwen3-0.6B'"
        )
