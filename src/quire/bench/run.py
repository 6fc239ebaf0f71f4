"""Runs a throughput benchmark: builds the engine and its baselines, and measures all rounds.

Called by `throughput` with the options of the command line.
"""

import datetime
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from quire.assembly.build import build_engine
from quire.bench.compare import WidthChoice, alternate, choose_width, ratio
from quire.bench.contenders import Contender, ContinuousBatches, StaticBatches, check_lengths
from quire.bench.hf_generate import HfModel, HfStaticBatches
from quire.bench.machine import processor
from quire.bench.report import QUIRE, Results
from quire.bench.trace_summary import summarize_trace
from quire.bench.workload import BenchRequest, WorkloadSpec, make_requests, request_lengths
from quire.engine.engine import Engine
from quire.hub.model_folder import resolve_model_folder
from quire.observability.step_trace import StepTrace
from quire.options.engine_options import EngineOptions
from quire.version import __version__

_WARM_UP_PROMPTS, _WARM_UP_TOKENS = 8, 8


@dataclass(frozen=True, slots=True)
class BenchSpec:
    """The specification of a benchmark run."""

    workload: WorkloadSpec
    #: Options of the engine, by EngineOptions' names.
    options: Mapping[str, Any] = field(default_factory=dict)
    #: The baselines to measure: "static", "hf" or both.
    baselines: tuple[str, ...] = ()
    #: The batch widths at which each baseline is tried.
    widths: tuple[int, ...] = (1, 4, 16, 48)
    #: Number of requests, taken from the start of the workload, with which widths are tried.
    choosing_prompts: int = 48
    #: The number of rounds.
    reps: int = 3
    #: The file for the step trace of quire's rounds; None writes no trace.
    trace: Path | None = None


Maker = Callable[[int], Contender | None]


def run(spec: BenchSpec) -> Results:
    """Run the benchmark. Raises ConfigurationError if it can't be run as specified."""
    engine = build_engine(spec.options)
    limits = engine.limits
    # Round 0 is used to warm up and to choose widths.
    rounds = [make_requests(spec.workload, limits.vocab_size, k) for k in range(spec.reps + 1)]
    first = rounds.pop(0)
    check_lengths(first, limits.max_model_len)
    _warm_up(engine, first)
    setting = _setting(spec, engine)
    contenders: dict[str, Contender] = {}
    widths: dict[str, WidthChoice] = {}
    for name in spec.baselines:
        make = _static(engine, first) if name == "static" else _hf(spec, setting)
        choice = choose_width(name, make, spec.widths, first[: spec.choosing_prompts])
        chosen = make(choice.best)
        assert chosen is not None
        contenders[name], widths[name] = chosen, choice
    with ExitStack() as stack:
        trace = stack.enter_context(StepTrace(spec.trace)) if spec.trace is not None else None
        found = alternate({QUIRE: ContinuousBatches(engine, trace), **contenders}, rounds)
    return Results(
        setting=setting,
        rounds=found,
        widths=widths,
        ratios={name: ratio(found[QUIRE], found[name]) for name in contenders},
        trace=summarize_trace(spec.trace) if spec.trace is not None else {},
    )


def _warm_up(engine: Engine, requests: Sequence[BenchRequest]) -> None:
    few = requests[:_WARM_UP_PROMPTS]
    short = [
        replace(request, output_len=min(_WARM_UP_TOKENS, request.output_len)) for request in few
    ]
    ContinuousBatches(engine).run(short)


def _static(engine: Engine, requests: Sequence[BenchRequest]) -> Maker:
    def make(width: int) -> Contender | None:
        contender = StaticBatches(engine, width)
        return contender if contender.fits(requests) else None

    return make


def _hf(spec: BenchSpec, setting: dict[str, Any]) -> Maker:
    """Load the model in transformers. Returns a function that makes its contender of a width."""
    options = EngineOptions.from_mapping(spec.options)
    folder = resolve_model_folder(options.model, options.revision)
    model = HfModel(folder, getattr(torch, setting["dtype"]))
    setting["versions"]["transformers"] = model.version
    return lambda width: HfStaticBatches(model, width)


def _setting(spec: BenchSpec, engine: Engine) -> dict[str, Any]:
    """Describes the workload, engine and machine, with vLLM's key names where vLLM reports the
    value."""
    options = EngineOptions.from_mapping(spec.options)
    scheduler = engine.scheduler.config
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S"),
        "backend": QUIRE,
        "model_id": options.model or "embedded model",
        "num_prompts": len(request_lengths(spec.workload)),
        "request_rate": "inf",
        "dtype": engine.facts["dtype"],
        "num_threads": torch.get_num_threads(),
        "processor": processor(),
        "versions": {"quire": __version__, "torch": str(torch.__version__)},
        "workload": asdict(spec.workload),
        "engine": {
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "max_model_len": engine.limits.max_model_len,
            "block_size": engine.scheduler.memory.block_size,
            "num_blocks": engine.scheduler.memory.pool.num_blocks,
            "enable_prefix_caching": options.enable_prefix_caching,
        },
    }
