"""The list of names that transformers may read of a config, against the installed sources."""

import transformers
from tools.config_fields import names_of, sources
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.models.architectures import MODELS
from quire.models.transformers_names.model_types import ARCHITECTURES
from quire.models.transformers_names.read_fields import LIST, known_version
from quire.models.wrappers import WRAPPERS


def test_the_list_has_all_that_the_served_families_and_the_shared_sources_read() -> None:
    """Of one version; reading all models' sources takes too long for a test."""
    assert known_version() == transformers.__version__
    listed = set(LIST.read_text().split())
    found = sources()
    served = [path for path in found if path.parent.name in ARCHITECTURES]
    shared = [path for path in found if path.parents[1].name != "models"]
    assert len(served) >= 2 * len(ARCHITECTURES) - 8 and len(shared) > 20
    for path in served + shared:
        assert names_of(path) <= listed, f"{path}: run tools/config_fields.py"


def test_the_list_is_sorted_and_has_fields_of_models_of_all_kinds() -> None:
    names = LIST.read_text().split()[1:]
    assert names == sorted(set(names))
    assert {"hidden_size", "clip_qkv", "vision_config", "mamba_d_state", "logit_scale"} <= {*names}


def test_a_model_type_has_the_class_of_transformers() -> None:
    assert set(ARCHITECTURES.values()) <= set(MODELS) | WRAPPERS.keys()
    for kind, name in ARCHITECTURES.items():
        theirs = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
        assert name == theirs or name in WRAPPERS or kind == "bert", kind
    reached = {*ARCHITECTURES.values()}
    generating = {name for name, entry in MODELS.items() if entry.generates}
    # Their types are those of wrappers, where the config has a text_config.
    assert generating - reached <= {"Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"}
