"""What a folder is served as."""

import json
import logging

from quire.assembly.model_kind import choose_kind
from quire.options.engine_options import EngineOptions

TEXT = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def test_a_multimodal_model_is_served_for_text_and_that_is_said(tmp_path, caplog):
    names = ["LlavaForConditionalGeneration"]
    config = {"architectures": names, "text_config": TEXT, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.INFO, logger="quire.assembly.model_kind"):
        kind = choose_kind(EngineOptions(model=str(tmp_path)))
    assert kind.generates
    assert kind.config.architecture == "LlamaForCausalLM"
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "LlavaForConditionalGeneration is served for text, by its language model (LlamaForCausalLM)"
    )
