"""What a template may do, and what it may not."""

from datetime import datetime
from typing import Any

import jinja2
import pytest

from quire.errors import InvalidRequestError
from quire.text.chat_template import ChatTemplate
from quire.text.template_sandbox import make_environment


def run(source: str, **variables: Any) -> str:
    return make_environment().from_string(source).render(variables)


def test_tojson_writes_characters_and_takes_options() -> None:
    assert run("{{ x | tojson }}", x={"a": "<é世>"}) == '{"a": "<é世>"}'
    assert run("{{ x | tojson(ensure_ascii=True) }}", x="é") == '"\\u00e9"'
    assert run("{{ x | tojson(indent=2) }}", x=[1]) == "[\n  1\n]"
    assert run("{{ x | tojson(separators=(',', ':'), sort_keys=true) }}", x={"b": 1, "a": 2}) == (
        '{"a":2,"b":1}'
    )


def test_strftime_now() -> None:
    assert run("{{ strftime_now('%Y') }}") in {
        str(datetime.now().year),
        str(datetime.now().year - 1),  # the year ended between the two readings
    }


def test_a_dates_format_is_short() -> None:
    """Python would take 200 MB for this one, whose text has 500 MB."""
    with pytest.raises(jinja2.exceptions.SecurityError, match="strftime_now has a format"):
        run("{{ strftime_now('%9999d' * 50000) }}")


def test_raise_exception_says_its_words() -> None:
    with pytest.raises(jinja2.TemplateError, match="roles must alternate"):
        run("{{ raise_exception('roles must alternate') }}")


def test_whitespace_is_trimmed_around_blocks() -> None:
    assert run("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


def test_loop_controls() -> None:
    source = "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}"
    assert run(source + "{% if i == 3 %}{% break %}{% endif %}{% endfor %}") == "023"


def test_generation_tag_keeps_its_text_in_a_scope_of_its_own() -> None:
    source = "{% set x = 1 %}<{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}>{{ x }}"
    assert run(source) == "<2>1"


def test_dict_and_namespace() -> None:
    source = "{% set ns = namespace(a=1, self=2) %}{% set ns.a = dict(b=3).b %}{{ ns.a + ns.self }}"
    assert run(source) == "5"
    assert run("{{ dict.fromkeys(['a'], 1) }}") == "{'a': 1}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages.clear() }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns._a = 1 %}",
        "{% set ns = namespace() %}{{ ns.__class__.__mro__ }}",
        "{% set ns = namespace() %}{{ ns['__init__'].__globals__ }}",
        "{{ {'a': 1}.__class__.__mro__ }}",
        "{{ dict.__subclasses__() }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
    ],
)
def test_python_is_out_of_reach(source: str) -> None:
    with pytest.raises(jinja2.TemplateError):
        run(source, messages=[1])


@pytest.mark.parametrize(
    "source",
    ["{{ 'a'.ljust(3000000000) }}", "{{ 10**100000000 }}", "{{ 'a' | center(3000000000) }}"],
)
def test_a_template_that_takes_too_much_refuses_the_messages(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="the model's chat template refuses"):
        ChatTemplate({"default": source}, {}).render([{"role": "user", "content": "hi"}])
