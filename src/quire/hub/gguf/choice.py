"""Chooses one of the GGUF models of a repository, by what stands behind its id.

    org/repo-GGUF:Q4_K_M            the quantization, whatever the case of its letters
    org/repo-GGUF:tiny-Q8_0.gguf    the file
    org/repo-GGUF                   the only one, or Q4_K_M

Works on names. Called by `hub.fetching`.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import PurePosixPath

from quire.errors import CheckpointError, shown
from quire.hub.gguf.naming import SUFFIX, models_of, quant_label
from quire.hub.model_files import shown_name

USUAL = "Q4_K_M"
"""What is served where nothing is chosen: the quantization that most publishers recommend."""

_MAX_NAMES_SHOWN = 24


def split_choice(name: str) -> tuple[str, str | None]:
    """A hub's id, and what is chosen of it; None: nothing."""
    repository, colon, choice = name.partition(":")
    return repository, choice if colon else None


def choose_gguf(what: str, names: Collection[str], choice: str | None) -> tuple[str, ...]:
    """The files of one model, the first one first; empty: there is no GGUF model, nor a choice.

    what: the repository, for messages. names: of all its files. Raises CheckpointError that lists
    what there is, where it is not one.
    """
    models = models_of(names)
    if choice is None:
        if len(models) < 2:
            return next(iter(models.values()), ())
        found = _matches(models, USUAL)
        if len(found) != 1:
            raise CheckpointError(
                f"{what} has {len(models)} models in GGUF format; {_advice(what, models)}"
            )
        return models[found[0]]
    if not models:
        raise CheckpointError(
            f"{what} has no models in GGUF format, of which {shown(choice)} could be one; leave out"
            f" ':{shown_name(choice)}'"
        )
    found = _matches(models, choice)
    if len(found) != 1:
        number = "none is" if not found else f"{len(found)} are"
        raise CheckpointError(
            f"{what} has {len(models)} models in GGUF format, of which {number}"
            f" {shown(choice)}; {_advice(what, models)}"
        )
    return models[found[0]]


def label_of(first: str) -> str:
    """How to name a model: its quantization, or else its file's name. first: its first file."""
    return quant_label(PurePosixPath(first).name) or first


def _matches(models: Mapping[str, tuple[str, ...]], choice: str) -> list[str]:
    """The first files of those that the choice may mean, by the first rule that finds any."""
    wanted = choice.lower()
    paths = {first: PurePosixPath(first.lower()) for first in models}
    rules: tuple[Callable[[str], bool], ...] = (
        lambda first: first.lower() in (wanted, wanted + SUFFIX),
        lambda first: paths[first].name in (wanted, wanted + SUFFIX),
        lambda first: label_of(first).lower() == wanted,
        lambda first: wanted in paths[first].parts[:-1],
        lambda first: _is_ending(paths[first].name.removesuffix(SUFFIX), wanted),
    )
    for rule in rules:
        found = [first for first in models if rule(first)]
        if found:
            return found
    return []


def _is_ending(stem: str, wanted: str) -> bool:
    return bool(wanted) and any(stem.endswith(mark + wanted) for mark in "-._")


def _advice(what: str, models: Mapping[str, tuple[str, ...]]) -> str:
    labels = [label_of(first) for first in models]
    names = [
        label if labels.count(label) == 1 else first
        for label, first in zip(labels, models, strict=True)
    ]
    listed = [shown_name(name) for name in sorted(names)]
    rest = len(listed) - _MAX_NAMES_SHOWN
    more = f" and {rest} more" if rest > 0 else ""
    return f"name one, as {what}:{listed[0]} does: {', '.join(listed[:_MAX_NAMES_SHOWN])}{more}"
