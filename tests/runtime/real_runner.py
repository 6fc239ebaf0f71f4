"""A hand-made core over a model in a folder, computed as its options choose."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.runtime.hand_core import HandCore

from quire.assembly.device_setup import DeviceSetup, choose_setup
from quire.kernels.cpu.sampling import NativeSampling
from quire.models.checkpoints.loader import load_model
from quire.models.interface import TextModel
from quire.models.registry import load_config
from quire.options.engine_options import EngineOptions
from quire.runtime.batch import RowBatch
from quire.runtime.kv_cache import KVCache
from quire.runtime.model_runner import ModelRunner
from quire.runtime.page_layout import plan_layout
from quire.sampling.host.sampler import HostStepSampler, Sampler, SamplingRows

CPU = torch.device("cpu")
NUM_ROWS, NUM_BLOCKS, MODEL_LEN, STEP_TOKENS = 10, 240, 160, 160


@dataclass
class Made:
    """A model and what computes it; `make` gives a core with an empty runner."""

    model: TextModel
    setup: DeviceSetup

    def make(self, block_size: int = 8) -> HandCore:
        model, backend = self.model, self.setup.new_backend()
        layout = plan_layout(
            model.attention_specs,
            type(backend),
            block_size,
            self.setup.kv_format,
            typical_tokens=64,
        )
        rows = RowBatch(
            num_rows=NUM_ROWS,
            max_model_len=MODEL_LEN,
            max_num_tokens=STEP_TOKENS,
            num_groups=len(layout.groups),
            block_size=block_size,
        )
        kernels = self.setup.kernels
        native = None if kernels is None else NativeSampling(kernels)
        sampler = Sampler(SamplingRows(NUM_ROWS, model.vocab_size), native)
        runner = ModelRunner(
            model,
            backend,
            KVCache(layout, NUM_BLOCKS, CPU),
            rows,
            HostStepSampler(sampler, rows.history),
            kernels,
        )
        return HandCore(runner, layout.groups, NUM_BLOCKS, block_size)


def load(folder: Path, **options: object) -> Made:
    """Without the option `kernels`, native ones: with them no bit depends on the rest of a step."""
    is_of_transformers = options.get("model_impl") == "transformers"
    config = load_config(folder, from_transformers=is_of_transformers or None)
    asked = {"model": str(folder), "dtype": "float32"} | options
    setup = choose_setup(EngineOptions.from_mapping(asked), config, CPU, 1)
    if setup.kernels is None and "kernels" not in options:
        pytest.skip("torch's products have other bits in other steps")
    where = {"dtype": torch.float32, "device": CPU, "max_model_len": MODEL_LEN}
    return Made(load_model(folder, config, methods=setup.methods, **where), setup)
