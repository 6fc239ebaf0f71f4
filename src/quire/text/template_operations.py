"""Python's operators and methods for untrusted chat templates, with bounded time and memory.

The memory of each result is taken from the rendering's budget (`template_budget`). If a result may
be larger than the inputs (`*`, `center`, `replace`, `join`, a width), its memory is taken, or the
call refused, before the result is made. Called by compiled templates, `template_sandbox` and
`template_filters`.
"""

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from string import Formatter
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.runtime import Macro

from quire.text.template_budget import CURRENT, TemplateBudget, size_of

MAX_INTEGER_BITS = 4096
MAX_WIDTH = 10_000
"""The largest width of padded text, of indents and of formatted numbers, in characters."""

SCALARS = frozenset({str, int, float, bool, type(None)})
_DIGITS = re.compile(r"\d+")
_PERCENT_WIDTHS = re.compile(r"[%)][#0\- +]*(\d*)(?:\.(\d*))?")
"""Matches width and precision in a `%` format, also after a key as in `%(key)10s`."""
_WIDTH_ARGUMENT = re.compile(r"[%)][^%a-zA-Z]*\*")
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "lteq": operator.le,
    "gt": operator.gt, "gteq": operator.ge, "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}  # fmt: skip
COMPARISONS = frozenset(_OPERATORS)


# ---- operators ----------------------------------------------------------------------------------


def _added(left: Any, right: Any) -> Any:
    """The operator `+`. The entries of the left operand were counted when it was made."""
    if type(left) is str and type(right) is str:
        CURRENT.budget.make(len(left) + len(right))
        return left + right
    if type(right) not in SCALARS:
        CURRENT.budget.make(CURRENT.budget.weigh(right))
    return taken(left + right)


def _multiplied(left: Any, right: Any) -> Any:
    """The operator `*`."""
    _check_product(CURRENT.budget, left, right)
    return taken(left * right)


def _modulo(left: Any, right: Any) -> Any:
    """The operator `%`."""
    if type(left) is int:
        return left % right
    if isinstance(left, (str, bytes)):
        check_percent(CURRENT.budget, left, right)
    return taken(left % right)


def _raised(left: Any, right: Any) -> Any:
    """The operator `**`."""
    _check_power(left, right)
    return taken(left**right)


def _check_product(budget: TemplateBudget, left: Any, right: Any) -> None:
    for repeated, times in ((left, right), (right, left)):
        if isinstance(times, int) and not isinstance(repeated, (int, float)):
            is_text = isinstance(repeated, (str, bytes))
            num_bytes = size_of(repeated) if is_text else budget.weigh(repeated)
            budget.make(num_bytes * max(times, 0))


def _check_power(left: Any, right: Any) -> None:
    if not (isinstance(left, int) and isinstance(right, int)):
        return
    if left.bit_length() * max(right, 0) > MAX_INTEGER_BITS:
        raise SecurityError(f"a power would have more than {MAX_INTEGER_BITS} bits")


def check_percent(budget: TemplateBudget, text: Any, arguments: Any) -> None:
    """Before a `%` format runs, take the memory of its widths, and of its arguments times their
    possible number of uses."""
    if not isinstance(text, str):
        raise SecurityError("bytes can't be formatted")
    if _WIDTH_ARGUMENT.search(text):
        raise SecurityError("a format's width can't be an argument")
    for found in _PERCENT_WIDTHS.finditer(text):
        for width in found.groups(""):
            budget.make(check_width(int(width[:9] or 0)))
    weight = budget.weigh(arguments)
    budget.make(weight * (text.count("%") if isinstance(arguments, Mapping) else 1))


def _comparison(name: str) -> Callable[[Any, Any], bool]:
    """The function for the comparison operator `name`; it takes steps for long operands."""
    compared = _OPERATORS[name]

    def comparison(left: Any, right: Any) -> bool:
        is_short = type(right) in SCALARS and (type(right) is not str or len(right) < 1024)
        if type(left) not in SCALARS or not is_short:
            _check_compared(left, right)
        return compared(left, right)  # type: ignore[no-any-return]

    return comparison


