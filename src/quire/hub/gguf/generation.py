"""Reads end tokens and sampling defaults of a GGUF file, as generation_config.json has them.

    tokenizer.ggml.eos_token_id, .eot_token_id, .eom_token_id    end a text, a turn, a message
    general.sampling.*                                            temperature, top_p and so on

Most files name only the end token of the original tokenizer. But the model may end its answers with
other tokens, which the original generation_config.json listed. As in llama.cpp (llama-vocab.cpp),
these tokens are found by their texts among the special tokens and the user-defined tokens, since
older converters stored some special tokens as user-defined. Called by `models.generation_config`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quire.hub.gguf.token_types import guess_types

_NAMED = ("eos", "eot", "eom")
_ENDS = frozenset(
    {
        *(
            "<|eot_id|>",
            "<|im_end|>",
            "<|end|>",
            "<|return|>",
            "<|call|>",
            "<|flush|>",
            "<|calls|>",
        ),
        *("<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]"),
        *("[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>"),
        *("<|tool_response>", "<\uff5cend▁of▁sentence\uff5c>", "[e~["),
    }
)
"""Texts of special tokens that end an answer."""
_CHANNELS = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})
"""In vocabularies that have these tokens, "<|end|>" ends a part of an answer, not the answer."""
_TAGS = frozenset({"</s>", "<eos>"})
"""Texts that may also be ordinary text: they end an answer only as special tokens."""
_CONTROL, _USER_DEFINED = 3, 4

_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
"""Names in generation_config.json -> names in the file, after "general.sampling."."""


def read_generation(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of generation_config.json that the metadata has, unchecked."""
    fields: dict[str, Any] = {"eos_token_id": _end_tokens(metadata)}
    for name, stored in _SAMPLING.items():
        value = metadata.get(f"general.sampling.{stored}")
        if value is not None:
            fields[name] = _decimal(value)
    return fields


def _end_tokens(metadata: Mapping[str, Any]) -> list[Any]:
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _NAMED)
    found = [token_id for token_id in named if token_id is not None]
    odd = [token_id for token_id in found if type(token_id) is not int]
    if odd:
        return odd  # the caller refuses them
    ends = {text: each for text, each in _tokens(metadata, _USER_DEFINED) if text in _ENDS - _TAGS}
    ends |= {text: each for text, each in _tokens(metadata, _CONTROL) if text in _ENDS}
    if any(each <= ends.keys() for each in _CHANNELS):
        ends.pop("<|end|>", None)
    if "<|tool_response>" in ends:  # Gemma 4, where "</s>" does not end an answer
        ends.pop("</s>", None)
    return list(dict.fromkeys([*found, *ends.values()]))


def _tokens(metadata: Mapping[str, Any], kind: int) -> list[tuple[str, int]]:
    """(text, id) of the tokens of a type."""
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    types = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, Sequence):
        return []
    if types is None:
        types = guess_types(
            [str(each) for each in tokens], metadata.get("tokenizer.ggml.model"), ()
        )
    found = np.flatnonzero(np.asarray(types) == kind).tolist()
    return [(str(tokens[i]), i) for i in found if i < len(tokens)]


def _decimal(value: Any) -> Any:
    """The shortest decimal that rounds to the same float32, to undo the rounding in the file."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
