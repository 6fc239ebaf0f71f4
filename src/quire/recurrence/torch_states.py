"""Recurrent layers in plain torch, one token at a time, for devices without kernels.

Each sequence's state is read from its pages, updated by `reference.py` in fp32, and written back.
Tokens are computed one by one because torch rounds some functions differently for larger tensors,
and results must not depend on how a prompt is split into chunks.

A state is stored as U units. A unit of a matrix state has 16 adjacent columns of one head, with all
rows (`state_specs.py`).
"""

import torch

from quire.kernels.state_calls import GatedDeltaInputs, Mamba2Inputs, Mamba2Weights
from quire.recurrence import reference
from quire.recurrence.state_backend import StateBackend
from quire.recurrence.state_specs import (
    UNIT_CHANNELS,
    UNIT_COLUMNS,
    GatedDeltaSpec,
    Mamba2Spec,
    ShortConvSpec,
)


class TorchStates(StateBackend):
    """The torch backend. A planned batch must not change until the step's last layer has run."""

    def gated_delta(self, layer: int, inputs: GatedDeltaInputs) -> torch.Tensor:
        spec = self._specs[layer]
        assert isinstance(spec, GatedDeltaSpec)
        out = torch.empty_like(inputs.v)
        for s, tokens, num_kept in self._sequences():
            state = kept = _joined(self._read(layer, s), spec.num_v_heads, spec.key_dim)
            for number, at in enumerate(tokens, 1):
                token = GatedDeltaInputs(*(part[at] for part in inputs))
                out[at], state = reference.gated_delta(spec, state, token)
                kept = state if number == num_kept else kept
            self._write(layer, s, _cut(kept))
        return out

    def mamba2(self, layer: int, inputs: Mamba2Inputs, weights: Mamba2Weights) -> torch.Tensor:
        spec = self._specs[layer]
        assert isinstance(spec, Mamba2Spec)
        out = torch.empty_like(inputs.x)
        for s, tokens, num_kept in self._sequences():
            state = kept = _joined(self._read(layer, s), spec.num_heads, spec.state_size)
            for number, at in enumerate(tokens, 1):
                token = Mamba2Inputs(*(part[at] for part in inputs))
                out[at], state = reference.mamba2(spec, state, token, weights)
                kept = state if number == num_kept else kept
            self._write(layer, s, _cut(kept))
        return out

    def short_conv(
        self, layer: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        spec = self._specs[layer]
        assert isinstance(spec, ShortConvSpec)
        out = torch.empty_like(x)
        for s, tokens, num_kept in self._sequences():
            units = self._read(layer, s).view(spec.num_units, spec.width - 1, UNIT_CHANNELS)
            padded = units.transpose(0, 1).flatten(1)
            state = kept = padded[:, : spec.num_channels]
            for number, at in enumerate(tokens, 1):
                out[at], state = reference.short_conv(spec, state, x[at], weight, bias)
                kept = state if number == num_kept else kept
            padded[:, : spec.num_channels] = kept
            shape = spec.width - 1, spec.num_units, UNIT_CHANNELS
            self._write(layer, s, padded.reshape(shape).transpose(0, 1))
        return out

    def _sequences(self) -> list[tuple[int, list[slice], int]]:
        """(index of a sequence, a slice for each of its tokens, the number of tokens that are no
        drafts), for all sequences of the step."""
        batch = self._batch
        assert batch is not None, "plan comes before a layer"
        found, first = [], 0
        for s, length in enumerate(batch.query_lens_list):
            num_drafts = batch.num_drafts_list[s] if batch.num_drafts_list else 0
            tokens = [slice(t, t + 1) for t in range(first, first + length)]
            found.append((s, tokens, length - num_drafts))
            first += length
        return found

    def _places(self, layer: int, s: int) -> tuple[torch.Tensor, torch.Tensor]:
        """For one sequence: the page [U] of each unit, and the unit's indices in it [U, bytes]."""
        batch, where, spec = self._batch, self._layers[layer], self._specs[layer]
        assert batch is not None
        device = where.pages.device
        units = torch.arange(spec.num_units, device=device) + where.first_unit
        blocks = batch.tables[where.group][batch.rows_list[s]]
        pages = blocks[units // where.units_per_page].long()
        first = units % where.units_per_page * spec.unit_bytes
        return pages, first[:, None] + torch.arange(spec.unit_bytes, device=device)

    def _read(self, layer: int, s: int) -> torch.Tensor:
        """The sequence's state [U, bytes / 4] fp32; zeros before its first token."""
        assert self._batch is not None
        pages, at = self._places(layer, s)
        units = self._layers[layer].pages[pages[:, None], at].view(torch.float32)
        is_fresh = self._batch.context_lens_list[s] == self._batch.query_lens_list[s]
        return torch.zeros_like(units) if is_fresh else units

    def _write(self, layer: int, s: int, units: torch.Tensor) -> None:
        pages, at = self._places(layer, s)
        data = units.flatten(1).contiguous().view(torch.uint8)
        self._layers[layer].pages[pages[:, None], at] = data


def _joined(units: torch.Tensor, num_heads: int, num_rows: int) -> torch.Tensor:
    """Join the units [U, rows * 16] read from pages into a state [heads, rows, columns]."""
    return units.view(num_heads, -1, num_rows, UNIT_COLUMNS).transpose(1, 2).flatten(2)


def _cut(state: torch.Tensor) -> torch.Tensor:
    """Cut a state [heads, rows, columns] into the units [U, rows, 16] that pages store."""
    num_heads, num_rows, _ = state.shape
    cut = state.reshape(num_heads, num_rows, -1, UNIT_COLUMNS).transpose(1, 2)
    return cut.flatten(0, 1)
