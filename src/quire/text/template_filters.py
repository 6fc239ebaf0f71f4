"""Jinja's filters and tests, with bounds for untrusted templates.

Their results equal those of Jinja. Each takes the memory of its result from the rendering's budget
(`template_budget`): before it runs if the result may be larger than the input, and otherwise
afterwards. A filter that takes more than linear time takes steps before it runs. Called by
`template_sandbox`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from json import JSONEncoder
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS
from jinja2.tests import TESTS
from jinja2.utils import _PassArg

from quire.text.template_budget import CURRENT, TemplateBudget, size_of
from quire.text.template_operations import (
    JOINED,
    OPERATIONS,
    QUICK_CHARACTERS,
    SCALARS,
    check_join,
    check_percent,
    check_replace,
    check_width,
    taken,
)

MAX_ROUND_DIGITS = 400


def checked_filters(own: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Jinja's filters, with checks. The filters in `own` replace Jinja's and take from the budget
    themselves."""
    functions: dict[str, Any] = {**FILTERS, **own}
    return {
        name: function if name in own or name in _GETTERS else _checked(name, function)
        for name, function in functions.items()
    }


def checked_tests() -> dict[str, Callable[..., Any]]:
    """Jinja's tests; tests that visit the items of their input take steps from the budget."""
    tests: dict[str, Any] = dict(TESTS)
    compared = {name: OPERATIONS[f"is_{op}"] for op, names in _TEST_NAMES.items() for name in names}
    return tests | compared | {name: _checked(name, tests[name]) for name in ("lower", "upper")}


_TEST_NAMES = {
    "eq": ("==", "eq", "equalto"), "ne": ("!=", "ne"), "lt": ("<", "lt", "lessthan"),
    "lteq": ("<=", "le"), "gt": (">", "gt", "greaterthan"), "gteq": (">=", "ge"), "in": ("in",),
}  # fmt: skip
"""Comparison operator -> the names of Jinja's tests for it."""


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    check, looks_inside = _CHECKS.get(name), name not in _SHALLOW
    # If a filter asks for it, Jinja passes a context or the environment as the first argument.
    num_passed = 0 if _PassArg.from_obj(function) is None else 1

    def checked(*args: Any, **kwargs: Any) -> Any:
        # First, refuse arguments with too large results, and take the steps for reading the input.
        given, budget = args[num_passed:], CURRENT.budget
        budget.step()
        if name == "join" and not isinstance(given[0], JOINED):
            given = (list(given[0]), *given[1:])
        if check is not None:
            check(budget, *given, **kwargs)
        for value in given:
            if type(value) is str:
                budget.step(len(value) >> 8)
            elif looks_inside and type(value) not in SCALARS:
                budget.weigh(value)
        # Second, run the filter, and take the memory of its result from the budget.
        found = function(*args[:num_passed], *given, **kwargs)
        if isinstance(found, Iterator):
            return _counted(budget, found)
        return taken(found)

    def lazy(context: Any, value: Any = (), *args: Any, **kwargs: Any) -> Iterator[Any]:
        budget = CURRENT.budget
        items = _counted(budget, value) if value else value
        found: Iterator[Any] = function(context, items, *args, **kwargs)
        return _counted(budget, found, is_weighed=True) if name == "map" else found

    def quick(value: Any, *args: Any, **kwargs: Any) -> Any:
        if type(value) is str and len(value) < QUICK_CHARACTERS:
            return function(value, *args, **kwargs)
        return checked(value, *args, **kwargs)

    if name in _QUICK_FILTERS:
        return quick
    if name in _LAZY:
        lazy.jinja_pass_arg = _PassArg.context  # type: ignore[attr-defined]
        return lazy
    if num_passed:
        checked.jinja_pass_arg = _PassArg.from_obj(function)  # type: ignore[attr-defined]
    return checked


def _counted(
    budget: TemplateBudget, items: Iterable[Any], *, is_weighed: bool = False
) -> Iterator[Any]:
    """Yield the items, and take a step from the budget for each. If is_weighed, also take each
    item's memory."""
    for item in items:
        budget.step()
        if is_weighed and type(item) not in SCALARS:
            budget.make(budget.weigh(item))
        yield item


