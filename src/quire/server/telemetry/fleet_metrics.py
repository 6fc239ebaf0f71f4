"""The Prometheus metric families of a fleet by replica, and of several models by name.

Their names and units follow the rules of `metric_families`.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from quire.server.hosted_model import HostedModel

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


_MODEL_COUNTERS = (
    ("num_loads", "quire_model_loads_total", "Loads of a model."),
    ("num_unloads", "quire_model_unloads_total", "Unloads of a model."),
    ("num_failures", "quire_model_failures_total", "Failures to load a model, or to run it."),
)

_MODEL_GAUGES = (
    ("reserved_bytes", "quire_model_memory_bytes", "Memory that is reserved for a model."),
    ("num_calls", "quire_model_calls_open", "Calls that use a model."),
)


def model_families(models: Iterable[HostedModel], budget_bytes: int) -> Iterator[Metric]:
    """The API server's metrics about its several models."""
    models = list(models)
    for key, name, text in _MODEL_COUNTERS:
        counter = CounterMetricFamily(name, text, labels=("model_name",))
        for model in models:
            counter.add_metric((model.name,), getattr(model, key))
        yield counter
    for key, name, text in _MODEL_GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=("model_name",))
        for model in models:
            gauge.add_metric((model.name,), getattr(model, key))
        yield gauge
    waiting = GaugeMetricFamily(
        "quire_model_calls_waiting", "Calls that wait for a model.", labels=("model_name",)
    )
    states = GaugeMetricFamily(
        "quire_model_state", "1 for the state that a model is in.", labels=("model_name", "state")
    )
    for model in models:
        waiting.add_metric((model.name,), len(model.waiting))
        states.add_metric((model.name, model.state), 1.0)
    yield waiting
    yield states
    yield GaugeMetricFamily(
        "quire_models_memory_bytes", "Memory that all models together may have.", budget_bytes
    )


def by_label(label: str, found: Mapping[str, Iterable[Metric]]) -> list[Metric]:
    """Merge the families of several engines or models. Each sample gets the label `label` with its
    key in `found` as the value, unless it already has this label. An empty key, such as the name of
    an only engine, adds no label."""
    merged: dict[str, Metric] = {}
    for name, families in found.items():
        for family in families:
            if name:
                family.samples = [
                    sample._replace(labels={**sample.labels, label: sample.labels.get(label, name)})
                    for sample in family.samples
                ]
            if family.name in merged:
                merged[family.name].samples += family.samples
            else:
                merged[family.name] = family
    return list(merged.values())
