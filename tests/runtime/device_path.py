"""The device's path in main memory: stand-ins for what only a GPU, or Triton, brings."""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from quire.attention.interface import AttentionBatch, GroupBatch, MixedSize, rotated
from quire.attention.torch_paged import TorchPagedAttention
from quire.engine.engine import Engine
from quire.kernels.attention_inputs import AttentionInputs
from quire.kernels.transfers import DeviceLink
from quire.runtime.batch import RowBatch
from quire.runtime.device_rows import DeviceRows
from quire.runtime.forward import ModuleForward
from quire.runtime.graphs import RepeatedCalls, graph_sizes, mixed_graph_sizes
from quire.runtime.model_runner import ModelRunner
from quire.sampling.device.history import DeviceHistory
from quire.sampling.host.history import Ints, TokenHistory
from quire.sampling.host.processors import RowMasks
from quire.sampling.host.sampler import (
    AheadSampler,
    HostStepSampler,
    PendingLogprobs,
    PendingSample,
    Rows,
    SampledTokens,
    Sampler,
    SamplingRows,
)

CPU = torch.device("cpu")
LINK = DeviceLink(CPU)


@dataclass
class Late:
    """A sample that may be fetched only once its step's successor is under way, or later."""

    found: SampledTokens
    num_fetched: int = 0

    def fetch(self) -> SampledTokens:
        self.num_fetched += 1
        assert self.num_fetched == 1, "a result is fetched once"
        return self.found


class HistorySampler:
    """Samples as the host does, from the device's history and into it, as a device's sampler."""

    def __init__(self, rows: SamplingRows, history: DeviceHistory) -> None:
        self.rows = rows
        self.ahead: AheadSampler | None = None
        self._history = history
        tokens = TokenHistory(history.token_ids.numpy(), history.num_tokens)
        self._sampler = HostStepSampler(Sampler(rows), tokens)

    def sample(
        self, logits: torch.Tensor, rows: Rows, masks: RowMasks | None = None
    ) -> PendingSample:
        assert torch.isfinite(logits).all() or logits.isnan().any()
        found = self._sampler.sample(logits, rows, masks).fetch()
        places = self._history.num_tokens[rows]
        self._history.token_ids.numpy()[rows, places] = np.maximum(found.token_ids, 0)
        return Late(found)

    def prompt_logprobs(
        self, logits: torch.Tensor, next_token_ids: Ints, k: int
    ) -> PendingLogprobs:
        return self._sampler.prompt_logprobs(logits, next_token_ids, k)


