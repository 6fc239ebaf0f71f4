"""Adapters of the language model beside images: the tokens of merged weights, in any company."""

from pathlib import Path

import pytest
import torch
from tests.adapters.peft_folders import merge, random_pairs, save_peft, sizes_of
from tests.engine.crowding import preempt_much
from tests.engine.image_prompts import (
    IMAGE_FAMILIES,
    PROMPTS,
    Answers,
    ImageFamily,
    answers_of,
    make_request,
    reference_logits,
)
from torch import nn
from transformers import PreTrainedModel

from quire import LLM
from quire.core.request import Request
from quire.core.scheduling.growth_forecast import GrowthForecast
from quire.errors import AdapterError

RANK, NEAR_TIE = 4, 1e-3
OPTIONS = {"max_model_len": 96, "skip_tokenizer_init": True, "enable_lora": True, "max_loras": 2}
CROWDED = {"block_size": 8, "max_num_batched_tokens": 13, "max_num_seqs": 12}


class Adapted:
    """A checkpoint, two adapters of its language model, and transformers' models merged with
    them."""

    def __init__(self, name: str, folder: Path) -> None:
        self.family: ImageFamily = IMAGE_FAMILIES[name]
        self.folder = folder / "model"
        base = self.family.save(self.folder)
        #: By the name of the adapter; "" is the base model.
        self.merged: dict[str, PreTrainedModel] = {"": base}
        self.adapters: dict[str, Path] = {}
        sizes = sizes_of(base, r"language_model|text_model")
        for seed, adapter in enumerate("ab"):
            pairs = random_pairs(sizes, RANK, seed)
            self.adapters[adapter] = save_peft(folder / adapter, pairs)
            self.merged[adapter] = self.family.save(folder / "again")
            merge(self.merged[adapter], pairs, 1.0)

    def llm(self, **options: object) -> LLM:
        return LLM(str(self.folder), **(OPTIONS | {"max_lora_rank": RANK} | options))

    def requests(self, llm: LLM, max_tokens: int = 8) -> list[Request]:
        """Each prompt for the base model and each adapter, by turns."""
        found = []
        for name, parts in PROMPTS.items():
            for adapter in self.merged:
                ref = None
                if adapter:
                    path = str(self.adapters[adapter])
                    ref = llm.engine.adapters.find(adapter, path).result()
                params = {"adapter": ref, "max_tokens": max_tokens}
                found.append(make_request(self.family, f"{adapter}:{name}", parts, **params))
        return found


@pytest.fixture(scope="module", params=["smolvlm", "qwen3_vl", "qwen3_5"])
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    torch.set_num_threads(1)
    return Adapted(request.param, tmp_path_factory.mktemp(request.param))


def test_tokens_equal_those_of_merged_weights(adapted: Adapted) -> None:
    """Twice in one crowd, the second time from the prefix cache."""
    llm = adapted.llm(dtype="float32", **CROWDED)
    first = answers_of(llm.engine, adapted.requests(llm))
    assert llm.engine.stats().contents["num_encoded"] == 2, "adapters share the images"
    answers = answers_of(llm.engine, adapted.requests(llm))
    assert answers.keys() == first.keys()
    assert llm.engine.stats().num_hit_tokens > 0
    for (request_id, _), entries in [*first.items(), *answers.items()]:
        adapter, _, name = request_id.partition(":")
        tokens = [token for token, _ in entries]
        model = adapted.merged[adapter]
        logits = reference_logits(adapted.family, model, PROMPTS[name], tokens)
        best, chosen = logits.max(dim=-1).values, logits[range(len(tokens)), tokens]
        assert tokens and (best - chosen).max() < NEAR_TIE, request_id


@pytest.mark.usefixtures("native_engine")
def test_equal_to_the_bit(adapted: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, and in a crowd that is chunked and preempted."""
    alone = adapted.llm(enable_prefix_caching=False)
    expected: Answers = {}
    for request in adapted.requests(alone, 16):
        expected |= answers_of(alone.engine, [request])
    said = {adapter: expected[f"{adapter}:two", 0] for adapter in adapted.merged}
    assert len({repr(each) for each in said.values()}) == 3, "they say different things"
    monkeypatch.setattr(GrowthForecast, "fits_later", lambda *_: True)
    crowd = adapted.llm(num_blocks=adapted.family.num_cramped_blocks, **CROWDED)
    preempt_much(crowd)
    assert answers_of(crowd.engine, adapted.requests(crowd, 16)) == expected
    assert crowd.engine.stats().num_preemptions > 0


def test_adapters_of_the_encoder_are_refused(adapted: Adapted, tmp_path: Path) -> None:
    sizes = {
        path: (module.in_features, module.out_features)
        for path, module in adapted.merged[""].named_modules()
        if isinstance(module, nn.Linear) and path != "lm_head"
    }
    folder = str(save_peft(tmp_path / "lora", random_pairs(sizes, RANK)))
    with pytest.raises(AdapterError, match=r"(vision|visual|connector)\S* is no linear of"):
        adapted.llm().engine.adapters.find("whole", folder).result()
    text = adapted.llm(language_model_only=True)
    assert text.engine.adapters.find("whole", folder).result().name == "whole"
