"""The Prometheus metric families of /metrics: every name, label and unit.

Names end in their unit, names of counters in `_total`. docs/observability.md explains each family,
and a test keeps the page complete. Clients can't create label values, so labels stay few.
`routes.admin.metrics` calls these functions with the numbers.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

from quire.core.memory.memory_report import HELD_PARTS, PARTS
from quire.core.scheduling.draft_totals import DraftTotals
from quire.core.sequence import COUNTED_REASONS
from quire.server.http.open_connections import OpenConnections
from quire.server.telemetry.monitor import FINISH_REASONS, MAX_TENANTS, OTHER_TENANTS, Monitor
from quire.version import __version__

Samples = Iterable[tuple[tuple[str, ...], float]]
"""Pairs of (label values, sample value)."""

_TENANT_COUNTERS = (
    ("num_generations", "quire_generations_total", "Generations (prompts times n) taken in."),
    ("num_prompt_tokens", "quire_prompt_tokens_total", "Tokens of prompts that were processed."),
    (
        "num_cached_tokens",
        "quire_prompt_cached_tokens_total",
        "Tokens of processed prompts that were served from the prefix cache.",
    ),
    (
        "num_generated_tokens",
        "quire_generation_tokens_total",
        "Generated tokens that came back to the API server.",
    ),
)

_LATENCIES = (
    (
        "time_to_first_token_s",
        "quire_time_to_first_token_seconds",
        "From the call's arrival to a generation's first token.",
    ),
    (
        "inter_token_s",
        "quire_inter_token_latency_seconds",
        "Between two tokens of one generation, for each token but the first.",
    ),
    (
        "time_per_token_s",
        "quire_time_per_output_token_seconds",
        "Mean time per token after the first, for each generation that has ended.",
    ),
    (
        "end_to_end_s",
        "quire_e2e_latency_seconds",
        "From the call's arrival to the end of a generation.",
    ),
)

_ENGINE_GAUGES = (
    ("num_running", "quire_requests_running", "Sequences that have a row in the batch."),
    ("num_waiting", "quire_requests_waiting", "Sequences that wait for a row."),
)

_ENGINE_COUNTERS = (
    ("num_steps", "quire_steps_total", "Forward passes that succeeded."),
    ("num_failed_steps", "quire_failed_steps_total", "Forward passes that failed as a whole."),
    ("num_computed_tokens", "quire_computed_tokens_total", "Tokens computed, prompts included."),
    ("num_generated_tokens", "quire_sampled_tokens_total", "Tokens that the engine has sampled."),
    ("num_preemptions", "quire_preemptions_total", "Sequences that had to give blocks back."),
    (
        "num_recomputed_tokens",
        "quire_recomputed_tokens_total",
        "Tokens computed again after a preemption.",
    ),
    (
        "num_query_tokens",
        "quire_prefix_query_tokens_total",
        "Prompt tokens looked up in the prefix cache.",
    ),
    ("num_hit_tokens", "quire_prefix_hit_tokens_total", "Prompt tokens found in the prefix cache."),
)

_MOVE_COUNTERS = (
    (
        "num_hit_tokens",
        "quire_prefix_loaded_tokens_total",
        "Prompt tokens found in the prefix cache after they were loaded from a tier.",
    ),
    (
        "num_loaded_tokens",
        "quire_tier_loaded_tokens_total",
        "Tokens loaded from a tier, those of preempted sequences included.",
    ),
    ("num_loads", "quire_tier_loads_total", "Loads begun, each of one sequence's prefix."),
    (
        "num_declined",
        "quire_tier_loads_declined_total",
        "Loads not begun, since computing was predicted to be faster, or nothing could be read.",
    ),
    ("num_late", "quire_tier_loads_late_total", "Loads given up, since they took too long."),
    (
        "predicted_s",
        "quire_tier_load_predicted_seconds_total",
        "Predicted duration of loads of which all blocks came.",
    ),
    ("waited_s", "quire_tier_load_seconds_total", "Duration of loads of which all blocks came."),
)

_LOADED_BLOCKS = (("num_loaded_blocks", "loaded"), ("num_failed_blocks", "failed"))
_STORED_BLOCKS = (
    ("num_stored_blocks", "stored"),
    ("num_not_stored_blocks", "failed"),
    ("num_too_late_blocks", "evicted"),
)

_TIER_GAUGES = (
    ("used_bytes", "quire_tier_bytes", "Bytes that a tier takes, of all models together."),
    (
        "pinned_bytes",
        "quire_tier_pinned_bytes",
        "Page-locked memory of the host that a tier holds, used or not.",
    ),
    ("num_records", "quire_tier_records", "Blocks that a tier keeps for this model."),
    ("queued_bytes", "quire_tier_queued_bytes", "Bytes that wait to be written to a tier."),
    (
        "bytes_per_s",
        "quire_tier_read_rate_bytes_per_second",
        "Rate of loads from a tier, as learned from those that ended.",
    ),
    ("is_reading", "quire_tier_reading", "1 while a tier is read, 0 while that is paused."),
    ("is_writing", "quire_tier_writing", "1 while a tier is written, 0 while that is paused."),
)

_TIER_COUNTERS = (
    ("loaded_bytes", "quire_tier_read_bytes_total", "Bytes of blocks read from a tier."),
    ("stored_bytes", "quire_tier_written_bytes_total", "Bytes written to a tier."),
    ("damaged", "quire_tier_damaged_total", "Blocks that were not what they should be."),
    ("rewritten", "quire_tier_rewritten_total", "Blocks kept when what lay beside them went."),
)

_TIER_FAILURES = (("load_failures", "read"), ("store_failures", "write"))
_TIER_DROPS = (("over_budget", "budget"), ("over_queue", "queue"))

_ADAPTER_GAUGES = (
    ("num_slots", "quire_adapter_slots", "Adapters that one step may use."),
    ("num_resident", "quire_adapters_resident", "Adapters that lie in slots."),
    ("num_host", "quire_adapters_in_memory", "Adapters that lie in the host's memory."),
    ("host_bytes", "quire_adapter_host_bytes", "Bytes of the host's memory that adapters take."),
)
_ADAPTER_COUNTERS = (
    ("num_loads", "quire_adapter_loads_total", "Adapters loaded into a slot."),
    ("num_reads", "quire_adapter_reads_total", "Adapters read from their folders."),
    (
        "num_failed",
        "quire_adapter_read_failures_total",
        "Reads of adapters that failed while requests waited for them.",
    ),
)

_CONTENT_GAUGES = (
    ("num_waiting", "quire_contents_waiting", "Images that are encoded or wait for it."),
    ("cache_bytes", "quire_encoder_cache_bytes", "Bytes of the cached embeddings of images."),
)
_CONTENT_COUNTERS = (
    ("num_encoded", "quire_contents_encoded_total", "Images that were encoded."),
    ("encode_s", "quire_encode_seconds_total", "Seconds of encoding images."),
    ("num_hits", "quire_encoder_cache_hits_total", "Images whose embeddings were cached."),
)

_DRAFT_COUNTERS = (
    ("verified", "quire_draft_tokens_total", "Drafts that steps verified."),
    (
        "accepted",
        "quire_accepted_draft_tokens_total",
        "Drafts that equalled the sampled tokens.",
    ),
)
_POSITION_COUNTERS = (
    (
        "verified",
        "quire_position_draft_tokens_total",
        "Drafts that steps verified, by position.",
    ),
    (
        "accepted",
        "quire_position_accepted_draft_tokens_total",
        "Drafts that equalled the sampled tokens, by position.",
    ),
    (
        "accepted",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "The same as quire_position_accepted_draft_tokens_total.",
    ),
)
_VLLM_DRAFT_COUNTERS = (
    ("num_rows", "vllm:spec_decode_num_drafts_total", "Rows of steps that had drafts."),
    (
        "num_verified",
        "vllm:spec_decode_num_draft_tokens_total",
        "The sum of quire_draft_tokens_total.",
    ),
    (
        "num_accepted",
        "vllm:spec_decode_num_accepted_tokens_total",
        "The sum of quire_accepted_draft_tokens_total.",
    ),
)

_TIME_USES = (("busy_s", "busy"), ("gap_s", "gap"), ("idle_s", "idle"))
_WORK_COUNTERS = (
    (
        "launching_s",
        "quire_launching_seconds_total",
        "Upper bound of the busy time in which a GPU waited within steps for launches.",
    ),
    ("num_bytes", "quire_step_bytes_total", "Bytes that the steps had to move at least."),
    ("operations", "quire_step_operations_total", "Operations that the steps had to do at least."),
    (
        "floor_s",
        "quire_step_floor_seconds_total",
        "Least time of these bytes and operations, at the machine's measured rates.",
    ),
)
_WORK_GAUGES = (
    ("busy_share", "quire_busy_ratio", "Share of the last 5 to 10 seconds with a step under way."),
    (
        "floor_share",
        "quire_floor_ratio",
        "Share of the last 5 to 10 seconds that the steps take at least, at the measured rates.",
    ),
    (
        "slowness",
        "quire_slowness_ratio",
        "Duration of the latest steps, relative to the one measured at the start.",
    ),
    (
        "bytes_per_s",
        "quire_machine_bytes_per_second",
        "Measured at the start: reads of memory; on a GPU a copy, read and written.",
    ),
    (
        "operations_per_s",
        "quire_machine_operations_per_second",
        "Measured at the start: a large product, with the model's weight format.",
    ),
)
_GPU_GAUGES = (
    ("busy_share", "quire_gpu_busy_ratio", "NVML's: time in which some kernel ran."),
    ("memory_share", "quire_gpu_memory_busy_ratio", "NVML's: time in which memory was accessed."),
)

_ENGINE_TIMES = (
    ("queue_s", "quire_queue_time_seconds", "From a request's arrival until it is scheduled."),
    ("prefill_s", "quire_prefill_time_seconds", "From a request's scheduling to its first token."),
    ("decode_s", "quire_decode_time_seconds", "From a sequence's first token to its end."),
    ("step_s", "quire_step_duration_seconds", "A forward pass with scheduling and sampling."),
)


def connection_families(connections: OpenConnections, num_body_bytes: int) -> Iterator[Metric]:
    """The metrics of client connections, and of the body bytes that `BodyBudget` counts."""
    yield GaugeMetricFamily(
        "quire_http_body_bytes",
        "Bytes of the bodies of open calls, beyond the first 64 KiB of each.",
        num_body_bytes,
    )
    yield GaugeMetricFamily(
        "quire_http_connections_open", "Connections of clients.", connections.num_open
    )
    if connections.max_open is not None:
        yield GaugeMetricFamily(
            "quire_http_connections_limit",
            "Most connections that may be open; others wait.",
            connections.max_open,
        )
    yield _counter(
        "quire_http_connections_closed_total",
        "Connections closed to bound their number: of an address with too many, or idle ones.",
        ("reason",),
        (
            (("refused",), connections.num_refused),
            (("idle",), connections.num_closed_idle),
        ),
    )


def api_server_families(monitor: Monitor, open_by_tenant: Mapping[str, int]) -> Iterator[Metric]:
    """The API server's metrics. `open_by_tenant` is `TenantBook.num_open`."""
    info = {"version": __version__, "model": monitor.model_name}
    yield InfoMetricFamily("quire_build", "What runs here.", value=info)
    yield GaugeMetricFamily(
        # HTTP calls.
        "quire_http_requests_open",
        "HTTP calls that are being answered.",
        monitor.num_open_http_calls,
    )
    yield _counter(
        "quire_http_requests_total",
        "HTTP calls answered.",
        ("method", "route", "status"),
        (
            ((method, route, str(status)), count)
            for (method, route, status), count in monitor.http_calls.items()
        ),
    )
    yield _counter(
        "quire_http_errors_total",
        "HTTP calls answered with an error, by its code.",
        ("status", "code"),
        (((str(status), code), count) for (status, code), count in monitor.http_errors.items()),
    )
    yield _gauge(
        "quire_tenant_generations_open",
        "Generations under way, by tenant.",
        ("tenant",),
        (((name,), count) for name, count in _bounded(open_by_tenant).items()),
    )


