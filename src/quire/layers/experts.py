"""Mixtures of experts: many small MLPs, a few of which are used for each token.

    out = sum over the token's experts e of w[e] down[e](act(gate[e] x) up[e] x)

A router chooses the experts and their weights w. Shared experts, which all tokens use, may be
added. (Shazeer et al., arXiv:1701.06538; shared experts: DeepSeekMoE, arXiv:2401.06066.)
The choice is an operator, `kernels.routing`. The experts' linears are ordinary linears; their
method multiplies all of them at once if it can. The CPU may compute them while another device
computes the rest of the model; hidden states and routing then cross to the host and back.

Each rank has a slice of every expert's intermediate size. The ranks' outputs are summed once per
layer. Called by the models.

Shapes: T tokens, H hidden size, E experts, K experts of a token.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Unpack

import torch
from torch import nn

from quire.formats.weight_format import ExpertLinears, LinearMethod, LinearModule
from quire.kernels.activations import ActivationFunction, Gating, gated
from quire.kernels.experts import mix_experts
from quire.kernels.routing import RouterSpec, Routing
from quire.kernels.transfers import DeviceLink
from quire.layers.linear import Linear, LinearKind, WeightSlot
from quire.layers.mlp import MLP
from quire.layers.operator_module import OperatorModule
from quire.layers.storage import Storage

SILU_GATING = Gating()


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """One layer's mixture of experts."""

    router: RouterSpec
    #: The intermediate size of each expert.
    intermediate_size: int
    gating: Gating = SILU_GATING
    #: Whether the experts' linears have biases.
    bias: bool = False
    #: Whether the router's linear has a bias.
    router_bias: bool = False
    #: Whether the router's logits are fp32 instead of the model's dtype.
    fp32_logits: bool = False
    #: The intermediate size of all shared experts together; 0 if there are none.
    shared_size: int = 0
    #: Whether the shared experts' output is multiplied by the sigmoid of a gate, which is a linear.
    shared_gate: bool = False

    def num_weights(self, hidden_size: int, *, active: bool = False) -> int:
        """The number of a layer's weights; with `active`, only those that one token reads."""
        num_experts = self.router.top_k if active else self.router.num_experts
        inner = num_experts * self.intermediate_size + self.shared_size
        return hidden_size * (3 * inner + self.router.num_experts + self.shared_gate)

    def why_not_split(self, num_ranks: int) -> str | None:
        """The reason why it can't be split; see `models.config.ModelConfig.why_not_split`."""
        for what, size in (("expert", self.intermediate_size), ("shared expert", self.shared_size)):
            if size % num_ranks:
                return f"the intermediate size of an {what}, {size}, is no multiple of it"
        return None

    def share(self, num_ranks: int) -> "MoESpec":
        """The spec of one rank's share. `why_not_split` must allow `num_ranks`."""
        return replace(
            self,
            intermediate_size=self.intermediate_size // num_ranks,
            shared_size=self.shared_size // num_ranks,
        )


class Router(Linear):
    """Computes the logits of all experts."""

    stays_dense = True
    #: [E] fp32, e_score_correction_bias in checkpoints. With `RouterSpec.has_bias` it is added to
    #: the scores, but only for the choice of experts; with `has_scales` it multiplies the experts'
    #: weights. None if the router has neither.
    correction: torch.Tensor | None

    def __init__(self, hidden_size: int, spec: MoESpec, **storage: Unpack[Storage]) -> None:
        sizes = (spec.router.num_experts,)
        super().__init__(
            hidden_size, sizes, LinearKind.REPLICATED, bias=spec.router_bias, **storage
        )
        self._logits_dtype = torch.float32 if spec.fp32_logits else None
        correction = None
        if spec.router.has_bias or spec.router.has_scales:
            correction = torch.empty(spec.router.num_experts, device=storage["device"])
        self.register_buffer("correction", correction)

    def slots(self) -> dict[tuple[str, int], WeightSlot]:
        correction = self.correction
        if correction is None:
            return super().slots()

        def load(first_row: int, rows: torch.Tensor) -> None:
            correction[first_row : first_row + len(rows)].copy_(rows)

        slot = WeightSlot(tuple(correction.shape), load)
        return super().slots() | {("e_score_correction_bias", 0): slot}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] -> logits [T, E], in x's dtype or fp32."""
        logits = self.method.apply(self, x, self._logits_dtype)
        return logits if self.adapter is None else self.adapter(x, logits)


class Expert(nn.Module):
    """The linears of one gated MLP, for `Experts`. They have no adapters."""

    def __init__(self, hidden_size: int, spec: MoESpec, **storage: Unpack[Storage]) -> None:
        super().__init__()
        size = spec.intermediate_size
        self.gate_up_proj = Linear(
            hidden_size, (size, size), LinearKind.COLUMN, bias=spec.bias, **storage, gated=True
        )
        self.down_proj = Linear(size, (hidden_size,), LinearKind.ROW, bias=spec.bias, **storage)
        self.down_proj.is_summed_later = True
        self.gate_up_proj.may_have_wide = self.down_proj.may_have_wide = False


