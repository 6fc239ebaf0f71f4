"""Experts that the CPU computes for another device: the same tokens, one crossing each way.

Without a GPU, torch's or Triton's kernels on the CPU stand in for the device.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.test_mixtures import GREEDY, PROMPTS, make_llm, save
from tests.models.checkpoints.quantized.writers import mxfp4_blocks, set_settings

from quire.assembly import host_part
from quire.core.sampling_params import SamplingParams
from quire.errors import ConfigurationError, InsufficientMemoryError
from quire.kernels.routing import Routing
from quire.kernels.transfers import DeviceLink
from quire.layers.experts import Experts
from quire.offline.llm import LLM
from quire.options.engine_options import EngineOptions

pytestmark = pytest.mark.usefixtures("native_library")


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("gpt-oss", tmp_path_factory.mktemp("gpt-oss"))


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mxfp4(tmp_path_factory.mktemp("mxfp4"))


def save_mxfp4(folder: Path) -> Path:
    """A model of two layers whose experts are MXFP4, as in published checkpoints."""
    save("gpt-oss", folder, num_hidden_layers=2)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales = mxfp4_blocks(tensors.pop(name).float().transpose(1, 2))
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
    save_file(tensors, folder / "model.safetensors")
    set_settings(folder, {"quant_method": "mxfp4"})
    return folder


def tokens(llm: LLM, prompts: list[Any] = PROMPTS, params: SamplingParams = GREEDY) -> list[Any]:
    return [each.outputs[0].token_ids for each in llm.generate(prompts, params, use_tqdm=False)]


def layers_of(llm: LLM) -> list[Experts]:
    model = llm.engine._runner._forward._model
    return [module for module in model.modules() if isinstance(module, Experts)]


def test_tokens_are_those_of_the_whole_model_on_either_side(gpt_oss: Path) -> None:
    expected = tokens(make_llm(gpt_oss, dtype="float32", kernels="torch"))
    assert tokens(make_llm(gpt_oss, dtype="float32")) == expected
    for wanted, on_host in ((1, [False, False, True]), ("all", [True] * 3)):
        llm = make_llm(gpt_oss, dtype="float32", kernels="torch", cpu_experts=wanted)
        assert [experts.is_on_host for experts in layers_of(llm)] == on_host
        assert tokens(llm) == expected
        assert llm.engine.facts["cpu_experts"] == sum(on_host)
        assert 0 < llm.engine.facts["host_weight_bytes"] < llm.engine.facts["weight_bytes"] * 4


def test_a_step_crosses_once_each_way_per_layer(
    gpt_oss: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crossings: list[str] = []
    for name in ("fetch", "send"):
        inner = getattr(DeviceLink, name)

        def noted(link: DeviceLink, *args: Any, name: str = name, inner: Any = inner) -> Any:
            crossings.append(name)
            return inner(link, *args)

        monkeypatch.setattr(DeviceLink, name, noted)
    llm = make_llm(gpt_oss, dtype="float32", kernels="torch", cpu_experts=2)
    crossings.clear()
    tokens(llm, PROMPTS[:1], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    assert crossings == ["fetch", "send"] * 2 * 3


def test_codes_stay_codes_on_the_host(mxfp4: Path) -> None:
    whole, split = (
        make_llm(mxfp4, dtype="float32", kernels="torch", num_blocks=40, **more)
        for more in ({}, {"cpu_experts": "all", "max_num_batched_tokens": 8, "max_num_seqs": 4})
    )
    linear = layers_of(split)[0].linears.down[0]
    assert linear.method.num_bytes(64, 96, torch.float32) < 64 * 96
    assert tokens(split) == tokens(whole)


@torch.no_grad()
def test_rows_have_the_same_bits_in_any_company(mxfp4: Path) -> None:
    llm = make_llm(mxfp4, dtype="bfloat16", kernels="torch", cpu_experts=1)
    experts = layers_of(llm)[-1]
    num_inputs, num_experts = experts.linears.gate_up[0].input_size, len(experts)
    x = torch.randn(21, num_inputs, dtype=torch.bfloat16)
    ids = torch.rand(21, num_experts).topk(2).indices
    weights = torch.rand(21, 2)
    together = experts(x, Routing(ids, weights))
    for row in range(21):
        rows = slice(row, row + 1)
        assert torch.equal(experts(x[rows], Routing(ids[rows], weights[rows])), together[rows])


def test_triton_kernels_launch_steps_one_by_one(mxfp4: Path) -> None:
    pytest.importorskip("triton")
    torch.set_num_threads(1)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    options = {"dtype": "float32", "num_blocks": 20, "max_num_seqs": 2}
    llm = make_llm(mxfp4, kernels="triton", cpu_experts=1, **options)
    assert type(llm.engine._runner._forward).__name__ == "ModuleForward"
    assert [experts.is_on_host for experts in layers_of(llm)] == [False, True]
    expected = tokens(make_llm(mxfp4, kernels="torch", **options), PROMPTS[:1], params)
    assert tokens(llm, PROMPTS[:1], params) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpu_experts": 4}, "cpu_experts is 4, but 3 layers of the model have experts"),
        ({"cpu_experts": "auto"}, "'auto', but the device is 'cpu'"),
        ({"cpu_experts": 1, "kernels": "auto"}, "the CPU computes the whole model"),
        ({"cpu_experts": 1, "dtype": "float16"}, "set dtype='bfloat16'"),
        ({"cpu_experts": 1, "tensor_parallel_size": 2}, "tensor_parallel_size is 2"),
        ({"cpu_experts": 0}, "cpu_experts is 0, but must be a number of layers"),
        ({"cpu_experts": "some"}, "'all' or 'auto'"),
        ({"cpu_experts": 1, "model": None}, "the model has no experts"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    options: dict[str, Any], message: str, gpt_oss: Path
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LLM(**{"model": str(gpt_oss), "kernels": "torch", "skip_tokenizer_init": True} | options)


def test_experts_need_the_machines_memory(gpt_oss: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_part, "available_memory_bytes", lambda: 1000)
    with pytest.raises(InsufficientMemoryError, match="the machine has 1000 B available"):
        make_llm(gpt_oss, kernels="torch", cpu_experts=1, dtype="float32")


def test_auto_takes_the_fewest_layers_that_make_room() -> None:
    def chosen(room_bytes: int) -> int:
        return host_part.fewest_layers(100, [30, 20, 10], room_bytes)

    assert [chosen(room) for room in (100, 99, 90, 89, 70, 69, 40, 0)] == [0, 1, 1, 2, 2, 3, 3, 3]


def test_auto_leaves_room_for_the_cache_and_a_step() -> None:
    class Card:
        total_bytes = 8 << 30

        def free_bytes(self) -> int:
            return 7 << 30

    class Config:
        vocab_size = 1 << 17

    def room(**options: Any) -> int:
        found: int = host_part._room_bytes(EngineOptions(**options), Config(), Card())  # type: ignore[arg-type]
        return found

    options = {"max_num_seqs": 64, "gpu_memory_utilization": 1.0}
    logits, step = 3 * 4 * 64 << 17, 1 << 29
    assert room(**options) == (7 << 30) - (2 << 30) - logits - step
    given = {"max_num_seqs": 64, "kv_cache_memory": 1 << 30}
    assert room(**given) == int(0.9 * (8 << 30)) - (1 << 30) - (1 << 30) - logits - step
