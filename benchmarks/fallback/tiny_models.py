"""Tiny random models of any class of transformers, and what its own greedy generation says.

The sizes that a config has are lowered by the names of its fields, which are alike in most of
them. Called by `equal_tokens.py` and by the tests.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

HIDDEN, HEADS, KV_HEADS, LAYERS, INNER, EXPERTS, VOCAB, POSITIONS = 64, 4, 2, 2, 96, 4, 320, 512

_SIZES = {
    HIDDEN: "hidden_size n_embd d_model word_embed_proj_dim embedding_size",
    LAYERS: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers"
    " num_experts_per_tok moe_k type_vocab_size num_global_key_value_heads"
    " swa_num_key_value_heads num_key_value_heads eos_token_id",
    HEADS: "num_attention_heads n_head n_heads encoder_attention_heads decoder_attention_heads"
    " swa_num_attention_heads num_experts num_local_experts n_routed_experts num_routed_experts"
    " moe_num_experts",
    INNER: "intermediate_size ffn_hidden_size encoder_ffn_dim decoder_ffn_dim ffn_dim n_inner dff",
    VOCAB: "vocab_size vocab_size_per_layer_input",
    POSITIONS: "max_position_embeddings n_positions",
    32: "moe_intermediate_size shared_expert_intermediate_size",
    24: "q_lora_rank qk_head_dim",
    16: "head_dim global_head_dim swa_head_dim kv_lora_rank qk_nope_head_dim v_head_dim"
    " hidden_size_per_layer_input",
    8: "qk_rope_head_dim sliding_window",
    1: "n_group topk_group num_expert_groups first_k_dense_replace bos_token_id",
    0: "pad_token_id",
}
SIZES = {name: size for size, names in _SIZES.items() for name in names.split()}

_ALWAYS = {"pad_token_id", "bos_token_id", "eos_token_id", "head_dim", "num_key_value_heads"}
"""Set where the default is None, too."""

_TOWER = {
    "depth": 1,
    "num_hidden_layers": 1,
    "num_layers": 1,
    "encoder_layers": 1,
    "image_size": 32,
    "patch_size": 16,
    "out_hidden_size": HIDDEN,
}
"""Of what sees or hears in a multimodal model."""

_OWN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "gemma3n_text": {
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.0] * 5,
    },
    "longcat_flash": {"head_dim": 8},
    # Its cache drops tokens before the window, but its masks show them.
    "moshi": {"sliding_window": 3000},
    "xmod": {"default_language": "en_XX"},
}
"""By model type: what the rules above don't find."""

PROMPTS = (
    [5, 17, 130, 9, 44, 251, 18, 33, 7, 7, 81],
    [200, 3],
    [11, *((i * 37 + 5) % 300 + 3 for i in range(40))],
)


def tiny_fields(kind: type[Any]) -> dict[str, Any]:
    """Fields of a config class that make its model tiny."""
    known = kind().to_dict()
    fields = {
        name: size
        for name, size in SIZES.items()
        if name in known and (known[name] is not None or name in _ALWAYS)
        if name == "eos_token_id" or not isinstance(known[name], list)
    }
    if "kv_lora_rank" in known:  # multi-head latent attention
        fields.pop("head_dim", None)
        fields["num_key_value_heads"] = HEADS
    if "is_decoder" in known:
        fields["is_decoder"] = True
    return fields | dict(_tiny_parts(kind)) | _OWN.get(known.get("model_type", ""), {})


def _tiny_parts(kind: type[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, given in (getattr(kind, "sub_configs", None) or {}).items():
        part = type(getattr(kind(), name)) if given is AutoConfig else given
        if part is type(None):
            continue
        known = part().to_dict()
        fields = tiny_fields(part)
        if name != "text_config":
            fields |= {
                each: size
                for each, size in _TOWER.items()
                if each in known and not isinstance(known[each], list)
            }
        if "model_type" in known:
            fields["model_type"] = known["model_type"]
        yield name, fields


def class_of(model_type: str) -> Any:
    """The class that predicts the next token."""
    found = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
    return found[0] if isinstance(found, (list, tuple)) else found


def make_tiny(model_type: str, folder: Path, **fields: Any) -> Any:
    """A random model in float32, saved in `folder`; `fields` go before those of `tiny_fields`."""
    kind = CONFIG_MAPPING[model_type]
    config = kind(**tiny_fields(kind) | fields)
    model = class_of(model_type)._from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            # Norms stay about 1; all else is large enough that tokens differ.
            parameter.copy_(noise * 0.08 if parameter.ndim > 1 else parameter + noise * 0.1)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    return model.eval()


def generated(
    model: Any, num_tokens: int, prompts: Sequence[Sequence[int]] = PROMPTS
) -> list[list[int]]:
    """Each prompt's tokens by transformers' own greedy generation, one prompt at a time."""
    found = []
    for prompt in prompts:
        with torch.inference_mode():
            token_ids = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                num_beams=1,
            )
        found.append(token_ids[0, len(prompt) :].tolist())
    return found