def _check_compared(left: Any, right: Any) -> None:
    budget = CURRENT.budget
    if type(left) in SCALARS:
        _searched(right)
    elif left is not right:
        budget.weigh(left)
        budget.weigh(right)


def _searched(value: Any) -> Any:
    """Take from the budget the steps for searching in `value`; returns `value`."""
    if type(value) is str:
        CURRENT.budget.step(len(value) >> 10)
    elif isinstance(value, (list, tuple)):
        CURRENT.budget.step(len(value))
    return value


def _concatenated(*parts: Any) -> str:
    """The operator `~`."""
    texts = [*map(str, parts)]
    CURRENT.budget.make(sum(map(len, texts)))
    return "".join(texts)


def joined(pieces: Iterable[str]) -> str:
    """Join the output of a template, a macro or a block, and take its memory from the budget."""
    pieces = [*pieces]
    CURRENT.budget.make(sum(map(len, pieces)))
    return "".join(pieces)


def written(value: Any) -> str:
    """A value as text for the output; its memory is taken when the output is joined."""
    if type(value) is str:
        return value
    text = str(value)
    CURRENT.budget.step(len(text) >> 4)
    return text


def taken(found: Any) -> Any:
    """Take from the budget the memory of a new value, without its items; returns the value."""
    if type(found) is str:
        CURRENT.budget.make(len(found))
    elif type(found) is int:
        if found.bit_length() > MAX_INTEGER_BITS:
            raise SecurityError(f"a number has more than {MAX_INTEGER_BITS} bits")
    else:
        CURRENT.budget.make(size_of(found))
    return found


def weighed(value: Any) -> Any:
    """Take from the budget the memory of a list, an object or a key that a template makes; returns
    it. An item that occurs several times counts each time, which bounds the length of the value as
    text."""
    if type(value) not in SCALARS:
        CURRENT.budget.make(CURRENT.budget.weigh(value))
    return value


def _count_iteration(value: Any) -> Any:
    """Take a step for a loop iteration, before the loop's condition may skip it; returns `value`,
    the condition."""
    CURRENT.budget.step()
    return value


OPERATIONS: dict[str, Callable[..., Any]] = {
    "added": _added, "multiplied": _multiplied, "modulo": _modulo, "raised": _raised,
    "concatenated": _concatenated, "searched": _searched, "taken": taken, "weighed": weighed,
    "ticked": _count_iteration, "written": written,
    **{f"is_{name}": _comparison(name) for name in COMPARISONS},
}  # fmt: skip
"""Maps the names that compiled templates call to the functions."""


# ---- methods ------------------------------------------------------------------------------------


def is_quick_method(function: Any, args: Sequence[Any]) -> bool:
    """True if a method needs no check: `dict.get`, or a method of a short text whose result is not
    much larger than the text."""
    owner = function.__self__
    if type(owner) is dict:
        return function.__name__ == "get" and all(type(value) in SCALARS for value in args)
    return (
        type(owner) is str and len(owner) < QUICK_CHARACTERS and function.__name__ in _QUICK_METHODS
    )


_CALL_STEPS = 4
"""Number of steps that a macro call counts, since it takes as long as a few loop iterations."""


def check_call(function: Any, args: Iterable[Any]) -> None:
    """Take the steps for calling a function that is not a method of a built-in type."""
    budget = CURRENT.budget
    budget.step(_CALL_STEPS)
    if not isinstance(function, (Macro, type)):  # macros and types count their own work
        for value in args:
            if type(value) not in SCALARS:
                budget.weigh(value)


