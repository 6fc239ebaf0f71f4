"""Answers that obey a form are equal alone and in any crowd (embedded model, fp32)."""

import json
from typing import Any

import pytest
from tests.engine.crowding import preempt_much
from tests.engine.test_law import make_llm

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.errors import InvalidRequestError

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
TIGHT = {"disable_any_whitespace": True}

FORMS: list[dict[str, Any] | None] = [
    {"json": SCHEMA, **TIGHT},
    {"regex": "(def|class) [a-z]{2,6}:"},
    None,
    {"choice": ["yes", "no", "no, never"]},
    {"json": {"type": "array", "items": {"type": "integer"}, "maxItems": 9}, **TIGHT},
    {"grammar": 'start: "[" WORD ("," WORD)~3 "]"\nWORD: /[a-z]{1,4}/'},
    {"json_object": True, **TIGHT},
]


def params_of(index: int) -> SamplingParams:
    form = FORMS[index % len(FORMS)]
    return SamplingParams(
        n=1 + index % 2,
        temperature=(1.0, 0.0, 1.7)[index % 3],
        top_p=(1.0, 0.9)[index % 2],
        frequency_penalty=(0.0, 0.4)[index % 2],
        seed=index,
        max_tokens=40,
        min_tokens=(0, 3)[index % 2],
        ignore_eos=index % 4 == 3,
        logprobs=(None, 2)[index % 2],
        structured_outputs=None if form is None else StructuredOutputsParams(**form),
    )


PROMPTS = ["import os\n", "def f(x):", "# a", "class A:", "x = 1", "return", "for i in"]
WISHES = [params_of(index) for index in range(len(PROMPTS))]


def answers(llm: LLM, prompts: list[str], wishes: list[SamplingParams]) -> list[list[Any]]:
    outputs = llm.generate(prompts, wishes, use_tqdm=False)
    return [
        [(each.token_ids, each.finish_reason, each.logprobs) for each in output.outputs]
        for output in outputs
    ]


@pytest.fixture(scope="module")
def alone() -> list[list[Any]]:
    llm = make_llm(enable_prefix_caching=False)
    return [answers(llm, [prompt], [wish])[0] for prompt, wish in zip(PROMPTS, WISHES, strict=True)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_blocks": 8, "block_size": 8, "max_model_len": 64},
        {"num_blocks": 8, "block_size": 8, "max_model_len": 64, "async_scheduling": True},
    ],
)
def test_the_tokens_are_those_of_the_request_alone(
    options: dict[str, Any], alone: list[list[Any]]
) -> None:
    """Each three times, also with so few blocks that some are preempted, and planned ahead."""
    llm = make_llm(**options)
    preempt_much(llm)
    assert answers(llm, 3 * PROMPTS, 3 * WISHES) == 3 * alone
    num_preemptions = llm.engine.stats().num_preemptions
    assert (num_preemptions > 0) is ("num_blocks" in options)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_llm()


def generate(llm: LLM, form: dict[str, Any], **params: Any) -> Any:
    wanted = StructuredOutputsParams(**form)
    asked = {"max_tokens": 60, "temperature": 1.0, "seed": 3, **params}
    wish = SamplingParams(structured_outputs=wanted, **asked)
    return llm.generate(["import os\n"], wish, use_tqdm=False)[0].outputs[0]


def test_an_answer_that_is_complete_obeys_its_schema(llm: LLM) -> None:
    for seed in range(8):
        output = generate(llm, {"json": SCHEMA, **TIGHT}, seed=seed)
        assert output.finish_reason == "stop"
        found = json.loads(output.text)
        assert list(found) == ["name", "size", "tags"]
        assert 0 <= found["size"] <= 99 and set(found["tags"]) <= {"a", "b"}


def test_a_fork_goes_on_from_where_its_parent_is(llm: LLM) -> None:
    wanted = StructuredOutputsParams(json=SCHEMA, **TIGHT)
    wish = SamplingParams(max_tokens=60, temperature=1.0, seed=5, structured_outputs=wanted)
    with llm.start("import os\n", wish) as parent:
        while not parent.output.token_ids:
            parent.step()
        children = [parent.fork() for _ in range(4)]
        answers = [branch.finish().text for branch in (parent, *children)]
        assert all(map(json.loads, answers)) and len(set(answers)) > 1
    other = StructuredOutputsParams(regex="[0-9]+")
    with llm.start("import os\n", wish) as parent:
        while not parent.output.token_ids:
            parent.step()
        with pytest.raises(InvalidRequestError, match="does not obey the grammar"):
            parent.fork(SamplingParams(max_tokens=60, structured_outputs=other))
        assert json.loads(parent.finish().text)


