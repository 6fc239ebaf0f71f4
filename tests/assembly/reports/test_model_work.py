"""What a step needs at least, from modules, attention and states of known sizes."""

import pytest
import torch
from tests.runtime.hybrid_family import ATTENTION, RECURRENT, WINDOW
from torch import nn

from quire.assembly.build import build_engine
from quire.assembly.reports.model_work import OPERATIONS_PER_STATE_ELEMENT, model_work
from quire.attention.backends import select
from quire.attention.kv_format import KVFormat
from quire.engine.step_work import AttentionWork, ExpertWork
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.experts import MoESpec, RouterSpec, SparseMLP
from quire.layers.linear import Linear, LinearKind
from quire.runtime.page_layout import plan_layout

CPU = torch.device("cpu")
BLOCK_SIZE = 16


class Model(nn.Module):
    """attention: names of layers; states: likewise."""

    num_host_layers = 0

    def __init__(self, *attention: str, states: tuple[str, ...] = (), **modules: nn.Module):
        super().__init__()
        self.attention_specs = tuple(ATTENTION[name] for name in attention)
        self.recurrent_specs = tuple(RECURRENT[name] for name in states)
        for name, module in modules.items():
            self.add_module(name, module)


def work_of(model: Model, dtype: torch.dtype = torch.float32):
    layout = plan_layout(
        model.attention_specs,
        type(select("cpu")),
        BLOCK_SIZE,
        KVFormat.plain(dtype),
        recurrent_specs=model.recurrent_specs,
    )
    return model_work(model, dtype, layout)  # type: ignore[arg-type]


def linear(num_inputs: int, num_outputs: int) -> Linear:
    kind, dtype = LinearKind.REPLICATED, torch.float32
    return Linear(num_inputs, (num_outputs,), kind, bias=True, dtype=dtype, device=CPU)


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_and_the_embedding_are_no_layers(tied: bool) -> None:
    table = VocabEmbedding(50, 8, dtype=torch.float32, device=CPU)
    model = Model("full", table=table, layer=linear(8, 20), head=LMHead(table, tied=tied))
    found = work_of(model)
    kv_bytes = 2 * 32 * 4
    assert found.layer_bytes == 4 * (8 * 20 + 20)
    assert found.token_operations == 2 * 8 * 20
    assert found.head_bytes == 4 * 50 * 8 and found.head_operations == 2 * 50 * 8
    assert found.token_bytes == 4 * 8 + kv_bytes
    assert found.attention == (AttentionWork(None, kv_bytes, 2 * 4 * (32 + 32)),)


def test_windows_are_apart_and_latent_vectors_are_stored_once() -> None:
    found = {each.window: each for each in work_of(Model("full", "window", "latent")).attention}
    assert found[WINDOW] == AttentionWork(WINDOW, 2 * 2 * 8 * 4, 2 * 4 * (8 + 8))
    assert found[None] == AttentionWork(None, 4 * (2 * 32 + 32), 2 * 4 * (32 + 32 + 32 + 24))


def test_states_are_read_and_written_once_for_each_sequence() -> None:
    found = work_of(Model("full", states=("delta", "conv")))
    elements = 2 * 16 * 32 + 3 * 64  # a unit of a convolution is 64 channels
    assert found.state_bytes == 2 * 4 * elements
    assert found.token_operations == OPERATIONS_PER_STATE_ELEMENT * elements


def test_expert_work_counts_the_share_of_experts_of_a_token() -> None:
    spec = MoESpec(router=RouterSpec(8, 2), intermediate_size=6)
    block = SparseMLP(4, spec, dtype=torch.float32, device=CPU)
    found = work_of(Model("full", block=block))
    expert = 3 * 4 * 6
    assert found.experts == (ExpertWork(4 * 8 * expert, 2 / 8),)
    assert found.layer_bytes == 4 * 8 * 4  # the router
    assert found.token_operations == 2 * (8 * 4 + 2 * expert)


def test_an_engine_knows_its_work_as_it_is_stored() -> None:
    given = {"model": str(EMBEDDED_MODEL), "max_model_len": 64, "skip_tokenizer_init": True}
    dense, int8 = (
        build_engine(given | {"quantization": name}).utilization for name in (None, "int8")
    )
    assert dense.work is not None and int8.work is not None
    assert dense.work.layer_bytes > 1.7 * int8.work.layer_bytes
    assert dense.work.token_operations == int8.work.token_operations > 0
    assert dense.rates is None  # nothing is measured where max_itl_ratio is 0