def generation_families(monitor: Monitor) -> Iterator[Metric]:
    """The generations of a model, with their tokens and times."""
    yield GaugeMetricFamily(
        "quire_generations_open", "Generations under way.", monitor.num_open_generations
    )
    yield _counter(
        "quire_generations_finished_total",
        "Generations that have ended, by reason.",
        ("reason", "tenant"),
        (
            ((reason, tenant), monitor.finished[reason, tenant])
            for tenant in monitor.tenants
            for reason in FINISH_REASONS
        ),
    )
    for field, name, text in _TENANT_COUNTERS:
        counts = (((key,), getattr(tenant, field)) for key, tenant in monitor.tenants.items())
        yield _counter(name, text, ("tenant",), counts)
    for field, name, text in _LATENCIES:
        yield _histogram(name, text, getattr(monitor, field).as_dict())


def engine_state_families(
    state: str, states: Iterable[str], num_restarts: int, last_step_age_s: float
) -> Iterator[Metric]:
    """The metrics of the engine's state, which need no reply from the engine. `states` lists all
    possible states."""
    yield GaugeMetricFamily(
        "quire_engine_up", "1 while the engine takes steps.", float(state == "ready")
    )
    yield _gauge(
        "quire_engine_state",
        "1 for the state that the engine is in.",
        ("state",),
        (((each,), float(each == state)) for each in states),
    )
    yield CounterMetricFamily(
        "quire_engine_restarts_total", "Engine processes started again.", num_restarts
    )
    yield GaugeMetricFamily(
        "quire_engine_last_sign_of_life_age_seconds",
        "Time since the last message of the engine.",
        last_step_age_s,
    )


