"""Maps the names of GGUF tensors to Hugging Face's, by an architecture's rules.

    blk.3.attn_q.weight            model.layers.3.self_attn.q_proj.weight
    blk.3.ffn_up_exps.weight       model.layers.3.mlp.experts.0.up_proj.weight, ...

A tensor without a rule keeps its name, by which the loader refuses it. Called by `gguf_files`.
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
from quire.models.checkpoints.gguf.places import (
    Combined,
    CombinedStacks,
    Computed,
    StoredRows,
    TensorPlace,
)
from quire.models.checkpoints.source import refusal_of_two
from quire.models.config_bounds import MAX_EXPERTS

EXPERT = "{expert}"
_WHOLE_SCALES = ("scale", "input_scale")
Change = Callable[[torch.Tensor], torch.Tensor]

_IN_LAYER = re.compile(r"blk\.(\d{1,6})\.(.+)")


@dataclass(frozen=True, slots=True)
class TensorRules:
    """How an architecture's tensors are a checkpoint's. Names in GGUF are without "blk.N." and,
    where not said otherwise, without ".weight" or ".bias".

    layer, top: a name -> the checkpoint's, in its layer or as it is. In `layer` a name with
    ".weight" or ".bias" goes first, and its value is whole. A value with EXPERT is of a stacked
    tensor; of several names the tensor's rows are, in equal parts.
    sizes: a name with several in `layer` whose parts aren't equal -> their numbers of rows.
    order: a name, with ".weight" or ".bias" or of both -> which of the stored rows each of the
        checkpoint's is.
    inputs: likewise -> the input that each of the stored columns meets.
    changes: a name with its parameter -> what turns the whole tensor into the checkpoint's.
    combined: a name of the checkpoint's, in its layer -> of what it is made, where that is there.
    unused: names, with all before and behind them, of tensors that say what the config says too.
    prefix: of the checkpoint's layers, before their numbers.
    num_layers: those behind them are left out, with all that is in them; None: there are none.
    """

    layer: Mapping[str, str | tuple[str, ...]]
    top: Mapping[str, str]
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    order: Mapping[str, torch.Tensor] = field(default_factory=dict)
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    changes: Mapping[str, Change] = field(default_factory=dict)
    combined: Mapping[str, Combined] = field(default_factory=dict)
    unused: frozenset[str] = frozenset()
    prefix: str = "model.layers."
    num_layers: int | None = None


def map_tensors(model: GGUFModel, rules: TensorRules) -> dict[str, TensorPlace]:
    """The checkpoint's names, in the files' order. Raises CheckpointError."""
    places: dict[str, TensorPlace] = {}
    origins: dict[str, str] = {}
    for name in model.tensors:
        for ours, place in _places_of(model, rules, name):
            if ours in places:
                raise refusal_of_two(origins[ours], name, ours)
            places[ours], origins[ours] = place, name
    return places


def _places_of(
    model: GGUFModel, rules: TensorRules, name: str
) -> Iterator[tuple[str, TensorPlace]]:
    """What of the checkpoint lies in one tensor of the files."""
    if name in rules.unused:
        return
    found = _IN_LAYER.fullmatch(name)
    if found is None:
        stem, _, parameter = name.rpartition(".")
        in_top = rules.top.get(stem)
        yield from _parts(model, rules, name, name, (f"{in_top}.{parameter}" if in_top else name,))
        return
    layer, inner = found[1], found[2]
    if rules.num_layers is not None and int(layer) >= rules.num_layers:
        return
    prefix = f"{rules.prefix}{layer}."
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
    """Converters of NVFP4 checkpoints put one number beside each weight."""
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
    """Of a tensor of a layer, the checkpoint's names in that layer; none: it has no rule."""
    stem, _, parameter = inner.rpartition(".")
    whole = rules.layer.get(inner)
    if whole is not None:
        return (whole,) if isinstance(whole, str) else whole
    names = rules.layer.get(stem, ())
    names = (names,) if isinstance(names, str) else names
    return tuple(f"{each}.{parameter}" for each in names)


def _parts(
    model: GGUFModel, rules: TensorRules, name: str, inner: str, targets: tuple[str, ...]
) -> Iterator[tuple[str, TensorPlace]]:
    """inner: the name within its layer. targets: the checkpoint's names."""
    shape = model.shape(name)
    if inner in rules.changes:
        (target,), change = targets, rules.changes[inner]
        try:
            changed = tuple(change(torch.empty(shape, device="meta")).shape)
        except (IndexError, RuntimeError):  # torch's, of a wrong number of dimensions
            raise misshapen(model, name) from None
        if prod(changed) != prod(shape):  # a change drops nothing, nor adds
            raise misshapen(model, name)
        yield target, Computed(changed, name, partial(_changed, model, name, change))
        return
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
            place = StoredRows(name, (num_rows, *of_one[1:]), start, order, inputs)
            yield target.replace(EXPERT, str(stack)), place
            start += num_rows


def misshapen(model: GGUFModel, name: str) -> CheckpointError:
    """Of a tensor that is there."""
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
