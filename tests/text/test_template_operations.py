"""What a template may make and how long it may take, whatever it is; and what it may still do."""

import time
from collections.abc import Callable
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.text import template_budget
from quire.text.template_sandbox import make_environment

ENVIRONMENT = make_environment()

GROWING = {
    "power": "{{ 10 ** 100000000 }}",
    "product": "{{ 'a' * 3000000000 }}{{ 3 * 'a' }}",
    "list": "{{ [1] * 1000000000 }}",
    "padded": "{{ 'a'.ljust(3000000000) }}",
    "padded with zeros": "{{ '1'.zfill(3000000000) }}",
    "padded by a filter": "{{ 'a' | center(3000000000) }}",
    "padded by way of another filter": "{{ ['a'] | map('center', 3000000000) | list }}",
    "padded by a method that a filter gives": "{{ ('a' | attr('ljust'))(3000000000) }}",
    "tabs": r"{{ '\t'.expandtabs(3000000000) }}",
    "width": "{{ '%3000000000d' % 1 }}",
    "width behind a key": "{{ '%(a%b)3000000000s' % {'a%b': 1} }}",
    "width as an argument": "{{ '%*d' % (3000000000, 1) }}",
    "places": "{{ '%.3000000000f' | format(1.5) }}",
    "width of format": "{{ '{:3000000000}'.format(1) }}",
    "width of format as an argument": "{{ '{:{}}'.format(1, 3000000000) }}",
    "indent": "{{ 'a' | indent(3000000000, true) }}",
    "JSON": "{{ [[1]] | tojson(indent=1000000000) }}",
    "replaced": "{{ ('a' * 100000).replace('a', 'b' * 1000000) }}",
    "replaced by a filter": "{{ ('a' * 100000) | replace('a', 'b' * 1000000) }}",
    "joined": "{{ range(100000) | join('b' * 1000000) }}",
    "formatted again and again": "{{ ('%(a)s' * 100000) % {'a': 'b' * 1000000} }}",
    "filled": "{{ [1] | batch(1000000000, 'x') | list }}",
    "rounded": "{{ 5 | round(-1000000000) }}",
    "bytes": "{{ (1).to_bytes(3000000000, 'big') }}",
    "translated": "{{ 'a'.translate({97: 'b' * 1000000000}) }}",
    "doubled": "{% set ns = namespace(x='ab') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubled with a text": "{% set ns = namespace(x='ab') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x + '-' + ns.x %}{% endfor %}",
    "doubled by ~": "{% set ns = namespace(x='ab') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubled in a block": "{% set ns = namespace(x='ab') %}{% for i in range(99) %}"
    "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "squared": "{% set ns = namespace(x=3) %}{% for i in range(99) %}"
    "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "shared lists": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% endfor %}",
    "shared keys": "{% set ns = namespace(x=(1,)) %}{% for i in range(99) %}"
    "{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ {ns.x: 1} }}",
    "shared objects": "{% set ns = namespace(x=1) %}{% for i in range(99) %}"
    "{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}",
    "shared by a filter": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}"
    "{% set ns.x = (ns.x * 2) | slice(1) | list %}{% endfor %}",
    "the output": "{% set x = 'a' * 10000000 %}{% for i in range(1000) %}{{ x }}{% endfor %}",
}
ENDLESS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops that pass over all": "{% for i in range(99999) %}{% for j in range(99999) if false %}"
    "{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(99) }}",
    "comparisons": "{% set x = 'a' * 9999999 %}{% set y = x ~ '' %}{% for i in range(99999) %}"
    "{% if x == y %}{% endif %}{% endfor %}",
    "searches": "{% set x = range(99999) | list %}{% for i in range(99999) %}"
    "{% if -1 in x %}{% endif %}{% endfor %}",
    "methods": "{% set x = 'a' * 9999999 %}{% for i in range(99999) %}{{ x.count('b') }}"
    "{% endfor %}",
    "filters": "{% set x = range(99999) | list %}{% for i in range(99999) %}{{ x | sum }}"
    "{% endfor %}",
    "lazy filters": "{% set x = range(99999) | list %}{% for i in range(99999) %}"
    "{{ x | select('equalto', -1) | first }}{% endfor %}",
    "JSON": "{% set x = range(99999) | list %}{% for i in range(99999) %}"
    "{{ x | tojson | length }}{% endfor %}",
    "tags": "{{ ('<!---->' * 1000000) | striptags }}",
    "lines": "{{ ('a' * 5000000) | wordwrap(1) }}",
    "codes": "{{ ('a' * 1000000).encode('punycode') }}",
}


