"""Shows the use of a device's memory, as decided when the engine is built.

`memory_report`, in contrast, shows the KV cache alone, at any moment. The numbers are among the
facts that the engine reports. Written by `assembly/device_memory_plan`, printed by
`server/start_message`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

TYPICAL_REQUEST_TOKENS = 2048
"""Number of tokens of a typical request, for messages about how many requests fit in memory. The
engine's fact num_request_blocks is the number of KV blocks of such a request, or of a request with
max_model_len tokens if that is less.
"""

PARTS = ("weight", "adapter", "activation", "graph", "kv_cache", "other", "unused")


@dataclass(frozen=True, slots=True)
class DeviceLedger:
    """Bytes of one device by use. The parts add up to total_bytes."""

    weight_bytes: int
    #: Memory of the largest step in addition to weights and KV cache, including the recurrent state
    #: of all sequences of the batch.
    activation_bytes: int
    #: Bytes reserved for CUDA graphs.
    graph_bytes: int
    kv_cache_bytes: int
    #: Bytes of other programs, the driver's context and the code of kernels.
    other_bytes: int
    #: Bytes beyond the limit of gpu_memory_utilization, or too few for another block.
    unused_bytes: int
    #: Bytes of the slots for adapters.
    adapter_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(asdict(self).values())

    def facts(self) -> dict[str, int]:
        """The parts by name, for `Engine.facts`, without adapters if there are none."""
        parts = asdict(self)
        if not self.adapter_bytes:
            del parts["adapter_bytes"]
        return {"device_memory_bytes": self.total_bytes, **parts}


def ledger_parts(facts: Mapping[str, Any]) -> dict[str, int]:
    """The memory parts among an engine's facts, in the order of PARTS. On the CPU they are weights,
    slots for adapters and KV cache only."""
    named = {name: facts.get(f"{name}_bytes") for name in PARTS}
    return {name: int(num_bytes) for name, num_bytes in named.items() if num_bytes is not None}
