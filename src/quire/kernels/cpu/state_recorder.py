"""Records what layers with states or latents compute between their linears.

`recorder.py` says what recording is.
"""

import torch

from quire.kernels.cpu.operator_recorder import OperatorRecorder
from quire.kernels.cpu.recorded_values import UnrecordableError
from quire.kernels.rotary import Angles


class StateRecorder(OperatorRecorder):
    """The other operators of `kernels.operators.Operators`."""

    def gated_rms_norm(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        gates_first: bool = False,
    ) -> torch.Tensor:
        raise UnrecordableError("a norm with a gate is no operation")

    def delta_gates(
        self, a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise UnrecordableError("the gates of Gated DeltaNet are no operation")

    def join_turned(self, x: torch.Tensor, tail: torch.Tensor, angles: Angles) -> torch.Tensor:
        raise UnrecordableError("parts of heads that are joined are no operation")
