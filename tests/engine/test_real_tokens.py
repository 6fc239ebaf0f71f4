"""SmolLM2's fp32 greedy tokens equal transformers', read from safetensors and from a GGUF file."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.reference import Reference, assert_greedy
from transformers import AutoModelForCausalLM, PreTrainedModel

from quire.core.sampling_params import SamplingParams
from quire.formats.block_quantized.linear_methods import BlockQuantizedMethods
from quire.models.checkpoints.readers import open_checkpoint
from quire.offline.llm import LLM

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 32}
ENGLISH = [
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time, in a village by the sea, there lived",
    "The three branches of the government of the United States are",
    "To make a good cup of tea, first",
    "Photosynthesis is the process by which",
    "In 1969, the first human beings",
    "Dear customer,\n\nThank you for",
    "She opened the letter, read it twice, and",
    "1, 2, 4, 8, 16,",
]
CODE = [
    "def fibonacci(n):\n    ",
    "import os\n\nfor name in os.listdir('.'):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "#include <stdio.h>\n\nint main(void) {\n",
    "SELECT name, COUNT(*) FROM users",
    "function add(a, b) {\n  return",
    "try:\n    value = int(text)\nexcept ValueError:\n",
    "numbers = [3, 1, 2]\nnumbers.sort()\nprint(numbers)  # ",
    '{"name": "Ada", "age": 36, "languages": [',
    "git commit -m",
]
CHATS = [
    "What is the largest planet?",
    "Write a haiku about autumn.",
    "How do I reverse a list in Python?",
    "Translate 'good morning' into Spanish.",
    "Name three primary colours.",
    "Explain recursion in one sentence.",
    "What is 17 + 25?",
    "Give me a title for a story about a lost dog.",
    "¿Cuál es la capital de España?",
    "Why is the sky blue? 🌤️",
]


pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> PreTrainedModel:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


def assert_tokens_equal(llm: LLM, reference: PreTrainedModel, every: int) -> None:
    """Compare each `every`th prompt of each kind."""
    chats = [[{"role": "user", "content": text}] for text in CHATS[::every]]
    outputs = llm.generate([*ENGLISH[::every], *CODE[::every]], GREEDY, use_tqdm=False)
    outputs += llm.chat(chats, GREEDY, use_tqdm=False)
    assert len(outputs) == 30 // every
    num_ties, told = 0, Reference(reference)
    for output in outputs:
        token_ids = output.outputs[0].token_ids
        assert len(token_ids) == GREEDY.max_tokens
        num_ties += assert_greedy(told, output.prompt_token_ids, token_ids, str(output.prompt))
    assert num_ties <= 1


def test_tokens_of_prompts_equal(smollm2: Path, reference: PreTrainedModel) -> None:
    assert_tokens_equal(LLM(str(smollm2), **OPTIONS), reference, every=2)


def test_tokens_of_the_gguf_files_numbers_equal(
    smollm2_gguf: Path, reference: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers that are read of the file are those that transformers has written in bfloat16,
    so with them, unrounded, its model is a reference for the file."""
    source = open_checkpoint(smollm2_gguf)
    parameters = dict(reference.named_parameters())
    with torch.no_grad():
        for name in source.names & parameters.keys():
            with source.rows(name, range(source.shape(name)[0])) as rows:
                assert torch.equal(rows.bfloat16().float(), parameters[name]), name
                parameters[name].copy_(rows)
    assert len(source.names) == len(parameters) == 272
    # Products of codes would round activations.
    monkeypatch.setattr(BlockQuantizedMethods, "of", lambda *_: None)
    assert_tokens_equal(LLM(str(smollm2_gguf), **OPTIONS), reference, every=5)
