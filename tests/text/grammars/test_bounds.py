"""What explodes is refused by name, within bounds that do not depend on the machine."""

import json
from threading import Thread, stack_size
from typing import Any

import pytest
from tests.text.grammars.walks import allowed

from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import GrammarTooComplexError, InvalidRequestError
from quire.text.grammars.compiler import GrammarCompiler
from quire.text.grammars.grammar_text import grammar_of

BOMBS: dict[str, tuple[dict[str, Any], str]] = {
    "maxItems": ({"json": {"type": "array", "maxItems": 10**9}}, "#: maxItems is 1000000000"),
    "enum": ({"json": {"items": {"enum": [*range(10_001)]}}}, "#/items: enum: the schema has more"),
    "patterns of one string": (
        {"json": {"allOf": [{"pattern": f"[a-z]*x[a-z]{{{i}}}y"} for i in range(1, 14)]}},
        "#: allOf: 13 expressions must match the same text",
    ),
    "patterns of one string, through references": (
        {
            "json": {
                "$defs": {
                    f"d{i}": {"pattern": f"[a-z]*x[a-z]{{{i}}}y", "$ref": f"#/$defs/d{i + 1}"}
                    for i in range(12)
                }
                | {"d12": {"format": "email", "minLength": 3}},
                "properties": {"a": {"$ref": "#/$defs/d0"}},
            }
        },
        r"\$ref: .* expressions must match the same text",
    ),
    "classes of one string": (
        {
            "json": {
                "type": "string",
                "allOf": [
                    {"pattern": "|".join(f"[a{chr(98 + i)}]{chr(98 + k)}" for i in range(20))}
                    for k in range(3)
                ],
            }
        },
        "#: allOf: .* their numbers multiply to",
    ),
    "classes of names": (
        {
            "json": {
                "patternProperties": {
                    "|".join(f"[ab{chr(200 + i)}]" for i in range(60)): True,
                    "^c": True,
                }
            }
        },
        "patternProperties: a pattern has 61 character classes with the same character",
    ),
    "lark intersection": (
        {"grammar": "start: T\nT: " + " & ".join(f"/[a-z]*x[a-z]{{{i}}}y/" for i in range(12))},
        "12 expressions must match the same text; up to 8 may",
    ),
    "references": (
        {
            "json": {
                "$defs": {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(5000)}
                | {"d5000": {}},
                "$ref": "#/$defs/d0",
            }
        },
        r"\$ref: schemas nest deeper than 200",
    ),
    "circle": ({"json": {"$ref": "#"}}, "no answer can ever complete it"),
    "depth": ({"json": '{"items":' * 90_000 + "{}" + "}" * 90_000}, "deeper than"),
    "length": ({"json": json.dumps({"title": "x" * 2_000_000})}, "2000013 bytes"),
    "length of an object": ({"json": {"title": "x" * 2_000_000}}, "more than 1048576 bytes"),
    "many values": ({"json": {"const": [[]] * 2_000_000}}, "more than 1048576 bytes"),
    "anyOf": (
        {
            "json": {
                "type": "object",
                "allOf": [
                    {"anyOf": [{"required": [f"p{i}_{j}"]} for j in range(4)]} for i in range(12)
                ],
            }
        },
        "too large",
    ),
    "patterns": (
        {"json": {"patternProperties": {f"^p{i}_": True for i in range(300)}}},
        "patternProperties: the schema has more than 48",
    ),
    "properties": (
        {"json": {"properties": {f"p{i}": True for i in range(5000)}}},
        "properties has 5000 optional properties",
    ),
    "minProperties": (
        {"json": {"minProperties": 1, "properties": {f"p{i}": True for i in range(60)}}},
        "minProperties and maxProperties are not supported",
    ),
    "multipleOf": ({"json": {"multipleOf": 1_000_003}}, "multipleOf: the least common"),
    "expression": ({"regex": "a?" * 32_000}, "64000 characters"),
    "nesting": ({"regex": "(" * 3000 + ")" * 3000}, "nest"),
    "choice": ({"choice": [str(i) for i in range(10_001)]}, "10001 texts"),
    "lark rules": (
        {"grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(600))},
        "more than 500 rules",
    ),
    "lark groups": ({"grammar": "start: " + "(" * 9000 + ")" * 9000}, "more than 3000 rules"),
    "lark expression": ({"grammar": "start: /" + "a?" * 9000 + "/"}, "longer than 8000"),
    "gbnf": ({"grammar": 'root ::= "a" #' + "#" * 60_000}, "GBNF may have up to"),
    "left recursion": ({"grammar": "start: x\nx: x"}, "no answer can ever complete it"),
    "tags": (
        {
            "structural_tag": {
                "format": {
                    "type": "sequence",
                    "elements": [{"type": "const_string", "value": "a"}] * 300,
                }
            }
        },
        "more than 256 formats",
    ),
}


@pytest.mark.parametrize("name", sorted(BOMBS))
def test_bombs_are_refused_by_name(compiler: GrammarCompiler, name: str) -> None:
    given, says = BOMBS[name]
    params = StructuredOutputsParams(**given)
    with pytest.raises(InvalidRequestError, match=says) as refused:
        compiler.compile(grammar_of(params))
    assert refused.value.param == f"structured_outputs.{next(iter(given))}"


def test_a_long_pattern_for_white_space_is_refused_by_name() -> None:
    params = StructuredOutputsParams(json={}, whitespace_pattern="a?" * 4_001)
    with pytest.raises(InvalidRequestError, match="has 8002 characters; it may") as error:
        grammar_of(params)
    assert error.value.param == "structured_outputs.whitespace_pattern"


@pytest.mark.parametrize(
    "given",
    [
        {"regex": "((a{1000}){1000}){1000}"},
        {"json": {"type": "array", "maxItems": 10_000}},
        {"json": {"type": "object", "properties": {f"p{i}": True for i in range(400)}}},
        {"grammar": "start: x\nx: x x | x x x | /a/ |"},
        {
            "json": {
                "type": "string",
                "allOf": [
                    {"pattern": "^.*[a-z]"},
                    {"pattern": "^.*[A-Z]"},
                    {"pattern": r"^.*\d"},
                    {"pattern": "^.*[@$!%*?&]"},
                    {"pattern": r"^[A-Za-z\d@$!%*?&]{8,64}$"},
                ],
            }
        },
    ],
)
def test_grammars_that_only_look_explosive_start(
    compiler: GrammarCompiler, given: dict[str, Any]
) -> None:
    state = compiler.compile(grammar_of(StructuredOutputsParams(**given))).start()
    assert allowed(state)


def test_too_complex_in_the_middle_of_the_answer(compiler: GrammarCompiler) -> None:
    """Optional rules that all may come next, but only behind the first token."""
    rules = "\n".join(f"r{i}: (r{i + 1}~1..3)?" for i in range(480))
    params = StructuredOutputsParams(grammar=f'start: "a" r0\n{rules}\nr480: "z"')
    state = compiler.compile(grammar_of(params)).start()
    first = min(allowed(state))
    with pytest.raises(GrammarTooComplexError, match="too complex to follow"):
        state.consume([first])
        state.mask()


def test_small_stacks_do_not_overflow(compiler: GrammarCompiler) -> None:
    """A process with such a thread would die of a schema of a hundred references."""
    schema = {
        "$defs": {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(90)}
        | {"d90": {}},
        "$ref": "#/$defs/d0",
    }
    before = stack_size(512 << 10)
    try:
        done: list[bool] = []

        def call() -> None:
            grammar = grammar_of(StructuredOutputsParams(json=schema))
            done.append(bool(allowed(compiler.compile(grammar).start())))

        thread = Thread(target=call)
        thread.start()
    finally:
        stack_size(before)
    thread.join()
    assert done == [True]
