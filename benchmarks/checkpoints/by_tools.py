"""Checkpoints that other tools have quantized, against transformers' models of their numbers.

    python -m benchmarks.checkpoints.by_tools --folder /tmp/by-tools [CASE ...]

has LLM Compressor and GPTQModel quantize a random Llama of two layers in every way that they know
and quire reads, each as its users do, and prints for each folder how far quire's logits are from
those of the original's class in transformers with the weights that the tool itself makes of its
codes, in fp32:

    numbers   quire with the weights as numbers of the model's dtype: nothing but fp32 sums differ
    codes     quire with the codes that it keeps, and so activations that are rounded to eight bits
    alike     the same from transformers with inputs of linears rounded alike: nothing else differs
    original  how far the tool's weights are from those before: the size of what is compared

Needs llmcompressor and gptqmodel beside quire's own packages.
"""

import argparse
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from quire.attention.interface import rotated
from quire.formats.block_quantized.linear_methods import CHUNK_INPUTS, BlockQuantizedMethods
from quire.formats.block_quantized.weights import BlockFormat
from quire.formats.dense import DenseMethod
from quire.formats.weight_format import LinearModule
from quire.kernels.attention_inputs import AttentionInputs
from quire.kernels.quantize import quantize_groups
from quire.layers.sharded import LinearMethods
from quire.models.checkpoints.loader import load_model
from quire.models.checkpoints.readers import open_checkpoint
from quire.models.checkpoints.source import CheckpointSource
from quire.models.registry import load_config

NUM_TOKENS = 64
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
_LINEARS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
WEIGHTS = {f"model.layers.{layer}.{each}.weight" for layer in range(2) for each in _LINEARS}
Numbers = dict[str, torch.Tensor]
"""Weights by name that a tool makes of its codes."""


def original(dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, dtype=dtype)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.08)
            if "norm" in name:
                parameter += 1
            elif parameter.dim() == 2:
                # Some inputs matter more than others, so that act-order is one.
                parameter *= torch.rand(parameter.shape[1]) + 0.5
    return model.to(dtype)


def token_batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 512, (1, 128), generator=generator) for _ in range(count)]


