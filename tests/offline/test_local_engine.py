"""What every engine of this process has: sleep, metrics, defaults, and answers to wrong names."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.compat.methods import COMPAT_METHODS
from quire.core.sampling_params import RequestOutputKind, SamplingParams
from quire.core.scheduling.pacing import ConstantPacer
from quire.errors import InvalidRequestError
from quire.offline.engine_metrics import CounterMetric, HistogramMetric, VectorMetric
from quire.offline.llm import LLM
from quire.offline.llm_engine import LLMEngine

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM(dtype="float32", max_model_len=512, kv_cache_memory="24MiB")
    yield llm
    assert llm.engine.stats().num_held_blocks == 0


def resident_bytes() -> int:
    """Of this process's memory what is anonymous: the KV cache is."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def test_asleep_it_has_no_kv_memory_and_awake_the_same_tokens(llm: LLM) -> None:
    prompts = [{"prompt_token_ids": [7 + i] * 500} for i in range(12)]
    one = SamplingParams(max_tokens=1)
    before = llm.generate("import os", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    llm.generate(prompts, one, use_tqdm=False)
    num_used_blocks = llm.engine.stats().num_cached_blocks
    facts = llm.engine.facts
    num_bytes = num_used_blocks * facts["kv_cache_bytes"] // facts["num_blocks"]
    full = resident_bytes()
    llm.sleep()
    assert llm.is_sleeping() and full - resident_bytes() > 0.8 * num_bytes > 4 << 20
    with pytest.raises(InvalidRequestError, match="asleep; call wake_up"):
        llm.generate("x", one, use_tqdm=False)
    llm.wake_up(tags=["weights"])
    assert llm.is_sleeping()
    llm.wake_up()
    again = llm.generate("import os", GREEDY, use_tqdm=False)[0]
    assert (again.outputs[0].token_ids, again.num_cached_tokens) == (before, 0)


def test_sleep_is_refused_where_it_can_not_be(llm: LLM) -> None:
    with llm.start("import os", GREEDY), pytest.raises(InvalidRequestError, match="are running"):
        llm.sleep()
    with pytest.raises(InvalidRequestError, match="level is 2, but must be 1"):
        llm.sleep(level=2)
    with pytest.raises(InvalidRequestError, match="tags contains 'kv'"):
        llm.wake_up(tags=["kv"])


def test_a_reset_prefix_cache_finds_nothing(llm: LLM) -> None:
    prompt = {"prompt_token_ids": [9] * 64}
    one = SamplingParams(max_tokens=1)
    llm.generate(prompt, one, use_tqdm=False)
    assert llm.generate(prompt, one, use_tqdm=False)[0].num_cached_tokens > 0
    assert llm.reset_prefix_cache(reset_running_requests=True)
    assert llm.generate(prompt, one, use_tqdm=False)[0].num_cached_tokens == 0


def test_metrics_count_what_was_done(llm: LLM) -> None:
    def generated() -> int:
        (found,) = [m for m in llm.get_metrics() if m.name == "quire_sampled_tokens_total"]
        assert isinstance(found, CounterMetric)
        return found.value

    before = generated()
    output = llm.generate("import os", GREEDY, use_tqdm=False)[0]
    assert generated() - before == 6
    histograms = [m for m in llm.get_metrics() if isinstance(m, HistogramMetric)]
    assert histograms and all(m.buckets["+Inf"] == m.count for m in histograms)
    metrics = output.metrics
    assert metrics is not None and metrics.num_generation_tokens == 6
    assert 0 < metrics.first_token_latency <= metrics.last_token_ts - metrics.arrival_ts


def test_metrics_of_drafts_have_vllms_names_too() -> None:
    llm = LLM(dtype="float32", max_model_len=256, speculation="prediction")
    llm.engine.scheduler.pacer = ConstantPacer()  # drafts are made whatever they cost
    params = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
    (plain,) = llm.generate("import os\n", params, use_tqdm=False)
    prompt = {"prompt": "import os\n", "prediction": plain.outputs[0].token_ids}
    llm.generate(prompt, params, use_tqdm=False)
    found = {metric.name: metric for metric in llm.get_metrics() if "replica" not in metric.labels}
    per_position = found["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert isinstance(per_position, VectorMetric) and per_position.values[0] > 0

    def value(name: str) -> float:
        metric = found[name]
        assert isinstance(metric, CounterMetric)
        return metric.value

    stats = llm.engine.stats()
    accepted = value("quire_accepted_draft_tokens_total")
    assert accepted == value("vllm:spec_decode_num_accepted_tokens") == sum(per_position.values)
    assert accepted == stats.num_accepted_drafts > 0
    assert value("quire_draft_tokens_total") == value("vllm:spec_decode_num_draft_tokens")
    assert value("quire_draft_tokens_total") == stats.num_drafts
    assert 0 < value("vllm:spec_decode_num_drafts") <= stats.num_drafts
    assert found["quire_draft_tokens_total"].labels == {"proposer": "prediction"}


def test_default_params_are_the_models(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    assert params.temperature == llm.engine.limits.defaults.temperature
    params.max_tokens = 3
    assert llm.get_default_sampling_params().max_tokens == 16


def test_the_engine_says_what_its_model_is(llm: LLM) -> None:
    """Where scripts for vLLM look for it."""
    config = llm.llm_engine.model_config
    limits = llm.engine.limits
    assert config.max_model_len == limits.max_model_len
    assert config.get_vocab_size() == config.vocab_size == limits.vocab_size
    assert config.dtype == llm.engine.facts["dtype"]
    assert config.tokenizer is not None and Path(config.tokenizer).is_dir()


def test_missing_methods_of_vllm_are_explained(llm: LLM) -> None:
    for name, why in COMPAT_METHODS.items():
        if not hasattr(LLM, name):
            with pytest.raises(AttributeError) as caught:
                getattr(llm, name)
            assert str(caught.value) == f"LLM has no {name}: {why}"
    with pytest.raises(AttributeError, match="LLM has no generat; did you mean generate"):
        llm.generat  # noqa: B018 - the access is the test
    output = llm.generate("x", SamplingParams(max_tokens=1), use_tqdm=False)[0]
    assert output.lora_request is None and output.outputs[0].finished()
    assert output.outputs[0].finished == True and repr(output.outputs[0].finished) == "True"  # noqa: E712
    with pytest.raises(AttributeError, match="RequestOutput has no encoder_prompt: no model here"):
        output.encoder_prompt  # noqa: B018
    with pytest.raises(AttributeError, match="CompletionOutput has no txt; did you mean text"):
        output.outputs[0].txt  # noqa: B018


def test_an_engine_whose_caller_steps_gives_what_each_request_wants(llm: LLM) -> None:
    whole = llm.generate("import os", GREEDY, use_tqdm=False)[0].outputs[0]
    options = {"dtype": "float32", "max_model_len": 128, "num_blocks": 64}
    engine = LLMEngine(**options, speculation="off")  # an output for each token
    outputs: dict[str, list] = {kind.name: [] for kind in RequestOutputKind}
    for kind in RequestOutputKind:
        params = GREEDY.clone()
        params.output_kind = kind
        engine.add_request(kind.name, "import os", params)
    engine.add_request("gone", "x", GREEDY)
    with pytest.raises(InvalidRequestError, match="'gone' is in use"):
        engine.add_request("gone", "x", GREEDY)
    engine.abort_request(["gone", "never was"])
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id].append(output)
    for kind in ("CUMULATIVE", "FINAL_ONLY"):
        last = outputs[kind][-1].outputs[0]
        assert (last.text, last.token_ids) == (whole.text, whole.token_ids)
        assert [list(entry) for entry in last.logprobs] == [list(one) for one in whole.logprobs]
    pieces = [output.outputs[0] for output in outputs["DELTA"]]
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    entries = [entry for piece in pieces for entry in piece.logprobs]
    assert [list(entry) for entry in entries] == [list(entry) for entry in whole.logprobs]
    assert [len(outputs[kind.name]) for kind in RequestOutputKind] == [6, 6, 1]
    assert engine.engine.stats().num_held_blocks == 0
