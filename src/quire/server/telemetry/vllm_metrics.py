"""Gives metrics vLLM's names and labels, which boards, autoscalers and gateways read.

The names are those of vLLM's first engine version and later. `routes.admin.metrics` adds these
families to ours.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

PREFIX = "vllm:"
"""The beginning of vLLM's names. Its names of draft metrics are among our own families."""

_NAMES = {
    "quire_requests_running": "num_requests_running",
    "quire_requests_waiting": "num_requests_waiting",
    "quire_kv_use_ratio": "kv_cache_usage_perc",
    "quire_preemptions": "num_preemptions",
    "quire_prefix_query_tokens": "prefix_cache_queries",
    "quire_prefix_hit_tokens": "prefix_cache_hits",
    "quire_prompt_tokens": "prompt_tokens",
    "quire_prompt_cached_tokens": "prompt_tokens_cached",
    "quire_generation_tokens": "generation_tokens",
    "quire_generations_finished": "request_success",
    "quire_time_to_first_token_seconds": "time_to_first_token_seconds",
    "quire_inter_token_latency_seconds": "inter_token_latency_seconds",
    "quire_time_per_output_token_seconds": "request_time_per_output_token_seconds",
    "quire_e2e_latency_seconds": "e2e_request_latency_seconds",
    "quire_queue_time_seconds": "request_queue_time_seconds",
    "quire_prefill_time_seconds": "request_prefill_time_seconds",
    "quire_decode_time_seconds": "request_decode_time_seconds",
}
"""Our families' names -> vLLM's names. Names of counters are without `_total`."""

_REASONS = {"disconnect": "abort", "deadline": "error"}
"""Our reasons why a generation ends that vLLM counts under another name."""


def as_vllm(families: Iterable[Metric], model_name: str) -> Iterator[Metric]:
    """Our families that vLLM has too, under its names.

    Each sample has the labels `model_name` and `engine`, the replica's name or 0. Samples of
    different tenants are added up.
    """
    for family in families:
        name = _NAMES.get(family.name)
        if name is not None:
            found = Metric(PREFIX + name, f"The same as {family.name}.", family.type)
            found.samples = _summed(family, found.name, model_name)
            yield found


def _summed(family: Metric, name: str, model_name: str) -> list[Sample]:
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in family.samples:
        labels = {"model_name": model_name, "engine": sample.labels.get("replica", "0")}
        if "le" in sample.labels:
            labels["le"] = sample.labels["le"]
        if (reason := sample.labels.get("reason")) is not None:
            labels["finished_reason"] = _REASONS.get(reason, reason)
        key = name + sample.name.removeprefix(family.name), tuple(labels.items())
        sums[key] = sums.get(key, 0.0) + sample.value
    return [Sample(each, dict(labels), value) for (each, labels), value in sums.items()]


def cache_config(facts: Mapping[str, Mapping[str, Any]], model_name: str) -> Metric:
    """The size of the KV cache in the labels of a metric, as gateways read it.

    facts: the facts of each engine, by its name; an only engine has an empty name.
    """
    family = GaugeMetricFamily(
        f"{PREFIX}cache_config_info",
        "The size of the KV cache, in labels.",
        labels=("model_name", "engine", "block_size", "num_gpu_blocks"),
    )
    for name, found in facts.items():
        if {"block_size", "num_blocks"} <= found.keys():  # unknown while an engine loads
            sizes = str(found["block_size"]), str(found["num_blocks"])
            family.add_metric((model_name, name or "0", *sizes), 1.0)
    return family


def chosen(families: Iterable[Metric], names: str) -> list[Metric]:
    """The families that the option `metrics_names` asks for."""
    if names == "both":
        return list(families)
    wants_vllm = names == "vllm"
    return [each for each in families if each.name.startswith(PREFIX) == wants_vllm]
