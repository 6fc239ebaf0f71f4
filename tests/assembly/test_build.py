"""MemoryPlan, dtypes and options that the composition root decides on."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quire.assembly.build import build_engine
from quire.core.request import Request
from quire.core.sampling_params import DecodingParams
from quire.engine.engine import Engine
from quire.errors import ConfigurationError, InsufficientMemoryError, UnsupportedModelError
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.kernels.cpu.library import NativeLibrary, NativeUnavailableError

# The embedded model: 4 layers x (K, V) x 2 heads x 64 x 16 tokens.
ELEMENTS_PER_BLOCK = 4 * 2 * 2 * 64 * 16


def num_blocks(**options: object) -> int:
    return build_engine(options).stats().num_blocks


def edited_model(tmp_path: Path, **changes: object) -> Path:
    """The embedded model with another config."""
    folder = tmp_path / "model"
    shutil.copytree(EMBEDDED_MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def set_memory(monkeypatch: pytest.MonkeyPatch, available: int, total: int = 2**34) -> None:
    monkeypatch.setattr("quire.assembly.host_memory_plan.available_memory_bytes", lambda: available)
    monkeypatch.setattr("quire.assembly.host_memory_plan.total_memory_bytes", lambda: total)


def test_memory_becomes_blocks() -> None:
    assert num_blocks(dtype="float32", kv_cache_memory="64MiB") == 2**26 // (ELEMENTS_PER_BLOCK * 4)
    assert num_blocks(dtype="bfloat16", kv_cache_memory_bytes=2**26) == 2**26 // (
        ELEMENTS_PER_BLOCK * 2
    )
    assert num_blocks(dtype="float32", kv_cache_memory=2**26, block_size=64) == 2**26 // (
        ELEMENTS_PER_BLOCK * 4 * 4
    )
    assert num_blocks(num_blocks=300) == 300


def test_default_memory_is_what_full_length_sequences_need() -> None:
    assert num_blocks(max_num_seqs=2, max_model_len=1000) == 2 * 63


def test_a_share_of_the_machines_memory() -> None:
    small = num_blocks(dtype="float32", gpu_memory_utilization=0.05)
    large = num_blocks(dtype="float32", gpu_memory_utilization=0.1)
    assert small < large < 2.2 * small


def test_quantized_weights_leave_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte less for each weight of the layers; the tied head's, of a byte, come on top."""
    set_memory(monkeypatch, 2**24, 2**24)
    sizes = {
        name: num_blocks(
            dtype="bfloat16", gpu_memory_utilization=0.6, kernels="torch", quantization=name
        )
        for name in (None, "int8")
    }
    layers, head = 4 * (3 * 640 + 2 * 256 + 2 * 128) * 256, 4096 * 256
    saved_bytes = (sizes["int8"] - sizes[None]) * ELEMENTS_PER_BLOCK * 2
    assert saved_bytes == pytest.approx(layers - head, rel=0.05)


def test_max_model_len_follows_the_pool_unless_it_was_asked_for() -> None:
    assert build_engine({"num_blocks": 10}).limits.max_model_len == 160
    assert build_engine({"num_blocks": 1000}).limits.max_model_len == 4096
    with pytest.raises(InsufficientMemoryError, match=r"hold 160 tokens.*max_model_len is 200"):
        build_engine({"num_blocks": 10, "max_model_len": 200})
    with pytest.raises(ConfigurationError, match=r"5000.*at most 4096.*'default' adds none"):
        build_engine({"max_model_len": 5000})


def test_an_unrequested_length_has_a_small_rotary_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # A position takes 64 numbers of four bytes.
    monkeypatch.setattr("quire.assembly.host_memory_plan.LEAST_TABLE_BYTES", 1000 * 64 * 4)
    folder = edited_model(tmp_path, max_position_embeddings=1 << 28)
    options = {"model": str(folder), "num_blocks": 200, "max_num_seqs": 4}
    for available, longest in ((2**26, 1024), (3 * 2**26, 3 * 1024), (2**25, 1000)):
        caplog.clear()
        set_memory(monkeypatch, available)
        assert build_engine(options).limits.max_model_len == longest
        assert "268435456 positions would need a table of 68719476736 bytes" in caplog.text
    assert build_engine(options | {"max_model_len": 3000}).limits.max_model_len == 3000


def test_a_rope_type_that_stretches_allows_more_but_only_when_asked(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0}
    folder = edited_model(tmp_path, max_position_embeddings=512, rope_scaling=rope)
    options = {"model": str(folder), "num_blocks": 200}
    assert build_engine(options).limits.max_model_len == 512
    assert build_engine(options | {"max_model_len": 2048}).limits.max_model_len == 2048
    with pytest.raises(
        ConfigurationError,
        match=r"2049.*at most 2048.*embeddings .* is 512.*rope type 'dynamic' stretches 4 times",
    ):
        build_engine(options | {"max_model_len": 2049})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_memory": 2000}, "kv_cache_memory=2000 leaves no room for the 1 KV blocks"),
        ({"kv_cache_memory": "1000TiB"}, "the machine has"),
        ({"num_blocks": 10**9}, "the machine has"),
        ({"gpu_memory_utilization": 1e-9}, "leaves no room"),
    ],
)
def test_impossible_memory(options: dict[str, object], message: str) -> None:
    with pytest.raises(InsufficientMemoryError, match=message):
        build_engine(options)


