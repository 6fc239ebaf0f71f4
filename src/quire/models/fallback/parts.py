"""Replaces the layers of a transformers model by quire's layers.

Linears, the token embedding, the head and the experts are always replaced. Norms, gated MLPs,
rotations, attention and decoder layers are replaced if `sources.py` recognizes their class.
Called by `model.py`.

Shapes: T tokens, E experts, I inputs, O outputs.
"""

import re
import threading
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import nn
from torch.nn import functional

from quire.attention.interface import AttentionSpec
from quire.errors import UnsupportedModelError
from quire.formats.weight_format import LinearMethod
from quire.kernels.activations import ActivationFunction
from quire.layers.embedding import LMHead
from quire.layers.linear import Linear, LinearKind, SlottedModule, WeightSlot
from quire.layers.storage import Storage
from quire.models.fallback.fused import (
    ResidualLayer,
    RowAttention,
    RowMLP,
    RowNorm,
    TableRotary,
    TokenEmbedding,
)
from quire.models.fallback.sources import (
    ATTENTIONS,
    GATED_MLP,
    LAYERS,
    NORMS,
    ROTARY,
    body_of,
    is_router,
    turns_halves,
)


class NamedLinear(Linear):
    """A linear with an attribute `weight` whose dtype and shape transformers' code can read."""

    dtype = torch.float32

    def use(self, method: LinearMethod, dtype: torch.dtype, device: torch.device) -> None:
        super().use(method, dtype, device)
        self.dtype = dtype

    def __getattr__(self, name: str) -> Any:
        # The method may store the weight in another layout, so a tensor on the meta device shows
        # its shape.
        if name == "weight" and self.state is not None:
            return torch.empty(self.output_size, self.input_size, dtype=self.dtype, device="meta")
        return super().__getattr__(name)


class TransposedLinear(NamedLinear):
    """A linear whose weight is [I, O] in the checkpoint, as in GPT-2."""

    def slots(self) -> dict[tuple[str, int], WeightSlot]:
        slots = super().slots()
        slots["weight", 0] = _transposed(slots["weight", 0])
        return slots


class ExpertModules(SlottedModule):
    """The linears of all experts of a layer, which replace transformers' stacked tensors."""

    #: The first linear of each expert. If the class is gated, it computes gate and up.
    up: nn.ModuleList
    #: The last linear of each expert.
    down: nn.ModuleList

    def __init__(self, experts: Any, **storage: Unpack[Storage]) -> None:
        super().__init__()
        self.has_gate: bool = experts.has_gate
        self.is_transposed: bool = experts.is_transposed
        self.up_name = "gate_up_proj" if self.has_gate else "up_proj"
        self.has_bias: bool = experts.has_bias
        weights = {"up": getattr(experts, self.up_name), "down": experts.down_proj}
        for name, stacked in weights.items():
            shape = stacked.shape[1:]
            num_inputs, num_outputs = shape if self.is_transposed else reversed(shape)
            linears = [
                Linear(
                    num_inputs, (num_outputs,), LinearKind.REPLICATED, bias=self.has_bias, **storage
                )
                for _ in range(len(stacked))
            ]
            setattr(self, name, nn.ModuleList(linears))

    def __len__(self) -> int:
        return len(self.up)

    def forward(self, experts: Any, expert: int, rows: torch.Tensor) -> torch.Tensor:
        """Send `rows` [R, H] through one expert of the transformers module `experts` -> [R, H]."""
        up, down = self.up[expert], self.down[expert]
        inner = up(rows)
        inner = experts._apply_gate(inner) if self.has_gate else experts.act_fn(inner)
        out: torch.Tensor = down(inner)
        return experts.post_expert_norm(out) if experts.has_post_expert_norm else out

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        """The slots of the stacked tensors, by their names relative to the experts module."""
        slots: dict[str, WeightSlot] = {}
        for own, theirs in ((self.up, self.up_name), (self.down, "down_proj")):
            linears = [each for each in own if isinstance(each, Linear)]
            slots[theirs] = _stacked(
                [_whole(linear, "weight", self.is_transposed) for linear in linears]
            )
            if self.has_bias:
                biases = [linear.slots()["bias", 0] for linear in linears]
                slots[f"{theirs}_bias"] = _stacked(biases)
        return slots