def compress(folder: Path, dtype: torch.dtype, modifier: Any, *, calibrates: bool) -> Numbers:
    """By LLM Compressor."""
    from compressed_tensors.compressors import decompress_module
    from datasets import Dataset
    from llmcompressor import oneshot

    source = save_original(folder, dtype)
    model = LlamaForCausalLM.from_pretrained(source, dtype=dtype)
    data: dict[str, Any] = {}
    if calibrates:
        rows = [batch[0].tolist() for batch in token_batches(16)]
        data["dataset"] = Dataset.from_dict(
            {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
        )
        data |= {"num_calibration_samples": len(rows), "max_seq_length": 128}
    oneshot(model=model, recipe=[modifier], **data)
    model.save_pretrained(folder, save_compressed=True)
    shutil.rmtree(source)
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            decompress_module(module)
    return {name: each.float() for name, each in model.named_parameters() if name in WEIGHTS}


def with_gptqmodel(folder: Path, dtype: torch.dtype, config: Any) -> Numbers:
    import gptqmodel
    from gptqmodel import BACKEND, GPTQModel
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    gptqmodel._default_cpu_workers = lambda: 2  # it wants two, however few cores there are
    folder.mkdir(parents=True)
    source = save_original(folder, dtype)
    model = GPTQModel.load(str(source), config)
    rows = [{"input_ids": b[0].tolist(), "attention_mask": [1] * 128} for b in token_batches(64)]
    model.quantize(rows, batch_size=1)
    model.save(str(folder))
    is_awq = config.quant_method == "awq"
    backend = BACKEND.AWQ_TORCH if is_awq else BACKEND.GPTQ_TORCH
    again = GPTQModel.load(str(folder), backend=backend, device="cpu", dtype=torch.float16)
    stored = load_file(folder / "model.safetensors")
    # AWQ changes norms, too.
    numbers = {name: stored[name].float() for name in stored if name.endswith("norm.weight")}
    for name, module in again.model.named_modules():
        if hasattr(module, "qweight"):
            module.float()  # or its numbers would be rounded to its scales' dtype
            if is_awq:
                packed = (module.qweight, module.qzeros, module.scales)
                weight = dequantize_gemm(*packed, bits=4, group_size=module.group_size)
            else:
                weight = module.dequantize_weight()
            numbers[f"{name}.weight"] = weight.float().T.contiguous()
    shutil.rmtree(source)
    return numbers


def save_original(folder: Path, dtype: torch.dtype) -> Path:
    """Beside the folder, with a tokenizer, which tools want."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    source = folder.parent / f"{folder.name}-original"
    original(dtype).save_pretrained(source)
    words = {f"w{index}": index for index in range(512)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", pad_token="w1", eos_token="w2"
    ).save_pretrained(source)
    return source


def cases() -> Iterator[tuple[str, Callable[[Path], Numbers]]]:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier

    def scheme(name: str, *, dtype: torch.dtype = torch.bfloat16, calibrates: bool = False):
        modifier = QuantizationModifier(targets="Linear", scheme=name, ignore=["lm_head"])
        return lambda folder: compress(folder, dtype, modifier, calibrates=calibrates)

    for name in ("W8A8", "W4A16", "W4A16_ASYM", "W8A16", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP4A16"):
        yield name.lower(), scheme(name)
    yield "w4a16-half", scheme("W4A16", dtype=torch.float16)
    yield "w4a16-single", scheme("W4A16", dtype=torch.float32)
    yield "fp8-static", scheme("FP8", calibrates=True)
    yield "w4a8", scheme("W4A8")

    def groups(**each: QuantizationScheme):
        modifier = QuantizationModifier(config_groups=each, ignore=["lm_head", "re:.*0.*k_proj"])
        return lambda folder: compress(folder, torch.bfloat16, modifier, calibrates=False)

    def weights(**fields: Any) -> QuantizationArgs:
        return QuantizationArgs(type="int", dynamic=False, **fields)

    tokens = QuantizationArgs(num_bits=8, type="int", strategy="token", dynamic=True)
    channel = weights(num_bits=4, strategy="channel", symmetric=True)
    yield "channel", groups(all=QuantizationScheme(targets=["Linear"], weights=channel))
    asymmetric = weights(num_bits=8, strategy="channel", symmetric=False)
    both = QuantizationScheme(targets=["Linear"], weights=asymmetric, input_activations=tokens)
    yield "w8a8-asymmetric", groups(all=both)
    fine = weights(num_bits=4, strategy="group", group_size=32, symmetric=False)
    eight = weights(num_bits=8, strategy="channel", symmetric=True)
    yield (
        "mixed",
        groups(
            fine=QuantizationScheme(targets=["re:.*self_attn.*"], weights=fine),
            eight=QuantizationScheme(
                targets=["re:.*mlp.*"], weights=eight, input_activations=tokens
            ),
        ),
    )
    calibrated = GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])
    yield "w4a16-gptq", lambda folder: compress(folder, torch.bfloat16, calibrated, calibrates=True)

    from gptqmodel import QuantizeConfig

    def gptq(**fields: Any) -> Callable[[Path], Numbers]:
        return lambda folder: with_gptqmodel(folder, torch.bfloat16, QuantizeConfig(**fields))

    yield "gptq", gptq(bits=4, group_size=128)
    yield "gptq-v2", gptq(bits=4, group_size=128, format="gptq_v2")
    yield "gptq-act-order", gptq(bits=4, group_size=64, desc_act=True)
    yield "gptq-asymmetric", gptq(bits=4, group_size=32, sym=False)
    yield "gptq-asymmetric-v2", gptq(bits=4, group_size=32, sym=False, format="gptq_v2")
    yield "gptq-8-bits", gptq(bits=8, group_size=128)
    yield "gptq-whole-rows", gptq(bits=4, group_size=-1, act_group_aware=False)
    dynamic = {"+:.*down_proj": {"bits": 8, "group_size": 32}, "-:.*q_proj": {}}
    yield "gptq-dynamic", gptq(bits=4, group_size=128, dynamic=dynamic)
    yield "awq", gptq(bits=4, group_size=128, sym=False, quant_method="awq", format="gemm")


class _Attention:
    """Causal attention over one chunk."""

    def __call__(self, layer: int, inputs: AttentionInputs) -> torch.Tensor:
        parts = (*rotated(inputs), inputs.v)
        q, k, v = (each.transpose(0, 1)[None] for each in parts if each is not None)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)


class _Rounded(DenseMethod):
    """Numbers as a model of this dtype has them, in fp32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def load_part(
        self, linear: LinearModule, parameter: str, index: int, first_row: int, rows: torch.Tensor
    ) -> None:
        super().load_part(linear, parameter, index, first_row, rows.to(self._dtype))


def quire_logits(folder: Path, methods: LinearMethods) -> torch.Tensor:
    model = load_model(
        folder,
        load_config(folder),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=NUM_TOKENS,
        methods=methods,
    )
    ids = token_batches(1)[0][0, :NUM_TOKENS]
    with torch.inference_mode():
        return model.logits(model(ids, torch.arange(NUM_TOKENS), _Attention()))


def reference_logits(
    numbers: Numbers, dtype: torch.dtype, block_formats: Mapping[str, BlockFormat] | None = None
) -> torch.Tensor:
    """block_formats: of weights that are multiplied as quire does, by what rounds their inputs."""
    model = original(torch.float32)  # whose rotations are not rounded
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
        for name, weight in numbers.items():
            model.get_parameter(name).copy_(weight if block_formats else weight.to(dtype))
        for name, block_format in (block_formats or {}).items():
            linear = model.get_submodule(name.removesuffix(".weight"))
            linear.register_forward_pre_hook(partial(round_inputs, block_format))
        return model(token_batches(1)[0][:, :NUM_TOKENS]).logits[0]


def round_inputs(
    block_format: BlockFormat, _: torch.nn.Module, given: tuple[torch.Tensor]
) -> torch.Tensor:
    (x,) = given
    rows = x.flatten(0, -2)
    order = torch.arange(x.shape[-1])
    if block_format.input_order is not None:
        order = block_format.input_order.inputs().long()
    size = x.shape[-1] if block_format.is_int8 else CHUNK_INPUTS
    q, scales = quantize_groups(rows[:, order], size)
    rounded = (q * scales[..., None]).flatten(1)
    return torch.empty_like(rows).index_copy_(1, order, rounded).view_as(x)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def compare(folder: Path, numbers: Numbers) -> str:
    config, checkpoint = load_config(folder), open_checkpoint(folder)
    assert config.quantized is not None and config.dtype is not None
    dtype = config.dtype
    expected = reference_logits(numbers, dtype)
    block_formats = {name: checkpoint.block_format(name) for name in checkpoint.names}
    kept = {
        name: block_format
        for name, block_format in block_formats.items()
        if block_format is not None
    }
    method = _Rounded(dtype)
    as_codes = quire_logits(folder, LinearMethods(method, block_quantized=BlockQuantizedMethods()))
    alike = reference_logits(as_fp32(checkpoint, kept, numbers), dtype, kept)
    return (
        f"{config.quantized.method:20}"
        f" numbers {distance(quire_logits(folder, LinearMethods(method)), expected):.1e}"
        f"   codes {distance(as_codes, expected):.4f}"
        f"   alike {distance(as_codes, alike):.1e}"
        f"   original {distance(reference_logits({}, dtype), expected):.3f}"
        f"   {len(kept)} of {len(WEIGHTS & numbers.keys())} kept"
    )


def as_fp32(
    checkpoint: CheckpointSource, kept: Mapping[str, BlockFormat], numbers: Numbers
) -> Numbers:
    """The tool's numbers, of which those that stay codes are not rounded to the model's dtype; they
    must be the same but for that."""
    found = dict(numbers)
    for name in kept:
        with checkpoint.rows(name, range(checkpoint.shape(name)[0])) as rows:
            found[name] = rows.clone()
        assert distance(found[name], numbers[name]) < 4e-3, name
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints are made")
    parser.add_argument("cases", nargs="*", help="names of cases; without any, all")
    args = parser.parse_args()
    lines = []
    for name, make in cases():
        if args.cases and name not in args.cases:
            continue
        folder = args.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        lines.append(f"{name:20} {compare(folder, make(folder))}")
        print(lines[-1], flush=True)
    print("\n" + "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