@pytest.mark.parametrize(
    "size",
    [{"kv_cache_memory": 2**30}, {"num_blocks": 2**30 // 2**16}, {"gpu_memory_utilization": 0.07}],
)
def test_memory_that_others_hold_is_not_promised(
    size: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = size | {"dtype": "float32", "max_model_len": 64}
    set_memory(monkeypatch, available=2**30)
    with pytest.raises(
        InsufficientMemoryError,
        match=r"1\.\d GiB of KV cache beside 0\.0 GiB of weights, but the machine has"
        r" 1\.0 GiB available now of 16\.0 GiB in all; lower",
    ):
        build_engine(options)
    set_memory(monkeypatch, available=2**31)
    assert build_engine(options).stats().num_blocks >= 2**14


def test_weights_count_in_the_dtype_that_they_are_computed_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_parameters = sum(
        tensor.numel() for tensor in load_file(EMBEDDED_MODEL / "model.safetensors").values()
    )
    for dtype, item_bytes in (("bfloat16", 2), ("float32", 4)):
        pages = 4 * ELEMENTS_PER_BLOCK * item_bytes
        options = {"dtype": dtype, "num_blocks": 4, "max_model_len": 64}
        set_memory(monkeypatch, available=num_parameters * item_bytes + pages)
        assert num_blocks(**options) == 4
        set_memory(monkeypatch, available=num_parameters * item_bytes + pages - 1)
        with pytest.raises(InsufficientMemoryError, match="available now"):
            build_engine(options)


def test_weights_alone_can_be_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    set_memory(monkeypatch, available=1000)
    with pytest.raises(InsufficientMemoryError, match=r"0\.0 GiB of KV cache beside"):
        build_engine({})


def test_slots_for_adapters_can_be_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    set_memory(monkeypatch, available=2**30)
    options = {"enable_lora": True, "max_loras": 1024, "max_lora_rank": 256}
    with pytest.raises(
        InsufficientMemoryError,
        match=r"beside 0\.0 GiB of weights and \d+\.\d GiB of slots for adapters, .*; lower"
        r" max_loras \(1024\), max_lora_rank \(256\), num_blocks",
    ):
        build_engine(SMALL | options)


def test_more_rows_than_memory_has_room_for() -> None:
    many = 10**13  # beyond any address space
    with pytest.raises(InsufficientMemoryError, match=r"max_num_seqs=10000000000000.*lower"):
        build_engine({"max_num_seqs": many, "num_blocks": 4, "max_model_len": 64})
    with pytest.raises(InsufficientMemoryError, match=r"lower .*max_num_batched_tokens"):
        build_engine({"max_num_batched_tokens": 10**13, "num_blocks": 8, "max_model_len": 64})


def test_window_layers_form_groups_of_equal_pages(tmp_path: Path) -> None:
    from tests.engine.checkpoints import save_checkpoint  # transformers takes a while to import

    engine = build_engine({"model": str(save_checkpoint("qwen2", tmp_path)), "num_blocks": 60})
    groups = engine.scheduler.memory.config.groups
    assert sorted(group.layers for group in groups) == [(0,), (1,), (2,)]
    assert [group.window for group in groups] == [None, 24, 24]
    assert len({group.bytes_per_block for group in groups}) == 1


def test_end_tokens_come_from_the_generation_config() -> None:
    assert build_engine({"num_blocks": 10}).limits.end_token_ids == (2, 0)


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    folder = edited_model(tmp_path, architectures=["NoSuchModel"])
    with pytest.raises(UnsupportedModelError, match=r"NoSuchModel.*docs/models.md lists all"):
        build_engine({"model": str(folder)})


def test_float16_is_computed_as_asked() -> None:
    # Named kernels would refuse it.
    options = {"dtype": "float16", "kernels": "auto", "max_model_len": 64, "num_blocks": 4}
    engine = build_engine(options)
    torch.set_num_threads(1)
    engine.add(Request("a", [5, 6, 7], DecodingParams(max_tokens=3, temperature=0.0)))
    tokens = [output.token_ids for _ in range(3) for output in engine.step()]
    assert len(tokens) == 3 and not engine.has_work()


SMALL = {"max_model_len": 64, "num_blocks": 4, "dtype": "float32"}


def greedy_tokens(engine: Engine) -> list[int]:
    engine.add(Request("a", [5, 6, 7], DecodingParams(max_tokens=6, temperature=0.0)))
    found: list[int] = []
    while engine.has_work():
        found += [token for output in engine.step() for token in output.token_ids]
    return found


def test_the_kernels_that_are_named_compute_with_as_many_threads(
    native_library: NativeLibrary, native_engine: None, caplog: pytest.LogCaptureFixture
) -> None:
    *_, last = native_library.isas()
    with caplog.at_level("INFO", "quire"):
        native = build_engine(SMALL | {"kernels": last, "num_threads": 3})
    assert f"kernels: {last}, num_threads=3" in caplog.messages
    assert torch.get_num_threads() == 1
    expected = build_engine(SMALL | {"kernels": "torch", "num_threads": 1})
    assert greedy_tokens(native) == greedy_tokens(expected)


def test_torch_gets_the_threads_that_are_asked_for() -> None:
    build_engine(SMALL | {"kernels": "torch"})
    own = torch.get_num_threads()
    build_engine(SMALL | {"kernels": "torch", "num_threads": own + 1})
    assert torch.get_num_threads() == own + 1
    build_engine(SMALL | {"kernels": "torch"})
    assert torch.get_num_threads() == own


def test_kernels_that_can_not_be_had_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise NativeUnavailableError("not built")

    monkeypatch.setattr("quire.kernels.cpu.selection.load_library", missing)
    with pytest.raises(ConfigurationError, match="kernels='avx2' can't be used: not built"):
        build_engine(SMALL | {"kernels": "avx2"})
    engine = build_engine(SMALL | {"kernels": "auto"})
    assert len(greedy_tokens(engine)) == 6


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory"
        ),
    ],
)
def test_memory_that_runs_out_while_it_is_built_is_named(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def load_model(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("quire.assembly.rank_build.load_model", load_model)
    with pytest.raises(InsufficientMemoryError, match="memory ran out while the engine was built"):
        build_engine(SMALL)
    with pytest.raises(InsufficientMemoryError, match=r"lower max_loras \(8\), max_lora_rank"):
        build_engine(SMALL | {"enable_lora": True})


def test_a_bug_of_a_model_is_not_taken_for_too_little_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load_model(*_: object, **__: object) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr("quire.assembly.rank_build.load_model", load_model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        build_engine(SMALL)


def test_triton_kernels_that_can_not_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "quire.kernels.triton.support.why_not", lambda device_type: "it is too warm"
    )
    refusal = "kernels is 'triton', but the Triton kernels can't run on cpu: it is too warm"
    with pytest.raises(ConfigurationError, match=refusal):
        build_engine(SMALL | {"kernels": "triton"})


def test_an_engine_tells_what_it_was_built_of_and_how_far_that_is() -> None:
    told: list[tuple[str, int, int]] = []
    options = SMALL | {"dtype": "float32", "quantization": None, "max_itl_ratio": 2.8}
    engine = build_engine(options, lambda *news: told.append(news))
    facts = engine.facts
    assert facts["architecture"] == "Qwen3ForCausalLM" and facts["dtype"] == "float32"
    assert facts["weight_bytes"] == 4 * facts["num_parameters"] > 0
    assert facts["kv_cache_bytes"] == facts["num_blocks"] * ELEMENTS_PER_BLOCK * 4
    assert facts["num_blocks"] == engine.stats().num_blocks
    assert (facts["block_size"], facts["num_kv_groups"]) == (16, 1)
    assert facts["num_request_blocks"] == -(-min(2048, facts["max_model_len"]) // 16)
    assert facts["max_model_len"] == engine.limits.max_model_len
    assert facts["num_threads"] >= 1 and isinstance(facts["kernels"], str)
    assert told[-1] == ("measuring what steps take", 0, 0)
    texts = {text for text, _, _ in told[:-1]}
    assert texts == {"loading the weights"} and told[-2][1] == told[-2][2] > 0


def test_an_engine_on_the_cpu_imports_no_triton_and_leaves_without_a_word():
    """Where Triton was imported, its bindings report leaks when the process ends."""
    program = (
        "import sys; from quire import LLM, SamplingParams;"
        "LLM(device='cpu', num_blocks=16, max_model_len=64, disable_log_stats=True)"
        ".generate('import os', SamplingParams(max_tokens=2));"
        "sys.exit('triton' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_more_ranks_than_processors_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start_workers(*_: object) -> None:
        raise RuntimeError("the workers would start now")

    monkeypatch.setattr("quire.assembly.build.Workers", start_workers)
    warned = []
    for count in (lambda: 2, lambda: 1):
        monkeypatch.setattr("quire.assembly.build.usable_processors", count)
        caplog.clear()
        with pytest.raises(RuntimeError, match="would start now"):
            build_engine(SMALL | {"tensor_parallel_size": 2})
        warned.append([each.getMessage() for each in caplog.records])
    assert not warned[0]
    assert len(warned[1]) == 1
    assert "--tensor-parallel-size is 2, but this process may use only 1 of" in warned[1][0]