def _whole(linear: Linear, name: str, is_transposed: bool) -> WeightSlot:
    slot = linear.slots()[name, 0]
    return _transposed(slot) if is_transposed else slot


def _stacked(slots: list[WeightSlot]) -> WeightSlot:
    """A slot for a stacked tensor. Its entry i is loaded into `slots[i]`."""

    def load(first: int, rows: torch.Tensor) -> None:
        for index, row in enumerate(rows, first):
            slots[index].load(0, row)

    return WeightSlot((len(slots), *slots[0].shape), load)


def _transposed(slot: WeightSlot) -> WeightSlot:
    """A slot for the transposed tensor. Pieces are copied, and loaded once all have been read."""
    num_outputs, num_inputs = slot.shape
    pieces: dict[int, torch.Tensor] = {}
    lock = threading.Lock()

    def load(first: int, rows: torch.Tensor) -> None:
        with lock:
            pieces[first] = rows.clone()
            if sum(map(len, pieces.values())) < num_inputs:
                return
        whole = torch.cat([pieces[start] for start in sorted(pieces)])
        pieces.clear()
        slot.load(0, whole.T.contiguous())

    return WeightSlot((num_inputs, num_outputs), load)


class WideLinear(NamedLinear):
    """A linear with fp32 weights that are never quantized, for routers: rounding could select other
    experts. Inputs of any dtype are multiplied in fp32, and outputs have the inputs' dtype."""

    stays_dense = True

    def use(self, method: LinearMethod, dtype: torch.dtype, device: torch.device) -> None:
        super().use(method, torch.float32, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float()).to(x.dtype)


class RouterProduct(SlottedModule):
    """The linear of a router, for a class that holds the weight itself and calls `linear`."""

    def __init__(self, weight: torch.Tensor, device: torch.device) -> None:
        super().__init__()
        num_outputs, num_inputs = weight.shape
        self.linear = WideLinear(
            num_inputs,
            (num_outputs,),
            LinearKind.REPLICATED,
            bias=False,
            dtype=torch.float32,
            device=device,
        )

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        return {"weight": self.linear.slots()["weight", 0]}


class RouterWeight:
    """Replaces a router's weight. It supports only the operations that router classes use."""

    def __init__(self, linear: WideLinear, dtype: torch.dtype) -> None:
        self._linear = linear
        #: The dtype that the weight would have in transformers.
        self.dtype = dtype

    def float(self) -> "RouterWeight":
        return self

    def type(self, dtype: torch.dtype) -> "RouterWeight":
        assert dtype == torch.float32
        return self

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> torch.Tensor:
        """Compute `linear` by the router's `WideLinear`. torch calls this in place of `linear`."""
        assert function is functional.linear and not kwargs, "the sources of routers are known"
        x, weight, *rest = args
        product: torch.Tensor = weight._linear(x.float())
        if rest and rest[0] is not None:
            product = product + rest[0].float()
        return product.to(x.dtype)


@dataclass(frozen=True, slots=True)
class Making:
    """The arguments for making layers."""

    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    #: See `TracedModel`.
    is_tied: bool
    #: Names of the parameters that stay in fp32.
    wide: set[str]

    @property
    def kwargs(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "device": self.device}


