"""The dtype that "auto" chooses on the CPU, with and without a processor that multiplies
bfloat16."""

import os
from collections.abc import Iterator

import pytest
import torch

from quire.assembly import device_setup
from quire.assembly.device_setup import choose_device, choose_setup
from quire.errors import ConfigurationError
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.models.registry import load_config
from quire.options.engine_options import EngineOptions


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """A setup sets the number of torch's threads."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def chosen_dtype(
    monkeypatch: pytest.MonkeyPatch, has_bfloat16: bool, kernels: str, dtype: str = "auto"
) -> torch.dtype:
    """The dtype for the embedded model, whose weights are in bfloat16."""
    monkeypatch.setattr(device_setup, "_has_bfloat16", lambda: has_bfloat16)
    config = load_config(EMBEDDED_MODEL)
    assert config.dtype is torch.bfloat16
    given = {"model": str(EMBEDDED_MODEL), "kernels": kernels, "dtype": dtype}
    return choose_setup(EngineOptions.from_mapping(given), config, torch.device("cpu"), 1).dtype


@pytest.mark.parametrize("has_bfloat16", [False, True])
def test_torch_computes_bfloat16_checkpoints_in_what_the_processor_multiplies(
    has_bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = torch.bfloat16 if has_bfloat16 else torch.float32
    assert chosen_dtype(monkeypatch, has_bfloat16, "torch") is expected


@pytest.mark.parametrize("has_bfloat16", [False, True])
def test_so_does_the_interpreter_of_triton(
    has_bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the interpreter is off")
    expected = torch.bfloat16 if has_bfloat16 else torch.float32
    assert chosen_dtype(monkeypatch, has_bfloat16, "triton") is expected


@pytest.mark.parametrize("has_bfloat16", [False, True])
@pytest.mark.parametrize("kernels", ["auto", "portable"])
@pytest.mark.usefixtures("native_library")
def test_native_kernels_keep_bfloat16_on_every_processor(
    kernels: str, has_bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen_dtype(monkeypatch, has_bfloat16, kernels) is torch.bfloat16


def test_a_dtype_that_is_asked_for_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen_dtype(monkeypatch, False, "torch", "bfloat16") is torch.bfloat16


def test_a_gpu_of_rocm_is_refused_by_name_and_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    for name in ("cuda", "cuda:0"):
        with pytest.raises(ConfigurationError, match="computes on AMD GPUs"):
            choose_device(name)
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