def engine_families(stats: Mapping[str, Any]) -> Iterator[Metric]:
    """The engine's metrics, from the fields of `EngineStats` by name; missing ones are left out."""
    for key, name, text in _ENGINE_GAUGES:
        if key in stats:
            yield GaugeMetricFamily(name, text, stats[key])
    for key, name, text in _ENGINE_COUNTERS:
        if key in stats:
            yield CounterMetricFamily(name, text, stats[key])
    # The use of the KV memory and of the prefix cache.
    if "num_blocks" in stats:
        yield GaugeMetricFamily(
            "quire_kv_use_ratio",
            "Share of all blocks that sequences hold.",
            stats["num_held_blocks"] / stats["num_blocks"],
        )
    if "prefix_misses" in stats:
        found = stats["prefix_misses"]
        yield _counter(
            "quire_prefix_misses_total",
            "Requests by the reason for which the prefix cache had no more of their prompts.",
            ("reason",),
            (((reason.value,), found.get(reason.value, 0)) for reason in COUNTED_REASONS),
        )
    # Features that the engine has only with their options.
    if stats.get("tiers"):
        yield from _move_families(stats["tiers"])
    if adapters := stats.get("adapters"):
        for key, name, text in _ADAPTER_GAUGES:
            yield GaugeMetricFamily(name, text, adapters[key])
        for key, name, text in _ADAPTER_COUNTERS:
            yield CounterMetricFamily(name, text, adapters[key])
    if contents := stats.get("contents"):
        for key, name, text in _CONTENT_GAUGES:
            yield GaugeMetricFamily(name, text, contents[key])
        for key, name, text in _CONTENT_COUNTERS:
            yield CounterMetricFamily(name, text, contents[key])
    if drafts := stats.get("drafts"):
        yield from _draft_families(drafts)
    if utilization := stats.get("utilization"):
        yield from _utilization_families(utilization)
    for key, name, text in _ENGINE_TIMES:
        if key in stats.get("times", ()):
            yield _histogram(name, text, stats["times"][key])


