"""The Prometheus metric families of a fleet, by replica.

Their names and units follow the rules of `metric_families`.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

_REPLICA_GAUGES = (
    ("num_open", "quire_replica_open_generations", "Generations that a replica computes."),
    (
        "num_prompts",
        "quire_replica_waiting_prompts",
        "Requests placed on a replica whose first token has not come.",
    ),
    (
        "num_uncached_tokens",
        "quire_replica_uncached_tokens",
        "Tokens of waiting prompts that the router expects not to be cached on the replica.",
    ),
    (
        "wait_s",
        "quire_replica_expected_wait_seconds",
        "Expected time until waiting prompts are computed, by the replica's cost model.",
    ),
)


def fleet_families(
    overview: Mapping[str, Mapping[str, Any]], num_moved: int, num_blamed: int
) -> Iterator[Metric]:
    """The API server's metrics about its replicas, from `FleetEngines.overview`."""
    for key, name, text in _REPLICA_GAUGES:
        family = GaugeMetricFamily(name, text, labels=("replica",))
        for replica, found in overview.items():
            if key in found:
                family.add_metric((replica,), found[key])
        yield family
    requested = CounterMetricFamily(
        "quire_replica_requested_restarts_total",
        "Restarts that an operator asked for; deaths are in quire_engine_restarts_total.",
        labels=("replica",),
    )
    for replica, found in overview.items():
        requested.add_metric((replica,), found["num_requested_restarts"])
    yield requested
    yield CounterMetricFamily(
        "quire_moved_requests_total",
        "Requests that went on in another replica, with the same tokens.",
        num_moved,
    )
    yield CounterMetricFamily(
        "quire_blamed_requests_total",
        "Requests that were ended because engines died of them.",
        num_blamed,
    )


def by_replica(found: Mapping[str, Iterable[Metric]]) -> list[Metric]:
    """Merge the families of several engines, adding the label `replica` to their samples. If there
    is only one engine, its name is empty and its samples get no label."""
    merged: dict[str, Metric] = {}
    for replica, families in found.items():
        for family in families:
            if replica:
                family.samples = [
                    sample._replace(labels={**sample.labels, "replica": replica})
                    for sample in family.samples
                ]
            if family.name in merged:
                merged[family.name].samples += family.samples
            else:
                merged[family.name] = family
    return list(merged.values())
