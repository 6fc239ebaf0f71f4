"""Rewrites a parsed Jinja template so that all its work is charged to a budget.

Each loop and macro begins with a tick: a statement that takes steps from the budget. Operators that
Jinja would compile to Python operators become calls of `template_operations`. Exceptions, for
speed, are comparisons with a constant, and sums of a few texts whose result is written out or
assigned, because only the result needs to be counted. Called by the code generator of
`template_sandbox`. A template runs for each chat request, so the metering may slow it by a few
percent only.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateSyntaxError, nodes
from jinja2.visitor import NodeTransformer

from quire.text.template_operations import COMPARISONS

MAX_SUMMANDS = 8
"""A sum of texts is counted by its result alone if it has at most this many variable summands. Its
temporary texts, each at most as long as the result, are not counted."""
_NODES_PER_STEP = 12

_NUMBER_FILTERS = frozenset({"length", "count", "int", "float", "round", "abs"})


@dataclass(slots=True)
class MeteringPlan:
    """The result of the rewriting, for the code generator. Nodes are identified by Python's
    `id(node)`."""

    #: Number of steps that each tick takes, by the `id` of the tick's node.
    ticks: dict[int, int] = field(default_factory=dict)
    #: `id`s of the sums that are compiled to Python's `+`.
    plain_sums: set[int] = field(default_factory=set)
    #: `id`s of filter nodes that are compiled to calls of `template_operations.OPERATIONS`; the
    #: filter's name is the operation's.
    operations: set[int] = field(default_factory=set)
    #: The nodes in `operations`, kept alive so that Python does not reuse their ids.
    kept: list[nodes.Node] = field(default_factory=list)

    def operation(self, name: str, operand: nodes.Node, *others: nodes.Node) -> nodes.Filter:
        """Make a node that calls the operation `name`."""
        made = nodes.Filter(operand, name, [*others], [], None, None, lineno=operand.lineno)
        self.operations.add(id(made))
        self.kept.append(made)
        return made


def metered(template: nodes.Template) -> MeteringPlan:
    """Rewrite the template. Raises TemplateSyntaxError for unsupported statements."""
    plan = MeteringPlan()
    for modifier in template.find_all(nodes.EvalContextModifier):
        raise TemplateSyntaxError("autoescape is not supported", modifier.lineno)
    # First, put a tick at the beginning of each loop and macro.
    scopes: Any = (nodes.For, nodes.Macro, nodes.CallBlock, nodes.FilterBlock)
    for scope in [*template.find_all(scopes)]:
        num_nodes = sum(1 for _ in scope.find_all(nodes.Expr))
        tick = nodes.ExprStmt(nodes.Const(None), lineno=scope.lineno)
        plan.ticks[id(tick)] = 1 + num_nodes // _NODES_PER_STEP
        scope.body.insert(0, tick)
        if isinstance(scope, nodes.For) and scope.test is not None:
            scope.test = plan.operation("ticked", scope.test)
    # Second, mark the sums whose result alone is counted.
    for output in template.find_all(nodes.Output):
        for expression in output.nodes:
            _mark_sum(expression, plan.plain_sums)
    for assignment in template.find_all(nodes.Assign):
        if _mark_sum(assignment.node, plan.plain_sums):
            assignment.node = plan.operation("taken", assignment.node)
    # Last, replace the other operators.
    _Replacement(plan).visit(template)
    return plan


def _mark_sum(expression: nodes.Node, plain_sums: set[int]) -> bool:
    """If the expression is a sum of texts, and counting its result is enough, mark it and return
    True."""
    sums: list[nodes.Node] = []
    summands: list[nodes.Node] = []
    waiting: list[nodes.Node] = [expression]
    while waiting:
        node = waiting.pop()
        if isinstance(node, nodes.Add):
            sums.append(node)
            waiting += [node.left, node.right]
        else:
            summands.append(node)
    texts = [each for each in summands if _is_text(each)]
    if not sums or not texts or len(summands) - len(texts) > MAX_SUMMANDS:
        return False
    plain_sums.update(map(id, sums))
    return True


def _is_text(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) and isinstance(node.value, str)


class _Replacement(NodeTransformer):
    """Replaces operators whose work is not counted yet by operations, innermost first."""

    def __init__(self, plan: MeteringPlan) -> None:
        self._operation: Callable[..., Any] = plan.operation

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        super().generic_visit(node)
        operation = self._operation
        match node:
            case nodes.Concat(nodes=[first, *others]):
                return operation("concatenated", first, *others)
            case nodes.Compare(expr=left, ops=[nodes.Operand(op=name, expr=right)]):
                if name in ("in", "notin") and isinstance(left, nodes.Const):
                    if not _is_constant(right):
                        node.ops[0].expr = operation("searched", right)
                elif not _is_quick(left, name, right):
                    return operation(f"is_{name}", left, right)
            case nodes.Compare(expr=left, ops=operands):
                node.expr = operation("weighed", left)
                for each in operands:
                    each.expr = operation("weighed", each.expr)
            case nodes.List() | nodes.Dict() | nodes.Tuple(ctx="load"):
                if not _is_constant(node):
                    return operation("weighed", node)
            case nodes.Pair(key=key):
                if not isinstance(key, nodes.Const):
                    node.key = operation("weighed", key)
            case nodes.Getitem(arg=nodes.Slice()):
                return operation("taken", node)
            case nodes.Getitem(arg=key):
                if not (isinstance(key, nodes.Const) or _is_number(key)):
                    node.arg = operation("weighed", key)
        return node


def _is_quick(left: nodes.Expr, name: str, right: nodes.Expr) -> bool:
    """True if a comparison takes little time, because one side is a constant or a number."""
    if name in ("in", "notin"):
        return _is_constant(right)
    return any(isinstance(each, nodes.Const) or _is_number(each) for each in (left, right))


def _is_number(node: nodes.Node) -> bool:
    """True if the value of an expression is surely a number or a boolean, unless it raises an
    error."""
    match node:
        case nodes.Const(value=value):
            return not isinstance(value, str)
        case nodes.Compare() | nodes.Not() | nodes.Test() | nodes.Sub() | nodes.Neg():
            return True
        case nodes.Filter(name=name):
            return name in _NUMBER_FILTERS or (
                name.startswith("quire ") and name[6:] in COMPARISONS
            )
        case nodes.Add(left=left, right=right):
            return _is_number(left) or _is_number(right)
        case nodes.Mod(right=right, left=left):
            return _is_number(left)
    return False


def _is_constant(node: nodes.Node) -> bool:
    inner = [*node.iter_child_nodes()]
    return all(map(_is_constant, inner)) if inner else isinstance(node, (nodes.Const, nodes.List))
