"""Images in prompts: transformers' tokens in any company, and the law to the bit."""

import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.crowding import preempt_much
from tests.engine.image_prompts import (
    IMAGE_FAMILIES,
    PROMPTS,
    Answers,
    ImageFamily,
    answers_of,
    make_request,
    reference_logits,
    requests_of,
    text,
)
from tests.engine.tier_law import eager
from transformers import PreTrainedModel

from quire import LLM
from quire.core.content_spans import Content
from quire.core.request import Request
from quire.core.scheduling.growth_forecast import GrowthForecast
from quire.errors import InvalidRequestError
from quire.runtime.contents.content_store import ContentStore

CROWDED = {"block_size": 8, "max_num_batched_tokens": 13, "max_num_seqs": 12}
NEAR_TIE = 1e-3


@dataclass(frozen=True)
class Saved:
    """A family's checkpoint, and transformers' model of it."""

    family: ImageFamily
    folder: Path
    model: PreTrainedModel

    def llm(self, **options: Any) -> LLM:
        sizes = {"max_model_len": 96, "dtype": "float32", "skip_tokenizer_init": True}
        return LLM(str(self.folder), **(sizes | options))


@pytest.fixture(scope="module", params=IMAGE_FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    torch.set_num_threads(1)
    family, folder = IMAGE_FAMILIES[request.param], tmp_path_factory.mktemp(request.param)
    return Saved(family, folder, family.save(folder))


def store_of(llm: LLM) -> ContentStore:
    store = llm.engine.scheduler.contents._source
    assert isinstance(store, ContentStore)
    return store


def is_loaded(llm: LLM) -> bool:
    return all(not each.is_meta for each in store_of(llm)._tower.parameters())


def assert_greedy(saved: Saved, answers: Answers, what: str) -> None:
    """Each token is transformers' choice after those before it."""
    for (name, branch), entries in answers.items():
        tokens = [token for token, _ in entries]
        logits = reference_logits(saved.family, saved.model, PROMPTS[name], tokens)
        best, chosen = logits.max(dim=-1).values, logits[range(len(tokens)), tokens]
        assert tokens and (best - chosen).max() < NEAR_TIE, (what, name, branch)


def test_tokens_equal_transformers(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, in chunks, from the prefix cache, forked, preempted, beside text and other images."""
    family = saved.family
    whole = saved.llm()
    for request in requests_of(family):
        assert_greedy(saved, answers_of(whole.engine, [request]), "alone")
    crowded = saved.llm(**CROWDED)
    answers = answers_of(crowded.engine, requests_of(family, n=2))
    assert len(answers) == 2 * len(PROMPTS)
    assert_greedy(saved, answers, "in chunks, forked")
    assert_greedy(saved, answers_of(crowded.engine, requests_of(family)), "from the prefix cache")
    assert crowded.engine.stats().num_hit_tokens > 0
    monkeypatch.setattr(GrowthForecast, "fits_later", lambda *_: True)
    cramped = saved.llm(**CROWDED, num_blocks=family.num_cramped_blocks)
    preempt_much(cramped)
    assert_greedy(
        saved, answers_of(cramped.engine, requests_of(family, n=2, max_tokens=16)), "preempted"
    )
    assert cramped.engine.stats().num_preemptions > 0
    for llm in (whole, crowded, cramped):
        assert llm.engine.stats().num_held_blocks == 0
        assert not store_of(llm)._inputs, "inputs outlive their requests"


def test_an_image_is_encoded_once_and_hits_to_the_token(saved: Saved) -> None:
    llm = saved.llm(block_size=8)
    parts = PROMPTS["in the middle"]
    first = answers_of(llm.engine, [make_request(saved.family, "1", parts)])
    store, num_tokens = (
        store_of(llm),
        sum(len(part) if isinstance(part, list) else 0 for part in parts),
    )
    num_tokens += len(saved.family.token_ids)
    has_states = saved.family.has_states
    num_hits = (num_tokens - 1) // 8 * 8 if has_states else num_tokens - 1
    assert (store.num_encoded, store.num_hits) == (1, 0)
    assert llm.engine.stats().contents == {"num_waiting": 0} | store.counts()
    again = answers_of(llm.engine, [make_request(saved.family, "2", parts)])
    assert [*first.values()] == [*again.values()]
    assert llm.engine.stats().num_hit_tokens == num_hits
    # Another image of equal size is hit up to its first position, and no further.
    other = [parts[0], 9, parts[2]]
    answers_of(llm.engine, [make_request(saved.family, "3", other)])
    num_hits += 0 if has_states else len(text(1, 13)) + saved.family.num_around
    assert llm.engine.stats().num_hit_tokens == num_hits
    assert store.num_encoded == 2
    # A longer prompt reads the image again at another place, from the cache of embeddings.
    answers_of(llm.engine, [make_request(saved.family, "4", [text(8, 5), 1, text(9, 4)])])
    assert store.num_encoded == 2


@pytest.mark.usefixtures("native_engine")
def test_equal_to_the_bit(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, and in a crowd with chunks, hits, forks, preemptions, and a cache for one image."""
    wishes: list[dict[str, Any]] = [
        {"temperature": index % 2 * 1.0, "seed": index, "logprobs": 2, "n": 2, "max_tokens": 16}
        for index in range(len(PROMPTS))
    ]

    def requests() -> list[Request]:
        return [
            make_request(saved.family, name, parts, **wish)
            for (name, parts), wish in zip(PROMPTS.items(), wishes, strict=True)
        ]

    bf16 = {"dtype": "bfloat16"}
    alone = saved.llm(enable_prefix_caching=False, num_threads=1, **bf16)
    expected: Answers = {}
    for request in requests():
        expected |= answers_of(alone.engine, [request])
    monkeypatch.setattr(GrowthForecast, "fits_later", lambda *_: True)
    crowd = saved.llm(**CROWDED, **bf16, num_blocks=saved.family.num_cramped_blocks, num_threads=2)
    preempt_much(crowd)
    store_of(crowd)._cache.max_bytes = 0
    assert answers_of(crowd.engine, requests()) == expected
    assert answers_of(crowd.engine, requests()) == expected, "again, from the prefix cache"
    assert crowd.engine.stats().num_preemptions > 0


@pytest.mark.usefixtures("native_engine")
def test_random_mixes_equal_to_the_bit(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few slots, small caches, and contents that move from slot to slot."""
    rng = random.Random(5)
    alone = saved.llm(enable_prefix_caching=False, dtype="bfloat16")
    monkeypatch.setattr(GrowthForecast, "fits_later", lambda *_: True)
    crowd = saved.llm(**CROWDED, dtype="bfloat16", num_blocks=saved.family.num_cramped_blocks + 3)
    preempt_much(crowd)
    crowd.engine.scheduler.contents.num_slots = 2
    store_of(crowd)._cache.max_bytes = rng.choice([0, 4096])
    for _ in range(2):
        requests = [
            make_request(
                saved.family,
                str(index),
                [
                    rng.randrange(1, 5) if rng.random() < 0.5 else text(rng.randrange(4), 7)
                    for _ in range(rng.randrange(1, 6))
                ]
                + [text(index, 4)],
                max_tokens=rng.randrange(1, 20),
            )
            for index in range(6)
        ]
        expected: Answers = {}
        for request in requests:
            expected |= answers_of(alone.engine, [request])
        assert answers_of(crowd.engine, requests) == expected


def test_running_requests_go_on_while_an_image_is_encoded(saved: Saved) -> None:
    llm = saved.llm()
    engine = llm.engine
    engine.add(make_request(saved.family, "stream", [text(1, 5)], max_tokens=60))
    while not engine.scheduler.running:
        engine.step()
    engine.add(make_request(saved.family, "image", PROMPTS["first"]))
    seen: list[str] = []
    while engine.has_work():
        seen += [output.request_id for output in engine.step()]
    assert "stream" in seen[: seen.index("image")], "the stream waited for the image"


def test_steps_do_not_overlap_with_the_encoder(saved: Saved) -> None:
    engine = saved.llm(async_scheduling=True, **CROWDED).engine
    assert not engine.overlap
    assert_greedy(saved, answers_of(engine, requests_of(saved.family)), "asked to overlap")


def test_aborted_requests_leave_nothing(saved: Saved) -> None:
    llm = saved.llm()
    engine, store = llm.engine, store_of(llm)
    for name in ("a", "b"):
        engine.add(make_request(saved.family, name, PROMPTS["two"]))
    engine.step()
    engine.abort("a")
    engine.abort("b")
    assert not store._inputs
    answers = answers_of(
        engine, [make_request(saved.family, "two, exchanged", PROMPTS["two, exchanged"])]
    )
    assert_greedy(saved, answers, "after others were aborted")
    while engine.scheduler.contents.num_reading:
        engine.step()
    assert store._encoding is None and not store._waiting and not store._ready


def test_resumed_requests_continue_with_their_images(saved: Saved) -> None:
    """After a crash the client sends the request again, with the tokens that it has."""
    request = make_request(saved.family, "x", PROMPTS["two"], n=2, temperature=1.0)
    whole = answers_of(saved.llm().engine, [request])
    known = {branch: [token for token, _ in whole["x", branch][:3]] for branch in range(2)}
    again = request.resume(known, has_output=True, elapsed_s=1.0)
    rest = answers_of(saved.llm(**CROWDED).engine, [again])
    for branch in range(2):
        tokens = [token for token, _ in whole["x", branch]]
        assert [token for token, _ in rest["x", branch]] == tokens[3:]


def test_forks_beside_an_image(saved: Saved) -> None:
    """A branch that is forked while it generates, and beams."""
    engine = saved.llm(**CROWDED).engine
    request = make_request(saved.family, "x", PROMPTS["the same twice"], max_tokens=12)
    expected = [token for token, _ in answers_of(engine, [request])["x", 0]]
    engine.add(request)
    found: dict[int, list[int]] = {}
    while engine.has_work():
        for output in engine.step():
            found.setdefault(output.branch_index, []).extend(output.token_ids)
        if len(found) == 1 and len(found[0]) >= 4:
            found[engine.fork("x", 0)] = found[0][:]
    assert found == {0: expected, 1: expected}
    beams = make_request(saved.family, "b", PROMPTS["two"], n=3, beam_width=3, logprobs=3)
    alone = answers_of(saved.llm().engine, [beams])
    crowd = answers_of(engine, [beams, *requests_of(saved.family)])
    tokens = [[token for token, _ in each["b", 0]] for each in (alone, crowd)]
    assert tokens[0] == tokens[1] and len(tokens[0]) > 1


def test_a_second_engine_loads_the_pages_of_images(saved: Saved, tmp_path: Path) -> None:
    options = {"cache_dir": str(tmp_path), "cache_size": "64MiB", **CROWDED}
    longer = [*PROMPTS["two"], text(10, 7)]
    answers, counts = [], []
    with eager():
        for prompts in ([PROMPTS["two"], longer], [longer]):
            llm = saved.llm(**options)
            for parts in prompts:
                answers.append(answers_of(llm.engine, [make_request(saved.family, "x", parts)]))
            assert llm.engine.tier_work.wait_for_moves(60.0)
            counts.append((llm.engine.stats().tiers["num_loads"], store_of(llm).num_encoded))
            llm.engine.tier_work.close()
    assert answers[1] == answers[2]
    assert counts[0] == (0, 2) and counts[1][0] > 0 == counts[1][1], "nothing is encoded again"


def _without_contents(request: Request) -> Request:
    return replace(request, contents=())


def _unknown(request: Request) -> Request:
    (content,) = request.contents
    return replace(request, contents=(content, content._replace(digest="0" * 32)))


def _twice(request: Request) -> Request:
    return replace(request, contents=request.contents * 2)


def _with(request: Request, **fields: Any) -> Request:
    (content,) = request.contents
    changed: Content = content._replace(**fields)
    return replace(request, contents=(changed,))


def _short(request: Request) -> Request:
    return _with(request, values=request.contents[0].values[:-4])


def _shape(request: Request) -> Request:
    return _with(request, shape=(1, *request.contents[0].shape))


def _long_span(request: Request) -> Request:
    (span,) = request.content_spans
    return replace(request, content_spans=(span._replace(num_tokens=span.num_tokens - 1),))


@pytest.mark.parametrize(
    "change", [_without_contents, _unknown, _twice, _short, _shape, _long_span]
)
def test_contents_that_do_not_match_are_refused(refusing: LLM, saved: Saved, change: Any) -> None:
    request = change(make_request(saved.family, "x", PROMPTS["in the middle"]))
    with pytest.raises(InvalidRequestError):
        refusing.engine.add(request)
    assert not refusing.engine.has_work() and not store_of(refusing)._inputs


@pytest.mark.parametrize("grid", [None, (1, 3, 2)])
def test_other_grids_are_refused(refusing: LLM, saved: Saved, grid: Any) -> None:
    if saved.family.span_grid is None:
        return
    request = make_request(saved.family, "x", PROMPTS["in the middle"])
    (span,) = request.content_spans
    with pytest.raises(InvalidRequestError, match="makes a grid of"):
        refusing.engine.add(replace(request, content_spans=(span._replace(grid=grid),)))


@pytest.fixture(scope="module")
def refusing(saved: Saved) -> LLM:
    return saved.llm()


def test_the_encoder_is_loaded_for_the_first_image(saved: Saved) -> None:
    """With the tokens, and the memory from the start, of an engine that loads it at its start."""
    eager_llm, lazy_llm = (saved.llm(load_encoder_at_start=now) for now in (True, False))
    sizes = [llm.engine.facts["vision_weight_bytes"] for llm in (eager_llm, lazy_llm)]
    assert sizes[0] == sizes[1]
    assert is_loaded(eager_llm) and not is_loaded(lazy_llm)
    text_only = make_request(saved.family, "text", PROMPTS["text"])
    assert_greedy(saved, answers_of(lazy_llm.engine, [text_only]), "text")
    assert not is_loaded(lazy_llm)
    request = make_request(saved.family, "two", PROMPTS["two"])
    assert answers_of(lazy_llm.engine, [request]) == answers_of(eager_llm.engine, [request])
    assert is_loaded(lazy_llm)


def test_an_encoder_that_cannot_be_loaded_fails_its_image_only(
    saved: Saved, tmp_path: Path
) -> None:
    shutil.copytree(saved.folder, tmp_path, dirs_exist_ok=True)
    engine = replace(saved, folder=tmp_path).llm().engine
    weights = tmp_path / "model.safetensors"
    weights.rename(tmp_path / "moved")
    image = make_request(saved.family, "first", PROMPTS["first"])
    engine.add(image)
    (output,) = [output for _ in range(50) if engine.has_work() for output in engine.step()]
    assert output.error is not None and "its encoder can't be loaded" in output.error
    assert str(tmp_path) not in output.error
    assert answers_of(engine, [make_request(saved.family, "text", PROMPTS["text"])])
    (tmp_path / "moved").rename(weights)
    assert_greedy(saved, answers_of(engine, [image]), "after the files came back")


def test_language_model_only_takes_no_images(saved: Saved) -> None:
    llm = saved.llm(language_model_only=True)
    assert llm.engine.limits.max_content_tokens == 0
    assert "vision_weight_bytes" not in llm.engine.facts
    with pytest.raises(InvalidRequestError, match="text only"):
        llm.engine.add(make_request(saved.family, "x", PROMPTS["first"]))
    assert_greedy(
        saved, answers_of(llm.engine, [make_request(saved.family, "text", PROMPTS["text"])]), "text"
    )
