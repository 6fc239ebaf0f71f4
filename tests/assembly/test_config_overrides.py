"""What hf_overrides changes of a model, and what it may not say."""

import json
import shutil
from pathlib import Path

import pytest

from quire.assembly.model_kind import choose_kind
from quire.errors import ConfigurationError, UnsupportedModelError
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.layers.rotary import YarnRope
from quire.options.engine_options import EngineOptions

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 2048,
}


def kind(**options):
    return choose_kind(EngineOptions.from_mapping(options))


def test_a_context_is_extended():
    found = kind(hf_overrides={"rope_parameters": YARN, "max_model_len": 6000})
    assert isinstance(found.config.rope, YarnRope) and found.config.rope.factor == 4
    assert found.options.max_model_len == 6000 <= found.config.max_supported_positions
    assert kind(hf_overrides=json.dumps({"rope_scaling": YARN})).config.rope == found.config.rope


def test_an_override_replaces_the_field_in_its_other_form(tmp_path: Path):
    shutil.copytree(EMBEDDED_MODEL, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    raw = json.loads(path.read_text()) | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    path.write_text(json.dumps(raw))
    found = kind(model=str(tmp_path / "model"), hf_overrides={"rope_parameters": YARN})
    assert found.config.rope == kind(hf_overrides={"rope_parameters": YARN}).config.rope


def test_a_classifier_of_two_tokens_is_a_model_that_scores_by_them():
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["no", "if"],
        "is_original_qwen3_reranker": True,
    }
    expected, found = kind(score_tokens="no,if"), kind(hf_overrides=overrides)
    assert found.pooling == expected.pooling and found.config == expected.config
    assert found.options == expected.options and found.pooling.can_score


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hf_overrides": {"use_cache": True}}, "use_cache, which changes nothing"),
        ({"hf_overrides": {"eos_token_id": 3}}, "eos_token_id, which changes nothing"),
        ({"hf_overrides": {"max_model_len": 9}, "max_model_len": 8}, "is 8, and 9 in hf_overrides"),
        ({"hf_overrides": {"classifier_from_token": ["Yes"]}}, "is made of two tokens"),
        ({"hf_overrides": {"method": "from_2_way_softmax"}}, "is made of two tokens"),
        ({"hf_overrides": {"max_model_len": 1}}, "max_model_len is 1, but must be at least 2"),
        ({"hf_overrides": "no"}, "hf_overrides is 'no', but must be an object in JSON"),
        ({"hf_overrides": {"architectures": ["Bard"]}}, r"architectures is \['Bard'\]"),
    ],
)
def test_overrides_without_effect_or_given_twice_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        kind(**options)


def test_fields_are_read_as_those_of_a_file():
    with pytest.raises(UnsupportedModelError, match="the field attention_chunk_size is 3"):
        kind(hf_overrides={"attention_chunk_size": 3})
    with pytest.raises(ConfigurationError, match="hf_overrides has banana, which no model reads"):
        kind(hf_overrides={"banana": 3})