@pytest.mark.parametrize("source", GROWING.values(), ids=GROWING.keys())
def test_templates_that_would_take_gigabytes_are_refused(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_budget, "NUM_BYTES", 64 << 20)
    with pytest.raises(jinja2.exceptions.SecurityError):
        ENVIRONMENT.from_string(source).render(messages=[])


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS.keys())
def test_templates_that_would_take_hours_are_refused(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_budget, "NUM_STEPS", 50_000)
    began_s = time.process_time()
    with pytest.raises(jinja2.exceptions.SecurityError):
        ENVIRONMENT.from_string(source).render(messages=[])
    assert time.process_time() - began_s < 20.0


def test_the_allowance_grows_with_what_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_budget, "NUM_STEPS", 100)
    monkeypatch.setattr(template_budget, "NUM_BYTES", 100)
    source = (
        "{% set ns = namespace(x='') %}{% for m in messages %}{% set ns.x = ns.x + m.content %}"
    )
    template = ENVIRONMENT.from_string(source + "{% endfor %}{{ ns.x }}")
    messages = [{"role": "user", "content": "word " * 100} for _ in range(200)]
    assert template.render(messages=messages) == "word " * 20_000
    endless = ENVIRONMENT.from_string("{% for i in range(9999) %}{% endfor %}")
    with pytest.raises(template_budget.TemplateBudgetError, match="takes too many steps"):
        endless.render(messages=messages[:1])


def test_each_rendering_has_a_budget_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ENVIRONMENT.from_string("{% for i in range(9000) %}{{ i }}{% endfor %}")
    monkeypatch.setattr(template_budget, "NUM_STEPS", 10_000)
    assert len({template.render() for _ in range(5)}) == 1


PLAIN = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
)
VARIABLES: dict[str, Any] = {
    "messages": [{"role": "user", "content": "a <b> c\n"}, {"role": "tool", "content": ["x", "y"]}],
    "n": 7,
    "text": "  some Text, some more  ",
    "nothing": None,
    "half": 0.5,
}
SAME = [
    "{{ 'a' + text + 'b' * 3 }}{{ n % 2 }}{{ n ** 2 }}{{ n * 1.5 }}{{ -n // 2 }}{{ n - 9 }}",
    "{{ '%s and %5.1f|%-4d' % (text, half, n) }}{{ '{0:>5} {x}'.format(n, x=text) }}",
    "{{ text ~ n ~ nothing ~ messages }}{{ messages }}{{ nothing }}{{ half }}{{ missing }}",
    "{{ messages[0]['role'] == 'user' and 'role' in messages[0] and n in [1, n] }}",
    "{{ 1 < n < 9 }}{{ n != half }}{{ text == text ~ '' }}{{ 'x' not in messages[1].content }}",
    "{{ messages[1:] }}{{ text[2:5] }}{{ messages[-1].content[::-1] }}{{ messages[n - 7].role }}",
    "{{ text.strip().upper().split(', ') }}{{ ', '.join(messages[1].content) }}",
    "{{ text.replace('some', 'more') }}{{ 'x'.center(9) }}{{ '5'.zfill(3) }}{{ 'é'.encode() }}",
    "{{ messages | map(attribute='role') | join('|') }}",
    "{{ ','.join(messages | map(attribute='role')) }}{{ range(3) | join }}",
    "{{ messages | selectattr('role', 'equalto', 'tool') | list }}{{ [3, 1] | sort }}",
    "{{ [1, 2, 3] | batch(2, 'x') | list }}{{ [1, 2, 3] | slice(2) | list }}{{ [1, 2] | sum }}",
    "{{ text | trim | title | replace('Some', n) | indent(3, true) | wordwrap(9) }}",
    "{{ text | length }}{{ 2.567 | round(1) }}{{ '12' | int + 1 }}{{ messages | first }}",
    "{{ messages[0].content | e | striptags }}{{ messages[0] | dictsort }}",
    "{{ [1, 1] | unique | list }}",
    "{{ messages | groupby('role') }}{{ '%s!' | format(n) }}{{ messages[0] | items | list }}",
    "{% for m in messages if m.role != 'user' %}{{ loop.index }}{{ m }}{% else %}-{% endfor %}",
    "{% for c in [[1, [2]], 3] recursive %}{{ loop(c) if c is iterable else c }}{% endfor %}",
    "{% macro m(a, b=2) %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}"
    "{{ m(1) }}{% call m(3, b=4) %}x{% endcall %}{% filter upper %}ab{{ text }}{% endfilter %}",
    "{% set ns = namespace(a=0) %}{% for i in range(4) %}{% set ns.a = ns.a + i %}{% endfor %}"
    "{{ ns.a }}",
    "{% set x %}{{ n }}{{ n }}{% endset %}{{ x }}{% with y = n + 1 %}{{ y }}{% endwith %}",
    "{{ dict(a=1)['a'] if true }}{{ {'a': n, text: [n]} }}{{ (n, [text]) }}",
    "{{ 'a' if n > 3 else 'b' }}",
    "{% if n is number and text is string and n is odd and n is eq(7) %}yes{% endif %}",
    "{{ cycler('a', 'b').next() }}{% for i in range(3) %}{{ loop.cycle('a', 'b') }}{% endfor %}",
]  # fmt: skip