def _draft_families(drafts: Mapping[str, Any]) -> Iterator[Metric]:
    """The metrics of speculation, from `Drafting.as_dict`. Families with vLLM's names have the same
    counts as ours."""
    by_proposer, totals = drafts["by_proposer"], DraftTotals.of(drafts)
    for key, name, text in _DRAFT_COUNTERS:
        counts = (((proposer,), sum(found[key])) for proposer, found in by_proposer.items())
        yield _counter(name, text, ("proposer",), counts)
    for key, name, text in _POSITION_COUNTERS:
        positions = (((str(at),), count) for at, count in enumerate(getattr(totals, key)))
        yield _counter(name, text, ("position",), positions)
    for key, name, text in _VLLM_DRAFT_COUNTERS:
        yield CounterMetricFamily(name, text, getattr(totals, key))
    yield GaugeMetricFamily(
        "quire_speculation_saved_seconds",
        "Predicted time of the steps that accepted drafts saved, less that of verifying drafts.",
        drafts["saved_s"],
    )


def _utilization_families(found: Mapping[str, Any]) -> Iterator[Metric]:
    """The device's utilization, from `Utilization.as_dict`; unmeasured numbers are left out."""
    yield _counter(
        "quire_engine_time_seconds_total",
        "The engine's time, by use: a step is under way, requests wait without one, idle.",
        ("use",),
        (((use,), found[key]) for key, use in _TIME_USES),
    )
    for key, name, text in _WORK_COUNTERS:
        if key in found:
            yield CounterMetricFamily(name, text, found[key])
    for key, name, text in _WORK_GAUGES:
        if key in found:
            yield GaugeMetricFamily(name, text, found[key])
    for key, name, text in _GPU_GAUGES:
        if key in found.get("device", ()):
            yield GaugeMetricFamily(name, text, found["device"][key])


