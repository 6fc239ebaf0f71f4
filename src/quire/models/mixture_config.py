"""Reads the fields that configs of mixtures of experts have in common.

Called by `models.families` and `models.registry`.
"""

from collections.abc import Callable
from typing import Any

from quire.errors import CheckpointError, shown
from quire.kernels.routing import RouterSpec, Scoring
from quire.layers.experts import MoESpec
from quire.models.config_fields import ConfigFields

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def read_num_experts(fields: ConfigFields, default: int | None = None) -> int:
    """Read the number of a layer's experts, a field with several names. Raises CheckpointError."""
    found = {name: fields.optional_integer(name) for name in _NUM_EXPERTS}
    given = {name: value for name, value in found.items() if value is not None}
    if len(set(given.values())) > 1:
        raise CheckpointError(
            f"config.json: {' and '.join(given)} are {shown(list(given.values()))}, but are names "
            "of the same field and must be equal"
        )
    for value in given.values():  # all are equal
        return value
    return fields.integer(_NUM_EXPERTS[0], default)


def read_router(fields: ConfigFields, num_experts: int, **spec: Any) -> RouterSpec:
    """Read a router's `num_experts_per_tok`, and its optional `n_group` and `topk_group`.

    `spec` has the other fields of `RouterSpec`. Raises CheckpointError for inconsistent numbers.
    """
    return checked_router(
        num_experts=num_experts,
        top_k=fields.integer("num_experts_per_tok"),
        num_groups=fields.integer("n_group", 1),
        top_groups=fields.integer("topk_group", 1),
        **spec,
    )


def read_sigmoid_router(fields: ConfigFields) -> RouterSpec:
    """Read the router of DeepSeek-V3. Its bias affects the choice of experts, but not their
    weights."""
    return read_router(
        fields,
        read_num_experts(fields, 128),
        scoring=Scoring.SIGMOID,
        renormalizes=fields.flag("norm_topk_prob", True),
        sums_best=fields.integer("n_group", 1) > 1,
        has_bias=True,
        scale=fields.number("routed_scaling_factor", 1.0),
    )


def checked_router(**spec: Any) -> RouterSpec:
    """Create a `RouterSpec` from its fields. Raises CheckpointError for inconsistent numbers."""
    try:
        return RouterSpec(**spec)
    except ValueError as error:
        raise CheckpointError(f"config.json: the experts' router is invalid: {error}") from None


def read_shared_mixture(fields: ConfigFields, router: RouterSpec, num_shared: int) -> MoESpec:
    """Read a mixture with `n_shared_experts` shared experts, which all tokens use. The experts'
    size is `moe_intermediate_size`.

    `num_shared` is the default number of shared experts.
    """
    size = fields.integer("moe_intermediate_size")
    return MoESpec(
        router=router,
        intermediate_size=size,
        fp32_logits=True,
        shared_size=size * fields.integer("n_shared_experts", num_shared),
    )


def by_layer(
    fields: ConfigFields, mixture: MoESpec, is_sparse: Callable[[int], bool]
) -> tuple[MoESpec | None, ...]:
    """The value of `DecoderConfig.mixtures`: `mixture` in the layers with `is_sparse(layer)`."""
    num_layers = fields.integer("num_hidden_layers")
    return tuple(mixture if is_sparse(layer) else None for layer in range(num_layers))


def by_sparse_step(fields: ConfigFields, mixture: MoESpec) -> tuple[MoESpec | None, ...]:
    """The value of `DecoderConfig.mixtures` for Qwen's models.

    Every `decoder_sparse_step`-th layer has the mixture, except for `mlp_only_layers`.
    """
    step, dense = (
        fields.integer("decoder_sparse_step", 1),
        read_layer_list(fields, "mlp_only_layers"),
    )
    return by_layer(fields, mixture, lambda layer: layer not in dense and (layer + 1) % step == 0)


def read_layer_list(fields: ConfigFields, name: str) -> list[int]:
    """Read a list of layer numbers; empty if the config has no such field."""
    layers = fields.value(name) or []
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise CheckpointError(
            f"config.json: {name} is {shown(layers)}, but must be a list of integers"
        )
    return layers


def replaced(name: str, parts: dict[str, str]) -> str:
    """Replace parts of a name: keys of `parts` by values. Each key occurs at most once."""
    for theirs, ours in parts.items():
        name = name.replace(theirs, ours)
    return name