class TensorsOnly(TorchPagedAttention):
    """Static steps are planned from tensors alone, padding and all.

    The words of a mixed step's plan are its number of decoding sequences, then three numbers for
    each sequence: its query length, context and row. The output of padding is NaN: nobody may read
    it.
    """

    serves_graphs = True
    serves_mixed_graphs = True

    def plan(self, batch: AttentionBatch) -> None:
        self.num_padded = 0
        if batch.mixed is not None:
            batch = self.unpacked(batch)
        elif batch.num_decodes == len(batch.query_lens_list):
            batch = self.without_padding(batch)
        if len(batch.rows):
            super().plan(batch)

    def num_plan_words(self, size: MixedSize) -> int:
        return 1 + 3 * size.num_seqs

    def write_plan(self, batch, size, words):
        lists = batch.query_lens_list, batch.context_lens_list, batch.rows_list
        assert not words.any() and sum(lists[0]) <= size.num_tokens
        assert len(lists[0]) <= size.num_seqs and max(lists[1]) <= size.max_context
        words[0] = batch.num_decodes
        for place, numbers in enumerate(zip(*lists, strict=True)):
            words[1 + 3 * place : 4 + 3 * place] = numbers
        return (), 1 + 3 * size.num_seqs

    def unpacked(self, batch: AttentionBatch) -> AttentionBatch:
        assert batch.mixed is not None
        num_decodes, *numbers = batch.mixed.words.tolist()
        lists = [numbers[kind::3] for kind in range(3)]
        count = next((i for i, length in enumerate(lists[0]) if not length), len(lists[0]))
        query_lens, context_lens, rows = (numbers[:count] for numbers in lists)
        starts = [0, *accumulate(query_lens)]
        assert batch.query_start[: count + 1].tolist() == starts
        assert batch.context_lens[:count].tolist() == context_lens
        for group in batch.groups:
            assert (group.slot_mapping[starts[-1] :] == -1).all()
        self.num_padded = batch.mixed.size.num_tokens - starts[-1]
        return AttentionBatch(
            query_start=batch.query_start[: count + 1],
            context_lens=batch.context_lens[:count],
            rows=batch.rows[:count],
            query_lens_list=query_lens,
            context_lens_list=context_lens,
            rows_list=rows,
            num_decodes=num_decodes,
            groups=tuple(
                GroupBatch(group.block_tables, group.slot_mapping[: starts[-1]])
                for group in batch.groups
            ),
        )

    def without_padding(self, batch: AttentionBatch) -> AttentionBatch:
        is_real = batch.context_lens > 0
        count = int(is_real.sum())
        self.num_padded = len(is_real) - count
        assert is_real[:count].all(), "padding comes last"
        assert batch.query_start.tolist() == list(range(len(is_real) + 1))
        for group in batch.groups:
            assert (group.slot_mapping[count:] == -1).all()
            assert (group.slot_mapping[:count] >= 0).all()
        return AttentionBatch(
            query_start=batch.query_start[: count + 1],
            context_lens=batch.context_lens[:count],
            rows=batch.rows[:count],
            query_lens_list=[1] * count,
            context_lens_list=batch.context_lens[:count].tolist(),
            rows_list=batch.rows[:count].tolist(),
            num_decodes=count,
            groups=tuple(
                GroupBatch(group.block_tables, group.slot_mapping[:count]) for group in batch.groups
            ),
        )

    def run(self, layer: int, inputs: AttentionInputs) -> torch.Tensor:
        if not self.num_padded:
            return super().run(layer, inputs)
        (q, k), v = rotated(inputs), inputs.v
        assert k is not None and v is not None
        output = torch.full_like(q, float("nan"))
        count = len(q) - self.num_padded
        if count:
            output[:count] = super().run(
                layer, AttentionInputs(q[:count], k[:count], v[:count], inputs.sinks)
            )
        return output


class CountedCalls(RepeatedCalls):
    """Knows how often it captured, and how often that was replayed."""

    def __init__(self) -> None:
        self.num_captured = self.num_replayed = 0

    def capture(self, computation):
        self.num_captured += 1
        again = super().capture(computation)

        def replay() -> torch.Tensor:
            self.num_replayed += 1
            return again()

        return replay


def host_rows(engine: Engine) -> RowBatch:
    """Rows as the engine's own runner has them."""
    facts = engine.facts
    return RowBatch(
        num_rows=facts["max_num_seqs"],
        max_model_len=facts["max_model_len"],
        max_num_tokens=facts["max_num_batched_tokens"],
        num_groups=facts["num_kv_groups"],
        block_size=facts["block_size"],
    )


def move_to_device(
    engine: Engine, *, overlap: bool, capture: RepeatedCalls | None = None
) -> ModelRunner:
    """Let an engine that was built to compute with torch go on along the device's path."""
    old, host = engine._runner, host_rows(engine)
    assert isinstance(old._forward, ModuleForward)
    model = old._forward._model
    num_rows = len(host.num_tokens)
    backend = TorchPagedAttention() if capture is None else TensorsOnly()
    sizes = graph_sizes(num_rows), mixed_graph_sizes(host.max_num_tokens)
    rows = DeviceRows(host, LINK, *(((), ()) if capture is None else sizes), backend)
    sampler = HistorySampler(SamplingRows(num_rows, model.vocab_size), rows.history)
    runner = ModelRunner(model, backend, old._kv_cache, rows, sampler, capture=capture)
    engine._runner = runner
    engine.overlap = overlap
    return runner
