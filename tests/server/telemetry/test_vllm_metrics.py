"""Metrics under vLLM's names: with the same numbers as ours, and vLLM's labels."""

import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from quire.observability.histogram import Histogram
from quire.server.telemetry.fleet_metrics import by_label
from quire.server.telemetry.metric_families import engine_families, generation_families
from quire.server.telemetry.monitor import Monitor
from quire.server.telemetry.vllm_metrics import as_vllm, cache_config, chosen

STATS = {"num_running": 3, "num_waiting": 2, "num_blocks": 8, "num_held_blocks": 2}


def found(families):
    return {(s.name, *s.labels.items()): s.value for each in families for s in each.samples}


def test_numbers_of_engines_have_the_model_and_the_engine():
    families = by_label(
        "replica", {"a": list(engine_families(STATS)), "b": list(engine_families(STATS))}
    )
    numbers = found(as_vllm(families, "m"))
    for replica in "ab":
        labels = ("model_name", "m"), ("engine", replica)
        assert numbers["vllm:num_requests_running", *labels] == 3
        assert numbers["vllm:num_requests_waiting", *labels] == 2
        assert numbers["vllm:kv_cache_usage_perc", *labels] == 0.25
    assert len(numbers) == 6


def test_tenants_are_added_up_and_reasons_have_vllms_names():
    family = CounterMetricFamily("quire_generations_finished", "", labels=("reason", "tenant"))
    for reason, count in (("abort", 1), ("disconnect", 2), ("deadline", 4), ("stop", 8)):
        family.add_metric((reason, "alice"), count)
        family.add_metric((reason, "bob"), 16)
    name, labels = "vllm:request_success_total", (("model_name", "m"), ("engine", "0"))
    assert found(as_vllm([family], "m")) == {
        (name, *labels, ("finished_reason", "abort")): 35,
        (name, *labels, ("finished_reason", "error")): 20,
        (name, *labels, ("finished_reason", "stop")): 24,
    }


def test_histograms_keep_their_buckets():
    times = Histogram()
    times.observe(0.3)
    family = next(
        each
        for each in engine_families({"times": {"queue_s": times.as_dict()}})
        if each.name == "quire_queue_time_seconds"
    )
    (renamed,) = as_vllm([family], "m")
    assert (renamed.name, renamed.type) == ("vllm:request_queue_time_seconds", "histogram")
    assert [s.value for s in renamed.samples] == [s.value for s in family.samples]
    assert [s.labels.get("le") for s in renamed.samples] == [
        s.labels.get("le") for s in family.samples
    ]


def test_the_size_of_the_cache_is_in_labels():
    facts = {"": {"num_blocks": 512, "block_size": 16}, "new": {}}
    labels = ("model_name", "m"), ("engine", "0"), ("block_size", "16"), ("num_gpu_blocks", "512")
    assert found([cache_config(facts, "m")]) == {("vllm:cache_config_info", *labels): 1}


@pytest.mark.parametrize(
    ("names", "wanted"),
    [("both", {"vllm:a", "quire_a"}), ("vllm", {"vllm:a"}), ("quire", {"quire_a"})],
)
def test_other_names_are_left_out(names, wanted):
    families = [GaugeMetricFamily("vllm:a", "", 1), GaugeMetricFamily("quire_a", "", 1)]
    assert {each.name for each in chosen(families, names)} == wanted


def test_the_front_s_metrics_are_renamed():
    names = {each.name for each in as_vllm(generation_families(Monitor("m")), "m")}
    assert {"vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds"} <= names
