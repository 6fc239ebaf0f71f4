"""Plans how to serve a load on this machine.

Memory sizes come from the code that sizes an engine, step times from measurements on this machine
(`measuring`), and all other results from the real scheduler on a virtual clock (`virtual_run`). A
plan names the sizes that were not measured instead of extrapolating. `quire plan` calls it.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.assembly.build import may_overlap_on_cpu
from quire.assembly.reports.memory_fit import MemoryFit, choose_model, fit_memory
from quire.attention.kv_registry import INT8
from quire.bench.machine import processor
from quire.core.memory.cache_options import AUTO_BLOCK_SIZE
from quire.core.scheduling.options import SERVED_MAX_ITL_RATIO
from quire.errors import ConfigurationError, QuireError
from quire.formats.format_registry import WEIGHT_FORMATS
from quire.hub.folder_digest import folder_digest
from quire.numa.binding import unbind_threads
from quire.option_fields import served_defaults
from quire.options.engine_options import EngineOptions
from quire.planning.block_sizes import DEFAULT, SizeOutcome, choose_size, try_sizes
from quire.planning.candidates import Candidate, Expectation, best_of, bound_of, expect, variants
from quire.planning.disk_bench import measure_disk
from quire.planning.load import Load
from quire.planning.objectives import Objectives
from quire.planning.step_bench import StepBench
from quire.planning.step_cost_file import StepCostFile
from quire.planning.step_costs import BlockFactors, StepCosts, fit_costs
from quire.simulation.virtual_disk import DiskShape
from quire.simulation.virtual_engine import EngineShape
from quire.speculation.speculation_options import AUTO, OFF
from quire.version import __version__

#: Stands for the formats that the given options name, or else for those of the model's files.
OWN = "own"
TRIED_NUM_SEQS = (64, 16, 4)
TRIED_RATIOS = (SERVED_MAX_ITL_RATIO, 0.0)


@dataclass(frozen=True, slots=True)
class ServedPrecision:
    """A format of weights together with a format of the KV cache."""

    #: The name of the weights' format, or OWN.
    name: str
    kv_format: str
    options: EngineOptions
    #: The memory layout; None if these formats can't be served.
    fit: MemoryFit | None
    #: The costs of steps; None if they, or the disk tier's speeds, were not measured on this
    #: machine.
    costs: StepCosts | None
    #: The reason why the formats can't be served; None if they can.
    obstacle: str | None = None
    #: The disk tier; None without one, or if its speeds were not measured.
    disk: DiskShape | None = None

    @property
    def shape(self) -> EngineShape:
        """The shape of an engine that serves these formats; only with a `fit`."""
        assert self.fit is not None, self.obstacle
        return replace(engine_shape(self.options, self.fit), disk=self.disk)


@dataclass(frozen=True, slots=True)
class Plan:
    """The predictions for all configurations, and the best one."""

    #: The model's name; None for the embedded one.
    model: str | None
    #: The options that all configurations have in common, by name.
    given: Mapping[str, Any]
    load: Load
    objectives: Objectives
    precisions: tuple[ServedPrecision, ...]
    #: The predictions, one for each configuration whose steps were measured.
    found: tuple[Expectation, ...]
    #: The best of `found`; None if nothing was measured or served.
    best: Expectation | None
    #: Text that says what limits the best configuration.
    why: str

    @property
    def has_disk(self) -> bool:
        """Whether a disk tier was simulated."""
        return any(each.disk is not None for each in self.precisions)


class Planner:
    """Plans for one model on this machine. The block size "auto" means DEFAULT until `tune` has
    chosen a size."""

    def __init__(self, given: Mapping[str, Any], costs: StepCostFile) -> None:
        """`given` are engine options by name that all plans use. A plan chooses the other options,
        or leaves them at the defaults of `quire serve`."""
        self._given = dict(given)
        self._options = EngineOptions.from_mapping({**served_defaults(EngineOptions), **given})
        if self._options.tensor_parallel_size > 1:
            raise ConfigurationError(
                f"tensor_parallel_size is {self._options.tensor_parallel_size}, but plans are made"
                " for one process only; leave it out"
            )
        if self._options.speculation not in (AUTO, OFF):
            raise ConfigurationError(
                f"speculation is {self._options.speculation!r}, but plans and replays simulate no"
                " drafts; leave it out"
            )
        if self._options.speculative_model is not None:
            raise ConfigurationError(
                f"speculative_model is {self._options.speculative_model!r}, but plans and replays"
                " simulate no drafts; leave it out"
            )
        if self._options.host_cache_size is not None:
            raise ConfigurationError(
                f"host_cache_size is {self._options.host_cache_size}, but plans and replays"
                " simulate the disk tier of a CPU only; leave it out"
            )
        self.tunes = self._options.block_size == AUTO_BLOCK_SIZE
        if self.tunes:
            self._options = replace(self._options, block_size=DEFAULT)
        self._factors: BlockFactors | None = None
        self._kind = choose_model(self._options)
        self._cost_file = costs
        self._digest = folder_digest(self._kind.folder)

    @property
    def block_size(self) -> int:
        """The block size of the plans."""
        return self._options.block_size

    def precisions(self) -> list[ServedPrecision]:
        """All formats to choose from. The first are the given formats, or else the model's own."""
        names: list[str | None] = [self._options.quantization]
        if not {"quantization", "dtype"} & self._given.keys() and not self._kind.config.quantized:
            names += WEIGHT_FORMATS
        formats = [self._options.kv_cache_dtype]
        if "kv_cache_dtype" not in self._given:
            formats.append(INT8)
        return [self._precision(name, kv) for name in names for kv in formats]

    def as_given(self) -> ServedPrecision:
        """The formats that the given options name."""
        return self._precision(self._options.quantization, self._options.kv_cache_dtype)

    def measure(
        self,
        name: str,
        kv_format: str,
        context: int,
        time_limit_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> StepCosts:
        """Load the model, measure its step costs and the speeds of the disk tier, if the options
        ask for one, and store them.

        `context` is the number of tokens of the longest sequence in later plans.
        """
        quantization = self._options.quantization if name == OWN else name
        found = self._precision(quantization, kv_format)
        if found.fit is None:
            raise ConfigurationError(f"{name} can't be measured: {found.obstacle}")
        facts = self._facts(found.options, found.fit)
        costs = measure_costs(found.options, found.fit, context, time_limit_s, clock)
        unbind_threads()  # the engine had bound them to its part of the machine
        self._cost_file.store(facts, costs)
        folder = found.options.cache_folder
        if folder is not None:
            block_bytes = _block_bytes(found.fit)
            self._cost_file.store_disk(
                _disk_facts(folder, block_bytes), measure_disk(folder, block_bytes)
            )
        return costs

    def tune(self, load: Load) -> list[SizeOutcome]:
        """Try all block sizes and choose the best one for later plans.

        Raises ConfigurationError if num_blocks is given, or the step costs were not measured.
        """
        if self._options.num_blocks is not None:
            raise ConfigurationError(
                f"num_blocks is {self._options.num_blocks}, but the bytes of a block depend on its"
                " size, which is to be chosen; give kv_cache_memory instead"
            )
        if self._options.cache_dir is not None:
            raise ConfigurationError(
                f"cache_dir is {self._options.cache_dir!r}, but block sizes are compared without a"
                " disk tier; give block_size, or leave cache_dir out"
            )
        first = self.precisions()[0]
        if first.fit is None or first.costs is None:
            missing = first.obstacle or "step times are not measured on this machine; add --measure"
            raise ConfigurationError(f"no block size can be chosen: {missing}")
        found = try_sizes(
            first.options,
            self._kind,
            first.costs,
            lambda options: engine_shape(options, fit_memory(options, self._kind)),
            load.requests,
        )
        chosen = choose_size(found)
        (self._factors,) = (each.factors for each in found if each.block_size == chosen)
        self._options = replace(self._options, block_size=chosen)
        return found

    def plan(self, load: Load, objectives: Objectives, replicas: int | None = None) -> Plan:
        """Predict the results of each configuration whose steps were measured."""
        precisions = self.precisions()
        found: list[Expectation] = []
        for each in precisions:
            if each.fit is not None and each.costs is not None:
                found += self._expect_all(each, each.fit, each.costs, load, objectives, replicas)
        best = best_of(found)
        why = "" if best is None else bound_of(best, load.requests)
        given = {name: value for name, value in self._given.items() if name != "model"}
        return Plan(
            self._given.get("model"),
            given,
            load,
            objectives,
            tuple(precisions),
            tuple(found),
            best,
            why,
        )

    def _expect_all(
        self,
        precision: ServedPrecision,
        fit: MemoryFit,
        costs: StepCosts,
        load: Load,
        objectives: Objectives,
        replicas: int | None,
    ) -> list[Expectation]:
        base = Candidate(precision.name, precision.kv_format, precision.shape, costs)
        numbers = self._values_to_try("max_num_seqs", TRIED_NUM_SEQS)
        ratios = self._values_to_try("max_itl_ratio", TRIED_RATIOS)
        found: list[Expectation] = []
        for candidate in variants(base, numbers, ratios):
            if any(_is_as(candidate, each) for each in found):
                continue
            found.append(expect(candidate, load.requests, objectives, replicas))
        return found

    def _values_to_try(self, name: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._given[name],) if self._given.get(name) is not None else values

    def _precision(self, name: str | None, kv_format: str) -> ServedPrecision:
        options = replace(self._options, quantization=name, kv_cache_dtype=kv_format)
        shown = OWN if name is None else name
        try:
            fit = fit_memory(options, self._kind)
        except QuireError as error:
            return ServedPrecision(shown, kv_format, options, None, None, str(error))
        if options.cache_folder is None:
            costs = self._costs(options, fit)
            return ServedPrecision(shown, kv_format, options, fit, costs)
        if fit.device_type != "cpu":
            obstacle = "plans and replays simulate a cache_dir on CPUs only; leave it out"
            return ServedPrecision(shown, kv_format, options, None, None, obstacle)
        disk = self._disk(options, options.cache_folder, fit)
        costs = None if disk is None else self._costs(options, fit)
        return ServedPrecision(shown, kv_format, options, fit, costs, disk=disk)

    def _disk(self, options: EngineOptions, folder: Path, fit: MemoryFit) -> DiskShape | None:
        """The disk tier; None if its speeds were not measured."""
        speeds = self._cost_file.find_disk(_disk_facts(folder, _block_bytes(fit)))
        if speeds is None:
            return None
        return DiskShape(
            speeds=speeds,
            num_bytes=options.cache_bytes,
            bytes_a_day=options.cache_bytes_per_day,
        )

    def _costs(self, options: EngineOptions, fit: MemoryFit) -> StepCosts | None:
        """The measured costs; or else costs measured at another block size, adapted to the block
        size that `tune` chose."""
        costs = self._cost_file.find(self._facts(options, fit))
        if costs is not None or self._factors is None:
            return costs
        base = {**self._facts(options, fit), "block_size": self._factors.base}
        costs = self._cost_file.find(base)
        return None if costs is None else costs.with_blocks(self._factors)

    def _facts(self, options: EngineOptions, fit: MemoryFit) -> dict[str, Any]:
        """Everything that affects step times, by name."""
        return {
            "model": self._digest,
            "dtype": fit.dtype,
            "quantization": options.quantization,
            "kv_dtype": fit.kv_format,
            "block_size": fit.block_size,
            "kernels": fit.kernels,
            "attention_backend": options.attention_backend,
            "model_impl": options.model_impl,
            "num_threads": fit.num_threads,
            "device": fit.device,
            "machine": processor(),
            "numa": options.numa,
            "overlap": _overlaps(options, fit),
            "hf_overrides": options.hf_overrides,
            "batch_invariant": options.batch_invariant,
            "enforce_eager": options.enforce_eager,
            "cpu_experts": options.cpu_experts,
            "cpu_layers": options.cpu_layers,
            "version": __version__,
        }


def engine_shape(options: EngineOptions, fit: MemoryFit) -> EngineShape:
    """The shape of an engine with these options and this memory layout."""
    return EngineShape(
        groups=fit.groups,
        num_blocks=fit.num_blocks,
        block_size=fit.block_size,
        max_model_len=fit.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_itl_ratio=options.max_itl_ratio,
        enable_prefix_caching=bool(options.enable_prefix_caching),
        num_lookahead_blocks=options.num_lookahead_blocks,
        scheduling_policy=options.scheduling_policy,
        eviction=options.eviction,
        max_loras=options.num_lora_slots,
        reads_contents_whole=fit.reads_contents_whole,
        overlap=_overlaps(options, fit),
    )


def _block_bytes(fit: MemoryFit) -> int:
    """The bytes of the largest block that the disk tier stores."""
    return max(group.stored_bytes for group in fit.groups)


def _disk_facts(folder: Path, block_bytes: int) -> dict[str, Any]:
    """Everything that affects the speeds of a disk tier, by name."""
    return {
        "cache_dir": str(folder.absolute()),
        "block_bytes": block_bytes,
        "machine": processor(),
        "version": __version__,
    }


def _overlaps(options: EngineOptions, fit: MemoryFit) -> bool:
    if fit.device_type == "cpu":
        return may_overlap_on_cpu(options)
    if options.async_scheduling is None:
        return options.host_part is None
    return options.async_scheduling


def measure_costs(
    options: EngineOptions,
    fit: MemoryFit,
    context: int,
    time_limit_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> StepCosts:
    """Build an engine with these options, and measure it for about time_limit_s."""
    bench = StepBench(options, fit, context, clock)
    return fit_costs(bench.measure(time_limit_s), bench.pacing)


def _is_as(candidate: Candidate, found: Expectation) -> bool:
    """Whether a candidate has the same results as `found`: only max_num_seqs differs, and the runs
    of `found` always had fewer rows than the candidate's max_num_seqs."""
    same = replace(candidate.shape, max_num_seqs=found.candidate.shape.max_num_seqs)
    used = max(found.served.most_rows, found.saturated.most_rows)
    return same == found.candidate.shape and used < candidate.shape.max_num_seqs