@pytest.mark.parametrize("source", SAME)
def test_operators_filters_and_methods_have_jinjas_results(source: str) -> None:
    assert ENVIRONMENT.from_string(source).render(VARIABLES) == (
        PLAIN.from_string(source).render(VARIABLES)
    )


OPERANDS = st.sampled_from(
    [
        *("n", "half", "text", "nothing", "missing", "messages", "'a'", "''", "3", "-2", "[1]"),
        *("{'a': n}", "true", "(1, n)", "messages[0]", "text | length", "loop"),
    ]
)
EXPRESSIONS = st.recursive(
    OPERANDS,
    lambda inner: st.one_of(
        st.tuples(
            inner,
            st.sampled_from(
                ["+", "*", "%", "-", "~", "==", "!=", "<", "in", "not in", "and", "or"]
            ),
            inner,
        ).map(lambda each: f"({' '.join(each)})"),
        st.tuples(inner, inner).map(lambda each: f"[{each[0]}, {each[1]}]"),
        st.tuples(inner, inner).map(lambda each: f"{each[0]}[{each[1]}]"),
        inner.map(lambda each: f"({each}) | string"),
        inner.map(lambda each: f"({each} if n else 0)"),
    ),
    max_leaves=5,
)


def outcome(make: Callable[[], str]) -> str:
    try:
        return make()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


NAMES = [
    *("role", "content", "missing", "items", "keys", "get", "pop", "update", "copy", "__class__"),
    *("__getitem__", "_private", "format"),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("written", [".{}", "['{}']", " | attr('{}')"])
def test_attributes_of_objects_are_jinjas(name: str, written: str) -> None:
    found = f"(message{written.format(name)})"
    source = (
        f"{{{{ {found} is defined }}}}{{{{ {found} if {found} is string }}}}{{{{ {found}.x }}}}"
    )
    message = {"role": "user", "items": "own", "_private": 1, "__class__": 2}
    plain = outcome(lambda: PLAIN.from_string(source).render(message=message))
    assert outcome(lambda: ENVIRONMENT.from_string(source).render(message=message)) == plain


@pytest.mark.parametrize(
    "arguments",
    ["", "'role'", "'no'", "'no', 3", "'no', messages", "(1, n)", "[1]", "a=1", "1, 2, 3"],
)
def test_values_are_looked_up_as_jinja_does(arguments: str) -> None:
    source = f"{{{{ messages[0].get({arguments}) }}}}"
    plain = outcome(lambda: PLAIN.from_string(source).render(VARIABLES))
    assert outcome(lambda: ENVIRONMENT.from_string(source).render(VARIABLES)) == plain


@given(EXPRESSIONS)
def test_expressions_have_jinjas_results_or_errors(expression: str) -> None:
    source = f"{{% set x = {expression} %}}{{{{ x }}}}{{{{ {expression} }}}}"
    plain = outcome(lambda: PLAIN.from_string(source).render(VARIABLES))
    assert outcome(lambda: ENVIRONMENT.from_string(source).render(VARIABLES)) == plain
