"""Adapters of an engine: its own law, on a real model, with every way that memory is shared.

A request gets the tokens of its adapter, whatever runs beside it, was cached before, or happened to
its memory.
"""

import os
import shutil
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
from tests.adapters.embedded import save_adapter

from quire.core.adapters import LoRARequest
from quire.core.request import FinishReason
from quire.core.sampling_params import BeamSearchParams, SamplingParams
from quire.errors import AdapterError, InvalidRequestError
from quire.offline.llm import LLM

PROMPT = "import os\n\n\ndef main(path):\n    for name in os.listdir(path):\n        print(name)\n"
GREEDY = SamplingParams(temperature=0, max_tokens=12)
NUM_ADAPTERS = 4


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> list[LoRARequest]:
    root = tmp_path_factory.mktemp("adapters")
    return [
        LoRARequest(f"a{seed}", seed + 1, str(save_adapter(root / f"a{seed}", seed)))
        for seed in range(NUM_ADAPTERS)
    ]


def make(**options) -> LLM:
    usual = {"max_loras": 2, "max_lora_rank": 4, "max_num_seqs": 8, "num_blocks": 256}
    usual["speculation"] = "off"  # tests count steps
    return LLM(enable_lora=True, **({"max_model_len": 512} | usual | options))


def tokens(llm: LLM, adapter, params=GREEDY, prompt=PROMPT) -> list[list[int]]:
    (output,) = llm.generate(prompt, params, use_tqdm=False, lora_request=adapter)
    assert output.error is None and output.lora_request is adapter
    return [list(each.token_ids) for each in output.outputs]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make()


@pytest.fixture(scope="module")
def alone(adapters) -> list[list[int]]:
    """Of each adapter, and last of the base model, computed in an engine of its own."""
    found = [tokens(make(), adapter)[0] for adapter in [*adapters, None]]
    assert len({tuple(each) for each in found}) == len(found), "they say different things"
    return found


def test_a_crowd_of_adapters_beside_the_base_model(llm, adapters, alone):
    everybody = [*adapters, None] * 3
    outputs = llm.generate([PROMPT] * len(everybody), GREEDY, False, everybody)
    assert [list(output.outputs[0].token_ids) for output in outputs] == alone * 3
    assert [output.lora_request for output in outputs] == everybody
    assert outputs[0].outputs[0].lora_request is adapters[0]
    counts = llm.engine.stats().adapters
    assert counts["num_slots"] == 2 and counts["num_loads"] >= NUM_ADAPTERS


def test_the_base_model_says_what_it_says_without_adapters(alone):
    plain = LLM(max_model_len=512, num_blocks=256)
    assert tokens(plain, None)[0] == alone[-1]


def test_cached_prefixes_are_an_adapter_s_own(adapters, alone):
    llm = make()
    cached = []
    for adapter, expected in zip(
        [*adapters[:2], None] * 2, [*alone[:2], alone[-1]] * 2, strict=True
    ):
        (output,) = llm.generate(PROMPT, GREEDY, False, adapter)
        assert list(output.outputs[0].token_ids) == expected
        cached.append(output.num_cached_tokens)
    num_prompt_tokens = len(output.prompt_token_ids)
    assert cached == [0, 0, 0, *[num_prompt_tokens - 1] * 3]


def test_two_names_of_one_content_share(adapters, alone, tmp_path):
    llm = make()
    shutil.copytree(adapters[0].lora_path, tmp_path / "copy")
    assert tokens(llm, adapters[0]) == [alone[0]]
    (output,) = llm.generate(PROMPT, GREEDY, False, LoRARequest("copy", 9, str(tmp_path / "copy")))
    assert list(output.outputs[0].token_ids) == alone[0] and output.num_cached_tokens
    assert llm.engine.stats().adapters["num_loads"] == 1


def test_a_reloaded_adapter_uses_no_cached_prefix_of_the_old_one(adapters, alone, tmp_path):
    llm, folder = make(), tmp_path / "a"
    again = LoRARequest("a", 1, str(folder))
    shutil.copytree(adapters[0].lora_path, folder)
    assert tokens(llm, again) == [alone[0]]
    shutil.copytree(adapters[1].lora_path, folder, dirs_exist_ok=True)
    os.utime(folder / "adapter_config.json", ns=(7, 7))
    (output,) = llm.generate(PROMPT, GREEDY, False, again)
    assert list(output.outputs[0].token_ids) == alone[1] and output.num_cached_tokens == 0