def check_method(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    """Check a call of a method of a built-in type before it runs; returns its positional arguments.
    Raises SecurityError if the result would be too large."""
    budget = CURRENT.budget
    budget.step()
    if function.__name__ == "join" and args and not isinstance(args[0], JOINED):
        args = (list(args[0]),)
    _check_method(budget, function.__self__, function.__name__, args, kwargs)
    for value in (*args, *kwargs.values()):
        if type(value) not in SCALARS:
            budget.weigh(value)
    return args


QUICK_CHARACTERS = 2048
_QUICK_METHODS = frozenset(
    {"strip", "lstrip", "rstrip", "startswith", "endswith", "removeprefix", "removesuffix"}
    | {"split", "rsplit", "splitlines", "partition", "rpartition", "upper", "lower", "title"}
    | {"capitalize", "find", "rfind", "index", "count", "isdigit", "isspace", "isupper"}
)
_METHODS: dict[type, frozenset[str]] = {
    bool: frozenset(),
    int: frozenset({"bit_length", "bit_count", "is_integer"}),
    float: frozenset({"is_integer", "hex"}),
    bytes: frozenset({"decode", "hex"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
}
"""The allowed methods of types other than str: their results are not much larger than their
input."""


def _check_method(
    budget: TemplateBudget, owner: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    if not isinstance(owner, str):
        allowed = _METHODS.get(type(owner))
        if allowed is not None and name not in allowed:
            raise SecurityError(f"the method {name} of {type(owner).__name__} is not supported")
        if isinstance(owner, (list, tuple)):
            budget.weigh(owner)
        if isinstance(owner, bytes):
            _check_coding(name, args, kwargs)
        return
    if len(owner) > 1024:
        budget.step(len(owner) >> 8)
    if name in ("center", "ljust", "rjust", "zfill"):
        check_width(args[0] if args else 0)
    elif name == "expandtabs":
        width = args[0] if args else kwargs.get("tabsize", 8)
        budget.make(owner.count("\t") * check_width(width) * 4)
    elif name == "replace" and len(args) >= 2:
        check_replace(budget, owner, *args[:2])
    elif name == "join" and args:
        check_join(budget, args[0], owner)
    elif name in ("split", "rsplit", "splitlines"):
        budget.make(_num_pieces(owner, args, kwargs) * 64)
    elif name in ("encode", "translate"):
        _check_coding(name, args, kwargs)


def check_width(width: Any) -> int:
    if isinstance(width, int) and width > MAX_WIDTH:
        raise SecurityError(f"a width is above {MAX_WIDTH}")
    return max(width, 0) if isinstance(width, int) else 0


def check_replace(budget: TemplateBudget, text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str) and len(new) > len(old):
        budget.make(text.count(old) * size_of(new))


JOINED = (str, list, tuple, dict)
"""The types that can be iterated twice, for the check and for `join`; others are copied to a list
first."""


def check_join(budget: TemplateBudget, parts: Any, separator: Any) -> None:
    budget.make(len(parts) * size_of(separator))
    budget.make(sum(size_of(each) if type(each) is str else budget.weigh(each) for each in parts))


def _num_pieces(text: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    separator = args[0] if args else kwargs.get("sep")
    if isinstance(separator, str) and separator:
        return text.count(separator) + 1
    return len(text) // 2 + 1


def _check_coding(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    coding = args[0] if args else kwargs.get("encoding", "utf-8")
    if name == "hex":
        return
    if name == "translate" or str(coding).lower() not in ("utf-8", "utf8", "ascii", "latin-1"):
        raise SecurityError(f"{name} is supported only for utf-8, ascii and latin-1")


def check_format(text: str, args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    """Take from the budget the memory of the widths and arguments of `text.format(...)`, before it
    runs."""
    budget = CURRENT.budget
    budget.step(len(text) >> 4)
    num_fields = 0
    for _, field, spec, _ in Formatter().parse(text):
        if "{" in (spec or ""):
            raise SecurityError("a format's width can't be an argument")
        for width in _DIGITS.findall(spec or ""):
            budget.make(check_width(int(width[:9])))
        num_fields += field is not None
    weight = sum(budget.weigh(each) for each in (*args, *kwargs.values()))
    budget.make(num_fields * weight)
