"""Tiny random models of many families, for `law`, and the number formats in which they are served.

All have the embedded model's tokenizer, so that every option that reads text can be drawn.
"""

import json
import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tests.adapters.embedded import save_adapter
from tests.models.family_shapes import FAMILIES, make_config
from transformers import AutoModelForCausalLM

from quire import LoRARequest
from quire.hub.model_folder import EMBEDDED_MODEL

VOCAB_SIZE = 4096
FIRST_TOKEN = 3
"""The first token of the tokenizer that is not special."""

MAX_MODEL_LEN = 192
EMBEDDED = "embedded"
WITH_STATES = ("falcon_h1", "nemotron_h", "qwen3_next", "qwen3_5", "qwen3_5_moe")
"""Families with recurrent states, which draft for no other model."""

WITH_LATENTS = ("deepseek_v2", "deepseek_v3", "deepseek_v3, dense", "glm4_moe_lite")
"""Families without int8 pages on the native kernels."""

NAMES = (EMBEDDED, *FAMILIES)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
NUM_ADAPTERS = 2


@dataclass(frozen=True)
class Served:
    """A model and the options that change the bits of its logits."""

    name: str
    folder: Path | None
    options: Mapping[str, Any]
    adapters: list[LoRARequest] = field(default_factory=list)
    #: The options of the drafter, for engines with drafts; empty if there is none.
    drafter: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        drafter = f", {self.drafter['speculation']}" if self.drafter else ""
        return f"{self.name} {dict(self.options)}{drafter}"


def draw_served(rng: random.Random, folder: Path, name: str | None = None) -> Served:
    """A model of a random family, or of the named one; its files are written into `folder`."""
    name = name or rng.choice((EMBEDDED, rng.choice(NAMES), rng.choice(NAMES)))
    options: dict[str, Any] = {"dtype": rng.choice(("float32", "bfloat16"))}
    options["quantization"] = rng.choice((None, None, "int8", "int4"))
    if name not in WITH_LATENTS and rng.random() < 0.3:
        options["kv_cache_dtype"] = "int8"
    if name != EMBEDDED:
        return Served(name, saved(name, folder / name.replace(" ", "_")), options)
    if rng.random() < 0.05:
        options["tensor_parallel_size"] = 2
    if rng.random() > 0.4 or "tensor_parallel_size" in options:
        return Served(name, None, options)
    adapters = [
        LoRARequest(f"a{seed}", seed, str(save_adapter(folder / f"a{seed}", seed)))
        for seed in range(1, 1 + NUM_ADAPTERS)
    ]
    options |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "quantization": None}
    return Served(name, None, options, adapters)


def saved(name: str, folder: Path, **changes: Any) -> Path:
    """The folder of the family's model, with these changes of its config; it is written once."""
    if folder.exists():
        return folder
    sizes = {"max_position_embeddings": 256, "vocab_size": VOCAB_SIZE}
    if name.startswith("gemma4"):
        sizes["vocab_size_per_layer_input"] = VOCAB_SIZE
    special = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    torch.manual_seed(len(name))
    config = make_config(name, **sizes, **special, **changes)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            # Wide, so that the tokens depend on the context; norms and biases matter, too.
            parameter.normal_(0, 0.15)
            if "norm" in path:
                parameter += 1
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    for file in TOKENIZER_FILES:
        shutil.copy(EMBEDDED_MODEL / file, folder)
    return folder