def test_branches_and_forks_have_their_request_s_adapter(llm, adapters, alone):
    samples = SamplingParams(n=3, temperature=0, max_tokens=12)
    assert tokens(llm, adapters[1], samples) == [alone[1]] * 3
    with llm.start(PROMPT, GREEDY, lora_request=adapters[2]) as trunk:
        for _ in range(4):
            trunk.step()
        branch = trunk.fork(GREEDY)
        assert branch.finish().token_ids == trunk.finish().token_ids == alone[2]
    text = "".join(llm.stream(PROMPT, GREEDY, lora_request=adapters[3]))
    assert text == llm.get_tokenizer().decode(alone[3])


def test_a_beam_search_has_an_adapter(llm, adapters):
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    both = llm.beam_search([PROMPT] * 2, params, False, [adapters[0], None])
    (own,) = make().beam_search(PROMPT, params, False, adapters[0])
    (base,) = make().beam_search(PROMPT, params, False)
    for found, expected in zip(both, (own, base), strict=True):
        assert [each.tokens for each in found.sequences] == [
            each.tokens for each in expected.sequences
        ]
    assert both[0].sequences[0].tokens != both[1].sequences[0].tokens


def test_preempted_ones_go_on_with_theirs(adapters):
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    everybody = [*adapters, None]
    expected = [tokens(make(num_blocks=64), adapter, params)[0] for adapter in everybody]
    small = make(num_blocks=20, max_num_seqs=5, max_model_len=256)
    outputs = small.generate([PROMPT] * 5, params, False, everybody)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert small.engine.stats().num_preemptions


@pytest.mark.parametrize("max_cpu_loras", [1, 8])
def test_one_slot_serves_all_in_turn(adapters, alone, max_cpu_loras):
    llm = make(max_loras=1, max_cpu_loras=max_cpu_loras)
    outputs = llm.generate([PROMPT] * 8, GREEDY, False, adapters * 2)
    assert [list(output.outputs[0].token_ids) for output in outputs] == alone[:-1] * 2


def test_chats_have_adapters(llm, adapters):
    question = [{"role": "user", "content": "What does os.path.join do?"}]
    both = llm.chat([question] * 2, GREEDY, False, lora_request=[None, adapters[0]])
    assert both[0].outputs[0].token_ids != both[1].outputs[0].token_ids


def test_a_broken_adapter_ends_its_own_request(adapters, alone, tmp_path):
    llm = make(max_cpu_loras=2)
    cut = shutil.copytree(adapters[0].lora_path, tmp_path / "cut")
    file = Path(cut) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    wide = save_adapter(tmp_path / "wide", 1, rank=8)
    broken = [
        LoRARequest("gone", 7, str(tmp_path / "gone")),
        LoRARequest("cut", 8, str(cut)),
        LoRARequest("wide", 9, str(wide)),
    ]
    mixed = [broken[0], adapters[0], broken[1], None, broken[2], adapters[1]]
    outputs = llm.generate(
        [PROMPT] * 6, SamplingParams(n=2, temperature=0, max_tokens=12), False, mixed
    )
    for output, adapter in zip(outputs, mixed, strict=True):
        reasons = {each.finish_reason for each in output.outputs}
        if adapter in broken:
            assert reasons == {FinishReason.ERROR.value} and output.error.count("\n") == 0
            assert f"adapter {adapter.lora_name!r}: " in output.error
        else:
            assert reasons == {FinishReason.LENGTH.value} and output.error is None
    fine = [list(output.outputs[0].token_ids) for output in outputs if output.error is None]
    assert fine == [alone[0], alone[-1], alone[1]]


def test_requests_for_an_adapter_deleted_meanwhile_fail_alone(adapters, alone, tmp_path):
    """It was found, so that requests carry its digest, and is in no memory any more."""
    llm = make(max_loras=1, max_cpu_loras=1)
    lost = shutil.copytree(adapters[2].lora_path, tmp_path / "lost")
    named = LoRARequest("lost", 5, str(lost))
    assert tokens(llm, named) == [alone[2]]
    assert tokens(llm, adapters[0]) == [alone[0]]
    ref = llm.engine.adapters.find("lost", str(lost)).result()
    shutil.rmtree(lost)
    store = llm.engine.adapters._find_store()
    find, done = store.find, Future()
    done.set_result(ref)
    store.find = lambda name, path, **more: done if name == "lost" else find(name, path, **more)
    outputs = llm.generate([PROMPT] * 3, GREEDY, False, [named, adapters[0], named])
    assert [output.error is not None for output in outputs] == [True, False, True]
    assert outputs[0].error == "adapter 'lost': it is not a folder; name one that PEFT saved"
    assert list(outputs[1].outputs[0].token_ids) == alone[0]


