"""A GGUF file is served as the model that it was made of, from here and from the hub."""

from pathlib import Path

import pytest
from tests.embedded_gguf import write_embedded_gguf
from tests.hub.conftest import start_hub
from tests.hub.hub_server import FakeHub

from quire import LLM, SamplingParams
from quire.assembly.reports.model_report import report_on
from quire.errors import CheckpointError, UnsupportedModelError
from quire.hub.model_folder import EMBEDDED_MODEL

__all__ = ["start_hub"]

PROMPTS = ["import os\n\ndef ", "class A:"]
QUESTION = [{"role": "user", "content": "def add(a, b):"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
OPTIONS = {"max_model_len": 256, "dtype": "float32", "kv_cache_memory": "16MiB"}


def answers(model: str | None, **options: object) -> list[tuple[list[int], list[int], str]]:
    """Prompt, tokens and text of each."""
    llm = LLM(model, **OPTIONS, **options)
    found = [*llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    found += llm.chat(QUESTION, GREEDY, use_tqdm=False)
    return [
        (list(each.prompt_token_ids), list(each.outputs[0].token_ids), each.outputs[0].text)
        for each in found
    ]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embedded_gguf(tmp_path_factory.mktemp("gguf") / "tiny-BF16.gguf")


@pytest.fixture(scope="module")
def expected() -> list[tuple[list[int], list[int], str]]:
    return answers(None)


def test_the_same_tokens_as_the_folder(gguf: Path, expected: object) -> None:
    assert answers(str(gguf)) == expected
    assert answers(str(gguf.parent)) == expected


def test_the_same_from_the_hub(gguf: Path, expected: object, start_hub) -> None:
    content = gguf.read_bytes()
    hub = start_hub(FakeHub({"tiny-BF16.gguf": content, "tiny-Q8_0.gguf": b"GGUF"}, "org/t-GGUF"))
    assert answers("org/t-GGUF:bf16") == expected
    assert hub.ranges("tiny-BF16.gguf") == [f"bytes=0-{len(content) - 1}", None]
    assert {*hub.fetched()} == {"tiny-BF16.gguf"}


def test_the_end_tokens_are_those_of_the_folder(gguf: Path) -> None:
    limits = LLM(str(gguf), **OPTIONS).engine.limits
    assert limits.end_token_ids == LLM(None, **OPTIONS).engine.limits.end_token_ids


def test_another_tokenizer_may_be_named(
    gguf: Path, tmp_path: Path, expected: list[tuple[list[int], list[int], str]]
) -> None:
    unknown = write_embedded_gguf(tmp_path / "unknown.gguf", "no-such")
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.pre says .*--tokenizer"):
        LLM(str(unknown), **OPTIONS)
    assert answers(str(unknown), tokenizer=str(EMBEDDED_MODEL)) == expected
    assert answers(None, tokenizer=str(gguf)) == expected


def test_the_report_has_the_engines_bytes_of_quantized_weights(tmp_path: Path) -> None:
    path = write_embedded_gguf(tmp_path / "tiny-Q8_0.gguf", kind="Q8_0")
    found = report_on(str(path), None, 256)
    stored, *others = found.precisions
    assert stored.name == "as stored" and [each.name for each in others] == ["int8", "int4"]
    assert all("quantized by GGUF's types (Q8_0)" in str(each.obstacle) for each in others)
    whole = report_on(str(EMBEDDED_MODEL), None, 256).precisions[0]
    assert 0.5 < stored.weight_bytes / whole.weight_bytes < 0.6 and stored.kv_bytes > 0
    assert 0 < stored.token_bytes < path.stat().st_size > stored.weight_bytes
    llm = LLM(str(path), max_model_len=256, kv_cache_memory="16MiB")
    assert llm.engine.facts["weight_bytes"] == stored.weight_bytes


def test_the_report_has_the_memory_of_a_gguf_model(gguf: Path, tmp_path: Path) -> None:
    found = report_on(str(gguf), None, 256)
    assert (found.architecture, found.folder) == ("Qwen3ForCausalLM", gguf)
    assert (found.problem, found.tokenizer_problem) == (None, None)
    assert [each.name for each in found.precisions] == ["bfloat16", "float32", "int8", "int4"]
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(gguf.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"cut\.gguf is not a whole GGUF file"):
        report_on(str(cut), None, 256)
