"""The options of the scheduler and its policies.

`options.engine_options` joins them with the other options. The scheduler is made with
`SchedulerConfig`.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from quire.core.scheduling.pacing import LEAST_MAX_ITL_RATIO
from quire.core.scheduling.policy import POLICIES
from quire.errors import ConfigurationError
from quire.option_fields import Flag, Kind, OneOf, Options, Text, Tokens, Whole, in_words, option

SERVED_MAX_ITL_RATIO = 2.7
SERVED_COSTS_FILE = "~/.cache/quire/start_costs.json"


@dataclass(frozen=True, slots=True)
class StepRatio(Kind):
    """A factor by which steps may get longer: 0 (no limit), or one large enough for a prompt to
    make progress."""

    metavar: ClassVar[str | None] = "X"
    number: ClassVar[type[int] | type[float] | None] = float

    def validate(self, name: str, value: Any, *, is_optional: bool) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and (value == 0 or LEAST_MAX_ITL_RATIO <= value < math.inf):
            return value  # type: ignore[no-any-return]
        raise ConfigurationError(
            f"{name} is {value!r}, but must be 0 (no limit) or a number from"
            f" {LEAST_MAX_ITL_RATIO} up"
        )


@dataclass(frozen=True)
class SchedulerConfig(Options):
    """The work of one step, and the memory that is reserved ahead."""

    max_num_seqs: int = option(
        64,
        Whole(1),
        group="scheduling",
        help="sequences per step at most",
        doc="the most sequences that run at once.",
    )
    max_num_batched_tokens: int = option(
        2048,
        Tokens(1),
        group="scheduling",
        help="tokens per step at most",
        doc="the most tokens that a step computes; at least max_num_seqs, so that every running"
        " sequence can always decode. None: 2048, or max_num_seqs if that is more.",
    )
    num_lookahead_blocks: int = option(
        1,
        Whole(0),
        group="memory",
        help="KV blocks reserved ahead per sequence",
        doc="KV blocks that a growing sequence reserves in advance beside the one that it needs,"
        " while more than a quarter of the memory is free.",
    )

    num_draft_tokens: int = option(
        15,
        Whole(1),
        group="scheduling",
        help="draft tokens per sequence and step at most, with --speculation",
        doc="the most draft tokens that a step verifies for one sequence.",
    )

    def _check_together(self) -> None:
        super()._check_together()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigurationError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, below max_num_seqs,"
                f" {self.max_num_seqs}: a step could not decode every running sequence"
            )

    @staticmethod
    def complete(given: dict[str, Any]) -> None:
        """Set the default that depends on another option."""
        if given.get("max_num_batched_tokens") is None:
            given.pop("max_num_batched_tokens", None)
            max_num_seqs = given.get("max_num_seqs")
            default = SchedulerConfig.max_num_batched_tokens
            if isinstance(max_num_seqs, int) and max_num_seqs > default:
                given["max_num_batched_tokens"] = max_num_seqs


@dataclass(frozen=True)
class PolicyOptions(Options):
    """The order of requests, and how much a prompt may slow the others down."""

    scheduling_policy: str = option(
        "fcfs",
        OneOf(POLICIES, listed=", ".join),
        group="scheduling",
        help="{names}",
        doc=in_words([f'"{name}"' for name in POLICIES]) + ". A prompt may set priority"
        ' only with "priority", and deadline_s only with "deadline".',
    )
    max_itl_ratio: float = option(
        0.0,
        StepRatio(),
        group="scheduling",
        help="a prompt may make a step of running sequences X times as long; 0: no limit",
        doc="a prompt that is computed beside running sequences may make a step at most this many"
        " times as long. If several prompts wait, all but the first count as running. A cost model"
        " predicts the step's time; it is measured at start-up (for at most about 0.4 s) and"
        " adjusted to later steps. 0: no limit, for the highest throughput, and nothing is"
        " measured.",
        flag=Flag(served=SERVED_MAX_ITL_RATIO),
    )
    start_costs: str | None = option(
        None,
        Text("a file", is_path=True),
        group="scheduling",
        help="file that remembers for later starts what was measured for max_itl_ratio",
        doc="a file that remembers what was measured for max_itl_ratio. An engine that starts again"
        " with the same options measures only a few steps, to see whether the costs still hold. On"
        " a GPU it measures all of them again, since that also captures CUDA graphs. None: nothing"
        " is remembered.",
        flag=Flag(metavar="FILE", served=SERVED_COSTS_FILE),
    )
