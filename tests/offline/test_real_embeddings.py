"""MiniLM's embeddings equal those of transformers: means over tokens, scaled to length 1."""

from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from quire.offline.llm import LLM

TEXTS = [
    "A cat sleeps on the sofa.",
    "The kitten is napping on the couch.",
    "The central bank raised interest rates.",
    "def mean(values):\n    return sum(values) / len(values)",
    "¿Dónde está la biblioteca?",
    "word",
    "Long texts are read whole. " * 20,
    "日本語の文章 and émigrés 🙂",
]


SUBJECTS = ["A cat", "My neighbour", "The old bridge", "The committee", "This function"]
WHAT = [
    "sleeps all day.",
    "was seen by a friend yesterday, when it rained.",
    "costs more than we can pay.",
    "returns a list of names that nobody has read",
    "is not what it was in 1969: neither strong nor beautiful.",
    "reminds me of summer",
    "cannot be found in Paris.",
    "does the same thing, twice as quickly as before, for half of the price.",
    "fell.",
    "has been praised by critics; the public was less kind.",
    "knows how to bake bread",
]
SENTENCES = [*TEXTS, *(f"{subject} {what}" for subject, what in product(SUBJECTS, WHAT))]


def embeddings(minilm: Path, **options: str) -> torch.Tensor:
    outputs = LLM(str(minilm), dtype="float32", **options).embed(SENTENCES, use_tqdm=False)
    return torch.tensor([output.outputs.embedding for output in outputs])


@pytest.fixture(scope="module")
def exact(minilm: Path) -> torch.Tensor:
    """[63, 384], each of length 1."""
    torch.set_num_threads(1)
    return embeddings(minilm)


def test_embeddings_are_those_of_transformers(minilm: Path, exact: torch.Tensor) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(minilm), AutoModel.from_pretrained(minilm)
    expected = []
    with torch.inference_mode():
        for text in TEXTS:
            # Alone, and so without padding, whose tokens would have to be left out of the mean.
            hidden = model.eval()(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
            expected.append(torch.nn.functional.normalize(hidden.mean(0), dim=0))
    found = exact[: len(TEXTS)]
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-5)
    likeness = found @ found.T
    assert likeness[0, 1] > 0.6 > 0.2 > likeness[0, 2]


@pytest.mark.parametrize(("name", "least"), [("int8", 0.999), ("int4", 0.94)])
def test_rounded_weights_keep_directions(
    minilm: Path, exact: torch.Tensor, name: str, least: float
) -> None:
    cosines = (embeddings(minilm, quantization=name) * exact).sum(1)
    assert least <= cosines.min() < 1 - 1e-6, f"{cosines.min():.5f}, mean {cosines.mean():.5f}"
