"""Writes weights as the tools do, element by element, and says which numbers they then are."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import PreTrainedModel

Tensors = dict[str, torch.Tensor]
Writer = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
"""weight [O, I] -> the tensors that hold it, by the last words of their names, and its numbers."""

LINEARS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
AUTO_ROUND = {
    **{"act_bits": 16, "act_data_type": "int", "act_dynamic": True, "act_group_size": 128},
    **{"act_sym": True, "amp": True, "autoround_version": "0.5.1", "data_type": "int"},
    **{"enable_minmax_tuning": True, "enable_norm_bias_tuning": False, "iters": 1000},
    **{"provider": "auto-round", "scale_dtype": "torch.float16", "super_bits": None},
}
"""As in Intel/Qwen3-14B-int4-AutoRound-gptq-inc, but for the provider."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(codes: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """codes [A, B] below 2^bits -> [A, ceil(B * bits / 32)] int32. order: which code of a word lies
    at each place, from the lowest bits up."""
    each = 32 // bits
    padded = functional.pad(codes.long(), (0, -codes.shape[1] % each))
    of_words = padded.unflatten(1, (-1, each))[..., list(order or range(each))]
    return (of_words << torch.arange(each) * bits).sum(-1).to(torch.int32)


def rounded(
    weight: torch.Tensor, groups: torch.Tensor, bits: int, symmetric: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """groups [I]: the group of each input -> codes [O, I], scales and zeros [O, G], numbers."""
    count, most = int(groups.max()) + 1, (1 << bits) - 1
    codes, numbers = torch.zeros_like(weight, dtype=torch.int64), torch.zeros_like(weight)
    scales, zeros = torch.zeros(len(weight), count), torch.zeros(len(weight), count).long()
    for group in range(count):
        part = weight[:, groups == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scale = ((high - low) / most).to(dtype).float()
        zero = torch.full_like(low, 1 << bits - 1) if symmetric else (-low / scale).round()
        chosen = (part / scale[:, None] + zero[:, None]).round().clamp(0, most)
        codes[:, groups == group] = chosen.long()
        numbers[:, groups == group] = scale[:, None] * (chosen - zero[:, None])
        scales[:, group], zeros[:, group] = scale, zero.long()
    return codes, scales.to(dtype), zeros, numbers


def fp8(
    block: tuple[int, int],
    name: str = "weight_scale_inv",
    dtype: torch.dtype = torch.float32,
    shape: list[int] | None = None,
) -> Writer:
    """block: of all rows, or columns, where 0. dtype, shape: of the scales; None: one per block."""

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        high, wide = block[0] or rows, block[1] or columns
        scales = torch.zeros(-(-rows // high), -(-columns // wide))
        stored = torch.zeros_like(weight).to(torch.float8_e4m3fn)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                here = (slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide))
                scale = weight[here].abs().max() / 448
                if dtype == torch.float8_e8m0fnu:
                    scale = scale.log2().ceil().exp2()
                scales[i, j] = scale.to(dtype).float()
                stored[here] = (weight[here] / scales[i, j]).to(torch.float8_e4m3fn)
        grown = scales.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
        scales = scales.to(dtype)
        tensors = {"weight": stored, name: scales if shape is None else scales.view(shape)}
        return tensors, stored.float() * grown

    return write


def mxfp4_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [..., O, I] -> blocks [..., O, I / 32, 16] and scales [..., O, I / 32]."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    groups = weight.unflatten(-1, (-1, 32))
    powers = (groups.abs().amax(-1) / 6).log2().ceil()
    distances = (groups / powers.exp2()[..., None])[..., None] - table
    codes = distances.abs().argmin(-1)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).byte()
    return blocks, (powers + 127).byte()


def nvfp4(codes: str, factor: str, *, is_reciprocal: bool = False) -> Writer:
    """codes, factor: the suffixes of their names. is_reciprocal: the stored factor divides."""

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        whole = weight.abs().max() / (448 * 6)
        groups = weight.unflatten(-1, (-1, 16))
        scales = (groups.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
        grown = (scales.float() * whole)[..., None]
        found = ((groups / grown.clamp(min=1e-12))[..., None] - table).abs().argmin(-1)
        numbers = (table[found] * grown).flatten(-2)
        found = found.flatten(-2)
        tensors = {
            codes: (found[..., ::2] | found[..., 1::2] << 4).byte(),
            "weight_scale": scales,
            factor: (1 / whole).view(1) if is_reciprocal else whole,
        }
        return tensors, numbers

    return write


def side_by_side(num_inputs: int, size: int) -> torch.Tensor:
    return torch.arange(num_inputs) // size


def mixed_up(num_inputs: int, size: int, seed: int = 0) -> torch.Tensor:
    groups = side_by_side(num_inputs, size).tolist()
    random.Random(seed).shuffle(groups)
    return torch.tensor(groups)


def rewrite(
    folder: Path, model: PreTrainedModel, writers: dict[str, Writer], settings: dict[str, Any]
) -> Tensors:
    """Give linears of a checkpoint of transformers other tensors, and `model` their numbers."""
    found = rewrite_folder(folder, writers, settings)
    with torch.no_grad():
        for name, numbers in found.items():
            model.get_parameter(name).copy_(numbers)
    return found


def rewrite_folder(folder: Path, writers: dict[str, Writer], settings: dict[str, Any]) -> Tensors:
    """Give linears of a checkpoint of transformers other tensors, and return their numbers.
    writers: a part of a linear's name -> its writer; the first that fits."""
    tensors = load_file(folder / "model.safetensors")
    found: Tensors = {}
    for name in sorted(tensors):
        module = name.removesuffix(".weight")
        writer = next((writers[part] for part in writers if part in name), None)
        if writer is None or not module.endswith(LINEARS) or module == name:
            continue
        written, found[name] = writer(tensors.pop(name).float())
        tensors |= {f"{module}.{part}": each.contiguous() for part, each in written.items()}
    save_file(tensors, folder / "model.safetensors")
    set_settings(folder, settings)
    return found


def set_settings(folder: Path, settings: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Put other tensors, named by how their names end (__ for a dot), or none, in a checkpoint."""
    stored = load_file(folder / "model.safetensors")
    for ending, tensor in tensors.items():
        ending = ending.replace("__", ".")
        (name, *_) = sorted(name for name in stored if name.endswith(ending))
        del stored[name]
        if tensor is not None:
            stored[name] = tensor
    save_file(stored, folder / "model.safetensors")


def add(folder: Path, tensors: Tensors) -> None:
    stored = load_file(folder / "model.safetensors")
    save_file(stored | tensors, folder / "model.safetensors")
