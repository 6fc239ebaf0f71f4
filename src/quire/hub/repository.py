"""Lists a hub's model, and chooses the files that are needed.

What the list shows to be missing is said before anything is fetched. Called by `fetching`.
Brings the hub's client, a quarter of a second of imports that a local folder doesn't need.
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
"""Fetched where there is nothing else, since the hub's client warns of a call for no files."""
_TEXT_PATTERNS = ("*.json", "*.jinja")
_UNUSED_PATTERNS = ("*.index.json", "trainer_state.json")
_IN_FOLDERS = re.compile(r"\d+_\w+/config\.json|additional_chat_templates/[^/]+\.jinja")
"""Configs of modules of sentence-transformers, and chat templates beside the usual one."""


@dataclass(frozen=True, slots=True)
class Repository:
    """A model at the hub.

    revision: as it was asked for. commit: what that stands for. sizes: name -> bytes of each file,
    None: the hub doesn't say.
    """

    name: str
    revision: str | None
    commit: str
    sizes: Mapping[str, int | None]

    @property
    def text_files(self) -> list[str]:
        """All but the weights: configs, tokenizer, chat template, and the index of the weights."""
        return [name for name in self.sizes if _is_text_file(name)]

    def gguf_files(self, choice: str | None, *, is_needed: bool = True) -> tuple[str, ...]:
        """The files of one model in GGUF format, as `choose_gguf` has them; none where nothing is
        chosen, and there is the same in Hugging Face's format, or where it is not needed."""
        if choice is None and (has_weights(self.sizes) or not is_needed):
            return ()
        return choose_gguf(self.name, self.sizes.keys(), choice)

    def check(self, *, needs_tokenizer: bool) -> None:
        """Raises CheckpointError where a file is missing without which nothing can be served."""
        self.check_text(needs_tokenizer=needs_tokenizer)
        weights_file(self.name, self.sizes)

    def check_text(self, *, needs_tokenizer: bool) -> None:
        """The same, but for the weights."""
        if not self.sizes.keys() & {"config.json", TOKENIZER_FILE}:
            raise CheckpointError(
                f"{self.name} has neither config.json nor {TOKENIZER_FILE}; name a model in Hugging"
                " Face's format"
            )
        if needs_tokenizer and TOKENIZER_FILE not in self.sizes:
            raise CheckpointError(
                f"{self.name} has no {TOKENIZER_FILE}, the only format of a tokenizer that is read;"
                " name a model that has the same one by `--tokenizer`, or convert it once with"
                f" transformers: AutoTokenizer.from_pretrained({self.name!r}).save_pretrained"
                "('FOLDER'), and name that folder by `--tokenizer`"
            )

    def fetch_text(self) -> Path:
        """Fetch all but the weights, as far as they are not in the cache. Returns the folder of the
        snapshot. Raises what the hub's client raises."""
        folder = snapshot_download(
            self.name,
            revision=self.revision,  # not the commit: the cache is to know which it was
            allow_patterns=[escape(name) for name in self.text_files or [_ALWAYS_THERE]],
            tqdm_class=_NoBar,
        )
        return Path(folder)

    def snapshot(self) -> Path:
        """The folder of the snapshot, in which nothing may be. Raises what the hub's client
        raises."""
        folder = self.fetch_text()
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def weight_files(self, folder: Path) -> list[str]:
        """The files of the weights. folder: has the text files. Raises CheckpointError where a file
        that the index names is not in the list."""
        if weights_file(self.name, self.sizes) == SINGLE_FILE:
            return [SINGLE_FILE]
        shards = shard_names(folder / INDEX_FILE)
        check_shards(self.name, shards, self.sizes)
        return shards


def list_repository(name: str, revision: str | None) -> Repository:
    """Ask the hub, by HF_ENDPOINT and HF_TOKEN. Raises what its client raises."""
    info = HfApi().model_info(name, revision=revision, files_metadata=True)
    siblings = info.siblings or []
    assert info.sha is not None
    return Repository(name, revision, info.sha, {file.rfilename: file.size for file in siblings})


class _NoBar(tqdm):  # type: ignore[type-arg]  # a class is asked for, not an alias
    """For files that are there at once."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options["disable"] = True
        options.pop("name", None)
        super().__init__(*args, **options)


def _is_text_file(name: str) -> bool:
    if "/" in name:
        return _IN_FOLDERS.fullmatch(name) is not None
    is_unused = name != INDEX_FILE and any(fnmatch(name, each) for each in _UNUSED_PATTERNS)
    return not is_unused and any(fnmatch(name, pattern) for pattern in _TEXT_PATTERNS)
