"""Lists the files of a model of the hub, and chooses the needed ones.

A file that is missing from the list is reported before anything is fetched. Called by `fetching`.
Imports the hub's client, which takes a quarter of a second that a local folder doesn't need.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from glob import escape
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from tqdm.auto import tqdm

from quire.errors import CheckpointError
from quire.hub.gguf.choice import choose_gguf
from quire.hub.weight_files import (
    INDEX_FILE,
    SINGLE_FILE,
    check_shards,
    has_weights,
    shard_names,
    weights_file,
)

TOKENIZER_FILE = "tokenizer.json"

_ALWAYS_THERE = ".gitattributes"
"""A file to fetch if no other file is needed. The hub's client warns if a pattern matches none."""
_TEXT_PATTERNS = ("*.json", "*.jinja")
_UNUSED_PATTERNS = ("*.index.json", "trainer_state.json")
_IN_FOLDERS = re.compile(r"\d+_\w+/config\.json|additional_chat_templates/[^/]+\.jinja")
"""Matches configs of sentence-transformers modules, and further chat templates."""


@dataclass(frozen=True, slots=True)
class Repository:
    """A model at the hub with its file list."""

    name: str
    #: The revision that the caller asked for; None for the default branch.
    revision: str | None
    #: The commit that the revision stands for.
    commit: str
    #: Size in bytes by file name; None if the hub doesn't say it.
    sizes: Mapping[str, int | None]

    @property
    def text_files(self) -> list[str]:
        """All files except weights: configs, tokenizer, chat template and index of the weights."""
        return [name for name in self.sizes if _is_text_file(name)]

    def gguf_files(self, choice: str | None, *, is_needed: bool = True) -> tuple[str, ...]:
        """The files of one GGUF model, as `choose_gguf` returns them. Empty if `choice` is None and
        either the repository has weights in Hugging Face's format or `is_needed` is False."""
        if choice is None and (has_weights(self.sizes) or not is_needed):
            return ()
        return choose_gguf(self.name, self.sizes.keys(), choice)

    def check(self, *, needs_tokenizer: bool) -> None:
        """Raises CheckpointError if the repository lacks a file that is needed to serve the
        model."""
        self.check_text(needs_tokenizer=needs_tokenizer)
        weights_file(self.name, self.sizes)

    def check_text(self, *, needs_tokenizer: bool) -> None:
        """Raises CheckpointError if the repository lacks a needed file other than the weights."""
        if not self.sizes.keys() & {"config.json", TOKENIZER_FILE}:
            raise CheckpointError(
                f"{self.name} has neither config.json nor {TOKENIZER_FILE}; name a model in Hugging"
                " Face's format"
            )
        if needs_tokenizer and TOKENIZER_FILE not in self.sizes:
            raise CheckpointError(
                f"{self.name} has no {TOKENIZER_FILE}, the only tokenizer format that quire reads;"
                " set `--tokenizer` to a model with the same tokenizer, or convert this one once"
                f" with transformers: AutoTokenizer.from_pretrained({self.name!r}).save_pretrained"
                "('FOLDER'), and name that folder by `--tokenizer`"
            )

    def fetch_text(self) -> Path:
        """Fetch all files except the weights, unless they are in the cache. Returns the folder of
        the snapshot. Raises the errors of the hub's client."""
        folder = snapshot_download(
            self.name,
            revision=self.revision,  # not the commit, since the cache records the revision's name
            allow_patterns=[escape(name) for name in self.text_files or [_ALWAYS_THERE]],
            tqdm_class=_NoBar,
        )
        return Path(folder)

    def snapshot(self) -> Path:
        """The folder of the snapshot, which may be empty. Raises the errors of the hub's client."""
        folder = self.fetch_text()
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def weight_files(self, folder: Path) -> list[str]:
        """The names of the files with weights. `folder` holds the text files, such as the index.
        Raises CheckpointError if a file in the index is not in the repository."""
        if weights_file(self.name, self.sizes) == SINGLE_FILE:
            return [SINGLE_FILE]
        shards = shard_names(folder / INDEX_FILE)
        check_shards(self.name, shards, self.sizes)
        return shards


def list_repository(name: str, revision: str | None) -> Repository:
    """Ask the hub for a model's file list. Uses HF_ENDPOINT and HF_TOKEN. Raises the errors of the
    hub's client."""
    info = HfApi().model_info(name, revision=revision, files_metadata=True)
    siblings = info.siblings or []
    assert info.sha is not None
    return Repository(name, revision, info.sha, {file.rfilename: file.size for file in siblings})


class _NoBar(tqdm):  # type: ignore[type-arg]  # the client needs a class, not an alias
    """A progress bar that is never drawn, for small files."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options["disable"] = True
        options.pop("name", None)
        super().__init__(*args, **options)


def _is_text_file(name: str) -> bool:
    if "/" in name:
        return _IN_FOLDERS.fullmatch(name) is not None
    is_unused = name != INDEX_FILE and any(fnmatch(name, each) for each in _UNUSED_PATTERNS)
    return not is_unused and any(fnmatch(name, pattern) for pattern in _TEXT_PATTERNS)