def test_others_are_computed_while_an_adapter_is_read(adapters, alone):
    llm = make(max_loras=1, max_cpu_loras=1)
    assert tokens(llm, adapters[1]) == [alone[1]]
    assert tokens(llm, adapters[0]) == [alone[0]]  # the other one is only on disk now
    store, gate = llm.engine.adapters._find_store(), threading.Event()
    read = store._read
    store._read = lambda folder: (gate.wait(10), read(folder))[1]
    waiting = llm.start(PROMPT, GREEDY, lora_request=adapters[1])
    assert tokens(llm, None) == [alone[-1]], "the reading has not even begun to end"
    assert not waiting.output.token_ids
    gate.set()
    assert waiting.finish().token_ids == alone[1]


def test_an_engine_without_adapters_names_the_option(adapters):
    plain = LLM(max_model_len=64, num_blocks=16)
    with pytest.raises(InvalidRequestError, match="make it with enable_lora=True"):
        plain.generate("x", GREEDY, lora_request=adapters[0])
    assert plain.engine.stats().adapters == {} and "adapter_bytes" not in plain.engine.facts


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("a", "lora_request is 'a', but must be a LoRARequest"),
        ([None], "there are 2 prompts, but lora_request has 1"),
        ([None, 3], "lora_request contains 3"),
    ],
)
def test_invalid_lora_requests_are_refused(llm, given, message):
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate([PROMPT] * 2, GREEDY, False, given)


def test_tiers_keep_blocks_by_adapter(adapters, alone, tmp_path):
    """A second engine finds on disk what the first one computed, of the same adapter only."""
    first = make(cache_dir=str(tmp_path))
    expected = [alone[0], alone[-1]]
    for adapter, own in zip((adapters[0], None), expected, strict=True):
        assert tokens(first, adapter) == [own]
    first.engine.tier_work.close()
    del first
    second = make(cache_dir=str(tmp_path))
    found = second.generate([PROMPT] * 3, GREEDY, False, [adapters[0], adapters[1], None])
    assert [list(each.outputs[0].token_ids) for each in found] == [alone[0], alone[1], alone[-1]]
    assert found[1].num_cached_tokens == 0
    second.engine.tier_work.close()


def test_the_ledger_names_the_slots(llm):
    slots = llm.engine.facts["adapter_bytes"]
    assert slots == 2 * make(max_loras=1).engine.facts["adapter_bytes"] > 0


def test_prefixes_are_published_and_pinned_by_adapter(adapters, alone, tmp_path):
    llm = make(num_blocks=40, max_model_len=256, eviction="lru")
    first, gone = adapters[0], LoRARequest("gone", 9, str(tmp_path / "gone"))

    def cached(adapter: LoRARequest | None, tenant: str) -> int:
        prompt = {"prompt": PROMPT, "tenant": tenant}
        (output,) = llm.generate(prompt, GREEDY, False, adapter)
        assert list(output.outputs[0].token_ids) == alone[-1 if adapter is None else 0]
        return output.num_cached_tokens

    num_tokens = llm.publish_prefix(PROMPT, lora_request=first)
    assert num_tokens > 16 and cached(first, "s") == num_tokens - 1
    assert cached(None, "s") == 0, "it serves its adapter alone"
    assert llm.pin_prefix(PROMPT, published=True) == 0, "the base model has published nothing"
    num_pinned = llm.pin_prefix(PROMPT, published=True, lora_request=first)
    assert num_pinned == num_tokens // 16 * 16
    for start in range(500, 2100, 200):
        flood = {"prompt_token_ids": list(range(start, start + 150))}
        llm.generate(flood, SamplingParams(max_tokens=1), False)
    assert cached(first, "t") >= num_pinned
    for call in (llm.publish_prefix, llm.pin_prefix):
        with pytest.raises(AdapterError, match="adapter 'gone': it is not a folder"):
            call(PROMPT, lora_request=gone)
