"""Families made of numbers: counted up, bounded, and without what the engine does not report."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector
from tests.server.telemetry.tier_counts import no_moves

from quire.core.sequence import COUNTED_REASONS
from quire.observability.histogram import Histogram
from quire.server.telemetry.metric_families import (
    api_server_families,
    engine_families,
    engine_state_families,
    memory_families,
)
from quire.server.telemetry.monitor import MAX_TENANTS, Monitor

MEMORY = {
    "total_bytes": 1000,
    "useful_bytes": 300,
    "unfilled_bytes": 50,
    "unused_bytes": 20,
    "reserved_bytes": 80,
    "in_flight_bytes": 30,
    "moving_bytes": 20,
    "cached_bytes": 200,
    "free_bytes": 300,
    "lookahead_bytes": 100,
    "saved_bytes": 700,
}


def samples(families):
    """{(name, label values...): value}"""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_histogram_counts_up_to_each_bound():
    histogram = Histogram((0.0001, 1.0, 10.0))
    for value in (0.00005, 0.5, 0.6, 99.0):
        histogram.observe(value)
    found = samples(engine_families({"times": {"step_s": histogram.as_dict()}}))
    name = "quire_step_duration_seconds"
    buckets = {key[1]: value for key, value in found.items() if key[0] == f"{name}_bucket"}
    assert buckets == {"0.0001": 1, "1.0": 3, "10.0": 3, "+Inf": 4}
    assert found[f"{name}_count",] == 4 and found[f"{name}_sum",] == histogram.total


def test_figures_that_the_engine_lacks_are_left_out():
    assert samples(engine_families({})) == {}
    found = samples(engine_families({"num_running": 2, "num_steps": 9}))
    assert found == {("quire_requests_running",): 2, ("quire_steps_total",): 9}


def test_every_reason_of_a_miss_is_there_from_the_start():
    found = samples(engine_families({"prefix_misses": {"evicted": 4}}))
    assert len(found) == len(COUNTED_REASONS)
    assert found["quire_prefix_misses_total", "evicted"] == 4
    assert found["quire_prefix_misses_total", "never_seen"] == 0


def test_tiers_are_told_by_their_names_and_absent_without_any():
    assert samples(engine_families({"tiers": {}})) == {}
    moves = no_moves() | {"num_hit_tokens": 70, "num_loaded_tokens": 90, "num_failed_blocks": 2}
    moves["by_tier"]["disk"] |= {"used_bytes": 5000, "over_budget": 3, "is_writing": True}
    moves["by_tier"]["another"] = {"used_bytes": 400}  # it counts nothing else
    found = samples(engine_families({"tiers": moves}))
    assert found["quire_prefix_loaded_tokens_total",] == 70
    assert found["quire_tier_loaded_tokens_total",] == 90
    assert found["quire_tier_load_blocks_total", "failed"] == 2
    assert found["quire_tier_load_blocks_total", "loaded"] == 0
    assert found["quire_tier_bytes", "disk"] == 5000 and found["quire_tier_bytes", "another"] == 400
    assert found["quire_tier_dropped_total", "disk", "budget"] == 3
    assert found["quire_tier_writing", "disk"] == 1 and found["quire_tier_reading", "disk"] == 0
    assert ("quire_tier_records", "another") not in found


def test_drafts_are_told_by_proposer_by_position_and_by_vllms_names():
    assert samples(engine_families({"drafts": {}})) == {}
    counts = {
        "ngram": {"verified": [4, 3], "accepted": [2]},
        "history": {"verified": [1, 1, 1], "accepted": [1, 1]},
    }
    found = samples(engine_families({"drafts": {"by_proposer": counts, "saved_s": -0.25}}))
    assert found == {
        ("quire_draft_tokens_total", "ngram"): 7,
        ("quire_draft_tokens_total", "history"): 3,
        ("quire_accepted_draft_tokens_total", "ngram"): 2,
        ("quire_accepted_draft_tokens_total", "history"): 2,
        ("quire_position_draft_tokens_total", "0"): 5,
        ("quire_position_draft_tokens_total", "1"): 4,
        ("quire_position_draft_tokens_total", "2"): 1,
        ("quire_position_accepted_draft_tokens_total", "0"): 3,
        ("quire_position_accepted_draft_tokens_total", "1"): 1,
        ("quire_position_accepted_draft_tokens_total", "2"): 0,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "0"): 3,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "1"): 1,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "2"): 0,
        ("quire_speculation_saved_seconds",): -0.25,
        ("vllm:spec_decode_num_drafts_total",): 5,
        ("vllm:spec_decode_num_draft_tokens_total",): 10,
        ("vllm:spec_decode_num_accepted_tokens_total",): 4,
    }


def test_known_utilization_figures_are_reported():
    known = {"busy_s": 3.0, "gap_s": 1.0, "idle_s": 2.0, "busy_share": 0.75}
    times = {
        ("quire_engine_time_seconds_total", "busy"): 3,
        ("quire_engine_time_seconds_total", "gap"): 1,
        ("quire_engine_time_seconds_total", "idle"): 2,
        ("quire_busy_ratio",): 0.75,
    }
    assert samples(engine_families({"utilization": known})) == times
    known |= {
        "launching_s": 0.5,
        "num_bytes": 7e9,
        "operations": 8e12,
        "floor_s": 2.0,
        "floor_share": 0.5,
    }
    known |= {"bytes_per_s": 1e12, "operations_per_s": 1e15, "device": {"busy_share": 0.875}}
    assert samples(engine_families({"utilization": known})) == times | {
        ("quire_launching_seconds_total",): 0.5,
        ("quire_step_bytes_total",): 7e9,
        ("quire_step_operations_total",): 8e12,
        ("quire_step_floor_seconds_total",): 2.0,
        ("quire_floor_ratio",): 0.5,
        ("quire_machine_bytes_per_second",): 1e12,
        ("quire_machine_operations_per_second",): 1e15,
        ("quire_gpu_busy_ratio",): 0.875,
    }


def test_the_ledger_is_told_in_bytes_and_in_blocks():
    found = samples(memory_families(MEMORY, 20))
    assert found["quire_kv_memory_bytes", "in_flight"] == 30
    assert found["quire_kv_saved_bytes",] == 700
    blocks = {key[1]: value for key, value in found.items() if key[0] == "quire_kv_blocks"}
    assert blocks == {"held": 10, "cached": 4, "free": 6}
    assert "quire_kv_blocks" not in {key[0] for key in samples(memory_families(MEMORY, None))}


def test_the_engine_s_state_is_one_of_all():
    found = samples(engine_state_families("recovering", ("ready", "recovering"), 3, 1.5))
    assert found == {
        ("quire_engine_up",): 0,
        ("quire_engine_state", "ready"): 0,
        ("quire_engine_state", "recovering"): 1,
        ("quire_engine_restarts_total",): 3,
        ("quire_engine_last_sign_of_life_age_seconds",): 1.5,
    }


def test_tenants_are_labels_within_a_bound():
    open_by_tenant = {f"t{index}": 1 for index in range(MAX_TENANTS + 9)}
    found = samples(api_server_families(Monitor(), open_by_tenant))
    tenants = {key[1]: value for key, value in found.items() if key[0].startswith("quire_tenant")}
    assert len(tenants) == MAX_TENANTS + 1 and tenants["other"] == 9


def test_odd_names_are_escaped():
    monitor = Monitor('m"\n\\x')
    monitor.begin_http()
    monitor.end_http("GET", '/"\n', 200, None)

    class Families(Collector):
        def collect(self):
            return api_server_families(monitor, {})

    registry = CollectorRegistry()
    registry.register(Families())
    text = generate_latest(registry).decode()
    assert r'route="/\"\n"' in text and r'model="m\"\n\\x"' in text
