"""Calibration runs through an engine's own loop, overlapped or not."""

from dataclasses import replace

import pytest

from quire.assembly.reports.memory_fit import choose_model, fit_memory
from quire.options.engine_options import EngineOptions
from quire.planning import measuring
from quire.planning.calibration_runs import CalibrationRun
from quire.planning.step_bench import StepBench


@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlapped"])
def test_every_step_is_measured(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "LEAST_RUNS", 4)
    options = EngineOptions.from_mapping(
        {"kv_cache_memory": "32MiB", "skip_tokenizer_init": True, "max_num_seqs": 4}
    )
    options = replace(options, async_scheduling=overlap)
    bench = StepBench(options, fit_memory(options, choose_model(options)), 300)
    bench_of_runs = measuring._CalibrationBench(bench._engine, bench._watched, bench._clock)
    run = CalibrationRun((40, 90), (((0, 50), (30, 20)), ((64, 5),)), 2048)
    found = [bench_of_runs.measure(7, run) for _ in range(2)]
    works = [[work for work, _ in steps] for steps in found]
    assert works[0] == works[1]
    loads = [work.load for work in works[0]]
    assert sum(load.num_chunk_tokens for load in loads) >= 75
    assert sum(work.num_admitted_tokens for work in works[0]) == 50 + 50 + 69, "without answers"
    assert [load.num_decodes for load in loads[:3]] == [2, 2, 2], "those that warm up are not there"
    assert sum(work.num_ended for work in works[0]) == 5
    taken = [seconds for _, seconds in found[0] if seconds is not None]
    assert min(taken) > 0
    assert len(taken) > len(loads) / 2  # not known where most of it passed between two calls
    bench_of_runs.end()
    assert len({step.run for step in bench.measure(0.0)}) == 4