class Parts:
    """Finds the layers of a model with a head, and replaces them."""

    def __init__(self, model: Any, make: Making) -> None:
        self._model = model
        self._make = make
        self._embedding, self._head = model.get_input_embeddings(), model.get_output_embeddings()
        modules = list(model.modules())
        attentions = [each for each in modules if type(each).__name__.endswith("Attention")]
        rotaries = [each for each in modules if type(each).__name__.endswith("RotaryEmbedding")]
        #: Whether all attention is replaced by `RowAttention` and all rotations by `TableRotary`.
        self.is_fused = all(_is_row_attention(each, make) for each in attentions) and all(
            _is_table_rotary(each) for each in rotaries
        )

    def replace(self) -> None:
        """Replace the layers. Raises UnsupportedModelError for a rotation that depends on the
        length of the context and has no table."""
        table: TokenEmbedding | None = None
        replaced: tuple[str, ...] = ()
        for path, module in list(self._model.named_modules()):
            if path.startswith(replaced) or module is self._head:
                continue
            if module is self._embedding and type(module) is nn.Embedding:
                sizes = module.num_embeddings, module.embedding_dim
                new: nn.Module | None
                new = table = TokenEmbedding(*sizes, **self._make.kwargs)
            else:
                new = self._new(path, module)
            if new is not None:
                _set_module(self._model, path, new)
                # Children of a `ResidualLayer` are old modules, which are replaced later. Other
                # replacements contain no old modules.
                if not isinstance(new, ResidualLayer):
                    replaced = (*replaced, f"{path}.")
        self._replace_head(table)

    def _replace_head(self, table: TokenEmbedding | None) -> None:
        head, make = self._head, self._make
        if type(head) is not nn.Linear:
            return
        path = next(name for name, module in self._model.named_modules() if module is head)
        if table is not None and fits_head(self._embedding, head):
            _set_module(self._model, path, LMHead(table, tied=make.is_tied))
        else:
            _set_module(self._model, path, _linear(head, **make.kwargs))

    def _new(self, path: str, module: Any) -> nn.Module | None:
        """The replacement of a module; None if the module is kept."""
        kwargs = self._make.kwargs
        if type(module) is nn.Linear:
            is_wide = f"{path}.weight" in self._make.wide
            return _linear(module, WideLinear if is_wide else NamedLinear, **kwargs)
        # Routers and experts are kept, but their weights are replaced.
        if is_router(module):
            weight = module._parameters.pop("weight")
            module.router = RouterProduct(weight, self._make.device)
            module.weight = RouterWeight(module.router.linear, self._weight_dtype(path))
            return None
        if _is_conv1d(module):
            num_inputs, num_outputs = module.weight.shape
            return TransposedLinear(
                num_inputs, (num_outputs,), LinearKind.REPLICATED, bias=True, **kwargs
            )
        if is_experts(module):
            module.expert_linears = ExpertModules(module, **kwargs)
            for name in module.expert_linears.checkpoint_slots():
                del module._parameters[name]
            return None
        if self.is_fused and _is_row_attention(module, self._make):
            return RowAttention(module, _spec_of(module), **kwargs)
        return self._known(module)

    def _weight_dtype(self, path: str) -> torch.dtype:
        return torch.float32 if f"{path}.weight" in self._make.wide else self._make.dtype

    def _known(self, module: Any) -> nn.Module | None:
        """A quire layer with the same result, if the source of the module's class is known."""
        make, body = self._make, body_of(module)
        if body in NORMS:
            size, eps = len(module.weight), module.variance_epsilon
            return RowNorm(size, eps, offset=NORMS[body], **make.kwargs)
        if body == GATED_MLP and _is_plain_mlp(module):
            return RowMLP(
                module.gate_proj.in_features,
                module.gate_proj.out_features,
                bias=module.gate_proj.bias is not None,
                activation=_ACTIVATIONS[type(module.act_fn).__name__],
                **make.kwargs,
            )
        if body in LAYERS:
            return ResidualLayer(module)
        if type(module).__name__.endswith("RotaryEmbedding") and make.device.type != "meta":
            if _is_table_rotary(module):
                return TableRotary(module, make.max_model_len, make.device, is_fused=self.is_fused)
            _check_fixed(module)
        return None


#: Types of rotation whose angles depend on the length of the context.
_GROWING = {"dynamic", "longrope"}