class Experts(nn.ModuleList):
    """All experts of a layer."""

    def __init__(self, hidden_size: int, spec: MoESpec, **storage: Unpack[Storage]) -> None:
        experts = [Expert(hidden_size, spec, **storage) for _ in range(spec.router.num_experts)]
        super().__init__(experts)
        self.active_share = spec.router.top_k / spec.router.num_experts  # see `models.footprint`
        # A plain object, which does not register the modules a second time.
        self.linears = ExpertLinears(
            tuple(each.gate_up_proj for each in experts),
            tuple(each.down_proj for each in experts),
            spec.gating,
        )
        self._alike: tuple[LinearMethod | None, bool] = (None, False)
        #: Whether the CPU computes the experts, and another device the rest of the layer.
        self.crosses = False

    @property
    def is_on_host(self) -> bool:
        """Whether the CPU computes the experts for a model on another device."""
        first = self.linears.gate_up[0]
        assert isinstance(first, Linear)
        return first.is_on_host

    def place_on_host(self) -> None:
        """Let the CPU store and compute the experts, before their linears get methods."""
        self.crosses = True
        for module in self.modules():
            if isinstance(module, Linear):
                module.is_on_host = True

    def forward(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """x [T, H] -> weighted sums of the experts' outputs [T, H]."""
        if not self.crosses:
            return self._mix(x, routing)
        link = DeviceLink(x.device)
        there, ids, weights = link.fetch(x, routing.ids, routing.weights)
        return link.send(self._mix(there, Routing(ids, weights)))

    def _mix(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        first = self.linears.gate_up[0]
        assert isinstance(first, Linear)
        if not self._are_alike(first.method):
            return mix_experts(x, routing, self._compute)
        return first.method.experts(self.linears, x, routing)

    @property
    def are_grouped(self) -> bool:
        """Whether grouped products compute all experts; if not, `forward` waits for the device."""
        up, down = self.linears.gate_up[0], self.linears.down[0]
        assert isinstance(up, Linear)
        are_able = _storage(up).groups_experts and _storage(down).groups_experts
        return are_able and self._are_alike(up.method)

    def _are_alike(self, method: LinearMethod) -> bool:
        """Whether `method`, the method of the first expert's linear, can multiply all experts.

        The result is cached for each method, since methods may be replaced.
        """
        if self._alike[0] is not method:
            own = {_storage(each) for each in self.linears.gate_up}
            others = {_storage(each) for each in self.linears.down}
            is_one_each = len(own) == len(others) == 1
            self._alike = method, is_one_each and method.storage.takes_experts_with(*others)
        return self._alike[1]

    def _compute(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        module = self[expert]
        assert isinstance(module, Expert)
        inner = gated(module.gate_up_proj(x), self.linears.gating)
        output: torch.Tensor = module.down_proj(inner)
        return output


def _storage(linear: LinearModule) -> LinearMethod:
    assert isinstance(linear, Linear)
    return linear.method.storage


class SparseMLP(OperatorModule):
    """A router, its experts, and optional shared experts."""

    def __init__(self, hidden_size: int, spec: MoESpec, **storage: Unpack[Storage]) -> None:
        super().__init__()
        self.spec = spec
        #: Sums the output over ranks; None if there is one rank.
        self.join: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.gate = Router(hidden_size, spec, **storage)
        self.experts = Experts(hidden_size, spec, **storage)
        self.shared_experts: MLP | None = None
        self.shared_expert_gate: Linear | None = None
        if spec.shared_size:
            self.shared_experts = MLP(
                hidden_size,
                spec.shared_size,
                bias=False,
                **storage,
                activation=spec.gating.activation,
            )
            self.shared_experts.down_proj.is_summed_later = True
        if spec.shared_gate:
            self.shared_expert_gate = Linear(
                hidden_size, (1,), LinearKind.REPLICATED, bias=False, **storage
            )
            self.shared_expert_gate.stays_dense = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] -> [T, H]."""
        logits = self.gate(x)
        routing = self.operators.route(logits, self.gate.correction, self.spec.router, x.dtype)
        output: torch.Tensor = self.experts(x, routing)
        if self.shared_experts is not None:
            output = self.operators.add(self._shared(self.shared_experts, x), output)
        return output if self.join is None else self.join(output)

    def _shared(self, experts: MLP, x: torch.Tensor) -> torch.Tensor:
        if self.shared_expert_gate is None:
            shared: torch.Tensor = experts(x)
            return shared
        gate = self.shared_expert_gate(x)
        return self.operators.gate(experts(x), gate, ActivationFunction.SIGMOID)
