"""A family whose heads rotate in part, composed of shared parts, against transformers.

It is GLM 4.5 with all of its layers dense: Llama, but that the first half of each head rotates, or
as much as the config says, after a norm of each head where it says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from tests.engine.reference import Reference, assert_greedy
from transformers import AutoModelForCausalLM, Glm4MoeConfig, PreTrainedModel

from quire.core.sampling_params import SamplingParams
from quire.errors import UnsupportedModelError
from quire.models.architectures import MODELS
from quire.models.config import DecoderConfig
from quire.models.config_fields import ConfigFields
from quire.models.decoder import DecoderForCausalLM
from quire.models.families.llama import LlamaConfig
from quire.models.model_entry import ModelEntry
from quire.offline.llm import LLM

NAME = "Glm4MoeForCausalLM"
OF_EXPERTS = (
    *("first_k_dense_replace", "moe_intermediate_size", "n_group", "n_routed_experts"),
    *("n_shared_experts", "norm_topk_prob", "num_experts_per_tok", "num_mtp_layers"),
    *("num_nextn_predict_layers", "output_router_logits"),
    *("routed_scaling_factor", "topk_group"),
)

FACTORS = [0.25, 0.5, 0.75, 1.0]
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [20, 21, 22], list(range(30, 53))]


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseGlmConfig(DecoderConfig):
    """Fields of experts are ignored, for there are none."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        fields = ConfigFields(raw)
        for name in OF_EXPERTS:
            fields.value(name)
        return cls.read(
            fields,
            partial_rotary=0.5,
            qkv_bias=fields.flag("attention_bias", False),
            qk_norm="head" if fields.flag("use_qk_norm", False) else None,
        )


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the place of quire's own entry, which `register` refuses."""
    entry = ModelEntry(DenseGlmConfig, DecoderForCausalLM)
    monkeypatch.setitem(MODELS._filled(), NAME, entry)


@pytest.fixture
def save(save_checkpoint):
    def save(factor: float | None, **fields: Any) -> tuple[Path, PreTrainedModel]:
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": factor}
        return save_checkpoint(
            Glm4MoeConfig,
            first_k_dense_replace=3,
            head_dim=32,
            **({} if factor is None else {"rope_parameters": rope}),
            **fields,
        )

    return save


@pytest.mark.parametrize("use_qk_norm", [False, True])
@pytest.mark.parametrize("factor", FACTORS)
def test_logits_equal_transformers(factor, use_qk_norm, save, assert_same_logits):
    folder, reference = save(factor, use_qk_norm=use_qk_norm)
    model = assert_same_logits(folder, reference)
    assert model.model.rotary[0].table.shape[1] == 32 * factor


def test_the_familys_own_part_rotates_where_the_config_is_silent(
    save, assert_same_logits, edit_config
):
    folder, reference = save(None, attention_bias=True)
    edit_config(folder, remove=("rope_parameters",), rope_theta=10000.0)
    assert assert_same_logits(folder, reference).model.rotary[0].table.shape[1] == 16


@pytest.mark.parametrize("field", ["partial_rotary_factor", "rope_parameters"])
def test_other_families_refuse_it_by_name(field):
    given = {"partial_rotary_factor": 0.5}
    raw = {name: 2 for name in ("num_hidden_layers", "num_attention_heads", "intermediate_size")}
    raw |= {"vocab_size": 8, "hidden_size": 8, "max_position_embeddings": 8}
    raw |= given if field in given else {field: given}
    with pytest.raises(UnsupportedModelError, match="partial_rotary_factor"):
        LlamaConfig.from_hf(raw | {"architectures": ["LlamaForCausalLM"]})


def make_llm(folder: Path, **options: Any) -> LLM:
    sizes: dict[str, Any] = {"max_model_len": 48, "block_size": 8, "max_num_seqs": 4}
    return LLM(str(folder), skip_tokenizer_init=True, **(sizes | {"num_blocks": 24} | options))


def generated(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
    found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [output.outputs[0] for output in found]


@pytest.mark.parametrize(
    ("kernels", "use_qk_norm"),
    [("auto", False), ("auto", True), ("torch", False), ("torch", True), ("triton", True)],
)
def test_tokens_equal_transformers(kernels, use_qk_norm, save):
    if kernels == "triton":
        pytest.importorskip("triton")
    torch.set_num_threads(1)
    num_layers, num_tokens = (1, 3) if kernels == "triton" else (3, 9)  # seconds, interpreted
    folder, _ = save(0.75, use_qk_norm=use_qk_norm, num_hidden_layers=num_layers)
    reference = Reference(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    llm = make_llm(folder, dtype="float32", kernels=kernels, max_num_batched_tokens=8)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for prompt, branch in zip(PROMPTS, generated(llm, PROMPTS, params), strict=True):
        assert len(branch.token_ids) == num_tokens
        assert_greedy(reference, prompt, branch.token_ids, f"prompt of {len(prompt)}")


ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "crowd": {},
    "other blocks, chunked": {"block_size": 16, "max_num_batched_tokens": 6},
}


@pytest.mark.parametrize("kernels", ["auto", "triton"])
def test_results_do_not_depend_on_batch_and_chunks(kernels, save):
    options: dict[str, Any] = {"dtype": "bfloat16", "kernels": kernels}
    prompts, num_tokens, num_layers = PROMPTS, 6, 2
    if kernels == "triton":
        pytest.importorskip("triton")
        options["batch_invariant"] = True
        prompts, num_tokens, num_layers = PROMPTS[:2], 2, 1  # a step takes long, interpreted
    torch.set_num_threads(1)
    folder, _ = save(0.25, use_qk_norm=True, num_hidden_layers=num_layers)

    def bits(llm: LLM, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        params = SamplingParams(
            temperature=0.8, seed=5, max_tokens=num_tokens, ignore_eos=True, logprobs=1
        )
        return [
            (branch.token_ids, [each.logprob for step in branch.logprobs for each in step.values()])
            for branch in generated(llm, prompts, params)
        ]

    alone_llm = make_llm(folder, enable_prefix_caching=False, **options)
    alone = [bits(alone_llm, [prompt])[0] for prompt in prompts]
    for name, arrangement in ARRANGEMENTS.items():
        assert bits(make_llm(folder, **(options | arrangement)), prompts) == alone, name
