"""Traces of steps: which steps stand in them, and what wrong settings get."""

import gzip
import json

import pytest
import torch

from quire.errors import InvalidRequestError
from quire.runtime.torch_profile import ProfilerSettings, TorchProfile


def recorded(tmp_path, num_steps, **settings):
    own = ProfilerSettings(torch_profiler_dir=tmp_path / "new", **settings)
    profile = TorchProfile(own, "mine")
    profile.start()
    for _ in range(num_steps):
        profile.on_step(None)
        torch.ones(3).add_(1)
    path = profile.stop()
    assert path.parent == tmp_path / "new" and path.name.startswith("mine.")
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    names = {event.get("name") for event in json.loads(text)["traceEvents"]}
    assert "aten::add_" in names
    return sorted(name for name in names if str(name).startswith("step "))


def test_all_steps_are_recorded_or_those_that_are_asked_for(tmp_path):
    assert recorded(tmp_path, 3, torch_profiler_with_stack=False) == ["step 0", "step 1", "step 2"]
    some = {"delay_iterations": 2, "max_iterations": 1, "torch_profiler_use_gzip": False}
    assert recorded(tmp_path, 5, **some) == ["step 2"]


def test_invalid_profiler_settings_are_refused(tmp_path):
    folder = str(tmp_path)
    for wrong, message in (
        ({}, "ProfilerSettings needs torch_profiler_dir"),
        ({"torch_profiler_dir": ""}, "torch_profiler_dir is '', but must be a folder"),
        ({"torch_profiler_dir": folder, "profiler": "cuda"}, "profiler is 'cuda', but must be"),
        ({"torch_profiler_dir": folder, "max_iterations": -1}, "max_iterations is -1"),
        ({"torch_profiler_dir": folder, "torch_profiler_with_stack": 1}, "must be True or False"),
        ({"torch_profiler_dir": folder, "warmup_iterations": 3}, "delay_iterations skips steps"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            ProfilerSettings(**wrong)
    late = TorchProfile(ProfilerSettings(torch_profiler_dir=folder, delay_iterations=9))
    late.start()
    late.on_step(None)
    with pytest.raises(InvalidRequestError, match="1 steps have run, and delay_iterations is 9"):
        late.stop()
