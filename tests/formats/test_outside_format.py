"""Weight formats from outside the package: registered by a name, they serve a model end to end."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cli.doctor.test_findings import SOUND
from tests.distributed.ranks import run_ranks
from tests.engine.checkpoints import save_checkpoint
from tests.registering import restored
from torch.nn import functional

from quire.assembly.build import build_engine
from quire.cli.doctor.findings import findings
from quire.cli.parser import build_parser
from quire.core.sampling_params import SamplingParams
from quire.distributed.group import ProcessGroup
from quire.errors import ConfigurationError
from quire.formats.format_registry import WEIGHT_FORMATS, WeightFormatEntry, load_weight_format
from quire.formats.rounded import RoundedMethod
from quire.formats.weight_format import (
    LinearMethod,
    LinearModule,
    Shape,
    WeightFormat,
    empty_parameter,
)
from quire.layers.sharded import LinearMethods, Sharding
from quire.models.checkpoints.loader import load_model, weight_bytes
from quire.models.registry import load_config
from quire.offline.llm import LLM
from quire.options.engine_options import EngineOptions

CPU = torch.device("cpu")
PROMPTS = [{"prompt_token_ids": [7 + seed, *range(40, 60, 3)]} for seed in range(5)]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


class Fp8Method(RoundedMethod):
    """levels [O, I] float8_e4m3fn and scales [O]; activations are not rounded."""

    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> int:
        return num_outputs * (num_inputs + 4)

    def create_weights(self, linear: LinearModule, device: torch.device) -> None:
        shape = (linear.output_size, linear.input_size)
        linear.register_parameter("levels", empty_parameter(shape, torch.float8_e4m3fn, device))
        linear.register_parameter("scales", empty_parameter(shape[:1], torch.float32, device))

    def load_rows(self, linear: LinearModule, span: slice, rows: torch.Tensor) -> None:
        levels, scales = rounded_to_fp8(rows)
        linear.get_parameter("levels")[span] = levels
        linear.get_parameter("scales")[span] = scales

    def apply(
        self, linear: LinearModule, x: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        levels = linear.get_parameter("levels").float() * linear.get_parameter("scales")[:, None]
        bias = None if linear.bias is None else linear.bias.to(x.dtype)
        return functional.linear(x, levels.to(x.dtype), bias).to(out_dtype or x.dtype)


class Fp8(WeightFormat):
    """torch alone multiplies; a dtype that is not float32 or bfloat16 is refused."""

    def torch_method(self) -> LinearMethod:
        return Fp8Method()

    def why_not(self, dtype: torch.dtype, device: torch.device) -> str | None:
        if dtype is torch.float16:
            return "scales of float16 may overflow; give dtype='bfloat16'"
        return None


class StoredInt8Method(Fp8Method):
    """Takes numbers that somebody else has rounded: tensors `levels` and `scales` of each part."""

    def tensors(self, linear: LinearModule) -> dict[tuple[str, int], Shape]:
        sizes = [*enumerate(linear.part_sizes)]
        shapes: dict[tuple[str, int], Shape]
        shapes = {("levels", index): (size, linear.input_size) for index, size in sizes}
        return shapes | {("scales", index): (size,) for index, size in sizes}

    def create_weights(self, linear: LinearModule, device: torch.device) -> None:
        super().create_weights(linear, device)
        shape = (linear.output_size, linear.input_size)
        linear.register_parameter("levels", empty_parameter(shape, torch.int8, device))

    def load_part(
        self, linear: LinearModule, parameter: str, index: int, first_row: int, rows: torch.Tensor
    ) -> None:
        start = linear.part_start(index) + first_row
        linear.get_parameter(parameter)[start : start + len(rows)] = rows


def rounded_to_fp8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = rows.float().abs().amax(1).clamp(min=1e-30) / 448
    return (rows.float() / scales[:, None]).to(torch.float8_e4m3fn), scales


def rounded_to_int8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = rows.float().abs().amax(1).clamp(min=1e-30) / 127
    return (rows.float() / scales[:, None]).round(), scales


@pytest.fixture(autouse=True)
def fp8() -> Iterator[None]:
    """The format "fp8", gone after the test."""
    with restored(WEIGHT_FORMATS):
        WEIGHT_FORMATS.register("fp8", WeightFormatEntry("a float and a scale an output", 8, Fp8))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def is_linear(name: str, tensor: torch.Tensor) -> bool:
    return tensor.ndim == 2 and "embed_tokens" not in name


def copy_with(folder: Path, target: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """The model of `folder` with other weights."""
    for name in ("config.json", "generation_config.json"):
        (target / name).write_text((folder / name).read_text())
    save_file(tensors, target / "model.safetensors")
    return target


def tokens(folder: Path, **options: object) -> list[tuple[int, ...]]:
    llm = LLM(model=folder, skip_tokenizer_init=True, dtype="float32", **options)  # type: ignore[arg-type]
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    "options", [{"kernels": "torch"}, {"max_num_batched_tokens": 16, "max_num_seqs": 4}, {}]
)
def test_it_serves_the_model_of_the_rounded_weights(
    options: dict[str, object], folder: Path, tmp_path: Path
) -> None:
    rounded = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        levels, scales = rounded_to_fp8(tensor) if tensor.ndim == 2 else (tensor, None)
        is_rounded = scales is not None and is_linear(name, tensor)
        rounded[name] = levels.float() * scales[:, None] if is_rounded else tensor  # type: ignore[index]
    expected = tokens(copy_with(folder, tmp_path, rounded), kernels="torch")
    assert tokens(folder, quantization="fp8", **options) == expected
    assert tokens(folder, kernels="torch") != expected  # the rounding makes a difference


def test_the_memory_plan_knows_its_bytes(folder: Path) -> None:
    methods = LinearMethods(load_weight_format("fp8").method())
    config, dtype = load_config(folder), torch.bfloat16
    model = load_model(folder, config, dtype=dtype, device=CPU, max_model_len=48, methods=methods)
    num_bytes = sum(each.numel() * each.element_size() for each in model.parameters())
    assert weight_bytes(folder, config, dtype, methods) == num_bytes
    engine = build_engine(
        {"model": folder, "quantization": "fp8", "dtype": "bfloat16", "max_model_len": 48}
    )
    assert engine.facts["weight_bytes"] == num_bytes
    assert engine.facts["quantization"] == "fp8"


def test_options_flags_and_doctor_know_its_name() -> None:
    assert EngineOptions(quantization="fp8").quantization == "fp8"
    flags = build_parser().parse_args(["serve", "--quantization", "fp8"])
    assert flags.quantization == "fp8"
    (advice,) = [each.text for each in findings(SOUND) if "--quantization" in each.text]
    assert "fp8 leaves 50% of them" in advice


def test_it_refuses_what_it_can_not_serve(folder: Path) -> None:
    expected = r"quantization is 'fp8', but scales of float16 may overflow; give dtype='bfloat16'"
    with pytest.raises(ConfigurationError, match=expected):
        # Native kernels that were asked for by name would be refused first.
        build_engine(
            {"model": folder, "quantization": "fp8", "dtype": "float16", "kernels": "auto"}
        )


def test_tensors_of_its_own_are_loaded_and_cut_over_ranks(folder: Path, tmp_path: Path) -> None:
    stored, rounded = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored[name] = rounded[name] = tensor
        if is_linear(name, tensor):
            levels, scales = rounded_to_int8(tensor)
            del stored[name]
            stored[name.replace(".weight", ".levels")] = levels.half()
            stored[name.replace(".weight", ".scales")] = scales
            rounded[name] = levels * scales[:, None]
    (tmp_path / "stored").mkdir()
    (tmp_path / "rounded").mkdir()
    copy_with(folder, tmp_path / "stored", stored)
    copy_with(folder, tmp_path / "rounded", rounded)

    def weights(name: str, methods: LinearMethods) -> dict[str, torch.Tensor]:
        """Of all linears, as the method multiplies them."""
        path = tmp_path / name
        config = load_config(path)
        options = {"dtype": torch.float32, "device": CPU, "max_model_len": 48}
        model = load_model(path, config, methods=methods, **options)  # type: ignore[arg-type]
        return {
            place: module(torch.eye(module.input_size))
            for place, module in model.named_modules()
            if isinstance(module, LinearModule)
        }

    def work(group: ProcessGroup) -> dict[str, torch.Tensor]:
        sharding = Sharding(group, load_config(folder).vocab_size)
        return weights("stored", LinearMethods(StoredInt8Method(), sharding))

    def whole(group: ProcessGroup) -> dict[str, torch.Tensor]:
        sharding = Sharding(group, load_config(folder).vocab_size)
        return weights("rounded", LinearMethods(load_weight_format(None).method(), sharding))

    for found, expected in zip(run_ranks(2, work), run_ranks(2, whole), strict=True):
        assert found.keys() == expected.keys()
        for name, weight in found.items():
            torch.testing.assert_close(weight, expected[name], atol=1e-6, rtol=1e-5)
