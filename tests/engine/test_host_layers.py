"""Layers that the CPU computes for another device, with their own part of every KV block.

Without a GPU, torch's or Triton's kernels on the CPU stand in for the device.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.test_mixtures import GREEDY, PROMPTS, make_llm, save

from quire.assembly import host_part
from quire.assembly.device_setup import choose_setup
from quire.assembly.host_part import place_weights
from quire.attention.cpu_paged import CpuPagedAttention
from quire.attention.interface import AttentionSpec
from quire.attention.kv_format import KVFormat
from quire.attention.torch_paged import TorchPagedAttention
from quire.core.sampling_params import SamplingParams
from quire.core.scheduling.growth_forecast import GrowthForecast
from quire.core.step import BlockCopy
from quire.errors import ConfigurationError, InsufficientMemoryError, UnsupportedModelError
from quire.kernels.transfers import DeviceLink
from quire.models.checkpoints.loader import weight_bytes
from quire.models.registry import load_config
from quire.offline.llm import LLM
from quire.options.engine_options import EngineOptions
from quire.runtime.kv_cache import KVCache
from quire.runtime.page_layout import HostLayers, plan_layout

pytestmark = pytest.mark.usefixtures("native_library")

FAMILIES = ["gpt-oss", "llama", "gemma3", "qwen3-moe", "deepseek_v3"]


def tokens(llm: LLM, prompts: list[Any] = PROMPTS, params: SamplingParams = GREEDY) -> list[Any]:
    found = llm.generate(prompts, params, use_tqdm=False)
    return [[each.token_ids for each in output.outputs] for output in found]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_whole_model(family: str, tmp_path: Path) -> None:
    folder = save(family, tmp_path)
    options = {"dtype": "float32", "kernels": "torch"}
    expected = tokens(make_llm(folder, **options))
    llm = make_llm(folder, cpu_layers=1, **options)
    assert tokens(llm) == expected
    assert llm.engine.facts["cpu_layers"] == 1 and llm.engine.facts["host_weight_bytes"] > 0


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, with and without windows, so that blocks of several groups are split."""
    return save("gpt-oss", tmp_path_factory.mktemp("gpt-oss"))


def test_tokens_are_the_same_chunked_cached_preempted_and_forked(
    gpt_oss: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"dtype": "float32", "kernels": "torch"}
    params = SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=36, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(range(first, first + 9))} for first in (3, 20, 40)]
    expected = tokens(make_llm(gpt_oss, **options), prompts, params)
    chunked = {"cpu_layers": 1, "max_num_batched_tokens": 8, "max_num_seqs": 4}
    for more in (chunked, {"cpu_layers": 2, "num_blocks": 16}):
        llm = make_llm(gpt_oss, **options, **more)
        if "num_blocks" in more:  # let in more sequences than fit
            monkeypatch.setattr(GrowthForecast, "fits_later", lambda *_: True)
        assert tokens(llm, prompts, params) == expected
        assert tokens(llm, prompts, params) == expected  # prompts come from the prefix cache
        assert (llm.engine.stats().num_preemptions > 0) == ("num_blocks" in more)


