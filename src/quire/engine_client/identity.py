"""Checks that the engines of one fleet, and restarted engines, compute the same answers."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from quire.core.sampling_params import ModelLimits
from quire.errors import ReplicaDiffersError

COMPARED_FACTS = (
    *("fingerprint", "answers", "dtype", "kernels", "quantization", "kv_cache_dtype", "block_size"),
    *("architecture", "num_parameters", "tensor_parallel_size"),
)
"""Facts of `build_engine` that must be equal in all engines. "fingerprint" is a hash of the
weights, the config, the number formats, the code and libraries that compute, and the processor
features by which these choose kernels. "answers" is a hash of the other inputs that answers depend
on: the rest of the config, the tokenizer and the rest of quire's code."""

Identity: TypeAlias = tuple[ModelLimits, Mapping[str, Any]]
"""The limits and facts that an engine reports when it is ready."""


def check_same(name: str, first: Identity, other: Identity) -> ReplicaDiffersError | None:
    """An error that says why the engine `name` can't continue requests of the first one; None if it
    can."""
    label = f"replica {name!r}" if name else "the restarted engine"
    (limits, facts), (other_limits, other_facts) = first, other
    for key in COMPARED_FACTS:
        if facts.get(key) != other_facts.get(key):
            return ReplicaDiffersError(
                f"{label} differs from the first one in {key}: {other_facts.get(key)!r}"
                f" instead of {facts.get(key)!r}; {_advice(key)}"
            )
    if limits != other_limits:
        return ReplicaDiffersError(
            f"{label} has other limits than the first one ({other_limits} instead of"
            f" {limits}); give both the same model and max_model_len"
        )
    return None


def _advice(key: str) -> str:
    if key == "answers":
        return "give both the same files and the same version of quire and its libraries"
    if key != "fingerprint":
        return "start both with the same model and options"
    return (
        "its weights, processor, or version of quire or a library differ, so its tokens may"
        " differ; use the same files and the same kind of machine"
    )
