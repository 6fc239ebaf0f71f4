"""The options of speculative decoding, and the registry of proposers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.errors import ConfigurationError
from quire.option_fields import OneOf, Options, Whole, option
from quire.registry import Registry

if TYPE_CHECKING:  # brings the scheduler, which a command's help does not need
    from quire.core.scheduling.drafts import Proposer

PROPOSERS: "Registry[Callable[[SpeculationOptions], Proposer]]" = Registry(
    "speculation", {"ngram": "quire.speculation.ngram:make_proposer"}
)
"""Functions that make proposers from the options. A plugin adds its own."""


@dataclass(frozen=True)
class SpeculationOptions(Options):
    """How drafts are proposed, which steps then verify; no output depends on them."""

    speculation: str | None = option(
        None,
        OneOf(PROPOSERS),
        group="scheduling",
        help="proposer of draft tokens, which steps verify: {names}",
        doc="proposer of draft tokens, which a step verifies together with a sequence's next"
        ' token. "ngram": the tokens that followed an earlier occurrence of the sequence\'s last'
        " tokens. Outputs are the same to the bit, with any proposer and without. None: no drafts.",
    )
    ngram_min_match: int = option(
        3,
        Whole(1),
        group="scheduling",
        help="tokens that an earlier occurrence must have in common with a sequence's end, for"
        " --speculation ngram",
        doc='for "ngram", the number of tokens that an earlier occurrence must at least have in'
        " common with the sequence's end.",
    )

    def _check_together(self) -> None:
        super()._check_together()
        default = SpeculationOptions.ngram_min_match
        if self.speculation is None and self.ngram_min_match != default:
            raise ConfigurationError(
                f"ngram_min_match is {self.ngram_min_match}, but it has no effect without"
                " speculation; set speculation, or leave it out"
            )
