"""The Jinja sandbox in which chat templates run, with the helper functions of transformers.

A template comes with a model and is an untrusted program. It can neither change its input nor
access Python's internals, and has a budget of steps and memory (`text.template_budget`). Called by
`text.chat_template`.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from types import BuiltinMethodType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from quire.text import template_filters
from quire.text import template_operations as operations
from quire.text.template_budget import CURRENT, TemplateBudget
from quire.text.template_metering import metered


def make_environment() -> ImmutableSandboxedEnvironment:
    """A Jinja environment that compiles and runs templates like transformers 5."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters |= template_filters.checked_filters({"tojson": _to_json})
    environment.tests |= template_filters.checked_tests()
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _TemplateDict(),
        "namespace": _TemplateNamespace,
    }
    del environment.globals["lipsum"]  # it makes unlimited random text
    return environment


class _CodeGenerator(CodeGenerator):
    """Compiles templates so that all their work is charged to a budget."""

    def visit_Template(self, node: nodes.Template, frame: Any = None) -> None:  # noqa: N802
        self._plan = metered(node)
        node.set_environment(self.environment)
        super().visit_Template(node, frame)

    def visit_ExprStmt(self, node: nodes.ExprStmt, frame: Any) -> None:  # noqa: N802
        num_steps = self._plan.ticks.get(id(node))
        if num_steps is None:
            super().visit_ExprStmt(node, frame)
        else:
            self.writeline(f"context.budget.step({num_steps})", node)

    def visit_Filter(self, node: nodes.Filter, frame: Any) -> None:  # noqa: N802
        if id(node) not in self._plan.operations:
            super().visit_Filter(node, frame)
            return
        operands = [each for each in (node.node, *node.args) if each is not None]
        self._write_operation(node.name, operands, frame)

    def visit_Add(self, node: nodes.BinExpr, frame: Any) -> None:  # noqa: N802
        if id(node) not in self._plan.plain_sums:
            self._visit_operation("added", node, frame)
            return
        self.write("(")
        self.visit(node.left, frame)
        self.write(" + ")
        self.visit(node.right, frame)
        self.write(")")

    def visit_Mul(self, node: nodes.BinExpr, frame: Any) -> None:  # noqa: N802
        self._visit_operation("multiplied", node, frame)

    def visit_Mod(self, node: nodes.BinExpr, frame: Any) -> None:  # noqa: N802
        self._visit_operation("modulo", node, frame)

    def visit_Pow(self, node: nodes.BinExpr, frame: Any) -> None:  # noqa: N802
        self._visit_operation("raised", node, frame)

    def _visit_operation(self, name: str, node: nodes.BinExpr, frame: Any) -> None:
        self._write_operation(name, (node.left, node.right), frame)

    def _write_operation(self, name: str, operands: Iterable[nodes.Node], frame: Any) -> None:
        self.write(f"environment.{name}(")
        for each in operands:
            self.visit(each, frame)
            self.write(", ")
        self.write(")")

    def _output_child_pre(self, node: nodes.Expr, frame: Any, finalize: Any) -> None:
        self.write("(" if id(node) in self._plan.plain_sums else "environment.written(")


class _Context(Context):
    """Jinja's context of a rendering, with the current budget."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.budget = CURRENT.budget


class _BoundedTemplate(jinja2.Template):
    """A template that uses a new budget for each rendering."""

    def render(self, *args: Any, **kwargs: Any) -> str:
        variables = dict(*args, **kwargs)
        before, CURRENT.budget = CURRENT.budget, TemplateBudget(variables)
        try:
            return super().render(variables)
        finally:
            CURRENT.budget = before


_PLAIN_TYPES = frozenset({str, int, float, bool, list, tuple, dict, LoopContext})
_DICT_ATTRIBUTES = frozenset(dir(dict))


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _CodeGenerator
    context_class = _Context
    template_class = _BoundedTemplate
    intercepted_binops = frozenset({"+", "*", "%", "**"})  # prevents constant folding
    concat = staticmethod(operations.joined)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ |= operations.OPERATIONS
        # A cache for `is_safe_attribute`: recomputing it at each access would take a third of a
        # rendering's time.
        self._safe_attributes: dict[tuple[type, str], bool] = {}

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            # Equals Jinja's result, but is several times as fast, since Jinja first raises an
            # AttributeError.
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        key = type(obj), attr
        if key[0] is _TemplateNamespace:  # the template chooses its attributes' names
            return not attr.startswith("_")
        if key[0] not in _PLAIN_TYPES:
            return super().is_safe_attribute(obj, attr, value)
        is_safe = self._safe_attributes.get(key)
        if is_safe is None:
            is_safe = super().is_safe_attribute(obj, attr, value)
            self._safe_attributes[key] = is_safe
        return is_safe

    def call(*args: Any, **kwargs: Any) -> Any:
        given: Sequence[Any]
        self, context, function, *given = args  # frees these names for keyword arguments
        if type(function) is BuiltinMethodType:
            # Jinja's own `call` uses these only for functions that take a context.
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            if not operations.is_quick_method(function, given):
                given = operations.check_method(function, given, kwargs)
            return operations.taken(function(*given, **kwargs))
        operations.check_call(function, given)
        found = ImmutableSandboxedEnvironment.call(self, context, function, *given, **kwargs)
        return operations.taken(found)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        bounded = super().wrap_str_format(value)
        if bounded is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            operations.check_format(value.__self__, args, kwargs)
            return bounded(*args, **kwargs)

        return checked


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's text in training data.

    Rendering keeps the contents and drops the tag. It is compiled as a call block, so variables set
    inside have their own scope.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a plain set

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render_body"), [], [], body).set_lineno(lineno)

    def _render_body(self, caller: Macro) -> str:
        return caller()


class _TemplateDict:
    """The `dict` function of templates: makes dictionaries, but does not expose Python's class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        made: dict[Any, Any] = operations.weighed(dict(*args, **kwargs))
        return made

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        made: dict[Any, Any] = operations.weighed(dict.fromkeys(*args))
        return made


class _TemplateNamespace(Namespace):
    """Jinja's namespace, which refuses names that begin with "_", since these give access to
    internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # so that a template may set a variable named self
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # a namespace may contain itself


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace can't have the attribute {name!r}")


_MAX_JSON_SPACES = 32
_MAX_TIME_CHARACTERS = 1000
"""The longest date format in characters. Python may allocate a kibibyte for each character of the
format, and the format may set the width of the result."""


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`. Unlike Jinja's, it adds no HTML escapes, and accepts options of
    json.dumps."""
    if (len(indent) if isinstance(indent, str) else indent or 0) > _MAX_JSON_SPACES:
        raise jinja2.exceptions.SecurityError(f"tojson has an indent above {_MAX_JSON_SPACES}")
    if sum(map(len, separators or ())) > _MAX_JSON_SPACES:
        raise jinja2.exceptions.SecurityError("tojson has too long separators")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return template_filters.json_text(value, encoder)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(format: str) -> str:
    if len(format) > _MAX_TIME_CHARACTERS:
        raise jinja2.exceptions.SecurityError(
            f"strftime_now has a format of more than {_MAX_TIME_CHARACTERS} characters"
        )
    return datetime.now().strftime(format)
