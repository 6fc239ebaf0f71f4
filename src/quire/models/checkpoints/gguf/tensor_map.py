"""Maps the names of GGUF tensors to names of Hugging Face, by an architecture's rules.

    blk.3.attn_q.weight            model.layers.3.self_attn.q_proj.weight
    blk.3.ffn_up_exps.weight       model.layers.3.mlp.experts.0.up_proj.weight, ...
    v.blk.3.ln1.weight             vision_model.encoder.layers.3.layer_norm1.weight

A tensor without a rule keeps its name, so that the loader refuses it and names it. Called by
`gguf_files`.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod

import torch

from quire.errors import CheckpointError, UnsupportedModelError
from quire.hub.model_files import shown_name
from quire.models.checkpoints.gguf.gguf_model import GGUFModel
from quire.models.checkpoints.gguf.tensor_locations import (
    Combined,
    CombinedStacks,
    Computed,
    StoredRows,
    TensorLocation,
)
from quire.models.checkpoints.source import refusal_of_two
from quire.models.config_bounds import MAX_EXPERTS

EXPERT = "{expert}"
_WHOLE_SCALES = ("scale", "input_scale")
Change = Callable[[torch.Tensor], torch.Tensor]

_IN_LAYER = re.compile(r"(?:v\.)?blk\.(\d{1,6})\.(.+)")


@dataclass(frozen=True, slots=True)
class TensorRules:
    """The rules that turn the tensors of an architecture into those of a checkpoint.

    GGUF names in the rules lack the prefix "blk.N." ("v.blk.N." in encoders of images), and also
    ".weight" and ".bias", unless a field says otherwise.
    """

    #: Maps a tensor of a layer to its name in the checkpoint, within the layer. A key with
    #: ".weight" or ".bias" has precedence, and its value is the full name. A value with EXPERT
    #: means that the stored tensor stacks all experts. If a value has several names, the tensor's
    #: rows are split among them, equally or as `sizes` says.
    layer: Mapping[str, str | tuple[str, ...]]
    #: Maps a tensor outside the layers to its name in the checkpoint. A key that is the tensor's
    #: full name has precedence, and its value is the full name.
    top: Mapping[str, str]
    #: For a tensor that `layer` splits unequally, the number of rows of each part.
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    #: For a reordered tensor, the stored index of each row. A key without ".weight" or ".bias"
    #: covers both.
    order: Mapping[str, torch.Tensor] = field(default_factory=dict)
    #: For a tensor with reordered columns, the input of each stored column. Keys include ".weight".
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    #: A function that turns a whole stored tensor into the checkpoint's tensor. Keys include
    #: ".weight" or ".bias", if the stored name has it.
    changes: Mapping[str, Change] = field(default_factory=dict)
    #: For a tensor of the checkpoint that may be stored as several tensors, the rule that computes
    #: it from them. Keys are names within the layer.
    combined: Mapping[str, Combined] = field(default_factory=dict)
    #: Full names of tensors that only repeat the config.
    unused: frozenset[str] = frozenset()
    #: The prefix of the checkpoint's layers, before their numbers.
    prefix: str = "model.layers."
    #: Number of layers that are read. Tensors of later layers are skipped. None means all layers.
    num_layers: int | None = None


def map_tensors(model: GGUFModel, rules: TensorRules) -> dict[str, TensorLocation]:
    """Maps each tensor's name in the checkpoint to its location, in the files' order. Raises
    CheckpointError."""
    locations: dict[str, TensorLocation] = {}
    origins: dict[str, str] = {}
    for name in model.tensors:
        for ours, location in _locations_in(model, rules, name):
            if ours in locations:
                raise refusal_of_two(origins[ours], name, ours)
            locations[ours], origins[ours] = location, name
    return locations


def _locations_in(
    model: GGUFModel, rules: TensorRules, name: str
) -> Iterator[tuple[str, TensorLocation]]:
    """(name in the checkpoint, location) of each checkpoint tensor that one GGUF tensor holds."""
    if name in rules.unused:
        return
    found = _IN_LAYER.fullmatch(name)
    # First, tensors outside the layers.
    if found is None:
        stem, _, parameter = name.rpartition(".")
        in_top = rules.top.get(stem)
        target = rules.top.get(name, f"{in_top}.{parameter}" if in_top else name)
        yield from _parts(model, rules, name, name, (target,))
        return
    layer, inner = found[1], found[2]
    if rules.num_layers is not None and int(layer) >= rules.num_layers:
        return
    prefix = f"{rules.prefix}{layer}."
    # A combined tensor is yielded once, at its first source.
    for whole, combined in rules.combined.items():
        if inner in combined.sources:
            if inner == combined.sources[0]:
                yield f"{prefix}{whole}", _combined(model, combined, layer)
            return
    targets = _targets(rules, inner)
    _check_scale(model, name)
    if targets:
        yield from _parts(model, rules, name, inner, tuple(prefix + each for each in targets))
    else:
        yield name, StoredRows(name, model.shape(name))


def _check_scale(model: GGUFModel, name: str) -> None:
    """Raises UnsupportedModelError for a scale of a whole NVFP4 weight. Converters store it as a
    separate tensor."""
    stem, _, parameter = name.rpartition(".")
    weight = f"{stem}.weight"
    if parameter not in _WHOLE_SCALES or weight not in model.tensors:
        return
    kind = model.info(weight).storage.name
    if kind == "NVFP4":
        raise UnsupportedModelError(
            f"{model.path}: its weights of {kind} have scales of whole tensors beside them"
            f" ({shown_name(name)}), which quire does not read; take another quantization of the"
            " model, such as Q4_K_M"
        )


def _targets(rules: TensorRules, inner: str) -> tuple[str, ...]:
    """The names, within the layer, that a layer's GGUF tensor has in the checkpoint; empty if it
    has no rule."""
    stem, _, parameter = inner.rpartition(".")
    whole = rules.layer.get(inner)
    if whole is not None:
        return (whole,) if isinstance(whole, str) else whole
    names = rules.layer.get(stem, ())
    names = (names,) if isinstance(names, str) else names
    return tuple(f"{each}.{parameter}" for each in names)


def _parts(
    model: GGUFModel, rules: TensorRules, name: str, inner: str, targets: tuple[str, ...]
) -> Iterator[tuple[str, TensorLocation]]:
    """The locations of the checkpoint's tensors `targets`, which the GGUF tensor `name` holds.
    `inner` is its name within the layer."""
    shape = model.shape(name)
    # A change is computed from the whole tensor. First, try it on the meta device.
    if inner in rules.changes:
        (target,), change = targets, rules.changes[inner]
        try:
            changed = tuple(change(torch.empty(shape, device="meta")).shape)
        except (IndexError, RuntimeError):  # torch's errors for a wrong number of dimensions
            raise misshapen(model, name) from None
        if prod(changed) != prod(shape):  # a change must keep all numbers
            raise misshapen(model, name)
        yield target, Computed(changed, name, partial(_changed, model, name, change))
        return
    # Other tensors are rows of the stored tensor, possibly reordered.
    stem = inner.rpartition(".")[0]
    order = rules.order.get(inner, rules.order.get(stem))
    if order is not None and (len(order) != shape[0] or len(targets) > 1):
        raise misshapen(model, name)
    inputs = rules.inputs.get(inner)
    if inputs is not None and (len(shape) != 2 or len(inputs) != shape[1]):
        raise misshapen(model, name)
    is_stacked = EXPERT in targets[0]
    if is_stacked and shape[0] > MAX_EXPERTS:
        raise misshapen(model, name)
    num_stacks, of_one = (shape[0], shape[1:]) if is_stacked else (1, shape)
    if not of_one:
        raise misshapen(model, name)
    sizes = rules.sizes.get(stem, (of_one[0] // len(targets),) * len(targets))
    if sum(sizes) != of_one[0]:
        raise misshapen(model, name)
    for stack in range(num_stacks):
        start = stack * of_one[0]
        for target, num_rows in zip(targets, sizes, strict=True):
            location = StoredRows(name, (num_rows, *of_one[1:]), start, order, inputs)
            yield target.replace(EXPERT, str(stack)), location
            start += num_rows


def misshapen(model: GGUFModel, name: str) -> CheckpointError:
    """The error for an existing tensor of a wrong shape."""
    return CheckpointError(
        f"{model.path}: its tensor {shown_name(name)} has the shape {list(model.shape(name))}, "
        "which is not what its metadata says; fetch it again"
    )


def _combined(model: GGUFModel, combined: Combined, layer: str) -> CombinedStacks:
    names = tuple(f"blk.{layer}.{source}" for source in combined.sources)
    for name in names:
        if model.shape(name)[0] * combined.num_rows != combined.shape[0]:
            raise misshapen(model, name)
    return CombinedStacks(combined.shape, names, combined.num_rows, combined.compute)


def _changed(model: GGUFModel, name: str, change: Change) -> torch.Tensor:
    return change(model.numbers(name))
