"""Sound model folders of a few kilobytes, one for each family and rope type, to be damaged."""

import json
from typing import Any

import numpy as np

Files = dict[str, bytes | None]
"""File name -> content; None: a pipe that nobody writes to."""

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "any",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": [299],
    "transformers_version": "4.51.0",
    "use_cache": True,
    "initializer_range": 0.02,
}
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0},
)


class Raw(str):
    """JSON text that no Python value stands for: 1e400, a name that is there twice."""


def render(value: Any) -> bytes:
    """JSON of a value with `Raw` in it."""
    raws: list[str] = []

    def plain(one: Any) -> Any:
        if isinstance(one, Raw):
            raws.append(str(one))
            return f"@raw{len(raws) - 1}@"
        if isinstance(one, dict):
            return {name: plain(inner) for name, inner in one.items()}
        return [plain(inner) for inner in one] if isinstance(one, list) else one

    text = json.dumps(plain(value))
    for index, raw in enumerate(raws):
        text = text.replace(f'"@raw{index}@"', raw)
    return text.encode(errors="surrogatepass")


def make_files(family: str, rope: dict[str, Any] | None) -> Files:
    """A sound model folder of a few kilobytes."""
    config = CONFIG | {"architectures": [family]} | ({"rope_scaling": rope} if rope else {})
    if family == "MistralForCausalLM":
        config["sliding_window"] = 32
    shapes = tensor_shapes(config, family)
    draw = np.random.default_rng(0)
    tensors = {name: draw.normal(0, 0.2, shape) for name, shape in shapes.items()}
    return {
        "config.json": render(config),
        "generation_config.json": render({"eos_token_id": [299], "temperature": 0.7}),
        "tokenizer.json": render(tokenizer()),
        "tokenizer_config.json": render({"eos_token": "</s>", "chat_template": "{{ messages }}"}),
        "special_tokens_map.json": render({"eos_token": {"content": "</s>", "lstrip": False}}),
        "model.safetensors": _safetensors(tensors),
    }


def tensor_shapes(config: dict[str, Any], family: str) -> dict[str, tuple[int, ...]]:
    """By the names in the checkpoint."""
    size, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (size,),
        "post_attention_layernorm.weight": (size,),
        "self_attn.q_proj.weight": (q, size),
        "self_attn.k_proj.weight": (kv, size),
        "self_attn.v_proj.weight": (kv, size),
        "self_attn.o_proj.weight": (size, q),
        "mlp.gate_proj.weight": (inner, size),
        "mlp.up_proj.weight": (inner, size),
        "mlp.down_proj.weight": (size, inner),
    }
    if family == "Qwen2ForCausalLM":
        layer |= {f"self_attn.{p}_proj.bias": (q if p == "q" else kv,) for p in "qkv"}
    if family == "Qwen3ForCausalLM":
        layer |= {f"self_attn.{p}_norm.weight": (head,) for p in "qk"}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (300, size)}
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes | {"model.norm.weight": (size,), "lm_head.weight": (300, size)}


def _safetensors(tensors: dict[str, Any]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in tensors.items():
        content = tensor.astype(np.float32).tobytes()
        span = [len(data), len(data) + len(content)]
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": span}
        data += content
    return with_header(render(header), data)


def with_header(header: bytes, data: bytes) -> bytes:
    """A safetensors file."""
    return len(header).to_bytes(8, "little") + header + data


def tokenizer() -> dict[str, Any]:
    """Bytes, a few merges and an end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(alphabet)}
    merges = [("a", "b"), ("ab", "c"), ("Ġ", "a")]
    vocab |= {"".join(pair): len(vocab) + index for index, pair in enumerate(merges)}
    found = Tokenizer(models.BPE(vocab, merges))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens(["</s>"])
    content: dict[str, Any] = json.loads(found.to_str())
    return content
