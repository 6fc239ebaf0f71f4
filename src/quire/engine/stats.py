"""A snapshot of the engine in numbers, and the log line with the same numbers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from quire.core.scheduling.draft_totals import DraftTotals
from quire.engine.utilization import in_short
from quire.observability.log import get_logger

LOG_INTERVAL_S = 10.0

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The state of the engine in numbers."""

    num_running: int
    num_waiting: int
    #: Number of blocks in the pool. Sequences hold num_held_blocks of them; the rest is free or
    #: cached.
    num_blocks: int
    num_held_blocks: int
    num_cached_blocks: int
    num_steps: int
    num_preemptions: int
    num_recomputed_tokens: int
    num_failed_steps: int
    #: Number of prompt tokens looked up in the prefix cache.
    num_query_tokens: int
    #: Number of prompt tokens served from the prefix cache.
    num_hit_tokens: int
    #: Number of tokens computed by steps that succeeded, without rejected drafts.
    num_computed_tokens: int = 0
    #: Number of tokens that sequences got from steps that succeeded.
    num_generated_tokens: int = 0
    #: Number of drafts that steps verified; 0 without a proposer.
    num_drafts: int = 0
    #: Number of drafts that equalled the sampled tokens.
    num_accepted_drafts: int = 0
    #: `Drafting.as_dict`; empty without a proposer.
    drafts: dict[str, Any] = field(default_factory=dict)
    #: Number of requests, by the reason why the cache had no more of their prompts
    #: (`core.sequence.COUNTED_REASONS`).
    prefix_misses: dict[str, int] = field(default_factory=dict)
    #: Counts of moves to and from the tiers (`BlockMoves.counts`); empty without tiers.
    tiers: dict[str, Any] = field(default_factory=dict)
    #: The counts of `AdapterWork.counts`; empty without adapters.
    adapters: dict[str, Any] = field(default_factory=dict)
    #: The counts of `ContentWork.counts`; empty if the model takes no contents.
    contents: dict[str, Any] = field(default_factory=dict)
    #: Histograms by name (see `request_times.RequestTimes`), each with bounds, counts and sum.
    times: dict[str, Any] = field(default_factory=dict)
    #: The result of `Utilization.as_dict`.
    utilization: dict[str, Any] = field(default_factory=dict)


class StatsLog:
    """Logs a line at level info after every LOG_INTERVAL_S seconds with work."""

    def __init__(self) -> None:
        self._since_s = 0.0
        self._num_computed_tokens = 0
        self._num_output_tokens = 0
        self._drafts = DraftTotals()

    def observe(
        self,
        num_computed_tokens: int,
        num_output_tokens: int,
        stats: Callable[[], EngineStats],
        worked_s: float,
    ) -> None:
        """Count one step; write a line and start again when the interval has passed.

        worked_s: seconds with work since the engine began.
        """
        self._num_computed_tokens += num_computed_tokens
        self._num_output_tokens += num_output_tokens
        elapsed_s = worked_s - self._since_s
        if elapsed_s < LOG_INTERVAL_S:
            return
        at = stats()
        drafts = DraftTotals.of(at.drafts)
        hit_rate = at.num_hit_tokens / at.num_query_tokens if at.num_query_tokens else 0.0
        logger.info(
            "%.0f tokens/s computed, %.0f tokens/s generated, %d running, %d waiting,"
            " KV %.1f%% in use, prefix hits %.1f%%, %d preemptions, %s%s%s",
            self._num_computed_tokens / elapsed_s,
            self._num_output_tokens / elapsed_s,
            at.num_running,
            at.num_waiting,
            100 * at.num_held_blocks / at.num_blocks,
            100 * hit_rate,
            at.num_preemptions,
            in_short(at.utilization),
            _tiers_in_short(at),
            _drafts_in_short(drafts.since(self._drafts)),
        )
        self._since_s = worked_s
        self._num_computed_tokens = self._num_output_tokens = 0
        self._drafts = drafts


def _tiers_in_short(stats: EngineStats) -> str:
    """The part of the log line about tiers; empty without tiers."""
    if not stats.tiers:
        return ""
    num_hits = stats.tiers["num_hit_tokens"]
    share = num_hits / stats.num_query_tokens if stats.num_query_tokens else 0.0
    return f", loaded from tiers {100 * share:.1f}%"


def _drafts_in_short(drafts: DraftTotals) -> str:
    """The part of the log line about drafts; empty if none were verified since the last line."""
    if not drafts.num_verified:
        return ""
    return (
        f", {100 * drafts.accepted_share:.0f}% of drafts accepted,"
        f" {drafts.tokens_a_step:.1f} tokens a step"
    )
