"""Which tokens end an answer, and the sampling defaults, by a GGUF file's metadata."""

from typing import Any

import numpy as np
import pytest

from quire.hub.gguf.generation import read_generation


def ends(tokens: list[str], types: Any, **named: int) -> list[int]:
    """named: eos=1 and so on."""
    metadata = {f"tokenizer.ggml.{name}_token_id": token_id for name, token_id in named.items()}
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    found: list[int] = read_generation(metadata)["eos_token_id"]
    return found


@pytest.mark.parametrize(
    ("tokens", "named", "expected"),
    [
        (["a", "<|im_end|>", "<|endoftext|>"], {"eos": 1}, [1, 2]),  # Qwen
        (["a", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"], {"eos": 2}, [2, 1, 3]),  # Llama 3
        (["a", "<eos>", "<end_of_turn>"], {"eos": 1, "eot": 2}, [1, 2]),  # Gemma 3
        # gpt-oss: "<|end|>" ends a part of an answer
        (["<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"], {"eos": 1}, [1, 2, 3]),
        (["<|end|>", "<|endoftext|>"], {"eos": 1}, [1, 0]),  # Phi 3
        (["</s>", "<eos>", "<turn|>", "<|tool_response>"], {"eos": 1}, [1, 2, 3]),  # Gemma 4
        (["a", "b"], {"eos": 0, "eot": 1, "eom": 1}, [0, 1]),
        (["a", "b"], {}, []),
    ],
)
def test_end_tokens_are_named_or_known(
    tokens: list[str], named: dict[str, int], expected: list[int]
) -> None:
    types = [3 if text.startswith("<") else 1 for text in tokens]
    assert ends(tokens, types, **named) == expected
    assert ends(tokens, np.array(types, np.int32), **named) == expected


def test_a_user_defined_token_ends_an_answer_where_its_text_can_be_nothing_else() -> None:
    """As in files of chat models on Llama's tokenizer that older converters made."""
    assert ends(["</s>", "<|im_end|>"], [3, 4], eos=0) == [0, 1]
    assert ends(["<|end|>", "<|return|>", "<|call|>"], [4, 4, 4], eos=1) == [1, 2]
    assert ends(["<eos>", "</s>", "<end_of_turn>"], [3, 4, 3], eos=0) == [0, 2]  # HTML's, in Gemma


def test_a_normal_token_of_such_a_text_ends_nothing() -> None:
    assert ends(["</s>", "<|im_end|>", "a"], [1, 1, 3], eos=2) == [2]
    assert read_generation({"tokenizer.ggml.tokens": ["</s>"]}) == {"eos_token_id": []}


def test_without_types_end_tokens_are_known_by_texts_that_can_be_nothing_else() -> None:
    metadata = {
        "tokenizer.ggml.tokens": ["</s>", "a", "<|im_end|>"],
        "tokenizer.ggml.model": "gpt2",
    }
    assert read_generation(metadata) == {"eos_token_id": [2]}
    metadata["tokenizer.ggml.model"] = "llama"
    assert read_generation(metadata) == {"eos_token_id": [0, 2]}


def test_invalid_end_token_ids_are_passed_on_unchanged() -> None:
    assert ends(["a"], [1], eos="x", eot=3) == ["x"]  # type: ignore[arg-type]
    assert ends(["a"], [1], eos=-1) == [-1]


def test_sampling_defaults_are_decimals_again() -> None:
    metadata = {
        "general.sampling.temp": float(np.float32(0.6)),
        "general.sampling.top_k": 20,
        "general.sampling.top_p": float(np.float32(0.95)),
        "general.sampling.min_p": 0.0,
        "general.sampling.penalty_repeat": float(np.float32(1.1)),
        "general.sampling.mirostat": 1,
    }
    assert read_generation(metadata) == {
        "eos_token_id": [],
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.0,
        "repetition_penalty": 1.1,
    }
