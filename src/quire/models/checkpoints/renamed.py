"""A checkpoint that renames or skips the tensors of another checkpoint.

Checkpoints of one model may name the same tensor differently. A model with a head adds a prefix to
the names of all tensors but the head's, and versions of transformers use different names. Called by
`models.registry`.
"""

import re
from collections.abc import Callable, Collection, Mapping, Set
from contextlib import AbstractContextManager

import torch

from quire.formats.block_quantized.weights import BlockFormat, BlockQuantizedRows
from quire.models.checkpoints.source import CheckpointSource, WrappedSource, refusal_of_two

Rename = Callable[[str], str | None]
"""Maps a tensor's name in the file to its name in the model, or to None if it is not used."""

_HEADS = ("lm_head.", "score.")
_LAYER = re.compile(r"^model\.layers\.(\d{1,6})\.")


class RenamedCheckpoint(WrappedSource):
    """The checkpoint `source` under other names."""

    def __init__(self, source: CheckpointSource, rename: Rename) -> None:
        """Raises CheckpointError if two tensors with different values get the same name."""
        super().__init__(source)
        self._names: dict[str, str] = {}
        for theirs in source.names:
            ours = rename(theirs)
            if ours is None:
                continue
            first = self._names.setdefault(ours, theirs)
            if first != theirs and not source.equal(first, theirs):
                raise refusal_of_two(first, theirs, ours)

    @property
    def names(self) -> Set[str]:
        return self._names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._names[name])

    def stored_name(self, name: str) -> str:
        return self._names[name]

    def rows(self, name: str, span: range) -> AbstractContextManager[torch.Tensor]:
        return self._source.rows(self._names[name], span)

    def block_format(self, name: str) -> BlockFormat | None:
        return self._source.block_format(self._names[name])

    def quantized_rows(self, name: str, span: range) -> AbstractContextManager[BlockQuantizedRows]:
        return self._source.quantized_rows(self._names[name], span)

    def pieces(self, name: str) -> list[range]:
        return self._source.pieces(self._names[name])


def with_prefix(prefix: str, *unused: str, but: Collection[str] = ()) -> Rename:
    """A function that adds the prefix to names that lack it. It drops names that begin with one of
    `unused`, and leaves the names in `but` unchanged."""

    def rename(name: str) -> str | None:
        if name.startswith(unused):
            return None
        return name if name.startswith(prefix) or name in but else prefix + name

    return rename


def with_missing_prefix(source: CheckpointSource, embedding: str) -> CheckpointSource:
    """Add the prefix to the names of a checkpoint that was saved without a head and so lacks it.
    Returns any other checkpoint unchanged. `embedding` is the embedding's name with the prefix."""
    prefix, _, bare = embedding.partition(".")
    if embedding in source.names or bare not in source.names:
        return source
    heads = [name for name in source.names if name.startswith(_HEADS)]
    return RenamedCheckpoint(source, with_prefix(f"{prefix}.", but=heads))


def with_words(words: Mapping[str, str]) -> Rename:
    """A function that replaces the words of a name, which dots separate, as `words` says. Words
    that become empty are left out."""

    def rename(name: str) -> str | None:
        return ".".join(filter(None, (words.get(word, word) for word in name.split("."))))

    return rename


def without_layers(layers: range) -> Rename:
    """A function that drops the tensors of these layers."""

    def rename(name: str) -> str | None:
        found = _LAYER.match(name)
        return None if found is not None and int(found[1]) in layers else name

    return rename
