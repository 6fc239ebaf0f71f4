"""The options of speculative decoding, and the registry of proposers."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from quire.errors import ConfigurationError
from quire.option_fields import Bytes, Flag, Kind, Options, Text, Whole, option
from quire.registry import Registry

if TYPE_CHECKING:  # brings the scheduler, which a command's help does not need
    from quire.speculation.proposer import Proposer

PROPOSERS: "Registry[Callable[[SpeculationOptions], Proposer]]" = Registry(
    "speculation",
    {
        "forced": "quire.speculation.forced:make_proposer",
        "prediction": "quire.speculation.prediction:make_proposer",
        "ngram": "quire.speculation.ngram:make_proposer",
        "siblings": "quire.speculation.siblings:make_proposer",
        "history": "quire.speculation.earlier_answers:make_proposer",
    },
)
"""Functions that make proposers from the options. A plugin adds its own. Among equally good guesses
of several proposers, that of the first is taken."""

AUTO, OFF = "auto", "off"

DRAFT_MODEL, EAGLE3, MTP = "draft_model", "eagle3", "mtp"
DRAFTERS = (DRAFT_MODEL, EAGLE3, MTP)
"""What drafts on the device, and is no proposer: the model or the EAGLE-3 head that
`speculative_model` names, or the MTP head in the model's own files."""

AUTO_PROPOSERS = ("forced", "prediction", "ngram", "siblings", "history")


@dataclass(frozen=True, slots=True)
class Names(Kind):
    """Different names of `choices` and `more`, separated by commas, or one name of `alone`."""

    #: The names. A registry may get further ones later.
    choices: Collection[str]
    more: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    metavar: ClassVar[str | None] = "NAMES"

    def validate(self, name: str, value: Any, *, is_optional: bool) -> str:
        parts = value.split(",") if isinstance(value, str) else value
        if isinstance(parts, (list, tuple)):
            is_known = all(isinstance(part, str) and part in self._names() for part in parts)
            if parts and is_known and len(set(parts)) == len(parts):
                return ",".join(parts)
            if len(parts) == 1 and parts[0] in self.alone:
                return str(parts[0])
        raise ConfigurationError(
            f"{name} is {value!r}, but must be one of {self.alone}, or different names of"
            f" {self._names()} separated by commas"
        )

    def names(self) -> tuple[str, ...]:
        return (*self.alone, *self._names())

    def _names(self) -> tuple[str, ...]:
        return (*self.choices, *self.more)


@dataclass(frozen=True)
class SpeculationOptions(Options):
    """How drafts are proposed, which steps then verify; no output depends on them."""

    speculation: str = option(
        AUTO,
        Names(PROPOSERS, DRAFTERS, (AUTO, OFF)),
        group="scheduling",
        help="proposers of draft tokens, which steps verify: {names}, or several after commas",
        doc="proposers of draft tokens, which a step verifies together with a sequence's next"
        ' token. "ngram": the tokens that followed an earlier occurrence of the sequence\'s last'
        ' tokens. "prediction": the text that a request expects. "forced": tokens to which a'
        ' grammar allows no alternative. "siblings": other branches of the request. "history":'
        ' earlier answers of the same cache domain. "draft_model", "eagle3": the model, or the'
        ' EAGLE-3 head, that speculative_model names. "mtp": the MTP head in the model\'s own'
        ' files. Several names are separated by commas. "auto": all of these except "mtp" if'
        ' outputs are bitwise the same with and without drafts, otherwise none. "off": no drafts.',
    )
    speculative_model: str | None = option(
        None,
        Text("a folder, a GGUF file or a hub id", is_path=True),
        group="scheduling",
        help="folder, GGUF file or hub id of a small model with similar tokens, or of an"
        " EAGLE-3 head of the model, which drafts",
        doc="a folder, GGUF file or hub id of a small model with similar tokens, or of an"
        " EAGLE-3 head of the model, which drafts tokens where that pays. It is computed on the CPU"
        " only.",
        flag=Flag(metavar="PATH"),
    )
    ngram_min_match: int = option(
        3,
        Whole(1),
        group="scheduling",
        help="tokens that an earlier occurrence must have in common with a sequence's end, for"
        " --speculation",
        doc='for "ngram", "siblings" and "history", the number of tokens that an earlier occurrence'
        " must at least have in common with the sequence's end.",
    )
    speculation_history_size: int = option(
        16 << 20,
        Bytes(0),
        group="scheduling",
        help="memory for earlier answers, for --speculation history",
        doc='for "history", the most memory for earlier answers; a cache domain gets 640 KiB of it.'
        " 0: no answer is kept.",
    )

    def _check_together(self) -> None:
        super()._check_together()
        drafters = [name for name in self.speculation.split(",") if name in DRAFTERS]
        if len(drafters) > 1:
            raise ConfigurationError(
                f"speculation is {self.speculation!r}, but one of {' and '.join(drafters)} drafts;"
                " leave the others out"
            )
        needs_model = drafters not in ([], [MTP])
        if needs_model and self.speculative_model is None:
            raise ConfigurationError(
                f"speculation is {self.speculation!r}, but no model drafts; name one with"
                f" speculative_model, or leave {drafters[0]} out"
            )
        if self.speculative_model is not None and not needs_model and self.speculation != AUTO:
            raise ConfigurationError(
                f"speculative_model is {self.speculative_model!r}, but speculation is"
                f" {self.speculation!r}, which does not use it; leave one of them out, or add"
                f" {DRAFT_MODEL} or {EAGLE3} to speculation"
            )
        for name in ("ngram_min_match", "speculation_history_size"):
            given = getattr(self, name)
            if self.speculation == OFF and given != getattr(SpeculationOptions, name):
                raise ConfigurationError(
                    f"{name} is {given}, but it has no effect without speculation; set"
                    " speculation, or leave it out"
                )
