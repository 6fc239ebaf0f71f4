"""A hybrid on Triton kernels in the interpreter: its states in steps of static sizes, with padding.

A step takes half a second here, hence few tokens. What else may happen to memory is tried by
`test_hybrid_runner.py`, with the native kernels.
"""

from pathlib import Path

import pytest
import torch
from tests.runtime.hand_core import HandCore, Held
from tests.runtime.hybrid_family import registered, save_hybrid

pytest.importorskip("triton")

from quire.assembly.device_setup import choose_setup
from quire.core.sampling_params import DecodingParams
from quire.kernels.transfers import DeviceLink
from quire.layers.operator_module import use_operators
from quire.models.checkpoints.loader import load_model
from quire.models.registry import load_config
from quire.options.engine_options import EngineOptions
from quire.recurrence.backends import select
from quire.recurrence.triton_states import TritonStates
from quire.runtime.batch import RowBatch
from quire.runtime.device_rows import DeviceRows
from quire.runtime.graphs import RepeatedCalls
from quire.runtime.kv_cache import KVCache
from quire.runtime.model_runner import ModelRunner
from quire.runtime.page_layout import plan_layout
from quire.sampling.device.sampler import DeviceSampler
from quire.sampling.host.sampler import SamplingRows

CPU = torch.device("cpu")
NUM_ROWS, NUM_BLOCKS, STEP_TOKENS = 4, 40, 32
LAYERS = ("delta", "conv", "full")


def make_core(folder: Path, static_sizes: tuple[int, ...]) -> HandCore:
    """static_sizes: of captured steps; none: all steps are launched one by one."""
    with registered():
        config = load_config(folder)
        given = {"model": str(folder), "dtype": "float32", "kernels": "triton"}
        options = EngineOptions.from_mapping(given | {"batch_invariant": True})
        setup = choose_setup(options, config, CPU, 1)
        where = {"dtype": torch.float32, "device": CPU, "max_model_len": 64}
        model = load_model(folder, config, methods=setup.methods, **where)
    use_operators(model, setup.operators)
    model.use_states(select("cpu", setup.kernels, is_triton=setup.is_triton))
    assert isinstance(model.recurrence, TritonStates)
    backend = setup.new_backend()
    layout = plan_layout(
        model.attention_specs,
        type(backend),
        8,
        setup.kv_format,
        recurrent_specs=model.recurrent_specs,
        typical_tokens=64,
    )
    host = RowBatch(
        num_rows=NUM_ROWS,
        max_model_len=64,
        max_num_tokens=STEP_TOKENS,
        num_groups=len(layout.groups) - len(layout.state_sizes),
        block_size=8,
        state_sizes=layout.state_sizes,
    )
    link = DeviceLink(CPU)
    rows = DeviceRows(host, link, static_sizes)
    sampler = DeviceSampler(SamplingRows(NUM_ROWS, model.vocab_size), rows.history, link)
    cache = KVCache(layout, NUM_BLOCKS, CPU)
    capture = RepeatedCalls() if static_sizes else None
    runner = ModelRunner(model, backend, cache, rows, sampler, None, capture)
    return HandCore(runner, layout.groups, NUM_BLOCKS, 8)


def admit(core: HandCore, length: int) -> Held:
    tokens = [(7 * length + 5 * at) % 499 for at in range(length)]
    return core.admit(tokens, DecodingParams(max_tokens=9, temperature=0.9, seed=3, logprobs=0))


def test_static_steps_chunks_and_company_change_no_bit(tmp_path: Path) -> None:
    folder = save_hybrid(tmp_path, layer_types=LAYERS)
    core = make_core(folder, static_sizes=())
    alone = admit(core, 14)
    for _ in range(4):
        core.step()
    core = make_core(folder, static_sizes=(4,))
    held, others = admit(core, 14), [admit(core, 3), admit(core, 9)]
    core.step({held.row: 6})
    for _ in range(4):
        core.step()
    assert core.runner.graphs.sizes == (4,)
    assert (held.sampled, held.logprobs) == (alone.sampled, alone.logprobs)
    assert all(len(other.sampled) == 5 for other in others)
