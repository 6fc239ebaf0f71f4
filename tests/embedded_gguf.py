"""The embedded model as a GGUF file, named and laid out as llama.cpp's converter does it."""

import json
import re
from pathlib import Path

import tokenizers
from safetensors.torch import load_file
from tests.gguf_writer import random_raw, write_gguf
from tests.text.gguf.metadata import byte_level_metadata

from quire.hub.model_folder import EMBEDDED_MODEL

_NAMES = {
    "model.embed_tokens.": "token_embd.",
    "model.norm.": "output_norm.",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.": "attn_",
    "mlp.": "ffn_",
    "_proj": "",
}
_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}


def write_embedded_gguf(path: Path, pre: str = "qwen2", kind: str | None = None) -> Path:
    """pre: how the tokenizer splits texts, by its name. kind: of the matrices' blocks, which are
    random then; None: its own matrices."""
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    settings = json.loads((EMBEDDED_MODEL / "tokenizer_config.json").read_text())
    backend = tokenizers.Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    rope = config.get("rope_parameters", config).get("rope_theta", 10000.0)
    metadata = {
        "general.architecture": "qwen3",
        "qwen3.rope.freq_base": float(rope),
        "tokenizer.chat_template": settings["chat_template"],
        **{f"qwen3.{ours}": config[theirs] for ours, theirs in _FIELDS.items()},
        **byte_level_metadata(backend, pre, eos_token_id=2, padding_token_id=0),
    }
    tensors = {
        _stored(name): tensor
        if kind is None or tensor.dim() < 2
        else random_raw(kind, tuple(tensor.shape), seed=0)
        for name, tensor in load_file(EMBEDDED_MODEL / "model.safetensors").items()
    }
    return write_gguf(path, metadata, tensors)


def _stored(name: str) -> str:
    for theirs, ours in _NAMES.items():
        name = re.sub(re.escape(theirs), ours, name)
    return name
