"""The registry of architectures, and the config of a model folder.

To add a family: its file in `families/`, and one line in `MODELS`; a program may add its own there.
Called by `models.checkpoints.loader` and `assembly`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quire.errors import UnsupportedModelError, shown
from quire.models.checkpoints.quantized import refuse_quantized_config
from quire.models.checkpoints.readers import find_reader
from quire.models.config import DecoderConfig
from quire.models.decoder import DecoderForCausalLM
from quire.models.families.granite import GraniteConfig
from quire.models.families.llama import LlamaConfig, LlamaForCausalLM
from quire.models.families.mistral import MistralConfig
from quire.models.families.olmo2 import Olmo2Config, Olmo2ForCausalLM
from quire.models.families.qwen2 import Qwen2Config
from quire.models.families.qwen3 import Qwen3Config
from quire.models.interface import CausalLM

CHECKPOINT_PARTS: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Our fused linears -> their parts' names in most checkpoints; all other names are equal."""


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """The classes of an architecture.

    checkpoint_parts: our fused linears' names -> their parts' names in the checkpoint.
    embedding, head: the checkpoint's names of the two tensors that may be tied.
    first_layer: how the names of the first layer's tensors begin, with its number and a dot.
    """

    config: type[DecoderConfig]
    model: type[CausalLM]
    checkpoint_parts: Mapping[str, tuple[str, ...]] = field(default_factory=CHECKPOINT_PARTS.copy)
    embedding: str = "model.embed_tokens.weight"
    head: str = "lm_head.weight"
    first_layer: str = "model.layers.0."


MODELS: dict[str, ModelEntry] = {
    "GraniteForCausalLM": ModelEntry(GraniteConfig, DecoderForCausalLM),
    "LlamaForCausalLM": ModelEntry(LlamaConfig, LlamaForCausalLM),
    "MistralForCausalLM": ModelEntry(MistralConfig, LlamaForCausalLM),
    "Olmo2ForCausalLM": ModelEntry(Olmo2Config, Olmo2ForCausalLM),
    "Qwen2ForCausalLM": ModelEntry(Qwen2Config, LlamaForCausalLM),
    "Qwen3ForCausalLM": ModelEntry(Qwen3Config, LlamaForCausalLM),
}


def load_config(folder: Path) -> DecoderConfig:
    """The config of a model folder in Hugging Face's format.

    Raises CheckpointError where config.json can't be read or lacks something, and
    UnsupportedModelError for an architecture, or a field, that is not understood.
    """
    path = folder / "config.json"
    raw = find_reader(folder).read_config(folder)
    refuse_quantized_config(str(folder), raw)
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if not isinstance(name, str) or name not in MODELS:
        raise UnsupportedModelError(
            f"{path}: architectures is {shown(names)}, which quire does not serve; it must be one "
            f"of {', '.join(MODELS)}"
        )
    return MODELS[name].config.from_hf(raw)
