"""Whether there is a GPU, by torch's build and the driver; torch is asked whether that is right."""

import ctypes

import pytest
import torch

from quire.observability import gpu_presence
from quire.observability.gpu_presence import lacks_gpu, torch_version


def test_torch_agrees() -> None:
    if lacks_gpu():
        assert not torch.cuda.is_available()
    assert torch_version() == str(torch.__version__)


def _no_driver(name: str) -> None:
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize(
    ("built", "has_driver", "lacks"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", True, True),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n", False, False),
        ("cuda: Optional[str] = '12.9'\nhip: Optional[str] = None\n", True, False),
        ("cuda: Optional[str] = '12.9'\nhip: Optional[str] = None\n", False, True),
    ],
)
def test_the_build_and_the_driver_decide(
    built: str, has_driver: bool, lacks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_presence, "_build_text", lambda: built)
    monkeypatch.setattr(ctypes, "CDLL", str if has_driver else _no_driver)
    assert lacks_gpu() is lacks
