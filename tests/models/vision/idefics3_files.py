"""A tiny random SmolVLM, which transformers wrote, and tiles for it."""

import json
from pathlib import Path

import torch
from transformers import PreTrainedModel, SmolVLMConfig, SmolVLMForConditionalGeneration

IMAGE_TOKEN = 5
"""The placeholder's token id."""
SIDE = 48
"""Height and width of a tile: 6 x 6 patches, which become 3 x 3 embeddings."""
TILE_TOKENS = 9

VISION = {
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": 8,
}
TEXT = {
    "model_type": "llama",
    "vocab_size": 1013,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}


def save_smolvlm(folder: Path, seed: int = 0) -> PreTrainedModel:
    """Write a random model to the folder, and return it, in fp32."""
    torch.manual_seed(seed)
    config = SmolVLMConfig(
        vision_config=VISION, text_config=TEXT, scale_factor=2, image_token_id=IMAGE_TOKEN
    )
    config._attn_implementation = "eager"
    model = SmolVLMForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Wide, so that logits lie apart; norms and biases start as constants: they must matter.
            parameter.normal_(0, 0.15)
            if "norm" in name and name.endswith("weight"):
                parameter += 1
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    return model


def make_tile(seed: int, side: int = SIDE) -> torch.Tensor:
    """A random tile [3, side, side]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(3, side, side, generator=generator) * 2 - 1
