"""Every family served by an engine: transformers' tokens, and the law to the bit in all formats.

The families' tiny configs are in `tests.models.family_shapes`; a family is tested here by being
there.
"""

import json
import random
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.crowding import preempt_much
from tests.engine.reference import Reference, assert_greedy
from tests.engine.tier_law import eager
from tests.models.family_shapes import FAMILIES, make_config
from transformers import AutoModelForCausalLM

from quire.assembly import tier_identity
from quire.core.sampling_params import BeamSearchParams, SamplingParams
from quire.core.scheduling.growth_forecast import GrowthForecast
from quire.engine_client.identity import check_same
from quire.engine_client.results import RequestOutput
from quire.models.registry import load_config
from quire.offline.llm import LLM

MAX_MODEL_LEN = 80
NUM_NEW_TOKENS = 18
SHARED = 19
"""Tokens that every second prompt begins with."""

CROWDED = {"block_size": 8, "max_num_batched_tokens": 24, "max_num_seqs": 16}

QUANTIZATIONS = (None, "int8", "int4")
"""Families take turns: neighbours in the list are alike, so each kind of layer meets all."""


@dataclass(frozen=True)
class Family:
    """A checkpoint, transformers' model of it in fp32, and engines that several tests share."""

    folder: Path
    reference: Reference
    quantization: str | None

    @cached_property
    def whole(self) -> LLM:
        """In fp32; prompts are computed in one step."""
        return make_llm(self)

    @cached_property
    def crowded(self) -> LLM:
        """In fp32; prompts are computed in chunks."""
        return make_llm(self, **CROWDED)

    @cached_property
    def crowded_bf16(self) -> LLM:
        return make_llm(self, **CROWDED, dtype="bfloat16")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    torch.set_num_threads(1)
    torch.manual_seed(len(request.param))
    config = make_config(
        request.param,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Wide, so that logits lie apart; norms and biases start as constants: they must matter.
            parameter.normal_(0, 0.15)
            if "norm" in name:
                parameter += 1
    folder = tmp_path_factory.mktemp(request.param.replace(" ", "_"))
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    turn = list(FAMILIES).index(request.param) % len(QUANTIZATIONS)
    return Family(folder, Reference(model), QUANTIZATIONS[turn])


def make_llm(family: Family, **options: Any) -> LLM:
    sizes = {"max_model_len": MAX_MODEL_LEN, "dtype": "float32"}
    return LLM(str(family.folder), skip_tokenizer_init=True, **(sizes | options))


def make_cramped_llm(family: Family, monkeypatch: pytest.MonkeyPatch, **options: Any) -> LLM:
    """With memory for a little more than one sequence of full length: some are preempted."""
    # The most blocks that it holds, whatever the format of the weights.
    alike = family.crowded_bf16 if options.get("dtype") == "bfloat16" else family.crowded
    num_blocks = alike.engine.scheduler.memory.growth.most_to_hold(MAX_MODEL_LEN) + 1
    monkeypatch.setattr(GrowthForecast, "fits_later", lambda *_: True)
    llm = make_llm(family, **CROWDED, **options, num_blocks=num_blocks)
    preempt_much(llm)
    return llm


def make_prompts() -> list[dict[str, list[int]]]:
    rng = random.Random(4)
    shared = [rng.randrange(3, 1000) for _ in range(SHARED)]
    lengths = (1, 4, 15, 16, 31, 40)
    return [
        {
            "prompt_token_ids": (shared if index % 2 else [])
            + [rng.randrange(3, 1000) for _ in range(length)]
        }
        for index, length in enumerate(lengths)
    ]


@torch.inference_mode()
def assert_equal_to_transformers(family: Family, outputs: list[RequestOutput], what: str) -> None:
    """Tokens are its greedy choice, and log-probabilities those that it has, within 1e-4."""
    for prompt, output in zip(make_prompts(), outputs, strict=True):
        ids = prompt["prompt_token_ids"]
        for branch in output.outputs:
            where = f"{what}, prompt of {len(ids)}"
            assert_greedy(family.reference, ids, branch.token_ids, where)
            logits = family.reference.logits([*ids, *branch.token_ids])
            expected = logits[len(ids) - 1 : -1].log_softmax(-1)
            expected = expected.gather(1, torch.tensor(branch.token_ids)[:, None])[:, 0]
            assert branch.logprobs is not None
            chosen = zip(branch.token_ids, branch.logprobs, strict=True)
            found = torch.tensor([entry[token].logprob for token, entry in chosen])
            # Rounding errors grow with the logits, which a checkpoint's multipliers may scale.
            atol = 1e-4 * max(1.0, logits.std().item())
            distance = (found - expected).abs().max().item()
            assert distance < atol, f"{where}: log-probabilities {distance} apart"


def test_tokens_equal_transformers(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, in chunks, from the prefix cache, forked and preempted."""
    prompts = make_prompts()
    greedy, forked = (
        SamplingParams(n=n, temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True, logprobs=0)
        for n in (1, 2)
    )
    whole = family.whole.generate(prompts, greedy, use_tqdm=False)
    assert_equal_to_transformers(family, whole, "whole")
    llm = family.crowded
    assert_equal_to_transformers(family, llm.generate(prompts, forked, use_tqdm=False), "chunked")
    again = llm.generate(prompts, greedy, use_tqdm=False)
    assert_equal_to_transformers(family, again, "from the prefix cache")
    assert llm.engine.stats().num_hit_tokens > 0
    llm = make_cramped_llm(family, monkeypatch)
    assert_equal_to_transformers(family, llm.generate(prompts, forked, use_tqdm=False), "preempted")
    # What windows hold is bounded and known: nobody has to go where there is nothing else.
    specs = load_config(family.folder).attention_specs
    if any(spec.window is None for spec in specs):
        assert llm.engine.stats().num_preemptions > 0
    assert llm.engine.stats().num_held_blocks == 0


SOURCES_DIGEST = cache(tier_identity._package_digest)
"""Read once for all families: it takes as long as building an engine of them."""


def test_a_cache_folder_and_a_fleet_take_the_family(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second engine loads the pages of the first, and may stand in for it in a fleet."""
    monkeypatch.setattr(tier_identity, "_package_digest", SOURCES_DIGEST)
    options = {"cache_dir": str(tmp_path), "cache_size": "64MiB", "tells_fingerprint": True}
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    first = make_prompts()[-1]
    longer = {"prompt_token_ids": [*first["prompt_token_ids"], 3, 1, 4, 1, 5]}
    identities, tokens, counts = [], [], []
    with eager():
        for prompts in ([first], [longer]), ([longer],):
            llm = make_llm(family, **CROWDED, **options)
            identities.append((llm.engine.limits, llm.engine.facts))
            for prompt in prompts:
                (output,) = llm.generate(prompt, greedy, use_tqdm=False)
            tokens.append(output.outputs[0].token_ids)
            assert llm.engine.tier_work.wait_for_moves(60.0)
            counts.append(llm.engine.stats().tiers)
            llm.engine.tier_work.close()
    assert tokens[0] == tokens[1]
    assert counts[0]["num_loads"] == 0 < counts[1]["num_loads"]
    assert counts[1]["num_failed_blocks"] == 0
    assert check_same("second", *identities) is None
    assert all(identities[1][1][name] for name in ("fingerprint", "answers"))


def test_beams_have_the_probabilities_of_transformers(family: Family) -> None:
    prompt = make_prompts()[3]
    wish = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    ids = prompt["prompt_token_ids"]
    (alone,) = family.whole.beam_search([prompt], wish, use_tqdm=False)
    (crowded,) = family.crowded.beam_search([prompt], wish, use_tqdm=False)
    assert len(alone.sequences) == 3
    for beam, other in zip(alone.sequences, crowded.sequences, strict=True):
        assert beam.tokens == other.tokens
        tokens = beam.tokens if beam.tokens[: len(ids)] == ids else [*ids, *beam.tokens]
        logprobs = family.reference.logits(tokens)[:-1].log_softmax(-1)
        own = logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[len(ids) - 1 :].sum()
        assert abs(beam.cum_logprob - float(own)) < 1e-3


@pytest.mark.usefixtures("native_engine")
def test_equal_to_the_bit(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, and in a crowd with chunks, hits, forks, preemptions and other numbers of threads."""
    options: dict[str, Any] = {"dtype": "bfloat16", "quantization": family.quantization}
    wishes = [
        SamplingParams(
            n=1 + index % 2,
            temperature=(0.0, 1.0)[index % 2],
            seed=index,
            max_tokens=NUM_NEW_TOKENS,
            ignore_eos=True,
            logprobs=2,
        )
        for index in range(len(make_prompts()))
    ]

    def found(llm: LLM, prompts: list[Any], params: list[SamplingParams]) -> list[Any]:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [
            [
                (branch.token_ids, branch.logprobs, branch.cumulative_logprob)
                for branch in each.outputs
            ]
            for each in outputs
        ]

    llm = make_llm(family, enable_prefix_caching=False, num_threads=1, **options)
    alone = []
    for prompt, wish in zip(make_prompts(), wishes, strict=True):
        alone += found(llm, [prompt], [wish])
    llm = make_cramped_llm(family, monkeypatch, num_threads=3, **options)
    assert found(llm, make_prompts(), wishes) == alone
    assert found(llm, make_prompts(), wishes) == alone, "again, from the prefix cache"
