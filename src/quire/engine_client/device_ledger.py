"""Where each byte of a device's memory is, decided when the engine is built.

Beside `memory_report`, which looks into one part of it, the KV cache, at any moment. Plain numbers,
which travel as the engine's facts. Written by `assembly/device_memory_plan`, printed by
`server/start_message`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

TYPICAL_REQUEST_TOKENS = 2048
"""Of requests by which people are told how many fit. The engine's fact num_request_blocks says how
many KV blocks such a one holds at its end, or one of max_model_len tokens where that is less."""

PARTS = ("weight", "adapter", "activation", "graph", "kv_cache", "other", "unused")


@dataclass(frozen=True, slots=True)
class DeviceLedger:
    """Bytes of one device by what they are for; the parts add up to total_bytes.

    adapter_bytes: slots for adapters. activation_bytes: what the largest step takes beside weights
    and KV cache, rows' state included. graph_bytes: kept for CUDA graphs. other_bytes: other
    programs, the driver's context, kernels' code. unused_bytes: beyond what gpu_memory_utilization
    allows, or less than a block.
    """

    weight_bytes: int
    activation_bytes: int
    graph_bytes: int
    kv_cache_bytes: int
    other_bytes: int
    unused_bytes: int
    adapter_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(asdict(self).values())

    def facts(self) -> dict[str, int]:
        """By name, for `Engine.facts`; nothing of adapters where there are none."""
        parts = asdict(self)
        if not self.adapter_bytes:
            del parts["adapter_bytes"]
        return {"device_memory_bytes": self.total_bytes, **parts}


def ledger_parts(facts: Mapping[str, Any]) -> dict[str, int]:
    """Of an engine's facts those that say where its memory is: bytes by PARTS, in their order. On
    the CPU there are weights, slots for adapters and KV cache alone."""
    named = {name: facts.get(f"{name}_bytes") for name in PARTS}
    return {name: int(num_bytes) for name, num_bytes in named.items() if num_bytes is not None}
