"""The ledger of a device: parts that add up, and what of it stands in facts."""

from dataclasses import replace

from quire.engine_client.device_ledger import PARTS, DeviceLedger, ledger_parts

LEDGER = DeviceLedger(
    weight_bytes=480,
    adapter_bytes=20,
    activation_bytes=60,
    graph_bytes=7,
    kv_cache_bytes=300,
    other_bytes=100,
    unused_bytes=33,
)


def test_the_parts_travel_as_facts_and_add_up() -> None:
    facts = LEDGER.facts()
    assert facts["device_memory_bytes"] == LEDGER.total_bytes == 1000
    names = [name for name in PARTS[:-1] if name not in ("vision_weight", "encoder_cache")]
    assert ledger_parts(facts | {"dtype": "bfloat16"}) == dict(
        zip(names, (480, 20, 60, 7, 300, 100, 33), strict=True)
    )


def test_without_adapters_nothing_is_said_of_them() -> None:
    assert "adapter_bytes" not in replace(LEDGER, adapter_bytes=0).facts()


def test_on_the_cpu_there_are_fewer_parts() -> None:
    facts = {"weight_bytes": 12, "kv_cache_bytes": 34, "num_blocks": 5}
    assert ledger_parts(facts) == {"weight": 12, "kv_cache": 34}
    drafting = ledger_parts(facts | {"answer_bytes": 56})
    assert drafting == {"weight": 12, "kv_cache": 34, "answer": 56}
    assert ledger_parts({}) == {}
