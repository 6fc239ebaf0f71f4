"""Sound GGUF files of a few kilobytes, kept in parts, to be damaged."""

import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.checkpoints.sound_models import CONFIG, Files, tensor_shapes, tokenizer
from quire.hub.gguf.storage_types import STORAGE_TYPES

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
ALIGNMENT = 32
SCALES = {"Q8_0": (1,), "Q4_0": (1,), "Q4_K": (1, 3), "Q6_K": (209,), "IQ4_XS": (1,)}
"""Where the upper bytes of a block's scales are, which must be numbers for results to be."""
TYPES = {storage.name: number for number, storage in STORAGE_TYPES.items()}
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_SIZES: dict[int, dict[str, int]] = {
    1: {},
    32: {"intermediate_size": 64},
    256: {"intermediate_size": 256, "hidden_size": 256, "head_dim": 64, "num_key_value_heads": 4},
}
"""By how many numbers a block has, so that rows are whole blocks."""
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}


@dataclass(slots=True)
class Tensor:
    """dims: innermost first. offset: in the data."""

    name: bytes
    dims: list[int]
    kind: int
    offset: int


@dataclass(slots=True)
class Parts:
    """fields: names with types and values, as they stand in the file. counts: what the header says
    of tensors and fields; None: the truth."""

    fields: dict[bytes, bytes]
    tensors: list[Tensor]
    data: bytes
    magic: bytes = b"GGUF"
    version: int = 3
    counts: list[int | None] = field(default_factory=lambda: [None, None])
    twice: list[bytes] = field(default_factory=list)

    def render(self) -> tuple[bytes, int]:
        """The file, and how long its header is."""
        fields = [string(name) + value for name, value in self.fields.items()] + self.twice
        counts = [
            len(found) if said is None else said
            for said, found in zip(self.counts, (self.tensors, fields), strict=True)
        ]
        pieces = [self.magic, struct.pack("<IQQ", self.version, *counts), *fields]
        for tensor in self.tensors:
            shape = struct.pack(f"<I{len(tensor.dims)}Q", len(tensor.dims), *tensor.dims)
            pieces += (string(tensor.name), shape, struct.pack("<IQ", tensor.kind, tensor.offset))
        header = b"".join(pieces)
        padding = bytes(-len(header) % ALIGNMENT)
        return header + padding + self.data, len(header)


def string(content: bytes) -> bytes:
    """With its length."""
    return struct.pack("<Q", len(content)) + content


def value(given: Any) -> bytes:
    """With its type."""
    if isinstance(given, bool):
        return struct.pack("<IB", BOOL, given)
    if isinstance(given, int):
        return struct.pack("<II", U32, given)
    if isinstance(given, float):
        return struct.pack("<If", F32, given)
    if isinstance(given, str):
        return struct.pack("<I", STRING) + string(given.encode())
    entries = [value(entry) for entry in given]
    kind = entries[0][:4]
    return (
        struct.pack("<I", ARRAY)
        + kind
        + struct.pack("<Q", len(entries))
        + b"".join(entry[4:] for entry in entries)
    )


def make_parts(family: str, kind: str) -> Parts:
    """A model of two layers whose matrices are of this type."""
    config = CONFIG | _SIZES[STORAGE_TYPES[TYPES[kind]].block_size]
    parts = Parts(_fields(family, config, tokenizer()), [], b"")
    draw = np.random.default_rng(1)
    for name, shape in tensor_shapes(config, family).items():
        _add(parts, _gguf_name(name), shape, kind if len(shape) > 1 else "F32", draw)
    return parts


def _add(
    parts: Parts, name: str, shape: tuple[int, ...], kind: str, draw: np.random.Generator
) -> None:
    storage = STORAGE_TYPES[TYPES[kind]]
    if kind == "F32":
        content = draw.normal(0, 0.2, shape).astype(np.float32).tobytes()
    else:
        num_blocks = int(np.prod(shape)) // storage.block_size
        blocks = draw.integers(0, 256, (num_blocks, storage.block_bytes), dtype=np.uint8)
        for at in SCALES[kind]:
            blocks[:, at] = 0x14 + (blocks[:, at] & 3)
        content = blocks.tobytes()
    parts.tensors.append(Tensor(name.encode(), list(shape[::-1]), TYPES[kind], len(parts.data)))
    parts.data += content + bytes(-len(content) % ALIGNMENT)


def _gguf_name(name: str) -> str:
    for theirs, ours in _NAMES.items():
        name = name.replace(theirs, ours)
    return name


def _fields(family: str, config: dict[str, Any], text: dict[str, Any]) -> dict[bytes, bytes]:
    architecture = ARCHITECTURES[family]
    model = text["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    tokens += [token["content"] for token in text["added_tokens"]]
    tokens += [f"[PAD{index}]" for index in range(len(tokens), config["vocab_size"])]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    own = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
    }
    found = {
        "general.architecture": architecture,
        **{f"{architecture}.{name}": given for name, given in own.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": len(model["vocab"]),
        "tokenizer.chat_template": "{{ messages }}",
    }
    rendered = {name.encode(): value(given) for name, given in found.items()}
    # Types of tokens are signed.
    kinds = np.ones(len(tokens), np.int32)
    kinds[len(model["vocab"])] = 3  # control
    array = struct.pack("<IIQ", ARRAY, I32, len(kinds)) + kinds.tobytes()
    return rendered | {b"tokenizer.ggml.token_type": array}


def as_files(parts: Parts, name: str = "model.gguf") -> Files:
    """A folder with it alone."""
    return {name: parts.render()[0]}
