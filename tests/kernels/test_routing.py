"""The choice of experts against transformers' routers, and what holds for ties and groups."""

from typing import Any

import pytest
import torch
import transformers
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from quire.kernels.routing import RouterSpec, Routing, Scoring, route

GROUPS: dict[str, Any] = {"num_groups": 4, "top_groups": 2}
HF_GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
SIGMOID: dict[str, Any] = {"scoring": Scoring.SIGMOID, "has_bias": True, "scale": 2.5}

# transformers' router, the fields of its config, and ours. E = 16, K = 3.
CASES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "softmax": (Qwen3MoeTopKRouter, transformers.Qwen3MoeConfig, {}, {"rounds": True}),
    "softmax, renormalized": (
        Qwen3MoeTopKRouter,
        transformers.Qwen3MoeConfig,
        {"norm_topk_prob": True},
        {"rounds": True, "renormalizes": True},
    ),
    "not rounded": (MixtralTopKRouter, transformers.MixtralConfig, {}, {"renormalizes": True}),
    "softmax of the chosen": (
        GraniteMoeTopKRouter,
        transformers.GraniteMoeConfig,
        {},
        {"scoring": Scoring.SOFTMAX_OF_CHOSEN, "rounds": True},
    ),
    "with a bias of the linear": (
        GptOssTopKRouter,
        transformers.GptOssConfig,
        {},
        {"scoring": Scoring.SOFTMAX_OF_CHOSEN, "rounds": True},
    ),
    "sigmoid, groups, a bias": (
        DeepseekV3TopkRouter,
        transformers.DeepseekV3Config,
        {"norm_topk_prob": True, **HF_GROUPS},
        {"renormalizes": True, "sums_best": True, **SIGMOID, **GROUPS},
    ),
    "sigmoid, one group": (
        DeepseekV3TopkRouter,
        transformers.DeepseekV3Config,
        {"norm_topk_prob": False, **HF_GROUPS, "n_group": 1, "topk_group": 1},
        SIGMOID,
    ),
    "the groups' best": (
        DeepseekV2TopkRouter,
        transformers.DeepseekV2Config,
        {"topk_method": "group_limited_greedy", **HF_GROUPS},
        {"scale": 2.5, **GROUPS},
    ),
}
NAMES = {
    transformers.DeepseekV3Config: "n_routed_experts",
    transformers.DeepseekV2Config: "n_routed_experts",
}


def sorted_by_id(ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    order = ids.argsort(-1)
    return ids.gather(1, order), weights.gather(1, order).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_equal_to_transformers(name: str, dtype: torch.dtype) -> None:
    kind, config_kind, fields, ours = CASES[name]
    num_experts = {NAMES.get(config_kind, "num_local_experts"): 16}
    config = config_kind(hidden_size=64, num_experts_per_tok=3, **num_experts, **fields)
    torch.manual_seed(3)
    router = kind(config)
    for parameter in router.parameters():
        parameter.data.normal_(0, 0.3)
    correction = getattr(router, "e_score_correction_bias", None)
    if correction is not None:
        correction.normal_(0, 0.2)
    router.to(dtype)
    if correction is not None:
        router.e_score_correction_bias = correction.float()
    x = torch.randn(400, 64).to(dtype)

    with torch.no_grad():
        logits, weights, ids = router(x)
        found = route(logits, correction, RouterSpec(16, 3, **ours), dtype)

    expected = sorted_by_id(ids, weights)
    chosen = sorted_by_id(found.ids, found.weights)
    # In bf16 two experts may have equal scores, of which transformers takes any.
    same = (expected[0] == chosen[0]).all(-1)
    assert same.all() if dtype is torch.float32 else same.float().mean() > 0.9
    torch.testing.assert_close(chosen[1][same], expected[1][same], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("scoring", Scoring, ids=lambda scoring: scoring.value)
def test_company_changes_no_bit(scoring: Scoring) -> None:
    logits = torch.randn(9, 17, generator=torch.Generator().manual_seed(3)) * 3
    spec = RouterSpec(17, 4, scoring, renormalizes=True)
    crowd = route(logits, None, spec, torch.float32)
    for token in range(9):
        alone = route(logits[token : token + 1], None, spec, torch.float32)
        assert torch.equal(alone.ids[0], crowd.ids[token])
        assert torch.equal(alone.weights[0], crowd.weights[token])


def test_the_lower_id_of_equal_scores_is_chosen() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0], [0.0] * 5])
    for scoring in Scoring:
        assert route(logits, None, RouterSpec(5, 2, scoring), torch.float32).ids.tolist() == [
            [1, 2],
            [0, 1],
        ]


def test_a_bias_changes_the_choice_and_no_weight() -> None:
    logits, bias = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([9.0, 0.0, 0.0])
    found = route(logits, bias, RouterSpec(3, 1, Scoring.SIGMOID, has_bias=True), torch.float32)
    assert found.ids.tolist() == [[0]]
    assert found.weights.tolist() == [[0.5]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": 4, "top_k": 5}, "top_k is 5, but must be 1 to 4"),
        ({"num_experts": 4, "top_k": 1, "num_groups": 3}, "num_groups is 3, but must divide"),
        (
            {"num_experts": 4, "top_k": 3, "num_groups": 2},
            "top_k is 3, but top_groups=1 groups have fewer experts",
        ),
        (
            {"num_experts": 4, "top_k": 1, "num_groups": 4, "sums_best": True},
            "num_groups is 4, but with sums_best each group needs at least 2 of the 4 experts",
        ),
    ],
)
def test_invalid_router_specs_are_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RouterSpec(**fields)


def test_logits_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"logits are \(2, 3\), but must be \[T, 4\]"):
        route(torch.zeros(2, 3), None, RouterSpec(4, 1), torch.float32)


def test_no_tokens_are_no_choice() -> None:
    found = route(torch.zeros(0, 4), None, RouterSpec(4, 2), torch.float32)
    assert isinstance(found, Routing) and found.ids.shape == found.weights.shape == (0, 2)