def _check_fixed(module: Any) -> None:
    kinds = getattr(module, "rope_type", "default")
    found = _GROWING & set(kinds.values() if isinstance(kinds, dict) else [kinds])
    if found:
        raise UnsupportedModelError(
            f"the rotation of {type(module).__name__} is of the type {found.pop()}, with which a"
            " token's keys depend on other tokens; quire has no table for this class"
        )


def _is_table_rotary(module: Any) -> bool:
    return body_of(module) == ROTARY


def _is_row_attention(module: Any, make: Making) -> bool:
    """Whether the class computes attention as Llama or Qwen3 does."""
    body = body_of(module)
    if body not in ATTENTIONS or not turns_halves(module):
        return False
    linears = (module.q_proj, module.k_proj, module.v_proj)
    biases = {each.bias is not None for each in linears}
    is_plain = all(type(each) is nn.Linear for each in (*linears, module.o_proj))
    norms = [getattr(module, name) for name in ("q_norm", "k_norm") if ATTENTIONS[body]]
    is_normed_alike = all(
        NORMS.get(body_of(each), 0.0) is None and len(each.weight) == module.head_dim
        for each in norms
    )
    return is_plain and len(biases) == 1 and is_normed_alike and module.head_dim % 2 == 0


def _spec_of(module: Any) -> AttentionSpec:
    """The sizes of a `RowAttention`. Its window and other properties are in the traced specs."""
    num_heads, num_kv_heads = (
        each.out_features // module.head_dim for each in (module.q_proj, module.k_proj)
    )
    return AttentionSpec(num_heads, num_kv_heads, module.head_dim, module.scaling)


def _is_plain_mlp(module: Any) -> bool:
    linears = (module.gate_proj, module.up_proj, module.down_proj)
    biases = {each.bias is not None for each in linears if type(each) is nn.Linear}
    is_plain = all(type(each) is nn.Linear for each in linears)
    return is_plain and len(biases) == 1 and type(module.act_fn).__name__ in _ACTIVATIONS


def wide_parameters(model: Any, dtype: torch.dtype) -> set[str]:
    """Names of the parameters that transformers keeps in fp32 even if the model's dtype differs."""
    kept = model._keep_in_fp32_modules_strict or set()
    patterns = [re.compile(rf"(^|\.){name}($|\.)") for name in kept]
    return {
        name
        for name, parameter in model.named_parameters()
        if dtype != torch.float32
        and (parameter.dtype == torch.float32 or any(each.search(name) for each in patterns))
    }


def fits_head(embedding: nn.Module, head: nn.Module | None) -> bool:
    """Whether `LMHead` can replace a model's head."""
    return (
        type(embedding) is nn.Embedding
        and type(head) is nn.Linear
        and head._parameters["bias"] is None
        and head.weight.shape == embedding.weight.shape
    )


def is_experts(module: Any) -> bool:
    """Whether the module's class uses transformers' interface for experts."""
    if not hasattr(module, "has_gate") or not hasattr(module, "is_transposed"):
        return False
    names = {"gate_up_proj" if module.has_gate else "up_proj", "down_proj"}
    if module.has_bias:
        names |= {f"{name}_bias" for name in names}
    return names == set(module._parameters)


def _linear(
    module: nn.Linear, kind: type[NamedLinear] = NamedLinear, **storage: Unpack[Storage]
) -> NamedLinear:
    return kind(
        module.in_features,
        (module.out_features,),
        LinearKind.REPLICATED,
        bias=module.bias is not None,
        **storage,
    )


def _is_conv1d(module: nn.Module) -> bool:
    """Whether the module is GPT-2's linear, whose weight is [I, O]."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def _set_module(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


_ACTIVATIONS = {
    "SiLUActivation": ActivationFunction.SILU,
    "SiLU": ActivationFunction.SILU,
    "GELUTanh": ActivationFunction.GELU_TANH,
}
"""Maps the names of transformers' activation classes to quire's activations."""
