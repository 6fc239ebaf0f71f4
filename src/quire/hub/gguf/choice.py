"""Chooses a GGUF model of a repository by the suffix after the colon of its id.

    org/repo-GGUF:Q4_K_M            the quantization, in upper or lower case
    org/repo-GGUF:tiny-Q8_0.gguf    the file
    org/repo-GGUF                   the only model, or Q4_K_M if there are several

Works on file names only. Called by `hub.fetching`.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import PurePosixPath

from quire.errors import CheckpointError, shown
from quire.hub.gguf.naming import (
    SUFFIX,
    encoder_folders,
    is_encoder_name,
    model_stem,
    models_of,
    quant_label,
)
from quire.hub.model_files import shown_name

USUAL = "Q4_K_M"
"""The quantization served if none is chosen; most publishers recommend it."""

_ENCODER_LABELS = ("F16", "FP16", "BF16", "F32", "FP32", "Q8_0")
"""Types of the numbers of encoders, the preferred one first."""

_MAX_NAMES_SHOWN = 24


def split_choice(name: str) -> tuple[str, str | None]:
    """Split a name into (hub id, choice after its colon); the choice is None without a colon."""
    repository, colon, choice = name.partition(":")
    return repository, choice if colon else None


def choose_gguf(
    what: str, names: Collection[str], choice: str | None, where: str = ""
) -> tuple[str, ...]:
    """The files of the chosen model, in order; empty if `choice` is None and there is no GGUF
    model.

    `what` names the repository in messages. `names` are the names of all its files. `where` is an
    addition to messages, for a list of names that may be incomplete. Raises CheckpointError that
    lists the models if `choice` matches none of them or several.
    """
    models = models_of(names)
    if choice is None and len(models) < 2:
        return next(iter(models.values()), ())
    if not models:
        raise CheckpointError(
            f"{what} has no models in GGUF format{where}, from which {shown(choice)} could choose;"
            f" leave out ':{shown_name(str(choice))}'"
        )
    found = _matches(models, USUAL if choice is None else choice)
    if len(found) == 1:
        return models[found[0]]
    listed, example = _listed(models if choice is None or not found else found)
    advice = f"name one, as {what}:{example} does"
    if choice is None:
        raise CheckpointError(
            f"{what} has {len(models)} models in GGUF format{where}: {listed}; {advice}"
        )
    if found:
        raise CheckpointError(
            f"{what} has {len(found)} models in GGUF format that {shown(choice)} may mean:"
            f" {listed}; {advice}"
        )
    raise CheckpointError(
        f"{what} has no model {shown(choice)} in GGUF format{where}, but {listed}; {advice}"
    )


def choose_encoder(names: Collection[str], model: str) -> str | None:
    """The file with an encoder of images in the folder of a model's file, or else in the folder
    above; None if there is none.

    Of several, the first by quantization in the order of _ENCODER_LABELS: numbers of 16 bits first,
    which most encoders are published in.
    """
    folders = encoder_folders(PurePosixPath(model))
    found = [
        name
        for name in sorted(names)
        if is_encoder_name(PurePosixPath(name).name) and PurePosixPath(name).parent in folders
    ]

    def rank(name: str) -> tuple[int, int]:
        path = PurePosixPath(name)
        label = quant_label(path.name)
        known = label in _ENCODER_LABELS
        type_rank = _ENCODER_LABELS.index(label) if known else len(_ENCODER_LABELS)
        return folders.index(path.parent), type_rank

    return min(found, key=rank, default=None)


def label_of(first: str) -> str:
    """The quantization in the name of a model's first file; without one, the whole name."""
    return quant_label(PurePosixPath(first).name) or first


def _matches(models: Mapping[str, tuple[str, ...]], choice: str) -> list[str]:
    """The first files of the models that `choice` means, by the first of the rules below that
    matches any model."""
    wanted = choice.lower()
    paths = {first: PurePosixPath(first.lower()) for first in models}

    def ends(first: str) -> bool:
        return _is_ending(model_stem(paths[first].name), wanted)

    rules: tuple[Callable[[str], bool], ...] = (
        lambda first: first.lower() in (wanted, wanted + SUFFIX),
        lambda first: paths[first].name in (wanted, wanted + SUFFIX),
        lambda first: label_of(first).lower() == wanted and ends(first),
        lambda first: label_of(first).lower() == wanted,
        lambda first: wanted in paths[first].parts[:-1],
        ends,
    )
    for rule in rules:
        found = [first for first in models if rule(first)]
        if found:
            return found
    return []


def _is_ending(stem: str, wanted: str) -> bool:
    return bool(wanted) and any(stem.endswith(mark + wanted) for mark in "-._")


def _listed(models: Collection[str]) -> tuple[str, str]:
    """A text that lists all models, and the label of one model as an example. `models` are the
    names of their first files."""
    labels = [label_of(first) for first in models]
    names = [
        label if labels.count(label) == 1 else first
        for label, first in zip(labels, models, strict=True)
    ]
    listed = [shown_name(name) for name in sorted(names)]
    rest = len(listed) - _MAX_NAMES_SHOWN
    more = f" and {rest} more" if rest > 0 else ""
    return ", ".join(listed[:_MAX_NAMES_SHOWN]) + more, listed[0]
