"""Write the table of families into docs/models.md, from the registry and the tests' tiny configs.

    .venv/bin/python -m tools.model_table

The table has a line for each family that is in the registry and in `tests/models/family_shapes.py`.
A family that is only in the registry is named below the table. A family's config tells what its
layers remember and whether ranks can share it. Building its model shows whether it is computed as
one native program. tests/tools/test_model_table.py fails if the page is outdated. Needs
transformers and the native kernels.
"""

import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.models.family_shapes import FAMILIES, make_config
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.assembly.rank_build import build_rank
from quire.assembly.reports.model_report import kv_kinds
from quire.formats.format_registry import WEIGHT_FORMATS
from quire.kernels.cpu.library import load_library
from quire.models.architectures import MODELS
from quire.models.config import ModelConfig
from quire.models.registry import load_config
from quire.options.engine_options import EngineOptions

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"
LOCK = ROOT / "requirements.lock"
BEGIN, END = "<!-- tools/model_table.py writes from here -->", "<!-- to here -->"

EXAMPLES = {
    "DeepseekV2ForCausalLM": "DeepSeek-V2, V2-Lite",
    "DeepseekV3ForCausalLM": "DeepSeek-V3, R1",
    "FalconH1ForCausalLM": "Falcon-H1",
    "Lfm2ForCausalLM": "LFM2",
    "GPT2LMHeadModel": "GPT-2",
    "Gemma2ForCausalLM": "Gemma 2",
    "Gemma3ForCausalLM": "Gemma 3 (text)",
    "Gemma4ForCausalLM": "Gemma 4 (text)",
    "Glm4ForCausalLM": "GLM-4-0414",
    "Glm4MoeForCausalLM": "GLM-4.5, 4.6, 4.7",
    "Glm4MoeLiteForCausalLM": "GLM-4.7-Flash",
    "GlmForCausalLM": "GLM-4-9B",
    "GptOssForCausalLM": "gpt-oss",
    "GraniteForCausalLM": "Granite 3 (dense)",
    "GraniteMoeForCausalLM": "Granite 3 (mixtures)",
    "LlamaForCausalLM": "Llama 1 to 3, SmolLM2, TinyLlama",
    "Ministral3ForCausalLM": "Ministral 3 (text)",
    "MinistralForCausalLM": "Ministral",
    "MistralForCausalLM": "Mistral 7B and its relatives with that architecture",
    "MixtralForCausalLM": "Mixtral 8x7B, 8x22B",
    "NemotronHForCausalLM": "Nemotron-H, Nemotron Nano 2 (dense)",
    "OPTForCausalLM": "OPT",
    "Olmo2ForCausalLM": "OLMo 2",
    "Olmo3ForCausalLM": "OLMo 3",
    "OlmoForCausalLM": "OLMo",
    "OlmoeForCausalLM": "OLMoE",
    "Phi3ForCausalLM": "Phi-3, Phi-4",
    "Qwen2ForCausalLM": "Qwen2, Qwen2.5 (dense)",
    "Qwen3ForCausalLM": "Qwen3 (dense), Qwen3-Embedding, Qwen3-Reranker",
    "Qwen3MoeForCausalLM": "Qwen3 (mixtures)",
    "Qwen3NextForCausalLM": "Qwen3-Next",
    "Qwen3_5ForCausalLM": "Qwen3.5 (dense)",
    "Qwen3_5MoeForCausalLM": "Qwen3.5 (mixtures)",
    "SmolLM3ForCausalLM": "SmolLM3",
    "StableLmForCausalLM": "StableLM (but for 2 12B)",
}
"""The usual names of the models; a family without an entry has an empty cell."""


@dataclass(frozen=True, slots=True)
class Family:
    """A line of the table."""

    architecture: str
    #: The kinds of memory that layers have.
    kinds: tuple[str, ...]
    #: Whether the CPU computes the model as one native program, not module by module.
    is_native: bool
    #: Whether ranks can share the model.
    is_shared: bool

    @property
    def line(self) -> str:
        computed = "one program" if self.is_native else "module by module"
        ranks = "yes" if self.is_shared else "no"
        examples = EXAMPLES.get(self.architecture, "")
        kinds = ", ".join(self.kinds)
        return f"| `{self.architecture}` | {examples} | {kinds} | {computed} | {ranks} |"


def families() -> list[Family]:
    """The families of the architectures for which tests have a config. Raises
    NativeUnavailableError."""
    load_library()  # or nothing would be native
    found = [_family(name) for name in FAMILIES]
    return sorted({family.architecture: family for family in found}.values(), key=_name)


def _name(family: Family) -> str:
    return family.architecture.lower()


def _family(name: str) -> Family:
    with tempfile.TemporaryDirectory() as folder:
        fields: dict[str, Any] = make_config(name).to_dict()
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[fields["model_type"]]
        fields["architectures"] = [architecture]
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        config = load_config(Path(folder))
        is_native = _is_native(name, Path(folder), config)
    kinds = [re.sub(r" of \d+$", "", kind) for kind, _ in kv_kinds(config)]
    return Family(architecture, tuple(dict.fromkeys(kinds)), is_native, _is_shared(config))


def _is_shared(config: ModelConfig) -> bool:
    """Between as many ranks as its tiny config has KV heads, or half of them."""
    return any(config.why_not_split(size) is None for size in (2, 3))


def _is_native(name: str, folder: Path, config: ModelConfig) -> bool:
    AutoModelForCausalLM.from_config(make_config(name)).save_pretrained(folder)
    options = EngineOptions(
        model=str(folder),
        dtype="float32",
        device="cpu",
        max_num_seqs=2,
        max_model_len=32,
        max_num_batched_tokens=32,
        num_blocks=64,
    )
    return build_rank(options, folder, config, None, None, lambda *progress: None).runner.is_native


def table() -> str:
    """The text between the marks."""
    return "\n".join(_lines(families()))


def _lines(found: list[Family]) -> Iterator[str]:
    yield "| `architectures` in config.json | models | KV memory of layers | on the CPU | ranks |"
    yield "|---|---|---|---|---|"
    yield from (family.line for family in found)
    known = {family.architecture for family in found}
    unknown = [
        f"`{name}`" for name, entry in MODELS.items() if entry.generates and name not in known
    ]
    if unknown:
        yield ""
        yield f"Served, but not among the tests' tiny configs yet: {', '.join(unknown)}."
    others = [f"`{name}`" for name, entry in MODELS.items() if not entry.generates]
    yield ""
    yield f"They embed or score, and predict no tokens: {', '.join(others)}."
    formats = ", ".join(f"`{name}`" for name in WEIGHT_FORMATS)
    yield ""
    yield (
        f"Each was compared with transformers {_tested_version()}, token by token, and is served in"
        f" bfloat16, float32 and {formats}."
    )


def _tested_version() -> str:
    found = re.search(r"^transformers==(\S+)", LOCK.read_text(), flags=re.MULTILINE)
    if found is None:
        raise ValueError(f"{LOCK} pins no transformers")
    return found[1]


def with_table(page: str) -> str:
    """The page with the table of today, between its marks."""
    pattern = rf"({re.escape(BEGIN)}\n).*?({re.escape(END)})"
    new, count = re.subn(
        pattern, lambda marks: f"{marks[1]}{table()}\n{marks[2]}", page, flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f"{PAGE} has {count} pairs of marks")
    return new


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
