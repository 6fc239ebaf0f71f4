"""Rendering equals transformers' on templates as real models have them; refusals are sentences."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.text.small_tokenizers import make_byte_level
from transformers import AutoTokenizer, PreTrainedTokenizerFast, ProcessorMixin

from quire.errors import CheckpointError, InvalidRequestError
from quire.text.chat_template import ChatTemplate

CHATML = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>' + '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\nToday: " + date_string + "\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + eos_token }}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """{{ bos_token }}{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/...') }}
    {% endif %}
    {% if message['role'] == 'user' %}{{ ' [INST] ' + message['content'] + ' [/INST]' }}
    {% elif message['role'] == 'assistant' %}{% generation %}
{{ ' ' + message['content'] + eos_token }}{% endgeneration %}
    {% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{% endfor %}"""
JSON_AND_TIME = """{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}
{% if m.content is none %}{% continue %}{% endif %}
{{ {"role": m.role, "text": m.content, "why": m.reasoning_content or 0} | tojson }} {{ ns.n }}
{% endfor %}{{ strftime_now('%Y') }}{{ documents | tojson }}{{ mode | default('plain') }}"""
PARTS = """{% for message in messages %}{{ message.role }}: {% if message.content is string %}
{{ message.content }}{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}
{% endif %}{{ eos_token }}{% endfor %}"""
ONLY_PARTS = """{% for message in messages %}{{ message.role }}: {% for part in message.content %}
{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{{ eos_token }}{% endfor %}"""
TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "json_and_time": JSON_AND_TIME,
    "parts": PARTS,
}

TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": " Grüße, 世界! <|im_end|>{{ 1 }} "},
    {"role": "assistant", "content": 'Hi "there"\n', "reasoning": "polite"},
    {"role": "user", "content": "bye"},
]
SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"ü": [1, None]}}}]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def peer() -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=make_byte_level(), **SPECIAL)


def check_equal(peer: Any, source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    theirs = peer.apply_chat_template(messages, chat_template=source, tokenize=False, **options)
    tools = options.pop("tools", None)
    switches = {name: options.pop(name, False) for name in list(options) if "_message" in name}
    prompt = options.pop("add_generation_prompt", False)
    ours = ChatTemplate({"default": source}, SPECIAL).render(
        messages,
        add_generation_prompt=prompt,
        tools=tools,
        chat_template_kwargs=options,
        **switches,
    )
    assert ours == theirs
    return ours


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_equals_transformers(
    peer: Any, name: str, add_generation_prompt: bool, length: int
) -> None:
    check_equal(peer, TEMPLATES[name], TURNS[:length], add_generation_prompt=add_generation_prompt)


@pytest.mark.parametrize("name", ["chatml", "llama3", "json_and_time", "parts"])
def test_system_tools_and_variables_equal_transformers(peer: Any, name: str) -> None:
    # Where a template does not know tools, transformers drops them.
    tools = {"tools": TOOLS} if name == "llama3" else {}
    rendered = check_equal(
        peer, TEMPLATES[name], [SYSTEM, *TURNS], **tools, date_string="today", mode="other"
    )
    assert ('"ü"' in rendered) == (name == "llama3")
    assert ("today" in rendered) == (name == "llama3")
    assert ("other" in rendered) == (name == "json_and_time")


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral", "parts"])
@pytest.mark.parametrize("ending", ["I was", "I was  ", "\n I was \n"])
def test_continued_message_equals_transformers(peer: Any, name: str, ending: str) -> None:
    messages = [TURNS[0], {"role": "assistant", "content": ending}]
    rendered = check_equal(peer, TEMPLATES[name], messages, continue_final_message=True)
    assert rendered.rstrip().endswith("I was")


def test_parts_equal_transformers(peer: Any) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    messages = [SYSTEM, {"role": "user", "content": parts}]
    assert "one two" in check_equal(peer, PARTS, messages)
    assert check_equal(peer, PARTS, messages, continue_final_message=True).endswith("one two")


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral", "json_and_time"])
def test_parts_are_joined_for_templates_that_want_a_string(name: str) -> None:
    template = ChatTemplate({"default": TEMPLATES[name]}, SPECIAL)
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert template.render([{"role": "user", "content": parts}]) == template.render(
        [{"role": "user", "content": "one\ntwo"}]
    )


# As Gemma's templates: turns have their parts one behind the other, without space around them.
USERS_PARTS = """\
{%- for message in messages -%}
{%- if message.role == 'system' -%}{{ SYSTEM }}
{% else -%}
<{{ message.role }}>
{%- if message.content is string -%}{{ message.content | trim }}
{%- else -%}{% for part in message.content %}{{ part.text | trim }}{% endfor %}
{%- endif %}</>
{%- endif -%}
{%- endfor -%}"""


@pytest.mark.parametrize(
    "system",
    [
        "message.content | trim",
        "message.content if message.content is string else message.content[0].text",
    ],
)
def test_parts_are_joined_as_the_template_joins_them_for_the_roles_that_it_does(
    system: str,
) -> None:
    template = ChatTemplate({"default": USERS_PARTS.replace("SYSTEM", system)}, {})
    parts = [{"type": "text", "text": text} for text in ("one ", "two")]
    messages = [{"role": role, "content": parts} for role in ("system", "user", "assistant")]
    rendered = template.render(messages, add_generation_prompt=False)
    assert rendered == "one \ntwo\n<user>onetwo</><assistant>onetwo</>"
    rendered = template.render([{"role": "developer", "content": parts}, messages[1]])
    assert rendered == "one \ntwo\n<user>onetwo</>"


def test_string_becomes_a_part_for_templates_that_want_parts(peer: Any) -> None:
    template = ChatTemplate({"default": ONLY_PARTS}, SPECIAL)
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    rendered = template.render([{"role": "user", "content": "hello"}])
    assert rendered == template.render(parts) == check_equal(peer, ONLY_PARTS, parts)


def test_developers_are_systems_where_the_template_knows_only_these() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, TURNS[0]]
    system = ChatTemplate({"default": LLAMA3}, SPECIAL).render([SYSTEM, TURNS[0]])
    assert ChatTemplate({"default": LLAMA3}, SPECIAL).render(messages) == system
    aware = "{# system or developer #}" + CHATML
    assert "<|im_start|>developer\n" in ChatTemplate({"default": aware}, {}).render(messages)


def test_template_may_overrule_special_tokens(peer: Any) -> None:
    assert check_equal(peer, LLAMA3, TURNS[:1], eos_token="!").count("!") > 1


def test_template_refusal_is_the_templates_sentence() -> None:
    template = ChatTemplate({"default": MISTRAL}, SPECIAL)
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        template.render([TURNS[1]])
    assert caught.value.param == "messages" and caught.value.http_status == 400


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[5].content }}",
        "{{ unknown_token + 'x' }}",
        "{{ 'a' + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages | tojson(indent=messages) }}",
        "{{ strftime_now(3) }}",
    ],
)
def test_template_that_fails_is_reported(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template refuses these messages"):
        ChatTemplate({"default": source}, SPECIAL).render(TURNS)


def test_model_without_a_template_says_what_to_do(tmp_path: Path) -> None:
    template = ChatTemplate.from_folder(tmp_path)
    assert not template.exists
    with pytest.raises(InvalidRequestError, match=r"no chat template.*/v1/completions") as caught:
        template.render(TURNS)
    assert str(tmp_path) not in str(caught.value)  # clients are told it
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "options, param",
    [
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"add_generation_prompt": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": ["enable_thinking"]}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": object()}}, "chat_template_kwargs"),
        ({"tools": "search"}, "tools"),
        ({"tools": ["search"]}, "tools"),
    ],
)
def test_option_that_makes_no_sense_is_refused(options: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate({"default": CHATML}, SPECIAL).render(TURNS, **options)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "source, message",
    [
        (CHATML, {"role": "assistant", "tool_calls": []}),
        ("{{ messages[0].content }}", {"role": "assistant", "content": "lost"}),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", TURNS[1]),
    ],
)
def test_message_that_can_not_be_continued(source: str, message: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate({"default": source}, SPECIAL).render(
            [TURNS[0], message], add_generation_prompt=False, continue_final_message=True
        )
    assert caught.value.param == "continue_final_message"


NAMED = [{"name": "default", "template": "default"}, {"name": "tool_use", "template": "tools"}]


@pytest.mark.parametrize(
    "in_config, files",
    [
        (None, {}),
        ("config", {}),
        ("config", {"chat_template.json": '{"chat_template": "of a processor"}'}),
        (NAMED, {}),
        ({"default": "default", "tool_use": "tools"}, {}),
        ("config", {"chat_template.jinja": "file"}),
        (NAMED, {"chat_template.jinja": "file"}),
        (
            "config",
            {"chat_template.jinja": "file", "additional_chat_templates/tool_use.jinja": "t"},
        ),
        (NAMED[1:], {}),
    ],
)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_source_is_found_as_transformers_finds_it(
    save_folder: Callable[..., Path], in_config: Any, files: dict[str, str], tools: Any
) -> None:
    fields = {"tokenizer_class": "PreTrainedTokenizerFast"}
    folder = save_folder(
        make_byte_level(),
        config={"model_type": "llama"},
        tokenizer_config=fields if in_config is None else {**fields, "chat_template": in_config},
    )
    for name, source in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(source)
    peer = AutoTokenizer.from_pretrained(str(folder))
    template = ChatTemplate.from_folder(folder)
    try:
        theirs = peer.apply_chat_template(TURNS, tools=tools, tokenize=False)
    except ValueError:
        with pytest.raises(InvalidRequestError):
            template.render(TURNS, tools=tools)
    else:
        assert template.render(TURNS, tools=tools) == theirs


def test_a_processors_template_is_found_as_transformers_finds_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "config"}')
    (tmp_path / "chat_template.json").write_text('{"chat_template": "of a processor"}')
    (tmp_path / "processor_config.json").write_text("{}")
    found, _ = ProcessorMixin.get_processor_dict(str(tmp_path))
    assert ChatTemplate.from_folder(tmp_path).render(TURNS) == found["chat_template"]


def test_an_empty_template_is_none(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("\n")
    assert not ChatTemplate.from_folder(tmp_path).exists
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "config"}')
    assert ChatTemplate.from_folder(tmp_path).render(TURNS) == "config"


def test_special_tokens_of_the_folder_are_variables(save_folder: Callable[..., Path]) -> None:
    folder = save_folder(
        tokenizer_config={
            "bos_token": {"__type": "AddedToken", "content": "<b>"},
            "image_token": "<image>",
            "chat_template": "{{ bos_token }}{{ image_token }}{{ eos_token }}",
        }
    )
    assert ChatTemplate.from_folder(folder).render(TURNS) == "<b><image>"


def test_broken_template_is_refused_when_the_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}\n{% for %}")
    with pytest.raises(CheckpointError, match="not valid Jinja: line 2") as caught:
        ChatTemplate.from_folder(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("in_config", [3, [3], [{"name": "default"}], [{"name": 1, "template": 2}]])
def test_template_of_a_wrong_type_is_refused(
    save_folder: Callable[..., Path], in_config: Any
) -> None:
    with pytest.raises(CheckpointError, match="must be a string, or a list"):
        ChatTemplate.from_folder(save_folder(tokenizer_config={"chat_template": in_config}))


def test_unreadable_template_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "chat_template.jinja"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError) as caught:
        ChatTemplate.from_folder(tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(("field", "value"), [("foo", 1), ("prefix", True)])
def test_a_field_that_the_template_does_not_read_is_refused(field: str, value: object) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    messages[1][field] = value  # type: ignore[assignment]
    with pytest.raises(InvalidRequestError, match=rf"messages\[1\] has '{field}', which the mod"):
        ChatTemplate({"default": CHATML}, {}).render(messages)
    reading = CHATML + "{{ messages[-1]." + field + " }}"
    assert ChatTemplate({"default": reading}, {}).render(messages).endswith(str(value))


def test_fields_that_clients_send_back_may_be_empty() -> None:
    """As OpenAI's client writes an answer into a history."""
    echoed = {
        "role": "assistant",
        "content": "b",
        "name": "ada",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
        "reasoning_content": "because",
    }
    plain = [{"role": "assistant", "content": "b"}]
    template = ChatTemplate({"default": CHATML}, {})
    assert template.render([echoed]) == template.render(plain)


TOOL_TEMPLATE = """{% for m in messages %}<{{ m.role }}>{{ m.content }}
{%- for call in m.tool_calls or [] %}[{{ call.function.name }}:{{ FORM }}]{% endfor %}
{%- endfor %}{% if add_generation_prompt %}<assistant>{{ think }}{% endif %}"""
TEXT_FORM, OBJECT_FORM = "call.function.arguments + ''", "call.function.arguments | tojson"
ITEMS_FORM = "call.function.arguments.items() | list"


def called(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": "1", "type": "function", "function": function}]
    return [
        TURNS[2],
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "sunny"}]},
    ]


@pytest.mark.parametrize(
    ("form", "arguments", "written"),
    [
        (OBJECT_FORM, '{"a":  1}', '{"a": 1}'),
        (OBJECT_FORM, "", "{}"),
        (OBJECT_FORM, None, "{}"),
        (OBJECT_FORM, '{"a":', '"{\\"a\\":"'),
        (OBJECT_FORM, "[1]", '"[1]"'),
        (TEXT_FORM, '{"a":  1}', '{"a":  1}'),
        (TEXT_FORM, {"ü": 1}, '{"ü": 1}'),
        (TEXT_FORM, None, "{}"),
        (ITEMS_FORM, '{"a":  1}', "[('a', 1)]"),
    ],
)
def test_arguments_have_the_form_that_the_template_takes(
    form: str, arguments: Any, written: str
) -> None:
    template = ChatTemplate({"default": TOOL_TEMPLATE.replace("FORM", form)}, {})
    rendered = template.render(called(arguments))
    assert rendered == f"<user>bye<assistant>[f:{written}]<tool>sunny<assistant>"


@pytest.mark.parametrize("arguments", ['{"a": "\\ud800"}', '{"a": ' + "[" * 80 + "]" * 80 + "}"])
def test_arguments_are_checked_as_what_they_are_read_as(arguments: str) -> None:
    template = ChatTemplate({"default": TOOL_TEMPLATE.replace("FORM", OBJECT_FORM)}, {})
    with pytest.raises(InvalidRequestError) as caught:
        template.render(called(arguments))
    assert caught.value.param == "messages"


def test_a_template_without_tools_gets_calls_and_results_as_text() -> None:
    rendered = ChatTemplate({"default": CHATML}, {}).render(called('{"a": 1}'))
    assert rendered == (
        "<|im_start|>user\nbye<|im_end|>\n"
        '<|im_start|>assistant\n[{"name": "f", "parameters": {"a": 1}}]<|im_end|>\n'
        "<|im_start|>user\nResult of f:\nsunny<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_without_tools_describes_them_as_a_system_message() -> None:
    template = ChatTemplate({"default": CHATML}, {})
    rendered = template.render(TURNS, tools=TOOLS)
    assert rendered.startswith("<|im_start|>system\nThese functions can be called:")
    assert '{"name": "f", "parameters": {"ü": [1, null]}}' in rendered
    assert template.render(TURNS, tools=[]) == template.render(TURNS)


@pytest.mark.parametrize(
    ("options", "beginning"),
    [
        ({}, "<assistant>"),
        ({"chat_template_kwargs": {"think": "<think>"}}, "<assistant><think>"),
        ({"add_generation_prompt": False}, ""),
        ({"add_generation_prompt": False, "continue_final_message": True}, "<think>I"),
    ],
)
def test_the_beginning_of_the_answer_in_the_prompt_is_found(
    options: dict[str, Any], beginning: str
) -> None:
    messages = [TURNS[0], {"role": "assistant", "content": "<think>I"}]
    source = TOOL_TEMPLATE.replace("FORM", OBJECT_FORM)
    rendering = ChatTemplate({"default": source}, {}).prepare(messages, **options)
    assert rendering.beginning(rendering.text()) == beginning
    assert rendering.text().endswith(beginning)


@pytest.mark.parametrize("as_file", [True, False])
def test_a_template_by_option_takes_the_place_of_the_models(
    save_folder: Callable[..., Path], tmp_path: Path, as_file: bool
) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text(PARTS)
    template = ChatTemplate.from_option(str(path) if as_file else PARTS, save_folder())
    assert template.source_for_tools == PARTS
    with pytest.raises(CheckpointError, match="not valid Jinja"):
        ChatTemplate.from_option("{% for", save_folder())


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 5000 + ")" * 5000 + " }}",
        "{{ " + "9" * 5000 + " }}",
        "{% if x %}" * 300 + "{% endif %}" * 300,
    ],
    ids=["brackets", "digits", "blocks"],
)
def test_a_template_that_python_cannot_compile_is_refused(source: str) -> None:
    with pytest.raises(CheckpointError, match="chat template 'default' of model"):
        ChatTemplate({"default": source}, {})
