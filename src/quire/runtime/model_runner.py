"""Executes plans on a model: forward pass, then sampling. Knows no requests and no text.

Obeys the contract of `core.step.Runner`. On the CPU all work is done when `execute` and `sample`
return, so `result` never waits.
"""

import time
from collections import deque
from dataclasses import dataclass

import torch

from quire.attention.interface import AttentionBackend
from quire.core.step import StepPlan, StepResult, TokenLogprobs, TokenMasks
from quire.kernels.cpu.library import NativeKernels
from quire.models.interface import CausalLM
from quire.runtime.batch import RowBatch, StepBatch
from quire.runtime.forward import make_forward
from quire.runtime.kv_cache import KVCache
from quire.sampling.sampler import NO_TOKEN, Sampler

# Prompt log-probabilities need the whole vocabulary for each position: so many positions at once.
PROMPT_LOGPROB_ROWS = 128


@dataclass(slots=True)
class StepTiming:
    """Seconds of the last step's parts; plan_s is the attention backend's planning."""

    build_s: float = 0.0
    plan_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0


class ModelRunner:
    """One model, its rows and its KV cache on one device."""

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        kv_cache: KVCache,
        rows: RowBatch,
        sampler: Sampler,
        kernels: NativeKernels | None = None,
    ) -> None:
        """backend: not yet bound; it is given kv_cache's memory here. kernels: those that the model
        and the backend were made with; None: torch computes."""
        self.timing = StepTiming()
        self._model = model
        self._backend = backend
        self._kv_cache = kv_cache
        self._rows = rows
        self._sampler = sampler
        self._executed: tuple[StepPlan, StepBatch, torch.Tensor] | None = None
        self._results: deque[StepResult] = deque()
        backend.bind(model.attention_specs, kv_cache.layers())
        self._forward = make_forward(model, backend, kernels, rows.max_num_tokens)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> None:
        """See `core.step.Runner`. Raises whatever the forward pass raises; then call `reset`."""
        assert self._executed is None, "the previous step was not sampled"
        assert not plan.moves, "this runner has one tier; there is nowhere to move a block"
        started_s = time.perf_counter()
        self._change_rows(plan)
        step = self._rows.build(plan)
        built_s = time.perf_counter()
        self._backend.plan(step.attention)
        planned_s = time.perf_counter()
        self._executed = (plan, step, self._forward(step))
        self.timing.build_s = built_s - started_s
        self.timing.plan_s = planned_s - built_s
        self.timing.forward_s = time.perf_counter() - planned_s

    @torch.inference_mode()
    def sample(self, masks: TokenMasks | None = None) -> None:
        """See `core.step.Runner`."""
        assert self._executed is not None, "there is no executed step to sample"
        started_s = time.perf_counter()
        (plan, step, hidden), self._executed = self._executed, None
        self._results.append(self._sample(plan, step, hidden, masks))
        self.timing.sample_s = time.perf_counter() - started_s

    def result(self) -> StepResult:
        """See `core.step.Runner`."""
        assert self._results, "there is no sampled step"
        return self._results.popleft()

    def _sample(
        self, plan: StepPlan, step: StepBatch, hidden: torch.Tensor, masks: TokenMasks | None
    ) -> StepResult:
        prompt_logprobs = self._prompt_logprobs(step, hidden)
        rows = step.sample_rows
        if len(rows) == 0:
            return StepResult(plan.step_id, (), (), prompt_logprobs=prompt_logprobs)
        sampled = self._sampler.sample(self._logits(step, hidden), rows, self._rows.history, masks)
        token_ids = sampled.token_ids
        if sampled.failed:
            succeeded = token_ids != NO_TOKEN
            rows, token_ids = rows[succeeded], token_ids[succeeded]
        self._rows.append_sampled(rows, token_ids)
        return StepResult(
            plan.step_id,
            rows.tolist(),
            [(token_id,) for token_id in token_ids.tolist()],
            logprobs={row: (entry,) for row, entry in sampled.logprobs.items()},
            prompt_logprobs=prompt_logprobs,
            failed=sampled.failed,
        )

    def _logits(self, step: StepBatch, hidden: torch.Tensor) -> torch.Tensor:
        """Of each sample row, [R, V]; a joining row's are a copy: the sampler edits each line."""
        num_computing = len(step.sample_rows) - len(step.joined_lines)
        logits = self._model.logits(hidden[step.sample_index[:num_computing]])
        if len(step.joined_lines) == 0:
            return logits
        return torch.cat([logits, logits[torch.from_numpy(step.joined_lines)]])

    def reset(self) -> None:
        """See `core.step.Runner`."""
        self._executed = None
        self._results.clear()
        self._rows.reset()

    def _change_rows(self, plan: StepPlan) -> None:
        self._rows.change(plan)
        for row in plan.release:
            self._sampler.rows.clear_row(row)
        for admission in plan.admit:
            self._sampler.rows.set_row(
                admission.row, admission.params, admission.branch_index, admission.num_prompt_tokens
            )
        for fork in plan.forks:
            num_prompt_tokens = int(self._rows.num_prompt_tokens[fork.row])
            self._sampler.rows.set_row(fork.row, fork.params, fork.branch_index, num_prompt_tokens)
        self._kv_cache.copy_blocks(plan.copies)

    def _prompt_logprobs(
        self, step: StepBatch, hidden: torch.Tensor
    ) -> dict[int, list[TokenLogprobs]]:
        found: dict[int, list[TokenLogprobs]] = {}
        for row, start, count, first in step.prompt_logprob_spans:
            entries = found.setdefault(row, [])
            num_top = self._sampler.rows.num_prompt_logprobs(row)
            assert num_top is not None
            for offset in range(0, count, PROMPT_LOGPROB_ROWS):
                size = min(PROMPT_LOGPROB_ROWS, count - offset)
                logits = self._model.logits(hidden[start + offset : start + offset + size])
                following = self._rows.token_ids[row, first + offset : first + offset + size]
                entries.extend(self._sampler.prompt_logprobs(logits, following, num_top))
        return found
