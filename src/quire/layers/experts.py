"""Mixtures of experts: many small MLPs, of which each token has a few.

    out = sum over the token's experts e of w[e] down[e](act(gate[e] x) up[e] x)

where a router gives the experts and their weights w, and shared experts, which all tokens have, may
be added. (Shazeer et al., arXiv:1701.06538; shared experts: DeepSeekMoE, arXiv:2401.06066.)
The choice is an operator, `kernels.routing`; the experts'
linears are ordinary ones, and their method multiplies all of them at once where it can.

Of several ranks each has all experts, with its share of their inner size; what comes out is a part
of a sum over ranks, which is taken once for a layer. Called by the models.

Shapes: T tokens, H hidden size, E experts, K experts of a token.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from quire.formats.weight_format import ExpertLinears, LinearMethod, LinearModule
from quire.kernels.activations import ActivationFunction, Gating, gated
from quire.kernels.experts import mix_experts
from quire.kernels.routing import RouterSpec, Routing
from quire.layers.linear import Linear, LinearKind, WeightSlot
from quire.layers.mlp import MLP
from quire.layers.operator_module import OperatorModule

SILU_GATING = Gating()


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """One layer's mixture of experts.

    intermediate_size: of each expert. gating: of the experts. bias: both linears of experts have
    one. router_bias: the router's linear has one. fp32_logits: the router's product is not rounded
    to the model's dtype. shared_size: intermediate size of all shared experts together, 0: there
    are none. shared_gate: their output is multiplied by the sigmoid of a product of its own.
    """

    router: RouterSpec
    intermediate_size: int
    gating: Gating = SILU_GATING
    bias: bool = False
    router_bias: bool = False
    fp32_logits: bool = False
    shared_size: int = 0
    shared_gate: bool = False

    def num_weights(self, hidden_size: int, *, active: bool = False) -> int:
        """Of a layer. active: only those that a token reads."""
        num_experts = self.router.top_k if active else self.router.num_experts
        inner = num_experts * self.intermediate_size + self.shared_size
        return hidden_size * (3 * inner + self.router.num_experts + self.shared_gate)

    def why_not_split(self, num_ranks: int) -> str | None:
        """As `models.config.ModelConfig.why_not_split`."""
        for what, size in (("expert", self.intermediate_size), ("shared expert", self.shared_size)):
            if size % num_ranks:
                return f"the intermediate size of an {what}, {size}, is no multiple of it"
        return None

    def share(self, num_ranks: int) -> "MoESpec":
        """Each rank's, of so many that `why_not_split` allows."""
        return replace(
            self,
            intermediate_size=self.intermediate_size // num_ranks,
            shared_size=self.shared_size // num_ranks,
        )


class Router(Linear):
    """Logits of all experts. correction: [E] fp32, is added to the scores for the choice alone; the
    checkpoint has it as e_score_correction_bias; with `RouterSpec.has_scales` it multiplies their
    weights. None where the spec has neither."""

    stays_dense = True
    correction: torch.Tensor | None

    def __init__(
        self, hidden_size: int, spec: MoESpec, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(
            hidden_size,
            (spec.router.num_experts,),
            LinearKind.REPLICATED,
            bias=spec.router_bias,
            dtype=dtype,
            device=device,
        )
        self._logits_dtype = torch.float32 if spec.fp32_logits else None
        correction = None
        if spec.router.has_bias or spec.router.has_scales:
            correction = torch.empty(spec.router.num_experts, device=device)
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
        """x [T, H] -> [T, E], in x's dtype or fp32."""
        logits = self.method.apply(self, x, self._logits_dtype)
        return logits if self.adapter is None else self.adapter(x, logits)


class Expert(nn.Module):
    """The linears of one gated MLP; `Experts` computes with them. They have no adapters."""

    def __init__(
        self, hidden_size: int, spec: MoESpec, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        size = spec.intermediate_size
        self.gate_up_proj = Linear(
            hidden_size,
            (size, size),
            LinearKind.COLUMN,
            bias=spec.bias,
            dtype=dtype,
            device=device,
            gated=True,
        )
        self.down_proj = Linear(
            size, (hidden_size,), LinearKind.ROW, bias=spec.bias, dtype=dtype, device=device
        )
        self.down_proj.is_summed_later = True


class Experts(nn.ModuleList):
    """All experts of a layer."""

    def __init__(
        self, hidden_size: int, spec: MoESpec, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        experts = [
            Expert(hidden_size, spec, dtype=dtype, device=device)
            for _ in range(spec.router.num_experts)
        ]
        super().__init__(experts)
        self.active_share = spec.router.top_k / spec.router.num_experts  # see `models.footprint`
        # Held apart from the modules, as these are.
        self.linears = ExpertLinears(
            tuple(each.gate_up_proj for each in experts),
            tuple(each.down_proj for each in experts),
            spec.gating,
        )
        self._alike: tuple[LinearMethod | None, bool] = (None, False)

    def forward(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """x [T, H] -> the weighted sum of each token's experts [T, H]."""
        first = self.linears.gate_up[0]
        assert isinstance(first, Linear)
        if not self._are_alike(first.method):
            return mix_experts(x, routing, self._compute)
        return first.method.experts(self.linears, x, routing)

    @property
    def are_grouped(self) -> bool:
        """Whether one product multiplies them all; else `forward` waits for the device."""
        up, down = self.linears.gate_up[0], self.linears.down[0]
        assert isinstance(up, Linear)
        are_able = _storage(up).groups_experts and _storage(down).groups_experts
        return are_able and self._are_alike(up.method)

    def _are_alike(self, method: LinearMethod) -> bool:
        """Whether `method`, the first one's, multiplies them all."""
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
    """A router, its experts, and what all tokens share.

    join: sums over ranks, where there are several.
    """

    def __init__(
        self, hidden_size: int, spec: MoESpec, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.spec = spec
        self.join: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.gate = Router(hidden_size, spec, dtype=dtype, device=device)
        self.experts = Experts(hidden_size, spec, dtype=dtype, device=device)
        self.shared_experts: MLP | None = None
        self.shared_expert_gate: Linear | None = None
        if spec.shared_size:
            self.shared_experts = MLP(
                hidden_size,
                spec.shared_size,
                bias=False,
                dtype=dtype,
                device=device,
                activation=spec.gating.activation,
            )
            self.shared_experts.down_proj.is_summed_later = True
        if spec.shared_gate:
            self.shared_expert_gate = Linear(
                hidden_size, (1,), LinearKind.REPLICATED, bias=False, dtype=dtype, device=device
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
