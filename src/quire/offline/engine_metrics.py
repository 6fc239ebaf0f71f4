"""Converts an engine's statistics to named metrics, for `LLM.get_metrics`.

Metrics that the server's `/metrics` also reports have the same names there. Uses no HTTP.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.core.scheduling.draft_totals import DraftTotals
from quire.engine.stats import EngineStats


@dataclass(frozen=True, slots=True)
class Metric:
    """Base class of all metrics."""

    name: str
    #: Labels that distinguish metrics of the same name.
    labels: dict[str, str] = field(default_factory=dict, kw_only=True)


@dataclass(frozen=True, slots=True)
class CounterMetric(Metric):
    """A number that only grows: a count, or seconds, bytes or operations."""

    value: float


@dataclass(frozen=True, slots=True)
class GaugeMetric(Metric):
    """A current value, which may grow and shrink."""

    value: float


@dataclass(frozen=True, slots=True)
class VectorMetric(Metric):
    """A list of numbers that only grow: the accepted drafts by position, under vLLM's name."""

    values: list[int]


@dataclass(frozen=True, slots=True)
class HistogramMetric(Metric):
    """A histogram of durations in seconds."""

    count: int
    sum: float
    #: The number of durations up to each upper bound.
    buckets: dict[str, int]


_GAUGES = {
    "num_running": "quire_requests_running",
    "num_waiting": "quire_requests_waiting",
    "num_blocks": "quire_kv_blocks_total",
    "num_held_blocks": "quire_kv_blocks_held",
    "num_cached_blocks": "quire_kv_blocks_cached",
}
_COUNTERS = {
    "num_steps": "quire_steps_total",
    "num_failed_steps": "quire_failed_steps_total",
    "num_computed_tokens": "quire_computed_tokens_total",
    "num_generated_tokens": "quire_sampled_tokens_total",
    "num_preemptions": "quire_preemptions_total",
    "num_recomputed_tokens": "quire_recomputed_tokens_total",
    "num_query_tokens": "quire_prefix_query_tokens_total",
    "num_hit_tokens": "quire_prefix_hit_tokens_total",
}
_MOVE_COUNTERS = {
    "num_hit_tokens": "quire_prefix_loaded_tokens_total",
    "num_loaded_tokens": "quire_tier_loaded_tokens_total",
    "num_loads": "quire_tier_loads_total",
    "num_declined": "quire_tier_loads_declined_total",
    "num_late": "quire_tier_loads_late_total",
}
_DRAFT_COUNTERS = {
    "verified": "quire_draft_tokens_total",
    "accepted": "quire_accepted_draft_tokens_total",
}
_TIER_GAUGES = {"used_bytes": "quire_tier_bytes", "num_records": "quire_tier_records"}
_TIME_USES = {"busy_s": "busy", "gap_s": "gap", "idle_s": "idle"}
_WORK_COUNTERS = {
    "launching_s": "quire_launching_seconds_total",
    "num_bytes": "quire_step_bytes_total",
    "operations": "quire_step_operations_total",
    "floor_s": "quire_step_floor_seconds_total",
}
_WORK_GAUGES = {
    "busy_share": "quire_busy_ratio",
    "floor_share": "quire_floor_ratio",
    "slowness": "quire_slowness_ratio",
}
_HISTOGRAMS = {
    "queue_s": "quire_queue_time_seconds",
    "prefill_s": "quire_prefill_time_seconds",
    "decode_s": "quire_decode_time_seconds",
    "step_s": "quire_step_duration_seconds",
}


def metrics_of(stats: EngineStats) -> list[Metric]:
    """The metrics of a snapshot, one for each of its numbers."""
    found: list[Metric] = [
        GaugeMetric(name, getattr(stats, each)) for each, name in _GAUGES.items()
    ]
    found += [CounterMetric(name, getattr(stats, each)) for each, name in _COUNTERS.items()]
    found += [
        CounterMetric("quire_prefix_misses_total", num_misses, labels={"reason": reason})
        for reason, num_misses in stats.prefix_misses.items()
    ]
    if stats.tiers:
        found += _tier_metrics(stats.tiers)
    if stats.drafts:
        found += _draft_metrics(stats.drafts)
    found += _utilization_metrics(stats.utilization)
    return found + [_histogram(name, stats.times[each]) for each, name in _HISTOGRAMS.items()]


def _tier_metrics(tiers: Mapping[str, Any]) -> list[Metric]:
    found: list[Metric] = [CounterMetric(name, tiers[key]) for key, name in _MOVE_COUNTERS.items()]
    return found + [
        GaugeMetric(name, counts[key], labels={"tier": tier})
        for tier, counts in tiers["by_tier"].items()
        for key, name in _TIER_GAUGES.items()
        if key in counts
    ]


def _draft_metrics(drafts: Mapping[str, Any]) -> list[Metric]:
    """The metrics of speculation. Some have vLLM's names, since scripts for vLLM read them."""
    totals = DraftTotals.of(drafts)
    found: list[Metric] = [
        CounterMetric(name, sum(counts[key]), labels={"proposer": proposer})
        for key, name in _DRAFT_COUNTERS.items()
        for proposer, counts in drafts["by_proposer"].items()
    ]
    return [
        *found,
        GaugeMetric("quire_speculation_saved_seconds", drafts["saved_s"]),
        CounterMetric("vllm:spec_decode_num_drafts", totals.num_rows),
        CounterMetric("vllm:spec_decode_num_draft_tokens", totals.num_verified),
        CounterMetric("vllm:spec_decode_num_accepted_tokens", totals.num_accepted),
        VectorMetric("vllm:spec_decode_num_accepted_tokens_per_pos", list(totals.accepted)),
    ]


def _utilization_metrics(utilization: Mapping[str, Any]) -> list[Metric]:
    found: list[Metric] = [
        CounterMetric("quire_engine_time_seconds_total", utilization[key], labels={"use": use})
        for key, use in _TIME_USES.items()
    ]
    found += [
        CounterMetric(name, utilization[key])
        for key, name in _WORK_COUNTERS.items()
        if key in utilization
    ]
    return found + [
        GaugeMetric(name, utilization[key])
        for key, name in _WORK_GAUGES.items()
        if key in utilization
    ]


def _histogram(name: str, data: Mapping[str, Any]) -> HistogramMetric:
    """The metric for `data`, which has the format of `observability.histogram`."""
    buckets, count = {}, 0
    for bound, number in zip([*map(str, data["bounds"]), "+Inf"], data["counts"], strict=True):
        count += number
        buckets[bound] = count
    return HistogramMetric(name, count, data["sum"], buckets)
