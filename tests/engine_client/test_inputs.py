"""What a request says of its place among others."""

from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, BeamSearchParams, SamplingParams
from quire.core.memory.prefix_cache import PUBLIC_DOMAIN
from quire.core.sampling_params import ModelLimits
from quire.engine_client.inputs import InputProcessor, RequestOptions, read_prompt
from quire.errors import InvalidRequestError, PromptTooLongError
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.text.tokenizer import Tokenizer

IDS = list(range(200, 300))
ONE = SamplingParams(max_tokens=1, temperature=0)


def test_no_two_pairs_of_tenant_and_salt_share_a_domain() -> None:
    pairs = [
        ("", ""),
        ("a", ""),
        ("", "a"),
        ("a", "b"),
        ("ab", ""),
        ("", "ab"),
        ("*", ""),
        ("1:", ""),
    ]
    domains = {
        RequestOptions(tenant=tenant, cache_salt=salt).cache_domain for tenant, salt in pairs
    }
    assert len(domains) == len(pairs) and PUBLIC_DOMAIN not in domains
    assert RequestOptions(is_public=True).cache_domain == PUBLIC_DOMAIN


def test_a_prompt_carries_its_options() -> None:
    prompt = {"prompt_token_ids": IDS, "priority": 3, "tenant": "t", "deadline_s": 1.5}
    assert read_prompt(prompt).options == RequestOptions(priority=3, tenant="t", deadline_s=1.5)
    asked = read_prompt({"prompt": "a", "speculation_history": False}).options
    assert asked == RequestOptions(speculation_history=False)
    assert read_prompt("text").options == RequestOptions()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"priority": 1.5}, "priority is 1.5"),
        ({"priority": True}, "priority is True"),
        ({"tenant": 7}, "tenant is 7"),
        ({"cache_salt": "x" * 300}, "cache_salt is"),
        ({"deadline_s": 0}, "deadline_s is 0"),
        ({"deadline_s": "soon"}, "deadline_s is 'soon'"),
        ({"speculation_history": 0}, "speculation_history is 0"),
        ({"prority": 1}, "unknown key 'prority'"),
        ({"tenant": "a\ud800"}, "tenant has U.D800 at position 1"),
        ({"cache_salt": "\udfff"}, "cache_salt has U.DFFF at position 0"),
        ({"prompt": "\udfff"}, "prompt has U.DFFF at position 0"),
        ({"priority": np.float32(1)}, "priority is"),
        ({"deadline_s": np.bool_(True)}, "deadline_s is"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        read_prompt({"prompt": "text", **options})


@pytest.mark.parametrize(
    "token_ids",
    [
        np.array([5, 6]),
        np.array([5, 6], dtype=np.int16),
        torch.tensor([5, 6]),
        [np.int64(5), 6],
        (torch.tensor(5), np.uint8(6)),
        range(5, 7),
    ],
    ids=repr,
)
def test_token_ids_may_be_of_any_type_of_whole_numbers(token_ids: Any) -> None:
    taken = read_prompt({"prompt_token_ids": token_ids}).prompt
    assert taken == [5, 6] and set(map(type, taken)) == {int}


@pytest.mark.parametrize(
    "token_ids",
    [
        np.array([5.0]),
        np.array([True]),
        np.array([[5]]),
        np.array(5),
        torch.tensor([5.5]),
        [torch.tensor(True)],
        [np.bool_(True)],
        [np.float32(5)],
        b"ab",
    ],
    ids=repr,
)
def test_arrays_of_other_numbers_are_no_prompts(tokenizer: Any, token_ids: Any) -> None:
    inputs = InputProcessor(tokenizer, ModelLimits(vocab_size=100, max_model_len=64))
    with pytest.raises(InvalidRequestError) as caught:
        asked = read_prompt({"prompt_token_ids": token_ids})
        inputs.make_request("r", asked.prompt, ONE, seed=0)
    assert caught.value.param == "prompt"


def test_options_may_be_of_other_types_of_numbers() -> None:
    options = RequestOptions(priority=np.int64(2), deadline_s=np.float32(1.5))
    assert options == RequestOptions(priority=2, deadline_s=1.5)
    assert (type(options.priority), type(options.deadline_s)) == (int, float)


def test_salts_and_tenants_do_not_share_and_a_published_prefix_is_for_all() -> None:
    llm = LLM(dtype="float32", max_model_len=256, num_blocks=200)

    def found(prompt_ids: list[int] = IDS, **options: Any) -> int:
        prompt = {"prompt_token_ids": prompt_ids, **options}
        return llm.generate(prompt, ONE, use_tqdm=False)[0].num_cached_tokens

    assert [found(), found(), found(cache_salt="s"), found(cache_salt="s")] == [0, 99, 0, 99]
    assert [found(tenant="t"), found(tenant="t", cache_salt="s")] == [0, 0]
    published = [*range(400, 450)]
    assert llm.publish_prefix({"prompt_token_ids": published}) == 50
    for tenant in ("u", "v"):
        # All but the last token, which is always computed, and what follows the published part.
        assert found(published, tenant=tenant) == 49
        assert found([*published, *IDS], tenant=tenant) == 50
        assert found([*published, *IDS], tenant=tenant) == 149


def test_the_reason_of_a_miss_is_kept() -> None:
    llm = LLM(dtype="float32", max_model_len=256, num_blocks=16)
    encode = llm.get_tokenizer().encode

    def miss(ids: list[int], **options: Any) -> Any:
        prompt = {"prompt_token_ids": ids, **options}
        return llm.generate(prompt, ONE, use_tqdm=False)[0].prefix_miss

    story = encode("import os\nimport sys\n\n\ndef main(path):\n    print(path)\n" * 9)[:60]
    assert len(story) == 60
    assert miss(story).reason == "never_seen"
    assert miss(story).reason == "none"
    other = [*story[:37], (story[37] + 1) % 500, *story[38:]]
    differs = miss(other)
    assert (differs.reason, differs.num_found_tokens) == ("differs", 37)
    assert differs.prompt_text != differs.cached_text
    assert miss(story, tenant="else").reason == "other_domain"
    for start in range(300, 2000, 200):
        miss([start + index for index in range(150)])
    evicted = miss([300 + index for index in range(150)])
    assert evicted.reason == "evicted" and evicted.evicted_by is not None
    cold = LLM(dtype="float32", max_model_len=256, num_blocks=32, enable_prefix_caching=False)
    assert cold.generate({"prompt_token_ids": story}, ONE, use_tqdm=False)[0].prefix_miss is None


def test_a_pinned_prefix_outlives_what_is_not() -> None:
    llm = LLM(dtype="float32", max_model_len=256, num_blocks=16, eviction="lru")

    def found(ids: list[int], **options: Any) -> int:
        prompt = {"prompt_token_ids": ids, **options}
        return llm.generate(prompt, ONE, use_tqdm=False)[0].num_cached_tokens

    def flood() -> None:
        for start in range(500, 2500, 200):
            found([start + index for index in range(150)])

    found(IDS)
    flood()
    assert found(IDS) == 0, "without a pin it is gone"
    assert llm.pin_prefix({"prompt_token_ids": IDS}) == 96  # six full blocks of 16
    flood()
    assert found(IDS) >= 96
    llm.publish_prefix({"prompt_token_ids": IDS[::-1]})
    assert llm.pin_prefix({"prompt_token_ids": IDS[::-1]}) == 0
    published = {"prompt_token_ids": IDS[::-1]}
    assert llm.pin_prefix(published, published=True, duration_s=1e-9, priority=3) == 96
    flood()
    assert found(IDS[::-1], tenant="t") == 0, "the time was over"
    with pytest.raises(InvalidRequestError, match="duration_s is 0"):
        llm.pin_prefix("text", duration_s=0)


class CountingTokenizer:
    """The embedded model's; counts what it was asked to encode."""

    def __init__(self) -> None:
        self.inner = Tokenizer.from_folder(EMBEDDED_MODEL)
        self.encoded: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.encoded.append(text)
        return self.inner.encode(text)

    def encode_bad_word(self, word: str) -> list[list[int]]:
        self.encoded.append(word)
        return self.inner.encode_bad_word(word)


@pytest.fixture
def tokenizer() -> Any:
    return CountingTokenizer()


def test_the_bad_words_of_a_call_are_encoded_once_for_all_its_prompts(tokenizer: Any) -> None:
    inputs = InputProcessor(tokenizer, ModelLimits(vocab_size=4096, max_model_len=256))
    params = SamplingParams(max_tokens=1, bad_words=["never", "ever"])
    made = [inputs.make_request(str(index), [5, 6], params, seed=0) for index in range(3)]
    assert tokenizer.encoded == ["never", "ever"]
    assert made[0].params.bad_words == made[2].params.bad_words != ()
    other = SamplingParams(max_tokens=1, bad_words=["other"])
    assert inputs.make_request("4", [5], other, seed=0).params != made[0].params


def test_bad_words_that_would_hold_up_each_step_are_refused(tokenizer: Any) -> None:
    inputs = InputProcessor(tokenizer, ModelLimits(4096, 4096))
    short = [f"zq{number}" for number in range(4000)]
    fine = SamplingParams(max_tokens=1, bad_words=short)
    assert inputs.make_request("a", "hello", fine, seed=0).params.bad_words
    mixed = SamplingParams(max_tokens=1, bad_words=[*short, "qxzjk" * 100])
    with pytest.raises(InvalidRequestError, match=r"4001 words.*too much") as refused:
        inputs.make_request("a", "hello", mixed, seed=0)
    assert refused.value.param == "bad_words"


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        (None, ()),
        ("", ()),
        ([7, 8], (7, 8)),
        (np.array([7, 8]), (7, 8)),
        ("def f(", "def f("),
        ("\ndef f(", "\ndef f("),
    ],
)
def test_a_request_has_the_tokens_of_its_prediction(
    tokenizer: Any, prediction: Any, expected: tuple[int, ...] | str
) -> None:
    inputs = InputProcessor(tokenizer.inner, ModelLimits(4096, 256))
    given = read_prompt({"prompt": "x", "prediction": prediction})
    request = inputs.make_request("a", given.prompt, ONE, seed=0)
    found = inputs.with_prediction(request, given.prediction).prediction_token_ids
    if isinstance(expected, str):
        assert tokenizer.inner.decode(found) == expected
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("prediction", "message"),
    [
        ("x\ud800", "prediction has U.D800 at position 1"),
        ("x" * 100_000, "the prediction has 100000 characters, more than the tokens of any answer"),
        ([3] * 257, "the prediction has 257 tokens, above max_model_len, 256"),
        ([4096], "the prediction contains token id 4096"),
        (7, "a prediction is 7, but must be text or a list"),
        ([1.5], "a prediction is .1.5., but must be text or a list"),
        (b"ab", "a prediction is b'ab', but must be text or a list"),
    ],
)
def test_bad_predictions_are_refused_by_name(tokenizer: Any, prediction: Any, message: str) -> None:
    inputs = InputProcessor(tokenizer.inner, ModelLimits(4096, 256))
    with pytest.raises(InvalidRequestError, match=message) as caught:
        given = read_prompt({"prompt": "x", "prediction": prediction})
        request = inputs.make_request("a", given.prompt, ONE, seed=0)
        inputs.with_prediction(request, given.prediction)
    assert caught.value.param == "prediction"


