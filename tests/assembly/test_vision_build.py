"""Engines of models whose images one step computes whole: steps, backends, refusals."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.image_prompts import (
    IMAGE_FAMILIES,
    PROMPTS,
    ImageFamily,
    Part,
    answers_of,
    make_request,
    reference_logits,
    token_ids_of,
)
from tests.models.vision import gemma4_files
from tests.models.vision.towers import save_model
from transformers import PreTrainedModel

from quire import LLM
from quire.attention.torch_paged import TorchPagedAttention
from quire.errors import ConfigurationError, RequestNeverFitsError

FAMILY = IMAGE_FAMILIES["gemma3"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("gemma3")
    return folder, FAMILY.save(folder)


def make(folder: Path, **options: Any) -> LLM:
    sizes = {"max_model_len": 96, "dtype": "float32", "skip_tokenizer_init": True}
    return LLM(str(folder), **(sizes | options))


def assert_equal(
    llm: LLM, family: ImageFamily, model: PreTrainedModel, parts: Sequence[Part]
) -> None:
    """Each token is transformers' choice after those before it."""
    ((_, entries),) = answers_of(llm.engine, [make_request(family, "r", parts)]).items()
    tokens = [token for token, _ in entries]
    logits = reference_logits(family, model, parts, tokens)
    assert (logits.max(-1).values - logits[range(len(tokens)), tokens]).max() < 1e-3


def test_a_step_exceeds_its_tokens_for_one_image(saved: tuple[Path, PreTrainedModel]) -> None:
    """An image of 9 tokens, in steps of 4, by torch's attention."""
    folder, model = saved
    llm = make(folder, max_num_batched_tokens=4, max_num_seqs=2, attention_backend="torch")
    assert_equal(llm, FAMILY, model, PROMPTS["two"])


def test_images_of_small_gemma_4_are_causal(tmp_path: Path) -> None:
    """They are computed in chunks like text."""
    family = replace(
        IMAGE_FAMILIES["gemma4"],
        save=lambda folder: save_model(gemma4_files.reference("small"), folder),
    )
    model = family.save(tmp_path)
    llm = make(tmp_path, max_num_batched_tokens=4, max_num_seqs=2)
    assert_equal(llm, family, model, PROMPTS["two"])
    assert llm.engine.scheduler.stats.num_steps > len(token_ids_of(family, PROMPTS["two"])) // 4


def test_a_backend_that_shows_no_later_keys_is_refused_for_images(
    saved: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchPagedAttention, "serves_sight_ahead", False)
    options = {"kernels": "torch", "attention_backend": "torch"}
    with pytest.raises(
        ConfigurationError, match=r"can't compute images of Gemma3For.*language_mod"
    ):
        make(saved[0], **options)
    llm = make(saved[0], language_model_only=True, **options)
    assert llm.engine.limits.max_content_tokens == 0


def test_a_prompt_whose_image_never_fits_is_refused(saved: tuple[Path, PreTrainedModel]) -> None:
    engine = make(saved[0], block_size=8, num_blocks=25).engine
    with pytest.raises(RequestNeverFitsError):
        engine.add(make_request(FAMILY, "r", PROMPTS["the same twice"], max_tokens=30))
    answers_of(engine, [make_request(FAMILY, "text", PROMPTS["text"], max_tokens=30)])
