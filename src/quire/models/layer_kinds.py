"""Reads attention windows and rotations that differ between a model's layers, from config.json.

Called by the families' `from_hf`.
"""

from collections.abc import Callable
from typing import Any

from quire.errors import CheckpointError, UnsupportedModelError, shown
from quire.hub.model_files import shown_name
from quire.layers.rotary import LayerRope
from quire.models.config_fields import ConfigFields
from quire.models.rope_config import read_rope, read_rope_parameters, read_rotary_dim

FULL, SLIDING = "full_attention", "sliding_attention"


def read_layer_types(
    fields: ConfigFields, default: Callable[[int], str], kinds: tuple[str, ...] = (FULL, SLIDING)
) -> tuple[str, ...]:
    """Read `layer_types`, the kind of each layer.

    If the config has no such list, `default` returns a layer's kind. `kinds` are the kinds that the
    family supports.
    """
    num_layers = fields.integer("num_hidden_layers")
    named = fields.value("layer_types")
    if named is None:
        return tuple(map(default, range(num_layers)))
    if not isinstance(named, list) or len(named) != num_layers:
        raise CheckpointError(
            f"config.json: layer_types is {shown(named)}, but must be a list of num_hidden_layers, "
            f"{num_layers}, names"
        )
    for kind in named:
        if kind not in kinds:
            raise UnsupportedModelError(
                f"config.json: layer_types has {shown(kind)}; understood are {', '.join(kinds)}"
            )
    return tuple(named)


def read_windows(fields: ConfigFields, layer_types: tuple[str, ...]) -> tuple[int | None, ...]:
    """For each layer, the value of `sliding_window` if the layer has a window, else None."""
    window = fields.optional_integer("sliding_window")
    if window is None and SLIDING in layer_types:
        raise CheckpointError(
            f"config.json has layers of {SLIDING}, but no sliding_window, which says how far they "
            "see"
        )
    return tuple(window if kind == SLIDING else None for kind in layer_types)


def read_layer_ropes(
    fields: ConfigFields,
    *,
    head_dims: dict[str, int],
    thetas: dict[str, float],
    partial_rotary: dict[str, float] | None = None,
) -> dict[str, LayerRope]:
    """Read the rotations of a family that has one rotation for each kind of layer.

    transformers 5 writes `rope_parameters` by kind; transformers 4 writes `rope_scaling`, which
    applies only to layers with full attention. `head_dims` are the head sizes by kind. `thetas` and
    `partial_rotary`, the fractions of heads that rotate, are defaults by kind.
    """
    # First, find the rope parameters of each kind, in either form.
    by_kind = read_rope_parameters(fields)
    if not by_kind.keys() & head_dims.keys():
        if by_kind and not fields.value("rope_scaling"):
            raise UnsupportedModelError(
                f"config.json: rope_parameters has {', '.join(map(shown_name, by_kind))}, but must"
                f" have an object for each kind of layer, {' and '.join(head_dims)}: transformers"
                " reads no others"
            )
        by_kind = {FULL: by_kind}
    unknown = sorted(by_kind.keys() - head_dims.keys())
    if unknown:
        raise UnsupportedModelError(
            "config.json: there are rope parameters for layers of the kinds "
            f"{', '.join(map(shown, unknown))}, but only {', '.join(head_dims)} are understood"
        )
    # Then, read each kind's rotation from its own parameters.
    max_position_embeddings = fields.integer("max_position_embeddings")
    found = {}
    for kind, head_dim in head_dims.items():
        inner: Any = by_kind.get(kind) or {}
        raw = fields.inner({"rope_theta": thetas[kind], "rope_parameters": inner})
        rotary_dim = None
        if partial_rotary is not None:
            factor = partial_rotary[kind]
            rotary_dim = read_rotary_dim(raw, head_dim=head_dim, default_factor=factor)
        rope = read_rope(
            raw,
            head_dim=head_dim,
            max_position_embeddings=max_position_embeddings,
            rotary_dim=rotary_dim,
        )
        found[kind] = LayerRope(rope, head_dim if rotary_dim is None else rotary_dim)
    return found


def chosen_ropes(ropes: dict[str, LayerRope], layer_types: tuple[str, ...]) -> dict[str, Any]:
    """The fields of `DecoderConfig` that describe the rotations of all layers.

    `rope` is the rotation of layers with full attention, which limits the context's length.
    """
    kinds = [FULL, *(kind for kind in ropes if kind != FULL)]
    return {
        "rope": ropes[FULL].rope,
        "rotary_dim": ropes[FULL].rotary_dim,
        "other_ropes": tuple(ropes[kind] for kind in kinds[1:]),
        "layer_ropes": tuple(map(kinds.index, layer_types)),
    }
