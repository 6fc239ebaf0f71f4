"""Models that can't draft for another one are refused by name; what drafts is reported."""

import json
from pathlib import Path

import pytest
from tests.engine.checkpoints import COMMON, save_checkpoint
from tests.engine.drafters import save_drafter, save_reordered_drafter
from tests.runtime.hybrid_family import registered, save_hybrid

from quire import LLM
from quire.assembly.draft_model_build import with_draft_model
from quire.assembly.model_kind import choose_kind
from quire.errors import ConfigurationError
from quire.options.engine_options import EngineOptions
from quire.text.tokenizer import Tokenizer


def refusal(folder: Path, **options: object) -> str:
    with pytest.raises(ConfigurationError) as caught:
        LLM(speculative_model=str(folder), **options)
    return str(caught.value)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_drafter(tmp_path_factory.mktemp("drafter") / "model", 1)


def test_other_vocabularies_are_refused(drafter: Path, tmp_path: Path) -> None:
    other = save_drafter(tmp_path / "other", 1)
    path = other / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    model = tokenizer["model"]
    model["merges"] = []
    model["vocab"] = {
        token if len(token) == 1 or token_id < 3 else f"{token}~": token_id
        for token, token_id in model["vocab"].items()
    }
    path.write_text(json.dumps(tokenizer))
    message = refusal(other)
    assert "in common with the model's, which is less than 50% of the 4096 tokens" in message
    save_checkpoint("llama", tmp_path / "small")
    message = refusal(tmp_path / "small", skip_tokenizer_init=True)
    assert f"its vocabulary has {COMMON['vocab_size']} tokens, that of the model 4096" in message


def test_another_order_of_the_same_tokens_can_draft(tmp_path: Path) -> None:
    folder = save_reordered_drafter(tmp_path / "reordered", 100)
    kind = with_draft_model(choose_kind(EngineOptions(speculative_model=str(folder))), None)
    assert kind.draft is not None and kind.draft.pairs is not None
    mine, theirs = Tokenizer.from_folder(kind.folder), Tokenizer.from_folder(folder)
    pairs = kind.draft.pairs
    assert len(pairs.target_ids) == theirs.vocab_size == mine.vocab_size - 100
    for target_id, own_id in zip(pairs.target_ids.tolist(), pairs.own_ids.tolist(), strict=True):
        assert mine.token_bytes(target_id) == theirs.token_bytes(own_id)
        assert pairs.stand_ins[target_id] == own_id
    # A token that the small model lacks has the end of its text as its stand-in.
    assert mine.token_bytes(4093) == b"[self"
    assert theirs.token_bytes(int(pairs.stand_ins[4093])) == b"self"


def test_models_that_cannot_draft_are_refused(drafter: Path, tmp_path: Path) -> None:
    with registered():
        states = save_hybrid(tmp_path, layer_types=["delta", "full"])
        assert "recurrent states, which can't be cut back" in refusal(states)
    assert "the model that it would draft for generates no tokens" in refusal(
        drafter, runner="pooling"
    )
    assert "a model drafts on the CPU only" in refusal(drafter, kernels="triton")
    assert "verifies no drafts here: torch computes" in refusal(drafter, kernels="torch")


@pytest.mark.usefixtures("native_engine")
def test_the_model_that_drafts_is_part_of_facts_memory_and_fingerprint(drafter: Path) -> None:
    plain = LLM(max_model_len=64, tells_fingerprint=True, num_blocks=20).engine.facts
    llm = LLM(
        max_model_len=64, tells_fingerprint=True, num_blocks=20, speculative_model=str(drafter)
    )
    facts = llm.engine.facts
    assert facts["speculative_model"] == str(drafter)
    assert 0 < facts["draft_weight_bytes"] < facts["weight_bytes"]
    assert facts["kv_cache_bytes"] == plain["kv_cache_bytes"] * 5 // 4
    assert facts["fingerprint"] != plain["fingerprint"]
