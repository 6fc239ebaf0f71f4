"""Recurrent layers by Triton kernels, which update states where they are stored.

A call is one launch for all sequences of a step. Decode and prefill use the same arithmetic, so
results don't depend on chunks or on other sequences (see `kernels/triton/recurrence/units.py`).
The shapes are those of `kernels.state_calls`.
"""

import torch

from quire.errors import ConfigurationError
from quire.kernels.state_calls import GatedDeltaInputs, Mamba2Inputs, Mamba2Weights
from quire.kernels.triton.recurrence.causal_conv import causal_conv
from quire.kernels.triton.recurrence.gated_delta_rule import gated_delta_rule
from quire.kernels.triton.recurrence.mamba2_scan import mamba2_scan
from quire.kernels.triton.recurrence.units import MAX_ROWS, UNIT_COLUMNS, StepStates
from quire.recurrence.reference import NORM_EPS
from quire.recurrence.state_backend import LayerStates, RecurrentSpec, StateBackend
from quire.recurrence.state_specs import GatedDeltaSpec, Mamba2Spec, ShortConvSpec


class TritonStates(StateBackend):
    """The Triton backend. A planned batch must not change until the step's last layer has run."""

    serves_graphs = True

    def __init__(self) -> None:
        super().__init__()
        self._pages: tuple[torch.Tensor, ...] = ()

    def bind(self, specs: tuple[RecurrentSpec, ...], layers: tuple[LayerStates, ...]) -> None:
        super().bind(specs, layers)
        for spec in specs:
            num_rows = spec.unit_bytes // (4 * UNIT_COLUMNS)
            if not isinstance(spec, ShortConvSpec) and num_rows > MAX_ROWS:
                raise ConfigurationError(
                    f"{spec} can't be served by the Triton kernels, which need key_dim or"
                    f" state_size up to {MAX_ROWS}; device='cpu' computes it"
                )
        self._pages = tuple(layer.pages.view(torch.float32) for layer in layers)

    def gated_delta(self, layer: int, inputs: GatedDeltaInputs) -> torch.Tensor:
        spec = self._specs[layer]
        assert isinstance(spec, GatedDeltaSpec)
        eps = NORM_EPS if spec.normalizes else None
        return gated_delta_rule(self._states(layer), inputs, eps=eps)

    def mamba2(self, layer: int, inputs: Mamba2Inputs, weights: Mamba2Weights) -> torch.Tensor:
        spec = self._specs[layer]
        assert isinstance(spec, Mamba2Spec)
        return mamba2_scan(self._states(layer), inputs, weights, spec.min_step, spec.max_step)

    def short_conv(
        self, layer: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        spec = self._specs[layer]
        assert isinstance(spec, ShortConvSpec)
        return causal_conv(self._states(layer), x, weight, bias, has_silu=spec.has_silu)

    def _states(self, layer: int) -> StepStates:
        batch, where = self._batch, self._layers[layer]
        assert batch is not None, "plan comes before a layer"
        return StepStates(
            self._pages[layer],
            batch.tables[where.group],
            batch.query_start,
            batch.context_lens,
            batch.rows,
            where.first_unit,
            where.units_per_page,
            len(batch.query_lens_list) - batch.num_decodes,
            batch.num_drafts,
        )
