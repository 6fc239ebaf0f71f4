"""Names to backends."""

import subprocess
import sys

import pytest
from tests.registering import restored

from quire.attention.backends import BACKENDS, BackendEntry, select
from quire.attention.cpu_paged import CpuPagedAttention
from quire.attention.torch_paged import TorchPagedAttention
from quire.core.sampling_params import SamplingParams
from quire.errors import ConfigurationError
from quire.kernels.cpu.library import NativeKernels, NativeLibrary
from quire.kernels.triton import support
from quire.offline.llm import LLM


@pytest.fixture(scope="module")
def one_thread(native_library: NativeLibrary) -> NativeKernels:
    return NativeKernels(native_library, num_threads=1)


@pytest.mark.parametrize("name", ["native", "triton", "torch"])
def test_each_name_gives_a_new_backend(name, one_thread):
    if name == "triton":
        pytest.importorskip("triton")
    assert name in BACKENDS
    assert select("cpu", name, one_thread) is not select("cpu", name, one_thread)


def test_native_kernels_serve_where_they_are_and_torch_elsewhere(one_thread):
    assert isinstance(select("cpu"), TorchPagedAttention)
    assert isinstance(select("cpu", kernels=one_thread), CpuPagedAttention)


def test_native_attention_without_kernels_is_refused():
    with pytest.raises(ConfigurationError, match="'native' needs the native kernels"):
        select("cpu", "native")


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ConfigurationError, match=r"'flash', but must be one of .*torch"):
        select("cpu", "flash")


def test_an_unknown_name_is_refused_on_an_unknown_device_too():
    with pytest.raises(ConfigurationError, match="attention backend is 'flash'"):
        select("cuda:1", "flash")


def test_a_device_without_a_backend_is_refused():
    with pytest.raises(ConfigurationError, match="no attention backend serves device 'mps:1'"):
        select("mps:1")


def test_a_gpu_is_served_by_triton(monkeypatch):
    """Built on a machine without one: it is bound to memory later."""
    module = pytest.importorskip("quire.attention.triton_paged")
    monkeypatch.setattr(support, "why_not", lambda device_type: None)
    assert isinstance(select("cuda:1"), module.TritonPagedAttention)


def test_triton_that_cannot_run_is_refused_with_the_reason():
    pytest.importorskip("triton")
    with pytest.raises(ConfigurationError, match="'triton' can't run: TRITON_INTERPRET is set"):
        select("cuda:0")


def test_batch_invariance_is_obeyed_or_refused():
    pytest.importorskip("triton")
    assert select("cpu", "triton", batch_invariant=True).is_batch_invariant
    assert not select("cpu", "triton").is_batch_invariant
    with pytest.raises(ConfigurationError, match="'torch' can't obey batch_invariant=True"):
        select("cpu", "torch", batch_invariant=True)
    with pytest.raises(ConfigurationError, match="'flashinfer' can't obey batch_invariant=True"):
        select("cuda", "flashinfer", batch_invariant=True)


def test_a_backend_that_does_not_serve_the_device_is_refused():
    with pytest.raises(ConfigurationError, match="'torch' does not serve device 'cuda:1'"):
        select("cuda:1", "torch")


def test_names_and_descriptions_come_without_torch():
    code = (
        "import sys; from quire.attention.backends import BACKENDS;"
        "assert all(entry.description for _, entry in BACKENDS.items());"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_backend_has_a_line_about_it():
    texts = [entry.description for _, entry in BACKENDS.items()]
    assert all(text and "\n" not in text for text in texts)


class Wrapped(TorchPagedAttention):
    """A backend from outside of the package; counts what it is asked for."""

    num_runs = 0

    def run(self, layer, inputs):
        Wrapped.num_runs += 1
        return super().run(layer, inputs)


@pytest.fixture
def wrapped():
    with restored(BACKENDS):
        entry = BackendEntry(f"{__name__}:Wrapped", "torch, counted", frozenset({"cpu"}))
        BACKENDS.register("wrapped", entry)
        yield


def test_a_backend_from_outside_serves_a_model(wrapped):
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    answers = []
    for name in ("wrapped", "torch"):
        Wrapped.num_runs = 0
        llm = LLM(attention_backend=name, kernels="torch", dtype="float32")
        (output,) = llm.generate("import os", greedy, use_tqdm=False)
        assert (Wrapped.num_runs > 0) == (name == "wrapped")
        answers.append(output.outputs[0].token_ids)
    assert answers[0] == answers[1]


def test_a_backend_that_promises_nothing_refuses_batch_invariance(wrapped):
    with pytest.raises(ConfigurationError, match="can't obey batch_invariant=True"):
        select("cpu", "wrapped", batch_invariant=True)