def _move_families(moves: Mapping[str, Any]) -> Iterator[Metric]:
    """The metrics of moves between the KV memory and its tiers, from `BlockMoves.counts`."""
    for key, name, text in _MOVE_COUNTERS:
        yield CounterMetricFamily(name, text, moves[key])
    yield _counter(
        "quire_tier_load_blocks_total",
        "Blocks that were loaded, by result.",
        ("result",),
        (((result,), moves[key]) for key, result in _LOADED_BLOCKS),
    )
    yield _counter(
        "quire_tier_store_blocks_total",
        "Blocks that were to be stored, by result.",
        ("result",),
        (((result,), moves[key]) for key, result in _STORED_BLOCKS),
    )
    tiers: Mapping[str, Mapping[str, float]] = moves["by_tier"]
    for key, name, text in _TIER_GAUGES:
        yield _gauge(name, text, ("tier",), _by_tier(tiers, key))
    for key, name, text in _TIER_COUNTERS:
        yield _counter(name, text, ("tier",), _by_tier(tiers, key))
    yield _counter(
        "quire_tier_failures_total",
        "Reads and writes that failed or hung.",
        ("tier", "operation"),
        _by_tier_and(tiers, _TIER_FAILURES),
    )
    yield _counter(
        "quire_tier_dropped_total",
        "Blocks not written: above a day's budget of bytes, or with too much in the queue.",
        ("tier", "reason"),
        _by_tier_and(tiers, _TIER_DROPS),
    )


def _by_tier(tiers: Mapping[str, Mapping[str, float]], key: str) -> Samples:
    """A sample for each tier that counts `key`."""
    return (((name,), float(counts[key])) for name, counts in tiers.items() if key in counts)


def _by_tier_and(
    tiers: Mapping[str, Mapping[str, float]], keys: Iterable[tuple[str, str]]
) -> Samples:
    return (
        ((name, value), counts[key])
        for key, value in keys
        for name, counts in tiers.items()
        if key in counts
    )


def memory_families(memory: Mapping[str, Any], num_blocks: int | None) -> Iterator[Metric]:
    """The use of the KV memory, from `MemoryReport.as_dict`. `num_blocks` is the number of blocks
    in the pool."""
    yield _gauge(
        "quire_kv_memory_bytes",
        "The KV memory by use; the parts add up to all of it.",
        ("part",),
        (((part,), memory[f"{part}_bytes"]) for part in PARTS),
    )
    yield GaugeMetricFamily(
        "quire_kv_saved_bytes",
        "Bytes that the same sequences would hold in addition if they shared no blocks.",
        memory["saved_bytes"],
    )
    yield GaugeMetricFamily(
        "quire_kv_lookahead_bytes",
        "Reserved bytes for tokens that are not known yet.",
        memory["lookahead_bytes"],
    )
    if num_blocks:
        block_bytes = memory["total_bytes"] / num_blocks
        held = sum(memory[f"{part}_bytes"] for part in HELD_PARTS)
        by_state = (("held", held), ("cached", memory["cached_bytes"]))
        yield _gauge(
            "quire_kv_blocks",
            "Blocks of the pool by state: held, free with content that prompts may find, free.",
            ("state",),
            (
                ((state,), round(num_bytes / block_bytes))
                for state, num_bytes in (*by_state, ("free", memory["free_bytes"]))
            ),
        )


def _counter(
    name: str, text: str, labels: tuple[str, ...], samples: Samples
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _gauge(name: str, text: str, labels: tuple[str, ...], samples: Samples) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _histogram(name: str, text: str, counted: Mapping[str, Any]) -> HistogramMetricFamily:
    """A histogram from `Histogram.as_dict`, converted to Prometheus's cumulative buckets."""
    bounds = [*map(floatToGoString, counted["bounds"]), "+Inf"]
    buckets = list(zip(bounds, accumulate(counted["counts"]), strict=True))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=counted["sum"])


def _bounded(by_tenant: Mapping[str, int]) -> Counter[str]:
    """The counts by tenant. Tenants beyond MAX_TENANTS are added up under one name."""
    found: Counter[str] = Counter()
    for index, (name, count) in enumerate(by_tenant.items()):
        found[name if index < MAX_TENANTS else OTHER_TENANTS] += count
    return found