_GETTERS = frozenset(
    {"attr", "d", "default", "first", "last", "length", "count", "random", "items"}
)
"""Filters that return an existing value."""
_QUICK_FILTERS = frozenset({"trim", "upper", "lower", "capitalize", "title", "string", "safe"})
"""Filters whose result is not much larger than the input text."""
_LAZY = frozenset({"map", "reject", "rejectattr", "select", "selectattr"})
"""Filters whose result is a generator."""
_SHALLOW = frozenset({"list", "batch", "slice", "reverse"})
"""Filters that do not visit the contents of their input."""


def _check_centered(budget: TemplateBudget, value: Any = "", width: Any = 80) -> None:
    check_width(width)


def _check_indented(
    budget: TemplateBudget, value: Any = "", width: Any = 4, *_: Any, **__: Any
) -> None:
    num_bytes = size_of(width) if isinstance(width, str) else check_width(width)
    budget.make((len(value.splitlines()) + 1 if isinstance(value, str) else 1) * num_bytes)


def _check_wrapped(
    budget: TemplateBudget,
    value: Any = "",
    width: Any = 79,
    break_long_words: bool = True,
    wrapstring: Any = None,
    break_on_hyphens: bool = True,
) -> None:
    """For `wordwrap`, which copies the rest of a long word for each line of the word."""
    length = len(value) if isinstance(value, str) else 0
    budget.step(length + length * (length >> 13))
    budget.make((length + 1) * size_of(wrapstring))


def _check_replaced(
    budget: TemplateBudget, value: Any = "", old: Any = "", new: Any = "", *_: Any, **__: Any
) -> None:
    if type(value) not in SCALARS:
        budget.make(budget.weigh(value))
    check_replace(budget, str(value), str(old), str(new))


def _check_joined(budget: TemplateBudget, value: Any = (), d: Any = "", *_: Any, **__: Any) -> None:
    check_join(budget, value, d)


def _check_filled(
    budget: TemplateBudget, value: Any = (), number: Any = 1, fill_with: Any = None, **_: Any
) -> None:
    budget.make(check_width(number) * budget.weigh(fill_with))


def _check_summed(
    budget: TemplateBudget, value: Any = (), attribute: Any = None, start: Any = 0
) -> None:
    if type(start) not in (int, float):
        raise SecurityError("sum is supported only for numbers")


def _check_rounded(
    budget: TemplateBudget, value: Any = 0, precision: Any = 0, *_: Any, **__: Any
) -> None:
    if isinstance(precision, int) and abs(precision) > MAX_ROUND_DIGITS:
        raise SecurityError(f"the precision of round is above {MAX_ROUND_DIGITS} digits")


def _check_listed(budget: TemplateBudget, value: Any = ()) -> None:
    if isinstance(value, str):
        budget.make(len(value) * (8 if value.isascii() else 80))


def _check_formatted(budget: TemplateBudget, value: Any = "", *args: Any, **kwargs: Any) -> None:
    check_percent(budget, str(value), kwargs or args)


def _check_slow(budget: TemplateBudget, value: Any = "", *_: Any, **__: Any) -> None:
    """For filters that are slow per character or entry, or take quadratic time."""
    length = len(value) if isinstance(value, str) else budget.weigh(value)
    budget.step(length + length * (length >> 13))
    budget.make(length * 16)


_JSON_CHARACTERS = 1 << 16


def json_text(value: Any, encoder: JSONEncoder) -> str:
    """`value` as JSON text; its memory and steps are taken from the budget."""
    budget = CURRENT.budget
    indent: object = encoder.indent
    if indent is None:
        text = encoder.encode(value)
        budget.make(len(text))
        budget.step(len(text) >> 5)
        return text
    pieces, num_characters = [], 0
    for piece in encoder.iterencode(value):  # json has no C code for indents anyway
        num_characters += len(piece)
        pieces.append(piece)
        if num_characters > _JSON_CHARACTERS:
            budget.make(num_characters)
            num_characters = 0
    budget.make(num_characters)
    return "".join(pieces)


_CHECKS: dict[str, Callable[..., None]] = {
    "batch": _check_filled, "center": _check_centered, "format": _check_formatted,
    "indent": _check_indented, "join": _check_joined, "list": _check_listed,
    "pprint": _check_slow, "replace": _check_replaced, "round": _check_rounded,
    "slice": _check_filled, "striptags": _check_slow, "sum": _check_summed,
    "urlize": _check_slow, "wordwrap": _check_wrapped,
}  # fmt: skip