def test_a_step_crosses_once_each_way(gpt_oss: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crossings: list[str] = []
    for name in ("fetch", "send"):
        inner = getattr(DeviceLink, name)

        def noted(link: DeviceLink, *args: Any, name: str = name, inner: Any = inner) -> Any:
            crossings.append(name)
            return inner(link, *args)

        monkeypatch.setattr(DeviceLink, name, noted)
    llm = make_llm(gpt_oss, dtype="float32", kernels="torch", cpu_layers=2)
    crossings.clear()
    tokens(llm, PROMPTS[:1], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    assert crossings == ["fetch", "send"] * 3


def test_triton_kernels_plan_on_the_device_and_native_ones_on_the_host(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    torch.set_num_threads(1)
    folder = save("llama", tmp_path, num_hidden_layers=2)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    options = {"dtype": "float32", "num_blocks": 20, "max_num_seqs": 2}
    llm = make_llm(folder, kernels="triton", cpu_layers=1, **options)
    assert type(llm.engine._runner._forward).__name__ == "ModuleForward"
    expected = tokens(make_llm(folder, kernels="torch", **options), PROMPTS[:2], params)
    assert tokens(llm, PROMPTS[:2], params) == expected


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cpu_layers": 3}, UnsupportedModelError, "has 3 layers, of which at least one stays"),
        ({"cpu_layers": "all"}, UnsupportedModelError, "or set device='cpu'"),
        ({"cpu_layers": "auto"}, ConfigurationError, "'auto', but the device is 'cpu'"),
        ({"cpu_layers": 1, "kernels": "auto"}, ConfigurationError, "computes the whole model"),
        ({"cpu_layers": 1, "cpu_experts": 1}, ConfigurationError, "give one of them"),
        ({"cpu_layers": 1, "enable_lora": True}, ConfigurationError, "enable_lora is set"),
        ({"cpu_layers": 1, "host_cache_size": 4096}, ConfigurationError, "host_cache_size is"),
        ({"cpu_layers": 1, "tensor_parallel_size": 2}, ConfigurationError, "cpu_layers is 1, but"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    options: dict[str, Any], error: type[Exception], message: str, gpt_oss: Path
) -> None:
    with pytest.raises(error, match=message):
        LLM(**{"model": str(gpt_oss), "kernels": "torch", "skip_tokenizer_init": True} | options)


def test_models_with_a_forward_pass_of_their_own_are_refused(tmp_path: Path) -> None:
    folder = save("lfm2", tmp_path)
    with pytest.raises(UnsupportedModelError, match="can't have its layers on two devices"):
        make_llm(folder, kernels="torch", cpu_layers=1)


@pytest.mark.parametrize("kind", ["cpu_layers", "cpu_experts"])
def test_auto_leaves_as_few_layers_as_fit_and_counts_both_sides(
    kind: str, gpt_oss: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, device = load_config(gpt_oss), torch.device("cpu")
    named = EngineOptions.from_mapping({"dtype": "float32", "kernels": "torch", kind: 1})
    setup = choose_setup(named, config, device, 1)
    whole = weight_bytes(gpt_oss, config, torch.float32, replace(setup.methods, host=None))
    monkeypatch.setattr(host_part, "_room_bytes", lambda *_: whole - 1)
    monkeypatch.setattr(host_part, "CudaMemory", lambda device: None)
    placed = place_weights(replace(named, **{kind: "auto"}), gpt_oss, config, setup)
    assert placed.num_host_layers == 1 and placed.facts()[kind] == 1
    assert whole == pytest.approx(placed.device_bytes + placed.host_bytes, rel=0.02)
    # Nothing is left to the CPU if all fits.
    monkeypatch.setattr(host_part, "_room_bytes", lambda *_: whole)
    placed = place_weights(replace(named, **{kind: "auto"}), gpt_oss, config, setup)
    assert placed.setup.methods.host is None and placed.facts() == {}


def test_blocks_are_divided_by_sides() -> None:
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
    specs = (spec, replace(spec, window=9), spec, replace(spec, window=9), spec)
    native = HostLayers(2, CpuPagedAttention)
    formats = KVFormat.plain(torch.float32)
    whole, split = (
        plan_layout(specs, TorchPagedAttention, 16, formats, host=host) for host in (None, native)
    )
    assert split.groups == whole.groups and split.num_host_layers == 2
    cache = KVCache(split, 3, torch.device("cpu"))
    sizes = [layer.pages.shape[1] for layer in cache.layers()]
    for group in range(len(split.groups)):
        for layers in (range(3), range(3, 5)):  # those of a side don't overlap in a block
            places = sorted(
                split.layer_places[at][1] for at in layers if split.layer_places[at][0] == group
            )
            assert places == [size * index for index, size in enumerate(sizes[: len(places)])]
    pages = [layer.pages for layer in cache.layers()]
    for at, page in enumerate(pages):
        page[1] = at + 1
    cache.copy_blocks([BlockCopy(1, 2)])
    assert all(bool((page[2] == page[1]).all()) for page in pages)
    assert split.bytes_per_block + split.host_bytes_per_block >= whole.bytes_per_block


def test_the_hosts_memory_bounds_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
    layout = plan_layout(
        (spec, spec),
        TorchPagedAttention,
        16,
        KVFormat.plain(torch.float32),
        host=HostLayers(1, CpuPagedAttention),
    )
    memory = 10 * layout.host_bytes_per_block / host_part.HOST_KV_SHARE + 1
    monkeypatch.setattr(host_part, "available_memory_bytes", lambda: int(memory))
    assert host_part.host_blocks(EngineOptions(), layout, 10) == 10
    assert host_part.host_blocks(EngineOptions(), layout, 11) == 10
    for asked in ({"num_blocks": 11}, {"kv_cache_memory": 11 * layout.bytes_per_block}):
        options = EngineOptions.from_mapping(asked)
        with pytest.raises(InsufficientMemoryError, match=r"11 KV blocks .* at most 10 blocks"):
            host_part.host_blocks(options, layout, 11)
