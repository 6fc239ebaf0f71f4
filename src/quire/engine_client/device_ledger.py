"""Shows the use of a device's memory, as decided when the engine is built.

`memory_report`, in contrast, shows only the KV cache, at any time. The engine reports these numbers
among its facts. Written by `assembly/device_memory_plan`, printed by `server/start_message`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

TYPICAL_REQUEST_TOKENS = 2048
"""Number of tokens of a typical request, for messages about how many requests fit in memory. The
engine's fact num_request_blocks is the number of KV blocks of such a request, or of a request with
max_model_len tokens if that is less.
"""

PARTS = (
    *("weight", "vision_weight", "encoder_cache", "adapter", "activation", "graph", "kv_cache"),
    *("other", "unused", "answer"),
)


@dataclass(frozen=True, slots=True)
class DeviceLedger:
    """Bytes of one device by use. The parts add up to total_bytes."""

    weight_bytes: int
    #: Bytes that the largest step needs besides weights and KV cache, including the recurrent
    #: states of all sequences in the batch.
    activation_bytes: int
    #: Bytes reserved for CUDA graphs.
    graph_bytes: int
    kv_cache_bytes: int
    #: Bytes of other programs, the driver's context and the code of kernels.
    other_bytes: int
    #: Bytes above the limit of gpu_memory_utilization, and a rest that is too small for another
    #: block.
    unused_bytes: int
    #: Bytes of the slots for adapters.
    adapter_bytes: int = 0
    #: Bytes of the weights of the encoder of images.
    vision_weight_bytes: int = 0
    #: Bytes reserved for the embeddings of images.
    encoder_cache_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(asdict(self).values())

    def facts(self) -> dict[str, int]:
        """The parts by name, for `Engine.facts`, without those of adapters and images if there are
        none."""
        optional = ("adapter_bytes", "vision_weight_bytes", "encoder_cache_bytes")
        parts = {
            name: num_bytes
            for name, num_bytes in asdict(self).items()
            if num_bytes or name not in optional
        }
        return {"device_memory_bytes": self.total_bytes, **parts}


def ledger_parts(facts: Mapping[str, Any]) -> dict[str, int]:
    """The memory parts among an engine's facts, in the order of PARTS. On the CPU they are weights,
    slots for adapters, KV cache, at most the embeddings of images, and at most the earlier answers
    that drafts are taken from."""
    named = {name: facts.get(f"{name}_bytes") for name in PARTS}
    return {name: int(num_bytes) for name, num_bytes in named.items() if num_bytes is not None}
