"""Small random models that embed and score, in the folders that sentence-transformers makes."""

import json
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3Model,
)

from quire.hub.model_folder import EMBEDDED_MODEL

WORDS = ["paris", "is", "a", "city", "the", "capital", "of", "france", "cats", "sleep", "bread"]
MODULES = "sentence_transformers.models"

BERT = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}
QWEN3 = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}


def make_bert(
    folder: Path, num_labels: int = 0, *, of_tokens: bool = False, **fields: object
) -> PreTrainedModel:
    """A BERT with a tokenizer of whole words; with labels, a cross-encoder, or of tokens."""
    config = BertConfig(**(BERT | fields), **({"num_labels": num_labels} if num_labels else {}))
    labelled = BertForTokenClassification if of_tokens else BertForSequenceClassification
    model = _random(labelled(config) if num_labels else BertModel(config))
    model.save_pretrained(folder)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: i for i, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


def make_qwen3(
    folder: Path, kind: type[PreTrainedModel] = Qwen3ForCausalLM, **fields: object
) -> PreTrainedModel:
    """A Qwen3 with the tokenizer of the embedded model. kind: also Qwen3Model, or
    Qwen3ForSequenceClassification."""
    assert kind in (Qwen3ForCausalLM, Qwen3Model, Qwen3ForSequenceClassification)
    model = _random(kind(Qwen3Config(**(QWEN3 | fields))))
    model.save_pretrained(folder)
    shutil.copy(EMBEDDED_MODEL / "tokenizer.json", folder)
    return model


def add_modules(folder: Path, mode: str, *, normalize: bool, max_seq_length: int = 0) -> None:
    """The files of sentence-transformers. mode: as in 1_Pooling/config.json."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modules += [("2_Normalize", "Normalize")] if normalize else []
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"{MODULES}.{name}"}
        for i, (path, name) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    modes = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    fields = {f"pooling_mode_{each}": each == mode for each in modes}
    fields |= {"word_embedding_dimension": 64, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(fields))
    if max_seq_length:
        (folder / "sentence_bert_config.json").write_text(
            json.dumps({"max_seq_length": max_seq_length, "do_lower_case": False})
        )


def _random(model: PreTrainedModel) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.15)
            if "norm" in name.lower() and name.endswith("weight"):
                parameter += 1
    return model.eval()
