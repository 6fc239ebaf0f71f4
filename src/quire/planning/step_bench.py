"""Builds an engine that is large enough for a plan, and measures its steps."""

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial

from quire.assembly.build import build_engine
from quire.assembly.reports.memory_fit import MemoryFit
from quire.core.scheduling.cost_model import StepCostModel
from quire.core.scheduling.options import SchedulerConfig
from quire.core.step import Runner
from quire.errors import ConfigurationError
from quire.options.engine_options import EngineOptions
from quire.planning.calibration_runs import LONGEST_ANSWER, RunBounds, draw_runs
from quire.planning.measuring import MeasuredStep, WatchedRunner, measure_runs
from quire.runtime.calibration import RunnerShape, calibrate, write_blocks
from quire.speculation.speculation_options import OFF, SpeculationOptions
from quire.tiers.tier_options import TierOptions

LEAST_CONTEXT = 2048
MEASURED_ROWS = 64
CALIBRATION_S = 1.5
"""A plan has more time than the start of an engine, and needs every kind of step."""
#: Tokens of KV for each row. The KV cache holds this number for all rows, but at least _LONG_ROWS
#: of the longest sequences; and, in addition, four of the longest sequences.
_SLOTS_PER_ROW = 1024
_LONG_ROWS = 16


class StepBench:
    """An engine whose steps are measured."""

    def __init__(
        self,
        options: EngineOptions,
        fit: MemoryFit,
        context: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Build the engine. `fit` is the memory layout for `options`.

        `context` is the number of tokens of the longest sequence in later plans. Raises
        ConfigurationError if the longest possible sequence is too short to be measured.
        """
        # First, choose how many rows and blocks are measured.
        self._clock = clock
        rows = max(options.max_num_seqs, MEASURED_ROWS)
        context = min(max(context, LEAST_CONTEXT), fit.max_model_len - LONGEST_ANSWER)
        if context < LONGEST_ANSWER:
            raise ConfigurationError(
                f"max_model_len is {fit.max_model_len}, but steps are measured with sequences of at"
                f" least {2 * LONGEST_ANSWER} tokens; raise it, or give the KV cache more memory"
            )
        slots = max(_SLOTS_PER_ROW * rows, _LONG_ROWS * context) + 4 * context
        num_blocks = min(fit.num_blocks, -(-slots // fit.block_size))
        # Then, build the engine around a runner that records its plans.
        changed = _for_measurement(options, rows, num_blocks, fit.max_model_len)
        seen: list[WatchedRunner] = []
        self._engine = build_engine(changed, watch=partial(_watch, seen, fit.block_size))
        self._watched = seen[0]
        shape = RunnerShape(
            num_rows=rows,
            max_num_tokens=changed.max_num_batched_tokens,
            max_model_len=fit.max_model_len,
            groups=fit.groups,
            num_blocks=num_blocks,
            block_size=fit.block_size,
            vocab_size=self._engine.limits.vocab_size,
        )
        # Finally, write the KV cache once, and fit the pacer's model as an engine does at its
        # start.
        runner = self._watched.inner
        write_blocks(runner, shape)
        is_on_gpu = fit.device_type != "cpu"
        samples = calibrate(
            runner, shape, warms_up=is_on_gpu, time_limit_s=CALIBRATION_S, clock=clock
        )
        #: The model with which an engine's pacer starts on this machine.
        self.pacing = StepCostModel.fit(samples)
        num_slots = num_blocks * fit.block_size
        bounds = RunBounds(rows, changed.max_num_batched_tokens, context, num_slots)
        self._runs = enumerate(draw_runs(bounds))

    def measure(self, time_limit_s: float) -> list[MeasuredStep]:
        """Measure the steps of more calibration runs, for about time_limit_s.

        The first call measures at least LEAST_RUNS runs; each later call at least ROUND.
        """
        return measure_runs(self._engine, self._watched, self._runs, time_limit_s, self._clock)


def _for_measurement(
    options: EngineOptions, rows: int, num_blocks: int, max_model_len: int
) -> EngineOptions:
    return replace(
        options,
        max_num_seqs=rows,
        max_num_batched_tokens=max(rows, options.max_num_batched_tokens),
        max_itl_ratio=0.0,
        num_blocks=num_blocks,
        kv_cache_memory=None,
        gpu_memory_utilization=None,
        max_model_len=max_model_len,
        skip_tokenizer_init=True,
        tokenizer=None,
        enable_prefix_caching=True,
        num_draft_tokens=SchedulerConfig.num_draft_tokens,
        **asdict(SpeculationOptions(speculation=OFF)),
        **asdict(TierOptions()),
    )


def _watch(seen: list[WatchedRunner], block_size: int, runner: Runner) -> Runner:
    seen.append(WatchedRunner(runner, block_size))
    return seen[-1]