def test_a_prediction_needs_an_answer_of_drafts() -> None:
    llm = LLM(dtype="float32", max_model_len=64)
    prompt = {"prompt": "x", "prediction": "y"}
    for call in (
        lambda: llm.beam_search(prompt, BeamSearchParams(beam_width=2, max_tokens=2)),
        lambda: llm.embed(prompt),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            call()
        assert caught.value.param == "prediction"
    bare = InputProcessor(None, ModelLimits(4096, 256))
    request = bare.make_request("a", [5], ONE, seed=0)
    with pytest.raises(InvalidRequestError, match="runs without a tokenizer; give token ids"):
        bare.with_prediction(request, "y")


@pytest.mark.parametrize(("limit", "num_kept"), [(None, 30), (7, 7), (-1, 39), (40, 40)])
def test_a_prompt_is_truncated_to_its_last_tokens(limit: int | None, num_kept: int) -> None:
    inputs = InputProcessor(None, ModelLimits(vocab_size=400, max_model_len=40))
    params = SamplingParams(truncate_prompt_tokens=limit)
    prompt = IDS[:30] if limit is None else IDS
    if num_kept == 40:
        with pytest.raises(PromptTooLongError, match="the prompt has 40 tokens"):
            inputs.make_request("r", prompt, params, seed=0)
        return
    request = inputs.make_request("r", prompt, params, seed=0)
    assert list(request.prompt_token_ids) == prompt[-num_kept:]


def test_a_prompt_may_be_truncated_to_its_first_tokens() -> None:
    inputs = InputProcessor(None, ModelLimits(vocab_size=400, max_model_len=40))
    for side, kept in (("right", IDS[:7]), ("left", IDS[-7:]), (None, IDS[-7:])):
        params = SamplingParams(truncate_prompt_tokens=7, truncation_side=side)
        request = inputs.make_request("r", IDS, params, seed=0)
        assert list(request.prompt_token_ids) == kept
    with pytest.raises(InvalidRequestError, match="truncation_side is 'up', but must be 'left' or"):
        SamplingParams(truncation_side="up")


def test_a_prompt_is_not_truncated_to_more_than_fits() -> None:
    inputs = InputProcessor(None, ModelLimits(vocab_size=400, max_model_len=40))
    with pytest.raises(InvalidRequestError, match="truncate_prompt_tokens is 41, above max_model"):
        inputs.make_request("r", IDS, SamplingParams(truncate_prompt_tokens=41), seed=0)