@pytest.mark.parametrize("params", [{"min_tokens": 30}, {"ignore_eos": True}, {}])
def test_the_end_of_the_form_ends_the_answer(llm: LLM, params: dict[str, Any]) -> None:
    output = generate(llm, {"regex": "[a-f]{7}"}, **params)
    assert (len(output.text), output.finish_reason) == (7, "stop")


def test_ends_are_put_off_while_the_form_can_go_on(llm: LLM) -> None:
    bias = {token_id: 100.0 for token_id in llm.engine.limits.end_token_ids}
    assert generate(llm, {"regex": "[a-f]*"}, logit_bias=bias).text == ""
    assert generate(llm, {"regex": "a*"}, min_tokens=4, logit_bias=bias).text.startswith("a")
    output = generate(llm, {"regex": "[a-f]{0,9}"}, ignore_eos=True, logit_bias=bias)
    assert (len(output.text), output.finish_reason) == (9, "stop")


def test_other_ends_and_limits_hold_beside_the_form(llm: LLM) -> None:
    cut = generate(llm, {"json": SCHEMA, **TIGHT}, max_tokens=5)
    assert (len(cut.token_ids), cut.finish_reason) == (5, "length")
    stopped = generate(llm, {"json": SCHEMA, **TIGHT}, stop='"size"')
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", '"size"')
    first = generate(llm, {"regex": "[a-f]{9}"}).token_ids[0]
    by_token = generate(llm, {"regex": "[a-f]{9}"}, stop_token_ids=[first])
    assert (by_token.token_ids, by_token.stop_reason) == ([first], first)


def test_special_tokens_that_the_form_names_are_shown_where_asked(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ends = llm.engine.limits.end_token_ids
    token_id = next(each for each in sorted(tokenizer.special_token_ids) if each not in ends)
    form = {"grammar": f'start: "a" <[{token_id}]> "b"'}
    assert generate(llm, form).text == "ab"
    name = tokenizer.decode([token_id], skip_special_tokens=False)
    assert generate(llm, form, skip_special_tokens=False).text == f"a{name}b"
    assert generate(llm, {"regex": "[a-f]{7}"}, skip_special_tokens=False).text.isalpha()


def test_logprobs_are_the_models_own(llm: LLM) -> None:
    """Not of what the form leaves: a token that it forces has its own small probability."""
    output = generate(llm, {"choice": ["zebra"]}, logprobs=1)
    entries = zip(output.token_ids, output.logprobs, strict=True)
    assert any(entry[token_id].logprob < -1 for token_id, entry in entries)


def test_a_request_without_an_allowed_token_ends_alone_with_an_error(llm: LLM) -> None:
    digit = llm.get_tokenizer().encode("7", add_special_tokens=False)[-1]
    output = generate(llm, {"regex": "[a-f]+"}, allowed_token_ids=[digit])
    assert output.finish_reason == "error"
    assert generate(llm, {"regex": "[0-9]{4}"}, allowed_token_ids=[digit]).text == "7777"


def test_mistakes_are_refused_before_anything_runs(llm: LLM) -> None:
    for form in ({"regex": "(a"}, {"json": {"type": "objekt"}}, {"grammar": "start: missing"}):
        (kind,) = form
        with pytest.raises(InvalidRequestError, match=f"structured_outputs.{kind}") as raised:
            generate(llm, form)
        assert raised.value.param == f"structured_outputs.{kind}"
    assert not llm.engine.has_work()


def test_without_a_tokenizer_forms_are_refused_by_name() -> None:
    bare = make_llm(skip_tokenizer_init=True)
    wish = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(InvalidRequestError, match="need a tokenizer") as raised:
        bare.generate([{"prompt_token_ids": [5]}], wish, use_tqdm=False)
    assert raised.value.param == "structured_outputs"
