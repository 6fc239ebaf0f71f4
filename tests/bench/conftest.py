import pytest
import torch

from quire.assembly.build import build_engine
from quire.bench.workload import LengthSpec, WorkloadSpec
from quire.engine.engine import Engine

# Without drafts, a step gives a sequence one token.
OPTIONS = {
    "dtype": "float32",
    "num_blocks": 95,
    "max_num_seqs": 6,
    "max_model_len": 256,
    "speculation": "off",
}


@pytest.fixture(scope="package", autouse=True)
def _one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def engine() -> Engine:
    """The embedded model in a small pool; in float32, where near-ties are rare."""
    return build_engine(OPTIONS)


@pytest.fixture
def small_load() -> WorkloadSpec:
    """Seven short requests."""
    return WorkloadSpec(num_prompts=7, input=LengthSpec(20, 4, 60), output=LengthSpec(6, 1, 12))
